//! The relay under hostile I/O: a whole shim in this process, with plain sockets before and behind
//! the shim.

mod bytes;
mod ends;
mod gate;
mod limits;
mod opening;

use crate::support::net::{Backend, read};
use crate::support::shim::Shim;
use std::io::Write;
use std::net::TcpStream;

/// Returns a client, and the instance's end of the connection after the instance has read the
/// request.
fn connect_pair(shim: &Shim, backend: &Backend, request: &[u8]) -> (TcpStream, TcpStream) {
    let client = shim.client_with(request);
    let mut instance = backend.accept();
    assert_eq!(read(&mut instance, request.len()), request);
    (client, instance)
}

/// Returns a client and the instance's end of the connection after the instance has answered.
fn connect_answered(shim: &Shim, backend: &Backend, request: &[u8]) -> (TcpStream, TcpStream) {
    let (mut client, mut instance) = connect_pair(shim, backend, request);
    instance.write_all(b"answer").unwrap();
    expect_answer(&mut client);
    (client, instance)
}

#[track_caller]
fn expect_answer(client: &mut TcpStream) {
    assert_eq!(read(client, 6), b"answer");
}
