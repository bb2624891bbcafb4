//! Probes of an etcd by TLS handshakes, since a stopping etcd keeps its listener but completes no
//! handshake.

use berth_cluster::http::connect_from;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_rustls::TlsConnector;

/// Time between two handshakes, and number of handshakes that may be in flight.
const INTERVAL: Duration = Duration::from_millis(100);
const IN_FLIGHT: usize = 8;

/// Time without a completed handshake after which the etcd counts as silent. A refused handshake
/// counts at once.
const SILENCE: Duration = Duration::from_millis(250);

/// Time for a single handshake before anything depends on the probes.
const ONCE: Duration = Duration::from_secs(5);

/// Probes the etcd at `to` for as long as `answers` has a receiver.
pub async fn probe_forever(
    source: IpAddr,
    to: SocketAddr,
    tls: Arc<ClientConfig>,
    answers: watch::Sender<bool>,
) {
    let mut in_flight = JoinSet::new();
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut ended = Instant::now();
    while !answers.is_closed() {
        let answer = tokio::select! {
            _ = ticks.tick() => {
                if in_flight.len() < IN_FLIGHT {
                    in_flight.spawn(try_handshake(source, to, tls.clone()));
                }
                (ended.elapsed() >= SILENCE).then_some(false)
            }
            Some(answer) = in_flight.join_next() => {
                ended = Instant::now();
                Some(matches!(answer, Ok(Ok(()))))
            }
        };
        if let Some(answer) = answer {
            answers.send_if_modified(|known| std::mem::replace(known, answer) != answer);
        }
    }
}

/// Makes a single handshake, with time for a busy etcd.
///
/// # Errors
/// The etcd does not answer.
pub async fn probe_once(source: IpAddr, to: SocketAddr, tls: Arc<ClientConfig>) -> io::Result<()> {
    timeout(ONCE, try_handshake(source, to, tls)).await?
}

/// Makes a handshake. Any TLS answer, even a TLS error, shows that the etcd serves: etcd's
/// certificate may be renewed meanwhile.
async fn try_handshake(source: IpAddr, to: SocketAddr, tls: Arc<ClientConfig>) -> io::Result<()> {
    let stream = connect_from(Some(source), to).await?;
    match TlsConnector::from(tls)
        .connect(ServerName::IpAddress(to.ip().into()), stream)
        .await
    {
        Err(error)
            if error
                .get_ref()
                .is_none_or(|inner| !inner.is::<rustls::Error>()) =>
        {
            Err(error)
        }
        _ => Ok(()),
    }
}
