//! The body of an answer: complete, or the lines of a watch as they arrive. A body records whether
//! it was sent completely.

use super::connection::Connection;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::mpsc;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// The content of an answer: all bytes at once, or the lines of a watch as they arrive.
#[derive(Debug)]
pub(super) enum Payload {
    Whole(Bytes),
    /// The lines of a watch, which end when the sender is dropped.
    Lines(mpsc::Receiver<Bytes>),
}

/// A [`Payload`] that is being sent on a connection.
#[derive(Debug)]
pub(super) struct Body {
    payload: Payload,
    finished: bool,
    connection: Arc<Connection>,
    /// Token that makes a drain wait until the answer was handed to hyper.
    _under_way: Option<TaskTrackerToken>,
}

impl Body {
    pub(super) fn new(
        payload: Payload,
        connection: Arc<Connection>,
        under_way: Option<TaskTrackerToken>,
    ) -> Self {
        let finished = matches!(&payload, Payload::Whole(bytes) if bytes.is_empty());
        Self {
            payload,
            finished,
            connection,
            _under_way: under_way,
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        match &mut this.payload {
            Payload::Whole(bytes) => {
                this.finished = true;
                let bytes = std::mem::take(bytes);
                Poll::Ready((!bytes.is_empty()).then(|| Ok(Frame::data(bytes))))
            }
            Payload::Lines(lines) => lines.poll_recv(cx).map(|line| {
                this.finished = line.is_none();
                line.map(|line| Ok(Frame::data(line)))
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.finished
    }

    fn size_hint(&self) -> SizeHint {
        match &self.payload {
            Payload::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Payload::Lines(_) => SizeHint::default(),
        }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if !self.finished {
            self.connection.count_unfinished_answer();
        }
    }
}
