//! The client, which makes closed-loop load from one thread.
//!
//! Each connection has one outstanding request, and the next is sent when the answer is complete.
//! Counting starts after a warm-up and ends while the load goes on. The first error ends a
//! measurement, because a figure with losses cannot be compared.

use super::wire::{ENDLESS_LENGTH, HEADER_BYTES, Header, MAX_CHUNK, Pattern, garbled_error};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Length in bytes of a request on a kept connection, and of its answer: as much as a small GET
/// over HTTP/2 and TLS.
pub(super) const PING_BYTES: usize = 256;

/// Length in bytes of the request on a short connection, and of its answer. The connection has no
/// further request.
const SHORT_BYTES: usize = 64;

/// Number of source addresses of clients. Each has 28,000 ports, so connections in TIME_WAIT cannot
/// use up all ports.
const SOURCE_COUNT: u8 = 64;

/// The last byte of the first source address.
const FIRST_SOURCE: u8 = 101;

/// The first three bytes of every source address.
const CLIENT_NETWORK: [u8; 3] = [127, 0, 1];

/// Number of requests that may be outstanding at a time while no speed is measured.
const MAX_ROUND_TRIPS: usize = 64;

/// Time without any event, in milliseconds, after which a measurement has failed.
const SILENCE_MS: u16 = 5_000;

/// Time limit of a connect that belongs to no measurement.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Durations of a measurement: the warm-up, and then the window, in which answers count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    pub(super) warm_up: Duration,
    pub(super) window: Duration,
}

/// Returns the CPU seconds that the relay has used so far. `None` if there is no relay.
pub(super) type CpuSeconds<'a> = &'a dyn Fn() -> Result<Option<f64>>;

/// The real length of a measurement's window.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) seconds: f64,
    /// CPU seconds that the relay used in the window. `None` if there is no relay.
    pub(super) cpu: Option<f64>,
}

/// The result of a measurement. Each answer came on a kept connection, or on a short connection of
/// its own.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) span: Span,
    /// The time that each answer took, in nanoseconds, sorted.
    pub(super) latencies: Vec<u32>,
}

/// The direction of bulk data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// To the backend.
    Up,
    /// To the client.
    Down,
}

/// Finds out when a measurement's window opens and closes, and what CPU time the relay used in
/// between.
struct Window<'a> {
    pace: Pace,
    cpu: CpuSeconds<'a>,
    start: Instant,
    began: Option<(Instant, Option<f64>)>,
}

impl<'a> Window<'a> {
    fn new(pace: Pace, cpu: CpuSeconds<'a>) -> Self {
        Self {
            pace,
            cpu,
            start: Instant::now(),
            began: None,
        }
    }

    /// True if the warm-up is over, so that answers count.
    fn is_open(&self) -> bool {
        self.began.is_some()
    }

    /// Must be called after each event. Returns true if the window has opened at this call.
    fn try_open_window(&mut self, now: Instant) -> Result<bool> {
        let opens = self.began.is_none() && now >= self.start + self.pace.warm_up;
        if opens {
            self.began = Some((Instant::now(), (self.cpu)()?));
        }
        Ok(opens)
    }

    fn is_over(&self, now: Instant) -> bool {
        self.began
            .is_some_and(|(began, _)| now >= began + self.pace.window)
    }

    fn measure_span(&self) -> Result<Span> {
        let (began, before) = self.began.context("the window never opened")?;
        let after = (self.cpu)()?;
        let cpu = after.zip(before).map(|(after, before)| after - before);
        Ok(Span {
            seconds: began.elapsed().as_secs_f64(),
            cpu,
        })
    }
}

struct Connection {
    stream: TcpStream,
    number: u32,
    sent: Instant,
    received: u64,
    expected: u64,
}

impl Connection {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            number: 0,
            sent: Instant::now(),
            received: 0,
            expected: 0,
        }
    }

    /// Sends a request of `length` bytes, which asks for an answer of `answer` bytes.
    fn send_request(
        &mut self,
        pattern: &Pattern,
        length: usize,
        answer: u64,
        now: Instant,
    ) -> io::Result<()> {
        let number = self.number.wrapping_add(1);
        let header = Header {
            count: false,
            number,
            request: length as u64,
            answer,
        };
        let mut small = [0; PING_BYTES];
        small[..length].copy_from_slice(pattern.bytes_from(0, length as u64));
        small[..HEADER_BYTES].copy_from_slice(&header.encode());
        // A request is small and the socket's buffer is empty, so one write takes all of it.
        if self.stream.write(&small[..length])? != length {
            return Err(io::Error::new(
                ErrorKind::WriteZero,
                "the kernel accepted only a part of a request",
            ));
        }
        (self.number, self.sent, self.received, self.expected) = (number, now, 0, answer);
        Ok(())
    }

    /// Reads with one call, checks the bytes, and returns their number.
    fn receive_answer(&mut self, pattern: &Pattern, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(buffer)?;
        if count == 0 {
            return Err(io::Error::new(
                ErrorKind::UnexpectedEof,
                "the connection was closed before the answer was complete",
            ));
        }
        let mut bytes = &buffer[..count];
        if self.received == 0 {
            let header: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or_else(garbled_error)?;
            let header = Header::decode(header)?;
            if header.number != self.number || header.answer != self.expected {
                return Err(garbled_error());
            }
            bytes = &bytes[HEADER_BYTES..];
        }
        pattern.check_bytes(bytes, self.received + (count - bytes.len()) as u64)?;
        self.received += count as u64;
        if self.received > self.expected {
            Err(garbled_error())
        } else {
            Ok(count)
        }
    }

    fn is_answered(&self) -> bool {
        self.received == self.expected
    }
}

/// The epoll instance and the buffers that every kind of load uses.
struct Reactor {
    epoll: Epoll,
    events: Vec<EpollEvent>,
    buffer: Vec<u8>,
    pattern: Pattern,
}

impl Reactor {
    fn new() -> Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            events: vec![EpollEvent::empty(); 1024],
            buffer: vec![0; MAX_CHUNK],
            pattern: Pattern::new(),
        })
    }

    /// Waits for events of epoll, and returns their number.
    fn wait(&mut self) -> Result<usize> {
        loop {
            match self.epoll.wait(&mut self.events, SILENCE_MS) {
                Err(nix::Error::EINTR) => {}
                Ok(0) => bail!("nothing happened for {SILENCE_MS} ms"),
                result => return Ok(result?),
            }
        }
    }
}

/// Connections that stay open. Each has made at least one round trip.
pub(super) struct Pool {
    target: SocketAddr,
    connections: Vec<Connection>,
    reactor: Reactor,
}

impl Pool {
    pub(super) fn open(target: SocketAddr, count: usize) -> Result<Self> {
        let mut pool = Self {
            target,
            connections: Vec::new(),
            reactor: Reactor::new()?,
        };
        pool.open_up_to(count)?;
        Ok(pool)
    }

    /// Opens further connections until the pool has `count` of them. Makes a round trip on each new
    /// one.
    pub(super) fn open_up_to(&mut self, count: usize) -> Result<()> {
        while self.connections.len() < count {
            let from = self.connections.len();
            for at in from..count.min(from + MAX_ROUND_TRIPS) {
                let socket = open_socket(at).context("socket")?;
                socket
                    .connect_timeout(&self.target.into(), CONNECT_TIMEOUT)
                    .with_context(|| format!("connect number {at}"))?;
                let stream = TcpStream::from(socket);
                stream.set_nonblocking(true)?;
                self.reactor
                    .epoll
                    .add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
                self.connections.push(Connection::new(stream));
            }
            self.make_round_trips(from..self.connections.len(), PING_BYTES as u64)?;
        }
        Ok(())
    }

    /// Sends a request for an answer of `length` bytes on each connection, and waits for all
    /// answers.
    pub(super) fn request_answers(&mut self, length: u64) -> Result<()> {
        self.make_round_trips(0..self.connections.len(), length)
    }

    fn make_round_trips(&mut self, mut ahead: Range<usize>, answer: u64) -> Result<()> {
        let mut outstanding = 0;
        loop {
            for at in ahead.by_ref().take(MAX_ROUND_TRIPS - outstanding) {
                self.connections[at].send_request(
                    &self.reactor.pattern,
                    PING_BYTES,
                    answer,
                    Instant::now(),
                )?;
                outstanding += 1;
            }
            if outstanding == 0 {
                return Ok(());
            }
            for event in 0..self.reactor.wait()? {
                let connection = &mut self.connections[self.reactor.events[event].data() as usize];
                connection.receive_answer(&self.reactor.pattern, &mut self.reactor.buffer)?;
                outstanding -= usize::from(connection.is_answered());
            }
        }
    }

    /// Keeps one request outstanding on each connection, and measures the answers.
    pub(super) fn measure_ping(&mut self, pace: Pace, cpu: CpuSeconds<'_>) -> Result<Answers> {
        let mut latencies = Vec::with_capacity(1 << 20);
        for connection in &mut self.connections {
            connection.send_request(
                &self.reactor.pattern,
                PING_BYTES,
                PING_BYTES as u64,
                Instant::now(),
            )?;
        }
        let mut outstanding = self.connections.len();
        let mut window = Window::new(pace, cpu);
        let mut span = None;
        while outstanding > 0 {
            for event in 0..self.reactor.wait()? {
                let connection = &mut self.connections[self.reactor.events[event].data() as usize];
                connection.receive_answer(&self.reactor.pattern, &mut self.reactor.buffer)?;
                if !connection.is_answered() {
                    continue;
                }
                let now = Instant::now();
                if span.is_some() {
                    outstanding -= 1;
                    continue;
                }
                if window.is_open() {
                    latencies.push((now - connection.sent).as_nanos() as u32);
                }
                connection.send_request(
                    &self.reactor.pattern,
                    PING_BYTES,
                    PING_BYTES as u64,
                    now,
                )?;
            }
            let now = Instant::now();
            window.try_open_window(now)?;
            if span.is_none() && window.is_over(now) {
                span = Some(window.measure_span()?);
            }
        }
        latencies.sort_unstable();
        Ok(Answers {
            span: span.context("no connections")?,
            latencies,
        })
    }

    /// Requests a large answer on each connection, and reads it slowly: `a_tick` bytes in each
    /// tick. The connections cannot be used afterwards.
    pub(super) fn read_slowly(
        &mut self,
        answer: u64,
        tick: Duration,
        a_tick: usize,
        until: Duration,
    ) -> Result<()> {
        for connection in &mut self.connections {
            connection.send_request(&self.reactor.pattern, PING_BYTES, answer, Instant::now())?;
        }
        let (start, mut next) = (Instant::now(), Instant::now() + tick);
        while start.elapsed() < until {
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            next += tick;
            for connection in &mut self.connections {
                match connection
                    .receive_answer(&self.reactor.pattern, &mut self.reactor.buffer[..a_tick])
                {
                    Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Transfers bulk data in one direction on all connections at once. Returns the number of bytes
    /// that arrived. The connections cannot be used afterwards.
    pub(super) fn measure_bulk(
        mut self,
        way: Direction,
        backend: SocketAddr,
        pace: Pace,
        cpu: CpuSeconds<'_>,
    ) -> Result<(u64, Span)> {
        let mut counter = Counter::new(backend)?;
        let mut offsets = vec![PING_BYTES as u64; self.connections.len()];
        for (at, connection) in self.connections.iter_mut().enumerate() {
            if way == Direction::Down {
                connection.send_request(
                    &self.reactor.pattern,
                    PING_BYTES,
                    ENDLESS_LENGTH,
                    Instant::now(),
                )?;
                continue;
            }
            let header = Header {
                count: false,
                number: 0,
                request: ENDLESS_LENGTH,
                answer: ENDLESS_LENGTH,
            };
            let message = self.reactor.pattern.encode_message(&header, PING_BYTES);
            ensure!(
                connection.stream.write(&message)? == PING_BYTES,
                "the kernel accepted only a part of a request"
            );
            let mut event = EpollEvent::new(EpollFlags::EPOLLOUT, at as u64);
            self.reactor.epoll.modify(&connection.stream, &mut event)?;
        }
        let mut window = Window::new(pace, cpu);
        let (mut received, mut before) = (0, 0);
        loop {
            for event in 0..self.reactor.wait()? {
                let at = self.reactor.events[event].data() as usize;
                let connection = &mut self.connections[at];
                if way == Direction::Down {
                    received += connection
                        .receive_answer(&self.reactor.pattern, &mut self.reactor.buffer)?
                        as u64;
                    continue;
                }
                match connection
                    .stream
                    .write(self.reactor.pattern.bytes_from(offsets[at], ENDLESS_LENGTH))
                {
                    Ok(count) => offsets[at] += count as u64,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error.into()),
                }
            }
            let now = Instant::now();
            if !window.is_over(now) && !window.try_open_window(now)? {
                continue;
            }
            // Count only bytes that have arrived. If clients send, the backend has to be asked for
            // the count, and the measured time includes the request.
            let so_far = if way == Direction::Down {
                received
            } else {
                counter.fetch_byte_count()?
            };
            if window.is_over(now) {
                return Ok((so_far - before, window.measure_span()?));
            }
            before = so_far;
        }
    }
}

/// A connection to the backend, past the relay, that asks how many bytes of requests without an end
/// have arrived.
struct Counter(TcpStream);

impl Counter {
    fn new(backend: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(backend)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_millis(SILENCE_MS.into())))?;
        Ok(Self(stream))
    }

    fn fetch_byte_count(&mut self) -> Result<u64> {
        let mut bytes = Header {
            count: true,
            number: 0,
            request: HEADER_BYTES as u64,
            answer: HEADER_BYTES as u64,
        }
        .encode();
        self.0.write_all(&bytes)?;
        self.0.read_exact(&mut bytes)?;
        Ok(Header::decode(&bytes)?.request)
    }
}

/// Makes short connections: connect, send a request, read the answer. With a pace, each client
/// closes its connection and connects again until the window ends. Without a pace, all clients
/// connect at once and stay connected, and the measurement ends with the last answer.
pub(super) fn measure_short_connections(
    target: SocketAddr,
    clients: usize,
    pace: Option<Pace>,
    cpu: CpuSeconds<'_>,
) -> Result<Answers> {
    let mut reactor = Reactor::new()?;
    let mut latencies = Vec::with_capacity(1 << 18);
    let mut turn = 0;
    let mut window = Window::new(
        pace.unwrap_or(Pace {
            warm_up: Duration::ZERO,
            window: Duration::ZERO,
        }),
        cpu,
    );
    if pace.is_none() {
        window.try_open_window(Instant::now())?;
    }
    let mut connections = Vec::with_capacity(clients);
    for at in 0..clients {
        connections.push(start_short_connection(target, at, &mut turn, &reactor)?);
    }
    loop {
        for event in 0..reactor.wait()? {
            let at = reactor.events[event].data() as usize;
            let connection = &mut connections[at];
            if !handle_short_connection(connection, at, &mut reactor)? {
                continue;
            }
            if window.is_open() {
                latencies.push(connection.sent.elapsed().as_nanos() as u32);
            }
            if pace.is_some() {
                *connection = start_short_connection(target, at, &mut turn, &reactor)?;
            }
        }
        let now = Instant::now();
        window.try_open_window(now)?;
        if window.is_over(now) && (pace.is_some() || latencies.len() == clients) {
            latencies.sort_unstable();
            return Ok(Answers {
                span: window.measure_span()?,
                latencies,
            });
        }
    }
}

/// Handles an event on a short connection: after the TCP handshake sends the request, and later
/// reads the answer. Returns true when the answer is complete.
fn handle_short_connection(
    connection: &mut Connection,
    at: usize,
    reactor: &mut Reactor,
) -> Result<bool> {
    if connection.expected == 0 {
        // The TCP handshake has succeeded or failed. If it failed, sending the request fails too.
        let began = connection.sent;
        connection
            .send_request(&reactor.pattern, SHORT_BYTES, SHORT_BYTES as u64, began)
            .context("connect")?;
        reactor.epoll.modify(
            &connection.stream,
            &mut EpollEvent::new(EpollFlags::EPOLLIN, at as u64),
        )?;
        return Ok(false);
    }
    connection.receive_answer(&reactor.pattern, &mut reactor.buffer)?;
    Ok(connection.is_answered())
}

/// Starts a short connection, and the clock for its answer.
fn start_short_connection(
    target: SocketAddr,
    at: usize,
    turn: &mut usize,
    reactor: &Reactor,
) -> Result<Connection> {
    let began = Instant::now();
    *turn += 1;
    let socket = open_socket(*turn)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&target.into()) {
        Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {
            bail!("this machine ran out of ports: the figure would not measure the peer")
        }
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => {
            return Err(error).context("connect");
        }
        _ => {}
    }
    let mut connection = Connection::new(socket.into());
    // On loopback the TCP handshake is complete by now, unless the listener's accept queue is full.
    let flags =
        match connection.send_request(&reactor.pattern, SHORT_BYTES, SHORT_BYTES as u64, began) {
            Ok(()) => EpollFlags::EPOLLIN,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                connection.sent = began;
                EpollFlags::EPOLLOUT
            }
            Err(error) => return Err(error).context("connect"),
        };
    reactor
        .epoll
        .add(&connection.stream, EpollEvent::new(flags, at as u64))?;
    Ok(connection)
}

/// Makes a socket that is bound to one of the clients' source addresses.
fn open_socket(turn: usize) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    // Without this option, bind reserves the port for every destination, and ports run out.
    berth_os::socket::set_bind_address_no_port(socket.as_fd())?;
    let [a, b, c] = CLIENT_NETWORK;
    let source = Ipv4Addr::new(
        a,
        b,
        c,
        FIRST_SOURCE + (turn % usize::from(SOURCE_COUNT)) as u8,
    );
    socket.bind(&SocketAddrV4::new(source, 0).into())?;
    Ok(socket)
}

/// Makes one round trip on a new connection.
pub(super) fn make_round_trip(target: SocketAddr) -> io::Result<()> {
    let socket = open_socket(0)?;
    socket.connect(&target.into())?;
    let mut connection = Connection::new(socket.into());
    connection
        .stream
        .set_read_timeout(Some(Duration::from_secs(1)))?;
    let pattern = Pattern::new();
    connection.send_request(&pattern, PING_BYTES, PING_BYTES as u64, Instant::now())?;
    while !connection.is_answered() {
        connection.receive_answer(&pattern, &mut [0; PING_BYTES])?;
    }
    Ok(())
}
