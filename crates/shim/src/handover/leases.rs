//! The own lease and those of the siblings: who is there, and the proof that this shim is.

use super::Keeper;
use crate::metrics::ProbeLabels;
use berth_node::registry::lease::{self, Lease};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

impl Keeper {
    pub(super) fn transitions(&self) -> u32 {
        let found = lease::read(&self.setup.berth, &self.setup.instance).ok().flatten();
        found.map_or(0, |lease| lease.transitions_to(self.me))
    }

    /// Asks every worker for a sign of life.
    pub(super) fn ping(&self) {
        self.alive.store(0, Relaxed);
        for worker in &self.setup.workers {
            let alive = self.alive.clone();
            worker.spawn(async move { alive.fetch_add(1, Relaxed) });
        }
    }

    /// Renews the lease if every worker gave a sign of life since it was renewed last.
    pub(super) fn renew(&mut self) {
        let now = self.now();
        let silent = now.saturating_sub(self.renewed);
        if silent >= self.setup.lease {
            tracing::warn!(
                seconds = silent.as_secs(),
                "this shim stood still for longer than its lease: siblings accepted from its listeners meanwhile"
            );
        }
        let workers = self.setup.workers.len() as u64;
        if self.alive.load(Relaxed) >= workers {
            if self.setup.blocked.swap(false, Relaxed) {
                tracing::info!("every relaying thread answers again");
            }
            self.renewed = now;
            self.write_lease();
            self.count_renewal("ok");
            self.ping();
        } else {
            if !self.setup.blocked.swap(true, Relaxed) {
                tracing::warn!("a relaying thread does not answer: the lease is not renewed, siblings will take over");
            }
            self.count_renewal("blocked");
        }
        self.tell_of_unconnected();
        for holder in self.machine.silent() {
            if self.told_problems.insert(format!("{holder:?} is silent")) {
                tracing::warn!(
                    sibling = holder.0,
                    "a sibling is connected and says nothing: it gets and gives no guards"
                );
            }
        }
        self.read_leases();
        self.look_for_strangers();
    }

    /// Siblings without a connection guard nothing for one another, and what is queued at one that leaves is lost.
    fn tell_of_unconnected(&mut self) {
        let unconnected = self.machine.unconnected();
        for holder in &unconnected {
            if self.told_unconnected.insert(*holder) {
                let instance = self.siblings.get(holder).map(tracing::field::display);
                let why = self.unreachable.get(holder).map_or("it does not dial", String::as_str);
                tracing::warn!(
                    instance,
                    "a live sibling has had no connection to this shim for longer than a lease, so neither guards the \
                     other's listeners: {why}"
                );
            }
        }
        let names: Vec<_> = unconnected.iter().filter_map(|holder| self.siblings.get(holder).cloned()).collect();
        self.setup.metrics.siblings_unconnected.set(i64::try_from(names.len()).unwrap_or(i64::MAX));
        self.setup.unconnected.send_if_modified(|now| std::mem::replace(now, names.clone()) != names);
    }

    fn count_renewal(&self, result: &'static str) {
        self.setup.metrics.renewals.get_or_create(&ProbeLabels { result }).inc();
    }

    pub(super) fn lease(&self) -> Lease {
        let announce = self.machine.announce();
        Lease {
            version: lease::VERSION,
            holder_identity: self.me,
            lease_duration_seconds: u32::try_from(self.setup.lease.as_secs()).unwrap_or(u32::MAX).max(1),
            acquire_time: self.acquired,
            renew_time: SystemTime::now(),
            lease_transitions: self.transitions,
            instance: self.setup.instance.clone(),
            backend: self.setup.backend,
            state: announce.phase,
            ready: announce.ready,
            reachable: announce.reachable,
            listen: self.machine.addresses().to_vec(),
            berth_version: berth_node::VERSION.to_owned(),
            boot_id: self.boot_id.clone(),
            expires_boottime_ms: u64::try_from((self.renewed + self.setup.lease).as_millis()).unwrap_or(u64::MAX),
        }
    }

    pub(super) fn write_lease(&mut self) {
        match lease::write(&self.setup.berth, &self.lease()) {
            Ok(()) => self.lease_written = true,
            Err(error) => {
                self.count_renewal("failed");
                if std::mem::replace(&mut self.lease_written, false) {
                    tracing::warn!(%error, "cannot write the lease: siblings will think this shim hangs");
                }
            }
        }
    }

    /// Takes in the siblings' leases, and dials those that are new. Of two, the one with the smaller
    /// name dials, so that there is one connection; if it does not within a lease, the other tries too.
    pub(super) fn read_leases(&mut self) {
        if self.setup.plain_close {
            return;
        }
        let now = self.now();
        let lease::Listing { leases, problems } = match lease::list(&self.setup.berth) {
            Ok(listing) => listing,
            Err(error) => {
                if self.told_problems.insert(format!("leases: {error}")) {
                    tracing::warn!(%error, "cannot list the leases");
                }
                return;
            }
        };
        for problem in problems {
            if self.told_problems.insert(problem.to_string()) {
                tracing::warn!("{problem}");
            }
        }
        self.tick();
        let own = leases.iter().any(|lease| lease.instance == self.setup.instance);
        if !own && now < self.renewed + self.setup.lease && lease::is_missing(&self.setup.berth, &self.setup.instance) {
            // It was removed with the directory, most likely: newcomers look for it.
            self.write_lease();
        }
        for lease in &leases {
            if !lease.is_live(&self.boot_id, now) {
                continue;
            }
            let holder = lease.holder_identity;
            if holder == self.me {
                continue;
            }
            if self.siblings.insert(holder, lease.instance.clone()).is_none() {
                let same: BTreeSet<_> = self.machine.addresses().iter().collect();
                if lease.listen.iter().collect::<BTreeSet<_>>() != same {
                    tracing::warn!(
                        instance = %lease.instance,
                        theirs = ?lease.listen,
                        ours = ?self.machine.addresses(),
                        "a sibling listens on other addresses: only those that both have are handed over"
                    );
                }
            }
            let actions = self.machine.leased(holder, lease.renewed_after(), lease.expires());
            self.act(actions);
            let stands = self.writers.contains_key(&holder) || self.connecting.contains_key(&holder);
            let dials = self.me < holder || self.machine.unconnected().contains(&holder);
            if dials && !stands && !self.machine.is_dead(holder) {
                self.dial(holder, &lease.instance);
            }
        }
        if let Err(error) = lease::prune(&self.setup.berth, &self.boot_id, now) {
            tracing::debug!(%error, "cannot prune leases");
        }
    }
}
