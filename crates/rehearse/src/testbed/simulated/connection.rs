//! A connection as seen by the instance. Only the instance can tell which end closed the
//! connection.

use crate::record::{
    event::{EndReport, EndedBy, STREAM_HEADER, StreamId},
    stamp::Stamp,
};
use hyper::HeaderMap;
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use tokio_util::sync::CancellationToken;

/// Length limit of a stream name.
const LONGEST_NAME: usize = 128;

/// The instance's knowledge of a connection, to report who ended the connection.
#[derive(Debug)]
pub(super) struct Connection {
    peer: SocketAddr,
    /// True if the client showed a trusted certificate.
    pub(super) known: bool,
    stream: OnceLock<StreamId>,
    /// Cancelled at the first request.
    pub(super) used: CancellationToken,
    /// Cancelled to have the connection closed when its requests in flight are answered.
    pub(super) close: CancellationToken,
    /// When the instance began to close the connection.
    ending: OnceLock<Stamp>,
    /// Number of answers that could not be sent completely.
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

    /// Notes a request. The header of the first request names the stream.
    pub(super) fn note_request(&self, headers: &HeaderMap) {
        let name = headers
            .get(STREAM_HEADER)
            .and_then(|v| v.to_str().ok())
            .filter(|v| v.len() <= LONGEST_NAME);
        if let Some(name) = name {
            let _ = self.stream.set(name.to_owned());
        }
        self.used.cancel();
    }

    /// Notes that the instance begins to close the connection.
    pub(super) fn record_closing(&self) {
        let _ = self.ending.set(Stamp::now());
    }

    /// Counts an answer that could not be sent completely.
    pub(super) fn count_unfinished_answer(&self) {
        self.unfinished.fetch_add(1, Relaxed);
    }

    /// Counts a request that was rejected because of the shutdown. Closing begins here, because the
    /// rejecting answer may itself end the connection (`Connection: close`).
    pub(super) fn close_after_rejected_request(&self) {
        self.rejected.fetch_add(1, Relaxed);
        self.record_closing();
        self.close.cancel();
    }

    /// Returns the report at the connection's end. `None` if the stream has no name, as with probes
    /// and kubectl.
    pub(super) fn report(&self) -> Option<EndReport> {
        let (by, at) = match (self.ending.get(), self.unfinished.load(Relaxed)) {
            (Some(&began), 0) => (EndedBy::Instance, began),
            (None, 0) => (EndedBy::Peer, Stamp::now()),
            // The peer is the cause even during a shutdown: the instance would have finished the
            // answer.
            (_, _) => (EndedBy::PeerEarly, Stamp::now()),
        };
        self.report_as(by, at)
    }

    /// Returns the report of a connection that is still open when the process ends.
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
        connection.note_request(&headers);
        connection
    }

    #[test]
    fn an_unfinished_answer_is_never_ended_by_the_instance() {
        let ended = |c: &Connection| c.report().unwrap().by;
        assert_eq!(ended(&connection("a")), EndedBy::Peer);
        let shutting = connection("a");
        shutting.record_closing();
        assert_eq!(ended(&shutting), EndedBy::Instance);
        shutting.count_unfinished_answer();
        assert_eq!(ended(&shutting), EndedBy::PeerEarly);
        assert_eq!(shutting.report_abandoned().unwrap().by, EndedBy::Instance);
    }

    #[test]
    fn a_rejected_request_ends_the_connection() {
        let connection = connection("a");
        connection.close_after_rejected_request();
        let report = connection.report().unwrap();
        assert_eq!((report.by, report.rejected), (EndedBy::Instance, 1));
    }

    #[test]
    fn a_connection_without_a_name_is_not_reported() {
        assert_eq!(
            Connection::new(([127, 0, 0, 1], 1).into(), false).report(),
            None
        );
        assert_eq!(connection(&"x".repeat(LONGEST_NAME + 1)).report(), None);
    }
}
