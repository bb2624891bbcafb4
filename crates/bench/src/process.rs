//! Child processes: start one, read its log and its memory, wait for its end.

use anyhow::{Context, Result, anyhow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Time between two polls.
const POLL: Duration = Duration::from_millis(50);

/// Time until one of this program's own servers listens.
const STARTED_WITHIN: Duration = Duration::from_secs(10);

/// A child process. It is killed when this is dropped, and gets SIGTERM when this process ends.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    child: Child,
    log: PathBuf,
}

impl ChildProcess {
    /// Starts it without variables `BERTH_*`; what it prints is appended to `log`. To be called on the main thread: the child gets
    /// SIGTERM when the thread that started it ends.
    pub(crate) fn start(mut command: Command, log: PathBuf) -> Result<Self> {
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        berth_os::process::remove_settings(&mut command);
        berth_os::process::die_with_parent(&mut command, Signal::SIGTERM);
        let child = command.spawn().with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self { child, log })
    }

    /// Starts this program as one of its own servers, which prints its address first: see [`ChildProcess::address`].
    pub(crate) fn start_server(args: &[&str], log: PathBuf) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(args);
        Self::start(command, log)
    }

    /// The address that a server has printed.
    pub(crate) async fn address(&mut self) -> Result<SocketAddr> {
        let log = self.log.clone();
        self.until("the address of a server", STARTED_WITHIN, async || {
            fs::read_to_string(&log).ok()?.split_once('\n')?.0.parse().ok()
        })
        .await
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn signal(&mut self, signal: Signal) {
        // Its number may be another's once its exit status was read.
        if self.exited().is_none() {
            let _ = kill(Pid::from_raw(self.pid()), signal);
        }
    }

    /// The exit status, if it has ended.
    pub(crate) fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// What it has printed.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The last line of its log, for an error message.
    pub(crate) fn last_line(&self) -> String {
        let log = self.log();
        log.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("its log is empty").to_owned()
    }

    pub(crate) async fn ended(&mut self, within: Duration) -> Result<()> {
        until("the end of a process", within, async || self.exited()).await.map(drop)
    }

    /// As [`until`], but an error if the process ends meanwhile.
    pub(crate) async fn until<T>(
        &mut self,
        what: &str,
        within: Duration,
        mut poll: impl AsyncFnMut() -> Option<T>,
    ) -> Result<T> {
        let found = until(what, within, async || match self.exited() {
            Some(status) => Some(Err(status)),
            None => poll().await.map(Ok),
        });
        let found = found.await.with_context(|| self.last_line())?;
        found.map_err(|status| anyhow!("ended while waiting for {what}, {status}: {}", self.last_line()))
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls until there is a result.
pub(crate) async fn until<T>(what: &str, within: Duration, mut poll: impl AsyncFnMut() -> Option<T>) -> Result<T> {
    let found = async {
        loop {
            if let Some(found) = poll().await {
                return found;
            }
            sleep(POLL).await;
        }
    };
    timeout(within, found).await.with_context(|| format!("waited {within:?} in vain for {what}"))
}

/// Proportional set size in bytes: resident memory, of which a page that N processes share counts as 1/N. What sockets hold in the
/// kernel is not in it.
pub(crate) fn pss(pid: i32) -> Result<f64> {
    let rollup = procfs::process::Process::new(pid)?.smaps_rollup()?;
    let pss = rollup.memory_map_rollup.into_iter().find_map(|map| map.extension.map.get("Pss").copied());
    Ok(pss.context("smaps_rollup has no Pss")? as f64)
}

/// Resident memory in KiB that is neither of a file nor shared: heap and stacks, where a leak is.
pub(crate) fn anonymous(pid: i32) -> Result<f64> {
    let status = procfs::process::Process::new(pid)?.status()?;
    Ok(status.rssanon.context("status has no RssAnon")? as f64)
}

/// Number of entries of a directory in /proc/PID, such as `fd` or `task`.
pub(crate) fn count(pid: i32, directory: &str) -> Result<f64> {
    Ok(fs::read_dir(format!("/proc/{pid}/{directory}"))?.count() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_memory() {
        let (pss, anonymous) = (pss(std::process::id() as i32).unwrap(), anonymous(std::process::id() as i32).unwrap());
        assert!((100e3..10e9).contains(&pss) && (10.0..10e6).contains(&anonymous), "{pss} {anonymous}");
    }

    #[tokio::test]
    async fn an_end_ends_the_wait() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such flag >&2; exit 3"]);
        let mut process = ChildProcess::start(command, directory.path().join("log")).unwrap();
        let error = process.until("nothing", STARTED_WITHIN, async || None::<()>).await.unwrap_err().to_string();
        assert!(error.contains("exit status: 3: no such flag"), "{error}");
    }
}
