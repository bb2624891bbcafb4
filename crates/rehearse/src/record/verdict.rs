//! The verdict of a run.
//!
//! **Lost** is a new connection that was refused, reset, or not answered within 15 s of being
//! dialled, or a stream that ended before its instance ended it.

use serde::{Deserialize, Serialize};

pub use crate::record::loss::Loss;

/// Name of the old instance.
pub const OLD: &str = "old";

/// Name of the new instance.
pub const NEW: &str = "new";

/// The verdict of a run, from best to worst. The worst observation decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing was lost beyond what promises allow, every promise was kept, and the run would have
    /// shown a loss.
    #[default]
    Held,
    /// The run proves nothing because too little happened. No error of berth or an instance was
    /// seen.
    Unproven,
    /// The run proves nothing because timers of the clients were so late that the machine was too
    /// busy.
    TooBusy,
    /// Nothing was lost, but a process misbehaved.
    Wrong,
    /// Nothing was lost beyond what promises allow, but a promise was broken.
    Broken,
    /// Something was lost.
    Lost,
}
