//! Copies bytes both ways between two sockets, until both directions ended or one end was reset.
//!
//! A connection is one task with one future for both directions, and holds no buffer: bytes are
//! read into a buffer that the thread's connections share, and written at once. Bytes that the
//! destination does not take are kept as a `UnwrittenBytes` of their exact size. Until the rest is
//! written, nothing more is read (backpressure). A large transfer bypasses the buffer, through a
//! pipe of the kernel ([`bulk`]).
//!
//! When the future ends, closing both sockets shows each end how the other ended. After
//! [`Outcome::Closed`] each end gets its FIN, if not sent before. After any other outcome both
//! sockets are set to reset at close.

use super::ByteCounter;
use super::bulk::{self, Bulk, LARGE_MOVE, MAX_MOVE, MoveResult};
use super::outcome::Outcome;
use berth_node::terms::shorten_wait;
use berth_os::socket::{is_writable, reset_on_close, was_reset_or_timed_out, writable_bytes};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::{Instant, Sleep};

/// Size of the buffer that the connections of a thread share. Larger buffers were not faster. With
/// 64 KiB and less, large transfers slow down.
const BUFFER_SIZE: usize = 128 * 1024;

/// Maximum number of bytes to read without checking the destination's room. All of them are kept if
/// the destination takes nothing. Most messages are smaller.
const SMALL_READ: usize = 64 * 1024;

/// The least number of bytes to read for a destination that has just taken less.
const MIN_READ: usize = 4096;

/// Bytes that a direction may move before other connections of the thread get their turn. A small
/// read counts as a full buffer; a move through a pipe is mostly a turn of its own.
const BYTES_PER_TURN: usize = 4 * BUFFER_SIZE;

/// After this time without a move, an end that is not read is checked for a reset. Most ends are
/// unread for a moment only, and the check costs a system call.
const QUIET_TIME: Duration = Duration::from_secs(1);

/// When the kernel has taken much less than a socket had room for, it counts as short of memory for
/// this long. Meanwhile reads are smaller, because bytes that the kernel does not take are kept
/// here.
const SHORTAGE_TIME: Duration = Duration::from_secs(10);

thread_local! {
    static SHORT_SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; BUFFER_SIZE].into_boxed_slice());
}

/// Runs `f` with the thread's shared buffer. The buffer's content has no meaning before or after.
pub(super) fn with_buffer<T>(f: impl FnOnce(&mut [u8]) -> T) -> T {
    BUFFER.with(|buffer| f(&mut buffer.borrow_mut()))
}

/// Bytes that were read and not written yet.
#[derive(Debug)]
struct UnwrittenBytes {
    bytes: Box<[u8]>,
    written: usize,
}

impl UnwrittenBytes {
    fn from_bytes(bytes: Vec<u8>) -> Option<Self> {
        (!bytes.is_empty()).then(|| Self {
            bytes: bytes.into(),
            written: 0,
        })
    }

    fn is_fully_written(&self) -> bool {
        self.written == self.bytes.len()
    }

    fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        destination: &mut TcpStream,
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(destination).poll_write(cx, &self.bytes[self.written..]))?;
        self.written += written;
        Poll::Ready(Ok(written))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The source has sent FIN, and this shim has sent FIN to the destination.
    Finished,
    /// The destination takes no more. The destination's own bytes are still read, as a client
    /// without a relay would: an answer that came before a reset can be read before the reset.
    Broken,
}

#[derive(Debug)]
struct Direction {
    phase: Phase,
    /// True if a write found that the destination was reset. The kernel reports the reset only
    /// once: the other direction reads the remaining bytes, and then an end that looks like a FIN
    /// but is none.
    reset: bool,
    rest: Option<UnwrittenBytes>,
    /// True if the destination has no room. Nothing is read for it then.
    full: bool,
    /// True if the latest read was a large one.
    large: bool,
    /// Bytes that the destination took at once recently, doubled each time that the destination
    /// took everything. A kernel short of memory takes less than the socket has room for.
    took: usize,
    bulk: Bulk,
}

/// The source was reset, or keepalive found it gone.
struct SourceGone;

impl Direction {
    fn new(pending: Vec<u8>) -> Self {
        let (rest, bulk) = (UnwrittenBytes::from_bytes(pending), Bulk::default());
        Self {
            phase: Phase::Open,
            reset: false,
            rest,
            full: false,
            large: false,
            took: MAX_MOVE,
            bulk,
        }
    }

    /// True if the destination takes nothing. The source is then not read.
    fn is_destination_full(&self) -> bool {
        self.full || self.rest.is_some()
    }

    /// Records that the destination takes no more. A reset after the destination's FIN gives EPIPE:
    /// the end that the other direction reads is then a real FIN.
    fn mark_broken(&mut self, error: &io::Error) {
        self.phase = Phase::Broken;
        self.reset = error.kind() != io::ErrorKind::BrokenPipe;
        self.rest = None;
    }

    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut TcpStream,
        destination: &mut TcpStream,
        back: &Self,
        buffer: &mut [u8],
        mut count: impl FnMut(usize),
    ) -> Poll<Result<(), SourceGone>> {
        let mut turn = 0;
        while turn < BYTES_PER_TURN {
            if self.phase != Phase::Open {
                return Poll::Ready(Ok(()));
            }
            if let Some(rest) = &mut self.rest {
                match ready!(rest.poll_write(cx, destination)) {
                    Ok(written) => {
                        count(written);
                        if rest.is_fully_written() {
                            self.rest = None;
                        }
                    }
                    Err(error) => self.mark_broken(&error),
                }
                continue;
            }
            let most = if self.large || self.bulk.is_active() {
                self.full = true;
                let room = ready!(poll_room(cx, destination));
                self.full = false;
                room.min(self.took).min(if is_memory_short() {
                    SMALL_READ
                } else {
                    MAX_MOVE
                })
            } else {
                SMALL_READ
            };
            let Ok(read) =
                ready!(self.poll_move(cx, source, destination, &mut *buffer, most, &mut count))
            else {
                return Poll::Ready(Err(SourceGone));
            };
            if read == 0 {
                if back.reset {
                    return Poll::Ready(Err(SourceGone));
                }
                // If the destination has finished too, both sockets are about to be closed, which
                // sends the FIN.
                let shut = if back.phase == Phase::Finished {
                    Ok(())
                } else {
                    ready!(Pin::new(&mut *destination).poll_shutdown(cx))
                };
                match shut {
                    Ok(()) => self.phase = Phase::Finished,
                    Err(error) => self.mark_broken(&error),
                }
            }
            self.large = read >= most.min(SMALL_READ);
            match &self.rest {
                Some(rest) => {
                    self.took = (read - rest.bytes.len()).max(MIN_READ);
                    if rest.bytes.len() >= SMALL_READ {
                        SHORT_SINCE.set(Some(Instant::now()));
                    }
                }
                None if read == most => self.took = self.took.saturating_mul(2).min(MAX_MOVE),
                None => {}
            }
            self.bulk.observe_move(read);
            turn += read.max(BUFFER_SIZE);
        }
        // yield_now() runs this task again after epoll's events for other tasks. The task's own
        // waker would run it before them.
        pin!(yield_now()).poll(cx).map(Ok)
    }

    /// Reads once, at most `most` bytes, writes as many as the destination takes at once, and keeps
    /// the rest. Returns the number of bytes read, 0 at the source's end. An error is the source's.
    fn poll_move(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut TcpStream,
        destination: &mut TcpStream,
        buffer: &mut [u8],
        most: usize,
        count: &mut impl FnMut(usize),
    ) -> Poll<io::Result<usize>> {
        if self.bulk.is_active()
            && most >= LARGE_MOVE
            && let Some(moved) = bulk::poll_move(cx, source, destination, most)
        {
            let MoveResult {
                read,
                written,
                rest,
            } = ready!(moved)?;
            count(written);
            match rest {
                Ok(rest) => self.rest = UnwrittenBytes::from_bytes(rest),
                Err(error) => self.mark_broken(&error),
            }
            return Poll::Ready(Ok(read));
        }
        let most = most.min(buffer.len());
        let mut read = ReadBuf::new(&mut buffer[..most]);
        ready!(Pin::new(source).poll_read(cx, &mut read))?;
        let bytes = read.filled();
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        match Pin::new(destination).poll_write(cx, bytes) {
            Poll::Ready(Ok(written)) => {
                count(written);
                self.rest = UnwrittenBytes::from_bytes(bytes[written..].to_vec());
            }
            Poll::Ready(Err(error)) => self.mark_broken(&error),
            Poll::Pending => self.rest = UnwrittenBytes::from_bytes(bytes.to_vec()),
        }
        Poll::Ready(Ok(bytes.len()))
    }
}

fn is_memory_short() -> bool {
    let since = SHORT_SINCE
        .get()
        .filter(|since| since.elapsed() < SHORTAGE_TIME);
    SHORT_SINCE.set(since);
    since.is_some()
}

/// Returns how much a destination takes at once. Waits while the room is too small to be worth a
/// read, so that the bytes of a slow reader stay at their source, and are not kept here.
fn poll_room(cx: &mut Context<'_>, destination: &TcpStream) -> Poll<usize> {
    loop {
        // This check comes first, because a write waits for the readiness that the runtime knows,
        // even if room has become free since.
        let ready = ready!(destination.poll_write_ready(cx));
        let room = writable_bytes(destination);
        if room > 0 || ready.is_err() {
            return Poll::Ready(room.max(1));
        }
        // After this check the kernel reports when the socket has more room.
        let check = || {
            is_writable(destination)
                .then_some(())
                .ok_or_else(|| io::ErrorKind::WouldBlock.into())
        };
        if destination.try_io(Interest::WRITABLE, check).is_ok() {
            return Poll::Ready(SMALL_READ);
        }
    }
}

/// Watches an unread end for a reset. An end is unread if it has sent FIN or its bytes are not
/// taken. The watch polls, because a descriptor to wait on would exceed the count of descriptors
/// per connection.
#[derive(Default)]
pub(super) struct ResetWatch {
    timer: Option<Pin<Box<Sleep>>>,
    moved: bool,
}

impl ResetWatch {
    /// Records that bytes moved: the last bytes of an end that is gone may still be on their way.
    fn record_move(&mut self) {
        self.moved = true;
    }

    /// Ready when the end is known to be gone, and nothing moved for a while.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, end: &TcpStream) -> Poll<()> {
        loop {
            ready!(self.poll_quiet(cx));
            if was_reset_or_timed_out(end) {
                return Poll::Ready(());
            }
        }
    }

    /// Ready when nothing moved for a while.
    fn poll_quiet(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let still = shorten_wait(QUIET_TIME);
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(still)));
        loop {
            ready!(timer.as_mut().poll(cx));
            timer.as_mut().reset(Instant::now() + still);
            if !std::mem::take(&mut self.moved) {
                return Poll::Ready(());
            }
        }
    }
}

/// Copies bytes in both directions, until both have ended or one end is reset. `up` and `down` are
/// bytes that were read before and not yet written.
pub(super) async fn copy_streams(
    client: &mut TcpStream,
    backend: &mut TcpStream,
    up: Vec<u8>,
    down: Vec<u8>,
    bytes: &mut ByteCounter<'_>,
) -> Outcome {
    let (mut up, mut down) = (Direction::new(up), Direction::new(down));
    let mut watch = ResetWatch::default();
    let end = poll_fn(|cx| {
        with_buffer(|buffer| {
            let mut moved = false;
            let upward = up.poll(cx, client, backend, &down, buffer, |n| {
                moved = true;
                bytes.count_bytes_up(n);
            });
            if let Poll::Ready(Err(SourceGone)) = upward {
                return Poll::Ready(Outcome::ClientReset);
            }
            let downward = down.poll(cx, backend, client, &up, buffer, |n| {
                moved = true;
                bytes.count_bytes_down(n);
            });
            if let Poll::Ready(Err(SourceGone)) = downward {
                return Poll::Ready(Outcome::BackendReset);
            }
            if moved {
                watch.record_move();
            }
            match (up.phase, down.phase) {
                (Phase::Finished, Phase::Finished) => Poll::Ready(Outcome::Closed),
                // All bytes that the broken instance had sent were read. In the next case, all
                // bytes of the broken client were read.
                (Phase::Broken, Phase::Finished | Phase::Broken) => {
                    Poll::Ready(Outcome::BackendReset)
                }
                (Phase::Finished, Phase::Broken) => Poll::Ready(Outcome::ClientReset),
                // The client is gone, and its last bytes may wait for an instance that takes
                // nothing.
                (Phase::Open, Phase::Broken) => watch.poll_quiet(cx).map(|()| Outcome::ClientReset),
                // Half closed: one end sends no more, and may be gone. A client may be slow to read
                // the last bytes of a dead instance.
                (Phase::Finished | Phase::Broken, Phase::Open) => {
                    watch.poll(cx, client).map(|()| Outcome::ClientReset)
                }
                // The instance takes nothing, so the client is not read.
                (Phase::Open, _) if up.is_destination_full() => {
                    watch.poll(cx, client).map(|()| Outcome::ClientReset)
                }
                (Phase::Open, Phase::Finished) => {
                    watch.poll(cx, backend).map(|()| Outcome::BackendReset)
                }
                (Phase::Open, Phase::Open) => Poll::Pending,
            }
        })
    })
    .await;
    if end != Outcome::Closed {
        reset_on_close(client);
        reset_on_close(backend);
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use tokio::net::TcpListener;

    /// The kernel reports room in the socket before the runtime lets a write use that room. Bytes
    /// that were read for such room would wait in the buffer, and would count as a shortage of the
    /// kernel.
    #[tokio::test]
    async fn room_unknown_to_the_runtime_does_not_count() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut reader = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        stream.writable().await.unwrap();
        let mut filled = 0;
        while let Ok(written) = stream.try_write(&[0; BUFFER_SIZE]) {
            filled += written;
        }
        reader.read_exact(&mut vec![0; filled]).unwrap();
        assert!(writable_bytes(&stream) > 0);
        // There was no await since the refused write, so the runtime does not know of the room yet.
        let asked = poll_fn(|cx| Poll::Ready(poll_room(cx, &stream))).await;
        assert!(asked.is_pending());
        assert!(poll_fn(|cx| poll_room(cx, &stream)).await > 0);
    }
}
