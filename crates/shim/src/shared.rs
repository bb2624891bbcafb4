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
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;
use tokio::sync::{Notify, watch};

/// A duplicate is the same.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    /// With the addresses that are bound, where the kernel chose a port.
    pub(crate) config: Arc<Config>,
    pub(crate) instance: InstanceId,
    pub(crate) berth: BerthDir,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) table: watch::Receiver<Arc<Table>>,
    /// Where the shim is in its life, and since when.
    pub(crate) phase: watch::Sender<(Phase, SystemTime)>,
    /// The last request to stop, by a signal or through its socket.
    pub(crate) stop: watch::Sender<Stop>,
    /// The siblings that live and have no connection to this shim.
    pub(crate) unconnected: watch::Sender<Vec<InstanceId>>,
    /// Whether connections that the own instance cannot serve are passed on.
    pub(crate) pass_on: Arc<AtomicBool>,
    /// Whether it is leaving: from the request on, not from when siblings took over.
    pub(crate) leaving: watch::Sender<bool>,
    /// Whether a sibling is there that stays when this shim goes.
    pub(crate) has_successor: Arc<AtomicBool>,
    pub(crate) cluster: Cluster,
    /// Limits TLS handshakes in flight, unless that is off.
    pub(crate) gate: Option<Arc<Gate>>,
    /// The direct path, if there is one.
    pub(crate) direct: Option<Arc<Direct>>,
    pub(crate) share: Arc<Sharing>,
    /// Which shim steers new connections to the instance.
    pub(crate) turn: watch::Sender<Turn>,
    /// Whether a worker gives no sign of life: better a sibling takes the connections.
    pub(crate) blocked: Arc<AtomicBool>,
    pub(crate) ended: Arc<Notify>,
}
