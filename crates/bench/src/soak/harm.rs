//! What goes wrong, one after the other; after each it is waited until both shims are joined again.

use crate::judge::Judge;
use crate::node::{Node, Pair, Process};
use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use nix::sys::signal::Signal;
use std::fs;
use std::path::PathBuf;
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
pub(crate) enum Harm {
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
    /// What can be done here; what cannot is said, with why.
    pub(crate) fn possible(previous: &Option<PathBuf>, faketime: &Option<PathBuf>, small_run_dir: bool) -> Vec<Self> {
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

    pub(crate) fn name(self) -> &'static str {
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

    pub(crate) async fn happen(self, node: &mut Node, random: &mut Rng, judge: &Arc<Judge>) -> Result<()> {
        let which: fn(&mut Node) -> &mut Pair = if random.bool() { |node| &mut node.a } else { |node| &mut node.b };
        eprintln!("{:.1} s: {}, {}", judge.now(), self.name(), which(node).id);
        match self {
            Self::Upgrade => upgrade(node, random, false).await?,
            Self::PreviousVersion => {
                upgrade(node, random, true).await?;
                // What it does under harm is known, and why it is the version before.
                upgrade(node, random, false).await?;
            }
            Self::KillShim => {
                node.b.shim.freeze().await?;
                judge.shim_is_killed(node.accepted_by(&node.b.shim)?);
                node.b.shim.kill().await?;
                pause(random, 1000).await;
                node.start_shim(|node| &mut node.b)?;
            }
            Self::KillInstance => {
                let pair = which(node);
                pair.instance.freeze().await?;
                judge.instance_is_killed(&pair.name);
                pair.instance.kill().await?;
                pause(random, 1000).await;
                node.start_instance(which)?;
            }
            Self::RestartInstance => {
                let mut command = Command::new(&node.options.berth);
                command.arg("drain").arg("--run-dir").arg(node.options.run_dir());
                command.args(["--instance", &which(node).id, "--wait", "--if-sibling"]);
                let drained = command.stdin(Stdio::null()).stdout(Stdio::null()).status().await?;
                ensure!(drained.success(), "berth drain: {drained}");
                restart_instance(node, which).await?;
            }
            Self::FreezeShim => {
                let pair = which(node);
                pair.shim.freeze().await?;
                pause(random, HANG).await;
                which(node).shim.signal(Signal::SIGCONT);
            }
            Self::FreezeInstance => {
                let pair = which(node);
                pair.instance.freeze().await?;
                pause(random, INSTANCE_HANG).await;
                which(node).instance.signal(Signal::SIGCONT);
            }
            Self::NoDescriptors => {
                let pair = which(node);
                let (pid, before) = limits(&pair.shim)?;
                let open = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
                limit(pid, &format!("{}:", open + random.u64(..8))).await?;
                pause(random, 3000).await;
                limit(pid, &format!("{before}:")).await?;
            }
            Self::FullRunDir => {
                let filler = node.options.run_dir().join("filler");
                // Until it is full: that is the error.
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

async fn restart_instance(node: &mut Node, which: fn(&mut Node) -> &mut Pair) -> Result<()> {
    let pair = which(node);
    pair.instance.signal(Signal::SIGTERM);
    pair.instance.ended("an instance").await?;
    node.start_instance(which)
}

async fn pause(random: &mut Rng, most: u64) {
    sleep(Duration::from_millis(random.u64(..most))).await;
}

/// A new pair comes, and the old one goes: both processes at once, as in a pod, or the shim first.
async fn upgrade(node: &mut Node, random: &mut Rng, previous: bool) -> Result<()> {
    let new = node.next_pair(previous)?;
    node.joined(&new).await?;
    let mut old = std::mem::replace(&mut node.b, new);
    pause(random, 500).await;
    old.shim.signal(Signal::SIGTERM);
    if random.bool() {
        let left = tokio::time::Instant::now() + Duration::from_secs(5);
        while tokio::time::Instant::now() < left {
            let status = node.status(&old).await;
            if status.is_err() || status.is_ok_and(|status| status.state == berth_node::terms::Phase::Left) {
                break;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
    old.instance.signal(Signal::SIGTERM);
    old.instance.ended("an instance that was told to").await?;
    old.shim.ended("a shim that was told to").await
}

/// The process of a shim, and its limit of open files.
fn limits(shim: &Process) -> Result<(i32, String)> {
    let pid = shim.pid().context("it has ended")?.as_raw();
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let line = limits.lines().find(|line| line.starts_with("Max open files")).context("no limit of open files")?;
    let soft = line.split_ascii_whitespace().nth(3).context("no soft limit")?;
    Ok((pid, soft.to_owned()))
}

async fn limit(pid: i32, soft: &str) -> Result<()> {
    let mut command = Command::new("prlimit");
    command.args(["--pid", &pid.to_string(), &format!("--nofile={soft}")]);
    let status = command.stdin(Stdio::null()).status().await.context("prlimit (of util-linux)")?;
    ensure!(status.success(), "prlimit: {status}");
    Ok(())
}
