//! Keeps the probing of instances in step with the run directory: with the records of `berth exec`, and
//! with the leases of siblings whose instance has no record (`--backend`).
//!
//! New instances are found in the directory. Whether a recorded instance is still alive is known from the lock on its record, by a
//! descriptor that is kept: it is not gone because the name is, or cannot be read for a moment. A lease that cannot be
//! read counts as none.

use crate::backend::prober::Probers;
use berth_node::instance::InstanceId;
use berth_node::registry::BerthDir;
use berth_node::registry::instance::{self, HeldRecord, IgnoredFile, Record};
use berth_node::registry::lease;
use berth_node::registry::watch::Watch;
use berth_os::clock;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::time::SystemTime;

#[derive(Debug, Clone)]
pub(crate) struct OwnShim {
    pub(crate) id: InstanceId,
    /// Its instance's address was configured: its record, if there is one, is ignored.
    pub(crate) given: bool,
    /// A node shim: an instance with a shim of its own is only its fallback.
    pub(crate) any: bool,
}

/// A live instance. Another value means another process.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LiveInstance {
    Recorded(Box<Record>),
    Leased(SocketAddr),
}

impl LiveInstance {
    fn address(&self) -> SocketAddr {
        match self {
            Self::Recorded(record) => record.address,
            Self::Leased(address) => *address,
        }
    }
}

#[derive(Debug, Default)]
struct RunDirContents {
    live: BTreeMap<InstanceId, LiveInstance>,
    /// The records of those that are recorded.
    held: BTreeMap<InstanceId, HeldRecord>,
    /// Instances with a live shim, the own one left out.
    shimmed: BTreeSet<InstanceId>,
    problems: BTreeSet<IgnoredFile>,
}

/// Reads records and leases.
fn read(berth: &BerthDir, own: &OwnShim) -> io::Result<RunDirContents> {
    let mut found = RunDirContents::default();
    let (boot, now) = (clock::boot_id()?, clock::boottime()?);
    let leases = lease::list(berth)?.found.into_iter();
    for lease in leases.filter(|lease| lease.instance != own.id && lease.is_live(&boot, now)) {
        found.live.extend(lease.backend.map(|address| (lease.instance.clone(), LiveInstance::Leased(address))));
        found.shimmed.insert(lease.instance);
    }
    let records = instance::list_live(berth)?;
    found.problems.extend(records.problems);
    for held in records.found.into_iter().filter(|held| !(own.given && held.record().instance == own.id)) {
        found.hold(held);
    }
    Ok(found)
}

impl RunDirContents {
    fn hold(&mut self, held: HeldRecord) {
        let record = held.record();
        let id = record.instance.clone();
        self.live.insert(id.clone(), LiveInstance::Recorded(Box::new(record.clone())));
        self.held.insert(id, held);
    }

    /// Adds the instances that are known to be alive and whose records were not found. A record that was found under the
    /// name of one is kept: another process could claim the name only because the record was gone.
    fn add(&mut self, alive: BTreeMap<InstanceId, HeldRecord>) {
        for (id, before) in alive {
            if !self.held.contains_key(&id) {
                self.hold(before);
            }
        }
    }
}

/// Follows a berth until it is dropped.
pub(crate) async fn follow(berth: BerthDir, own: OwnShim, mut probers: Probers) {
    let mut watch = Watch::new(&berth);
    let mut known: BTreeMap<InstanceId, LiveInstance> = BTreeMap::new();
    let mut held: BTreeMap<InstanceId, HeldRecord> = BTreeMap::new();
    let mut logged: BTreeSet<IgnoredFile> = BTreeSet::new();
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
        match read(&berth, &own) {
            Ok(mut found) => {
                broken = false;
                found.add(alive);
                let RunDirContents { live, held: records, shimmed, problems } = found;
                for problem in problems.difference(&logged) {
                    tracing::warn!("{problem}");
                }
                logged = problems;
                for id in known.keys().filter(|id| !live.contains_key(id)) {
                    probers.remove(id);
                }
                for (id, seen) in &live {
                    let renewed = known.get(id).is_some_and(|before| before != seen);
                    probers.insert(id, seen.address(), *id == own.id, renewed);
                    probers.set_fallback(id, own.any && shimmed.contains(id));
                }
                (known, held) = (live, records);
            }
            Err(error) => {
                if !std::mem::replace(&mut broken, true) {
                    tracing::warn!(directory = %berth.path().display(), %error, "cannot read the berth's directory, trying again");
                }
                for id in &ended {
                    probers.remove(id);
                    known.remove(id);
                }
                held = alive;
            }
        }
        if let Err(error) = instance::prune(&berth, SystemTime::now()) {
            tracing::debug!(%error, "cannot prune instance records");
        }
        watch.changed().await;
    }
}
