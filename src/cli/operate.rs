//! Options of `berth inject`, `berth eject`, `berth doctor` and `berth upgrade`.

use super::{parse_duration, parse_seconds};
use berth_manifest::report::Severity;
use berth_node::terms::Speedup;
use berth_options::place::ADDRESSES_HEADING;
use berth_options::probe::ProbeArgs;
use berth_options::shim::pass_mode_parser;
use berth_shim::config::PassMode;
use berth_upgrade::judge::{Signal, Undecided, parse_shares};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Options of `berth inject`.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("probe", |probe| probe.hide(true)), mut_arg("probe_timeout", |timeout| timeout.hide(true)))]
pub struct InjectArgs {
    /// The manifest, and the destination of the result.
    #[command(flatten)]
    pub file: ManifestArgs,
    /// Image with berth as its entrypoint; no such image is published
    #[arg(long, env = "BERTH_IMAGE", value_name = "IMAGE")]
    pub image: String,
    /// Write patches for `kubeadm … --patches DIR` into this directory, and leave the manifest
    /// alone
    #[arg(long, value_name = "DIR", conflicts_with_all = ["write", "diff"])]
    pub kubeadm_patch: Option<PathBuf>,
    /// Address where the shim listens; may be given several times, the first names the berth
    /// [default: the manifest's --bind-address or --advertise-address, else the node's address]
    #[arg(long, env = "BERTH_LISTEN", value_delimiter = ' ', value_name = "ADDR:PORT[,freebind]", help_heading = ADDRESSES_HEADING)]
    pub listen: Vec<String>,
    /// Run directory, on the node and in the containers
    #[arg(
        long,
        env = "BERTH_RUN_DIR",
        default_value = "/run/berth",
        value_name = "DIR",
        hide = true
    )]
    pub run_dir: String,
    /// Keep the Service `kubernetes` whole, with this kubeconfig, which `berth grant` wrote on the
    /// node [without a value: /etc/kubernetes/berth-cluster/kubeconfig]; the pods of a Deployment
    /// or DaemonSet use their service account instead
    #[arg(long, env = "BERTH_SERVICE", value_name = "KUBECONFIG", num_args = 0..=1, require_equals = true, default_missing_value = "/etc/kubernetes/berth-cluster/kubeconfig")]
    pub service: Option<String>,
    /// How the shim passes clients to kube-apiserver: it relays their bytes, or gives their sockets
    /// to kube-apiserver (docs/how-it-works.md)
    #[arg(long, env = "BERTH_PASS", default_value = "relay", value_name = "HOW", value_parser = pass_mode_parser())]
    pub pass: PassMode,
    /// Errors that --bridge ignores.
    #[command(flatten)]
    pub ignored: IgnoreErrorsArgs,
    /// How kube-apiserver is probed; paths are paths in its container. Without --probe-ca,
    /// kubeadm's CA is used.
    #[command(flatten)]
    pub probe: ProbeArgs,
}

/// Files that berth keeps on a node.
#[derive(Debug, Clone, Args)]
pub struct StateDirArgs {
    /// Directory of the original manifests and of the state of an upgrade
    #[arg(long, env = "BERTH_STATE_DIR", default_value = berth_upgrade::state::DEFAULT_DIRECTORY, value_name = "DIR")]
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

/// A manifest, and the destination of the result.
#[derive(Debug, Clone, Args)]
pub struct ManifestArgs {
    /// The manifest; `-` is standard input
    #[arg(
        default_value = "/etc/kubernetes/manifests/kube-apiserver.yaml",
        value_name = "FILE"
    )]
    pub path: PathBuf,
    /// Write the result into the file, not to standard output. The kubelet then restarts a static
    /// pod, and clients are refused until it is ready; --bridge prevents that
    #[arg(long)]
    pub write: bool,
    /// Write under `berth bridge` (Linux 5.9): a temporary kube-apiserver serves until the
    /// kube-apiserver of the new manifest is ready, and nothing is lost. Nothing is written if
    /// `berth doctor --node` finds an error
    #[arg(long, requires = "write")]
    pub bridge: bool,
    /// Print the changes instead of the whole result; nothing is written
    #[arg(long, conflicts_with = "write")]
    pub diff: bool,
    #[command(flatten)]
    pub state: StateDirArgs,
}

/// Checks of berth doctor that only warn.
#[derive(Debug, Clone, Args)]
pub struct IgnoreErrorsArgs {
    /// Continue despite errors of these checks of berth doctor, separated by commas; docs/doctor.md
    /// lists the checks
    #[arg(
        long,
        value_name = "CHECKS",
        value_delimiter = ',',
        value_parser = parse_check
    )]
    pub ignore_errors: Vec<String>,
}

fn parse_check(id: &str) -> Result<String, String> {
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

fn parse_finding(code: &str) -> Result<Signal, String> {
    code.parse()
        .map_err(|error: String| error.replacen("unknown variant", "unknown finding", 1))
}

/// Options of `berth doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// The manifest; `-` is standard input [default: kube-apiserver.yaml in --manifests-dir]
    #[arg(value_name = "FILE")]
    pub manifest: Option<PathBuf>,
    /// Check this node, too: the manifest is, or will be, a static pod of this node, like the
    /// manifests in the kubelet's directory
    #[arg(long)]
    pub node: bool,
    /// The kubelet's directory.
    #[command(flatten)]
    pub kubelet: KubeletArgs,
    #[command(flatten)]
    pub state: StateDirArgs,
    /// Check the cluster, too, with this kubeconfig: do all control-plane nodes have the same
    /// secure port?
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Errors to ignore.
    #[command(flatten)]
    pub ignored: IgnoreErrorsArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub(super) const UPGRADE_STATUS: &str = "Exit status: 0 done: the new instance serves, from kube-apiserver.yaml. 1 not done, or rolled \
    back: the old instance serves, from kube-apiserver.yaml. 64 wrong command line or manifest, 69 a requirement is \
    missing: nothing was changed. 75 neither result could be confirmed: instances that serve are left alone, the state is kept, \
    and the same command continues the upgrade; with --judge also a bad verdict: the old instance serves, or the new instance \
    serves and behaves as the old release.";

const JUDGE_HEADING: &str = "The judge";

/// Options of `berth upgrade`.
#[derive(Debug, Clone, Args)]
pub struct UpgradeArgs {
    /// The new manifest, which is behind berth and outside the kubelet's directory [default: the
    /// current manifest, for a rolling restart]
    #[arg(value_name = "FILE")]
    pub manifest: Option<PathBuf>,
    /// The kubelet's directory.
    #[command(flatten)]
    pub kubelet: KubeletArgs,
    /// Time in which an instance must get ready and join
    #[arg(long, env = "BERTH_READY_TIMEOUT", default_value = "5m", value_name = "DURATION", value_parser = parse_seconds)]
    pub ready_timeout: Duration,
    /// Time for which an instance must then stay ready before the other instance stops: a little
    /// more than the interval of its watch cache's bookmarks, so that watches resume without a new
    /// list
    #[arg(long, env = "BERTH_SETTLE", default_value = "75s", value_name = "DURATION", value_parser = parse_duration)]
    pub settle: Duration,
    /// An administrator's kubeconfig, for the cluster's lock and for the node's address in the
    /// Service `kubernetes` [default: /etc/kubernetes/admin.conf, if that file exists]
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Take the cluster's lock from a node that will never complete its upgrade
    #[arg(long)]
    pub break_lock: bool,
    /// Errors to ignore.
    #[command(flatten)]
    pub ignored: IgnoreErrorsArgs,
    /// How the new instance is judged.
    #[command(flatten)]
    pub judge: JudgeArgs,
    /// Print the steps, and do nothing
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub state: StateDirArgs,
    /// The kubelet's directory of container logs; the last lines of a log are shown when its
    /// container fails
    #[arg(
        long,
        env = "BERTH_POD_LOGS_DIR",
        default_value = "/var/log/pods",
        value_name = "DIR",
        hide = true
    )]
    pub pod_logs_dir: PathBuf,
}

/// How `berth upgrade` judges the new instance.
#[derive(Debug, Clone, Args)]
pub struct JudgeArgs {
    /// Give the new instance its clients in steps, compare the metrics of both instances, and roll
    /// back if the new instance is worse; needs a kubeconfig (docs/upgrade.md)
    #[arg(long, help_heading = JUDGE_HEADING)]
    pub judge: bool,
    /// Share of new connections for the new instance, one value a step
    #[arg(long, default_value = "5%,25%,50%", value_name = "PERCENTAGES", value_parser = parse_shares, requires = "judge", help_heading = JUDGE_HEADING)]
    pub canary: Parts,
    /// Duration of each step; after the steps the new instance gets all new connections for twice
    /// as long, while the old instance still runs
    #[arg(long, default_value = "60s", value_name = "DURATION", value_parser = parse_seconds, requires = "judge", help_heading = JUDGE_HEADING)]
    pub canary_time: Duration,
    /// Send clients on the node itself to the new instance, too. By default these clients stay on
    /// the old instance until the old instance stops, since kubelet and controller-manager must not
    /// depend on a server that is not judged
    #[arg(long, requires = "judge", help_heading = JUDGE_HEADING)]
    pub canary_local: bool,
    /// Start the new instance without --emulated-version; by default the new instance emulates the
    /// old release until the verdict
    #[arg(long, requires = "judge", help_heading = JUDGE_HEADING)]
    pub no_emulate: bool,
    /// Findings that do not make a verdict bad, separated by commas; docs/upgrade.md lists the
    /// findings
    #[arg(long, value_name = "CODES", value_delimiter = ',', value_parser = parse_finding, requires = "judge", help_heading = JUDGE_HEADING)]
    pub accept: Vec<Signal>,
    /// Reaction if there were too few requests to judge
    #[arg(long, default_value = "go-on", value_name = "WHAT", requires = "judge", help_heading = JUDGE_HEADING)]
    pub undecided: Undecided,
    /// If clients send too few requests to judge by, send some requests to both instances: lists,
    /// and writes without effect (dry run)
    #[arg(long, requires = "judge", help_heading = JUDGE_HEADING)]
    pub judge_requests: bool,
    /// Divide the times that no option sets
    #[arg(long, hide = true, default_value_t)]
    pub speedup: Speedup,
}

/// The new instance's share of new connections in each step, in thousandths.
type Parts = Vec<u16>;
