//! The handover: leases, guards (duplicates of siblings' listeners), and which shim accepts from
//! which listener.
//!
//! `machine` decides (pure). The other modules carry the decisions out, in the order of the flow:
//! `leases` keeps the own lease and reads the siblings' leases, `siblings` connects to the
//! siblings, [`peers`] talks to them, `listeners` has the descriptors and the accept loops, and
//! `passing` exchanges clients with siblings.
//!
//! A listener never closes while a sibling lives, which is safer than a graceful close. Every shim
//! holds a duplicate of every sibling's listener, so a queue survives its shim, however the shim
//! ended.

mod leases;
mod listeners;
mod machine;
mod passing;
pub mod peers;
mod siblings;

pub(crate) use passing::MAX_PASSES;

use crate::accept::{Accepting, Dispatcher};
use crate::backend::Table;
use crate::config::Config;
use crate::relay::PassRequest;
use crate::shared::Shared;
use crate::state::ShimState;
use berth_node::ipc::wire::Share;
use berth_node::ipc::{IncomingRequest, PATIENCE};
use berth_node::registry::lease;
use berth_node::registry::watch::Watch;
use berth_node::terms::{InstanceHealth, Phase, ShimId};
use berth_os::clock;
use berth_os::explained;
use berth_os::socket;
use leases::OwnLease;
use listeners::Listeners;
use machine::{Action, Facts, Machine, Rules, Time};
use peers::{PeerEvent, PublishedState, exchange_updates, lock_published};
use siblings::Siblings;
use std::collections::btree_map::Entry;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// This shim and the siblings: the other shims on the same listen address.
struct Group {
    config: Arc<Config>,
    shared: Shared,
    dispatcher: Arc<Dispatcher>,
    machine: Machine,
    me: ShimId,
    lease: OwnLease,
    siblings: Siblings,
    listeners: Listeners,
    published: Arc<Mutex<PublishedState>>,
    logged_problems: BTreeSet<String>,
}

/// Runs the handover of this shim. `sockets` are bound sockets that do not listen yet, by address;
/// the first address names the berth. After a request to stop, the caller drops the future when the
/// last connection has ended. The duplicates of siblings' listeners are held until then.
///
/// # Errors
/// The host has no clock or no boot ID, so leases cannot be kept.
pub(crate) async fn run_handover(
    shared: &Shared,
    sockets: Vec<(SocketAddr, OwnedFd)>,
    dispatcher: Arc<Dispatcher>,
    workers: Vec<Handle>,
    mut passes: mpsc::UnboundedReceiver<PassRequest>,
    mut requests: mpsc::UnboundedReceiver<IncomingRequest>,
) -> io::Result<()> {
    let now = clock::read_boottime()?;
    let me = ShimId::new(
        now,
        getrandom::u64().map_err(|error| io::Error::other(error.to_string()))?,
    );
    let config = &shared.config;
    let rules = Rules {
        addresses: config.place.addresses().collect(),
        hold: config.hold,
        lease: config.lease,
    };
    let (to_events, mut events) = mpsc::unbounded_channel();
    let (to_loops, mut loops) = mpsc::unbounded_channel();
    let (mut table, mut state) = (shared.table.clone(), shared.state.subscribe());
    let mut watch = Watch::new(&shared.berth);
    let third = config.lease / 3;
    let mut group = Group {
        machine: Machine::new(rules, now),
        me,
        lease: OwnLease::new(workers, now)?,
        siblings: Siblings::new(config, to_events),
        listeners: Listeners::new(sockets, to_loops),
        published: Arc::default(),
        logged_problems: BTreeSet::new(),
        dispatcher,
        config: config.clone(),
        shared: shared.clone(),
    };
    // This shim's lease is written before leases are read. Otherwise the lease of this instance's
    // previous shim would count as a sibling's.
    group.write_first_lease().await;
    group.ping_workers();
    group.read_leases().await;
    let mut renew = tokio::time::interval_at(Instant::now() + third, third);
    renew.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        group.read_leases_after_stall().await;
        // This call also updates the machine's time, which is all that a timer is for.
        group.mark_dead_siblings().await;
        group.update_readiness_facts(&mut table, &mut state);
        group.publish_takers();
        let wake = group.next_wake();
        tokio::select! {
            changed = table.changed() => if changed.is_err() { return Ok(()) },
            changed = state.changed() => if changed.is_err() { return Ok(()) },
            Some(event) = events.recv() => group.on_event(event),
            Some(event) = loops.recv() => group.on_loop_event(event),
            Some(pass) = passes.recv() => group.pass_client(pass),
            Some(request) = requests.recv() => group.on_request(request),
            () = watch.wait_for_change() => group.read_leases().await,
            _ = renew.tick() => {
                group.renew_lease();
                group.read_leases().await;
            }
            () = tokio::time::sleep_until(wake) => {}
        }
    }
}

impl Group {
    /// Returns how long the loop waits for a call that may block: less than the interval of
    /// renewals, which is a third of a lease.
    fn request_timeout(&self) -> Duration {
        self.config.lease / 4
    }

    fn now(&self) -> Time {
        clock::read_boottime().unwrap_or(self.lease.renewed)
    }

    fn next_wake(&self) -> Instant {
        let now = self.now();
        let machine = self
            .machine
            .next_wake()
            .map(|at| Instant::now() + at.saturating_sub(now));
        let dead = self
            .siblings
            .looked
            .filter(|_| !self.machine.awaited_siblings().is_empty())
            .map(|looked| looked + siblings::DEAD_CHECK_INTERVAL);
        // If no timer is set, the loop wakes after an hour. Another event comes earlier.
        machine
            .into_iter()
            .chain(self.listeners.retry)
            .chain(self.shared.share.expiry())
            .chain(dead)
            .min()
            .unwrap_or_else(|| Instant::now() + Duration::from_secs(3600))
    }

    fn update_readiness_facts(
        &mut self,
        table: &mut watch::Receiver<Arc<Table>>,
        state: &mut watch::Receiver<ShimState>,
    ) {
        self.tick();
        let state = state.borrow_and_update().clone();
        let blocked = state.blocked;
        let facts = {
            let table = table.borrow_and_update();
            let own = table
                .own_instance()
                .is_some_and(|own| own.health() == InstanceHealth::Ready);
            let any = self.config.discover
                && table
                    .instances
                    .iter()
                    .any(|instance| instance.health() == InstanceHealth::Ready);
            Facts {
                ready: (own || any) && !blocked,
                reachable: table.pick_instance(|_| true).is_some(),
                leaving: state.is_leaving(),
                blocked,
            }
        };
        let actions = self.machine.set_facts(facts);
        self.carry_out_actions(actions);
    }

    /// Divides new connections between this shim and a sibling, as the share says.
    fn apply_share(&self, share: Share) -> Result<(), String> {
        if self.config.discover || self.config.preferred.is_some() {
            return Err("this shim serves several instances: a share needs two shims with one instance each".into());
        }
        self.shared.share.set_share(
            share,
            &self.shared.instance,
            &self.shared.berth,
            Instant::now(),
        )
    }

    /// True if this shim has not run for a while. The leases that it knows are old then, and must
    /// not be used.
    fn has_stalled(&self) -> bool {
        self.now() >= self.machine.now() + self.config.lease / 2
    }

    /// Reads the leases after a stall. Until then the machine's clock stands still.
    async fn read_leases_after_stall(&mut self) {
        if self.has_stalled() {
            self.read_leases().await;
        }
    }

    fn tick(&mut self) {
        self.shared.share.expire(Instant::now());
        self.listeners.retry = self.listeners.retry.filter(|at| *at > Instant::now());
        let mut actions = if self.has_stalled() {
            Vec::new()
        } else {
            self.machine.tick(self.now())
        };
        if self.listeners.retry.is_none() {
            for address in std::mem::take(&mut self.listeners.not_listening) {
                actions.extend(self.machine.retry_listen(address));
            }
            // A failed accept loop counts as ended: the machine tries again.
            for cookie in std::mem::take(&mut self.listeners.failed) {
                actions.extend(self.machine.on_loop_ended(cookie));
            }
        }
        self.carry_out_actions(actions);
    }

    fn on_event(&mut self, event: PeerEvent) {
        self.tick();
        let actions = match event {
            PeerEvent::Written(written) => return self.on_written(written),
            PeerEvent::Connected(holder, socket) => {
                self.siblings.connecting.remove(&holder);
                self.siblings.unreachable.remove(&holder);
                self.siblings.logged_unconnected.remove(&holder);
                // Both shims have dialled each other, and the other connection is established
                // already. This connection ends here.
                let Entry::Vacant(free) = self.siblings.writers.entry(holder) else {
                    return;
                };
                let changed = free.insert(Arc::default()).clone();
                self.count_handover_step("connect", "ok");
                let addresses: Arc<[SocketAddr]> = self.machine.addresses().into();
                tokio::spawn(exchange_updates(
                    socket,
                    holder,
                    addresses,
                    self.published.clone(),
                    changed,
                    self.siblings.events.clone(),
                ));
                self.machine.on_connected(holder)
            }
            PeerEvent::Updated(holder, announce, guards) => {
                let mut known = Vec::new();
                for (cookie, address, descriptor) in guards {
                    self.count_handover_step("guard", "ok");
                    known.push((cookie, address));
                    lock_published(&self.published)
                        .held
                        .entry(cookie)
                        .or_insert_with(|| (address, Arc::new(descriptor)));
                }
                self.machine.on_update(holder, announce, &known)
            }
            PeerEvent::Refused(holder, why) => {
                // A refusal is no problem if both shims dialled and the other connection is
                // established.
                if self.record_failed_dial(holder, &why) {
                    if self.logged_problems.insert(format!("{holder:?} {why}")) {
                        tracing::warn!(
                            code = %explained::LISTENERS_NOT_SHARED,
                            "a sibling does not share its listeners: {why}"
                        );
                    }
                    self.count_handover_step("connect", "refused");
                }
                return;
            }
            PeerEvent::Conflict(holder, why) => {
                self.record_failed_dial(holder, &why);
                self.report_conflict(&why);
                return;
            }
            PeerEvent::Unreachable(holder, why) => {
                self.record_failed_dial(holder, &why);
                tracing::debug!("cannot reach a sibling: {why}");
                return;
            }
            PeerEvent::Gone(holder) => {
                if self.siblings.writers.remove(&holder).is_none() {
                    // The sibling ended before its connection was established.
                    self.siblings.connecting.remove(&holder);
                    return;
                }
                let instance = self
                    .siblings
                    .instances
                    .get(&holder)
                    .map(tracing::field::display);
                tracing::info!(
                    instance,
                    "a sibling is gone: this shim accepts from the sibling's listeners, if any"
                );
                self.machine.on_gone(self.now(), holder)
            }
        };
        self.carry_out_actions(actions);
    }

    /// Carries out the machine's actions, and the actions that follow from them.
    fn carry_out_actions(&mut self, actions: Vec<Action>) {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Listen(address) => actions.extend(self.listen(address)),
                Action::Accept(cookie) => actions.extend(self.start_accepting(cookie)),
                Action::Guard(cookie) => self.end_loop(cookie, Accepting::No),
                Action::Refuse(cookie) => {
                    if let Some((address, listener)) =
                        lock_published(&self.published).held.get(&cookie)
                    {
                        match socket::refuse_clients(listener.as_fd()) {
                            Ok(()) => {
                                tracing::warn!(
                                    code = %explained::NOTHING_REACHABLE,
                                    %address,
                                    "nothing is reachable: clients are refused"
                                );
                            }
                            Err(error) => {
                                tracing::warn!(
                                    code = %explained::CANNOT_END_LISTENING,
                                    %address,
                                    %error,
                                    "cannot end listening"
                                );
                            }
                        }
                    }
                    self.count_handover_step("refuse", "ok");
                    self.end_loop(cookie, Accepting::No);
                }
                Action::Close(cookie) => {
                    // The accept loop shares the descriptor of the listener, and closes it when the
                    // queue is empty.
                    let closed = lock_published(&self.published).held.remove(&cookie);
                    self.end_loop(cookie, Accepting::Rest);
                    if !self.listeners.loops.contains_key(&cookie) {
                        actions.extend(self.drain_guard(cookie, closed));
                    }
                    self.count_handover_step("close", "ok");
                }
                Action::Announce => {
                    {
                        let mut published = lock_published(&self.published);
                        published.announce = self.machine.announce();
                        published.guards = self
                            .machine
                            .guards()
                            .into_iter()
                            .map(|(cookie, _)| cookie)
                            .collect();
                    }
                    for writer in self.siblings.writers.values() {
                        writer.notify_one();
                    }
                    self.write_lease();
                }
                Action::Phase(phase) => {
                    if phase == Phase::Left {
                        // Sockets that do not listen would hold the port until the last connection
                        // has ended. A shim that joins again binds new sockets.
                        self.listeners.waiting.clear();
                    }
                    let siblings = self.siblings.writers.len();
                    let connections = self.shared.metrics.open_connections();
                    tracing::info!(connections, siblings, "{}", phase.as_str());
                    self.count_handover_step(phase.as_str(), "ok");
                    self.shared.update_state(|state| {
                        (state.phase, state.since) = (phase, SystemTime::now());
                    });
                    if phase == Phase::Joined {
                        self.start_listing_listeners();
                    }
                }
            }
        }
    }

    fn count_handover_step(&self, step: &'static str, result: &'static str) {
        self.shared.metrics.count_handover(step, result);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for accepting in self.listeners.loops.values() {
            accepting.send_replace(Accepting::No);
        }
        let (berth, lease) = (self.shared.berth.clone(), self.current_lease());
        let most = self.request_timeout().min(PATIENCE);
        self.shared
            .run_dir
            .make_last_call_within(most, move || drop(lease::remove(&berth, &lease)));
    }
}
