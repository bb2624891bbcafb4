//! TCP sockets with the options that std and tokio do not offer.
//!
//! Every function is one system call or a fixed short row of them; what to do about a failure is decided by the caller.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, getsockopt, setsockopt, sockopt};
use nix::{getsockopt_impl, setsockopt_impl, sockopt_impl};
use procfs::KernelVersion;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use std::ffi::c_int;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::from_mut;
use std::sync::LazyLock;
use std::time::Duration;

/// Not in the libc crate; from linux/in.h.
const IP_LOCAL_PORT_RANGE: c_int = 51;

sockopt_impl!(
    /// Which ports the socket may have: the lowest, and the highest in the upper half.
    LocalPortRange, SetOnly, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, u32
);
sockopt_impl!(
    NamespaceCookie,
    GetOnly,
    libc::SOL_SOCKET,
    libc::SO_NETNS_COOKIE,
    u64
);

/// A silent peer is probed after this time, and counts as gone when this many probes at this interval are unanswered.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_PROBES: u32 = 3;
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// A socket that is bound but does not listen: it reserves the port and gets nothing.
///
/// `SO_REUSEPORT` lets siblings of the same effective uid bind too. `SO_REUSEADDR` allows to bind while connections of an
/// apiserver that held the port alone are in TIME_WAIT. It is removed at once, because a socket that has
/// it and does not listen lets one of any other uid listen on the port.
///
/// # Errors
/// Those of socket(2), setsockopt(2) and bind(2); `EADDRINUSE` is explained by [`super::proc_net`].
pub fn bind(address: SocketAddr, freebind: bool) -> io::Result<OwnedFd> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM.nonblocking(),
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if freebind {
        match address {
            SocketAddr::V4(_) => socket.set_freebind_v4(true)?,
            SocketAddr::V6(_) => socket.set_freebind_v6(true)?,
        }
    }
    socket.bind(&address.into())?;
    socket.set_reuse_address(false)?;
    Ok(socket.into())
}

/// A socket that is bound as kube-apiserver binds its own: with `SO_REUSEADDR` alone.
///
/// # Errors
/// Those of socket(2), setsockopt(2) and bind(2).
pub fn bind_as_apiserver(address: SocketAddr, nonblocking: bool) -> io::Result<OwnedFd> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(nonblocking)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Starts to listen, or changes the backlog of a socket that listens.
///
/// While it listens it has `SO_REUSEADDR`: listen(2) checks for conflicts as bind(2) does, and accepted
/// connections inherit it. Without it, an apiserver without berth could not bind a wildcard address for as long as
/// one of them is open or in TIME_WAIT.
///
/// # Errors
/// `EADDRINUSE` when a socket of another uid began to listen on the port in the meantime.
pub fn start_listening(socket: BorrowedFd<'_>, backlog: u32) -> io::Result<()> {
    let socket = SockRef::from(&socket);
    socket.set_reuse_address(true)?;
    // The kernel cuts it to net.core.somaxconn. (SOMAXCONN of the C library is another matter: musl's is 128.)
    socket
        .listen(i32::try_from(backlog).unwrap_or(i32::MAX))
        .inspect_err(|_| {
            // As after bind. That it fails too is not the news.
            let _ = socket.set_reuse_address(false);
        })
}

/// Marks a listener, so that [`super::sock_diag::destroy_unmarked`] spares its new connections, which inherit the mark.
///
/// The mark is `IP_BIND_ADDRESS_NO_PORT`, which has no effect on a bound socket that listens. An IPv6 socket takes it too.
/// (Before bind(2), a port of 0 would stay 0.)
///
/// # Errors
/// Those of setsockopt(2).
pub fn mark_listener(listener: BorrowedFd<'_>) -> io::Result<()> {
    set_bind_address_no_port(listener)
}

/// The address that a socket is bound to.
///
/// # Errors
/// Those of getsockname(2), or `EAFNOSUPPORT` for a socket that is neither IPv4 nor IPv6.
pub fn local_address(socket: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    SockRef::from(&socket)
        .local_addr()?
        .as_socket()
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
}

/// Takes one connection out of the accept queue, non-blocking and close-on-exec.
///
/// # Errors
/// `EWOULDBLOCK` when the queue is empty; see accept(2) for the others.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<(TcpStream, SocketAddr)> {
    let (stream, peer) =
        SockRef::from(&listener).accept4(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC)?;
    let peer = peer
        .as_socket()
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))?;
    Ok((stream.into(), peer))
}

/// How many connections wait in a listener's accept queue.
///
/// # Errors
/// Those of getsockopt(2).
pub fn queue_length(listener: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(info(listener)?.tcpi_unacked)
}

/// Wakes whoever waits for a listener by an edge-triggered epoll(7), if a connection is in its accept queue. The listener stays as it is:
/// shutdown(2) of the writing side of a listener does nothing else.
pub fn wake_pollers(listener: BorrowedFd<'_>) {
    // If this fails, it does not listen.
    let _ = SockRef::from(&listener).shutdown(std::net::Shutdown::Write);
}

/// Reads what has arrived, whatever the event loop's readiness.
///
/// # Errors
/// Those of recv(2); `EWOULDBLOCK` when nothing has arrived, on a non-blocking socket.
pub fn read(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    (&*SockRef::from(&socket)).read(buffer)
}

/// Starts a non-blocking connection to `to`, from `source` if there is one.
///
/// To an address of this host the TCP handshake has mostly ended when this returns.
///
/// # Errors
/// Those of socket(2), setsockopt(2), bind(2) and connect(2); `EADDRNOTAVAIL` when the source has no port left.
pub fn connect(to: SocketAddr, source: Option<IpAddr>) -> io::Result<TcpStream> {
    let socket = Socket::new(
        Domain::for_address(to),
        Type::STREAM.nonblocking(),
        Some(Protocol::TCP),
    )?;
    if to.ip().is_loopback() {
        // Keepalive probes whether a host is there: it is this one.
        socket.set_tcp_nodelay(true)?;
    } else {
        set_options(socket.as_fd())?;
    }
    if let Some(source) = source {
        // Options of IPv4.
        if source.is_ipv4() {
            set_bind_address_no_port(socket.as_fd())?;
            if takes_every_port() {
                set_every_port(socket.as_fd())?;
            }
        }
        socket.bind(&SocketAddr::from((source, 0)).into())?;
    }
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket.into()),
    }
}

/// Sets `TCP_NODELAY` and keepalive, so that a dead peer is not held for ever. From a listener, accepted sockets inherit both.
/// `TCP_USER_TIMEOUT` is turned off, since a listener may come from a version that had set it: it would cut a reader that pauses for that
/// long (`kubectl logs -f | less`).
pub fn set_options(socket: BorrowedFd<'_>) -> io::Result<()> {
    let socket = SockRef::from(&socket);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL);
    socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_PROBES))?;
    socket.set_tcp_user_timeout(None)
}

/// Lets a bind to a source address leave the port open until connect, so that the 28,000 ephemeral
/// ports count for each pair of addresses and not for the source address alone. What does not know the option (before Linux 4.2; QEMU's
/// user mode) has the fewer ports.
pub fn set_bind_address_no_port(socket: BorrowedFd<'_>) -> io::Result<()> {
    match setsockopt(&socket, sockopt::IpBindAddressNoPort, &true) {
        Err(Errno::ENOPROTOOPT) => Ok(()),
        result => Ok(result?),
    }
}

/// Whether a socket can be made to search odd and even ports alike: Linux 6.8. Before that, connect() tries
/// odd ports (one half) only when every even one is in use, and all even ones each time.
pub fn takes_every_port() -> bool {
    static SUPPORTED: LazyLock<bool> = LazyLock::new(|| {
        let is_new =
            KernelVersion::current().is_ok_and(|kernel| kernel >= KernelVersion::new(6, 8, 0));
        let set = || set_every_port(Socket::new(Domain::IPV4, Type::STREAM, None)?.as_fd());
        // What only calls itself Linux may not know the option.
        is_new && set().is_ok()
    });
    *SUPPORTED
}

/// Gives the socket a range of ports of its own (`IP_LOCAL_PORT_RANGE`), which is why both halves count. The range is
/// that of `net.ipv4.ip_local_port_range`: a bound of 0 and one outside of it have no effect (ip(7)).
fn set_every_port(socket: BorrowedFd<'_>) -> io::Result<()> {
    Ok(setsockopt(&socket, LocalPortRange, &0xffff_0000)?)
}

/// The kernel's name of a socket, the same for all duplicates and for no other socket of the network
/// namespace (`SO_COOKIE`; before Linux 4.12 and in QEMU's user mode, which do not know it, its inode).
///
/// # Errors
/// Those of getsockopt(2), such as `ENOTSOCK`.
pub fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let known =
        |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOPROTOOPT | libc::EINVAL));
    SockRef::from(&socket)
        .cookie()
        .or_else(|error| inode(socket).filter(|_| known(&error)).ok_or(error))
}

/// The kernel's name of this thread's network namespace, which no other ever has (`SO_NETNS_COOKIE`).
///
/// # Errors
/// `ENOPROTOOPT` before Linux 5.14.
pub fn namespace_cookie() -> io::Result<u64> {
    Ok(getsockopt(
        &Socket::new(Domain::UNIX, Type::DGRAM, None)?,
        NamespaceCookie,
    )?)
}

/// The inode that /proc/net/tcp names a socket by.
pub fn inode(socket: BorrowedFd<'_>) -> Option<u64> {
    nix::sys::stat::fstat(socket).ok().map(|stat| stat.st_ino)
}

/// The network namespace that a socket is of.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN there.
pub fn network_namespace(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: it reads and writes no memory of this process.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGSKNS as libc::Ioctl) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: it is new, so nothing else owns it.
        namespace => Ok(unsafe { OwnedFd::from_raw_fd(namespace) }),
    }
}

/// Whether a socket listens on an address of this host. Without a connection: bind(2) is refused only because of a
/// socket that listens, or has no `SO_REUSEADDR`, which Go and most others set.
///
/// # Errors
/// Errors of socket(2) and bind(2): the address is not one of this host, or descriptors ran out.
pub fn is_listened_on(address: SocketAddr) -> io::Result<bool> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    match socket.bind(&address.into()) {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(true),
        Err(error) => Err(error),
    }
}

/// Ends listening for every holder of a duplicate: what is queued is reset, new clients are refused.
/// [`start_listening`] comes back from it; the port stays bound.
///
/// # Errors
/// `ENOTCONN` when it did not listen.
pub fn refuse(listener: BorrowedFd<'_>) -> io::Result<()> {
    let listener = SockRef::from(&listener);
    listener.set_reuse_address(false)?;
    listener.shutdown(std::net::Shutdown::Read)
}

/// Checks a descriptor from another process: it must be a TCP socket bound to this address, with `SO_REUSEPORT` and this
/// cookie.
pub fn check_listener(
    socket: BorrowedFd<'_>,
    address: SocketAddr,
    name: u64,
) -> Result<(), String> {
    let failed = |error: io::Error| format!("its options cannot be read: {error}");
    let asked = SockRef::from(&socket);
    if asked.r#type().map_err(failed)? != Type::STREAM
        || asked.protocol().map_err(failed)? != Some(Protocol::TCP)
    {
        return Err("it is no TCP socket".into());
    }
    if cookie(socket).map_err(failed)? != name {
        return Err("it is another socket than announced".into());
    }
    match local_address(socket).map_err(failed)? {
        bound if bound != address => {
            return Err(format!("it is bound to {bound}, not to {address}"));
        }
        _ => {}
    }
    if asked.peer_addr().is_ok() {
        return Err("it is a connection, not a listener".into());
    }
    if !asked.reuse_port().map_err(failed)? {
        return Err("it does not share its port".into());
    }
    Ok(())
}

/// Whether a descriptor of another process is a TCP connection; the peer's address if it is.
pub fn check_connection(socket: BorrowedFd<'_>) -> Result<SocketAddr, String> {
    let failed = |error: io::Error| format!("it is no connection: {error}");
    let asked = SockRef::from(&socket);
    if asked.r#type().map_err(failed)? != Type::STREAM
        || asked.protocol().map_err(failed)? != Some(Protocol::TCP)
    {
        return Err("it is no TCP socket".into());
    }
    let peer = asked.peer_addr().map_err(failed)?;
    peer.as_socket()
        .ok_or_else(|| "it is no connection of the Internet".into())
}

/// How many bytes the kernel takes for a connection now; 0 where epoll would not call that writable, which is as
/// long as more than two thirds of its buffer are taken.
pub fn room(socket: &impl AsFd) -> usize {
    // Of linux/sock_diag.h.
    const SNDBUF: usize = 3;
    const WMEM_QUEUED: usize = 5;
    // Without an answer, assume room until a write shows otherwise.
    let mut figures = [0_u32; 9];
    // SAFETY: numbers.
    let length = unsafe {
        option(
            socket.as_fd(),
            (libc::SOL_SOCKET, libc::SO_MEMINFO),
            &mut figures,
        )
    };
    if !length.is_ok_and(|length| length > WMEM_QUEUED * size_of::<u32>()) {
        return usize::MAX;
    }
    let (queued, room) = (
        figures[WMEM_QUEUED],
        figures[SNDBUF].saturating_sub(figures[WMEM_QUEUED]),
    );
    if room >= queued / 2 { room as usize } else { 0 }
}

/// Whether the kernel takes more data for a connection. If not, epoll reports when it does.
pub fn is_writable(socket: &impl AsFd) -> bool {
    is_ready(socket, PollFlags::POLLOUT)
}

/// Whether there is something to read or accept, or reading finds out why not.
pub fn is_readable(socket: &impl AsFd) -> bool {
    is_ready(socket, PollFlags::POLLIN)
}

fn is_ready(socket: &impl AsFd, flags: PollFlags) -> bool {
    // If poll(2) fails, the next read or write shows it.
    poll(&mut [PollFd::new(socket.as_fd(), flags)], PollTimeout::ZERO) != Ok(0)
}

/// Whether a connection was reset or timed out. The error is left for the next read. One whose both ends have sent FIN
/// (POLLHUP) may have bytes that are not read yet.
pub fn is_gone(socket: &impl AsFd) -> bool {
    events(socket, PollFlags::empty()).is_some_and(|events| events.contains(PollFlags::POLLERR))
}

/// Whether the other end of a connection has sent FIN or reset it, whatever it sent before.
pub fn has_ended(socket: &impl AsFd) -> bool {
    // nix has no POLLRDHUP.
    events(socket, PollFlags::from_bits_retain(libc::POLLRDHUP))
        .is_none_or(|events| !events.is_empty())
}

/// Time since data last came or went.
pub fn quiet(socket: BorrowedFd<'_>) -> io::Result<Duration> {
    let info = info(socket)?;
    Ok(Duration::from_millis(
        info.tcpi_last_data_sent
            .min(info.tcpi_last_data_recv)
            .into(),
    ))
}

/// How far a connection is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Sent to the other end for the first time.
    pub sent: u64,
    /// Bytes received from the other end. The other end's FIN counts as one byte.
    pub received: u64,
    /// Received, and not read.
    pub unread: u64,
}

/// Reads how far a connection is: none of these is the descriptor's, all are the socket's.
///
/// # Errors
/// Those of getsockopt(2) and ioctl(2).
pub fn progress(socket: BorrowedFd<'_>) -> io::Result<Progress> {
    let (sent, received) = sent_and_received(socket)?;
    let mut unread: c_int = 0;
    // SAFETY: FIONREAD writes an int.
    Errno::result(unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, from_mut(&mut unread))
    })?;
    Ok(Progress {
        sent,
        received,
        unread: unread.unsigned_abs().into(),
    })
}

/// Whether a byte was sent to the other end: by whatever descriptor.
///
/// # Errors
/// Those of [`progress`].
pub fn has_sent(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(sent_and_received(socket)?.0 > 0)
}

fn sent_and_received(socket: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    // Of struct tcp_info in linux/tcp.h, which is longer than that of the C library: tcpi_bytes_received, and tcpi_bytes_sent of Linux 4.19.
    const RECEIVED: usize = 128 / size_of::<u64>();
    const SENT: usize = 200 / size_of::<u64>();
    let mut info = [0_u64; SENT + 1];
    // SAFETY: numbers.
    let length = unsafe { option(socket, (libc::IPPROTO_TCP, libc::TCP_INFO), &mut info) }?;
    if length < size_of_val(&info) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok((info[SENT], info[RECEIVED]))
}

/// Makes a socket non-blocking, which another process may have made a blocking one.
///
/// # Errors
/// Those of ioctl(2).
pub fn set_nonblocking(socket: BorrowedFd<'_>) -> io::Result<()> {
    SockRef::from(&socket).set_nonblocking(true)
}

/// Peeks at what has arrived, from its beginning; it stays where it is. Never waits.
///
/// # Errors
/// Those of recv(2); `EWOULDBLOCK` when nothing has arrived.
pub fn peek(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(nix::sys::socket::recv(
        socket.as_raw_fd(),
        buffer,
        MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT,
    )?)
}

fn info(socket: BorrowedFd<'_>) -> io::Result<libc::tcp_info> {
    // SAFETY: a plain C struct, of whatever zeroes.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { option(socket, (libc::IPPROTO_TCP, libc::TCP_INFO), &mut info) }?;
    Ok(info)
}

/// Reads an option, of which the kernel may have only the beginning; gives how many bytes it has.
///
/// # Safety
/// `T` is made of numbers, which any bytes are.
unsafe fn option<T>(
    socket: BorrowedFd<'_>,
    (level, option): (c_int, c_int),
    value: &mut T,
) -> io::Result<usize> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is alive and has room for `length` bytes; what they are is the caller's promise.
    Errno::result(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            from_mut(value).cast(),
            &raw mut length,
        )
    })?;
    Ok(length as usize)
}

/// What poll(2) reports for a socket now; none: flags that nix does not know, or poll(2) failed.
fn events(socket: &impl AsFd, asked: PollFlags) -> Option<PollFlags> {
    let mut asked = [PollFd::new(socket.as_fd(), asked)];
    let _ = poll(&mut asked, PollTimeout::ZERO);
    asked[0].revents()
}

/// Makes the close of this socket a reset: what a reset of the other end becomes here.
pub fn reset_on_close(socket: &impl AsFd) {
    // If this fails, the socket is gone already.
    let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::CloneFlags;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener};

    #[test]
    fn what_was_said_before_hides_no_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        assert!(!has_ended(&server));
        client.write_all(b"sent").unwrap();
        assert!(!has_ended(&server));
        client.shutdown(Shutdown::Write).unwrap();
        assert!(has_ended(&server));
    }

    #[test]
    fn what_was_read_and_sent_is_known_to_whoever_has_a_duplicate() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let duplicate = server.try_clone().unwrap();
        let is = |sent, received, unread| {
            let is = progress(duplicate.as_fd()).unwrap();
            assert_eq!(
                is,
                Progress {
                    sent,
                    received,
                    unread
                }
            );
        };
        is(0, 0, 0);
        client.write_all(b"hello").unwrap();
        let mut buffer = [0; 16];
        assert_eq!(
            (peek(duplicate.as_fd(), &mut buffer).unwrap(), &buffer[..5]),
            (5, &b"hello"[..])
        );
        is(0, 5, 5);
        server.read_exact(&mut [0; 3]).unwrap();
        is(0, 5, 2);
        server.read_exact(&mut [0; 2]).unwrap();
        assert_eq!(
            peek(duplicate.as_fd(), &mut buffer).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        server.write_all(b"answer!").unwrap();
        is(7, 5, 0);
    }

    /// As kube-apiserver has it: `SO_REUSEADDR` alone.
    fn plain(address: SocketAddr) -> io::Result<TcpListener> {
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(false)?;
        }
        socket.bind(&address.into())?;
        socket.listen(16)?;
        Ok(socket.into())
    }

    /// A connection of each kind that outlives its listener: one that is open, and one in TIME_WAIT here.
    fn leave_connections(at: SocketAddr, mut accept: impl FnMut() -> TcpStream) -> [TcpStream; 2] {
        let (mut closed, open) = (
            TcpStream::connect(at).unwrap(),
            TcpStream::connect(at).unwrap(),
        );
        drop(accept());
        assert_eq!(closed.read(&mut [0]).unwrap(), 0);
        drop(closed);
        [accept(), open]
    }

    /// Whatever the C library takes for the largest.
    #[test]
    fn the_backlog_is_what_was_asked_for() {
        berth_testing::namespace::run(CloneFlags::CLONE_NEWNET, || {
            std::fs::write("/proc/sys/net/core/somaxconn", "20000")
                .map_err(|error| format!("net.core.somaxconn cannot be set: {error}"))?;
            let listener = bind("0.0.0.0:0".parse().unwrap(), false).unwrap();
            for asked in [100, 10_000] {
                start_listening(listener.as_fd(), asked).unwrap();
                // Of a listener it is the length of its queue.
                assert_eq!(info(listener.as_fd()).unwrap().tcpi_sacked, asked);
            }
            Ok(())
        });
    }

    #[test]
    fn an_apiserver_without_berth_can_listen_while_a_client_of_berth_is_connected() {
        // The port is of all addresses: where another process has it, another is tried, none of those from which the
        // kernel gives to clients (after other tests there is one in TIME_WAIT at each).
        let tried = (0..20).any(|_| {
            let port = 20_000 + getrandom::u32().unwrap() % 10_000;
            let Ok(berth) = bind(format!("127.3.7.1:{port}").parse().unwrap(), false) else {
                return false;
            };
            start_listening(berth.as_fd(), 16).unwrap();
            let at = local_address(berth.as_fd()).unwrap();
            let _connections = leave_connections(at, || {
                let waiting = PollFd::new(berth.as_fd(), PollFlags::POLLIN);
                poll(&mut [waiting], PollTimeout::NONE).unwrap();
                accept(berth.as_fd()).unwrap().0
            });
            drop(berth);
            let wildcard =
                |any: &str| plain(format!("{any}:{}", at.port()).parse().unwrap()).is_ok();
            wildcard("0.0.0.0") && wildcard("[::]")
        });
        assert!(tried, "no wildcard address could be bound");
    }

    #[test]
    fn a_shim_listens_after_an_apiserver_without_berth() {
        let apiserver = plain("127.3.7.2:0".parse().unwrap()).unwrap();
        let at = apiserver.local_addr().unwrap();
        let [one, other] = leave_connections(at, || apiserver.accept().unwrap().0);
        drop((one, other, apiserver));
        let berth = bind(at, false).unwrap();
        // Its own apiserver, of whose listener the kernel's shortcut for sockets of one uid knows nothing.
        let _instance = plain(SocketAddr::from(([127, 3, 7, 3], at.port())));
        start_listening(berth.as_fd(), 16).unwrap();
    }

    #[test]
    fn a_connection_that_both_ends_closed_is_not_gone_before_it_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut end, _) = listener.accept().unwrap();
        end.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        client.write_all(b"upload").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        // Behind what was sent.
        let mut asked = [PollFd::new(end.as_fd(), PollFlags::empty())];
        poll(&mut asked, PollTimeout::NONE).unwrap();
        assert!(!is_gone(&end));
        assert_eq!(end.read(&mut [0; 8]).unwrap(), 6);

        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (end, _) = listener.accept().unwrap();
        client.write_all(b"upload").unwrap();
        reset_on_close(&client);
        drop(client);
        let mut asked = [PollFd::new(end.as_fd(), PollFlags::empty())];
        poll(&mut asked, PollTimeout::NONE).unwrap();
        assert!(is_gone(&end));
    }

    #[test]
    fn connections_inherit_the_mark_of_a_listener_of_either_family() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            // There may be no IPv6.
            let Ok(listener) = TcpListener::bind(at) else {
                continue;
            };
            let is_marked = || {
                let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                getsockopt(&listener.accept().unwrap().0, sockopt::IpBindAddressNoPort).unwrap()
            };
            assert!(!is_marked());
            mark_listener(listener.as_fd()).unwrap();
            assert!(is_marked());
        }
    }

    #[test]
    fn a_listener_of_an_earlier_version_keeps_no_user_timeout() {
        let socket = bind("127.3.7.4:0".parse().unwrap(), false).unwrap();
        let options = SockRef::from(&socket);
        options
            .set_tcp_user_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        set_options(socket.as_fd()).unwrap();
        assert_eq!(
            (
                options.keepalive().unwrap(),
                options.tcp_user_timeout().unwrap()
            ),
            (true, None)
        );
    }
}
