//! Unix sockets that preserve message boundaries (`SOCK_SEQPACKET`), non-blocking and
//! close-on-exec.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr,
    UnixCredentials, bind, connect, getsockopt, listen, sendmsg, socket, sockopt,
};
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketFlags, accept_with,
    recvmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

/// Size limit of a message, in bytes.
pub const MAX_MESSAGE: usize = 64 * 1024;

/// Limit of descriptors in a message. The kernel allows 253 (SCM_MAX_FD).
pub const MAX_DESCRIPTORS: usize = 64;

fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )?)
}

/// Length of a listener's queue: as long as net.core.somaxconn allows (4,096 by default). Many
/// connections may arrive at one moment, because a sibling may send every client that it has.
const BACKLOG: Backlog = Backlog::MAXALLOWABLE;

/// Makes a socket that listens at a path. Fails if the path exists.
pub fn bind_listener(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket()?;
    bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to a listener without waiting.
///
/// # Errors
/// `ENOENT` and `ECONNREFUSED` if nobody listens, `EAGAIN` if the queue is full: try again.
pub fn dial_path(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket()?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

/// Accepts the next connection of a listener. Fails with `EWOULDBLOCK` if no connection waits.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(accept_with(
        listener,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
    )?)
}

/// Returns the process and the effective uid of the peer, as they were when the peer connected or
/// began to listen.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<UnixCredentials> {
    Ok(getsockopt(&socket, sockopt::PeerCredentials)?)
}

/// True if the other end is closed, so that nobody reads a message that is sent now.
pub fn is_closed(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    poll(&mut polled, PollTimeout::ZERO)?;
    Ok(polled[0]
        .revents()
        .is_some_and(|events| events.contains(PollFlags::POLLHUP)))
}

/// A message and the descriptors that came with it.
#[derive(Debug)]
pub struct Received {
    /// The number of bytes that were written to the buffer. 0 means that the other end is closed.
    pub length: usize,
    /// The descriptors, in the order in which they were sent.
    pub descriptors: Vec<OwnedFd>,
}

/// Receives one message.
///
/// # Errors
/// `EWOULDBLOCK` if no message has arrived. `EMSGSIZE` if the message or its descriptors do not
/// fit; the descriptors that fit are closed.
pub fn receive_message(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        // The return drops `control`, which closes the descriptors that the kernel installed.
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(Received {
        length: received.bytes,
        descriptors,
    })
}

/// Sends one message with duplicates of at most [`MAX_DESCRIPTORS`] descriptors.
///
/// # Errors
/// `EWOULDBLOCK` if the other end does not read, `EPIPE` if the other end is closed, `ETOOMANYREFS`
/// if too many descriptors are in flight.
pub fn transmit_message(
    socket: BorrowedFd<'_>,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() {
        &rights[..0]
    } else {
        &rights[..]
    };
    sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(message)],
        control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::socketpair;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    fn socket_pair() -> (OwnedFd, OwnedFd) {
        socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .unwrap()
    }

    #[test]
    fn a_closed_peer_is_noticed_even_behind_an_unread_message() {
        let (from, to) = socket_pair();
        assert!(!is_closed(to.as_fd()).unwrap());
        transmit_message(from.as_fd(), b"a request", &[]).unwrap();
        assert!(!is_closed(to.as_fd()).unwrap());
        drop(from);
        assert!(is_closed(to.as_fd()).unwrap());
        assert_eq!(receive_message(to.as_fd(), &mut [0; 64]).unwrap().length, 9);
        assert!(is_closed(to.as_fd()).unwrap());
    }

    #[test]
    fn descriptors_arrive_in_order() {
        let (from, to) = socket_pair();
        let sent: Vec<_> = (0..MAX_DESCRIPTORS)
            .map(|_| UnixStream::pair().unwrap())
            .collect();
        let descriptors: Vec<_> = sent.iter().map(|(_, other)| other.as_fd()).collect();
        transmit_message(from.as_fd(), b"with all that fit", &descriptors).unwrap();
        let mut buffer = [0; 64];
        let received = receive_message(to.as_fd(), &mut buffer).unwrap();
        assert_eq!(&buffer[..received.length], b"with all that fit");
        assert_eq!(received.descriptors.len(), MAX_DESCRIPTORS);
        for (at, ((mine, _), descriptor)) in sent.iter().zip(received.descriptors).enumerate() {
            nix::unistd::write(&descriptor, &[at as u8]).unwrap();
            let mut got = [0];
            (&mut &*mine).read_exact(&mut got).unwrap();
            assert_eq!(usize::from(got[0]), at);
        }
        transmit_message(from.as_fd(), b"", &[]).unwrap();
        assert_eq!(
            receive_message(to.as_fd(), &mut buffer)
                .unwrap()
                .descriptors
                .len(),
            0
        );
    }

    /// The kernel installs only as many descriptors as the buffer has room for, and reports that
    /// more were sent.
    #[test]
    fn a_message_that_does_not_fit_leaves_no_open_descriptor() {
        for (message, descriptors) in [(&b"70"[..], 70), (&[0; 65], 1)] {
            let (from, to) = socket_pair();
            let (mut mine, other) = UnixStream::pair().unwrap();
            transmit_message(from.as_fd(), message, &vec![other.as_fd(); descriptors]).unwrap();
            drop(other);
            let error = receive_message(to.as_fd(), &mut [0; 64]).unwrap_err();
            // The read ends when the last duplicate of the other end is closed.
            mine.set_read_timeout(Some(Duration::from_secs(30)))
                .unwrap();
            assert_eq!(mine.read(&mut [0; 1]).unwrap(), 0);
            assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
        }
    }
}
