//! The state that the parts of a shim share.

use crate::backend::Table;
use crate::cluster::Cluster;
use crate::config::Config;
use crate::gate::Gate;
use crate::metrics::Metrics;
use crate::share::Sharing;
use crate::state::{ShimState, Stop};
use berth_node::instance_id::InstanceId;
use berth_node::registry::BerthDir;
use berth_os::off_thread::OffThread;
use std::sync::Arc;
use tokio::sync::{Notify, watch};

/// State that the parts of a shim share. Clones refer to the same state.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    /// The configuration, with the bound addresses where the kernel chose a port.
    pub(crate) config: Arc<Config>,
    pub(crate) instance: InstanceId,
    pub(crate) berth: BerthDir,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) table: watch::Receiver<Arc<Table>>,
    /// The shim's state, which only [`Self::update_state`] changes.
    pub(crate) state: watch::Sender<ShimState>,
    pub(crate) cluster: Cluster,
    /// Limits TLS handshakes in flight. `None` if the gate is off.
    pub(crate) gate: Option<Arc<Gate>>,
    pub(crate) share: Arc<Sharing>,
    /// Makes the calls in the run directory outside of the runtime, since they may block.
    pub(crate) run_dir: OffThread,
    /// Lists sockets and reads the process's figures outside of the runtime, since these calls may
    /// block: in a container, another process may serve the files in /proc.
    pub(crate) kernel: OffThread,
    /// Notified when a connection ends.
    pub(crate) ended: Arc<Notify>,
}

impl Shared {
    /// Changes the state, and notifies the receivers if the state differs. Returns true if the
    /// state differs.
    pub(crate) fn update_state(&self, change: impl FnOnce(&mut ShimState)) -> bool {
        self.state.send_if_modified(|state| {
            let before = state.clone();
            change(state);
            *state != before
        })
    }

    pub(crate) fn stop(&self) -> Stop {
        self.state.borrow().stop
    }

    pub(crate) fn is_worker_blocked(&self) -> bool {
        self.state.borrow().blocked
    }
}
