//! Up to five shims, a kernel and a network in a box. proptest chooses the order of joins, leaves,
//! crashes, hangs and wake-ups; messages are delivered one by one or late.
//!
//! Each assumption of the model is listed with the tests that show the assumption of the kernel and
//! of real processes (in `tests/integration/handover` unless said otherwise). In doubt, the model
//! has both possibilities: an assumption kinder than the kernel hides losses.
//!
//! * The last message of a shim that crashes is received (`Crash`), or lost (`CrashUnread`). The
//!   end of the connection follows. `peers`: `the_last_update_of_a_sibling_that_died_is_received`
//! * A newcomer finds leases of dead shims, and the dead shims' sockets refuse. `death`:
//!   `consecutive_deaths_leave_no_client_waiting_for_a_lease`
//! * A shim that hangs accepts no connection until it wakes. Established connections go on, with
//!   their queued messages. `death`: `a_hang_makes_clients_wait_for_one_lease_at_most`
//! * A connection may end although both ends live. `names`:
//!   `a_connection_that_ends_is_made_again_while_the_sibling_lives`
//! * A listener lives, with its queue, while a process holds it. `death`:
//!   `a_crash_loses_what_was_accepted_and_nothing_that_was_queued`
//! * A descriptor in flight holds the listener, too. `peers`: the test named first
//! * The exit of a listener's last holder resets queued clients that were not accepted before.
//!   `death`: `a_shim_that_has_left_serves_queued_clients_when_the_last_sibling_dies`
//! * An accept loop runs, ends or fails later than requested (`Runs`, `Ended`, `Deaf`), or fails
//!   after it ran (`Failed`).
//!   `listeners`: `a_shim_accepts_when_its_accept_loop_runs`,
//!   `a_shim_has_left_when_its_accept_loops_have_ended`
//! * A shim goes on without renewing its lease (`Lapse`) or without listing leases (`Blind`):
//!   `leases.rs`, `on_written` and `read_leases`. Siblings then accept from its listeners, or the
//!   shim from theirs. A shim that cannot list leases for the duration of a lease takes each sibling
//!   for hung: the model does not require that such a shim hands its listeners over or heeds its
//!   siblings' instances.
//! * A shim that refuses ends listening for every holder. `outage`:
//!   `beyond_the_hold_clients_are_refused_at_once`
//!
//! The model lacks: several addresses, leases of different lengths, messages that arrive without
//! their descriptors (they end a connection, as `Break` does), and blocked threads (a separate test
//! below).

mod rules;
mod states;

use super::*;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

const LEASE: Time = Duration::from_secs(3);
/// Longer than a lease, and short enough for one `Pass(7)`: searches have few passes.
const HOLD: Time = Duration::from_millis(3500);
const STEP: Time = Duration::from_millis(500);

fn test_address() -> SocketAddr {
    "10.0.0.5:6443".parse().unwrap()
}

#[derive(Debug, Clone)]
enum Message {
    Connected,
    Update(Announce, Vec<(Cookie, SocketAddr)>),
    Gone,
    /// From an own accept loop: the loop accepts clients from now on, unless it is ending already.
    Runs(Cookie),
    /// From an own accept loop: the loop has ended, as requested or because the listener listens no
    /// more.
    Ended(Cookie),
    /// From an own accept loop: the loop ran and failed.
    Failed(Cookie),
}

/// The sender of messages from a shim's own accept loops.
const LOOPS: ShimId = ShimId(0);

#[derive(Debug, Clone)]
struct Shim {
    machine: Machine,
    ready: bool,
    was_ready: bool,
    leaving: bool,
    hung: bool,
    /// The shim reaches no instance except its own.
    cut: bool,
    /// The shim does not renew its lease: its run directory is full, for example.
    lapses: bool,
    /// The shim cannot list the leases. Its siblings' leases expire for the shim.
    blind: bool,
    /// The shim can neither listen nor wait for clients: descriptors ran out, or another process
    /// listens.
    deaf: bool,
    /// Accept loops that were started and do not run yet.
    starting: BTreeSet<Cookie>,
    /// Listeners that failed to accept, to be tried again.
    failed: BTreeSet<Cookie>,
    /// Closed listeners from which the shim accepts the queued clients.
    draining: BTreeSet<Cookie>,
    /// Addresses with an own socket that could not listen, left alone until the next tick.
    left_alone: BTreeSet<SocketAddr>,
    lease: Time,
    /// Messages from each sibling, in order.
    inbox: BTreeMap<ShimId, VecDeque<Message>>,
    /// Siblings with an open connection, as far as the shim knows, and the held listeners that each
    /// sibling was given.
    connected: BTreeMap<ShimId, BTreeSet<Cookie>>,
}

/// A kernel's listening socket.
#[derive(Debug, Clone, Default)]
struct Socket {
    holders: BTreeSet<ShimId>,
    acceptors: BTreeSet<ShimId>,
    listening: bool,
    /// Since when the socket listens and no running shim accepts from it.
    alone_since: Option<Time>,
    /// The shim that made the listener and is about to accept.
    reserved: Option<ShimId>,
}

#[derive(Debug, Clone, Default)]
struct World {
    /// True if the berth has two addresses.
    two: bool,
    /// True if an instance of no shim is ready.
    elsewhere: bool,
    /// A shim of a later version. Its siblings know none of its phases, and read each phase as
    /// waiting.
    later: Option<ShimId>,
    now: Time,
    shims: BTreeMap<ShimId, Shim>,
    /// Leases that dead shims left behind, with the shims that saw the connection of the dead shim
    /// end.
    graves: BTreeMap<ShimId, (Time, BTreeSet<ShimId>)>,
    sockets: BTreeMap<Cookie, Socket>,
    next: u64,
    most_alive: usize,
    /// Listeners made while a sibling hung or had unread messages: the fall-back. Also counts
    /// listeners that were closed here although held by a sibling that could not accept for a
    /// lease's duration: the sibling does not give such a listener back.
    fallbacks: usize,
    /// When a shim last began to hang or woke, or a connection between two live shims broke. Only
    /// these events cost a lease.
    disturbed: Option<Time>,
    /// Events that happened and effects that they had, in this world and its clones.
    happened: Rc<RefCell<BTreeSet<String>>>,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Start,
    Ready(usize, bool),
    Leave(usize),
    Exit(usize),
    Crash(usize),
    /// A crash that loses the shim's unread messages.
    CrashUnread(usize),
    Hang(usize),
    Wake(usize),
    /// The shim reads a message before the leases.
    WakeBy(usize, ShimId),
    Deaf(usize, bool),
    /// The shim reaches no other shim's instance, or reaches the others again.
    Cut(usize, bool),
    Lapse(usize, bool),
    Blind(usize, bool),
    /// The accept loop that runs on the shim's nth listener fails.
    Fail(usize, usize),
    /// The shim tries again what failed.
    Retry(usize),
    /// The connection between two shims ends, and both shims live on.
    Break(usize, usize),
    Deliver(usize, usize),
    /// From a shim that may have ended.
    DeliverFrom(usize, ShimId),
    /// A shim sends another shim its last announcement again.
    Repeat(usize, usize),
    DeliverAll,
    Pass(u8),
}

fn any_event() -> impl Strategy<Value = Event> {
    let shim = 0usize..5;
    prop_oneof![
        3 => Just(Event::Start),
        4 => (shim.clone(), prop::bool::weighted(0.75)).prop_map(|(s, r)| Event::Ready(s, r)),
        2 => shim.clone().prop_map(Event::Leave),
        3 => shim.clone().prop_map(Event::Exit),
        1 => shim.clone().prop_map(Event::Crash),
        1 => shim.clone().prop_map(Event::CrashUnread),
        1 => shim.clone().prop_map(Event::Hang),
        2 => shim.clone().prop_map(Event::Wake),
        2 => (shim.clone(), prop::bool::weighted(0.4)).prop_map(|(s, d)| Event::Deaf(s, d)),
        1 => (shim.clone(), prop::bool::weighted(0.4)).prop_map(|(s, c)| Event::Cut(s, c)),
        1 => (shim.clone(), prop::bool::weighted(0.4)).prop_map(|(s, l)| Event::Lapse(s, l)),
        1 => (shim.clone(), prop::bool::weighted(0.4)).prop_map(|(s, b)| Event::Blind(s, b)),
        1 => (shim.clone(), 0usize..3).prop_map(|(s, l)| Event::Fail(s, l)),
        1 => shim.clone().prop_map(Event::Retry),
        1 => (shim.clone(), shim.clone()).prop_map(|(a, b)| Event::Break(a, b)),
        6 => (shim.clone(), shim).prop_map(|(a, b)| Event::Deliver(a, b)),
        5 => Just(Event::DeliverAll),
        4 => (1u8..30).prop_map(Event::Pass),
    ]
}

impl World {
    fn nth_holder(&self, nth: usize) -> Option<ShimId> {
        let count = self.shims.len();
        (count > 0).then(|| *self.shims.keys().nth(nth % count).unwrap())
    }

    fn shim_at(&mut self, nth: usize) -> Option<&mut Shim> {
        let holder = self.nth_holder(nth)?;
        self.shims.get_mut(&holder)
    }

    fn note_event(&self, what: &str) {
        if !self.happened.borrow().contains(what) {
            self.happened.borrow_mut().insert(what.to_owned());
        }
    }

    fn is_any_instance_reachable(&self) -> bool {
        self.elsewhere || self.shims.values().any(|shim| shim.ready)
    }

    fn running_loops(&self, of: ShimId) -> impl Iterator<Item = Cookie> {
        let runs = move |(_, socket): &(&Cookie, &Socket)| socket.acceptors.contains(&of);
        self.sockets.iter().filter(runs).map(|(cookie, _)| *cookie)
    }

    /// Returns the shims that reach an instance.
    fn shims_reaching_instances(&self) -> BTreeSet<ShimId> {
        let any = self.is_any_instance_reachable();
        let reaches = |(_, shim): &(&ShimId, &Shim)| shim.ready || (any && !shim.cut);
        let shims = self.shims.iter().filter(reaches);
        shims.map(|(holder, _)| *holder).collect()
    }

    fn apply_event(&mut self, event: Event) {
        match event {
            Event::Start if self.shims.len() < 5 => self.start_shim(),
            Event::Start => {}
            Event::Ready(nth, ready) => {
                let Some(shim) = self.shim_at(nth) else {
                    return;
                };
                (shim.ready, shim.was_ready) = (ready, shim.was_ready || ready);
                self.update_facts_of_machines();
            }
            Event::Leave(nth) => {
                let Some(shim) = self.shim_at(nth) else {
                    return;
                };
                shim.leaving = true;
                self.update_facts_of_machines();
            }
            Event::Exit(nth) => {
                let Some(holder) = self.nth_holder(nth) else {
                    return;
                };
                let shim = &self.shims[&holder];
                if shim.leaving && !shim.hung && shim.machine.phase() == Phase::Left {
                    self.check_queues_are_drained(holder);
                    self.end_shim(holder);
                }
            }
            Event::Crash(nth) => {
                let Some(holder) = self.nth_holder(nth) else {
                    return;
                };
                self.check_no_listener_is_lost(holder);
                self.end_shim(holder);
            }
            Event::CrashUnread(nth) => {
                let Some(holder) = self.nth_holder(nth) else {
                    return;
                };
                self.check_no_listener_is_lost(holder);
                for other in self.shims.values_mut() {
                    if let Some(inbox) = other.inbox.get_mut(&holder) {
                        inbox.retain(|message| !matches!(message, Message::Update(..)));
                    }
                }
                self.end_shim(holder);
            }
            Event::Hang(nth) => {
                if let Some(shim) = self.shim_at(nth) {
                    shim.hung = true;
                    self.disturbed = Some(self.now);
                }
            }
            Event::Wake(nth) => {
                let Some(shim) = self.shim_at(nth) else {
                    return;
                };
                shim.hung = false;
                self.wake_shims();
            }
            Event::WakeBy(nth, from) => {
                let Some(holder) = self.nth_holder(nth) else {
                    return;
                };
                if std::mem::take(&mut self.shims.get_mut(&holder).unwrap().hung) {
                    self.deliver_message(holder, from);
                    self.wake_shims();
                }
            }
            Event::Deaf(nth, deaf) => {
                if let Some(shim) = self.shim_at(nth) {
                    shim.deaf = deaf;
                }
            }
            Event::Cut(nth, cut) => {
                if let Some(shim) = self.shim_at(nth) {
                    shim.cut = cut;
                    self.update_facts_of_machines();
                }
            }
            Event::Lapse(nth, lapses) => {
                if let Some(shim) = self.shim_at(nth) {
                    shim.lapses = lapses;
                }
            }
            Event::Blind(nth, blind) => {
                if let Some(shim) = self.shim_at(nth) {
                    shim.blind = blind;
                }
            }
            Event::Fail(nth, listener) => {
                let Some(holder) = self
                    .nth_holder(nth)
                    .filter(|holder| !self.shims[holder].hung)
                else {
                    return;
                };
                let running = self.running_loops(holder).nth(listener);
                if let Some(cookie) = running {
                    let socket = self.sockets.get_mut(&cookie).unwrap();
                    socket.acceptors.remove(&holder);
                    self.post_message(holder, LOOPS, Message::Failed(cookie));
                }
            }
            Event::Retry(nth) => {
                if let Some(holder) = self
                    .nth_holder(nth)
                    .filter(|holder| !self.shims[holder].hung)
                {
                    self.retry_failed(holder);
                }
            }
            Event::Break(one, other) => {
                if let (Some(one), Some(other)) = (self.nth_holder(one), self.nth_holder(other)) {
                    self.disturbed = Some(self.now);
                    self.end_connection(one, other);
                }
            }
            Event::Deliver(to, from) => {
                if let (Some(to), Some(from)) = (self.nth_holder(to), self.nth_holder(from)) {
                    self.deliver_message(to, from);
                }
            }
            Event::DeliverFrom(nth, from) => {
                if let Some(holder) = self.nth_holder(nth) {
                    self.deliver_message(holder, from);
                }
            }
            Event::Repeat(to, from) => {
                let (Some(to), Some(from)) = (self.nth_holder(to), self.nth_holder(from)) else {
                    return;
                };
                if self.shims[&from].connected.contains_key(&to) {
                    let announce = self.shims[&from].machine.announce();
                    self.post_message(to, from, Message::Update(announce, Vec::new()));
                }
            }
            Event::DeliverAll => self.deliver_all(),
            Event::Pass(steps) => (0..steps).for_each(|_| self.advance_time_step()),
        }
        self.check_invariants();
    }

    fn start_shim(&mut self) {
        self.next += 1;
        let holder = ShimId(self.next);
        let mut addresses = vec![test_address()];
        addresses.extend(self.two.then(|| SocketAddr::new(test_address().ip(), 7443)));
        let machine = Machine::new(
            Rules {
                addresses,
                hold: HOLD,
                lease: LEASE,
            },
            self.now,
        );
        let others: Vec<_> = self.shims.keys().copied().collect();
        let shim = Shim {
            machine,
            ready: false,
            was_ready: false,
            leaving: false,
            hung: false,
            cut: false,
            lapses: false,
            blind: false,
            deaf: false,
            starting: BTreeSet::new(),
            failed: BTreeSet::new(),
            draining: BTreeSet::new(),
            left_alone: BTreeSet::new(),
            lease: self.now + LEASE,
            inbox: BTreeMap::new(),
            connected: BTreeMap::new(),
        };
        self.shims.insert(holder, shim);
        self.most_alive = self.most_alive.max(self.shims.len());
        // Each shim finds the other's lease before the connection is established.
        for other in others {
            let (now, lease) = (self.now, self.shims[&other].lease);
            if lease > now {
                self.give_input(holder, |machine| {
                    machine.on_leases(now, &[(other, lease - LEASE, lease)])
                });
            }
            // A hung shim accepts no connection before it wakes.
            if !self.shims[&other].hung {
                self.connect_shims(holder, other);
            }
        }
        // The newcomer finds the leases of dead shims, too.
        for (dead, lease) in self
            .graves
            .iter()
            .map(|(dead, (lease, _))| (*dead, *lease))
            .collect::<Vec<_>>()
        {
            let now = self.now;
            if lease > now {
                self.give_input(holder, |machine| {
                    machine.on_leases(now, &[(dead, lease - LEASE, lease)])
                });
            }
        }
        self.dial_siblings(holder);
        self.update_facts_of_machines();
    }

    /// The shim reads the leases before judging anything.
    fn wake_shims(&mut self) {
        self.disturbed = Some(self.now);
        self.renew_leases(true);
        self.update_facts_of_machines();
        self.tick();
    }

    /// Dials the awaited siblings: the socket of a dead sibling refuses.
    fn dial_siblings(&mut self, holder: ShimId) {
        let now = self.now;
        self.give_input(holder, |machine| machine.tick(now));
        for dead in self.shims[&holder].machine.awaited_siblings() {
            if self.graves.contains_key(&dead) {
                self.give_input(holder, |machine| machine.on_gone(now, dead));
            }
        }
    }

    fn connect_shims(&mut self, one: ShimId, other: ShimId) {
        for (to, from) in [(one, other), (other, one)] {
            self.shims
                .get_mut(&to)
                .unwrap()
                .connected
                .insert(from, BTreeSet::new());
            self.post_message(to, from, Message::Connected);
        }
    }

    /// Messages that were sent before are read before the end, as at a crash.
    fn end_connection(&mut self, one: ShimId, other: ShimId) {
        for (to, from) in [(one, other), (other, one)] {
            if self
                .shims
                .get_mut(&to)
                .unwrap()
                .connected
                .remove(&from)
                .is_some()
            {
                self.post_message(to, from, Message::Gone);
            }
        }
    }

    /// True if `at` has read all messages of `from`.
    fn has_read_all_messages(&self, at: ShimId, from: ShimId) -> bool {
        self.shims[&at]
            .inbox
            .get(&from)
            .is_none_or(VecDeque::is_empty)
    }

    /// True if the other shim is alive for the first, and neither shim has unread messages of the
    /// other.
    fn have_met(&self, one: ShimId, other: ShimId) -> bool {
        let Shim {
            connected,
            hung,
            lease,
            ..
        } = &self.shims[&other];
        let quiet =
            self.has_read_all_messages(other, one) && self.has_read_all_messages(one, other);
        let fresh = *lease > self.now && !self.shims[&one].blind;
        connected.contains_key(&one) && quiet && !hung && fresh
    }

    fn post_message(&mut self, to: ShimId, from: ShimId, mut message: Message) {
        if let Message::Update(announce, _) = &mut message
            && self.later == Some(from)
        {
            announce.phase = Phase::Waiting;
        }
        self.shims
            .get_mut(&to)
            .unwrap()
            .inbox
            .entry(from)
            .or_default()
            .push_back(message);
    }

    fn end_shim(&mut self, holder: ShimId) {
        let ended = self.shims.remove(&holder).unwrap();
        self.graves.insert(
            holder,
            (ended.lease, ended.connected.keys().copied().collect()),
        );
        for socket in self.sockets.values_mut() {
            socket.acceptors.remove(&holder);
            socket.holders.remove(&holder);
        }
        // Messages sent before the crash are delivered before the end of file. Unsent messages are
        // lost.
        for other in ended.connected.into_keys() {
            if self
                .shims
                .get_mut(&other)
                .is_some_and(|other| other.connected.remove(&holder).is_some())
            {
                self.post_message(other, holder, Message::Gone);
            }
        }
        self.drop_unheld_sockets();
        self.update_facts_of_machines();
    }

    /// Removes the sockets without a holder. A descriptor in an unread message holds its socket.
    fn drop_unheld_sockets(&mut self) {
        let inboxes = self.shims.values().flat_map(|shim| shim.inbox.values());
        let flying: BTreeSet<Cookie> = inboxes
            .flatten()
            .flat_map(|message| match message {
                Message::Update(_, guards) => guards.as_slice(),
                _ => &[],
            })
            .map(|(cookie, _)| *cookie)
            .collect();
        self.sockets
            .retain(|cookie, socket| !socket.holders.is_empty() || flying.contains(cookie));
    }

    /// Checks that a death closes no listener that a sibling could hold, since the sibling has read
    /// all messages. A listener with an accept loop that is about to run may be the shim's alone:
    /// the shim has not given the listener yet.
    fn check_no_listener_is_lost(&self, holder: ShimId) {
        let ends = &self.shims[&holder];
        let lost = |(_, socket): &(&Cookie, &Socket)| {
            socket.listening
                && socket.reserved != Some(holder)
                && socket.holders.iter().eq([&holder])
        };
        if let Some(lost) = self.sockets.iter().filter(|_| !ends.leaving).find(lost) {
            let stays = |(_, shim): &(&ShimId, &Shim)| {
                !shim.leaving && shim.connected.contains_key(&holder)
            };
            for (other, _) in self.shims.iter().filter(stays) {
                let heard = self.has_read_all_messages(*other, holder)
                    && self.has_read_all_messages(holder, *other);
                assert!(
                    !heard || !ends.connected.contains_key(other),
                    "{other:?} has no guard of {lost:?}"
                );
            }
        }
    }

    fn recent_disturbance(&self) -> Option<Time> {
        self.disturbed.filter(|when| self.now < *when + LEASE)
    }

    /// Checks that the last holder of a listener has accepted the queued clients before its exit,
    /// which resets clients in the queue. Excepted: a holder that cannot know yet that it is the
    /// last, and a listener that a hung or disconnected shim may still take.
    fn check_queues_are_drained(&self, holder: ShimId) {
        let all_read = self.shims[&holder].inbox.values().all(VecDeque::is_empty);
        if !all_read || self.recent_disturbance().is_some() {
            return;
        }
        for (cookie, socket) in &self.sockets {
            let flies = |message: &Message| matches!(message, Message::Update(_, guards) if guards.iter().any(|(guard, _)| guard == cookie));
            let mut inboxes = self
                .shims
                .values()
                .flat_map(|shim| shim.inbox.get(&holder))
                .flatten();
            let last = socket.listening && socket.holders == BTreeSet::from([holder]);
            assert!(
                !last || inboxes.any(flies),
                "{holder:?} exits and resets what waits at {cookie:?}: {socket:?}"
            );
        }
    }

    fn update_facts_of_machines(&mut self) {
        let reaching = self.shims_reaching_instances();
        let holders: Vec<_> = self.shims.keys().copied().collect();
        for holder in holders {
            let shim = &self.shims[&holder];
            if !shim.hung {
                let facts = Facts {
                    ready: shim.ready,
                    reachable: reaching.contains(&holder),
                    leaving: shim.leaving,
                    blocked: false,
                };
                self.dial_siblings(holder);
                self.give_input(holder, |machine| machine.set_facts(facts));
            }
        }
    }

    fn deliver_message(&mut self, to: ShimId, from: ShimId) -> bool {
        let waits = |shim: &&Shim| {
            !shim.hung && shim.inbox.get(&from).is_some_and(|inbox| !inbox.is_empty())
        };
        if self.shims.get(&to).filter(waits).is_none() {
            return false;
        }
        let now = self.now;
        // After a stall, the machine keeps the time from before.
        if now < self.shims[&to].machine.now() + LEASE / 2 {
            self.give_input(to, |machine| machine.tick(now));
        }
        let inbox = self
            .shims
            .get_mut(&to)
            .and_then(|shim| shim.inbox.get_mut(&from));
        let Some(message) = inbox.and_then(VecDeque::pop_front) else {
            return false;
        };
        match message {
            Message::Connected => self.give_input(to, |machine| machine.on_connected(from)),
            Message::Update(announce, guards) => {
                for (cookie, _) in &guards {
                    let socket = self.sockets.get_mut(cookie);
                    socket.expect("it was in flight").holders.insert(to);
                }
                self.give_input(to, |machine| machine.on_update(from, announce, &guards));
            }
            Message::Runs(cookie) => self.start_loop(to, cookie),
            Message::Ended(cookie) => {
                self.shims.get_mut(&to).unwrap().draining.remove(&cookie);
                self.give_input(to, |machine| machine.on_loop_ended(cookie));
            }
            Message::Failed(cookie) => {
                let shim = self.shims.get_mut(&to).unwrap();
                shim.draining.remove(&cookie);
                shim.failed.insert(cookie);
                self.give_input(to, |machine| machine.on_loop_failed(cookie));
            }
            Message::Gone => self.give_input(to, |machine| machine.on_gone(now, from)),
        }
        true
    }

    fn start_loop(&mut self, of: ShimId, cookie: Cookie) {
        if let Some(socket) = self.sockets.get_mut(&cookie) {
            socket.reserved = None;
        }
        let shim = self.shims.get_mut(&of).unwrap();
        let goes_on = shim.starting.remove(&cookie);
        if goes_on && shim.deaf {
            shim.failed.insert(cookie);
            return self.give_input(of, |machine| machine.on_loop_failed(cookie));
        }
        if let Some(socket) = self.sockets.get_mut(&cookie).filter(|_| goes_on) {
            if socket.listening {
                socket.acceptors.insert(of);
            } else {
                // A sibling refused meanwhile.
                self.post_message(of, LOOPS, Message::Ended(cookie));
            }
        }
        self.give_input(of, |machine| machine.on_accepting(cookie));
    }

    /// Ends an accept loop, if one runs. A loop that a sibling's refusal ended has reported its end
    /// already.
    fn end_loop(&mut self, of: ShimId, cookie: Cookie) -> bool {
        let started = self.shims.get_mut(&of).unwrap().starting.remove(&cookie);
        let ends = self.sockets.get_mut(&cookie).unwrap().acceptors.remove(&of) || started;
        if ends {
            self.post_message(of, LOOPS, Message::Ended(cookie));
        }
        ends
    }

    fn deliver_all(&mut self) {
        self.deliver_between(|_, _| true);
    }

    /// Delivers the messages between the chosen pairs of receiver and sender, and the messages that
    /// follow, until no such message waits.
    fn deliver_between(&mut self, chosen: impl Fn(ShimId, ShimId) -> bool) {
        for round in 0.. {
            assert!(round < 1000, "messages without end");
            let pairs: Vec<_> = self
                .unread_inboxes()
                .filter(|(to, from)| chosen(*to, *from))
                .collect();
            if pairs.is_empty() {
                return;
            }
            for (to, from) in pairs {
                self.deliver_message(to, from);
            }
        }
    }

    /// Shims that do not hang, each with the senders of its unread messages.
    fn unread_inboxes(&self) -> impl Iterator<Item = (ShimId, ShimId)> {
        let shims = self.shims.iter().filter(|(_, shim)| !shim.hung);
        shims.flat_map(|(to, shim)| {
            shim.inbox
                .iter()
                .filter(|(_, q)| !q.is_empty())
                .map(|(from, _)| (*to, *from))
        })
    }

    fn advance_time_step(&mut self) {
        self.deliver_all();
        self.now += STEP;
        self.renew_leases(false);
        self.tick();
        self.deliver_all();
        self.check_invariants();
    }

    fn renew_leases(&mut self, force: bool) {
        let now = self.now;
        let renews = |shim: &&mut Shim| !shim.hung && !shim.lapses;
        for shim in self.shims.values_mut().filter(renews) {
            if force || shim.lease < now + LEASE - LEASE / 3 {
                shim.lease = now + LEASE;
            }
        }
        let living = self.shims.iter().map(|(holder, shim)| (holder, shim.lease));
        let dead = self
            .graves
            .iter()
            .map(|(holder, (lease, _))| (holder, *lease));
        let leases: Vec<_> = living
            .chain(dead)
            .map(|(holder, lease)| (*holder, lease))
            .collect();
        let holders: Vec<_> = self
            .shims
            .iter()
            .filter(|(_, s)| !s.hung)
            .map(|(h, _)| *h)
            .collect();
        let live: BTreeSet<_> = leases
            .iter()
            .filter(|(_, lease)| *lease > now)
            .map(|(holder, _)| *holder)
            .collect();
        for holder in &holders {
            let Shim { machine, blind, .. } = self.shims.get_mut(holder).unwrap();
            if *blind {
                self.give_input(*holder, |machine| machine.tick(now));
                continue;
            }
            machine.forget_dead(&live);
            let seen = leases
                .iter()
                .filter(|(other, lease)| other != holder && *lease > now);
            let seen: Vec<_> = seen
                .map(|(other, lease)| (*other, *lease - LEASE, *lease))
                .collect();
            let dead: Vec<_> = live
                .iter()
                .filter(|other| machine.is_dead(**other))
                .collect();
            self.give_input(*holder, |machine| machine.on_leases(now, &seen));
            for other in dead
                .into_iter()
                .filter(|other| !self.shims[holder].machine.is_dead(**other))
            {
                let saw_it_die = self
                    .graves
                    .get(other)
                    .is_some_and(|(_, saw)| saw.contains(holder));
                assert!(
                    !saw_it_die,
                    "{other:?} is dead, and a lease from before revived it"
                );
            }
        }
        // Of two unconnected shims the shim with the smaller ID dials, unless it knows that the
        // other died. After a lease, the other dials too. A shim dials the leases that it lists.
        for one in &holders {
            for other in holders.iter().filter(|other| *other > one) {
                let known = |at: &ShimId, of: &ShimId| {
                    let Shim {
                        connected, inbox, ..
                    } = &self.shims[at];
                    connected.contains_key(of) || !inbox.get(of).is_none_or(VecDeque::is_empty)
                };
                let lists = |at: &ShimId, of: &ShimId| {
                    let Shim { machine, blind, .. } = &self.shims[at];
                    !blind && self.shims[of].lease > now && !machine.is_dead(*of)
                };
                let waits = || {
                    self.shims[other]
                        .machine
                        .unconnected_siblings()
                        .contains(one)
                };
                if !known(one, other)
                    && !known(other, one)
                    && (lists(one, other) || (lists(other, one) && waits()))
                {
                    self.connect_shims(*one, *other);
                }
            }
        }
    }

    fn tick(&mut self) {
        let holders: Vec<_> = self
            .shims
            .iter()
            .filter(|(_, s)| !s.hung)
            .map(|(h, _)| *h)
            .collect();
        for holder in holders {
            self.dial_siblings(holder);
            self.retry_failed(holder);
        }
    }

    fn retry_failed(&mut self, holder: ShimId) {
        for address in std::mem::take(&mut self.shims.get_mut(&holder).unwrap().left_alone) {
            self.give_input(holder, |machine| machine.retry_listen(address));
        }
        for cookie in std::mem::take(&mut self.shims.get_mut(&holder).unwrap().failed) {
            self.give_input(holder, |machine| machine.on_loop_ended(cookie));
        }
    }

    /// Gives a machine an input, and carries out the machine's actions.
    fn give_input(&mut self, holder: ShimId, input: impl FnOnce(&mut Machine) -> Vec<Action>) {
        let Some(shim) = self.shims.get_mut(&holder) else {
            return;
        };
        let before = shim.machine.phase();
        let mut actions = VecDeque::from(input(&mut shim.machine));
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Listen(address) => {
                    let shim = self.shims.get_mut(&holder).unwrap();
                    assert!(
                        !shim.left_alone.contains(&address),
                        "what could not listen is left alone for a while"
                    );
                    if shim.deaf {
                        shim.left_alone.insert(address);
                        self.note_event("cannot listen");
                        continue;
                    }
                    // Not connected, or one of both shims has unread messages.
                    let unheard = |other: ShimId| {
                        let Shim {
                            connected, blind, ..
                        } = &self.shims[&holder];
                        let apart = *blind || !connected.contains_key(&other);
                        apart
                            || !self.has_read_all_messages(holder, other)
                            || !self.has_read_all_messages(other, holder)
                    };
                    let fallback = self.shims.iter().any(|(o, shim)| {
                        *o != holder && (shim.hung || shim.lease <= self.now || unheard(*o))
                    });
                    self.fallbacks += usize::from(fallback);
                    self.next += 1;
                    let cookie = Cookie(self.next);
                    self.check_all_siblings_announced(holder);
                    let holders = BTreeSet::from([holder]);
                    let socket = Socket {
                        holders,
                        listening: true,
                        reserved: Some(holder),
                        ..Socket::default()
                    };
                    self.sockets.insert(cookie, socket);
                    actions.extend(
                        self.shims
                            .get_mut(&holder)
                            .unwrap()
                            .machine
                            .on_listening(address, cookie),
                    );
                }
                Action::Accept(cookie) if self.shims[&holder].deaf => {
                    self.note_event("cannot accept");
                    self.sockets.get_mut(&cookie).unwrap().reserved = None;
                    let shim = self.shims.get_mut(&holder).unwrap();
                    shim.failed.insert(cookie);
                    actions.extend(shim.machine.on_loop_failed(cookie));
                }
                Action::Accept(cookie) => {
                    let socket = self
                        .sockets
                        .get_mut(&cookie)
                        .expect("it accepts from what it holds");
                    assert!(
                        socket.holders.contains(&holder),
                        "it accepts from what it holds"
                    );
                    // The maker sets its own options on the listener, and connections inherit the
                    // options. A maker that leaves need not.
                    let other = socket
                        .reserved
                        .filter(|maker| *maker != holder && self.shims.contains_key(maker));
                    assert!(
                        other.is_none(),
                        "{holder:?} accepts from {cookie:?}, and {other:?} is about to"
                    );
                    socket.listening = true;
                    let shim = self.shims.get_mut(&holder).unwrap();
                    shim.failed.remove(&cookie);
                    assert!(
                        shim.starting.insert(cookie),
                        "one accept loop of a listener"
                    );
                    self.post_message(holder, LOOPS, Message::Runs(cookie));
                }
                Action::Guard(cookie) => {
                    self.check_another_shim_accepts(holder, cookie);
                    self.end_loop(holder, cookie);
                }
                Action::Refuse(cookie) => {
                    let reaching = self.shims_reaching_instances();
                    if !reaching.is_empty() {
                        self.note_event("refuses although another shim reaches an instance");
                    }
                    assert!(
                        !reaching.iter().any(|other| self.have_met(holder, *other)),
                        "{holder:?} refuses, and a live sibling reaches an instance"
                    );
                    self.end_loop(holder, cookie);
                    let socket = self.sockets.get_mut(&cookie).unwrap();
                    socket.listening = false;
                    for other in std::mem::take(&mut socket.acceptors) {
                        self.post_message(other, LOOPS, Message::Ended(cookie));
                    }
                }
                Action::Close(cookie) => {
                    assert!(
                        self.shims[&holder].leaving,
                        "{holder:?} closes {cookie:?}, and need not leave"
                    );
                    let could = self
                        .shims
                        .iter()
                        .any(|(other, shim)| !shim.leaving && self.have_met(holder, *other));
                    // Also from a guard, a loop takes the queued clients, if none has failed just
                    // now.
                    let failed = |message: &Message| matches!(message, Message::Failed(failed) if *failed == cookie);
                    let mut loops = self.shims[&holder].inbox.get(&LOOPS).into_iter().flatten();
                    if !loops.any(failed) && !self.end_loop(holder, cookie) {
                        self.post_message(holder, LOOPS, Message::Ended(cookie));
                    }
                    let shim = self.shims.get_mut(&holder).unwrap();
                    shim.failed.remove(&cookie);
                    shim.draining.insert(cookie);
                    self.sockets
                        .get_mut(&cookie)
                        .unwrap()
                        .holders
                        .remove(&holder);
                    let socket = &self.sockets[&cookie];
                    assert!(
                        !could || !socket.holders.is_empty(),
                        "closed, and a live sibling could hold it"
                    );
                    self.fallbacks += usize::from(!socket.holders.is_empty());
                }
                Action::Announce => {
                    let Shim {
                        machine, connected, ..
                    } = self.shims.get_mut(&holder).unwrap();
                    let (announce, guards) = (machine.announce(), machine.guards());
                    if machine.is_leaving() {
                        let its = self
                            .sockets
                            .values_mut()
                            .filter(|socket| socket.reserved == Some(holder));
                        its.for_each(|socket| socket.reserved = None);
                    }
                    let mut updates = Vec::new();
                    for (other, given) in connected {
                        given.retain(|cookie| machine.held.contains_key(cookie));
                        let new: Vec<_> = guards
                            .iter()
                            .filter(|(cookie, _)| given.insert(*cookie))
                            .copied()
                            .collect();
                        updates.push((*other, Message::Update(announce.clone(), new)));
                    }
                    updates
                        .into_iter()
                        .for_each(|(other, message)| self.post_message(other, holder, message));
                    self.check_announce(holder, &announce);
                }
                Action::Phase(phase) => {
                    self.check_phase(holder, phase);
                    let was_ready = self.shims[&holder].was_ready;
                    assert!(
                        phase != Phase::Joined || was_ready,
                        "{holder:?} joins, and its apiserver was never ready"
                    );
                }
            }
        }
        let after = self.shims[&holder].machine.phase();
        if before != after {
            self.note_event(&format!("{before:?} to {after:?}"));
        }
        self.drop_unheld_sockets();
    }

    /// Checks who accepts after an accept loop is ended. If all messages are read and nobody hung,
    /// another shim accepts from the listener. Where the first shim leaves, the other shim stays.
    fn check_another_shim_accepts(&self, holder: ShimId, cookie: Cookie) {
        let leaving = self.shims[&holder].leaving;
        let mut others = self.shims.iter().filter(|(other, _)| **other != holder);
        let all_read =
            others.all(|(other, shim)| self.has_read_all_messages(holder, *other) && !shim.hung);
        let dead = self
            .graves
            .keys()
            .any(|dead| !self.has_read_all_messages(holder, *dead));
        let Socket {
            acceptors,
            listening,
            ..
        } = &self.sockets[&cookie];
        if all_read && !dead && *listening && self.recent_disturbance().is_none() {
            let covers =
                |other: &ShimId| *other != holder && !(leaving && self.shims[other].leaving);
            assert!(
                acceptors.iter().any(covers),
                "{holder:?} lets go of {cookie:?}, and nobody else accepts from it"
            );
        }
    }

    /// Checks that a new shim makes no listener before each sibling has announced something: a
    /// sibling may have an orphan for the new shim.
    fn check_all_siblings_announced(&self, holder: ShimId) {
        let Shim {
            machine, connected, ..
        } = &self.shims[&holder];
        let is_new = machine.phase() == Phase::Waiting && !machine.returning;
        for sibling in connected
            .keys()
            .filter(|sibling| **sibling < holder && is_new && self.recent_disturbance().is_none())
        {
            let hangs = self.shims.get(sibling).is_none_or(|shim| shim.hung);
            let heard = machine
                .peers
                .get(sibling)
                .is_none_or(|peer| peer.announced.is_some());
            assert!(
                hangs || heard,
                "{holder:?} has heard nothing of {sibling:?}, and makes a listener"
            );
        }
    }

    /// Checks that a shim accepts from, and holds, the listeners that its announcement names.
    fn check_announce(&self, holder: ShimId, announce: &Announce) {
        let Announce { owns, accepts, .. } = announce;
        let runs = |cookie: &Cookie| {
            self.sockets
                .get(cookie)
                .is_some_and(|socket| socket.acceptors.contains(&holder))
        };
        // A sibling refused, and the shim has not heard yet that its loop ended.
        let ends = self.shims[&holder].inbox.get(&LOOPS);
        let ended = |cookie, end: &Message| matches!(end, Message::Ended(ended) | Message::Failed(ended) if *ended == cookie);
        let unheard = |cookie: &Cookie| ends.into_iter().flatten().any(|end| ended(*cookie, end));
        accepts.iter().for_each(|cookie| {
            assert!(
                runs(cookie) || unheard(cookie),
                "{holder:?} announces {announce:?}"
            );
        });
        let held = |cookie: &Cookie| {
            self.sockets
                .get(cookie)
                .is_some_and(|socket| socket.holders.contains(&holder))
        };
        owns.iter()
            .for_each(|cookie| assert!(held(cookie), "{holder:?} announces {announce:?}"));
    }

    /// Checks that a phase is announced only while it holds.
    fn check_phase(&self, holder: ShimId, phase: Phase) {
        let accepts = self
            .sockets
            .values()
            .filter(|socket| socket.acceptors.contains(&holder))
            .count();
        let machine = &self.shims[&holder].machine;
        let mut ends = self.shims[&holder].inbox.get(&LOOPS).into_iter().flatten();
        match phase {
            Phase::Joined => {
                // A sibling refused just now, and the shim has not heard yet that its loop ended.
                let unheard = |end: &Message| matches!(end, Message::Ended(cookie) | Message::Failed(cookie) if !machine.is_ending(*cookie));
                assert!(
                    accepts > 0 || ends.any(unheard),
                    "joined, and accepts from no listener"
                );
            }
            Phase::Left => {
                let running = ends.filter(
                    |end| matches!(end, Message::Ended(cookie) if machine.is_ending(*cookie)),
                );
                assert_eq!(
                    (accepts, running.count()),
                    (0, 0),
                    "left, and an accept loop runs"
                );
                let Shim {
                    starting, draining, ..
                } = &self.shims[&holder];
                assert!(
                    starting.is_empty() && draining.is_empty(),
                    "left, and an accept loop is about to run or serves a queue"
                );
            }
            Phase::Waiting | Phase::Refusing => {}
        }
    }

    /// All hung shims wake, time passes, messages arrive.
    fn check_recovery(&mut self) {
        for nth in 0..self.shims.len() {
            self.apply_event(Event::Deaf(nth, false));
            self.apply_event(Event::Cut(nth, false));
            self.apply_event(Event::Lapse(nth, false));
            self.apply_event(Event::Blind(nth, false));
            self.apply_event(Event::Wake(nth));
        }
        self.apply_event(Event::Pass(60));
        for (holder, shim) in &self.shims {
            let phase = shim.machine.phase();
            match (shim.leaving, shim.ready) {
                (true, _) => assert_eq!(phase, Phase::Left, "{holder:?} was to leave"),
                (false, true) => assert_eq!(phase, Phase::Joined, "{holder:?} is ready"),
                (false, false) => {}
            }
            // No state is kept of dead shims, and every live shim counts.
            let Machine { peers, dead, .. } = &shim.machine;
            let now = shim.machine.now;
            let lives =
                |peer| self.shims.contains_key(peer) && peers[peer].live_announce(now).is_some();
            let all = peers.len() + 1 == self.shims.len();
            let known = all && peers.keys().all(lives) && dead.is_empty();
            assert!(
                known,
                "{holder:?} knows {:?} and that {dead:?} ended",
                peers.keys()
            );
        }
        let serves = self.shims.values().any(|shim| shim.ready && !shim.leaving);
        for (cookie, socket) in &self.sockets {
            let accepted = !socket.acceptors.is_empty();
            assert!(
                !serves || (accepted && socket.listening),
                "{cookie:?} lies idle: {socket:?}"
            );
            if !self.is_any_instance_reachable() {
                assert!(
                    !socket.listening || !accepted,
                    "nothing is reachable and {cookie:?} accepts"
                );
            }
        }
    }

    fn check_invariants(&mut self) {
        let now = self.now;
        let reaching = self.shims_reaching_instances();
        let disturbed = self.recent_disturbance();
        for (cookie, socket) in &mut self.sockets {
            let runs = |holder: &ShimId| self.shims.get(holder).is_some_and(|shim| !shim.hung);
            let accepted = socket.acceptors.iter().any(runs);
            if accepted {
                socket.alone_since = None;
                continue;
            }
            let since = *socket.alone_since.get_or_insert(now);
            // Holders that stay and reach an instance.
            let stays = |holder: &&ShimId| {
                runs(holder) && {
                    let Shim {
                        machine,
                        leaving,
                        deaf,
                        ..
                    } = &self.shims[holder];
                    !leaving
                        && !deaf
                        && reaching.contains(*holder)
                        && machine.phase() != Phase::Left
                }
            };
            let mut stay = socket.holders.iter().filter(stays).peekable();
            if stay.peek().is_some() {
                let ready = stay.any(|holder| self.shims[holder].ready);
                let longest = if ready && disturbed.is_none() {
                    Time::ZERO
                } else {
                    LEASE + STEP
                };
                let alone = now - since.max(disturbed.unwrap_or_default());
                assert!(
                    alone <= longest,
                    "{cookie:?} has had no acceptor for {alone:?}: {socket:?}"
                );
            } else {
                socket.alone_since = Some(now);
            }
        }
        assert!(
            self.sockets.len() <= self.most_alive * (1 + usize::from(self.two)) + self.fallbacks,
            "{} listeners, never more than {} shims, {} fall-backs",
            self.sockets.len(),
            self.most_alive,
            self.fallbacks
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(berth_testing::case_count(250)))]

    #[test]
    fn every_order_of_events_keeps_the_invariants(events in prop::collection::vec(any_event(), 1..120)) {
        let mut world = World::default();
        for event in events {
            world.apply_event(event);
        }
        world.check_recovery();
    }
}

/// The accepting shim hangs, and so does the holder of its guard. A third holder leaves. A newcomer
/// remains that got no message from two of them.
#[test]
fn a_newcomer_takes_an_orphan_when_it_has_heard_all_siblings() {
    use Event::{Crash, DeliverAll, Hang, Leave, Pass, Ready, Start};
    let mut world = World::default();
    let events = [
        Start,
        Ready(0, true),
        Start,
        Start,
        Start,
        Crash(1),
        Start,
        DeliverAll,
        Hang(0),
        Crash(1),
        Start,
        Hang(3),
        Crash(1),
        Start,
        Pass(3),
        Start,
        Hang(1),
        DeliverAll,
        Leave(3),
        Pass(5),
    ];
    for event in events {
        world.apply_event(event);
    }
    let (newcomer, shim) = world.shims.last_key_value().unwrap();
    let (newcomer, accepts) = (*newcomer, |world: &World, holder| {
        world
            .sockets
            .values()
            .any(|s| s.acceptors.contains(&holder))
    });
    assert!(!shim.machine.knows_siblings() && !accepts(&world, newcomer));
    world.apply_event(Pass(1));
    assert!(
        accepts(&world, newcomer),
        "a lease after it came: {:?}",
        world.sockets
    );
}

/// The shim's accept loop runs on a blocked thread and will not end.
#[test]
fn a_blocked_shim_has_left_a_lease_after_its_release() {
    let leaves = |blocked: bool| {
        let rules = Rules {
            addresses: vec![test_address()],
            hold: HOLD,
            lease: LEASE,
        };
        let mut machine = Machine::new(rules, Time::ZERO);
        let ready = Facts {
            ready: true,
            reachable: true,
            ..Facts::default()
        };
        machine.set_facts(ready);
        machine.on_listening(test_address(), Cookie(1));
        machine.on_accepting(Cookie(1));
        assert_eq!(machine.phase(), Phase::Joined);
        machine.tick(STEP);
        machine.set_facts(Facts {
            ready: !blocked,
            leaving: true,
            blocked,
            ..ready
        });
        machine
    };
    let mut machine = leaves(true);
    assert_eq!(
        machine.phase(),
        Phase::Joined,
        "its accept loop has not ended"
    );
    assert_eq!(machine.next_wake(), Some(STEP + LEASE));
    let actions = machine.tick(STEP + LEASE);
    assert_eq!(
        (
            machine.phase(),
            actions.contains(&Action::Phase(Phase::Left))
        ),
        (Phase::Left, true)
    );
    let mut machine = leaves(false);
    machine.tick(10 * LEASE);
    assert_eq!(
        machine.phase(),
        Phase::Joined,
        "its accept loop has not ended, and will"
    );
    machine.on_loop_ended(Cookie(1));
    assert_eq!(machine.phase(), Phase::Left);
}

/// A shim that accepts from a listener sets its own socket options on the listener, and new
/// connections inherit the options. So the owner comes first.
#[test]
fn no_sibling_accepts_from_a_listener_before_its_owner() {
    use Event::{Deliver, DeliverAll, Ready, Start};
    let mut world = World::default();
    for event in [
        Start,
        Ready(0, true),
        DeliverAll,
        Start,
        DeliverAll,
        Ready(1, true),
    ] {
        world.apply_event(event);
    }
    let (first, second) = (world.nth_holder(0).unwrap(), world.nth_holder(1).unwrap());
    assert!(
        !world.shims[&second].starting.is_empty(),
        "the accept loop of the second is about to run"
    );
    let accepts = |world: &World| {
        world
            .sockets
            .values()
            .filter(|s| s.acceptors.contains(&first))
            .count()
    };
    // All messages of the second shim until now, and finally the start of its loop.
    for _ in 0..8 {
        world.apply_event(Deliver(0, 1));
    }
    assert_eq!(
        (accepts(&world), world.shims[&first].starting.len()),
        (1, 0),
        "the first keeps to its own"
    );
    world.apply_event(DeliverAll);
    assert!(
        world
            .sockets
            .values()
            .all(|s| s.holders.len() == 2 && s.acceptors.len() == 1),
        "{:?}",
        world.sockets
    );
}

/// The shim hangs before its accept loop ran. When the shim wakes, its time to leave has passed:
/// siblings have its listener.
#[test]
fn a_shim_that_leaves_before_it_accepts_gives_its_listener() {
    use Event::{DeliverAll, Hang, Pass, Ready, Start, Wake};
    let mut world = World::default();
    for event in [
        Start,
        Start,
        Ready(1, true),
        DeliverAll,
        Ready(0, true),
        Ready(0, false),
        Hang(0),
        Pass(6),
        Wake(0),
    ] {
        world.apply_event(event);
    }
    assert_eq!(world.sockets.len(), 2, "{:?}", world.sockets);
    assert!(
        world
            .sockets
            .values()
            .all(|socket| !socket.acceptors.is_empty()),
        "{:?}",
        world.sockets
    );
}

fn list_acceptors(world: &World) -> Vec<Vec<u64>> {
    world
        .sockets
        .values()
        .map(|socket| socket.acceptors.iter().map(|holder| holder.0).collect())
        .collect()
}

/// The sibling that stays has no guard of the orphan yet.
#[test]
fn a_waiting_shim_that_leaves_keeps_an_orphan_until_a_sibling_accepts() {
    use Event::{Crash, Deliver, DeliverAll, Leave, Ready, Start};
    let mut world = World::default();
    let begin = [
        Start,
        Ready(0, true),
        Start,
        DeliverAll,
        Crash(0),
        DeliverAll,
    ];
    for event in begin.into_iter().chain([Start, Deliver(0, 1), Leave(0)]) {
        world.apply_event(event);
    }
    assert_eq!(list_acceptors(&world), [[3]]);
    world.apply_event(DeliverAll);
    assert_eq!(
        (
            list_acceptors(&world),
            world.shims[&ShimId(3)].machine.phase()
        ),
        (vec![vec![4]], Phase::Left)
    );
}

/// The shim's accept loop has not run, so no sibling has a guard: clients may be queued.
#[test]
fn a_joining_shim_that_leaves_keeps_its_listener_until_a_sibling_accepts() {
    use Event::{DeliverAll, Leave, Ready, Start};
    let mut world = World::default();
    for event in [
        Start,
        Ready(0, true),
        DeliverAll,
        Start,
        DeliverAll,
        Ready(1, true),
        Leave(1),
    ] {
        world.apply_event(event);
    }
    let shim = &world.shims[&world.nth_holder(1).unwrap()];
    assert_eq!(
        (shim.machine.phase(), shim.starting.len()),
        (Phase::Waiting, 1)
    );
    world.apply_event(DeliverAll);
    let leaves = world.shims[&world.nth_holder(1).unwrap()].machine.phase();
    assert_eq!(
        (list_acceptors(&world), leaves),
        (vec![vec![1], vec![1]], Phase::Left)
    );
}

/// Otherwise the shim would exit with queued clients.
#[test]
fn a_shim_that_accepts_again_has_not_left() {
    use Event::{Crash, DeliverAll, Exit, Leave, Ready, Start};
    let mut world = World::default();
    let begin = [
        Start,
        Start,
        DeliverAll,
        Ready(0, true),
        Ready(1, true),
        DeliverAll,
        Ready(0, false),
        DeliverAll,
    ];
    for event in begin {
        world.apply_event(event);
    }
    let phase = |world: &World| world.shims[&ShimId(1)].machine.phase();
    assert_eq!(phase(&world), Phase::Left);
    world.apply_event(Crash(1));
    while !world.has_read_all_messages(ShimId(1), ShimId(2)) {
        world.deliver_message(ShimId(1), ShimId(2));
    }
    assert_eq!(
        (phase(&world), world.shims[&ShimId(1)].starting.is_empty()),
        (Phase::Waiting, false)
    );
    for event in [Leave(0), Exit(0), DeliverAll] {
        world.apply_event(event);
    }
    assert_eq!(
        (phase(&world), world.sockets.len()),
        (Phase::Left, 0),
        "its queues are drained"
    );
}

/// The sibling renewed its lease and ended while this shim was stopped: the end of the connection
/// is read before the leases.
#[test]
fn a_sibling_that_ended_during_a_stall_is_gone() {
    let rules = Rules {
        addresses: vec![test_address()],
        hold: HOLD,
        lease: LEASE,
    };
    let (mut machine, sibling) = (Machine::new(rules, Time::ZERO), ShimId(1));
    machine.on_leases(Time::ZERO, &[(sibling, Time::ZERO, LEASE)]);
    machine.on_connected(sibling);
    machine.on_update(sibling, Announce::default(), &[]);
    machine.on_gone(3 * STEP, sibling);
    machine.on_leases(3 * STEP, &[(sibling, 2 * STEP, 2 * STEP + LEASE)]);
    assert!(
        machine.is_dead(sibling) && machine.peers.is_empty(),
        "{machine:?}"
    );
    // Only the sibling's connection ended.
    machine.on_leases(5 * STEP, &[(sibling, 4 * STEP, 4 * STEP + LEASE)]);
    assert!(!machine.is_dead(sibling));
}
