//! The end of a shim that has left. The shim first waits until the own instance has sent the first
//! bytes that it owes ([`FirstByteWait`]), so that the instance can be stopped. Next the shim waits
//! for the last connection to end, up to a deadline. The deadline begins when the own instance
//! stops listening, because the shim outlives its apiserver.

use crate::backend::Table;
use crate::metrics::Metrics;
use crate::state::{ShimState, Stop};
use berth_node::terms::{InstanceHealth, Phase};
use berth_os::explained;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until};

/// How long clients that wait for a first byte may delay the stop of an instance. kube-apiserver
/// closes its listener at once on SIGTERM, if `--shutdown-delay-duration` is 0.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for the first bytes of the last accepted client. A ClientHello arrives about one
/// round trip after the connection. The shim has already connected to the instance by then.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_millis(500);

/// Decides whether an instance can be stopped. `left` is the time since the instance's shim left,
/// `open` the number of the shim's connections, and `pending` the number of connections that wait
/// for a first byte. Returns the number of connections that will get no first byte, or `None` if
/// the instance cannot be stopped yet.
pub fn count_unanswered_if_stoppable(left: Duration, pending: u64, open: u64) -> Option<u64> {
    let waited = if pending > 0 {
        left >= ANSWER_TIMEOUT
    } else {
        left >= FIRST_BYTES_TIMEOUT || open == 0
    };
    waited.then_some(pending)
}

/// Time between two checks whether clients still wait for a first byte.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Time between two log lines about the connections that a leaving shim waits for.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Waits until the own instance of a leaving shim can be stopped.
#[derive(Debug)]
pub struct FirstByteWait {
    state: watch::Receiver<ShimState>,
    metrics: Arc<Metrics>,
    left: Option<Instant>,
}

impl FirstByteWait {
    pub(crate) fn new(state: watch::Receiver<ShimState>, metrics: Arc<Metrics>) -> Self {
        Self {
            state,
            metrics,
            left: None,
        }
    }

    /// Waits until the shim has left and no client waits for a first byte, for 5 s at most. The
    /// future can be dropped and the method called again.
    pub async fn wait_until_stoppable(&mut self) {
        // The wait fails if the shim has ended. Its connections have ended, too.
        let Ok(_) = self
            .state
            .wait_for(|state| state.phase == Phase::Left)
            .await
        else {
            return;
        };
        let left = *self.left.get_or_insert_with(Instant::now);
        loop {
            match count_unanswered_if_stoppable(
                left.elapsed(),
                self.metrics.pending_connections(),
                self.metrics.open_connections(),
            ) {
                None => sleep(CHECK_INTERVAL).await,
                Some(0) => return,
                Some(connections) => {
                    tracing::warn!(
                        code = %explained::STOPPED_WITH_CLIENTS,
                        connections,
                        "clients have no answer yet; the apiserver is stopped all the same"
                    );
                    return;
                }
            }
        }
    }
}

/// True if an instance listens and the shim must outlive the instance's connections: the own
/// instance, or any instance for a node shim.
pub(crate) fn has_listening_instance(table: &Table, discover: bool) -> bool {
    let mut its = table
        .instances
        .iter()
        .filter(|instance| instance.own || discover);
    its.any(|instance| instance.health() != InstanceHealth::Unready)
}

/// Waits until the shim's connections have ended, at most `timeout` after `is_served` becomes
/// false. Returns the number of connections that are left. The caller resets them.
pub(crate) async fn drain_connections(
    metrics: &Metrics,
    ended: &Notify,
    mut table: watch::Receiver<Arc<Table>>,
    mut state: watch::Receiver<ShimState>,
    is_served: impl Fn(&Table) -> bool,
    timeout: Duration,
) -> u64 {
    let started = Instant::now();
    let mut log_at = started + LOG_INTERVAL;
    let mut deadline = None;
    loop {
        let open = metrics.open_connections();
        let ends = state.borrow_and_update().stop == Stop::Now;
        if open == 0 {
            tracing::info!(ms = started.elapsed().as_millis() as u64, "drained");
            return 0;
        }
        if ends {
            tracing::warn!(
                code = %explained::SECOND_SIGNAL,
                connections = open,
                "second signal: connections are cut"
            );
            return open;
        }
        let listens = is_served(&table.borrow_and_update());
        if !listens && deadline.is_none() {
            deadline = Some(Instant::now() + timeout);
            tracing::info!(connections = open, timeout = %humantime::format_duration(timeout), "the instance listens no more: draining");
        }
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            tracing::warn!(
                code = %explained::DRAIN_TIMEOUT,
                connections = open,
                "--drain-timeout has expired: connections are cut"
            );
            return open;
        }
        if log_at <= Instant::now() {
            log_at += LOG_INTERVAL;
            tracing::info!(connections = open, instance_listens = listens, "draining");
        }
        tokio::select! {
            () = ended.notified() => {}
            Ok(()) = table.changed() => {}
            Ok(()) = state.changed() => {}
            () = sleep_until(deadline.map_or(log_at, |deadline| deadline.min(log_at))) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_stopped_when_no_client_waits_or_after_the_limit() {
        let moment = Duration::from_millis(1);
        for (left, pending, open, can) in [
            (Duration::ZERO, 0, 0, Some(0)),
            (FIRST_BYTES_TIMEOUT - moment, 0, 1, None),
            (FIRST_BYTES_TIMEOUT, 0, 1, Some(0)),
            (FIRST_BYTES_TIMEOUT, 1, 1, None),
            (ANSWER_TIMEOUT - moment, 2, 3, None),
            (ANSWER_TIMEOUT, 2, 3, Some(2)),
        ] {
            assert_eq!(
                count_unanswered_if_stoppable(left, pending, open),
                can,
                "{left:?} {pending} {open}"
            );
        }
    }
}
