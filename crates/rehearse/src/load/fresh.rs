//! New connections at a fixed rate: connect, TLS handshake, one request, close.

use super::timetable::{Seed, protocol};
use super::{Client, Due};
use crate::record::Stamp;
use tokio::task::JoinSet;

/// Opens `rate` connections a second until the load stops, then waits for those under way. There is
/// no bound on those but that each is given up after [`super::UNANSWERED`]: a slow server must not
/// slow the timetable.
pub(super) async fn run(client: Client, seed: Seed, rate: u32) {
    let start = Due::now();
    let mut attempts = JoinSet::new();
    for entry in seed.fresh(rate) {
        let due = start.plus(entry.after);
        if client.stop.run_until_cancelled(tokio::time::sleep_until(due.instant)).await.is_none() {
            break;
        }
        let behind = Stamp::now().since(due.stamp);
        client.recorder.note(|r| r.behind = r.behind.max(behind));
        let client = client.clone();
        attempts.spawn(async move {
            client.open(protocol(entry.number), format!("new-{}", entry.number), entry, due).await;
        });
        while attempts.try_join_next().is_some() {}
    }
    while attempts.join_next().await.is_some() {}
}
