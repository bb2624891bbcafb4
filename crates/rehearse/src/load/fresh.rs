//! New connections at a fixed rate: connect, TLS handshake, one request, close.

use super::timetable::{Entry, Seed, protocol};
use super::{Client, Due};
use crate::record::Stamp;
use std::pin::pin;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

/// Opens `rate` connections a second until the load stops, then waits for those under way.
pub(super) async fn run(client: Client, seed: Seed, rate: u32) {
    begin(client.stop.cancelled(), seed.fresh(rate), |entry, due| {
        let behind = Stamp::now().since(due.stamp);
        client.recorder.note(|r| r.behind = r.behind.max(behind));
        let client = client.clone();
        async move { drop(client.open(protocol(entry.number), format!("new-{}", entry.number), entry, due).await) }
    })
    .await;
}

/// Begins each when it is due, until told to stop, then waits for those under way. There is no bound on those but that
/// each is given up after [`super::UNANSWERED`]: a slow server must not slow the timetable.
pub(super) async fn begin<F: Future<Output = ()> + Send + 'static>(
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
        while attempts.try_join_next().is_some() {}
    }
    while attempts.join_next().await.is_some() {}
}
