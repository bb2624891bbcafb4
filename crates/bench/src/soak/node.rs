//! The processes of a berth: pairs of an instance, started by `berth exec`, and its shim.

use crate::instance;
use anyhow::{Context, Result, bail};
use berth_node::ipc;
use berth_node::ipc::wire::Status;
use berth_node::terms::Phase;
use berth_os::proc_net;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

/// Longest wait for anything that should happen: a machine may be slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// Shims renew three times in this time.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

/// What the processes are started with.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) berth: PathBuf,
    pub(crate) previous: Option<PathBuf>,
    pub(crate) faketime: Option<PathBuf>,
    pub(crate) dir: PathBuf,
}

impl Options {
    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    /// What libfaketime reads: how far the clock is off.
    pub(crate) fn clock(&self) -> PathBuf {
        self.dir.join("clock")
    }
}

/// A process. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn pid(&self) -> Option<Pid> {
        self.0.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            // One that has just ended is what is wanted, or will be noticed.
            let _ = kill(pid, signal);
        }
    }

    /// Stops it, and waits until it stands still.
    pub(crate) async fn freeze(&self) -> Result<()> {
        let pid = self.pid().context("it has ended")?;
        self.signal(Signal::SIGSTOP);
        until("a process that stands still", async || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T')).then_some(())
        })
        .await
    }

    pub(crate) async fn ended(&mut self, what: &str) -> Result<()> {
        let status = tokio::time::timeout(2 * PATIENCE, self.0.wait()).await;
        status.with_context(|| format!("{what} did not end"))?.map(drop).context("wait")
    }

    pub(crate) async fn kill(&mut self) -> Result<()> {
        self.signal(Signal::SIGKILL);
        self.ended("what was killed").await
    }
}

/// An instance and its shim.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) id: String,
    /// What the instance calls itself: another name for each process.
    pub(crate) name: String,
    pub(crate) shim: Process,
    pub(crate) instance: Process,
    /// Its shim is of the version before.
    pub(crate) is_previous: bool,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) options: Options,
    pub(crate) listen: SocketAddr,
    /// Stays to the end: what grows, grows there.
    pub(crate) a: Pair,
    pub(crate) b: Pair,
    started: u32,
}

impl Node {
    pub(crate) async fn start(options: Options, listen: SocketAddr) -> Result<Self> {
        // Taken for a moment: a port that nobody has.
        let listen = TcpListener::bind(listen)?.local_addr()?;
        fs::create_dir_all(options.dir.join("log")).context("the directory of the logs")?;
        fs::write(options.clock(), "+0\n")?;
        let a = Pair::start(&options, listen, "a", 1, false)?;
        let b = Pair::start(&options, listen, "b2", 2, false)?;
        let node = Self { options, listen, a, b, started: 2 };
        node.joined(&node.a).await?;
        node.joined(&node.b).await?;
        Ok(node)
    }

    /// A pair under a name that nobody had.
    pub(crate) fn next_pair(&mut self, previous: bool) -> Result<Pair> {
        self.started += 1;
        Pair::start(&self.options, self.listen, &format!("b{}", self.started), self.started, previous)
    }

    /// Starts the instance of a pair again.
    pub(crate) fn start_instance(&mut self, which: fn(&mut Self) -> &mut Pair) -> Result<()> {
        self.started += 1;
        let id = which(self).id.clone();
        let (name, instance) = start_instance(&self.options, self.listen, &id, self.started)?;
        let pair = which(self);
        (pair.name, pair.instance) = (name, instance);
        Ok(())
    }

    /// Starts the shim of a pair again.
    pub(crate) fn start_shim(&mut self, which: fn(&mut Self) -> &mut Pair) -> Result<()> {
        let (id, previous) = (which(self).id.clone(), which(self).is_previous);
        let shim = start_shim(&self.options, self.listen, &id, previous)?;
        which(self).shim = shim;
        Ok(())
    }

    pub(crate) async fn status(&self, pair: &Pair) -> Result<Box<Status>, String> {
        let path = self.options.run_dir().join(self.listen.to_string()).join(format!("{}.sock", pair.id));
        ipc::status(&path, Duration::from_secs(1)).await
    }

    /// Waits until a shim is joined and its own instance ready.
    pub(crate) async fn joined(&self, pair: &Pair) -> Result<()> {
        let mut last = Err("not asked".into());
        let joined = until("", async || {
            last = self.status(pair).await;
            let status = last.as_ref().ok()?;
            (status.state == Phase::Joined && status.ready().is_ok()).then_some(())
        });
        let result = joined.await;
        result.map_err(|_| anyhow::anyhow!("{} did not join within {PATIENCE:?}: {last:?}", pair.id))
    }

    /// Waits until all is as it should be.
    pub(crate) async fn calm(&self) -> Result<()> {
        self.joined(&self.a).await?;
        self.joined(&self.b).await
    }

    /// The clients whose connections a shim has accepted, while it stands still: whose sockets it holds.
    pub(crate) fn accepted_by(&self, shim: &Process) -> Result<HashSet<SocketAddr>> {
        let pid = shim.pid().context("it has ended")?;
        let mut sockets = HashSet::new();
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
            let target = fs::read_link(entry.path()).unwrap_or_default();
            let inode =
                target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            sockets.extend(inode.map(|inode: u64| inode));
        }
        let table = fs::read_to_string("/proc/net/tcp")?;
        let of_shim = table.lines().filter_map(|line| {
            let entry = proc_net::parse_line(line)?;
            (entry.local == self.listen && sockets.contains(&entry.inode)).then(|| peer(line))?
        });
        Ok(of_shim.collect())
    }

    pub(crate) fn listeners(&self) -> usize {
        let found = proc_net::listeners(self.listen.port()).unwrap_or_default();
        found.iter().filter(|listener| listener.local == self.listen).count()
    }

    pub(crate) fn logs(&self) -> PathBuf {
        self.options.dir.join("log")
    }

    pub(crate) async fn end(mut self) {
        for pair in [&mut self.b, &mut self.a] {
            pair.shim.signal(Signal::SIGTERM);
            pair.instance.signal(Signal::SIGTERM);
            let _ = pair.shim.ended("the shim").await;
            let _ = pair.instance.ended("the instance").await;
        }
    }
}

impl Pair {
    fn start(options: &Options, listen: SocketAddr, id: &str, number: u32, previous: bool) -> Result<Self> {
        let shim = start_shim(options, listen, id, previous)?;
        let (name, instance) = start_instance(options, listen, id, number)?;
        Ok(Self { id: id.to_owned(), name, shim, instance, is_previous: previous })
    }
}

fn log(options: &Options, id: &str, what: &str) -> Result<File> {
    let path = options.dir.join("log").join(format!("{id}.{what}"));
    OpenOptions::new().create(true).append(true).open(&path).with_context(|| path.display().to_string())
}

fn spawn(mut command: Command, log: File) -> Result<Process> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).kill_on_drop(true);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"BERTH_")) {
        command.env_remove(name);
    }
    berth_os::process::die_with_parent(command.as_std_mut());
    Ok(Process(command.spawn().context("cannot start a process")?))
}

fn start_shim(options: &Options, listen: SocketAddr, id: &str, previous: bool) -> Result<Process> {
    let program = options.previous.as_ref().filter(|_| previous).unwrap_or(&options.berth);
    let mut command = Command::new(program);
    command.args(["serve", "--probe", "tcp", "--probe-interval", "200ms", "--threads", "2", "--log-format", "json"]);
    command.arg("--lease").arg(format!("{}s", LEASE.as_secs()));
    command.args(["--listen", &listen.to_string(), "--instance", id]).arg("--run-dir").arg(options.run_dir());
    if let Some(library) = &options.faketime {
        command.env("LD_PRELOAD", library).env("FAKETIME_TIMESTAMP_FILE", options.clock());
        // What the kernel counts from its start does not jump.
        command.env("FAKETIME_NO_CACHE", "1").env("DONT_FAKE_MONOTONIC", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }
    spawn(command, log(options, id, "shim")?)
}

fn start_instance(options: &Options, listen: SocketAddr, id: &str, number: u32) -> Result<(String, Process)> {
    let name = format!("{id}#{number}");
    let mut command = Command::new(&options.berth);
    command.args(["exec", "--listen", &listen.to_string(), "--instance", id]).arg("--run-dir").arg(options.run_dir());
    command.arg("--").arg(std::env::current_exe()?).args([instance::COMMAND, &format!("--name={name}")]);
    Ok((name, spawn(command, log(options, id, "instance")?)?))
}

/// The other end of a line of /proc/net/tcp: four bytes in the machine's order, and the port.
fn peer(line: &str) -> Option<SocketAddr> {
    let (address, port) = line.split_ascii_whitespace().nth(2)?.split_once(':')?;
    let address = u32::from_str_radix(address, 16).ok()?.to_ne_bytes();
    Some(SocketAddr::from((address, u16::from_str_radix(port, 16).ok()?)))
}

/// Looks again and again until there is something.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            bail!("waited {PATIENCE:?} in vain: {what}");
        }
        sleep(LOOK).await;
    }
}
