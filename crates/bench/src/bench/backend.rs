//! The backend, a server to which every relay under test (peer) connects. One thread sends answers
//! of the requested length.
//!
//! The backend is a process of its own, so that its memory and CPU time are separate. The process
//! prints its address, and ends with its parent.

use super::wire::{ENDLESS_LENGTH, HEADER_BYTES, Header, MAX_CHUNK, Pattern, garbled_error};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

/// Number of connections to accept in a row, before other events get a turn.
const MAX_ACCEPTS: usize = 64;

/// Number that means the listener in an event of epoll. Other events have the number of a
/// connection's descriptor.
const LISTENER_EVENT: u64 = u64::MAX;

/// Serves until the process is killed.
pub(crate) fn run(address: SocketAddr) -> io::Result<()> {
    berth_os::process::raise_file_limit()?;
    let listener = open_listener(address)?;
    println!("{}", listener.local_addr()?);
    let mut backend = Backend {
        epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        connections: Vec::new(),
        shared: SharedState {
            buffer: vec![0; MAX_CHUNK],
            pattern: Pattern::new(),
            endless: 0,
        },
    };
    backend.epoll.add(
        &listener,
        EpollEvent::new(EpollFlags::EPOLLIN, LISTENER_EVENT),
    )?;
    let mut events = vec![EpollEvent::empty(); 1024];
    loop {
        let count = match backend.epoll.wait(&mut events, EpollTimeout::NONE) {
            Err(nix::Error::EINTR) => continue,
            result => result?,
        };
        for event in &events[..count] {
            match event.data() {
                LISTENER_EVENT => backend.accept(&listener)?,
                fd => backend.serve(fd as usize),
            }
        }
    }
}

fn open_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(i32::from(u16::MAX))?;
    Ok(socket.into())
}

struct Backend {
    epoll: Epoll,
    /// Indexed by descriptor.
    connections: Vec<Option<Connection>>,
    shared: SharedState,
}

/// State that all connections of the backend share.
struct SharedState {
    buffer: Vec<u8>,
    pattern: Pattern,
    /// Bytes received of requests without an end, on all connections together.
    endless: u64,
}

struct Connection {
    stream: TcpStream,
    header: [u8; HEADER_BYTES],
    /// Number of bytes of the current request that have been received.
    received: u64,
    /// The answer that is being sent. `None` while the request is being received.
    answer: Option<Answer>,
}

struct Answer {
    header: [u8; HEADER_BYTES],
    length: u64,
    sent: u64,
}

impl Backend {
    fn accept(&mut self, listener: &TcpListener) -> io::Result<()> {
        for _ in 0..MAX_ACCEPTS {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let fd = stream.as_raw_fd() as usize;
            self.epoll
                .add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, fd as u64))?;
            if self.connections.len() <= fd {
                self.connections.resize_with(fd + 1, || None);
            }
            self.connections[fd] = Some(Connection {
                stream,
                header: [0; HEADER_BYTES],
                received: 0,
                answer: None,
            });
        }
        Ok(())
    }

    fn serve(&mut self, fd: usize) {
        // The connection may have been closed after the kernel reported this event.
        let Some(connection) = &mut self.connections[fd] else {
            return;
        };
        let was_writing = connection.answer.is_some();
        let served = match connection.serve(&mut self.shared) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            served => served,
        };
        let waited = served.and_then(|()| {
            match connection.answer {
                Some(_) if !was_writing => self.epoll.modify(
                    &connection.stream,
                    &mut make_event(EpollFlags::EPOLLOUT, fd),
                ),
                None if was_writing => self
                    .epoll
                    .modify(&connection.stream, &mut make_event(EpollFlags::EPOLLIN, fd)),
                _ => Ok(()),
            }
            .map_err(Into::into)
        });
        if let Err(error) = waited {
            // Any other error means that the client has closed the connection, for example when it
            // has seen enough of an answer without an end.
            if error.kind() == ErrorKind::InvalidData {
                eprintln!("bench backend: {error}");
            }
            self.connections[fd] = None;
        }
    }
}

fn make_event(flags: EpollFlags, fd: usize) -> EpollEvent {
    EpollEvent::new(flags, fd as u64)
}

impl Connection {
    fn serve(&mut self, shared: &mut SharedState) -> io::Result<()> {
        if self.answer.is_some() {
            self.write(&shared.pattern)
        } else {
            self.read(shared)
        }
    }

    fn read(&mut self, shared: &mut SharedState) -> io::Result<()> {
        let count = self.stream.read(&mut shared.buffer)?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let bytes = &shared.buffer[..count];
        let start = self.received as usize;
        let of_header = HEADER_BYTES.saturating_sub(start).min(count);
        if of_header > 0 {
            self.header[start..start + of_header].copy_from_slice(&bytes[..of_header]);
        }
        shared
            .pattern
            .check_bytes(&bytes[of_header..], self.received + of_header as u64)?;
        self.received += count as u64;
        if self.received < HEADER_BYTES as u64 {
            return Ok(());
        }
        let header = Header::decode(&self.header)?;
        if header.request == ENDLESS_LENGTH {
            shared.endless += count as u64;
        }
        if self.received < header.request {
            return Ok(());
        }
        if self.received > header.request {
            return Err(garbled_error());
        }
        let header = if header.count {
            Header {
                request: shared.endless,
                ..header
            }
        } else {
            header
        };
        self.received = 0;
        self.answer = Some(Answer {
            header: header.encode(),
            length: header.answer,
            sent: 0,
        });
        self.write(&shared.pattern)
    }

    /// Writes a part of the answer with one call: otherwise an answer without an end would keep
    /// other clients waiting.
    fn write(&mut self, pattern: &Pattern) -> io::Result<()> {
        let Some(answer) = &mut self.answer else {
            return Ok(());
        };
        let left = answer.length - answer.sent;
        let written = if answer.sent < HEADER_BYTES as u64 {
            let mut first = [0; 4096];
            let length = left.min(first.len() as u64) as usize;
            first[..length].copy_from_slice(&pattern.bytes_from(answer.sent, left)[..length]);
            let of_header = &answer.header[answer.sent as usize..];
            first[..of_header.len()].copy_from_slice(of_header);
            self.stream.write(&first[..length])?
        } else {
            self.stream.write(pattern.bytes_from(answer.sent, left))?
        };
        answer.sent += written as u64;
        if answer.sent == answer.length {
            self.answer = None;
        }
        Ok(())
    }
}
