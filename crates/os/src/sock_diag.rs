//! TCP sockets by sock_diag(7), in this thread's network namespace. sock_diag needs no privilege,
//! and unlike /proc/net/tcp it can filter by port and state, and shows a socket's options. A
//! request for listeners alone spares the kernel the walk through its table of connections, which
//! has 262,144 buckets on a node of 24 GiB.
//!
//! The crate netlink-packet-sock-diag would help with little more than a reply's header: the crate
//! does not know INET_DIAG_SOCKOPT, and brings three more crates. Offsets and numbers here are from
//! linux/netlink.h and linux/inet_diag.h.

use crate::file::none_if_missing;
use crate::proc_net::{self, ESTABLISHED_STATE, Entry, LISTEN_STATE};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

/// State of a connection after its peer's FIN (TCP_CLOSE_WAIT in the kernel's tcp_states.h).
const CLOSE_WAIT_STATE: u8 = 0x08;

/// Message types of linux/sock_diag.h, which the libc crate lacks.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

/// The attribute of a reply that contains a struct inet_diag_sockopt. The second byte of that
/// structure has the bit bind_address_no_port.
const INET_DIAG_SOCKOPT: u16 = 22;
const BIND_ADDRESS_NO_PORT: u8 = if cfg!(target_endian = "little") {
    0x01
} else {
    0x80
};

/// Lengths of a struct nlmsghdr, and of a whole request: a struct nlmsghdr and a struct
/// inet_diag_req_v2.
const HEADER_LENGTH: usize = 16;
const REQUEST_LENGTH: usize = HEADER_LENGTH + 56;

/// Length of a struct inet_diag_sockid, which is part of a request and of a reply.
const ID_LENGTH: usize = 48;

/// Limit of the size of a datagram in a reply, in bytes.
const MAX_DATAGRAM: usize = 32 * 1024;

/// Time limit for a list of sockets, over all attempts. The limit is short because the calling
/// thread may have to renew a lease every second.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);

/// Time limit for a list of listeners. The list is short, so only a process that gets no CPU
/// reaches the limit.
const LISTENERS_TIMEOUT: Duration = Duration::from_secs(10);

/// Number of attempts to get a consistent list, while the kernel's tables change.
const MAX_ATTEMPTS: usize = 4;

/// Returns the listening sockets with this port. A socket that is bound but does not listen is
/// missing: the kernel does not show such a socket.
///
/// # Errors
/// `TimedOut`; `InvalidData` for a reply that cannot be parsed; errors of socket(2).
pub fn list_listeners(port: u16) -> io::Result<Vec<Entry>> {
    let list = |family| list_sockets(family, port, &[LISTEN_STATE], LISTENERS_TIMEOUT);
    let listed = list(libc::AF_INET).and_then(|mut listeners| {
        // A kernel without IPv6 returns an error here, which means that there are no IPv6 sockets.
        listeners.extend(none_if_missing(list(libc::AF_INET6))?.into_iter().flatten());
        Ok(listeners)
    });
    fall_back_to_proc(listed, |local| local.port() == port)
}

/// Returns the listening sockets with this address and port. See [`list_listeners`].
pub fn listeners_at(address: SocketAddr) -> io::Result<Vec<Entry>> {
    fall_back_to_proc(
        list_sockets(
            family_of(address),
            address.port(),
            &[LISTEN_STATE],
            LISTENERS_TIMEOUT,
        ),
        |local| *local == address,
    )
}

/// Selects the sockets with a wanted local address from a list. If the kernel has no sock_diag, or
/// none for TCP (CONFIG_INET_TCP_DIAG), reads /proc instead.
fn fall_back_to_proc(
    listed: io::Result<Vec<ListedSocket>>,
    wants: impl Fn(&SocketAddr) -> bool,
) -> io::Result<Vec<Entry>> {
    let listed = match listed {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EPROTONOSUPPORT | libc::ENOENT)
            ) =>
        {
            proc_net::read_sockets()?
                .into_iter()
                .filter(|entry| entry.state == LISTEN_STATE)
                .collect()
        }
        listed => listed?
            .iter()
            .map(ListedSocket::listener_entry)
            .collect::<Vec<_>>(),
    };
    Ok(listed
        .into_iter()
        .filter(|entry| wants(&entry.local))
        .collect())
}

/// Ends the connections on this local port, except those of a listener with the mark of
/// [`super::socket::mark_listener`]. Both ends get an error. Needs CAP_NET_ADMIN, and a kernel with
/// CONFIG_INET_DIAG_DESTROY.
///
/// # Errors
/// `EOPNOTSUPP` if the kernel cannot end connections; `EPERM`; `ENOENT` if the kernel has no
/// tcp_diag; errors of [`list_listeners`].
pub fn destroy_unmarked_connections(port: u16) -> io::Result<usize> {
    let list = |family| {
        list_sockets(
            family,
            port,
            &[ESTABLISHED_STATE, CLOSE_WAIT_STATE],
            REPLY_TIMEOUT,
        )
    };
    let mut all = list(libc::AF_INET)?;
    all.extend(none_if_missing(list(libc::AF_INET6))?.into_iter().flatten());
    let mut ended = 0;
    for socket in all
        .iter()
        .filter(|socket| socket.local.port() == port && socket.is_marked == Some(false))
    {
        // If the connection has ended meanwhile, the result is `None`, and the connection does not
        // count.
        ended += usize::from(none_if_missing(destroy_socket(socket))?.is_some());
    }
    Ok(ended)
}

fn family_of(address: SocketAddr) -> i32 {
    if address.is_ipv6() {
        libc::AF_INET6
    } else {
        libc::AF_INET
    }
}

fn destroy_socket(socket: &ListedSocket) -> io::Result<()> {
    let family = family_of(socket.local);
    let request = build_request(SOCK_DESTROY, libc::NLM_F_ACK, family, &[], &socket.id);
    let mut netlink = send_netlink(&request)?;
    netlink.set_read_timeout(Some(REPLY_TIMEOUT))?;
    let mut buffer = [0; MAX_DATAGRAM];
    let length = netlink.read(&mut buffer)?;
    let mut datagram = buffer.get(..length).unwrap_or_default();
    let (_, body) = take_message(&mut datagram).ok_or_else(unreadable_reply)?;
    parse_error(body)
        .ok_or_else(unreadable_reply)?
        .map_or(Ok(()), Err)
}

/// A socket, as the kernel's reply describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ListedSocket {
    /// The bytes of the reply's struct inet_diag_sockid. A request can name the socket with these
    /// bytes.
    id: [u8; ID_LENGTH],
    local: SocketAddr,
    uid: u32,
    inode: u32,
    /// True if the socket's listener had the mark of [`super::socket::mark_listener`]. `None`
    /// before Linux 5.10, where the kernel does not show the mark.
    is_marked: Option<bool>,
}

impl ListedSocket {
    fn listener_entry(&self) -> Entry {
        let unspecified = if self.local.is_ipv6() {
            Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        let remote = SocketAddr::new(unspecified, 0);
        Entry {
            local: self.local,
            remote,
            state: LISTEN_STATE,
            uid: self.uid,
            inode: self.inode.into(),
        }
    }
}

/// A datagram of a reply.
#[derive(Debug, Default, PartialEq, Eq)]
struct ReplyPart {
    sockets: Vec<ListedSocket>,
    is_last: bool,
    /// True if the kernel's tables changed while the kernel wrote the reply. The reply may then
    /// lack some sockets, or contain some twice.
    is_inconsistent: bool,
}

/// Lists the sockets of a family with one of these states and this local port. Port 0 means every
/// port.
fn list_sockets(
    family: i32,
    port: u16,
    states: &[u8],
    patience: Duration,
) -> io::Result<Vec<ListedSocket>> {
    let by = Instant::now() + patience;
    for _ in 0..MAX_ATTEMPTS {
        if let Some(sockets) = list_sockets_once(family, port, states, by)? {
            return Ok(sockets);
        }
    }
    Err(io::Error::new(
        io::ErrorKind::ResourceBusy,
        "the kernel's sockets changed during each try to list the sockets",
    ))
}

/// Requests one list of sockets. `None` if the kernel's tables changed meanwhile, so that the list
/// is inconsistent.
fn list_sockets_once(
    family: i32,
    port: u16,
    states: &[u8],
    by: Instant,
) -> io::Result<Option<Vec<ListedSocket>>> {
    // Each request has a socket of its own, so every received datagram belongs to the reply.
    let mut id = [0; ID_LENGTH];
    id[..2].copy_from_slice(&port.to_be_bytes());
    let mut socket = send_netlink(&build_request(
        SOCK_DIAG_BY_FAMILY,
        libc::NLM_F_DUMP,
        family,
        states,
        &id,
    ))?;
    let mut buffer = vec![0; MAX_DATAGRAM];
    let (mut sockets, mut is_inconsistent) = (Vec::new(), false);
    loop {
        let left = by.saturating_duration_since(Instant::now());
        // For the system, a timeout below a microsecond means that there is none.
        if left < Duration::from_millis(1) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the kernel did not list its sockets in time",
            ));
        }
        socket.set_read_timeout(Some(left))?;
        let length = match socket.read(&mut buffer) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) =>
            {
                continue;
            }
            read => read?,
        };
        // If a datagram was cut to the buffer's length, its last message is incomplete, and
        // parse_datagram fails.
        let part = parse_datagram(buffer.get(..length).unwrap_or_default())?;
        sockets.extend(part.sockets);
        is_inconsistent |= part.is_inconsistent;
        if part.is_last {
            return Ok((!is_inconsistent).then_some(sockets));
        }
    }
}

fn send_netlink(request: &[u8]) -> io::Result<Socket> {
    let protocol = Protocol::from(libc::NETLINK_SOCK_DIAG);
    let socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, Some(protocol))?;
    socket.send(request)?;
    Ok(socket)
}

/// Returns a request: a struct nlmsghdr and a struct inet_diag_req_v2.
fn build_request(
    kind: u16,
    flags: i32,
    family: i32,
    states: &[u8],
    id: &[u8; ID_LENGTH],
) -> [u8; REQUEST_LENGTH] {
    let mut request = [0; REQUEST_LENGTH];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, from) in request.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    };
    put(0, &(REQUEST_LENGTH as u32).to_ne_bytes());
    put(4, &kind.to_ne_bytes());
    put(6, &((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    put(HEADER_LENGTH, &[family as u8, libc::IPPROTO_TCP as u8]);
    put(
        HEADER_LENGTH + 4,
        &states
            .iter()
            .fold(0, |set, state| set | 1_u32 << state)
            .to_ne_bytes(),
    );
    put(HEADER_LENGTH + 8, id);
    request
}

/// Parses a datagram of the kernel, which contains one or more messages.
///
/// # Errors
/// The error that the kernel reports, or `InvalidData`.
fn parse_datagram(mut datagram: &[u8]) -> io::Result<ReplyPart> {
    let mut part = ReplyPart::default();
    loop {
        let (header, body) = take_message(&mut datagram).ok_or_else(unreadable_reply)?;
        part.is_inconsistent |= i32::from(header.flags) & libc::NLM_F_DUMP_INTR != 0;
        match i32::from(header.kind) {
            libc::NLMSG_NOOP => {}
            libc::NLMSG_DONE => match parse_error(body).ok_or_else(unreadable_reply)? {
                None => part.is_last = true,
                Some(error) => return Err(error),
            },
            // NLMSG_ERROR without an error acknowledges other kinds of requests, and is no valid
            // reply to a listing.
            libc::NLMSG_ERROR => {
                return Err(parse_error(body).flatten().unwrap_or_else(unreadable_reply));
            }
            _ if header.kind == SOCK_DIAG_BY_FAMILY => {
                part.sockets
                    .push(parse_entry(body).ok_or_else(unreadable_reply)?);
            }
            _ => return Err(unreadable_reply()),
        }
        if part.is_last || datagram.is_empty() {
            return Ok(part);
        }
    }
}

fn unreadable_reply() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the kernel's list of sockets (sock_diag) cannot be read",
    )
}

struct Header {
    kind: u16,
    flags: u16,
}

/// Removes the first message from a datagram. Returns the message's struct nlmsghdr and its body.
fn take_message<'a>(datagram: &mut &'a [u8]) -> Option<(Header, &'a [u8])> {
    let length = u32::from_ne_bytes(read_field(datagram, 0)?);
    let message = take_bytes(datagram, length.try_into().ok()?)?;
    let header = Header {
        kind: u16::from_ne_bytes(read_field(message, 4)?),
        flags: u16::from_ne_bytes(read_field(message, 6)?),
    };
    Some((header, message.get(HEADER_LENGTH..)?))
}

/// Returns the error in the body of a NLMSG_ERROR or NLMSG_DONE, which begins with a negated errno.
/// Some(None) means errno 0, which is no error.
fn parse_error(body: &[u8]) -> Option<Option<io::Error>> {
    match i32::from_ne_bytes(read_field(body, 0)?).checked_neg()? {
        0 => Some(None),
        errno => (errno > 0).then(|| Some(io::Error::from_raw_os_error(errno))),
    }
}

/// Parses the body of a message about a socket: a struct inet_diag_msg, and its attributes.
fn parse_entry(body: &[u8]) -> Option<ListedSocket> {
    let [family] = read_field(body, 0)?;
    let ip: IpAddr = match i32::from(family) {
        libc::AF_INET => read_field::<4>(body, 8)?.into(),
        libc::AF_INET6 => read_field::<16>(body, 8)?.into(),
        _ => return None,
    };
    let local = SocketAddr::new(ip, u16::from_be_bytes(read_field(body, 4)?));
    let [uid, inode] = [64, 68].map(|at| read_field(body, at).map(u32::from_ne_bytes));
    let (mut attributes, mut is_marked) = (body.get(72..)?, None);
    while !attributes.is_empty() {
        let [length, kind] = [0, 2].map(|at| read_field(attributes, at).map(u16::from_ne_bytes));
        let value = take_bytes(&mut attributes, length?.into())?.get(4..)?;
        if kind? == INET_DIAG_SOCKOPT {
            is_marked = Some(value.get(1)? & BIND_ADDRESS_NO_PORT != 0);
        }
    }
    Some(ListedSocket {
        id: read_field(body, 4)?,
        local,
        uid: uid?,
        inode: inode?,
        is_marked,
    })
}

fn read_field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Removes `length` bytes from the beginning of `bytes`, and the padding up to a multiple of 4. At
/// the end of a message, the padding may be missing.
fn take_bytes<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let taken = bytes.get(..length)?;
    *bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netdevice::{self, InterfaceSetting};
    use crate::socket::mark_listener;
    use berth_testing::namespace;
    use nix::sched::CloneFlags;
    use proptest::prelude::*;
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    const NODE: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
    const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
    const PORT: u16 = 6443;

    /// Runs a test in a network namespace with two addresses.
    fn run_in_namespace(test: impl FnOnce() + Send + 'static) {
        namespace::run(CloneFlags::CLONE_NEWNET, || {
            netdevice::set_interface("lo", InterfaceSetting::Up).unwrap();
            netdevice::set_interface("lo:1", InterfaceSetting::Address(NODE)).unwrap();
            netdevice::set_interface("lo:2", InterfaceSetting::Address(NEIGHBOUR)).unwrap();
            let has = list_sockets(libc::AF_INET, PORT, &[LISTEN_STATE], REPLY_TIMEOUT);
            if let Err(error) = has
                && error.raw_os_error() == Some(libc::EPROTONOSUPPORT)
            {
                return Err(format!("no sock_diag(7): {error}"));
            }
            test();
            Ok(())
        });
    }

    fn start_listener(at: impl Into<SocketAddr>, backlog: i32) -> TcpListener {
        let at = at.into();
        let socket =
            Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP)).unwrap();
        socket.set_reuse_port(true).unwrap();
        socket.bind(&at.into()).unwrap();
        socket.listen(backlog).unwrap();
        socket.into()
    }

    fn listen_marked(at: impl Into<SocketAddr>) -> TcpListener {
        let listener = start_listener(at, 4096);
        mark_listener(listener.as_fd()).unwrap();
        listener
    }

    /// Connects to a listener. Returns the client's end and the accepted end.
    fn connect_client(to: (Ipv4Addr, u16), listener: &TcpListener) -> (TcpStream, TcpStream) {
        (
            TcpStream::connect(to).unwrap(),
            listener.accept().unwrap().0,
        )
    }

    /// Waits until a value equals `expected`. The kernel changes the value some time after the
    /// test's calls.
    fn wait_until_equal<T: PartialEq + std::fmt::Debug>(actual: impl Fn() -> T, expected: &T) {
        let begun = Instant::now();
        while actual() != *expected && begun.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        assert_eq!(actual(), *expected);
    }

    /// Repeats a request that timed out because the machine was busy.
    fn retry_on_timeout<T>(ask: impl Fn() -> io::Result<T>) -> T {
        loop {
            match ask() {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {}
                answer => return answer.unwrap(),
            }
        }
    }

    #[test]
    fn without_sock_diag_listeners_are_read_from_proc() {
        let here = start_listener((Ipv4Addr::LOCALHOST, 0), 1);
        let at = here.local_addr().unwrap();
        let instead_of = |error| {
            fall_back_to_proc(Err(io::Error::from_raw_os_error(error)), |local| {
                *local == at
            })
        };
        for error in [libc::EPROTONOSUPPORT, libc::ENOENT] {
            assert_eq!(
                instead_of(error).unwrap(),
                retry_on_timeout(|| listeners_at(at))
            );
        }
        assert_eq!(
            instead_of(libc::EPERM).unwrap_err().raw_os_error(),
            Some(libc::EPERM)
        );
    }

    #[test]
    fn connections_are_ended_except_those_of_a_marked_listener() {
        run_in_namespace(|| {
            let (ours, theirs) = (
                listen_marked((NODE, PORT)),
                start_listener((NEIGHBOUR, PORT), 128),
            );
            let elsewhere = start_listener((NODE, PORT + 1), 128);
            let kept = [
                connect_client((NODE, PORT), &ours),
                connect_client((NODE, PORT + 1), &elsewhere),
            ];
            let mut ended = connect_client((NEIGHBOUR, PORT), &theirs);
            assert_eq!(retry_on_timeout(|| destroy_unmarked_connections(PORT)), 1);
            for end in [&mut ended.0, &mut ended.1] {
                assert!(end.read(&mut [0]).is_err());
            }
            for (mut client, mut end) in kept {
                client.write_all(b"k").unwrap();
                assert_eq!(end.read(&mut [0]).unwrap(), 1);
            }
            // Port 0 in a request means any port. `destroy_unmarked_connections` must end no
            // connection for it.
            assert_eq!(retry_on_timeout(|| destroy_unmarked_connections(0)), 0);
        });
    }

    /// Makes so many connections that the reply needs several datagrams, with some 200 connections
    /// each.
    #[test]
    fn a_reply_of_many_datagrams_is_counted_right() {
        run_in_namespace(|| {
            let _ours = listen_marked((NODE, PORT));
            let _theirs = start_listener((NEIGHBOUR, PORT), 4096);
            // Each client is closed at once, so that the test needs few descriptors. Its connection
            // stays in the accept queue, in CLOSE_WAIT.
            for to in [NODE, NODE, NEIGHBOUR] {
                (0..1000).for_each(|_| drop(TcpStream::connect((to, PORT)).unwrap()));
            }
            let are = |marked| move |socket: &&ListedSocket| socket.is_marked == Some(marked);
            let counted = || {
                let all = retry_on_timeout(|| {
                    list_sockets(libc::AF_INET, PORT, &[CLOSE_WAIT_STATE], REPLY_TIMEOUT)
                });
                (
                    all.iter().filter(are(true)).count(),
                    all.iter().filter(are(false)).count(),
                )
            };
            wait_until_equal(counted, &(2000, 1000));
        });
    }

    /// The limit ends the wait, however many sockets are listed and however often the list is
    /// repeated.
    #[test]
    fn a_reply_is_not_waited_for_beyond_the_limit() {
        let late =
            list_sockets_once(libc::AF_INET, PORT, &[LISTEN_STATE], Instant::now()).map(drop);
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    fn encode_message(kind: i32, flags: i32, body: &[u8]) -> Vec<u8> {
        let length = (HEADER_LENGTH + body.len()) as u32;
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(
            [kind as u16, flags as u16]
                .map(u16::to_ne_bytes)
                .as_flattened(),
        );
        message.extend([0; 8]);
        message.extend(body);
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    fn encode_attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut attribute = [4 + value.len() as u16, kind]
            .map(u16::to_ne_bytes)
            .as_flattened()
            .to_vec();
        attribute.extend(value);
        attribute.resize(attribute.len().next_multiple_of(4), 0);
        attribute
    }

    /// Encodes a socket in the form of the kernel's reply, between attributes that nobody
    /// requested.
    fn encode_entry(entry: &ListedSocket) -> Vec<u8> {
        let mut body = vec![0; 72];
        body[4..6].copy_from_slice(&entry.local.port().to_be_bytes());
        let (family, ip) = match entry.local.ip() {
            IpAddr::V4(ip) => (libc::AF_INET, ip.octets().to_vec()),
            IpAddr::V6(ip) => (libc::AF_INET6, ip.octets().to_vec()),
        };
        body[0] = family as u8;
        body[8..8 + ip.len()].copy_from_slice(&ip);
        let figures = [entry.uid, entry.inode];
        body[64..].copy_from_slice(figures.map(u32::to_ne_bytes).as_flattened());
        body.extend(encode_attribute(8, &[3]));
        if let Some(is_marked) = entry.is_marked {
            let others = !BIND_ADDRESS_NO_PORT;
            body.extend(encode_attribute(
                INET_DIAG_SOCKOPT,
                &[
                    0xff,
                    others | if is_marked { BIND_ADDRESS_NO_PORT } else { 0 },
                ],
            ));
        }
        body.extend(encode_attribute(21, &[0xff; 8]));
        encode_message(SOCK_DIAG_BY_FAMILY.into(), libc::NLM_F_MULTI, &body)
    }

    fn any_entry() -> impl Strategy<Value = ListedSocket> {
        any::<(IpAddr, u16, [u32; 2], Option<bool>)>().prop_map(
            |(ip, port, [uid, inode], is_marked)| {
                let listed = ListedSocket {
                    id: [0; ID_LENGTH],
                    local: SocketAddr::new(ip, port),
                    uid,
                    inode,
                    is_marked,
                };
                let mut id = [0; ID_LENGTH];
                id.copy_from_slice(&encode_entry(&listed)[HEADER_LENGTH + 4..][..ID_LENGTH]);
                ListedSocket { id, ..listed }
            },
        )
    }

    fn encode_answer(sockets: &[ListedSocket]) -> Vec<u8> {
        let mut answer: Vec<u8> = sockets.iter().flat_map(encode_entry).collect();
        answer.extend(encode_message(
            libc::NLMSG_DONE,
            libc::NLM_F_MULTI,
            &0_i32.to_ne_bytes(),
        ));
        answer
    }

    proptest! {
        #[test]
        fn every_listed_socket_is_parsed(sockets in prop::collection::vec(any_entry(), 0..20)) {
            prop_assert_eq!(parse_datagram(&encode_answer(&sockets)).unwrap(), ReplyPart { sockets, is_last: true, is_inconsistent: false });
        }

        /// If a reply is cut, parsing succeeds only if the cut is between two messages.
        #[test]
        fn a_truncated_reply_is_refused(sockets in prop::collection::vec(any_entry(), 1..4), cut: prop::sample::Index) {
            let answer = encode_answer(&sockets);
            let cut = cut.index(answer.len());
            let ends = sockets.iter().scan(0, |end, entry| { *end += encode_entry(entry).len(); Some(*end) });
            match parse_datagram(&answer[..cut]) {
                Ok(part) => prop_assert!(!part.is_last && ends.into_iter().any(|end| end == cut)),
                Err(error) => prop_assert_eq!(error.kind(), io::ErrorKind::InvalidData),
            }
        }

        #[test]
        fn a_corrupted_reply_does_not_panic(
            sockets in prop::collection::vec(any_entry(), 0..4),
            changes in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..8),
        ) {
            let mut answer = encode_answer(&sockets);
            for (at, byte) in changes {
                let at = at.index(answer.len());
                answer[at] = byte;
            }
            let _ = parse_datagram(&answer);
        }
    }

    #[test]
    fn a_refusal_of_the_kernel_is_returned_as_its_error() {
        let errno = |kind, code: i32| {
            parse_datagram(&encode_message(kind, 0, &code.to_ne_bytes()))
                .map_err(|error| error.raw_os_error())
        };
        for kind in [libc::NLMSG_ERROR, libc::NLMSG_DONE] {
            assert_eq!(errno(kind, -libc::ENOENT), Err(Some(libc::ENOENT)));
            assert_eq!(errno(kind, i32::MIN), Err(None));
            assert_eq!(errno(kind, 1), Err(None));
        }
        assert_eq!(errno(libc::NLMSG_ERROR, 0), Err(None));
        assert_eq!(errno(libc::NLMSG_OVERRUN, 0), Err(None));
        assert!(parse_datagram(&[]).is_err(), "an empty reply was accepted");
        let changed = encode_message(libc::NLMSG_DONE, libc::NLM_F_DUMP_INTR, &[0; 4]);
        assert_eq!(
            parse_datagram(&changed).unwrap(),
            ReplyPart {
                sockets: vec![],
                is_last: true,
                is_inconsistent: true
            }
        );
    }
}
