//! `berth bridge`.

use super::{parse_duration, parse_seconds};
use berth_bridge::DIRECTORY;
use berth_bridge::etcd::EtcdMode;
use berth_bridge::machine::OnFailure;
use berth_bridge::plan::ServerName;
use berth_bridge::pod::MANIFEST;
use berth_node::terms::Speedup;
use berth_options::probe::DEFAULT_NAME;
use clap::{Args, Subcommand};
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

pub(super) const BRIDGE_STATUS: &str = "Exit status: COMMAND's own, or 128 plus the number of the signal that ended COMMAND. 75 the node's \
    kube-apiserver did not come back: clients stay on the bridge, or the bridge was lost. 64 wrong command line. 69 a requirement is missing, \
    or the temporary kube-apiserver did not get ready: COMMAND was not run. docs/something-went-wrong.md says what to do then.";

/// Arguments of `berth bridge`.
#[derive(Debug, Clone, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BridgeArgs {
    /// A step of a bridge for several commands; without a step, the bridge lasts while COMMAND
    /// runs.
    #[command(subcommand)]
    pub action: Option<BridgeAction>,
    #[command(flatten)]
    pub start: BridgeStartArgs,
    /// Command that replaces or restarts the node's kube-apiserver
    #[arg(last = true, value_name = "COMMAND", num_args = 1..)]
    pub run: Vec<OsString>,
}

/// Steps of a bridge that lasts for several commands.
#[derive(Debug, Clone, Subcommand)]
pub enum BridgeAction {
    /// Build a bridge, and return when the node's kube-apiserver may be replaced
    Start(Box<BridgeStartArgs>),
    /// Print the bridge's status
    Status(BridgeDirArgs),
    /// Restore the manifest and files of the node's kube-apiserver, wait until it is ready, and end
    /// the bridge
    Restore(BridgeRestoreArgs),
    /// Wait until the node's kube-apiserver is ready, and end the bridge
    End(BridgeEndArgs),
}

/// The bridge's directory, and the output format.
#[derive(Debug, Clone, Args)]
pub struct BridgeDirArgs {
    /// Directory for the bridge's socket, logs and copies of keys
    #[arg(long, hide = true, env = "BERTH_BRIDGE_STATE_DIR", default_value = DIRECTORY, value_parser = make_absolute)]
    pub state_dir: PathBuf,
    /// Print JSON: the bridge's status at each change, one line each, to standard error (`status`
    /// and --dry-run: to standard output)
    #[arg(long)]
    pub json: bool,
}

/// How a bridge is built.
#[derive(Debug, Clone, Args)]
pub struct BridgeStartArgs {
    /// Manifest of the static pod
    #[arg(
        long,
        env = "BERTH_MANIFEST",
        default_value = MANIFEST,
        value_name = "FILE",
        value_parser = make_absolute,
        conflicts_with = "command"
    )]
    pub manifest: PathBuf,
    /// Command line of this node's kube-apiserver if it does not run in a pod; words are separated
    /// as in a shell
    #[arg(long, value_name = "COMMAND LINE", value_parser = parse_words)]
    pub command: Option<Words>,
    /// Time in which the temporary kube-apiserver, and later the node's kube-apiserver, must get
    /// ready
    #[arg(long, env = "BERTH_READY_TIMEOUT", default_value = "5m", value_name = "DURATION", value_parser = parse_seconds)]
    pub ready_timeout: Duration,
    /// Time for which a kube-apiserver must then stay ready before it gets clients: a little more
    /// than the interval of its watch cache's bookmarks, so that watches resume without a new list
    #[arg(long, env = "BERTH_SETTLE", default_value = "75s", value_name = "DURATION", value_parser = parse_duration)]
    pub settle: Duration,
    /// Reaction if COMMAND fails or the node's kube-apiserver does not come back
    #[arg(long, default_value = "stay", value_name = "WHAT", value_enum)]
    pub on_failure: OnFailure,
    /// Etcd of the temporary kube-apiserver, if an etcd member runs on this node
    #[arg(
        long,
        env = "BERTH_BRIDGE_ETCD",
        default_value = "auto",
        value_name = "WHICH",
        value_enum
    )]
    pub etcd: EtcdMode,
    /// Administrator's kubeconfig, to keep the node's address in the Service `kubernetes` while
    /// COMMAND restarts kube-apiserver [default: /etc/kubernetes/admin.conf, if that file exists]
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// PEM file with the CAs that verify kube-apiserver's certificate [default: --client-ca-file of
    /// kube-apiserver, if that file is in the directory of kube-apiserver's certificate]
    #[arg(long, env = "BERTH_PROBE_CA", value_name = "FILE", value_parser = make_absolute)]
    pub probe_ca: Option<PathBuf>,
    /// PEM file with the probe's client certificate, for a kube-apiserver without anonymous access
    #[arg(long, env = "BERTH_PROBE_CERT", value_name = "FILE", value_parser = make_absolute, requires = "probe_key")]
    pub probe_cert: Option<PathBuf>,
    /// PEM file with the key of --probe-cert
    #[arg(long, env = "BERTH_PROBE_KEY", value_name = "FILE", value_parser = make_absolute, requires = "probe_cert")]
    pub probe_key: Option<PathBuf>,
    /// Name that kube-apiserver's certificate must carry
    #[arg(long, env = "BERTH_PROBE_SERVER_NAME", default_value = DEFAULT_NAME, value_name = "NAME", value_parser = parse_server_name)]
    pub probe_server_name: ServerName<'static>,
    /// Time limit for the answer to a probe
    #[arg(long, hide = true, default_value = "2s", value_parser = parse_duration)]
    pub probe_timeout: Duration,
    /// Check the requirements, print the steps, and do nothing; COMMAND may be left out
    #[arg(long)]
    pub dry_run: bool,
    /// Divide the times that no option sets
    #[arg(long, hide = true, default_value_t)]
    pub speedup: Speedup,
    #[command(flatten)]
    pub dir: BridgeDirArgs,
}

/// The words of a command line, split as a shell splits them.
#[derive(Debug, Clone)]
pub struct Words(pub Vec<OsString>);

fn parse_words(text: &str) -> Result<Words, shell_words::ParseError> {
    Ok(Words(
        shell_words::split(text)?
            .into_iter()
            .map(OsString::from)
            .collect(),
    ))
}

/// Makes a path absolute: the bridge, which becomes a daemon, has another working directory.
fn make_absolute(path: &str) -> io::Result<PathBuf> {
    std::path::absolute(path)
}

fn parse_server_name(text: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(text.to_owned())
        .map_err(|_| "give a DNS name or IP address from the certificate".into())
}

/// Options of `berth bridge restore`.
#[derive(Debug, Clone, Args)]
pub struct BridgeRestoreArgs {
    #[command(flatten)]
    pub dir: BridgeDirArgs,
    /// Show the difference, and do nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Options of `berth bridge end`.
#[derive(Debug, Clone, Args)]
pub struct BridgeEndArgs {
    #[command(flatten)]
    pub dir: BridgeDirArgs,
    /// Administrator's kubeconfig. If no bridge is on this node, the entries that a killed bridge
    /// left in the Service `kubernetes` are removed [default: /etc/kubernetes/admin.conf, if that
    /// file exists]
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Do not wait for the node's kube-apiserver; clients are refused if it is not ready
    #[arg(long)]
    pub now: bool,
}
