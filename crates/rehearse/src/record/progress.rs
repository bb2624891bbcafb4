//! Prints the progress on standard error: a line for each phase, and live counters on a terminal.
//! The output has no colours, so `NO_COLOR` is not needed.

use super::event::{Answer, Attempt};
use super::format::format_count;
use super::log::{Recorder, attempts_at_tested_address};
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Time between two updates of the counters.
const UPDATE_INTERVAL: Duration = Duration::from_millis(500);

/// Escape sequence that clears the terminal's line.
const CLEAR_LINE: &str = "\r\x1b[K";

/// Prints a line. A closed standard error is ignored.
pub(crate) fn print(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Returns the number of requests, and of those without a good answer.
fn count_requests(recorder: &Recorder) -> (usize, usize) {
    let bad = |attempt: &Attempt| usize::from(!matches!(attempt.answer, Answer::Good { .. }));
    recorder.read(|log| {
        attempts_at_tested_address(log).fold((0, 0), |(all, failed), attempt| {
            (all + 1, failed + bad(attempt))
        })
    })
}

/// Progress of a rehearsal. Clears the counters on drop.
#[derive(Debug)]
pub(crate) struct Progress {
    began: Instant,
    ticker: Option<JoinHandle<()>>,
}

impl Progress {
    /// Starts live counters if standard error is a terminal.
    pub(crate) fn new(recorder: &Arc<Recorder>) -> Self {
        let began = Instant::now();
        let ticker = io::stderr().is_terminal().then(|| {
            let recorder = Arc::clone(recorder);
            tokio::spawn(async move {
                let mut before = (began, 0);
                loop {
                    tokio::time::sleep(UPDATE_INTERVAL).await;
                    let (all, bad) = count_requests(&recorder);
                    let rate = all.saturating_sub(before.1) as f64 / before.0.elapsed().as_secs_f64();
                    before = (Instant::now(), all);
                    let (all, bad) = (format_count(all as u64), format_count(bad as u64));
                    let seconds = began.elapsed().as_secs();
                    let line =
                        format!("{CLEAR_LINE}{seconds} s: {all} requests, {rate:.0} a second, {bad} without a good answer");
                    let _ = io::stderr().write_all(line.as_bytes());
                }
            })
        });
        Self { began, ticker }
    }

    /// Prints the begin or end of a phase.
    pub(crate) fn print(&self, what: &str) {
        let clear = if self.ticker.is_some() {
            CLEAR_LINE
        } else {
            ""
        };
        print(&format!(
            "{clear}{:5.1} s  {what}",
            self.began.elapsed().as_secs_f64()
        ));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(ticker) = &self.ticker {
            ticker.abort();
            let _ = io::stderr().write_all(CLEAR_LINE.as_bytes());
        }
    }
}
