//! The client: closed-loop load from one thread.
//!
//! Each connection has one outstanding request, and the next is sent when the answer is complete.
//! Counting starts after a warm-up and ends while the load goes on. The first error ends a
//! measurement, because a figure with losses cannot be compared.

use super::wire::{CHUNK, ENDLESS, HEADER, Header, Pattern, garbled_error};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Bytes of a request on a kept connection, and of its answer: a small GET over HTTP/2 and TLS.
pub(super) const PING: usize = 256;

/// Bytes of the single request of a short connection, and of its answer.
const SHORT: usize = 64;

/// Number of source addresses, with 28,000 ports each, so that connections in TIME_WAIT cannot use
/// up the ports.
const SOURCES: u8 = 64;

/// The last byte of the first source address.
const FIRST_SOURCE: u8 = 101;

/// The network of the clients.
const CLIENTS: [u8; 3] = [127, 0, 1];

/// Number of concurrent round trips while no speed is measured.
const GENTLE: usize = 64;

/// Milliseconds without any event after which a measurement has failed.
const SILENCE: u16 = 5_000;

/// Longest wait for a connect outside of a measurement.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The durations of a measurement's warm-up and of its window, in which answers are counted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    pub(super) warm_up: Duration,
    pub(super) window: Duration,
}

/// CPU seconds of the peer so far. `None` without a relay.
pub(super) type CpuSeconds<'a> = &'a dyn Fn() -> Result<Option<f64>>;

/// The duration of a measurement.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) seconds: f64,
    /// CPU seconds of the peer.
    pub(super) cpu: Option<f64>,
}

/// The result of a measurement: answers on kept connections, or short connections with an answer
/// each.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) span: Span,
    /// The time of each answer in nanoseconds, sorted.
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

/// The window of a measurement: its begin and end, with the peer's CPU time.
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

    /// True while answers are counted.
    fn is_open(&self) -> bool {
        self.began.is_some()
    }

    /// To be called after each event. Returns true when the window has just opened.
    fn opens(&mut self, now: Instant) -> Result<bool> {
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

    fn close(&self) -> Result<Span> {
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

    /// Sends a request of `length` bytes for an answer of `answer` bytes.
    fn ask(
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
        let mut small = [0; PING];
        small[..length].copy_from_slice(pattern.from(0, length as u64));
        small[..HEADER].copy_from_slice(&header.encode());
        // A request fits easily into the empty socket buffer.
        if self.stream.write(&small[..length])? != length {
            return Err(io::Error::new(
                ErrorKind::WriteZero,
                "the kernel took a part of a request",
            ));
        }
        (self.number, self.sent, self.received, self.expected) = (number, now, 0, answer);
        Ok(())
    }

    /// Reads once, and returns the number of bytes.
    fn receive(&mut self, pattern: &Pattern, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(buffer)?;
        if count == 0 {
            return Err(io::Error::new(
                ErrorKind::UnexpectedEof,
                "closed before the answer was complete",
            ));
        }
        let mut bytes = &buffer[..count];
        if self.received == 0 {
            let header: &[u8; HEADER] = bytes.first_chunk().ok_or_else(garbled_error)?;
            let header = Header::decode(header)?;
            if header.number != self.number || header.answer != self.expected {
                return Err(garbled_error());
            }
            bytes = &bytes[HEADER..];
        }
        pattern.check(bytes, self.received + (count - bytes.len()) as u64)?;
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

/// The event loop of all loads.
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
            buffer: vec![0; CHUNK],
            pattern: Pattern::new(),
        })
    }

    /// Waits for events, and returns their number.
    fn wait(&mut self) -> Result<usize> {
        loop {
            match self.epoll.wait(&mut self.events, SILENCE) {
                Err(nix::Error::EINTR) => {}
                Ok(0) => bail!("nothing happened for {SILENCE} ms"),
                result => return Ok(result?),
            }
        }
    }
}

/// Kept connections, each after at least one round trip.
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
        pool.grow(count)?;
        Ok(pool)
    }

    /// Opens connections until there are `count`.
    pub(super) fn grow(&mut self, count: usize) -> Result<()> {
        while self.connections.len() < count {
            let from = self.connections.len();
            for at in from..count.min(from + GENTLE) {
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
            self.round_trips(from..self.connections.len(), PING as u64)?;
        }
        Ok(())
    }

    /// Requests an answer of `length` bytes on each connection.
    pub(super) fn request_answers(&mut self, length: u64) -> Result<()> {
        self.round_trips(0..self.connections.len(), length)
    }

    fn round_trips(&mut self, mut ahead: Range<usize>, answer: u64) -> Result<()> {
        let mut outstanding = 0;
        loop {
            for at in ahead.by_ref().take(GENTLE - outstanding) {
                self.connections[at].ask(&self.reactor.pattern, PING, answer, Instant::now())?;
                outstanding += 1;
            }
            if outstanding == 0 {
                return Ok(());
            }
            for event in 0..self.reactor.wait()? {
                let connection = &mut self.connections[self.reactor.events[event].data() as usize];
                connection.receive(&self.reactor.pattern, &mut self.reactor.buffer)?;
                outstanding -= usize::from(connection.is_answered());
            }
        }
    }

    /// Sends requests on all connections at once.
    pub(super) fn ping(&mut self, pace: Pace, cpu: CpuSeconds<'_>) -> Result<Answers> {
        let mut latencies = Vec::with_capacity(1 << 20);
        for connection in &mut self.connections {
            connection.ask(&self.reactor.pattern, PING, PING as u64, Instant::now())?;
        }
        let mut outstanding = self.connections.len();
        let mut window = Window::new(pace, cpu);
        let mut span = None;
        while outstanding > 0 {
            for event in 0..self.reactor.wait()? {
                let connection = &mut self.connections[self.reactor.events[event].data() as usize];
                connection.receive(&self.reactor.pattern, &mut self.reactor.buffer)?;
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
                connection.ask(&self.reactor.pattern, PING, PING as u64, now)?;
            }
            let now = Instant::now();
            window.opens(now)?;
            if span.is_none() && window.is_over(now) {
                span = Some(window.close()?);
            }
        }
        latencies.sort_unstable();
        Ok(Answers {
            span: span.context("no connections")?,
            latencies,
        })
    }

    /// Requests a large answer on each connection, and reads `a_tick` bytes a tick. The connections
    /// cannot be used afterwards.
    pub(super) fn read_slowly(
        &mut self,
        answer: u64,
        tick: Duration,
        a_tick: usize,
        until: Duration,
    ) -> Result<()> {
        for connection in &mut self.connections {
            connection.ask(&self.reactor.pattern, PING, answer, Instant::now())?;
        }
        let (start, mut next) = (Instant::now(), Instant::now() + tick);
        while start.elapsed() < until {
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            next += tick;
            for connection in &mut self.connections {
                match connection.receive(&self.reactor.pattern, &mut self.reactor.buffer[..a_tick])
                {
                    Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Sends bulk data in one direction on all connections at once, and returns the bytes that
    /// arrived. The connections cannot be used afterwards.
    pub(super) fn bulk(
        mut self,
        way: Direction,
        backend: SocketAddr,
        pace: Pace,
        cpu: CpuSeconds<'_>,
    ) -> Result<(u64, Span)> {
        let mut counter = Counter::new(backend)?;
        let mut offsets = vec![PING as u64; self.connections.len()];
        for (at, connection) in self.connections.iter_mut().enumerate() {
            if way == Direction::Down {
                connection.ask(&self.reactor.pattern, PING, ENDLESS, Instant::now())?;
                continue;
            }
            let header = Header {
                count: false,
                number: 0,
                request: ENDLESS,
                answer: ENDLESS,
            };
            let message = self.reactor.pattern.message(&header, PING);
            ensure!(
                connection.stream.write(&message)? == PING,
                "the kernel took a part of a request"
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
                    received +=
                        connection.receive(&self.reactor.pattern, &mut self.reactor.buffer)? as u64;
                    continue;
                }
                match connection
                    .stream
                    .write(self.reactor.pattern.from(offsets[at], ENDLESS))
                {
                    Ok(count) => offsets[at] += count as u64,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error.into()),
                }
            }
            let now = Instant::now();
            if !window.is_over(now) && !window.opens(now)? {
                continue;
            }
            // Only bytes that have arrived are counted. In the upward direction the measured time
            // includes asking the backend for the count.
            let so_far = if way == Direction::Down {
                received
            } else {
                counter.count()?
            };
            if window.is_over(now) {
                return Ok((so_far - before, window.close()?));
            }
            before = so_far;
        }
    }
}

/// A direct connection for asking the backend how many bytes of endless requests have arrived.
struct Counter(TcpStream);

impl Counter {
    fn new(backend: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(backend)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_millis(SILENCE.into())))?;
        Ok(Self(stream))
    }

    fn count(&mut self) -> Result<u64> {
        let mut bytes = Header {
            count: true,
            number: 0,
            request: HEADER as u64,
            answer: HEADER as u64,
        }
        .encode();
        self.0.write_all(&bytes)?;
        self.0.read_exact(&mut bytes)?;
        Ok(Header::decode(&bytes)?.request)
    }
}

/// Short connections: connect, request, answer. With a pace, each client closes its
/// connection and connects again until the window ends. Without a pace, all clients connect at once
/// and stay, and the span ends with the last answer.
pub(super) fn short_connections(
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
        window.opens(Instant::now())?;
    }
    let mut connections = Vec::with_capacity(clients);
    for at in 0..clients {
        connections.push(start_short(target, at, &mut turn, &reactor)?);
    }
    loop {
        for event in 0..reactor.wait()? {
            let at = reactor.events[event].data() as usize;
            let connection = &mut connections[at];
            if !is_answered(connection, at, &mut reactor)? {
                continue;
            }
            if window.is_open() {
                latencies.push(connection.sent.elapsed().as_nanos() as u32);
            }
            if pace.is_some() {
                *connection = start_short(target, at, &mut turn, &reactor)?;
            }
        }
        let now = Instant::now();
        window.opens(now)?;
        if window.is_over(now) && (pace.is_some() || latencies.len() == clients) {
            latencies.sort_unstable();
            return Ok(Answers {
                span: window.close()?,
                latencies,
            });
        }
    }
}

/// Handles an event on a short connection: sends the request after the TCP handshake, and later
/// reads. Returns true when the answer is complete.
fn is_answered(connection: &mut Connection, at: usize, reactor: &mut Reactor) -> Result<bool> {
    if connection.expected == 0 {
        // The TCP handshake is complete or has failed. After a failure the write fails too.
        let began = connection.sent;
        connection
            .ask(&reactor.pattern, SHORT, SHORT as u64, began)
            .context("connect")?;
        reactor.epoll.modify(
            &connection.stream,
            &mut EpollEvent::new(EpollFlags::EPOLLIN, at as u64),
        )?;
        return Ok(false);
    }
    connection.receive(&reactor.pattern, &mut reactor.buffer)?;
    Ok(connection.is_answered())
}

/// Starts a short connection and its time.
fn start_short(
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
            bail!("this machine ran out of ports: the figure would not be the peer's")
        }
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => {
            return Err(error).context("connect");
        }
        _ => {}
    }
    let mut connection = Connection::new(socket.into());
    // On loopback the TCP handshake is complete by now, unless the accept queue is full.
    let flags = match connection.ask(&reactor.pattern, SHORT, SHORT as u64, began) {
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

/// A socket that will connect from one of the clients' addresses.
fn open_socket(turn: usize) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    // Otherwise bind would reserve the port for all destinations, and ports would run out.
    berth_os::socket::set_bind_address_no_port(socket.as_fd())?;
    let [a, b, c] = CLIENTS;
    let source = Ipv4Addr::new(a, b, c, FIRST_SOURCE + (turn % usize::from(SOURCES)) as u8);
    socket.bind(&SocketAddrV4::new(source, 0).into())?;
    Ok(socket)
}

/// Makes one round trip on a connection of its own.
pub(super) fn round_trip(target: SocketAddr) -> io::Result<()> {
    let socket = open_socket(0)?;
    socket.connect(&target.into())?;
    let mut connection = Connection::new(socket.into());
    connection
        .stream
        .set_read_timeout(Some(Duration::from_secs(1)))?;
    let pattern = Pattern::new();
    connection.ask(&pattern, PING, PING as u64, Instant::now())?;
    while !connection.is_answered() {
        connection.receive(&pattern, &mut [0; PING])?;
    }
    Ok(())
}
