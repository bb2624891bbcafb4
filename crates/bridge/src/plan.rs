//! What the operator wants of a bridge, and a bridge that can be built.

use super::etcd::{EtcdMode, EtcdPlan};
use super::localhost::Localhost;
use super::machine::{Limits, OnFailure};
use super::pod::RunningPod;
use berth_cluster::Client;
use berth_cluster::kubeconfig::given_or_admin;
use berth_doctor::ShimOf;
use berth_doctor::service::ServiceKeeper;
use berth_node::instance::InstanceId;
use berth_os::process::{HeldProcess, ProcessAttributes};
use berth_shim::backend::probe::ProbeConfig;
pub use rustls::pki_types::ServerName;
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Duration;

/// The kube-apiserver that runs here.
#[derive(Debug, Clone)]
pub enum RunningInstance {
    /// A process in the node's namespaces, with this command line.
    Process { command: Vec<OsString> },
    /// In a static pod, with this manifest.
    Pod { manifest: PathBuf },
}

#[derive(Debug, Clone)]
pub struct BridgeOptions {
    pub running: RunningInstance,
    pub limits: Limits,
    pub on_failure: OnFailure,
    pub etcd: EtcdMode,
    /// With what both instances are probed; `None`: with the CA that kube-apiserver's arguments name.
    pub probe_ca: Option<PathBuf>,
    /// A client certificate and its key.
    pub probe_client: Option<(PathBuf, PathBuf)>,
    pub probe_server_name: ServerName<'static>,
    pub probe_timeout: Duration,
    pub directory: PathBuf,
    /// An admin's kubeconfig, for the Service; none: kubeadm's, if it exists.
    pub kubeconfig: Option<PathBuf>,
}

impl BridgeOptions {
    /// The node's instances as an admin, who trusts them as their probe does. `None` without a kubeconfig.
    pub(super) fn client(&self, probe: &ProbeConfig) -> Option<Result<Client, String>> {
        let client = Client::from_kubeconfig(given_or_admin(self.kubeconfig.as_deref())?);
        let (server_name, ca) = (probe.server_name.to_str().into_owned(), probe.ca.clone());
        let shim = ShimOf {
            server_name,
            ca,
            ..ShimOf::default()
        };
        Some(
            client
                .map(|client| shim.client(&client))
                .map_err(|error| error.to_string()),
        )
    }
}

/// The address that the node's own is probed from: what comes from there is not steered.
pub(super) fn own_source(own: IpAddr) -> IpAddr {
    if own.is_ipv4() {
        Ipv4Addr::LOCALHOST.into()
    } else {
        Ipv6Addr::LOCALHOST.into()
    }
}

/// A bridge that can be built.
#[derive(Debug)]
pub struct BridgePlan {
    pub options: BridgeOptions,
    pub instance: InstanceId,
    /// The port that is steered, and the addresses that its listener answers.
    pub port: u16,
    pub steered: Vec<IpAddr>,
    /// How localhost is covered, where something listens there; or why not.
    pub localhost: Result<Option<Localhost>, String>,
    /// Where the node's own instance is probed. The address that it advertises need not be one of the node.
    pub own: SocketAddr,
    pub listen: Vec<SocketAddr>,
    pub temporary: SocketAddrV4,
    /// How both instances are probed: the temporary one with copies of files, which COMMAND does not change.
    pub own_probe: ProbeConfig,
    pub probe: ProbeConfig,
    /// The temporary instance's command line, and where it writes its audit log.
    pub argv: Vec<OsString>,
    pub audit: Option<PathBuf>,
    /// The running instance, and its command line.
    pub process: HeldProcess,
    pub like: ProcessAttributes,
    pub command: Vec<OsString>,
    /// Where it runs in a static pod.
    pub pod: Option<RunningPod>,
    /// The node's address in the Service, where it can be kept.
    pub service: Option<ServiceKeeper>,
    pub etcd: EtcdPlan,
    /// Notes for the operator that do not prevent the bridge.
    pub notes: Vec<String>,
}
