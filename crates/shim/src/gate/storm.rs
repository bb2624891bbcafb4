//! When more clients come than an instance opens, and who brings them: for the log. Pure: it is told the time.

use super::source::Source;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// So many that wait are a storm, or one that has waited so long.
const CROWD: usize = 100;
const LONG: Duration = Duration::from_secs(1);

/// It is over when nobody has waited for so long.
const OVER: Duration = Duration::from_secs(5);

/// Sources that are named.
const NAMED: usize = 5;

/// Sources that are counted; more are one. A /16 that is spread over costs no more memory.
const COUNTED: usize = 4096;

/// What waited while a storm lasted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Brought {
    /// Clients that had to wait, and those among them that got no opening.
    pub(super) waited: u64,
    pub(super) dropped: u64,
    /// The longest queue.
    pub(super) most: usize,
    by_source: HashMap<Source, u64>,
}

impl Brought {
    /// The sources that brought most, the greatest first.
    pub(super) fn sources(&self) -> Vec<(Source, u64)> {
        let mut sources: Vec<_> = self.by_source.iter().map(|(source, count)| (*source, *count)).collect();
        sources.sort_unstable_by_key(|(source, count)| (std::cmp::Reverse(*count), *source));
        sources.truncate(NAMED);
        sources
    }
}

#[derive(Debug, Default)]
pub(super) struct Storm {
    /// While nobody waits, none.
    brought: Option<Brought>,
    /// When it was seen that it is one.
    began: Option<Instant>,
    /// When one waited last.
    waited: Option<Instant>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    Began,
    /// It lasted so long.
    Ended(Duration, Brought),
}

impl Storm {
    /// One had to wait, and the queue is as long with it.
    pub(super) fn wait(&mut self, source: Source, queue: usize) {
        let brought = self.brought.get_or_insert_default();
        brought.waited += 1;
        brought.most = brought.most.max(queue);
        if brought.by_source.len() < COUNTED || brought.by_source.contains_key(&source) {
            *brought.by_source.entry(source).or_default() += 1;
        }
    }

    /// One that waited got no opening.
    pub(super) fn drop_one(&mut self) {
        if let Some(brought) = &mut self.brought {
            brought.dropped += 1;
        }
    }

    /// What begins or ends, now that so many wait, the longest since then.
    pub(super) fn look(&mut self, waiting: usize, oldest: Option<Instant>, now: Instant) -> Option<Change> {
        if waiting > 0 {
            self.waited = Some(now);
            let is_long = oldest.is_some_and(|oldest| now >= oldest + LONG);
            if self.began.is_none() && (waiting >= CROWD || is_long) {
                self.began = Some(now);
                return Some(Change::Began);
            }
            return None;
        }
        if self.waited.is_some_and(|waited| now < waited + OVER) {
            return None;
        }
        let brought = self.brought.take().unwrap_or_default();
        let lasted = |began| self.waited.unwrap_or(began).saturating_duration_since(began);
        self.began.take().map(|began| Change::Ended(lasted(began), brought))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(number: u8) -> Source {
        Source::of([10, 0, 0, number].into())
    }

    #[test]
    fn a_storm_begins_and_ends_once() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut storm = Storm::default();
        for number in [1, 1, 1, 2, 3, 3] {
            storm.wait(source(number), 6);
        }
        assert_eq!(storm.look(6, Some(at(0)), at(900)), None, "a few for a moment are none");
        assert_eq!(storm.look(6, Some(at(0)), at(1000)), Some(Change::Began));
        assert_eq!(storm.look(6, Some(at(0)), at(2000)), None);
        storm.drop_one();
        assert_eq!(storm.look(0, None, at(6000)), None, "it may go on");
        let Some(Change::Ended(lasted, brought)) = storm.look(0, None, at(7000)) else { panic!("{storm:?}") };
        assert_eq!((lasted, brought.waited, brought.dropped, brought.most), (Duration::from_secs(1), 6, 1, 6));
        assert_eq!(brought.sources(), [(source(1), 3), (source(3), 2), (source(2), 1)]);
        assert_eq!(storm.look(0, None, at(20_000)), None);

        assert_eq!(storm.look(CROWD, Some(at(30_000)), at(30_000)), Some(Change::Began), "many are one at once");
    }

    #[test]
    fn many_sources_are_counted_as_far_as_there_is_room() {
        let mut storm = Storm::default();
        for number in 0..3 * COUNTED as u32 {
            storm.wait(Source::of(std::net::Ipv4Addr::from(number).into()), 1);
        }
        let brought = storm.brought.unwrap();
        assert_eq!((brought.by_source.len(), brought.waited), (COUNTED, 3 * COUNTED as u64));
    }
}
