//! Which berth, which instance, which directory.

use clap::Args;
use std::path::PathBuf;

/// A heading of help texts.
pub const ADDRESSES: &str = "Addresses";

/// Which berth, which instance of it, and where the shims meet.
#[derive(Debug, Clone, Args)]
pub struct PlaceArgs {
    /// Public address of the apiserver, e.g. 10.0.0.5:6443; may be given several times, the first
    /// names the berth. `,freebind` binds an address that is not there yet (a virtual IP). In the
    /// environment: separated by spaces
    #[arg(long, env = "BERTH_LISTEN", value_delimiter = ' ', value_name = "ADDR:PORT[,freebind]", help_heading = ADDRESSES)]
    pub listen: Vec<String>,
    /// Name of this instance among those of the berth, the same again after a restart (in a pod: its
    /// UID) [default: a random one]
    #[arg(long, env = "BERTH_INSTANCE", value_name = "ID", help_heading = ADDRESSES)]
    pub instance: Option<String>,
    /// Where the shims of this node meet.
    #[command(flatten)]
    pub run_dir: RunDirArgs,
}

/// Where the shims of this node meet.
#[derive(Debug, Clone, Args)]
pub struct RunDirArgs {
    /// Directory where the shims of this node meet [default: /run/berth, or $XDG_RUNTIME_DIR/berth
    /// when not root]
    #[arg(long, env = "BERTH_RUN_DIR", value_name = "DIR", help_heading = ADDRESSES)]
    pub run_dir: Option<PathBuf>,
}
