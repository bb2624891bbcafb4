//! Blocking sockets with time limits, and assertions about sockets.

use super::PATIENCE;
use berth_os::proc_net;
use socket2::{Domain, SockRef, Socket, Type};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{BufRead as _, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Source address of probes. Clients never have this address.
pub(crate) const PROBES: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Most descriptors that the tests of one process have open. The soft limit of an ordinary user is
/// 1,024.
const DESCRIPTORS: u64 = 8_192;

/// Returns an address in 127.0.0.0/8 that no other test uses now. Every test that opens sockets
/// calls this function, so the first call raises the limit of descriptors.
pub(crate) fn fresh_ip() -> Ipv4Addr {
    static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| {
        let limit = berth_os::process::raise_file_limit().unwrap();
        if limit < DESCRIPTORS {
            let line = format!(
                "the hard limit of open files is {limit}, and these tests need {DESCRIPTORS}: some may fail with \"Too many open files\"; \
                 raise that limit (ulimit -Hn, LimitNOFILE=, /etc/security/limits.conf)\n"
            );
            // Not `eprintln!`: the harness hides its output when a test passes.
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
        AtomicU32::new(RandomState::new().hash_one(1) as u32)
    });
    let [_, b, c, d] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    Ipv4Addr::new(127, 1 + b % 250, 1 + c % 250, 1 + d % 250)
}

/// Returns an address with an unused port. A socket is bound to find the port, but never listens:
/// another test's thread may fork meanwhile, and the child would hold a listener until its exec,
/// which could accept a client.
pub(crate) fn free_address() -> SocketAddr {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket
        .bind(&SocketAddr::from((fresh_ip(), 0)).into())
        .unwrap();
    // A child that another thread forks may hold a duplicate of the socket, which must not block
    // the port.
    socket
        .set_reuse_address(true)
        .and_then(|()| socket.set_reuse_port(true))
        .unwrap();
    socket.local_addr().unwrap().as_socket().unwrap()
}

/// A listener in the place of an apiserver.
pub(crate) struct Backend(pub(crate) TcpListener);

impl Backend {
    pub(crate) fn new() -> Self {
        Self::at((fresh_ip(), 0).into())
    }

    pub(crate) fn at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address)
            .unwrap_or_else(|error| panic!("cannot listen on {address}: {error}"));
        // The timeout holds for accept, too.
        SockRef::from(&listener)
            .set_read_timeout(Some(PATIENCE))
            .unwrap();
        Self(listener)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.local_addr().unwrap()
    }

    /// Returns the next connection that is no probe.
    #[track_caller]
    pub(crate) fn accept(&self) -> TcpStream {
        loop {
            match self.0.accept() {
                Ok((stream, peer)) if peer.ip() != PROBES => return with_limits(stream),
                Ok(_) => {}
                Err(error) => panic!("no connection came to the backend: {error}"),
            }
        }
    }

    /// Returns the connections that wait now, without probes.
    pub(crate) fn waiting(&self) -> Vec<TcpStream> {
        self.0.set_nonblocking(true).unwrap();
        let mut found = Vec::new();
        while let Ok((stream, peer)) = self.0.accept() {
            if peer.ip() != PROBES {
                stream.set_nonblocking(false).unwrap();
                found.push(with_limits(stream));
            }
        }
        self.0.set_nonblocking(false).unwrap();
        found
    }

    /// Serves every connection on a separate thread, until the process ends.
    pub(crate) fn serve(self, how: impl Fn(TcpStream) + Clone + Send + 'static) -> SocketAddr {
        let address = self.address();
        std::thread::spawn(move || {
            for stream in self.0.incoming().flatten() {
                let how = how.clone();
                std::thread::spawn(move || how(with_limits(stream)));
            }
        });
        address
    }
}

/// Sends back every byte that arrives, until the stream ends.
pub(crate) fn echo(mut stream: TcpStream) {
    let mut buffer = [0; 16 * 1024];
    while let Ok(length @ 1..) = stream.read(&mut buffer) {
        if stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
    let _ = stream.shutdown(Shutdown::Write);
}

fn with_limits(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// Connects from a source address.
#[track_caller]
pub(crate) fn connect_from(source: IpAddr, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(source, 0).into()).unwrap();
    socket
        .connect_timeout(&to.into(), PATIENCE)
        .unwrap_or_else(|error| panic!("cannot connect to {to}: {error}"));
    with_limits(socket.into())
}

/// Connects as a client, from an address that no probe has.
#[track_caller]
pub(crate) fn connect(to: SocketAddr) -> TcpStream {
    match to {
        SocketAddr::V4(_) => connect_from(fresh_ip().into(), to),
        SocketAddr::V6(_) => with_limits(TcpStream::connect_timeout(&to, PATIENCE).unwrap()),
    }
}

/// Closes the connection with a reset.
pub(crate) fn reset_stream(stream: TcpStream) {
    SockRef::from(&stream)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
    drop(stream);
}

/// Reads exactly `length` bytes.
#[track_caller]
pub(crate) fn read(stream: &mut TcpStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut at = 0;
    while at < length {
        match stream.read(&mut bytes[at..]) {
            Ok(0) => panic!("the end after {at} of {length} bytes"),
            Ok(more) => at += more,
            Err(error) => panic!("after {at} of {length} bytes: {error}"),
        }
    }
    bytes
}

/// Sends bytes to an echo server, and reads them back.
#[track_caller]
pub(crate) fn ping(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    assert!(read(stream, bytes.len()) == bytes, "not what was sent");
}

/// Checks that a new client gets an answer.
#[track_caller]
pub(crate) fn expect_service(by: SocketAddr) {
    served_client(by);
}

/// Returns a client that an echo server has answered, and that stays.
#[track_caller]
pub(crate) fn served_client(by: SocketAddr) -> TcpStream {
    let mut client = connect(by);
    ping(&mut client, &client_hello(64));
    client
}

/// Returns a client that an echo server has answered, and that stays. The client is relayed even if
/// sockets are passed, since its ClientHello is larger than a shim's buffer for replays.
#[track_caller]
pub(crate) fn relayed_client(by: SocketAddr) -> TcpStream {
    let mut client = connect(by);
    ping(&mut client, &client_hello(60_000)[..20_000]);
    client
}

/// Returns a client that has sent its ClientHello and has no answer yet.
#[track_caller]
pub(crate) fn client_with_hello(to: SocketAddr) -> TcpStream {
    let mut client = connect(to);
    client.write_all(&client_hello(64)).unwrap();
    client
}

/// Checks that the stream ends with a reset.
#[track_caller]
pub(crate) fn expect_reset(stream: &mut TcpStream) {
    match stream.read(&mut [0; 64]) {
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("no reset but {other:?}"),
    }
}

/// Connects as a client and expects a reset, at connect or later.
#[track_caller]
pub(crate) fn expect_no_service(to: SocketAddr) {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
    socket
        .bind(&SocketAddr::new(fresh_ip().into(), 0).into())
        .unwrap();
    match socket.connect_timeout(&to.into(), PATIENCE) {
        Ok(()) => expect_reset(&mut with_limits(socket.into())),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("no reset but {error}"),
    }
}

/// Checks that the stream ends without further bytes.
#[track_caller]
pub(crate) fn expect_end(stream: &mut TcpStream) {
    match stream.read(&mut [0; 64]) {
        Ok(0) => {}
        other => panic!("not the end but {other:?}"),
    }
}

/// Checks that no byte arrives for a moment.
#[track_caller]
pub(crate) fn expect_silence(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(super::MOMENT)).unwrap();
    match stream.read(&mut [0; 64]) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
        other => panic!("no silence but {other:?}"),
    }
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
}

/// Waits until the socket has an error (a reset), without reading.
#[track_caller]
pub(crate) fn expect_error(stream: &TcpStream) {
    super::eventually("an error on the socket", || stream.take_error().unwrap());
}

/// Writes until the socket's buffers are full: for 300 ms nothing more could be written.
pub(crate) fn fill_buffers(stream: &mut TcpStream) {
    stream
        .set_write_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut pattern = Pattern::default();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let at = pattern.0;
        pattern.fill(&mut buffer);
        match stream.write(&buffer) {
            Ok(written) => pattern.0 = at + written as u64,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                return;
            }
            Err(error) => panic!("cannot write: {error}"),
        }
    }
}

/// Returns bytes that look like the first message of a TLS client: a ClientHello in one record (RFC
/// 8446, sections 4 and 5.1).
pub(crate) fn client_hello(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    Pattern::default().fill(&mut bytes);
    bytes[0] = 0x16;
    bytes[3..5].copy_from_slice(&((length - 5) as u16).to_be_bytes());
    bytes[5..9].copy_from_slice(&(1 << 24 | (length - 9) as u32).to_be_bytes());
    bytes
}

/// Bytes that show the position in a stream: the pattern repeats only after a large prime number.
#[derive(Default)]
pub(crate) struct Pattern(pub(crate) u64);

impl Pattern {
    fn block() -> &'static [u8] {
        static BLOCK: LazyLock<Vec<u8>> = LazyLock::new(|| {
            let mut state = 1_u32;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            };
            (0..1_000_003).map(|_| next()).collect()
        });
        &BLOCK
    }

    /// Fills the buffer with the next bytes.
    pub(crate) fn fill(&mut self, buffer: &mut [u8]) {
        let block = Self::block();
        let mut at = 0;
        while at < buffer.len() {
            let from = (self.0 % block.len() as u64) as usize;
            let length = (block.len() - from).min(buffer.len() - at);
            buffer[at..at + length].copy_from_slice(&block[from..from + length]);
            at += length;
            self.0 += length as u64;
        }
    }

    /// Sends the next `length` bytes.
    #[track_caller]
    pub(crate) fn send(&mut self, stream: &mut TcpStream, length: u64) {
        let mut buffer = vec![0; 64 * 1024];
        let end = self.0 + length;
        while self.0 < end {
            let part = (end - self.0).min(buffer.len() as u64) as usize;
            self.fill(&mut buffer[..part]);
            stream
                .write_all(&buffer[..part])
                .unwrap_or_else(|error| panic!("at {} of {end}: {error}", self.0));
        }
    }

    /// Receives `length` bytes and compares each one.
    #[track_caller]
    pub(crate) fn receive(&mut self, stream: &mut TcpStream, length: u64) {
        let (mut buffer, mut expected) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
        let end = self.0 + length;
        while self.0 < end {
            let part = (end - self.0).min(buffer.len() as u64) as usize;
            let at = self.0;
            match stream.read(&mut buffer[..part]) {
                Ok(0) => panic!("the end after {at} of {end} bytes"),
                Ok(more) => {
                    self.fill(&mut expected[..more]);
                    assert!(
                        buffer[..more] == expected[..more],
                        "another byte between {at} and {}",
                        self.0
                    );
                }
                Err(error) => panic!("after {at} of {end} bytes: {error}"),
            }
        }
    }

    /// Receives all bytes before a reset, compares each byte, and returns the number of bytes.
    #[track_caller]
    pub(crate) fn receive_until_reset(&mut self, stream: &mut TcpStream) -> u64 {
        let (mut buffer, mut expected) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
        loop {
            match stream.read(&mut buffer) {
                Ok(more @ 1..) => {
                    self.fill(&mut expected[..more]);
                    assert!(
                        buffer[..more] == expected[..more],
                        "another byte before {}",
                        self.0
                    );
                }
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return self.0,
                other => panic!("no reset but {other:?} after {} bytes", self.0),
            }
        }
    }
}

/// Returns the sockets of this network namespace with a local address: the state, and the number of
/// unread bytes (for a listener, of connections to accept).
fn list_sockets(local: SocketAddr) -> Vec<(u8, u64)> {
    let text = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let parse = |line: &str| {
        let entry = proc_net::parse_line(line).filter(|entry| entry.local == local)?;
        let queues = line.split_ascii_whitespace().nth(4)?;
        Some((
            entry.state,
            u64::from_str_radix(queues.split(':').nth(1)?, 16).ok()?,
        ))
    };
    text.lines().filter_map(parse).collect()
}

/// Returns how many connections wait at a listener to be accepted.
pub(crate) fn count_queued(listener: SocketAddr) -> u64 {
    list_sockets(listener)
        .iter()
        .filter(|(state, _)| *state == 0x0a)
        .map(|(_, waiting)| waiting)
        .sum()
}

/// Returns how many connections wait at the listener with an inode. `None` if the socket does not
/// listen.
pub(crate) fn queued_at(inode: u64) -> Option<u64> {
    let table = BufReader::new(File::open("/proc/thread-self/net/tcp").unwrap());
    let entries = table
        .lines()
        .map(Result::unwrap)
        .filter_map(|line| Some((proc_net::parse_line(&line)?, line)));
    // Listeners come first in the file. Reading further takes a second where 100,000 sockets are in
    // TIME_WAIT.
    let mut listeners = entries.take_while(|(entry, _)| entry.state == proc_net::LISTEN_STATE);
    let (_, line) = listeners.find(|(entry, _)| entry.inode == inode)?;
    let queues = line.split_ascii_whitespace().nth(4)?;
    u64::from_str_radix(queues.split(':').nth(1)?, 16).ok()
}

/// Returns how many unread bytes the established connections of a local address have.
pub(crate) fn count_unread(local: SocketAddr) -> u64 {
    list_sockets(local)
        .iter()
        .filter(|(state, _)| *state == 0x01)
        .map(|(_, waiting)| waiting)
        .sum()
}

/// Returns the inodes of the sockets that listen on an address.
pub(crate) fn find_listening(address: SocketAddr) -> Vec<u64> {
    berth_os::sock_diag::listeners_at(address)
        .unwrap()
        .into_iter()
        .map(|entry| entry.inode)
        .collect()
}
