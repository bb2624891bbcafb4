//! What clients and the instance say: as long as what is said in TLS, so that a relay waits for it as for that.

use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A ClientHello in one record (RFC 8446, sections 4 and 5.1).
pub(crate) const HELLO: [u8; HELLO_LENGTH] = {
    let mut hello = [0; HELLO_LENGTH];
    let body = HELLO_LENGTH - 5;
    (hello[0], hello[1], hello[2], hello[3], hello[4]) = (0x16, 3, 1, (body >> 8) as u8, body as u8);
    let body = body - 4;
    (hello[5], hello[7], hello[8]) = (1, (body >> 8) as u8, body as u8);
    hello
};
const HELLO_LENGTH: usize = 517;

/// What an instance answers to it, and what a request and its answer are.
pub(crate) const ANSWER: usize = 1200;
pub(crate) const REQUEST: usize = 64;

pub(crate) async fn say(to: &mut (impl AsyncWrite + Unpin), bytes: usize) -> io::Result<()> {
    to.write_all(&[0; ANSWER][..bytes]).await
}

pub(crate) async fn hear(from: &mut (impl AsyncRead + Unpin), bytes: usize) -> io::Result<()> {
    from.read_exact(&mut [0; ANSWER][..bytes]).await.map(drop)
}
