//! The state that the parts of a shim share.

use crate::backend::Table;
use crate::cluster::Cluster;
use crate::config::Config;
use crate::direct::{Direct, Turn};
use crate::drain::Stop;
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::share::Sharing;
use berth_node::instance::InstanceId;
use berth_node::registry::BerthDir;
use berth_node::terms::Phase;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::{Notify, watch};

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
    /// A sibling is there that stays when this shim goes.
    pub(crate) has_successor: bool,
    /// The siblings that live and have no connection to this shim.
    pub(crate) unconnected: Vec<InstanceId>,
    /// Which shim steers new connections to the instance.
    pub(crate) turn: Turn,
}

impl Default for ShimState {
    fn default() -> Self {
        Self {
            phase: Phase::Waiting,
            since: SystemTime::now(),
            stop: Stop::No,
            blocked: false,
            has_successor: false,
            unconnected: Vec::new(),
            turn: Turn::NoShim("not joined yet"),
        }
    }
}

impl ShimState {
    /// The shim leaves: from the request on, not from when siblings took over.
    pub(crate) fn is_leaving(&self) -> bool {
        self.stop != Stop::No
    }
}

/// A duplicate is the same.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    /// With the addresses that are bound, where the kernel chose a port.
    pub(crate) config: Arc<Config>,
    pub(crate) instance: InstanceId,
    pub(crate) berth: BerthDir,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) table: watch::Receiver<Arc<Table>>,
    /// Changed by [`Self::update`].
    pub(crate) state: watch::Sender<ShimState>,
    pub(crate) cluster: Cluster,
    /// Limits TLS handshakes in flight, unless that is off.
    pub(crate) gate: Option<Arc<Gate>>,
    /// The direct path, if there is one.
    pub(crate) direct: Option<Arc<Direct>>,
    pub(crate) share: Arc<Sharing>,
    /// Notified when a connection ends.
    pub(crate) ended: Arc<Notify>,
}

impl Shared {
    /// Changes the state, notifies its receivers if the state is different now, and returns whether the state is different.
    pub(crate) fn update(&self, change: impl FnOnce(&mut ShimState)) -> bool {
        self.state.send_if_modified(|state| {
            let before = state.clone();
            change(state);
            *state != before
        })
    }

    pub(crate) fn stop(&self) -> Stop {
        self.state.borrow().stop
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.state.borrow().blocked
    }
}
