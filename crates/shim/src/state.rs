//! What changes in the life of a shim.

use berth_node::instance::InstanceId;
use berth_node::terms::Phase;
use std::time::SystemTime;

/// A request to stop, from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// Serve.
    No,
    /// Leave, let connections end, and stay.
    Leave,
    /// Leave, let connections end, then end.
    Drain,
    /// End at once.
    Now,
}

/// What changes in the life of a shim.
#[derive(Debug, Clone, PartialEq)]
pub struct ShimState {
    /// Where the shim is in its life.
    pub phase: Phase,
    /// When that phase began.
    pub since: SystemTime,
    /// The last request to stop, by a signal or through the shim's socket.
    pub stop: Stop,
    /// A worker gives no sign of life: better a sibling takes the connections.
    pub(crate) blocked: bool,
    /// The siblings that live and have no connection to this shim.
    pub(crate) unconnected: Vec<InstanceId>,
}

impl Default for ShimState {
    fn default() -> Self {
        Self {
            phase: Phase::Waiting,
            since: SystemTime::now(),
            stop: Stop::No,
            blocked: false,
            unconnected: Vec::new(),
        }
    }
}

impl ShimState {
    /// The shim leaves: from the request on, not from when siblings took over.
    pub(crate) fn is_leaving(&self) -> bool {
        self.stop != Stop::No
    }
}
