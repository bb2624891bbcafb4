//! What can be lost.

use super::data::Tally;
use serde::{Deserialize, Serialize};
use std::fmt;

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

impl Loss {
    /// Its name in a report, which does not change, and what one and several are called.
    pub(crate) fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Refused => ("refused", "connection refused", "connections refused"),
            Self::Reset => ("reset", "connection reset", "connections reset"),
            Self::Closed => ("closed", "connection closed without an answer", "connections closed without an answer"),
            Self::Unanswered => ("unanswered", "request unanswered for 15 s", "requests unanswered for 15 s"),
            Self::Tls => ("tls", "TLS error", "TLS errors"),
            Self::Http => ("http", "HTTP error", "HTTP errors"),
            Self::BadStatus => ("bad_status", "error status", "error statuses"),
            Self::StreamEnded => ("stream_ended", "stream cut", "streams cut"),
            Self::EventMissed => ("event_missed", "watch event missed", "watch events missed"),
            Self::EventDuplicated => ("event_duplicated", "watch event duplicated", "watch events duplicated"),
        }
    }

    /// So many of it, as a report has them.
    pub(crate) fn tally(self, count: u64) -> Tally {
        let (kind, _, text) = self.names();
        Tally { kind: kind.to_owned(), text: text.to_owned(), count }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names().2)
    }
}
