//! Progress on standard error: a line a phase, and on a terminal live counters
//! below. No colours, so there is nothing that `NO_COLOR` has to turn off.

use super::event::{Answer, Attempt};
use super::format::count;
use super::log::{Recorder, attempts};
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Time between two updates of the counters.
const UPDATE: Duration = Duration::from_millis(500);

/// Begins a terminal's line anew, empty.
const CLEAR: &str = "\r\x1b[K";

/// Prints a line; it is no error when standard error is closed.
pub(crate) fn print(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Requests so far, and how many of them got no good answer.
fn counts(recorder: &Recorder) -> (usize, usize) {
    let bad = |attempt: &Attempt| usize::from(!matches!(attempt.answer, Answer::Good { .. }));
    recorder.read(|log| {
        attempts(log).fold((0, 0), |(all, failed), attempt| {
            (all + 1, failed + bad(attempt))
        })
    })
}

/// Progress of one rehearsal. Dropping it clears the counters.
#[derive(Debug)]
pub(crate) struct Progress {
    began: Instant,
    ticker: Option<JoinHandle<()>>,
}

impl Progress {
    /// Live counters when standard error is a terminal, plain lines when not.
    pub(crate) fn new(recorder: &Arc<Recorder>) -> Self {
        let began = Instant::now();
        let ticker = io::stderr().is_terminal().then(|| {
            let recorder = Arc::clone(recorder);
            tokio::spawn(async move {
                let mut before = (began, 0);
                loop {
                    tokio::time::sleep(UPDATE).await;
                    let (all, bad) = counts(&recorder);
                    let rate = all.saturating_sub(before.1) as f64 / before.0.elapsed().as_secs_f64();
                    before = (Instant::now(), all);
                    let (all, bad) = (count(all as u64), count(bad as u64));
                    let seconds = began.elapsed().as_secs();
                    let line =
                        format!("{CLEAR}{seconds} s: {all} requests, {rate:.0} a second, {bad} without a good answer");
                    let _ = io::stderr().write_all(line.as_bytes());
                }
            })
        });
        Self { began, ticker }
    }

    /// A phase began or ended.
    pub(crate) fn print(&self, what: &str) {
        let clear = if self.ticker.is_some() { CLEAR } else { "" };
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
            let _ = io::stderr().write_all(CLEAR.as_bytes());
        }
    }
}
