//! Which shim accepts from which listener, as a pure state machine: no I/O, no clock of its own.
//!
//! At each change, the shims of a berth announce to one another their phase, the listeners
//! that they own, and those that they accept from ([`Announce`]); each listener comes with a duplicate of
//! it (a guard) the first time. Everything follows from these, from leases and from the own instance:
//!
//! * A listener that no live shim owns is an orphan. Every shim that is allowed to accepts from it, until one
//!   that joins takes it over. So a crash (end of file), a hang (the lease expired) and a leave
//!   are the same to the siblings.
//! * A shim that leaves disowns its listeners and goes on accepting until a live sibling announces that it accepts
//!   from each: the announcement is the acknowledgement. A sibling that leaves too does not count. If no shim stays, the
//!   queues of all held listeners are accepted and the listeners closed, also when the last one that stayed leaves later.
//! * What is announced is done, not decided: a shim is *joined* when each of its addresses has a listener
//!   that it accepts from, and has *left* when its last accept loop has ended.
//! * A shim that joins waits for the first announcement of each sibling. One that hangs costs it the rest of a lease; one that is
//!   dead costs nothing, because its socket refuses.
//! * A shim that joins takes an orphan over before it makes a listener of its own, so that there are never
//!   more listeners of an address than there were ever shims alive at the same time.
//!
//! Because an announcement is a state and no change, one that is lost, late or repeated breaks
//! nothing, and any order of events leads to the same result.

use berth_node::terms::{Announce, Cookie, Phase, ShimId};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

/// Time on a clock that does not jump, since its start.
pub(crate) type Time = Duration;

/// The own state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Facts {
    /// The own instance is ready (node shim: any is), and so one is reachable.
    pub(crate) ready: bool,
    /// Some instance can get connections.
    pub(crate) reachable: bool,
    /// It has to leave for good.
    pub(crate) leaving: bool,
    /// A relaying thread does not respond: an accept loop may never end.
    pub(crate) blocked: bool,
}

/// An action to carry out. Each is idempotent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Listen on the own, bound socket of an address; answered by [`Machine::listening`], or by
    /// [`Machine::listen_again`].
    Listen(SocketAddr),
    /// Listen on a held socket (again) and accept from it; answered by [`Machine::accepting`] when clients are
    /// accepted, or by [`Machine::failed`].
    Accept(Cookie),
    /// Stop accepting and keep it as a guard. Answered by [`Machine::ended`], as the next two are.
    Guard(Cookie),
    /// End listening for every holder: no client can be served. Clients are refused at once.
    Refuse(Cookie),
    /// Accept what is queued and close it: no other shim holds it.
    Close(Cookie),
    /// Send [`Machine::announce`] to every sibling.
    Announce,
    Phase(Phase),
}

#[derive(Debug, Clone)]
struct Peer {
    /// Its last announcement; none before the first.
    announced: Option<Announce>,
    /// When it became known.
    since: Time,
    /// Its lease, or what replaces it before the first, holds until then.
    fresh_until: Time,
    connected: bool,
}

impl Peer {
    fn new(now: Time) -> Self {
        Self {
            announced: None,
            since: now,
            fresh_until: now,
            connected: false,
        }
    }

    /// It may be alive, and announce something yet: its lease holds, and it has not been known for the time of a lease.
    fn is_awaited(&self, now: Time, lease: Duration) -> bool {
        self.announced.is_none() && now < self.fresh_until.min(self.since + lease)
    }

    /// Its announcement counts: it is connected and does not hang.
    fn live(&self, now: Time) -> Option<&Announce> {
        self.announced
            .as_ref()
            .filter(|_| self.connected && now < self.fresh_until)
    }
}

#[derive(Debug, Clone, Copy)]
struct Held {
    address: SocketAddr,
    own: bool,
    accept: AcceptLoop,
}

impl Held {
    fn new(address: SocketAddr, own: bool) -> Self {
        Self {
            address,
            own,
            accept: AcceptLoop::None,
        }
    }

    /// This shim accepts from it, or soon will.
    fn accepting(&self) -> bool {
        matches!(
            self.accept,
            AcceptLoop::Starting | AcceptLoop::Running | AcceptLoop::Failed
        )
    }
}

/// The state of a listener's accept loop. What is announced is what runs, not what was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AcceptLoop {
    None,
    /// Requested: it may accept a client at any moment.
    Starting,
    /// It could not start or go on: there is none, and it is tried again.
    Failed,
    Running,
    /// It has to end: a client may still be between accept(2) and being counted.
    Ending,
}

/// Fixed for a shim's life.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rules {
    pub(crate) addresses: Vec<SocketAddr>,
    /// How long nothing may be reachable before clients are refused.
    pub(crate) hold: Duration,
    /// Duration of a lease: how long a sibling may be without a renewal.
    pub(crate) lease: Duration,
}

/// One shim's part in its berth.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    rules: Rules,
    phase: Phase,
    facts: Facts,
    now: Time,
    held: BTreeMap<Cookie, Held>,
    peers: BTreeMap<ShimId, Peer>,
    /// Addresses whose own socket should listen and does not yet.
    requested: BTreeSet<SocketAddr>,
    /// Since when nothing is reachable, for oneself or for a live sibling.
    unreachable_since: Option<Time>,
    /// Since when it waits for siblings to accept from its listeners.
    leaving_since: Option<Time>,
    /// When it released its listeners; it has left when the last accept loop has ended.
    released: Option<Time>,
    /// It is about to join; it is joined when each address has a listener that it accepts from.
    joining: bool,
    /// It had left, and accepts again: nobody relieves it any more.
    returning: bool,
    /// Listeners that are no longer held, whose last clients are being accepted.
    closing: BTreeSet<Cookie>,
    /// Siblings whose connection ended, and when: they are gone, even if a lease that they wrote before is still valid.
    dead: BTreeMap<ShimId, Time>,
    /// The last announcement to siblings, and the listeners that were given with it.
    announced: (Announce, Vec<(Cookie, SocketAddr)>),
}

impl Machine {
    pub(crate) fn new(rules: Rules, now: Time) -> Self {
        Self {
            rules,
            now,
            unreachable_since: Some(now),
            ..Self::default()
        }
    }

    /// The last time that it was given.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.rules.addresses
    }

    /// Whether a sibling's connection ended, without a sign of its process since.
    pub(crate) fn is_dead(&self, holder: ShimId) -> bool {
        self.dead.contains_key(&holder)
    }

    /// The announcement to siblings.
    pub(crate) fn announce(&self) -> Announce {
        let with = |of: fn(&Held) -> bool| {
            self.held
                .iter()
                .filter(|(_, h)| of(h))
                .map(|(c, _)| *c)
                .collect()
        };
        Announce {
            phase: self.phase,
            ready: self.facts.ready,
            reachable: self.facts.reachable,
            leaving: self.facts.leaving,
            // A shim that leaves owns none: siblings take over from here on.
            owns: if self.is_leaving() {
                BTreeSet::new()
            } else {
                with(|held| held.own)
            },
            accepts: with(|held| held.accept == AcceptLoop::Running),
        }
    }

    /// Listeners of which a sibling should have duplicates: all that are held, except an own one whose accept loop has
    /// not started. A sibling would take that for an orphan, and set its own options on it; while leaving, it should. Shims that
    /// all leave give none: they would close them and get them again, without end.
    pub(crate) fn guards(&self) -> Vec<(Cookie, SocketAddr)> {
        if self.is_last() {
            return Vec::new();
        }
        let given =
            |held: &Held| !held.own || held.accept != AcceptLoop::Starting || self.is_leaving();
        self.held
            .iter()
            .filter(|(_, held)| given(held))
            .map(|(cookie, held)| (*cookie, held.address))
            .collect()
    }

    /// Siblings that are joined and ready, for connections that the own instance cannot serve.
    pub(crate) fn joined_siblings(&self) -> Vec<ShimId> {
        self.those(|peer| {
            peer.live(self.now)
                .is_some_and(|its| its.phase == Phase::Joined && its.ready)
        })
    }

    /// Whether there is a sibling that is joined, ready and not leaving.
    pub(crate) fn has_successor(&self) -> bool {
        self.live()
            .any(|its| its.phase == Phase::Joined && its.ready && !its.leaving)
    }

    /// Siblings that are connected and have announced nothing for the time of a lease.
    pub(crate) fn silent(&self) -> Vec<ShimId> {
        self.those(|peer| {
            peer.connected && peer.announced.is_none() && self.now >= peer.since + self.rules.lease
        })
    }

    /// Siblings that have a lease, and no connection for the time of a lease.
    pub(crate) fn unconnected(&self) -> Vec<ShimId> {
        let lease = self.rules.lease;
        self.those(|peer| !peer.connected && self.now >= peer.since + lease)
    }

    /// Siblings that have a lease and no connection, for which a shim that joins waits: they live, or died before their first
    /// announcement.
    pub(crate) fn awaited(&self) -> Vec<ShimId> {
        self.those(|peer| !peer.connected && peer.is_awaited(self.now, self.rules.lease))
    }

    fn those(&self, are: impl Fn(&Peer) -> bool) -> Vec<ShimId> {
        self.peers
            .iter()
            .filter(|(_, peer)| are(peer))
            .map(|(holder, _)| *holder)
            .collect()
    }

    /// Whether every sibling that has a lease is connected and has announced its state: then a listener without a
    /// guard is no sibling's.
    pub(crate) fn has_all_guards(&self) -> bool {
        self.peers.values().all(|peer| {
            (peer.connected && peer.announced.is_some()) || self.now >= peer.fresh_until
        })
    }

    /// When it needs [`Machine::tick`] without an event.
    pub(crate) fn wake(&self) -> Option<Time> {
        let waits = [
            self.unreachable_since.map(|since| since + self.rules.hold),
            self.leaving_since.map(|since| since + self.rules.lease),
            self.released.map(|since| since + self.rules.lease),
        ];
        let peers = self
            .peers
            .values()
            .flat_map(|peer| [peer.fresh_until, peer.since + self.rules.lease]);
        waits
            .into_iter()
            .flatten()
            .chain(peers)
            .filter(|at| *at > self.now)
            .min()
    }

    pub(crate) fn tick(&mut self, now: Time) -> Vec<Action> {
        self.now = self.now.max(now);
        self.peers
            .retain(|_, peer| peer.connected || self.now < peer.fresh_until);
        self.settle()
    }

    pub(crate) fn facts(&mut self, facts: Facts) -> Vec<Action> {
        self.facts = facts;
        self.settle()
    }

    /// Siblings' leases were read: of each, when it was renewed, or a little before that, and until when it holds. All at
    /// once, with the time: a shim that stalled would take a sibling for hung before it has read its new lease.
    pub(crate) fn leased(&mut self, now: Time, leases: &[(ShimId, Time, Time)]) -> Vec<Action> {
        self.now = self.now.max(now);
        for &(holder, renewed, until) in leases {
            // Only its connection ended. That its lease still holds would mean nothing: it may have died.
            if self.dead.get(&holder).is_some_and(|ended| renewed > *ended) {
                self.dead.remove(&holder);
            }
            if !self.is_dead(holder) {
                let peer = self.peer(holder);
                peer.fresh_until = peer.fresh_until.max(until);
            }
        }
        self.tick(now)
    }

    /// Only these have leases that may hold: the ends of others need not be remembered.
    pub(crate) fn forget_dead(&mut self, leased: &BTreeSet<ShimId>) {
        self.dead.retain(|holder, _| leased.contains(holder));
    }

    /// The connection to a sibling is established.
    pub(crate) fn connected(&mut self, holder: ShimId) -> Vec<Action> {
        let until = self.now + self.rules.lease;
        self.dead.remove(&holder);
        let peer = self.peer(holder);
        peer.connected = true;
        peer.fresh_until = peer.fresh_until.max(until);
        let mut actions = self.settle();
        if !actions.contains(&Action::Announce) {
            actions.push(Action::Announce);
        }
        actions
    }

    /// A sibling announced its state, and gave duplicates of listeners that were not held yet.
    pub(crate) fn updated(
        &mut self,
        holder: ShimId,
        announce: Announce,
        guards: &[(Cookie, SocketAddr)],
    ) -> Vec<Action> {
        for (cookie, address) in guards {
            self.held
                .entry(*cookie)
                .or_insert(Held::new(*address, false));
        }
        self.peer(holder).announced = Some(announce);
        self.settle()
    }

    /// The connection to a sibling ended, or its socket refuses one: its process is gone, or will renew its lease. With the time, which
    /// counts for nothing else yet: after a stall, a lease that the sibling renewed meanwhile is from before its end.
    pub(crate) fn gone(&mut self, now: Time, holder: ShimId) -> Vec<Action> {
        self.peers.remove(&holder);
        self.dead.insert(holder, self.now.max(now));
        self.settle()
    }

    /// A listener listens, and clients are accepted from it.
    pub(crate) fn accepting(&mut self, cookie: Cookie) -> Vec<Action> {
        // One that has to end meanwhile ends.
        if let Some(held) = self
            .held
            .get_mut(&cookie)
            .filter(|held| held.accept == AcceptLoop::Starting)
        {
            held.accept = AcceptLoop::Running;
        }
        self.settle()
    }

    /// This shim could not accept from a listener; [`Machine::ended`] tries it again.
    pub(crate) fn failed(&mut self, cookie: Cookie) -> Vec<Action> {
        self.closing.remove(&cookie);
        if let Some(held) = self.held.get_mut(&cookie) {
            held.accept = if held.accepting() {
                AcceptLoop::Failed
            } else {
                AcceptLoop::None
            };
        }
        self.settle()
    }

    /// The accept loop of a listener has ended, and every client that it accepted is counted: on request, or because the
    /// listener no longer listens, since a sibling found nothing reachable and refused.
    pub(crate) fn ended(&mut self, cookie: Cookie) -> Vec<Action> {
        self.closing.remove(&cookie);
        if let Some(held) = self.held.get_mut(&cookie) {
            held.accept = AcceptLoop::None;
        }
        self.settle()
    }

    /// The own socket of an address listens, as this listener.
    pub(crate) fn listening(&mut self, address: SocketAddr, cookie: Cookie) -> Vec<Action> {
        self.requested.remove(&address);
        self.held.insert(cookie, Held::new(address, true));
        self.settle()
    }

    /// The own socket of an address could not listen, and may be tried again.
    pub(crate) fn listen_again(&mut self, address: SocketAddr) -> Vec<Action> {
        self.requested.remove(&address);
        self.settle()
    }

    /// Whether the accept loop of a listener has not ended yet.
    #[cfg(test)]
    fn is_ending(&self, cookie: Cookie) -> bool {
        self.closing.contains(&cookie)
            || self
                .held
                .get(&cookie)
                .is_some_and(|held| held.accept == AcceptLoop::Ending)
    }

    fn peer(&mut self, holder: ShimId) -> &mut Peer {
        let now = self.now;
        self.peers.entry(holder).or_insert_with(|| Peer::new(now))
    }

    fn live(&self) -> impl Iterator<Item = &Announce> {
        self.peers.values().filter_map(|peer| peer.live(self.now))
    }

    fn is_leaving(&self) -> bool {
        self.leaving_since.is_some() || self.released.is_some() || self.phase == Phase::Left
    }

    /// Brings phase and listeners in line with what is known.
    fn settle(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        self.update_reachable();
        let before = self.phase;
        self.change_phase(&mut actions);
        self.change_listeners(&mut actions);
        if self.phase != before {
            actions.push(Action::Phase(self.phase));
        }
        // A new guard is announced too: the sibling that gave it may be gone before it gave one to every other.
        let announced = (self.announce(), self.guards());
        if announced != self.announced {
            self.announced = announced;
            actions.push(Action::Announce);
        }
        actions
    }

    fn update_reachable(&mut self) {
        let reachable = self.facts.reachable || self.live().any(|its| its.reachable);
        self.unreachable_since = if reachable {
            None
        } else {
            self.unreachable_since.or(Some(self.now))
        };
    }

    fn is_refusing(&self) -> bool {
        self.unreachable_since
            .is_some_and(|since| self.now >= since + self.rules.hold)
    }

    fn change_phase(&mut self, actions: &mut Vec<Action>) {
        let Facts { ready, leaving, .. } = self.facts;
        // Its instance is down and another shim's is up, which should take the connections.
        let relieved = !ready && self.has_successor();
        let listens = self.phase != Phase::Waiting
            || self.returning
            || self.held.values().any(|held| held.own);
        let wants_out = leaving || (relieved && listens);
        if !wants_out {
            self.leaving_since = None;
        }
        if wants_out && self.phase != Phase::Left && self.released.is_none() {
            let since = *self.leaving_since.get_or_insert(self.now);
            // A shim that is only relieved goes on as long as its sibling cannot accept.
            let expired = leaving && self.now >= since + self.rules.lease;
            if expired || self.is_last() || self.uncovered().is_empty() {
                self.release(actions);
            }
        } else if self.is_last() {
            self.close_uncovered(actions);
        }
        self.joining = match self.phase {
            _ if wants_out || self.released.is_some() => false,
            // No sibling relieves it any more: it holds clients, which would otherwise wait in an accept queue.
            Phase::Left | Phase::Refusing => !self.is_refusing(),
            Phase::Waiting => {
                (ready && self.knows_siblings()) || (self.returning && !self.is_refusing())
            }
            Phase::Joined => false,
        };
        self.returning =
            self.phase == Phase::Left || (self.phase == Phase::Waiting && self.returning);
        self.phase = match self.phase {
            _ if self.has_released() => {
                self.released = None;
                Phase::Left
            }
            _ if self.joining && self.listens_everywhere() => Phase::Joined,
            // Who has left may exit, and so must accept nothing.
            Phase::Left if self.joining => Phase::Waiting,
            Phase::Joined if self.is_refusing() && !self.is_leaving() => Phase::Refusing,
            phase => phase,
        };
    }

    /// It released its listeners, and every accept loop has ended. One on a thread that is blocked accepts no client and may never
    /// end: after a lease, the shim has left without it, so that its end can begin.
    fn has_released(&self) -> bool {
        let idle = |held: &Held| matches!(held.accept, AcceptLoop::None | AcceptLoop::Failed);
        let ended = || self.closing.is_empty() && self.held.values().all(idle);
        let expired = |since| self.facts.blocked && self.now >= since + self.rules.lease;
        self.released.is_some_and(|since| ended() || expired(since))
    }

    /// Each address has a listener of its own that is accepted from.
    fn listens_everywhere(&self) -> bool {
        let serves = |address: &SocketAddr| {
            let fits = |held: &Held| {
                held.own && held.address == *address && held.accept == AcceptLoop::Running
            };
            self.held.values().any(fits)
        };
        self.rules.addresses.iter().all(serves)
    }

    /// It has to leave, and so has every sibling that may be alive: none will accept from what it holds.
    fn is_last(&self) -> bool {
        let stays = |peer: &Peer| {
            self.now < peer.fresh_until && peer.announced.as_ref().is_none_or(|its| !its.leaving)
        };
        self.facts.leaving && !self.peers.values().any(stays)
    }

    /// What it accepts from, or holds while it has to leave, and no sibling that stays accepts from.
    fn uncovered(&self) -> Vec<Cookie> {
        let covered = |cookie: &Cookie| {
            self.live()
                .any(|its| !its.leaving && its.accepts.contains(cookie))
        };
        // A loop that ends would not accept what is queued.
        let left = |held: &Held| {
            held.accepting() || (self.facts.leaving && held.accept == AcceptLoop::None)
        };
        let left = |(cookie, held): &(&Cookie, &Held)| {
            left(held) && !covered(cookie) && !self.closing.contains(cookie)
        };
        self.held
            .iter()
            .filter(left)
            .map(|(cookie, _)| *cookie)
            .collect()
    }

    fn release(&mut self, actions: &mut Vec<Action>) {
        self.leaving_since = None;
        self.released = Some(self.now);
        self.close_uncovered(actions);
        for held in self.held.values_mut() {
            held.own = false;
        }
    }

    /// No other shim accepts from these: what is queued is served here, then they are closed.
    fn close_uncovered(&mut self, actions: &mut Vec<Action>) {
        for cookie in self.uncovered() {
            self.held.remove(&cookie);
            self.closing.insert(cookie);
            actions.push(Action::Close(cookie));
        }
    }

    /// Every known sibling has announced what it owns and holds, or its lease has expired, or it had the time of a lease to.
    fn knows_siblings(&self) -> bool {
        self.peers
            .values()
            .all(|peer| !peer.is_awaited(self.now, self.rules.lease))
    }

    fn change_listeners(&mut self, actions: &mut Vec<Action>) {
        if self.joining {
            for address in self.rules.addresses.clone() {
                self.own_a_listener(address, actions);
            }
        }
        let owned_elsewhere = |cookie: &Cookie| {
            self.live()
                .any(|its| its.owns.contains(cookie) && its.accepts.contains(cookie))
        };
        let (refusing, knows) = (self.is_refusing(), self.knows_siblings());
        let may = match self.phase {
            _ if self.released.is_some() => false,
            Phase::Joined => true,
            // Refusing: it was about to join.
            Phase::Waiting | Phase::Refusing => !refusing,
            Phase::Left => false,
        };
        let leaving = self.facts.leaving;
        // One that a sibling gives again while it is being closed here is used when that has ended.
        let closing = |cookie: &Cookie| self.closing.contains(cookie);
        let wanted: Vec<(Cookie, bool)> = self
            .held
            .iter()
            .filter(|(cookie, _)| !closing(cookie))
            .map(|(cookie, held)| {
                let orphan = !owned_elsewhere(cookie) && (knows || held.accepting());
                let takes = match self.phase {
                    // A shim that leaves takes no orphan over, but keeps what it has until it is covered.
                    Phase::Refusing if !self.joining => held.accepting(),
                    _ => held.own || if leaving { held.accepting() } else { orphan },
                };
                (*cookie, may && takes)
            })
            .collect();
        for (cookie, wants) in wanted {
            let Some(held) = self.held.get_mut(&cookie) else {
                continue;
            };
            match (held.accept, wants) {
                (AcceptLoop::None, true) => {
                    held.accept = AcceptLoop::Starting;
                    actions.push(Action::Accept(cookie));
                }
                (AcceptLoop::Failed, false) => held.accept = AcceptLoop::None,
                (AcceptLoop::Starting | AcceptLoop::Running, false) => {
                    held.accept = AcceptLoop::Ending;
                    actions.push(if refusing {
                        Action::Refuse(cookie)
                    } else {
                        Action::Guard(cookie)
                    });
                }
                // One that ends is not started again until it has ended: two loops of one listener would share unevenly.
                _ => {}
            }
        }
    }

    /// Keeps, takes over or makes a listener for an address.
    fn own_a_listener(&mut self, address: SocketAddr, actions: &mut Vec<Action>) {
        if self
            .held
            .values()
            .any(|held| held.own && held.address == address)
        {
            return;
        }
        let owned: BTreeSet<Cookie> = self
            .live()
            .flat_map(|its| its.owns.iter().copied())
            .collect();
        let orphan = self
            .held
            .iter_mut()
            .find(|(cookie, held)| held.address == address && !owned.contains(cookie));
        match orphan {
            Some((_, held)) => held.own = true,
            None if self.requested.insert(address) => actions.push(Action::Listen(address)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests;
