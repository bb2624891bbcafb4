//! More clients at once than an instance can serve, with berth's gate and without it, in turns: the tool of `scripts/storm.sh`.
//!
//! `reconnect`: all clients come at one moment and retry until they are served, as kubelets do after an outage, and a client on the
//! node connects meanwhile. `greedy`: one source opens connections in a loop, while others open a few. In both, the instance is simulated: a
//! handshake and a request cost a given CPU time. `real` is `reconnect` to a real kube-apiserver, and `ramp` restarts one under
//! informers. The instance has a CPU of its own; clients and berth have the others.

mod clients;
pub(crate) mod instance;
mod ramp;
mod real;
mod storms;

use crate::markdown::aligned;
use crate::process::ChildProcess;
use crate::stats::Summary;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use real::ControlPlane;
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;

/// Where berth listens, in a network all of whose addresses are this machine's (RFC 2544).
const NODE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 254, 0, 0);
const PORT: u16 = 6443;
const NODE_ADDRESS: SocketAddr = SocketAddr::V4(SocketAddrV4::new(NODE, PORT));

const INSTANCE: &str = "127.0.2.1:0";

/// Time without a storm before it, and the longest that it may take.
const CALM: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(180);

const STARTED_WITHIN: Duration = Duration::from_secs(30);

const WASTED: &str = "handshakes of clients that left before their first answer";

/// Warnings of berth's that are shown.
const SHOWN: usize = 10;

#[derive(Debug, Args)]
pub(crate) struct StormOptions {
    #[arg(value_enum, default_value = "reconnect")]
    storm: StormKind,
    /// The berth
    #[arg(long, default_value = "berth")]
    berth: PathBuf,
    /// Clients that come at once
    #[arg(long, default_value_t = 5000)]
    clients: u32,
    /// Addresses that they have
    #[arg(long, default_value_t = 500)]
    sources: u32,
    /// CPU time of a handshake, in microseconds
    #[arg(long, default_value_t = 1000)]
    handshake: u64,
    /// CPU time of a request, in microseconds
    #[arg(long, default_value_t = 1000)]
    request: u64,
    /// Values of --max-openings to compare
    #[arg(long, default_value = "off,auto", value_delimiter = ',')]
    gates: Vec<String>,
    /// Times that each is measured
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Clients that list and watch, of `ramp`
    #[arg(long, default_value_t = 2000)]
    informers: u32,
    #[command(flatten)]
    real: Option<real::Programs>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum StormKind {
    Reconnect,
    Greedy,
    Real,
    Ramp,
}

/// The figures of one round.
#[derive(Debug, Default)]
struct Round {
    figures: Vec<(&'static str, f64)>,
    /// Connections whose first request was answered.
    answered: u64,
    /// How long the storm was.
    lasted: Duration,
}

pub(crate) fn run(options: &StormOptions) -> Result<()> {
    crate::enter_network(NODE, NETMASK)?;
    // berth's --max-connections follows from it: clients are to wait at the gate, not in the backlog.
    berth_os::process::raise_hard_file_limit()?;
    // A connection that is closed keeps its port for 60 s (TIME_WAIT). Where one source has few left, connect(2) looks for one for
    // longer than a handshake takes.
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "1024 65535").context("cannot give clients more ports")?;
    let cpus = Cpus::split()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        // A signal drops the processes and temporary directories.
        tokio::select! {
            done = compare(options, &cpus) => done,
            _ = interrupt.recv() => bail!("interrupted"),
            _ = terminate.recv() => bail!("terminated"),
        }
    })
}

async fn compare(options: &StormOptions, cpus: &Cpus) -> Result<()> {
    let plane = match options.storm {
        StormKind::Reconnect | StormKind::Greedy => None,
        StormKind::Real | StormKind::Ramp => {
            let programs = options.real.as_ref().context("give --kube-apiserver, --etcd and --server-key")?;
            Some(ControlPlane::start(programs, cpus)?)
        }
    };
    let mut rounds: Vec<Vec<Round>> = options.gates.iter().map(|_| Vec::new()).collect();
    for round in 0..options.rounds {
        for turn in 0..options.gates.len() {
            let at = (turn + round as usize) % options.gates.len();
            let gate = &options.gates[at];
            let measured = match &plane {
                Some(plane) if options.storm == StormKind::Ramp => ramp::run(options, gate, cpus, plane).await?,
                Some(plane) => real::storm(options, gate, cpus, plane).await?,
                None => simulated(options, gate, cpus).await?,
            };
            eprintln!("round {}, --max-openings {gate}: {:?}", round + 1, measured.figures);
            rounds[at].push(measured);
        }
    }
    print(options, &rounds);
    Ok(())
}

/// The medians, a column for each gate.
fn print(options: &StormOptions, rounds: &[Vec<Round>]) {
    let Some(first) = rounds.first().and_then(|rounds| rounds.first()) else { return };
    let row = |head: &str, cells: Vec<String>| [vec![head.to_owned()], cells].concat();
    let mut lines = vec![row("", options.gates.clone())];
    for (at, (name, _)) in first.figures.iter().enumerate() {
        let medians = rounds.iter().map(|rounds| {
            let values: Vec<_> = rounds.iter().map(|round| round.figures[at].1).collect();
            format!("{:.1}", Summary::of(&values).map_or(f64::NAN, |summary| summary.median))
        });
        lines.push(row(name, medians.collect()));
    }
    print!("{}", aligned(&lines));
}

async fn simulated(options: &StormOptions, gate: &str, cpus: &Cpus) -> Result<Round> {
    let directory = directory()?;
    let costs = [options.handshake, options.request].map(|cost| cost.to_string());
    let args = ["busy-instance", INSTANCE, &costs[0], &costs[1]];
    let mut instance = cpus.start(|| ChildProcess::start_server(&args, directory.path().join("instance")))?;
    let address = instance.address().await?;
    let berth = start_berth(options, gate, address, &["--probe=tcp".into()], directory.path()).await?;
    let mut round = match options.storm {
        StormKind::Greedy => storms::greedy(&clients::Simulated).await?,
        _ => storms::reconnect(options, &clients::Simulated).await?,
    };
    drop(berth);
    instance.signal(Signal::SIGTERM);
    instance.ended(STARTED_WITHIN).await?;
    let handshakes: u64 = instance.last_line().parse().context("the instance did not print its handshakes")?;
    round.figures.push(("handshakes", handshakes as f64));
    round.figures.push((WASTED, handshakes.saturating_sub(round.answered) as f64));
    Ok(round)
}

fn directory() -> Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("berth-storm-").tempdir()?)
}

/// Starts a berth before one instance, and waits until it listens. `probe`: how it asks the instance.
async fn start_berth(
    options: &StormOptions,
    gate: &str,
    backend: SocketAddr,
    probe: &[OsString],
    directory: &Path,
) -> Result<ChildProcess> {
    let mut command = Command::new(&options.berth);
    command.args(["serve", "--rise", "1", "--drain-timeout", "1s", "--max-openings", gate]).args(probe);
    command.arg(format!("--listen={NODE_ADDRESS}")).arg(format!("--backend={backend}"));
    command.arg("--run-dir").arg(directory.join("run"));
    let mut berth = ChildProcess::start(command, directory.join("log"))?;
    berth.until("berth", STARTED_WITHIN, async || TcpStream::connect(NODE_ADDRESS).ok()).await?;
    Ok(berth)
}

/// Shows what berth warned of: it is no figure, but explains some.
fn show_warnings(berth: &ChildProcess) {
    let log = berth.log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
    for line in warnings.iter().take(SHOWN) {
        eprintln!("berth: {line}");
    }
    if warnings.len() > SHOWN {
        eprintln!("berth: {} warnings more", warnings.len() - SHOWN);
    }
}

/// The instance's CPU, and those of all others.
struct Cpus {
    instance: CpuSet,
    others: CpuSet,
}

impl Cpus {
    /// Takes the last one from this process and its children.
    fn split() -> Result<Self> {
        let mut all = sched_getaffinity(Pid::this())?;
        let mut last = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or_default());
        let Some(last) = last.next_back().filter(|last| *last > 0) else { bail!("two CPUs are needed") };
        let mut instance = CpuSet::new();
        instance.set(last)?;
        all.unset(last)?;
        sched_setaffinity(Pid::this(), &all)?;
        Ok(Self { instance, others: all })
    }

    /// Starts a process on the instance's CPU. It has to be there from the start: Go counts CPUs once.
    fn start(&self, start: impl FnOnce() -> Result<ChildProcess>) -> Result<ChildProcess> {
        sched_setaffinity(Pid::this(), &self.instance)?;
        let started = start();
        sched_setaffinity(Pid::this(), &self.others)?;
        started
    }
}
