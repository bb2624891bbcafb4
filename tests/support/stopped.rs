//! A hanging thread in a process with running threads.

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// A thread that hangs until the value is dropped. `waitpid` cannot reap a process with a stopped
/// thread.
pub(crate) struct Stopped(pub(crate) Pid);

impl Stopped {
    /// Stops a thread in `epoll_wait` or on the way into it. A thread stopped elsewhere may hold a
    /// lock, and the whole process would wait for the lock.
    pub(crate) fn new(thread: Pid) -> Self {
        ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD).unwrap();
        ptrace::interrupt(thread).unwrap();
        loop {
            let stop = waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
            if waits_for_events(thread) {
                return Self(thread);
            }
            // Continue to the next system call, with the signal that stopped the thread, if any.
            let signal = if let WaitStatus::Stopped(_, signal) = stop {
                Some(signal)
            } else {
                None
            };
            ptrace::syscall(thread, signal).unwrap();
        }
    }
}

/// True if a stopped thread is in epoll_wait(2).
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
        // The thread may have ended with its process.
        let _ = ptrace::detach(self.0, None);
    }
}
