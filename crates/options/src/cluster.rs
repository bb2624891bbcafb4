//! Options for a shim that sends requests to the cluster's API.

use crate::mistakes::Checks;
use berth_cluster::lease::is_object_name;
use berth_cluster::service::{Family, slice_name};
use berth_keeper::{ClusterConfig, Credentials};
use berth_shim::config::Place;
use clap::Args;

const CLUSTER_HEADING: &str = "Cluster";

/// Options for requests to the cluster's API.
#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    /// Keep this node's address in the Service `kubernetes`, and keep a Lease for each instance.
    /// Credentials: the pod's service account (in-cluster), or a kubeconfig that `berth grant`
    /// wrote [default: off]
    #[arg(long, env = "BERTH_CLUSTER", value_name = "in-cluster|KUBECONFIG", help_heading = CLUSTER_HEADING)]
    pub cluster: Option<String>,
    /// The node's name in the cluster (in a pod: spec.nodeName) [default: the host's name]
    #[arg(long, env = "BERTH_NODE_NAME", value_name = "NAME", help_heading = CLUSTER_HEADING)]
    pub node_name: Option<String>,
}

/// Checks the options. `server_name` is the name that kube-apiserver's certificate must contain
/// with `in-cluster`; a kubeconfig determines the name itself.
pub(crate) fn check_cluster(
    args: &ClusterArgs,
    place: &Place,
    server_name: &str,
    checks: &mut Checks,
) -> Option<ClusterConfig> {
    let cluster = args.cluster.as_deref()?;
    let node = args.node_name.clone().unwrap_or_else(host_name);
    if !is_node_name(&node) {
        checks.report(format!(
            "--node-name {node:?}: give the name that `kubectl get nodes` shows"
        ));
    }
    let named = |id: &str| !id.contains('.') && is_object_name(id);
    if let Some(instance) = place
        .instance
        .as_ref()
        .filter(|instance| !named(instance.as_str()))
    {
        checks.report(format!(
            "--instance {instance}: with --cluster the name is part of a Lease's name: use only a-z 0-9 and -, and begin and end with a letter or a digit"
        ));
    }
    // The files of the credentials are not read here. The keeper reads them, and tries again if
    // they are missing: a shim serves without them.
    let credentials = if cluster == "in-cluster" {
        Credentials::InCluster {
            server: place.berth_address(),
            name: server_name.to_owned(),
        }
    } else {
        Credentials::Kubeconfig(cluster.into())
    };
    Some(ClusterConfig { credentials, node })
}

/// True if `name` can be the name of a Node and a part of the names of berth's objects for the
/// node.
#[must_use]
pub fn is_node_name(name: &str) -> bool {
    is_object_name(&slice_name(name, Family::V4)) && is_object_name(name)
}

/// Returns the host's name in lower case, which the kubelet uses as the node's name.
#[must_use]
pub fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .to_lowercase()
}
