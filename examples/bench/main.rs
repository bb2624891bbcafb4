//! Measures berth against other TCP relays and against no relay, on loopback: the tool of
//! `scripts/bench.sh`.
//!
//! Peers take turns: in each round every peer does the same work, in an order that moves on by one,
//! so that what else the machine does falls on all of them. Client, relay and backend share its
//! cores. This process is the client; the backend is a process of its own.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`peer`] | what is compared, and how each is configured |
//! | [`work`] | what they do, and what is measured of it |
//! | [`load`] | the client |
//! | [`backend`] | the backend |
//! | [`wire`] | what these two say to one another |
//! | [`process`] | memory, descriptors and processor time of a peer |
//! | [`stats`], [`results`] | samples, medians, ratios |
//! | [`table`] | Markdown |

mod backend;
mod load;
mod peer;
mod process;
mod results;
mod stats;
mod table;
mod wire;
mod work;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use peer::{Kind, Peer};
use results::{Results, Sample};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use work::{Bench, Work};

/// Where the backend listens: away from peers and clients.
const BACKEND: &str = "127.0.2.1:0";

/// Measure berth against other TCP relays and against no relay, on loopback
#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// What all peers relay to
    #[command(hide = true)]
    Backend { address: SocketAddr },
}

#[derive(Debug, Args)]
struct Options {
    /// Who takes part [default: direct, each --berth, and what is there of haproxy, haproxy-splice,
    /// nginx and envoy]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    peers: Vec<String>,
    /// What they do [default: all]
    #[arg(long, value_delimiter = ',')]
    work: Vec<Work>,
    /// Times that each peer does each work
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Length of one measurement
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<Duration>,
    /// A berth; several are compared, and their names are peers
    #[arg(long, value_name = "[NAME=]PATH", required = true)]
    berth: Vec<String>,
    /// An haproxy [default: the one on PATH]
    #[arg(long, value_name = "PATH")]
    haproxy: Option<PathBuf>,
    /// An nginx [default: the one on PATH]
    #[arg(long, value_name = "PATH")]
    nginx: Option<PathBuf>,
    /// An envoy [default: the one on PATH]
    #[arg(long, value_name = "PATH")]
    envoy: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number")?;
    if (0.1..=600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("must be 0.1 to 600".to_owned())
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    if let Some(Part::Backend { address }) = cli.part {
        return Ok(backend::run(address)?);
    }
    let options = cli.options;
    berth::os::process::raise_file_limit()?;
    let folder = tempfile::Builder::new().prefix("berth-bench-").tempdir()?;
    clean_up_on_signal(folder.path().to_owned())?;
    let peers = peers(&options)?;
    for peer in &peers {
        eprintln!("bench: {}: {}", peer.name, peer.version());
    }
    let results = run(&options, peers, folder.path())?;
    print!("{}", table::tables(&results, false));
    Ok(())
}

fn run(options: &Options, peers: Vec<Peer>, folder: &Path) -> Result<Results> {
    let (backend, address) = start_backend()?;
    let _backend = process::Tree::new(backend);
    let window = options.seconds.unwrap_or(Duration::from_secs(2));
    let pace = load::Pace { warm_up: window / 4, window };
    let bench = Bench { backend: address, pace, short: false, folder };
    let all = [Work::Ping, Work::Connect, Work::Bulk, Work::Idle, Work::Growth];
    let work = if options.work.is_empty() { &all[..] } else { &options.work };
    let rounds = options.rounds.unwrap_or(5) as usize;
    let mut results = Results { peers, samples: Vec::new() };
    let start = Instant::now();
    for round in 0..rounds {
        for &work in work {
            for turn in 0..results.peers.len() {
                let at = (turn + round) % results.peers.len();
                let peer = &results.peers[at];
                if !work.is_for(peer) {
                    continue;
                }
                for (case, outcome) in bench.run(work, peer) {
                    let sample = Sample { case, peer: at, round, outcome };
                    eprintln!("[{:>4} s] {}: {sample}", start.elapsed().as_secs(), peer.name);
                    results.samples.push(sample);
                }
            }
        }
    }
    Ok(results)
}

fn start_backend() -> Result<(Child, SocketAddr)> {
    let mut command = Command::new(std::env::current_exe()?);
    // The parser wants a berth in any case.
    command.args(["--berth=none", "backend", BACKEND]).stdin(Stdio::null()).stdout(Stdio::piped());
    berth::os::process::die_with_parent(&mut command);
    let mut child = command.spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no pipe to the backend")?).read_line(&mut line)?;
    Ok((child, line.trim().parse().context("the backend did not start")?))
}

/// The peers that were asked for, or all that are there; those that are not are named.
fn peers(options: &Options) -> Result<Vec<Peer>> {
    let mut found = vec![Peer { name: "direct".to_owned(), kind: Kind::Direct, program: PathBuf::new() }];
    for given in &options.berth {
        let (name, path) = given.split_once('=').unwrap_or(("berth", given));
        found.push(Peer { name: name.to_owned(), kind: Kind::Berth, program: std::path::absolute(path)? });
    }
    let others = [
        ("haproxy", Kind::Haproxy { splice: false }, program("haproxy", options.haproxy.as_ref())),
        ("haproxy-splice", Kind::Haproxy { splice: true }, program("haproxy", options.haproxy.as_ref())),
        ("nginx", Kind::Nginx(nginx_stream()), program("nginx", options.nginx.as_ref())),
        ("envoy", Kind::Envoy, program("envoy", options.envoy.as_ref())),
    ];
    for (name, kind, program) in others {
        if !options.peers.is_empty() && !options.peers.iter().any(|peer| peer == name) {
            continue;
        }
        match program {
            Some(program) => found.push(Peer { name: name.to_owned(), kind, program }),
            None => eprintln!("bench: {name} is not here and is left out"),
        }
    }
    if !options.peers.is_empty() {
        found.retain(|peer| options.peers.contains(&peer.name));
    }
    for (at, peer) in found.iter().enumerate() {
        if found[..at].iter().any(|other| other.name == peer.name) {
            bail!("two peers are called {}: give each --berth a NAME=", peer.name);
        }
    }
    Ok(found)
}

fn program(name: &str, given: Option<&PathBuf>) -> Option<PathBuf> {
    if let Some(given) = given {
        return std::path::absolute(given).ok();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/local/sbin".into(), "/usr/sbin".into()]);
    folders.map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Where distributions put nginx's stream module when they build it apart.
fn nginx_stream() -> Option<PathBuf> {
    let places = ["/usr/lib/nginx/modules/ngx_stream_module.so", "/usr/lib64/nginx/modules/ngx_stream_module.so"];
    places.into_iter().map(PathBuf::from).find(|path| path.is_file())
}

/// Ends the run on SIGINT, SIGTERM or SIGHUP: the children get SIGTERM when this process is gone.
fn clean_up_on_signal(folder: PathBuf) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    drop(guard);
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
        });
        let _ = std::fs::remove_dir_all(&folder);
        eprintln!("bench: ended by a signal");
        std::process::exit(130);
    });
    Ok(())
}
