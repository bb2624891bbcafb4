//! A thread that hangs, among others that do not.

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// A thread that stands still until this is dropped. A process that has one cannot be waited for.
pub(crate) struct Stopped(pub(crate) Pid);

impl Stopped {
    /// Stops it where it waits for events, or is about to: elsewhere it may hold a lock, for which the whole process would wait.
    pub(crate) fn new(thread: Pid) -> Self {
        ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD).unwrap();
        ptrace::interrupt(thread).unwrap();
        loop {
            let stop = waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
            if waits_for_events(thread) {
                return Self(thread);
            }
            // On to its next system call, with the signal that it stopped for if it was one.
            let signal = if let WaitStatus::Stopped(_, signal) = stop {
                Some(signal)
            } else {
                None
            };
            ptrace::syscall(thread, signal).unwrap();
        }
    }
}

/// Whether a thread that is stopped is in epoll_wait(2).
fn waits_for_events(thread: Pid) -> bool {
    #[cfg(target_arch = "x86_64")]
    const WAITS: &[i64] = &[libc::SYS_epoll_wait, libc::SYS_epoll_pwait];
    #[cfg(not(target_arch = "x86_64"))]
    const WAITS: &[i64] = &[libc::SYS_epoll_pwait];
    let call = std::fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap();
    call.split_whitespace()
        .next()
        .and_then(|number| number.parse().ok())
        .is_some_and(|call| WAITS.contains(&call))
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have ended with its process.
        let _ = ptrace::detach(self.0, None);
    }
}
