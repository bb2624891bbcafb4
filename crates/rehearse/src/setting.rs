//! What the processes of a rehearsal need to know of it.

use super::apiserver::Shutdown;
use super::certs::Certs;
use berth_node::terms::Speedup;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A bridge's directory, in that of a run.
pub(crate) const BRIDGE: &str = "bridge";

/// What the processes need to know.
#[derive(Debug, Clone)]
pub(crate) struct StageSetting {
    /// Directory of all that the rehearsal writes.
    pub(crate) dir: PathBuf,
    pub(crate) address: SocketAddr,
    /// The program that shims are processes of.
    pub(crate) berth: PathBuf,
    pub(crate) certs: Arc<Certs>,
    /// Value of `--etcd-servers` for real apiservers.
    pub(crate) etcd: Option<String>,
    /// The shims' probes show a certificate: an apiserver refuses, or may refuse, clients without one.
    pub(crate) probe_with_certificate: bool,
    /// kube-apiserver's flags for its shutdown.
    pub(crate) shutdown: Shutdown,
    /// The shims have a direct path.
    pub(crate) direct: bool,
    /// The shims' `--hold`.
    pub(crate) hold: Duration,
    /// The shims' and bridges' `--speedup`.
    pub(crate) speedup: Speedup,
}

impl StageSetting {
    /// Socket of the simulated apiservers' store.
    pub(crate) fn store(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Where shims meet.
    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    /// Where a bridge keeps its socket and logs.
    pub(crate) fn bridge(&self) -> PathBuf {
        self.dir.join(BRIDGE)
    }

    /// Where its shim is.
    pub(crate) fn bridge_run_dir(&self) -> PathBuf {
        self.bridge().join("bridge-shim")
    }
}
