//! Runs a berth for minutes or hours while faults happen at random: the tool of `scripts/soak.sh`.
//!
//! Real processes: `berth serve` and `berth exec` in two pairs, of which one (`a`) stays to the end and the other is upgraded
//! and crashes again and again; the instances are this program. The clients of [`clients`] connect through berth, never retry, and report
//! to [`judge`], which knows what of it is lost, as the design defines it, and what a kill was allowed to take. The control comes first:
//! the same clients, and kills that the judge does not know of; it must find losses.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`node`] | the processes of berth |
//! | [`harm`] | the faults |
//! | [`clients`] | the clients |
//! | [`instance`] | the simulated apiserver |
//! | [`judge`] | served, lost, allowed |
//! | [`figures`] | descriptors, memory, threads and listeners over time, and the errors in the logs |
//! | [`picture`] | all of it over time, as SVG |

mod clients;
mod figures;
mod harm;
pub(crate) mod instance;
mod judge;
mod node;
mod picture;

use crate::process::until;
use anyhow::{Context, Result, ensure};
use berth_rehearse::report;
use clap::Args;
use clients::Load;
use figures::Figures;
use harm::Harm;
use judge::Judge;
use node::{Node, PATIENCE};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Load without faults at the start, before the fitted figures, and at the end.
const CALM: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(crate) struct SoakOptions {
    /// Length of the run
    #[arg(long, default_value = "2", value_name = "MINUTES")]
    minutes: f64,
    /// Determines which fault happens when; drawn and printed if not given
    #[arg(long)]
    seed: Option<u64>,
    /// New connections a second
    #[arg(long, default_value_t = 60)]
    rate: u32,
    /// The binary to soak
    #[arg(long)]
    berth: PathBuf,
    /// The version before, which takes part in upgrades
    #[arg(long)]
    previous: Option<PathBuf>,
    /// libfaketime's library, which makes the shims' clocks jump
    #[arg(long)]
    faketime: Option<PathBuf>,
    /// An empty directory for the run directory, logs and the clock
    #[arg(long)]
    dir: PathBuf,
    /// The run directory is a small file system of its own, which may be filled
    #[arg(long)]
    small_run_dir: bool,
    /// The document that explains errors in the logs
    #[arg(long, default_value = "docs/troubleshooting.md")]
    explained: PathBuf,
    /// Draw what was served, lost and used over time into this file, as SVG
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
}

impl SoakOptions {
    fn run_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    fn logs(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// The file in which libfaketime reads the clock's offset.
    fn clock(&self) -> PathBuf {
        self.dir.join("clock")
    }
}

pub(crate) fn run(options: SoakOptions) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(if runtime.block_on(soak(options))? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// True if nothing was lost, nothing grows, and every error is explained.
async fn soak(options: SoakOptions) -> Result<bool> {
    let SoakOptions { minutes, rate, .. } = options;
    ensure!(minutes > 0.0 && minutes <= 24.0 * 60.0, "--minutes {minutes}: 0 to 1440");
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    let explained = std::fs::read_to_string(&options.explained);
    let explained = explained.with_context(|| options.explained.display().to_string())?;
    let picture = options.picture.clone();
    picture.as_deref().map(report::check_writable).transpose()?;
    let mut random = fastrand::Rng::with_seed(seed);
    let listen = SocketAddr::from(([127, random.u8(1..250), random.u8(1..250), random.u8(1..250)], 0));
    let harms = Harm::possible(&options);
    println!("seed {seed}, {minutes} minutes, {rate} new connections a second");
    let mut node = Node::start(options, listen).await?;
    control(&mut node, &mut random, rate).await?;
    let judge = Arc::<Judge>::default();
    let load = Load::start(node.listen, rate, judge.clone(), seed);
    sleep(CALM).await;

    let mut figures = Figures::default();
    let end = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let mut counts = BTreeMap::<&str, u64>::new();
    let mut failed = None;
    while Instant::now() < end && !load.has_ended() {
        let harm = harms[random.usize(..harms.len())];
        *counts.entry(harm.name()).or_default() += 1;
        if let Err(error) = harm.happen(&mut node, &mut random, &judge).await {
            failed = Some(format!("{}: {error:#}", harm.name()));
            break;
        }
        figures.sample(&node, judge.now()).await?;
    }
    sleep(CALM).await;
    let seconds = judge.now();
    if let Err(error) = load.finish().await {
        failed.get_or_insert(error.to_string());
    }
    let errors = figures::errors(&node.options.logs(), &explained)?;
    node.end().await;

    println!("\nwhat happened: {}", list(&counts, " x "));
    judge.print();
    let flat = figures.print();
    if let Some(path) = picture {
        report::write_file(&path, Ok(picture::draw(seconds, &judge.timeline(), &figures)))?;
    }
    for (line, count) in &errors.unexplained {
        println!("UNEXPLAINED ERROR, {count} times: {line}");
    }
    let explained = errors.all - errors.unexplained.values().sum::<u64>();
    println!("lines of log at error: {}, explained: {explained}", errors.all);
    if let Some(failed) = &failed {
        println!("FAILED: {failed}");
    }
    let good = failed.is_none() && judge.is_good() && flat && errors.unexplained.is_empty();
    println!("\nsoak, seed {seed}: {}", if good { "passed" } else { "failed" });
    Ok(good)
}

/// Kills that the judge does not know of: if it found nothing lost then, it would find nothing lost in any run.
async fn control(node: &mut Node, random: &mut fastrand::Rng, rate: u32) -> Result<()> {
    for harm in [Harm::KillShim, Harm::KillInstance] {
        let judge = Arc::<Judge>::default();
        let load = Load::start(node.listen, rate, judge.clone(), random.u64(..));
        let served = async || judge.unserved().is_empty().then_some(());
        until("clients of every kind to be served", PATIENCE, served).await?;
        ensure!(judge.is_good(), "control: lost before anything went wrong");
        eprintln!("control: what follows is lost on purpose");
        harm.happen(node, random, &Arc::default()).await?;
        load.finish().await?;
        println!("control, {} without the judge's knowledge: {} lost", harm.name(), judge.lost());
        ensure!(judge.lost() > 0, "control: nothing was lost by {}: the judge does not see losses", harm.name());
    }
    Ok(())
}

fn list(counts: &BTreeMap<&str, u64>, between: &str) -> String {
    counts.iter().map(|(name, count)| format!("{count}{between}{name}")).collect::<Vec<_>>().join(", ")
}
