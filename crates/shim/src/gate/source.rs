//! Sources of clients: which clients share a queue, and which go first.

use berth_os::netdevice;
use ipnet::IpNet;
use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;
use tokio::time::Instant;

/// How long a list of the node's own addresses is valid.
const LISTED: Duration = Duration::from_secs(10);

/// The clients that share a queue: an IPv4 address, or an IPv6 /64, within which a machine can change its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Source(IpAddr);

impl Source {
    pub(crate) fn of(client: IpAddr) -> Self {
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

/// Clients that go first: the node's own, such as the kubelet, and those that were configured.
#[derive(Debug)]
pub(crate) struct First {
    given: Vec<IpNet>,
    own: RwLock<OwnAddresses>,
}

#[derive(Debug)]
struct OwnAddresses {
    addresses: BTreeSet<IpAddr>,
    listed: Instant,
}

impl First {
    pub(crate) fn new(given: Vec<IpNet>) -> Self {
        let addresses = match netdevice::addresses() {
            Ok(addresses) => addresses.into_iter().collect(),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "cannot list the node's own addresses, whose clients would go first: allow this process AF_NETLINK, or \
                     give them by --first"
                );
                BTreeSet::new()
            }
        };
        Self { given, own: RwLock::new(OwnAddresses { addresses, listed: Instant::now() }) }
    }

    pub(super) fn contains(&self, client: IpAddr) -> bool {
        let client = client.to_canonical();
        let is_own = || self.own.read().unwrap_or_else(PoisonError::into_inner).addresses.contains(&client);
        client.is_loopback() || self.given.iter().any(|net| net.contains(&client)) || is_own()
    }

    /// Lists the node's own addresses again if that was long ago.
    pub(super) fn renew(&self) {
        if self.own.read().unwrap_or_else(PoisonError::into_inner).listed.elapsed() < LISTED {
            return;
        }
        let addresses = netdevice::addresses().map(|addresses| addresses.into_iter().collect());
        let mut own = self.own.write().unwrap_or_else(PoisonError::into_inner);
        own.listed = Instant::now();
        // If they cannot be listed, the last list is kept.
        if let Ok(addresses) = addresses {
            own.addresses = addresses;
        }
    }
}
