//! `berth exec` and `berth copy-self`.

use crate::place::PlaceArgs;
use crate::shim::pass_modes;
use berth_shim::config::PassMode;
use clap::Args;
use std::path::PathBuf;

/// Options of `berth exec`.
#[derive(Debug, Clone, Args)]
pub struct ExecArgs {
    /// Which berth and which instance.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// How clients come to the apiserver: with auto and inject, this process stays as its parent and gives it the sockets that
    /// its shim sends
    #[arg(long, env = "BERTH_PASS", default_value = "relay", value_name = "HOW", value_parser = pass_modes())]
    pub pass: PassMode,
    /// Stay as the apiserver's parent, so that it gets one SIGTERM however berth run ends: for berth run
    #[arg(long, hide = true)]
    pub stay: bool,
    /// The apiserver's command; {instance} in its arguments becomes the instance's ID
    #[arg(last = true, required = true, value_name = "COMMAND", num_args = 1..)]
    pub command: Vec<std::ffi::OsString>,
}

/// Options of `berth copy-self`.
#[derive(Debug, Clone, Args)]
pub struct CopySelfArgs {
    /// Where the copy shall be
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Make this directory too if it is not there, with mode 0700
    #[arg(long, env = "BERTH_RUN_DIR", value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Uid that the run directory shall belong to [default: this process's]
    #[arg(long, env = "BERTH_OWNER", value_name = "UID", requires = "run_dir")]
    pub owner: Option<u32>,
}
