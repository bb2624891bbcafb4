//! The relay that kube-apiserver dials instead of the node's etcd: passes bytes to the etcd that
//! serves the data. TLS is not opened.
//!
//! A connection waits while no etcd can serve, because a refused connection costs 1 s and more:
//! gRPC backs off.

use super::machine::Route;
use berth_cluster::http::connect_from;
use berth_os::explained;
use berth_os::netdevice;
use berth_steering::{Error, Purpose, Steering};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time between two dials of an etcd that refuses.
const REDIAL: Duration = Duration::from_millis(50);

/// Number of dials after which a client's connection is closed. All these dials together take as
/// long as kube-apiserver's own dial may take.
const DIALS: u32 = 400;

/// Time for which the steering lasts without a renewal.
pub const LEASE: Duration = Duration::from_secs(4);

/// Steers connections to an etcd's address that come from the same address to a relay, once
/// switched on.
///
/// # Errors
/// A kernel feature or permission is missing.
pub fn steer_to_relay(at: SocketAddrV4, relay: &impl AsFd) -> Result<Steering, Error> {
    let steering = Steering::new(Purpose::Etcd, at.port(), &[(*at.ip()).into()], LEASE)?;
    steering.steer_to(relay.as_fd())?;
    Ok(steering)
}

/// Addresses of the two etcds.
#[derive(Debug, Clone, Copy)]
pub struct Members {
    pub own: SocketAddrV4,
    pub temporary: SocketAddrV4,
    /// Source address of the relay: connections from the node's etcd's address are steered to the
    /// relay.
    pub source: Ipv4Addr,
}

/// Relays clients to the etcd that serves, until the future is dropped. Each change of `ends` ends
/// all connections that were connected before.
pub async fn relay_clients(
    listener: TcpListener,
    members: Members,
    route: watch::Receiver<Route>,
    ends: watch::Receiver<u64>,
) {
    accept_clients(listener, |client| {
        relay_client(client, members, route.clone(), ends.clone())
    })
    .await;
}

/// Gives each client of this node to `relay`, until the future is dropped.
pub async fn accept_clients<R: Future<Output = io::Result<()>> + Send + 'static>(
    listener: TcpListener,
    relay: impl Fn(TcpStream) -> R,
) {
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, from)) if is_of_node(from.ip()) => drop(open.spawn(relay(client))),
                Ok((_, from)) => tracing::info!(%from, "the relay to etcd is for clients on this node: another client was refused"),
                Err(error) => {
                    tracing::warn!(
                        code = %explained::ETCD_RELAY,
                        %error,
                        "the relay to etcd cannot accept"
                    );
                    tokio::time::sleep(REDIAL).await;
                }
            },
            Some(_) = open.join_next() => {}
        }
    }
}

/// True if a client is on this node: the relay listens at the address of the node's etcd, which
/// remote clients may reach.
fn is_of_node(ip: IpAddr) -> bool {
    ip.is_loopback() || netdevice::local_addresses().is_ok_and(|all| all.contains(&ip))
}

async fn relay_client(
    client: TcpStream,
    members: Members,
    mut route: watch::Receiver<Route>,
    mut ends: watch::Receiver<u64>,
) -> io::Result<()> {
    let etcd = connect_to_etcd(members, &mut route, &mut ends).await?;
    pass_bytes(client, etcd, async { drop(ends.changed().await) }).await
}

/// Passes bytes until either connection ends, or `ends` completes.
pub async fn pass_bytes(
    mut client: TcpStream,
    mut etcd: TcpStream,
    ends: impl Future<Output = ()>,
) -> io::Result<()> {
    client.set_nodelay(true)?;
    etcd.set_nodelay(true)?;
    tokio::select! {
        ended = copy_bidirectional(&mut client, &mut etcd) => ended.map(drop),
        () = ends => Ok(()),
    }
}

/// Waits for an etcd that serves, for as long as a client may wait. A change of `ends` after the
/// dial ends this connection, too.
async fn connect_to_etcd(
    members: Members,
    route: &mut watch::Receiver<Route>,
    ends: &mut watch::Receiver<u64>,
) -> io::Result<TcpStream> {
    let mut dials = 0;
    loop {
        let ended = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        let open = timeout(
            REDIAL * DIALS,
            route.wait_for(|route| *route != Route::Hold),
        )
        .await?;
        let chosen = *open.map_err(ended)?;
        ends.mark_unchanged();
        let to = match chosen {
            Route::Temporary => members.temporary,
            Route::Own | Route::Hold => members.own,
        };
        match connect_from(Some(members.source.into()), to.into()).await {
            Err(_) if dials < DIALS => dials += 1,
            // The route has changed since.
            Ok(_) if *route.borrow() != chosen => continue,
            dialled => return dialled,
        }
        tokio::time::sleep(REDIAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_of_another_host_is_refused() {
        for stranger in ["192.0.2.7", "2001:db8::7", "0.0.0.0"] {
            assert!(!is_of_node(stranger.parse().unwrap()), "{stranger}");
        }
        let own = netdevice::local_addresses().unwrap();
        assert!(
            own.iter().all(|ip| is_of_node(*ip)) && is_of_node("127.99.1.2".parse().unwrap()),
            "{own:?}"
        );
    }
}
