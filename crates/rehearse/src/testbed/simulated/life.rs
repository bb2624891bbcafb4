//! The phases of a simulated apiserver, which follow kube-apiserver's, and the waits between them.

use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Time that connections wait in the queue of a new listener. kube-apiserver opens the listener
/// with its configuration, and accepts when its APIs are installed. With a shared port, clients
/// waited for 1.5 to 2.6 s (docs/measured.md).
pub(super) const SERVE_DELAY: Duration = Duration::from_secs(2);

/// Time until RBAC knows its roles. Until then every request except health checks gets 403. In
/// docs/measured.md, at some 50 requests a second, 71 to 144 were lost on a shared port, most of
/// them by a 403.
pub(super) const ROLES_DELAY: Duration = Duration::from_secs(3);

/// Time limit for requests after the end of listening (kube-apiserver's request timeout).
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Time limit for connections after the drain, if the server kept listening during the drain
/// (`--shutdown-send-retry-after`).
pub(super) const LINGER_TIMEOUT: Duration = Duration::from_secs(2);

/// The phases in the life of a simulated apiserver, in order. Each token is cancelled when its
/// phase begins.
#[derive(Debug, Clone, Default)]
pub(super) struct Life {
    /// `/readyz` may be 200.
    pub(super) ready: CancellationToken,
    /// After SIGTERM: `/readyz` is 500, everything else continues.
    pub(super) terminating: CancellationToken,
    /// New requests on open connections are rejected, and watches end.
    pub(super) draining: CancellationToken,
    /// The listener is closed. Connections are closed as soon as no request is in flight.
    pub(super) closing: CancellationToken,
    /// Requests in flight, except watches.
    requests: TaskTracker,
}

impl Life {
    /// Counts a request until the token is dropped. `None` if the request must be rejected.
    pub(super) fn begin_request(&self) -> Option<TaskTrackerToken> {
        (!self.draining.is_cancelled()).then(|| self.requests.token())
    }

    /// True if `/readyz` is 200.
    pub(super) fn is_ready(&self) -> bool {
        self.ready.is_cancelled() && !self.terminating.is_cancelled()
    }

    /// Waits for the post-start hooks, reports readiness, then turns ready. Does nothing after
    /// SIGTERM.
    pub(super) async fn start<F: Future<Output = ()>>(
        &self,
        hooks: impl Future<Output = ()>,
        report: impl FnOnce() -> F,
    ) {
        if self.terminating.run_until_cancelled(hooks).await.is_some() {
            report().await;
            self.ready.cancel();
        }
    }

    /// Begins to drain, then to close. With `answer_meanwhile` the close waits until no request is
    /// in flight.
    pub(super) async fn drain(&self, answer_meanwhile: bool) {
        self.draining.cancel();
        if answer_meanwhile {
            self.requests.close();
            let _ = tokio::time::timeout(DRAIN_TIMEOUT, self.requests.wait()).await;
        }
        self.closing.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn closing_waits_for_requests_only_when_it_answers_meanwhile() {
        let life = Life::default();
        let request = life.begin_request();
        life.drain(false).await;
        assert!(life.closing.is_cancelled() && life.begin_request().is_none());
        drop(request);

        let life = Life::default();
        let request = life.begin_request().unwrap();
        let drain = tokio::spawn({
            let life = life.clone();
            async move { life.drain(true).await }
        });
        life.draining.cancelled().await;
        assert!(!life.closing.is_cancelled());
        drop(request);
        drain.await.unwrap();
        assert!(life.closing.is_cancelled());
    }

    #[tokio::test]
    async fn an_instance_stopped_before_it_is_ready_never_gets_ready() {
        let life = Life::default();
        life.terminating.cancel();
        life.start(std::future::pending(), || async {}).await;
        assert!(!life.is_ready() && !life.ready.is_cancelled());
    }
}
