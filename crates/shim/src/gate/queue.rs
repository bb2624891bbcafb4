//! Who waits for an opening, and whose turn it is. Pure: it is told the time.
//!
//! A line for each source, and of lines three classes. Within a class each line has its turn after the others (deficit
//! round robin, where all cost the same: one handshake), so that who brings a thousand clients waits for its own. Of
//! [`TURNS`] turns for which all three classes wait the first class has five, the others four and the late one: none is
//! starved by another. What would be too much is rejected where it hurts least: the newest of the longest line, which is the
//! last to be served and has waited least.

use super::source::Source;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;
use tokio::time::Instant;

/// Who has waited so long goes behind all others: client-go gives a TLS handshake 10 s, so it has soon left.
pub(super) const LATE: Duration = Duration::from_secs(8);

/// Nobody waits longer.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// Turns until the first is due again.
const TURNS: u8 = 10;

/// The first class may have one in so many of all places.
const FIRST_SHARE: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Class {
    /// The node's own clients, and those of `--first`.
    First,
    Others,
    /// Who has waited for [`LATE`], of either.
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

    /// Which comes first in a turn, and which for want of it.
    fn in_turn(turn: u8) -> [Self; 3] {
        match turn {
            0 => [Self::Late, Self::First, Self::Others],
            odd if odd % 2 == 1 => [Self::First, Self::Others, Self::Late],
            _ => [Self::Others, Self::First, Self::Late],
        }
    }
}

/// What a queue has room for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) clients: usize,
    /// Of what they said.
    pub(super) bytes: usize,
}

/// A client that waits; another number for each.
pub(super) type Ticket = u64;

/// A client's place in a line: who came first is first.
type Place = (Instant, Ticket);

#[derive(Debug)]
struct Waiting {
    line: Key,
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
struct Line {
    places: BTreeSet<Place>,
    /// Its place among lines as long as it, which is another each time that its source comes.
    any: u64,
    /// The line with the smallest number of its class is next.
    turn: u64,
}

#[derive(Debug)]
pub(super) struct Queue {
    room: Room,
    clients: HashMap<Ticket, Waiting>,
    bytes: usize,
    lines: HashMap<Key, Line>,
    turns: BTreeMap<(Class, u64), Source>,
    /// Of all but the first class, and of that: the longest last, and of those as long as it any.
    lengths: [BTreeSet<(usize, u64, Key)>; 2],
    random: RandomState,
    /// Those that are not late yet, and those that are.
    ages: [BTreeSet<Place>; 2],
    /// Of each class, how many.
    waiting: [usize; 3],
    turn: u8,
    next_turn: u64,
    next_ticket: Ticket,
}

impl Queue {
    pub(super) fn new(room: Room) -> Self {
        Self {
            room,
            clients: HashMap::new(),
            bytes: 0,
            lines: HashMap::new(),
            turns: BTreeMap::new(),
            lengths: [BTreeSet::new(), BTreeSet::new()],
            random: RandomState::new(),
            ages: [BTreeSet::new(), BTreeSet::new()],
            waiting: [0; 3],
            turn: 1,
            next_turn: 0,
            next_ticket: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.clients.len()
    }

    /// Since when somebody waits.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.ages.iter().filter_map(|ages| ages.first()).map(|(since, _)| *since).min()
    }

    /// How many wait, of a class.
    pub(super) fn waiting(&self, class: Class) -> usize {
        self.waiting[class as usize]
    }

    /// Whether a source has a line.
    #[cfg(test)]
    pub(super) fn has(&self, source: &Source) -> bool {
        Class::ALL.iter().any(|class| self.lines.contains_key(&(*class, *source)))
    }

    /// The longest line, and its source.
    pub(super) fn longest(&self) -> Option<(usize, Source)> {
        let longest = self.lengths.iter().filter_map(BTreeSet::last).max();
        longest.map(|(length, _, (_, source))| (*length, *source))
    }

    /// Lines up a client that waits `since` then, and says who is rejected for it: itself, it may be.
    pub(super) fn push(
        &mut self,
        (source, is_first): (Source, bool),
        bytes: usize,
        since: Instant,
        now: Instant,
    ) -> (Ticket, Vec<Ticket>) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let line = (if is_first { Class::First } else { Class::Others }, source);
        self.clients.insert(ticket, Waiting { line, since, bytes });
        self.bytes += bytes;
        self.ages[0].insert((since, ticket));
        self.join(line, (since, ticket));
        self.age(now);
        let mut rejected = Vec::new();
        while self.clients.len() > self.room.clients || self.bytes > self.room.bytes {
            let Some(newest) = self.reject().or_else(|| self.reject_of(true)) else { break };
            rejected.push(newest);
        }
        (ticket, rejected)
    }

    /// Takes out the newest of the longest line, but nobody of the first class while that has no more than its share.
    pub(super) fn reject(&mut self) -> Option<Ticket> {
        let [others, first] = self.lengths.each_ref().map(|lengths| lengths.last().map(|(length, ..)| *length));
        self.reject_of(first >= others && self.waiting(Class::First) > self.room.clients / FIRST_SHARE)
    }

    fn reject_of(&mut self, is_first: bool) -> Option<Ticket> {
        let (.., line) = self.lengths[usize::from(is_first)].last()?;
        let (_, newest) = *self.lines.get(line)?.places.last()?;
        self.remove(newest);
        Some(newest)
    }

    /// Takes a client out that gave up; whether it was there.
    pub(super) fn remove(&mut self, ticket: Ticket) -> bool {
        let Some(Waiting { line, since, bytes }) = self.clients.remove(&ticket) else { return false };
        self.bytes -= bytes;
        self.ages[usize::from(line.0 == Class::Late)].remove(&(since, ticket));
        self.leave(line, (since, ticket));
        true
    }

    /// Takes the next one out, of those whose source `may` have an opening.
    pub(super) fn next(&mut self, now: Instant, may: impl Fn(&Source) -> bool) -> Option<Next> {
        self.age(now);
        let (class, source) = Class::in_turn(self.turn).into_iter().find_map(|class| {
            let mut lines = self.turns.range((class, 0)..=(class, u64::MAX));
            lines.find(|(_, source)| may(source)).map(|(_, source)| (class, *source))
        })?;
        let line = self.lines.get_mut(&(class, source))?;
        let (since, ticket) = *line.places.first()?;
        self.turns.remove(&(class, line.turn));
        line.turn = self.next_turn;
        self.turns.insert((class, line.turn), source);
        self.next_turn += 1;
        self.turn = (self.turn + 1) % TURNS;
        self.remove(ticket);
        Some(Next { ticket, source, class, since })
    }

    /// Sends those behind who are late, and drops those whose time is over: each of them has a timer of its own.
    fn age(&mut self, now: Instant) {
        while let Some(place) = self.ages[0].first().filter(|(since, _)| now >= *since + LATE).copied() {
            self.ages[0].remove(&place);
            self.ages[1].insert(place);
            let Some(client) = self.clients.get_mut(&place.1) else { continue };
            let (before, after) = (client.line, (Class::Late, client.line.1));
            client.line = after;
            self.leave(before, place);
            self.join(after, place);
        }
        while let Some((_, ticket)) = self.ages[1].first().filter(|(since, _)| now >= *since + LONGEST_WAIT).copied() {
            self.remove(ticket);
        }
    }

    fn join(&mut self, key: Key, place: Place) {
        self.waiting[key.0 as usize] += 1;
        let line = self.lines.entry(key).or_default();
        if line.places.is_empty() {
            line.turn = self.next_turn;
            line.any = self.random.hash_one(line.turn);
            self.next_turn += 1;
            self.turns.insert((key.0, line.turn), key.1);
        }
        let lengths = &mut self.lengths[usize::from(key.0 == Class::First)];
        lengths.remove(&(line.places.len(), line.any, key));
        line.places.insert(place);
        lengths.insert((line.places.len(), line.any, key));
    }

    fn leave(&mut self, key: Key, place: Place) {
        let Some(line) = self.lines.get_mut(&key) else { return };
        self.waiting[key.0 as usize] -= 1;
        let lengths = &mut self.lengths[usize::from(key.0 == Class::First)];
        lengths.remove(&(line.places.len(), line.any, key));
        line.places.remove(&place);
        if line.places.is_empty() {
            self.turns.remove(&(key.0, line.turn));
            self.lines.remove(&key);
        } else {
            lengths.insert((line.places.len(), line.any, key));
        }
    }
}

#[cfg(test)]
mod tests;
