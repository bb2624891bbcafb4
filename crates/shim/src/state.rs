//! The state that changes in the life of a shim.

use berth_node::instance_id::InstanceId;
use berth_node::terms::Phase;
use std::time::SystemTime;

/// A request to stop, from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// Serve.
    No,
    /// Leave, let connections end, and stay.
    Leave,
    /// Leave, let connections end, and exit.
    Drain,
    /// Exit at once.
    Now,
}

/// State of a shim that changes during its life: its phase, and requests to stop.
#[derive(Debug, Clone, PartialEq)]
pub struct ShimState {
    /// The phase of the shim's life.
    pub phase: Phase,
    /// When the phase began.
    pub since: SystemTime,
    /// The last request to stop, by a signal or through the shim's socket.
    pub stop: Stop,
    /// True if a worker does not respond: a sibling should take the connections.
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
    /// True if the shim leaves: from the request on, not from the siblings' takeover on.
    pub(crate) fn is_leaving(&self) -> bool {
        self.stop != Stop::No
    }
}
