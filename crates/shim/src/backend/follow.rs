//! Keeps the probing of instances in step with the run directory: with the records of `berth exec`,
//! and with the leases of siblings that have an instance without a record (`--backend`).
//!
//! New instances are found in the directory. The lock on an instance's record, by a kept
//! descriptor, shows whether the instance is alive: a name that is removed, or unreadable for a
//! moment, does not mean that the instance is gone. A lease that cannot be read holds until its
//! expiry.

use crate::backend::prober::{Probers, SupervisorPath};
use berth_node::instance_id::InstanceId;
use berth_node::registry::BerthDir;
use berth_node::registry::instance::{self, HeldRecord, IgnoredFile};
use berth_node::registry::lease::{self, Lease};
use berth_node::registry::watch::Watch;
use berth_os::clock;
use berth_os::explained;
use berth_os::off_thread::OffThread;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

/// Longest wait for a read of the directory.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(crate) struct OwnShim {
    pub(crate) id: InstanceId,
    /// True if the instance's address was configured. A record of this instance is ignored then.
    pub(crate) given: bool,
    /// True if this shim serves all instances of the node. An instance with a shim of its own is
    /// only a fallback then.
    pub(crate) any: bool,
}

/// A live instance. A different value means a different process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LiveInstance {
    address: SocketAddr,
    /// Inode of the instance's record, if there is a record. The record of the next process may
    /// have the same content.
    inode: Option<u64>,
}

/// Content of the run directory, as last read.
#[derive(Debug, Clone, Default)]
struct RunDirContents {
    live: BTreeMap<InstanceId, LiveInstance>,
    /// Instances' records that are kept open. The lock on a record shows whether its instance is
    /// alive.
    held: BTreeMap<InstanceId, HeldRecord>,
    leases: Vec<Lease>,
    /// Instances that have a live shim. This shim's own instance is left out.
    shimmed: BTreeSet<InstanceId>,
    problems: BTreeSet<IgnoredFile>,
}

/// Reads records and leases. If a lease exists and cannot be read, the lease in `known` counts.
fn read_run_dir(berth: &BerthDir, own: &OwnShim, known: &[Lease]) -> io::Result<RunDirContents> {
    let mut found = RunDirContents {
        leases: lease::list(berth)?.found,
        ..RunDirContents::default()
    };
    for lease in known {
        let read = found
            .leases
            .iter()
            .any(|read| read.instance == lease.instance);
        if !read && !lease::is_missing(berth, &lease.instance) {
            found.leases.push(lease.clone());
        }
    }
    let (boot, now) = (clock::boot_id()?, clock::read_boottime()?);
    found
        .leases
        .retain(|lease| lease.instance != own.id && lease.is_live(&boot, now));
    for lease in &found.leases {
        let leased = lease.backend.map(|address| {
            (
                lease.instance.clone(),
                LiveInstance {
                    address,
                    inode: None,
                },
            )
        });
        found.live.extend(leased);
        found.shimmed.insert(lease.instance.clone());
    }
    let records = instance::list_live(berth)?;
    found.problems.extend(records.problems);
    for held in records
        .found
        .into_iter()
        .filter(|held| !(own.given && held.record().instance == own.id))
    {
        found.add_held(held);
    }
    Ok(found)
}

impl RunDirContents {
    fn add_held(&mut self, held: HeldRecord) {
        let id = held.record().instance.clone();
        let live = LiveInstance {
            address: held.record().address,
            inode: Some(held.inode()),
        };
        self.live.insert(id.clone(), live);
        self.held.insert(id, held);
    }

    /// Reads the directory again. Keeps instances that are alive although their records were not
    /// found. A record that was found under the name of a live instance is kept: another process
    /// could claim the name only because the old record was gone.
    ///
    /// If the directory cannot be read, returns the known content without the ended instances, and
    /// an error.
    fn read_run_dir_again(mut self, berth: &BerthDir, own: &OwnShim) -> (Self, io::Result<()>) {
        let found = read_run_dir(berth, own, &self.leases);
        if let Err(error) = instance::prune(berth, SystemTime::now()) {
            tracing::debug!(%error, "cannot prune instance records");
        }
        let (alive, ended): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut self.held)
            .into_iter()
            .partition(|(_, held)| held.is_alive());
        match found {
            Ok(mut found) => {
                for (id, before) in alive {
                    if !found.held.contains_key(&id) {
                        found.add_held(before);
                    }
                }
                (found, Ok(()))
            }
            Err(error) => {
                self.live.retain(|id, _| !ended.contains_key(id));
                (
                    Self {
                        held: alive,
                        ..self
                    },
                    Err(error),
                )
            }
        }
    }
}

/// Follows the run directory, and tells the probers of its instances. Ends only when dropped.
pub(crate) async fn follow_berth(
    berth: BerthDir,
    own: OwnShim,
    files: OffThread,
    mut probers: Probers,
) {
    let mut watch = Watch::new(&berth);
    let mut known = RunDirContents::default();
    let mut broken = false;
    loop {
        let (before, directory, shim) = (known.clone(), berth.clone(), own.clone());
        let looked = files
            .call_within(READ_TIMEOUT, move || {
                before.read_run_dir_again(&directory, &shim)
            })
            .await;
        let (found, read) = looked.unwrap_or_else(|error| (known.clone(), Err(error)));
        match read {
            Ok(()) => broken = false,
            Err(error) if !std::mem::replace(&mut broken, true) => {
                tracing::warn!(
                    code = %explained::RUN_DIRECTORY_UNREADABLE,
                    directory = %berth.path().display(),
                    %error,
                    "cannot read the berth's directory, trying again"
                );
            }
            Err(_) => {}
        }
        for problem in found.problems.difference(&known.problems) {
            tracing::warn!(code = %explained::FILE_IGNORED, "{problem}");
        }
        for id in known.live.keys().filter(|id| !found.live.contains_key(id)) {
            probers.remove(id);
        }
        for (id, seen) in &found.live {
            let renewed = known.live.get(id).is_some_and(|before| before != seen);
            let pass =
                SupervisorPath::from_record(&berth, found.held.get(id).map(HeldRecord::record));
            probers.insert(id, seen.address, *id == own.id, renewed, pass);
            probers.set_fallback(id, own.any && found.shimmed.contains(id));
        }
        known = found;
        watch.wait_for_change().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::probe::{Probe, ProbeConfig, ProbeKind};
    use crate::backend::{Table, TableWriter};
    use crate::config::PassMode;
    use crate::metrics::Metrics;
    use crate::state::ShimState;
    use berth_node::registry::RunDir;
    use berth_node::registry::instance::{Claimant, claim};
    use berth_node::terms::Phase;
    use std::sync::Arc;
    use tempfile::TempDir;
    use tokio::sync::watch;
    use tokio::time::timeout;

    fn make_lease(id: &str, address: &str, seconds: u32) -> Lease {
        let golden = include_bytes!("../../../../tests/data/golden/lease-v1.json");
        let golden = Lease::parse(golden, &"v1.34_b".parse().unwrap()).unwrap();
        let mut lease = Lease {
            instance: id.parse().unwrap(),
            backend: Some(address.parse().unwrap()),
            lease_duration_seconds: seconds,
            boot_id: clock::boot_id().unwrap(),
            ..golden
        };
        lease.renew(clock::read_boottime().unwrap(), SystemTime::now());
        lease
    }

    /// Puts a lease into place as a later version of berth would, in a format that this version
    /// does not read.
    fn write_newer_format(berth: &BerthDir, id: &str) {
        let new = berth.leases_path().join(format!(".{id}.lease.new"));
        std::fs::write(&new, r#"{"version": 2}"#).unwrap();
        std::fs::rename(new, berth.leases_path().join(format!("{id}.json"))).unwrap();
    }

    fn find_instance(table: &Table, id: &str) -> Option<(SocketAddr, u64)> {
        let found = table
            .instances
            .iter()
            .find(|instance| instance.id.as_str() == id)?;
        Some((found.address, found.started))
    }

    /// A run directory that is followed, and the table of its instances.
    struct FollowedBerth {
        _temp: TempDir,
        berth: BerthDir,
        table: watch::Receiver<Arc<Table>>,
        _state: watch::Sender<ShimState>,
    }

    impl FollowedBerth {
        async fn wait_until(&mut self, is: impl Fn(&Table) -> bool) -> Arc<Table> {
            const LONG: Duration = Duration::from_secs(60);
            timeout(LONG, self.table.wait_for(|table| is(table)))
                .await
                .unwrap()
                .unwrap()
                .clone()
        }
    }

    fn follow_new_berth() -> FollowedBerth {
        let temp = tempfile::tempdir().unwrap();
        let berth = RunDir::open(&temp.path().join("run"))
            .unwrap()
            .berth("10.0.0.5:6443".parse().unwrap())
            .unwrap();
        let writer = TableWriter::new(1, 1);
        let table = writer.subscribe();
        let (_state, state) = watch::channel(ShimState {
            phase: Phase::Joined,
            ..ShimState::default()
        });
        let own: InstanceId = "a".parse().unwrap();
        let metrics = Arc::new(Metrics::new(
            &own,
            1,
            8,
            writer.subscribe(),
            state,
            Vec::new(),
        ));
        let probe = Probe::new(ProbeConfig {
            kind: ProbeKind::Tcp,
            path: String::new(),
            ca: None,
            client: None,
            token: None,
            server_name: "localhost".try_into().unwrap(),
            timeout: Duration::from_secs(1),
        });
        let interval = Duration::from_secs(1);
        let probers = Probers::new(
            writer,
            probe,
            ProbeKind::Tcp,
            interval,
            PassMode::Relay,
            metrics,
        );
        let files = OffThread::new("the run directory");
        tokio::spawn(follow_berth(
            berth.clone(),
            OwnShim {
                id: own,
                given: true,
                any: false,
            },
            files,
            probers,
        ));
        FollowedBerth {
            _temp: temp,
            berth,
            table,
            _state,
        }
    }

    /// Both records have the same time, in seconds, and the same pid, because pids can be equal in
    /// different containers.
    #[tokio::test]
    async fn a_new_instance_with_an_identical_record_is_new() {
        let mut followed = follow_new_berth();
        let b: InstanceId = "b".parse().unwrap();
        let claimant = Claimant {
            instance: &b,
            advertise: "10.0.0.5".parse().unwrap(),
            supervisor: None,
            pid: Some(7),
        };
        let berth = followed.berth.clone();
        let claimed =
            || claim(&berth, &claimant, |_, _| Ok("127.1.2.3:1".parse().unwrap())).unwrap();
        loop {
            let first = claimed();
            let before = find_instance(
                &*followed
                    .wait_until(|table| find_instance(table, "b").is_some())
                    .await,
                "b",
            );
            let record = std::fs::read(first.path()).unwrap();
            drop(first);
            let second = claimed();
            if std::fs::read(second.path()).unwrap() == record {
                followed
                    .wait_until(|table| {
                        find_instance(table, "b").is_some_and(|now| Some(now) != before)
                    })
                    .await;
                return;
            }
            drop(second);
        }
    }

    #[tokio::test]
    async fn a_lease_that_cannot_be_read_holds_until_it_expires() {
        let mut followed = follow_new_berth();
        let berth = followed.berth.clone();
        lease::write(&berth, &make_lease("b", "127.1.2.3:1", 600)).unwrap();
        let before = followed
            .wait_until(|table| find_instance(table, "b").is_some())
            .await;
        write_newer_format(&berth, "b");
        lease::write(&berth, &make_lease("c", "127.1.2.4:1", 600)).unwrap();
        let after = followed
            .wait_until(|table| find_instance(table, "c").is_some())
            .await;
        assert_eq!(
            find_instance(&after, "b"),
            find_instance(&before, "b"),
            "nothing is known against it"
        );

        // The known lease expires after a second, although the file now has a format that cannot be
        // read.
        lease::write(&berth, &make_lease("b", "127.1.2.5:1", 1)).unwrap();
        followed
            .wait_until(|table| find_instance(table, "b") != find_instance(&before, "b"))
            .await;
        write_newer_format(&berth, "b");
        followed
            .wait_until(|table| find_instance(table, "b").is_none())
            .await;

        // A removed lease belongs to a shim that ended.
        lease::remove(&berth, &make_lease("c", "127.1.2.4:1", 600)).unwrap();
        followed
            .wait_until(|table| find_instance(table, "c").is_none())
            .await;
    }
}
