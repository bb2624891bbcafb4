//! Probes both instances periodically. The node's own is dialled from loopback, which is never steered.

use berth_node::terms::Speedup;
use berth_os::sock_diag;
use berth_shim::backend::health::Observation;
use berth_shim::backend::probe::Probe;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Consecutive good answers that make an instance ready.
const RISE: u32 = 2;

/// Time between two probes of an instance that is not ready, and of one that is.
const STARTING: Duration = Duration::from_millis(100);
const READY: Duration = Duration::from_secs(1);

/// The probed state of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProbeState {
    pub ready: bool,
    /// Inode of the listener on the port, which no other process has had, where that is to be known.
    pub listener: Option<u64>,
    /// Result of the last probe, as text.
    pub words: String,
    /// When that was answered.
    pub at: Option<Instant>,
}

/// Probes an address for as long as there is a receiver. With `port`, the listener on that is looked up too.
pub async fn follow(
    probe: Probe,
    address: SocketAddr,
    port: Option<u16>,
    speedup: Speedup,
    to: watch::Sender<ProbeState>,
) {
    let mut good = 0;
    while !to.is_closed() {
        let before = port.and_then(listener);
        let answer = probe.ready(address).await;
        let listener = port.and_then(listener);
        // The listener changed during the probe: the answer may be the old process's, so it does not count.
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

/// Inode of the listener on a port, on other addresses than those of loopback.
fn listener(port: u16) -> Option<u64> {
    let all = sock_diag::listeners(port).unwrap_or_default();
    all.into_iter()
        .filter(|entry| !entry.local.ip().is_loopback())
        .map(|entry| entry.inode)
        .min()
}
