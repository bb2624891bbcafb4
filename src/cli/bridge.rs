//! `berth bridge`.

use berth_node::terms::Speedup;
use berth_operate::bridge::etcd::EtcdMode;
use berth_operate::bridge::machine::OnFailure;
use berth_options::probe::ProbeArgs;
use berth_upgrade::judge::Signal;
use clap::{Args, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

pub(super) const BRIDGE_STATUS: &str = "Exit status: that of COMMAND, and 128 and the number of a signal that ended it. 75 the node's own \
    kube-apiserver did not come back: clients stay on the bridge, or it was lost. 64 wrong command line, 69 something that is needed is missing, \
    or the temporary kube-apiserver did not get ready: COMMAND was not run.";

/// Arguments of `berth bridge`.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BridgeArgs {
    /// A step of a bridge that takes several commands; without one, the bridge is there while COMMAND runs.
    #[command(subcommand)]
    pub action: Option<BridgeAction>,
    #[command(flatten)]
    pub start: BridgeStartArgs,
    /// What replaces or restarts the node's kube-apiserver
    #[arg(last = true, value_name = "COMMAND", num_args = 1..)]
    pub run: Vec<OsString>,
}

/// Parts of a bridge's life.
#[derive(Debug, Clone, Subcommand)]
pub enum BridgeAction {
    /// Build a bridge, and leave it when the node's own kube-apiserver may be replaced
    Start(Box<BridgeStartArgs>),
    /// Print the bridge's status
    Status(BridgeDirArgs),
    /// Restore the manifest and files of the node's own kube-apiserver, and end the bridge when that is ready
    Restore(BridgeRestoreArgs),
    /// End the bridge when the node's own kube-apiserver is ready
    End(BridgeEndArgs),
}

/// The bridge's directory, and the output format.
#[derive(Debug, Clone, Args)]
pub struct BridgeDirArgs {
    /// Directory for the bridge's socket, logs and copies of keys
    #[arg(long, env = "BERTH_BRIDGE_STATE_DIR", default_value = berth_operate::bridge::DIRECTORY, value_name = "DIR")]
    pub state_dir: PathBuf,
    /// Print JSON: the bridge's status, a line at each change, on standard error (of `status` and --dry-run on standard output)
    #[arg(long, env = "BERTH_BRIDGE_JSON")]
    pub json: bool,
}

/// How a bridge is built.
#[derive(Debug, Clone, Args)]
pub struct BridgeStartArgs {
    /// The static pod's manifest
    #[arg(
        long,
        env = "BERTH_MANIFEST",
        default_value = berth_operate::bridge::pod::MANIFEST,
        value_name = "FILE",
        conflicts_with = "command"
    )]
    pub manifest: PathBuf,
    /// The command line of the kube-apiserver that runs on this node, if it is in no pod; its words are separated as by a shell
    #[arg(long, env = "BERTH_BRIDGE_COMMAND", value_name = "COMMAND LINE")]
    pub command: Option<String>,
    /// Port on loopback of the temporary kube-apiserver and of its shim [default: a free one]
    #[arg(long, env = "BERTH_BRIDGE_PORT", value_name = "PORT")]
    pub port: Option<String>,
    /// How long either kube-apiserver may take to get ready
    #[arg(long, env = "BERTH_READY_TIMEOUT", default_value = "5m", value_name = "DURATION")]
    pub ready_timeout: String,
    /// How long each must then stay ready before clients are given to it: a round of its watch cache's bookmarks and a little, so
    /// that watches go on in it
    #[arg(long, env = "BERTH_SETTLE", default_value = "75s", value_name = "DURATION")]
    pub settle: String,
    /// What happens when COMMAND fails, or the node's own kube-apiserver does not come back
    #[arg(long, env = "BERTH_BRIDGE_ON_FAILURE", default_value = "stay", value_name = "WHAT", value_enum)]
    pub on_failure: OnFailure,
    /// Which etcd the temporary kube-apiserver uses, where one of its members is on this node
    #[arg(long, env = "BERTH_BRIDGE_ETCD", default_value = "auto", value_name = "WHICH", value_enum)]
    pub etcd: EtcdMode,
    /// Keeps the Service `kubernetes` whole while COMMAND restarts kube-apiserver, as an admin
    /// [default: /etc/kubernetes/admin.conf, if it is there]
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Serve /metrics, /livez, /readyz and /status of the bridge by HTTP here [default: off]
    #[arg(long, env = "BERTH_BRIDGE_ADMIN", value_name = "ADDR:PORT")]
    pub admin: Option<String>,
    /// Check what is needed, print the steps, and do nothing; COMMAND may be left out
    #[arg(long, env = "BERTH_DRY_RUN")]
    pub dry_run: bool,
    /// Divide the times that no option sets
    #[arg(long, hide = true, default_value_t)]
    pub speedup: Speedup,
    #[command(flatten)]
    pub dir: BridgeDirArgs,
    #[command(flatten)]
    pub probe: ProbeArgs,
}

/// Options of `berth bridge restore`.
#[derive(Debug, Clone, Args)]
pub struct BridgeRestoreArgs {
    #[command(flatten)]
    pub dir: BridgeDirArgs,
    /// Show the difference, and do nothing
    #[arg(long, env = "BERTH_DRY_RUN")]
    pub dry_run: bool,
}

/// Options of `berth bridge end`.
#[derive(Debug, Clone, Args)]
pub struct BridgeEndArgs {
    #[command(flatten)]
    pub dir: BridgeDirArgs,
    /// Where there is no bridge on this node: removes what one that was killed left in the Service `kubernetes`, as an admin
    /// [default: /etc/kubernetes/admin.conf, if it is there]
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Do not wait for the node's own kube-apiserver: without one, clients are refused
    #[arg(long, env = "BERTH_BRIDGE_NOW")]
    pub now: bool,
}
