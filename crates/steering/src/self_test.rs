//! Tests whether this kernel steers connections, on a free port of an address of this node.

use super::{Error, Purpose, Steering};
use berth_os::{netdevice, socket};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};

/// Time limit for a connection of this node to itself. The node may be busy.
const PATIENCE: Duration = Duration::from_secs(5);

/// The result of the test in one address family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tried {
    Arrived,
    /// The family was not tested, because there is nothing to steer in it. The text is the reason.
    Skipped(String),
}

impl fmt::Display for Tried {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arrived => write!(to, "a steered connection arrived"),
            Self::Skipped(why) => write!(to, "skipped: {why}"),
        }
    }
}

/// Steers an IPv4 and an IPv6 connection, each to a port on which nothing listens, at an address of
/// this node. Afterwards, no program, listener or connection of the test is left.
///
/// # Errors
/// A requirement is missing, a connection did not arrive, or neither family could be tested.
pub async fn self_test() -> Result<[Tried; 2], Error> {
    let ipv4 = try_family(Ipv4Addr::LOCALHOST.into()).await?;
    let ipv6 = try_family(Ipv6Addr::LOCALHOST.into()).await?;
    match (ipv4, ipv6) {
        (ipv4 @ Tried::Skipped(_), ipv6 @ Tried::Skipped(_)) => Err(Error::Untried { ipv4, ipv6 }),
        (ipv4, ipv6) => Ok([ipv4, ipv6]),
    }
}

/// Tests steering of connections to localhost, like [`self_test`], but by IPv4 alone.
///
/// # Errors
/// Errors of [`self_test`] and of [`Steering::cover_localhost`].
pub async fn self_test_of_localhost(cgroup: &Path) -> Result<(), Error> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .map_err(Error::Listener)?;
    let reserved = socket::bind((Ipv4Addr::LOCALHOST, 0).into(), false).map_err(Error::Listener)?;
    let to = socket::local_address(reserved.as_fd()).map_err(Error::Listener)?;
    let mut steering = Steering::new(Purpose::SelfTest, to.port(), &[to.ip()], PATIENCE * 2)?;
    steering.cover_localhost(cgroup, "", to.port(), &[to.ip()])?;
    steering.steer_to(listener.as_fd())?;
    steering.start();
    check_arrival(to, &listener).await
}

async fn try_family(loopback: IpAddr) -> Result<Tried, Error> {
    let listener = match TcpListener::bind((loopback, 0)).await {
        Ok(listener) => listener,
        Err(error) => {
            return Ok(Tried::Skipped(format!(
                "cannot listen on {loopback}: {error}"
            )));
        }
    };
    let Some((_reserved, to)) = free_port(loopback.is_ipv4()) else {
        let family = if loopback.is_ipv4() { "IPv4" } else { "IPv6" };
        return Ok(Tried::Skipped(format!(
            "this node has no address of {family} except loopback and link-local ones"
        )));
    };
    let steering = Steering::new(Purpose::SelfTest, to.port(), &[to.ip()], PATIENCE * 2)?;
    steering.steer_to(listener.as_fd())?;
    steering.start();
    check_arrival(to, &listener).await.map(|()| Tried::Arrived)
}

/// Connects to an address. Checks that the connection arrives at the given listener, to which it is
/// steered.
pub(super) async fn check_arrival(to: SocketAddr, listener: &TcpListener) -> Result<(), Error> {
    #[cfg(debug_assertions)]
    if berth_os::bpf::is_steering_turned_off() {
        return Ok(());
    }
    let both = async {
        let client = TcpStream::connect(to).await?;
        let own = client.local_addr()?;
        // Clients may connect to this port, too, so wait for the test's own connection.
        while listener.accept().await?.1 != own {}
        Ok::<_, io::Error>(())
    };
    let why = match tokio::time::timeout(PATIENCE, both).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => {
            format!(
                "no answer for {} s; does a firewall drop what this node sends to itself?",
                PATIENCE.as_secs()
            )
        }
    };
    Err(Error::NotArrived { to, why })
}

/// Finds an address of this node from which connections are steered. Returns this address with a
/// free port, and a socket that reserves the port without listening.
pub(super) fn free_port(ipv4: bool) -> Option<(OwnedFd, SocketAddr)> {
    let steered = |ip: &IpAddr| match ip {
        IpAddr::V4(_) => ipv4 && !ip.is_loopback(),
        IpAddr::V6(ip) => !ipv4 && !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    let own = netdevice::local_addresses()
        .unwrap_or_default()
        .into_iter()
        .filter(steered);
    own.map(|ip| SocketAddr::new(ip, 0)).find_map(|any| {
        let reserved = socket::bind(any, false).ok()?;
        let address = socket::local_address(reserved.as_fd()).ok()?;
        Some((reserved, address))
    })
}
