//! What a client sent before an instance answered: it can be replayed to the next one.

use super::copy::with_buffer;
use super::{Pending, client_hello};
use std::io::{self, Read};
use std::net::TcpStream as StdTcpStream;
use std::pin::Pin;
use std::task::{self, Poll, ready};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;

/// Most bytes of a client that are kept for a replay; beyond that there is none. A ClientHello is 0.3 to 2 KB.
const KEPT: usize = 16 * 1024;

/// What a client sent so far.
pub(super) struct ReplayBuffer {
    pub(super) bytes: Vec<u8>,
    /// The client has closed its side.
    pub(super) finished: bool,
    /// A sibling passed the client on: it is not passed again.
    pub(super) passed: bool,
    /// It waits: no instance has its bytes.
    held: bool,
    pending: Option<Pending>,
}

impl ReplayBuffer {
    /// What was `sent` to a sibling that passed the client on, and what can be read at once. Before the
    /// runtime waits for the socket: a TLS client's ClientHello is mostly there, and can be sent with the connect.
    pub(super) fn read(mut client: &StdTcpStream, sent: Option<Vec<u8>>, pending: Option<Pending>) -> io::Result<Self> {
        let passed = sent.is_some();
        let mut kept = Self { bytes: sent.unwrap_or_default(), finished: false, passed, held: false, pending };
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

    /// An instance is stopped when every client has its answer. That leaves out clients that sent nothing (a port check), that
    /// closed their side, or that are held because there is no instance.
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

    /// Whether bytes that an instance already got can be replayed to another.
    pub(super) fn is_replayable(&self) -> bool {
        self.bytes.first().is_none_or(|first| *first == client_hello::HANDSHAKE)
    }

    /// Whether the client gave up: it closed its side before the TLS handshake.
    pub(super) fn is_given_up(&self) -> bool {
        self.finished && self.is_replayable()
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes.len() >= KEPT
    }

    /// Whether the client's first message is complete: an instance answers it.
    pub(super) fn is_whole(&self) -> bool {
        client_hello::is_whole(&self.bytes)
    }

    /// Whether it is all of a ClientHello.
    pub(super) fn is_client_hello(&self) -> bool {
        self.is_replayable() && self.is_whole()
    }

    /// Reads what the client sends next.
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
