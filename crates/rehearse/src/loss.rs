//! What can be lost.

use std::fmt;

/// A kind of loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loss {
    /// A new connection was refused.
    Refused,
    /// A new connection was reset.
    Reset,
    /// A new connection was closed without an answer.
    Closed,
    /// No answer within 15 s.
    Unanswered,
    /// TLS failed.
    Tls,
    /// HTTP failed.
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

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refused => "refused",
            Self::Reset => "reset",
            Self::Closed => "closed without an answer",
            Self::Unanswered => "unanswered for 15 s",
            Self::Tls => "TLS errors",
            Self::Http => "HTTP errors",
            Self::BadStatus => "error statuses",
            Self::StreamEnded => "streams ended by berth",
            Self::EventMissed => "watch events missed",
            Self::EventDuplicated => "watch events duplicated",
        })
    }
}
