//! The bridge's process, forked before any thread and any runtime starts: two processes that share
//! a runtime's signal pipe would take each other's signals.

use super::caller::end_last_bridge;
use super::cgroup;
use super::claim::Claim;
use super::drive::drive_bridge;
use super::plan::{BridgeOptions, BridgePlan, RunningInstance};
use super::preflight::preflight;
use super::watch::TIMEOUT;
use berth_manifest::report::Refusal;
use berth_os::namespaces::unshare_mounts;
use berth_os::process::{Detached, fork_detached, leave_terminal, set_oom_score};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, geteuid};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// OOM score of the bridge's process. When memory runs out, the kernel kills every pod before this
/// process (critical static pods have -997), and the container runtime (-999) after it.
const OOM_SCORE: i16 = -998;

/// Result of the fork, which tells each of the two processes which one it is.
pub enum ForkSide {
    /// The bridge's process, which writes to the socket when the bridge begins, and waits for the
    /// caller's answer.
    Bridge(UnixStream),
    /// The process that began the bridge.
    Caller(Bridge),
}

/// Handle for a bridge's process, which writes to `begins` when the bridge begins.
pub struct Bridge {
    pid: Pid,
    begins: UnixStream,
}

/// Forks this process, which must be single-threaded.
///
/// # Errors
/// The process has another thread, or a system call failed.
pub fn fork_bridge() -> io::Result<ForkSide> {
    let (begins, begin) = UnixStream::pair()?;
    Ok(match fork_detached()? {
        Detached::Daemon => ForkSide::Bridge(begin),
        Detached::Caller(pid) => ForkSide::Caller(Bridge {
            pid: Pid::from_raw(pid),
            begins,
        }),
    })
}

impl Bridge {
    /// Waits for the bridge to begin, and returns the socket. The caller writes to the socket after
    /// its first request, for which the bridge waits. If the bridge ends first, returns its exit
    /// status, or `None` if killed by a signal; the bridge has printed the reason.
    ///
    /// # Errors
    /// Errors of waitpid(2).
    pub fn wait_for_begin(mut self) -> io::Result<Result<UnixStream, Option<i32>>> {
        if self.begins.read_exact(&mut [0]).is_ok() {
            return Ok(Ok(self.begins));
        }
        Ok(Err(match waitpid(self.pid, None)? {
            WaitStatus::Exited(_, code) => Some(code),
            _ => None,
        }))
    }
}

/// Gives the bridge of a pod a mount namespace. Must be called while the process has only one
/// thread. Without root there is no namespace, and preflight reports the missing right.
///
/// # Errors
/// CAP_SYS_ADMIN is missing.
pub fn isolate_mounts(options: &BridgeOptions) -> io::Result<()> {
    match options.running {
        RunningInstance::Pod { .. } if geteuid().is_root() => unshare_mounts(),
        _ => Ok(()),
    }
}

/// Runs the bridge, if preflight accepts it. Prints on the caller's terminal until the write to
/// `begin`.
///
/// # Errors
/// The reasons why no bridge can begin.
pub async fn run_bridge(
    options: BridgeOptions,
    begin: UnixStream,
    note: impl Fn(&BridgePlan),
) -> Result<(), Refusal> {
    end_last_bridge(&options.directory).await;
    let plan = preflight(options).await?;
    note(&plan);
    let unavailable = |why: String| Refusal::Unavailable(vec![why]);
    let claim = Claim::acquire(&plan.options.directory).map_err(unavailable)?;
    leave_terminal(&claim.log)
        .map_err(|error| unavailable(format!("cannot leave the terminal: {error}")))?;
    // A caller that was stopped (Ctrl-Z) may answer later, when the plan is outdated.
    let asked = begin
        .set_read_timeout(Some(TIMEOUT))
        .and_then(|()| (&begin).write_all(&[0]));
    if asked.and_then(|()| (&begin).read_exact(&mut [0])).is_err() {
        tracing::info!(
            "the process that requested the bridge has gone away, or is stopped: no bridge begins"
        );
        return Ok(());
    }
    drop(begin);
    if let Err(error) = set_oom_score(OOM_SCORE) {
        tracing::info!(%error, "the bridge cannot lower its OOM score: run the bridge with CAP_SYS_RESOURCE");
    }
    if let Err(error) = cgroup::leave_session_cgroup() {
        tracing::info!(%error, "this bridge is in the cgroup of the process that started it");
    }
    drive_bridge(plan, claim).await;
    cgroup::remove_bridge_cgroup();
    Ok(())
}
