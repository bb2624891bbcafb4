//! Settings that the processes of a rehearsal need.

use crate::testbed::certs::Certs;
use berth_node::terms::Speedup;
use berth_shim::config::PassMode;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Name of a bridge's directory in the directory of a run.
pub(crate) const BRIDGE_DIRECTORY: &str = "bridge";

/// Settings that the processes need.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Directory of the rehearsal's files.
    pub(crate) dir: PathBuf,
    pub(crate) address: SocketAddr,
    /// The berth program of the shims.
    pub(crate) berth: PathBuf,
    pub(crate) certs: Arc<Certs>,
    /// Value of `--etcd-servers` for real apiservers.
    pub(crate) etcd: Option<String>,
    /// True if the shims' probes show a certificate, because an apiserver (possibly) rejects
    /// clients without one.
    pub(crate) probe_with_certificate: bool,
    /// The shims' and instances' `--pass`.
    pub(crate) pass: PassMode,
    /// The shims' and bridges' `--speedup`.
    pub(crate) speedup: Speedup,
    /// The libfaketime library, which makes the shims' clock jump.
    pub(crate) faketime: Option<PathBuf>,
}

impl Settings {
    /// Socket of the simulated apiservers' store.
    pub(crate) fn store_path(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Run directory of the shims.
    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    /// Directory of a bridge's socket and logs.
    pub(crate) fn bridge_directory(&self) -> PathBuf {
        self.dir.join(BRIDGE_DIRECTORY)
    }

    /// Run directory of the bridge's shim.
    pub(crate) fn bridge_run_dir(&self) -> PathBuf {
        self.bridge_directory().join("bridge-shim")
    }
    /// File from which libfaketime reads the offset of the clock.
    pub(crate) fn clock_file(&self) -> PathBuf {
        self.dir.join("clock")
    }

    /// Returns environment variables that make a shim read its wall clock's offset from a file. The
    /// monotonic clock stays the kernel's.
    pub(crate) fn fake_time_variables(&self) -> Vec<(&'static str, PathBuf)> {
        let Some(library) = &self.faketime else {
            return Vec::new();
        };
        vec![
            ("LD_PRELOAD", library.clone()),
            ("FAKETIME_TIMESTAMP_FILE", self.clock_file()),
            ("FAKETIME_NO_CACHE", "1".into()),
            ("DONT_FAKE_MONOTONIC", "1".into()),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ]
    }
}
