//! Options of `berth serve` and `berth run`.

use crate::cluster::ClusterArgs;
use crate::place::{ADDRESSES_HEADING, PlaceArgs};
use crate::probe::ProbeArgs;
use berth_node::terms::Speedup;
use berth_shim::config::PassMode;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

const CONNECTIONS_HEADING: &str = "Connections";

const OPERATION_HEADING: &str = "Operation";

/// Options of `berth serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Options that name the berth, the instance and the run directory.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Address of kube-apiserver; without this option the shim waits for the address that `berth
    /// exec` records
    #[arg(long, env = "BERTH_BACKEND", value_name = "ADDR:PORT", help_heading = ADDRESSES_HEADING)]
    pub backend: Option<String>,
    /// Serve every kube-apiserver that `berth exec` records for this berth: a single shim for the
    /// node, through all upgrades
    #[arg(long, env = "BERTH_DISCOVER", conflicts_with = "backend", help_heading = ADDRESSES_HEADING)]
    pub discover: bool,
    /// Options that `berth serve` and `berth run` share.
    #[command(flatten)]
    pub shim: ShimArgs,
}

/// Options of `berth run`.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// Options that name the berth, the instance and the run directory.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Options that `berth serve` and `berth run` share.
    #[command(flatten)]
    pub shim: ShimArgs,
    /// Command of kube-apiserver; {instance} in its arguments becomes the instance's ID
    #[arg(last = true, required = true, value_name = "COMMAND", num_args = 1..)]
    pub command: Vec<std::ffi::OsString>,
}

/// Options that `berth serve` and `berth run` share.
#[derive(Debug, Clone, Args)]
pub struct ShimArgs {
    /// Time for which bind is retried while a port is not available, before exit status 69
    #[arg(long, env = "BERTH_BIND_WAIT", default_value = "0s", value_name = "DURATION", help_heading = ADDRESSES_HEADING)]
    pub bind_wait: String,
    #[command(flatten)]
    pub probe: ProbeArgs,
    /// Time between two probes; at most 100ms while kube-apiserver starts
    #[arg(long, hide = true, default_value = "1s", value_name = "DURATION")]
    pub probe_interval: String,
    /// Consecutive failed probes that make a kube-apiserver unready
    #[arg(long, hide = true, default_value = "3", value_name = "N")]
    pub fall: String,
    /// Time for which a client waits while no kube-apiserver is ready
    #[arg(long, env = "BERTH_HOLD", default_value = "8s", value_name = "DURATION", help_heading = CONNECTIONS_HEADING)]
    pub hold: String,
    /// Time for which relayed connections may continue after SIGTERM, counted from when the shim's
    /// kube-apiserver stops listening
    #[arg(long, env = "BERTH_DRAIN_TIMEOUT", default_value = "60s", value_name = "DURATION", help_heading = CONNECTIONS_HEADING)]
    pub drain_timeout: String,
    /// Maximum of open connections, not counting sockets that were given to kube-apiserver
    /// (--pass). Further clients wait in the backlog, unless a connection that waits for its turn
    /// (--max-openings) makes room [default: as many as the file limit allows]
    #[arg(long, env = "BERTH_MAX_CONNECTIONS", value_name = "N", help_heading = CONNECTIONS_HEADING)]
    pub max_connections: Option<String>,
    /// Maximum of new connections to which an instance has not sent a first byte yet, about the
    /// number of TLS handshakes that the instance computes: auto (16 per CPU), a number, or off.
    /// Further clients wait, in one queue per source
    #[arg(long, env = "BERTH_MAX_OPENINGS", default_value = "auto", value_name = "auto|N|off", help_heading = CONNECTIONS_HEADING)]
    pub max_openings: String,
    /// Clients from these addresses go first when new connections wait, as clients from the node's
    /// own addresses do; may be given more than once
    #[arg(long, env = "BERTH_FIRST", value_delimiter = ',', value_name = "CIDR", help_heading = CONNECTIONS_HEADING)]
    pub first: Vec<String>,
    /// If this shim gives no sign of life for this time, siblings accept from its listeners; at
    /// most a day
    #[arg(long, hide = true, default_value = "3s", value_name = "DURATION")]
    pub lease: String,
    /// How clients come to kube-apiserver: the shim relays their bytes, or gives their sockets to
    /// kube-apiserver
    #[arg(long, env = "BERTH_PASS", default_value = "relay", value_name = "HOW", value_parser = pass_mode_parser(), help_heading = CONNECTIONS_HEADING)]
    pub pass: PassMode,
    /// Divide the times that no option sets
    #[arg(long, hide = true, default_value_t)]
    pub speedup: Speedup,
    /// Number of threads that relay [default: one per core, at most 8]
    #[arg(long, env = "BERTH_THREADS", value_name = "N", help_heading = CONNECTIONS_HEADING)]
    pub threads: Option<String>,
    /// Serve /metrics, /livez, /readyz and /status by HTTP on this address; several shims may share
    /// the address [default: off]
    #[arg(long, env = "BERTH_ADMIN", value_name = "ADDR:PORT", help_heading = OPERATION_HEADING)]
    pub admin: Option<String>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Log the end of each connection at info instead of debug
    #[arg(long, env = "BERTH_LOG_CONNECTIONS", help_heading = OPERATION_HEADING)]
    pub log_connections: bool,
}

pub fn pass_mode_parser() -> impl TypedValueParser<Value = PassMode> {
    let help = |mode| match mode {
        PassMode::Relay => "Relay every connection",
        PassMode::Auto => {
            "Pass clients' sockets to the instance if a self-test of `berth exec` passes. Otherwise relay: the log and the status have the reason"
        }
        PassMode::Inject => {
            "Pass clients' sockets to the instance; `berth exec` exits with status 69 if the sockets cannot be passed"
        }
    };
    let modes = PassMode::ALL.map(|mode| PossibleValue::new(mode.as_str()).help(help(mode)));
    PossibleValuesParser::new(modes).map(|text| {
        let is = |mode: &PassMode| mode.as_str() == text;
        PassMode::ALL.into_iter().find(is).unwrap_or_default()
    })
}
