//! Options that say where an instance belongs: the berth, the instance's name and the run
//! directory.

use clap::Args;
use std::path::PathBuf;

/// The heading under which help texts list these options.
pub const ADDRESSES_HEADING: &str = "Addresses";

/// Options for the berth, the instance's name and the run directory.
#[derive(Debug, Clone, Args)]
pub struct PlaceArgs {
    /// Public address of kube-apiserver, e.g. 10.0.0.5:6443; may be given several times, the first
    /// address names the berth. `,freebind` binds an address that the node does not have yet (a
    /// virtual IP). In the environment: separated by spaces
    #[arg(long, env = "BERTH_LISTEN", value_delimiter = ' ', value_name = "ADDR:PORT[,freebind]", help_heading = ADDRESSES_HEADING)]
    pub listen: Vec<String>,
    /// Name of this instance in its berth, the same after a restart (in a pod: the pod's UID)
    /// [default: a random name]
    #[arg(long, env = "BERTH_INSTANCE", value_name = "ID", help_heading = ADDRESSES_HEADING)]
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
    #[arg(long, env = "BERTH_RUN_DIR", value_name = "DIR", help_heading = ADDRESSES_HEADING)]
    pub run_dir: Option<PathBuf>,
}
