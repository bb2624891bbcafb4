//! Unix sockets that keep messages apart (`SOCK_SEQPACKET`), non-blocking and close-on-exec.

use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt, listen, recv,
    send, socket, sockopt,
};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

/// Largest message, in bytes.
pub const MESSAGE: usize = 64 * 1024;

fn new() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?)
}

/// A listener at a path, which must not be there yet.
///
/// # Errors
/// What socket(2), bind(2) and listen(2) say.
pub fn listener(path: &Path) -> io::Result<OwnedFd> {
    let socket = new()?;
    bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&socket, Backlog::new(64)?)?;
    Ok(socket)
}

/// A connection to a listener. It stands at once or fails.
///
/// # Errors
/// `ENOENT` and `ECONNREFUSED` where nobody listens, `EAGAIN` where the queue is full.
pub fn dial(path: &Path) -> io::Result<OwnedFd> {
    let socket = new()?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

/// The next connection of a listener.
///
/// # Errors
/// `EWOULDBLOCK` when there is none.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let fd = accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK)?;
    // SAFETY: accept4 gave a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The effective uid of the other end, when it connected or began to listen.
///
/// # Errors
/// What getsockopt(2) says.
pub fn peer_uid(socket: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(getsockopt(&socket, sockopt::PeerCredentials)?.uid())
}

/// Receives one message; 0 bytes are the end.
///
/// # Errors
/// `EWOULDBLOCK` when there is none; `EMSGSIZE` when it did not fit.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    let length = recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_TRUNC)?;
    if length > buffer.len() { Err(io::Error::from_raw_os_error(libc::EMSGSIZE)) } else { Ok(length) }
}

/// Sends one message.
///
/// # Errors
/// `EWOULDBLOCK` when the other end does not read; `EPIPE` when it is gone.
pub fn transmit(socket: BorrowedFd<'_>, message: &[u8]) -> io::Result<()> {
    send(socket.as_raw_fd(), message, MsgFlags::MSG_NOSIGNAL)?;
    Ok(())
}
