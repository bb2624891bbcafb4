//! Shared parts of the tests of shims: a shim in this process or as the real binary, with plain
//! sockets before and behind it.
//!
//! Every wait has a limit and names the event that did not happen. Probes come from 127.0.0.1 and
//! clients never do, so that a backend can tell them apart.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod cluster;
pub(crate) mod load;
pub(crate) mod metrics;
pub(crate) mod net;
pub(crate) mod process;
pub(crate) mod shim;
pub(crate) mod stopped;
pub(crate) mod tls;

#[allow(unused_imports, reason = "each test binary uses a part of it")]
pub(crate) use berth_testing::namespace::print_skipped;

use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest wait for an event that should happen at once. Generous, since machines are slow at
/// times.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Time in which a test checks that a forbidden event does not happen.
pub(crate) const MOMENT: Duration = Duration::from_millis(150);

/// Prints that the test proves nothing, with the test's name: its measuring thread was too late.
pub(crate) fn too_busy(what: &str) {
    print_skipped(&format!("this machine was too busy to tell: {what}"));
}

/// Creates a directory in memory, like /run. On a busy disk, writing a lease takes seconds.
pub(crate) fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

/// Polls until `look` returns a value.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "waited {PATIENCE:?} in vain: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
