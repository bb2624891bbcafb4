//! Starts child processes, and reads their logs and their memory.

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Time between two looks at the log of a server that starts.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Time limit until one of this program's servers listens.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A child process. Dropping this value kills the child. If this process ends before, the child
/// gets SIGTERM.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    child: Child,
    log: PathBuf,
}

impl ChildProcess {
    /// Starts the child without variables `BERTH_*`, and appends its output to `log`. Must be
    /// called on the main thread, because the child gets SIGTERM when the thread that started it
    /// ends.
    pub(crate) fn start(mut command: Command, log: PathBuf) -> Result<Self> {
        let file = File::options().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("cannot write {}", log.display()))?;
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file);
        berth_os::process::remove_berth_variables(&mut command);
        berth_os::process::die_with_parent(&mut command, Signal::SIGTERM);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self { child, log })
    }

    /// Starts this program as a server. The server prints its address: see
    /// [`ChildProcess::address`].
    pub(crate) fn start_server(args: &[&str], log: PathBuf) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(args);
        Self::start(command, log)
    }

    /// Waits until the server has printed its address on a line of its own, and returns the
    /// address.
    pub(crate) fn address(&mut self) -> Result<SocketAddr> {
        let start = Instant::now();
        loop {
            if let Some(address) = self
                .read_log()
                .split_inclusive('\n')
                .find_map(|line| line.strip_suffix('\n')?.parse().ok())
            {
                return Ok(address);
            }
            match self.exit_status() {
                Some(status) => bail!("a server ended, {status}: {}", self.last_line()),
                None if start.elapsed() > START_TIMEOUT => {
                    bail!("a server does not listen: {}", self.last_line())
                }
                None => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Returns the child's exit status. `None` while the child runs.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Returns the output that the child has written so far.
    pub(crate) fn read_log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Returns the last line of the child's output, for an error message.
    pub(crate) fn last_line(&self) -> String {
        let log = self.read_log();
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

/// Returns a process's proportional set size (PSS) in bytes: its resident memory, with 1/N of each
/// page that N processes share. Memory of sockets in the kernel is not included.
pub(crate) fn read_pss(pid: i32) -> Result<f64> {
    let rollup = procfs::process::Process::new(pid)?.smaps_rollup()?;
    let pss = rollup
        .memory_map_rollup
        .into_iter()
        .find_map(|map| map.extension.map.get("Pss").copied());
    Ok(pss.context("smaps_rollup has no Pss")? as f64)
}

/// Counts the entries of a directory in /proc/PID, such as `fd` or `task`.
pub(crate) fn count_entries(pid: i32, directory: &str) -> Result<f64> {
    Ok(fs::read_dir(format!("/proc/{pid}/{directory}"))?.count() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pss_of_this_process_is_plausible() {
        let pss = read_pss(std::process::id() as i32).unwrap();
        assert!((100e3..10e9).contains(&pss), "{pss}");
    }

    #[test]
    fn a_process_that_exits_ends_the_wait() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such flag >&2; exit 3"]);
        let mut process = ChildProcess::start(command, directory.path().join("log")).unwrap();
        let error = process.address().unwrap_err().to_string();
        assert!(error.contains("exit status: 3: no such flag"), "{error}");
    }
}
