//! Child processes: start one, read its log and its memory.

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

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
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        berth_os::process::remove_settings(&mut command);
        berth_os::process::die_with_parent(&mut command, Signal::SIGTERM);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self { child, log })
    }

    /// Starts this program as one of its own servers: see [`ChildProcess::address`].
    pub(crate) fn start_server(args: &[&str], log: PathBuf) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(args);
        Self::start(command, log)
    }

    /// The address that a server prints when it listens, in a line of its own.
    pub(crate) fn address(&mut self) -> Result<SocketAddr> {
        let start = Instant::now();
        loop {
            if let Some(address) = self
                .log()
                .split_inclusive('\n')
                .find_map(|line| line.strip_suffix('\n')?.parse().ok())
            {
                return Ok(address);
            }
            match self.exited() {
                Some(status) => bail!("a server ended, {status}: {}", self.last_line()),
                None if start.elapsed() > STARTED_WITHIN => {
                    bail!("a server does not listen: {}", self.last_line())
                }
                None => std::thread::sleep(POLL),
            }
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
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
        log.lines()
            .rev()
            .find(|line| !line.trim().is_empty())
            .unwrap_or("its log is empty")
            .to_owned()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Proportional set size in bytes: resident memory, of which a page that N processes share counts as 1/N. What sockets hold in the
/// kernel is not in it.
pub(crate) fn pss(pid: i32) -> Result<f64> {
    let rollup = procfs::process::Process::new(pid)?.smaps_rollup()?;
    let pss = rollup
        .memory_map_rollup
        .into_iter()
        .find_map(|map| map.extension.map.get("Pss").copied());
    Ok(pss.context("smaps_rollup has no Pss")? as f64)
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
        let pss = pss(std::process::id() as i32).unwrap();
        assert!((100e3..10e9).contains(&pss), "{pss}");
    }

    #[test]
    fn an_end_ends_the_wait() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such flag >&2; exit 3"]);
        let mut process = ChildProcess::start(command, directory.path().join("log")).unwrap();
        let error = process.address().unwrap_err().to_string();
        assert!(error.contains("exit status: 3: no such flag"), "{error}");
    }
}
