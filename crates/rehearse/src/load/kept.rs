//! A client that keeps its connection and sends request after request.
//!
//! When the server ends the connection, the next request opens a new connection. This is no retry,
//! because no request is sent twice.

use super::dial::{Link, SendError};
use super::timetable::{Entry, Seed, protocol_of};
use super::{Client, Due};
use crate::config::{ANSWER_TIMEOUT, REQUEST_INTERVAL};
use crate::record::{
    event::{Answer, ConnectionKind, Failure, StreamKind},
    stamp::Stamp,
};

/// Sends a request every [`REQUEST_INTERVAL`] until the load stops. A client of the control ends
/// with its first connection.
pub(super) async fn run(client: Client, seed: Seed, index: u64) {
    let start = Due::now();
    let mut kept = KeptConnection {
        client,
        index,
        opened: 0,
        link: None,
    };
    for entry in seed.kept_entries(index, REQUEST_INTERVAL) {
        let due = start.plus(entry.after);
        if !kept.wait_until_due(due).await {
            return;
        }
        kept.send_request(entry, due.stamp).await;
    }
}

struct KeptConnection {
    client: Client,
    index: u64,
    /// Connections so far.
    opened: u64,
    link: Option<Link>,
}

impl KeptConnection {
    /// Waits until the next request is due, and logs the end of the connection if the connection
    /// ends meanwhile. Returns false if there is no next request.
    async fn wait_until_due(&mut self, due: Due) -> bool {
        loop {
            if self.client.control.is_some() && self.opened > 0 && self.link.is_none() {
                return false;
            }
            let ended = async {
                match &mut self.link {
                    Some(link) => link.wait_for_end().await,
                    None => std::future::pending().await,
                }
            };
            let how = tokio::select! {
                biased;
                () = self.client.stop.cancelled() => return false,
                how = ended => how,
                () = tokio::time::sleep_until(due.instant) => return true,
            };
            self.record_end(how, false);
        }
    }

    async fn send_request(&mut self, entry: Entry, due: Stamp) {
        if let Some(link) = &mut self.link {
            let asked = tokio::time::timeout(ANSWER_TIMEOUT, self.client.ask(link, entry)).await;
            let stream = link.stream.clone();
            let answer = match asked {
                Ok(Ok(answer)) => answer,
                Ok(Err(SendError::Died(failure))) => {
                    self.record_end(failure.clone(), true);
                    Answer::Failed(failure)
                }
                Ok(Err(SendError::NeverSent)) => {
                    let how = link.wait_for_end().await;
                    self.record_end(how, false);
                    return self.open_connection(entry, due).await;
                }
                Err(_) => {
                    self.link = None;
                    Answer::Failed(Failure::Unanswered)
                }
            };
            self.client
                .record_attempt(ConnectionKind::Kept, entry.ask, &stream, due, answer);
        } else {
            self.open_connection(entry, due).await;
        }
    }

    async fn open_connection(&mut self, entry: Entry, due: Stamp) {
        if self.client.control.is_some() && self.opened > 0 {
            return;
        }
        self.opened += 1;
        let stream = format!("{}-{}", self.client.name("kept", self.index), self.opened);
        // The future is boxed, because it is large, and connections are rarely opened.
        self.link =
            Box::pin(
                self.client
                    .open_connection(protocol_of(self.index), stream, entry, due),
            )
            .await;
    }

    fn record_end(&mut self, how: Failure, in_flight: bool) {
        if let Some(link) = self.link.take() {
            self.client
                .record_end(link.describe_end(StreamKind::Kept, how, in_flight, false));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dial::Target;
    use super::super::objects::Tag;
    use super::super::writer::Ledger;
    use super::*;
    use crate::record::log::{Recorder, attempts_at_tested_address};
    use crate::testbed::certs;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::net::TcpListener;
    use tokio_util::sync::CancellationToken;

    #[tokio::test]
    async fn a_late_request_still_has_its_time_to_open_a_connection() {
        let directory = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let certs = certs::make_certs(directory.path(), &[]).unwrap();
        let client = Client {
            target: Target::new(listener.local_addr().unwrap(), &certs).unwrap(),
            recorder: Arc::new(Recorder::default()),
            tag: Tag::from_current_time(),
            ledger: Ledger::default(),
            catch_up: Duration::ZERO,
            stop: CancellationToken::new(),
            control: None,
        };
        let recorder = client.recorder.clone();
        // The request was due at zero of the monotonic clock, so the client is very late.
        let due = Stamp(0);
        let mut kept = KeptConnection {
            client,
            index: 0,
            opened: 0,
            link: None,
        };
        let entry = Seed(0).kept_entries(0, REQUEST_INTERVAL).next().unwrap();
        let served = async {
            let accepted = listener.accept().await.unwrap();
            // The connection ends only after some time, in which a time limit counted from `due`
            // would have passed.
            tokio::time::sleep(REQUEST_INTERVAL).await;
            drop(accepted);
        };
        tokio::join!(kept.open_connection(entry, due), served);
        let attempt = recorder.read(|log| attempts_at_tested_address(log).next().unwrap().clone());
        assert!(
            matches!(
                attempt.answer,
                Answer::Failed(Failure::Reset | Failure::Closed)
            ),
            "{attempt:?}"
        );
        assert_eq!(attempt.due, due, "it waited since then");
    }
}
