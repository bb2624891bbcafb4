//! What the processes of a rehearsal need to know of it.

use crate::testbed::certs::Certs;
use berth_node::terms::Speedup;
use berth_shim::config::PassMode;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

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
    /// The shims' and instances' `--pass`.
    pub(crate) pass: PassMode,
    /// The shims' and bridges' `--speedup`.
    pub(crate) speedup: Speedup,
    /// The library by which the shims' clock can jump.
    pub(crate) faketime: Option<PathBuf>,
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
    /// File in which libfaketime reads how far the clock is off.
    pub(crate) fn clock(&self) -> PathBuf {
        self.dir.join("clock")
    }

    /// Environment variables by which the wall clock of a shim is read from a file. Its monotonic clock stays the kernel's.
    pub(crate) fn fake_time(&self) -> Vec<(&'static str, PathBuf)> {
        let Some(library) = &self.faketime else {
            return Vec::new();
        };
        vec![
            ("LD_PRELOAD", library.clone()),
            ("FAKETIME_TIMESTAMP_FILE", self.clock()),
            ("FAKETIME_NO_CACHE", "1".into()),
            ("DONT_FAKE_MONOTONIC", "1".into()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ]
    }
}
