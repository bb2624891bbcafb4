//! Directions that move a lot: splice(2) through a pipe instead of read and write.
//!
//! The bytes stay in the kernel's pages, which pays from some 64 KiB a move on; below, two copies are
//! cheaper than two more system calls. A direction has a pipe only while there is something in it, so an
//! idle connection has none. Empty ones wait in a pool of the thread; where none can be had,
//! bytes are copied.

use crate::os::pipe::Pipe;
use std::cell::{Cell, RefCell};
use std::io;
use std::task::{Context, Poll, ready};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Most that is moved at once. The kernel's limit for a pipe without privilege (pipe-max-size).
const SIZE: usize = 1024 * 1024;

/// Most pipes of a thread, of two descriptors each: a slow reader of something large keeps one.
pub const PIPES: u32 = 32;

/// A move of so many bytes is a large one.
const LARGE: usize = 64 * 1024;

/// Large moves in a row that make a direction bulk: an answer of less than half a megabyte is over before
/// a pipe would pay.
const MANY: u8 = 4;

thread_local! {
    static POOL: RefCell<Vec<Pipe>> = const { RefCell::new(Vec::new()) };
    static LENT: Cell<u32> = const { Cell::new(0) };
}

/// Whether a direction moves a lot, told from its latest moves.
#[derive(Debug, Default)]
pub(super) struct Bulk {
    large: u8,
}

impl Bulk {
    pub(super) fn is(&self) -> bool {
        self.large >= MANY
    }

    /// Takes in the size of a move. Small ones in between do not end it at once: a sender pauses now and then.
    pub(super) fn saw(&mut self, moved: usize) {
        self.large = match moved {
            LARGE.. => (self.large + 1).min(2 * MANY),
            _ if self.is() => self.large - 1,
            _ => 0,
        };
    }
}

/// Bytes on their way through a pipe.
#[derive(Debug)]
pub(super) struct Piped {
    /// There until dropped.
    pipe: Option<Pipe>,
    pub(super) bytes: usize,
}

impl Piped {
    /// Takes what the source has, zero bytes at its end. `None`: no pipe can be had.
    pub(super) fn poll_read(cx: &mut Context<'_>, source: &TcpStream) -> Option<Poll<io::Result<Self>>> {
        if LENT.get() >= PIPES {
            return None;
        }
        let pipe = match POOL.with_borrow_mut(Vec::pop) {
            Some(pipe) => pipe,
            None => Pipe::new(SIZE).ok()?,
        };
        LENT.set(LENT.get() + 1);
        let mut piped = Self { pipe: Some(pipe), bytes: 0 };
        match piped.poll_fill(cx, source) {
            Poll::Ready(Err(error)) if is_refusal(&error) => None,
            filled => Some(filled.map_ok(|()| piped)),
        }
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>, source: &TcpStream) -> Poll<io::Result<()>> {
        loop {
            ready!(source.poll_read_ready(cx))?;
            let filled =
                source.try_io(Interest::READABLE, || self.pipe.as_ref().map_or(Ok(0), |p| p.fill(source, SIZE)));
            match filled {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                filled => return Poll::Ready(filled.map(|bytes| self.bytes = bytes)),
            }
        }
    }

    /// Gives to the destination what it takes.
    pub(super) fn poll_write(&mut self, cx: &mut Context<'_>, destination: &TcpStream) -> Poll<io::Result<usize>> {
        loop {
            ready!(destination.poll_write_ready(cx))?;
            let drain = || self.pipe.as_ref().map_or(Ok(0), |pipe| pipe.drain(destination, self.bytes));
            match destination.try_io(Interest::WRITABLE, drain) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                drained => {
                    return Poll::Ready(drained.inspect(|moved| self.bytes -= moved));
                }
            }
        }
    }
}

/// Whether an error of splice(2) speaks of the call and not of the socket, which has all its bytes still: a
/// sandbox without it, or no memory for pages.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS | libc::EPERM | libc::ENOMEM | libc::EOPNOTSUPP))
}

impl Drop for Piped {
    fn drop(&mut self) {
        LENT.set(LENT.get().saturating_sub(1));
        // What is left in a pipe must never reach another connection: it is closed.
        if let Some(pipe) = self.pipe.take().filter(|_| self.bytes == 0) {
            POOL.with_borrow_mut(|pool| pool.push(pipe));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    async fn piped(source: &TcpStream) -> Piped {
        poll_fn(|cx| Piped::poll_read(cx, source).unwrap()).await.unwrap()
    }

    fn pools() -> (usize, u32) {
        (POOL.with_borrow(Vec::len), LENT.get())
    }

    #[test]
    fn many_large_moves_make_bulk_and_many_small_ones_end_it() {
        let mut bulk = Bulk::default();
        for moved in [LARGE, LARGE, LARGE, 1, LARGE, LARGE, LARGE] {
            bulk.saw(moved);
            assert!(!bulk.is());
        }
        for _ in 0..100 {
            bulk.saw(SIZE);
            assert!(bulk.is());
        }
        let small = (0..100).take_while(|_| {
            bulk.saw(1);
            bulk.is()
        });
        assert_eq!(small.count(), usize::from(MANY));
    }

    #[tokio::test]
    async fn bytes_go_through_and_the_pipe_comes_back() {
        let ((mut source, from), (to, mut destination)) = (pair().await, pair().await);
        source.write_all(b"hello").await.unwrap();
        let mut through = piped(&from).await;
        assert_eq!((through.bytes, pools()), (5, (0, 1)));
        assert_eq!(poll_fn(|cx| through.poll_write(cx, &to)).await.unwrap(), 5);
        assert_eq!(through.bytes, 0);
        drop(through);
        assert_eq!(pools(), (1, 0));
        let mut got = [0; 5];
        destination.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"hello");
        drop(source);
        assert_eq!(piped(&from).await.bytes, 0, "the end");
    }

    /// What one connection could not bring to its end is nothing for the next.
    #[tokio::test]
    async fn a_pipe_with_something_in_it_is_closed() {
        let (mut source, from) = pair().await;
        source.write_all(b"secret").await.unwrap();
        drop(piped(&from).await);
        assert_eq!(pools(), (0, 0));
    }

    #[tokio::test]
    async fn pipes_are_limited() {
        let (mut source, from) = pair().await;
        let mut held = Vec::new();
        for _ in 0..PIPES {
            source.write_all(b"x").await.unwrap();
            held.push(piped(&from).await);
        }
        assert!(poll_fn(|cx| Poll::Ready(Piped::poll_read(cx, &from).is_none())).await);
        held.pop();
        assert!(poll_fn(|cx| Poll::Ready(Piped::poll_read(cx, &from).is_some())).await);
    }
}
