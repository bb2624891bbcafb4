//! What can be lost.

use super::data::Tally;
use super::report::format;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// A new connection was refused.
    Refused,
    /// A new connection was reset.
    Reset,
    /// A new connection was closed without an answer.
    Closed,
    /// No answer within 15 s.
    Unanswered,
    Tls,
    Http,
    /// An error status that no shutdown explains.
    BadStatus,
    /// A stream ended although its instance did not end it.
    StreamEnded,
    /// A write that a watch never saw.
    EventMissed,
    /// A write that a watch saw twice or too late.
    EventDuplicated,
}

/// The name of each kind in a report, which does not change, and what one and several are called; in the order of [`Loss`].
const NAMES: [(&str, &str, &str); 10] = [
    ("refused", "connection refused", "connections refused"),
    ("reset", "connection reset", "connections reset"),
    ("closed", "connection closed without an answer", "connections closed without an answer"),
    ("unanswered", "request unanswered for 15 s", "requests unanswered for 15 s"),
    ("tls", "TLS error", "TLS errors"),
    ("http", "HTTP error", "HTTP errors"),
    ("bad_status", "error status", "error statuses"),
    ("stream_ended", "stream cut", "streams cut"),
    ("event_missed", "watch event missed", "watch events missed"),
    ("event_duplicated", "watch event duplicated", "watch events duplicated"),
];

/// The place of a tally's kind among those of losses.
fn place(tally: &Tally) -> Option<usize> {
    NAMES.iter().position(|(kind, ..)| *kind == tally.kind)
}

/// What one loss of a tally's kind is called.
fn one(tally: &Tally) -> &str {
    place(tally).map_or(&tally.text, |place| NAMES[place].1)
}

/// A tally in words.
pub(crate) fn words(tally: &Tally) -> String {
    format::of(tally.count, one(tally), &tally.text)
}

impl Loss {
    /// Its name in a report.
    pub(crate) fn kind(self) -> &'static str {
        NAMES[self as usize].0
    }

    /// This number of it, as a report has them.
    pub fn tally(self, count: u64) -> Tally {
        let (kind, _, text) = NAMES[self as usize];
        Tally { kind: kind.to_owned(), text: text.to_owned(), count }
    }

    /// Adds this number of it to the tallies of losses, which are in the order of their kinds.
    pub(crate) fn add(self, count: u64, tallies: &mut Vec<Tally>) {
        if count == 0 {
            return;
        }
        let at = tallies.partition_point(|tally| place(tally) < Some(self as usize));
        match tallies.get_mut(at).filter(|tally| tally.kind == self.kind()) {
            Some(tally) => tally.count += count,
            None => tallies.insert(at, self.tally(count)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tallies_are_in_the_order_of_their_kinds() {
        let mut tallies = Vec::new();
        for (loss, count) in [(Loss::EventMissed, 2), (Loss::Reset, 0), (Loss::Refused, 1), (Loss::EventMissed, 3)] {
            loss.add(count, &mut tallies);
        }
        assert_eq!(tallies, [Loss::Refused.tally(1), Loss::EventMissed.tally(5)]);
        assert_eq!(one(&tallies[1]), "watch event missed");
        // The names of the log and of the report are the same.
        assert_eq!(serde_json::to_value(Loss::EventDuplicated).unwrap(), Loss::EventDuplicated.kind());
    }
}
