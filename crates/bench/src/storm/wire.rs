//! What clients and the instance say: as long as what is said in TLS, so that a relay waits for it as for that.

use berth_bench::client_hello::client_hello;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// What a client says first.
pub(crate) const HELLO: [u8; 517] = client_hello();

/// What an instance answers to it, and what a request and its answer are.
pub(crate) const ANSWER: usize = 1200;
pub(crate) const REQUEST: usize = 64;

pub(crate) async fn say(to: &mut (impl AsyncWrite + Unpin), bytes: usize) -> io::Result<()> {
    to.write_all(&[0; ANSWER][..bytes]).await
}

pub(crate) async fn hear(from: &mut (impl AsyncRead + Unpin), bytes: usize) -> io::Result<()> {
    from.read_exact(&mut [0; ANSWER][..bytes]).await.map(drop)
}
