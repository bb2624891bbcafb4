//! The command line: clap types and help texts, no logic.
//!
//! Values stay as they were typed; [`crate::config`] turns them into checked types, so that every
//! mistake of a command line is reported at once and not one per try.

use crate::backend::probe::ProbeKind;
#[cfg(feature = "rehearse")]
use crate::rehearse::plan::choice::{Topology, Via, fault_names};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Two kube-apiservers share one node and one secure port, so that an upgrade loses nothing.
#[derive(Debug, Parser)]
#[command(
    name = "berth",
    version,
    max_term_width = 100,
    propagate_version = true,
    after_help = "Exit status: 0 done, 1 no (not ready, something was lost), 64 wrong command line or \
                  configuration, 69 a port or file that is needed cannot be had, 70 a bug in berth, 75 (upgrade) neither done nor rolled \
                  back: run it again."
)]
pub struct Cli {
    /// Where the log goes and how much of it.
    #[command(flatten)]
    pub log: LogArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Share the secure port and relay to one apiserver (the shim, as a side-container)
    Serve(Box<ServeArgs>),
    /// Give an apiserver its own 127.x address and become it (the main container)
    Exec(ExecArgs),
    /// `exec` and `serve` in one: start an apiserver and relay to it (bare metal, rehearsals)
    Run(Box<RunArgs>),
    /// Exit 0 when the own apiserver is ready and its shim listens (readiness probe)
    Ready(ReadyArgs),
    /// Exit 0 when the own apiserver answers /livez (liveness probe)
    Live(Box<LiveArgs>),
    /// Take a shim off the port now and let its connections end (preStop hook)
    Drain(DrainArgs),
    /// Show the berths and apiservers on this node
    Status(StatusArgs),
    /// Put the kube-apiserver of a manifest behind berth
    #[cfg(feature = "manifest")]
    Inject(Box<InjectArgs>),
    /// Take berth out of a manifest again
    #[cfg(feature = "manifest")]
    Eject(EjectArgs),
    /// Say what stands between a kube-apiserver's manifest and an upgrade that loses nothing
    #[cfg(feature = "manifest")]
    Doctor(DoctorArgs),
    /// Upgrade or restart the kube-apiserver of a static pod, with nothing lost
    #[cfg(feature = "manifest")]
    #[command(after_help = UPGRADE_STATUS)]
    Upgrade(Box<UpgradeArgs>),
    /// Copy this program to a path, and make the run directory (init container)
    CopySelf(CopySelfArgs),
    /// Rehearse an upgrade under load on this machine, and say what it lost
    #[cfg(feature = "rehearse")]
    Rehearse(Box<RehearseArgs>),
    /// A small apiserver with kube-apiserver's flags and phases, for rehearsals and tests
    #[cfg(feature = "rehearse")]
    #[command(hide = true, disable_version_flag = true)]
    StandIn(StandInArgs),
    /// Write man pages or shell completions
    Generate(GenerateArgs),
}

const LOGGING: &str = "Logging";
const ADDRESSES: &str = "Addresses";
const PROBE: &str = "Probe";
const CONNECTIONS: &str = "Connections";
const OPERATION: &str = "Operation";

/// Logging options, valid with every subcommand.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// How log lines look; they go to standard error
    #[arg(long, global = true, env = "BERTH_LOG_FORMAT", hide_env_values = true, default_value = "text", value_name = "FORMAT", help_heading = LOGGING)]
    pub log_format: LogFormat,
    /// Least severity that is logged
    #[arg(long, global = true, env = "BERTH_LOG_LEVEL", hide_env_values = true, default_value = "info", value_name = "LEVEL", help_heading = LOGGING)]
    pub log_level: LogLevel,
}

/// Form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One readable line an event
    Text,
    /// One JSON object an event
    Json,
}

/// Least severity that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Only what needs somebody
    Error,
    /// And what may need somebody
    Warn,
    /// And the life cycle
    Info,
    /// And each connection
    Debug,
    /// And each step of it
    Trace,
}

/// Options of `berth serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Which berth and which instance.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Address of the apiserver; without it, the address that `berth exec` recorded is waited for
    #[arg(long, env = "BERTH_BACKEND", hide_env_values = true, value_name = "ADDR:PORT", help_heading = ADDRESSES)]
    pub backend: Option<String>,
    /// Serve every apiserver that `berth exec` records for this berth: one shim for a node, through all
    /// upgrades
    #[arg(long, env = "BERTH_DISCOVER", hide_env_values = true, conflicts_with = "backend", help_heading = ADDRESSES)]
    pub discover: bool,
    /// All that `berth run` has in common with `berth serve`.
    #[command(flatten)]
    pub shim: ShimArgs,
}

/// Options of `berth run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Which berth and which instance.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// All that `berth run` has in common with `berth serve`.
    #[command(flatten)]
    pub shim: ShimArgs,
    /// The apiserver's command; {instance} in its arguments becomes the instance's ID
    #[arg(last = true, required = true, value_name = "COMMAND", num_args = 1..)]
    pub command: Vec<std::ffi::OsString>,
}

/// Options of `berth exec`.
#[derive(Debug, Clone, Args)]
pub struct ExecArgs {
    /// Which berth and which instance.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Stay as the apiserver's parent, so that it gets one SIGTERM however berth run ends: what berth run asks for
    #[arg(long, hide = true)]
    pub stay: bool,
    /// The apiserver's command; {instance} in its arguments becomes the instance's ID
    #[arg(last = true, required = true, value_name = "COMMAND", num_args = 1..)]
    pub command: Vec<std::ffi::OsString>,
}

/// Which berth, which instance of it, and where the shims meet.
#[derive(Debug, Clone, Args)]
pub struct PlaceArgs {
    /// Public address of the apiserver, e.g. 10.0.0.5:6443; may be given several times, the first
    /// names the berth. `,freebind` binds an address that is not there yet (a virtual IP). In the
    /// environment: separated by spaces
    #[arg(long, env = "BERTH_LISTEN", hide_env_values = true, value_delimiter = ' ', value_name = "ADDR:PORT[,freebind]", help_heading = ADDRESSES)]
    pub listen: Vec<String>,
    /// Name of this instance among those of the berth, the same again after a restart (in a pod: its
    /// UID) [default: a random one]
    #[arg(long, env = "BERTH_INSTANCE", hide_env_values = true, value_name = "ID", help_heading = ADDRESSES)]
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
    #[arg(long, env = "BERTH_RUN_DIR", hide_env_values = true, value_name = "DIR", help_heading = ADDRESSES)]
    pub run_dir: Option<PathBuf>,
}

/// Options that `berth serve` and `berth run` share.
#[derive(Debug, Clone, Args)]
pub struct ShimArgs {
    /// How long a port that cannot be had is tried again before exit 69
    #[arg(long, env = "BERTH_BIND_WAIT", hide_env_values = true, default_value = "0s", value_name = "DURATION", help_heading = ADDRESSES)]
    pub bind_wait: String,
    /// How the apiserver is asked whether it is ready.
    #[command(flatten)]
    pub probe: ProbeArgs,
    /// What it is asked, how often, and how many answers in a row decide.
    #[command(flatten)]
    pub pace: PaceArgs,
    /// How long a client is kept waiting while no apiserver is ready
    #[arg(long, env = "BERTH_HOLD", hide_env_values = true, default_value = "8s", value_name = "DURATION", help_heading = CONNECTIONS)]
    pub hold: String,
    /// How long connections may go on after SIGTERM, counted from when the own apiserver stopped
    /// listening
    #[arg(long, env = "BERTH_DRAIN_TIMEOUT", hide_env_values = true, default_value = "60s", value_name = "DURATION", help_heading = CONNECTIONS)]
    pub drain_timeout: String,
    /// Most connections at once; further ones wait in the backlog [default: what the file limit
    /// allows]
    #[arg(long, env = "BERTH_MAX_CONNECTIONS", hide_env_values = true, value_name = "N", help_heading = CONNECTIONS)]
    pub max_connections: Option<String>,
    /// Length of the accept queue; the kernel caps it at net.core.somaxconn
    #[arg(long, env = "BERTH_BACKLOG", hide_env_values = true, default_value = "4096", value_name = "N", help_heading = CONNECTIONS)]
    pub backlog: String,
    /// Idle time after which TCP asks whether the peer is still there; 0s: never
    #[arg(long, env = "BERTH_KEEPALIVE_IDLE", hide_env_values = true, default_value = "30s", value_name = "DURATION", help_heading = CONNECTIONS)]
    pub keepalive_idle: String,
    /// Time between two such questions
    #[arg(long, env = "BERTH_KEEPALIVE_INTERVAL", hide_env_values = true, default_value = "10s", value_name = "DURATION", help_heading = CONNECTIONS)]
    pub keepalive_interval: String,
    /// Unanswered questions after which the peer is gone
    #[arg(long, env = "BERTH_KEEPALIVE_PROBES", hide_env_values = true, default_value = "3", value_name = "N", help_heading = CONNECTIONS)]
    pub keepalive_probes: String,
    /// TCP_USER_TIMEOUT; 0s: off. It also cuts readers that pause for that long (`kubectl logs -f |
    /// less`)
    #[arg(long, env = "BERTH_USER_TIMEOUT", hide_env_values = true, default_value = "0s", value_name = "DURATION", help_heading = CONNECTIONS)]
    pub user_timeout: String,
    /// How long siblings wait for a sign of life of this shim before they accept from its listeners; at most a day
    #[arg(long, env = "BERTH_LEASE", hide_env_values = true, default_value = "3s", value_name = "DURATION", help_heading = CONNECTIONS)]
    pub lease: String,
    /// Close listeners with what is queued in them: what the tests compare with
    #[arg(long, hide = true)]
    pub plain_close: bool,
    /// Threads that relay [default: one per core, at most 8]
    #[arg(long, env = "BERTH_THREADS", hide_env_values = true, value_name = "N", help_heading = CONNECTIONS)]
    pub threads: Option<String>,
    /// Serve /metrics, /livez, /readyz and /status by HTTP here; may be shared by several shims
    /// [default: off]
    #[arg(long, env = "BERTH_ADMIN", hide_env_values = true, value_name = "ADDR:PORT", help_heading = OPERATION)]
    pub admin: Option<String>,
    /// Log the end of each connection at info instead of debug
    #[arg(long, env = "BERTH_LOG_CONNECTIONS", hide_env_values = true, help_heading = OPERATION)]
    pub log_connections: bool,
}

/// How the apiserver is asked.
#[derive(Debug, Clone, Args)]
pub struct ProbeArgs {
    /// Ask by HTTPS, or only whether the port accepts connections
    #[arg(long, env = "BERTH_PROBE", hide_env_values = true, default_value = "https", value_name = "KIND", help_heading = PROBE)]
    pub probe: ProbeKind,
    /// PEM file with the authorities that the apiserver's certificate is checked against
    #[arg(long, env = "BERTH_PROBE_CA", hide_env_values = true, value_name = "FILE", help_heading = PROBE)]
    pub probe_ca: Option<PathBuf>,
    /// PEM file with the probe's client certificate, for an apiserver without anonymous access
    #[arg(long, env = "BERTH_PROBE_CERT", hide_env_values = true, value_name = "FILE", help_heading = PROBE)]
    pub probe_cert: Option<PathBuf>,
    /// PEM file with the key of --probe-cert
    #[arg(long, env = "BERTH_PROBE_KEY", hide_env_values = true, value_name = "FILE", help_heading = PROBE)]
    pub probe_key: Option<PathBuf>,
    /// File with a bearer token for the probe
    #[arg(long, env = "BERTH_PROBE_TOKEN_FILE", hide_env_values = true, value_name = "FILE", help_heading = PROBE)]
    pub probe_token_file: Option<PathBuf>,
    /// Name that the apiserver's certificate must carry
    #[arg(long, env = "BERTH_PROBE_SERVER_NAME", hide_env_values = true, default_value = "kubernetes", value_name = "NAME", help_heading = PROBE)]
    pub probe_server_name: String,
    /// Do not check the apiserver's certificate; no credentials are sent then
    #[arg(long, env = "BERTH_PROBE_INSECURE", hide_env_values = true, help_heading = PROBE)]
    pub probe_insecure: bool,
    /// How long an answer may take
    #[arg(long, env = "BERTH_PROBE_TIMEOUT", hide_env_values = true, default_value = "2s", value_name = "DURATION", help_heading = PROBE)]
    pub probe_timeout: String,
}

/// What the apiserver is asked, how often, and how many answers in a row decide.
#[derive(Debug, Clone, Args)]
pub struct PaceArgs {
    /// Path that answers 200 when the apiserver is ready
    #[arg(long, env = "BERTH_PROBE_PATH", hide_env_values = true, default_value = "/readyz", value_name = "PATH", help_heading = PROBE)]
    pub probe_path: String,
    /// Time between two probes; while nobody listens it is 100ms at most
    #[arg(long, env = "BERTH_PROBE_INTERVAL", hide_env_values = true, default_value = "1s", value_name = "DURATION", help_heading = PROBE)]
    pub probe_interval: String,
    /// Good answers in a row that make it ready
    #[arg(long, env = "BERTH_RISE", hide_env_values = true, default_value = "2", value_name = "N", help_heading = PROBE)]
    pub rise: String,
    /// Bad answers in a row that make it unready
    #[arg(long, env = "BERTH_FALL", hide_env_values = true, default_value = "3", value_name = "N", help_heading = PROBE)]
    pub fall: String,
}

/// Which instance is meant.
#[derive(Debug, Clone, Args)]
pub struct AskArgs {
    /// Which instance [default: the only one there]
    #[arg(long, env = "BERTH_INSTANCE", hide_env_values = true, value_name = "ID", help_heading = ADDRESSES)]
    pub instance: Option<String>,
    /// Where the shims of this node meet.
    #[command(flatten)]
    pub run_dir: RunDirArgs,
}

/// How long a probe's answer may take.
#[derive(Debug, Clone, Args)]
pub struct TimeoutArgs {
    /// How long the answer may take: the kubelet's timeoutSeconds less one, which is for the start of this process
    #[arg(long, env = "BERTH_TIMEOUT", hide_env_values = true, value_name = "DURATION", help_heading = PROBE)]
    pub timeout: Option<String>,
}

/// Options of `berth ready`.
#[derive(Debug, Clone, Args)]
pub struct ReadyArgs {
    /// Which instance.
    #[command(flatten)]
    pub ask: AskArgs,
    /// How long the shim may take.
    #[command(flatten)]
    pub timeout: TimeoutArgs,
}

/// Options of `berth drain`.
#[derive(Debug, Clone, Args)]
pub struct DrainArgs {
    /// Which instance.
    #[command(flatten)]
    pub ask: AskArgs,
    /// Do nothing where no sibling is joined: with nobody to hand over to, clients are served until
    /// the apiserver itself stops (for a preStop hook)
    #[arg(long, env = "BERTH_DRAIN_IF_SIBLING", hide_env_values = true)]
    pub if_sibling: bool,
    /// Return when the siblings have taken over and clients that wait for the apiserver's first byte have
    /// it (for 5s at most), not at once
    #[arg(long, env = "BERTH_DRAIN_WAIT", hide_env_values = true)]
    pub wait: bool,
    /// Return when the connections have ended too, or with exit status 1 after this time and how
    /// many are left; implies --wait
    #[arg(long, env = "BERTH_DRAIN_WAIT_STREAMS", hide_env_values = true, value_name = "DURATION")]
    pub wait_streams: Option<String>,
}

/// Options of `berth live`.
#[derive(Debug, Clone, Args)]
pub struct LiveArgs {
    /// Which instance.
    #[command(flatten)]
    pub ask: AskArgs,
    /// How the apiserver is asked.
    #[command(flatten)]
    pub probe: ProbeArgs,
    /// How long it may take, if not --probe-timeout.
    #[command(flatten)]
    pub timeout: TimeoutArgs,
}

/// Options of `berth status`.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// Where the shims of this node meet.
    #[command(flatten)]
    pub run_dir: RunDirArgs,
    /// Print JSON instead of a table
    #[arg(long, env = "BERTH_STATUS_JSON", hide_env_values = true)]
    pub json: bool,
    /// Print again every second until interrupted
    #[arg(long, env = "BERTH_STATUS_WATCH", hide_env_values = true)]
    pub watch: bool,
}

/// Options of `berth inject`.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Args)]
pub struct InjectArgs {
    /// Which manifest, and where the result goes.
    #[command(flatten)]
    pub file: ManifestArgs,
    /// Image with berth as its entrypoint; there is no published one
    #[arg(long, env = "BERTH_IMAGE", hide_env_values = true, value_name = "IMAGE")]
    pub image: String,
    /// How the shim runs: as an init container that restarts (Kubernetes 1.29 or newer) or a plain container
    #[arg(long, env = "BERTH_SIDE_CONTAINER", hide_env_values = true, default_value = "native", value_name = "KIND")]
    pub side_container: SideContainer,
    /// Write patches for `kubeadm … --patches DIR` into this folder, and leave the manifest alone
    #[arg(long, env = "BERTH_KUBEADM_PATCH", hide_env_values = true, value_name = "DIR", conflicts_with_all = ["write", "diff"])]
    pub kubeadm_patch: Option<PathBuf>,
    /// Where the shim listens; may be given several times, the first names the berth [default: the
    /// manifest's --bind-address or --advertise-address, else the node's address]
    #[arg(long, env = "BERTH_LISTEN", hide_env_values = true, value_delimiter = ' ', value_name = "ADDR:PORT[,freebind]", help_heading = ADDRESSES)]
    pub listen: Vec<String>,
    /// Listen on this port of every address; the apiserver's own port becomes 7443, which other
    /// controllers must share
    #[arg(long, env = "BERTH_EXPOSE_ALL", hide_env_values = true, value_name = "PORT", conflicts_with = "listen", help_heading = ADDRESSES)]
    pub expose_all: Option<String>,
    /// Directory where the shims of a node meet, there and in the containers
    #[arg(long, env = "BERTH_RUN_DIR", hide_env_values = true, default_value = "/run/berth", value_name = "DIR", help_heading = ADDRESSES)]
    pub run_dir: String,
    /// How the apiserver is asked; files are those of its container. Without --probe-ca, kubeadm's
    /// authority is found.
    #[command(flatten)]
    pub probe: ProbeArgs,
}

/// How the shim runs beside the apiserver.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SideContainer {
    /// An init container that restarts, started before kube-apiserver and stopped after it (Kubernetes 1.29
    /// or newer)
    #[default]
    Native,
    /// A container like the others, stopped at the same time
    Plain,
}

/// Options of `berth eject`.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Args)]
pub struct EjectArgs {
    /// Which manifest, and where the result goes.
    #[command(flatten)]
    pub file: ManifestArgs,
}

/// What berth keeps on a node.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Args)]
pub struct KeptArgs {
    /// Where originals and the state of an upgrade are kept
    #[arg(
        long,
        env = "BERTH_BACKUP_DIR",
        hide_env_values = true,
        default_value = "/etc/kubernetes/berth",
        value_name = "DIR"
    )]
    pub backup_dir: PathBuf,
}

/// The kubelet of this node.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Args)]
pub struct KubeletArgs {
    /// The kubelet's folder of static pods, with kube-apiserver.yaml in it
    #[arg(
        long,
        env = "BERTH_MANIFESTS_DIR",
        hide_env_values = true,
        default_value = "/etc/kubernetes/manifests",
        value_name = "DIR"
    )]
    pub manifests_dir: PathBuf,
}

/// A manifest, and where its new form goes.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Args)]
pub struct ManifestArgs {
    /// The manifest; `-` is standard input
    #[arg(default_value = "/etc/kubernetes/manifests/kube-apiserver.yaml", value_name = "FILE")]
    pub path: PathBuf,
    /// Write the result into the file, not to standard output; the kubelet then restarts a static pod
    #[arg(long, env = "BERTH_WRITE", hide_env_values = true)]
    pub write: bool,
    /// Print what changes, not the whole result
    #[arg(long, env = "BERTH_DIFF", hide_env_values = true)]
    pub diff: bool,
    /// What berth keeps.
    #[command(flatten)]
    pub kept: KeptArgs,
}

/// Checks whose errors do not count.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Args)]
pub struct ExcusedArgs {
    /// Checks of berth doctor whose errors are warnings, separated by commas (docs/doctor.md names all)
    #[arg(
        long,
        env = "BERTH_IGNORE_ERRORS",
        hide_env_values = true,
        value_name = "CHECKS",
        value_delimiter = ',',
        value_parser = checks_with_errors(),
        hide_possible_values = true
    )]
    pub ignore_errors: Vec<String>,
}

#[cfg(feature = "manifest")]
fn checks_with_errors() -> clap::builder::PossibleValuesParser {
    use crate::doctor::{CHECKS, Severity};
    CHECKS.iter().filter(|check| check.severity == Severity::Error).map(|check| check.id).collect::<Vec<_>>().into()
}

/// Options of `berth doctor`.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// The manifest; `-` is standard input
    #[arg(default_value = "/etc/kubernetes/manifests/kube-apiserver.yaml", value_name = "FILE")]
    pub manifest: PathBuf,
    /// Look at this node too: the manifest is, or will be, of a static pod here, beside the others of the
    /// kubelet's folder
    #[arg(long, env = "BERTH_NODE", hide_env_values = true)]
    pub node: bool,
    /// Where the kubelet finds static pods.
    #[command(flatten)]
    pub kubelet: KubeletArgs,
    /// What berth keeps.
    #[command(flatten)]
    pub kept: KeptArgs,
    /// Ask the cluster too, with this kubeconfig: whether all controllers have one secure port
    #[arg(long, env = "BERTH_KUBECONFIG", hide_env_values = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Which errors do not count.
    #[command(flatten)]
    pub excused: ExcusedArgs,
    /// Print JSON
    #[arg(long, env = "BERTH_DOCTOR_JSON", hide_env_values = true)]
    pub json: bool,
}

#[cfg(feature = "manifest")]
const UPGRADE_STATUS: &str = "Exit status: 0 done: the new one serves, from kube-apiserver.yaml. 1 not done, or rolled \
    back: the old one serves, from kube-apiserver.yaml. 64 wrong command line or manifest, 69 something that is needed \
    cannot be had: nothing was changed. 75 neither can be confirmed: what serves is left alone, its state is kept, and the \
    same command goes on from there.";

/// Options of `berth upgrade`.
#[cfg(feature = "manifest")]
#[derive(Debug, Clone, Args)]
pub struct UpgradeArgs {
    /// The new manifest, behind berth, outside the kubelet's folder [default: the current one, for a
    /// rolling restart]
    #[arg(long, env = "BERTH_UPGRADE_MANIFEST", hide_env_values = true, value_name = "FILE")]
    pub manifest: Option<PathBuf>,
    /// Where the kubelet finds static pods.
    #[command(flatten)]
    pub kubelet: KubeletArgs,
    /// How long an instance may take to get ready and join
    #[arg(long, env = "BERTH_READY_TIMEOUT", hide_env_values = true, default_value = "5m", value_name = "DURATION")]
    pub ready_timeout: String,
    /// How long an instance must then stay ready before the other one goes: a round of its watch cache's bookmarks and a
    /// little, so that watches go on in it
    #[arg(long, env = "BERTH_SETTLE", hide_env_values = true, default_value = "75s", value_name = "DURATION")]
    pub settle: String,
    /// Puts the node's address back into the Service `kubernetes` as an admin [default:
    /// /etc/kubernetes/admin.conf, if it is there]
    #[arg(long, env = "BERTH_KUBECONFIG", hide_env_values = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The current apiserver is not behind berth, so the first switch is one restart: do it
    #[arg(long, env = "BERTH_ACCEPT_GAP", hide_env_values = true)]
    pub accept_gap: bool,
    /// Which errors do not count.
    #[command(flatten)]
    pub excused: ExcusedArgs,
    /// Print the steps, and do nothing
    #[arg(long, env = "BERTH_DRY_RUN", hide_env_values = true)]
    pub dry_run: bool,
    /// What berth keeps.
    #[command(flatten)]
    pub kept: KeptArgs,
    /// Where the kubelet writes the logs of containers, whose last lines are shown when one fails
    #[arg(
        long,
        env = "BERTH_POD_LOGS_DIR",
        hide_env_values = true,
        default_value = "/var/log/pods",
        value_name = "DIR"
    )]
    pub pod_logs_dir: PathBuf,
    /// Directory where the shims of the node meet [default: the new manifest's, else /run/berth]
    #[arg(long, env = "BERTH_RUN_DIR", hide_env_values = true, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
}

/// Options of `berth copy-self`.
#[derive(Debug, Clone, Args)]
pub struct CopySelfArgs {
    /// Where the copy shall be
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Make this directory too if it is not there, with mode 0700
    #[arg(long, env = "BERTH_RUN_DIR", hide_env_values = true, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Uid that the run directory shall belong to [default: this process's]
    #[arg(long, env = "BERTH_OWNER", hide_env_values = true, value_name = "UID", requires = "run_dir")]
    pub owner: Option<u32>,
}
#[cfg(feature = "rehearse")]
const REHEARSED: &str = "What is rehearsed";
#[cfg(feature = "rehearse")]
const TIMES: &str = "Times";
#[cfg(feature = "rehearse")]
const LOAD: &str = "Load";
#[cfg(feature = "rehearse")]
const COMPARISON: &str = "Comparison";
#[cfg(feature = "rehearse")]
const OUTPUT: &str = "Output";

/// Options of `berth rehearse`.
#[cfg(feature = "rehearse")]
#[derive(Debug, Clone, Args)]
pub struct RehearseArgs {
    /// Command of the apiserver that is replaced, split as a shell does it; flags that it lacks are
    /// filled in. `stand-in FLAGS`: berth's own
    #[arg(long, env = "BERTH_REHEARSE_OLD", hide_env_values = true, default_value = "stand-in", value_name = "CMD", help_heading = REHEARSED)]
    pub old: String,
    /// Command of the one that replaces it
    #[arg(long, env = "BERTH_REHEARSE_NEW", hide_env_values = true, default_value = "stand-in", value_name = "CMD", help_heading = REHEARSED)]
    pub new: String,
    /// The etcd that real apiservers get, if their commands name none [default: the one in PATH]
    #[arg(long, env = "BERTH_REHEARSE_ETCD", hide_env_values = true, value_name = "PATH", help_heading = REHEARSED)]
    pub etcd: Option<PathBuf>,
    /// The berth whose shims are rehearsed, an image's for example [default: this program]
    #[arg(long, env = "BERTH_REHEARSE_BERTH", hide_env_values = true, value_name = "PATH", help_heading = REHEARSED)]
    pub berth: Option<PathBuf>,
    /// Rehearse in a network namespace of its own, where kube-apiserver can advertise an address
    #[arg(long, env = "BERTH_REHEARSE_NETNS", hide_env_values = true, help_heading = REHEARSED)]
    pub netns: bool,
    /// Which processes an instance has, and who of them is told to stop when
    #[arg(long, env = "BERTH_REHEARSE_TOPOLOGY", hide_env_values = true, default_value = "side-container", value_name = "TOPOLOGY", value_enum, help_heading = REHEARSED)]
    pub topology: Topology,
    /// Upgrades in a row, from old to new and back
    #[arg(long, env = "BERTH_REHEARSE_UPGRADES", hide_env_values = true, default_value = "1", value_name = "N", help_heading = REHEARSED)]
    pub upgrades: String,
    /// What goes wrong meanwhile, separated by commas; several: one after the other
    #[arg(long, env = "BERTH_REHEARSE_FAULT", hide_env_values = true, default_value = "none", value_name = "LIST", value_delimiter = ',', value_parser = fault_names(), help_heading = REHEARSED)]
    pub fault: Vec<String>,
    /// How long the load lasts before an upgrade, while both serve, and after it, each
    #[arg(
        long,
        env = "BERTH_REHEARSE_PHASE",
        hide_env_values = true,
        default_value = "3s",
        value_name = "DURATION",
        help_heading = TIMES
    )]
    pub phase: String,
    /// How long both serve before the old one goes, as `berth upgrade --settle` [default: --phase]
    #[arg(long, env = "BERTH_REHEARSE_SETTLE", hide_env_values = true, value_name = "DURATION", help_heading = TIMES)]
    pub settle: Option<String>,
    /// Time from SIGTERM to SIGKILL, as a pod's or a unit's [default: 30s beyond the shutdown delay]
    #[arg(long, env = "BERTH_REHEARSE_STOP_GRACE", hide_env_values = true, value_name = "DURATION", help_heading = TIMES)]
    pub stop_grace: Option<String>,
    /// The shims' --hold: how long a client waits while no apiserver is ready
    #[arg(long, env = "BERTH_REHEARSE_HOLD", hide_env_values = true, default_value = "8s", value_name = "DURATION", help_heading = TIMES)]
    pub hold: String,
    /// kube-apiserver's flag of that name: time between SIGTERM and the end of listening
    #[arg(long, env = "BERTH_REHEARSE_SHUTDOWN_DELAY_DURATION", hide_env_values = true, default_value = "0s", value_name = "DURATION", help_heading = TIMES)]
    pub shutdown_delay_duration: String,
    /// kube-apiserver's flag of that name: answer 429 while draining, and listen until then
    #[arg(long, env = "BERTH_REHEARSE_SHUTDOWN_SEND_RETRY_AFTER", hide_env_values = true, help_heading = TIMES)]
    pub shutdown_send_retry_after: bool,
    /// kube-apiserver's flag of that name: time over which watches are ended
    #[arg(long, env = "BERTH_REHEARSE_SHUTDOWN_WATCH_TERMINATION_GRACE_PERIOD", hide_env_values = true, default_value = "0s", value_name = "DURATION", help_heading = TIMES)]
    pub shutdown_watch_termination_grace_period: String,
    /// New TLS connections a second
    #[arg(long, env = "BERTH_REHEARSE_RATE", hide_env_values = true, default_value = "100", value_name = "N", help_heading = LOAD)]
    pub rate: String,
    /// Clients that keep their connection
    #[arg(long, env = "BERTH_REHEARSE_CLIENTS", hide_env_values = true, default_value = "8", value_name = "N", help_heading = LOAD)]
    pub clients: String,
    /// Watches of ConfigMaps
    #[arg(long, env = "BERTH_REHEARSE_WATCHES", hide_env_values = true, default_value = "8", value_name = "N", help_heading = LOAD)]
    pub watches: String,
    /// Clients that read a large answer slowly
    #[arg(long, env = "BERTH_REHEARSE_SLOW_READERS", hide_env_values = true, default_value = "0", value_name = "N", help_heading = LOAD)]
    pub slow_readers: String,
    /// Makes the clients do the same again [default: a random one, which is printed]
    #[arg(long, env = "BERTH_REHEARSE_SEED", hide_env_values = true, value_name = "N", help_heading = LOAD)]
    pub seed: Option<String>,
    /// What clients go through
    #[arg(long, env = "BERTH_REHEARSE_VIA", hide_env_values = true, default_value = "berth", value_name = "VIA", value_enum, help_heading = COMPARISON)]
    pub via: Via,
    /// Rehearse through each of these, one after the other; the exit status is that of --via's
    #[arg(long, env = "BERTH_REHEARSE_COMPARE", hide_env_values = true, value_name = "LIST", value_enum, value_delimiter = ',', help_heading = COMPARISON)]
    pub compare: Vec<Via>,
    /// Write all figures here, as JSON
    #[arg(long, env = "BERTH_REHEARSE_JSON", hide_env_values = true, value_name = "FILE", help_heading = OUTPUT)]
    pub json: Option<PathBuf>,
    /// Write a page to look at here, as HTML
    #[arg(long, env = "BERTH_REHEARSE_REPORT", hide_env_values = true, value_name = "FILE", help_heading = OUTPUT)]
    pub report: Option<PathBuf>,
}

/// Arguments of the stand-in apiserver.
#[cfg(feature = "rehearse")]
#[derive(Debug, Clone, Args)]
pub struct StandInArgs {
    /// kube-apiserver's flags
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
    pub flags: Vec<String>,
}

/// Options of `berth generate`.
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    /// What to write.
    #[command(subcommand)]
    pub what: Generate,
}

/// What `berth generate` writes.
#[derive(Debug, Clone, Subcommand)]
pub enum Generate {
    /// Write a man page for berth and one for each subcommand
    Man {
        /// Directory to write them to; made if it is not there
        #[arg(default_value = ".", value_name = "DIR")]
        dir: PathBuf,
    },
    /// Write a shell's completions to standard output
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}
