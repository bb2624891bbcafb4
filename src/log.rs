//! Buffers log lines, so that no thread blocks on standard error.
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

/// Limit of buffered log lines, in bytes: some 5,000 lines, enough for a reader that only pauses.
const MAX_BUFFERED: usize = 1024 * 1024;

/// Time for which the end of the process waits while the reader of the log takes nothing.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The writing end of the buffer, which never blocks. A thread writes the lines from the buffer to
/// standard error, as long as the process lives.
#[derive(Debug, Clone)]
pub(crate) struct LineWriter(Arc<Shared>);

/// Makes the end of the process wait for the log. Dropping this value waits until all buffered
/// lines are written, or the reader has stopped.
#[derive(Debug)]
pub(crate) struct FlushGuard(LineWriter);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    limit: usize,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<u8>,
    /// Number of bytes that the writing thread has removed from `waiting` and has not written yet.
    taken: usize,
    /// Number of lines that were dropped and that no log line has reported yet.
    dropped: u64,
}

impl LineWriter {
    /// Starts a thread that writes lines to standard error.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn to_stderr() -> io::Result<(Self, FlushGuard)> {
        let report = |lines| {
            tracing::warn!(
                code = %explained::LOG_DROPPED,
                lines,
                "the log was not read: lines were dropped"
            );
        };
        Self::write_to(io::stderr(), MAX_BUFFERED, report)
    }

    /// Starts a thread that writes lines to `out`. The thread calls `report` with the number of
    /// dropped lines.
    fn write_to(
        out: impl Write + Send + 'static,
        limit: usize,
        report: impl Fn(u64) + Send + 'static,
    ) -> io::Result<(Self, FlushGuard)> {
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
        Ok((lines.clone(), FlushGuard(lines)))
    }
}

impl Write for LineWriter {
    /// Puts the line into the buffer. If the whole line has no room, drops it and counts it.
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

impl<'a> MakeWriter<'a> for LineWriter {
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
            // Write each line with one call. An apiserver may write to the same pipe, and its lines
            // then come between two lines, but not into one.
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

impl Drop for FlushGuard {
    fn drop(&mut self) {
        let shared = &*self.0.0;
        let mut state = shared.lock();
        // Wait as long as lines get written. Give up if none was written for a while.
        loop {
            let left = state.waiting.len() + state.taken;
            if left == 0 {
                return;
            }
            let same = |state: &mut State| state.waiting.len() + state.taken == left;
            let waited = shared
                .changed
                .wait_timeout_while(state, FLUSH_TIMEOUT, same);
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

    /// A writer that waits in each write until the test has read the line.
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

    fn start_line_writer(
        limit: usize,
    ) -> (Receiver<Vec<u8>>, LineWriter, FlushGuard, Receiver<u64>) {
        let ((out, read), (report, reports)) = (mpsc::sync_channel(0), mpsc::channel());
        let (lines, flush) =
            LineWriter::write_to(Out(out), limit, move |lines| report.send(lines).unwrap())
                .unwrap();
        (read, lines, flush, reports)
    }

    #[test]
    fn the_end_waits_for_the_last_line() {
        let (read, mut lines, flush, _reports) = start_line_writer(MAX_BUFFERED);
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
        let (read, mut lines, flush, reports) = start_line_writer(100);
        for number in 100..100 + LINES {
            lines.write_all(format!("{number:9}\n").as_bytes()).unwrap();
        }
        // The test reads no line now, and dropping `flush` must return nevertheless.
        drop(flush);
        assert!(reports.try_recv().is_err());
        assert_eq!(read.recv().unwrap(), b"      100\n");
        let missing = reports.recv().unwrap();
        assert!(
            (LINES - 20..LINES).contains(&missing) && LOG_LINES_DROPPED.load(Relaxed) >= missing,
            "{missing}"
        );
        // The number of dropped lines was reported as soon as there was room. Read the lines that
        // remain.
        let mut rest = Vec::new();
        while !lines.0.lock().waiting.is_empty() {
            rest.push(read.recv().unwrap());
        }
        lines.write_all(b"after\n").unwrap();
        rest.extend(read.iter().take_while(|line| line != b"after\n"));
        assert_eq!(rest.len() as u64, LINES - 1 - missing);
        assert!(reports.try_recv().is_err(), "reported once");
    }

    /// Nobody reads standard error any more, for example because its pipe is closed.
    #[test]
    fn lines_that_cannot_be_written_are_dropped() {
        let (read, mut lines, flush, reports) = start_line_writer(MAX_BUFFERED);
        drop(read);
        lines.write_all(b"lost\n").unwrap();
        drop(flush);
        assert_eq!(lines.0.lock().dropped, 1);
        assert!(reports.try_recv().is_err());
    }
}
