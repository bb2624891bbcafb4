//! Calls that may block (on a disk that stalls, or on a lock of the kernel), away from a thread that has to go on.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// A wait has this many parts: a process that was stopped itself has used up one of them, not the whole wait.
const PARTS: u32 = 4;

/// Makes calls on another thread, one after the other. A call that hangs is waited for once; until it ends, further calls fail at
/// once and start no thread.
#[derive(Debug, Clone)]
pub struct OffThread {
    what: &'static str,
    /// One permit, for the call that is being made or was begun; closed before the last call.
    turns: Arc<Semaphore>,
    /// Held by the call that is being made.
    running: Arc<Mutex<()>>,
    /// The last wait for a call was in vain.
    late: Arc<AtomicBool>,
}

impl OffThread {
    /// `what` is called, for messages.
    pub fn new(what: &'static str) -> Self {
        Self {
            what,
            turns: Arc::new(Semaphore::new(1)),
            running: Arc::default(),
            late: Arc::default(),
        }
    }

    /// What a call returns, if that is within this time. A call that returns later is made nevertheless. To be called within a tokio
    /// runtime, whose end must not wait for its threads.
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

    /// As [`Self::within`], where something is dropped: the last call, after the one that is being made. Calls that wait for their turn
    /// are not made any more.
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

/// In a debug build, a call hangs while the directory that this variable names has a file of the call's name. Another file shows that a
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
            // At once, however long it may take.
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
            "what failed is not made up for"
        );
        assert_eq!(calls.within(LONG, || 7).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn a_call_that_takes_long_is_waited_for_by_the_next() {
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
    async fn after_the_last_call_none_is_made() {
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
            "a lease that is written after it was removed is that of a shim which hangs"
        );
        assert_eq!(made.iter().collect::<Vec<_>>(), ["last"]);
    }

    #[test]
    fn what_ends_is_waited_for_no_longer_than_it_may_take() {
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
