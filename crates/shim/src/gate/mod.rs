//! Limits the TLS handshakes in flight: an instance's work for a new connection is mostly its
//! handshake.
//!
//! A handshake is in flight from the sending of a client's ClientHello to an instance until the
//! instance's first byte, and has a `HandshakeSlot` meanwhile. Each CPU gives `PER_CPU` slots.
//! Further clients wait in the `queue`, with the bytes that they sent. Normally no client waits,
//! and the gate costs two short locks per connection. Many clients come at once after a switch or
//! an outage, or from one client in a loop. The gate then lets an instance compute handshakes only
//! for clients that still wait, and sources take turns.
//!
//! The gate is before the attempt and not before accept(2): the accept queue is a FIFO, in which
//! the kubelet would queue behind all other clients. A client that sends its ClientHello slowly, or
//! never, waits before the gate, and costs an instance nothing there.

mod metrics;
mod queue;
mod source;

use crate::config::MaxOpenings;
use berth_node::ipc::wire::{GateStatus, LongestQueue};
use berth_node::terms::shorten_wait;
use berth_os::off_thread::OffThread;
use berth_os::process;
use ipnet::IpNet;
use metrics::GateCounters;
use queue::{Class, LONGEST_WAIT, Queue, Room, Ticket};
use source::First;
use std::cmp::Reverse;
use std::collections::{HashMap, hash_map};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

pub(crate) use metrics::GateMetrics;
pub(crate) use source::Source;

/// A longer handshake counts as stuck and releases its slot, so a hung instance cannot block the
/// queue.
const LONGEST_HANDSHAKE: Duration = Duration::from_secs(5);

/// How long a client may take to send its ClientHello. After this time, an attempt begins without
/// the ClientHello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// A source may have at most the `SOURCE_SHARE`th part of all slots, rounded up, so that a slot is
/// left for the next source.
const SOURCE_SHARE: usize = 2;

/// Room of a queue: the clients of some thousand nodes. A ClientHello has 0.3 to 2 KB, which are
/// kept in memory.
const ROOM: Room = Room {
    clients: 16_384,
    bytes: 64 << 20,
};

/// Handshakes that an instance may have in flight for each CPU of the node: enough that no CPU
/// idles, and few enough that a client has its answer soon after its turn (docs/gate.md,
/// "Measured").
const PER_CPU: usize = 16;

/// Time between two lists of the node's addresses.
const LISTED: Duration = Duration::from_secs(10);

/// Why a client that waited gets no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The queue had no room for the client.
    Full,
    /// The client waited for [`LONGEST_WAIT`].
    Expired,
    /// The client had closed by the time of its turn.
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
    /// Handshakes that an instance may have in flight.
    bound: usize,
    first: First,
    /// Instances by epoch.
    instances: Mutex<HashMap<u64, InstanceGate>>,
    counters: GateCounters,
}

/// The gate before an instance.
#[derive(Debug)]
struct InstanceGate {
    queue: Queue,
    /// Handshakes in flight, in total and of each source.
    in_flight: usize,
    of_source: HashMap<Source, usize>,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
}

/// The result of [`Gate::enter`].
pub(crate) enum Entry {
    Open(HandshakeSlot),
    Wait(QueuePlace),
}

impl Gate {
    /// Makes a gate in which the clients in `first` go first. `None` if the gate is off.
    pub fn new(most: MaxOpenings, first: Vec<IpNet>) -> Option<Arc<Self>> {
        let bound = match most {
            MaxOpenings::Off => return None,
            MaxOpenings::Auto => PER_CPU * process::count_cpus(),
            MaxOpenings::Fixed(most) => most.get(),
        };
        let first = First::new(first);
        Some(Arc::new(Self {
            bound,
            first,
            instances: Mutex::default(),
            counters: GateCounters::new(),
        }))
    }

    /// Returns the deadline for the ClientHello of a client that comes now.
    pub(crate) fn hello_deadline(&self) -> Instant {
        Instant::now() + shorten_wait(HELLO_WITHIN)
    }

    /// Gives a client a slot at an instance, or queues the client. `to` is the instance's epoch,
    /// `bytes` the number of bytes that the client has sent, and `since` the start of the client's
    /// wait.
    pub(crate) fn enter(
        self: &Arc<Self>,
        to: u64,
        client: IpAddr,
        bytes: usize,
        since: Instant,
    ) -> Entry {
        let (source, now) = (Source::from_client(client), Instant::now());
        let mut instances = self.lock_instances();
        if !instances.contains_key(&to) {
            // Drops the state of dead instances.
            instances.retain(|_, instance| !instance.is_idle());
        }
        let instance = instances.entry(to).or_insert_with(InstanceGate::new);
        self.admit(instance, now);
        // If a slot is still free now, no waiting client may have that slot.
        if instance.in_flight < self.bound && has_room(&instance.of_source, &source, self.bound) {
            instance.open(source);
            return Entry::Open(HandshakeSlot {
                gate: self.clone(),
                to,
                source,
                began: now,
            });
        }
        let (ticket, rejected) =
            instance
                .queue
                .push((source, self.first.contains(client)), bytes, since, now);
        let (admit, admitted) = oneshot::channel();
        instance.waiting.insert(ticket, admit);
        // A dropped sender notifies its client.
        rejected
            .iter()
            .for_each(|rejected| drop(instance.waiting.remove(rejected)));
        Entry::Wait(QueuePlace {
            gate: self.clone(),
            to,
            source,
            ticket,
            since,
            admitted,
        })
    }

    /// Gives slots to the next clients of the queue.
    fn admit(&self, instance: &mut InstanceGate, now: Instant) {
        while !instance.queue.is_empty() && instance.in_flight < self.bound {
            let InstanceGate {
                queue, of_source, ..
            } = instance;
            let Some(next) = queue.next(now, |source| has_room(of_source, source, self.bound))
            else {
                break;
            };
            self.counters
                .count_wait(next.class, now.saturating_duration_since(next.since));
            if instance
                .waiting
                .remove(&next.ticket)
                .is_some_and(|admit| admit.send(()).is_ok())
            {
                instance.open(next.source);
            }
        }
    }

    /// Rejects the waiting client that would be served last, outside the first class. Returns true
    /// if a client was rejected.
    pub(crate) fn make_room(&self) -> bool {
        let mut guard = self.lock_instances();
        let mut instances: Vec<_> = guard.values_mut().collect();
        instances.sort_by_key(|instance| Reverse(instance.queue.len()));
        instances.into_iter().any(|instance| {
            instance
                .queue
                .reject()
                .is_some_and(|ticket| instance.waiting.remove(&ticket).is_some())
        })
    }

    /// Renews the list of the node's addresses, until dropped.
    pub(crate) async fn keep_addresses(&self) {
        let (mut ticks, kernel) = (
            tokio::time::interval(shorten_wait(LISTED)),
            OffThread::new("the node's addresses"),
        );
        loop {
            ticks.tick().await;
            self.first.renew(&kernel, LISTED).await;
        }
    }

    /// Returns totals over all instances.
    pub(crate) fn status(&self) -> GateStatus {
        let instances = self.lock_instances();
        let mut status = GateStatus::default();
        let newest = instances.keys().max().copied();
        // Dead instances have no handshakes in flight.
        let instances = instances
            .iter()
            .filter(|(of, instance)| Some(**of) == newest || !instance.is_idle());
        let longest = instances
            .clone()
            .filter_map(|(_, instance)| instance.queue.longest_queue())
            .max();
        status.longest = longest.map(|(clients, source)| LongestQueue {
            source: source.to_string(),
            clients: clients as u64,
        });
        for (_, instance) in instances {
            status.openings += instance.in_flight as u64;
            status.limit += self.bound as u64;
            status.waiting += instance.queue.len() as u64;
        }
        status
    }

    fn count_waiting(&self, class: Class) -> usize {
        self.lock_instances()
            .values()
            .map(|instance| instance.queue.waiting(class))
            .sum()
    }

    fn lock_instances(&self) -> MutexGuard<'_, HashMap<u64, InstanceGate>> {
        self.instances
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if a source has fewer handshakes than slots.
fn has_room(of_source: &HashMap<Source, usize>, source: &Source, bound: usize) -> bool {
    of_source
        .get(source)
        .is_none_or(|handshakes| *handshakes < bound.div_ceil(SOURCE_SHARE))
}

impl InstanceGate {
    fn new() -> Self {
        Self {
            queue: Queue::new(ROOM),
            in_flight: 0,
            of_source: HashMap::new(),
            waiting: HashMap::new(),
        }
    }

    fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.queue.is_empty()
    }

    fn open(&mut self, source: Source) {
        self.in_flight += 1;
        *self.of_source.entry(source).or_default() += 1;
    }

    fn close(&mut self, source: Source) {
        self.in_flight -= 1;
        if let hash_map::Entry::Occupied(mut handshakes) = self.of_source.entry(source) {
            *handshakes.get_mut() -= 1;
            if *handshakes.get() == 0 {
                handshakes.remove();
            }
        }
    }
}

/// The right to have a TLS handshake in flight at an instance, until dropped.
#[derive(Debug)]
pub(crate) struct HandshakeSlot {
    gate: Arc<Gate>,
    to: u64,
    source: Source,
    began: Instant,
}

impl HandshakeSlot {
    /// Returns the time at which the slot expires.
    pub(crate) fn ends(&self) -> Instant {
        self.began + shorten_wait(LONGEST_HANDSHAKE)
    }

    /// True if a client waits for a slot.
    pub(crate) fn is_awaited(&self) -> bool {
        self.gate
            .lock_instances()
            .get(&self.to)
            .is_some_and(|instance| !instance.queue.is_empty())
    }

    /// Records that the instance's first byte has come, or is overdue.
    pub(crate) fn end(self) {
        self.gate.counters.count_handshake(self.began.elapsed());
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        if let Some(instance) = self.gate.lock_instances().get_mut(&self.to) {
            instance.close(self.source);
            self.gate.admit(instance, Instant::now());
        }
    }
}

/// A place in the queue of an instance, until dropped.
#[derive(Debug)]
pub(crate) struct QueuePlace {
    gate: Arc<Gate>,
    to: u64,
    source: Source,
    ticket: Ticket,
    since: Instant,
    admitted: oneshot::Receiver<()>,
}

impl QueuePlace {
    /// Waits for the client's turn.
    ///
    /// # Errors
    /// The client's turn does not come.
    pub(crate) async fn wait_for_turn(&mut self) -> Result<HandshakeSlot, Refused> {
        let expires = self.since + LONGEST_WAIT;
        match timeout_at(expires, &mut self.admitted).await {
            Ok(Ok(())) => {
                let began = Instant::now();
                Ok(HandshakeSlot {
                    gate: self.gate.clone(),
                    to: self.to,
                    source: self.source,
                    began,
                })
            }
            Ok(Err(_)) if Instant::now() < expires => Err(Refused::Full),
            Ok(Err(_)) | Err(_) => Err(Refused::Expired),
        }
    }

    /// Counts a client that gets no slot.
    pub(crate) fn refuse(self, why: Refused) {
        self.gate.counters.count_dropped(why);
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        if let Some(instance) = self.gate.lock_instances().get_mut(&self.to) {
            instance.queue.remove(self.ticket);
            instance.waiting.remove(&self.ticket);
            // The client has got a slot and does not know of the slot yet, so the slot is given
            // back.
            if self.admitted.try_recv().is_ok() {
                instance.close(self.source);
                self.gate.admit(instance, Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests;
