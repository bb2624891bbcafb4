//! Decides from which listeners a shim accepts. A pure state machine: no I/O, and the time is an
//! argument.
//!
//! At each change, the shims of a berth announce to one another their phase, the listeners that
//! they own, and the listeners from which they accept ([`Announce`]). The first announcement of a
//! listener carries a duplicate of the listener (a guard). Every decision follows from the
//! announcements, the leases and the state of the own instance:
//!
//! * A listener that no live shim owns is an orphan. Every shim that is allowed to accepts from the
//!   orphan, until a joining shim takes the orphan over. So a crash (end of file), a hang (the
//!   lease expired) and a leave look alike to the siblings.
//! * A shim that leaves disowns its listeners, and goes on accepting until a live sibling announces
//!   that the sibling accepts from each listener: the announcement is the acknowledgement.
//!   Announcements of a sibling that leaves too do not count. If no shim stays, the shim accepts
//!   the queues of all held listeners and closes the listeners, also when the last shim that stayed
//!   leaves later.
//! * Announcements say what is done, not what is decided. A shim is *joined* when each of its
//!   addresses has a listener from which the shim accepts. A shim has *left* when its last accept
//!   loop has ended.
//! * A shim that joins waits for the first announcement of each sibling. A sibling that hangs
//!   delays the shim by the rest of a lease. A dead sibling delays nothing, because its socket
//!   refuses connections.
//! * A shim that joins takes an orphan over before making a listener. So an address never has more
//!   listeners than there were ever shims alive at the same time.
//!
//! An announcement is a state, not a change. So lost, late and repeated announcements break
//! nothing, and any order of events leads to one result.

use berth_node::terms::{Announce, Cookie, Phase, ShimId};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

/// Time since the start of a monotonic clock.
pub(crate) type Time = Duration;

/// The state of this shim and its instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Facts {
    /// The own instance is ready (node shim: any instance is ready). Implies `reachable`.
    pub(crate) ready: bool,
    /// Some instance can get connections.
    pub(crate) reachable: bool,
    /// This shim has to leave for good.
    pub(crate) leaving: bool,
    /// A relaying thread does not respond, so an accept loop may never end.
    pub(crate) blocked: bool,
}

/// An action to carry out. Actions are idempotent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Listen on the own, bound socket of an address. Answered by [`Machine::on_listening`] or
    /// [`Machine::retry_listen`].
    Listen(SocketAddr),
    /// Listen on a held socket (again) and accept clients. Answered by [`Machine::on_accepting`]
    /// when clients are accepted, else by [`Machine::on_loop_failed`].
    Accept(Cookie),
    /// Stop accepting and keep the listener as a guard. Answered by [`Machine::on_loop_ended`],
    /// like the next two actions.
    Guard(Cookie),
    /// End listening for every holder, because no client can be served. Clients are refused at
    /// once.
    Refuse(Cookie),
    /// Accept the queued clients and close the listener: no other shim holds the listener.
    Close(Cookie),
    /// Send [`Machine::announce`] to every sibling.
    Announce,
    Phase(Phase),
}

#[derive(Debug, Clone)]
struct Peer {
    /// The last announcement; `None` before the first.
    announced: Option<Announce>,
    /// When the sibling became known.
    since: Time,
    /// Until when the sibling's lease holds. Before the first lease, a connection counts like a
    /// lease.
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

    /// True if the sibling may be alive and still announce its state: its lease holds, and the
    /// sibling has been known for less than a lease's duration.
    fn is_awaited(&self, now: Time, lease: Duration) -> bool {
        self.announced.is_none() && now < self.fresh_until.min(self.since + lease)
    }

    /// The announcement, if the announcement counts: the sibling is connected and does not hang.
    fn live_announce(&self, now: Time) -> Option<&Announce> {
        self.announced
            .as_ref()
            .filter(|_| self.connected && now < self.fresh_until)
    }
}

#[derive(Debug, Clone, Copy)]
struct Held {
    address: SocketAddr,
    own: bool,
    /// This shim made the listener, and has not accepted from the listener yet.
    new: bool,
    accept: AcceptLoop,
}

impl Held {
    fn new(address: SocketAddr, own: bool) -> Self {
        Self {
            address,
            own,
            new: own,
            accept: AcceptLoop::None,
        }
    }

    /// True if this shim accepts from the listener, or soon will.
    fn is_accepting(&self) -> bool {
        matches!(
            self.accept,
            AcceptLoop::Starting | AcceptLoop::Running | AcceptLoop::Failed
        )
    }
}

/// The state of a listener's accept loop. Announcements follow the running loop, not the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AcceptLoop {
    None,
    /// Requested: the loop may accept a client at any moment.
    Starting,
    /// The loop could not start or go on. No loop runs, and the start is tried again.
    Failed,
    Running,
    /// The loop has to end: a client may still be between accept(2) and the counter of connections.
    Ending,
}

/// Configuration, fixed for a shim's life.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rules {
    pub(crate) addresses: Vec<SocketAddr>,
    /// How long nothing may be reachable before clients are refused.
    pub(crate) hold: Duration,
    /// Duration of a lease: how long a sibling may go without a renewal.
    pub(crate) lease: Duration,
}

/// This shim's part in the berth.
#[derive(Debug, Clone, Default)]
pub(crate) struct Machine {
    rules: Rules,
    phase: Phase,
    facts: Facts,
    now: Time,
    held: BTreeMap<Cookie, Held>,
    peers: BTreeMap<ShimId, Peer>,
    /// Addresses with an own socket that should listen and does not yet.
    requested: BTreeSet<SocketAddr>,
    /// Since when neither this shim nor a live sibling can reach an instance.
    unreachable_since: Option<Time>,
    /// Since when this shim waits for siblings to accept from its listeners.
    leaving_since: Option<Time>,
    /// Time of the release of all listeners. The shim has left when the last accept loop has ended.
    released: Option<Time>,
    /// This shim is about to join: the phase changes when each address has a listener from which
    /// the shim accepts.
    joining: bool,
    /// This shim had left and accepts again, because no sibling relieves this shim any more.
    returning: bool,
    /// Listeners that are no longer held, and still have queued clients to accept.
    closing: BTreeSet<Cookie>,
    /// Siblings with an ended connection, and when the connection ended. They are gone, even if a
    /// lease that they wrote before is still valid.
    dead: BTreeMap<ShimId, Time>,
    /// The last announcement to siblings, and the listeners given with the announcement.
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

    /// The last time that the machine was given.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.rules.addresses
    }

    /// True if the sibling's connection ended, and the sibling's process has shown no sign of life
    /// since.
    pub(crate) fn is_dead(&self, holder: ShimId) -> bool {
        self.dead.contains_key(&holder)
    }

    /// Returns the announcement to siblings.
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
            // A shim that leaves owns nothing: siblings take over from here on.
            owns: if self.is_leaving() {
                BTreeSet::new()
            } else {
                with(|held| held.own)
            },
            accepts: with(|held| held.accept == AcceptLoop::Running),
        }
    }

    /// Returns the listeners to give siblings as guards: all held listeners, except a new listener
    /// with an accept loop that is just starting. A sibling would take such a listener for an
    /// orphan and set the sibling's options on the listener; while this shim leaves, the sibling
    /// should. If every shim leaves, no shim gives guards: shims would close guards and get them
    /// again, without end.
    pub(crate) fn guards(&self) -> Vec<(Cookie, SocketAddr)> {
        if self.are_all_shims_leaving() {
            return Vec::new();
        }
        let given =
            |held: &Held| !held.new || held.accept != AcceptLoop::Starting || self.is_leaving();
        self.held
            .iter()
            .filter(|(_, held)| given(held))
            .map(|(cookie, held)| (*cookie, held.address))
            .collect()
    }

    /// Returns the joined and ready siblings, for connections that the own instance cannot serve.
    pub(crate) fn joined_siblings(&self) -> Vec<ShimId> {
        self.find_peers(|peer| {
            peer.live_announce(self.now)
                .is_some_and(|its| its.phase == Phase::Joined && its.ready)
        })
    }

    /// True if a sibling is joined, ready and not leaving.
    pub(crate) fn has_successor(&self) -> bool {
        self.live_announces()
            .any(|its| its.phase == Phase::Joined && its.ready && !its.leaving)
    }

    /// Returns the siblings that are connected and have announced nothing for the duration of a
    /// lease.
    pub(crate) fn silent_siblings(&self) -> Vec<ShimId> {
        self.find_peers(|peer| {
            peer.connected && peer.announced.is_none() && self.now >= peer.since + self.rules.lease
        })
    }

    /// Returns the siblings that have a lease, and no connection for the duration of a lease.
    pub(crate) fn unconnected_siblings(&self) -> Vec<ShimId> {
        let lease = self.rules.lease;
        self.find_peers(|peer| !peer.connected && self.now >= peer.since + lease)
    }

    /// Returns the siblings that have a lease and no connection, and for which a joining shim
    /// waits. Such siblings live, or died before their first announcement.
    pub(crate) fn awaited_siblings(&self) -> Vec<ShimId> {
        self.find_peers(|peer| !peer.connected && peer.is_awaited(self.now, self.rules.lease))
    }

    fn find_peers(&self, are: impl Fn(&Peer) -> bool) -> Vec<ShimId> {
        self.peers
            .iter()
            .filter(|(_, peer)| are(peer))
            .map(|(holder, _)| *holder)
            .collect()
    }

    /// True if every sibling with a lease is connected and has announced its state. A listener
    /// without a guard is then no sibling's listener.
    pub(crate) fn has_all_guards(&self) -> bool {
        self.peers.values().all(|peer| {
            (peer.connected && peer.announced.is_some()) || self.now >= peer.fresh_until
        })
    }

    /// Returns when [`Machine::tick`] is due if no event comes first.
    pub(crate) fn next_wake(&self) -> Option<Time> {
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
        self.update_and_decide()
    }

    pub(crate) fn set_facts(&mut self, facts: Facts) -> Vec<Action> {
        self.facts = facts;
        self.update_and_decide()
    }

    /// Takes in the siblings' leases. Each has the time of its renewal, or a little before, and the
    /// time of its expiry. All leases and the time come at once: a shim that stalled would
    /// otherwise take a sibling for hung before reading the sibling's new lease.
    pub(crate) fn on_leases(&mut self, now: Time, leases: &[(ShimId, Time, Time)]) -> Vec<Action> {
        self.now = self.now.max(now);
        for &(holder, renewed, until) in leases {
            // Only the sibling's connection ended. A lease that still holds would prove nothing:
            // the sibling may have died.
            if self.dead.get(&holder).is_some_and(|ended| renewed > *ended) {
                self.dead.remove(&holder);
            }
            if !self.is_dead(holder) {
                let peer = self.peer_mut(holder);
                peer.fresh_until = peer.fresh_until.max(until);
            }
        }
        self.tick(now)
    }

    /// Forgets dead siblings without a lease that may hold.
    pub(crate) fn forget_dead(&mut self, leased: &BTreeSet<ShimId>) {
        self.dead.retain(|holder, _| leased.contains(holder));
    }

    /// The connection to a sibling is established.
    pub(crate) fn on_connected(&mut self, holder: ShimId) -> Vec<Action> {
        let until = self.now + self.rules.lease;
        self.dead.remove(&holder);
        let peer = self.peer_mut(holder);
        peer.connected = true;
        peer.fresh_until = peer.fresh_until.max(until);
        let mut actions = self.update_and_decide();
        if !actions.contains(&Action::Announce) {
            actions.push(Action::Announce);
        }
        actions
    }

    /// A sibling announced its state, and gave duplicates of listeners that were not held yet.
    pub(crate) fn on_update(
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
        self.peer_mut(holder).announced = Some(announce);
        self.update_and_decide()
    }

    /// The connection to a sibling ended, or the sibling's socket refuses connections. Either the
    /// process is gone, or the sibling will renew its lease. `now` only dates the end: after a
    /// stall, a lease that the sibling renewed during the stall is older than the end.
    pub(crate) fn on_gone(&mut self, now: Time, holder: ShimId) -> Vec<Action> {
        self.peers.remove(&holder);
        self.dead.insert(holder, self.now.max(now));
        self.update_and_decide()
    }

    /// A listener listens, and clients are accepted.
    pub(crate) fn on_accepting(&mut self, cookie: Cookie) -> Vec<Action> {
        // A loop that was told to end meanwhile ends.
        if let Some(held) = self
            .held
            .get_mut(&cookie)
            .filter(|held| held.accept == AcceptLoop::Starting)
        {
            (held.accept, held.new) = (AcceptLoop::Running, false);
        }
        self.update_and_decide()
    }

    /// This shim could not accept from a listener. After [`Machine::on_loop_ended`] the machine
    /// tries again.
    pub(crate) fn on_loop_failed(&mut self, cookie: Cookie) -> Vec<Action> {
        self.closing.remove(&cookie);
        if let Some(held) = self.held.get_mut(&cookie) {
            held.accept = if held.is_accepting() {
                AcceptLoop::Failed
            } else {
                AcceptLoop::None
            };
        }
        self.update_and_decide()
    }

    /// The accept loop of a listener has ended, and every accepted client is counted. The end was
    /// requested, or the listener no longer listens, since a sibling reached no instance and
    /// refused clients.
    pub(crate) fn on_loop_ended(&mut self, cookie: Cookie) -> Vec<Action> {
        self.closing.remove(&cookie);
        if let Some(held) = self.held.get_mut(&cookie) {
            held.accept = AcceptLoop::None;
        }
        self.update_and_decide()
    }

    /// The own socket of an address listens, under this cookie.
    pub(crate) fn on_listening(&mut self, address: SocketAddr, cookie: Cookie) -> Vec<Action> {
        self.requested.remove(&address);
        self.held.insert(cookie, Held::new(address, true));
        self.update_and_decide()
    }

    /// The own socket of an address could not listen, and may be tried again.
    pub(crate) fn retry_listen(&mut self, address: SocketAddr) -> Vec<Action> {
        self.requested.remove(&address);
        self.update_and_decide()
    }

    /// True if the accept loop of a listener has not ended yet.
    #[cfg(test)]
    fn is_ending(&self, cookie: Cookie) -> bool {
        self.closing.contains(&cookie)
            || self
                .held
                .get(&cookie)
                .is_some_and(|held| held.accept == AcceptLoop::Ending)
    }

    fn peer_mut(&mut self, holder: ShimId) -> &mut Peer {
        let now = self.now;
        self.peers.entry(holder).or_insert_with(|| Peer::new(now))
    }

    fn live_announces(&self) -> impl Iterator<Item = &Announce> {
        self.peers
            .values()
            .filter_map(|peer| peer.live_announce(self.now))
    }

    fn is_leaving(&self) -> bool {
        self.leaving_since.is_some() || self.released.is_some() || self.phase == Phase::Left
    }

    /// Brings phase and listeners in line with the known state.
    fn update_and_decide(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        self.update_reachable();
        let before = self.phase;
        self.change_phase(&mut actions);
        self.change_listeners(&mut actions);
        if self.phase != before {
            actions.push(Action::Phase(self.phase));
        }
        // A new guard is announced too: the sibling that gave the guard may end before reaching
        // every other sibling.
        let announced = (self.announce(), self.guards());
        if announced != self.announced {
            self.announced = announced;
            actions.push(Action::Announce);
        }
        actions
    }

    fn update_reachable(&mut self) {
        let reachable = self.facts.reachable || self.live_announces().any(|its| its.reachable);
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
        // The own instance is down. A sibling with a ready instance should take the connections.
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
            if expired || self.are_all_shims_leaving() || self.uncovered_listeners().is_empty() {
                self.release_listeners(actions);
            }
        } else if self.are_all_shims_leaving() {
            self.close_uncovered(actions);
        }
        self.joining = match self.phase {
            _ if wants_out || self.released.is_some() => false,
            // No sibling relieves this shim any more. The shim holds clients, which would otherwise
            // wait in an accept queue.
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
            // A shim that has left may exit, and so must accept nothing.
            Phase::Left if self.joining => Phase::Waiting,
            Phase::Joined if self.is_refusing() && !self.is_leaving() => Phase::Refusing,
            phase => phase,
        };
    }

    /// True if the listeners are released and every accept loop has ended. A loop on a blocked
    /// thread accepts no client and may never end: after a lease's duration the shim counts as left
    /// without that loop, so that the shim's end can begin.
    fn has_released(&self) -> bool {
        let idle = |held: &Held| matches!(held.accept, AcceptLoop::None | AcceptLoop::Failed);
        let ended = || self.closing.is_empty() && self.held.values().all(idle);
        let expired = |since| self.facts.blocked && self.now >= since + self.rules.lease;
        self.released.is_some_and(|since| ended() || expired(since))
    }

    /// True if each address has an own listener from which this shim accepts.
    fn listens_everywhere(&self) -> bool {
        let serves = |address: &SocketAddr| {
            let fits = |held: &Held| {
                held.own && held.address == *address && held.accept == AcceptLoop::Running
            };
            self.held.values().any(fits)
        };
        self.rules.addresses.iter().all(serves)
    }

    /// True if this shim and every sibling that may be alive have to leave: no sibling will accept
    /// from the held listeners.
    fn are_all_shims_leaving(&self) -> bool {
        let stays = |peer: &Peer| {
            self.now < peer.fresh_until && peer.announced.as_ref().is_none_or(|its| !its.leaving)
        };
        self.facts.leaving && !self.peers.values().any(stays)
    }

    /// Returns this shim's listeners from which no staying sibling accepts: the listeners with an
    /// accept loop and, if this shim has to leave, guards.
    fn uncovered_listeners(&self) -> Vec<Cookie> {
        let covered = |cookie: &Cookie| {
            self.live_announces()
                .any(|its| !its.leaving && its.accepts.contains(cookie))
        };
        // A loop that ends would not accept the queued clients.
        let left = |held: &Held| {
            held.is_accepting() || (self.facts.leaving && held.accept == AcceptLoop::None)
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

    fn release_listeners(&mut self, actions: &mut Vec<Action>) {
        self.leaving_since = None;
        self.released = Some(self.now);
        self.close_uncovered(actions);
        for held in self.held.values_mut() {
            held.own = false;
        }
    }

    /// Accepts the queued clients of listeners from which no other shim accepts, and closes the
    /// listeners.
    fn close_uncovered(&mut self, actions: &mut Vec<Action>) {
        for cookie in self.uncovered_listeners() {
            self.held.remove(&cookie);
            self.closing.insert(cookie);
            actions.push(Action::Close(cookie));
        }
    }

    /// True if every known sibling has announced its listeners, has an expired lease, or has had a
    /// lease's duration to announce them.
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
            self.live_announces()
                .any(|its| its.owns.contains(cookie) && its.accepts.contains(cookie))
        };
        let (refusing, knows) = (self.is_refusing(), self.knows_siblings());
        let may = match self.phase {
            _ if self.released.is_some() => false,
            Phase::Joined => true,
            // In `Refusing`, this shim was about to join.
            Phase::Waiting | Phase::Refusing => !refusing,
            Phase::Left => false,
        };
        let leaving = self.facts.leaving;
        // A sibling may give a listener again that is being closed here. The listener is used after
        // the close.
        let closing = |cookie: &Cookie| self.closing.contains(cookie);
        let wanted: Vec<(Cookie, bool)> = self
            .held
            .iter()
            .filter(|(cookie, _)| !closing(cookie))
            .map(|(cookie, held)| {
                let orphan = !owned_elsewhere(cookie) && (knows || held.is_accepting());
                let takes = match self.phase {
                    // A shim that leaves takes no orphan over, but keeps its listeners until
                    // siblings accept from them.
                    Phase::Refusing if !self.joining => held.is_accepting(),
                    _ => held.own || if leaving { held.is_accepting() } else { orphan },
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
                // A loop that ends is not started again before its end: two loops of one listener
                // would share unevenly.
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
            .live_announces()
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
