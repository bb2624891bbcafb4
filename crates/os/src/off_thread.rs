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

/// Number of parts into which a wait is divided. If this process is stopped for a while (SIGSTOP),
/// only the current part runs out, not the whole wait.
const WAIT_PARTS: u32 = 4;

/// Makes calls on another thread, one after the other. If a call hangs, only its own caller waits.
/// Until that call ends, further calls fail at once and start no thread.
#[derive(Debug, Clone)]
pub struct OffThread {
    what: &'static str,
    /// A single permit. The call that runs, or is about to run, holds the permit.
    /// [`Self::make_last_call_within`] closes the semaphore before the last call.
    turns: Arc<Semaphore>,
    /// The running call holds this lock.
    running: Arc<Mutex<()>>,
    /// True if the caller that waited last gave up waiting.
    late: Arc<AtomicBool>,
}

impl OffThread {
    /// Makes an `OffThread`. In error messages, `what` names the thing that does not respond, for
    /// example a disk.
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
    /// `TimedOut`; or the call panicked, or came after [`Self::make_last_call_within`].
    pub async fn call_within<T: Send + 'static>(
        &self,
        most: Duration,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let what = self.what;
        if !self.late.load(Relaxed) || self.turns.available_permits() > 0 {
            let mut returned = std::pin::pin!(async {
                let last = move || {
                    io::Error::other(format!(
                        "{what}: no further call is made, because the process is ending"
                    ))
                };
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
            for _ in 0..WAIT_PARTS {
                if let Ok(returned) = timeout(most / WAIT_PARTS, &mut returned).await {
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

    /// Makes a last call, for example to remove a file, when the running call has ended. Calls that
    /// still wait for their turn are not made any more. Returns after at most `most`.
    pub fn make_last_call_within(&self, most: Duration, call: impl FnOnce() + Send + 'static) {
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

/// Lets a test make a call hang, in debug builds. The call hangs while the directory in
/// BERTH_TEST_HANGS has a file with the name of `what`. A second file then shows the test that the
/// call hangs.
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
            .call_within(MOMENT, move || hangs.recv().is_err())
            .await
            .unwrap_err();
        assert_eq!(
            (hung.kind(), hung.to_string().as_str()),
            (ErrorKind::TimedOut, "no answer of a disk in 40ms")
        );
        let (called, calls_made) = mpsc::channel();
        for _ in 0..100 {
            let called = called.clone();
            // This call may take long, but fails at once because an earlier call hangs.
            let refused = calls
                .call_within(LONG, move || called.send(()))
                .await
                .unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::TimedOut);
        }
        drop(go_on);
        while calls.call_within(LONG, || ()).await.is_err() {
            tokio::task::yield_now().await;
        }
        assert!(
            calls_made.try_recv().is_err(),
            "a failed call was made later"
        );
        assert_eq!(calls.call_within(LONG, || 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_call_waits_for_a_slow_call_before_it() {
        let calls = OffThread::new("a disk");
        let (go_on, waits) = mpsc::channel::<()>();
        let first = calls.call_within(LONG, move || waits.recv().is_err());
        let second = calls.call_within(LONG, || 2);
        let ends = async { drop(go_on) };
        let (first, second, ()) = tokio::join!(first, second, ends);
        assert_eq!((first.unwrap(), second.unwrap()), (true, 2));
        assert!(calls.call_within(LONG, || panic!("a bug")).await.is_err());
        assert_eq!(calls.call_within(LONG, || 3).await.unwrap(), 3);
    }

    #[tokio::test]
    async fn no_call_is_made_after_the_last_one() {
        let calls = OffThread::new("a disk");
        let (go_on, waits) = mpsc::channel::<()>();
        let (called, made) = mpsc::channel();
        let (begins, begun) = tokio::sync::oneshot::channel();
        let first = calls.call_within(LONG, move || {
            begins.send(()).is_ok() && waits.recv().is_err()
        });
        let (second, third) = (called.clone(), called.clone());
        let waits_for_its_turn = calls.call_within(LONG, move || second.send("second").unwrap());
        let last = async {
            begun.await.unwrap();
            calls.make_last_call_within(MOMENT, move || called.send("last").unwrap());
            drop(go_on);
        };
        let (first, second, ()) = tokio::join!(first, waits_for_its_turn, last);
        assert!(first.unwrap());
        let mut refused = second.is_err();
        refused &= calls
            .call_within(LONG, move || third.send("third").unwrap())
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
        calls.make_last_call_within(MOMENT, move || assert!(hangs.recv().is_err()));
        let late = called.clone();
        calls.make_last_call_within(MOMENT, move || late.send("late").unwrap());
        assert!(was_called.try_recv().is_err());
        drop(go_on);
        calls.make_last_call_within(LONG, move || called.send("in time").unwrap());
        let mut called: Vec<_> = was_called.iter().take(2).collect();
        called.sort_unstable();
        assert_eq!(called, ["in time", "late"]);
    }
}
