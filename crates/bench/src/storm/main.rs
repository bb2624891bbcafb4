//! More clients than an instance opens, with the gate of berth and without it, by turns.
//!
//! `reconnect`: all clients come at one moment and insist, as kubelets do after an outage, beside a client of the node's own.
//! `greedy`: one source opens connections in a loop, beside others that open a few. In both, the instance is a stand-in, with
//! which a handshake and a request cost what they are told. `real` is `reconnect` to a real kube-apiserver, and `ramp` restarts one
//! under informers. The instance has a processor of its own; clients and berth have the others.

mod clients;
mod instance;
mod process;
mod ramp;
mod real;
mod storms;
mod wire;

use anyhow::{Context, Result, bail};
use berth_bench::start::{EX_UNAVAILABLE, command_line, enter_network};
use berth_bench::stats::Summary;
use clap::{Parser, Subcommand, ValueEnum};
use clients::StandIn;
use instance::Cost;
use process::{Berth, Instance, Processors};
use real::ControlPlane;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;

/// Where berth listens, in a network of which all addresses are the machine's own (RFC 2544).
const NODE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 254, 0, 0);
const PORT: u16 = 6443;

/// How long it is calm first, and how long a storm is waited for.
const CALM: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(180);

const WASTED: &str = "handshakes of clients that left before their first answer";

/// Lets clients come at once to an instance behind berth, with the gate and without
#[derive(Parser)]
#[command(name = "storm")]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    /// The berth
    #[arg(long, default_value = "berth")]
    berth: PathBuf,
    #[arg(long, value_enum, default_value = "reconnect")]
    storm: Storm,
    /// Clients that come at once
    #[arg(long, default_value_t = 5000)]
    clients: u32,
    /// Addresses that they have
    #[arg(long, default_value_t = 500)]
    sources: u32,
    /// Processor time of a handshake, in microseconds
    #[arg(long, default_value_t = 1000)]
    handshake: u64,
    /// Processor time of a request, in microseconds
    #[arg(long, default_value_t = 1000)]
    request: u64,
    /// Values of --max-openings that are compared
    #[arg(long, default_value = "off,auto", value_delimiter = ',')]
    gates: Vec<String>,
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Clients that list and watch, of `ramp`
    #[arg(long, default_value_t = 2000)]
    informers: u32,
    #[command(flatten)]
    real: Option<real::Programs>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Storm {
    Reconnect,
    Greedy,
    Real,
    Ramp,
}

#[derive(Subcommand)]
enum Part {
    /// What stands behind berth
    #[command(hide = true)]
    Instance { address: SocketAddr, handshake: u64, request: u64 },
}

/// What one round saw.
#[derive(Debug, Default)]
struct Round {
    figures: Vec<(&'static str, f64)>,
    /// Connections whose first request was answered.
    answered: u64,
    /// How long the storm was.
    lasted: Duration,
}

fn main() -> ExitCode {
    let cli: Cli = match command_line() {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    let done = match cli.part {
        Some(Part::Instance { address, handshake, request }) => {
            let [handshake, request] = [handshake, request].map(Duration::from_micros);
            instance::run(address, Cost { handshake, request }).map_err(Into::into)
        }
        None => compare(&cli),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("storm: {error:#}");
            ExitCode::from(EX_UNAVAILABLE)
        }
    }
}

fn compare(cli: &Cli) -> Result<()> {
    enter_network(NODE, NETMASK)?;
    // berth's --max-connections follows from it: what waits is to wait at the gate, not in the backlog.
    berth_os::process::raise_hard_file_limit()?;
    // A connection that is closed keeps its port for 60 s (TIME_WAIT). Where one source has few left, connect(2) looks for one for
    // longer than a handshake takes.
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "1024 65535").context("cannot give clients more ports")?;
    let processors = Processors::split()?;
    let plane = match cli.storm {
        Storm::Reconnect | Storm::Greedy => None,
        Storm::Real | Storm::Ramp => {
            let programs = cli.real.as_ref().context("give --kube-apiserver, --etcd and --server-key")?;
            Some(ControlPlane::start(programs, &processors)?)
        }
    };
    let mut rounds: Vec<Vec<Round>> = cli.gates.iter().map(|_| Vec::new()).collect();
    for round in 0..cli.rounds {
        for turn in 0..cli.gates.len() {
            let at = (turn + round as usize) % cli.gates.len();
            let seen = run(cli, &cli.gates[at], &processors, plane.as_ref())?;
            eprintln!("round {}, --max-openings {}: {:?}", round + 1, cli.gates[at], seen.figures);
            rounds[at].push(seen);
        }
    }
    print(cli, &rounds);
    Ok(())
}

/// The medians, a column for each gate.
fn print(cli: &Cli, rounds: &[Vec<Round>]) {
    println!("| | {} |\n| --- |{}", cli.gates.join(" | "), " ---: |".repeat(cli.gates.len()));
    let Some(first) = rounds.first().and_then(|rounds| rounds.first()) else { return };
    for (row, (name, _)) in first.figures.iter().enumerate() {
        let medians = rounds.iter().map(|rounds| {
            let of: Vec<_> = rounds.iter().map(|round| round.figures[row].1).collect();
            format!("{:.1}", Summary::of(&of).map_or(f64::NAN, |summary| summary.median))
        });
        println!("| {name} | {} |", medians.collect::<Vec<_>>().join(" | "));
    }
}

fn run(cli: &Cli, gate: &str, processors: &Processors, plane: Option<&ControlPlane>) -> Result<Round> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = LocalSet::new();
    runtime.block_on(local.run_until(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let round = async {
            match (cli.storm, plane) {
                (Storm::Real, Some(plane)) => real::storm(cli, gate, processors, plane).await,
                (Storm::Ramp, Some(plane)) => ramp::run(cli, gate, processors, plane).await,
                _ => stand_in(cli, gate, processors).await,
            }
        };
        // So that its processes end, and its directories are removed.
        tokio::select! {
            round = round => round,
            _ = interrupt.recv() => bail!("interrupted"),
            _ = terminate.recv() => bail!("terminated"),
        }
    }))
}

async fn stand_in(cli: &Cli, gate: &str, processors: &Processors) -> Result<Round> {
    let directory = tempfile::Builder::new().prefix("berth-storm-").tempdir()?;
    let mut instance = Instance::start(cli, processors)?;
    let berth = Berth::start(cli, gate, instance.address, &["--probe=tcp".into()], directory.path())?;
    let service = StandIn((NODE, PORT).into());
    let mut round = match cli.storm {
        Storm::Greedy => storms::greedy(&service).await?,
        _ => storms::reconnect(cli, &service).await?,
    };
    drop(berth);
    let handshakes = instance.end()?;
    round.figures.push(("handshakes", handshakes as f64));
    round.figures.push((WASTED, handshakes.saturating_sub(round.answered) as f64));
    Ok(round)
}
