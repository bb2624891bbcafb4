//! Detects storms, in which more clients come than an instance answers, and their sources: for the log. Pure: the time is
//! passed in.

use super::source::Source;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// It is a storm when this many clients wait, or one has waited this long.
const CROWD: usize = 100;
const LONG: Duration = Duration::from_secs(1);

/// It has ended when no client has waited for this long.
const CALM: Duration = Duration::from_secs(5);

/// Sources that are logged.
const NAMED: usize = 5;

/// Sources that are counted; further ones are not, so clients from a whole /16 cost no more memory.
const COUNTED: usize = 4096;

/// The clients of a storm.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct StormSummary {
    /// Clients that had to wait, and those among them that got no slot.
    pub(super) waited: u64,
    pub(super) dropped: u64,
    /// Greatest length of the queue.
    pub(super) most: usize,
    by_source: HashMap<Source, u64>,
}

impl StormSummary {
    /// The sources with most clients, the greatest first.
    pub(super) fn sources(&self) -> Vec<(Source, u64)> {
        let mut sources: Vec<_> = self.by_source.iter().map(|(source, count)| (*source, *count)).collect();
        sources.sort_unstable_by_key(|(source, count)| (std::cmp::Reverse(*count), *source));
        sources.truncate(NAMED);
        sources
    }
}

#[derive(Debug, Default)]
pub(super) struct StormDetector {
    /// While clients wait.
    summary: Option<StormSummary>,
    /// When it was detected.
    began: Option<Instant>,
    /// When a client last waited.
    waited: Option<Instant>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    Began,
    /// With its duration.
    Ended(Duration, StormSummary),
}

impl StormDetector {
    /// A client has to wait; the queue has this length with it.
    pub(super) fn wait(&mut self, source: Source, queue: usize) {
        let summary = self.summary.get_or_insert_default();
        summary.waited += 1;
        summary.most = summary.most.max(queue);
        if summary.by_source.len() < COUNTED || summary.by_source.contains_key(&source) {
            *summary.by_source.entry(source).or_default() += 1;
        }
    }

    /// A client that waited got no slot.
    pub(super) fn drop_one(&mut self) {
        if let Some(summary) = &mut self.summary {
            summary.dropped += 1;
        }
    }

    /// Whether a storm begins or ends, with this number of waiting clients, of which the `oldest` waits since then.
    pub(super) fn update(&mut self, waiting: usize, oldest: Option<Instant>, now: Instant) -> Option<Change> {
        if waiting > 0 {
            self.waited = Some(now);
            let is_long = oldest.is_some_and(|oldest| now >= oldest + LONG);
            if self.began.is_none() && (waiting >= CROWD || is_long) {
                self.began = Some(now);
                return Some(Change::Began);
            }
            return None;
        }
        if self.waited.is_some_and(|waited| now < waited + CALM) {
            return None;
        }
        let summary = self.summary.take().unwrap_or_default();
        let lasted = |began| self.waited.unwrap_or(began).saturating_duration_since(began);
        self.began.take().map(|began| Change::Ended(lasted(began), summary))
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
        let mut storm = StormDetector::default();
        for number in [1, 1, 1, 2, 3, 3] {
            storm.wait(source(number), 6);
        }
        assert_eq!(storm.update(6, Some(at(0)), at(900)), None, "a few for a moment are none");
        assert_eq!(storm.update(6, Some(at(0)), at(1000)), Some(Change::Began));
        assert_eq!(storm.update(6, Some(at(0)), at(2000)), None);
        storm.drop_one();
        assert_eq!(storm.update(0, None, at(6000)), None, "it may go on");
        let Some(Change::Ended(lasted, summary)) = storm.update(0, None, at(7000)) else { panic!("{storm:?}") };
        assert_eq!((lasted, summary.waited, summary.dropped, summary.most), (Duration::from_secs(1), 6, 1, 6));
        assert_eq!(summary.sources(), [(source(1), 3), (source(3), 2), (source(2), 1)]);
        assert_eq!(storm.update(0, None, at(20_000)), None);

        assert_eq!(storm.update(CROWD, Some(at(30_000)), at(30_000)), Some(Change::Began), "many are one at once");
    }

    #[test]
    fn many_sources_are_counted_as_far_as_there_is_room() {
        let mut storm = StormDetector::default();
        for number in 0..3 * COUNTED as u32 {
            storm.wait(Source::of(std::net::Ipv4Addr::from(number).into()), 1);
        }
        let summary = storm.summary.unwrap();
        assert_eq!((summary.by_source.len(), summary.waited), (COUNTED, 3 * COUNTED as u64));
    }
}
