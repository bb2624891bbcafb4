//! A buffer for log lines, so that no thread blocks on standard error.
//!
//! Standard error is usually a pipe, and a write blocks while the pipe's reader has stopped. A
//! thread that relays must not block, so a separate thread writes a shim's log lines from a buffer.
//! When the buffer is full, lines are dropped and counted. Their number is logged as soon as lines
//! can be written again. Commands that do not relay write directly.

use berth_os::explained;
use berth_shim::metrics::LOG_LINES_DROPPED;
use std::io::{self, Write};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use tracing_subscriber::fmt::MakeWriter;

/// Maximum of buffered bytes: some 5,000 lines, enough for a reader that only pauses.
const WAITING: usize = 1024 * 1024;

/// Time for which the end of the process waits for a reader that has stopped.
const PATIENCE: Duration = Duration::from_secs(2);

/// Accepts log lines without ever blocking. A thread writes the lines for as long as the process
/// lives.
#[derive(Debug, Clone)]
pub(crate) struct Lines(Arc<Shared>);

/// Waits on drop until the buffered lines have been written or the reader has stopped.
#[derive(Debug)]
pub(crate) struct Flush(Lines);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    limit: usize,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<u8>,
    /// Bytes that the thread has removed from `waiting` and not yet written.
    taken: usize,
    /// Number of dropped lines that has not been logged yet.
    dropped: u64,
}

impl Lines {
    /// Writes lines to standard error.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn to_stderr() -> io::Result<(Self, Flush)> {
        let report = |lines| {
            tracing::warn!(
                code = %explained::LOG_DROPPED,
                lines,
                "the log was not read: lines of it were dropped"
            );
        };
        Self::to(io::stderr(), WAITING, report)
    }

    /// Writes lines to `out`. The writing thread calls `report` with the number of dropped lines.
    fn to(
        out: impl Write + Send + 'static,
        limit: usize,
        report: impl Fn(u64) + Send + 'static,
    ) -> io::Result<(Self, Flush)> {
        let shared = Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            limit,
        };
        let lines = Self(Arc::new(shared));
        let writing = lines.clone();
        thread::Builder::new()
            .name("berth-log".into())
            .spawn(move || writing.0.write_forever(out, report))?;
        Ok((lines.clone(), Flush(lines)))
    }
}

impl Write for Lines {
    /// Buffers the whole line, or drops the whole line.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut state = self.0.lock();
        if state.waiting.len() + line.len() > self.0.limit {
            state.dropped += 1;
            LOG_LINES_DROPPED.fetch_add(1, Relaxed);
        } else {
            state.waiting.extend_from_slice(line);
            self.0.changed.notify_all();
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_forever(&self, mut out: impl Write, report: impl Fn(u64)) {
        loop {
            let lines = {
                let state = self.lock();
                let waited = self
                    .changed
                    .wait_while(state, |state| state.waiting.is_empty());
                let mut state = waited.unwrap_or_else(PoisonError::into_inner);
                let lines = std::mem::take(&mut state.waiting);
                state.taken = lines.len();
                lines
            };
            // One write per line: an apiserver on the same pipe can then write between two lines,
            // but not within a line.
            for line in lines.split_inclusive(|byte| *byte == b'\n') {
                let written = out.write_all(line);
                let mut state = self.lock();
                state.taken -= line.len();
                let dropped = match written {
                    Ok(()) => std::mem::take(&mut state.dropped),
                    Err(_) => {
                        state.dropped += 1;
                        LOG_LINES_DROPPED.fetch_add(1, Relaxed);
                        0
                    }
                };
                self.changed.notify_all();
                drop(state);
                if dropped > 0 {
                    report(dropped);
                }
            }
        }
    }
}

impl Drop for Flush {
    fn drop(&mut self) {
        let shared = &*self.0.0;
        let mut state = shared.lock();
        // Wait on as long as there is progress.
        loop {
            let left = state.waiting.len() + state.taken;
            if left == 0 {
                return;
            }
            let same = |state: &mut State| state.waiting.len() + state.taken == left;
            let waited = shared.changed.wait_timeout_while(state, PATIENCE, same);
            let (now, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                return;
            }
            state = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{self, Receiver, SyncSender};

    /// A writer whose writes wait until the test reads them.
    struct Out(SyncSender<Vec<u8>>);

    impl Write for Out {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0
                .send(line.to_vec())
                .map_err(|_| io::ErrorKind::BrokenPipe)?;
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn make_lines(limit: usize) -> (Receiver<Vec<u8>>, Lines, Flush, Receiver<u64>) {
        let ((out, read), (report, reports)) = (mpsc::sync_channel(0), mpsc::channel());
        let (lines, flush) =
            Lines::to(Out(out), limit, move |lines| report.send(lines).unwrap()).unwrap();
        (read, lines, flush, reports)
    }

    #[test]
    fn the_end_waits_for_the_last_line() {
        let (read, mut lines, flush, _reports) = make_lines(WAITING);
        for number in 0..1000 {
            lines.write_all(format!("{number}\n").as_bytes()).unwrap();
        }
        let reading = thread::spawn(move || read.iter().take(1000).last());
        drop(flush);
        assert_eq!(reading.join().unwrap().unwrap(), b"999\n");
    }

    #[test]
    fn dropped_lines_are_counted_and_reported() {
        const LINES: u64 = 1000;
        let (read, mut lines, flush, reports) = make_lines(100);
        for number in 100..100 + LINES {
            lines.write_all(format!("{number:9}\n").as_bytes()).unwrap();
        }
        // The reader has stopped, but the drop does not wait for ever.
        drop(flush);
        assert!(reports.try_recv().is_err());
        assert_eq!(read.recv().unwrap(), b"      100\n");
        let missing = reports.recv().unwrap();
        assert!(
            (LINES - 20..LINES).contains(&missing) && LOG_LINES_DROPPED.load(Relaxed) >= missing,
            "{missing}"
        );
        // The report comes as soon as the buffer has room again.
        let mut rest = Vec::new();
        while !lines.0.lock().waiting.is_empty() {
            rest.push(read.recv().unwrap());
        }
        lines.write_all(b"after\n").unwrap();
        rest.extend(read.iter().take_while(|line| line != b"after\n"));
        assert_eq!(rest.len() as u64, LINES - 1 - missing);
        assert!(reports.try_recv().is_err(), "reported once");
    }

    /// Standard error may be a pipe without a reader.
    #[test]
    fn lines_that_cannot_be_written_are_dropped() {
        let (read, mut lines, flush, reports) = make_lines(WAITING);
        drop(read);
        lines.write_all(b"lost\n").unwrap();
        drop(flush);
        assert_eq!(lines.0.lock().dropped, 1);
        assert!(reports.try_recv().is_err());
    }
}
