//! For tests that need a network namespace of their own.

use nix::sched::{CloneFlags, unshare};
use std::io::{self, Write as _};

/// Runs a test on a thread that is in a new one. Where there is none, or the test returns what is missing, it is skipped.
pub(crate) fn run(name: &str, test: impl FnOnce() -> Result<(), String> + Send + 'static) {
    let thread = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|error| error.to_string())?;
        test()
    });
    match thread.join() {
        Ok(Ok(())) => {}
        // Not by eprintln!, which a test's harness keeps to itself.
        Ok(Err(why)) => drop(writeln!(io::stderr(), "skipped: {name}: {why}")),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
