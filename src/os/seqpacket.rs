//! Unix sockets that keep messages apart (`SOCK_SEQPACKET`), non-blocking and close-on-exec.

use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
    connect, getsockopt, listen, recvmsg, sendmsg, socket, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// Largest message, in bytes.
pub const MESSAGE: usize = 64 * 1024;

/// Most descriptors with a message; the kernel takes 253 (SCM_MAX_FD).
pub const DESCRIPTORS: usize = 64;

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

/// A message and the descriptors that came with it.
#[derive(Debug)]
pub struct Received {
    /// Its length in the buffer; 0 is the end.
    pub length: usize,
    /// In the order in which they were sent.
    pub descriptors: Vec<OwnedFd>,
}

/// Receives one message.
///
/// # Errors
/// `EWOULDBLOCK` when there is none; `EMSGSIZE` when it or its descriptors did not fit: those that did
/// are closed.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = nix::cmsg_space!([RawFd; DESCRIPTORS]);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = part {
            // SAFETY: recvmsg made these descriptors for us, and each comes up once.
            descriptors.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    Ok(Received { length: message.bytes, descriptors })
}

/// Sends one message with duplicates of descriptors, at most [`DESCRIPTORS`].
///
/// # Errors
/// `EWOULDBLOCK` when the other end does not read; `EPIPE` when it is gone; `ETOOMANYREFS` when too many
/// descriptors are under way.
pub fn transmit(socket: BorrowedFd<'_>, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &rights[..0] } else { &rights[..] };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(message)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}
