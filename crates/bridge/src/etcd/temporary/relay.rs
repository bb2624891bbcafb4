//! What kube-apiserver dials instead of the node's etcd: bytes are passed to whoever serves the data. TLS is not opened.
//!
//! A connection that nobody can serve yet waits, since a refused one costs 1 s and more: gRPC backs off.

use super::machine::Route;
use berth_os::netdevice;
use berth_steering::{Error, Purpose, Steering};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time between two dials of an etcd that refuses.
const REDIAL: Duration = Duration::from_millis(50);

/// Dials after which a client is let go: as long as kube-apiserver's own dial may take.
const DIALS: u32 = 400;

/// How long the steering is good for without a renewal.
pub const LEASE: Duration = Duration::from_secs(4);

/// Steers what dials an etcd's address from there to a relay, once that is on.
///
/// # Errors
/// Something necessary is missing.
pub fn steering(at: SocketAddrV4, relay: &impl AsFd) -> Result<Steering, Error> {
    let steering = Steering::new(Purpose::Etcd, at.port(), &[(*at.ip()).into()], LEASE)?;
    steering.give_to(relay.as_fd())?;
    Ok(steering)
}

/// Where the two etcds are.
#[derive(Debug, Clone, Copy)]
pub struct Members {
    pub own: SocketAddrV4,
    pub temporary: SocketAddrV4,
    /// The relay dials from here: what comes from the own one's address itself is steered to the relay.
    pub source: Ipv4Addr,
}

/// Relays until it is dropped. Each change of `ends` ends all connections that were connected before.
pub async fn serve(
    listener: TcpListener,
    members: Members,
    route: watch::Receiver<Route>,
    ends: watch::Receiver<u64>,
) {
    accept(listener, |client| {
        relay(client, members, route.clone(), ends.clone())
    })
    .await;
}

/// Gives each client of this node to `relay`, until this is dropped.
pub async fn accept<R: Future<Output = io::Result<()>> + Send + 'static>(
    listener: TcpListener,
    relay: impl Fn(TcpStream) -> R,
) {
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((client, from)) if is_of_node(from.ip()) => drop(open.spawn(relay(client))),
                Ok((_, from)) => tracing::info!(%from, "the relay to etcd is for this node alone: a client was refused"),
                Err(error) => {
                    tracing::warn!(%error, "the relay to etcd cannot accept");
                    tokio::time::sleep(REDIAL).await;
                }
            },
            Some(_) = open.join_next() => {}
        }
    }
}

/// Whether a client is on this node: the relay listens at the address of the node's etcd, which others may reach.
fn is_of_node(ip: IpAddr) -> bool {
    ip.is_loopback() || netdevice::addresses().is_ok_and(|all| all.contains(&ip))
}

async fn relay(
    client: TcpStream,
    members: Members,
    mut route: watch::Receiver<Route>,
    mut ends: watch::Receiver<u64>,
) -> io::Result<()> {
    let etcd = connect(members, &mut route, &mut ends).await?;
    pass(client, etcd, async { drop(ends.changed().await) }).await
}

/// Passes bytes until one of them ends, or `ends` does.
pub async fn pass(
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

/// Waits until somebody serves, for as long as a client may wait. What ends connections from the time of the dial on ends this one.
async fn connect(
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
        match dial(members.source.into(), to.into()).await {
            Err(_) if dials < DIALS => dials += 1,
            // Another serves by now, or nobody.
            Ok(_) if *route.borrow() != chosen => continue,
            dialled => return dialled,
        }
        tokio::time::sleep(REDIAL).await;
    }
}

/// Both are of one family.
pub async fn dial(source: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.bind((source, 0).into())?;
    socket.connect(to).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_of_another_host_is_refused() {
        for stranger in ["192.0.2.7", "2001:db8::7", "0.0.0.0"] {
            assert!(!is_of_node(stranger.parse().unwrap()), "{stranger}");
        }
        let own = netdevice::addresses().unwrap();
        assert!(
            own.iter().all(|ip| is_of_node(*ip)) && is_of_node("127.99.1.2".parse().unwrap()),
            "{own:?}"
        );
    }
}
