//! Measures berth against other TCP relays and against no relay, on loopback: the tool of
//! `scripts/bench.sh`.
//!
//! Peers take turns: in each round every peer does the same work, in an order that moves on by one,
//! so that what else the machine does falls on all of them. Client, relay and backend share its
//! cores. This process is the client; the backend is a process of its own.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`options`] | the command line |
//! | [`peer`] | what is compared, and how each is configured |
//! | [`work`] | what they do, and what is measured of it |
//! | [`load`] | the client |
//! | [`backend`] | the backend |
//! | [`wire`] | what these two say to one another |
//! | [`process`] | memory, descriptors and CPU time of a peer |
//! | [`results`], [`berth_bench::stats`] | samples, medians, ratios |
//! | [`verdict`] | whether berth is far off |
//! | [`setting`] | where and how it was measured |
//! | [`report`], [`table`], [`plot`] | Markdown, JSON and SVG |

#![forbid(unsafe_code)]

mod backend;
mod load;
mod options;
mod peer;
mod plot;
mod process;
mod report;
mod results;
mod setting;
mod table;
mod verdict;
mod wire;
mod work;

use anyhow::Result;
use berth_bench::start::{EX_UNAVAILABLE, EX_USAGE, another, command_line, enter_network, said_address};
use load::Pace;
use options::{Cli, Options, Part};
use results::{Results, Sample};
use setting::Setting;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::time::Instant;
use work::Bench;

/// Where the backend listens: away from peers and clients.
const BACKEND: &str = "127.0.2.1:0";

/// Where peers listen, in a network of which all addresses are the machine's own (RFC 5737), or without one.
const NODE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);
const LOOPBACK: Ipv4Addr = Ipv4Addr::new(127, 0, 3, 1);

/// Exit status of an end by a signal.
const SIGNALLED: i32 = 130;

fn main() -> ExitCode {
    let cli: Cli = match command_line() {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    let done = match cli.part {
        Some(Part::Backend { address }) => backend::run(address).map(|()| ExitCode::SUCCESS).map_err(Into::into),
        None => compare(&cli.options),
    };
    done.unwrap_or_else(|error| {
        eprintln!("bench: {error:#}");
        ExitCode::from(EX_UNAVAILABLE)
    })
}

fn compare(options: &Options) -> Result<ExitCode> {
    let node = node();
    let (peers, missing) = match options.peers(!node.is_loopback()) {
        Ok(found) => found,
        Err(mistakes) => {
            for mistake in mistakes {
                eprintln!("bench: {mistake}");
            }
            return Ok(ExitCode::from(EX_USAGE));
        }
    };
    for name in &missing {
        eprintln!("bench: {name} is not here and is left out");
    }
    berth_os::process::raise_file_limit()?;
    let directory = tempfile::Builder::new().prefix("berth-bench-").tempdir()?;
    clean_up_on_signal(directory.path().to_owned())?;

    let pace = Pace { warm_up: options.window() / 4, window: options.window() };
    let mut results = Results { peers, missing, samples: Vec::new() };
    measure(&mut results, options, pace, node, directory.path())?;

    let setting = Setting::new(&options.command, &results.peers, options.rounds(), pace, options.short);
    print!("{}", report::markdown(&results, &setting));
    if let Some(out) = &options.out {
        report::write(out, &results, &setting)?;
    }
    let complaints = verdict::complaints(&results, options.short);
    for complaint in &complaints {
        eprintln!("bench: {complaint}");
    }
    Ok(ExitCode::from(u8::from(!complaints.is_empty())))
}

/// Where peers listen. Root has a network namespace for it, with an address from which the kernel may steer; else it is one of
/// loopback, and there is no direct path. To be called before there are threads.
fn node() -> Ipv4Addr {
    match enter_network(NODE, NETMASK) {
        Ok(()) => NODE,
        Err(error) => {
            eprintln!("bench: no network namespace, so no direct path: {error:#}");
            LOOPBACK
        }
    }
}

fn measure(results: &mut Results, options: &Options, pace: Pace, node: Ipv4Addr, directory: &Path) -> Result<()> {
    let (backend, address) = start_backend()?;
    let _backend = process::Tree::new(backend);
    let bench = Bench { node, backend: address, pace, short: options.short, directory };
    let start = Instant::now();
    for round in 0..options.rounds() {
        for work in options.work() {
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
    Ok(())
}

fn start_backend() -> Result<(Child, SocketAddr)> {
    let mut child = another(["backend", BACKEND])?.stdin(Stdio::null()).spawn()?;
    let (address, _) = said_address(&mut child)?;
    Ok((child, address))
}

/// Ends the run on SIGINT, SIGTERM or SIGHUP: the children get SIGTERM when this process is gone.
fn clean_up_on_signal(directory: PathBuf) -> Result<()> {
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
        let _ = std::fs::remove_dir_all(&directory);
        eprintln!("bench: ended by a signal");
        std::process::exit(SIGNALLED);
    });
    Ok(())
}
