//! Which connections were served, and which were lost.
//!
//! Lost, as the design defines it: a new connection that is refused, reset or unanswered for 15 s, or a stream
//! that ended before its instance ended it. Allowed is only what a kill took: the connections that the
//! killed shim had accepted, by their clients' addresses, and those that the killed instance had begun to answer, by its name.
//! Both are recorded while the process is stopped, before it is killed.

use super::list;
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What clients do. Each must have been served: a run without such clients could not lose any.
const KINDS: [&str; 6] = ["new", "ping", "bulk", "slow reader", "upload", "port check"];

/// Lost connections that are shown.
const SHOWN: usize = 20;

#[derive(Debug, Default)]
pub(crate) struct Judge(Mutex<Record>);

/// What happened when, in seconds since the start.
#[derive(Debug, Default, Clone)]
pub(super) struct Timeline {
    /// New connections that were answered, and after how many milliseconds.
    pub(super) served: Vec<(f64, f64)>,
    pub(super) allowed: Vec<f64>,
    pub(super) lost: Vec<f64>,
}

#[derive(Debug)]
struct Record {
    began: Instant,
    served: BTreeMap<&'static str, u64>,
    slowest: Duration,
    timeline: Timeline,
    /// Streams that their instance ended.
    ended: u64,
    allowed: BTreeMap<&'static str, u64>,
    lost: Vec<String>,
    accepted_by_killed: HashSet<SocketAddr>,
    killed: HashSet<String>,
}

impl Default for Record {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            served: BTreeMap::new(),
            slowest: Duration::ZERO,
            timeline: Timeline::default(),
            ended: 0,
            allowed: BTreeMap::new(),
            lost: Vec::new(),
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
        if kind == "new" {
            let at = record.began.elapsed().as_secs_f64();
            record.timeline.served.push((at, took.as_secs_f64() * 1e3));
        }
    }

    pub(crate) fn ended_by_instance(&self) {
        self.record().ended += 1;
    }

    /// Records a failed connection: its client, and the instance that had begun to answer.
    pub(crate) fn failed(&self, kind: &'static str, client: Option<SocketAddr>, instance: Option<&str>, why: &str) {
        let mut record = self.record();
        let at = record.began.elapsed().as_secs_f64();
        let allowed = if client.is_some_and(|client| record.accepted_by_killed.contains(&client)) {
            Some("accepted by a shim that was killed")
        } else if instance.is_some_and(|instance| record.killed.contains(instance)) {
            Some("answered by an instance that was killed")
        } else {
            None
        };
        if let Some(allowed) = allowed {
            *record.allowed.entry(allowed).or_default() += 1;
            return record.timeline.allowed.push(at);
        }
        let client = client.map_or_else(|| "no address".into(), |client| client.to_string());
        let line = format!("at {at:.1} s, {kind} from {client}, instance {}: {why}", instance.unwrap_or("none yet"));
        eprintln!("LOST {line}");
        record.lost.push(line);
        record.timeline.lost.push(at);
    }

    pub(crate) fn shim_is_killed(&self, accepted: impl IntoIterator<Item = SocketAddr>) {
        self.record().accepted_by_killed.extend(accepted);
    }

    pub(crate) fn instance_is_killed(&self, name: &str) {
        self.record().killed.insert(name.to_owned());
    }

    /// Seconds since the start.
    pub(crate) fn now(&self) -> f64 {
        self.record().began.elapsed().as_secs_f64()
    }

    /// The kinds of which no client was served yet.
    pub(crate) fn unserved(&self) -> Vec<&'static str> {
        let record = self.record();
        KINDS.into_iter().filter(|kind| !record.served.contains_key(kind)).collect()
    }

    pub(super) fn timeline(&self) -> Timeline {
        self.record().timeline.clone()
    }

    pub(crate) fn lost(&self) -> usize {
        self.record().lost.len()
    }

    pub(crate) fn is_good(&self) -> bool {
        self.lost() == 0 && self.unserved().is_empty()
    }

    pub(crate) fn print(&self) {
        let record = self.record();
        println!("served: {}", list(&record.served, " "));
        println!("slowest: {:.3} s; streams ended by their instance: {}", record.slowest.as_secs_f64(), record.ended);
        println!("allowed, by kills: {}", list(&record.allowed, " "));
        println!("lost: {}", record.lost.len());
        for line in record.lost.iter().take(SHOWN) {
            println!("  {line}");
        }
        drop(record);
        let unserved = self.unserved();
        if !unserved.is_empty() {
            println!("NEVER SERVED: {}", unserved.join(", "));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_good_if_every_kind_was_served_and_none_lost() {
        let judge = Judge::default();
        for kind in KINDS {
            assert!(!judge.is_good() && judge.unserved().contains(&kind));
            judge.served(kind, Duration::ZERO);
        }
        assert!(judge.is_good());
        judge.failed("new", None, None, "refused");
        assert!(!judge.is_good());
    }

    #[test]
    fn only_what_a_kill_took_is_allowed() {
        let judge = Judge::default();
        let client = |port| Some(SocketAddr::from(([127, 1, 2, 3], port)));
        judge.shim_is_killed(client(1));
        judge.instance_is_killed("b#7");
        judge.failed("new", client(1), None, "reset");
        judge.failed("kept", client(2), Some("b#7"), "reset");
        assert_eq!(judge.lost(), 0);
        judge.failed("new", client(2), None, "reset");
        judge.failed("kept", client(2), Some("b#8"), "reset");
        judge.failed("port check", None, None, "refused");
        assert_eq!(judge.lost(), 3);
    }
}
