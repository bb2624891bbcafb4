//! Progress for the operator on standard error: plain lines with the time since the start. Write
//! errors are ignored, because an upgrade must not stop when the terminal is gone.

use berth_os::strip_error_numbers;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// While a wait goes on, its reason is printed again after this time.
const REPEAT_INTERVAL: Duration = Duration::from_secs(15);

/// A duration in whole seconds.
pub fn format_seconds(duration: Duration) -> String {
    humantime::format_duration(Duration::from_secs(duration.as_secs())).to_string()
}

#[derive(Debug)]
pub struct Progress {
    began: Instant,
    /// The last printed wait, and when it was printed.
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

    /// Prints a line with the elapsed time.
    pub fn print_line(&self, what: &str) {
        let _ = writeln!(
            std::io::stderr(),
            "{:6.1} s  {}",
            self.elapsed().as_secs_f64(),
            strip_error_numbers(what.to_owned())
        );
    }

    /// Prints a line that continues the previous line.
    pub fn print_detail(&self, what: &str) {
        let _ = writeln!(
            std::io::stderr(),
            "          {}",
            strip_error_numbers(what.to_owned())
        );
    }

    /// Prints the reason of a wait: at once if the reason is new, and otherwise every 15 s.
    pub fn print_wait(&self, what: &str) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting
            .as_ref()
            .is_some_and(|(last, printed)| last == what && printed.elapsed() < REPEAT_INTERVAL)
        {
            return;
        }
        self.print_line(&format!("     {what}"));
        *waiting = Some((what.to_owned(), Instant::now()));
    }
}
