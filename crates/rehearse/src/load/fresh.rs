//! New connections at a fixed rate: connect, TLS handshake, one request, close.

use super::timetable::{Entry, Seed, protocol_of};
use super::{Client, Due};
use crate::record::{event::EventKind, stamp::Stamp};
use std::panic::resume_unwind;
use std::pin::pin;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

/// Opens `rate` connections a second until the load stops, then waits for the open ones.
pub(super) async fn run(client: Client, seed: Seed, rate: u32) {
    let mut most = Duration::ZERO;
    begin_attempts(
        client.stop.cancelled(),
        seed.fresh_entries(rate),
        |entry, due| {
            let behind = Stamp::now().since(due.stamp);
            if behind > most {
                most = behind;
                client.recorder.add("", EventKind::Behind(behind));
            }
            let client = client.clone();
            async move {
                drop(
                    client
                        .open_connection(
                            protocol_of(entry.number),
                            client.name("new", entry.number),
                            entry,
                            due.stamp,
                        )
                        .await,
                );
            }
        },
    )
    .await;
}

/// Begins each attempt when it is due, until `stop`, then waits for open attempts. The number of
/// open attempts has no limit, because a slow server must not slow the timetable. Attempts end by
/// themselves after [`super::ANSWER_TIMEOUT`]. A panic in an attempt ends the run.
pub(super) async fn begin_attempts<F: Future<Output = ()> + Send + 'static>(
    stop: impl Future<Output = ()>,
    timetable: impl Iterator<Item = Entry>,
    mut attempt: impl FnMut(Entry, Due) -> F,
) {
    let (start, mut stop) = (Due::now(), pin!(stop));
    let mut attempts = JoinSet::new();
    for entry in timetable {
        let due = start.plus(entry.after);
        tokio::select! {
            biased;
            () = &mut stop => break,
            () = sleep_until(due.instant) => {}
        }
        attempts.spawn(attempt(entry, due));
        while let Some(ended) = attempts.try_join_next() {
            if let Some(panic) = ended.err().and_then(|error| error.try_into_panic().ok()) {
                resume_unwind(panic);
            }
        }
    }
    attempts.join_all().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;

    #[tokio::test]
    #[should_panic(expected = "closed pipe")]
    async fn an_attempt_that_panics_ends_all() {
        begin_attempts(pending(), Seed(0).fresh_entries(1_000), |_, _| async {
            panic!("closed pipe")
        })
        .await;
    }
}
