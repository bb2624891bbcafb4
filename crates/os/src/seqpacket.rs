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
pub const MESSAGE: usize = 64 * 1024;

/// Limit of descriptors in a message. The kernel allows 253 (SCM_MAX_FD).
pub const DESCRIPTORS: usize = 64;

fn new() -> io::Result<OwnedFd> {
    Ok(socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )?)
}

/// Length of a listener's queue: the limit of net.core.somaxconn (4,096 by default), because every
/// client of a sibling may come at one moment.
const BACKLOG: Backlog = Backlog::MAXALLOWABLE;

/// Makes a listener at a path, which must not exist yet.
pub fn bind_listener(path: &Path) -> io::Result<OwnedFd> {
    let socket = new()?;
    bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to a listener without waiting.
///
/// # Errors
/// `ENOENT` and `ECONNREFUSED` if nobody listens, `EAGAIN` if the queue is full: try again.
pub fn dial_path(path: &Path) -> io::Result<OwnedFd> {
    let socket = new()?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

/// Accepts the next connection of a listener. `EWOULDBLOCK` if no connection waits.
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

/// True if the other end is closed, so that messages sent now are not read.
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
    /// The message's length in the buffer; 0 is the end.
    pub length: usize,
    /// The descriptors, in the order in which they were sent.
    pub descriptors: Vec<OwnedFd>,
}

/// Receives one message.
///
/// # Errors
/// `EWOULDBLOCK` if no message has arrived. `EMSGSIZE` if the message or its descriptors do not
/// fit; the descriptors that fit are closed.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
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
        // Dropping `control` closes the installed descriptors.
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

/// Sends one message with duplicates of at most [`DESCRIPTORS`] descriptors.
///
/// # Errors
/// `EWOULDBLOCK` if the other end does not read, `EPIPE` if the other end is closed, `ETOOMANYREFS`
/// if too many descriptors are in flight.
pub fn transmit(
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
        transmit(from.as_fd(), b"a request", &[]).unwrap();
        assert!(!is_closed(to.as_fd()).unwrap());
        drop(from);
        assert!(is_closed(to.as_fd()).unwrap());
        assert_eq!(receive(to.as_fd(), &mut [0; 64]).unwrap().length, 9);
        assert!(is_closed(to.as_fd()).unwrap());
    }

    #[test]
    fn descriptors_arrive_in_order() {
        let (from, to) = socket_pair();
        let sent: Vec<_> = (0..DESCRIPTORS)
            .map(|_| UnixStream::pair().unwrap())
            .collect();
        let descriptors: Vec<_> = sent.iter().map(|(_, other)| other.as_fd()).collect();
        transmit(from.as_fd(), b"with all that fit", &descriptors).unwrap();
        let mut buffer = [0; 64];
        let received = receive(to.as_fd(), &mut buffer).unwrap();
        assert_eq!(&buffer[..received.length], b"with all that fit");
        assert_eq!(received.descriptors.len(), DESCRIPTORS);
        for (at, ((mine, _), descriptor)) in sent.iter().zip(received.descriptors).enumerate() {
            nix::unistd::write(&descriptor, &[at as u8]).unwrap();
            let mut got = [0];
            (&mut &*mine).read_exact(&mut got).unwrap();
            assert_eq!(usize::from(got[0]), at);
        }
        transmit(from.as_fd(), b"", &[]).unwrap();
        assert_eq!(
            receive(to.as_fd(), &mut buffer).unwrap().descriptors.len(),
            0
        );
    }

    /// The kernel installs as many descriptors as fit, and reports that more were sent.
    #[test]
    fn a_message_that_does_not_fit_leaves_no_open_descriptor() {
        for (message, descriptors) in [(&b"70"[..], 70), (&[0; 65], 1)] {
            let (from, to) = socket_pair();
            let (mut mine, other) = UnixStream::pair().unwrap();
            transmit(from.as_fd(), message, &vec![other.as_fd(); descriptors]).unwrap();
            drop(other);
            let error = receive(to.as_fd(), &mut [0; 64]).unwrap_err();
            // A read returns the end once the last duplicate is closed.
            mine.set_read_timeout(Some(Duration::from_secs(30)))
                .unwrap();
            assert_eq!(mine.read(&mut [0; 1]).unwrap(), 0);
            assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
        }
    }
}
