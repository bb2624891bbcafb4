//! A timer on the clients' thread. The timer needs nothing that is under test, so it is late only
//! if this machine is too busy.

use super::Due;
use crate::config::LATE_TIMER;
use crate::record::{event::EventKind, log::Recorder, stamp::Stamp};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep_until;

/// Time between two ticks. Short compared with [`LATE_TIMER`], so that hardly any delay of the
/// thread falls between two ticks and is missed.
const TICK: Duration = Duration::from_millis(50);

/// Records every late tick until the future is dropped.
pub(super) async fn run(recorder: Arc<Recorder>) {
    loop {
        let due = Due::now().plus(TICK);
        sleep_until(due.instant).await;
        let late = Stamp::now().since(due.stamp);
        if late >= LATE_TIMER {
            recorder.add("", EventKind::Late(late));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::JoinSet;

    /// Returns how late the late ticks of the timer were while the clients' thread ran `meanwhile`.
    async fn measure_delays(meanwhile: impl Future<Output = ()>) -> Vec<Duration> {
        let recorder = Arc::new(Recorder::default());
        let mut timer = JoinSet::new();
        timer.spawn(run(Arc::clone(&recorder)));
        tokio::task::yield_now().await;
        meanwhile.await;
        tokio::time::sleep(2 * TICK).await;
        timer.shutdown().await;
        let late = recorder.drain().into_iter();
        late.map(|event| {
            if let EventKind::Late(late) = event.what {
                late
            } else {
                panic!("{event:?}")
            }
        })
        .collect()
    }

    #[tokio::test]
    async fn the_timer_is_late_while_its_thread_cannot_run() {
        let stood_still = LATE_TIMER + 4 * TICK;
        let late = measure_delays(async { std::thread::sleep(stood_still) }).await;
        assert!(!late.is_empty() && late[0] >= LATE_TIMER, "{late:?}");
    }

    /// A slow answer of the system under test does not make the timer late.
    #[tokio::test(start_paused = true)]
    async fn waiting_for_an_answer_does_not_make_the_timer_late() {
        assert!(
            measure_delays(tokio::time::sleep(Duration::from_secs(15)))
                .await
                .is_empty()
        );
    }
}
