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
//!   `deaths_in_a_row_leave_nobody_waiting_for_a_lease`
//! * A shim that hangs accepts no connection until it wakes. Established connections go on, with
//!   their queued messages. `death`: `a_hang_makes_clients_wait_for_one_lease_at_most`
//! * A connection may end although both ends live. `names`:
//!   `a_connection_that_ends_is_made_again_while_the_sibling_lives`
//! * A listener lives, with its queue, while a process holds it. `death`:
//!   `a_crash_loses_what_was_accepted_and_nothing_that_was_queued`
//! * A descriptor in flight holds the listener, too. `peers`: the test named first
//! * The exit of a listener's last holder resets queued clients that were not accepted before.
//!   `death`: `who_has_left_serves_what_waits_when_the_last_sibling_dies`
//! * An accept loop runs, ends or fails later than requested (`Runs`, `Ended`, `Deaf`).
//!   `listeners`: `a_shim_accepts_when_its_accept_loop_runs`,
//!   `a_shim_has_left_when_its_accept_loops_have_ended`
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
use std::collections::VecDeque;

const LEASE: Time = Duration::from_secs(3);
/// Longer than a lease, and short enough for one `Pass(7)`: searches have few passes.
const HOLD: Time = Duration::from_millis(3500);
const STEP: Time = Duration::from_millis(500);

fn address() -> SocketAddr {
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
    /// The shim can neither listen nor wait for clients: descriptors ran out, or another process
    /// listens.
    deaf: bool,
    /// Accept loops that were started and do not run yet.
    starting: BTreeSet<Cookie>,
    /// Listeners that failed to accept, to be tried again.
    failed: BTreeSet<Cookie>,
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

fn event() -> impl Strategy<Value = Event> {
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
        1 => (shim.clone(), shim.clone()).prop_map(|(a, b)| Event::Break(a, b)),
        6 => (shim.clone(), shim).prop_map(|(a, b)| Event::Deliver(a, b)),
        5 => Just(Event::DeliverAll),
        4 => (1u8..30).prop_map(Event::Pass),
    ]
}

impl World {
    fn holder(&self, nth: usize) -> Option<ShimId> {
        let count = self.shims.len();
        (count > 0).then(|| *self.shims.keys().nth(nth % count).unwrap())
    }

    fn reachable(&self) -> bool {
        self.shims.values().any(|shim| shim.ready)
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Start if self.shims.len() < 5 => self.start(),
            Event::Start => {}
            Event::Ready(nth, ready) => {
                let Some(holder) = self.holder(nth) else {
                    return;
                };
                let shim = self.shims.get_mut(&holder).unwrap();
                (shim.ready, shim.was_ready) = (ready, shim.was_ready || ready);
                self.update_facts();
            }
            Event::Leave(nth) => {
                let Some(holder) = self.holder(nth) else {
                    return;
                };
                self.shims.get_mut(&holder).unwrap().leaving = true;
                self.update_facts();
            }
            Event::Exit(nth) => {
                let Some(holder) = self.holder(nth) else {
                    return;
                };
                let shim = &self.shims[&holder];
                if shim.leaving && !shim.hung && shim.machine.phase() == Phase::Left {
                    self.check_drained(holder);
                    self.end(holder);
                }
            }
            Event::Crash(nth) => {
                let Some(holder) = self.holder(nth) else {
                    return;
                };
                self.check_given(holder);
                self.end(holder);
            }
            Event::CrashUnread(nth) => {
                let Some(holder) = self.holder(nth) else {
                    return;
                };
                self.check_given(holder);
                for other in self.shims.values_mut() {
                    if let Some(inbox) = other.inbox.get_mut(&holder) {
                        inbox.retain(|message| !matches!(message, Message::Update(..)));
                    }
                }
                self.end(holder);
            }
            Event::Hang(nth) => {
                if let Some(holder) = self.holder(nth) {
                    self.shims.get_mut(&holder).unwrap().hung = true;
                    self.disturbed = Some(self.now);
                }
            }
            Event::Wake(nth) => {
                let Some(holder) = self.holder(nth) else {
                    return;
                };
                self.shims.get_mut(&holder).unwrap().hung = false;
                self.wake();
            }
            Event::WakeBy(nth, from) => {
                let Some(holder) = self.holder(nth) else {
                    return;
                };
                if std::mem::take(&mut self.shims.get_mut(&holder).unwrap().hung) {
                    self.deliver(holder, from);
                    self.wake();
                }
            }
            Event::Deaf(nth, deaf) => {
                if let Some(holder) = self.holder(nth) {
                    self.shims.get_mut(&holder).unwrap().deaf = deaf;
                }
            }
            Event::Break(one, other) => {
                if let (Some(one), Some(other)) = (self.holder(one), self.holder(other)) {
                    self.disturbed = Some(self.now);
                    self.end_connection(one, other);
                }
            }
            Event::Deliver(to, from) => {
                if let (Some(to), Some(from)) = (self.holder(to), self.holder(from)) {
                    self.deliver(to, from);
                }
            }
            Event::DeliverFrom(nth, from) => {
                if let Some(holder) = self.holder(nth) {
                    self.deliver(holder, from);
                }
            }
            Event::Repeat(to, from) => {
                let (Some(to), Some(from)) = (self.holder(to), self.holder(from)) else {
                    return;
                };
                if self.shims[&from].connected.contains_key(&to) {
                    let announce = self.shims[&from].machine.announce();
                    self.post(to, from, Message::Update(announce, Vec::new()));
                }
            }
            Event::DeliverAll => self.deliver_all(),
            Event::Pass(steps) => (0..steps).for_each(|_| self.pass()),
        }
        self.check();
    }

    fn start(&mut self) {
        self.next += 1;
        let holder = ShimId(self.next);
        let mut addresses = vec![address()];
        addresses.extend(self.two.then(|| SocketAddr::new(address().ip(), 7443)));
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
            deaf: false,
            starting: BTreeSet::new(),
            failed: BTreeSet::new(),
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
            self.act(holder, |machine| {
                machine.on_leases(now, &[(other, lease - LEASE, lease)])
            });
            // A hung shim accepts no connection before it wakes.
            if !self.shims[&other].hung {
                self.connect(holder, other);
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
                self.act(holder, |machine| {
                    machine.on_leases(now, &[(dead, lease - LEASE, lease)])
                });
            }
        }
        self.dial(holder);
        self.update_facts();
    }

    /// The shim reads the leases before judging anything.
    fn wake(&mut self) {
        self.disturbed = Some(self.now);
        self.renew(true);
        self.update_facts();
        self.tick();
    }

    /// Dials the awaited siblings: the socket of a dead sibling refuses.
    fn dial(&mut self, holder: ShimId) {
        let now = self.now;
        self.act(holder, |machine| machine.tick(now));
        for dead in self.shims[&holder].machine.awaited_siblings() {
            if self.graves.contains_key(&dead) {
                self.act(holder, |machine| machine.on_gone(now, dead));
            }
        }
    }

    fn connect(&mut self, one: ShimId, other: ShimId) {
        for (to, from) in [(one, other), (other, one)] {
            self.shims
                .get_mut(&to)
                .unwrap()
                .connected
                .insert(from, BTreeSet::new());
            self.post(to, from, Message::Connected);
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
                self.post(to, from, Message::Gone);
            }
        }
    }

    /// True if `at` has read all messages of `from`.
    fn is_quiet(&self, at: ShimId, from: ShimId) -> bool {
        self.shims[&at]
            .inbox
            .get(&from)
            .is_none_or(VecDeque::is_empty)
    }

    fn post(&mut self, to: ShimId, from: ShimId, mut message: Message) {
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

    fn end(&mut self, holder: ShimId) {
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
                self.post(other, holder, Message::Gone);
            }
        }
        self.drop_unheld();
        self.update_facts();
    }

    /// Removes the sockets without a holder. A descriptor in an unread message holds its socket.
    fn drop_unheld(&mut self) {
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
    fn check_given(&self, holder: ShimId) {
        let ends = &self.shims[&holder];
        let lost = |(cookie, socket): &(&Cookie, &Socket)| {
            socket.listening
                && !ends.starting.contains(*cookie)
                && socket.holders.iter().eq([&holder])
        };
        if let Some(lost) = self.sockets.iter().filter(|_| !ends.leaving).find(lost) {
            let stays = |(_, shim): &(&ShimId, &Shim)| {
                !shim.leaving && shim.connected.contains_key(&holder)
            };
            for (other, _) in self.shims.iter().filter(stays) {
                let heard = self.is_quiet(*other, holder) && self.is_quiet(holder, *other);
                assert!(
                    !heard || !ends.connected.contains_key(other),
                    "{other:?} has no guard of {lost:?}"
                );
            }
        }
    }

    fn is_disturbed(&self) -> Option<Time> {
        self.disturbed
            .filter(|when| self.now <= *when + LEASE + STEP)
    }

    /// Checks that the last holder of a listener has accepted the queued clients before its exit,
    /// which resets clients in the queue. Excepted: a holder that cannot know yet that it is the
    /// last, and a listener that a hung or disconnected shim may still take.
    fn check_drained(&self, holder: ShimId) {
        let all_read = self.shims[&holder].inbox.values().all(VecDeque::is_empty);
        if !all_read || self.is_disturbed().is_some() {
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

    fn update_facts(&mut self) {
        let reachable = self.reachable();
        let holders: Vec<_> = self.shims.keys().copied().collect();
        for holder in holders {
            let shim = &self.shims[&holder];
            if !shim.hung {
                let facts = Facts {
                    ready: shim.ready,
                    reachable,
                    leaving: shim.leaving,
                    blocked: false,
                };
                self.dial(holder);
                self.act(holder, |machine| machine.set_facts(facts));
            }
        }
    }

    fn deliver(&mut self, to: ShimId, from: ShimId) -> bool {
        let waits = |shim: &&Shim| {
            !shim.hung && shim.inbox.get(&from).is_some_and(|inbox| !inbox.is_empty())
        };
        if self.shims.get(&to).filter(waits).is_none() {
            return false;
        }
        let now = self.now;
        // After a stall, the machine keeps the time from before.
        if now < self.shims[&to].machine.now() + LEASE / 2 {
            self.act(to, |machine| machine.tick(now));
        }
        let inbox = self
            .shims
            .get_mut(&to)
            .and_then(|shim| shim.inbox.get_mut(&from));
        let Some(message) = inbox.and_then(VecDeque::pop_front) else {
            return false;
        };
        match message {
            Message::Connected => self.act(to, |machine| machine.on_connected(from)),
            Message::Update(announce, guards) => {
                for (cookie, _) in &guards {
                    let socket = self.sockets.get_mut(cookie);
                    socket.expect("it was in flight").holders.insert(to);
                }
                self.act(to, |machine| machine.on_update(from, announce, &guards));
            }
            Message::Runs(cookie) => self.start_loop(to, cookie),
            Message::Ended(cookie) => self.act(to, |machine| machine.on_ended(cookie)),
            Message::Gone => self.act(to, |machine| machine.on_gone(now, from)),
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
            return self.act(of, |machine| machine.on_failed(cookie));
        }
        if let Some(socket) = self.sockets.get_mut(&cookie).filter(|_| goes_on) {
            if socket.listening {
                socket.acceptors.insert(of);
            } else {
                // A sibling refused meanwhile.
                self.post(of, LOOPS, Message::Ended(cookie));
            }
        }
        self.act(of, |machine| machine.on_accepting(cookie));
    }

    /// Ends an accept loop, if one runs. A loop that a sibling's refusal ended has reported its end
    /// already.
    fn end_loop(&mut self, of: ShimId, cookie: Cookie) -> bool {
        let started = self.shims.get_mut(&of).unwrap().starting.remove(&cookie);
        let ends = self.sockets.get_mut(&cookie).unwrap().acceptors.remove(&of) || started;
        if ends {
            self.post(of, LOOPS, Message::Ended(cookie));
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
                self.deliver(to, from);
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

    fn pass(&mut self) {
        self.deliver_all();
        self.now += STEP;
        self.renew(false);
        self.tick();
        self.deliver_all();
        self.check();
    }

    fn renew(&mut self, force: bool) {
        let now = self.now;
        for shim in self.shims.values_mut().filter(|shim| !shim.hung) {
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
            let Shim { machine, .. } = self.shims.get_mut(holder).unwrap();
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
            self.act(*holder, |machine| machine.on_leases(now, &seen));
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
        // other died.
        for one in &holders {
            for other in holders.iter().filter(|other| *other > one) {
                let known = |at: &ShimId, of: &ShimId| {
                    let Shim {
                        connected, inbox, ..
                    } = &self.shims[at];
                    connected.contains_key(of) || !inbox.get(of).is_none_or(VecDeque::is_empty)
                };
                if !known(one, other)
                    && !known(other, one)
                    && !self.shims[one].machine.is_dead(*other)
                {
                    self.connect(*one, *other);
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
            self.dial(holder);
            for address in std::mem::take(&mut self.shims.get_mut(&holder).unwrap().left_alone) {
                self.act(holder, |machine| machine.retry_listen(address));
            }
            for cookie in std::mem::take(&mut self.shims.get_mut(&holder).unwrap().failed) {
                self.act(holder, |machine| machine.on_ended(cookie));
            }
        }
    }

    /// Gives a machine an input, and carries out the machine's actions.
    fn act(&mut self, holder: ShimId, input: impl FnOnce(&mut Machine) -> Vec<Action>) {
        let Some(shim) = self.shims.get_mut(&holder) else {
            return;
        };
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
                        continue;
                    }
                    // Not connected, or one of both shims has unread messages.
                    let unheard = |other: ShimId| {
                        let apart = !self.shims[&holder].connected.contains_key(&other);
                        apart || !self.is_quiet(holder, other) || !self.is_quiet(other, holder)
                    };
                    let fallback = self
                        .shims
                        .iter()
                        .any(|(o, shim)| *o != holder && (shim.hung || unheard(*o)));
                    self.fallbacks += usize::from(fallback);
                    self.next += 1;
                    let cookie = Cookie(self.next);
                    self.check_heard(holder);
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
                    self.sockets.get_mut(&cookie).unwrap().reserved = None;
                    let shim = self.shims.get_mut(&holder).unwrap();
                    shim.failed.insert(cookie);
                    actions.extend(shim.machine.on_failed(cookie));
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
                    self.post(holder, LOOPS, Message::Runs(cookie));
                }
                Action::Guard(cookie) => {
                    self.check_covered(holder, cookie);
                    self.end_loop(holder, cookie);
                }
                Action::Refuse(cookie) => {
                    self.end_loop(holder, cookie);
                    let socket = self.sockets.get_mut(&cookie).unwrap();
                    socket.listening = false;
                    for other in std::mem::take(&mut socket.acceptors) {
                        self.post(other, LOOPS, Message::Ended(cookie));
                    }
                }
                Action::Close(cookie) => {
                    assert!(
                        self.shims[&holder].leaving,
                        "{holder:?} closes {cookie:?}, and need not leave"
                    );
                    let could = self.shims.iter().any(|(other, shim)| {
                        // Neither shim has unread messages of the other.
                        let together = shim.connected.contains_key(&holder);
                        let met = together
                            && self.is_quiet(*other, holder)
                            && self.is_quiet(holder, *other);
                        met && !shim.hung && !shim.leaving && shim.lease > self.now
                    });
                    // Also from a guard, a loop takes the queued clients.
                    if !self.end_loop(holder, cookie) {
                        self.post(holder, LOOPS, Message::Ended(cookie));
                    }
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
                        .for_each(|(other, message)| self.post(other, holder, message));
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
        self.drop_unheld();
    }

    /// Checks who accepts after an accept loop is ended. If all messages are read and nobody hung,
    /// another shim accepts from the listener. Where the first shim leaves, the other shim stays.
    fn check_covered(&self, holder: ShimId, cookie: Cookie) {
        let leaving = self.shims[&holder].leaving;
        let mut others = self.shims.iter().filter(|(other, _)| **other != holder);
        let all_read = others.all(|(other, shim)| self.is_quiet(holder, *other) && !shim.hung);
        let dead = self.graves.keys().any(|dead| !self.is_quiet(holder, *dead));
        let Socket {
            acceptors,
            listening,
            ..
        } = &self.sockets[&cookie];
        if all_read && !dead && *listening && self.is_disturbed().is_none() {
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
    fn check_heard(&self, holder: ShimId) {
        let Shim {
            machine, connected, ..
        } = &self.shims[&holder];
        let is_new = machine.phase() == Phase::Waiting && !machine.returning;
        for sibling in connected
            .keys()
            .filter(|sibling| **sibling < holder && is_new && self.is_disturbed().is_none())
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
        let ended =
            |cookie, end: &Message| matches!(end, Message::Ended(ended) if *ended == cookie);
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
                let unheard = |end: &Message| matches!(end, Message::Ended(cookie) if !machine.is_ending(*cookie));
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
                assert!(
                    self.shims[&holder].starting.is_empty(),
                    "left, and an accept loop is about to run"
                );
            }
            Phase::Waiting | Phase::Refusing => {}
        }
    }

    /// All hung shims wake, time passes, messages arrive.
    fn peace(&mut self) {
        for nth in 0..self.shims.len() {
            self.apply(Event::Deaf(nth, false));
            self.apply(Event::Wake(nth));
        }
        self.apply(Event::Pass(60));
        for (holder, shim) in &self.shims {
            let phase = shim.machine.phase();
            match (shim.leaving, shim.ready) {
                (true, _) => assert_eq!(phase, Phase::Left, "{holder:?} was to leave"),
                (false, true) => assert_eq!(phase, Phase::Joined, "{holder:?} is ready"),
                (false, false) => {}
            }
            // No state is kept of dead shims.
            let Machine { peers, dead, .. } = &shim.machine;
            let known = peers.keys().all(|peer| self.shims.contains_key(peer)) && dead.is_empty();
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
            if !self.reachable() {
                assert!(
                    !socket.listening || !accepted,
                    "nothing is reachable and {cookie:?} accepts"
                );
            }
        }
    }

    fn check(&mut self) {
        let now = self.now;
        let reachable = self.reachable();
        let disturbed = self.is_disturbed();
        for (cookie, socket) in &mut self.sockets {
            let runs = |holder: &ShimId| self.shims.get(holder).is_some_and(|shim| !shim.hung);
            let accepted = socket.acceptors.iter().any(runs);
            if accepted || !socket.listening {
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
                    !leaving && !deaf && matches!(machine.phase(), Phase::Joined | Phase::Waiting)
                }
            };
            let mut stay = socket.holders.iter().filter(stays).peekable();
            if reachable && stay.peek().is_some() {
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
    fn every_order_of_events_keeps_the_invariants(events in prop::collection::vec(event(), 1..120)) {
        let mut world = World::default();
        for event in events {
            world.apply(event);
        }
        world.peace();
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
        world.apply(event);
    }
    let (newcomer, shim) = world.shims.last_key_value().unwrap();
    let (newcomer, accepts) = (*newcomer, |world: &World, holder| {
        world
            .sockets
            .values()
            .any(|s| s.acceptors.contains(&holder))
    });
    assert!(!shim.machine.knows_siblings() && !accepts(&world, newcomer));
    world.apply(Pass(1));
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
            addresses: vec![address()],
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
        machine.on_listening(address(), Cookie(1));
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
    machine.on_ended(Cookie(1));
    assert_eq!(machine.phase(), Phase::Left);
}

/// The sibling would set its own options on the listener, and the listener's connections would
/// inherit another shim's options.
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
        world.apply(event);
    }
    let (first, second) = (world.holder(0).unwrap(), world.holder(1).unwrap());
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
        world.apply(Deliver(0, 1));
    }
    assert_eq!(
        (accepts(&world), world.shims[&first].starting.len()),
        (1, 0),
        "the first keeps to its own"
    );
    world.apply(DeliverAll);
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
        world.apply(event);
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
        world.apply(event);
    }
    assert_eq!(list_acceptors(&world), [[3]]);
    world.apply(DeliverAll);
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
        world.apply(event);
    }
    let shim = &world.shims[&world.holder(1).unwrap()];
    assert_eq!(
        (shim.machine.phase(), shim.starting.len()),
        (Phase::Waiting, 1)
    );
    world.apply(DeliverAll);
    let leaves = world.shims[&world.holder(1).unwrap()].machine.phase();
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
        world.apply(event);
    }
    let phase = |world: &World| world.shims[&ShimId(1)].machine.phase();
    assert_eq!(phase(&world), Phase::Left);
    world.apply(Crash(1));
    while !world.is_quiet(ShimId(1), ShimId(2)) {
        world.deliver(ShimId(1), ShimId(2));
    }
    assert_eq!(
        (phase(&world), world.shims[&ShimId(1)].starting.is_empty()),
        (Phase::Waiting, false)
    );
    for event in [Leave(0), Exit(0), DeliverAll] {
        world.apply(event);
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
        addresses: vec![address()],
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
