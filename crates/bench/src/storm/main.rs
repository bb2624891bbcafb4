//! More clients than an instance opens, with the gate of berth and without it, by turns.
//!
//! Two storms. `reconnect`: all clients come at one moment and insist, as kubelets do after an outage, beside a client of the node's own.
//! `greedy`: one source opens connections in a loop, beside others that open a few. The instance has a processor of its own, on
//! which a handshake and a request cost what they are told; clients and berth have the others.

mod clients;
mod instance;
mod wire;

use anyhow::{Context, Result, bail};
use berth_os::netdevice::{self, Setting};
use berth_rehearse::netns;
use clap::{Parser, Subcommand, ValueEnum};
use clients::{Seen, insist, kept_connection, new_connections};
use instance::{Cost, Done};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

/// Where berth listens, in a network of which all addresses are the machine's own (RFC 2544).
const NODE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 254, 0, 0);
const INSTANCE: &str = "127.0.2.1:0";
const PORT: u16 = 6443;

/// How long it is calm first, and how long a storm is waited for.
const CALM: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(180);

/// The greedy one's connections a second, and the others' and how many they are.
const GREEDY_PERIOD: Duration = Duration::from_micros(500);
const OTHERS: u32 = 50;
const OTHERS_PERIOD: Duration = Duration::from_millis(500);
const GREEDY_LASTS: Duration = Duration::from_secs(30);

/// Time between two connections of the node's own client.
const OWN_PERIOD: Duration = Duration::from_millis(100);

const EX_USAGE: u8 = 64;
const EX_UNAVAILABLE: u8 = 69;

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
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Storm {
    Reconnect,
    Greedy,
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
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { EX_USAGE } else { 0 });
        }
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
    netns::enter_as_root(NODE)?;
    netdevice::set(netns::ALIAS, Setting::Netmask(NETMASK)).context("cannot give the clients addresses")?;
    berth_os::process::raise_file_limit()?;
    let processors = Processors::split()?;
    let mut rounds: Vec<Vec<Round>> = cli.gates.iter().map(|_| Vec::new()).collect();
    for round in 0..cli.rounds {
        for turn in 0..cli.gates.len() {
            let at = (turn + round as usize) % cli.gates.len();
            let seen = run(cli, &cli.gates[at], &processors)?;
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
            let mut of: Vec<_> = rounds.iter().map(|round| round.figures[row].1).collect();
            of.sort_by(f64::total_cmp);
            format!("{:.1}", of[of.len() / 2])
        });
        println!("| {name} | {} |", medians.collect::<Vec<_>>().join(" | "));
    }
}

/// The instance's, and those of all others.
struct Processors {
    instance: CpuSet,
}

impl Processors {
    /// Takes the last one from this process and whom it starts.
    fn split() -> Result<Self> {
        let mut all = sched_getaffinity(Pid::this())?;
        let mut last = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap_or_default());
        let Some(last) = last.next_back().filter(|last| *last > 0) else { bail!("two processors are needed") };
        let mut instance = CpuSet::new();
        instance.set(last)?;
        all.unset(last)?;
        sched_setaffinity(Pid::this(), &all)?;
        Ok(Self { instance })
    }
}

fn run(cli: &Cli, gate: &str, processors: &Processors) -> Result<Round> {
    let directory = tempfile::Builder::new().prefix("berth-storm-").tempdir()?;
    let mut instance = Instance::start(cli, processors)?;
    let berth = Berth::start(cli, gate, instance.address, directory.path())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let to = SocketAddr::from((NODE, PORT));
    let mut round = runtime.block_on(LocalSet::new().run_until(async {
        match cli.storm {
            Storm::Reconnect => reconnect(cli, to).await,
            Storm::Greedy => greedy(to).await,
        }
    }))?;
    drop(runtime);
    drop(berth);
    let Done { handshakes, wasted } = instance.end()?;
    round.figures.push(("handshakes", handshakes as f64));
    round.figures.push(("handshakes for clients that had left", wasted as f64));
    Ok(round)
}

/// All come at once and insist.
async fn reconnect(cli: &Cli, to: SocketAddr) -> Result<Round> {
    let (ends, ended) = watch::channel(false);
    let end = |mut ended: watch::Receiver<bool>| async move { drop(ended.wait_for(|ended| *ended).await) };
    let own_new = tokio::task::spawn_local(new_connections(NODE, to, OWN_PERIOD, end(ended.clone())));
    let own_kept = tokio::task::spawn_local(kept_connection(NODE, to, end(ended)));
    sleep(CALM).await;
    let mut crowd = JoinSet::new();
    for client in 0..cli.clients {
        crowd.spawn_local(insist(source(client % cli.sources), to));
    }
    let mut served = Vec::new();
    let all = async {
        while let Some(client) = crowd.join_next().await {
            served.push(client.expect("no client panics"));
        }
    };
    let in_time = timeout(LONGEST, all).await.is_ok();
    let _ = ends.send(true);
    let (own_new, own_kept) = (own_new.await?, own_kept.await??);
    let mut after: Vec<_> = served.iter().map(|(served, _)| served.after).collect();
    after.sort_unstable();
    let gave_up: u32 = served.iter().map(|(served, _)| served.gave_up).sum();
    let mut figures = vec![
        ("clients that were served", after.len() as f64),
        ("s until the last was", if in_time { seconds(&after, 1.0) } else { f64::INFINITY }),
        ("s until half of them were", seconds(&after, 0.5)),
        ("times that one gave up", f64::from(gave_up)),
    ];
    figures.extend(own("node's own, new connections: p99 ms", "lost", own_new));
    figures.extend(own("node's own, kept connection: p99 ms", "lost", own_kept));
    Ok(Round { figures })
}

/// One source in a loop, beside others.
async fn greedy(to: SocketAddr) -> Result<Round> {
    let (ends, ended) = watch::channel(false);
    let end = |mut ended: watch::Receiver<bool>| async move { drop(ended.wait_for(|ended| *ended).await) };
    let mut others = JoinSet::new();
    for number in 1..=OTHERS {
        others.spawn_local(new_connections(source(number), to, OTHERS_PERIOD, end(ended.clone())));
    }
    sleep(CALM).await;
    let greedy = new_connections(source(0), to, GREEDY_PERIOD, sleep(GREEDY_LASTS)).await;
    let _ = ends.send(true);
    let others = others.join_all().await;
    let lost: u64 = others.iter().map(|seen| seen.lost).sum();
    let shares: Vec<_> = others.iter().map(share).collect();
    let mut took: Vec<_> = others.into_iter().flat_map(|seen| seen.took).collect();
    took.sort_unstable();
    Ok(Round {
        figures: vec![
            ("50 sources with 2/s: p99 ms", 1000.0 * seconds(&took, 0.99)),
            ("served", took.len() as f64),
            ("lost", lost as f64),
            ("Jain's index over their shares that were served", jain(&shares)),
            ("one source with 2,000/s: served", greedy.took.len() as f64),
            ("lost or rejected", greedy.lost as f64),
        ],
    })
}

fn share(seen: &Seen) -> f64 {
    seen.took.len() as f64 / (seen.took.len() as f64 + seen.lost as f64)
}

/// 1 where all have the same, 1 ÷ n where one has all.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = (shares.iter().sum::<f64>(), shares.iter().map(|share| share * share).sum::<f64>());
    sum * sum / (shares.len() as f64 * squares)
}

fn own(p99: &'static str, lost: &'static str, mut seen: Seen) -> [(&'static str, f64); 2] {
    seen.took.sort_unstable();
    [(p99, 1000.0 * seconds(&seen.took, 0.99)), (lost, seen.lost as f64)]
}

/// The time that a share of them did not exceed.
fn seconds(sorted: &[Duration], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).map_or(f64::NAN, Duration::as_secs_f64)
}

fn source(number: u32) -> Ipv4Addr {
    // In 198.19.0.0/16.
    Ipv4Addr::from_bits(Ipv4Addr::new(198, 19, 0, 1).to_bits() + number)
}

struct Instance {
    child: Child,
    address: SocketAddr,
    said: BufReader<std::process::ChildStdout>,
}

impl Instance {
    fn start(cli: &Cli, processors: &Processors) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["instance", INSTANCE, &cli.handshake.to_string(), &cli.request.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        berth_os::process::die_with_parent(&mut command);
        let mut child = command.spawn()?;
        sched_setaffinity(Pid::from_raw(i32::try_from(child.id())?), &processors.instance)?;
        let mut said = BufReader::new(child.stdout.take().context("no pipe to the instance")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        let address = line.trim().parse().context("the instance did not start")?;
        Ok(Self { child, address, said })
    }

    /// Ends it; what it did.
    fn end(&mut self) -> Result<Done> {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.said.read_to_string(&mut said)?;
        Ok(serde_json::from_str(&said)?)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Berth(Child);

impl Berth {
    fn start(cli: &Cli, gate: &str, backend: SocketAddr, directory: &Path) -> Result<Self> {
        let mut command = Command::new(&cli.berth);
        command.args(["serve", "--probe", "tcp", "--rise", "1", "--drain-timeout", "1s", "--max-openings", gate]);
        command.arg(format!("--listen={NODE}:{PORT}")).arg(format!("--backend={backend}"));
        command.arg("--run-dir").arg(directory.join("run"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(directory.join("log"))?);
        berth_os::process::die_with_parent(&mut command);
        let child = command.spawn().with_context(|| format!("cannot start {}", cli.berth.display()))?;
        let mut berth = Self(child);
        while std::net::TcpStream::connect((NODE, PORT)).is_err() {
            if let Some(status) = berth.0.try_wait()? {
                let said = std::fs::read_to_string(directory.join("log")).unwrap_or_default();
                bail!("berth ended, {status}: {}", said.lines().last().unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(berth)
    }
}

impl Drop for Berth {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_of_fairness() {
        assert_eq!(jain(&[1.0, 1.0, 1.0, 1.0]), 1.0);
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), 0.25);
    }
}
