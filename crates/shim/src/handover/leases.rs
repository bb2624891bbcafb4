//! The own lease, which proves that this shim is alive, and the siblings' leases.

use super::Group;
use super::machine::Time;
use super::peers::PeerEvent;
use crate::shared::Shared;
use berth_node::registry::RunDir;
use berth_node::registry::lease::{self, Lease};
use berth_os::clock;
use berth_os::explained;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;
use tokio::runtime::Handle;

pub(super) struct OwnLease {
    boot_id: String,
    acquired: SystemTime,
    /// Time of the last renewal, counted from boot. Leases are measured by this clock.
    pub(super) renewed: Time,
    /// True if the last attempt to write the lease succeeded.
    written: bool,
    /// `workers` has every relaying thread. `alive` counts the threads that have responded since
    /// the last renewal.
    workers: Vec<Handle>,
    alive: Arc<AtomicU64>,
}

impl OwnLease {
    pub(super) fn new(workers: Vec<Handle>, now: Time) -> io::Result<Self> {
        Ok(Self {
            boot_id: clock::boot_id()?,
            acquired: SystemTime::now(),
            renewed: now,
            written: true,
            workers,
            alive: Arc::default(),
        })
    }
}

fn write_lease_file(shared: &Shared, lease: &Lease) -> io::Result<()> {
    lease::write(&shared.berth, lease).or_else(|error| match error.kind() {
        // The directory was removed, and is made again. Without leases, connected siblings take
        // each other for hung.
        io::ErrorKind::NotFound => {
            let place = &shared.config.place;
            let berth = RunDir::open(&place.run_dir)
                .and_then(|run_dir| run_dir.berth(place.berth_address()));
            lease::write(&berth.map_err(io::Error::other)?, lease)
        }
        _ => Err(error),
    })
}

impl Group {
    /// Sends every worker a task that proves the worker alive.
    pub(super) fn ping_workers(&self) {
        self.lease.alive.store(0, Relaxed);
        for worker in &self.lease.workers {
            let alive = self.lease.alive.clone();
            worker.spawn(async move { alive.fetch_add(1, Relaxed) });
        }
    }

    /// Renews the lease if every worker responded since the last renewal.
    pub(super) fn renew_lease(&mut self) {
        let now = self.now();
        let silent = now.saturating_sub(self.lease.renewed);
        if silent >= self.config.lease {
            let who = match self.siblings.writers.len() {
                0 => {
                    "no sibling was there to accept from the listeners of this shim, so new clients waited"
                }
                _ => {
                    "siblings that did not stall accepted from the listeners of this shim meanwhile"
                }
            };
            tracing::warn!(
                code = %explained::STALLED,
                seconds = silent.as_secs(),
                "this shim stalled beyond its lease: {who}"
            );
        }
        let workers = self.lease.workers.len() as u64;
        if self.lease.alive.load(Relaxed) >= workers {
            if self.shared.update_state(|state| state.blocked = false) {
                tracing::info!("every relaying thread answers again");
            }
            self.lease.renewed = now;
            self.write_lease();
            self.shared.metrics.count_renewal("ok");
            self.ping_workers();
        } else {
            if self.shared.update_state(|state| state.blocked = true) {
                tracing::warn!(
                    code = %explained::THREAD_HANGS,
                    "a relaying thread does not answer: the lease is not renewed, siblings will take over"
                );
            }
            self.shared.metrics.count_renewal("blocked");
        }
        self.report_unconnected();
        for holder in self.machine.silent_siblings() {
            if self.logged_problems.insert(format!("{holder:?} is silent")) {
                tracing::warn!(
                    code = %explained::SIBLING_SILENT,
                    sibling = holder.0,
                    "a sibling is connected and sends no updates: no guards are exchanged with it"
                );
            }
        }
        self.start_listing_listeners();
    }

    /// Reports siblings without a connection. Two such siblings hold no duplicates of each other's
    /// listeners. If one of them leaves, the clients in its queue are lost.
    fn report_unconnected(&mut self) {
        let unconnected = self.machine.unconnected_siblings();
        for holder in &unconnected {
            if self.siblings.logged_unconnected.insert(*holder) {
                let instance = self
                    .siblings
                    .instances
                    .get(holder)
                    .map(tracing::field::display);
                let why = self
                    .siblings
                    .unreachable
                    .get(holder)
                    .map_or("the sibling does not dial", String::as_str);
                tracing::warn!(
                    code = %explained::SIBLING_NOT_CONNECTED,
                    instance,
                    "a live sibling has had no connection to this shim for longer than a lease, so neither shim guards \
                     the other shim's listeners: {why}"
                );
            }
        }
        let names: Vec<_> = unconnected
            .iter()
            .filter_map(|holder| self.siblings.instances.get(holder).cloned())
            .collect();
        self.shared
            .metrics
            .siblings_unconnected
            .set(i64::try_from(names.len()).unwrap_or(i64::MAX));
        self.shared.update_state(|state| state.unconnected = names);
    }

    pub(super) fn current_lease(&self) -> Lease {
        let announce = self.machine.announce();
        Lease {
            version: lease::VERSION,
            holder_identity: self.me,
            lease_duration_seconds: u32::try_from(self.config.lease.as_secs())
                .unwrap_or(u32::MAX)
                .max(1),
            acquire_time: self.lease.acquired,
            renew_time: SystemTime::now(),
            lease_transitions: 0,
            instance: self.shared.instance.clone(),
            backend: self.config.backend,
            state: announce.phase,
            ready: announce.ready,
            reachable: announce.reachable,
            listen: self.machine.addresses().to_vec(),
            berth_version: berth_node::VERSION.to_owned(),
            boot_id: self.lease.boot_id.clone(),
            expires_boottime_ms: u64::try_from(
                (self.lease.renewed + self.config.lease).as_millis(),
            )
            .unwrap_or(u64::MAX),
        }
    }

    fn prepare_lease_write(&self) -> impl Future<Output = io::Result<()>> + Send + use<> {
        let (shared, lease, most) = (
            self.shared.clone(),
            self.current_lease(),
            self.request_timeout(),
        );
        let run_dir = shared.run_dir.clone();
        async move {
            run_dir
                .call_within(most, move || write_lease_file(&shared, &lease))
                .await
                .flatten()
        }
    }

    pub(super) async fn write_first_lease(&mut self) {
        let written = self.prepare_lease_write().await;
        self.on_written(written);
    }

    pub(super) fn write_lease(&self) {
        let (writing, events) = (self.prepare_lease_write(), self.siblings.events.clone());
        tokio::spawn(async move { events.send(PeerEvent::Written(writing.await)) });
    }

    pub(super) fn on_written(&mut self, written: io::Result<()>) {
        let before = std::mem::replace(&mut self.lease.written, written.is_ok());
        if let Err(error) = written {
            self.shared.metrics.count_renewal("failed");
            if before {
                let error = berth_os::strip_error_numbers(error.to_string());
                tracing::warn!(
                    code = %explained::LEASE_NOT_WRITTEN,
                    error,
                    "cannot write the lease: siblings take over from this shim when the lease expires"
                );
            }
        }
    }

    /// Reads the siblings' leases, and dials new siblings. Of two shims, the shim with the smaller
    /// ID dials, so that there is one connection. After a lease's duration without a connection,
    /// the other shim dials too.
    pub(super) async fn read_leases(&mut self) {
        let (berth, boot_id, now) = (
            self.shared.berth.clone(),
            self.lease.boot_id.clone(),
            self.now(),
        );
        let list = move || {
            let listing = lease::list(&berth);
            if let Err(error) = lease::prune(&berth, &boot_id, now) {
                tracing::debug!(%error, "cannot prune leases");
            }
            listing
        };
        let listing = self
            .shared
            .run_dir
            .call_within(self.request_timeout(), list)
            .await
            .flatten();
        let now = self.now();
        let listing = match listing {
            Ok(listing) => listing,
            Err(error) => {
                if self.logged_problems.insert(format!("leases: {error}")) {
                    tracing::warn!(
                        code = %explained::RUN_DIRECTORY_UNREADABLE,
                        %error,
                        "cannot list the leases"
                    );
                }
                let actions = self.machine.tick(now);
                return self.carry_out_actions(actions);
            }
        };
        for problem in listing.problems {
            if self.logged_problems.insert(problem.to_string()) {
                tracing::warn!(code = %explained::FILE_IGNORED, "{problem}");
            }
        }
        let live: Vec<_> = listing
            .found
            .into_iter()
            .filter(|lease| {
                lease.is_live(&self.lease.boot_id, now) && lease.holder_identity != self.me
            })
            .collect();
        self.forget_siblings_except(&live.iter().map(|lease| lease.holder_identity).collect());
        let leases: Vec<_> = live
            .iter()
            .map(|lease| {
                (
                    lease.holder_identity,
                    lease.last_renewal_lower_bound(),
                    lease.expires(),
                )
            })
            .collect();
        let actions = self.machine.on_leases(now, &leases);
        self.carry_out_actions(actions);
        for lease in &live {
            let holder = lease.holder_identity;
            if self
                .siblings
                .instances
                .insert(holder, lease.instance.clone())
                .is_none()
            {
                let same: BTreeSet<_> = self.machine.addresses().iter().collect();
                if lease.listen.iter().collect::<BTreeSet<_>>() != same {
                    tracing::warn!(
                        code = %explained::OTHER_ADDRESSES,
                        instance = %lease.instance,
                        theirs = ?lease.listen,
                        ours = ?self.machine.addresses(),
                        "a sibling listens on other addresses: only listeners of addresses that both shims have are handed over"
                    );
                }
            }
            let exists = self.siblings.writers.contains_key(&holder)
                || self.siblings.connecting.contains_key(&holder);
            let dials = self.me < holder || self.machine.unconnected_siblings().contains(&holder);
            if dials && !exists && !self.machine.is_dead(holder) {
                self.dial_sibling(holder, &lease.instance);
            }
        }
    }
}
