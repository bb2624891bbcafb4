//! Own mount and PID namespaces: what is mounted and what runs in them ends with them, however their owner ends.

use crate::process::{KILL_CHILD, check_single_threaded, die_with, ended};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::unistd::{ForkResult, Pid, fork, getpid};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, open, unlinkat};
use rustix::process::PidfdFlags;
use std::ffi::{CStr, CString, NulError};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

/// Whether a process is in this process's namespace of a kind, a name in /proc/PID/ns. True also if neither can be read.
pub fn is_shared_with(pid: i32, kind: &str) -> bool {
    let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{kind}")).ok();
    of(&pid.to_string()) == of("self")
}

/// Enters a new mount namespace, to which mounts of the old one propagate, but not back.
/// To be called by a process with one thread: others would stay in the old one.
///
/// # Errors
/// There is another thread, or CAP_SYS_ADMIN is missing.
pub fn own_mounts() -> io::Result<()> {
    check_single_threaded()?;
    unshare(CloneFlags::CLONE_NEWNS)?;
    Ok(mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)?)
}

/// Mounts a tmpfs for at most this many bytes, with mode 0700, which is never swapped since Linux 6.4. With `label`, all its files
/// have this SELinux label.
///
/// # Errors
/// Those of mount(2).
pub fn tmpfs(at: &Path, bytes: u64, label: Option<&str>) -> io::Result<()> {
    let label = label.map(|label| format!(",context=\"{label}\"")).unwrap_or_default();
    let with = |more: &str| {
        let options = format!("mode=0700,size={bytes}{more}{label}");
        mount(Some("berth"), at, Some("tmpfs"), MsFlags::MS_NODEV, Some(options.as_str()))
    };
    // An older kernel refuses an unknown option.
    let mounted = with(",noswap").or_else(|error| if error == Errno::EINVAL { with("") } else { Err(error) });
    Ok(mounted?)
}

/// Unmounts it, even while it is in use.
///
/// # Errors
/// Those of umount2(2).
pub fn unmount(at: &Path) -> io::Result<()> {
    Ok(umount2(at, MntFlags::MNT_DETACH)?)
}

/// Runs the child's program as the first process of new PID and mount namespaces, so that everything it starts ends with it. The
/// child itself stays outside until the program has ended, and ends with its exit status, or 128 and the number of the signal that
/// ended it. It forwards SIGTERM; when the thread that started it ends, or on [`KILL_CHILD`], it kills all processes of the namespace.
/// Finally it leaves and removes these `cgroups`, each given as the cgroup.procs of its parent and its own directory. A cgroup with
/// other processes in it stays.
///
/// # Errors
/// A path contains a NUL.
pub fn in_own_processes(command: &mut Command, cgroups: &[(PathBuf, PathBuf)]) -> io::Result<()> {
    let text = |path: &PathBuf| CString::new(path.as_os_str().as_bytes());
    let cgroups: Result<Vec<_>, _> = cgroups.iter().map(|(above, own)| Ok((text(above)?, text(own)?))).collect();
    let cgroups = cgroups.map_err(|error: NulError| io::Error::other(error))?;
    let parent = getpid();
    // SAFETY: in the child, and in its own child, only system calls are made and errors without allocation constructed: all
    // async-signal-safe, as fork(2) is without a registered handler.
    unsafe {
        command.pre_exec(move || supervise(parent, &cgroups));
    }
    Ok(())
}

/// Returns in the first process of new namespaces, never in this one.
fn supervise(parent: Pid, cgroups: &[(CString, CString)]) -> io::Result<()> {
    let awaited: SigSet = [Signal::SIGCHLD, Signal::SIGTERM, KILL_CHILD].into_iter().collect();
    // Blocked before they can come, so that none is missed.
    let mask = awaited.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    die_with(parent, KILL_CHILD)?;
    unshare(CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS)?;
    // Mounts made here must not propagate to other namespaces.
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_SLAVE, None::<&str>)?;
    // The ID of a process outside is meaningless in the new namespace.
    let this = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    // SAFETY: this process has one thread, being a child that has not executed anything yet.
    match unsafe { fork() }? {
        ForkResult::Child => {
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            // The parent may have died before the line above.
            let mut ended = [PollFd::new(this.as_fd(), PollFlags::POLLIN)];
            if poll(&mut ended, PollTimeout::ZERO)? > 0 {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
            mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)?;
            Ok(mask.thread_set_mask()?)
        }
        ForkResult::Parent { child } => {
            // One of them is the pipe whose end shows the parent that the program was executed.
            // SAFETY: nothing uses these descriptors any more.
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
            let code = watch(child, &awaited)
                .map_or(70, |status| status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default()));
            for (above, own) in cgroups {
                remove_cgroup(above, own);
            }
            // SAFETY: it only ends this process.
            unsafe { libc::_exit(code) }
        }
    }
}

/// Waits until the child has ended.
fn watch(child: Pid, awaited: &SigSet) -> io::Result<ExitStatus> {
    loop {
        match awaited.wait()? {
            Signal::SIGCHLD => {
                if let Some(status) = ended(child)? {
                    return Ok(status);
                }
            }
            KILL_CHILD => drop(kill(child, Signal::SIGKILL)),
            signal => drop(kill(child, signal)),
        }
    }
}

/// Leaves a cgroup and removes it, by system calls alone.
fn remove_cgroup(above: &CStr, own: &CStr) {
    if let Ok(above) = open(above, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        // 0 is the writing process.
        let _ = rustix::io::write(&above, b"0");
    }
    let _ = unlinkat(CWD, own, AtFlags::REMOVEDIR);
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::namespace::{refused, skipped};
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, Stdio};

    /// Runs a script as the first process; it has printed something when this returns, unless there can be no namespaces here.
    fn start(script: &str, cgroups: &[(PathBuf, PathBuf)]) -> Option<(Child, String)> {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        in_own_processes(&mut command, cgroups).unwrap();
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                refused(&format!("no namespace can be had: {error}"));
                None
            }
            child => {
                let mut child = child.unwrap();
                let mut line = String::new();
                BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
                Some((child, line))
            }
        }
    }

    /// The end of all that can write to the child's output, and its status.
    fn end(mut child: Child) -> Option<i32> {
        // Who reads goes on.
        drop(child.stdin.take());
        child.stdout.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
        child.wait().unwrap().code()
    }

    fn signal(child: &Child, signal: Signal) {
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
    }

    #[test]
    fn it_is_the_first_process_and_ends_as_it_ends() {
        let Some((child, line)) = start("echo $$ $(readlink /proc/self | wc -w); read line; exit 7", &[]) else {
            return;
        };
        assert_eq!(line, "1 1\n");
        assert_eq!(end(child), Some(7));
        let mut command = Command::new("/nonexistent");
        in_own_processes(&mut command, &[]).unwrap();
        assert_eq!(command.spawn().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_it_is_told_reaches_it() {
        let script = "trap 'exit 3' TERM; echo; while :; do read line; done";
        let Some((mut child, _)) = start(script, &[]) else { return };
        let stdin = child.stdin.take();
        signal(&child, Signal::SIGTERM);
        // A shell acts when it has read.
        drop(stdin);
        assert_eq!(end(child), Some(3));
    }

    #[test]
    fn all_that_it_started_ends_with_it() {
        let script = "trap '' TERM; setsid sleep 1000 & echo; wait";
        let Some((child, _)) = start(script, &[]) else { return };
        signal(&child, KILL_CHILD);
        assert_eq!(end(child), Some(128 + 9));
        // By the end of what stays outside, and of its parent.
        let Some((child, _)) = start(script, &[]) else { return };
        signal(&child, Signal::SIGKILL);
        assert_eq!(end(child), None);
        let started = std::thread::spawn(|| start("trap '' TERM; sleep 1000 & echo; wait", &[])).join().unwrap();
        let Some((child, _)) = started else { return };
        assert_eq!(end(child), Some(128 + 9));
    }

    #[test]
    fn its_cgroups_are_removed() {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mut roots = mounts.lines().filter(|line| line.contains(" cgroup2 ") || line.contains("name=systemd"));
        let Some(root) = roots.find_map(|line| line.split(' ').nth(1)).map(Path::new) else {
            return skipped("no cgroups are mounted");
        };
        let own = root.join(format!("berth-test-{}", getpid()));
        if let Err(error) = fs::create_dir(&own) {
            return skipped(&format!("no cgroup can be made: {error}"));
        }
        let script = format!("echo 0 > {}/cgroup.procs && echo in; read line", own.display());
        let Some((child, line)) = start(&script, &[(root.join("cgroup.procs"), own.clone())]) else {
            return fs::remove_dir(&own).unwrap();
        };
        assert_eq!((line.as_str(), end(child)), ("in\n", Some(1)));
        assert!(!own.exists());
    }

    #[test]
    fn memory_is_mounted_where_it_can_be() {
        assert!(own_mounts().unwrap_err().to_string().contains("threads"), "a test has several");
        let temp = tempfile::tempdir().unwrap();
        let at = temp.path().to_owned();
        let mounted = std::thread::spawn(move || -> io::Result<()> {
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
            tmpfs(&at, 1 << 20, None)?;
            let mounts = fs::read_to_string("/proc/thread-self/mounts")?;
            let line = mounts.lines().find(|line| line.split(' ').nth(1).is_some_and(|place| at == Path::new(place)));
            let line = line.expect("it is mounted");
            let release = crate::process::kernel_release();
            let mut numbers = release.split('.').map(|part| part.parse::<u32>().unwrap_or_default());
            // The root of a user namespace may not keep memory from being swapped.
            let is_root = !line.contains(",uid=");
            let has_noswap = is_root && (numbers.next(), numbers.next()) >= (Some(6), Some(4));
            assert_eq!(line.contains(",noswap"), has_noswap, "{line} on {release}");
            let meta = rustix::fs::statvfs(&at)?;
            assert_eq!((meta.f_blocks * meta.f_frsize, rustix::fs::stat(&at)?.st_mode & 0o777), (1 << 20, 0o700));
            assert_eq!(fs::write(at.join("x"), vec![1; 2 << 20]).unwrap_err().kind(), io::ErrorKind::StorageFull);
            unmount(&at)?;
            assert!(!at.join("x").exists());
            Ok(())
        });
        match mounted.join().unwrap() {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                refused(&format!("no namespace can be had: {error}"));
            }
            mounted => mounted.unwrap(),
        }
    }
}
