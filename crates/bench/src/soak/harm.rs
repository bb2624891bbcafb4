//! The faults, one at a time; after each, both shims have to be joined again.

use super::SoakOptions;
use super::judge::Judge;
use super::node::{Node, Pair, ended, freeze, kill};
use crate::process::{ChildProcess, count, until};
use anyhow::{Context, Result, bail, ensure};
use berth_node::terms::Phase;
use fastrand::Rng;
use nix::sys::signal::Signal;
use procfs::process::LimitValue;
use std::fs;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::sleep;

/// Longest time that a shim hangs: beyond its lease, within the clients' 15 s.
const HANG: u64 = 5000;

/// Longest time that an instance hangs.
const INSTANCE_HANG: u64 = 9000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Harm {
    Upgrade,
    PreviousVersion,
    KillShim,
    KillInstance,
    RestartInstance,
    FreezeShim,
    FreezeInstance,
    NoDescriptors,
    FullRunDir,
    ClockJump,
}

impl Harm {
    /// The faults that are possible here. Prints why the others are skipped.
    pub(super) fn possible(options: &SoakOptions) -> Vec<Self> {
        let SoakOptions { previous, faketime, small_run_dir, .. } = options;
        let all = [
            (Self::Upgrade, None),
            (Self::Upgrade, None),
            (Self::PreviousVersion, previous.is_none().then_some("no --previous")),
            (Self::KillShim, None),
            (Self::KillInstance, None),
            (Self::RestartInstance, None),
            (Self::FreezeShim, None),
            (Self::FreezeInstance, None),
            (Self::NoDescriptors, None),
            (Self::FullRunDir, (!small_run_dir).then_some("the run directory is no small file system of its own")),
            (Self::ClockJump, faketime.is_none().then_some("no --faketime")),
        ];
        for (harm, why) in all {
            if let Some(why) = why {
                println!("skipped: {}: {why}", harm.name());
            }
        }
        all.into_iter().filter(|(_, why)| why.is_none()).map(|(harm, _)| harm).collect()
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Upgrade => "upgrade",
            Self::PreviousVersion => "two versions",
            Self::KillShim => "SIGKILL of a shim",
            Self::KillInstance => "SIGKILL of an instance",
            Self::RestartInstance => "drain and restart in place",
            Self::FreezeShim => "SIGSTOP of a shim",
            Self::FreezeInstance => "SIGSTOP of an instance",
            Self::NoDescriptors => "EMFILE",
            Self::FullRunDir => "full run directory",
            Self::ClockJump => "jump of the clock",
        }
    }

    pub(super) async fn happen(self, node: &mut Node, random: &mut Rng, judge: &Arc<Judge>) -> Result<()> {
        let which: fn(&mut Node) -> &mut Pair = if random.bool() { |node| &mut node.a } else { |node| &mut node.b };
        eprintln!("{:.1} s: {}, {}", judge.now(), self.name(), which(node).id);
        match self {
            Self::Upgrade => upgrade(node, random, false).await?,
            Self::PreviousVersion => {
                upgrade(node, random, true).await?;
                // The version before has faults that are known, and were the reason for this one.
                upgrade(node, random, false).await?;
            }
            Self::KillShim => {
                freeze(&mut node.b.shim).await?;
                judge.shim_is_killed(node.accepted_by(&node.b.shim)?);
                kill(&mut node.b.shim).await?;
                pause(random, 1000).await;
                node.start_shim()?;
            }
            Self::KillInstance => {
                let pair = which(node);
                freeze(&mut pair.instance).await?;
                judge.instance_is_killed(&pair.name);
                kill(&mut pair.instance).await?;
                pause(random, 1000).await;
                node.start_instance(which)?;
            }
            Self::RestartInstance => {
                let mut command = Command::new(&node.options.berth);
                command.arg("drain").arg("--run-dir").arg(node.options.run_dir());
                command.args(["--instance", &which(node).id, "--wait", "--if-sibling"]);
                let drained = command.stdin(Stdio::null()).stdout(Stdio::null()).status().await?;
                ensure!(drained.success(), "berth drain: {drained}");
                let instance = &mut which(node).instance;
                instance.signal(Signal::SIGTERM);
                ended(instance, "an instance").await?;
                node.start_instance(which)?;
            }
            Self::FreezeShim => hang(&mut which(node).shim, random, HANG).await?,
            Self::FreezeInstance => hang(&mut which(node).instance, random, INSTANCE_HANG).await?,
            Self::NoDescriptors => {
                let pid = which(node).shim.pid();
                let limits = procfs::process::Process::new(pid)?.limits()?;
                let LimitValue::Value(before) = limits.max_open_files.soft_limit else {
                    bail!("no limit of open files")
                };
                limit_files(pid, count(pid, "fd")? as u64 + random.u64(..8)).await?;
                pause(random, 3000).await;
                limit_files(pid, before).await?;
            }
            Self::FullRunDir => {
                let filler = node.options.run_dir().join("filler");
                // Writes until the file system is full, which is an error.
                let _ = fs::write(&filler, vec![0; 4 << 20]);
                pause(random, 6000).await;
                fs::remove_file(&filler).context("the filler")?;
            }
            Self::ClockJump => {
                let seconds = random.i64(-100_000..100_000);
                fs::write(node.options.clock(), format!("{seconds:+}\n"))?;
                pause(random, 4000).await;
            }
        }
        node.calm().await?;
        pause(random, 1000).await;
        Ok(())
    }
}

/// Stops a process for a while.
async fn hang(process: &mut ChildProcess, random: &mut Rng, most: u64) -> Result<()> {
    freeze(process).await?;
    pause(random, most).await;
    process.signal(Signal::SIGCONT);
    Ok(())
}

async fn pause(random: &mut Rng, most: u64) {
    sleep(Duration::from_millis(random.u64(..most))).await;
}

/// Starts a new pair and ends the old one: both processes at once, as in a pod, or the shim first.
async fn upgrade(node: &mut Node, random: &mut Rng, previous: bool) -> Result<()> {
    let new = node.next_pair(previous)?;
    node.joined(&new).await?;
    let mut old = std::mem::replace(&mut node.b, new);
    pause(random, 500).await;
    old.shim.signal(Signal::SIGTERM);
    if random.bool() {
        // An error: it has ended. One that has not left within this time gets no more.
        let left = async || node.status(&old).await.map_or(true, |status| status.state == Phase::Left).then_some(());
        let _ = until("a shim to leave", Duration::from_secs(5), left).await;
    }
    old.instance.signal(Signal::SIGTERM);
    ended(&mut old.instance, "an instance after SIGTERM").await?;
    ended(&mut old.shim, "a shim after SIGTERM").await
}

/// Sets the soft limit of open files.
async fn limit_files(pid: i32, soft: u64) -> Result<()> {
    let mut command = Command::new("prlimit");
    command.args(["--pid", &pid.to_string(), &format!("--nofile={soft}:")]);
    let status = command.stdin(Stdio::null()).status().await.context("prlimit (of util-linux)")?;
    ensure!(status.success(), "prlimit: {status}");
    Ok(())
}
