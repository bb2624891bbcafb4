//! Kinds of losses.

use super::format;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Number of losses by kind.
pub type Losses = BTreeMap<Loss, u64>;

/// A kind of loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// A TLS handshake failed.
    Tls,
    /// The answer was no HTTP.
    Http,
    /// An error status that a shutdown does not explain.
    BadStatus,
    /// A stream ended, but not by its instance.
    StreamEnded,
    /// A watch missed a write.
    EventMissed,
    /// A watch saw a write twice or too late.
    EventDuplicated,
}

impl Loss {
    /// Returns the name of the loss for messages, in the singular and in the plural.
    fn singular_and_plural(self) -> (&'static str, &'static str) {
        match self {
            Self::Refused => ("connection refused", "connections refused"),
            Self::Reset => ("connection reset", "connections reset"),
            Self::Closed => ("connection closed", "connections closed"),
            Self::Unanswered => (
                "request unanswered for 15 s",
                "requests unanswered for 15 s",
            ),
            Self::Tls => ("TLS error", "TLS errors"),
            Self::Http => ("HTTP error", "HTTP errors"),
            Self::BadStatus => ("error status", "error statuses"),
            Self::StreamEnded => ("stream cut", "streams cut"),
            Self::EventMissed => ("watch event missed", "watch events missed"),
            Self::EventDuplicated => ("watch event duplicated", "watch events duplicated"),
        }
    }

    pub(crate) fn plural(self) -> &'static str {
        self.singular_and_plural().1
    }

    /// Returns a number of losses in words.
    pub(crate) fn words(self, count: u64) -> String {
        let (one, many) = self.singular_and_plural();
        format::format_count_with_noun(count, one, many)
    }
}

/// Returns all losses in words.
pub(crate) fn losses_in_words(losses: &Losses) -> String {
    losses
        .iter()
        .map(|(loss, count)| loss.words(*count))
        .collect::<Vec<_>>()
        .join(", ")
}
