//! One connection as the instance sees it, for the one question that only the instance can answer:
//! which end closed it?

use crate::record::{
    event::{EndReport, EndedBy, STREAM_HEADER, StreamId},
    stamp::Stamp,
};
use hyper::HeaderMap;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use tokio_util::sync::CancellationToken;

/// Longest stream name that is accepted.
const LONGEST_NAME: usize = 128;

/// What is known about a connection.
#[derive(Debug)]
pub(super) struct Connection {
    peer: SocketAddr,
    /// It showed a certificate that is trusted.
    pub(super) known: bool,
    stream: OnceLock<StreamId>,
    /// Cancelled at the first request.
    pub(super) used: CancellationToken,
    /// Cancelled when the connection should be closed after what is under way.
    pub(super) close: CancellationToken,
    /// When the instance began to end it.
    ending: OnceLock<Stamp>,
    /// Answers that could not be sent to their end.
    unfinished: AtomicU32,
    rejected: AtomicU32,
}

impl Connection {
    pub(super) fn new(peer: SocketAddr, known: bool) -> Self {
        Self {
            peer,
            known,
            stream: OnceLock::new(),
            used: CancellationToken::new(),
            close: CancellationToken::new(),
            ending: OnceLock::new(),
            unfinished: AtomicU32::new(0),
            rejected: AtomicU32::new(0),
        }
    }

    /// A request came; the first one names the stream. Whether it is a client's of the rehearsal.
    pub(super) fn request(&self, headers: &HeaderMap) {
        let name = headers
            .get(STREAM_HEADER)
            .and_then(|v| v.to_str().ok())
            .filter(|v| v.len() <= LONGEST_NAME);
        if let Some(name) = name {
            let _ = self.stream.set(name.to_owned());
        }
        self.used.cancel();
    }

    /// From here on the instance itself ends the connection.
    pub(super) fn begin_end(&self) {
        let _ = self.ending.set(Stamp::now());
    }

    /// An answer did not get to its end.
    pub(super) fn cut(&self) {
        self.unfinished.fetch_add(1, Relaxed);
    }

    /// A request was rejected because the instance shuts down. The answer itself may be what ends the
    /// connection (`Connection: close`), before the connection is seen to be closing.
    pub(super) fn reject(&self) {
        self.rejected.fetch_add(1, Relaxed);
        self.begin_end();
        self.close.cancel();
    }

    /// The report at its end; none when it had no name (probes, kubectl).
    pub(super) fn report(&self) -> Option<EndReport> {
        let (by, at) = match (self.ending.get(), self.unfinished.load(Relaxed)) {
            (Some(&began), 0) => (EndedBy::Instance, began),
            (None, 0) => (EndedBy::Peer, Stamp::now()),
            // Also while it was shutting down: it would have finished the answer.
            (_, _) => (EndedBy::PeerEarly, Stamp::now()),
        };
        self.report_as(by, at)
    }

    /// The report when the process ends with the connection open.
    pub(super) fn report_abandoned(&self) -> Option<EndReport> {
        self.report_as(EndedBy::Instance, Stamp::now())
    }

    fn report_as(&self, by: EndedBy, at: Stamp) -> Option<EndReport> {
        let stream = self.stream.get()?.clone();
        Some(EndReport {
            stream,
            peer: self.peer,
            by,
            at,
            rejected: self.rejected.load(Relaxed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(name: &str) -> Connection {
        let connection = Connection::new(([127, 0, 0, 1], 1).into(), false);
        let mut headers = HeaderMap::new();
        headers.insert(STREAM_HEADER, name.parse().unwrap());
        connection.request(&headers);
        connection
    }

    #[test]
    fn an_answer_that_was_cut_is_never_the_instances_doing() {
        let ended = |c: &Connection| c.report().unwrap().by;
        assert_eq!(ended(&connection("a")), EndedBy::Peer);
        let shutting = connection("a");
        shutting.begin_end();
        assert_eq!(ended(&shutting), EndedBy::Instance);
        shutting.cut();
        assert_eq!(ended(&shutting), EndedBy::PeerEarly);
        assert_eq!(shutting.report_abandoned().unwrap().by, EndedBy::Instance);
    }

    #[test]
    fn what_rejects_a_request_ends_the_connection() {
        let connection = connection("a");
        connection.reject();
        let report = connection.report().unwrap();
        assert_eq!((report.by, report.rejected), (EndedBy::Instance, 1));
    }

    #[test]
    fn one_without_a_name_is_not_reported() {
        assert_eq!(
            Connection::new(([127, 0, 0, 1], 1).into(), false).report(),
            None
        );
        assert_eq!(connection(&"x".repeat(LONGEST_NAME + 1)).report(), None);
    }
}
