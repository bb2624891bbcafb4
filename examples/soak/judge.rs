//! What became of the connections.
//!
//! Lost, as the design defines it: a new connection that is refused, reset or unanswered for 15 s, or a stream
//! that ended before its instance ended it. Allowed is only what a kill took: the connections that the
//! killed shim had accepted, by their clients' addresses, and those that the killed instance had begun to answer, by its name.
//! Both are written down while the process stands still, before it is killed.

use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Lost connections that are shown.
const SHOWN: usize = 20;

#[derive(Debug, Default)]
pub(crate) struct Judge(Mutex<Record>);

#[derive(Debug)]
struct Record {
    began: Instant,
    served: BTreeMap<&'static str, u64>,
    slowest: Duration,
    /// Streams that their instance ended.
    ended: u64,
    allowed: BTreeMap<&'static str, u64>,
    lost: Vec<String>,
    control: (u64, u64),
    accepted_by_killed: HashSet<SocketAddr>,
    killed: HashSet<String>,
}

impl Default for Record {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            served: BTreeMap::new(),
            slowest: Duration::ZERO,
            ended: 0,
            allowed: BTreeMap::new(),
            lost: Vec::new(),
            control: (0, 0),
            accepted_by_killed: HashSet::new(),
            killed: HashSet::new(),
        }
    }
}

impl Judge {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn served(&self, kind: &'static str, took: Duration) {
        let mut record = self.record();
        *record.served.entry(kind).or_default() += 1;
        record.slowest = record.slowest.max(took);
    }

    pub(crate) fn ended_by_instance(&self) {
        self.record().ended += 1;
    }

    /// A connection of this client failed, which this instance had begun to answer.
    pub(crate) fn failed(&self, kind: &'static str, client: Option<SocketAddr>, instance: Option<&str>, why: &str) {
        let mut record = self.record();
        if client.is_some_and(|client| record.accepted_by_killed.contains(&client)) {
            *record.allowed.entry("accepted by a shim that was killed").or_default() += 1;
        } else if instance.is_some_and(|instance| record.killed.contains(instance)) {
            *record.allowed.entry("answered by an instance that was killed").or_default() += 1;
        } else {
            let at = record.began.elapsed().as_secs_f64();
            let client = client.map_or_else(|| "no address".into(), |client| client.to_string());
            let line =
                format!("at {at:.1} s, {kind} from {client}, instance {}: {why}", instance.unwrap_or("none yet"));
            eprintln!("LOST {line}");
            record.lost.push(line);
        }
    }

    pub(crate) fn control(&self, served: bool) {
        let mut record = self.record();
        record.control.0 += 1;
        record.control.1 += u64::from(!served);
    }

    pub(crate) fn shim_is_killed(&self, accepted: impl IntoIterator<Item = SocketAddr>) {
        self.record().accepted_by_killed.extend(accepted);
    }

    pub(crate) fn instance_is_killed(&self, name: &str) {
        self.record().killed.insert(name.to_owned());
    }

    /// Seconds since the start, for what else is said.
    pub(crate) fn now(&self) -> f64 {
        self.record().began.elapsed().as_secs_f64()
    }

    pub(crate) fn is_good(&self) -> bool {
        let record = self.record();
        // A control that loses nothing shows that nothing would be seen.
        record.lost.is_empty() && record.control.1 > 0 && record.served.values().all(|served| *served > 0)
    }

    pub(crate) fn print(&self) {
        let record = self.record();
        let named =
            |counts: &BTreeMap<&str, u64>| crate::list(counts.iter().map(|(name, count)| format!("{count} {name}")));
        println!("served: {}", named(&record.served));
        println!("slowest: {:.3} s; streams ended by their instance: {}", record.slowest.as_secs_f64(), record.ended);
        println!("allowed, by kills: {}", named(&record.allowed));
        println!("control, dialling an instance's own address: {} of {} lost", record.control.1, record.control.0);
        println!("lost: {}", record.lost.len());
        for line in record.lost.iter().take(SHOWN) {
            println!("  {line}");
        }
    }
}
