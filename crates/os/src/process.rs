//! Functions for processes: limits, capabilities, signals, children, and processes that are held by
//! a pidfd.

use crate::explained;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{
    SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, kill, sigaction,
};
use nix::unistd::{
    ForkResult, Gid, Pid, Uid, dup2_stderr, dup2_stdin, dup2_stdout, fork, geteuid, getpid,
    getppid, setgid, setgroups, setsid, setuid,
};
use procfs::process::{Limit, LimitValue, Process};
use procfs::{CpuInfo, Current as _, ProcResult};
use rustix::process::{PidfdFlags, WaitOptions};
use rustix::thread::CapabilitySet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Upper limit of open files: the kernel's default of /proc/sys/fs/nr_open. If the limit is much
/// higher, a program that closes every possible descriptor takes minutes.
const MAX_OPEN_FILES: u64 = 1 << 20;

/// Returns the names of the capabilities that this thread lacks for loading BPF programs that steer
/// connections. CAP_BPF is new with Linux 5.8, and part of CAP_SYS_ADMIN.
///
/// # Errors
/// Errors of capget(2).
pub fn missing_capabilities_for_bpf() -> io::Result<Vec<&'static str>> {
    let has = rustix::thread::capabilities(None)?.effective;
    let needed = [
        ("CAP_BPF", CapabilitySet::BPF | CapabilitySet::SYS_ADMIN),
        ("CAP_NET_ADMIN", CapabilitySet::NET_ADMIN),
    ];
    Ok(needed
        .into_iter()
        .filter(|(_, one_of)| !has.intersects(*one_of))
        .map(|(name, _)| name)
        .collect())
}

/// Returns the number of processors of this node that are online, even if this process may use only
/// some of them. (With musl, sysconf(3) counts only those.)
pub fn count_cpus() -> usize {
    CpuInfo::current().map_or(1, |info| info.num_cores().max(1))
}

/// Raises the limit of locked memory. The new limit is unlimited if this process may raise its hard
/// limit. Returns true if the limit was changed.
pub(crate) fn raise_locked_memory_limit() -> bool {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_MEMLOCK) else {
        return false;
    };
    let raise = |to| soft < to && setrlimit(Resource::RLIMIT_MEMLOCK, to, to).is_ok();
    raise(libc::RLIM_INFINITY) || raise(hard)
}

/// Returns the kernel's release, as `uname -r` prints it.
pub fn kernel_release() -> String {
    rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned()
}

/// Raises the limit of open files to the hard limit, or to the kernel's default if the hard limit
/// is higher, for example `infinity`. Returns the smaller of the hard limit and the kernel's
/// default.
pub fn raise_file_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let most = hard.min(MAX_OPEN_FILES);
    if soft < most {
        setrlimit(Resource::RLIMIT_NOFILE, most, hard)?;
    }
    Ok(most)
}

/// Raises the limit of open files as [`raise_file_limit`] does. As root, raises the hard limit too,
/// up to the kernel's default.
pub fn raise_hard_file_limit() -> io::Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let kernels = fs::read_to_string("/proc/sys/fs/nr_open")
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let most = kernels.unwrap_or(MAX_OPEN_FILES).min(MAX_OPEN_FILES);
    if hard < most && setrlimit(Resource::RLIMIT_NOFILE, most, most).is_ok() {
        return Ok(most);
    }
    raise_file_limit()
}

/// Returns the CPU time of this process, user and system, in seconds.
pub fn cpu_seconds() -> f64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| {
        seconds(usage.user_time()) + seconds(usage.system_time())
    })
}

/// Returns what this process uses of the machine, by the metric names of Prometheus' client
/// libraries. Values that /proc does not show are missing.
pub fn read_usage() -> Vec<(&'static str, &'static str, f64)> {
    let mut all = Vec::new();
    if let Ok(own) = Process::myself() {
        if let Ok(statm) = own.statm() {
            let help = "Resident memory of the shim's process, in bytes";
            all.push((
                "process_resident_memory_bytes",
                help,
                (statm.resident * procfs::page_size()) as f64,
            ));
        }
        if let (Ok(stat), Ok(boot)) = (own.stat(), procfs::boot_time_secs()) {
            let help = "Start of the shim's process, in seconds since 1970";
            let start = boot as f64 + stat.starttime as f64 / procfs::ticks_per_second() as f64;
            all.push(("process_start_time_seconds", help, start));
        }
    }
    // Count the files here: procfs counts the directory being read among them on some kernels and
    // not on others.
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        // The listing itself opens one descriptor.
        all.push((
            "process_open_fds",
            "Open file descriptors of the shim's process",
            open.count().saturating_sub(1) as f64,
        ));
    }
    if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
        all.push((
            "process_max_fds",
            "Most file descriptors that the shim's process may have",
            soft as f64,
        ));
    }
    all
}

/// Lets SIGTERM and SIGINT end this process even if it is the first process of a PID namespace, for
/// which the kernel drops signals without a handler. Ignored signals stay ignored. Execve resets
/// the handlers.
pub fn end_on_signals() -> io::Result<()> {
    extern "C" fn end(signal: libc::c_int) {
        // SAFETY: _exit only ends the process, and is async-signal-safe.
        unsafe { libc::_exit(128 + signal) }
    }
    let action = SigAction::new(SigHandler::Handler(end), SaFlags::empty(), SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: the handler calls nothing but _exit.
        let before = unsafe { sigaction(signal, &action) }?;
        if matches!(before.handler(), SigHandler::SigIgn) {
            // SAFETY: the action was in effect before.
            unsafe { sigaction(signal, &before) }?;
        }
    }
    Ok(())
}

/// Makes the kernel send the child a signal when the thread that starts the child ends. `pdeathsig`
/// follows the thread, so start children from the main thread. The setting outlives execve. When a
/// process of several threads dies, its children pass to each thread that still lives for a moment,
/// so the signal can come several times: see [`continue_as_child`].
pub fn die_with_parent(command: &mut Command, signal: Signal) {
    let parent = getpid();
    // SAFETY: between fork and exec only prctl, getppid and error construction without allocation
    // are called, and they are async-signal-safe.
    unsafe {
        command.pre_exec(move || die_with_process(parent, signal));
    }
}

/// Lets the child ignore a signal, as nohup(1) does with SIGHUP. The setting outlives execve.
pub fn ignore_signal(command: &mut Command, signal: Signal) {
    let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
    // SAFETY: between fork and exec only sigaction(2) is called, which is async-signal-safe, and no
    // handler is set.
    unsafe {
        command.pre_exec(move || {
            sigaction(signal, &ignore)?;
            Ok(())
        });
    }
}

/// Removes variables `BERTH_*` from a child's environment. They would set options of berth, and the
/// child must have only the options of its command line.
pub fn remove_berth_variables(command: &mut Command) {
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"BERTH_"))
    {
        command.env_remove(name);
    }
}

/// Returns the parent of a process. `None` if the process does not exist.
pub fn parent_of(pid: i32) -> Option<i32> {
    Process::new(pid)
        .and_then(|process| process.stat())
        .ok()
        .map(|stat| stat.ppid)
}

/// A process held by its pidfd: the process ID may be reused, but the descriptor always means the
/// same process.
#[derive(Debug)]
pub struct HeldProcess {
    pub pid: i32,
    fd: OwnedFd,
}

impl HeldProcess {
    /// Opens a process.
    ///
    /// # Errors
    /// No process has this ID.
    pub fn of(pid: i32) -> io::Result<Self> {
        let number = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            pid,
            fd: rustix::process::pidfd_open(number, PidfdFlags::empty())?,
        })
    }

    /// Returns the result of `read`, which finds the process by its ID. (An open root directory and
    /// program would not replace the check: when the last process of a mount namespace ends, the
    /// mounts below its root disappear, and a copy of them would be empty.)
    ///
    /// # Errors
    /// The error of `read`, or the process has ended, so that `read` may have read another process.
    pub fn read_while_alive<T>(&self, read: impl FnOnce(i32) -> io::Result<T>) -> io::Result<T> {
        let found = read(self.pid);
        if self.ends_within(Duration::ZERO)? {
            return Err(io::Error::other(format!(
                "process {} ended meanwhile",
                self.pid
            )));
        }
        found
    }

    /// Waits until the process and all its threads have ended, but at most for `most`. Then none of
    /// its files is open any more. Returns true if the process has ended.
    ///
    /// # Errors
    /// Errors of poll(2).
    pub fn ends_within(&self, most: Duration) -> io::Result<bool> {
        let until = Instant::now() + most;
        let mut ends = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match poll(
                &mut ends,
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX),
            ) {
                Err(Errno::EINTR) => {}
                ready => return Ok(ready? > 0),
            }
        }
    }

    /// Sends SIGKILL.
    ///
    /// # Errors
    /// The process has ended, or may not be signalled.
    pub fn kill(&self) -> io::Result<()> {
        Ok(rustix::process::pidfd_send_signal(
            &self.fd,
            rustix::process::Signal::KILL,
        )?)
    }

    /// Stops the process (SIGSTOP), and waits at most for `most` until none of its threads runs.
    /// The process continues when the result is dropped.
    ///
    /// # Errors
    /// The process has ended, may not be signalled, or has a thread that still runs, for example a
    /// thread that waits for a disk.
    pub fn pause(&self, most: Duration) -> io::Result<Paused<'_>> {
        let guard = start_sigcont_guard(self.pid)?;
        rustix::process::pidfd_send_signal(&self.fd, rustix::process::Signal::STOP)?;
        let paused = Paused {
            process: self,
            guard,
        };
        let until = Instant::now() + most;
        loop {
            if self.read_while_alive(is_stopped)? {
                return Ok(paused);
            }
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(CHECK_INTERVAL);
        }
    }
}

/// Pause between two checks of a process that is being stopped.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// True if every thread of a process is stopped, so that none runs or waits in the kernel.
fn is_stopped(pid: i32) -> io::Result<bool> {
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let stat = match fs::read_to_string(thread?.path().join("stat")) {
            // The thread has ended meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
            stat => stat?,
        };
        // The name of the thread precedes the state, and may contain parentheses, so search from
        // the end.
        let state = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        if !matches!(state, Some('T' | 't' | 'Z' | 'X')) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Starts a guard: a process that lets a stopped process continue as soon as this process has
/// ended, even by SIGKILL, because the kernel then closes the pipe that the guard reads. The guard
/// has a process group of its own, and so outlives signals to the process group of this process.
fn start_sigcont_guard(pid: i32) -> io::Result<Child> {
    let mut guard = Command::new("sh");
    guard.args([
        "-c",
        "trap '' INT HUP TERM; read -r line; kill -CONT \"$0\"",
        &pid.to_string(),
    ]);
    guard
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// A process that was stopped by SIGSTOP. The process continues when this value is dropped or this
/// process ends.
#[derive(Debug)]
pub struct Paused<'a> {
    process: &'a HeldProcess,
    guard: Child,
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.process.fd, rustix::process::Signal::CONT);
        // Kill the guard before its pipe closes. If the stopped process has ended, its ID may
        // belong to another process, which the guard must not signal.
        let _ = self.guard.kill();
        let _ = self.guard.wait();
    }
}

/// Attributes of a running process, for starting another process like it.
#[derive(Debug, Clone)]
pub struct ProcessAttributes {
    pub environment: Vec<(OsString, OsString)>,
    pub directory: PathBuf,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    /// Limits of resources (setrlimit(2)), each with its soft and its hard value.
    pub limits: Vec<(Resource, u64, u64)>,
    pub oom_score_adj: i16,
    /// Anonymous memory in bytes, that is memory which belongs to no file. A process like this one
    /// needs as much memory.
    pub anonymous: u64,
}

impl ProcessAttributes {
    /// Reads the attributes of a process in the namespaces of this process.
    ///
    /// # Errors
    /// The process has ended, or may not be inspected.
    pub fn of(pid: i32) -> io::Result<Self> {
        Self::read(pid).map_err(io::Error::other)
    }

    fn read(pid: i32) -> ProcResult<Self> {
        let process = Process::new(pid)?;
        let (status, limits) = (process.status()?, process.limits()?);
        let number = |limit| match limit {
            LimitValue::Unlimited => libc::RLIM_INFINITY,
            LimitValue::Value(value) => value,
        };
        let limit = |of,
                     Limit {
                         soft_limit,
                         hard_limit,
                     }| (of, number(soft_limit), number(hard_limit));
        Ok(Self {
            environment: process
                .environ()?
                .into_iter()
                .filter(|(name, _)| !name.is_empty())
                .collect(),
            directory: process.cwd()?,
            uid: status.euid,
            gid: status.egid,
            groups: status.groups,
            limits: vec![
                limit(Resource::RLIMIT_NOFILE, limits.max_open_files),
                limit(Resource::RLIMIT_NPROC, limits.max_processes),
                limit(Resource::RLIMIT_CORE, limits.max_core_file_size),
                limit(Resource::RLIMIT_MEMLOCK, limits.max_locked_memory),
            ],
            oom_score_adj: process.oom_score_adj()?,
            anonymous: status.rssanon.unwrap_or_default() * 1024,
        })
    }

    /// Gives a child the same environment, directory, user and limits. The child gets SIGKILL when
    /// the thread that starts it ends. The caller must provide access to the child's program, and
    /// set the OOM score ([`Self::set_oom_score`]).
    pub fn apply_attributes_to_command(&self, command: &mut Command) {
        self.set_environment_and_directory(command);
        let credentials = self.credentials();
        let parent = getpid();
        // SAFETY: between fork and exec only the system calls of `assume_credentials`, prctl and
        // getppid are made, and an error is constructed without allocation. They are
        // async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                credentials.assume_credentials()?;
                // Request the signal last, because the kernel forgets the request when the user
                // changes.
                die_with_process(parent, Signal::SIGKILL)
            });
        }
    }

    /// Sets a child's environment and working directory, but not its user and limits.
    pub(crate) fn set_environment_and_directory(&self, command: &mut Command) {
        command
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.current_dir(&self.directory);
    }

    pub(crate) fn credentials(&self) -> Credentials {
        Credentials {
            uid: Uid::from_raw(self.uid),
            gid: Gid::from_raw(self.gid),
            groups: self
                .groups
                .iter()
                .map(|group| Gid::from_raw(*group))
                .collect(),
            limits: self.limits.clone(),
        }
    }

    /// Sets a child's OOM score.
    ///
    /// # Errors
    /// A score lower than the score of this process needs CAP_SYS_RESOURCE.
    pub fn set_oom_score(&self, child: u32) -> io::Result<()> {
        let child = i32::try_from(child).map_err(io::Error::other)?;
        Process::new(child)
            .and_then(|child| child.set_oom_score_adj(self.oom_score_adj))
            .map_err(io::Error::other)
    }
}

/// The user, the groups and the limits of a process, for use after fork(2).
#[derive(Debug)]
pub(crate) struct Credentials {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
    limits: Vec<(Resource, u64, u64)>,
}

impl Credentials {
    /// Takes over the limits, and as root also the groups and the user. Makes system calls only,
    /// without allocation.
    ///
    /// # Errors
    /// Errors of the system calls.
    pub(crate) fn assume_credentials(&self) -> io::Result<()> {
        for (resource, soft, hard) in &self.limits {
            setrlimit(*resource, *soft, *hard)?;
        }
        // Only root may change its user.
        if geteuid().is_root() {
            setgroups(&self.groups)?;
            setgid(self.gid)?;
            setuid(self.uid)?;
        }
        Ok(())
    }
}

/// Tells the two processes apart that return from [`fork_detached`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detached {
    /// The process that called `fork_detached`, with the daemon's process ID.
    Caller(i32),
    /// The daemon, in a session of its own.
    Daemon,
}

/// Checks that this process has only one thread.
pub(crate) fn check_single_threaded() -> io::Result<()> {
    match Process::myself()
        .and_then(|own| own.stat())
        .map_err(io::Error::other)?
        .num_threads
    {
        1 => Ok(()),
        threads => Err(io::Error::other(format!(
            "this process has {threads} threads"
        ))),
    }
}

/// Forks this process, which must have one thread. The child gets a session of its own. Must be
/// called before the process makes resources that parent and child would share, such as a runtime
/// with its pipe for signals.
///
/// # Errors
/// The process has several threads, or errors of the system calls.
pub fn fork_detached() -> io::Result<Detached> {
    check_single_threaded()?;
    // SAFETY: with one thread, no other thread holds a lock for which the child would wait.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Detached::Caller(child.as_raw())),
        ForkResult::Child => {
            setsid()?;
            Ok(Detached::Daemon)
        }
    }
}

/// Sets the OOM score of this process. Its children inherit the score.
///
/// # Errors
/// A score lower than the previous score needs CAP_SYS_RESOURCE.
pub fn set_oom_score(score: i16) -> io::Result<()> {
    Process::myself()
        .and_then(|own| own.set_oom_score_adj(score))
        .map_err(io::Error::other)
}

/// Leaves the working directory and the terminal. From then on, output of this process goes into
/// `log`.
///
/// # Errors
/// Errors of the system calls.
pub fn leave_terminal(log: &File) -> io::Result<()> {
    std::env::set_current_dir("/")?;
    dup2_stdin(File::open("/dev/null")?.as_fd())?;
    dup2_stdout(log.as_fd())?;
    dup2_stderr(log.as_fd())?;
    Ok(())
}

pub(crate) fn die_with_process(parent: Pid, signal: Signal) -> io::Result<()> {
    prctl::set_pdeathsig(signal)?;
    // If the parent died before the call above, no signal will come.
    if getppid() == parent {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ESRCH))
    }
}

/// The signal that makes the parent in [`continue_as_child`] kill its child. Neither the kernel nor
/// people send this signal.
pub const KILL_CHILD: Signal = Signal::SIGSTKFLT;

/// Forks and returns in the child. The parent stays until the child ends, and then ends with the
/// child's status. The parent forwards SIGTERM, SIGINT, SIGHUP and SIGQUIT (on which Go writes its
/// stacks first) once each, however often they come, and one [`KILL_CHILD`] as SIGKILL. When the
/// parent dies, the child gets SIGKILL, also after execve, and only once because the parent has one
/// thread.
///
/// Must be called by a process with one thread.
///
/// # Errors
/// Errors of the system calls, or `ESRCH` in a child if the parent died at once.
pub fn continue_as_child() -> io::Result<()> {
    let signals = [
        Signal::SIGCHLD,
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        KILL_CHILD,
    ];
    let signals: SigSet = signals.into_iter().collect();
    // Block the signals before the child exists, so that none is lost.
    let mask = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let parent = getpid();
    // SAFETY: with one thread, no other thread holds a lock for which the child would wait.
    match unsafe { fork() }? {
        ForkResult::Child => {
            mask.thread_set_mask()?;
            die_with_process(parent, Signal::SIGKILL)
        }
        ForkResult::Parent { child } => exit_like(forward_signals(child, &signals)?),
    }
}

/// Forwards this process's signals to the child until the child has ended.
fn forward_signals(child: Pid, signals: &SigSet) -> io::Result<ExitStatus> {
    let mut forwarded = SigSet::empty();
    loop {
        let (signal, passed) = match signals.wait()? {
            Signal::SIGCHLD => match try_wait(child)? {
                Some(status) => return Ok(status),
                None => continue,
            },
            KILL_CHILD => (KILL_CHILD, Signal::SIGKILL),
            signal => (signal, signal),
        };
        if forwarded.contains(signal) {
            continue;
        }
        forwarded.add(signal);
        if let Err(error) = kill(child, passed) {
            tracing::warn!(
                code = %explained::APISERVER_NOT_SIGNALLED,
                pid = child.as_raw(),
                signal = %passed,
                %error,
                "cannot signal the apiserver"
            );
        } else if passed == Signal::SIGTERM {
            // A stopped child handles SIGTERM only after SIGCONT. systemd sends both, too.
            let _ = kill(child, Signal::SIGCONT);
        }
    }
}

/// Returns the status of a child that has ended. `None` if the child still runs.
pub(crate) fn try_wait(child: Pid) -> io::Result<Option<ExitStatus>> {
    // nix's waitpid fails if a real-time signal ended the child, so rustix's is used.
    let ended = rustix::process::waitpid(
        rustix::process::Pid::from_raw(child.as_raw()),
        WaitOptions::NOHANG,
    )?;
    Ok(ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())))
}

/// Returns a child that has ended, and its status. `None` if no child has ended. PID 1 of a
/// container also gets orphans of other processes.
///
/// # Errors
/// `ECHILD` if this process has no child.
pub fn reap_child() -> io::Result<Option<(i32, ExitStatus)>> {
    let ended = rustix::process::wait(WaitOptions::NOHANG)?;
    Ok(ended.map(|(pid, status)| {
        (
            pid.as_raw_nonzero().get(),
            ExitStatus::from_raw(status.as_raw()),
        )
    }))
}

/// Sends any signal, also a real-time signal.
///
/// # Errors
/// Errors of kill(2).
pub fn send_signal(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: the call takes numbers only.
    Errno::result(unsafe { libc::kill(pid, signal) })?;
    Ok(())
}

/// Ends this process in the way in which a child has ended: with the same exit status, or by the
/// same signal. If the signal does not end this process, because it is PID 1 of a container, the
/// exit status is 128 plus the signal's number.
///
/// Must be called by a process with one thread.
pub fn exit_like(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        // The child's core file is enough: this process writes no core file.
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
        // SAFETY: the default action needs no handler, and this process has one thread.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        let _ = SigSet::all().thread_unblock();
        // SAFETY: raise(3) takes any number.
        unsafe { libc::raise(signal) };
        std::process::exit(128 + signal);
    }
    std::process::exit(status.code().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::{CpuSet, sched_setaffinity};

    /// Imitates a container that may use only some processors, by the affinity of a thread.
    #[test]
    fn processors_of_the_whole_node_are_counted_and_open_files_are_limited() {
        let all = count_cpus();
        let pinned = std::thread::spawn(|| {
            let mut one = CpuSet::new();
            let own = nix::sched::sched_getaffinity(Pid::from_raw(0)).unwrap();
            one.set(
                (0..CpuSet::count())
                    .find(|cpu| own.is_set(*cpu).unwrap())
                    .unwrap(),
            )
            .unwrap();
            sched_setaffinity(Pid::from_raw(0), &one).unwrap();
            (
                count_cpus(),
                std::thread::available_parallelism().unwrap().get(),
            )
        });
        assert_eq!(pinned.join().unwrap(), (all, 1));
        assert!(raise_file_limit().unwrap() <= MAX_OPEN_FILES);
    }

    #[test]
    fn a_result_that_may_be_of_another_process_is_rejected() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let held = HeldProcess::of(pid).unwrap();
        let its = |pid: i32| parent_of(pid).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(held.read_while_alive(its).unwrap(), getpid().as_raw());
        // The child ends during this read. Another process may then get the
        // child's ID.
        let other = |_| {
            child.kill()?;
            child.wait()?;
            its(getpid().as_raw())
        };
        assert_eq!(
            held.read_while_alive(other).unwrap_err().kind(),
            io::ErrorKind::Other
        );
        assert!(HeldProcess::of(pid).is_err());
    }

    #[test]
    fn a_wait_returns_when_the_process_has_ended() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let held = HeldProcess::of(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(!held.ends_within(Duration::ZERO).unwrap());
        let end = child.stdin.take();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| held.ends_within(Duration::from_secs(60)).unwrap());
            drop(end);
            assert!(waits.join().unwrap());
        });
        child.wait().unwrap();
        assert!(held.kill().is_err(), "another process was killed");
    }

    #[test]
    fn a_process_is_paused_with_all_its_threads_and_goes_on() {
        let mut child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let held = HeldProcess::of(i32::try_from(child.id()).unwrap()).unwrap();
        let until = |stopped: bool| {
            let end = Instant::now() + Duration::from_secs(60);
            while is_stopped(held.pid).unwrap() != stopped {
                assert!(Instant::now() < end, "stopped: {stopped}");
                std::thread::sleep(CHECK_INTERVAL);
            }
        };
        let paused = held.pause(Duration::from_secs(60)).unwrap();
        assert!(is_stopped(held.pid).unwrap());
        drop(paused);
        until(false);
        // The kernel closes the guard's pipe when the process that started the guard ends. Here the
        // test closes the pipe itself.
        let mut guard = start_sigcont_guard(held.pid).unwrap();
        kill(Pid::from_raw(held.pid), Signal::SIGSTOP).unwrap();
        until(true);
        drop(guard.stdin.take());
        until(false);
        guard.wait().unwrap();
        // SIGKILL ends a process even while it is stopped.
        let paused = held.pause(Duration::from_secs(60)).unwrap();
        held.kill().unwrap();
        child.wait().unwrap();
        drop(paused);
        assert!(held.pause(Duration::ZERO).is_err());
    }

    /// A test process with this environment variable is a rerun of the test that may change its own
    /// limits.
    const LIMITED: &str = "BERTH_TEST_LOCKED_MEMORY";

    #[test]
    fn the_limit_of_locked_memory_is_raised_as_far_as_permitted() {
        if std::env::var_os(LIMITED).is_some() {
            setrlimit(Resource::RLIMIT_MEMLOCK, 4096, 8192).unwrap();
            assert!(raise_locked_memory_limit());
            let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
            let may = rustix::thread::capabilities(None)
                .unwrap()
                .effective
                .contains(CapabilitySet::SYS_RESOURCE);
            assert_eq!(
                (soft, hard),
                if may {
                    (libc::RLIM_INFINITY, libc::RLIM_INFINITY)
                } else {
                    (8192, 8192)
                }
            );
            assert!(
                !raise_locked_memory_limit(),
                "the limit cannot be raised further"
            );
            return;
        }
        berth_testing::namespace::rerun_with(LIMITED);
    }
}
