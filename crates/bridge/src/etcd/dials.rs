//! Connects the node's kube-apiserver to another member of etcd while the node's member is away.
//!
//! kube-apiserver dials the loopback address of the node's member. The kernel gives the connection
//! to a relay, which does not open TLS, and so can use only members with a certificate for that
//! address, such as kubeadm's. Without the relay, requests on connections from before the bridge
//! wait: a kubelet with such a connection does not renew its node's Lease, and the pods of a node
//! that is not ready leave their Services.
//!
//! The relay also gets connections of etcd's own JSON gateway, which dials the address from the
//! same address.
//!
//! Connections to the stopping member are not ended here: the member sends GOAWAY, and the next
//! request comes on a new connection. So a member that was only slow costs nothing.

use super::temporary::relay;
use super::{Cluster, split_url};
use berth_os::socket;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

/// Longest time for an answer of another member.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Idle time after which a connection to another member is ended, once the node's member serves
/// again: no call is in flight then.
const IDLE_TIME: Duration = Duration::from_millis(500);

/// Members on other nodes to which the node's kube-apiserver can be connected.
#[derive(Debug, Clone)]
pub struct MemberRelay {
    /// Address of the node's member, which the node's kube-apiserver dials.
    own: SocketAddrV4,
    others: Arc<[SocketAddr]>,
}

impl MemberRelay {
    /// # Errors
    /// The reason why no other member is usable.
    pub(super) async fn find(cluster: &Cluster) -> Result<Self, String> {
        let own = split_url(&cluster.own)
            .and_then(|(host, port)| Some(SocketAddrV4::new(host.parse().ok()?, port)))
            .filter(|own| own.ip().is_loopback())
            .ok_or_else(|| format!("{} is no IPv4 address of loopback", cluster.own))?;
        let checked = cluster.gateway.build_tls_config(true)?;
        let (mut others, mut why) = (Vec::new(), Vec::new());
        for (member, url) in &cluster.others.members {
            match timeout(
                ANSWER_TIMEOUT,
                check_certificate(url, *own.ip(), checked.clone()),
            )
            .await
            .unwrap_or_else(|late| Err(late.into()))
            {
                Ok(at) => others.push(at),
                Err(error) => why.push(format!("{}: {error}", member.describe())),
            }
        }
        if others.is_empty() {
            return Err(format!(
                "no other etcd member's certificate is valid for {}: {}",
                own.ip(),
                why.join("; ")
            ));
        }
        Ok(Self {
            own,
            others: others.into(),
        })
    }

    /// Relays steered connections to another member, and never returns. `answers` is true while
    /// this node's member answers.
    ///
    /// # Errors
    /// The listener or the steering cannot be set up.
    pub async fn relay_steered_clients(
        self,
        mut answers: watch::Receiver<bool>,
    ) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let Self { own, others } = self;
        let listener = TcpListener::bind((*own.ip(), 0))
            .await
            .map_err(|error| text(&error))?;
        socket::mark_listener(listener.as_fd()).map_err(|error| text(&error))?;
        let steering = relay::steer_to_relay(own, &listener).map_err(|error| text(&error))?;
        let mut tasks = JoinSet::new();
        let answered = answers.clone();
        tasks.spawn(relay::accept_clients(listener, move |client| {
            relay_to_other_member(client, others.clone(), answered.clone())
        }));
        let mut serves = true;
        loop {
            let now = *answers.borrow_and_update();
            if now {
                steering.stop();
            } else {
                steering.start();
            }
            if std::mem::replace(&mut serves, now) != now {
                let to = if now { "this node's" } else { "another" };
                tracing::info!(%own, "etcd: the node's kube-apiserver dials {to} member");
            }
            tokio::select! {
                changed = answers.changed() => changed.map_err(|error| text(&error))?,
                () = sleep(relay::LEASE / 4) => {}
                Some(_) = tasks.join_next() => return Err("a task of the relay to other members failed".into()),
            }
        }
    }
}

/// Connects to a member and returns its address. Fails unless the member's certificate is also
/// valid for `ip`, the address that kube-apiserver dials.
async fn check_certificate(
    url: &str,
    ip: Ipv4Addr,
    checked: Arc<ClientConfig>,
) -> io::Result<SocketAddr> {
    let stream = TcpStream::connect(split_url(url).ok_or(io::ErrorKind::InvalidInput)?).await?;
    let at = stream.peer_addr()?;
    TlsConnector::from(checked)
        .connect(ServerName::IpAddress(IpAddr::from(ip).into()), stream)
        .await?;
    Ok(at)
}

async fn relay_to_other_member(
    client: TcpStream,
    others: Arc<[SocketAddr]>,
    own: watch::Receiver<bool>,
) -> io::Result<()> {
    let etcd = connect_to_first(&others).await?;
    let seen = client.as_fd().try_clone_to_owned()?;
    relay::pass_bytes(client, etcd, wait_until_unused(seen, own)).await
}

/// Connects to the first member that accepts.
async fn connect_to_first(others: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut why = io::Error::from(io::ErrorKind::NotConnected);
    for at in others {
        match timeout(ANSWER_TIMEOUT, TcpStream::connect(at))
            .await
            .unwrap_or_else(|late| Err(late.into()))
        {
            Err(error) => why = error,
            connected => return connected,
        }
    }
    Err(why)
}

/// Waits until the node's member serves, and this connection has been idle for [`IDLE_TIME`].
async fn wait_until_unused(client: impl AsFd, mut own: watch::Receiver<bool>) {
    while own.wait_for(|serves| *serves).await.is_ok() {
        match socket::idle_time(client.as_fd()) {
            Ok(quiet) if quiet < IDLE_TIME => sleep(IDLE_TIME - quiet).await,
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_connection_stays_until_the_nodes_member_serves_and_nothing_is_in_flight() {
        let [relay, other, gone] = [(); 3].map(|()| {
            std::net::TcpListener::bind("127.0.0.1:0")
                .and_then(|it| it.set_nonblocking(true).map(|()| it))
        });
        let (relay, other) = (
            TcpListener::from_std(relay.unwrap()).unwrap(),
            TcpListener::from_std(other.unwrap()).unwrap(),
        );
        let mut client = TcpStream::connect(relay.local_addr().unwrap())
            .await
            .unwrap();
        let (accepted, _) = relay.accept().await.unwrap();
        let others = [
            gone.unwrap().local_addr().unwrap(),
            other.local_addr().unwrap(),
        ];
        let (serves, own) = watch::channel(false);
        let passed = tokio::spawn(relay_to_other_member(accepted, others.into(), own));
        let (mut etcd, _) = other.accept().await.unwrap();
        let mut said = [0; 4];
        client.write_all(b"call").await.unwrap();
        etcd.read_exact(&mut said).await.unwrap();
        assert!(!passed.is_finished());
        serves.send_replace(true);
        passed.await.unwrap().unwrap();
        assert_eq!(client.read(&mut said).await.unwrap(), 0);
    }
}
