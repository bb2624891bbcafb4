//! Bytes both ways between two sockets, until both directions ended or one end was reset.
//!
//! One future holds both directions, so that a connection is one task, and no buffer: bytes are read into a
//! buffer that the thread's connections share and written at once. Only what the other end does not take yet is
//! kept, as a `Rest` of its exact size; until it is written, nothing more is read (backpressure). A large transfer
//! bypasses the buffer, through a pipe of the kernel ([`bulk`]).
//!
//! When the future ends, closing both sockets shows each end what the other did: after
//! [`Outcome::Closed`] each gets its FIN, if it has not got it yet; after any other both are set to reset at close.

use super::Bytes;
use super::bulk::{self, Bulk, LARGE, MOST, Moved};
use super::outcome::Outcome;
use berth_node::terms::shorten;
use berth_os::socket::{is_gone, is_writable, reset_on_close, room};
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

/// Size of the buffer that the connections of a thread share. Larger ones were not faster; with
/// 64 KiB and less, bulk slows down.
const SHARED: usize = 128 * 1024;

/// Most that is read without checking how much the destination takes, and kept if it takes nothing: most messages are
/// smaller.
const SMALL: usize = 64 * 1024;

/// Least that is read for a destination that took less.
const LEAST: usize = 4096;

/// Bytes that a direction may move before other connections of the thread get their turn. A small read
/// counts as a full buffer; a move through a pipe is mostly a turn of its own.
const TURN: usize = 4 * SHARED;

/// How long nothing moves before an end that is not read is checked for a reset. Most are not read for a
/// moment only, and the check costs a system call.
const STILL: Duration = Duration::from_secs(1);

/// How long the kernel counts as short of memory for sockets after it took much less than there was room for. Then
/// less is read at once, because what is not taken is kept here.
const SHORTAGE: Duration = Duration::from_secs(10);

thread_local! {
    static SHORT: Cell<Option<Instant>> = const { Cell::new(None) };
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; SHARED].into_boxed_slice());
}

/// Runs `f` with the thread's shared buffer, whose content has no meaning before or after.
pub(super) fn with_buffer<T>(f: impl FnOnce(&mut [u8]) -> T) -> T {
    BUFFER.with(|buffer| f(&mut buffer.borrow_mut()))
}

/// What was read and not written yet.
#[derive(Debug)]
struct Rest {
    bytes: Box<[u8]>,
    written: usize,
}

impl Rest {
    fn of(bytes: Vec<u8>) -> Option<Self> {
        (!bytes.is_empty()).then(|| Self {
            bytes: bytes.into(),
            written: 0,
        })
    }

    fn is_gone(&self) -> bool {
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
    /// The source has sent FIN, and so has this shim to the destination.
    Finished,
    /// The destination takes no more. What it has sent is still read, as a client without
    /// a relay would: an answer that came before a reset can be read before it.
    Broken,
}

#[derive(Debug)]
struct Direction {
    phase: Phase,
    /// The destination was reset, as a write found. The kernel reports it once: when the other
    /// direction has read what is left, it reads what looks like an end (FIN) and is none.
    reset: bool,
    rest: Option<Rest>,
    /// The destination has no room, so nothing is read for it.
    full: bool,
    /// The latest read was a large one.
    large: bool,
    /// What the destination took at once recently, doubled after each time that it took everything: where the kernel
    /// is short of memory, it takes less than it has room for.
    took: usize,
    bulk: Bulk,
}

/// The source was reset, or keepalive found it gone.
struct SourceGone;

impl Direction {
    fn new(pending: Vec<u8>) -> Self {
        let (rest, bulk) = (Rest::of(pending), Bulk::default());
        Self {
            phase: Phase::Open,
            reset: false,
            rest,
            full: false,
            large: false,
            took: MOST,
            bulk,
        }
    }

    /// Whether the destination takes nothing, so that the source is not read.
    fn is_stuck(&self) -> bool {
        self.full || self.rest.is_some()
    }

    /// The destination takes no more. A reset that came after its FIN gives EPIPE: then the end that
    /// is read is one.
    fn break_off(&mut self, error: &io::Error) {
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
        while turn < TURN {
            if self.phase != Phase::Open {
                return Poll::Ready(Ok(()));
            }
            if let Some(rest) = &mut self.rest {
                match ready!(rest.poll_write(cx, destination)) {
                    Ok(written) => {
                        count(written);
                        if rest.is_gone() {
                            self.rest = None;
                        }
                    }
                    Err(error) => self.break_off(&error),
                }
                continue;
            }
            let most = if self.large || self.bulk.is() {
                self.full = true;
                let room = ready!(poll_room(cx, destination));
                self.full = false;
                room.min(self.took)
                    .min(if is_short() { SMALL } else { MOST })
            } else {
                SMALL
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
                // If the destination has finished too, both sockets are about to be closed, which sends the FIN.
                let shut = if back.phase == Phase::Finished {
                    Ok(())
                } else {
                    ready!(Pin::new(&mut *destination).poll_shutdown(cx))
                };
                match shut {
                    Ok(()) => self.phase = Phase::Finished,
                    Err(error) => self.break_off(&error),
                }
            }
            self.large = read >= most.min(SMALL);
            match &self.rest {
                Some(rest) => {
                    self.took = (read - rest.bytes.len()).max(LEAST);
                    if rest.bytes.len() >= SMALL {
                        SHORT.set(Some(Instant::now()));
                    }
                }
                None if read == most => self.took = self.took.saturating_mul(2).min(MOST),
                None => {}
            }
            self.bulk.observe(read);
            turn += read.max(SHARED);
        }
        // The waker would run this task before epoll's events for others.
        pin!(yield_now()).poll(cx).map(Ok)
    }

    /// Reads once, at most `most`, and writes as much of it as the destination takes at once; the rest is kept. Gives
    /// the number of bytes read, 0 at the source's end; an error is the source's.
    fn poll_move(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut TcpStream,
        destination: &mut TcpStream,
        buffer: &mut [u8],
        most: usize,
        count: &mut impl FnMut(usize),
    ) -> Poll<io::Result<usize>> {
        if self.bulk.is()
            && most >= LARGE
            && let Some(moved) = bulk::poll_move(cx, source, destination, most)
        {
            let Moved {
                read,
                written,
                rest,
            } = ready!(moved)?;
            count(written);
            match rest {
                Ok(rest) => self.rest = Rest::of(rest),
                Err(error) => self.break_off(&error),
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
                self.rest = Rest::of(bytes[written..].to_vec());
            }
            Poll::Ready(Err(error)) => self.break_off(&error),
            Poll::Pending => self.rest = Rest::of(bytes.to_vec()),
        }
        Poll::Ready(Ok(bytes.len()))
    }
}

fn is_short() -> bool {
    let since = SHORT.get().filter(|since| since.elapsed() < SHORTAGE);
    SHORT.set(since);
    since.is_some()
}

/// How much a destination takes at once; waits while that is too little to be worth a read. So what a slow
/// reader does not take stays at its source, and is not kept here.
fn poll_room(cx: &mut Context<'_>, destination: &TcpStream) -> Poll<usize> {
    loop {
        // First: a write waits for readiness as the runtime knows it, however much room there is since.
        let ready = ready!(destination.poll_write_ready(cx));
        let room = room(destination);
        if room > 0 || ready.is_err() {
            return Poll::Ready(room.max(1));
        }
        // After this check the kernel reports when there is more room.
        let check = || {
            is_writable(destination)
                .then_some(())
                .ok_or_else(|| io::ErrorKind::WouldBlock.into())
        };
        if destination.try_io(Interest::WRITABLE, check).is_ok() {
            return Poll::Ready(SMALL);
        }
    }
}

/// Watches an end that is not read, because it has sent FIN or what it sent is not taken, for a
/// reset. It polls: a descriptor to wait on would be one more than a connection is counted with.
#[derive(Default)]
pub(super) struct ResetWatch {
    timer: Option<Pin<Box<Sleep>>>,
    moved: bool,
}

impl ResetWatch {
    /// Bytes moved: the last ones of an end that is gone may still be on their way.
    fn moved(&mut self) {
        self.moved = true;
    }

    /// Ready when the end is known to be gone, and nothing moved for a while.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, end: &TcpStream) -> Poll<()> {
        loop {
            ready!(self.poll_still(cx));
            if is_gone(end) {
                return Poll::Ready(());
            }
        }
    }

    /// Ready when nothing moved for a while.
    fn poll_still(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let still = shorten(STILL);
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

/// Copies until the end. `up` and `down` are bytes that were read before and not yet written.
pub(super) async fn copy(
    client: &mut TcpStream,
    backend: &mut TcpStream,
    up: Vec<u8>,
    down: Vec<u8>,
    bytes: &mut Bytes<'_>,
) -> Outcome {
    let (mut up, mut down) = (Direction::new(up), Direction::new(down));
    let mut watch = ResetWatch::default();
    let end = poll_fn(|cx| {
        with_buffer(|buffer| {
            let mut moved = false;
            let upward = up.poll(cx, client, backend, &down, buffer, |n| {
                moved = true;
                bytes.up(n);
            });
            if let Poll::Ready(Err(SourceGone)) = upward {
                return Poll::Ready(Outcome::ClientReset);
            }
            let downward = down.poll(cx, backend, client, &up, buffer, |n| {
                moved = true;
                bytes.down(n);
            });
            if let Poll::Ready(Err(SourceGone)) = downward {
                return Poll::Ready(Outcome::BackendReset);
            }
            if moved {
                watch.moved();
            }
            match (up.phase, down.phase) {
                (Phase::Finished, Phase::Finished) => Poll::Ready(Outcome::Closed),
                // Everything that the broken instance had sent was read; likewise for the client.
                (Phase::Broken, Phase::Finished | Phase::Broken) => {
                    Poll::Ready(Outcome::BackendReset)
                }
                (Phase::Finished, Phase::Broken) => Poll::Ready(Outcome::ClientReset),
                // The client is gone, and its last bytes may wait for an instance that takes nothing.
                (Phase::Open, Phase::Broken) => watch.poll_still(cx).map(|()| Outcome::ClientReset),
                // Half closed: one end sends no more, and may be gone. A client may be slow to read the
                // last bytes of an instance that is gone.
                (Phase::Finished | Phase::Broken, Phase::Open) => {
                    watch.poll(cx, client).map(|()| Outcome::ClientReset)
                }
                // The instance takes nothing, so the client is not read.
                (Phase::Open, _) if up.is_stuck() => {
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

    /// What is read for room that no write can use yet is kept here, and counts as a shortage of the kernel's.
    #[tokio::test]
    async fn room_that_the_runtime_was_not_told_of_is_none() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut reader = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        stream.writable().await.unwrap();
        let mut filled = 0;
        while let Ok(written) = stream.try_write(&[0; SHARED]) {
            filled += written;
        }
        reader.read_exact(&mut vec![0; filled]).unwrap();
        assert!(room(&stream) > 0);
        // No await since the write that was refused: the runtime does not know of the room yet.
        let asked = poll_fn(|cx| Poll::Ready(poll_room(cx, &stream))).await;
        assert!(asked.is_pending());
        assert!(poll_fn(|cx| poll_room(cx, &stream)).await > 0);
    }
}
