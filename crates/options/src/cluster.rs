//! What a shim does in the cluster's API.

use crate::mistakes::Checks;
use berth_cluster::kubeconfig::Token;
use berth_cluster::lease::is_object_name;
use berth_cluster::{Access, Client};
use berth_keeper::ClusterConfig;
use berth_shim::config::Place;
use clap::Args;
use std::path::Path;

const CLUSTER: &str = "Cluster";

/// Options of the cluster's API.
#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    /// Keep the Service `kubernetes` whole, and a Lease for each instance: with the pod's service account (in-cluster), or
    /// with a kubeconfig that `berth grant` wrote [default: off]
    #[arg(long, env = "BERTH_CLUSTER", hide_env_values = true, value_name = "in-cluster|KUBECONFIG", help_heading = CLUSTER)]
    pub cluster: Option<String>,
    /// The node's name in the cluster (in a pod: spec.nodeName) [default: the host's name]
    #[arg(long, env = "BERTH_NODE_NAME", hide_env_values = true, value_name = "NAME", help_heading = CLUSTER)]
    pub node_name: Option<String>,
}

/// Checks the options, and reads the credentials. `server_name` is what the apiserver's certificate has to carry where no
/// kubeconfig says it.
pub(crate) fn check(
    args: &ClusterArgs,
    place: &Place,
    server_name: &str,
    checks: &mut Checks,
) -> Option<ClusterConfig> {
    let cluster = args.cluster.as_deref()?;
    let node = args.node_name.clone().unwrap_or_else(host_name);
    if !is_object_name(&node) {
        checks.wrong(format!("--node-name {node:?}: give the name that `kubectl get nodes` shows"));
    }
    if let Some(instance) = place.instance.as_ref().filter(|instance| !is_object_name(instance.as_str())) {
        checks.wrong(format!(
            "--instance {instance}: with --cluster it is part of a Lease's name: use only a-z 0-9 . and -, and begin and end \
             with a letter or a digit"
        ));
    }
    let access = if cluster == "in-cluster" {
        Access::in_cluster(place.berth(), server_name)
    } else {
        Access::read(Path::new(cluster))
    };
    let access = checks.note(access.map_err(|error| format!("--cluster {cluster}: {error}")))?;
    if access.client.is_some() {
        checks.wrong(format!(
            "--cluster {cluster}: it holds a client certificate, which is an operator's, and can do more than a shim needs: give \
             a kubeconfig that `berth grant` wrote"
        ));
    }
    let client = checks.note(Client::new(&access).map_err(|error| format!("--cluster {cluster}: {error}")))?;
    let token = match access.token {
        // The kubelet renews that of a service account.
        Some(Token::File(path)) if cluster != "in-cluster" => Some(path),
        _ => None,
    };
    Some(ClusterConfig { client, token, node })
}

/// In lower case, as the kubelet takes it.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().to_lowercase()
}
