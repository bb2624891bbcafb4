//! Keeps the probing of instances in step with the run directory: with the records of `berth exec`, and
//! with the leases of siblings whose instance has no record (`--backend`).
//!
//! The directory says who came. Whether a recorded instance lives on, its lock says, by a descriptor that is kept:
//! nobody is gone because a name is gone, or cannot be read for a moment.

use super::BerthDir;
use super::instance::{HeldRecord, Problem, Record};
use super::repair::Repair;
use super::watch::Watch;
use super::{instance, lease};
use crate::backend::prober::Probers;
use crate::instance::InstanceId;
use crate::metrics::Metrics;
use crate::os::clock;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::time::sleep;

/// Time between two looks while a record is missing, or was written again: no notice tells when an instance ends
/// whose own file has no name, and until that is seen its successor cannot claim the name.
const PAUSE: Duration = Duration::from_millis(100);

/// Whose shim looks.
#[derive(Debug, Clone)]
pub struct Own {
    /// Its instance's name.
    pub id: InstanceId,
    /// Its instance's address was given: its record, if there is one, says nothing.
    pub given: bool,
    /// A node shim: an instance with a shim of its own is only its fallback.
    pub any: bool,
}

/// A live instance. Another value means another process.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Recorded(Box<Record>),
    Leased(SocketAddr),
}

impl Seen {
    fn address(&self) -> SocketAddr {
        match self {
            Self::Recorded(record) => record.address,
            Self::Leased(address) => *address,
        }
    }
}

/// What a look at the run directory shows.
#[derive(Debug, Default)]
struct Look {
    live: BTreeMap<InstanceId, Seen>,
    /// The records of those that are recorded.
    held: BTreeMap<InstanceId, HeldRecord>,
    /// Instances with a live shim, the own one left out.
    shimmed: BTreeSet<InstanceId>,
    problems: BTreeSet<Problem>,
}

fn look(berth: &BerthDir, own: &Own) -> io::Result<Look> {
    let mut look = Look::default();
    let (boot, now) = (clock::boot_id()?, clock::boottime()?);
    for lease in lease::list(berth)?.leases {
        if lease.instance != own.id && lease.is_live(&boot, now) {
            look.live.extend(lease.backend.map(|address| (lease.instance.clone(), Seen::Leased(address))));
            look.shimmed.insert(lease.instance);
        }
    }
    let (records, problems) = instance::list_live(berth)?;
    look.problems.extend(problems);
    for held in records.into_iter().filter(|held| !(own.given && held.record().instance == own.id)) {
        look.hold(held);
    }
    Ok(look)
}

impl Look {
    fn hold(&mut self, held: HeldRecord) {
        let record = held.record();
        let id = record.instance.clone();
        self.live.insert(id.clone(), Seen::Recorded(Box::new(record.clone())));
        self.held.insert(id, held);
    }

    /// Adds who is known to live, seen or not. Of two descriptors of one process the earlier is kept: that file is the
    /// one that the process itself locked.
    fn add(&mut self, alive: BTreeMap<InstanceId, HeldRecord>) {
        for (id, before) in alive {
            // Another process has the name, which it could claim only because the record was gone: it is who is meant.
            let succeeded = |now: &HeldRecord| now.record() != before.record();
            if !self.held.get(&id).is_some_and(succeeded) {
                self.hold(before);
            }
        }
    }
}

/// Follows a berth until it is dropped.
pub async fn follow(berth: BerthDir, own: Own, mut probers: Probers, metrics: Arc<Metrics>) {
    let mut watch = Watch::new(&berth);
    let mut repair = Repair::new(berth.clone(), metrics);
    let mut known: BTreeMap<InstanceId, Seen> = BTreeMap::new();
    let mut held: BTreeMap<InstanceId, HeldRecord> = BTreeMap::new();
    let mut told: BTreeSet<Problem> = BTreeSet::new();
    let mut broken = false;
    loop {
        let mut ended = Vec::new();
        let mut alive = BTreeMap::new();
        for (id, before) in held {
            match before.if_alive() {
                Some(still) => drop(alive.insert(id, still)),
                None => ended.push(id),
            }
        }
        // Before anybody looks: a lock of our own in its stead is no sign of life.
        ended.iter().for_each(|id| repair.ended(id));
        repair.folders();
        match look(&berth, &own) {
            Ok(mut looked) => {
                broken = false;
                looked.add(alive);
                let Look { live, held: found, shimmed, problems } = looked;
                for problem in problems.difference(&told) {
                    tracing::warn!("{problem}");
                }
                told = problems;
                for id in known.keys().filter(|id| !live.contains_key(id)) {
                    probers.strike(id);
                }
                for (id, seen) in &live {
                    let renewed = known.get(id).is_some_and(|before| before != seen);
                    probers.enter(id, seen.address(), *id == own.id, renewed);
                    probers.set_fallback(id, own.any && shimmed.contains(id));
                }
                for (_, record) in found.iter().filter(|(id, _)| **id == own.id || own.any && !shimmed.contains(id)) {
                    repair.record(record);
                }
                (known, held) = (live, found);
            }
            Err(error) => {
                if !std::mem::replace(&mut broken, true) {
                    tracing::warn!(folder = %berth.path().display(), %error, "cannot look at the berth's folder, trying again");
                }
                for id in &ended {
                    probers.strike(id);
                    known.remove(id);
                }
                held = alive;
            }
        }
        if let Err(error) = instance::prune(&berth, SystemTime::now()) {
            tracing::debug!(%error, "cannot prune instance records");
        }
        tokio::select! {
            () = watch.changed() => {}
            () = sleep(PAUSE), if repair.is_busy() => {}
        }
    }
}
