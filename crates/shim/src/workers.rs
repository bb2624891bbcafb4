//! The data plane's threads: a current-thread runtime per core. A connection stays on its worker,
//! so that its two sockets and its buffer never change cores. Its counters hardly do: the thread
//! that accepts or receives a connection counts it for the worker.

use berth_node::terms::shorten_wait;
use berth_os::explained;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// Interval of a timer that is always set. A thread that sets a timer earlier than all its other
/// timers wakes itself once more (a write to an eventfd and a round of epoll), and each connection
/// that is half closed for a moment sets a timer. The timer with this interval is earlier.
const TICK_INTERVAL: Duration = Duration::from_millis(500);

/// How long a thread may take to end its connections: a blocked thread would never let the process
/// end.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The relaying threads. A drop ends the threads and every connection on them.
#[derive(Debug)]
pub(crate) struct Workers {
    handles: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
    stop: CancellationToken,
    /// Disconnected when the last thread has ended, because each thread holds a sender.
    running: Receiver<()>,
}

impl Workers {
    pub(crate) fn start(count: usize) -> io::Result<Self> {
        let (runs, running) = channel();
        let stop = CancellationToken::new();
        let mut workers = Self {
            handles: Vec::new(),
            threads: Vec::new(),
            stop,
            running,
        };
        // The sender is moved here so that it is dropped before `workers`. If a thread cannot be
        // started, the drop of `workers` waits until no sender is left.
        let runs = runs;
        for number in 0..count.max(1) {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            workers.handles.push(runtime.handle().clone());
            let (stop, runs) = (workers.stop.clone(), runs.clone());
            let thread = std::thread::Builder::new()
                .name(format!("berth-relay-{number}"))
                .spawn(move || {
                    let _runs = runs;
                    // The runtime is moved into the thread, so that its connections end before the
                    // end of the thread is reported.
                    let runtime = runtime;
                    runtime.block_on(run_worker(stop));
                })?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    pub(crate) fn handles(&self) -> &[Handle] {
        &self.handles
    }
}

async fn run_worker(stop: CancellationToken) {
    while tokio::time::timeout(TICK_INTERVAL, stop.cancelled())
        .await
        .is_err()
    {}
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop.cancel();
        if self.running.recv_timeout(shorten_wait(END_TIMEOUT)) == Err(RecvTimeoutError::Timeout) {
            // A thread that does not end in time ends with the process.
            return tracing::error!(
                code = %explained::THREAD_DOES_NOT_END,
                "a relaying thread does not end, and is not waited for"
            );
        }
        for thread in self.threads.drain(..) {
            // A thread that has panicked has printed that already.
            let _ = thread.join();
        }
    }
}
