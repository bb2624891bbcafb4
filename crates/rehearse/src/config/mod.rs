//! What will be rehearsed, in checked values.

pub mod apiserver;
pub mod choice;
pub mod fault;

use apiserver::Apiserver;
use berth_node::terms::Speedup;
use berth_options::check::{Checks, Mistakes};
use berth_shim::config::PassMode;
use clap::ValueEnum;
use fault::Fault;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

pub use choice::{Topology, Via};

/// After this long without an answer a connection is lost.
pub const UNANSWERED: Duration = Duration::from_secs(15);

/// A timer of the clients that is later shows that this machine is too busy. A request takes some twenty turns of threads.
pub const LATE: Duration = Duration::from_millis(500);

/// New connections a second: below, a run this short shows nothing; above, one process cannot keep the
/// timetable.
pub const RATE: RangeInclusive<u32> = 20..=1000;

pub const WATCHES: RangeInclusive<u32> = 1..=500;

/// Clients of a storm: with more, one process that computes all of their handshakes is what is slow.
pub const STORM: RangeInclusive<u32> = 0..=20_000;

pub const UPGRADES: RangeInclusive<u32> = 1..=1000;

/// Time between two requests of a kept connection.
pub const PACE: Duration = Duration::from_millis(100);

/// Time between two writes that watches must see.
pub const WRITE_EVERY: Duration = Duration::from_millis(100);

/// The shims' `--lease`: their default.
pub const LEASE: Duration = Duration::from_secs(3);

/// What will be rehearsed.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Command of the apiserver that is replaced.
    pub old: Apiserver,
    /// Command of the one that replaces it.
    pub new: Apiserver,
    /// Their versions; those of real ones are known once they were [asked](Self::ask_versions).
    pub versions: [String; 2],
    /// The etcd that is started for real apiservers; none: they are simulated apiservers, or name one themselves.
    pub etcd: Option<PathBuf>,
    /// The berth that shims are processes of, if it is not this program.
    pub berth: Option<PathBuf>,
    /// In a network namespace of its own.
    pub netns: bool,
    /// Which processes an instance has.
    pub topology: Topology,
    /// How clients come to instances from the shims.
    pub pass: PassMode,
    /// From old to new and back, in [`UPGRADES`].
    pub upgrades: u32,
    /// Upgrades go on for this long instead, each with one fault that the seed draws.
    pub lasts: Option<Duration>,
    /// What goes wrong meanwhile, in this order.
    pub faults: BTreeSet<Fault>,
    /// How long each phase lasts.
    pub timing: Timing,
    /// What concerns clients.
    pub load: LoadPlan,
    pub via: Via,
    /// All runs, [`Plan::via`] among them, in this order.
    pub runs: Vec<Via>,
    /// Where it is written to.
    pub output: Output,
}

/// Where a rehearsal is written to, in addition to the terminal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    pub json: Option<PathBuf>,
    pub report: Option<PathBuf>,
}

/// How long each phase lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Load on the old instance alone, and after the old one is gone: each.
    pub phase: Duration,
    /// Load while both serve, before the old one is stopped or anything goes wrong.
    pub settle: Duration,
    /// From listening to ready, of a simulated apiserver that replaces another.
    pub start_delay: Duration,
    /// How long an upgrade that fails is waited for.
    pub failing: Duration,
    /// Bound for an instance to get ready and joined.
    pub ready_within: Duration,
    /// Time from SIGTERM to SIGKILL, as in a pod or a systemd unit.
    pub grace: Duration,
    /// What divides the times of shims and bridges that no option sets.
    pub speedup: Speedup,
}

/// What concerns clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadPlan {
    /// New TLS connections a second, in [`RATE`].
    pub rate: u32,
    /// Clients with a kept connection: one each of HTTP/1.1 and HTTP/2 at least.
    pub clients: u32,
    /// Watches, in [`WATCHES`].
    pub watches: u32,
    /// Clients that come at one moment after the first switch, in [`STORM`].
    pub storm: u32,
    /// What is random in the clients follows from it.
    pub seed: u64,
    /// After this long without anything new, at the end, the last writes do not arrive at a watch any more.
    pub catch_up: Duration,
}

impl Default for LoadPlan {
    fn default() -> Self {
        Self {
            rate: 100,
            clients: 8,
            watches: 8,
            storm: 0,
            seed: 0,
            catch_up: Duration::from_secs(5),
        }
    }
}

impl Default for Timing {
    /// About twelve seconds in all.
    fn default() -> Self {
        Self {
            phase: Duration::from_secs(3),
            settle: Duration::from_secs(3),
            start_delay: Duration::ZERO,
            failing: Duration::from_secs(4),
            ready_within: Duration::from_secs(20),
            grace: GRACE,
            speedup: Speedup::NONE,
        }
    }
}

/// Default of [`Timing::grace`], beyond the shutdown delay: a pod's `terminationGracePeriodSeconds`.
pub const GRACE: Duration = Duration::from_secs(30);

/// Versions of simulated apiservers, which differ so that `/version` shows which one answers.
const VERSIONS: [&str; 2] = ["v1.33.0", "v1.34.0"];

/// How long a real kube-apiserver may take to get ready, on a small machine.
pub const REAL_READY_WITHIN: Duration = Duration::from_secs(90);

impl Default for Plan {
    /// One upgrade of simulated apiservers through berth.
    fn default() -> Self {
        Self {
            old: Apiserver::default(),
            new: Apiserver::default(),
            versions: VERSIONS.map(str::to_owned),
            etcd: None,
            berth: None,
            netns: false,
            topology: Topology::Sidecar,
            pass: PassMode::Relay,
            upgrades: 1,
            lasts: None,
            faults: BTreeSet::new(),
            timing: Timing::default(),
            load: LoadPlan::default(),
            via: Via::Berth,
            runs: vec![Via::Berth],
            output: Output::default(),
        }
    }
}

impl Plan {
    /// Why a fault has no place in this rehearsal.
    pub fn misplaced(&self, fault: Fault) -> impl Iterator<Item = &'static str> {
        let bridged = self.topology == Topology::Bridge;
        let apart = matches!(
            self.topology,
            Topology::Sidecar | Topology::NativeSidecar | Topology::Node
        );
        let rules = [
            (
                fault.needs_a_bridge() && !(bridged && self.via == Via::Berth),
                "there is no bridge; give --topology bridge, too, or leave it out",
            ),
            (
                fault.is_of_shims() && !apart,
                "it needs a shim in a process of its own; give --topology sidecar, native-sidecar or node",
            ),
            (
                fault.is_of_shims() && self.via == Via::Haproxy,
                "HAProxy has no such shim; leave the fault out",
            ),
            (
                fault.needs_a_shim() && self.via == Via::None,
                "there is nothing that relays; leave the fault out",
            ),
        ];
        rules
            .into_iter()
            .filter_map(|(is_wrong, why)| is_wrong.then_some(why))
    }

    /// True if the shims' clock may jump.
    pub(crate) fn clock_jumps(&self) -> bool {
        let faults = if self.lasts.is_some() {
            self.drawn()
        } else {
            Vec::from_iter(self.faults.clone())
        };
        faults.contains(&Fault::ClockJump)
    }

    /// The faults of which each round has one.
    pub(crate) fn drawn(&self) -> Vec<Fault> {
        // A shim for all rounds, of which is seen whether it grows, lives through them.
        let is_kept = |fault: &Fault| self.topology == Topology::Node && *fault == Fault::KillShim;
        let has_place = |fault: &Fault| self.misplaced(*fault).next().is_none() && !is_kept(fault);
        match self.faults.is_empty() {
            true => Fault::value_variants()
                .iter()
                .copied()
                .filter(has_place)
                .collect(),
            false => self.faults.iter().copied().collect(),
        }
    }

    /// Asks both commands for their version, which shows whether they can be started at all.
    pub async fn ask_versions(&mut self) -> Result<(), Mistakes> {
        let mut checks = Checks::default();
        let sides = [("--old", &self.old), ("--new", &self.new)];
        for ((option, apiserver), version) in sides.into_iter().zip(&mut self.versions) {
            let asked = apiserver.version(version).await;
            let fix = |why| {
                format!(
                    "{option}: {why}; give a kube-apiserver's command that starts, or stand-in for a simulated one"
                )
            };
            if let Some(reported) = checks.ok_or_report(asked.map_err(fix)) {
                *version = reported;
            }
        }
        if let Some(berth) = self
            .berth
            .as_ref()
            .filter(|_| self.topology == Topology::Bridge)
        {
            let help = tokio::process::Command::new(berth)
                .args(["bridge", "--help"])
                .output()
                .await;
            if !help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--settle")) {
                let why = "it has no bridge, which --topology bridge needs; give a newer one";
                checks.report(format!("--berth {}: {why}", berth.display()));
            }
        }
        checks.finish(Some(()))
    }
}

impl LoadPlan {
    /// Descriptors that the load can have open at most: an answer that never comes holds its
    /// connection for [`UNANSWERED`], the store's sockets come on top.
    pub fn descriptors(&self) -> u64 {
        let fresh = u64::from(self.rate) * UNANSWERED.as_secs();
        let others = 2 * u64::from(self.clients) + 3 * u64::from(self.watches) + 128;
        fresh + u64::from(self.storm) + others
    }
}

/// Looks a program up as execvp(3) does. The error is why it cannot be run.
pub fn find_program(program: &OsStr) -> Result<PathBuf, String> {
    use nix::unistd::{AccessFlags, access};
    let can_run = |path: &PathBuf| path.is_file() && access(path, AccessFlags::X_OK).is_ok();
    let path = PathBuf::from(program);
    if program.as_encoded_bytes().contains(&b'/') {
        return match path.metadata() {
            Ok(_) if can_run(&path) => Ok(path),
            Ok(_) => Err(format!("{} cannot be executed", path.display())),
            Err(error) => Err(format!("{}: {error}", path.display())),
        };
    }
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&dirs)
        .map(|dir| dir.join(program))
        .find(can_run);
    found.ok_or_else(|| format!("{} is not in PATH", path.display()))
}
