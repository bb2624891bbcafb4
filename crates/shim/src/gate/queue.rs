//! The clients that wait for a handshake slot, and their order. Pure: the time is passed in.
//!
//! Each source has a queue, in one of three classes. Within a class the sources take turns by
//! deficit round robin, in which all clients cost one handshake. So a source with a thousand
//! clients waits only for its own clients. While clients of all three classes wait, of
//! [`TURNS_PER_CYCLE`] turns the first class has five, the others have four and the late class has
//! one: no class starves another. Beyond the room, the newest client of the longest queue is
//! rejected, because that client would be served last and has waited least.

use super::source::Source;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;
use tokio::time::Instant;

/// A client that has waited for this long goes behind all others. client-go gives a TLS handshake
/// 10 s, so the client will soon leave.
pub(super) const LATE_AFTER: Duration = Duration::from_secs(8);

/// Longest wait of a client for its turn. Afterwards the client leaves the queue.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(15);

/// Number of turns after which the order of the classes begins again.
const TURNS_PER_CYCLE: u8 = 10;

/// The first class may have the `FIRST_DIVISOR`th part of all places.
const FIRST_DIVISOR: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Class {
    /// Clients on the node itself, and clients in the networks of `--first`.
    First,
    Others,
    /// Clients of either class that have waited for [`LATE_AFTER`].
    Late,
}

impl Class {
    pub(crate) const ALL: [Self; 3] = [Self::First, Self::Others, Self::Late];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Others => "others",
            Self::Late => "late",
        }
    }

    /// Returns the classes in the order in which they may have this turn. A class has the turn if
    /// no client of an earlier class waits.
    fn order_for_turn(turn: u8) -> [Self; 3] {
        match turn {
            0 => [Self::Late, Self::First, Self::Others],
            odd if odd % 2 == 1 => [Self::First, Self::Others, Self::Late],
            _ => [Self::Others, Self::First, Self::Late],
        }
    }
}

/// Capacity of a queue.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct QueueCapacity {
    pub(super) clients: usize,
    /// Bytes that the waiting clients have sent, in total.
    pub(super) bytes: usize,
}

/// Identifies a waiting client.
pub(super) type Ticket = u64;

/// A client's place in its queue: first by the start of its wait, then by its number.
type Place = (Instant, Ticket);

#[derive(Debug)]
struct QueuedClient {
    key: QueueKey,
    since: Instant,
    bytes: usize,
}

type QueueKey = (Class, Source);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NextClient {
    pub(super) ticket: Ticket,
    pub(super) source: Source,
    pub(super) class: Class,
    pub(super) since: Instant,
}

#[derive(Debug, Default)]
struct SourceQueue {
    places: BTreeSet<Place>,
    /// Random number for the order among queues of equal length. A new number is drawn each time
    /// that the source comes, so that clients of one address are not always rejected first.
    any: u64,
    /// Place among the queues of the class: the smallest number is next.
    turn: u64,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    room: QueueCapacity,
    clients: HashMap<Ticket, QueuedClient>,
    bytes: usize,
    queues: HashMap<QueueKey, SourceQueue>,
    turns: BTreeMap<(Class, u64), Source>,
    /// Two sets of queues, each sorted by length with the longest queue last: the queues of other
    /// classes, and the queues of the first class.
    lengths: [BTreeSet<(usize, u64, QueueKey)>; 2],
    random: RandomState,
    /// Waiting clients by age: before and after [`LATE_AFTER`].
    ages: [BTreeSet<Place>; 2],
    /// Number of clients in each class.
    waiting: [usize; 3],
    turn: u8,
    next_turn: u64,
    next_ticket: Ticket,
}

impl Queue {
    pub(super) fn new(room: QueueCapacity) -> Self {
        Self {
            room,
            turn: 1,
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.clients.len()
    }

    /// Number of waiting clients of a class.
    pub(super) fn count_waiting(&self, class: Class) -> usize {
        self.waiting[class as usize]
    }

    /// True if a source has a queue.
    #[cfg(test)]
    pub(super) fn has_source(&self, source: &Source) -> bool {
        Class::ALL
            .iter()
            .any(|class| self.queues.contains_key(&(*class, *source)))
    }

    /// Returns length and source of the longest queue.
    pub(super) fn longest_queue(&self) -> Option<(usize, Source)> {
        let longest = self.lengths.iter().filter_map(BTreeSet::last).max();
        longest.map(|(length, _, (_, source))| (*length, *source))
    }

    /// Queues a client that has waited since `since`. Returns the clients that are rejected to make
    /// room, possibly the new client too.
    pub(super) fn push_client(
        &mut self,
        (source, is_first): (Source, bool),
        bytes: usize,
        since: Instant,
        now: Instant,
    ) -> (Ticket, Vec<Ticket>) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let key = (
            if is_first {
                Class::First
            } else {
                Class::Others
            },
            source,
        );
        self.clients
            .insert(ticket, QueuedClient { key, since, bytes });
        self.bytes += bytes;
        self.ages[0].insert((since, ticket));
        self.add_place(key, (since, ticket));
        self.age_clients(now);
        let mut rejected = Vec::new();
        while self.clients.len() > self.room.clients || self.bytes > self.room.bytes {
            let Some(newest) = self
                .reject_client()
                .or_else(|| self.reject_from_class(true))
            else {
                break;
            };
            rejected.push(newest);
        }
        (ticket, rejected)
    }

    /// Removes the newest client of the longest queue: a queue of the first class if the class has
    /// more than its share, else a queue of another class.
    pub(super) fn reject_client(&mut self) -> Option<Ticket> {
        self.reject_from_class(self.count_waiting(Class::First) > self.room.clients / FIRST_DIVISOR)
    }

    fn reject_from_class(&mut self, is_first: bool) -> Option<Ticket> {
        let (.., key) = self.lengths[usize::from(is_first)].last()?;
        let (_, newest) = *self.queues.get(key)?.places.last()?;
        self.remove_client(newest);
        Some(newest)
    }

    /// Removes a client. Returns true if the client was queued.
    pub(super) fn remove_client(&mut self, ticket: Ticket) -> bool {
        let Some(QueuedClient { key, since, bytes }) = self.clients.remove(&ticket) else {
            return false;
        };
        self.bytes -= bytes;
        self.ages[usize::from(key.0 == Class::Late)].remove(&(since, ticket));
        self.remove_place(key, (since, ticket));
        true
    }

    /// Removes the client that is next in turn. Its source must be one that `may` have a slot.
    pub(super) fn pop_next(
        &mut self,
        now: Instant,
        may: impl Fn(&Source) -> bool,
    ) -> Option<NextClient> {
        self.age_clients(now);
        let (class, source) = Class::order_for_turn(self.turn)
            .into_iter()
            .find_map(|class| {
                let mut queues = self.turns.range((class, 0)..=(class, u64::MAX));
                queues
                    .find(|(_, source)| may(source))
                    .map(|(_, source)| (class, *source))
            })?;
        let queue = self.queues.get_mut(&(class, source))?;
        let (since, ticket) = *queue.places.first()?;
        self.turns.remove(&(class, queue.turn));
        queue.turn = self.next_turn;
        self.turns.insert((class, queue.turn), source);
        self.next_turn += 1;
        self.turn = (self.turn + 1) % TURNS_PER_CYCLE;
        self.remove_client(ticket);
        Some(NextClient {
            ticket,
            source,
            class,
            since,
        })
    }

    /// Moves clients that have waited long to the late class, and drops expired clients. Expired
    /// clients are not notified, because each client has its own timer.
    fn age_clients(&mut self, now: Instant) {
        while let Some(place) = self.ages[0]
            .first()
            .filter(|(since, _)| now >= *since + LATE_AFTER)
            .copied()
        {
            self.ages[0].remove(&place);
            self.ages[1].insert(place);
            let Some(client) = self.clients.get_mut(&place.1) else {
                continue;
            };
            let (before, after) = (client.key, (Class::Late, client.key.1));
            client.key = after;
            self.remove_place(before, place);
            self.add_place(after, place);
        }
        while let Some((_, ticket)) = self.ages[1]
            .first()
            .filter(|(since, _)| now >= *since + MAX_WAIT)
            .copied()
        {
            self.remove_client(ticket);
        }
    }

    fn add_place(&mut self, key: QueueKey, place: Place) {
        self.waiting[key.0 as usize] += 1;
        let queue = self.queues.entry(key).or_default();
        if queue.places.is_empty() {
            queue.turn = self.next_turn;
            queue.any = self.random.hash_one(queue.turn);
            self.next_turn += 1;
            self.turns.insert((key.0, queue.turn), key.1);
        }
        let lengths = &mut self.lengths[usize::from(key.0 == Class::First)];
        lengths.remove(&(queue.places.len(), queue.any, key));
        queue.places.insert(place);
        lengths.insert((queue.places.len(), queue.any, key));
    }

    fn remove_place(&mut self, key: QueueKey, place: Place) {
        let Some(queue) = self.queues.get_mut(&key) else {
            return;
        };
        self.waiting[key.0 as usize] -= 1;
        let lengths = &mut self.lengths[usize::from(key.0 == Class::First)];
        lengths.remove(&(queue.places.len(), queue.any, key));
        queue.places.remove(&place);
        if queue.places.is_empty() {
            self.turns.remove(&(key.0, queue.turn));
            self.queues.remove(&key);
        } else {
            lengths.insert((queue.places.len(), queue.any, key));
        }
    }
}

#[cfg(test)]
mod tests;
