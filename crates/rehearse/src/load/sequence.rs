//! Checks that a watch saw every write once. No I/O.

use crate::record::verdict::Loss;

/// The numbered writes that a watch saw. Writes are numbered from 1 on.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    last: u64,
}

impl Sequence {
    /// Records that a list had the writes up to `last`.
    pub(super) fn record_list(&mut self, last: u64) {
        self.last = self.last.max(last);
    }

    /// Records the event of a write, and returns its flaw, if any.
    pub(super) fn observe_number(&mut self, number: u64) -> Option<(Loss, u64)> {
        if number <= self.last {
            return Some((Loss::EventDuplicated, 1));
        }
        self.advance(number - 1, number)
    }

    /// True if all writes up to `goal` were seen.
    pub(super) fn has_reached(&self, goal: u64) -> bool {
        self.last >= goal
    }

    /// Records that no more events will come. Missing writes up to `goal` are missed.
    pub(super) fn find_missing_end(&mut self, goal: u64) -> Option<(Loss, u64)> {
        self.advance(goal, goal.max(self.last))
    }

    fn advance(&mut self, before: u64, last: u64) -> Option<(Loss, u64)> {
        let missed = before.saturating_sub(self.last);
        self.last = last;
        (missed > 0).then_some((Loss::EventMissed, missed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_duplicates_and_a_missing_end_are_losses() {
        let mut sequence = Sequence::default();
        sequence.record_list(10);
        let flaws: Vec<_> = [11, 12, 15, 15, 14, 16]
            .map(|number| sequence.observe_number(number))
            .into();
        let (missed, duplicated) = (
            Some((Loss::EventMissed, 2)),
            Some((Loss::EventDuplicated, 1)),
        );
        assert_eq!(flaws, [None, None, missed, duplicated, duplicated, None]);
        assert!(sequence.has_reached(16) && !sequence.has_reached(17));
        // Writes in a second list are not missed.
        sequence.record_list(18);
        assert_eq!(sequence.observe_number(19), None);
        assert_eq!(sequence.find_missing_end(22), Some((Loss::EventMissed, 3)));
        assert_eq!(sequence.find_missing_end(20), None);
    }
}
