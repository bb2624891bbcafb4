//! Measures berth against other TCP relays and against no relay, on loopback: the tool of
//! `scripts/bench.sh`.
//!
//! The relays, and the case without a relay, are named peers. Peers take turns: in each round every
//! peer does the same work, in an order that moves on by one, so that load from elsewhere on the
//! machine affects all peers. Client, relay and backend share the machine's cores. This process is
//! the client, and the backend is a process of its own.
//!
//! | module | contents |
//! | --- | --- |
//! | [`options`] | the command line |
//! | [`peer`] | the relays and their configurations |
//! | [`work`] | the work of a peer, and the measured figures |
//! | [`load`] | the client |
//! | [`backend`] | the backend |
//! | [`wire`] | the messages between client and backend |
//! | [`usage`] | memory, descriptors and CPU time of a peer |
//! | [`results`], [`crate::stats`] | samples, medians, ratios |
//! | [`verdict`] | whether berth is far off |
//! | [`setting`] | machine, date and command of a run |
//! | [`report`], [`table`] | Markdown |

pub(crate) mod backend;
mod load;
pub(crate) mod options;
mod peer;
mod report;
mod results;
mod setting;
mod table;
mod usage;
mod verdict;
mod wire;
mod work;

use crate::EX_USAGE;
use crate::process::ChildProcess;
use anyhow::Result;
use load::Pace;
use options::BenchOptions;
use results::{Results, Sample};
use setting::BenchSetting;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;
use work::Bench;

/// The address of the backend. Relays and clients have other addresses.
const BACKEND_ADDRESS: &str = "127.0.2.1";

/// Exit status if a signal ended the run.
const EX_SIGNALLED: i32 = 130;

pub(crate) fn run(options: &BenchOptions) -> Result<ExitCode> {
    let (peers, missing) = match options.find_peers(peer::find_passing_obstacle) {
        Ok(found) => found,
        Err(mistakes) => {
            for mistake in mistakes {
                eprintln!("bench: {mistake}");
            }
            return Ok(ExitCode::from(EX_USAGE));
        }
    };
    for (name, why) in &missing {
        eprintln!("bench: {name} is left out: {why}");
    }
    berth_os::process::raise_file_limit()?;
    let directory = tempfile::Builder::new().prefix("berth-bench-").tempdir()?;
    let log = directory.path().join("backend");
    let mut backend = match &options.server {
        Some(server) => {
            let mut command = Command::new(server);
            command.arg(format!("--bind-address={BACKEND_ADDRESS}"));
            ChildProcess::start(command, log)?
        }
        None => ChildProcess::start_server(&["backend", &format!("{BACKEND_ADDRESS}:0")], log)?,
    };
    let address = backend.address()?;
    clean_up_on_signal(directory.path().to_owned())?;

    let pace = Pace {
        warm_up: options.window() / 4,
        window: options.window(),
    };
    let mut results = Results {
        peers,
        missing,
        samples: Vec::new(),
    };
    let bench = Bench {
        backend: address,
        pace,
        short: options.short,
        directory: directory.path(),
    };
    measure_rounds(&mut results, options, &bench);

    let server = backend
        .read_log()
        .lines()
        .next()
        .filter(|_| options.server.is_some())
        .unwrap_or_default()
        .to_owned();
    let setting = BenchSetting::new(
        &options.command,
        &results.peers,
        server,
        options.rounds(),
        pace,
    );
    print!("{}", report::render_markdown(&results, &setting));
    let complaints = verdict::list_complaints(&results, options.short);
    for complaint in &complaints {
        eprintln!("bench: {complaint}");
    }
    Ok(ExitCode::from(u8::from(!complaints.is_empty())))
}

fn measure_rounds(results: &mut Results, options: &BenchOptions, bench: &Bench<'_>) {
    let start = Instant::now();
    for round in 0..options.rounds() {
        for work in options.selected_work() {
            for turn in 0..results.peers.len() {
                let at = (turn + round) % results.peers.len();
                let peer = &results.peers[at];
                if !work.is_measured_for(peer) {
                    continue;
                }
                for (case, outcome) in bench.run(work, peer) {
                    let sample = Sample {
                        case,
                        peer: at,
                        round,
                        outcome,
                    };
                    eprintln!(
                        "[{:>4} s] {}: {sample}",
                        start.elapsed().as_secs(),
                        peer.name
                    );
                    results.samples.push(sample);
                }
            }
        }
    }
}

/// Removes the directory and ends the run on SIGINT, SIGTERM or SIGHUP. The kernel sends SIGTERM to
/// the children when this process has ended.
fn clean_up_on_signal(directory: PathBuf) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
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
        std::process::exit(EX_SIGNALLED);
    });
    Ok(())
}
