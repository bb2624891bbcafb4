//! What will be rehearsed: checked numbers, and the times that make a rehearsal.

use std::ops::RangeInclusive;
use std::time::Duration;

/// After this long without an answer a connection is lost (the design's figure).
pub const UNANSWERED: Duration = Duration::from_secs(15);

/// New connections a second: below, a run this short says nothing; above, one process cannot keep the
/// timetable.
pub const RATE: RangeInclusive<u32> = 20..=1000;

/// Clients with a kept connection: one each of HTTP/1.1 and HTTP/2 at least.
pub const CLIENTS: RangeInclusive<u32> = 2..=200;

/// Watches.
pub const WATCHES: RangeInclusive<u32> = 1..=500;

/// Longest `--shutdown-delay-duration`: production uses seconds to a minute.
pub const LONGEST_DELAY: Duration = Duration::from_secs(60);

/// Time between two requests of a kept connection.
pub const PACE: Duration = Duration::from_millis(100);

/// Time between two writes that watches must see.
pub const WRITE_EVERY: Duration = Duration::from_millis(100);

/// What will be rehearsed.
#[derive(Debug, Clone)]
pub struct Plan {
    /// New TLS connections a second, in [`RATE`].
    pub rate: u32,
    /// Clients with a kept connection, in [`CLIENTS`].
    pub clients: u32,
    /// Watches, in [`WATCHES`].
    pub watches: u32,
    /// kube-apiserver's flag of that name.
    pub shutdown_delay: Duration,
    /// Load on the old instance alone.
    pub before: Duration,
    /// Load while both serve.
    pub together: Duration,
    /// Load after the old instance is gone.
    pub after: Duration,
    /// Bound for an instance to get ready and joined.
    pub ready_within: Duration,
    /// Time from SIGTERM to SIGKILL, as in a pod or a systemd unit, beyond the shutdown delay.
    pub grace: Duration,
}

impl Plan {
    /// The default times: about twelve seconds in all.
    pub fn new(rate: u32, clients: u32, watches: u32, shutdown_delay: Duration) -> Self {
        Self {
            rate,
            clients,
            watches,
            shutdown_delay,
            before: Duration::from_secs(3),
            together: Duration::from_secs(3),
            after: Duration::from_secs(3),
            ready_within: Duration::from_secs(10),
            grace: Duration::from_secs(30),
        }
    }

    /// Descriptors that the load can have open at most: an answer that never comes holds its
    /// connection for [`UNANSWERED`], the store's sockets come on top.
    pub fn descriptors(&self) -> u64 {
        let fresh = u64::from(self.rate) * UNANSWERED.as_secs();
        fresh + 2 * u64::from(self.clients) + 3 * u64::from(self.watches) + 128
    }
}
