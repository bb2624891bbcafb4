//! Limits, capabilities and descendants of this process.

use nix::sched::{CloneFlags, setns};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, kill, sigaction};
use nix::unistd::{ForkResult, Pid, fork, getpid, getppid};
use procfs::process::Process;
use rustix::process::WaitOptions;
use rustix::thread::CapabilitySet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::sync::Arc;

/// Which capabilities this thread lacks for BPF programs that concern the network. CAP_BPF is new with Linux 5.8, and
/// part of CAP_SYS_ADMIN.
///
/// # Errors
/// What capget(2) says.
pub fn lacks_for_bpf() -> io::Result<Vec<&'static str>> {
    let has = rustix::thread::capabilities(None)?.effective;
    let needed =
        [("CAP_BPF", CapabilitySet::BPF | CapabilitySet::SYS_ADMIN), ("CAP_NET_ADMIN", CapabilitySet::NET_ADMIN)];
    Ok(needed.into_iter().filter(|(_, one_of)| !has.intersects(*one_of)).map(|(name, _)| name).collect())
}

/// The kernel's release, as `uname -r` says it.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Raises the limit of open files to the hard limit and says what it is.
pub fn raise_file_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

/// CPU time of this process, user and system, in seconds.
pub fn cpu_seconds() -> f64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// This process's use of the machine, after the names that Prometheus' client libraries agreed on. What
/// /proc does not tell is left out.
pub fn usage() -> Vec<(&'static str, &'static str, f64)> {
    let mut all = Vec::new();
    if let Ok(statm) = Process::myself().and_then(|own| own.statm()) {
        all.push(("process_resident_memory_bytes", "Resident memory", (statm.resident * procfs::page_size()) as f64));
    }
    // Not procfs: on some kernels it counts the directory that is being read, on others not.
    if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
        // One of them is the directory that is being read.
        all.push(("process_open_fds", "Open file descriptors", open.count().saturating_sub(1) as f64));
    }
    if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
        all.push(("process_max_fds", "Most file descriptors", soft as f64));
    }
    all
}

/// Lets SIGTERM and SIGINT end this process also where it is the first one of a PID namespace, for which the kernel
/// drops a signal without a handler. One that is ignored stays so. Execve takes that back.
pub fn end_on_signals() -> io::Result<()> {
    extern "C" fn end(signal: libc::c_int) {
        // SAFETY: it ends the process and is async-signal-safe.
        unsafe { libc::_exit(128 + signal) }
    }
    let action = SigAction::new(SigHandler::Handler(end), SaFlags::empty(), SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: the handler calls nothing but _exit.
        let before = unsafe { sigaction(signal, &action) }?;
        if matches!(before.handler(), SigHandler::SigIgn) {
            // SAFETY: it was so before.
            unsafe { sigaction(signal, &before) }?;
        }
    }
    Ok(())
}

/// Lets the child get SIGTERM when the thread that starts it ends: `pdeathsig` follows the thread, so
/// start children from the main thread. It outlives execve. When a process of several threads dies, each that still
/// lives gets its children for a moment, so it can come several times: see [`go_on_as_child`].
pub fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    // SAFETY: between fork and exec only prctl, getppid and error construction without allocation
    // are called, all async-signal-safe.
    unsafe {
        command.pre_exec(move || die_with(parent, Signal::SIGTERM));
    }
}

/// Lets the child run in a namespace of any kind that execve does not need anew.
pub fn in_namespace(command: &mut Command, namespace: Arc<OwnedFd>) {
    // SAFETY: between fork and exec only setns is called, and construction of an error without allocation: both
    // async-signal-safe.
    unsafe {
        command.pre_exec(move || Ok(setns(&*namespace, CloneFlags::empty())?));
    }
}

fn die_with(parent: Pid, signal: Signal) -> io::Result<()> {
    prctl::set_pdeathsig(signal)?;
    // The parent may have died before the line above.
    if getppid() == parent { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
}

/// The signal by which who stays in [`go_on_as_child`] kills the child.
pub const KILL_CHILD: Signal = Signal::SIGQUIT;

/// Goes on as a child of what was this process, which stays between it and the parent until it ends, and then ends
/// as it did. What asks a process to end (SIGTERM, SIGINT, SIGHUP) it passes on, each once, however often it comes, and
/// one [`KILL_CHILD`] as SIGKILL. It has one thread, so its own death reaches the child once: as SIGKILL, also through
/// execve.
///
/// To be called by a process of one thread.
///
/// # Errors
/// What the system calls say, or `ESRCH` in a child whose parent died at once.
pub fn go_on_as_child() -> io::Result<()> {
    let heard: SigSet =
        [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, KILL_CHILD].into_iter().collect();
    // Blocked before there is a child, so that none is missed.
    let mask = heard.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let parent = getpid();
    // SAFETY: with one thread, nobody holds a lock that the child would wait for in vain.
    match unsafe { fork() }? {
        ForkResult::Child => {
            mask.thread_set_mask()?;
            die_with(parent, Signal::SIGKILL)
        }
        ForkResult::Parent { child } => end_as(stay(child, &heard)?),
    }
}

/// Passes signals on until the child has ended.
fn stay(child: Pid, heard: &SigSet) -> io::Result<ExitStatus> {
    let mut told = SigSet::empty();
    loop {
        let (signal, passed) = match heard.wait()? {
            Signal::SIGCHLD => match ended(child)? {
                Some(status) => return Ok(status),
                None => continue,
            },
            KILL_CHILD => (KILL_CHILD, Signal::SIGKILL),
            signal => (signal, signal),
        };
        if told.contains(signal) {
            continue;
        }
        told.add(signal);
        if let Err(error) = kill(child, passed) {
            tracing::warn!(pid = child.as_raw(), signal = %passed, %error, "cannot signal the apiserver");
        }
    }
}

/// How a child ended, if it has.
fn ended(child: Pid) -> io::Result<Option<ExitStatus>> {
    // Not nix's: that one has no real-time signals.
    let ended = rustix::process::waitpid(rustix::process::Pid::from_raw(child.as_raw()), WaitOptions::NOHANG)?;
    Ok(ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())))
}

fn end_as(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        // One core file is enough.
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
        // SAFETY: the default action needs no handler, and no other thread has an opinion about it.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        let _ = SigSet::all().thread_unblock();
        // SAFETY: it takes any number.
        unsafe { libc::raise(signal) };
        std::process::exit(128 + signal);
    }
    std::process::exit(status.code().unwrap_or_default())
}
