//! Keeps the probing of instances in step with the run directory: with the records of `berth exec`, and
//! with the leases of siblings whose instance has no record (`--backend`).
//!
//! New instances are found in the directory. Whether a recorded instance is still alive is known from the lock on its record, by a
//! descriptor that is kept: it is not gone because the name is, or cannot be read for a moment. A lease that cannot be read holds until
//! it would have expired.

use crate::backend::prober::Probers;
use berth_node::instance::InstanceId;
use berth_node::registry::BerthDir;
use berth_node::registry::instance::{self, HeldRecord, IgnoredFile, Record};
use berth_node::registry::lease::{self, Lease};
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
    leases: Vec<Lease>,
    /// Instances with a live shim, the own one left out.
    shimmed: BTreeSet<InstanceId>,
    problems: BTreeSet<IgnoredFile>,
}

/// Reads records and leases. A lease that exists and cannot be read holds as it was read before, in `known`.
fn read(berth: &BerthDir, own: &OwnShim, known: &[Lease]) -> io::Result<RunDirContents> {
    let mut found = RunDirContents { leases: lease::list(berth)?.found, ..RunDirContents::default() };
    for lease in known {
        let read = found.leases.iter().any(|read| read.instance == lease.instance);
        if !read && !lease::is_missing(berth, &lease.instance) {
            found.leases.push(lease.clone());
        }
    }
    let (boot, now) = (clock::boot_id()?, clock::boottime()?);
    found.leases.retain(|lease| lease.instance != own.id && lease.is_live(&boot, now));
    for lease in &found.leases {
        found.live.extend(lease.backend.map(|address| (lease.instance.clone(), LiveInstance::Leased(address))));
        found.shimmed.insert(lease.instance.clone());
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
    let mut known_leases: Vec<Lease> = Vec::new();
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
        match read(&berth, &own, &known_leases) {
            Ok(mut found) => {
                broken = false;
                found.add(alive);
                let RunDirContents { live, held: records, leases, shimmed, problems } = found;
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
                (known, held, known_leases) = (live, records, leases);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::probe::{Probe, ProbeConfig, ProbeKind};
    use crate::backend::{Table, TableWriter};
    use crate::metrics::Metrics;
    use crate::state::ShimState;
    use berth_node::registry::RunDir;
    use berth_node::terms::Phase;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::sync::watch;
    use tokio::time::timeout;

    fn lease(id: &str, address: &str, seconds: u32) -> Lease {
        let golden = include_bytes!("../../../../tests/golden/lease-v1.json");
        let golden = Lease::parse(golden, &"v1.34_b".parse().unwrap()).unwrap();
        let mut lease = Lease {
            instance: id.parse().unwrap(),
            backend: Some(address.parse().unwrap()),
            lease_duration_seconds: seconds,
            boot_id: clock::boot_id().unwrap(),
            ..golden
        };
        lease.renew(clock::boottime().unwrap(), SystemTime::now());
        lease
    }

    /// Puts it into its place as a later version of berth would, which this one does not read.
    fn of_another_format(berth: &BerthDir, id: &str) {
        let new = berth.leases().join(format!(".{id}.lease.new"));
        std::fs::write(&new, r#"{"version": 2}"#).unwrap();
        std::fs::rename(new, berth.leases().join(format!("{id}.json"))).unwrap();
    }

    fn find(table: &Table, id: &str) -> Option<(SocketAddr, u64)> {
        let found = table.instances.iter().find(|instance| instance.id.as_str() == id)?;
        Some((found.address, found.started))
    }

    #[tokio::test]
    async fn a_lease_that_cannot_be_read_holds_until_it_expires() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let temp = tempfile::tempdir().unwrap();
        let berth = RunDir::open(&temp.path().join("run")).unwrap().berth("10.0.0.5:6443".parse().unwrap()).unwrap();
        let writer = TableWriter::new(1, 1);
        let mut table = writer.subscribe();
        let (_state, state) = watch::channel(ShimState { phase: Phase::Joined, ..ShimState::default() });
        let own: InstanceId = "a".parse().unwrap();
        let metrics = Arc::new(Metrics::new(&own, 1, 8, writer.subscribe(), state, Vec::new()));
        let probe = Probe::new(ProbeConfig {
            kind: ProbeKind::Tcp,
            path: String::new(),
            ca: None,
            client: None,
            token: None,
            server_name: "localhost".try_into().unwrap(),
            timeout: Duration::from_secs(1),
        });
        let probers = Probers::new(writer, probe, ProbeKind::Tcp, Duration::from_secs(1), metrics);
        lease::write(&berth, &lease("b", "127.1.2.3:1", 600)).unwrap();
        tokio::spawn(follow(berth.clone(), OwnShim { id: own, given: true, any: false }, probers));
        let mut until = async |is: &dyn Fn(&Table) -> bool| {
            timeout(PATIENCE, table.wait_for(|table| is(table))).await.unwrap().unwrap().clone()
        };

        let before = until(&|table| find(table, "b").is_some()).await;
        of_another_format(&berth, "b");
        lease::write(&berth, &lease("c", "127.1.2.4:1", 600)).unwrap();
        let after = until(&|table| find(table, "c").is_some()).await;
        assert_eq!(find(&after, "b"), find(&before, "b"), "nothing is known against it");

        // A second later it has expired, whether it was seen meanwhile or not.
        lease::write(&berth, &lease("b", "127.1.2.5:1", 1)).unwrap();
        until(&|table| find(table, "b") != find(&before, "b")).await;
        of_another_format(&berth, "b");
        until(&|table| find(table, "b").is_none()).await;

        // And one that is removed is of a shim that ended.
        lease::remove(&berth, &lease("c", "127.1.2.4:1", 600)).unwrap();
        until(&|table| find(table, "c").is_none()).await;
    }
}
