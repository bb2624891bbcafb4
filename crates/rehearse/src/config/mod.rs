//! The plan of a rehearsal, in checked values.

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

/// Time without an answer after which a connection counts as lost.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Delay of a client's timer from which on the machine counts as too busy. A single request needs
/// threads to be scheduled about twenty times, so delays of this length add up.
pub const LATE_TIMER: Duration = Duration::from_millis(500);

/// Allowed rates of new connections a second. At a lower rate, a short run shows nothing. At a
/// higher rate, a single process cannot keep to the timetable.
pub const RATE: RangeInclusive<u32> = 20..=1000;

pub const WATCHES: RangeInclusive<u32> = 1..=500;

/// Allowed numbers of clients in a storm. With more clients, a storm would only show how long this
/// process computes TLS handshakes.
pub const STORM: RangeInclusive<u32> = 0..=20_000;

pub const UPGRADES: RangeInclusive<u32> = 1..=1000;

/// Time between two requests on an open connection.
pub const REQUEST_INTERVAL: Duration = Duration::from_millis(100);

/// Time between two writes.
pub const WRITE_INTERVAL: Duration = Duration::from_millis(100);

/// The default of the shims' `--lease`.
pub const LEASE_DURATION: Duration = Duration::from_secs(3);

/// Everything that a rehearsal does, as the checked options decide it.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Command of the old apiserver.
    pub old: Apiserver,
    /// Command of the new apiserver.
    pub new: Apiserver,
    /// Versions of the old and the new apiserver. Versions of real apiservers are known after
    /// [`Plan::ask_versions`].
    pub versions: [String; 2],
    /// The etcd program for real apiservers. `None` if the apiservers are simulated or name an etcd
    /// themselves.
    pub etcd: Option<PathBuf>,
    /// The berth program of the shims. `None` for this program.
    pub berth: Option<PathBuf>,
    /// True if the rehearsal has a network namespace of its own.
    pub netns: bool,
    /// The processes that an instance consists of: for example, two containers of one pod.
    pub topology: Topology,
    /// How shims pass clients to instances.
    pub pass: PassMode,
    /// Number of upgrades, from old to new and back. In the range [`UPGRADES`].
    pub upgrades: u32,
    /// Duration of the upgrades instead of their number. Each upgrade has a random fault from the
    /// seed.
    pub lasts: Option<Duration>,
    /// Faults to inject, in this order.
    pub faults: BTreeSet<Fault>,
    /// Durations and time limits of an upgrade's phases.
    pub timing: Timing,
    /// Numbers and rates of the load's clients.
    pub load: LoadPlan,
    pub via: Via,
    /// The ways to rehearse in order, a run for each. [`Plan::via`] is one of them.
    pub runs: Vec<Via>,
    /// Files to write.
    pub output: Output,
}

/// Files with the result, in addition to the terminal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    pub json: Option<PathBuf>,
    pub report: Option<PathBuf>,
}

/// Durations and time limits of an upgrade's phases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Duration of the load on the old instance alone, and again after the old instance is gone.
    pub phase: Duration,
    /// Duration of the load while both instances serve, before the old instance is stopped or a
    /// fault is injected.
    pub settle: Duration,
    /// Time that a new simulated apiserver takes to get ready after it began to listen.
    pub start_delay: Duration,
    /// Time after which an upgrade that must fail is given up.
    pub failing: Duration,
    /// Time limit for an instance to get ready and to get new connections.
    pub ready_within: Duration,
    /// Time from SIGTERM to SIGKILL, as in a pod or a systemd unit.
    pub grace: Duration,
    /// Divisor, for tests, of the times in shims and bridges that no option sets.
    pub speedup: Speedup,
}

/// Numbers and rates of the load's clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadPlan {
    /// New TLS connections a second, in the range [`RATE`].
    pub rate: u32,
    /// Number of clients with a long-lived connection: at least one of HTTP/1.1 and one of HTTP/2.
    pub clients: u32,
    /// Number of watches, in the range [`WATCHES`].
    pub watches: u32,
    /// Number of clients in the storm. They all connect at one moment after the first switch. In
    /// the range [`STORM`].
    pub storm: u32,
    /// Seed of the clients' random numbers.
    pub seed: u64,
    /// Time without an event after which a watch is given up at the end of the load. The writes
    /// that the watch has not seen by then count as missed.
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
    /// Timing of an upgrade that takes about twelve seconds in total.
    fn default() -> Self {
        Self {
            phase: Duration::from_secs(3),
            settle: Duration::from_secs(3),
            start_delay: Duration::ZERO,
            failing: Duration::from_secs(4),
            ready_within: Duration::from_secs(20),
            grace: SHUTDOWN_GRACE,
            speedup: Speedup::NONE,
        }
    }
}

/// Default of [`Timing::grace`], to which an apiserver's shutdown delay is added. As long as the
/// default of a pod's `terminationGracePeriodSeconds`.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(30);

/// Versions of simulated apiservers, distinct so that `/version` shows the answering apiserver.
const SIMULATED_VERSIONS: [&str; 2] = ["v1.33.0", "v1.34.0"];

/// Time limit for a real kube-apiserver to get ready on a small machine.
pub const REAL_READY_TIMEOUT: Duration = Duration::from_secs(90);

impl Default for Plan {
    /// A single upgrade of simulated apiservers through berth.
    fn default() -> Self {
        Self {
            old: Apiserver::default(),
            new: Apiserver::default(),
            versions: SIMULATED_VERSIONS.map(str::to_owned),
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
    /// Returns the reasons why a fault is impossible in this rehearsal.
    pub fn find_objections(&self, fault: Fault) -> impl Iterator<Item = &'static str> {
        let bridged = self.topology == Topology::Bridge;
        let apart = matches!(
            self.topology,
            Topology::Sidecar | Topology::NativeSidecar | Topology::Node
        );
        let rules = [
            (
                fault.needs_a_bridge() && !(bridged && self.via == Via::Berth),
                "there is no bridge; give --topology bridge, too, or leave the fault out",
            ),
            (
                fault.harms_shims() && !apart,
                "the fault needs a shim in a process of its own; give --topology sidecar, native-sidecar or node",
            ),
            (
                fault.harms_shims() && self.via == Via::Haproxy,
                "HAProxy has no shim; leave the fault out",
            ),
            (
                fault.needs_a_shim() && self.via == Via::None,
                "no process relays connections; leave the fault out",
            ),
        ];
        rules
            .into_iter()
            .filter_map(|(is_wrong, why)| is_wrong.then_some(why))
    }

    /// True if the shims' clock may jump.
    pub(crate) fn clock_jumps(&self) -> bool {
        let faults = if self.lasts.is_some() {
            self.drawable_faults()
        } else {
            Vec::from_iter(self.faults.clone())
        };
        faults.contains(&Fault::ClockJump)
    }

    /// Returns the faults from which each upgrade draws one.
    pub(crate) fn drawable_faults(&self) -> Vec<Fault> {
        // The shim of the node topology must survive all upgrades, to show whether its resources
        // grow.
        let is_kept = |fault: &Fault| self.topology == Topology::Node && *fault == Fault::KillShim;
        let has_place =
            |fault: &Fault| self.find_objections(*fault).next().is_none() && !is_kept(fault);
        match self.faults.is_empty() {
            true => Fault::value_variants()
                .iter()
                .copied()
                .filter(has_place)
                .collect(),
            false => self.faults.iter().copied().collect(),
        }
    }

    /// Asks both commands for the version, which shows that they can be started.
    pub async fn ask_versions(&mut self) -> Result<(), Mistakes> {
        let mut checks = Checks::default();
        let sides = [("--old", &self.old), ("--new", &self.new)];
        for ((option, apiserver), version) in sides.into_iter().zip(&mut self.versions) {
            let asked = apiserver.version(version).await;
            let fix = |why| {
                format!(
                    "{option}: {why}; give a kube-apiserver's command that starts, or stand-in for a simulated apiserver"
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
                let why =
                    "this berth has no bridge, which --topology bridge needs; give a newer berth";
                checks.report(format!("--berth {}: {why}", berth.display()));
            }
        }
        checks.finish(Some(()))
    }
}

impl LoadPlan {
    /// Returns the largest number of file descriptors of the load. An unanswered request holds its
    /// connection for [`ANSWER_TIMEOUT`]. The store's sockets are included.
    pub fn max_descriptors(&self) -> u64 {
        let fresh = u64::from(self.rate) * ANSWER_TIMEOUT.as_secs();
        let others = 2 * u64::from(self.clients) + 3 * u64::from(self.watches) + 128;
        fresh + u64::from(self.storm) + others
    }
}

/// Looks up a program like execvp(3). The error says why the program cannot be run.
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
