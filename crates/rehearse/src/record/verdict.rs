//! What a run came to as a whole.
//!
//! **Lost** is a new connection that was refused, reset, or not answered within
//! 15 s of being dialled, or a stream that ended before its instance ended it.

use serde::{Deserialize, Serialize};

pub use crate::record::loss::Loss;

/// The instance that is replaced.
pub const OLD: &str = "old";

/// The instance that replaces it.
pub const NEW: &str = "new";

/// What a run came to. Each is worse than the one before it, and the worst that was seen counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing was lost beyond what promises allow, every promise was kept, and the run would have shown it otherwise.
    #[default]
    Held,
    /// Nothing can be concluded, as the run came to too little: nothing was seen that berth or an instance did wrong.
    Unproven,
    /// The same, and timers of the clients were so late that this machine was too busy to tell.
    TooBusy,
    /// Nothing was lost, and a process did not do what it should.
    Wrong,
    /// Nothing was lost beyond what promises allow, and a promise was broken.
    Broken,
    /// Something was lost.
    Lost,
}
