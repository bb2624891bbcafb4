//! A client that keeps its connection and sends request after request.
//!
//! When the server ends the connection, the next request opens a new connection. This is no retry,
//! because no request is sent twice.

use super::dial::{Link, Unsent};
use super::timetable::{Entry, Seed, protocol_of};
use super::{Client, Due};
use crate::config::{PACE, UNANSWERED};
use crate::record::{
    event::{Answer, ConnectionKind, Failure, StreamKind},
    stamp::Stamp,
};

/// Sends a request every [`PACE`] until the load stops. A client of the control ends with its first
/// connection.
pub(super) async fn run(client: Client, seed: Seed, index: u64) {
    let start = Due::now();
    let mut kept = KeptConnection {
        client,
        index,
        opened: 0,
        link: None,
    };
    for entry in seed.kept_entries(index, PACE) {
        let due = start.plus(entry.after);
        if !kept.wait(due).await {
            return;
        }
        kept.request(entry, due.stamp).await;
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
    async fn wait(&mut self, due: Due) -> bool {
        loop {
            if self.client.control.is_some() && self.opened > 0 && self.link.is_none() {
                return false;
            }
            let ended = async {
                match &mut self.link {
                    Some(link) => link.ended().await,
                    None => std::future::pending().await,
                }
            };
            let how = tokio::select! {
                biased;
                () = self.client.stop.cancelled() => return false,
                how = ended => how,
                () = tokio::time::sleep_until(due.instant) => return true,
            };
            self.ended(how, false);
        }
    }

    async fn request(&mut self, entry: Entry, due: Stamp) {
        if let Some(link) = &mut self.link {
            let asked = tokio::time::timeout(UNANSWERED, self.client.ask(link, entry)).await;
            let stream = link.stream.clone();
            let answer = match asked {
                Ok(Ok(answer)) => answer,
                Ok(Err(Unsent::Died(failure))) => {
                    self.ended(failure.clone(), true);
                    Answer::Failed(failure)
                }
                Ok(Err(Unsent::NeverSent)) => {
                    let how = link.ended().await;
                    self.ended(how, false);
                    return self.open(entry, due).await;
                }
                Err(_) => {
                    self.link = None;
                    Answer::Failed(Failure::Unanswered)
                }
            };
            self.client
                .attempt(ConnectionKind::Kept, entry.ask, &stream, due, answer);
        } else {
            self.open(entry, due).await;
        }
    }

    async fn open(&mut self, entry: Entry, due: Stamp) {
        if self.client.control.is_some() && self.opened > 0 {
            return;
        }
        self.opened += 1;
        let stream = format!("{}-{}", self.client.name("kept", self.index), self.opened);
        // The future is boxed, because it is large, and connections are rarely opened.
        self.link = Box::pin(
            self.client
                .open(protocol_of(self.index), stream, entry, due),
        )
        .await;
    }

    fn ended(&mut self, how: Failure, in_flight: bool) {
        if let Some(link) = self.link.take() {
            self.client
                .ended(link.end(StreamKind::Kept, how, in_flight, false));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dial::Target;
    use super::super::objects::Tag;
    use super::super::writer::Ledger;
    use super::*;
    use crate::record::log::{Recorder, front_attempts};
    use crate::testbed::certs;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::net::TcpListener;
    use tokio_util::sync::CancellationToken;

    #[tokio::test]
    async fn one_that_is_late_has_its_time_to_open_a_connection() {
        let directory = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let certs = certs::make_certs(directory.path(), &[]).unwrap();
        let client = Client {
            target: Target::new(listener.local_addr().unwrap(), &certs).unwrap(),
            recorder: Arc::new(Recorder::default()),
            tag: Tag::now(),
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
        let entry = Seed(0).kept_entries(0, PACE).next().unwrap();
        let served = async {
            let accepted = listener.accept().await.unwrap();
            // The connection ends only after some time, in which a time limit counted from `due`
            // would have passed.
            tokio::time::sleep(PACE).await;
            drop(accepted);
        };
        tokio::join!(kept.open(entry, due), served);
        let attempt = recorder.read(|log| front_attempts(log).next().unwrap().clone());
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
