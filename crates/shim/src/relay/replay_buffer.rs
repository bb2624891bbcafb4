//! The client's bytes before an instance's first byte: they can be replayed to the next instance.
//!
//! Where clients may be passed to an instance as sockets, the bytes are only peeked at, and stay in
//! the socket until the client is relayed.

use super::copy::with_buffer;
use super::{PendingConnection, client_hello};
use berth_os::socket;
use std::io;
use std::net::TcpStream as StdTcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::task::{self, Poll, ready};
use tokio::io::{AsyncRead, Interest, ReadBuf};
use tokio::net::TcpStream;

/// Maximum number of bytes of a client that are kept. A client that sends more cannot be replayed.
/// A ClientHello has 0.3 to 2 KB.
const MAX_KEPT: usize = 16 * 1024;

/// The bytes that a client has sent before an instance's first byte.
pub(super) struct ReplayBuffer {
    pub(super) bytes: Vec<u8>,
    /// True if further bytes are peeked at, not read.
    peeks: bool,
    /// The number of bytes, counted from the last, that are still in the socket.
    unread: usize,
    /// True if the client has closed its side.
    pub(super) finished: bool,
    /// True if a sibling passed the client on. This shim does not pass the client again.
    pub(super) passed: bool,
    /// True if the client waits, and no instance has the client's bytes.
    held: bool,
    pending: Option<PendingConnection>,
}

impl ReplayBuffer {
    /// Collects the bytes `sent` to a sibling that passed the client on, and the bytes that can be
    /// read or peeked at once. The read comes before the runtime waits for the socket: the
    /// ClientHello has mostly arrived, and can be sent with the connect.
    pub(super) fn read(
        client: &StdTcpStream,
        sent: Option<Vec<u8>>,
        pending: Option<PendingConnection>,
        peeks: bool,
    ) -> io::Result<Self> {
        let (passed, bytes) = (sent.is_some(), sent.unwrap_or_default());
        // Bytes that a sibling has read are not in the socket.
        let peeks = peeks && bytes.is_empty();
        let mut kept = Self {
            bytes,
            peeks,
            unread: 0,
            finished: false,
            passed,
            held: false,
            pending,
        };
        kept.read_available_bytes(client.as_fd())?;
        Ok(kept)
    }

    /// Reads or peeks at the bytes in the socket, whatever readiness the runtime knows.
    pub(super) fn read_available_bytes(&mut self, client: BorrowedFd<'_>) -> io::Result<()> {
        if self.is_full() || self.finished {
            return Ok(());
        }
        let read = if self.peeks {
            self.peek(client)
        } else {
            with_buffer(|buffer| self.read_some(client, buffer))
        };
        match read {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
        self.update_pending();
        Ok(())
    }

    fn read_some(&mut self, client: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<()> {
        let read = socket::read(client, &mut buffer[..MAX_KEPT - self.bytes.len()])?;
        self.bytes.extend_from_slice(&buffer[..read]);
        self.finished = read == 0;
        Ok(())
    }

    /// Peeks at new bytes.
    ///
    /// # Errors
    /// `EWOULDBLOCK` if no bytes are new.
    fn peek(&mut self, client: BorrowedFd<'_>) -> io::Result<()> {
        with_buffer(|buffer| {
            let most = MAX_KEPT - (self.bytes.len() - self.unread);
            let new = match socket::peek(client, &mut buffer[..most])? {
                peeked if peeked > self.unread => &buffer[self.unread..peeked],
                0 => &[],
                // The known bytes are still unread and hide later events, so the socket's state is
                // checked.
                _ if socket::was_reset_or_timed_out(&client) => {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
                _ if socket::peer_has_ended(&client) => &[],
                _ => return Err(io::ErrorKind::WouldBlock.into()),
            };
            self.finished = new.is_empty();
            self.unread += new.len();
            self.bytes.extend_from_slice(new);
            Ok(())
        })
    }

    /// True if the client can be passed on as a socket: nothing was read.
    pub(super) fn is_intact(&self) -> bool {
        self.peeks && self.unread == self.bytes.len()
    }

    pub(super) fn is_peeking(&self) -> bool {
        self.peeks
    }

    /// Returns the bytes that are no longer in the socket.
    pub(super) fn consumed_bytes(&self) -> &[u8] {
        &self.bytes[..self.bytes.len() - self.unread]
    }

    /// Records that another process has read the first `read` bytes.
    pub(super) fn set_consumed(&mut self, read: usize) {
        self.unread = self.bytes.len() - read;
    }

    /// Reads the peeked bytes: the client is relayed from here on.
    ///
    /// # Errors
    /// The client is gone.
    pub(super) fn consume(&mut self, client: BorrowedFd<'_>) -> io::Result<()> {
        self.peeks = false;
        while self.unread > 0 {
            match with_buffer(|buffer| socket::read(client, &mut buffer[..self.unread]))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => self.unread -= read,
            }
        }
        Ok(())
    }

    /// Counts the client as pending or not. An instance is stopped when no client is pending. Not
    /// pending are clients that sent nothing (a port check), that closed their side, or that are
    /// held because no instance is ready.
    pub(super) fn update_pending(&mut self) {
        let is = !self.bytes.is_empty() && !self.finished && !self.held;
        if let Some(pending) = &mut self.pending {
            pending.set_pending(is);
        }
    }

    pub(super) fn set_held(&mut self, held: bool) {
        self.held = held;
        self.update_pending();
    }

    /// True if bytes that an instance already got can be replayed to another instance.
    pub(super) fn is_replayable(&self) -> bool {
        self.bytes
            .first()
            .is_none_or(|first| *first == client_hello::HANDSHAKE_TYPE)
    }

    /// True if the client gave up: the client closed its side before the TLS handshake.
    pub(super) fn is_given_up(&self) -> bool {
        self.finished && self.is_replayable()
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes.len() >= MAX_KEPT
    }

    /// True if the client's first message is complete: an instance answers it.
    pub(super) fn has_whole_hello(&self) -> bool {
        client_hello::is_whole_hello(&self.bytes)
    }

    /// True if the bytes are a complete ClientHello.
    pub(super) fn is_client_hello(&self) -> bool {
        self.is_replayable() && self.has_whole_hello()
    }

    /// Reads or peeks at the client's next bytes.
    pub(super) fn poll_fill(
        &mut self,
        cx: &mut task::Context<'_>,
        client: &mut TcpStream,
    ) -> Poll<io::Result<()>> {
        while self.peeks {
            ready!(client.poll_read_ready(cx))?;
            match client.try_io(Interest::READABLE, || self.peek(client.as_fd())) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                peeked => {
                    self.update_pending();
                    return Poll::Ready(peeked);
                }
            }
        }
        with_buffer(|buffer| {
            let mut read = ReadBuf::new(&mut buffer[..MAX_KEPT - self.bytes.len()]);
            ready!(Pin::new(client).poll_read(cx, &mut read))?;
            self.finished = read.filled().is_empty();
            self.bytes.extend_from_slice(read.filled());
            self.update_pending();
            Poll::Ready(Ok(()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener};

    const HELLO: [u8; 9] = [client_hello::HANDSHAKE_TYPE, 3, 1, 0, 4, 2, 0, 0, 0];

    /// Returns a client that has sent some bytes, the runtime's socket, a duplicate as another
    /// process would have it, and the buffer.
    fn connect_peeked_client(sent: &[u8]) -> (StdTcpStream, TcpStream, StdTcpStream, ReplayBuffer) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = StdTcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (client, _) = listener.accept().unwrap();
        client.set_nonblocking(true).unwrap();
        sender.write_all(sent).unwrap();
        let kept = ReplayBuffer::read(&client, None, None, true).unwrap();
        assert_eq!(kept.bytes, sent);
        let duplicate = client.try_clone().unwrap();
        (
            sender,
            TcpStream::from_std(client).unwrap(),
            duplicate,
            kept,
        )
    }

    async fn fill_buffer(kept: &mut ReplayBuffer, client: &mut TcpStream) -> io::Result<()> {
        poll_fn(|cx| kept.poll_fill(cx, client)).await
    }

    #[tokio::test]
    async fn peeked_bytes_stay_in_the_socket_until_the_client_is_relayed() {
        let (mut sender, mut client, mut duplicate, mut kept) = connect_peeked_client(&HELLO[..4]);
        let early = poll_fn(|cx| Poll::Ready(kept.poll_fill(cx, &mut client))).await;
        // The event of the first bytes has been used, and no more bytes have come.
        assert!(early.is_pending());
        sender.write_all(&HELLO[4..]).unwrap();
        fill_buffer(&mut kept, &mut client).await.unwrap();
        assert!(kept.bytes == HELLO && kept.is_intact() && kept.consumed_bytes().is_empty());
        // An instance reads some bytes, and ends.
        duplicate.read_exact(&mut [0; 3]).unwrap();
        kept.set_consumed(3);
        assert!(!kept.is_intact() && kept.consumed_bytes() == &HELLO[..3]);
        sender.write_all(b"more").unwrap();
        fill_buffer(&mut kept, &mut client).await.unwrap();
        kept.consume(client.as_fd()).unwrap();
        assert_eq!(kept.consumed_bytes(), [&HELLO[..], b"more"].concat());
        sender.write_all(b"!").unwrap();
        fill_buffer(&mut kept, &mut client).await.unwrap();
        assert!(kept.bytes.ends_with(b"more!") && !kept.finished);
        sender.shutdown(Shutdown::Write).unwrap();
        fill_buffer(&mut kept, &mut client).await.unwrap();
        assert!(kept.finished);
    }

    #[tokio::test]
    async fn an_end_is_seen_behind_bytes_that_are_not_read() {
        let (sender, mut client, _duplicate, mut kept) = connect_peeked_client(&HELLO);
        sender.shutdown(Shutdown::Write).unwrap();
        fill_buffer(&mut kept, &mut client).await.unwrap();
        assert!(kept.finished && kept.is_given_up());
        let (sender, mut client, _duplicate, mut kept) = connect_peeked_client(&HELLO);
        socket::reset_on_close(&sender);
        drop(sender);
        assert_eq!(
            fill_buffer(&mut kept, &mut client)
                .await
                .unwrap_err()
                .kind(),
            io::ErrorKind::ConnectionReset
        );
    }
}
