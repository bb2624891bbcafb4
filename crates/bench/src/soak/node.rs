//! The processes of a berth: pairs of an instance, started by `berth exec`, and its shim.

use super::SoakOptions;
use crate::process::{ChildProcess, until};
use anyhow::{Context, Result, anyhow};
use berth_node::ipc;
use berth_node::ipc::wire::Status;
use berth_node::terms::Phase;
use berth_os::sock_diag;
use nix::sys::signal::Signal;
use procfs::process::FDTarget;
use std::collections::HashSet;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::time::Duration;

/// Longest wait for anything that should happen: a machine may be slow.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Shims renew three times in this time.
const LEASE: Duration = Duration::from_secs(2);

/// An instance and its shim.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) id: String,
    /// The instance's name, another for each process.
    pub(super) name: String,
    pub(super) shim: ChildProcess,
    pub(super) instance: ChildProcess,
    /// The shim is of the version before.
    is_previous: bool,
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) options: SoakOptions,
    pub(super) listen: SocketAddr,
    /// Stays to the end: what grows, grows there.
    pub(super) a: Pair,
    pub(super) b: Pair,
    started: u32,
}

impl Node {
    pub(super) async fn start(options: SoakOptions, listen: SocketAddr) -> Result<Self> {
        // Bound for a moment to find a free port.
        let listen = TcpListener::bind(listen)?.local_addr()?;
        fs::create_dir_all(options.logs()).context("the directory of the logs")?;
        fs::write(options.clock(), "+0\n")?;
        let a = start_pair(&options, listen, "a", 1, false)?;
        let b = start_pair(&options, listen, "b2", 2, false)?;
        let node = Self { options, listen, a, b, started: 2 };
        node.calm().await?;
        Ok(node)
    }

    /// Starts a pair with a new name.
    pub(super) fn next_pair(&mut self, previous: bool) -> Result<Pair> {
        self.started += 1;
        start_pair(&self.options, self.listen, &format!("b{}", self.started), self.started, previous)
    }

    /// Starts the instance of a pair again.
    pub(super) fn start_instance(&mut self, which: fn(&mut Self) -> &mut Pair) -> Result<()> {
        self.started += 1;
        let id = which(self).id.clone();
        let (name, instance) = start_instance(&self.options, self.listen, &id, self.started)?;
        let pair = which(self);
        (pair.name, pair.instance) = (name, instance);
        Ok(())
    }

    /// Starts the shim of `b` again.
    pub(super) fn start_shim(&mut self) -> Result<()> {
        self.b.shim = start_shim(&self.options, self.listen, &self.b.id, self.b.is_previous)?;
        Ok(())
    }

    pub(super) async fn status(&self, pair: &Pair) -> Result<Box<Status>, String> {
        let path = self.options.run_dir().join(self.listen.to_string()).join(format!("{}.sock", pair.id));
        ipc::status(&path, Duration::from_secs(1)).await
    }

    /// Waits until a shim is joined and its own instance ready.
    pub(super) async fn joined(&self, pair: &Pair) -> Result<()> {
        let mut last = Err("no status yet".into());
        let joined = until("", PATIENCE, async || {
            last = self.status(pair).await;
            let status = last.as_ref().ok()?;
            (status.state == Phase::Joined && status.ready().is_ok()).then_some(())
        });
        let result = joined.await;
        result.map_err(|_| anyhow!("{} did not join within {PATIENCE:?}: {last:?}", pair.id))
    }

    /// Waits until both pairs are joined.
    pub(super) async fn calm(&self) -> Result<()> {
        self.joined(&self.a).await?;
        self.joined(&self.b).await
    }

    /// The clients whose connections a shim has accepted, while it is stopped: it has their sockets.
    pub(super) fn accepted_by(&self, shim: &ChildProcess) -> Result<HashSet<SocketAddr>> {
        let fds = procfs::process::Process::new(shim.pid())?.fd()?;
        let sockets: HashSet<u64> = fds
            .filter_map(|fd| match fd.ok()?.target {
                FDTarget::Socket(inode) => Some(inode),
                _ => None,
            })
            .collect();
        let mut entries = procfs::net::tcp()?;
        entries.retain(|entry| entry.local_address == self.listen && sockets.contains(&entry.inode));
        Ok(entries.into_iter().map(|entry| entry.remote_address).collect())
    }

    pub(super) fn listeners(&self) -> usize {
        sock_diag::listeners_at(self.listen).unwrap_or_default().len()
    }

    pub(super) async fn end(mut self) {
        for pair in [&mut self.b, &mut self.a] {
            pair.shim.signal(Signal::SIGTERM);
            pair.instance.signal(Signal::SIGTERM);
            let _ = ended(&mut pair.shim, "the shim").await;
            let _ = ended(&mut pair.instance, "the instance").await;
        }
    }
}

/// Stops a process by SIGSTOP, and waits until it is stopped.
pub(super) async fn freeze(process: &mut ChildProcess) -> Result<()> {
    process.signal(Signal::SIGSTOP);
    let stat = procfs::process::Process::new(process.pid())?;
    process.until("a process to stop", PATIENCE, async || (stat.stat().ok()?.state == 'T').then_some(())).await
}

pub(super) async fn kill(process: &mut ChildProcess) -> Result<()> {
    process.signal(Signal::SIGKILL);
    ended(process, "a killed process").await
}

pub(super) async fn ended(process: &mut ChildProcess, what: &str) -> Result<()> {
    process.ended(2 * PATIENCE).await.with_context(|| what.to_owned())
}

fn start_pair(options: &SoakOptions, listen: SocketAddr, id: &str, number: u32, previous: bool) -> Result<Pair> {
    let shim = start_shim(options, listen, id, previous)?;
    let (name, instance) = start_instance(options, listen, id, number)?;
    Ok(Pair { id: id.to_owned(), name, shim, instance, is_previous: previous })
}

fn start_shim(options: &SoakOptions, listen: SocketAddr, id: &str, previous: bool) -> Result<ChildProcess> {
    let program = options.previous.as_ref().filter(|_| previous).unwrap_or(&options.berth);
    let mut command = Command::new(program);
    command.args(["serve", "--probe", "tcp", "--probe-interval", "200ms", "--threads", "2", "--log-format", "json"]);
    command.arg("--lease").arg(format!("{}s", LEASE.as_secs()));
    command.args(["--listen", &listen.to_string(), "--instance", id]).arg("--run-dir").arg(options.run_dir());
    if let Some(library) = &options.faketime {
        command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", options.clock());
        // The kernel's monotonic clock does not jump.
        command.env("FAKETIME_NO_CACHE", "1").env("DONT_FAKE_MONOTONIC", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }
    ChildProcess::start(command, options.logs().join(format!("{id}.shim")))
}

fn start_instance(options: &SoakOptions, listen: SocketAddr, id: &str, number: u32) -> Result<(String, ChildProcess)> {
    let name = format!("{id}#{number}");
    let mut command = Command::new(&options.berth);
    command.args(["exec", "--listen", &listen.to_string(), "--instance", id]).arg("--run-dir").arg(options.run_dir());
    command.arg("--").arg(std::env::current_exe()?).args(["instance", &format!("--name={name}")]);
    Ok((name, ChildProcess::start(command, options.logs().join(format!("{id}.instance")))?))
}
