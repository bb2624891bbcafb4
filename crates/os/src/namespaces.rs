//! Runs processes in mount and PID namespaces of their own. Mounts and processes in such a
//! namespace end with the process that owns it, for whatever reason that ends.

use crate::clock::read_monotonic;
use crate::process::{
    Credentials, KILL_CHILD, ProcessAttributes, check_single_threaded, die_with_process, try_wait,
};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::sys::time::TimeSpec;
use nix::unistd::{ForkResult, Pid, fork, getpid, pipe2, setpgid};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, open, unlinkat};
use rustix::process::PidfdFlags;
use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// True if another process and this process are in the same namespace of a kind (a name in
/// /proc/PID/ns). True also if neither namespace can be read.
pub fn is_shared_with(pid: i32, kind: &str) -> bool {
    let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{kind}")).ok();
    of(&pid.to_string()) == of("self")
}

/// Enters a new mount namespace. Mounts of the old namespace propagate to the new one, but not
/// back. Must be called by a process with one thread: other threads would stay in the old
/// namespace.
///
/// # Errors
/// The process has several threads, or CAP_SYS_ADMIN is missing.
pub fn unshare_mounts() -> io::Result<()> {
    check_single_threaded()?;
    unshare(CloneFlags::CLONE_NEWNS)?;
    Ok(mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_REC | MsFlags::MS_SLAVE,
        None::<&str>,
    )?)
}

/// Mounts a tmpfs of at most this many bytes with mode 0700. The tmpfs is never swapped on Linux
/// 6.4 and newer. With `label`, every file in the tmpfs has this SELinux label.
///
/// # Errors
/// Errors of mount(2).
pub fn mount_tmpfs(at: &Path, bytes: u64, label: Option<&str>) -> io::Result<()> {
    let label = label
        .map(|label| format!(",context=\"{label}\""))
        .unwrap_or_default();
    let with = |more: &str| {
        let options = format!("mode=0700,size={bytes}{more}{label}");
        mount(
            Some("berth"),
            at,
            Some("tmpfs"),
            MsFlags::MS_NODEV,
            Some(options.as_str()),
        )
    };
    // Kernels before 6.4 do not know the option `noswap` and refuse it. The mount is then made
    // without the option.
    let mounted = with(",noswap").or_else(|error| {
        if error == Errno::EINVAL {
            with("")
        } else {
            Err(error)
        }
    });
    Ok(mounted?)
}

/// Unmounts a path, even while the mount is in use.
///
/// # Errors
/// Errors of umount2(2).
pub fn unmount(at: &Path) -> io::Result<()> {
    Ok(umount2(at, MntFlags::MNT_DETACH)?)
}

/// Settings of a child that runs in namespaces of its own.
#[derive(Debug, Default)]
pub struct Enclosure {
    /// Cgroups that the supervisor leaves and removes when the program has ended. A pair has the
    /// path of the parent's cgroup.procs, and the directory of the cgroup to remove. A cgroup with
    /// other processes stays.
    pub cgroups: Vec<(PathBuf, PathBuf)>,
    /// Files that no process in the namespace can rename, replace or remove (EBUSY): each file is
    /// mounted onto itself.
    pub pinned: Vec<PathBuf>,
    /// A running process of which the child gets the environment, directory, user, limits and OOM
    /// score. `None` if the program sets these itself.
    pub attributes: Option<ProcessAttributes>,
    /// The pipe on which another process gives signs of life. If no sign comes for too long, the
    /// child is killed. `None` if the child's life does not depend on another process.
    pub signs: Option<SignReader>,
}

/// The writing end of a pipe. Each byte in the pipe is a sign of life of the writing process.
#[derive(Debug)]
pub struct SignWriter(OwnedFd);

/// The reading end of a pipe for signs of life. If no sign comes within `patience`, the writer
/// counts as hung.
#[derive(Debug)]
pub struct SignReader {
    pipe: OwnedFd,
    patience: Duration,
}

/// Makes both ends of a pipe for signs of life. The writer must send a sign at least once per
/// `patience`.
///
/// # Errors
/// Errors of pipe2(2).
pub fn open_signs_of_life(patience: Duration) -> io::Result<(SignWriter, SignReader)> {
    let (pipe, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    Ok((SignWriter(writer), SignReader { pipe, patience }))
}

impl SignWriter {
    /// Writes a sign of life. A failed write is ignored: a full pipe contains signs already, and a
    /// pipe without a reader needs none.
    pub fn send_sign(&self) {
        let _ = rustix::io::write(&self.0, b".");
    }
}

impl SignReader {
    /// Reads the pending signs. Returns true if at least one sign was pending.
    fn drain_signs(&self) -> bool {
        let mut signs = [0; 4096];
        rustix::io::read(&self.pipe, &mut signs).is_ok_and(|length| length > 0)
    }
}

/// Runs the child's program as the first process of new PID and mount namespaces, so that the
/// program's descendants end with the program. The child itself stays outside as a supervisor until
/// the program has ended. The supervisor exits with the program's exit status, or with 128 plus the
/// number of the signal that ended the program. The supervisor forwards SIGTERM. It kills every
/// process of the namespace on [`KILL_CHILD`], when the thread that started the supervisor ends, or
/// when no sign of life comes. With signs of life, the supervisor has a process group of its own.
///
/// # Errors
/// A path contains a NUL.
pub fn run_in_namespaces(command: &mut Command, enclosure: Enclosure) -> io::Result<()> {
    let text = |path: &PathBuf| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
    let Enclosure {
        cgroups,
        pinned,
        attributes: like,
        signs,
    } = enclosure;
    let inner = Inner {
        cgroups: cgroups
            .iter()
            .map(|(above, own)| Ok((text(above)?, text(own)?)))
            .collect::<io::Result<_>>()?,
        pinned: pinned.iter().map(text).collect::<io::Result<_>>()?,
        oom_score: like.as_ref().map(|like| like.oom_score_adj.to_string()),
        credentials: like.as_ref().map(ProcessAttributes::credentials),
        signs,
    };
    if let Some(like) = like {
        like.set_environment_and_directory(command);
    }
    let parent = getpid();
    // SAFETY: the child and the child's child only make system calls and construct errors without
    // allocation. These calls are async-signal-safe, and so is fork(2) without a registered
    // handler.
    unsafe {
        command.pre_exec(move || supervise_child(parent, &inner));
    }
    Ok(())
}

/// The settings of an [`Enclosure`] in a form that a child can use, which must not allocate memory.
struct Inner {
    cgroups: Vec<(CString, CString)>,
    pinned: Vec<CString>,
    oom_score: Option<String>,
    credentials: Option<Credentials>,
    signs: Option<SignReader>,
}

/// Supervises the program in this process, and ends this process with the program. Returns only in
/// the program's process, the first one in the new namespaces.
fn supervise_child(parent: Pid, inner: &Inner) -> io::Result<()> {
    let awaited: SigSet = [Signal::SIGCHLD, Signal::SIGTERM, KILL_CHILD]
        .into_iter()
        .collect();
    // Block the signals before the first one can arrive, so that none is lost.
    let mask = awaited.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    die_with_process(parent, KILL_CHILD)?;
    if inner.signs.is_some() {
        // The writer of the signs and the supervisor are in the same process group. A signal to
        // this group, such as SIGSTOP, must not stop the supervisor too.
        setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
    }
    if let Some(score) = &inner.oom_score
        && let Ok(file) = open(
            c"/proc/self/oom_score_adj",
            OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )
    {
        // Only a process with CAP_SYS_RESOURCE may lower its score. If the write fails, the child
        // keeps this process's score.
        let _ = rustix::io::write(&file, score.as_bytes());
    }
    unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS)?;
    // Mounts that are made here must not appear in other namespaces.
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_REC | MsFlags::MS_SLAVE,
        None::<&str>,
    )?;
    for file in &inner.pinned {
        mount(
            Some(file.as_c_str()),
            file.as_c_str(),
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )?;
    }
    // A process ID from outside is meaningless in the new namespace, so a pidfd is used.
    let this = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    // SAFETY: this process has one thread, being a child that has not executed anything yet.
    match unsafe { fork() }? {
        ForkResult::Child => {
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
            mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)?;
            if let Some(credentials) = &inner.credentials {
                credentials.assume_credentials()?;
            }
            // Set the signal after the change of user, because the kernel forgets the signal when
            // the user changes.
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            // If the supervisor died before that call, no signal will come.
            let mut ended = [PollFd::new(this.as_fd(), PollFlags::POLLIN)];
            if poll(&mut ended, PollTimeout::ZERO)? > 0 {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(mask.thread_set_mask()?)
        }
        ForkResult::Parent { child } => {
            close_descriptors_except(inner.signs.as_ref().map(|signs| signs.pipe.as_raw_fd()));
            let code = watch_child(child, &awaited, inner.signs.as_ref()).map_or(70, |status| {
                status
                    .code()
                    .unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
            });
            for (above, own) in &inner.cgroups {
                remove_cgroup(above, own);
            }
            // SAFETY: the call only ends this process.
            unsafe { libc::_exit(code) }
        }
    }
}

/// Closes every descriptor except `one`, standard input, output and error. This also closes the
/// pipe that reports a failed execve to the parent. The parent then reads its end, and knows that
/// the program runs.
fn close_descriptors_except(one: Option<RawFd>) {
    let close = |first: libc::c_uint, last: libc::c_uint| {
        if first <= last {
            // SAFETY: nothing uses these descriptors any more.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    };
    match one
        .and_then(|one| libc::c_uint::try_from(one).ok())
        .filter(|one| *one >= 3)
    {
        Some(one) => {
            close(3, one - 1);
            close(one + 1, libc::c_uint::MAX);
        }
        None => close(3, libc::c_uint::MAX),
    }
}

/// Time between two checks for signs of life.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// Waits until the child has ended. Kills the child if no sign of life comes in time.
fn watch_child(child: Pid, awaited: &SigSet, signs: Option<&SignReader>) -> io::Result<ExitStatus> {
    let mut last = read_monotonic()?;
    loop {
        match wait_for_signal_within(
            awaited,
            signs.map(|signs| READ_INTERVAL.min(signs.patience)),
        )? {
            Some(Signal::SIGCHLD) => {
                if let Some(status) = try_wait(child)? {
                    return Ok(status);
                }
            }
            Some(KILL_CHILD) => drop(kill(child, Signal::SIGKILL)),
            Some(signal) => drop(kill(child, signal)),
            None => {}
        }
        let Some(signs) = signs else { continue };
        let now = read_monotonic()?;
        if signs.drain_signs() {
            last = now;
        } else if now.saturating_sub(last) >= signs.patience {
            let _ = kill(child, Signal::SIGKILL);
        }
    }
}

/// Waits for one of the blocked signals. `None` if none comes within `most`.
fn wait_for_signal_within(awaited: &SigSet, most: Option<Duration>) -> io::Result<Option<Signal>> {
    let Some(most) = most else {
        return Ok(Some(awaited.wait()?));
    };
    let most = TimeSpec::from_duration(most);
    // SAFETY: both references are valid for the call. The null pointer means that no details of the
    // signal are requested.
    let signal =
        unsafe { libc::sigtimedwait(awaited.as_ref(), std::ptr::null_mut(), most.as_ref()) };
    match Errno::result(signal) {
        Ok(signal) => Ok(Some(Signal::try_from(signal)?)),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Moves this process out of a cgroup and removes the cgroup. Makes system calls only, because this
/// process must not allocate memory.
fn remove_cgroup(above: &CStr, own: &CStr) {
    if let Ok(above) = open(above, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        // Writing 0 moves the process that writes.
        let _ = rustix::io::write(&above, b"0");
    }
    let _ = unlinkat(CWD, own, AtFlags::REMOVEDIR);
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::namespace::{print_skipped, rerun_in_user_namespace};
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, Stdio};

    /// Runs a script as the first process of new namespaces, and waits for the script's first line.
    /// If no namespace can be made here, runs the test again in a user namespace, and returns
    /// `None`.
    fn start_script(script: &str, enclosure: Enclosure) -> Option<(Child, String)> {
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        run_in_namespaces(&mut command, enclosure).unwrap();
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                rerun_in_user_namespace(&format!("no namespace can be had: {error}"));
                None
            }
            child => {
                let mut child = child.unwrap();
                let mut line = String::new();
                BufReader::new(child.stdout.as_mut().unwrap())
                    .read_line(&mut line)
                    .unwrap();
                Some((child, line))
            }
        }
    }

    /// Waits until every process that can write to the script's output has ended. Returns the exit
    /// status.
    fn end_script(mut child: Child) -> Option<i32> {
        // The script waits in `read`, which ends when the standard input is closed.
        drop(child.stdin.take());
        child
            .stdout
            .take()
            .unwrap()
            .read_to_end(&mut Vec::new())
            .unwrap();
        child.wait().unwrap().code()
    }

    fn signal_child(child: &Child, signal: Signal) {
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
    }

    #[test]
    fn a_program_is_the_first_process_and_its_status_is_passed_on() {
        let Some((child, line)) = start_script(
            "echo $$ $(readlink /proc/self | wc -w); read line; exit 7",
            Enclosure::default(),
        ) else {
            return;
        };
        assert_eq!(line, "1 1\n");
        assert_eq!(end_script(child), Some(7));
        let mut command = Command::new("/nonexistent");
        run_in_namespaces(&mut command, Enclosure::default()).unwrap();
        assert_eq!(command.spawn().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn sigterm_reaches_the_program() {
        let script = "trap 'exit 3' TERM; echo; while :; do read line; done";
        let Some((mut child, _)) = start_script(script, Enclosure::default()) else {
            return;
        };
        let stdin = child.stdin.take();
        signal_child(&child, Signal::SIGTERM);
        // A shell runs the trap for the signal only after its `read` has returned.
        drop(stdin);
        assert_eq!(end_script(child), Some(3));
    }

    #[test]
    fn descendants_of_the_program_end_with_it() {
        let script = "trap '' TERM; setsid sleep 1000 & echo; wait";
        let Some((child, _)) = start_script(script, Enclosure::default()) else {
            return;
        };
        signal_child(&child, KILL_CHILD);
        assert_eq!(end_script(child), Some(128 + 9));
        // The program must also end if the supervisor is killed, and if the thread that started the
        // supervisor ends.
        let Some((child, _)) = start_script(script, Enclosure::default()) else {
            return;
        };
        signal_child(&child, Signal::SIGKILL);
        assert_eq!(end_script(child), None);
        let started = std::thread::spawn(|| {
            start_script(
                "trap '' TERM; sleep 1000 & echo; wait",
                Enclosure::default(),
            )
        })
        .join()
        .unwrap();
        let Some((child, _)) = started else { return };
        assert_eq!(end_script(child), Some(128 + 9));
    }

    #[test]
    fn the_programs_cgroups_are_removed() {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut roots = mounts
            .lines()
            .filter(|line| line.contains(" cgroup2 ") || line.contains("name=systemd"));
        let Some(root) = roots.find_map(|line| line.split(' ').nth(1)).map(Path::new) else {
            return print_skipped("no cgroups are mounted");
        };
        let own = root.join(format!("berth-test-{}", getpid()));
        if let Err(error) = fs::create_dir(&own) {
            return print_skipped(&format!("no cgroup can be made: {error}"));
        }
        let cgroups = vec![(root.join("cgroup.procs"), own.clone())];
        let script = format!(
            "echo 0 > {}/cgroup.procs && echo in; read line",
            own.display()
        );
        let Some((child, line)) = start_script(
            &script,
            Enclosure {
                cgroups,
                ..Enclosure::default()
            },
        ) else {
            return fs::remove_dir(&own).unwrap();
        };
        assert_eq!((line.as_str(), end_script(child)), ("in\n", Some(1)));
        assert!(!own.exists());
    }

    /// The program must live while its starter gives signs of life, and be killed when the signs
    /// stop.
    #[test]
    fn a_program_without_signs_of_life_is_killed() {
        let patience = Duration::from_millis(300);
        let (writer, signs) = open_signs_of_life(patience).unwrap();
        let enclosure = Enclosure {
            signs: Some(signs),
            ..Enclosure::default()
        };
        let begun = std::time::Instant::now();
        let Some((mut child, _)) =
            start_script("trap '' TERM; setsid sleep 1000 & echo; wait", enclosure)
        else {
            return;
        };
        while begun.elapsed() < 4 * patience {
            writer.send_sign();
            std::thread::sleep(patience / 30);
        }
        let is_slow = begun.elapsed() > 5 * patience;
        assert!(
            is_slow || child.try_wait().unwrap().is_none(),
            "killed in spite of signs of life"
        );
        assert_eq!(end_script(child), Some(128 + 9));
        assert!(begun.elapsed() >= 5 * patience - patience / 30);
        writer.send_sign();
    }

    #[test]
    fn a_pinned_file_can_be_replaced_outside_the_namespace_only() {
        let temp = tempfile::tempdir().unwrap();
        let [file, other] = ["db", "db.tmp"].map(|name| temp.path().join(name));
        fs::write(&file, "old").unwrap();
        fs::write(&other, "new").unwrap();
        let script = format!(
            "moved=$(mv -f {o} {f} 2>&1); echo more >> {f}; echo $moved $(rm -f {f} 2>&1); read line; cat {f}",
            o = other.display(),
            f = file.display()
        );
        let like = ProcessAttributes::of(getpid().as_raw()).unwrap();
        let enclosure = Enclosure {
            pinned: vec![file.clone()],
            attributes: Some(like),
            ..Enclosure::default()
        };
        let Some((mut child, line)) = start_script(&script, enclosure) else {
            return;
        };
        assert_eq!(line.matches("busy").count(), 2, "{line}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "oldmore\n");
        fs::rename(&other, &file).unwrap();
        drop(child.stdin.take());
        let mut text = String::new();
        child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert!(
            text.ends_with("new"),
            "the new file of a process outside is not visible: {text}"
        );
        child.wait().unwrap();
        let mut command = Command::new("true");
        let pinned = vec![temp.path().join("missing")];
        run_in_namespaces(
            &mut command,
            Enclosure {
                pinned,
                ..Enclosure::default()
            },
        )
        .unwrap();
        assert_eq!(command.spawn().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_tmpfs_is_mounted_with_its_size_and_mode() {
        assert_eq!(
            unshare_mounts().unwrap_err().kind(),
            io::ErrorKind::Other,
            "a test has several threads"
        );
        let temp = tempfile::tempdir().unwrap();
        let at = temp.path().to_owned();
        let mounted = std::thread::spawn(move || -> io::Result<()> {
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(
                None::<&str>,
                "/",
                None::<&str>,
                MsFlags::MS_REC | MsFlags::MS_PRIVATE,
                None::<&str>,
            )?;
            mount_tmpfs(&at, 1 << 20, None)?;
            let mounts = fs::read_to_string("/proc/thread-self/mounts")?;
            let line = mounts.lines().find(|line| {
                line.split(' ')
                    .nth(1)
                    .is_some_and(|place| at == Path::new(place))
            });
            let line = line.expect("the tmpfs is not mounted");
            let release = crate::process::kernel_release();
            let mut numbers = release
                .split('.')
                .map(|part| part.parse::<u32>().unwrap_or_default());
            // Root of a user namespace may not use `noswap`.
            let is_root = !line.contains(",uid=");
            let has_noswap = is_root && (numbers.next(), numbers.next()) >= (Some(6), Some(4));
            assert_eq!(line.contains(",noswap"), has_noswap, "{line} on {release}");
            let meta = rustix::fs::statvfs(&at)?;
            assert_eq!(
                (
                    meta.f_blocks * meta.f_frsize,
                    rustix::fs::stat(&at)?.st_mode & 0o777
                ),
                (1 << 20, 0o700)
            );
            assert_eq!(
                fs::write(at.join("x"), vec![1; 2 << 20])
                    .unwrap_err()
                    .kind(),
                io::ErrorKind::StorageFull
            );
            unmount(&at)?;
            assert!(!at.join("x").exists());
            Ok(())
        });
        match mounted.join().unwrap() {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                rerun_in_user_namespace(&format!("no namespace can be had: {error}"));
            }
            mounted => mounted.unwrap(),
        }
    }
}
