//! Whether a watch saw every write once. No I/O.

use serde_json::Value;

/// Field of a ConfigMap's data with the number of the write.
pub(super) const FIELD: &str = "sequence";

/// The numbers that a watch saw.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    last: u64,
    pub(super) missed: u64,
    pub(super) doubled: u64,
}

impl Sequence {
    /// A list told that writes up to `last` are there. What a watch should have told before is
    /// missed.
    pub(super) fn listed(&mut self, last: u64, first_list: bool) {
        if first_list {
            self.last = last;
        } else {
            self.finish(last);
        }
    }

    /// A watch told of a write.
    pub(super) fn saw(&mut self, number: u64) {
        if number <= self.last {
            self.doubled += 1;
            return;
        }
        self.missed += number - self.last - 1;
        self.last = number;
    }

    /// Whether all writes up to `goal` were seen.
    pub(super) fn has(&self, goal: u64) -> bool {
        self.last >= goal
    }

    /// No more will come: what is not there up to `goal` is missed.
    pub(super) fn finish(&mut self, goal: u64) {
        self.missed += goal.saturating_sub(self.last);
        self.last = self.last.max(goal);
    }
}

/// The number of the write that made an object; none for other objects.
pub(super) fn number(object: &Value) -> Option<u64> {
    object["data"][FIELD].as_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_doubles_and_a_missing_end() {
        let mut sequence = Sequence::default();
        sequence.listed(10, true);
        for number in [11, 12, 15, 15, 14, 16] {
            sequence.saw(number);
        }
        assert_eq!((sequence.missed, sequence.doubled), (2, 2));
        assert!(sequence.has(16) && !sequence.has(17));
        sequence.listed(18, false);
        sequence.finish(20);
        assert_eq!(sequence.missed, 6);
    }

    #[test]
    fn only_numbered_objects_count() {
        assert_eq!(number(&serde_json::json!({"data": {"sequence": "7"}})), Some(7));
        assert_eq!(number(&serde_json::json!({"data": {"hello": "world"}})), None);
        assert_eq!(number(&serde_json::json!(3)), None);
    }
}
