//! What the runs of a rehearsal came to.

use super::processes::Error;
use crate::config::Via;
use crate::record::data::Run;

/// All that a rehearsal came to.
#[derive(Debug, Default)]
pub struct Rehearsed {
    /// One a way, in the order of [`Plan::runs`].
    pub runs: Vec<Run>,
    /// The ways whose run did not come to its end, and why.
    pub failed: Vec<(Via, String)>,
    /// Why it did not come to its end; what is there was gathered before.
    pub aborted: Option<Aborted>,
}

/// Why a rehearsal did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum Aborted {
    /// A signal; its number.
    #[error("the rehearsal was aborted by {}; nothing can be concluded from it", name(*.0))]
    Signal(i32),
    /// A bug in berth.
    #[error("the rehearsal broke down: {0}; nothing can be concluded from it (please report this)")]
    Panicked(String),
    /// Something was not there, or an instance did not do what it should.
    #[error(transparent)]
    Failed(#[from] Error),
}

fn name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal)
        .map_or_else(|_| format!("signal {signal}"), |s| s.to_string())
}
