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
use super::pod::{ApiserverPod, EMULATION_FLAG, TEMPORARY_PREFIX};
use super::progress::Progress;
use super::state::{State, Store, remove_file};
use berth_cluster::Client;
use berth_doctor::service::{Demand, Keeping, Purpose, ServiceKeeper};
use berth_manifest::file::{replace_file, replace_or_create_file, sweep_temporary_files_of};
use berth_manifest::names::{INSTALL_CONTAINER, SHIM_CONTAINER};
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

/// How long the upgrade may fail to keep this node in the Service `kubernetes` before a warning is
/// printed. While an instance stops, the API may be away.
const WARN_UNKEPT_AFTER: Duration = Duration::from_secs(10);

/// Everything that an upgrade needs besides its state on disk: the pod, limits, directories and the
/// cluster.
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
    /// A client of the cluster's API with an administrator's credentials.
    pub client: Option<Client>,
    /// The lock that keeps other nodes from being upgraded.
    pub lock: Option<Lock>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriveOutcome {
    /// The new version serves from `kube-apiserver.yaml`.
    Done,
    /// The old version serves.
    RolledBack,
    /// The upgrade went back after a bad verdict. The old version serves, or the new one serves and
    /// emulates the old release.
    Judged,
    /// The upgrade is neither done nor rolled back. The state is kept, and serving instances are
    /// left alone.
    Halted,
    /// A second signal stopped the upgrade. The state is kept, as after `Halted`.
    Stopped,
}

/// The outcome of the upgrade, or the error if a file cannot be read or written.
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
        service: service?.map(ServiceKeeper::start_keeping_slice),
        drain_trouble: String::new(),
        unkept: None,
        warned_unkept: false,
        entered: SystemTime::now(),
        kubelet_asked_at: None,
        kubelet_trouble: None,
        state,
        store,
        context,
        progress: progress.clone(),
    };
    let keep_lock = async {
        match &context.lock {
            Some(lock) => lock.keep_renewed(&progress).await,
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
    /// The judging of the new instance. `None` in a step that does not judge.
    judging: Option<Judging>,
    observer: NodeObserver,
    signals: OperatorSignals,
    service: Option<Keeping>,
    /// Why a shim did not accept the last request to leave its port.
    drain_trouble: String,
    /// Since when the upgrade fails to keep this node in the Service `kubernetes`, and whether it
    /// has warned of that.
    unkept: Option<Instant>,
    warned_unkept: bool,
    entered: SystemTime,
    /// When the kubelet's journal was last read.
    kubelet_asked_at: Option<Instant>,
    /// Why the kubelet cannot start this step's pod.
    kubelet_trouble: Option<String>,
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
            sweep_temporary_files_of(path);
        }
        // The path is printed for the operator. The names of kept manifests sort by time, and if
        // the clock was set back, the last name may belong to another upgrade.
        let before = self.store.old_manifest_path(&self.state);
        replace_file(&before, &self.state.old)?;
        self.progress
            .print_detail(&format!("the old manifest is kept: {}", before.display()));
        self.print_step();
        loop {
            let (mut seen, details) = self.observer.sample(&self.state).await?;
            if let Some(service) = &self.service {
                let serves = seen.canonical.may_serve() || seen.temporary.may_serve();
                service.set_demand(if serves {
                    Demand::Serving
                } else {
                    Demand::NotServing
                });
                let trouble = service.state().err().filter(|_| serves);
                self.warn_of_unkept_service(trouble);
            }
            self.update_kubelet_trouble(&mut seen).await;
            let refused = self.announce_share(&details).await.err();
            match self.machine.next(&seen, self.progress.elapsed()) {
                Action::Judge(slot) if self.begin_judging(slot, refused.as_deref()) => {
                    let Some(judging) = &mut self.judging else {
                        continue;
                    };
                    let both =
                        [slot.opposite_slot(), slot].map(|slot| details.details_of_slot(slot));
                    tokio::select! {
                        judged = judging.sample_and_judge(both, &self.progress) => {
                            judged.into_iter().for_each(|judged| self.machine.record_judge_result(judged));
                        }
                        _ = self.signals.next() => {
                            if !self.handle_signal() {
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
                    if signalled && !self.handle_signal() {
                        return Ok(DriveOutcome::Stopped);
                    }
                }
                Action::Entered => {
                    let first = self.state.position.why.is_none();
                    let before = std::mem::replace(
                        &mut self.state.position,
                        self.machine.position().clone(),
                    );
                    // The failure is reported before the position is saved. If the upgrade is
                    // killed in between, the resumed run reports the failure again.
                    if let (true, Some(why)) = (first, self.state.position.why.as_deref())
                        && why != INTERRUPTED
                        && !self.state.position.judged
                    {
                        self.print_failure(why, before.step, &details);
                    }
                    self.store.save(&self.state)?;
                    self.entered = SystemTime::now();
                    (self.kubelet_trouble, self.judging) = (None, None);
                    self.print_step();
                }
                Action::Place(slot, version) => {
                    let (path, text) = self.file_and_text(slot, version);
                    let had = self.state.access.filter(|_| slot == Slot::Canonical);
                    replace_or_create_file(path, text, had)?;
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
                    drained = ask_to_leave(details.details_of_slot(slot).socket.as_deref()) => self.report_drain(slot, drained).await,
                    // A signal ends the wait for the shim's reply. The next sample of the node
                    // shows whether the shim has got the request.
                    _ = self.signals.next() => {
                        if !self.handle_signal() {
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

    /// Returns true if it is time to look at both instances. Also returns true if there is nothing
    /// to compare, because there is no kubeconfig or because a shim refuses the new instance's
    /// share. The result is recorded then.
    fn begin_judging(&mut self, slot: Slot, refused: Option<&str>) -> bool {
        let (Some(options), Some(client)) = (&self.state.judge, &self.context.client) else {
            let why =
                "without --kubeconfig the instances cannot be asked for their metrics".to_owned();
            let undecided = self.state.judge.as_ref().map(|judge| judge.undecided);
            self.progress.print_line(&format!("     not judged: {why}"));
            self.machine
                .record_judge_result(undecided.unwrap_or_default().into_judge_result(why, false));
            return true;
        };
        if let Some(why) = refused {
            let why = format!("a shim refuses the new instance its share of the clients: {why}");
            self.progress.print_line(&format!("     {why}"));
            self.progress.print_detail(
                "put a shim of this version of berth into the new manifest, or upgrade without --judge",
            );
            self.machine.record_judge_result(JudgeResult::GoBack(why));
            self.judging = None;
            return true;
        }
        let emulation = self.state.emulated.as_ref().map(|emulated| Emulation {
            release: emulated.release.clone(),
            wanted: slot == Slot::Temporary,
        });
        let judging = || {
            Judging::new(
                options,
                &self.context.pod.shim.trusting_client(client),
                emulation,
            )
        };
        self.judging.get_or_insert_with(judging).is_due()
    }

    /// Sends the new instance's share of the clients to the shims: no clients before judging, all
    /// clients afterwards, and no clients on the way back.
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
        shares.send_share_if_due(slot, permille, details).await
    }

    /// While the new manifest's pod starts, checks whether the kubelet fails to get an image.
    async fn update_kubelet_trouble(&mut self, seen: &mut NodeObservation) {
        let instance = match self.state.position.step {
            Step::StartTemporary => &mut seen.temporary,
            Step::StartCanonical => &mut seen.canonical,
            _ => return,
        };
        if instance.in_group {
            return;
        }
        if self
            .kubelet_asked_at
            .is_none_or(|asked| asked.elapsed() >= JOURNAL_INTERVAL)
        {
            let pod = self.logged_pod(self.state.position.step.watched_slot());
            self.kubelet_trouble = find_kubelet_trouble(&pod, self.entered).await;
            self.kubelet_asked_at = Some(Instant::now());
        }
        instance.not_started = self.kubelet_trouble.is_some();
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
                    "done: {version} serves, from {file}; no temporary instance is left"
                ));
                if !self.state.is_restart() {
                    self.progress
                        .print_detail(&format!("to go back: berth upgrade {}", before.display()));
                }
                DriveOutcome::Done
            }
            UpgradeOutcome::RolledBack => {
                self.progress.print_line(&format!(
                    "rolled back: the old manifest serves, from {file}; no temporary instance is left"
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
                    "not done: {version} serves and behaves as {release} (--{EMULATION_FLAG}), from {file}; no temporary instance is left"
                ));
                self.progress.print_detail(&format!("why: {why}"));
                self.progress.print_detail(
                    "the same command with the new manifest tries the last step again, and judges the new instance beside the instance that serves now; \
                     berth no longer promises a way back to the old manifest",
                );
                DriveOutcome::Judged
            }
        })
    }

    /// Removes this upgrade's EndpointSlice from the Service `kubernetes`. If `waits` is true, the
    /// slice stays until kube-apiserver itself names the node, or until a time limit.
    async fn leave_service(&mut self, waits: bool) {
        let Some(mut service) = self.service.take() else {
            return;
        };
        if waits {
            self.progress
                .print_wait("waiting until kube-apiserver names the node in the Service kubernetes (at most 11 s)");
            service.remove_slice_when_reconciled().await;
        }
        self.progress
            .print_wait("removing this upgrade's EndpointSlice (at most 5 s)");
        if let Err(slice) = service.stop_keeping_slice().await {
            self.progress.print_line(&format!(
                "warning: the EndpointSlice {slice} may still be in the Service kubernetes"
            ));
            self.progress.print_detail(&format!(
                "remove it: kubectl delete endpointslice --namespace default {slice}"
            ));
        }
    }

    fn warn_of_unkept_service(&mut self, trouble: Option<String>) {
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
                "the Service may be without this node for up to 10 s whenever an instance stops; let the user of --kubeconfig get, list, \
                 create, patch and delete EndpointSlices in the namespace default, and check that the server of --kubeconfig answers",
            );
        }
    }

    /// Handles a signal. Returns true if the upgrade continues.
    fn handle_signal(&mut self) -> bool {
        if self.signals.count > 1 {
            self.progress.print_line(
                "a second signal: the upgrade stops here; the same command goes on from here",
            );
            return false;
        }
        self.machine.interrupt();
        let what = match self.state.position.step {
            Step::JudgeCanonical => {
                "interrupted: going back to the serving instance, which emulates the old release"
            }
            _ if self.machine.interrupt_leads_back() => {
                "interrupted: going back to the old manifest; the old instance serves"
            }
            _ => {
                "interrupted: the old instance has already left the port, so the upgrade goes on: going back would take longer"
            }
        };
        self.progress.print_line(&format!(
            "{what} (a second signal stops the upgrade at once)"
        ));
        true
    }

    fn print_step(&self) {
        let Position { step, target, .. } = self.state.position;
        let (number, text) = describe_step(
            step,
            target,
            &self.state,
            &self.context.limits,
            &self.context.pod,
        );
        let number = number
            .map(|number| format!("{number}/{STEP_COUNT}  "))
            .unwrap_or_default();
        self.progress.print_line(&format!("{number}{text}"));
    }

    fn describe_wait(&self, seen: &NodeObservation, details: &NodeDetails) -> String {
        let step = self.state.position.step;
        let slot = step.watched_slot();
        let (watched, stopped) = (
            details.details_of_slot(slot),
            details.details_of_slot(slot.opposite_slot()),
        );
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
        let slot = step.watched_slot();
        let (reason, pod) = (&details.details_of_slot(slot).reason, self.logged_pod(slot));
        let instance = match slot {
            Slot::Temporary => "the new instance",
            Slot::Canonical => "the instance of the canonical file",
        };
        self.progress
            .print_line(&format!("failed: {instance}: {why}"));
        if let Some(trouble) = &self.kubelet_trouble {
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
                "the instance's container {container} wrote no log in {directory}: see journalctl -u kubelet (is the image {image} on this node?)"
            ));
            found = last(SHIM_CONTAINER).or_else(|| last(INSTALL_CONTAINER));
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
pub const STEP_COUNT: usize = 8;

/// Asks a shim to stop listening and to leave new connections to its siblings.
async fn ask_to_leave(socket: Option<&Path>) -> Result<(), String> {
    let Some(socket) = socket else {
        return Err("the instance has no shim of its own".into());
    };
    match ipc::ask_shim(socket, Ask::Drain, LEAVE_TIMEOUT).await {
        Ok(Reply::Done) => Ok(()),
        Ok(reply) => Err(format!(
            "unexpected reply of the instance's shim: {reply:?}"
        )),
        Err(error) => Err(format!("the instance's shim cannot be asked: {error}")),
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
            "judge the new instance beside {beside}: {} of new connections for {} each, then all for {}; if the verdict is bad, the new instance is removed",
            parts.join(", "),
            duration(plan.step),
            duration(plan.bake)
        )
    };
    let (number, text) = match step {
        Step::StartTemporary => {
            let text = format!(
                "write {temporary}: the {manifest} manifest as pod {TEMPORARY_PREFIX}{}; the instance must be ready and joined within {ready}, else the instance is removed and nothing else has changed",
                pod.name
            );
            (2, text)
        }
        Step::SettleTemporary => (
            3,
            format!(
                "watch the temporary instance for {settle}; if the instance gets unready or starts again, the instance is removed"
            ),
        ),
        Step::JudgeTemporary => (3, judged("the old instance")),
        Step::StopOld => (
            4,
            format!(
                "drain the old instance, remove {canonical}, wait for the last stream and the end of the instance (at most {stop})"
            ),
        ),
        Step::StartCanonical => {
            let else_back = if target == Version::Old {
                ""
            } else {
                ", else the old manifest is restored"
            };
            (
                5,
                format!(
                    "write {canonical} with the {manifest} manifest; the instance must be ready and joined within {ready}{else_back}"
                ),
            )
        }
        Step::SettleCanonical => (6, format!("watch the instance of {canonical} for {settle}")),
        Step::JudgeCanonical => (
            6,
            judged("the temporary instance, which behaves as the old release"),
        ),
        Step::StopTemporary => (
            7,
            format!(
                "drain the temporary instance, remove {temporary}, wait for the last stream and the end of the instance (at most {stop})"
            ),
        ),
        Step::Verify => {
            let text = format!(
                "check that exactly one instance serves, the pod of {canonical}, and that this file is the {manifest} manifest, byte for byte"
            );
            (STEP_COUNT, text)
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
