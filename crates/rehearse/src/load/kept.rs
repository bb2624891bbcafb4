//! A client that keeps its connection and sends one request after the other.
//!
//! When the server ends the connection, the next request opens a new one. That is no retry: nothing
//! that was sent is sent again.

use super::dial::{Link, Unsent};
use super::timetable::{Entry, Seed, protocol};
use super::{Client, Due};
use crate::plan::{PACE, UNANSWERED};
use crate::record::{Answer, Failure, Kind, What};

/// Sends a request every [`PACE`] until the load stops. A client of the control is over with its
/// first connection.
pub(super) async fn run(client: Client, seed: Seed, index: u64) {
    let start = Due::now();
    let mut kept = KeptConnection { client, index, opened: 0, link: None };
    for entry in seed.kept(index, PACE) {
        let due = start.plus(entry.after);
        if !kept.wait(due).await {
            return;
        }
        kept.request(entry, due).await;
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
    /// Waits until the next request is due, and notices when the connection ends meanwhile. False:
    /// there is no next one.
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

    async fn request(&mut self, entry: Entry, due: Due) {
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
            self.client.attempt(Kind::Kept, &stream, due.stamp, answer);
        } else {
            self.open(entry, due).await;
        }
    }

    async fn open(&mut self, entry: Entry, due: Due) {
        if self.client.control.is_some() && self.opened > 0 {
            return;
        }
        self.opened += 1;
        let stream = format!("{}-{}", self.client.name("kept", self.index), self.opened);
        // Boxed: an opening is rare, and its future is large.
        self.link = Box::pin(self.client.open(protocol(self.index), stream, entry, due)).await;
    }

    fn ended(&mut self, how: Failure, in_flight: bool) {
        if let Some(link) = self.link.take() {
            let end = link.end(What::Kept, how, in_flight, false);
            self.client.recorder.note(|r| r.ends.push(end));
        }
    }
}
