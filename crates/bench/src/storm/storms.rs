//! The storms that are the same for whatever stands behind berth.

use crate::clients::{Seen, Service, insist, kept_connection, new_connections};
use crate::{CALM, Cli, LONGEST, NODE, Round};
use anyhow::{Context, Result};
use berth_bench::stats::percentile;
use std::net::Ipv4Addr;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, sleep, timeout};

/// The greedy one's connections a second, and the others' and how many they are.
const GREEDY_PERIOD: Duration = Duration::from_micros(500);
const OTHERS: u32 = 50;
const OTHERS_PERIOD: Duration = Duration::from_millis(500);
const GREEDY_LASTS: Duration = Duration::from_secs(30);

/// Time between two connections of the node's own client.
const OWN_PERIOD: Duration = Duration::from_millis(100);

/// The node's own client. On a thread of its own: in this process it must not wait for its turn behind the crowd.
struct Own {
    ends: watch::Sender<bool>,
    thread: JoinHandle<Result<(Seen, Seen)>>,
}

impl Own {
    fn start(service: impl Service) -> Self {
        let (ends, ended) = watch::channel(false);
        let clients = async move || {
            let new =
                tokio::task::spawn_local(new_connections(NODE, service.clone(), OWN_PERIOD, until(ended.clone())));
            let kept = kept_connection(NODE, service, until(ended)).await;
            Ok((new.await?, kept.context("the node's own client got no connection in calm")?))
        };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(LocalSet::new().run_until(clients()))
        });
        Self { ends, thread }
    }

    /// What its new connections saw, and its kept one.
    fn end(self) -> Result<(Seen, Seen)> {
        let _ = self.ends.send(true);
        self.thread.join().expect("it does not panic")
    }
}

async fn until(mut ended: watch::Receiver<bool>) {
    drop(ended.wait_for(|ended| *ended).await);
}

/// All come at once and insist.
pub(crate) async fn reconnect(cli: &Cli, service: &impl Service) -> Result<Round> {
    let own = Own::start(service.clone());
    sleep(CALM).await;
    let began = Instant::now();
    let mut crowd = JoinSet::new();
    for client in 0..cli.clients {
        crowd.spawn_local(insist(source(client % cli.sources), service.clone()));
    }
    let mut served = Vec::new();
    let all = async {
        while let Some(client) = crowd.join_next().await {
            served.push(client.expect("no client panics"));
        }
    };
    let in_time = timeout(LONGEST, all).await.is_ok();
    let lasted = began.elapsed();
    let (own_new, own_kept) = own.end()?;
    let mut after: Vec<_> = served.iter().map(|(served, _)| served.after).collect();
    after.sort_unstable();
    let gave_up: u32 = served.iter().map(|(served, _)| served.gave_up).sum();
    let rejected: u32 = served.iter().map(|(served, _)| served.rejected).sum();
    let mut figures = vec![
        ("clients that were served", after.len() as f64),
        ("s until the last was", if in_time { lasted.as_secs_f64() } else { f64::INFINITY }),
        ("s until half of them were", seconds(&after, 0.5)),
        ("times that one gave up", f64::from(gave_up)),
        ("times that one was refused or reset", f64::from(rejected)),
    ];
    // One of its own is the kept one.
    let answered = (after.len() + own_new.took.len() + 1) as u64;
    figures.extend(of_own("node's own, new connections: p99 ms", "lost", own_new));
    figures.extend(of_own("node's own, kept connection: p99 ms", "lost", own_kept));
    Ok(Round { figures, answered, lasted })
}

/// One source in a loop, beside others.
pub(crate) async fn greedy(service: &impl Service) -> Result<Round> {
    let (ends, ended) = watch::channel(false);
    let mut others = JoinSet::new();
    for number in 1..=OTHERS {
        others.spawn_local(new_connections(source(number), service.clone(), OTHERS_PERIOD, until(ended.clone())));
    }
    sleep(CALM).await;
    let greedy = new_connections(source(0), service.clone(), GREEDY_PERIOD, sleep(GREEDY_LASTS)).await;
    let _ = ends.send(true);
    let others = others.join_all().await;
    let lost: u64 = others.iter().map(|seen| seen.lost).sum();
    let shares: Vec<_> = others.iter().map(share).collect();
    let mut took: Vec<_> = others.into_iter().flat_map(|seen| seen.took).collect();
    took.sort_unstable();
    Ok(Round {
        figures: vec![
            ("50 sources with 2/s: p99 ms", 1000.0 * seconds(&took, 0.99)),
            ("served", took.len() as f64),
            ("lost", lost as f64),
            ("Jain's index over their shares that were served", jain(&shares)),
            ("one source with 2,000/s: served", greedy.took.len() as f64),
            ("lost or rejected", greedy.lost as f64),
        ],
        answered: (took.len() + greedy.took.len()) as u64,
        lasted: GREEDY_LASTS,
    })
}

fn share(seen: &Seen) -> f64 {
    seen.took.len() as f64 / (seen.took.len() as f64 + seen.lost as f64)
}

/// 1 where all have the same, 1 ÷ n where one has all.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = (shares.iter().sum::<f64>(), shares.iter().map(|share| share * share).sum::<f64>());
    sum * sum / (shares.len() as f64 * squares)
}

fn of_own(p99: &'static str, lost: &'static str, mut seen: Seen) -> [(&'static str, f64); 2] {
    seen.took.sort_unstable();
    [(p99, 1000.0 * seconds(&seen.took, 0.99)), (lost, seen.lost as f64)]
}

/// The time that a share of them did not exceed.
fn seconds(sorted: &[Duration], share: f64) -> f64 {
    percentile(sorted, share).map_or(f64::NAN, |time| time.as_secs_f64())
}

pub(crate) fn source(number: u32) -> Ipv4Addr {
    // In 198.19.0.0/16.
    Ipv4Addr::from_bits(Ipv4Addr::new(198, 19, 0, 1).to_bits() + number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_of_fairness() {
        assert_eq!(jain(&[1.0, 1.0, 1.0, 1.0]), 1.0);
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), 0.25);
    }
}
