//! The clients that wait for a handshake slot, and their order. Pure: the time is passed in.
//!
//! Each source has a queue, in one of three classes. Within a class the sources take turns by
//! deficit round robin, in which all clients cost one handshake. So a source with a thousand
//! clients waits only for its own clients. While clients of all three classes wait, of [`TURNS`]
//! turns the first class has five, the others have four and the late class has one: no class
//! starves another. Beyond the room, the newest client of the longest queue is rejected, because
//! that client would be served last and has waited least.

use super::source::Source;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;
use tokio::time::Instant;

/// Wait after which a client goes behind all others: client-go gives a TLS handshake 10 s, so the
/// client will soon leave.
pub(super) const LATE: Duration = Duration::from_secs(8);

/// Longest wait of a client.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// Turns of a cycle.
const TURNS: u8 = 10;

/// The first class may have the `FIRST_SHARE`th part of all places.
const FIRST_SHARE: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Class {
    /// Clients on the node itself, and the clients of `--first`.
    First,
    Others,
    /// Clients of either class that have waited for [`LATE`].
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

    /// Returns the class of a turn, and the classes that get the turn if no client of that class
    /// waits.
    fn in_turn(turn: u8) -> [Self; 3] {
        match turn {
            0 => [Self::Late, Self::First, Self::Others],
            odd if odd % 2 == 1 => [Self::First, Self::Others, Self::Late],
            _ => [Self::Others, Self::First, Self::Late],
        }
    }
}

/// Capacity of a queue.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Room {
    pub(super) clients: usize,
    /// Bytes that the clients sent.
    pub(super) bytes: usize,
}

/// Identifies a waiting client.
pub(super) type Ticket = u64;

/// A client's place in its queue, by arrival.
type Place = (Instant, Ticket);

#[derive(Debug)]
struct QueuedClient {
    key: Key,
    since: Instant,
    bytes: usize,
}

type Key = (Class, Source);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Next {
    pub(super) ticket: Ticket,
    pub(super) source: Source,
    pub(super) class: Class,
    pub(super) since: Instant,
}

#[derive(Debug, Default)]
struct SourceQueue {
    places: BTreeSet<Place>,
    /// Random order among queues of equal length, drawn each time that the source comes, so that
    /// clients of one address are not always rejected first.
    any: u64,
    /// Place among the queues of the class: the smallest number is next.
    turn: u64,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    room: Room,
    clients: HashMap<Ticket, QueuedClient>,
    bytes: usize,
    queues: HashMap<Key, SourceQueue>,
    turns: BTreeMap<(Class, u64), Source>,
    /// Two sets of queues, each sorted by length with the longest queue last: the queues of other
    /// classes, and the queues of the first class.
    lengths: [BTreeSet<(usize, u64, Key)>; 2],
    random: RandomState,
    /// Waiting clients by age: before and after [`LATE`].
    ages: [BTreeSet<Place>; 2],
    /// Number of clients in each class.
    waiting: [usize; 3],
    turn: u8,
    next_turn: u64,
    next_ticket: Ticket,
}

impl Queue {
    pub(super) fn new(room: Room) -> Self {
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
    pub(super) fn waiting(&self, class: Class) -> usize {
        self.waiting[class as usize]
    }

    /// True if a source has a queue.
    #[cfg(test)]
    pub(super) fn has(&self, source: &Source) -> bool {
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
    pub(super) fn push(
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
        self.join(key, (since, ticket));
        self.age_clients(now);
        let mut rejected = Vec::new();
        while self.clients.len() > self.room.clients || self.bytes > self.room.bytes {
            let Some(newest) = self.reject().or_else(|| self.reject_of(true)) else {
                break;
            };
            rejected.push(newest);
        }
        (ticket, rejected)
    }

    /// Removes the newest client of the longest queue: a queue of the first class if the class has
    /// more than its share, else a queue of another class.
    pub(super) fn reject(&mut self) -> Option<Ticket> {
        self.reject_of(self.waiting(Class::First) > self.room.clients / FIRST_SHARE)
    }

    fn reject_of(&mut self, is_first: bool) -> Option<Ticket> {
        let (.., key) = self.lengths[usize::from(is_first)].last()?;
        let (_, newest) = *self.queues.get(key)?.places.last()?;
        self.remove(newest);
        Some(newest)
    }

    /// Removes a client. Returns true if the client was queued.
    pub(super) fn remove(&mut self, ticket: Ticket) -> bool {
        let Some(QueuedClient { key, since, bytes }) = self.clients.remove(&ticket) else {
            return false;
        };
        self.bytes -= bytes;
        self.ages[usize::from(key.0 == Class::Late)].remove(&(since, ticket));
        self.leave(key, (since, ticket));
        true
    }

    /// Removes the next client with a source that `may` have a slot.
    pub(super) fn next(&mut self, now: Instant, may: impl Fn(&Source) -> bool) -> Option<Next> {
        self.age_clients(now);
        let (class, source) = Class::in_turn(self.turn).into_iter().find_map(|class| {
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
        self.turn = (self.turn + 1) % TURNS;
        self.remove(ticket);
        Some(Next {
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
            .filter(|(since, _)| now >= *since + LATE)
            .copied()
        {
            self.ages[0].remove(&place);
            self.ages[1].insert(place);
            let Some(client) = self.clients.get_mut(&place.1) else {
                continue;
            };
            let (before, after) = (client.key, (Class::Late, client.key.1));
            client.key = after;
            self.leave(before, place);
            self.join(after, place);
        }
        while let Some((_, ticket)) = self.ages[1]
            .first()
            .filter(|(since, _)| now >= *since + LONGEST_WAIT)
            .copied()
        {
            self.remove(ticket);
        }
    }

    fn join(&mut self, key: Key, place: Place) {
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

    fn leave(&mut self, key: Key, place: Place) {
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
