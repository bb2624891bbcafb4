//! The bridge's process, forked before any thread and any runtime starts: two processes that share a runtime's signal pipe would take
//! each other's signals.

use super::caller::end_last;
use super::cgroup;
use super::claim::Claim;
use super::drive::drive;
use super::plan::{BridgeOptions, BridgePlan, RunningInstance};
use super::preflight::preflight;
use super::watch::PATIENCE;
use berth_manifest::report::Refusal;
use berth_os::namespaces::unshare_mounts;
use berth_os::process::{Detached, detach, leave_terminal, set_oom_score};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, geteuid};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// The daemon's OOM score: out of memory, the kernel kills every pod before it (critical static pods have -997), but no container
/// runtime (-999).
const OOM_SCORE: i16 = -998;

/// Which process this is.
pub enum Half {
    /// The bridge's own process, which writes to this socket when the bridge begins, and waits for the caller's answer.
    Bridge(UnixStream),
    /// The process that began the bridge.
    Caller(Bridge),
}

/// A bridge's process, which writes when the bridge begins.
pub struct Bridge {
    pid: Pid,
    begins: UnixStream,
}

/// Forks this process, which must have one thread.
///
/// # Errors
/// There is another thread, or those of the system calls.
pub fn divide() -> io::Result<Half> {
    let (begins, begin) = UnixStream::pair()?;
    Ok(match detach()? {
        Detached::Daemon => Half::Bridge(begin),
        Detached::Caller(pid) => Half::Caller(Bridge {
            pid: Pid::from_raw(pid),
            begins,
        }),
    })
}

impl Bridge {
    /// Waits until it begins, and gives the socket to which the caller writes when it has asked the bridge, which waits for that; else
    /// for the bridge's exit status, having printed why: `None` if a signal ended it.
    ///
    /// # Errors
    /// Those of waitpid(2).
    pub fn begins(mut self) -> io::Result<Result<UnixStream, Option<i32>>> {
        if self.begins.read_exact(&mut [0]).is_ok() {
            return Ok(Ok(self.begins));
        }
        Ok(Err(match waitpid(self.pid, None)? {
            WaitStatus::Exited(_, code) => Some(code),
            _ => None,
        }))
    }
}

/// Lets the bridge of a pod have mounts of its own. To be called before there is a second thread. Without root there is no namespace, and
/// the preflight reports that.
///
/// # Errors
/// CAP_SYS_ADMIN is missing.
pub fn isolate(options: &BridgeOptions) -> io::Result<()> {
    match options.running {
        RunningInstance::Pod { .. } if geteuid().is_root() => unshare_mounts(),
        _ => Ok(()),
    }
}

/// Runs the bridge, if there can be one. Until it writes to `begin`, it prints on the terminal that started it.
///
/// # Errors
/// Why there is none.
pub async fn hold(
    options: BridgeOptions,
    begin: UnixStream,
    note: impl Fn(&BridgePlan),
) -> Result<(), Refusal> {
    end_last(&options.directory).await;
    let plan = preflight(options).await?;
    note(&plan);
    let unavailable = |why: String| Refusal::Unavailable(vec![why]);
    let claim = Claim::acquire(&plan.options.directory).map_err(unavailable)?;
    leave_terminal(&claim.log)
        .map_err(|error| unavailable(format!("cannot leave the terminal: {error}")))?;
    // A caller that is stopped (Ctrl-Z) asks later, when the plan may be wrong.
    let asked = begin
        .set_read_timeout(Some(PATIENCE))
        .and_then(|()| (&begin).write_all(&[0]));
    if asked.and_then(|()| (&begin).read_exact(&mut [0])).is_err() {
        tracing::info!(
            "the process that wanted a bridge has gone away, or is stopped: there is none"
        );
        return Ok(());
    }
    drop(begin);
    if let Err(error) = set_oom_score(OOM_SCORE) {
        tracing::info!(%error, "this bridge keeps its OOM score: run it with CAP_SYS_RESOURCE");
    }
    if let Err(error) = cgroup::leave() {
        tracing::info!(%error, "this bridge is in the cgroup of the process that started it");
    }
    drive(plan, claim).await;
    cgroup::remove();
    Ok(())
}
