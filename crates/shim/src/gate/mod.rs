//! Which new connection is opened when: what an instance pays for a client is paid before it says a word, in the TLS handshake.
//!
//! An *opening* is in flight from when a client's ClientHello is on its way to an instance until the instance's first
//! byte. As many as the `limiter` allows are; the others wait in the `queue`, with what they said. Without a crowd nobody
//! waits, and the gate is two short locks a connection. A crowd comes after a switch or an outage, or from one client in a loop;
//! then the handshakes that are computed are those of clients that still want them, each source in its turn.
//!
//! The gate is before the leg and not before accept(2): the accept queue is one FIFO, where the kubelet would stand behind
//! the storm. A client that says its ClientHello slowly, or never, waits outside, where it costs an instance nothing.

mod limiter;
mod metrics;
mod queue;
mod source;
mod storm;

use crate::config::MaxOpenings;
use berth_node::ipc::wire::{GateStatus, LongestQueue};
use berth_node::terms::Speedup;
use berth_os::process;
use ipnet::IpNet;
use limiter::Limiter;
use metrics::Seen;
use queue::{Class, LONGEST_WAIT, Queue, Room, Ticket};
use source::{First, Source};
use std::cmp::Reverse;
use std::collections::{HashMap, hash_map};
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use storm::{Change, Storm};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

pub(crate) use metrics::GateMetrics;

/// One that takes longer hangs: its place is another's, so that an instance that hangs does not end with it what is behind.
const LONGEST_OPENING: Duration = Duration::from_secs(5);

/// How long a client may take to say its ClientHello until there is a leg for it without.
const SPEAKS_WITHIN: Duration = Duration::from_secs(5);

/// A source may have one in so many of all openings, rounded up: so there is one for who comes next.
const SOURCE_SHARE: usize = 2;

/// Room of a queue: the clients of some thousand nodes. A ClientHello is 0.3 to 2 KB, and all of it is in memory.
const ROOM: Room = Room { clients: 16_384, bytes: 64 << 20 };

/// An instance to which nobody came for so long is gone, or may well begin anew.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Time between two looks at whether there is a storm.
const LOOK: Duration = Duration::from_secs(1);

/// Why a client that waited is not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// There was no room for it.
    Full,
    /// It waited for [`LONGEST_WAIT`].
    Expired,
    /// It had closed when its turn came, or before.
    Left,
}

impl Refused {
    const ALL: [Self; 3] = [Self::Full, Self::Expired, Self::Left];

    fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Expired => "expired",
            Self::Left => "left",
        }
    }
}

/// The gate of a shim.
#[derive(Debug)]
pub struct Gate {
    /// Openings that an instance may have in flight, where that is told.
    fixed: Option<NonZeroUsize>,
    processors: usize,
    first: First,
    speedup: Speedup,
    state: Mutex<State>,
    seen: Seen,
}

#[derive(Debug, Default)]
struct State {
    /// For each process that listens, by its epoch.
    doors: HashMap<u64, Door>,
    storm: Storm,
}

/// The gate before one instance.
#[derive(Debug)]
struct Door {
    limiter: Limiter,
    queue: Queue,
    /// When somebody came last.
    used: Instant,
    /// Openings, and of which source.
    in_flight: usize,
    of_source: HashMap<Source, usize>,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
}

/// What becomes of a client that wants to an instance.
pub(crate) enum Entry {
    Open(Opening),
    Wait(Waiting),
}

impl Gate {
    /// The gate, unless there is to be none; these clients go first.
    pub fn new(most: MaxOpenings, first: Vec<IpNet>, speedup: Speedup) -> Option<Arc<Self>> {
        let fixed = match most {
            MaxOpenings::Off => return None,
            MaxOpenings::Auto => None,
            MaxOpenings::Fixed(most) => Some(most),
        };
        let (first, processors) = (First::new(first), process::processors());
        Some(Arc::new(Self { fixed, processors, first, speedup, state: Mutex::default(), seen: Seen::new() }))
    }

    /// By when a client that comes now has to have said its ClientHello.
    pub(crate) fn speaks_by(&self) -> Instant {
        Instant::now() + self.speedup.of(SPEAKS_WITHIN)
    }

    /// Lets a client that said so many bytes and waits `since` then to an instance (by its epoch), or lines it up.
    pub(crate) fn enter(self: &Arc<Self>, to: u64, client: IpAddr, bytes: usize, since: Instant) -> Entry {
        let (source, now) = (Source::of(client), Instant::now());
        let mut state = self.state();
        let State { doors, storm } = &mut *state;
        if !doors.contains_key(&to) {
            // What is left of instances that are gone.
            doors.retain(|_, door| !door.is_idle() || now < door.used + FORGOTTEN);
        }
        let door = doors.entry(to).or_insert_with(|| Door::new(self.processors, now));
        door.used = now;
        self.admit(door, now);
        // So nobody that waits could have what is free.
        let bound = door.bound(self.fixed, now);
        if door.may_open(&source, bound) {
            door.open(source);
            return Entry::Open(Opening { gate: self.clone(), to, source, began: now, took: None });
        }
        let (ticket, rejected) = door.queue.push((source, self.first.contains(client)), bytes, since, now);
        let (tell, verdict) = oneshot::channel();
        door.waiting.insert(ticket, tell);
        // The end of its sender says so.
        rejected.iter().for_each(|rejected| drop(door.waiting.remove(rejected)));
        storm.wait(source, door.queue.len());
        Entry::Wait(Waiting { gate: self.clone(), to, source, ticket, since, verdict })
    }

    /// Whether a client would have to wait because the instance is young: another that is ready may take it.
    /// Not for who goes first: it would be the next here.
    pub(crate) fn is_ramping(&self, to: u64, client: IpAddr) -> bool {
        let (mut state, now) = (self.state(), Instant::now());
        let Some(door) = state.doors.get_mut(&to).filter(|_| self.fixed.is_none()) else { return false };
        let bound = door.bound(None, now);
        !door.may_open(&Source::of(client), bound) && door.limiter.is_young() && !self.first.contains(client)
    }

    /// Lets those in whose turn it is.
    fn admit(&self, door: &mut Door, now: Instant) {
        let bound = door.bound(self.fixed, now);
        while !door.queue.is_empty() && door.in_flight < bound {
            let of_source = &door.of_source;
            let may = |source: &Source| of_source.get(source).is_none_or(|openings| *openings < share(bound));
            let Some(next) = door.queue.next(now, may) else { break };
            self.seen.waited(next.class, now.saturating_duration_since(next.since));
            if door.waiting.remove(&next.ticket).is_some_and(|tell| tell.send(()).is_ok()) {
                door.open(next.source);
            }
        }
    }

    /// Turns away one of those that wait, the last that would be served; whether there is one.
    pub(crate) fn make_room(&self) -> bool {
        let mut state = self.state();
        let mut doors: Vec<_> = state.doors.values_mut().collect();
        doors.sort_by_key(|door| Reverse(door.queue.len()));
        doors.into_iter().any(|door| door.queue.reject().is_some_and(|ticket| door.waiting.remove(&ticket).is_some()))
    }

    /// Says in the log when a storm begins and when it ends, until it is dropped.
    pub(crate) async fn watch(&self) {
        let mut ticks = tokio::time::interval(LOOK);
        loop {
            ticks.tick().await;
            self.first.renew();
            let change = {
                let mut state = self.state();
                let State { doors, storm } = &mut *state;
                // A bound grows with time, too.
                doors.values_mut().for_each(|door| self.admit(door, Instant::now()));
                let waiting = doors.values().map(|door| door.queue.len()).sum();
                let oldest = doors.values().filter_map(|door| door.queue.oldest()).min();
                storm.look(waiting, oldest, Instant::now()).map(|change| (change, waiting))
            };
            match change {
                None => {}
                Some((Change::Began, waiting)) => tracing::warn!(
                    waiting,
                    "new connections wait at the gate: more come than the instance opens, and each source has its turn; \
                     `berth status` names the one of which most wait"
                ),
                Some((Change::Ended(lasted, brought), _)) => {
                    let sources: Vec<_> = brought.sources().iter().map(|(of, many)| format!("{of} {many}")).collect();
                    tracing::warn!(
                        seconds = lasted.as_secs(),
                        waited = brought.waited,
                        dropped = brought.dropped,
                        longest_queue = brought.most,
                        sources = sources.join(", "),
                        "no new connection waits at the gate any more"
                    );
                }
            }
        }
    }

    /// How it is now, over all instances.
    pub(crate) fn status(&self) -> GateStatus {
        let (mut state, now) = (self.state(), Instant::now());
        let mut status = GateStatus::default();
        let newest = state.doors.keys().max().copied();
        // What is left of instances that are gone has no openings.
        let doors = state.doors.iter_mut().filter(|(of, door)| Some(**of) == newest || !door.is_idle());
        for (_, door) in doors {
            status.openings += door.in_flight as u64;
            status.limit += door.bound(self.fixed, now) as u64;
            status.waiting += door.queue.len() as u64;
            let longest = door.queue.longest().map(|(clients, source)| (clients as u64, source));
            if let Some((clients, source)) =
                longest.filter(|(clients, _)| status.longest.as_ref().is_none_or(|it| it.clients < *clients))
            {
                status.longest = Some(LongestQueue { source: source.to_string(), clients });
            }
        }
        status
    }

    fn waiting(&self, class: Class) -> usize {
        self.state().doors.values().map(|door| door.queue.waiting(class)).sum()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many of its openings may be of one source.
fn share(bound: usize) -> usize {
    bound.div_ceil(SOURCE_SHARE)
}

impl Door {
    fn new(processors: usize, now: Instant) -> Self {
        Self {
            limiter: Limiter::new(processors, now),
            queue: Queue::new(ROOM),
            used: now,
            in_flight: 0,
            of_source: HashMap::new(),
            waiting: HashMap::new(),
        }
    }

    fn bound(&mut self, fixed: Option<NonZeroUsize>, now: Instant) -> usize {
        fixed.map_or_else(|| self.limiter.bound(now), NonZeroUsize::get)
    }

    fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.queue.is_empty()
    }

    fn may_open(&self, source: &Source, bound: usize) -> bool {
        self.in_flight < bound && self.openings(source) < share(bound)
    }

    fn openings(&self, source: &Source) -> usize {
        self.of_source.get(source).copied().unwrap_or_default()
    }

    fn open(&mut self, source: Source) {
        self.in_flight += 1;
        *self.of_source.entry(source).or_default() += 1;
    }

    fn close(&mut self, source: Source) {
        self.in_flight -= 1;
        if let hash_map::Entry::Occupied(mut openings) = self.of_source.entry(source) {
            *openings.get_mut() -= 1;
            if *openings.get() == 0 {
                openings.remove();
            }
        }
    }
}

/// A place among the openings of an instance, until it is dropped.
#[derive(Debug)]
pub(crate) struct Opening {
    gate: Arc<Gate>,
    to: u64,
    source: Source,
    began: Instant,
    /// For an instance that answered, or took too long.
    took: Option<Duration>,
}

impl Opening {
    /// When it is one no longer.
    pub(crate) fn ends(&self) -> Instant {
        self.began + self.gate.speedup.of(LONGEST_OPENING)
    }

    /// The instance's first byte is there, or will not come for long.
    pub(crate) fn end(mut self) {
        let took = self.began.elapsed();
        self.gate.seen.opened(took);
        self.took = Some(took);
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        if let Some(door) = self.gate.state().doors.get_mut(&self.to) {
            let now = Instant::now();
            if let Some(took) = self.took {
                let bound = door.bound(self.gate.fixed, now);
                let reached = !door.may_open(&self.source, bound);
                door.limiter.took(took, door.in_flight + door.queue.len(), reached, now);
            }
            door.close(self.source);
            self.gate.admit(door, now);
        }
    }
}

/// A place in the queue of an instance, until it is dropped.
#[derive(Debug)]
pub(crate) struct Waiting {
    gate: Arc<Gate>,
    to: u64,
    source: Source,
    ticket: Ticket,
    since: Instant,
    verdict: oneshot::Receiver<()>,
}

impl Waiting {
    /// Waits for its turn.
    ///
    /// # Errors
    /// It does not come.
    pub(crate) async fn turn(&mut self) -> Result<Opening, Refused> {
        let expires = self.since + LONGEST_WAIT;
        match timeout_at(expires, &mut self.verdict).await {
            Ok(Ok(())) => {
                let began = Instant::now();
                Ok(Opening { gate: self.gate.clone(), to: self.to, source: self.source, began, took: None })
            }
            Ok(Err(_)) if Instant::now() < expires => Err(Refused::Full),
            Ok(Err(_)) | Err(_) => Err(Refused::Expired),
        }
    }

    /// It gets no opening.
    pub(crate) fn refuse(self, why: Refused) {
        self.gate.seen.dropped(why);
        self.gate.state().storm.drop_one();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(door) = self.gate.state().doors.get_mut(&self.to) {
            door.queue.remove(self.ticket);
            door.waiting.remove(&self.ticket);
            // It was let in and does not know.
            if self.verdict.try_recv().is_ok() {
                door.close(self.source);
                self.gate.admit(door, Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests;
