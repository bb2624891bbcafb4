//! Options of the commands that run in a pod: clap types and help texts, one file per group, and
//! their checks ([`check`]). The command line uses them, and doctor reads them from the containers
//! of a manifest.
//!
//! The clap types keep the text of each value. [`check`] parses the text, so that every mistake of
//! a command line is reported at once and not one per try.

#![forbid(unsafe_code)]

pub mod ask;
pub mod check;
pub mod cluster;
pub mod exec;
pub mod log;
pub mod mistakes;
pub mod place;
pub mod probe;
pub mod shim;

use ask::{DrainArgs, LiveArgs, ReadyArgs};
use clap::{Parser, Subcommand};
use exec::{CopySelfArgs, ExecArgs};
use log::LogArgs;
use shim::{RunArgs, ServeArgs};

/// A command line in a pod.
#[derive(Debug, Parser)]
#[command(name = "berth")]
pub struct InPod {
    /// Options for the format and the level of the log.
    #[command(flatten)]
    pub log: LogArgs,
    #[command(subcommand)]
    pub command: PodCommand,
}

/// The subcommands that run in a pod.
#[derive(Debug, Subcommand)]
pub enum PodCommand {
    /// Share the secure port and relay to one kube-apiserver (the shim, as a sidecar)
    Serve(Box<ServeArgs>),
    /// Give a kube-apiserver its own 127.x address and become it (the main container)
    Exec(ExecArgs),
    /// `exec` and `serve` in one: start a kube-apiserver and relay to it (bare metal, rehearsals)
    Run(Box<RunArgs>),
    /// Exit 0 if the instance is ready and its shim listens (readiness probe)
    Ready(ReadyArgs),
    /// Exit 0 if the instance answers /livez (liveness probe)
    Live(Box<LiveArgs>),
    /// Take a shim off the port now and let its connections end (preStop hook)
    Drain(DrainArgs),
    /// Copy this program to a path, and make the run directory (init container)
    CopySelf(CopySelfArgs),
}
