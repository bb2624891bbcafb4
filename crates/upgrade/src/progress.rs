//! Progress for the operator, on standard error: plain lines with the time since the beginning. A
//! terminal that is gone is no reason to stop, so failures to write are ignored.

use berth_os::strip_error_numbers;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two lines on the same wait.
const AGAIN: Duration = Duration::from_secs(15);

/// A time in whole seconds.
pub fn seconds(duration: Duration) -> String {
    humantime::format_duration(Duration::from_secs(duration.as_secs())).to_string()
}

#[derive(Debug)]
pub struct Progress {
    began: Instant,
    /// The last wait that was printed, and when.
    waiting: Mutex<Option<(String, Instant)>>,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            waiting: Mutex::default(),
        }
    }
}

impl Progress {
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// A line with the time.
    pub fn line(&self, what: &str) {
        let _ = writeln!(
            std::io::stderr(),
            "{:6.1} s  {}",
            self.elapsed().as_secs_f64(),
            strip_error_numbers(what.to_owned())
        );
    }

    /// A line that belongs to the one before.
    pub fn more(&self, what: &str) {
        let _ = writeln!(
            std::io::stderr(),
            "          {}",
            strip_error_numbers(what.to_owned())
        );
    }

    /// What is waited for: at once if it is something else than before, else from time to time.
    pub fn waiting(&self, what: &str) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting
            .as_ref()
            .is_some_and(|(last, printed)| last == what && printed.elapsed() < AGAIN)
        {
            return;
        }
        self.line(&format!("     {what}"));
        *waiting = Some((what.to_owned(), Instant::now()));
    }
}
