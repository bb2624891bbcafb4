//! Large transfers: splice(2) through a pipe instead of read and write.
//!
//! The bytes stay in the kernel's pages, which is faster for moves of some 64 KiB or more. For
//! smaller moves, two copies are cheaper than two more system calls. A thread has one pipe, which
//! is empty between two moves: a move is limited to the destination's room, so a reader that stalls
//! holds no pipe. Without a pipe, bytes are copied.

use berth_os::pipe::Pipe;
use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Maximum number of bytes per move, and the size of a pipe. Larger pipes would need a privilege
/// (pipe-max-size). With pipes and moves of 256 KiB, a transfer costs a fifth to a half more CPU
/// time.
pub(super) const MAX_MOVE: usize = 1024 * 1024;

/// Maximum number of pipes of size `MOST` in this process. All pipes of a user share 64 MiB
/// (pipe-user-pages-soft), beyond which each new pipe has 8 KiB, and kube-apiserver may be the same
/// user. Further pipes have the default size.
const MAX_LARGE_PIPES: usize = 8;

/// Default size of a pipe.
const PIPE_SIZE: usize = 64 * 1024;

/// Maximum number of pipes of a thread. Each pipe has two descriptors.
pub(crate) const MAX_PIPES: u32 = 1;

/// A move of at least this many bytes is large.
pub(super) const LARGE_MOVE: usize = 64 * 1024;

/// Number of consecutive large moves after which a direction uses a pipe. An answer of less than
/// half a megabyte ends before a pipe would pay.
const BULK_MOVES: u8 = 4;

static PIPE_COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static PIPE: Cell<Option<CountedPipe>> = const { Cell::new(None) };
}

/// A pipe that is counted in [`PIPE_COUNT`] as long as it exists.
#[derive(Debug)]
struct CountedPipe(Pipe);

impl CountedPipe {
    fn new() -> io::Result<Self> {
        let pipe = Pipe::new(if PIPE_COUNT.load(Ordering::Relaxed) < MAX_LARGE_PIPES {
            MAX_MOVE
        } else {
            PIPE_SIZE
        })?;
        PIPE_COUNT.fetch_add(1, Ordering::Relaxed);
        Ok(Self(pipe))
    }
}

impl Drop for CountedPipe {
    fn drop(&mut self) {
        PIPE_COUNT.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Decides whether a direction uses a pipe, by the sizes of its latest moves.
#[derive(Debug, Default)]
pub(super) struct Bulk {
    large: u8,
}

impl Bulk {
    pub(super) fn is_active(&self) -> bool {
        self.large >= BULK_MOVES
    }

    /// Records the size of a move. A few small moves do not end the use of a pipe at once: a sender
    /// pauses now and then.
    pub(super) fn observe_move(&mut self, moved: usize) {
        self.large = match moved {
            LARGE_MOVE.. => (self.large + 1).min(2 * BULK_MOVES),
            _ if self.is_active() => self.large - 1,
            _ => 0,
        };
    }
}

#[derive(Debug)]
pub(super) struct MoveResult {
    /// Number of bytes read from the source, 0 at its end.
    pub(super) read: usize,
    pub(super) written: usize,
    /// Bytes left in the pipe that could not be written, or the write error.
    pub(super) rest: io::Result<Vec<u8>>,
}

/// Moves at most `most` bytes from the source to the destination. `None` if no pipe can be had;
/// nothing was read.
pub(super) fn poll_move(
    cx: &mut Context<'_>,
    source: &TcpStream,
    destination: &TcpStream,
    most: usize,
) -> Option<Poll<io::Result<MoveResult>>> {
    let pipe = match PIPE.take() {
        Some(pipe) => pipe,
        None => CountedPipe::new().ok()?,
    };
    let read = match poll_fill(cx, &pipe.0, source, most.min(MAX_MOVE)) {
        Poll::Ready(Err(error)) if is_splice_refusal(&error) => return None,
        Poll::Ready(Ok(read)) => read,
        // Nothing was read, so the pipe is empty and can be used again.
        Poll::Ready(Err(error)) => {
            PIPE.set(Some(pipe));
            return Some(Poll::Ready(Err(error)));
        }
        Poll::Pending => {
            PIPE.set(Some(pipe));
            return Some(Poll::Pending);
        }
    };
    let mut written = 0;
    let rest = loop {
        if written == read {
            break Ok(Vec::new());
        }
        match poll_drain(cx, &pipe.0, destination, read - written) {
            Poll::Ready(Ok(drained)) => written += drained,
            Poll::Ready(Err(error)) => break Err(error),
            Poll::Pending => break pipe.0.read(read - written),
        }
    };
    // Bytes left in a pipe must never reach another connection, so the pipe is closed.
    if rest.is_ok() {
        PIPE.set(Some(pipe));
    }
    Some(Poll::Ready(Ok(MoveResult {
        read,
        written,
        rest,
    })))
}

fn poll_fill(
    cx: &mut Context<'_>,
    pipe: &Pipe,
    source: &TcpStream,
    most: usize,
) -> Poll<io::Result<usize>> {
    loop {
        ready!(source.poll_read_ready(cx))?;
        match source.try_io(Interest::READABLE, || pipe.fill(source, most)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            filled => return Poll::Ready(filled),
        }
    }
}

fn poll_drain(
    cx: &mut Context<'_>,
    pipe: &Pipe,
    destination: &TcpStream,
    length: usize,
) -> Poll<io::Result<usize>> {
    loop {
        ready!(destination.poll_write_ready(cx))?;
        match destination.try_io(Interest::WRITABLE, || pipe.drain(destination, length)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            drained => return Poll::Ready(drained),
        }
    }
}

/// True if an error of splice(2) is about the call and not the socket, which still has all its
/// bytes: the sandbox lacks splice(2), or memory for pages is short.
fn is_splice_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::ENOSYS | libc::EPERM | libc::ENOMEM | libc::EOPNOTSUPP)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    async fn connect_pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    async fn move_bytes(source: &TcpStream, destination: &TcpStream, most: usize) -> MoveResult {
        poll_fn(|cx| poll_move(cx, source, destination, most).unwrap())
            .await
            .unwrap()
    }

    fn has_pipe() -> bool {
        let pipe = PIPE.take();
        let has = pipe.is_some();
        PIPE.set(pipe);
        has
    }

    #[test]
    fn many_large_moves_make_bulk_and_many_small_ones_end_it() {
        let mut bulk = Bulk::default();
        for moved in [
            LARGE_MOVE, LARGE_MOVE, LARGE_MOVE, 1, LARGE_MOVE, LARGE_MOVE, LARGE_MOVE,
        ] {
            bulk.observe_move(moved);
            assert!(!bulk.is_active());
        }
        for _ in 0..100 {
            bulk.observe_move(MAX_MOVE);
            assert!(bulk.is_active());
        }
        let small = (0..100).take_while(|_| {
            bulk.observe_move(1);
            bulk.is_active()
        });
        assert_eq!(small.count(), usize::from(BULK_MOVES));
    }

    #[tokio::test]
    async fn bytes_go_through_one_pipe() {
        let ((mut source, from), (to, mut destination)) =
            (connect_pair().await, connect_pair().await);
        for _ in 0..2 {
            source.write_all(b"hello").await.unwrap();
            let MoveResult {
                read,
                written,
                rest,
            } = move_bytes(&from, &to, MAX_MOVE).await;
            assert_eq!((read, written, rest.unwrap()), (5, 5, Vec::new()));
            assert!(has_pipe());
            let mut got = [0; 5];
            destination.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, b"hello");
        }
        source.write_all(b"hello").await.unwrap();
        assert_eq!(
            move_bytes(&from, &to, 2).await.read,
            2,
            "no more than it may"
        );
        assert_eq!(move_bytes(&from, &to, MAX_MOVE).await.read, 3);
        drop(source);
        assert_eq!(move_bytes(&from, &to, MAX_MOVE).await.read, 0, "the end");
    }

    /// Bytes that one connection could not deliver never reach the next connection.
    #[tokio::test]
    async fn bytes_that_a_destination_does_not_take_leave_the_pipe() {
        let ((mut source, from), (mut to, mut destination)) =
            (connect_pair().await, connect_pair().await);
        let mut filled = 0;
        while let Ok(Ok(written)) =
            tokio::time::timeout(std::time::Duration::from_millis(100), to.write(&[1; 65536])).await
        {
            filled += written;
        }
        source.write_all(b"secret").await.unwrap();
        let MoveResult {
            read,
            written,
            rest,
        } = move_bytes(&from, &to, MAX_MOVE).await;
        assert_eq!((read, written, rest.unwrap()), (6, 0, b"secret".to_vec()));
        assert!(has_pipe());

        // The destination is gone: its kernel answers the next write with a reset.
        destination.read_exact(&mut vec![0; filled]).await.unwrap();
        destination.set_zero_linger().unwrap();
        drop(destination);
        let _ = to.read(&mut [0]).await;
        source.write_all(b"secret").await.unwrap();
        let MoveResult {
            read,
            written,
            rest,
        } = move_bytes(&from, &to, MAX_MOVE).await;
        assert!(read == 6 && written == 0 && rest.is_err());
        assert!(!has_pipe(), "closed with what is in it");
    }
}
