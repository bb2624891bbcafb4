//! A client that keeps its connection and sends one request after the other.
//!
//! When the server ends the connection, the next request opens a new one. That is no retry: nothing
//! that was sent is sent again.

use super::dial::{Link, Protocol, Unsent};
use super::{Client, Due, READ, ask};
use crate::rehearse::plan::{PACE, UNANSWERED};
use crate::rehearse::record::{Answer, Failure, Kind, Stamp, StreamEnd, What};

/// Sends a request every [`PACE`] until the load stops; `of` clients share the time evenly.
pub(super) async fn run(client: Client, index: u64, of: u64) {
    let offset = PACE.mul_f64(index as f64 / of as f64);
    let mut due = Due::now().plus(offset);
    let mut kept = Kept { client, index, opened: 0, link: None };
    while kept.wait(due).await {
        kept.request(due).await;
        due = due.plus(PACE);
    }
}

struct Kept {
    client: Client,
    index: u64,
    /// Connections so far.
    opened: u64,
    link: Option<Link>,
}

impl Kept {
    /// Waits until the next request is due, and notices when the connection ends meanwhile. False:
    /// the load stops.
    async fn wait(&mut self, due: Due) -> bool {
        loop {
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

    async fn request(&mut self, due: Due) {
        if let Some(link) = &mut self.link {
            let stream = link.stream.clone();
            let asked = tokio::time::timeout(UNANSWERED, ask(link, READ)).await;
            let answer = match asked {
                Ok(Ok(answer)) => answer,
                Ok(Err(Unsent::Died(failure))) => {
                    self.ended(failure.clone(), true);
                    Answer::Failed(failure)
                }
                Ok(Err(Unsent::NeverSent)) => {
                    let how = link.ended().await;
                    self.ended(how, false);
                    return self.open(due).await;
                }
                Err(_) => {
                    self.link = None;
                    Answer::Failed(Failure::Unanswered)
                }
            };
            self.client.attempt(Kind::Kept, &stream, due.stamp, answer);
        } else {
            self.open(due).await;
        }
    }

    async fn open(&mut self, due: Due) {
        self.opened += 1;
        let stream = format!("kept-{}-{}", self.index, self.opened);
        // Boxed: an opening is rare, and its future is large.
        self.link = Box::pin(self.client.open(Protocol::of(self.index), stream, READ, due)).await;
    }

    fn ended(&mut self, how: Failure, in_flight: bool) {
        if let Some(link) = self.link.take() {
            let end = StreamEnd { stream: link.stream.clone(), what: What::Kept, at: Stamp::now(), how, in_flight };
            self.client.recorder.note(|r| r.ends.push(end));
        }
    }
}
