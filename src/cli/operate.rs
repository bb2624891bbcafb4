//! `berth inject`, `eject`, `doctor` and `upgrade`.

use super::{duration, seconds};
use berth_manifest::report::Severity;
use berth_node::terms::Speedup;
use berth_options::place::ADDRESSES;
use berth_options::probe::ProbeArgs;
use berth_options::shim::pass_modes;
use berth_shim::config::PassMode;
use berth_upgrade::judge::{Signal, Undecided, parts};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Options of `berth inject`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("probe", |probe| probe.hide(true)), mut_arg("probe_timeout", |timeout| timeout.hide(true)))]
pub struct InjectArgs {
    /// Which manifest, and where the result goes.
    #[command(flatten)]
    pub file: ManifestArgs,
    /// Image with berth as its entrypoint; there is no published one
    #[arg(long, env = "BERTH_IMAGE", value_name = "IMAGE")]
    pub image: String,
    /// Write patches for `kubeadm … --patches DIR` into this directory, and leave the manifest alone
    #[arg(long, value_name = "DIR", conflicts_with_all = ["write", "diff"])]
    pub kubeadm_patch: Option<PathBuf>,
    /// Where the shim listens; may be given several times, the first names the berth [default: the
    /// manifest's --bind-address or --advertise-address, else the node's address]
    #[arg(long, env = "BERTH_LISTEN", value_delimiter = ' ', value_name = "ADDR:PORT[,freebind]", help_heading = ADDRESSES)]
    pub listen: Vec<String>,
    /// Directory where the shims of a node meet, there and in the containers
    #[arg(
        long,
        env = "BERTH_RUN_DIR",
        default_value = "/run/berth",
        value_name = "DIR",
        hide = true
    )]
    pub run_dir: String,
    /// Keep the Service `kubernetes` whole: with this kubeconfig, which `berth grant` wrote on the node [/etc/kubernetes/berth-cluster/kubeconfig if
    /// none is named]; a Deployment or DaemonSet uses its service account
    #[arg(long, env = "BERTH_SERVICE", value_name = "KUBECONFIG", num_args = 0..=1, require_equals = true, default_missing_value = "/etc/kubernetes/berth-cluster/kubeconfig")]
    pub service: Option<String>,
    /// How clients come to the apiserver: their bytes are relayed, or their sockets become the apiserver's own (docs/pass.md)
    #[arg(long, env = "BERTH_PASS", default_value = "relay", value_name = "HOW", value_parser = pass_modes())]
    pub pass: PassMode,
    /// Which errors do not count, with --bridge.
    #[command(flatten)]
    pub excused: ExcusedArgs,
    /// How the apiserver is probed; paths are those in its container. Without --probe-ca, kubeadm's CA is used.
    #[command(flatten)]
    pub probe: ProbeArgs,
}

/// Files that berth keeps on a node.
#[derive(Debug, Clone, Args)]
pub struct KeptArgs {
    /// Where originals and the state of an upgrade are kept
    #[arg(long, env = "BERTH_STATE_DIR", default_value = berth_upgrade::state::DIRECTORY, value_name = "DIR")]
    pub state_dir: PathBuf,
}

/// The operator's credentials for the cluster.
#[derive(Debug, Clone, Args)]
pub struct AdminArgs {
    /// An administrator's kubeconfig for requests to the cluster; shims never see it
    #[arg(
        long,
        env = "BERTH_KUBECONFIG",
        default_value = "/etc/kubernetes/admin.conf",
        value_name = "FILE"
    )]
    pub kubeconfig: PathBuf,
}

/// The kubelet of this node.
#[derive(Debug, Clone, Args)]
pub struct KubeletArgs {
    /// The kubelet's directory of static pods, with kube-apiserver.yaml in it
    #[arg(
        long,
        env = "BERTH_MANIFESTS_DIR",
        default_value = "/etc/kubernetes/manifests",
        value_name = "DIR"
    )]
    pub manifests_dir: PathBuf,
}

/// A manifest, and where the result goes.
#[derive(Debug, Clone, Args)]
pub struct ManifestArgs {
    /// The manifest; `-` is standard input
    #[arg(
        default_value = "/etc/kubernetes/manifests/kube-apiserver.yaml",
        value_name = "FILE"
    )]
    pub path: PathBuf,
    /// Write the result into the file, not to standard output; the kubelet then restarts a static pod, and clients are refused until it
    /// is ready: --bridge prevents that
    #[arg(long)]
    pub write: bool,
    /// Write it under `berth bridge`, which needs Linux 5.9: a temporary kube-apiserver serves until the one of the new manifest does, and
    /// nothing is lost. Nothing is written if `berth doctor --node` finds an error
    #[arg(long, requires = "write")]
    pub bridge: bool,
    /// Print what changes, not the whole result; nothing is written
    #[arg(long, conflicts_with = "write")]
    pub diff: bool,
    #[command(flatten)]
    pub kept: KeptArgs,
}

/// Checks whose errors are warnings.
#[derive(Debug, Clone, Args)]
pub struct ExcusedArgs {
    /// Checks of berth doctor whose errors are warnings, separated by commas (docs/doctor.md names all)
    #[arg(
        long,
        value_name = "CHECKS",
        value_delimiter = ',',
        value_parser = check
    )]
    pub ignore_errors: Vec<String>,
}

fn check(id: &str) -> Result<String, String> {
    let errors = berth_doctor::CHECKS
        .iter()
        .filter(|check| check.severity == Severity::Error);
    let known: Vec<_> = errors.map(|check| format!("`{}`", check.id)).collect();
    match known.contains(&format!("`{id}`")) {
        true => Ok(id.to_owned()),
        false => Err(format!(
            "unknown check `{id}`, expected one of {}",
            known.join(", ")
        )),
    }
}

fn finding(code: &str) -> Result<Signal, String> {
    code.parse()
        .map_err(|error: String| error.replacen("unknown variant", "unknown finding", 1))
}

/// Options of `berth doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// The manifest; `-` is standard input [default: kube-apiserver.yaml in --manifests-dir]
    #[arg(value_name = "FILE")]
    pub manifest: Option<PathBuf>,
    /// Check this node too: the manifest is, or will be, of a static pod here, like the others in the
    /// kubelet's directory
    #[arg(long)]
    pub node: bool,
    /// Where the kubelet finds static pods.
    #[command(flatten)]
    pub kubelet: KubeletArgs,
    #[command(flatten)]
    pub kept: KeptArgs,
    /// Check the cluster too, with this kubeconfig: whether all control-plane nodes have one secure port
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Which errors do not count.
    #[command(flatten)]
    pub excused: ExcusedArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub(super) const UPGRADE_STATUS: &str = "Exit status: 0 done: the new one serves, from kube-apiserver.yaml. 1 not done, or rolled \
    back: the old one serves, from kube-apiserver.yaml. 64 wrong command line or manifest, 69 something that is needed \
    cannot be had: nothing was changed. 75 neither can be confirmed: what serves is left alone, its state is kept, and the \
    same command goes on from there; with --judge also a bad verdict: the old one serves, or the new one as the old release.";

const JUDGE: &str = "The judge";

/// Options of `berth upgrade`.
#[derive(Debug, Clone, Args)]
pub struct UpgradeArgs {
    /// The new manifest, behind berth, outside the kubelet's directory [default: the current one, for a
    /// rolling restart]
    #[arg(value_name = "FILE")]
    pub manifest: Option<PathBuf>,
    /// Where the kubelet finds static pods.
    #[command(flatten)]
    pub kubelet: KubeletArgs,
    /// How long an instance may take to get ready and join
    #[arg(long, env = "BERTH_READY_TIMEOUT", default_value = "5m", value_name = "DURATION", value_parser = seconds)]
    pub ready_timeout: Duration,
    /// How long an instance must then stay ready before the other one stops: one round of its watch cache's bookmarks and a
    /// margin, so that watches resume in it
    #[arg(long, env = "BERTH_SETTLE", default_value = "75s", value_name = "DURATION", value_parser = duration)]
    pub settle: Duration,
    /// An administrator's kubeconfig, for the cluster's lock and the node's address in the Service `kubernetes`
    /// [default: /etc/kubernetes/admin.conf, if it is there]
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Take the cluster's lock from the node that holds it and whose upgrade will not be completed
    #[arg(long)]
    pub break_lock: bool,
    /// Which errors do not count.
    #[command(flatten)]
    pub excused: ExcusedArgs,
    /// How the new one is judged.
    #[command(flatten)]
    pub judge: JudgeArgs,
    /// Print the steps, and do nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub kept: KeptArgs,
    /// The kubelet's directory of container logs, of which the last lines are shown when a container fails
    #[arg(
        long,
        env = "BERTH_POD_LOGS_DIR",
        default_value = "/var/log/pods",
        value_name = "DIR",
        hide = true
    )]
    pub pod_logs_dir: PathBuf,
}

/// How `berth upgrade` judges the new one.
#[derive(Debug, Clone, Args)]
pub struct JudgeArgs {
    /// Give the new one its clients in steps, judge it by the metrics of both, and go back by itself if it is bad; it needs a kubeconfig
    /// (docs/judge.md)
    #[arg(long, help_heading = JUDGE)]
    pub judge: bool,
    /// The new one's part of new connections, step by step
    #[arg(long, default_value = "5%,25%,50%", value_name = "PERCENTAGES", value_parser = parts, requires = "judge", help_heading = JUDGE)]
    pub canary: Parts,
    /// How long each of these steps takes; then the new one has all new connections for twice as long, while the old one still runs
    #[arg(long, default_value = "60s", value_name = "DURATION", value_parser = seconds, requires = "judge", help_heading = JUDGE)]
    pub canary_time: Duration,
    /// Clients on the node itself are in the steps, too; otherwise they stay on the old one until it goes, since kubelet and
    /// controller-manager must not depend on a server that is not judged
    #[arg(long, requires = "judge", help_heading = JUDGE)]
    pub canary_local: bool,
    /// Do not let the new one behave as the old one's release (--emulated-version) until it is judged
    #[arg(long, requires = "judge", help_heading = JUDGE)]
    pub no_emulate: bool,
    /// Findings that do not make a verdict bad, separated by commas (docs/judge.md names all)
    #[arg(long, value_name = "CODES", value_delimiter = ',', value_parser = finding, requires = "judge", help_heading = JUDGE)]
    pub accept: Vec<Signal>,
    /// What to do if there was not enough to judge
    #[arg(long, default_value = "go-on", value_name = "WHAT", requires = "judge", help_heading = JUDGE)]
    pub undecided: Undecided,
    /// Where clients send too few requests to judge by, send some to both: lists, and writes without effect (dry run)
    #[arg(long, requires = "judge", help_heading = JUDGE)]
    pub judge_requests: bool,
    /// Divide the times that no option sets
    #[arg(long, hide = true, default_value_t)]
    pub speedup: Speedup,
}

/// Parts of new connections, in thousandths.
type Parts = Vec<u16>;
