//! An instance's signals about the end of a connection inside TLS: close_notify, and HTTP/2's
//! GOAWAY. They are recorded before HTTP turns them into a single error.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const CLOSE_NOTIFY: u8 = 1;
const GOAWAY: u8 = 2;

/// The signals that the client has got on a connection so far. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct EndSignals(Arc<AtomicU8>);

impl EndSignals {
    pub(super) fn has_close_notify(&self) -> bool {
        self.0.load(Relaxed) & CLOSE_NOTIFY != 0
    }

    pub(super) fn has_goaway(&self) -> bool {
        self.0.load(Relaxed) & GOAWAY != 0
    }

    fn set_signal(&self, what: u8) {
        self.0.fetch_or(what, Relaxed);
    }
}

/// A TLS stream that looks for the instance's signals in what it reads.
#[derive(Debug)]
pub(super) struct Observed<T> {
    inner: T,
    end_signals: EndSignals,
    frames: Option<Frames>,
}

impl<T> Observed<T> {
    pub(super) fn new(inner: T, http2: bool) -> Self {
        Self {
            inner,
            end_signals: EndSignals::default(),
            frames: http2.then(Frames::default),
        }
    }

    pub(super) fn end_signals(&self) -> EndSignals {
        self.end_signals.clone()
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Observed<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let (before, room) = (buf.filled().len(), buf.remaining());
        ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        let read = &buf.filled()[before..];
        // An empty read means that the instance sent close_notify: an end without close_notify is
        // an error of `poll_read`.
        if read.is_empty() && room > 0 {
            this.end_signals.set_signal(CLOSE_NOTIFY);
        }
        if this
            .frames
            .as_mut()
            .is_some_and(|frames| frames.completes_goaway(read))
        {
            this.end_signals.set_signal(GOAWAY);
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Observed<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

/// Length of an HTTP/2 frame's header, and of the first fields of GOAWAY: last stream, error code.
const HEADER: usize = 9;
const GOAWAY_FIELDS: usize = 8;
const GOAWAY_TYPE: u8 = 7;

/// The frames of an HTTP/2 connection, as far as necessary to see a GOAWAY.
#[derive(Debug, Default)]
struct Frames {
    /// The first bytes of the present frame: its header, and the first fields if the frame is a
    /// GOAWAY.
    begun: [u8; HEADER + GOAWAY_FIELDS],
    have: usize,
    /// Number of bytes to skip until the next frame begins.
    skip: usize,
}

impl Frames {
    /// Takes the next bytes of the connection. Returns true if they complete a GOAWAY without an
    /// error.
    fn completes_goaway(&mut self, mut bytes: &[u8]) -> bool {
        let mut seen = false;
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let wanted = if self.is_goaway() {
                self.begun.len()
            } else {
                HEADER
            };
            let taken = bytes.len().min(wanted - self.have);
            self.begun[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            let whole = if self.is_goaway() {
                self.begun.len()
            } else {
                HEADER
            };
            if self.have == whole {
                seen |= self.is_goaway() && self.begun[HEADER + 4..] == [0; 4];
                let length =
                    u32::from_be_bytes([0, self.begun[0], self.begun[1], self.begun[2]]) as usize;
                self.skip = length.saturating_sub(whole - HEADER);
                self.have = 0;
            }
        }
        seen
    }

    /// True if the present frame is a GOAWAY long enough for the fields.
    fn is_goaway(&self) -> bool {
        let long_enough = self.begun[..2] != [0; 2] || usize::from(self.begun[2]) >= GOAWAY_FIELDS;
        self.have >= HEADER && self.begun[3] == GOAWAY_TYPE && long_enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn make_frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, 0, 0, 0, 0, 1]);
        frame.extend(payload);
        frame
    }

    const GRACEFUL: &[u8] = &[0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0, b'b', b'y', b'e'];
    const ERROR: &[u8] = &[0, 0, 0, 1, 0, 0, 0, 1];

    proptest! {
        #[test]
        fn a_goaway_is_found_however_the_bytes_come(
            others in prop::collection::vec((0..7_u8, prop::collection::vec(any::<u8>(), 0..40)), 0..6),
            last in prop::sample::select(vec![Some(GRACEFUL), Some(ERROR), Some(&[0; 3][..]), None]),
            cuts in prop::collection::vec(1..30_usize, 1..20),
        ) {
            let mut bytes: Vec<u8> = others.iter().flat_map(|(kind, payload)| make_frame(*kind, payload)).collect();
            bytes.extend(last.map(|payload| make_frame(GOAWAY_TYPE, payload)).unwrap_or_default());
            bytes.extend(make_frame(0, b"after it"));
            let (mut frames, mut rest, mut seen) = (Frames::default(), &bytes[..], false);
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at(rest.len().min(*cut));
                seen |= frames.completes_goaway(now);
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(seen, last == Some(GRACEFUL));
            prop_assert_eq!((frames.have, frames.skip), (0, 0));
        }
    }

    #[tokio::test]
    async fn only_a_signed_end_is_recorded() {
        use tokio::io::AsyncReadExt;
        let mut observed = Observed::new(&b"ab"[..], false);
        let end_signals = observed.end_signals();
        let mut two = [0; 2];
        observed.read_exact(&mut two).await.unwrap();
        assert!(!end_signals.has_close_notify());
        assert_eq!(observed.read(&mut two).await.unwrap(), 0);
        assert!(end_signals.has_close_notify() && !end_signals.has_goaway());
    }
}
