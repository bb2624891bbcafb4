//! Limits, capabilities and descendants of this process.

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

/// The most open files that the kernel allows a process by default (/proc/sys/fs/nr_open). With a limit far above, programs that close
/// all that may be open take minutes.
const FILES: u64 = 1 << 20;

/// Which capabilities this thread lacks for BPF programs that concern the network. CAP_BPF is new with Linux 5.8, and
/// part of CAP_SYS_ADMIN.
///
/// # Errors
/// Those of capget(2).
pub fn lacks_for_bpf() -> io::Result<Vec<&'static str>> {
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

/// Processors that are online: how much at once can be computed on this node, whatever share of it this process has. (Not by sysconf(3), which
/// counts those of this process where the C library is musl.)
pub fn cpus() -> usize {
    CpuInfo::current().map_or(1, |info| info.num_cores().max(1))
}

/// Raises the limit of locked memory, to none if this process may. Whether it is another now.
pub(crate) fn raise_locked_memory() -> bool {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_MEMLOCK) else {
        return false;
    };
    let raise = |to| soft < to && setrlimit(Resource::RLIMIT_MEMLOCK, to, to).is_ok();
    raise(libc::RLIM_INFINITY) || raise(hard)
}

/// The kernel's release, as `uname -r` prints it.
pub fn kernel_release() -> String {
    rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned()
}

/// Raises the limit of open files to the hard limit, or to the kernel's default if that is less, as it is of `infinity`; returns what it is
/// then, or the kernel's default.
pub fn raise_file_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let most = hard.min(FILES);
    if soft < most {
        setrlimit(Resource::RLIMIT_NOFILE, most, hard)?;
    }
    Ok(most)
}

/// As [`raise_file_limit`], and for root the hard limit too, up to the kernel's default.
pub fn raise_hard_file_limit() -> io::Result<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let kernels = fs::read_to_string("/proc/sys/fs/nr_open")
        .ok()
        .and_then(|text| text.trim().parse().ok());
    let most = kernels.unwrap_or(FILES).min(FILES);
    if hard < most && setrlimit(Resource::RLIMIT_NOFILE, most, most).is_ok() {
        return Ok(most);
    }
    raise_file_limit()
}

/// CPU time of this process, user and system, in seconds.
pub fn cpu_seconds() -> f64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let seconds =
        |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| {
        seconds(usage.user_time()) + seconds(usage.system_time())
    })
}

/// This process's use of the machine, by the names that Prometheus' client libraries agreed on. What /proc does
/// not show is left out.
pub fn usage() -> Vec<(&'static str, &'static str, f64)> {
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
    // Not by procfs, which counts the directory that is being read on some kernels and not on others.
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        // One of them is the directory that is being read.
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

/// Lets the child get a signal when the thread that starts it ends: `pdeathsig` follows the thread, so
/// start children from the main thread. It outlives execve. When a process of several threads dies, each that still
/// lives gets its children for a moment, so it can come several times: see [`go_on_as_child`].
pub fn die_with_parent(command: &mut Command, signal: Signal) {
    let parent = getpid();
    // SAFETY: between fork and exec only prctl, getppid and error construction without allocation
    // are called, all async-signal-safe.
    unsafe {
        command.pre_exec(move || die_with(parent, signal));
    }
}

/// Lets the child ignore a signal, as nohup(1) does with SIGHUP. That outlives execve.
pub fn ignore_signal(command: &mut Command, signal: Signal) {
    let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
    // SAFETY: between fork and exec only sigaction(2) is called, which is async-signal-safe, and no handler is set.
    unsafe {
        command.pre_exec(move || {
            sigaction(signal, &ignore)?;
            Ok(())
        });
    }
}

/// Keeps this process's variables `BERTH_*` from a child: they set options of berth, and the child is to run with those of its
/// command line alone.
pub fn remove_settings(command: &mut Command) {
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"BERTH_"))
    {
        command.env_remove(name);
    }
}

/// The parent of a process, if it is there.
pub fn parent(pid: i32) -> Option<i32> {
    Process::new(pid)
        .and_then(|process| process.stat())
        .ok()
        .map(|stat| stat.ppid)
}

/// A process by its pidfd: the number may be reused, the descriptor stays its own.
#[derive(Debug)]
pub struct HeldProcess {
    pub pid: i32,
    fd: OwnedFd,
}

impl HeldProcess {
    /// # Errors
    /// No process has this number.
    pub fn of(pid: i32) -> io::Result<Self> {
        let number = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            pid,
            fd: rustix::process::pidfd_open(number, PidfdFlags::empty())?,
        })
    }

    /// What `read` finds by its number. (Keeping its root and program open instead would not do: the mounts in a root go with the last
    /// process there, and would be copied as empty.)
    ///
    /// # Errors
    /// That of `read`, or the process ended, so that what was read may be another's.
    pub fn read<T>(&self, read: impl FnOnce(i32) -> io::Result<T>) -> io::Result<T> {
        let found = read(self.pid);
        if self.ends_within(Duration::ZERO)? {
            return Err(io::Error::other(format!(
                "process {} ended meanwhile",
                self.pid
            )));
        }
        found
    }

    /// Waits at most this long until it has ended with all its threads, so that none of its files is open; whether it has.
    ///
    /// # Errors
    /// Those of poll(2).
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

    /// # Errors
    /// It has ended, or may not be signalled.
    pub fn kill(&self) -> io::Result<()> {
        Ok(rustix::process::pidfd_send_signal(
            &self.fd,
            rustix::process::Signal::KILL,
        )?)
    }

    /// Stops it (SIGSTOP), and waits at most this long until none of its threads runs. It goes on when what is returned is dropped.
    ///
    /// # Errors
    /// It has ended, may not be signalled, or a thread of it still runs, such as one that waits for a disk.
    pub fn pause(&self, most: Duration) -> io::Result<Paused<'_>> {
        let guard = guard(self.pid)?;
        rustix::process::pidfd_send_signal(&self.fd, rustix::process::Signal::STOP)?;
        let paused = Paused {
            process: self,
            guard,
        };
        let until = Instant::now() + most;
        loop {
            if self.read(is_stopped)? {
                return Ok(paused);
            }
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// Pause between two looks at a process that is to stop.
const PAUSE: Duration = Duration::from_millis(2);

/// True if no thread of a process runs or waits in the kernel.
fn is_stopped(pid: i32) -> io::Result<bool> {
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        let stat = match fs::read_to_string(thread?.path().join("stat")) {
            // A thread that has ended since, which says either of them.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
            stat => stat?,
        };
        // The name before it may have parentheses, too.
        let state = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        if !matches!(state, Some('T' | 't' | 'Z' | 'X')) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A process that lets a stopped one go on as soon as this process has ended, even by SIGKILL: the kernel closes the pipe that it reads.
/// In a process group of its own, it outlives signals to this process's.
fn guard(pid: i32) -> io::Result<Child> {
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

/// A process that is stopped for as long as this and this process live.
#[derive(Debug)]
pub struct Paused<'a> {
    process: &'a HeldProcess,
    guard: Child,
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.process.fd, rustix::process::Signal::CONT);
        // Without its pipe the guard ends: where the process has ended since, no other one is to get its signal.
        let _ = self.guard.kill();
        let _ = self.guard.wait();
    }
}

/// How a process runs, so that another one can be run in the same way.
#[derive(Debug, Clone)]
pub struct ProcessAttributes {
    pub environment: Vec<(OsString, OsString)>,
    pub directory: PathBuf,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    /// Resources, and the soft and the hard limit of each.
    pub limits: Vec<(Resource, u64, u64)>,
    pub oom_score_adj: i16,
    /// Its memory that is not of files, in bytes: what another process like it needs, too.
    pub anonymous: u64,
}

impl ProcessAttributes {
    /// Of a process in this one's namespaces.
    ///
    /// # Errors
    /// It has ended, or may not be inspected.
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

    /// Gives a child its environment, directory, user and limits. The child gets SIGKILL when the thread that starts it
    /// ends. Access to the child's program is the caller's task, and so is the OOM score ([`Self::set_oom_score`]).
    pub fn apply(&self, command: &mut Command) {
        self.surround(command);
        let credentials = self.credentials();
        let parent = getpid();
        // SAFETY: between fork and exec only the system calls of `assume`, prctl and getppid are called, and construction of an
        // error without allocation: all async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                credentials.assume()?;
                // Last: the kernel forgets it when the user changes.
                die_with(parent, Signal::SIGKILL)
            });
        }
    }

    /// Gives a child its environment and directory alone.
    pub(crate) fn surround(&self, command: &mut Command) {
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

    /// Gives a child its OOM score.
    ///
    /// # Errors
    /// A lower one than this process's own needs CAP_SYS_RESOURCE.
    pub fn set_oom_score(&self, child: u32) -> io::Result<()> {
        let child = i32::try_from(child).map_err(io::Error::other)?;
        Process::new(child)
            .and_then(|child| child.set_oom_score_adj(self.oom_score_adj))
            .map_err(io::Error::other)
    }
}

/// A process's user and limits.
#[derive(Debug)]
pub(crate) struct Credentials {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
    limits: Vec<(Resource, u64, u64)>,
}

impl Credentials {
    /// Gives them to this process, by setrlimit, and as root setgroups, setgid and setuid, without allocation.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn assume(&self) -> io::Result<()> {
        for (resource, soft, hard) in &self.limits {
            setrlimit(*resource, *soft, *hard)?;
        }
        // Only root may.
        if geteuid().is_root() {
            setgroups(&self.groups)?;
            setgid(self.gid)?;
            setuid(self.uid)?;
        }
        Ok(())
    }
}

/// Which process this is after [`detach`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detached {
    /// The one that was there, and the ID of the other.
    Caller(i32),
    /// The one that goes on in a session of its own.
    Daemon,
}

/// Fails unless this process has one thread.
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

/// Forks this process, which must have one thread; the child gets its own session. To be called before anything is made that both
/// would share, such as a runtime with its pipe for signals.
///
/// # Errors
/// There is another thread, or those of the system calls.
pub fn detach() -> io::Result<Detached> {
    check_single_threaded()?;
    // SAFETY: with one thread, no other holds a lock that the child would wait for.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Detached::Caller(child.as_raw())),
        ForkResult::Child => {
            setsid()?;
            Ok(Detached::Daemon)
        }
    }
}

/// Gives this process an OOM score, which its children inherit.
///
/// # Errors
/// A lower one than it has had needs CAP_SYS_RESOURCE.
pub fn set_oom_score(score: i16) -> io::Result<()> {
    Process::myself()
        .and_then(|own| own.set_oom_score_adj(score))
        .map_err(io::Error::other)
}

/// Leaves the working directory and the terminal; this process writes its output into `log` from now on.
///
/// # Errors
/// Those of the system calls.
pub fn leave_terminal(log: &File) -> io::Result<()> {
    std::env::set_current_dir("/")?;
    dup2_stdin(File::open("/dev/null")?.as_fd())?;
    dup2_stdout(log.as_fd())?;
    dup2_stderr(log.as_fd())?;
    Ok(())
}

pub(crate) fn die_with(parent: Pid, signal: Signal) -> io::Result<()> {
    prctl::set_pdeathsig(signal)?;
    // The parent may have died before the line above.
    if getppid() == parent {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ESRCH))
    }
}

/// The signal on which the parent in [`go_on_as_child`] kills the child: neither the kernel nor people send it.
pub const KILL_CHILD: Signal = Signal::SIGSTKFLT;

/// Forks and returns in the child. The parent stays until the child ends, and then ends with the same status. It forwards SIGTERM,
/// SIGINT, SIGHUP and SIGQUIT (on which Go writes its stacks first), each once, however often it comes, and one [`KILL_CHILD`] as
/// SIGKILL. It has one thread, so its own death reaches the child once: as SIGKILL, also through execve.
///
/// To be called by a process with one thread.
///
/// # Errors
/// Those of the system calls, or `ESRCH` in a child whose parent died at once.
pub fn go_on_as_child() -> io::Result<()> {
    let signals = [
        Signal::SIGCHLD,
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        KILL_CHILD,
    ];
    let signals: SigSet = signals.into_iter().collect();
    // Blocked before there is a child, so that none is missed.
    let mask = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let parent = getpid();
    // SAFETY: with one thread, no other holds a lock that the child would wait for.
    match unsafe { fork() }? {
        ForkResult::Child => {
            mask.thread_set_mask()?;
            die_with(parent, Signal::SIGKILL)
        }
        ForkResult::Parent { child } => end_as(forward_signals(child, &signals)?),
    }
}

/// Forwards signals until the child has ended.
fn forward_signals(child: Pid, signals: &SigSet) -> io::Result<ExitStatus> {
    let mut forwarded = SigSet::empty();
    loop {
        let (signal, passed) = match signals.wait()? {
            Signal::SIGCHLD => match ended(child)? {
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
            tracing::warn!(pid = child.as_raw(), signal = %passed, %error, "cannot signal the apiserver");
        } else if passed == Signal::SIGTERM {
            // One that is stopped handles it only then. As systemd does.
            let _ = kill(child, Signal::SIGCONT);
        }
    }
}

/// How a child ended, if it has.
pub(crate) fn ended(child: Pid) -> io::Result<Option<ExitStatus>> {
    // Not nix's: that one has no real-time signals.
    let ended = rustix::process::waitpid(
        rustix::process::Pid::from_raw(child.as_raw()),
        WaitOptions::NOHANG,
    )?;
    Ok(ended.map(|(_, status)| ExitStatus::from_raw(status.as_raw())))
}

/// A child that has ended, and how, if there is one: as PID 1 of a container also what other processes left behind.
///
/// # Errors
/// `ECHILD` if this process has no child.
pub fn reap() -> io::Result<Option<(i32, ExitStatus)>> {
    let ended = rustix::process::wait(WaitOptions::NOHANG)?;
    Ok(ended.map(|(pid, status)| {
        (
            pid.as_raw_nonzero().get(),
            ExitStatus::from_raw(status.as_raw()),
        )
    }))
}

/// Sends any signal, a real-time one too.
///
/// # Errors
/// Those of kill(2).
pub fn send_signal(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: numbers only.
    Errno::result(unsafe { libc::kill(pid, signal) })?;
    Ok(())
}

/// Ends this process as another one has ended: by the same signal, or with 128 and its number where that is ignored, as for PID 1 of a
/// container.
///
/// To be called by a process with one thread.
pub fn end_as(status: ExitStatus) -> ! {
    if let Some(signal) = status.signal() {
        // One core file is enough.
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
        // SAFETY: the default action needs no handler, and there is no other thread.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        let _ = SigSet::all().thread_unblock();
        // SAFETY: it takes any number.
        unsafe { libc::raise(signal) };
        std::process::exit(128 + signal);
    }
    std::process::exit(status.code().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sched::{CpuSet, sched_setaffinity};

    /// As in a container whose processors are its own.
    #[test]
    fn processors_are_the_nodes_and_open_files_have_a_limit() {
        let all = cpus();
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
            (cpus(), std::thread::available_parallelism().unwrap().get())
        });
        assert_eq!(pinned.join().unwrap(), (all, 1));
        assert!(raise_file_limit().unwrap() <= FILES);
    }

    #[test]
    fn what_may_be_another_processs_is_not_taken() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let held = HeldProcess::of(pid).unwrap();
        let its = |pid: i32| parent(pid).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(held.read(its).unwrap(), getpid().as_raw());
        // As if another had its number.
        let other = |_| {
            child.kill()?;
            child.wait()?;
            its(getpid().as_raw())
        };
        assert!(
            held.read(other)
                .unwrap_err()
                .to_string()
                .contains("ended meanwhile")
        );
        assert!(HeldProcess::of(pid).is_err());
    }

    #[test]
    fn the_end_of_a_process_is_waited_for() {
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
        assert!(held.kill().is_err(), "no other process has its number");
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
                std::thread::sleep(PAUSE);
            }
        };
        let paused = held.pause(Duration::from_secs(60)).unwrap();
        assert!(is_stopped(held.pid).unwrap());
        drop(paused);
        until(false);
        // Where the one that stopped it has ended, the kernel closes the guard's pipe.
        let mut guard = guard(held.pid).unwrap();
        kill(Pid::from_raw(held.pid), Signal::SIGSTOP).unwrap();
        until(true);
        drop(guard.stdin.take());
        until(false);
        guard.wait().unwrap();
        // One that is stopped can be killed.
        let paused = held.pause(Duration::from_secs(60)).unwrap();
        held.kill().unwrap();
        child.wait().unwrap();
        drop(paused);
        assert!(held.pause(Duration::ZERO).is_err());
    }

    /// In the environment of the process that may have another limit.
    const LIMITED: &str = "BERTH_TEST_LOCKED_MEMORY";

    #[test]
    fn the_limit_of_locked_memory_is_raised_as_far_as_it_may_be() {
        if std::env::var_os(LIMITED).is_some() {
            setrlimit(Resource::RLIMIT_MEMLOCK, 4096, 8192).unwrap();
            assert!(raise_locked_memory());
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
            assert!(!raise_locked_memory(), "there is no more to be had");
            return;
        }
        berth_testing::namespace::again_with(LIMITED);
    }
}
