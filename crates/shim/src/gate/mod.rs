//! Limits the TLS handshakes in flight: an instance's work for a new connection is mostly its
//! handshake.
//!
//! A handshake is in flight from the sending of a client's ClientHello to an instance until the
//! instance's first byte, and has a `HandshakeSlot` meanwhile. Each CPU gives `HANDSHAKES_PER_CPU`
//! slots. Further clients wait in the `queue`, with the bytes that they sent. Normally no client
//! waits, and the gate costs two short locks per connection. Many clients come at once after a
//! switch or an outage, or from one client in a loop. The gate then lets an instance compute
//! handshakes only for clients that still wait, and sources take turns.
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
use queue::{Class, MAX_WAIT, Queue, QueueCapacity, Ticket};
use source::FirstClients;
use std::cmp::Reverse;
use std::collections::{HashMap, hash_map};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

pub(crate) use metrics::GateMetrics;
pub(crate) use source::Source;

/// A TLS handshake that takes longer counts as stuck and releases its slot. So a hung instance
/// cannot block the queue.
const MAX_HANDSHAKE: Duration = Duration::from_secs(5);

/// How long a client may take to send its ClientHello. After this time, an attempt begins without
/// the ClientHello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// A source (the clients of one address) may have at most the `SOURCE_DIVISOR`th part of all slots,
/// rounded up, so that a slot is left for the next source.
const SOURCE_DIVISOR: usize = 2;

/// Room of a queue of waiting clients: enough for the clients of some thousand nodes. A ClientHello
/// has 0.3 to 2 KB, which are kept in memory.
const ROOM: QueueCapacity = QueueCapacity {
    clients: 16_384,
    bytes: 64 << 20,
};

/// Handshakes that an instance may have in flight for each CPU of the node: enough that no CPU
/// idles, and few enough that a client has its answer soon after its turn
/// (docs/how-it-works.md#the-gate).
const HANDSHAKES_PER_CPU: usize = 16;

/// The node's addresses are listed again after this time.
const LIST_INTERVAL: Duration = Duration::from_secs(10);

/// Why a client that waited gets no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GateRefusal {
    /// The queue had no room for the client.
    Full,
    /// The client waited for [`MAX_WAIT`].
    Expired,
    /// The client had closed by the time of its turn.
    Left,
}

impl GateRefusal {
    const ALL: [Self; 3] = [Self::Full, Self::Expired, Self::Left];

    fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Expired => "expired",
            Self::Left => "left",
        }
    }
}

/// Limits the TLS handshakes in flight at each instance. Further clients wait for their turn.
#[derive(Debug)]
pub struct Gate {
    /// Maximum number of TLS handshakes in flight at an instance.
    bound: usize,
    first: FirstClients,
    /// Instances by epoch.
    instances: Mutex<HashMap<u64, InstanceGate>>,
    counters: GateCounters,
}

/// The TLS handshakes in flight at one instance, and the clients that wait for their turn there.
#[derive(Debug)]
struct InstanceGate {
    queue: Queue,
    /// Handshakes in flight, in total and of each source.
    in_flight: usize,
    of_source: HashMap<Source, usize>,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
}

/// The gate's answer to a client: a slot at once, or a place in the queue.
pub(crate) enum GateEntry {
    Open(HandshakeSlot),
    Wait(QueuePlace),
}

impl Gate {
    /// Makes a gate in which the clients in `first` go first. `None` if the gate is off.
    pub fn new(most: MaxOpenings, first: Vec<IpNet>) -> Option<Arc<Self>> {
        let bound = match most {
            MaxOpenings::Off => return None,
            MaxOpenings::Auto => HANDSHAKES_PER_CPU * process::count_cpus(),
            MaxOpenings::Fixed(most) => most.get(),
        };
        let first = FirstClients::new(first);
        Some(Arc::new(Self {
            bound,
            first,
            instances: Mutex::default(),
            counters: GateCounters::new(),
        }))
    }

    /// Returns the deadline for the ClientHello of a client that comes now.
    pub(crate) fn hello_deadline(&self) -> Instant {
        Instant::now() + shorten_wait(HELLO_TIMEOUT)
    }

    /// Gives a client a slot at an instance, or queues the client. `to` is the instance's epoch,
    /// `bytes` the number of bytes that the client has sent, and `since` the start of the client's
    /// wait.
    pub(crate) fn enter_client(
        self: &Arc<Self>,
        to: u64,
        client: IpAddr,
        bytes: usize,
        since: Instant,
    ) -> GateEntry {
        let (source, now) = (Source::from_client(client), Instant::now());
        let mut instances = self.lock_instances();
        if !instances.contains_key(&to) {
            // Drops the state of dead instances.
            instances.retain(|_, instance| !instance.is_idle());
        }
        let instance = instances.entry(to).or_insert_with(InstanceGate::new);
        self.admit_waiting_clients(instance, now);
        // `admit_waiting_clients` has given slots to all waiting clients that may have one. A slot
        // that is still free is for this client.
        if instance.in_flight < self.bound && has_room(&instance.of_source, &source, self.bound) {
            instance.add_handshake(source);
            return GateEntry::Open(HandshakeSlot {
                gate: self.clone(),
                to,
                source,
                began: now,
            });
        }
        let (ticket, rejected) =
            instance
                .queue
                .push_client((source, self.first.goes_first(client)), bytes, since, now);
        let (admit, admitted) = oneshot::channel();
        instance.waiting.insert(ticket, admit);
        // Dropping a sender tells the waiting client that it was rejected.
        rejected
            .iter()
            .for_each(|rejected| drop(instance.waiting.remove(rejected)));
        GateEntry::Wait(QueuePlace {
            gate: self.clone(),
            to,
            source,
            ticket,
            since,
            admitted,
        })
    }

    /// Gives slots to the next clients of the queue.
    fn admit_waiting_clients(&self, instance: &mut InstanceGate, now: Instant) {
        while !instance.queue.is_empty() && instance.in_flight < self.bound {
            let InstanceGate {
                queue, of_source, ..
            } = instance;
            let Some(next) = queue.pop_next(now, |source| has_room(of_source, source, self.bound))
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
                instance.add_handshake(next.source);
            }
        }
    }

    /// Rejects the newest client of the longest queue, which would be served last. The first class
    /// is spared unless it has more than its share of places. Returns true if a client was
    /// rejected.
    pub(crate) fn make_room(&self) -> bool {
        let mut guard = self.lock_instances();
        let mut instances: Vec<_> = guard.values_mut().collect();
        instances.sort_by_key(|instance| Reverse(instance.queue.len()));
        instances.into_iter().any(|instance| {
            instance
                .queue
                .reject_client()
                .is_some_and(|ticket| instance.waiting.remove(&ticket).is_some())
        })
    }

    /// Renews the list of the node's addresses, until dropped.
    pub(crate) async fn keep_node_addresses_current(&self) {
        let (mut ticks, kernel) = (
            tokio::time::interval(shorten_wait(LIST_INTERVAL)),
            OffThread::new("the node's addresses"),
        );
        loop {
            ticks.tick().await;
            self.first
                .update_node_addresses(&kernel, LIST_INTERVAL)
                .await;
        }
    }

    /// Returns the gate's status. Numbers are totals over all instances.
    pub(crate) fn status(&self) -> GateStatus {
        let instances = self.lock_instances();
        let mut status = GateStatus::default();
        let newest = instances.keys().max().copied();
        // The newest instance counts, and older ones only while handshakes are in flight: a dead
        // instance has none.
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
            .map(|instance| instance.queue.count_waiting(class))
            .sum()
    }

    fn lock_instances(&self) -> MutexGuard<'_, HashMap<u64, InstanceGate>> {
        self.instances
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if a source has fewer handshakes in flight than it may have.
fn has_room(of_source: &HashMap<Source, usize>, source: &Source, bound: usize) -> bool {
    of_source
        .get(source)
        .is_none_or(|handshakes| *handshakes < bound.div_ceil(SOURCE_DIVISOR))
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

    fn add_handshake(&mut self, source: Source) {
        self.in_flight += 1;
        *self.of_source.entry(source).or_default() += 1;
    }

    fn remove_handshake(&mut self, source: Source) {
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
    pub(crate) fn end_time(&self) -> Instant {
        self.began + shorten_wait(MAX_HANDSHAKE)
    }

    /// True if another client waits for a slot at this instance.
    pub(crate) fn has_waiting_clients(&self) -> bool {
        self.gate
            .lock_instances()
            .get(&self.to)
            .is_some_and(|instance| !instance.queue.is_empty())
    }

    /// Records that the instance's first byte has come, or is overdue.
    pub(crate) fn end_handshake(self) {
        self.gate.counters.count_handshake(self.began.elapsed());
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        if let Some(instance) = self.gate.lock_instances().get_mut(&self.to) {
            instance.remove_handshake(self.source);
            self.gate.admit_waiting_clients(instance, Instant::now());
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
    pub(crate) async fn wait_for_turn(&mut self) -> Result<HandshakeSlot, GateRefusal> {
        let expires = self.since + MAX_WAIT;
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
            Ok(Err(_)) if Instant::now() < expires => Err(GateRefusal::Full),
            Ok(Err(_)) | Err(_) => Err(GateRefusal::Expired),
        }
    }

    /// Counts a client that gets no slot.
    pub(crate) fn refuse_client(self, why: GateRefusal) {
        self.gate.counters.count_dropped(why);
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        if let Some(instance) = self.gate.lock_instances().get_mut(&self.to) {
            instance.queue.remove_client(self.ticket);
            instance.waiting.remove(&self.ticket);
            // The client was given a slot and has not taken it yet, so the slot is free again.
            if self.admitted.try_recv().is_ok() {
                instance.remove_handshake(self.source);
                self.gate.admit_waiting_clients(instance, Instant::now());
            }
        }
    }
}

#[cfg(test)]
mod tests;
