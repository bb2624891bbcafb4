//! Options of `berth exec` and `berth copy-self`.

use crate::place::PlaceArgs;
use crate::shim::pass_mode_parser;
use berth_shim::config::PassMode;
use clap::Args;
use std::path::PathBuf;

/// Options of `berth exec`.
#[derive(Debug, Clone, Args)]
pub struct ExecArgs {
    /// Options that name the berth, the instance and the run directory.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// How the shim passes clients to kube-apiserver. With auto and inject, this process stays as
    /// kube-apiserver's parent and gives it the sockets that the shim sends
    #[arg(long, env = "BERTH_PASS", default_value = "relay", value_name = "HOW", value_parser = pass_mode_parser())]
    pub pass: PassMode,
    /// Stay as kube-apiserver's parent, so that kube-apiserver gets one SIGTERM however berth run
    /// ends (for berth run)
    #[arg(long, hide = true)]
    pub stay: bool,
    /// Command of kube-apiserver; {instance} in its arguments becomes the instance's ID
    #[arg(last = true, required = true, value_name = "COMMAND", num_args = 1..)]
    pub command: Vec<std::ffi::OsString>,
}

/// Options of `berth copy-self`.
#[derive(Debug, Clone, Args)]
pub struct CopySelfArgs {
    /// Path of the copy
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Create also this directory, with mode 0700, if it does not exist
    #[arg(long, env = "BERTH_RUN_DIR", value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Owner (uid) of the run directory [default: the uid of this process]
    #[arg(long, env = "BERTH_OWNER", value_name = "UID", requires = "run_dir")]
    pub owner: Option<u32>,
}
