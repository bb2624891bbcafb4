//! The control-plane nodes, as the Service `kubernetes` lists them.

use super::checks::{BRIDGE_SLICE, NOT_CHECKED, SECURE_PORTS};
use super::layout::Layout;
use super::{Case, Finding, options};
use crate::service;
use berth_cluster::service::{OF_SERVICE, slice_addresses, slice_ports};
use berth_cluster::{Client, Error};
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// Facts about the Service `kubernetes`.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    pub addresses: Vec<SocketAddr>,
    /// EndpointSlices left in the Service by bridges and upgrades that have ended.
    pub left: Vec<String>,
}

impl Cluster {
    /// Reads the Service with an administrator's credentials.
    ///
    /// # Errors
    /// The API does not answer, or refuses these credentials.
    pub async fn ask(client: &Client) -> Result<Self, Error> {
        Ok(Self {
            addresses: list_endpoints(&client.get(OF_SERVICE).await?),
            left: service::leftover_slices(client, None).await?,
        })
    }
}

/// The addresses in a list of EndpointSlices.
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
        let unseen = NOT_CHECKED.at(
            "cluster",
            "whether all control-plane nodes have this secure port cannot be seen here",
            "on one of several control-plane nodes, give --kubeconfig (/etc/kubernetes/admin.conf)",
        );
        return Some(unseen)
            .filter(|_| case.manifest.kind() == "Pod")
            .into_iter()
            .collect();
    };
    let left = cluster.left.iter().map(|slice| {
        BRIDGE_SLICE.at(
            "Service kubernetes",
            format!("the EndpointSlice {slice} is left from a bridge or an upgrade that has ended: clients are sent to its node, even if nothing serves there"),
            "`berth bridge end` on any control-plane node removes it",
        )
    });
    left.chain(secure_ports(case, &cluster.addresses)).collect()
}

fn secure_ports(case: &Case<'_>, addresses: &[SocketAddr]) -> Option<Finding> {
    // Behind `berth exec`, the port of the first listen address is also the apiserver's port.
    let berth = Layout::of(case.manifest)
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
        SECURE_PORTS.at(
            "Service kubernetes",
            format!(
                "the secure port here is {own}, and there are control-plane nodes at {}: each sets its own port for all addresses \
                 of the Service, so clients in the cluster are sent to ports where nobody listens",
                others.join(", ")
            ),
            format!("give all control-plane nodes one port: change the others to {own}, or this one to theirs"),
        )
    })
}
