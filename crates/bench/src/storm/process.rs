//! Processes, and on which processors they are.

use crate::{Cli, NODE, PORT};
use anyhow::{Context, Result, bail};
use berth_bench::start::{another, said_address};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::io::{BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const INSTANCE: &str = "127.0.2.1:0";

/// The instance's, and those of all others.
pub(crate) struct Processors {
    instance: CpuSet,
    others: CpuSet,
}

impl Processors {
    /// Takes the last one from this process and whom it starts.
    pub(crate) fn split() -> Result<Self> {
        let mut all = sched_getaffinity(Pid::this())?;
        let mut last = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or_default());
        let Some(last) = last.next_back().filter(|last| *last > 0) else { bail!("two processors are needed") };
        let mut instance = CpuSet::new();
        instance.set(last)?;
        all.unset(last)?;
        sched_setaffinity(Pid::this(), &all)?;
        Ok(Self { instance, others: all })
    }

    /// Starts a process on the instance's. From the start: Go counts them once.
    pub(crate) fn spawn<T>(&self, spawn: impl FnOnce() -> std::io::Result<T>) -> Result<T> {
        sched_setaffinity(Pid::this(), &self.instance)?;
        let spawned = spawn();
        sched_setaffinity(Pid::this(), &self.others)?;
        Ok(spawned?)
    }
}

/// The stand-in.
pub(crate) struct Instance {
    child: Child,
    pub(crate) address: SocketAddr,
    said: BufReader<std::process::ChildStdout>,
}

impl Instance {
    pub(crate) fn start(cli: &Cli, processors: &Processors) -> Result<Self> {
        let mut command = another(["instance", INSTANCE, &cli.handshake.to_string(), &cli.request.to_string()])?;
        command.stdin(Stdio::piped());
        let mut child = processors.spawn(|| command.spawn())?;
        let (address, said) = said_address(&mut child)?;
        Ok(Self { child, address, said })
    }

    /// Ends it; how many handshakes it computed.
    pub(crate) fn end(&mut self) -> Result<u64> {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.said.read_to_string(&mut said)?;
        Ok(said.trim().parse()?)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// berth before one instance.
pub(crate) struct Berth {
    child: Child,
    log: PathBuf,
}

impl Berth {
    /// `probe`: how it asks the instance.
    pub(crate) fn start(
        cli: &Cli,
        gate: &str,
        backend: SocketAddr,
        probe: &[OsString],
        directory: &Path,
    ) -> Result<Self> {
        let mut command = Command::new(&cli.berth);
        command.args(["serve", "--rise", "1", "--drain-timeout", "1s", "--max-openings", gate]).args(probe);
        command.arg(format!("--listen={NODE}:{PORT}")).arg(format!("--backend={backend}"));
        command.arg("--run-dir").arg(directory.join("run"));
        let log = directory.join("log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&log)?);
        berth_os::process::die_with_parent(&mut command);
        let child = command.spawn().with_context(|| format!("cannot start {}", cli.berth.display()))?;
        let mut berth = Self { child, log };
        while std::net::TcpStream::connect((NODE, PORT)).is_err() {
            if let Some(status) = berth.child.try_wait()? {
                bail!("berth ended, {status}: {}", berth.said().lines().last().unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(berth)
    }

    /// Its log.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Berth {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
