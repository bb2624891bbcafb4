//! What a client said before any instance answered: it can be said again to the next one.

use super::copy::with_buffer;
use super::{Pending, client_hello};
use std::io::{self, Read};
use std::net::TcpStream as StdTcpStream;
use std::pin::Pin;
use std::task::{self, Poll, ready};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;

/// Most bytes of a client that are kept for a replay; one that says more goes on without. A ClientHello is 0.3 to 2 KB.
const KEPT: usize = 16 * 1024;

/// What a client sent so far.
pub(super) struct ReplayBuffer {
    pub(super) bytes: Vec<u8>,
    /// The client is done.
    pub(super) finished: bool,
    /// A sibling passed the client on: it is not passed again.
    pub(super) passed: bool,
    /// There is no instance to ask.
    held: bool,
    pending: Option<Pending>,
}

impl ReplayBuffer {
    /// What was `said` to a sibling that passed the client on, and what else is there at once. Read before the
    /// runtime waits for the socket: a TLS client's ClientHello is mostly there, and can go with the connect.
    pub(super) fn read(mut client: &StdTcpStream, said: Option<Vec<u8>>, pending: Option<Pending>) -> io::Result<Self> {
        let passed = said.is_some();
        let mut kept = Self { bytes: said.unwrap_or_default(), finished: false, passed, held: false, pending };
        if !kept.is_full() {
            let read: io::Result<usize> = with_buffer(|buffer| {
                let read = client.read(&mut buffer[..KEPT - kept.bytes.len()])?;
                kept.bytes.extend_from_slice(&buffer[..read]);
                Ok(read)
            });
            match read {
                Ok(read) => kept.finished = read == 0,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        kept.count();
        Ok(kept)
    }

    /// Whoever stops an instance waits for those that it owes an answer: not for who said nothing (a port check), who
    /// wants nothing any more, or who is held because there is no instance.
    pub(super) fn count(&mut self) {
        let is = !self.bytes.is_empty() && !self.finished && !self.held;
        if let Some(pending) = &mut self.pending {
            pending.set(is);
        }
    }

    pub(super) fn set_held(&mut self, held: bool) {
        self.held = held;
        self.count();
    }

    /// Whether what an instance already got can be replayed to another.
    pub(super) fn is_replayable(&self) -> bool {
        self.bytes.first().is_none_or(|first| *first == client_hello::HANDSHAKE)
    }

    /// Whether the client wants nothing any more: it was done before the TLS handshake.
    pub(super) fn is_given_up(&self) -> bool {
        self.finished && self.is_replayable()
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes.len() >= KEPT
    }

    /// Whether what the client says first is there: an instance answers it.
    pub(super) fn is_whole(&self) -> bool {
        client_hello::is_whole(&self.bytes)
    }

    /// Whether it is all of a ClientHello.
    pub(super) fn is_client_hello(&self) -> bool {
        self.is_replayable() && self.is_whole()
    }

    /// Takes in what the client sends next.
    pub(super) fn poll_fill(&mut self, cx: &mut task::Context<'_>, client: &mut TcpStream) -> Poll<io::Result<()>> {
        with_buffer(|buffer| {
            let mut read = ReadBuf::new(&mut buffer[..KEPT - self.bytes.len()]);
            ready!(Pin::new(client).poll_read(cx, &mut read))?;
            self.finished = read.filled().is_empty();
            self.bytes.extend_from_slice(read.filled());
            self.count();
            Poll::Ready(Ok(()))
        })
    }
}
