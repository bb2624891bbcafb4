//! The main loop: samples the node, gets the next action from the machine, saves the position on
//! disk, carries the action out, and reports.

use super::journal::find_kubelet_trouble;
use super::judge::{ALL, Emulation, Judging, Shares, format_percent};
use super::lock::Lock;
use super::logs::{self, LoggedPod};
use super::machine::{
    Action, INTERRUPTED, JudgeResult, LEAVE_TIMEOUT, Limits, Machine, NodeObservation, Position,
    Slot, Step, UpgradeOutcome, Version,
};
use super::observer::{NodeDetails, NodeObserver};
use super::pod::{ApiserverPod, EMULATION, PREFIX};
use super::progress::Progress;
use super::state::{State, Store, remove_file};
use berth_cluster::Client;
use berth_doctor::service::{Demand, Keeping, Purpose, ServiceKeeper};
use berth_manifest::file::{replace, replace_or_make, sweep_temporary};
use berth_manifest::names::{INSTALL, SHIM};
use berth_node::ipc;
use berth_node::ipc::wire::{Ask, Reply};
use berth_os::signals::Signals;
use nix::sys::signal::Signal;
use std::error::Error;
use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

/// Time between two reads of the kubelet's journal.
const JOURNAL_INTERVAL: Duration = Duration::from_secs(2);

/// How long the Service may be unkept before a warning is printed: while an instance stops, the API
/// may be away.
const WARN_UNKEPT_AFTER: Duration = Duration::from_secs(10);

/// The surroundings of an upgrade, not part of its state.
#[derive(Debug)]
pub struct UpgradeContext {
    /// The fields of the new manifest that the upgrade needs.
    pub pod: ApiserverPod,
    /// Time limits of the steps.
    pub limits: Limits,
    /// The run directory of the node's shims.
    pub run_dir: PathBuf,
    /// The directory where the kubelet writes container logs.
    pub pod_logs: PathBuf,
    /// The cluster, as an administrator.
    pub client: Option<Client>,
    /// The lock that keeps other nodes from being upgraded.
    pub lock: Option<Lock>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriveOutcome {
    /// The new version serves from the canonical file.
    Done,
    /// The old version serves.
    RolledBack,
    /// Gone back after a bad verdict. The old version serves, or the new one emulating the old
    /// release.
    Judged,
    /// Neither done nor rolled back. The state is kept, and serving instances are left alone.
    Halted,
    /// Stopped by a second signal, with the state kept as after `Halted`.
    Stopped,
}

/// The end of the upgrade, or the file that cannot be read or written.
type DriveResult = Result<DriveOutcome, Box<dyn Error>>;

/// Carries an upgrade out from its current step to the end.
///
/// # Errors
/// A file cannot be read or written. The state is kept.
pub async fn drive_upgrade(
    state: State,
    store: &Store,
    context: &UpgradeContext,
    progress: Rc<Progress>,
) -> DriveResult {
    let client = context.client.as_ref().filter(|_| state.service);
    let service = client
        .map(|client| ServiceKeeper::new(client, Purpose::Upgrade, state.address))
        .transpose();
    let mut driver = Driver {
        machine: Machine::new(state.position.clone(), context.limits, state.course()),
        shares: state
            .judge
            .as_ref()
            .map(|judge| Shares::new(&state.uid, judge.local)),
        judging: None,
        observer: NodeObserver::new(&context.run_dir),
        signals: OperatorSignals::new()?,
        service: service?.map(ServiceKeeper::start),
        drain_trouble: String::new(),
        unkept: None,
        warned_unkept: false,
        entered: SystemTime::now(),
        asked_kubelet: None,
        find_kubelet_trouble: None,
        state,
        store,
        context,
        progress: progress.clone(),
    };
    let keep_lock = async {
        match &context.lock {
            Some(lock) => lock.keep(&progress).await,
            None => pending().await,
        }
    };
    let ended = tokio::select! {
        ended = driver.run() => ended,
        () = keep_lock => Ok(DriveOutcome::Stopped),
    };
    driver
        .leave_service(!matches!(ended, Ok(DriveOutcome::Stopped)))
        .await;
    ended
}

struct Driver<'a> {
    machine: Machine,
    shares: Option<Shares>,
    /// `Some` in a step that judges.
    judging: Option<Judging>,
    observer: NodeObserver,
    signals: OperatorSignals,
    service: Option<Keeping>,
    /// Why the last drain failed.
    drain_trouble: String,
    /// Since when the Service is unkept, and whether a warning has been printed.
    unkept: Option<Instant>,
    warned_unkept: bool,
    entered: SystemTime,
    /// When the kubelet's journal was last read.
    asked_kubelet: Option<Instant>,
    /// Why the kubelet cannot start this step's pod.
    find_kubelet_trouble: Option<String>,
    state: State,
    store: &'a Store,
    context: &'a UpgradeContext,
    progress: Rc<Progress>,
}

impl Driver<'_> {
    async fn run(&mut self) -> DriveResult {
        for path in [
            &self.state.canonical,
            &self.state.temporary,
            self.store.path(),
        ] {
            sweep_temporary(path);
        }
        // The operator needs this path: once the clock was set back, the newest kept manifest by
        // name may belong to another upgrade.
        let before = self.store.old_manifest_path(&self.state);
        replace(&before, &self.state.old)?;
        self.progress
            .print_detail(&format!("the old manifest is kept: {}", before.display()));
        self.announce();
        loop {
            let (mut seen, details) = self.observer.sample(&self.state).await?;
            if let Some(service) = &self.service {
                let serves = seen.canonical.may_serve() || seen.temporary.may_serve();
                service.demand(if serves {
                    Demand::Serving
                } else {
                    Demand::NotServing
                });
                let trouble = service.state().err().filter(|_| serves);
                self.warn_unkept(trouble);
            }
            self.ask_kubelet(&mut seen).await;
            let refused = self.announce_share(&details).await.err();
            match self.machine.next(&seen, self.progress.elapsed()) {
                Action::Judge(slot) if self.begin_judging(slot, refused.as_deref()) => {
                    let Some(judging) = &mut self.judging else {
                        continue;
                    };
                    let both = [slot.other(), slot].map(|slot| details.of_slot(slot));
                    tokio::select! {
                        judged = judging.look(both, &self.progress) => {
                            judged.into_iter().for_each(|judged| self.machine.record_judge_result(judged));
                        }
                        _ = self.signals.next() => {
                            if !self.interrupt() {
                                return Ok(DriveOutcome::Stopped);
                            }
                        }
                    }
                }
                Action::Wait | Action::Judge(_) => {
                    self.progress
                        .print_wait(&self.describe_wait(&seen, &details));
                    let signalled = tokio::select! {
                        signalled = self.signals.next() => signalled,
                        () = self.observer.wait_for_change() => false,
                    };
                    if signalled && !self.interrupt() {
                        return Ok(DriveOutcome::Stopped);
                    }
                }
                Action::Entered => {
                    let first = self.state.position.why.is_none();
                    let before = std::mem::replace(
                        &mut self.state.position,
                        self.machine.position().clone(),
                    );
                    // Reported before the position is saved: if the upgrade is killed in between,
                    // the resumed run reports the failure again.
                    if let (true, Some(why)) = (first, self.state.position.why.as_deref())
                        && why != INTERRUPTED
                        && !self.state.position.judged
                    {
                        self.print_failure(why, before.step, &details);
                    }
                    self.store.save(&self.state)?;
                    self.entered = SystemTime::now();
                    (self.find_kubelet_trouble, self.judging) = (None, None);
                    self.announce();
                }
                Action::Place(slot, version) => {
                    let (path, text) = self.file_and_text(slot, version);
                    let had = self.state.access.filter(|_| slot == Slot::Canonical);
                    replace_or_make(path, text, had)?;
                    self.progress.print_line(&format!(
                        "     {} is written ({version} manifest)",
                        path.display()
                    ));
                }
                Action::Remove(slot) => {
                    let (path, _) = self.file_and_text(slot, Version::New);
                    remove_file(path)?;
                    self.progress
                        .print_line(&format!("     {} is removed", path.display()));
                }
                Action::Drain(slot) => tokio::select! {
                    drained = ask_to_leave(details.of_slot(slot).socket.as_deref()) => self.report_drain(slot, drained).await,
                    // The next sample shows whether the shim received the drain.
                    _ = self.signals.next() => {
                        if !self.interrupt() {
                            return Ok(DriveOutcome::Stopped);
                        }
                    }
                },
                Action::Finish(outcome) => return self.finish(outcome, &details).await,
                Action::Halt(why) => {
                    self.state.position = self.machine.position().clone();
                    self.store.save(&self.state)?;
                    let step = self.state.position.step;
                    self.print_failure(&why, step, &details);
                    return Ok(DriveOutcome::Halted);
                }
            }
        }
    }

    /// True if the next look at both instances is due. False if a shim refuses the new instance's
    /// share, since there is nothing to compare.
    fn begin_judging(&mut self, slot: Slot, refused: Option<&str>) -> bool {
        let (Some(options), Some(client)) = (&self.state.judge, &self.context.client) else {
            let why =
                "there is no --kubeconfig to ask the instances for their metrics with".to_owned();
            let undecided = self.state.judge.as_ref().map(|judge| judge.undecided);
            self.progress.print_line(&format!("     not judged: {why}"));
            self.machine
                .record_judge_result(undecided.unwrap_or_default().decide(why, false));
            return true;
        };
        if let Some(why) = refused {
            let why = format!("a shim refuses the new instance its share of the clients: {why}");
            self.progress.print_line(&format!("     {why}"));
            self.progress.print_detail(
                "give the new manifest a shim of this berth, or upgrade without --judge",
            );
            self.machine.record_judge_result(JudgeResult::GoBack(why));
            self.judging = None;
            return true;
        }
        let emulation = self.state.emulated.as_ref().map(|emulated| Emulation {
            release: emulated.release.clone(),
            wanted: slot == Slot::Temporary,
        });
        let judging = || Judging::new(options, &self.context.pod.shim.client(client), emulation);
        self.judging.get_or_insert_with(judging).is_due()
    }

    /// Tells the shims the new instance's share of the clients: none before judging, everything
    /// afterwards, and none on the way back.
    async fn announce_share(&mut self, details: &NodeDetails) -> Result<(), String> {
        let Some(shares) = &mut self.shares else {
            return Ok(());
        };
        let permille = self.judging.as_ref().map_or(0, Judging::permille);
        let Position { step, target, .. } = self.state.position;
        let emulated = self.state.emulated.is_some();
        let (slot, permille) = match step {
            Step::StartTemporary | Step::SettleTemporary | Step::Withdraw => (Slot::Temporary, 0),
            Step::JudgeTemporary => (Slot::Temporary, permille),
            Step::StopOld => (Slot::Temporary, ALL),
            Step::StartCanonical if emulated => (Slot::Canonical, 0),
            Step::SettleCanonical | Step::JudgeCanonical if emulated && target == Version::New => {
                (Slot::Canonical, permille)
            }
            Step::StopTemporary if emulated && target == Version::New => (Slot::Canonical, ALL),
            _ => return Ok(()),
        };
        shares.keep(slot, permille, details).await
    }

    /// While the new manifest's pod starts, checks whether the kubelet fails to get an image.
    async fn ask_kubelet(&mut self, seen: &mut NodeObservation) {
        let instance = match self.state.position.step {
            Step::StartTemporary => &mut seen.temporary,
            Step::StartCanonical => &mut seen.canonical,
            _ => return,
        };
        if instance.in_group {
            return;
        }
        if self
            .asked_kubelet
            .is_none_or(|asked| asked.elapsed() >= JOURNAL_INTERVAL)
        {
            let pod = self.logged_pod(self.state.position.step.watched());
            self.find_kubelet_trouble = find_kubelet_trouble(&pod, self.entered).await;
            self.asked_kubelet = Some(Instant::now());
        }
        instance.not_started = self.find_kubelet_trouble.is_some();
    }

    fn file_and_text(&self, slot: Slot, version: Version) -> (&Path, &str) {
        match slot {
            Slot::Canonical => (&self.state.canonical, self.state.manifest_text(version)),
            Slot::Temporary => (&self.state.temporary, &self.state.temporary_text),
        }
    }

    async fn report_drain(&mut self, slot: Slot, drained: Result<(), String>) {
        self.machine.record_drain(drained.is_ok());
        match drained {
            Ok(()) => {
                self.progress.print_wait(&format!(
                    "the {} instance leaves the port",
                    self.instance_name(slot)
                ));
                self.observer.wait_for_change().await;
            }
            Err(why) if why != self.drain_trouble => {
                self.progress.print_line(&format!(
                    "     the {} instance cannot be drained: {why}",
                    self.instance_name(slot)
                ));
                self.drain_trouble = why;
            }
            Err(_) => self.observer.wait_for_change().await,
        }
    }

    fn instance_name(&self, slot: Slot) -> &'static str {
        match (slot, self.state.position.step) {
            (Slot::Temporary, _) => "temporary",
            (Slot::Canonical, Step::StopOld | Step::Withdraw) => "old",
            (Slot::Canonical, _) => "canonical",
        }
    }

    async fn finish(&mut self, outcome: UpgradeOutcome, details: &NodeDetails) -> DriveResult {
        self.leave_service(true).await;
        // The lock is released before the state is removed: an upgrade killed in between is resumed
        // here, and leaves no lock behind.
        if let Some(lock) = &self.context.lock {
            lock.release(&self.progress).await;
        }
        let before = self.store.old_manifest_path(&self.state);
        if outcome == UpgradeOutcome::RolledBack || self.state.is_restart() {
            remove_file(&before)?;
        }
        self.store.remove()?;
        let version = details
            .canonical
            .version
            .as_deref()
            .unwrap_or("kube-apiserver");
        let file = self.state.canonical.display();
        let why = self.state.position.why.as_deref().unwrap_or(INTERRUPTED);
        Ok(match outcome {
            UpgradeOutcome::Done => {
                self.progress.print_line(&format!(
                    "done: {version} serves, from {file}; nothing else is left"
                ));
                if !self.state.is_restart() {
                    self.progress
                        .print_detail(&format!("back again: berth upgrade {}", before.display()));
                }
                DriveOutcome::Done
            }
            UpgradeOutcome::RolledBack => {
                self.progress.print_line(&format!(
                    "rolled back: the old manifest serves, from {file}; nothing else is left"
                ));
                self.progress.print_detail(&format!("why: {why}"));
                if self.state.position.judged {
                    DriveOutcome::Judged
                } else {
                    DriveOutcome::RolledBack
                }
            }
            UpgradeOutcome::Emulating => {
                let release = self
                    .state
                    .emulated
                    .as_ref()
                    .map_or("", |emulated| &emulated.release);
                self.progress.print_line(&format!(
                    "not done: {version} serves and behaves as {release} (--{EMULATION}), from {file}; nothing else is left"
                ));
                self.progress.print_detail(&format!("why: {why}"));
                self.progress.print_detail(
                    "the same command with the new manifest tries the last step again, and judges it beside what serves now; from \
                     here berth promises no way back to the old manifest",
                );
                DriveOutcome::Judged
            }
        })
    }

    /// Removes this upgrade's slice from the Service. If `waits`, the removal follows when
    /// kube-apiserver itself names the node, or after a time limit.
    async fn leave_service(&mut self, waits: bool) {
        let Some(mut service) = self.service.take() else {
            return;
        };
        if waits {
            self.progress
                .print_wait("waiting until kube-apiserver names the node in the Service kubernetes (at most 11 s)");
            service.hand_back().await;
        }
        self.progress
            .print_wait("removing this upgrade's EndpointSlice (at most 5 s)");
        if let Err(slice) = service.end().await {
            self.progress.print_line(&format!(
                "warning: the EndpointSlice {slice} may still be in the Service kubernetes"
            ));
            self.progress.print_detail(&format!(
                "remove it: kubectl delete endpointslice --namespace default {slice}"
            ));
        }
    }

    fn warn_unkept(&mut self, trouble: Option<String>) {
        let Some(why) = trouble else {
            self.unkept = None;
            return;
        };
        let since = *self.unkept.get_or_insert_with(Instant::now);
        if since.elapsed() >= WARN_UNKEPT_AFTER && !std::mem::replace(&mut self.warned_unkept, true)
        {
            self.progress.print_line(&format!(
                "warning: the Service kubernetes cannot be kept: {why}"
            ));
            self.progress.print_detail(
                "it may be without this node for up to 10 s whenever an instance stops; let the user of --kubeconfig get, list, \
                 create, patch and delete EndpointSlices in the namespace default, and see that its server answers",
            );
        }
    }

    /// Handles a signal. Returns true if the upgrade continues.
    fn interrupt(&mut self) -> bool {
        if self.signals.count > 1 {
            self.progress.print_line(
                "a second signal: stopped where it is; the same command goes on from here",
            );
            return false;
        }
        self.machine.interrupt();
        let what = match self.state.position.step {
            Step::JudgeCanonical => {
                "interrupted: going back to the instance that emulates the old release, and serves"
            }
            _ if self.machine.interrupt_leads_back() => {
                "interrupted: going back to the old manifest, whose instance serves"
            }
            _ => {
                "interrupted: the old instance has already left, so the upgrade goes on: that is the shortest way to a whole node"
            }
        };
        self.progress
            .print_line(&format!("{what} (a second signal stops at once)"));
        true
    }

    fn announce(&self) {
        let Position { step, target, .. } = self.state.position;
        let (number, text) = describe_step(
            step,
            target,
            &self.state,
            &self.context.limits,
            &self.context.pod,
        );
        let number = number
            .map(|number| format!("{number}/{STEPS}  "))
            .unwrap_or_default();
        self.progress.print_line(&format!("{number}{text}"));
    }

    fn describe_wait(&self, seen: &NodeObservation, details: &NodeDetails) -> String {
        let step = self.state.position.step;
        let slot = step.watched();
        let (watched, stopped) = (details.of_slot(slot), details.of_slot(slot.other()));
        match step {
            Step::Verify => "checking which instances serve".into(),
            Step::StopOld | Step::StopTemporary | Step::Withdraw => match stopped.open {
                0 => "waiting for the instance to end".into(),
                1 => "waiting for the instance to end: 1 connection is open".into(),
                open => format!("waiting for the instance to end: {open} connections are open"),
            },
            _ if !seen.instance(slot).alive => {
                "waiting for the kubelet to start the instance".into()
            }
            _ if !watched.reason.is_empty() => format!("not ready: {}", watched.reason),
            Step::StartTemporary | Step::StartCanonical => {
                "waiting for the instance to get ready".into()
            }
            Step::SettleTemporary | Step::SettleCanonical => "ready".into(),
            Step::JudgeTemporary | Step::JudgeCanonical => "ready, and being judged".into(),
        }
    }

    fn logged_pod(&self, slot: Slot) -> LoggedPod<'_> {
        let ApiserverPod {
            namespace, name, ..
        } = &self.context.pod;
        match slot {
            Slot::Temporary => LoggedPod::Uid(self.state.uid.as_str()),
            Slot::Canonical => LoggedPod::Name(namespace, name),
        }
    }

    /// Prints the reason of a failure and the last lines of the container's log.
    fn print_failure(&self, why: &str, step: Step, details: &NodeDetails) {
        let ApiserverPod {
            container, image, ..
        } = &self.context.pod;
        let slot = step.watched();
        let (reason, pod) = (&details.of_slot(slot).reason, self.logged_pod(slot));
        let instance = match slot {
            Slot::Temporary => "the new instance",
            Slot::Canonical => "the instance of the canonical file",
        };
        self.progress
            .print_line(&format!("failed: {instance}: {why}"));
        if let Some(trouble) = &self.find_kubelet_trouble {
            self.progress
                .print_detail(&format!("the kubelet: {trouble}"));
        }
        if !reason.is_empty() {
            self.progress.print_detail(&format!("its shim: {reason}"));
        }
        let directory = &self.context.pod_logs;
        let last = |container: &str| logs::find_last_lines(directory, &pod, container);
        let mut found = last(container);
        if found.is_none() {
            let directory = directory.display();
            self.progress.print_detail(&format!(
                "its container {container} wrote no log in {directory}: see journalctl -u kubelet (is {image} there?)"
            ));
            found = last(SHIM).or_else(|| last(INSTALL));
        }
        if let Some((path, lines)) = found {
            self.progress
                .print_detail(&format!("last lines of {}:", path.display()));
            lines
                .iter()
                .for_each(|line| self.progress.print_detail(&format!("  {line}")));
        }
    }
}

/// Number of steps, including the check at the beginning.
pub const STEPS: usize = 8;

/// Asks a shim to leave the group.
async fn ask_to_leave(socket: Option<&Path>) -> Result<(), String> {
    let Some(socket) = socket else {
        return Err("it has no shim of its own".into());
    };
    match ipc::ask_shim(socket, Ask::Drain, LEAVE_TIMEOUT).await {
        Ok(Reply::Done) => Ok(()),
        Ok(reply) => Err(format!("unexpected reply of its shim: {reply:?}")),
        Err(error) => Err(format!("its shim cannot be asked: {error}")),
    }
}

/// Signals from the operator. SIGHUP from a closed terminal is ignored.
struct OperatorSignals {
    signals: Signals,
    _hangup: Signals,
    count: u32,
}

impl OperatorSignals {
    fn new() -> io::Result<Self> {
        let signals = Signals::new(&[Signal::SIGINT, Signal::SIGTERM])?;
        Ok(Self {
            signals,
            _hangup: Signals::new(&[Signal::SIGHUP])?,
            count: 0,
        })
    }

    async fn next(&mut self) -> bool {
        self.signals.next().await;
        self.count += 1;
        true
    }
}

/// The plan as text, for `--dry-run`.
pub fn describe_plan(state: &State, limits: &Limits, pod: &ApiserverPod) -> Vec<String> {
    let text = |step| describe_step(step, Version::New, state, limits, pod).1;
    let judged = |step, is_judged| {
        if is_judged {
            format!("; {}", text(step))
        } else {
            String::new()
        }
    };
    vec![
        "check the manifest and the node".into(),
        text(Step::StartTemporary),
        text(Step::SettleTemporary) + &judged(Step::JudgeTemporary, state.judge.is_some()),
        text(Step::StopOld),
        text(Step::StartCanonical),
        text(Step::SettleCanonical) + &judged(Step::JudgeCanonical, state.emulated.is_some()),
        text(Step::StopTemporary),
        text(Step::Verify),
    ]
}

/// The number of a step on the way to the new manifest, and its description.
fn describe_step(
    step: Step,
    target: Version,
    state: &State,
    limits: &Limits,
    pod: &ApiserverPod,
) -> (Option<usize>, String) {
    let duration = |duration: Duration| humantime::format_duration(duration).to_string();
    let (ready, settle, stop) = (
        duration(limits.ready),
        duration(limits.settle),
        duration(limits.stop),
    );
    let (canonical, temporary) = (state.canonical.display(), state.temporary.display());
    let manifest = if state.is_restart() {
        "same".to_owned()
    } else {
        target.to_string()
    };
    let judged = |beside: &str| {
        let plan = state
            .judge
            .as_ref()
            .map(|judge| judge.plan.clone())
            .unwrap_or_default();
        let parts: Vec<_> = plan
            .parts
            .iter()
            .map(|part| format_percent(*part))
            .collect();
        format!(
            "it is judged beside {beside}: {} of new connections for {} each, then all for {}; if the verdict is bad, it is removed",
            parts.join(", "),
            duration(plan.step),
            duration(plan.bake)
        )
    };
    let (number, text) = match step {
        Step::StartTemporary => {
            let text = format!(
                "write {temporary}: the {manifest} manifest as pod {PREFIX}{}; ready and joined within {ready}, else it \
                 is removed and nothing else has changed",
                pod.name
            );
            (2, text)
        }
        Step::SettleTemporary => (
            3,
            format!("watch it for {settle}; if it gets unready or starts again, it is removed"),
        ),
        Step::JudgeTemporary => (3, judged("the old instance")),
        Step::StopOld => (
            4,
            format!(
                "drain the old instance, remove {canonical}, wait for its last stream and its end (at most {stop})"
            ),
        ),
        Step::StartCanonical => {
            let else_back = if target == Version::Old {
                ""
            } else {
                ", else the old manifest comes back there"
            };
            (
                5,
                format!(
                    "write {canonical} with the {manifest} manifest; ready and joined within {ready}{else_back}"
                ),
            )
        }
        Step::SettleCanonical => (6, format!("watch it for {settle}")),
        Step::JudgeCanonical => (
            6,
            judged("the temporary instance, which behaves as the old release"),
        ),
        Step::StopTemporary => (
            7,
            format!(
                "drain the temporary instance, remove {temporary}, wait for its last stream and its end (at most {stop})"
            ),
        ),
        Step::Verify => {
            let text = format!(
                "check that exactly one instance serves, the pod of {canonical}, and that this file is the {manifest} manifest, byte for byte"
            );
            (STEPS, text)
        }
        Step::Withdraw => {
            return (
                None,
                format!("back: the old instance serves on, and {temporary} is removed"),
            );
        }
    };
    (Some(number), text)
}
