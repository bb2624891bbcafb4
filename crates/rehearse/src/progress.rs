//! Progress on standard error: a line a phase, and on a terminal live counters
//! below. No colours, so there is nothing that `NO_COLOR` has to turn off.

use super::event::{Answer, Attempt};
use super::log::{Recorder, attempts};
use super::report::format::count;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Time between two updates of the counters.
const UPDATE: Duration = Duration::from_millis(500);

/// Prints a line; it is no error when standard error is closed.
pub(crate) fn print(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Requests so far, and how many of them got no good answer.
fn counts(recorder: &Recorder) -> (usize, usize) {
    let bad = |attempt: &Attempt| usize::from(!matches!(attempt.answer, Answer::Good { .. }));
    recorder.read(|log| attempts(log).fold((0, 0), |(all, failed), attempt| (all + 1, failed + bad(attempt))))
}

/// Progress of one rehearsal. Dropping it clears the counters.
#[derive(Debug)]
pub(crate) struct Progress {
    began: Instant,
    bar: Option<ProgressBar>,
    ticker: Option<JoinHandle<()>>,
}

impl Progress {
    /// Live counters when standard error is a terminal, plain lines when not.
    pub(crate) fn new(recorder: &Arc<Recorder>) -> Self {
        let bar = io::stderr().is_terminal().then(ProgressBar::new_spinner);
        let ticker = bar.clone().map(|bar| {
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
                bar.set_style(style);
            }
            let recorder = Arc::clone(recorder);
            tokio::spawn(async move {
                let mut before = (Instant::now(), 0);
                loop {
                    tokio::time::sleep(UPDATE).await;
                    let (all, bad) = counts(&recorder);
                    let rate = all.saturating_sub(before.1) as f64 / before.0.elapsed().as_secs_f64();
                    before = (Instant::now(), all);
                    let (all, bad) = (count(all as u64), count(bad as u64));
                    bar.set_message(format!("{all} requests, {rate:.0} a second, {bad} without a good answer"));
                    bar.tick();
                }
            })
        });
        Self { began: Instant::now(), bar, ticker }
    }

    /// A phase began or ended.
    pub(crate) fn print(&self, what: &str) {
        let line = format!("{:5.1} s  {what}", self.began.elapsed().as_secs_f64());
        match &self.bar {
            Some(bar) => bar.println(line),
            None => print(&line),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(ticker) = &self.ticker {
            ticker.abort();
        }
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
