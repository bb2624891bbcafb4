//! Checks of the control-plane nodes that the Service `kubernetes` lists.

use super::checks::{BRIDGE_SLICE, NOT_CHECKED, SECURE_PORTS};
use super::layout::Layout;
use super::{Case, Finding, options};
use crate::service;
use berth_cluster::service::{SERVICE_SLICES, slice_addresses, slice_ports};
use berth_cluster::{Client, Error};
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// Facts about the Service `kubernetes` that doctor has read.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    pub addresses: Vec<SocketAddr>,
    /// Names of EndpointSlices that a bridge or an upgrade has left in the Service.
    pub left: Vec<String>,
}

impl Cluster {
    /// Reads the Service with an administrator's credentials.
    ///
    /// # Errors
    /// The API does not answer, or refuses these credentials.
    pub async fn fetch(client: &Client) -> Result<Self, Error> {
        Ok(Self {
            addresses: list_endpoints(&client.get(SERVICE_SLICES).await?),
            left: service::leftover_slices(client, None).await?,
        })
    }
}

/// Returns the addresses in a list of EndpointSlices, sorted and without repetitions.
pub(super) fn list_endpoints(list: &Value) -> Vec<SocketAddr> {
    let slices = list["items"].as_array().into_iter().flatten();
    let of = |slice| {
        slice_addresses(slice)
            .flat_map(move |ip| slice_ports(slice).map(move |port| SocketAddr::new(ip, port)))
    };
    let found: BTreeSet<_> = slices.flat_map(of).collect();
    found.into_iter().collect()
}

pub(super) fn examine(case: &Case<'_>) -> Vec<Finding> {
    let Some(cluster) = case.cluster else {
        let unseen = NOT_CHECKED.make_finding(
            "cluster",
            "berth cannot see here whether all control-plane nodes have this secure port",
            "if there are several control-plane nodes, give --kubeconfig (/etc/kubernetes/admin.conf)",
        );
        return Some(unseen)
            .filter(|_| case.manifest.kind() == "Pod")
            .into_iter()
            .collect();
    };
    let left = cluster.left.iter().map(|slice| {
        BRIDGE_SLICE.make_finding(
            "Service kubernetes",
            format!("the EndpointSlice {slice} remains from a bridge or an upgrade that has ended: clients are sent to the node in this \
                     slice, even if nothing serves on the node"),
            "`berth bridge end` on any control-plane node removes the EndpointSlice",
        )
    });
    left.chain(check_secure_ports(case, &cluster.addresses))
        .collect()
}

fn check_secure_ports(case: &Case<'_>, addresses: &[SocketAddr]) -> Option<Finding> {
    // If `berth exec` starts kube-apiserver, the port of the first listen address is also
    // kube-apiserver's port.
    let berth = Layout::from_manifest(case.manifest)
        .and_then(|layout| options::berth_address(&layout.apiserver.parsed));
    let own = berth
        .map(|berth| berth.port())
        .or_else(|| case.manifest.secure_port().ok())?;
    let others: Vec<_> = addresses
        .iter()
        .filter(|address| address.port() != own)
        .map(ToString::to_string)
        .collect();
    (!others.is_empty()).then(|| {
        SECURE_PORTS.make_finding(
            "Service kubernetes",
            format!(
                "the secure port of this node is {own}, and there are control-plane nodes at {}: each node sets its own port for all \
                 addresses of the Service, so clients in the cluster are sent to ports where nobody listens",
                others.join(", ")
            ),
            format!("give all control-plane nodes one port: change the ports of the other nodes to {own}, or the port of this node to theirs"),
        )
    })
}
