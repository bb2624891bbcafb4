//! Periodic probes of both instances. The node's kube-apiserver is dialled from loopback, which is
//! never steered.

use berth_node::terms::Speedup;
use berth_os::sock_diag;
use berth_shim::backend::health::Observation;
use berth_shim::backend::probe::Probe;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Consecutive good answers after which an instance is ready.
const RISE: u32 = 2;

/// Time between two probes, of an instance that is not ready and of a ready instance.
const STARTING: Duration = Duration::from_millis(100);
const READY: Duration = Duration::from_secs(1);

/// The probed state of an instance.
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
    let mut good = 0;
    while !to.is_closed() {
        let before = port.and_then(find_listener);
        let answer = probe.ready(address).await;
        let listener = port.and_then(find_listener);
        // If the listener changed during the probe, the answer may be the old process's, and does
        // not count.
        good = if answer.seen == Observation::Pass && before == listener {
            good + 1
        } else {
            0
        };
        let asked = ProbeState {
            ready: good >= RISE,
            listener,
            words: answer.words,
            at: Some(Instant::now()),
        };
        let pause = if asked.ready {
            speedup.of(READY)
        } else {
            STARTING
        };
        to.send_if_modified(|known| {
            let news = (known.ready, known.listener) != (asked.ready, asked.listener);
            *known = asked;
            news
        });
        tokio::time::sleep(pause).await;
    }
}

/// Inode of the listener on a port, on any address outside loopback.
fn find_listener(port: u16) -> Option<u64> {
    let all = sock_diag::list_listeners(port).unwrap_or_default();
    all.into_iter()
        .filter(|entry| !entry.local.ip().is_loopback())
        .map(|entry| entry.inode)
        .min()
}
