//! Sources of clients: which clients share a queue, and which clients go first.

use berth_os::explained;
use berth_os::netdevice;
use berth_os::off_thread::OffThread;
use ipnet::IpNet;
use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

/// The clients that share a queue: an IPv4 address, or an IPv6 /64, within which a machine can
/// change its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Source(IpAddr);

impl Source {
    pub(crate) fn from_client(client: IpAddr) -> Self {
        Self(match client.to_canonical() {
            IpAddr::V4(address) => address.into(),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
        })
    }
}

impl From<Source> for IpAddr {
    fn from(source: Source) -> Self {
        source.0
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(address) => address.fmt(f),
            IpAddr::V6(address) => write!(f, "{address}/64"),
        }
    }
}

/// Clients that go first: clients on the node itself, such as the kubelet, and the configured
/// clients.
#[derive(Debug)]
pub(crate) struct FirstClients {
    given: Vec<IpNet>,
    own: RwLock<BTreeSet<IpAddr>>,
}

impl FirstClients {
    pub(crate) fn new(given: Vec<IpNet>) -> Self {
        let own = netdevice::local_addresses().unwrap_or_else(|error| {
            tracing::warn!(
                code = %explained::OWN_ADDRESSES,
                %error,
                "cannot list the node's addresses, so clients on these addresses do not go first: allow this process \
                 AF_NETLINK, or give the addresses with --first"
            );
            Vec::new()
        });
        Self {
            given,
            own: RwLock::new(own.into_iter().collect()),
        }
    }

    pub(super) fn goes_first(&self, client: IpAddr) -> bool {
        let client = client.to_canonical();
        let is_own = || {
            self.own
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .contains(&client)
        };
        client.is_loopback() || self.given.iter().any(|net| net.contains(&client)) || is_own()
    }

    /// Lists the node's addresses again. If listing fails, the last list is kept.
    pub(super) async fn update_node_addresses(&self, kernel: &OffThread, most: Duration) {
        if let Ok(Ok(addresses)) = kernel.call_within(most, netdevice::local_addresses).await {
            *self.own.write().unwrap_or_else(PoisonError::into_inner) =
                addresses.into_iter().collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_that_the_node_has_no_more_does_not_go_first() {
        let (first, client) = (FirstClients::new(Vec::new()), "192.0.2.1".parse().unwrap());
        first.own.write().unwrap().insert(client);
        assert!(first.goes_first(client));
        first
            .update_node_addresses(
                &OffThread::new("the node's addresses"),
                Duration::from_secs(3600),
            )
            .await;
        assert!(!first.goes_first(client));
    }
}
