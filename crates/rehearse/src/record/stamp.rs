//! Timestamps across all processes of a rehearsal.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A timestamp of `CLOCK_MONOTONIC`, in nanoseconds. All processes of a rehearsal share this clock,
/// so ends seen by a client and by an instance can be ordered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Stamp(pub u64);

impl Stamp {
    pub fn now() -> Self {
        // Every Linux has this clock. Without it, all stamps would be equal, and the verdict would
        // be unproven.
        Self(
            berth_os::clock::read_monotonic()
                .map_or(0, |t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX)),
        )
    }

    /// Returns the time since `earlier`. Zero if `earlier` is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the stamp `time` earlier.
    pub(crate) fn before(self, time: Duration) -> Self {
        Self(
            self.0
                .saturating_sub(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        )
    }

    /// Returns the stamp `after` later.
    #[must_use]
    pub(crate) fn plus(self, after: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

/// Converts a duration to a report's milliseconds. The precision is a microsecond, like that of the
/// measured waits.
pub(crate) fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}
