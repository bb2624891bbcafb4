//! The operator's options, and the plan of a bridge that preflight has accepted.

use super::etcd::{EtcdMode, EtcdPlan};
use super::localhost::Localhost;
use super::machine::{Limits, OnFailure};
use super::pod::RunningPod;
use berth_cluster::Client;
use berth_cluster::kubeconfig::choose_kubeconfig;
use berth_doctor::ShimOf;
use berth_doctor::service::ServiceKeeper;
use berth_node::instance_id::InstanceId;
use berth_os::process::{HeldProcess, ProcessAttributes};
use berth_shim::backend::probe::ProbeConfig;
pub use rustls::pki_types::ServerName;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Duration;

/// How the running kube-apiserver was started: as a process, or as a static pod.
#[derive(Debug, Clone)]
pub enum RunningInstance {
    /// A process in the node's namespaces, with the given command line.
    Process { command: Vec<OsString> },
    /// A container of a static pod, with the given manifest.
    Pod { manifest: PathBuf },
}

#[derive(Debug, Clone)]
pub struct BridgeOptions {
    pub running: RunningInstance,
    pub limits: Limits,
    pub on_failure: OnFailure,
    pub etcd: EtcdMode,
    /// CA for probes of both instances. `None` stands for the CA that kube-apiserver's arguments
    /// name.
    pub probe_ca: Option<PathBuf>,
    /// Client certificate and key for probes.
    pub probe_client: Option<(PathBuf, PathBuf)>,
    pub probe_server_name: ServerName<'static>,
    pub probe_timeout: Duration,
    pub directory: PathBuf,
    /// An admin's kubeconfig, with which the bridge keeps the node's address in the Service
    /// `kubernetes`. `None` stands for kubeadm's file, if it exists.
    pub kubeconfig: Option<PathBuf>,
}

impl BridgeOptions {
    /// A client for the node's instances with an admin's credentials, which trusts the same CA as
    /// the probes. `None` without a kubeconfig.
    pub(super) fn make_client(&self, probe: &ProbeConfig) -> Option<Result<Client, String>> {
        let client = Client::from_kubeconfig(choose_kubeconfig(self.kubeconfig.as_deref())?);
        let (server_name, ca) = (probe.server_name.to_str().into_owned(), probe.ca.clone());
        let shim = ShimOf {
            server_name,
            ca,
            ..ShimOf::default()
        };
        Some(
            client
                .map(|client| shim.trusting_client(&client))
                .map_err(|error| error.to_string()),
        )
    }
}

/// The plan of a bridge. Preflight has checked that everything in the plan is possible on this
/// node.
#[derive(Debug)]
pub struct BridgePlan {
    pub options: BridgeOptions,
    pub instance: InstanceId,
    /// The steered port, and the addresses of the port's listener.
    pub port: u16,
    pub steered: Vec<IpAddr>,
    /// The means to steer connections to localhost, or the reason why these connections cannot be
    /// steered. `Ok(None)` if nothing listens at localhost.
    pub localhost: Result<Option<Localhost>, String>,
    /// Address for probes of the node's kube-apiserver. The advertised address may belong to
    /// another machine.
    pub own: SocketAddr,
    pub listen: Vec<SocketAddr>,
    pub temporary: SocketAddrV4,
    /// Probes of the node's kube-apiserver, and of the temporary instance. Probes of the temporary
    /// instance use copies of files, which COMMAND does not change.
    pub own_probe: ProbeConfig,
    pub probe: ProbeConfig,
    /// Command line of the temporary instance, and path of its audit log.
    pub argv: Vec<OsString>,
    pub audit: Option<PathBuf>,
    /// The running kube-apiserver, and its command line.
    pub process: HeldProcess,
    pub like: ProcessAttributes,
    pub command: Vec<OsString>,
    /// The static pod of the running kube-apiserver. `None` for a process.
    pub pod: Option<RunningPod>,
    /// Keeps the node's address in the Service `kubernetes`. `None` if that is not possible.
    pub service: Option<ServiceKeeper>,
    pub etcd: EtcdPlan,
    /// Notes for the operator that do not prevent the bridge.
    pub notes: Vec<String>,
}
