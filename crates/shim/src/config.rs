//! The configuration of a shim, in checked types.

use crate::backend::probe::ProbeConfig;
use berth_keeper::ClusterConfig;
use berth_node::instance_id::InstanceId;
use ipnet::IpNet;
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::watch;

/// Consecutive good answers that make an instance ready.
pub const RISE_COUNT: u32 = 2;

/// The checked options of `berth serve` or `berth run`.
#[derive(Debug, Clone)]
pub struct Config {
    /// Listen addresses, instance and run directory.
    pub place: Place,
    /// The instance's address, if configured and not taken from the instance's record.
    pub backend: Option<SocketAddr>,
    /// An instance that gets new connections before this shim's own instance.
    pub preferred: Option<Preferred>,
    /// True for a node shim, which serves every instance of the berth.
    pub discover: bool,
    /// How long siblings wait for a renewal of this shim's lease.
    pub lease: Duration,
    /// How long bind(2) is tried again while a port is not available.
    pub bind_wait: Duration,
    /// How instances are probed.
    pub probe: ProbeConfig,
    /// Time between two probes of an instance.
    pub probe_interval: Duration,
    /// Consecutive bad answers that make an instance unready.
    pub fall: u32,
    /// How long a client waits for an instance.
    pub hold: Duration,
    /// How long connections may go on after the own instance stopped listening.
    pub drain_timeout: Duration,
    /// Maximum number of connections. `None` for as many as the file limit allows.
    pub max_connections: Option<u64>,
    /// Number of relaying threads. `None` for a thread per core, at most eight.
    pub threads: Option<usize>,
    /// TLS handshakes that an instance may have in flight.
    pub max_openings: MaxOpenings,
    /// Networks of the clients that go first at the gate, in addition to clients on the node
    /// itself.
    pub first: Vec<IpNet>,
    /// Address of the admin server (/metrics, /status, /livez, /readyz).
    pub admin: Option<SocketAddr>,
    /// Whether clients' sockets are passed to instances with a supervisor.
    pub pass: PassMode,
    /// The cluster's API, if the shim keeps the Service `kubernetes` and Leases.
    pub cluster: Option<ClusterConfig>,
    /// True if ends of connections are logged at info.
    pub log_connections: bool,
}

/// An instance of this host that gets new connections before this shim's own instance, while it is
/// ready. A bridge sets this. The instance does not listen on a loopback address, and is dialled
/// from loopback, because connections from loopback are not steered.
#[derive(Debug, Clone)]
pub struct Preferred {
    /// The instance's ID in this shim.
    pub id: InstanceId,
    /// The instance's listen address.
    pub address: SocketAddr,
    /// How the instance is probed.
    pub probe: ProbeConfig,
    /// Identifies the instance's process. A new process starts with unknown health. `None` if the
    /// instance gets no connections.
    pub process: watch::Receiver<Option<u64>>,
}

/// How many TLS handshakes an instance may have in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MaxOpenings {
    /// 16 for each CPU.
    #[default]
    Auto,
    /// At most this number.
    Fixed(NonZeroUsize),
    /// No limit.
    Off,
}

impl fmt::Display for MaxOpenings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(most) => most.fmt(f),
            Self::Off => f.write_str("off"),
        }
    }
}

/// How an instance gets its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PassMode {
    /// The shim relays the clients' bytes.
    #[default]
    Relay,
    /// Clients' sockets become results of the instance's accept(2), where possible.
    Auto,
    /// Like [`Self::Auto`], but with a warning where passing sockets is impossible.
    Inject,
}

impl PassMode {
    /// All modes, in the order of the help texts.
    pub const ALL: [Self; 3] = [Self::Relay, Self::Auto, Self::Inject];

    /// Returns the mode's name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Auto => "auto",
            Self::Inject => "inject",
        }
    }
}

/// The berth, the instance, and the directory in which shims meet.
#[derive(Debug, Clone)]
pub struct Place {
    /// Listen addresses, at least one. The first address names the berth.
    pub listen: Vec<Listen>,
    /// The instance's ID. `None` to draw a random ID.
    pub instance: Option<InstanceId>,
    /// The directory that all shims and instances of the node share.
    pub run_dir: PathBuf,
}

impl Place {
    /// Returns the address that names the berth.
    pub fn berth_address(&self) -> SocketAddr {
        self.listen[0].addr
    }

    /// Returns all listen addresses.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        self.listen.iter().map(|listen| listen.addr)
    }
}

/// A listen address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen {
    /// Address and port; port 0 lets the kernel choose.
    pub addr: SocketAddr,
    /// True if this node may not have the address yet (IP_FREEBIND).
    pub freebind: bool,
}
