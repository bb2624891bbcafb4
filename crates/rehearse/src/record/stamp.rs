//! When something was, in all processes of a rehearsal.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A moment on `CLOCK_MONOTONIC`, in nanoseconds: the one clock that the processes of a rehearsal
/// share, so that a client's end can be put before or after an instance's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Stamp(pub u64);

impl Stamp {
    pub fn now() -> Self {
        // The clock is part of every Linux; were it not, all stamps would be equal and the verdict
        // would find no real test.
        Self(
            berth_os::clock::monotonic()
                .map_or(0, |t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX)),
        )
    }

    /// Time since `earlier`, zero if that is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The moment `time` earlier.
    pub(crate) fn before(self, time: Duration) -> Self {
        Self(
            self.0
                .saturating_sub(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        )
    }

    /// The moment `after` later.
    #[must_use]
    pub(crate) fn plus(self, after: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

/// As a report has it. Microseconds are as fine as the waits are measured.
pub(crate) fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}
