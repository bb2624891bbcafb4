//! The storms that are the same for every service behind berth.

use super::clients::{Answers, Service, kept_connection, new_connections};
use super::{CALM, LONGEST, NODE, Round, StormOptions};
use crate::clients::{Failed, insist, is_set};
use anyhow::{Context, Result};
use berth_rehearse::stats::percentile;
use std::net::Ipv4Addr;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, sleep, timeout};

/// Time between two connections of the greedy source, and how long it connects.
const GREEDY_PERIOD: Duration = Duration::from_micros(500);
const GREEDY_LASTS: Duration = Duration::from_secs(30);

/// The number of other sources, and the time between two connections of each.
const OTHERS: u32 = 50;
const OTHERS_PERIOD: Duration = Duration::from_millis(500);

/// Time between two connections of the node's own client.
const OWN_PERIOD: Duration = Duration::from_millis(100);

/// The node's own client, on a thread of its own: in this process it must not wait for its turn behind the crowd.
struct OwnClient {
    stop: watch::Sender<bool>,
    thread: JoinHandle<Result<(Answers, Answers)>>,
}

impl OwnClient {
    fn start(service: impl Service) -> Self {
        let (stop, stopped) = watch::channel(false);
        let clients = async move || {
            let new = new_connections(NODE, service.clone(), OWN_PERIOD, is_set(stopped.clone()));
            let new = tokio::task::spawn_local(new);
            let kept = kept_connection(NODE, service, is_set(stopped)).await;
            Ok((new.await?, kept.context("the node's own client got no connection before the storm")?))
        };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            LocalSet::new().block_on(&runtime, clients())
        });
        Self { stop, thread }
    }

    /// Ends it; the answers on its new connections, and on its kept one.
    fn end(self) -> Result<(Answers, Answers)> {
        let _ = self.stop.send(true);
        self.thread.join().expect("it does not panic")
    }
}

/// A client of the crowd that was served.
struct Served {
    after: Duration,
    timed_out: u32,
    rejected: u32,
}

/// Retries until it is served; the connection stays open.
async fn client<S: Service>(from: Ipv4Addr, service: S) -> (Served, S::Connection) {
    let (began, mut timed_out, mut rejected) = (Instant::now(), 0, 0);
    let connection = insist(
        async || service.open(from).await,
        |failed| match failed {
            Failed::TimedOut => timed_out += 1,
            Failed::Rejected => rejected += 1,
        },
    );
    let connection = connection.await;
    (Served { after: began.elapsed(), timed_out, rejected }, connection)
}

/// All come at once and retry.
pub(super) async fn reconnect(options: &StormOptions, service: &impl Service) -> Result<Round> {
    let own = OwnClient::start(service.clone());
    sleep(CALM).await;
    let began = Instant::now();
    let mut crowd = JoinSet::new();
    for number in 0..options.clients {
        crowd.spawn_local(client(source(number % options.sources), service.clone()));
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
    let timed_out: u32 = served.iter().map(|(served, _)| served.timed_out).sum();
    let rejected: u32 = served.iter().map(|(served, _)| served.rejected).sum();
    let mut figures = vec![
        ("clients that were served", after.len() as f64),
        ("s until the last was", if in_time { lasted.as_secs_f64() } else { f64::INFINITY }),
        ("s until half of them were", seconds(&after, 0.5)),
        ("times that one gave up", f64::from(timed_out)),
        ("times that one was refused or reset", f64::from(rejected)),
    ];
    // The node's client has one kept connection more.
    let answered = (after.len() + own_new.took.len() + 1) as u64;
    figures.extend(of_own("node's own, new connections: p99 ms", own_new));
    figures.extend(of_own("node's own, kept connection: p99 ms", own_kept));
    Ok(Round { figures, answered, lasted })
}

/// One source in a loop, while others open a few connections.
pub(super) async fn greedy(service: &impl Service) -> Result<Round> {
    let (stop, stopped) = watch::channel(false);
    let mut others = JoinSet::new();
    for number in 1..=OTHERS {
        others.spawn_local(new_connections(source(number), service.clone(), OTHERS_PERIOD, is_set(stopped.clone())));
    }
    sleep(CALM).await;
    let greedy = new_connections(source(0), service.clone(), GREEDY_PERIOD, sleep(GREEDY_LASTS)).await;
    let _ = stop.send(true);
    let others = others.join_all().await;
    let lost: u64 = others.iter().map(|answers| answers.lost).sum();
    let shares: Vec<_> = others.iter().map(share).collect();
    let mut took: Vec<_> = others.into_iter().flat_map(|answers| answers.took).collect();
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

fn share(answers: &Answers) -> f64 {
    answers.took.len() as f64 / (answers.took.len() as f64 + answers.lost as f64)
}

/// Jain's index of fairness: 1 where all have the same, 1 ÷ n where one has everything.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = (shares.iter().sum::<f64>(), shares.iter().map(|share| share * share).sum::<f64>());
    sum * sum / (shares.len() as f64 * squares)
}

fn of_own(p99: &'static str, mut answers: Answers) -> [(&'static str, f64); 2] {
    answers.took.sort_unstable();
    [(p99, 1000.0 * seconds(&answers.took, 0.99)), ("lost", answers.lost as f64)]
}

fn seconds(sorted: &[Duration], share: f64) -> f64 {
    percentile(sorted, share).map_or(f64::NAN, |time| time.as_secs_f64())
}

/// An address of a client, in 198.19.0.0/16.
pub(super) fn source(number: u32) -> Ipv4Addr {
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
