//! TCP sockets with options that std and tokio do not offer.
//!
//! Each function makes one system call or a fixed short sequence of calls. The caller decides what
//! to do about a failure.

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

/// An option of linux/in.h that the libc crate lacks.
const IP_LOCAL_PORT_RANGE: c_int = 51;

sockopt_impl!(
    /// The range from which the kernel takes the socket's port. The lower 16 bits are the lowest
    /// port, the upper 16 bits are the highest port.
    LocalPortRange, SetOnly, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, u32
);
sockopt_impl!(
    NamespaceCookie,
    GetOnly,
    libc::SOL_SOCKET,
    libc::SO_NETNS_COOKIE,
    u64
);

/// Times of keepalive: if a peer is silent for KEEPALIVE_IDLE, it is probed each
/// KEEPALIVE_INTERVAL. After KEEPALIVE_PROBES probes without an answer, it counts as gone.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_PROBES: u32 = 3;
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Makes a socket that is bound but does not listen: the socket reserves the port and gets no
/// connection.
///
/// `SO_REUSEPORT` lets siblings of the same effective uid bind too. `SO_REUSEADDR` allows to bind
/// while connections of an apiserver that held the port alone are in TIME_WAIT. `SO_REUSEADDR` is
/// removed at once, because a socket with `SO_REUSEADDR` that does not listen lets a socket of any
/// other uid listen on the port.
///
/// # Errors
/// Errors of socket(2), setsockopt(2) and bind(2); `EADDRINUSE` is explained by
/// [`super::proc_net`].
pub fn bind(address: SocketAddr, freebind: bool) -> io::Result<OwnedFd> {
    let socket = create_socket(address)?;
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

fn create_socket(address: SocketAddr) -> io::Result<Socket> {
    Socket::new(
        Domain::for_address(address),
        Type::STREAM.nonblocking(),
        Some(Protocol::TCP),
    )
}

/// Makes a socket that is bound as kube-apiserver binds its socket: with `SO_REUSEADDR` alone.
///
/// # Errors
/// Errors of socket(2), setsockopt(2) and bind(2).
pub fn bind_as_apiserver(address: SocketAddr, nonblocking: bool) -> io::Result<OwnedFd> {
    let socket = create_socket(address)?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(nonblocking)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Starts to listen, or changes the backlog of a socket that listens.
///
/// A listening socket has `SO_REUSEADDR`: listen(2) checks for conflicts as bind(2) does, and
/// accepted connections inherit the option. Without the option, an apiserver without berth could
/// not bind a wildcard address while such a connection is open or in TIME_WAIT.
///
/// # Errors
/// `EADDRINUSE` if a socket of another uid began to listen on the port in the meantime.
pub fn start_listening(socket: BorrowedFd<'_>, backlog: u32) -> io::Result<()> {
    let socket = SockRef::from(&socket);
    socket.set_reuse_address(true)?;
    // The kernel limits the backlog to net.core.somaxconn. (Do not use the C library's SOMAXCONN:
    // musl's is 128.)
    socket
        .listen(i32::try_from(backlog).unwrap_or(i32::MAX))
        .inspect_err(|_| {
            // Restore the state that `bind` left. A failure is ignored here, because the caller
            // gets the error of listen.
            let _ = socket.set_reuse_address(false);
        })
}

/// Marks a listener, so that [`super::sock_diag::destroy_unmarked_connections`] spares its new
/// connections, which inherit the mark.
///
/// The mark is `IP_BIND_ADDRESS_NO_PORT`, which has no effect on a bound socket that listens. An
/// IPv6 socket accepts the option too. (Before bind(2), a port of 0 would stay 0.)
///
/// # Errors
/// Errors of setsockopt(2).
pub fn mark_listener(listener: BorrowedFd<'_>) -> io::Result<()> {
    set_bind_address_no_port(listener)
}

/// Returns the address to which a socket is bound.
///
/// # Errors
/// Errors of getsockname(2), or `EAFNOSUPPORT` for a socket that is neither IPv4 nor IPv6.
pub fn local_address(socket: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    SockRef::from(&socket)
        .local_addr()?
        .as_socket()
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
}

/// Takes one connection out of the accept queue, non-blocking and close-on-exec.
///
/// # Errors
/// `EWOULDBLOCK` if the queue is empty; see accept(2) for other errors.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<(TcpStream, SocketAddr)> {
    let (stream, peer) =
        SockRef::from(&listener).accept4(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC)?;
    let peer = peer
        .as_socket()
        .ok_or_else(|| io::Error::from_raw_os_error(libc::EAFNOSUPPORT))?;
    Ok((stream.into(), peer))
}

/// Returns the number of connections in a listener's accept queue.
///
/// # Errors
/// Errors of getsockopt(2).
pub fn queue_length(listener: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(read_tcp_info(listener)?.tcpi_unacked)
}

/// Wakes every thread that waits for a listener by an edge-triggered epoll(7), if a connection is
/// in the accept queue. This shuts down the writing side of the listener, which has no other effect
/// on a listener.
pub fn wake_pollers(listener: BorrowedFd<'_>) {
    // The call fails only if the socket does not listen. Then no thread waits.
    let _ = SockRef::from(&listener).shutdown(std::net::Shutdown::Write);
}

/// Reads bytes that have arrived, even if the event loop has not reported the socket as readable.
///
/// # Errors
/// Errors of recv(2); `EWOULDBLOCK` if nothing has arrived on a non-blocking socket.
pub fn read(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    (&*SockRef::from(&socket)).read(buffer)
}

/// Starts a non-blocking connection to `to`, from `source` if given.
///
/// For an address of this host, the TCP handshake has mostly ended when the function returns.
///
/// # Errors
/// Errors of socket(2), setsockopt(2), bind(2) and connect(2); `EADDRNOTAVAIL` if the source has no
/// port left.
pub fn connect(to: SocketAddr, source: Option<IpAddr>) -> io::Result<TcpStream> {
    let socket = create_socket(to)?;
    if to.ip().is_loopback() {
        // Loopback needs no keepalive: the peer's host is this host.
        socket.set_tcp_nodelay(true)?;
    } else {
        set_nodelay_and_keepalive(socket.as_fd())?;
    }
    if let Some(source) = source {
        // Both options below exist for IPv4 only.
        if source.is_ipv4() {
            set_bind_address_no_port(socket.as_fd())?;
            if supports_local_port_range() {
                set_local_port_range(socket.as_fd())?;
            }
        }
        socket.bind(&SocketAddr::from((source, 0)).into())?;
    }
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket.into()),
    }
}

/// Sets `TCP_NODELAY` and keepalive, so that a connection to a dead peer ends. Accepted sockets
/// inherit both options from a listener. `TCP_USER_TIMEOUT` is turned off, because a listener may
/// come from a version that set the timeout: the timeout would cut a reader that pauses for so long
/// (`kubectl logs -f | less`).
pub fn set_nodelay_and_keepalive(socket: BorrowedFd<'_>) -> io::Result<()> {
    let socket = SockRef::from(&socket);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL);
    socket.set_tcp_keepalive(&keepalive.with_retries(KEEPALIVE_PROBES))?;
    socket.set_tcp_user_timeout(None)
}

/// Lets a bind to a source address leave the port open until connect, so that the 28,000 ephemeral
/// ports count for each pair of addresses and not for the source address alone. Kernels without the
/// option (Linux before 4.2; QEMU's user mode) have fewer ports.
pub fn set_bind_address_no_port(socket: BorrowedFd<'_>) -> io::Result<()> {
    match setsockopt(&socket, sockopt::IpBindAddressNoPort, &true) {
        Err(Errno::ENOPROTOOPT) => Ok(()),
        result => Ok(result?),
    }
}

/// True if the kernel can search odd and even ports alike for a socket, as Linux 6.8 does. Before,
/// connect(2) tries an odd port only after it has found that every even port is in use.
pub fn supports_local_port_range() -> bool {
    static IS_SUPPORTED: LazyLock<bool> = LazyLock::new(|| {
        let is_new =
            KernelVersion::current().is_ok_and(|kernel| kernel >= KernelVersion::new(6, 8, 0));
        let set = || set_local_port_range(Socket::new(Domain::IPV4, Type::STREAM, None)?.as_fd());
        // An emulation such as QEMU's user mode may report a new kernel and not know the option.
        is_new && set().is_ok()
    });
    *IS_SUPPORTED
}

/// Gives the socket a range of ports of its own (`IP_LOCAL_PORT_RANGE`). For such a socket, the
/// kernel searches odd and even ports alike. The bounds are chosen so that the range is still
/// `net.ipv4.ip_local_port_range` (ip(7)).
fn set_local_port_range(socket: BorrowedFd<'_>) -> io::Result<()> {
    Ok(setsockopt(&socket, LocalPortRange, &0xffff_0000)?)
}

/// Returns the kernel's number for a socket (`SO_COOKIE`). Every duplicate of the socket has the
/// same number, and no other socket in the network namespace has it. If `SO_COOKIE` is unknown
/// (before Linux 4.12, and in QEMU's user mode), returns the socket's inode instead.
///
/// # Errors
/// Errors of getsockopt(2), such as `ENOTSOCK`.
pub fn read_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let known =
        |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOPROTOOPT | libc::EINVAL));
    SockRef::from(&socket)
        .cookie()
        .or_else(|error| read_inode(socket).filter(|_| known(&error)).ok_or(error))
}

/// Returns the kernel's number for this thread's network namespace (`SO_NETNS_COOKIE`). The kernel
/// never uses a number twice.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 5.14.
pub fn namespace_cookie() -> io::Result<u64> {
    Ok(getsockopt(
        &Socket::new(Domain::UNIX, Type::DGRAM, None)?,
        NamespaceCookie,
    )?)
}

/// Returns the inode of a socket. /proc/net/tcp identifies the socket by this inode.
pub fn read_inode(socket: BorrowedFd<'_>) -> Option<u64> {
    nix::sys::stat::fstat(socket).ok().map(|stat| stat.st_ino)
}

/// Returns the network namespace of a socket.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN in that namespace.
pub fn network_namespace(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: the request reads and writes no memory of this process.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGSKNS as libc::Ioctl) } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the descriptor is new, so nothing else owns it.
        namespace => Ok(unsafe { OwnedFd::from_raw_fd(namespace) }),
    }
}

/// True if a socket listens on an address of this host. The function makes no connection. It tries
/// bind(2), which fails only if a socket listens there, or is bound without `SO_REUSEADDR`, which
/// Go and most programs set.
///
/// # Errors
/// Errors of socket(2) and bind(2): the address does not belong to this host, or descriptors ran
/// out.
pub fn is_listened_on(address: SocketAddr) -> io::Result<bool> {
    match bind_as_apiserver(address, false) {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(true),
        Err(error) => Err(error),
    }
}

/// Makes a listener stop listening, also for processes that hold a duplicate. Queued connections
/// are reset, and new clients get connection refused. The port stays bound, and [`start_listening`]
/// listens again.
///
/// # Errors
/// `ENOTCONN` if the socket did not listen.
pub fn refuse_clients(listener: BorrowedFd<'_>) -> io::Result<()> {
    let listener = SockRef::from(&listener);
    listener.set_reuse_address(false)?;
    listener.shutdown(std::net::Shutdown::Read)
}

/// Checks a descriptor from another process: it must be a TCP socket bound to this address, with
/// `SO_REUSEPORT` and this cookie.
pub fn check_listener(
    socket: BorrowedFd<'_>,
    address: SocketAddr,
    name: u64,
) -> Result<(), String> {
    let failed = |error: io::Error| format!("the socket's options cannot be read: {error}");
    let asked = SockRef::from(&socket);
    if asked.r#type().map_err(failed)? != Type::STREAM
        || asked.protocol().map_err(failed)? != Some(Protocol::TCP)
    {
        return Err("the descriptor is no TCP socket".into());
    }
    if read_cookie(socket).map_err(failed)? != name {
        return Err("the socket is not the announced one".into());
    }
    match local_address(socket).map_err(failed)? {
        bound if bound != address => {
            return Err(format!("the socket is bound to {bound}, not to {address}"));
        }
        _ => {}
    }
    if asked.peer_addr().is_ok() {
        return Err("the socket is a connection, not a listener".into());
    }
    if !asked.reuse_port().map_err(failed)? {
        return Err("the socket does not share its port".into());
    }
    Ok(())
}

/// Checks a descriptor from another process: it must be a TCP connection. Returns the peer's
/// address.
pub fn check_connection(socket: BorrowedFd<'_>) -> Result<SocketAddr, String> {
    let failed = |error: io::Error| format!("the socket is no connection: {error}");
    let asked = SockRef::from(&socket);
    if asked.r#type().map_err(failed)? != Type::STREAM
        || asked.protocol().map_err(failed)? != Some(Protocol::TCP)
    {
        return Err("the descriptor is no TCP socket".into());
    }
    let peer = asked.peer_addr().map_err(failed)?;
    peer.as_socket()
        .ok_or_else(|| "the socket is no TCP/IP connection".into())
}

/// Returns how many bytes the kernel accepts for a connection now. Returns 0 if epoll would not
/// report the connection as writable, because more than two thirds of its buffer are in use.
pub fn writable_bytes(socket: &impl AsFd) -> usize {
    // Indexes of figures in SO_MEMINFO's array, by linux/sock_diag.h.
    const SNDBUF: usize = 3;
    const WMEM_QUEUED: usize = 5;
    // If the kernel reports nothing, the connection counts as writable until a write shows that it
    // is not.
    let mut figures = [0_u32; 9];
    // SAFETY: the option's value is an array of numbers.
    let length = unsafe {
        read_option(
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

/// True if the kernel accepts more data for a connection. If false, epoll reports when the kernel
/// accepts data again.
pub fn is_writable(socket: &impl AsFd) -> bool {
    is_ready(socket, PollFlags::POLLOUT)
}

/// True if there is something to read or accept, or if a read would return an error.
pub fn is_readable(socket: &impl AsFd) -> bool {
    is_ready(socket, PollFlags::POLLIN)
}

fn is_ready(socket: &impl AsFd, flags: PollFlags) -> bool {
    // If poll(2) fails, report the socket as readable: the next read or write then shows the error.
    poll(&mut [PollFd::new(socket.as_fd(), flags)], PollTimeout::ZERO) != Ok(0)
}

/// True if a connection was reset or timed out. The error is left for the next read. A connection
/// after FIN from both ends (POLLHUP) may still have unread bytes, so POLLHUP is not enough.
pub fn was_reset_or_timed_out(socket: &impl AsFd) -> bool {
    poll_events(socket, PollFlags::empty())
        .is_some_and(|events| events.contains(PollFlags::POLLERR))
}

/// True if the other end of a connection has sent FIN or a reset, even if bytes sent before are
/// unread.
pub fn peer_has_ended(socket: &impl AsFd) -> bool {
    // nix does not have the flag POLLRDHUP.
    poll_events(socket, PollFlags::from_bits_retain(libc::POLLRDHUP))
        .is_none_or(|events| !events.is_empty())
}

/// Returns the time since data was last sent or received.
pub fn idle_time(socket: BorrowedFd<'_>) -> io::Result<Duration> {
    let info = read_tcp_info(socket)?;
    Ok(Duration::from_millis(
        info.tcpi_last_data_sent
            .min(info.tcpi_last_data_recv)
            .into(),
    ))
}

/// Numbers of bytes that a connection has sent and received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes sent to the other end. Retransmitted bytes count once.
    pub sent: u64,
    /// Bytes received from the other end. The other end's FIN counts as one byte.
    pub received: u64,
    /// Bytes received but not read yet.
    pub unread: u64,
}

/// Reads a connection's progress, which belongs to the socket: every duplicate of the descriptor
/// shows the same counts.
///
/// # Errors
/// Errors of getsockopt(2) and ioctl(2).
pub fn read_progress(socket: BorrowedFd<'_>) -> io::Result<Progress> {
    let (sent, received) = count_sent_and_received(socket)?;
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

/// True if a byte was sent to the other end, through any descriptor of the socket.
///
/// # Errors
/// Errors of [`read_progress`].
pub fn has_sent(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(count_sent_and_received(socket)?.0 > 0)
}

fn count_sent_and_received(socket: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    // Positions in struct tcp_info of linux/tcp.h, which is longer than the C library's:
    // tcpi_bytes_received, and tcpi_bytes_sent (Linux 4.19).
    const RECEIVED: usize = 128 / size_of::<u64>();
    const SENT: usize = 200 / size_of::<u64>();
    let mut info = [0_u64; SENT + 1];
    // SAFETY: the option's value is an array of numbers.
    let length = unsafe { read_option(socket, (libc::IPPROTO_TCP, libc::TCP_INFO), &mut info) }?;
    if length < size_of_val(&info) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok((info[SENT], info[RECEIVED]))
}

/// Makes a socket non-blocking. Needed before use, because another process that has the socket may
/// have made it blocking.
///
/// # Errors
/// Errors of ioctl(2).
pub fn set_nonblocking(socket: BorrowedFd<'_>) -> io::Result<()> {
    SockRef::from(&socket).set_nonblocking(true)
}

/// Reads received bytes without removing them, from the first unread byte on. Never waits.
///
/// # Errors
/// Errors of recv(2); `EWOULDBLOCK` if nothing has arrived.
pub fn peek(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(nix::sys::socket::recv(
        socket.as_raw_fd(),
        buffer,
        MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT,
    )?)
}

fn read_tcp_info(socket: BorrowedFd<'_>) -> io::Result<libc::tcp_info> {
    // SAFETY: `tcp_info` is a plain C struct, for which zeroes are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    // SAFETY: `tcp_info` holds numbers only.
    unsafe { read_option(socket, (libc::IPPROTO_TCP, libc::TCP_INFO), &mut info) }?;
    Ok(info)
}

/// Reads an option and returns the number of bytes that the kernel wrote. An older kernel may write
/// only the beginning of `T`.
///
/// # Safety
/// `T` is made of numbers, for which every byte pattern is valid.
unsafe fn read_option<T>(
    socket: BorrowedFd<'_>,
    (level, option): (c_int, c_int),
    value: &mut T,
) -> io::Result<usize> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is alive and has room for `length` bytes; the caller promises that every byte
    // pattern is valid.
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

/// Returns the events that poll(2) reports for a socket now. `None` if nix does not know a reported
/// flag, or poll(2) failed.
fn poll_events(socket: &impl AsFd, asked: PollFlags) -> Option<PollFlags> {
    let mut asked = [PollFd::new(socket.as_fd(), asked)];
    let _ = poll(&mut asked, PollTimeout::ZERO);
    asked[0].revents()
}

/// Makes the kernel reset the connection when this socket is closed. A relay calls this to pass on
/// a reset from the other end.
pub fn reset_on_close(socket: &impl AsFd) {
    // The call fails only if the connection is gone already.
    let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::CloneFlags;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener};

    #[test]
    fn an_end_is_noticed_even_behind_unread_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        assert!(!peer_has_ended(&server));
        client.write_all(b"sent").unwrap();
        assert!(!peer_has_ended(&server));
        client.shutdown(Shutdown::Write).unwrap();
        assert!(peer_has_ended(&server));
    }

    #[test]
    fn a_duplicate_shows_what_was_read_and_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let duplicate = server.try_clone().unwrap();
        let is = |sent, received, unread| {
            let is = read_progress(duplicate.as_fd()).unwrap();
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

    /// Listens with the same options as kube-apiserver: `SO_REUSEADDR` alone.
    fn listen_as_apiserver(address: SocketAddr) -> io::Result<TcpListener> {
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

    /// Leaves two connections that outlive their listener: an open connection, and a connection in
    /// TIME_WAIT at the listener's end.
    fn make_connections_outliving_listener(
        at: SocketAddr,
        mut accept: impl FnMut() -> TcpStream,
    ) -> [TcpStream; 2] {
        let (mut closed, open) = (
            TcpStream::connect(at).unwrap(),
            TcpStream::connect(at).unwrap(),
        );
        drop(accept());
        assert_eq!(closed.read(&mut [0]).unwrap(), 0);
        drop(closed);
        [accept(), open]
    }

    /// The C library's SOMAXCONN must not limit the backlog.
    #[test]
    fn a_listener_gets_the_requested_backlog() {
        berth_testing::namespace::run(CloneFlags::CLONE_NEWNET, || {
            std::fs::write("/proc/sys/net/core/somaxconn", "20000")
                .map_err(|error| format!("net.core.somaxconn cannot be set: {error}"))?;
            let listener = bind("0.0.0.0:0".parse().unwrap(), false).unwrap();
            for asked in [100, 10_000] {
                start_listening(listener.as_fd(), asked).unwrap();
                // The kernel reports a listener's backlog as tcpi_sacked.
                assert_eq!(read_tcp_info(listener.as_fd()).unwrap().tcpi_sacked, asked);
            }
            Ok(())
        });
    }

    #[test]
    fn an_apiserver_without_berth_can_listen_while_a_client_of_berth_is_connected() {
        // To bind a wildcard address, the port must be free on every address, so the test tries
        // several ports. It avoids ephemeral ports, which clients of other tests leave in
        // TIME_WAIT.
        let tried = (0..20).any(|_| {
            let port = 20_000 + getrandom::u32().unwrap() % 10_000;
            let Ok(berth) = bind(format!("127.3.7.1:{port}").parse().unwrap(), false) else {
                return false;
            };
            start_listening(berth.as_fd(), 16).unwrap();
            let at = local_address(berth.as_fd()).unwrap();
            let _connections = make_connections_outliving_listener(at, || {
                let waiting = PollFd::new(berth.as_fd(), PollFlags::POLLIN);
                poll(&mut [waiting], PollTimeout::NONE).unwrap();
                accept(berth.as_fd()).unwrap().0
            });
            drop(berth);
            let wildcard = |any: &str| {
                listen_as_apiserver(format!("{any}:{}", at.port()).parse().unwrap()).is_ok()
            };
            wildcard("0.0.0.0") && wildcard("[::]")
        });
        assert!(tried, "no wildcard address could be bound");
    }

    #[test]
    fn a_shim_listens_after_an_apiserver_without_berth() {
        // A process that another test has just forked keeps the closed listener open until it
        // executes its program, so the test tries several ports.
        let tried = (0..20).any(|_| {
            let apiserver = listen_as_apiserver("127.3.7.2:0".parse().unwrap()).unwrap();
            let at = apiserver.local_addr().unwrap();
            drop(make_connections_outliving_listener(at, || {
                apiserver.accept().unwrap().0
            }));
            drop(apiserver);
            bind(at, false).is_ok_and(|berth| {
                // Listens for the apiserver of the shim. Without this second listener on the port,
                // the kernel's shortcut for sockets of one uid would hide a conflict.
                let _instance = listen_as_apiserver(SocketAddr::from(([127, 3, 7, 3], at.port())));
                start_listening(berth.as_fd(), 16).is_ok()
            })
        });
        assert!(tried, "no closed listener's port could be bound");
    }

    #[test]
    fn a_connection_closed_by_both_ends_is_not_gone_before_it_is_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut end, _) = listener.accept().unwrap();
        end.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        client.write_all(b"upload").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        // Wait until the client's FIN has arrived, after the bytes.
        let mut asked = [PollFd::new(end.as_fd(), PollFlags::empty())];
        poll(&mut asked, PollTimeout::NONE).unwrap();
        assert!(!was_reset_or_timed_out(&end));
        assert_eq!(end.read(&mut [0; 8]).unwrap(), 6);

        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (end, _) = listener.accept().unwrap();
        client.write_all(b"upload").unwrap();
        reset_on_close(&client);
        drop(client);
        let mut asked = [PollFd::new(end.as_fd(), PollFlags::empty())];
        poll(&mut asked, PollTimeout::NONE).unwrap();
        assert!(was_reset_or_timed_out(&end));
    }

    #[test]
    fn connections_inherit_the_mark_of_a_listener_of_either_family() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            // The kernel may have no IPv6: then skip this address.
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
        set_nodelay_and_keepalive(socket.as_fd()).unwrap();
        assert_eq!(
            (
                options.keepalive().unwrap(),
                options.tcp_user_timeout().unwrap()
            ),
            (true, None)
        );
    }
}
