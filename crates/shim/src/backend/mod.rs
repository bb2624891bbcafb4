//! The instances that can get connections.
//!
//! [`Table`] is a snapshot without locks, from which the relay picks; only [`TableWriter`] changes
//! it. [`Table::pick_instance`] alone decides which instance gets a new connection (while leaving:
//! [`Table::pick_instance_while_leaving`]). Other code decides which shim relays the bytes, and
//! whether the socket is passed to a `supervisor` instead. `prober` probes the instances, [`probe`]
//! is one probe, and [`health`] derives an instance's state from consecutive results.

pub(crate) mod follow;
pub(crate) mod hang;
pub mod health;
pub mod probe;
pub(crate) mod prober;
pub(crate) mod supervisor;

use berth_node::instance_id::InstanceId;
use berth_node::terms::InstanceHealth;
use hang::Handshakes;
use health::{HealthTracker, Observation};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;
use supervisor::Link;
use tokio::sync::watch;

/// An instance, as the relay sees it.
#[derive(Debug, Clone)]
pub struct BackendInstance {
    pub id: InstanceId,
    pub address: SocketAddr,
    pub own: bool,
    /// True if the instance is used only while no other is ready. A shim for the whole node leaves
    /// an instance to that instance's own shim.
    pub fallback: bool,
    tracker: HealthTracker,
    /// True if the instance hangs: its probe fails, and clients that wait for its first byte are
    /// better served elsewhere.
    pub(crate) hangs: bool,
    pub(crate) handshakes: Arc<Handshakes>,
    /// A number that changes when a new process has the address, and when a refusal makes the
    /// instance unready. Attempts of a connection at an instance are limited in each epoch.
    pub epoch: u64,
    /// The first epoch of the process. This number changes with each new process, but not after a
    /// refusal.
    pub started: u64,
    pub since: SystemTime,
    /// The last probe's result, as text.
    pub last_probe: Arc<str>,
    /// True if the last probe was [`Observation::Rejected`].
    pub probe_rejected: bool,
    /// The link that passes clients' sockets to the instance, while the instance accepts them.
    pub(crate) link: Option<Arc<Link>>,
    /// Why clients are relayed although `--pass` wants their sockets passed.
    pub(crate) relayed: Option<Arc<str>>,
    /// The version that the instance reports, once ready.
    pub version: Option<Arc<str>>,
}

impl BackendInstance {
    pub fn health(&self) -> InstanceHealth {
        self.tracker.health()
    }

    /// True if the instance is not ready, but its last probe passed. The next probe follows at
    /// once.
    pub(crate) fn is_rising(&self) -> bool {
        self.tracker.is_rising()
    }

    /// True if the instance is ready and its last probe passed.
    pub(crate) fn is_well(&self) -> bool {
        self.tracker.is_well()
    }
}

#[derive(Debug, Clone, Default)]
pub struct Table {
    /// The own instance first, followed by the siblings' instances in the order of arrival.
    pub instances: Vec<BackendInstance>,
}

impl Table {
    /// Returns the instance for a new connection: the own instance if ready, else a sibling's ready
    /// instance, else (fail open) an instance that was ready and has not refused since. Among
    /// failing instances, those that hang come last. `usable` excludes instances that the
    /// connection has tried.
    pub fn pick_instance(
        &self,
        usable: impl Fn(&BackendInstance) -> bool,
    ) -> Option<&BackendInstance> {
        let with = |health, hangs| {
            let is_fit =
                |i: &&BackendInstance| i.health() == health && i.hangs == hangs && usable(i);
            let mut fit = self.instances.iter().filter(is_fit);
            fit.clone().find(|i| !i.fallback).or_else(|| fit.next())
        };
        let failing =
            || with(InstanceHealth::Failing, false).or_else(|| with(InstanceHealth::Failing, true));
        with(InstanceHealth::Ready, false).or_else(failing)
    }

    /// Returns the instance for a new connection while the shim leaves. A sibling's ready instance
    /// comes before the own instance, which may have got SIGTERM together with the shim and still
    /// pass its probe. The own instance may finish a TLS handshake now and end the request without
    /// an answer.
    pub fn pick_instance_while_leaving(
        &self,
        usable: impl Fn(&BackendInstance) -> bool,
    ) -> Option<&BackendInstance> {
        let sibling = self
            .instances
            .iter()
            .find(|i| !i.own && i.health() == InstanceHealth::Ready && usable(i));
        sibling.or_else(|| self.pick_instance(usable))
    }

    pub fn own_instance(&self) -> Option<&BackendInstance> {
        self.instances.iter().find(|i| i.own)
    }
}

/// Changes the [`Table`], as its only writer. Runs on the control runtime.
#[derive(Debug)]
pub struct TableWriter {
    table: watch::Sender<Arc<Table>>,
    rise: u32,
    fall: u32,
    next_epoch: u64,
}

impl TableWriter {
    /// Makes an empty table. `rise` good or `fall` bad probes in a row change the health of an
    /// instance.
    pub fn new(rise: u32, fall: u32) -> Self {
        Self {
            table: watch::Sender::new(Arc::default()),
            rise,
            fall,
            next_epoch: 1,
        }
    }

    pub fn subscribe(&self) -> watch::Receiver<Arc<Table>> {
        self.table.subscribe()
    }

    pub fn table(&self) -> Arc<Table> {
        self.table.borrow().clone()
    }

    /// Adds an instance. A known instance at another address, or with `renewed`, begins a new
    /// epoch. Returns the epoch if the instance has to be probed from the start.
    pub fn insert(
        &mut self,
        id: &InstanceId,
        address: SocketAddr,
        own: bool,
        renewed: bool,
    ) -> Option<u64> {
        if !renewed
            && self
                .table
                .borrow()
                .instances
                .iter()
                .any(|i| i.id == *id && i.address == address)
        {
            return None;
        }
        let epoch = self.draw_epoch();
        let instance = BackendInstance {
            id: id.clone(),
            address,
            own,
            fallback: false,
            tracker: HealthTracker::new(self.rise, self.fall),
            hangs: false,
            handshakes: Arc::default(),
            epoch,
            started: epoch,
            since: SystemTime::now(),
            last_probe: "not probed yet".into(),
            probe_rejected: false,
            link: None,
            relayed: None,
            version: None,
        };
        self.table.send_modify(|table| {
            let instances = &mut Arc::make_mut(table).instances;
            instances.retain(|i| i.id != *id);
            instances.insert(if own { 0 } else { instances.len() }, instance);
        });
        Some(epoch)
    }

    pub(crate) fn remove(&self, id: &InstanceId) {
        if self.table.borrow().instances.iter().any(|i| i.id == *id) {
            self.table
                .send_modify(|table| Arc::make_mut(table).instances.retain(|i| i.id != *id));
        }
    }

    /// Records an observation of an instance in an epoch. `words` describes the observation.
    /// Returns the health before and after, or `None` for an instance or epoch that has ended.
    pub fn observe(
        &mut self,
        id: &InstanceId,
        epoch: u64,
        seen: Observation,
        words: &str,
    ) -> Option<(InstanceHealth, InstanceHealth)> {
        let (next_epoch, rejected) = (self.draw_epoch(), seen == Observation::Rejected);
        let mut observed = None;
        self.update_instance(id, |instance| {
            if instance.epoch != epoch {
                return false;
            }
            let (before, after) = (instance.health(), instance.tracker.observe(seen));
            observed = Some((before, after));
            // A hanging instance stops hanging when enough probes have passed to make the instance
            // ready.
            let hangs =
                after == InstanceHealth::Failing && (instance.hangs || seen == Observation::Hangs);
            let hung = std::mem::replace(&mut instance.hangs, hangs);
            if before != after {
                instance.since = SystemTime::now();
                if after == InstanceHealth::Unready {
                    instance.epoch = next_epoch;
                }
            }
            // Only a change wakes the receivers, and not every probe.
            let changed = before != after
                || hung != hangs
                || *instance.last_probe != *words
                || instance.probe_rejected != rejected;
            if changed {
                (instance.last_probe, instance.probe_rejected) = (words.into(), rejected);
            }
            changed
        });
        observed
    }

    pub(crate) fn set_fallback(&self, id: &InstanceId, fallback: bool) {
        self.update_instance(id, |instance| {
            std::mem::replace(&mut instance.fallback, fallback) != fallback
        });
    }

    pub(crate) fn set_version(&self, id: &InstanceId, version: Option<Arc<str>>) {
        self.update_instance(id, |instance| {
            instance.version = version;
            true
        });
    }

    pub(crate) fn set_link(&self, id: &InstanceId, link: Option<Arc<Link>>) {
        self.update_instance(id, |instance| {
            std::mem::replace(&mut instance.link, link).is_some() || instance.link.is_some()
        });
    }

    pub(crate) fn set_relay_reason(&self, id: &InstanceId, why: &str) {
        self.update_instance(id, |instance| {
            instance.relayed.replace(why.into()).is_none()
        });
    }

    pub(crate) fn find_instance(&self, id: &InstanceId) -> Option<BackendInstance> {
        self.table
            .borrow()
            .instances
            .iter()
            .find(|i| i.id == *id)
            .cloned()
    }

    /// Changes an instance. Receivers are woken if `change` returns true.
    fn update_instance(&self, id: &InstanceId, change: impl FnOnce(&mut BackendInstance) -> bool) {
        self.table.send_if_modified(|table| {
            Arc::make_mut(table)
                .instances
                .iter_mut()
                .find(|i| i.id == *id)
                .is_some_and(change)
        });
    }

    fn draw_epoch(&mut self) -> u64 {
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_writer() -> (TableWriter, InstanceId, InstanceId) {
        let (own, sibling) = ("own".parse().unwrap(), "sibling".parse().unwrap());
        let mut writer = TableWriter::new(1, 1);
        writer.insert(&sibling, "127.2.0.1:6443".parse().unwrap(), false, false);
        writer.insert(&own, "127.1.0.1:6443".parse().unwrap(), true, false);
        (writer, own, sibling)
    }

    fn observe(writer: &mut TableWriter, id: &InstanceId, seen: Observation) {
        let epoch = writer.find_instance(id).unwrap().epoch;
        writer.observe(id, epoch, seen, "").unwrap();
    }

    fn pick_id(writer: &TableWriter) -> Option<InstanceId> {
        writer.table().pick_instance(|_| true).map(|i| i.id.clone())
    }

    #[test]
    fn the_own_instance_is_picked_then_a_sibling_then_any_instance() {
        let (mut writer, own, sibling) = make_writer();
        assert_eq!(pick_id(&writer), None, "none was ready yet");
        observe(&mut writer, &sibling, Observation::Pass);
        assert_eq!(pick_id(&writer), Some(sibling.clone()));
        observe(&mut writer, &own, Observation::Pass);
        assert_eq!(pick_id(&writer), Some(own.clone()));
        observe(&mut writer, &own, Observation::Fail);
        assert_eq!(
            pick_id(&writer),
            Some(sibling.clone()),
            "a sibling's ready instance comes before the failing own instance"
        );
        observe(&mut writer, &sibling, Observation::Fail);
        assert_eq!(pick_id(&writer), Some(own.clone()), "both fail: open");
        observe(&mut writer, &own, Observation::Hangs);
        assert_eq!(
            pick_id(&writer),
            Some(sibling.clone()),
            "an instance that fails its probe may only be slow"
        );
        observe(&mut writer, &sibling, Observation::Hangs);
        assert_eq!(pick_id(&writer), Some(own.clone()), "both hang: open");
        observe(&mut writer, &own, Observation::Refused);
        assert_eq!(pick_id(&writer), Some(sibling.clone()));
        observe(&mut writer, &sibling, Observation::Refused);
        assert_eq!(
            pick_id(&writer),
            None,
            "fail open ends at a refused connect"
        );
    }

    #[test]
    fn a_leaving_shim_prefers_a_ready_sibling() {
        let (mut writer, own, sibling) = make_writer();
        let leaving = |writer: &TableWriter| {
            writer
                .table()
                .pick_instance_while_leaving(|_| true)
                .map(|i| i.id.clone())
        };
        observe(&mut writer, &own, Observation::Pass);
        assert_eq!(leaving(&writer), Some(own.clone()), "no other is ready");
        observe(&mut writer, &sibling, Observation::Pass);
        assert_eq!(leaving(&writer), Some(sibling.clone()));
        observe(&mut writer, &sibling, Observation::Fail);
        assert_eq!(
            leaving(&writer),
            Some(own),
            "the own instance comes before a sibling's failing instance"
        );
    }

    #[test]
    fn a_fallback_is_used_where_no_other_is_ready() {
        let (mut writer, own, sibling) = make_writer();
        observe(&mut writer, &own, Observation::Pass);
        observe(&mut writer, &sibling, Observation::Pass);
        writer.set_fallback(&own, true);
        assert_eq!(pick_id(&writer), Some(sibling.clone()));
        observe(&mut writer, &sibling, Observation::Refused);
        assert_eq!(pick_id(&writer), Some(own));
    }

    #[test]
    fn a_refusal_of_an_earlier_epoch_does_not_count_in_the_next() {
        let (mut writer, own, _) = make_writer();
        observe(&mut writer, &own, Observation::Pass);
        let old = writer.find_instance(&own).unwrap().epoch;
        observe(&mut writer, &own, Observation::Refused);
        observe(&mut writer, &own, Observation::Pass);
        assert!(
            writer
                .observe(&own, old, Observation::Refused, "late")
                .is_none()
        );
        assert_eq!(pick_id(&writer), Some(own));
    }

    #[test]
    fn an_instance_with_a_new_record_is_not_ready_yet() {
        let (mut writer, own, _) = make_writer();
        observe(&mut writer, &own, Observation::Pass);
        assert!(
            writer
                .insert(&own, "127.1.0.1:6443".parse().unwrap(), true, false)
                .is_none()
        );
        assert!(
            writer
                .insert(&own, "127.1.0.1:6443".parse().unwrap(), true, true)
                .is_some()
        );
        assert_eq!(pick_id(&writer), None);
    }

    /// Every connection that is opened or held waits for a change of the table, and an instance
    /// that refuses is probed ten times a second.
    #[test]
    fn an_answer_that_changes_nothing_wakes_no_receiver() {
        let (mut writer, own, _) = make_writer();
        let mut table = writer.subscribe();
        for (seen, words, changes) in [
            (Observation::Refused, "nothing listens", true),
            (Observation::Refused, "nothing listens", false),
            (Observation::Refused, "still nothing", true),
            (Observation::Pass, "still nothing", true),
            (Observation::Pass, "still nothing", false),
        ] {
            table.mark_unchanged();
            let epoch = writer.find_instance(&own).unwrap().epoch;
            writer.observe(&own, epoch, seen, words).unwrap();
            assert_eq!(table.has_changed().unwrap(), changes, "{seen:?} {words}");
        }
    }
}
