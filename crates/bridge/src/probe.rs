//! Periodic probes of both instances. The node's kube-apiserver is dialled from loopback, because
//! the bridge never steers connections from loopback.

use berth_node::terms::Speedup;
use berth_os::sock_diag;
use berth_shim::backend::health::Observation;
use berth_shim::backend::probe::Probe;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Consecutive good answers after which an instance is ready.
const RISE_COUNT: u32 = 2;

/// Time between two probes: `START_INTERVAL` for an instance that is not ready, and
/// `READY_INTERVAL` for a ready instance.
const START_INTERVAL: Duration = Duration::from_millis(100);
const READY_INTERVAL: Duration = Duration::from_secs(1);

/// The results of the last probes of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProbeState {
    pub ready: bool,
    /// Inode of the listener on the port, if requested. Unique to a process.
    pub listener: Option<u64>,
    /// Result of the last probe, as text.
    pub words: String,
    /// Time of the last answer.
    pub at: Option<Instant>,
}

/// Probes an address for as long as there is a receiver. With `port`, also looks up the port's
/// listener.
pub async fn probe_forever(
    probe: Probe,
    address: SocketAddr,
    port: Option<u16>,
    speedup: Speedup,
    to: watch::Sender<ProbeState>,
) {
    let (mut good, mut listener) = (0, None);
    while !to.is_closed() {
        let answer = probe.probe_ready(address).await;
        let before = listener;
        listener = port.and_then(|port| find_listener(port, before));
        // If the listener has changed, the answer may be the old process's, and does not count.
        good = if answer.seen == Observation::Pass && before == listener {
            good + 1
        } else {
            0
        };
        let asked = ProbeState {
            ready: good >= RISE_COUNT,
            listener,
            words: answer.words,
            at: Some(Instant::now()),
        };
        let pause = if asked.ready {
            speedup.shorten(READY_INTERVAL)
        } else {
            START_INTERVAL
        };
        to.send_if_modified(|known| {
            let news = (known.ready, known.listener) != (asked.ready, asked.listener);
            *known = asked;
            news
        });
        tokio::time::sleep(pause).await;
    }
}

/// Returns the inode of the listener on a port, on any address outside loopback. If the kernel does
/// not list the listeners, `known` counts on: clients are steered away if nothing listens.
fn find_listener(port: u16, known: Option<u64>) -> Option<u64> {
    sock_diag::list_listeners(port).map_or(known, |all| {
        all.into_iter()
            .filter(|entry| !entry.local.ip().is_loopback())
            .map(|entry| entry.inode)
            .min()
    })
}
