//! Whether a watch saw every write once. No I/O.

use crate::record::Flaw;

/// The numbers that a watch saw.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    last: u64,
    pub(super) missed: u64,
    pub(super) duplicated: u64,
}

impl Sequence {
    /// A list told that writes up to `last` are there.
    pub(super) fn listed(&mut self, last: u64) {
        self.last = self.last.max(last);
    }

    /// A watch told of a write; what is wrong with that.
    pub(super) fn saw(&mut self, number: u64) -> Option<Flaw> {
        if number <= self.last {
            self.duplicated += 1;
            return Some(Flaw::Duplicated(1));
        }
        self.reach(number - 1, number)
    }

    /// Whether all writes up to `goal` were seen.
    pub(super) fn has(&self, goal: u64) -> bool {
        self.last >= goal
    }

    /// No more will come: what is not there up to `goal` is missed.
    pub(super) fn finish(&mut self, goal: u64) -> Option<Flaw> {
        self.reach(goal, goal.max(self.last))
    }

    fn reach(&mut self, before: u64, last: u64) -> Option<Flaw> {
        let missed = before.saturating_sub(self.last);
        self.missed += missed;
        self.last = last;
        (missed > 0).then_some(Flaw::Missed(missed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_doubles_and_a_missing_end() {
        let mut sequence = Sequence::default();
        sequence.listed(10);
        let flaws: Vec<_> = [11, 12, 15, 15, 14, 16].map(|number| sequence.saw(number)).into();
        let (missed, duplicated) = (Some(Flaw::Missed(2)), Some(Flaw::Duplicated(1)));
        assert_eq!(flaws, [None, None, missed, duplicated, duplicated, None]);
        assert_eq!((sequence.missed, sequence.duplicated), (2, 2));
        assert!(sequence.has(16) && !sequence.has(17));
        // What a second list tells is not missed.
        sequence.listed(18);
        assert_eq!(sequence.saw(19), None);
        assert_eq!(sequence.finish(22), Some(Flaw::Missed(3)));
        assert_eq!((sequence.finish(20), sequence.missed), (None, 5));
    }
}
