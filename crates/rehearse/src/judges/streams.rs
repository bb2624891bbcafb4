//! Lives of connections: when each was open, and on which instance.
//!
//! A stream's name is its client's name and a number that counts the client's connections. It is open
//! from its first good answer to the end that its client saw, or to the end of the load.

use super::{Case, Span};
use crate::data::{Flaw, Gap, Segment, Watch};
use crate::event::{Answer, StreamEnd, WatchSum};
use crate::record::Record;
use crate::stamp::Stamp;
use crate::verdict::Loss;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Clients of these names make one request a connection: they keep none, and log no end that they wanted.
const ONE_SHOT: [&str; 2] = ["new", "slow"];

/// Clients whose name begins so are watches.
const WATCH: &str = "watch-";

/// A client's connections, in order.
pub(super) type Lives<'a> = BTreeMap<&'a str, Vec<Life<'a>>>;

/// One connection that was kept.
#[derive(Debug)]
pub(super) struct Life<'a> {
    pub(super) instance: &'a str,
    pub(super) from: Stamp,
    pub(super) to: Stamp,
    end: Option<&'a StreamEnd>,
}

pub(super) fn lives<'a>(record: &'a Record, span: &Span) -> Lives<'a> {
    let ends: HashMap<&str, &StreamEnd> = record.ends.iter().map(|end| (end.stream.as_str(), end)).collect();
    let mut seen = HashSet::new();
    let mut lives = Lives::new();
    for attempt in &record.attempts {
        let kind = attempt.stream.split('-').next().unwrap_or_default();
        let Some((client, _)) = attempt.stream.rsplit_once('-').filter(|_| !ONE_SHOT.contains(&kind)) else {
            continue;
        };
        let Answer::Good { instance } = &attempt.answer else { continue };
        if seen.insert(attempt.stream.as_str()) {
            let end = ends.get(attempt.stream.as_str()).copied();
            let to = end.map_or(span.over, |end| end.at).max(attempt.done);
            lives.entry(client).or_default().push(Life { instance, from: attempt.done, to, end });
        }
    }
    for lives in lives.values_mut() {
        lives.sort_by_key(|life| life.from);
        // A client gave up a connection without an end that it saw.
        for index in 1..lives.len() {
            lives[index - 1].to = lives[index - 1].to.min(lives[index].from);
        }
    }
    lives
}

/// A lane for each watch, those that never came to be too.
pub(super) fn watches(case: &Case<'_>) -> Vec<Watch> {
    let Case { record, span, lives, .. } = case;
    let sums: HashMap<&str, _> = record.watches.iter().map(|sum| (sum.client.as_str(), sum)).collect();
    let opened = lives.keys().copied().filter(|client| client.starts_with(WATCH));
    let mut clients: Vec<&str> = opened.chain(sums.keys().copied()).collect();
    // watch-2 before watch-10.
    clients.sort_unstable_by_key(|client| (client.len(), *client));
    clients.dedup();
    let watch = |client: &str| {
        let (own, sum) = (lives.get(client).map_or(&[][..], Vec::as_slice), sums.get(client));
        Watch {
            id: client.to_owned(),
            events: sum.map_or(0, |sum| sum.events.values().sum()),
            missed: sum.map_or(0, |sum| sum.count(Loss::EventMissed)),
            duplicated: sum.map_or(0, |sum| sum.count(Loss::EventDuplicated)),
            relists: sum.map_or(0, |sum| sum.relists),
            expired: sum.map_or(0, |sum| sum.expired),
            segments: own.iter().map(|life| segment(life, span)).collect(),
            gaps: gaps(own, case),
            flaws: sum.map_or_else(Vec::new, |sum| flaws(sum, span)),
        }
    };
    clients.into_iter().map(watch).collect()
}

fn segment(life: &Life<'_>, span: &Span) -> Segment {
    Segment { from_ms: span.ms(life.from), to_ms: span.ms(life.to), instance: life.instance.to_owned() }
}

fn flaws(sum: &WatchSum, span: &Span) -> Vec<Flaw> {
    let flaw = |(at, loss, count): &(Stamp, Loss, u64)| {
        let of = |one| if *loss == one { *count } else { 0 };
        Flaw { at_ms: span.ms(*at), missed: of(Loss::EventMissed), duplicated: of(Loss::EventDuplicated) }
    };
    sum.flaws.iter().map(flaw).collect()
}

fn gaps(lives: &[Life<'_>], Case { span, ended: by_instance, allowed, .. }: &Case<'_>) -> Vec<Gap> {
    if lives.is_empty() {
        let (from_ms, to_ms) = (0, span.ms(span.over));
        return vec![Gap { from_ms, to_ms, by_instance: false, allowed: false, reason: "never opened".into() }];
    }
    let ended = lives.iter().enumerate().filter_map(|(index, life)| Some((index, life, life.end?)));
    let gap = |(index, life, end): (usize, &Life<'_>, &StreamEnd)| {
        let to = lives.get(index + 1).map_or(span.over.max(life.to), |next| next.from);
        Gap {
            from_ms: span.ms(life.to),
            to_ms: span.ms(to),
            by_instance: by_instance.contains(end.stream.as_str()),
            allowed: allowed.contains(end.stream.as_str()),
            reason: end.how.to_string(),
        }
    };
    ended.map(gap).collect()
}
