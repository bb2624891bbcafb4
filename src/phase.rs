//! The states of a shim. What brings it from one to the next is decided in
//! [`crate::handover::machine`].

use serde::{Deserialize, Serialize};

/// Where a shim is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its ports are bound and do not listen: its own instance was not ready yet. It holds guards, and
    /// accepts from orphans.
    #[default]
    Waiting,
    /// It listens.
    Joined,
    /// It listens no more and lets its connections end; it holds guards until it exits.
    Left,
    /// Nothing was reachable for longer than `--hold`: clients are refused at once.
    Dry,
}

impl Phase {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Waiting, Self::Joined, Self::Left, Self::Dry];

    /// The word for log and status.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Joined => "joined",
            Self::Left => "left",
            Self::Dry => "dry",
        }
    }
}
