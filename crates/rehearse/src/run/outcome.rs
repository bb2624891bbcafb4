//! The outcome of a rehearsal.

use super::processes::Error;
use crate::config::Via;
use crate::record::data::Run;

/// The outcome of a rehearsal.
#[derive(Debug, Default)]
pub struct Rehearsed {
    /// Runs, one for each way, in the order of [`Plan::runs`](crate::config::Plan::runs).
    pub runs: Vec<Run>,
    /// Ways with an aborted run, and the reason.
    pub failed: Vec<(Via, String)>,
    /// Why the rehearsal was aborted. The runs contain the data gathered until then. `None` if the
    /// rehearsal was completed.
    pub aborted: Option<Aborted>,
}

/// Why a rehearsal was aborted.
#[derive(Debug, thiserror::Error)]
pub enum Aborted {
    /// The rehearsal got the signal with this number.
    #[error("the rehearsal was aborted by {}; nothing can be concluded from it", signal_name(*.0))]
    Signal(i32),
    /// A bug in berth.
    #[error(
        "the rehearsal panicked: {0}; nothing can be concluded from it (please report the line)"
    )]
    Panicked(String),
    /// A prerequisite was missing, or an instance misbehaved.
    #[error(transparent)]
    Failed(#[from] Error),
}

fn signal_name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal)
        .map_or_else(|_| format!("signal {signal}"), |s| s.to_string())
}
