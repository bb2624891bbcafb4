//! The bridge's daemon: one loop that observes both instances, asks the machine for the next
//! action, carries out the action, and publishes the status.
//!
//! A bridge ends with the daemon's process. The process holds the descriptor of the steering, so
//! the kernel removes the steering. The kernel also kills the temporary instance.

use super::claim::{Claim, REPORTING, SHIM, remove_files};
use super::etcd::EtcdHandle;
use super::localhost::uncovered_note;
use super::logs;
use super::machine::{Action, BridgeObservation, Machine, OwnObservation, TemporaryObservation};
use super::plan::BridgePlan;
use super::pod::RunningPod;
use super::probe::{self, ProbeState};
use super::restore::{self, Restored, SavedFile};
use super::server::{Answer, Request, serve_commands};
use super::temporary_instance::{self, RESTART, Template, TemporaryProcess};
use berth_doctor::service::{Demand, Keeping, LOST};
use berth_node::ipc::bridge::{
    Ask, BridgeOutcome, BridgeStatus, Difference, OwnStatus, Reply, Step, TemporaryStatus, VERSION,
};
use berth_node::terms::Phase;
use berth_options::check;
use berth_os::explained;
use berth_os::signals::Signals;
use berth_shim::app::{self, Bound};
use berth_shim::backend::probe::Probe;
use berth_shim::config::{Config, Listen, Place, Preferred};
use berth_shim::state::{ShimState, Stop};
use berth_steering::{Purpose, Steering};
use nix::sys::signal::Signal;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet, spawn_blocking};
use tokio::time::{Instant, sleep, timeout};

/// ID of the node's kube-apiserver in the bridge's shim.
const OWN: &str = "own";

/// Time for which new connections are steered to a shim that gives no sign of life.
const LEASE: Duration = Duration::from_secs(4);

/// Longest time for which clients wait while neither instance is ready. client-go gives up a
/// handshake after 10 s, so a longer wait helps no client.
const HOLD: Duration = Duration::from_secs(12);

/// Longest time between two observations.
const INTERVAL: Duration = Duration::from_millis(200);

/// Time between two checks of the node's files.
const FILES: Duration = Duration::from_secs(2);

/// Time for the temporary instance to end after the last connection has ended; commands that wait
/// for the bridge then wait as long for the bridge's connections to the node's kube-apiserver.
/// `LONGEST_DRAIN` bounds both: kube-apiserver itself closes the remaining connections after 60 s.
const ENDING: Duration = Duration::from_secs(10);
const LONGEST_DRAIN: Duration = Duration::from_secs(300);

/// Runs the bridge to its end. Must be called on the main thread of a process, in a runtime with
/// one thread.
pub async fn drive_bridge(plan: BridgePlan, claim: Claim) -> BridgeOutcome {
    let Claim {
        directory,
        socket,
        mut lock,
        ..
    } = claim;
    lock.write_begun();
    let (status, _) = watch::channel(make_first_status(&plan));
    let (ask, asks) = mpsc::unbounded_channel();
    let (ended, has_ended) = oneshot::channel();
    let server = tokio::spawn(serve_commands(socket, status.clone(), ask, has_ended));
    let outcome = match Bridge::build(plan, status.clone()).await {
        Ok((bridge, bound)) => bridge.run(bound, asks).await,
        Err(why) => BridgeOutcome::NotBegun(why),
    };
    tracing::info!(?outcome, "the bridge has ended");
    if outcome == BridgeOutcome::Done {
        let _ = lock.file.set_len(0);
    }
    remove_files(&directory);
    status.send_modify(|status| status.outcome = Some(outcome.clone()));
    let _ = ended.send(());
    let _ = timeout(REPORTING, server).await;
    outcome
}

fn make_first_status(plan: &BridgePlan) -> BridgeStatus {
    BridgeStatus {
        version: VERSION,
        berth: berth_node::VERSION.to_owned(),
        pid: std::process::id(),
        temporary: TemporaryStatus {
            address: Some(plan.temporary.into()),
            ..TemporaryStatus::default()
        },
        own: OwnStatus {
            address: Some(plan.own),
            ..OwnStatus::default()
        },
        logs: vec![plan.options.directory.join(logs::BRIDGE)],
        ..BridgeStatus::default()
    }
}

/// State of the daemon.
struct Bridge {
    plan: Arc<BridgePlan>,
    machine: Machine,
    process: TemporaryProcess,
    shim: Shim,
    /// Probed state of both instances.
    temporary: watch::Receiver<ProbeState>,
    own: watch::Receiver<ProbeState>,
    service: Option<Keeping>,
    etcd: EtcdHandle,
    files: watch::Receiver<NodeFiles>,
    /// Work with the node's files, on separate threads: a disk may be slow.
    work: JoinSet<FinishedWork>,
    /// Reply channel of the restore request under way.
    restore_reply: Option<oneshot::Sender<Answer>>,
    /// Lasting notes for the operator, in sentences.
    notes: Vec<String>,
    drain: Option<Drain>,
    signalled: bool,
    status: watch::Sender<BridgeStatus>,
    _tasks: JoinSet<()>,
}

/// The bridge's shim, and the steering of new connections to it.
struct Shim {
    steering: Arc<Steering>,
    /// Listeners of the shim while connections may be steered to them. `given` is true while they
    /// listen and are in the BPF program's map.
    listeners: Vec<OwnedFd>,
    given: bool,
    state: watch::Receiver<ShimState>,
    /// Process of the node's kube-apiserver that the shim prefers to the temporary instance.
    preferred: watch::Sender<Option<u64>>,
    stop: watch::Sender<Stop>,
    is_alive: Box<dyn Fn() -> bool>,
    open: Box<dyn Fn() -> u64>,
}

/// End of the temporary instance and of its connections.
struct Drain {
    since: Instant,
    /// Time at which the shim's last connection had ended.
    served: Option<Instant>,
    /// Time at which the temporary instance had ended.
    gone: Option<Instant>,
    /// True once the temporary instance has got SIGTERM.
    terminated: bool,
}

/// Result of work with files.
enum FinishedWork {
    Restored(Restored),
    /// COMMAND succeeded. `replaces` is true if COMMAND replaces the node's kube-apiserver.
    Command {
        replaces: bool,
    },
}

/// The loop's reaction to an action.
enum Next {
    /// Observe again at once.
    Observe,
    /// Wait until something happens.
    Wait,
    End(BridgeOutcome),
}

impl Bridge {
    async fn build(
        mut plan: BridgePlan,
        status: watch::Sender<BridgeStatus>,
    ) -> Result<(Self, Bound), String> {
        let etcd = std::mem::take(&mut plan.etcd);
        let plan = Arc::new(plan);
        let (directory, speedup) = (&plan.options.directory, plan.options.limits.speedup);
        let template = Template::new(&plan)
            .map_err(|error| format!("cannot prepare the temporary kube-apiserver: {error}"))?;
        let mut logs = template.log_paths();
        let mut steering = Steering::new(Purpose::Bridge, plan.port, &plan.steered, LEASE)
            .map_err(|error| format!("steering: {error}"))?;
        let localhost = plan
            .localhost
            .as_ref()
            .map_err(String::clone)
            .and_then(|localhost| {
                localhost
                    .iter()
                    .try_for_each(|it| it.steer_localhost(&mut steering, plan.port))
                    .map_err(|error| error.to_string())
            });
        let (preferred, process) = watch::channel(None);
        let bound = app::build_shim(shim_config(&plan, process)?)
            .await
            .map_err(|error| error.to_string())?;
        let mut tasks = JoinSet::new();
        tasks.spawn(logs::limit_log_sizes(directory.clone()));
        let instances = [plan.temporary.into(), plan.own];
        let etcd = etcd.start_keeping_etcd(instances, directory, speedup, &mut tasks)?;
        logs.extend(etcd.temporary.is_some().then(|| directory.join(logs::ETCD)));
        status.send_modify(|status| status.logs.extend(logs));
        let mut follow = |probe, at, port| {
            let (to, state) = watch::channel(ProbeState::default());
            tasks.spawn(probe::probe_forever(probe, at, port, speedup, to));
            state
        };
        let temporary = follow(Probe::new(plan.probe.clone()), plan.temporary.into(), None);
        let own = Probe::new(plan.own_probe.clone()).with_loopback_source(plan.own.ip());
        let own = follow(own, plan.own, Some(plan.port));
        let (to, files) = watch::channel(NodeFiles::default());
        tasks.spawn(follow_files(plan.clone(), own.clone(), to));
        let bridge = Self {
            machine: Machine::new(plan.options.limits, plan.options.on_failure),
            process: TemporaryProcess::new(template),
            shim: Shim {
                steering: Arc::new(steering),
                listeners: bound.listeners().map_err(|error| error.to_string())?,
                given: false,
                state: bound.state(),
                preferred,
                stop: watch::Sender::new(Stop::No),
                is_alive: Box::new(bound.is_alive()),
                open: Box::new(bound.open_connections_counter()),
            },
            temporary,
            own,
            service: plan
                .service
                .clone()
                .map(|service| service.with_addresses(instances).start_keeping_slice()),
            etcd,
            files,
            work: JoinSet::new(),
            restore_reply: None,
            notes: localhost
                .err()
                .iter()
                .map(|why| uncovered_note(why))
                .collect(),
            drain: None,
            signalled: false,
            status,
            _tasks: tasks,
            plan,
        };
        Ok((bridge, bound))
    }

    async fn run(
        mut self,
        bound: Bound,
        mut asks: mpsc::UnboundedReceiver<Request>,
    ) -> BridgeOutcome {
        let mut signals = match Signals::new(&[Signal::SIGTERM, Signal::SIGINT]) {
            Ok(signals) => signals,
            Err(error) => {
                return BridgeOutcome::NotBegun(format!("cannot handle signals: {error}"));
            }
        };
        let began = Instant::now();
        let interval = self.plan.options.limits.speedup.shorten(INTERVAL);
        let turns = Arc::new(AtomicBool::new(true));
        let (turned, relays) = (turns.clone(), bound.is_alive());
        let _renewal = match renew_steering(self.shim.steering.clone(), move || {
            turned.swap(false, Relaxed) && relays()
        }) {
            Ok(renewal) => renewal,
            Err(error) => {
                return BridgeOutcome::NotBegun(format!("cannot start a thread: {error}"));
            }
        };
        let mut answered = bound.first_byte_wait();
        let serving = bound.run(self.shim.stop.subscribe());
        tokio::pin!(serving);
        loop {
            turns.store(true, Relaxed);
            let seen = self.observe();
            let action = self.machine.next(&seen, began.elapsed());
            self.publish_status(&seen);
            match self.carry_out(action).await {
                Next::Observe => continue,
                Next::Wait => self.enforce_drain_limits(),
                Next::End(outcome) => return outcome,
            }
            let has_served = self
                .drain
                .as_ref()
                .is_some_and(|drain| drain.served.is_some());
            let is_stopping = self.drain.as_ref().is_some_and(|drain| !drain.terminated);
            tokio::select! {
                _ = &mut serving, if !has_served => {
                    let Some(drain) = &mut self.drain else {
                        self.shim.steering.stop();
                        self.leave_service().await;
                        return BridgeOutcome::Abandoned("the bridge's shim ended".into());
                    };
                    drain.served = Some(Instant::now());
                    self.terminate_temporary();
                }
                () = answered.wait_until_stoppable(), if is_stopping => self.terminate_temporary(),
                () = self.process.wait_for_exit() => {}
                Some(done) = self.work.join_next() => self.finish_work(done),
                Some((ask, reply)) = asks.recv() => self.handle_request(ask, reply),
                signal = signals.next() => self.handle_signal(signal),
                Ok(()) = self.temporary.changed() => {}
                Ok(()) = self.own.changed() => {}
                Ok(()) = self.shim.state.changed() => {}
                () = sleep(interval) => {}
            }
            self.process.reap_if_exited();
        }
    }

    fn observe(&mut self) -> BridgeObservation {
        let (temporary, own) = (self.temporary.borrow(), self.own.borrow());
        let (running, has_joined) = (
            self.process.is_running(),
            self.shim.state.borrow().phase == Phase::Joined,
        );
        self.shim.given &= has_joined;
        // An answer from before a restart came from the previous process.
        let is_fresh = temporary.at > self.process.started;
        // A hung relay thread accepts connections, but answers none.
        let listens = (self.shim.is_alive)() && has_joined;
        let ready = running && is_fresh && temporary.ready && listens;
        let etcd = self.etcd.state();
        if let Some(refused) = &etcd.refused {
            let before = self.machine.step();
            self.machine.refuse_command(refused, own.listener);
            if self.machine.step() != before {
                tracing::info!(step = %self.machine.step(), "COMMAND is refused: {refused}");
            }
        }
        let ending = self.plan.options.limits.speedup.shorten(ENDING);
        let drained = self
            .drain
            .as_mut()
            .filter(|_| !running)
            .is_some_and(|drain| {
                let gone = *drain.gone.get_or_insert_with(Instant::now);
                drain.served.is_some() || gone.elapsed() >= ending
            });
        BridgeObservation {
            temporary: TemporaryObservation {
                running,
                ready,
                ends: self.process.ends,
            },
            // With the temporary etcd as its etcd, the node's kube-apiserver would not stay ready
            // for long.
            own: OwnObservation {
                process: own.listener,
                ready: own.ready && self.etcd.own_etcd_has_data(),
            },
            listens,
            steering: self.shim.given && self.shim.steering.is_steering(),
            prepared: etcd.prepared,
            named: self
                .service
                .as_ref()
                .is_none_or(|service| service.state().is_ok()),
            etcd: self.etcd.serves(),
            drained,
        }
    }

    async fn carry_out(&mut self, action: Action) -> Next {
        let speedup = self.plan.options.limits.speedup;
        match action {
            Action::Entered => {
                tracing::info!(step = %self.machine.step(), trouble = self.machine.trouble(), "step");
                return Next::Observe;
            }
            Action::Start if self.process.start(speedup.shorten(RESTART)) => return Next::Observe,
            Action::Steer => match self.shim.steer_to_bridge() {
                Ok(()) => {
                    tracing::info!(port = self.plan.port, "new connections go to the bridge");
                    return Next::Observe;
                }
                Err(why) => {
                    if self.machine.steering_error() != Some(&why) {
                        tracing::warn!(
                            code = %explained::CANNOT_STEER,
                            "cannot steer: {why}; new connections go to the node's listener; the bridge tries again"
                        );
                    }
                    self.machine.record_steering_failure(&why);
                }
            },
            Action::Unsteer => {
                self.shim.steering.stop();
                tracing::info!("new connections go to the node's listener");
                return Next::Observe;
            }
            Action::Prepare => self.etcd.prepare_etcd(),
            Action::Drain if self.drain.is_none() => {
                self.drain = Some(Drain {
                    since: Instant::now(),
                    served: None,
                    gone: None,
                    terminated: false,
                });
                // Allow upgrades of other nodes from now on.
                self.etcd.release_lock();
                self.leave_service().await;
                // Close our duplicates: an open listener would queue connections that nobody
                // accepts.
                self.shim.listeners.clear();
                self.shim.stop.send_replace(Stop::Drain);
            }
            Action::Restore => {
                let plan = self.plan.clone();
                self.work.spawn_blocking(move || {
                    FinishedWork::Restored(match saved_files(&plan) {
                        Ok(all) => restore::restore_files(&all),
                        Err(why) => Restored {
                            files: Err(why),
                            kept: Vec::new(),
                        },
                    })
                });
                return Next::Observe;
            }
            Action::Finish(outcome) => {
                let known = self.status.borrow().outcome.clone();
                let outcome = known.unwrap_or_else(|| self.etcd.abandon_if_writes_lost(outcome));
                if self
                    .drain
                    .as_ref()
                    .is_some_and(|drain| drain.served.is_some())
                {
                    return Next::End(outcome);
                }
                self.publish_outcome(outcome);
            }
            Action::Start | Action::Drain | Action::Wait => {}
        }
        Next::Wait
    }

    /// Carries out actions that are due after some time.
    fn enforce_drain_limits(&mut self) {
        let Some(drain) = &self.drain else { return };
        if drain.since.elapsed() >= LONGEST_DRAIN && *self.shim.stop.borrow() != Stop::Now {
            self.shim.stop.send_replace(Stop::Now);
        }
        let ending = self.plan.options.limits.speedup.shorten(ENDING);
        if drain
            .served
            .is_some_and(|served| served.elapsed() >= ending)
        {
            self.process
                .send_signal(self.process.template.kill_signal());
        }
    }

    /// Stops the temporary instance: all requests are answered, or no client is left.
    fn terminate_temporary(&mut self) {
        if let Some(drain) = &mut self.drain
            && !std::mem::replace(&mut drain.terminated, true)
        {
            self.process.send_signal(Signal::SIGTERM);
        }
    }

    /// The warning that the Service does not name the node although COMMAND may need the entry by
    /// now.
    fn service_warning(&self) -> Option<String> {
        let counts = matches!(self.machine.step(), Step::Hold | Step::AwaitOwn);
        let why = self.service.as_ref().filter(|_| counts)?.state().err()?;
        Some(format!("{why}; {LOST}"))
    }

    async fn leave_service(&mut self) {
        let Some(service) = self.service.take() else {
            return;
        };
        if let Err(slice) = service.stop_keeping_slice().await {
            tracing::warn!(
                code = %explained::SLICE_STAYS,
                slice,
                "the bridge's slice may be in the Service kubernetes: `berth bridge end` removes it"
            );
        }
    }

    /// Publishes the outcome. The bridge has ended except for connections to the node's
    /// kube-apiserver, which are relayed for 5 minutes at most. No command waits for their end.
    fn publish_outcome(&self, outcome: BridgeOutcome) {
        if self.status.borrow().outcome.is_none() {
            tracing::info!(
                connections = (self.shim.open)(),
                "the bridge has ended, and relays its open connections to the node's kube-apiserver for 5 minutes at most"
            );
            temporary_instance::remove_files(&self.plan.options.directory);
            self.status
                .send_modify(|status| status.outcome = Some(outcome));
        }
    }

    fn finish_work(&mut self, done: Result<FinishedWork, JoinError>) {
        match done {
            Ok(FinishedWork::Command { replaces }) => self.machine.record_command_end(Ok(replaces)),
            Ok(FinishedWork::Restored(Restored { files, kept })) => {
                self.notes.extend(
                    kept.iter()
                        .map(|path| format!("the replaced file is kept as {}", path.display())),
                );
                let is_restarted =
                    |put: &Vec<_>| replaces_apiserver(manifest_path(&self.plan), Some(put));
                self.machine
                    .record_restore(files.as_ref().map(is_restarted).map_err(String::clone));
                if let Some(reply) = self.restore_reply.take() {
                    let _ = reply.send(files.map(|all| Some(Reply::Differences(all))));
                }
            }
            Err(error) => {
                tracing::warn!(
                    code = %explained::BRIDGE_THREAD,
                    %error,
                    "a thread of the bridge failed; `berth bridge end --now` ends it"
                );
            }
        }
    }

    fn handle_request(&mut self, ask: Option<Ask>, reply: oneshot::Sender<Answer>) {
        if !matches!(ask, Some(Ask::Status | Ask::Accompany)) {
            tracing::info!(
                ?ask,
                "request from a command (None: the process that ran COMMAND went away)"
            );
        }
        let plan = self.plan.clone();
        let done = match ask {
            Some(Ask::Status | Ask::Accompany) => Ok(()),
            Some(Ask::Command) => match &self.etcd.state().refused {
                Some(why) => Err(why.clone()),
                None => self.machine.request_command(),
            },
            Some(Ask::Ended { failed: None }) => {
                self.work.spawn_blocking(move || {
                    let changed = find_differences(&plan).inspect_err(|why| {
                        tracing::warn!("cannot tell what COMMAND changed: {why}");
                    });
                    FinishedWork::Command {
                        replaces: replaces_apiserver(manifest_path(&plan), changed.ok().as_deref()),
                    }
                });
                Ok(())
            }
            Some(Ask::Ended { failed: Some(why) }) => {
                self.machine.record_command_end(Err(why));
                Ok(())
            }
            None => {
                self.machine.record_abandoned_command(
                    "the process that ran COMMAND went away before it reported COMMAND's end",
                );
                Ok(())
            }
            Some(Ask::End { now }) => self.end_bridge(now),
            Some(Ask::Restore { dry_run: true }) => {
                spawn_blocking(move || {
                    reply.send(find_differences(&plan).map(|all| Some(Reply::Differences(all))))
                });
                return;
            }
            Some(Ask::Restore { dry_run: false }) => {
                match require_pod(&plan).and_then(|_| self.machine.request_restore()) {
                    Ok(()) => {
                        self.restore_reply = Some(reply);
                        return;
                    }
                    Err(why) => Err(why),
                }
            }
        };
        let _ = reply.send(done.map(|()| None));
    }

    fn end_bridge(&mut self, now: bool) -> Result<(), String> {
        if now && self.machine.step() == Step::Drain {
            self.shim.stop.send_replace(Stop::Now);
        }
        self.machine.request_end(now)
    }

    /// Ends the bridge: the first signal as `berth bridge end` does, the next one at once.
    fn handle_signal(&mut self, signal: Signal) {
        tracing::info!("{signal}");
        let now = std::mem::replace(&mut self.signalled, true);
        if let Err(why) = self.end_bridge(now) {
            tracing::warn!("{signal}: {why}; the next signal ends the bridge at once");
        }
    }

    /// Informs all dependents of the machine's state: the shim, the parts that keep etcd and the
    /// Service, and commands.
    fn publish_status(&self, seen: &BridgeObservation) {
        let (step, preferred) = (self.machine.step(), self.machine.preferred_process());
        self.etcd
            .set_command_may_run(self.machine.command_may_run());
        self.shim
            .preferred
            .send_if_modified(|known| std::mem::replace(known, preferred) != preferred);
        // Keep the Service until the node's kube-apiserver stays ready.
        let on = seen.steering
            && matches!(
                step,
                Step::Overlap | Step::Hold | Step::AwaitOwn | Step::Restore
            );
        if let Some(service) = &self.service {
            service.set_demand(if on { Demand::Serving } else { Demand::Ending });
        }
        let (temporary, own, files) = (
            self.temporary.borrow(),
            self.own.borrow(),
            self.files.borrow(),
        );
        let mut notes = self.notes.clone();
        notes.extend(
            self.service_warning()
                .into_iter()
                .chain(self.etcd.state().notes)
                .chain(files.warnings()),
        );
        let is_wrong = self.machine.trouble().is_some() || self.machine.own_apiserver_is_late();
        self.status.send_if_modified(|status| {
            notes
                .iter()
                .filter(|note| !status.notes.contains(note))
                .for_each(|note| tracing::warn!("{note}"));
            let now = BridgeStatus {
                step,
                steering: seen.steering,
                command: self.machine.is_command_running(),
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
                    preferred: seen.own.ready && preferred.is_some(),
                    late: self.machine.own_apiserver_is_late(),
                    address: status.own.address,
                    probe: own.words.clone(),
                    log: if is_wrong && !seen.own.ready {
                        files.log.clone()
                    } else {
                        Vec::new()
                    },
                },
                etcd: self.etcd.status(),
                notes,
                connections_open: (self.shim.open)(),
                connections_steered: self.shim.steering.count_steered_connections(),
                ..status.clone()
            };
            let is_news = without_counters(&now) != without_counters(status);
            *status = now;
            is_news
        });
    }
}

/// A copy of the status without the values that change all the time and are not reported alone:
/// counters, and the text of probes and logs.
fn without_counters(status: &BridgeStatus) -> BridgeStatus {
    let mut status = status.clone();
    (status.connections_open, status.connections_steered) = (0, 0);
    [&mut status.temporary.probe, &mut status.own.probe]
        .into_iter()
        .for_each(String::clear);
    status.own.log.clear();
    status
}

impl Shim {
    fn steer_to_bridge(&mut self) -> Result<(), String> {
        for listener in &self.listeners {
            self.steering
                .steer_to(listener.as_fd())
                .map_err(|error| error.to_string())?;
        }
        self.given = true;
        self.steering.start();
        Ok(())
    }
}

/// Renews the steering's lease while `is_alive` returns true, until the returned value is dropped.
/// A thread of its own does the work: a slow disk or a busy CPU must not send clients to the node's
/// kube-apiserver while that is down.
fn renew_steering(
    steering: Arc<Steering>,
    is_alive: impl Fn() -> bool + Send + 'static,
) -> io::Result<std::sync::mpsc::Sender<()>> {
    let (until, dropped) = std::sync::mpsc::channel();
    std::thread::Builder::new()
        .name("renewal".into())
        .spawn(move || {
            while dropped.recv_timeout(LEASE / 4) == Err(RecvTimeoutError::Timeout) {
                if is_alive() {
                    steering.renew_lease();
                }
            }
        })?;
    Ok(until)
}

/// Observations of the node's files.
#[derive(Debug, Clone, Default)]
struct NodeFiles {
    /// Last lines of the container log of the node's kube-apiserver, while not ready.
    log: Vec<String>,
    /// Key files that have changed.
    keys: BTreeSet<PathBuf>,
}

impl NodeFiles {
    fn warnings(&self) -> impl Iterator<Item = String> {
        self.keys.iter().map(|path| {
            format!(
                "{} has changed, and the temporary kube-apiserver still has the old keys: it cannot read objects that the new \
                 kube-apiserver encrypts with a new key, and refuses tokens that the new kube-apiserver signs with a new key",
                path.display()
            )
        })
    }
}

/// Observes the files of a static pod for as long as there is a receiver.
async fn follow_files(
    plan: Arc<BridgePlan>,
    own: watch::Receiver<ProbeState>,
    to: watch::Sender<NodeFiles>,
) {
    while plan.pod.is_some() && !to.is_closed() {
        let (plan, is_ready) = (plan.clone(), own.borrow().ready);
        let look = move || NodeFiles {
            log: plan
                .pod
                .as_ref()
                .filter(|_| !is_ready)
                .map(RunningPod::last_log_lines)
                .unwrap_or_default(),
            keys: changed_keys(&plan).unwrap_or_default(),
        };
        if let Ok(files) = spawn_blocking(look).await {
            to.send_modify(|known| {
                known.log = files.log;
                // Warnings stay.
                known.keys.extend(files.keys);
            });
        }
        sleep(FILES).await;
    }
}

fn require_pod(plan: &BridgePlan) -> Result<&RunningPod, String> {
    plan.pod.as_ref().ok_or_else(|| {
        "only a static pod's files can be restored, and this kube-apiserver runs in no static pod".to_owned()
    })
}

fn manifest_path(plan: &BridgePlan) -> Option<&Path> {
    plan.pod.as_ref().map(RunningPod::manifest)
}

fn saved_files(plan: &BridgePlan) -> Result<Vec<SavedFile>, String> {
    Ok(require_pod(plan)?.saved_files(&plan.command, &plan.options.directory))
}

fn changed_keys(plan: &BridgePlan) -> Result<BTreeSet<PathBuf>, String> {
    restore::changed_keys(
        &saved_files(plan)?,
        &require_pod(plan)?.key_files(&plan.command),
    )
}

fn find_differences(plan: &BridgePlan) -> Result<Vec<Difference>, String> {
    restore::find_differences(&saved_files(plan)?)
}

/// True if COMMAND replaces the node's kube-apiserver: in a pod, by a changed manifest, which the
/// kubelet reads long after a command that only writes the file has ended; outside a pod, always.
/// `changed` is `None` if the changes cannot be seen, and may include the manifest.
fn replaces_apiserver(manifest: Option<&Path>, changed: Option<&[Difference]>) -> bool {
    let (Some(manifest), Some(changed)) = (manifest, changed) else {
        return true;
    };
    changed.iter().any(|difference| difference.path == manifest)
}

/// Configuration of the bridge's shim: the defaults of `berth serve`, except for the fields set
/// below.
fn shim_config(plan: &BridgePlan, process: watch::Receiver<Option<u64>>) -> Result<Config, String> {
    let id = OWN.parse().map_err(|error| format!("{OWN}: {error}"))?;
    let preferred = Preferred {
        id,
        address: plan.own,
        probe: plan.own_probe.clone(),
        process,
    };
    let listen = plan
        .listen
        .iter()
        .map(|addr| Listen {
            addr: *addr,
            freebind: false,
        })
        .collect();
    let place = Place {
        listen,
        instance: Some(plan.instance.clone()),
        run_dir: plan.options.directory.join(SHIM),
    };
    let defaults =
        check::default_config(place, plan.temporary.into()).map_err(|error| error.to_string())?;
    Ok(Config {
        preferred: Some(preferred),
        lease: LEASE,
        probe: plan.probe.clone(),
        probe_interval: plan.options.limits.speedup.shorten(defaults.probe_interval),
        hold: HOLD,
        drain_timeout: LONGEST_DRAIN,
        ..defaults
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bridge must not end before the kubelet has stopped the node's kube-apiserver.
    #[test]
    fn an_instance_counts_as_replaced_unless_its_manifest_is_unchanged() {
        let changed = |path: &str| Difference {
            path: path.into(),
            missing: false,
            diff: None,
            refused: None,
        };
        let (manifest, key) = (Path::new("/m/k.yaml"), [changed("/pki/sa.key")]);
        for (manifest, changed, replaced) in [
            (Some(manifest), Some(&key[..]), false),
            (Some(manifest), Some(&[]), false),
            (
                Some(manifest),
                Some(&[changed("/pki/sa.key"), changed("/m/k.yaml")]),
                true,
            ),
            (Some(manifest), None, true),
            (None, None, true),
        ] {
            assert_eq!(
                replaces_apiserver(manifest, changed),
                replaced,
                "{manifest:?} {changed:?}"
            );
        }
    }
}
