//! Limits and descendants of this process.

use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Raises the limit of open files to the hard limit and says what it is.
///
/// # Errors
/// What getrlimit(2) and setrlimit(2) say.
pub fn raise_file_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// Processor time of this process, user and system, in seconds.
#[must_use]
pub fn cpu_seconds() -> f64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// This process's use of the machine, after the names that Prometheus' client libraries agreed on. What
/// /proc does not tell is left out.
#[must_use]
pub fn usage() -> Vec<(&'static str, &'static str, f64)> {
    let mut all = Vec::new();
    let resident = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|statm| statm.split_ascii_whitespace().nth(1)?.parse::<f64>().ok());
    if let (Some(pages), Ok(Some(page))) = (resident, nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)) {
        all.push(("process_resident_memory_bytes", "Resident memory", pages * page as f64));
    }
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        // One of them is the directory that is being read.
        all.push(("process_open_fds", "Open file descriptors", open.count().saturating_sub(1) as f64));
    }
    if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
        all.push(("process_max_fds", "Most file descriptors", soft as f64));
    }
    all
}

/// Lets the child get SIGTERM when the thread that starts it ends: `pdeathsig` follows the thread, so
/// start children from the main thread. It outlives execve.
pub fn die_with_parent(command: &mut Command) {
    let parent = nix::unistd::getpid();
    // SAFETY: between fork and exec only prctl, getppid and error construction without allocation
    // are called, all async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            prctl::set_pdeathsig(Signal::SIGTERM)?;
            // The parent may have died before the line above.
            if nix::unistd::getppid() == parent { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
        });
    }
}
