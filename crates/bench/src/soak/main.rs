//! Runs a berth for minutes or hours while everything goes wrong by chance: the tool of `scripts/soak.sh`.
//!
//! Real processes: `berth serve` and `berth exec` in two pairs, of which one (`a`) stays to the end and the other is upgraded
//! and crashes again and again; the instances are this program too. The clients of [`clients`] go through the
//! berth, never retry, and judge from outside; [`judge`] says what of it is lost, as the design defines it, and
//! what a kill was allowed to take. The control comes first: the same clients and a judge that is not told of a kill, which must
//! say that they lost something.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`node`] | the processes: start, ask, wait, end |
//! | [`harm`] | what goes wrong |
//! | [`clients`] | who connects |
//! | [`instance`] | who answers |
//! | [`judge`] | served, lost, allowed |
//! | [`figures`] | descriptors, memory, threads and listeners over time, and the errors in the logs |

#![forbid(unsafe_code)]

mod clients;
mod figures;
mod harm;
mod instance;
mod judge;
mod node;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use clients::Load;
use figures::Figures;
use harm::Harm;
use judge::Judge;
use node::{Node, Options};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Load without harm at the start, which is no part of the fitted figures, and at the end.
const CALM: Duration = Duration::from_secs(5);

/// A berth under load and harm
#[derive(Debug, Parser)]
struct Cli {
    /// How long
    #[arg(long, default_value = "2", value_name = "MINUTES")]
    minutes: f64,
    /// What is done when follows from it; drawn and said when it is not given
    #[arg(long)]
    seed: Option<u64>,
    /// New connections a second
    #[arg(long, default_value_t = 60)]
    rate: u32,
    /// The binary that is soaked
    #[arg(long)]
    berth: PathBuf,
    /// The version before, which takes part in upgrades
    #[arg(long)]
    previous: Option<PathBuf>,
    /// libfaketime's library: the clock of the shims jumps
    #[arg(long)]
    faketime: Option<PathBuf>,
    /// An empty directory for the run directory, logs and the clock
    #[arg(long)]
    dir: PathBuf,
    /// The run directory is a small file system of its own: it is filled
    #[arg(long)]
    small_run_dir: bool,
    /// What explains errors in the logs
    #[arg(long, default_value = "docs/troubleshooting.md")]
    explained: PathBuf,
}

fn main() -> ExitCode {
    // `berth exec` adds its flags at the end.
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|arg| arg == instance::COMMAND) {
        return instance::run(&args[2..]);
    }
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("soak: no runtime: {error}");
            return ExitCode::from(69);
        }
    };
    match runtime.block_on(soak(cli)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// True: nothing was lost, everything is flat, and every error is explained.
async fn soak(cli: Cli) -> Result<bool> {
    ensure!(cli.minutes > 0.0 && cli.minutes <= 24.0 * 60.0, "--minutes {}: 0 to 1440", cli.minutes);
    let seed = cli.seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    let explained = std::fs::read_to_string(&cli.explained).with_context(|| cli.explained.display().to_string())?;
    let mut random = fastrand::Rng::with_seed(seed);
    let listen = SocketAddr::from(([127, random.u8(1..250), random.u8(1..250), random.u8(1..250)], 0));
    let harms = Harm::possible(&cli.previous, &cli.faketime, cli.small_run_dir);
    println!("seed {seed}, {} minutes, {} new connections a second", cli.minutes, cli.rate);
    let options = Options { berth: cli.berth, previous: cli.previous, faketime: cli.faketime, dir: cli.dir };
    let mut node = Node::start(options, listen).await?;
    control(&mut node, &mut random, cli.rate).await?;
    let judge = Arc::<Judge>::default();
    let load = Load::start(node.listen, cli.rate, judge.clone(), seed);
    tokio::time::sleep(CALM).await;

    let mut figures = Figures::default();
    let end = Instant::now() + Duration::from_secs_f64(cli.minutes * 60.0);
    let mut counts = std::collections::BTreeMap::<&str, u32>::new();
    let mut failed = None;
    while Instant::now() < end && !load.is_over() {
        let harm = harms[random.usize(..harms.len())];
        *counts.entry(harm.name()).or_default() += 1;
        if let Err(error) = harm.happen(&mut node, &mut random, &judge).await {
            failed = Some(format!("{}: {error:#}", harm.name()));
            break;
        }
        figures.sample(&node).await?;
    }
    tokio::time::sleep(CALM).await;
    if let Err(error) = load.finish().await {
        failed.get_or_insert(error.to_string());
    }
    let errors = figures::errors(&node.logs(), &explained)?;
    node.end().await;

    println!("\nwhat happened: {}", list(counts.iter().map(|(name, count)| format!("{count} x {name}"))));
    judge.print();
    let flat = figures.print();
    for (line, count) in &errors.unexplained {
        println!("UNEXPLAINED ERROR, {count} times: {line}");
    }
    println!(
        "lines of log at error: {}, explained: {}",
        errors.all,
        errors.all - errors.unexplained.values().sum::<u64>()
    );
    if let Some(failed) = &failed {
        println!("FAILED: {failed}");
    }
    let good = failed.is_none() && judge.is_good() && flat && errors.unexplained.is_empty();
    println!("\nsoak, seed {seed}: {}", if good { "passed" } else { "failed" });
    Ok(good)
}

/// Kills of which the judge is not told: a run in which it then finds nothing lost would find nothing lost whatever happened.
async fn control(node: &mut Node, random: &mut fastrand::Rng, rate: u32) -> Result<()> {
    for harm in [Harm::KillShim, Harm::KillInstance] {
        let judge = Arc::<Judge>::default();
        let load = Load::start(node.listen, rate, judge.clone(), random.u64(..));
        node::until("clients of every kind are served", async || judge.unserved().is_empty().then_some(())).await?;
        ensure!(judge.is_good(), "control: lost before anything went wrong");
        eprintln!("control: what follows is lost on purpose");
        harm.happen(node, random, &Arc::default()).await?;
        load.finish().await?;
        println!("control, {} that the judge is not told of: {} lost", harm.name(), judge.lost());
        ensure!(judge.lost() > 0, "control: nothing was lost by {}: losses are not seen", harm.name());
    }
    Ok(())
}

fn list(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}
