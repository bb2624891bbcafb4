//! `berth status`.

use berth_options::place::RunDirArgs;
use clap::Args;

/// Options of `berth status`.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// The node's run directory.
    #[command(flatten)]
    pub run_dir: RunDirArgs,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}
