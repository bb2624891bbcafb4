//! The bridge's daemon: it samples both instances, gets the next action from the machine, carries it out, and publishes the status.
//!
//! A bridge ends with this process: the kernel removes the steering, whose descriptor is here, and kills the temporary instance.

use super::etcd::keeping;
use super::etcd::temporary::revisions::Compared;
use super::etcd::temporary::{self, EtcdDaemon};
use super::instance::{self, Template, TemporaryProcess};
use super::localhost::NOT_COVERED;
use super::machine::{Action, BridgeObservation, Machine, OwnObservation, TemporaryObservation};
use super::plan::{BridgePlan, own_source};
use super::pod::RunningPod;
use super::probe::{self, ProbeState};
use super::restore::{self, Restored, SavedFile};
use super::server::{Answer, Asking, serve};
use super::{LOCK, logs, surroundings};
use berth_doctor::service::{Demand, Keeping, LOST};
use berth_node::instance::InstanceId;
use berth_node::ipc::bridge::{
    Ask, BridgeOutcome, BridgeStatus, Difference, EtcdStatus, EtcdStep, OwnStatus, Reply, SOCKET, Step,
    TemporaryStatus, VERSION,
};
use berth_node::terms::Phase;
use berth_options::check;
use berth_os::file::{lock_within, private_directory};
use berth_os::seqpacket;
use berth_os::signals::Signals;
use berth_shim::app::{self, Bound};
use berth_shim::backend::probe::{Probe, ProbeConfig};
use berth_shim::config::{Config, Listen, Place, Preferred};
use berth_shim::drain::Stop;
use berth_shim::metrics::gauge;
use berth_shim::shared::ShimState;
use berth_shim::steering::{Purpose, Steering, SteeringMetrics};
use nix::fcntl::Flock;
use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

/// Run directory of the bridge's shim, with its lease.
const SHIM: &str = "bridge-shim";

/// ID of the node's own instance in the bridge's shim.
const OWN: &str = "own";

/// How long new connections are steered to a shim that gives no sign of life.
const LEASE: Duration = Duration::from_secs(4);

/// How long clients wait while neither instance is ready. client-go gives up a handshake after 10 s, so longer helps no client.
const HOLD: Duration = Duration::from_secs(12);

/// Longest time between two samples.
const INTERVAL: Duration = Duration::from_millis(200);

/// How old the last lines of the node's own log may be.
const LOG_AGE: Duration = Duration::from_secs(2);

/// Time between two looks at the files with keys.
const KEYS_AGE: Duration = Duration::from_secs(2);

/// Shortest time between two starts of the temporary instance.
const RESTART: Duration = Duration::from_secs(1);

/// How long the temporary instance may take to end after its last connection; how long commands that wait for the bridge then wait for
/// its connections to the node's own; and how long both may take: kube-apiserver itself closes the rest after 60 s.
const ENDING: Duration = Duration::from_secs(10);
const LONGEST_DRAIN: Duration = Duration::from_secs(300);

/// When a bridge warns that it is still on: it is not meant to be permanent.
const LONG: Duration = Duration::from_secs(30 * 60);

/// How long commands that wait for the outcome may take to read it.
const REPORTING: Duration = Duration::from_secs(2);

/// A directory that no other bridge has, with its socket.
#[derive(Debug)]
pub struct Claim {
    directory: PathBuf,
    socket: OwnedFd,
    /// Where the daemon writes what it logs.
    pub log: File,
    /// Locked while this is a bridge. Not empty: it has not ended well, or not yet.
    lock: Flock<File>,
    _alone: UnixDatagram,
}

impl Claim {
    /// Claims a directory that the preflight accepted, and removes what a killed bridge left there.
    ///
    /// # Errors
    /// Another bridge has it, or it cannot be created.
    pub fn acquire(directory: &Path) -> Result<Self, String> {
        let failed = |what: &'static str| {
            let path = directory.display().to_string();
            move |error: io::Error| format!("cannot {what} in {path}: {error}; give another directory with --state-dir")
        };
        private_directory(directory, geteuid().as_raw()).map_err(failed("make the bridge's directory"))?;
        let mut options = OpenOptions::new();
        options.create(true).append(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let lock = options.open(directory.join(LOCK)).map_err(failed("make a file"))?;
        // One whose outcome is known may not be gone yet.
        let lock = lock_within(lock, REPORTING)
            .map_err(|_| format!("another bridge is on ({}): see `berth bridge status`", directory.display()))?;
        let alone = surroundings::alone()?;
        clear(directory);
        let path = directory.join(SOCKET);
        let socket = seqpacket::listener(&path).map_err(failed("make a socket"))?;
        fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(failed("make a socket"))?;
        let last_failed = lock.metadata().is_ok_and(|meta| meta.len() > 0);
        logs::begin(directory, last_failed);
        let log = options.open(directory.join(logs::BRIDGE)).map_err(failed("make a file"))?;
        lock.set_len(0).map_err(failed("write a file"))?;
        Ok(Self { directory: directory.to_owned(), socket, log, lock, _alone: alone })
    }
}

/// Removes a bridge's files here, except its logs and its lock.
fn clear(directory: &Path) {
    instance::clean(directory);
    let _ = fs::remove_dir_all(directory.join(SHIM));
    let _ = fs::remove_file(directory.join(SOCKET));
}

/// Runs the bridge to its end. To be called on the main thread of a process, in a runtime of one thread.
pub async fn drive(mut plan: BridgePlan, mut claim: Claim) -> BridgeOutcome {
    // A process that is killed cannot record that it failed.
    if let Err(error) = claim.lock.write_all(b"on\n") {
        tracing::info!(%error, "the next bridge will not keep the logs of this one if it fails");
    }
    let (status, _) = watch::channel(first_status(&plan));
    let (ask, asks) = mpsc::unbounded_channel();
    let (ended, has_ended) = oneshot::channel();
    let server = tokio::spawn(serve(claim.socket, status.clone(), ask, has_ended));
    let etcd = plan.etcd.temporary.take();
    let outcome = match Bridge::build(Arc::new(plan), etcd, status.clone()).await {
        Ok((bridge, bound)) => bridge.run(bound, asks).await,
        Err(why) => BridgeOutcome::NotBegun(why),
    };
    tracing::info!(?outcome, "the bridge has ended");
    if outcome == BridgeOutcome::Done {
        let _ = claim.lock.set_len(0);
    }
    clear(&claim.directory);
    status.send_modify(|status| status.outcome = Some(outcome.clone()));
    let _ = ended.send(());
    let _ = tokio::time::timeout(REPORTING, server).await;
    outcome
}

fn first_status(plan: &BridgePlan) -> BridgeStatus {
    BridgeStatus {
        version: VERSION,
        berth: berth_node::VERSION.to_owned(),
        pid: std::process::id(),
        temporary: TemporaryStatus { address: Some(plan.temporary.into()), ..TemporaryStatus::default() },
        own: OwnStatus { address: Some(plan.own), ..OwnStatus::default() },
        logs: vec![plan.options.directory.join(logs::BRIDGE), plan.options.directory.join(logs::INSTANCE)],
        ..BridgeStatus::default()
    }
}

type RestoreResult = Result<Vec<Difference>, String>;

/// The result of work with files.
enum FinishedWork {
    Restored(Restored),
    /// COMMAND succeeded; whether it replaces the node's own instance.
    Command {
        replaces: bool,
    },
    /// The last lines of its container's log.
    Log(Vec<String>),
    /// Files with keys that have changed.
    Keys(BTreeSet<PathBuf>),
}

/// The state of a bridge, except for its shim.
struct Bridge {
    plan: Arc<BridgePlan>,
    machine: Machine,
    process: TemporaryProcess,
    steering: Arc<Steering>,
    /// When new connections first went to the bridge, by both clocks: the system's is for others, and may be set.
    since: Arc<OnceLock<SystemTime>>,
    steered: Option<Instant>,
    /// The shim's listeners, while they may be steered to.
    listeners: Vec<OwnedFd>,
    /// Whether they listen and are in the program's map.
    given: bool,
    signalled: bool,
    /// Stops its shim.
    stop: watch::Sender<Stop>,
    temporary: watch::Receiver<ProbeState>,
    own: watch::Receiver<ProbeState>,
    /// Process of the node's own instance that the shim prefers to the temporary one.
    preferred: watch::Sender<Option<u64>>,
    /// Connections that the temporary instance had received when the preferred process was first ready.
    old: Option<u64>,
    shim: watch::Receiver<ShimState>,
    status: watch::Sender<BridgeStatus>,
    _asking: JoinSet<()>,
    service: Option<Keeping>,
    etcd: Option<keeping::Keeping>,
    /// Reads and writes of the node's files, on threads of their own: a disk may be slow.
    work: JoinSet<FinishedWork>,
    /// The last lines of the own container's log, and when they are read again; none: a read is under way.
    log: Vec<String>,
    log_due: Option<Instant>,
    /// When files with keys are looked at again, in the same way.
    keys_due: Option<Instant>,
    /// Receives the result of the restore under way.
    wanted: Option<oneshot::Sender<Answer>>,
    /// Of the node's etcd, where a temporary one serves while it is away; that is to know whether COMMAND may run.
    temporary_etcd: Option<watch::Receiver<EtcdStatus>>,
    /// What the temporary one acknowledged and the node's own has not got.
    revisions: watch::Receiver<Compared>,
    /// Whether this node's member answers, of each etcd that has others.
    members: Vec<watch::Receiver<bool>>,
    commanding: watch::Sender<bool>,
}

impl Bridge {
    async fn build(
        plan: Arc<BridgePlan>,
        etcd: Option<temporary::Plan>,
        status: watch::Sender<BridgeStatus>,
    ) -> Result<(Self, Bound), String> {
        let template =
            Template::new(&plan).map_err(|error| format!("cannot prepare the temporary kube-apiserver: {error}"))?;
        status.send_modify(|status| status.logs.extend(template.logs().into_iter().skip(1)));
        let mut steering = Steering::new(Purpose::Bridge, plan.port, &plan.steered, LEASE)
            .map_err(|error| format!("steering: {error}"))?;
        let localhost = plan.localhost.as_ref().map_err(String::clone).and_then(|localhost| {
            localhost.iter().try_for_each(|it| it.cover(&mut steering, plan.port)).map_err(|error| error.to_string())
        });
        if let Err(why) = localhost {
            tracing::warn!("localhost is not covered: {why}; {NOT_COVERED}");
            status.send_modify(|status| status.localhost = Some(why));
        }
        let since = Arc::new(OnceLock::new());
        let steering = Arc::new(steering);
        let collectors: Vec<Box<dyn Collector>> =
            vec![Box::new(SteeringMetrics(steering.clone())), Box::new(BridgeMetrics { since: since.clone() })];
        let (preferred, process) = watch::channel(None);
        let bound = app::build(config(&plan, process)?, collectors).await.map_err(|error| error.to_string())?;
        let listeners = bound.listeners().map_err(|error| error.to_string())?;
        let shim = bound.state();
        let mut asking = JoinSet::new();
        asking.spawn(logs::bound(plan.options.directory.clone()));
        let speedup = plan.options.limits.speedup;
        let (commanding, commands) = watch::channel(false);
        let (compared, revisions) = watch::channel(Compared::default());
        let temporary_etcd = match etcd {
            Some(etcd) => {
                let (to, etcd_status) = watch::channel(EtcdStatus::default());
                asking.spawn(etcd.revisions.clone().compare(etcd_status.clone(), compared));
                let daemon = EtcdDaemon::new(etcd, &plan.options.directory, speedup, to)?;
                asking.spawn(daemon.run(commands));
                status.send_modify(|status| status.logs.push(plan.options.directory.join(logs::ETCD)));
                Some(etcd_status)
            }
            None => None,
        };
        let members = plan.etcd.clusters.iter().map(|cluster| cluster.follow(&mut asking)).collect();
        let probe = |config: &ProbeConfig| Probe::new(config.clone());
        let (to, temporary) = watch::channel(ProbeState::default());
        asking.spawn(probe::follow(probe(&plan.probe), plan.temporary.into(), None, speedup, to));
        let (to, own) = watch::channel(ProbeState::default());
        asking.spawn(probe::follow(
            probe(&plan.options.probe).from(own_source(plan.own.ip())),
            plan.own,
            Some(plan.port),
            speedup,
            to,
        ));
        let bridge = Self {
            machine: Machine::new(plan.options.limits, plan.options.on_failure),
            process: TemporaryProcess::new(template),
            steering,
            since,
            steered: None,
            listeners,
            given: false,
            signalled: false,
            stop: watch::Sender::new(Stop::No),
            temporary,
            own,
            preferred,
            old: None,
            shim,
            status,
            _asking: asking,
            work: JoinSet::new(),
            log: Vec::new(),
            log_due: Some(Instant::now()),
            keys_due: Some(Instant::now()),
            wanted: None,
            etcd: plan.etcd.start([plan.temporary.into(), plan.own]),
            temporary_etcd,
            revisions,
            members,
            commanding,
            service: plan.service.clone().map(|service| service.at([plan.temporary.into(), plan.own]).start()),
            plan,
        };
        Ok((bridge, bound))
    }

    async fn run(mut self, bound: Bound, mut asks: mpsc::UnboundedReceiver<Asking>) -> BridgeOutcome {
        let mut signals = match Signals::new(&[Signal::SIGTERM, Signal::SIGINT]) {
            Ok(signals) => signals,
            Err(error) => return BridgeOutcome::NotBegun(format!("cannot handle signals: {error}")),
        };
        let began = Instant::now();
        let speedup = self.plan.options.limits.speedup;
        let (is_alive, open, served_old, mut answered) =
            (bound.is_alive(), bound.open(), bound.own(), bound.answered());
        let turns = Arc::new(AtomicBool::new(true));
        let (turned, relays) = (turns.clone(), bound.is_alive());
        let _renewal = match renew(self.steering.clone(), move || turned.swap(false, Relaxed) && relays()) {
            Ok(renewal) => renewal,
            Err(error) => return BridgeOutcome::NotBegun(format!("cannot start a thread: {error}")),
        };
        let serving = bound.run(self.stop.subscribe());
        tokio::pin!(serving);
        let mut served: Option<Instant> = None;
        let mut terminated = false;
        let (mut draining, mut gone): (Option<Instant>, Option<Instant>) = (None, None);
        let mut warned = false;
        loop {
            turns.store(true, Relaxed);
            if self.shim.borrow().phase != Phase::Joined {
                self.given = false;
            }
            if draining.is_some() && !self.process.is_running() {
                gone.get_or_insert_with(Instant::now);
            }
            let seen = self.seen(served.is_some() || late(gone, speedup.of(ENDING)), is_alive());
            if let Some(why) = self.etcd.as_ref().and_then(|etcd| etcd.state().refused) {
                self.machine.refuse(&why);
            }
            let action = self.machine.next(&seen, began.elapsed());
            let preferred = self.machine.preferred();
            self.commanding.send_replace(self.machine.command_may_run());
            self.preferred.send_if_modified(|current| std::mem::replace(current, preferred) != preferred);
            self.read_log(&seen);
            self.look_at_keys();
            self.publish(&seen, open(), served_old());
            self.keep_service(&seen);
            match action {
                Action::Entered => {
                    tracing::info!(step = %self.machine.step(), trouble = self.machine.trouble(), "step");
                    if let Some(why) = self.unkept() {
                        tracing::warn!("{why}; {LOST}");
                    }
                    continue;
                }
                Action::Start
                    if self.process.started.is_none_or(|started| started.elapsed() >= speedup.of(RESTART)) =>
                {
                    self.process.start();
                    continue;
                }
                Action::Steer => match self.steer() {
                    Ok(()) => continue,
                    Err(why) => {
                        if self.machine.steering_error() != Some(&why) {
                            tracing::warn!(
                                "cannot steer: {why}; new connections go to the node's own listener, and it is tried again"
                            );
                        }
                        self.machine.cannot_steer(&why);
                    }
                },
                Action::Unsteer => {
                    self.steering.off();
                    tracing::info!("new connections go to the node's own listener");
                    continue;
                }
                Action::Prepare => self.etcd.iter().for_each(keeping::Keeping::prepare),
                Action::Drain if draining.is_none() => {
                    draining = Some(Instant::now());
                    // Other nodes may follow.
                    self.etcd = None;
                    self.leave_service().await;
                    // Close our duplicates: an open listener would queue connections that nothing accepts.
                    self.listeners.clear();
                    self.stop.send_replace(Stop::Drain);
                }
                Action::Restore => {
                    let plan = self.plan.clone();
                    self.work.spawn_blocking(move || {
                        FinishedWork::Restored(match before(&plan) {
                            Ok(all) => restore::restore(&all),
                            Err(why) => Restored { files: Err(why), kept: Vec::new() },
                        })
                    });
                    continue;
                }
                Action::Finish(outcome) if served.is_some() => return self.judged(outcome),
                Action::Finish(outcome) => self.publish_outcome(self.judged(outcome), open()),
                Action::Start | Action::Drain | Action::Wait => {}
            }
            if !warned && late(self.steered, LONG) && draining.is_none() {
                warned = true;
                tracing::warn!(
                    "the bridge has been on for 30 minutes: it is for a piece of work; `berth bridge end` ends it"
                );
            }
            if late(draining, LONGEST_DRAIN) && *self.stop.borrow() != Stop::Now {
                self.stop.send_replace(Stop::Now);
            }
            if late(served, speedup.of(ENDING)) || (served.is_some() && late(draining, LONGEST_DRAIN)) {
                self.process.signal(self.process.template.kill());
            }
            tokio::select! {
                _ = &mut serving, if served.is_none() => {
                    served = Some(Instant::now());
                    if draining.is_none() {
                        self.steering.off();
                        self.leave_service().await;
                        return BridgeOutcome::Abandoned("its shim ended".into());
                    }
                    if !std::mem::replace(&mut terminated, true) {
                        self.process.signal(Signal::SIGTERM);
                    }
                }
                () = answered.wait(), if draining.is_some() && !terminated => {
                    self.process.signal(Signal::SIGTERM);
                    terminated = true;
                }
                () = self.process.ended() => {}
                Some(done) = self.work.join_next() => self.done(done),
                Some((ask, reply)) = asks.recv() => self.handle(ask, reply),
                signal = signals.next() => self.on_signal(signal),
                Ok(()) = self.temporary.changed() => {}
                Ok(()) = self.own.changed() => {}
                Ok(()) = self.shim.changed() => {}
                () = tokio::time::sleep(speedup.of(INTERVAL)) => {}
            }
            self.process.reap();
        }
    }

    /// Keeps the Service while new connections go to the bridge, until the node's own instance stays ready.
    fn keep_service(&self, seen: &BridgeObservation) {
        let on =
            seen.steering && matches!(self.machine.step(), Step::Overlap | Step::Hold | Step::AwaitOwn | Step::Restore);
        if let Some(service) = &self.service {
            service.demand(if on { Demand::Serving } else { Demand::Ending });
        }
    }

    /// Why the Service does not name the node although it may be needed by now.
    fn unkept(&self) -> Option<String> {
        let counts = matches!(self.machine.step(), Step::Hold | Step::AwaitOwn);
        self.service.as_ref().filter(|_| counts).and_then(|service| service.kept().err())
    }

    async fn leave_service(&mut self) {
        let Some(service) = self.service.take() else { return };
        if let Err(slice) = service.end().await {
            tracing::warn!(slice, "the bridge's slice may be in the Service kubernetes: `berth bridge end` removes it");
        }
    }

    /// The bridge has ended except for its connections to the node's own, which are relayed until they end. No command waits for that.
    fn publish_outcome(&self, outcome: BridgeOutcome, connections: u64) {
        if self.status.borrow().outcome.is_none() {
            tracing::info!(
                connections,
                "the bridge has ended, and relays its open connections to the node's own until they end"
            );
            instance::clean(&self.plan.options.directory);
            self.status.send_modify(|status| status.outcome = Some(outcome));
        }
    }

    fn seen(&self, served: bool, alive: bool) -> BridgeObservation {
        let (temporary, own) = (self.temporary.borrow(), self.own.borrow());
        let running = self.process.is_running();
        // An answer from before a restart is the previous process's.
        let fresh = temporary.at > self.process.started;
        // A hung relaying thread accepts connections and answers none.
        let ready = running && fresh && temporary.ready && alive && self.shim.borrow().phase == Phase::Joined;
        BridgeObservation {
            temporary: TemporaryObservation { running, ready, ends: self.process.ends },
            // With the temporary etcd it would not be ready for long.
            own: OwnObservation { process: own.listener, ready: own.ready && self.has_own_etcd() },
            steering: self.given && self.steering.is_steering(),
            prepared: self.etcd.as_ref().is_none_or(|etcd| etcd.state().prepared),
            named: self.service.as_ref().is_none_or(|service| service.kept().is_ok()),
            etcd: self.has_own_etcd() && self.members.iter().all(|answers| *answers.borrow()),
            drained: served && !running,
        }
    }

    /// A bridge under which writes were lost has not ended well.
    fn judged(&self, outcome: BridgeOutcome) -> BridgeOutcome {
        let Compared { missing, is_open } = self.revisions.borrow().clone();
        match (outcome, missing) {
            (BridgeOutcome::Done, Some(why)) => BridgeOutcome::Abandoned(why),
            (outcome, _) => {
                if is_open {
                    tracing::warn!(
                        "whether the node's own etcd has all that was written while it was away is not known: it did not answer when it \
                         was asked for its revision"
                    );
                }
                outcome
            }
        }
    }

    fn has_own_etcd(&self) -> bool {
        self.temporary_etcd.as_ref().is_none_or(|etcd| etcd.borrow().step == EtcdStep::Own)
    }

    fn steer(&mut self) -> Result<(), String> {
        for listener in &self.listeners {
            self.steering.give_to(listener.as_fd()).map_err(|error| error.to_string())?;
        }
        self.given = true;
        self.steering.on();
        self.since.get_or_init(SystemTime::now);
        self.steered.get_or_insert_with(Instant::now);
        tracing::info!(port = self.plan.port, "new connections go to the temporary kube-apiserver");
        Ok(())
    }

    /// Reads ahead why the node's own is not ready.
    fn read_log(&mut self, seen: &BridgeObservation) {
        if !seen.own.ready && self.log_due.is_some_and(|due| due <= Instant::now()) {
            let plan = self.plan.clone();
            self.log_due = None;
            self.work.spawn_blocking(move || {
                FinishedWork::Log(plan.pod.as_ref().map(RunningPod::last_lines).unwrap_or_default())
            });
        }
    }

    /// While COMMAND may change them.
    fn look_at_keys(&mut self) {
        let counts = matches!(self.machine.step(), Step::Hold | Step::AwaitOwn) && self.plan.pod.is_some();
        if counts && self.keys_due.is_some_and(|due| due <= Instant::now()) {
            let plan = self.plan.clone();
            self.keys_due = None;
            self.work.spawn_blocking(move || FinishedWork::Keys(changed_keys(&plan).unwrap_or_default()));
        }
    }

    /// Says it once for each file.
    fn note_keys(&mut self, changed: BTreeSet<PathBuf>) {
        for path in changed {
            let warning = format!(
                "{} has changed: the temporary kube-apiserver has the keys from before, and while it serves it cannot read what the new \
                 one encrypts with another key, and refuses tokens that the new one signs with it",
                path.display()
            );
            self.status.send_if_modified(|status| {
                let is_new = !status.warnings.contains(&warning);
                if is_new {
                    tracing::warn!("{warning}");
                    status.warnings.push(warning);
                }
                is_new
            });
        }
    }

    fn done(&mut self, done: Result<FinishedWork, JoinError>) {
        match done {
            Ok(FinishedWork::Restored(put)) => self.restored(put),
            Ok(FinishedWork::Command { replaces }) => self.machine.command_ended(Ok(replaces)),
            Ok(FinishedWork::Log(lines)) => (self.log, self.log_due) = (lines, Some(Instant::now() + LOG_AGE)),
            Ok(FinishedWork::Keys(changed)) => {
                self.keys_due = Some(Instant::now() + KEYS_AGE);
                self.note_keys(changed);
            }
            Err(error) => tracing::warn!(%error, "a thread of the bridge failed; `berth bridge end --now` ends it"),
        }
    }

    /// Handles the result of a restore.
    fn restored(&mut self, Restored { files: put, kept }: Restored) {
        self.status.send_modify(|status| status.replaced.extend(kept));
        self.machine.restored(put.as_ref().map(|put| restarts(&self.plan, put)).map_err(String::clone));
        if let Some(reply) = self.wanted.take() {
            let _ = reply.send(put.map(|all| Some(Reply::Differences(all))));
        }
    }

    fn handle(&mut self, ask: Option<Ask>, reply: oneshot::Sender<Answer>) {
        if ask == Some(Ask::Restore { dry_run: false }) {
            tracing::info!("restore was requested");
            match pod(&self.plan).and_then(|_| self.machine.restore()) {
                Ok(()) => self.wanted = Some(reply),
                Err(why) => drop(reply.send(Err(why))),
            }
            return;
        }
        if ask == Some(Ask::Restore { dry_run: true }) {
            let plan = self.plan.clone();
            tokio::task::spawn_blocking(move || {
                reply.send(differences(&plan).map(|all| Some(Reply::Differences(all))))
            });
            return;
        }
        let _ = reply.send(self.answer(ask));
    }

    fn answer(&mut self, ask: Option<Ask>) -> Answer {
        let Some(ask) = ask else {
            tracing::info!("the process that ran COMMAND went away");
            self.machine.command_abandoned("the process that ran COMMAND went away before it ended");
            return Ok(None);
        };
        let done = match ask {
            Ask::Status | Ask::Accompany | Ask::Restore { .. } => Ok(()),
            Ask::Command => self.machine.command_begins(),
            Ask::Ended { failed } => {
                tracing::info!(failed, "COMMAND ended");
                match failed {
                    Some(why) => self.machine.command_ended(Err(why)),
                    None => {
                        let plan = self.plan.clone();
                        self.work.spawn_blocking(move || FinishedWork::Command { replaces: is_replaced(&plan) });
                    }
                }
                Ok(())
            }
            Ask::End { now } => {
                tracing::info!(now, "the end was requested");
                self.end(now)
            }
        };
        done.map(|()| None)
    }

    fn end(&mut self, now: bool) -> Result<(), String> {
        if now && self.machine.step() == Step::Drain {
            self.stop.send_replace(Stop::Now);
        }
        self.machine.end(now)
    }

    /// The first signal ends it as `berth bridge end` does, the next one at once.
    fn on_signal(&mut self, signal: Signal) {
        tracing::info!("{signal}");
        let now = std::mem::replace(&mut self.signalled, true);
        if let Err(why) = self.end(now) {
            tracing::warn!("{signal}: {why}; the next signal ends it at once");
        }
    }

    fn publish(&mut self, seen: &BridgeObservation, open: u64, old: u64) {
        let preferred = seen.own.ready && self.machine.preferred().is_some();
        self.old = self.old.or(preferred.then_some(old));
        let (temporary, own) = (self.temporary.borrow(), self.own.borrow());
        self.status.send_if_modified(|status| {
            let now = BridgeStatus {
                step: self.machine.step(),
                steering: seen.steering,
                command: self.machine.is_commanding(),
                trouble: self.machine.trouble().map(str::to_owned),
                steering_error: self.machine.steering_error().map(str::to_owned),
                temporary: TemporaryStatus {
                    pid: self.process.pid(),
                    ready: seen.temporary.ready,
                    ends: seen.temporary.ends,
                    address: status.temporary.address,
                    probe: temporary.words.clone(),
                },
                own: OwnStatus {
                    listener: seen.own.process,
                    ready: seen.own.ready,
                    preferred,
                    late: self.machine.own_is_late(),
                    address: status.own.address,
                    probe: own.words.clone(),
                    log: match self.machine.trouble().is_some() || self.machine.own_is_late() {
                        true if !seen.own.ready => self.log.clone(),
                        _ => Vec::new(),
                    },
                },
                service: self.unkept(),
                etcd: self.temporary_etcd.as_ref().map(|etcd| {
                    let lost = self.revisions.borrow().missing.clone();
                    let etcd = etcd.borrow().clone();
                    EtcdStatus { trouble: lost.or(etcd.trouble), ..etcd }
                }),
                etcd_notes: self.etcd.as_ref().map(|etcd| etcd.state().notes).unwrap_or_default(),
                connections_open: open,
                connections_steered: self.steering.counters().steered,
                connections_old: self.old.map_or(0, |before| old - before),
                ..status.clone()
            };
            // Changed counters alone are not reported.
            let key = |status: &BridgeStatus| {
                let BridgeStatus { step, steering, command, trouble, temporary, own, etcd, service, .. } = status;
                let notes = status.etcd_notes.clone();
                let reported = (trouble.clone(), status.steering_error.clone(), service.is_some(), notes);
                let own = (own.listener, own.ready, own.preferred, own.late);
                let etcd = etcd.as_ref().map(|etcd| (etcd.step, etcd.trouble.clone()));
                (*step, *steering, *command, reported, temporary.pid, temporary.ready, own, etcd)
            };
            let news = key(status) != key(&now);
            *status = now;
            news
        });
    }
}

/// What a bridge adds to the metrics of its shim.
#[derive(Debug)]
struct BridgeMetrics {
    since: Arc<OnceLock<SystemTime>>,
}

impl Collector for BridgeMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(since) = self.since.get().and_then(|since| since.duration_since(UNIX_EPOCH).ok()) else {
            return Ok(());
        };
        let help = "When new connections first went to the bridge, in seconds since 1970";
        gauge(&mut to, "berth_bridge_start_time_seconds", help, since.as_secs_f64())
    }
}

/// Renews the steering's lease while `alive` returns true, until the returned value is dropped. On a thread of its own: a slow disk or
/// a busy CPU must not send clients to the node's own instance while that is down.
fn renew(
    steering: Arc<Steering>,
    is_alive: impl Fn() -> bool + Send + 'static,
) -> io::Result<std::sync::mpsc::Sender<()>> {
    let (until, dropped) = std::sync::mpsc::channel();
    std::thread::Builder::new().name("renewal".into()).spawn(move || {
        while dropped.recv_timeout(LEASE / 4) == Err(RecvTimeoutError::Timeout) {
            if is_alive() {
                steering.renew();
            }
        }
    })?;
    Ok(until)
}

fn late(since: Option<Instant>, long: Duration) -> bool {
    since.is_some_and(|since| since.elapsed() >= long)
}

fn pod(plan: &BridgePlan) -> Result<&RunningPod, String> {
    plan.pod.as_ref().ok_or_else(|| "what a kube-apiserver that is no pod is started from is not known here".to_owned())
}

fn before(plan: &BridgePlan) -> Result<Vec<SavedFile>, String> {
    Ok(pod(plan)?.before(&plan.command, &plan.options.directory))
}

fn changed_keys(plan: &BridgePlan) -> Result<BTreeSet<PathBuf>, String> {
    restore::changed_keys(&before(plan)?, &pod(plan)?.keys(&plan.command))
}

fn differences(plan: &BridgePlan) -> RestoreResult {
    restore::differences(&before(plan)?)
}

/// Whether COMMAND replaces the node's own instance: in a pod, by a changed manifest, which the kubelet reads long after a command that
/// only writes it has ended; outside a pod, always.
fn is_replaced(plan: &BridgePlan) -> bool {
    differences(plan).is_ok_and(|all| restarts(plan, &all)) || plan.pod.is_none()
}

/// The kubelet restarts the node's own when its manifest changes.
fn restarts(plan: &BridgePlan, put: &[Difference]) -> bool {
    put.iter().any(|difference| plan.pod.as_ref().is_some_and(|pod| pod.manifest() == difference.path))
}

/// The bridge's shim: `berth serve` with its defaults, but for what is set below.
fn config(plan: &BridgePlan, process: watch::Receiver<Option<u64>>) -> Result<Config, String> {
    let (address, probe) = (plan.own, plan.options.probe.clone());
    let preferred =
        Preferred { id: OWN.parse::<InstanceId>().map_err(|error| error.to_string())?, address, probe, process };
    let listen = plan.listen.iter().map(|addr| Listen { addr: *addr, freebind: false }).collect();
    let place = Place { listen, instance: Some(plan.instance.clone()), run_dir: plan.options.directory.join(SHIM) };
    let defaults = check::defaults(place, plan.temporary.into()).map_err(|error| error.to_string())?;
    Ok(Config {
        preferred: Some(preferred),
        lease: LEASE,
        probe: plan.probe.clone(),
        probe_interval: plan.options.limits.speedup.of(defaults.probe_interval),
        hold: HOLD,
        drain_timeout: LONGEST_DRAIN,
        admin: plan.options.admin,
        ..defaults
    })
}
