//! Options for the berth, the instance and the run directory.

use clap::Args;
use std::path::PathBuf;

/// A heading of help texts.
pub const ADDRESSES: &str = "Addresses";

/// The berth, its instance, and the run directory.
#[derive(Debug, Clone, Args)]
pub struct PlaceArgs {
    /// Public address of the apiserver, e.g. 10.0.0.5:6443; may be given several times, the first
    /// address names the berth. `,freebind` binds an address that the node does not have yet (a
    /// virtual IP). In the environment: separated by spaces
    #[arg(long, env = "BERTH_LISTEN", value_delimiter = ' ', value_name = "ADDR:PORT[,freebind]", help_heading = ADDRESSES)]
    pub listen: Vec<String>,
    /// Name of this instance in its berth, the same after a restart (in a pod: its UID) [default: a
    /// random name]
    #[arg(long, env = "BERTH_INSTANCE", value_name = "ID", help_heading = ADDRESSES)]
    pub instance: Option<String>,
    /// The run directory.
    #[command(flatten)]
    pub run_dir: RunDirArgs,
}

/// The run directory, where the shims of a node meet.
#[derive(Debug, Clone, Args)]
pub struct RunDirArgs {
    /// Directory where the shims of this node meet [default: /run/berth, or $XDG_RUNTIME_DIR/berth
    /// when not root]
    #[arg(long, env = "BERTH_RUN_DIR", value_name = "DIR", help_heading = ADDRESSES)]
    pub run_dir: Option<PathBuf>,
}
