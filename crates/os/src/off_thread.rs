//! Runs calls that may block (on a disk that hangs, or on a kernel lock) away from a thread that
//! must not block.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// A wait is divided into this number of parts. If this process itself was stopped for a while,
/// only one part is used up, not the whole wait.
const PARTS: u32 = 4;

/// Makes calls on another thread, one after the other. A call that hangs is waited for once. Until
/// the call ends, further calls fail at once and start no thread.
#[derive(Debug, Clone)]
pub struct OffThread {
    what: &'static str,
    /// A single permit, held by the call that runs or is about to run. Closed before the last call.
    turns: Arc<Semaphore>,
    /// Locked by the running call.
    running: Arc<Mutex<()>>,
    /// True if the last wait for a call timed out.
    late: Arc<AtomicBool>,
}

impl OffThread {
    /// Makes a caller. `what` names the callee in messages.
    pub fn new(what: &'static str) -> Self {
        Self {
            what,
            turns: Arc::new(Semaphore::new(1)),
            running: Arc::default(),
            late: Arc::default(),
        }
    }

    /// Returns the result of a call if the call returns within `most`. A call that takes longer
    /// still runs to its end. Must be called within a tokio runtime that does not wait for its
    /// blocking threads when it ends.
    ///
    /// # Errors
    /// `TimedOut`; or the call panicked, or came after [`Self::finish_within`].
    pub async fn within<T: Send + 'static>(
        &self,
        most: Duration,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let what = self.what;
        if !self.late.load(Relaxed) || self.turns.available_permits() > 0 {
            let mut returned = std::pin::pin!(async {
                let last = move || io::Error::other(format!("{what}: the last call was made"));
                let (turns, running) = (self.turns.clone(), self.running.clone());
                let turn = turns.clone().acquire_owned().await.map_err(|_| last())?;
                self.late.store(false, Relaxed);
                let call = move || {
                    let (_turn, _running) = (turn, running.lock());
                    #[cfg(debug_assertions)]
                    hang_in_tests(what);
                    if turns.is_closed() {
                        Err(last())
                    } else {
                        Ok(call())
                    }
                };
                spawn_blocking(call).await?
            });
            for _ in 0..PARTS {
                if let Ok(returned) = timeout(most / PARTS, &mut returned).await {
                    return returned;
                }
            }
            self.late.store(true, Relaxed);
        }
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("no answer of {what} in {most:?}"),
        ))
    }

    /// Makes the last call, for example a removal, after the running call has ended, and waits for
    /// at most `most`. Queued calls are not made any more.
    pub fn finish_within(&self, most: Duration, call: impl FnOnce() + Send + 'static) {
        self.turns.close();
        let (running, (returns, returned)) = (self.running.clone(), mpsc::channel());
        let call = move || {
            let _running = running.lock();
            call();
            returns.send(())
        };
        if thread::Builder::new().spawn(call).is_ok() {
            let _ = returned.recv_timeout(most);
        }
    }
}

/// Hangs, in a debug build, while the directory that BERTH_TEST_HANGS names contains a file of the
/// call's name. A second file shows that a call hangs.
#[cfg(debug_assertions)]
fn hang_in_tests(what: &str) {
    let Some(directory) = std::env::var_os("BERTH_TEST_HANGS") else {
        return;
    };
    let file = std::path::Path::new(&directory).join(what);
    while file.exists() {
        let _ = std::fs::write(file.with_extension("hangs"), "");
        thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    const MOMENT: Duration = Duration::from_millis(40);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_call_that_hangs_is_waited_for_once_and_starts_no_further_thread() {
        let calls = OffThread::new("a disk");
        let (go_on, hangs) = mpsc::channel::<()>();
        let hung = calls
            .within(MOMENT, move || hangs.recv().is_err())
            .await
            .unwrap_err();
        assert_eq!(
            (hung.kind(), hung.to_string().as_str()),
            (ErrorKind::TimedOut, "no answer of a disk in 40ms")
        );
        let (called, calls_made) = mpsc::channel();
        for _ in 0..100 {
            let called = called.clone();
            // Fails at once, although the call may take long.
            let refused = calls
                .within(LONG, move || called.send(()))
                .await
                .unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::TimedOut);
        }
        drop(go_on);
        while calls.within(LONG, || ()).await.is_err() {
            tokio::task::yield_now().await;
        }
        assert!(
            calls_made.try_recv().is_err(),
            "a failed call was made later"
        );
        assert_eq!(calls.within(LONG, || 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_call_waits_for_a_slow_call_before_it() {
        let calls = OffThread::new("a disk");
        let (go_on, waits) = mpsc::channel::<()>();
        let first = calls.within(LONG, move || waits.recv().is_err());
        let second = calls.within(LONG, || 2);
        let ends = async { drop(go_on) };
        let (first, second, ()) = tokio::join!(first, second, ends);
        assert_eq!((first.unwrap(), second.unwrap()), (true, 2));
        assert!(calls.within(LONG, || panic!("a bug")).await.is_err());
        assert_eq!(calls.within(LONG, || 3).await.unwrap(), 3);
    }

    #[tokio::test]
    async fn no_call_is_made_after_the_last_one() {
        let calls = OffThread::new("a disk");
        let (go_on, waits) = mpsc::channel::<()>();
        let (called, made) = mpsc::channel();
        let (begins, begun) = tokio::sync::oneshot::channel();
        let first = calls.within(LONG, move || {
            begins.send(()).is_ok() && waits.recv().is_err()
        });
        let (second, third) = (called.clone(), called.clone());
        let waits_for_its_turn = calls.within(LONG, move || second.send("second").unwrap());
        let last = async {
            begun.await.unwrap();
            calls.finish_within(MOMENT, move || called.send("last").unwrap());
            drop(go_on);
        };
        let (first, second, ()) = tokio::join!(first, waits_for_its_turn, last);
        assert!(first.unwrap());
        let mut refused = second.is_err();
        refused &= calls
            .within(LONG, move || third.send("third").unwrap())
            .await
            .is_err();
        assert!(
            refused,
            "a lease written after its removal would be taken for a lease of a shim that hangs"
        );
        assert_eq!(made.iter().collect::<Vec<_>>(), ["last"]);
    }

    #[test]
    fn the_last_call_is_waited_for_within_its_limit() {
        let (go_on, hangs) = mpsc::channel::<()>();
        let (called, was_called) = mpsc::channel();
        let calls = OffThread::new("a disk");
        calls.finish_within(MOMENT, move || assert!(hangs.recv().is_err()));
        let late = called.clone();
        calls.finish_within(MOMENT, move || late.send("late").unwrap());
        assert!(was_called.try_recv().is_err());
        drop(go_on);
        calls.finish_within(LONG, move || called.send("in time").unwrap());
        let mut called: Vec<_> = was_called.iter().take(2).collect();
        called.sort_unstable();
        assert_eq!(called, ["in time", "late"]);
    }
}
