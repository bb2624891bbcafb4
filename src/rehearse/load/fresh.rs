//! New connections at a fixed rate: connect, TLS handshake, one GET, close.

use super::dial::Protocol;
use super::{Client, Due, READ};
use crate::rehearse::record::Stamp;
use std::time::Duration;
use tokio::task::JoinSet;

/// Opens `rate` connections a second until the load stops, then waits for those under way. There is
/// no bound on those but that each is given up after [`super::UNANSWERED`]: a slow server must not
/// slow the timetable.
pub(super) async fn run(client: Client, rate: u32) {
    let start = Due::now();
    let mut attempts = JoinSet::new();
    for number in 0_u64.. {
        let due = start.plus(Duration::from_secs(1) * u32::try_from(number).unwrap_or(u32::MAX) / rate);
        if client.stop.run_until_cancelled(tokio::time::sleep_until(due.instant)).await.is_none() {
            break;
        }
        let behind = Stamp::now().since(due.stamp);
        client.recorder.note(|r| r.behind = r.behind.max(behind));
        let client = client.clone();
        attempts.spawn(async move {
            client.open(Protocol::of(number), format!("new-{number}"), READ, due).await;
        });
        while attempts.try_join_next().is_some() {}
    }
    while attempts.join_next().await.is_some() {}
}
