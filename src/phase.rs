//! The states of a shim, and what brings it from one to the next. Pure.

use serde::{Deserialize, Serialize};

/// Where a shim is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its ports are bound and do not listen: its own instance was not ready yet.
    Waiting,
    /// It listens.
    Joined,
    /// It listens no more and lets its connections end.
    Left,
}

impl Phase {
    /// The word for log and status.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Joined => "joined",
            Self::Left => "left",
        }
    }

    /// The phase that follows from how things are. Level-triggered: asked again with the same facts it
    /// gives the same answer.
    #[must_use]
    pub fn next(self, own_ready: bool, stopping: bool) -> Self {
        match self {
            Self::Left => Self::Left,
            _ if stopping => Self::Left,
            Self::Waiting if own_ready => Self::Joined,
            phase => phase,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Phase::*;

    #[test]
    fn ready_before_joined_and_left_for_good() {
        assert_eq!(Waiting.next(false, false), Waiting);
        assert_eq!(Waiting.next(true, false), Joined);
        assert_eq!(Joined.next(false, false), Joined, "an unready instance: clients are held");
        assert_eq!(Waiting.next(true, true), Left, "whoever stops does not join");
        assert_eq!(Joined.next(true, true), Left);
        assert_eq!(Left.next(true, false), Left);
    }
}
