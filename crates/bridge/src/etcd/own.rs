//! Probes of this node's member of an etcd with several members, over connections that the bridge
//! does not steer to another member.
//!
//! The node's kube-apiserver may be ready while it uses another member through the bridge's relay,
//! which disappears when the bridge ends. So a ready kube-apiserver does not show that this node's
//! member serves.

use super::temporary::probe;
use super::{Cluster, split_url};
use berth_exec::address;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use tokio::net::lookup_host;
use tokio::sync::watch;

/// Probes this node's member for as long as `answers` has a receiver. etcd completes no handshake
/// before it has published itself to the other members.
///
/// # Errors
/// The URL has no address, or a source address or certificate is missing.
pub(super) async fn probe_own(
    cluster: &Cluster,
    answers: watch::Sender<bool>,
) -> Result<(), String> {
    let to = resolve_url(&cluster.own).await?;
    let source = match to {
        // Connections that come from the member's own address are steered, so the probe needs
        // another source address.
        SocketAddr::V4(_) => {
            IpAddr::from(address::random_address().map_err(|error| error.to_string())?)
        }
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    probe::probe_forever(
        source,
        to,
        cluster.gateway.build_tls_config(false)?,
        answers,
    )
    .await;
    Ok(())
}

async fn resolve_url(url: &str) -> Result<SocketAddr, String> {
    let none = || format!("{url} has no address");
    let found = lookup_host(split_url(url).ok_or_else(none)?)
        .await
        .map_err(|error| format!("{url}: {error}"))?;
    found
        .min_by_key(|address| !address.ip().is_loopback())
        .ok_or_else(none)
}
