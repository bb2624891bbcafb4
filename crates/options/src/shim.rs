//! `berth serve` and `berth run`.

use crate::cluster::ClusterArgs;
use crate::place::{ADDRESSES, PlaceArgs};
use crate::probe::ProbeArgs;
use berth_node::terms::Speedup;
use berth_shim::config::PassMode;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

const CONNECTIONS: &str = "Connections";

const OPERATION: &str = "Operation";

/// Options of `berth serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Which berth and which instance.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Address of the apiserver; without it, the address that `berth exec` recorded is waited for
    #[arg(long, env = "BERTH_BACKEND", value_name = "ADDR:PORT", help_heading = ADDRESSES)]
    pub backend: Option<String>,
    /// Serve every apiserver that `berth exec` records for this berth: one shim for a node, through all
    /// upgrades
    #[arg(long, env = "BERTH_DISCOVER", conflicts_with = "backend", help_heading = ADDRESSES)]
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

/// Options that `berth serve` and `berth run` share.
#[derive(Debug, Clone, Args)]
pub struct ShimArgs {
    /// How long bind is tried again while a port is not available, before exit 69
    #[arg(long, env = "BERTH_BIND_WAIT", default_value = "0s", value_name = "DURATION", help_heading = ADDRESSES)]
    pub bind_wait: String,
    #[command(flatten)]
    pub probe: ProbeArgs,
    /// Time between two probes; while it starts, 100ms at most
    #[arg(long, hide = true, default_value = "1s", value_name = "DURATION")]
    pub probe_interval: String,
    /// Consecutive bad answers that make it unready
    #[arg(long, hide = true, default_value = "3", value_name = "N")]
    pub fall: String,
    /// How long a client is kept waiting while no apiserver is ready
    #[arg(long, env = "BERTH_HOLD", default_value = "8s", value_name = "DURATION", help_heading = CONNECTIONS)]
    pub hold: String,
    /// How long relayed connections may go on after SIGTERM, counted from when the own apiserver stopped
    /// listening
    #[arg(long, env = "BERTH_DRAIN_TIMEOUT", default_value = "60s", value_name = "DURATION", help_heading = CONNECTIONS)]
    pub drain_timeout: String,
    /// Most connections at once, without those whose sockets the apiserver has (--pass); further ones wait in the backlog,
    /// unless one that waits for its turn at the gate makes room [default: what the file limit allows]
    #[arg(long, env = "BERTH_MAX_CONNECTIONS", value_name = "N", help_heading = CONNECTIONS)]
    pub max_connections: Option<String>,
    /// Most new connections at once that an instance has not answered with a first byte, which is about the TLS handshakes
    /// that it computes: auto (16 for each CPU), a number, or off. Further clients wait
    /// for their turn, each source in a queue of its own
    #[arg(long, env = "BERTH_MAX_OPENINGS", default_value = "auto", value_name = "auto|N|off", help_heading = CONNECTIONS)]
    pub max_openings: String,
    /// Clients of these addresses go first where new connections wait for their turn, as those of the node's own addresses
    /// do; may be given more than once
    #[arg(long, env = "BERTH_FIRST", value_delimiter = ',', value_name = "CIDR", help_heading = CONNECTIONS)]
    pub first: Vec<String>,
    /// How long siblings wait for a sign of life of this shim before they accept from its listeners; at most a day
    #[arg(long, hide = true, default_value = "3s", value_name = "DURATION")]
    pub lease: String,
    /// How clients come to the apiserver: their bytes are relayed, or their sockets become the apiserver's own
    #[arg(long, env = "BERTH_PASS", default_value = "relay", value_name = "HOW", value_parser = pass_modes(), help_heading = CONNECTIONS)]
    pub pass: PassMode,
    /// Divide the times that no option sets
    #[arg(long, hide = true, default_value_t)]
    pub speedup: Speedup,
    /// Threads that relay [default: one per core, at most 8]
    #[arg(long, env = "BERTH_THREADS", value_name = "N", help_heading = CONNECTIONS)]
    pub threads: Option<String>,
    /// Serve /metrics, /livez, /readyz and /status by HTTP here; may be shared by several shims
    /// [default: off]
    #[arg(long, env = "BERTH_ADMIN", value_name = "ADDR:PORT", help_heading = OPERATION)]
    pub admin: Option<String>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Log the end of each connection at info instead of debug
    #[arg(long, env = "BERTH_LOG_CONNECTIONS", help_heading = OPERATION)]
    pub log_connections: bool,
}

pub fn pass_modes() -> impl TypedValueParser<Value = PassMode> {
    let help = |mode| match mode {
        PassMode::Relay => "Relay every connection",
        PassMode::Auto => {
            "Give sockets where a self-test of `berth exec` passes, else relay: the log and the status have the reason"
        }
        PassMode::Inject => "Give sockets; `berth exec` ends with 69 where that is impossible",
    };
    let modes = PassMode::ALL.map(|mode| PossibleValue::new(mode.as_str()).help(help(mode)));
    PossibleValuesParser::new(modes).map(|text| {
        let is = |mode: &PassMode| mode.as_str() == text;
        PassMode::ALL.into_iter().find(is).unwrap_or_default()
    })
}
