//! The steps of an upgrade: from a position and an observation to the next action. Pure: time is an
//! argument.
//!
//! Only the [`Position`] is kept on disk, and each new position is written before any action of its
//! step. Completed actions are not stored but observed: each step compares the files and the
//! instances with its goal and does what is missing. A run that was killed at any point therefore
//! continues as if it had only been slow, and repeating an action changes nothing.
//!
//! If the new version is judged, a further step follows once the temporary instance has settled.
//! That step gives the temporary instance clients beside the old one, and the old one is stopped
//! only if the verdict is not bad. If the temporary instance emulates the old release, the
//! canonical instance, which does not emulate, is judged beside the temporary one in the same way.
//! The way back from there leads to the emulating version, because the old version may not be able
//! to read objects that were written without emulation.
//!
//! Two rules hold in every step. Neither of the two manifest files is removed while the instance of
//! the other one does not serve. A file with contents that berth did not write is never touched.

mod terms;

use super::progress::format_seconds;
use std::task::Poll;
use std::time::Duration;
pub use terms::{
    Action, Content, Course, InstanceObservation, JudgeResult, Limits, NodeObservation, Position,
    Slot, Step, UpgradeOutcome, Version,
};

/// An instance that served counts as lost when it has not served for this long. A single slow
/// answer is no loss.
const LOST_AFTER: Duration = Duration::from_secs(3);

/// How long a shim may take to accept the request to leave its port, and then as long again to
/// leave. After that the pod is stopped anyway, since SIGTERM makes the shim leave, too.
pub const LEAVE_TIMEOUT: Duration = Duration::from_secs(30);

/// An instance is given up after its process has ended this often. The kubelet restarts it at ever
/// longer intervals.
const MAX_ENDS: u32 = 3;

/// After this many failed drains in a row, the pod is stopped without a drain.
const MAX_FAILED_DRAINS: u32 = 3;

/// Why an upgrade goes back after a signal.
pub const INTERRUPTED: &str = "interrupted by a signal";

const TEMPORARY_REMOVED: &str = "the temporary file was removed";

#[derive(Debug, Clone, Default)]
pub struct Machine {
    position: Position,
    limits: Limits,
    course: Course,
    interrupted: bool,
    /// When this step's watch began: at its first observation of the node, or when the watched
    /// instance began to serve in this run.
    since: Option<StepStart>,
    /// True if the instance that this step watches has served during this run of berth. A run that
    /// resumes a step cannot know about earlier runs: after a reboot every pod starts again.
    joined: bool,
    /// Since when the watched instance does not serve any more.
    lost: Option<Duration>,
    /// Since when a pod runs although its manifest file is removed.
    stopping: Option<Duration>,
    /// True if the shim of the instance to be stopped has accepted a drain in this run. A run that
    /// resumes an upgrade does not know of earlier drains, and waits for the other instance for the
    /// whole ready timeout. A shim that a killed run has drained leaves within two leases. That is
    /// shorter than the default of --ready-timeout, so the machine does not go back to the drained
    /// instance.
    drained: bool,
    drains_failed: u32,
    /// The result of judging in this step.
    judged: Option<JudgeResult>,
}

/// The time when the watch of a step began, and the state of the node at that time.
#[derive(Debug, Clone, Copy)]
struct StepStart {
    at: Duration,
    seen: NodeObservation,
}

impl Machine {
    /// Continues from a position on disk. A run that was killed may have left the position.
    pub fn new(position: Position, limits: Limits, course: Course) -> Self {
        Self {
            position,
            limits,
            course,
            ..Self::default()
        }
    }

    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Records that the operator wants the old version back. As long as the old instance serves,
    /// the machine goes back. Later the shortest way to a node that is whole is forward.
    pub fn interrupt(&mut self) {
        self.interrupted = true;
    }

    /// True if an interrupt at this point leads back.
    pub fn interrupt_leads_back(&self) -> bool {
        self.can_withdraw()
            || matches!(self.position.step, Step::JudgeCanonical | Step::Withdraw)
            || self.position.target != Version::New
    }

    /// True while the old instance serves and none of its parts has been removed.
    fn can_withdraw(&self) -> bool {
        matches!(
            self.position.step,
            Step::StartTemporary | Step::SettleTemporary | Step::JudgeTemporary
        )
    }

    /// Records the result of an [`Action::Drain`]. `asked` is true if the shim accepted the drain.
    pub fn record_drain(&mut self, asked: bool) {
        self.drained |= asked;
        self.drains_failed = if asked { 0 } else { self.drains_failed + 1 };
    }

    /// Records the result of an [`Action::Judge`].
    pub fn record_judge_result(&mut self, judged: JudgeResult) {
        self.judged = Some(judged);
    }

    pub fn next(&mut self, seen: &NodeObservation, now: Duration) -> Action {
        let since = *self.since.get_or_insert(StepStart {
            at: now,
            seen: *seen,
        });
        let step = StepView {
            seen,
            now,
            since,
            limits: self.limits,
            same: self.course.same,
            target: self.position.target,
        };
        if let Some(path) = step.foreign_file() {
            return Action::Halt(format!(
                "the {path} file holds none of this upgrade's manifests, so berth leaves the file alone"
            ));
        }
        if self.interrupted && self.can_withdraw() {
            return self.withdraw_temporary(INTERRUPTED);
        }
        if let Some(wrong) = step.find_changed_content(self.position.step) {
            return Action::Halt(format!("the canonical file does not hold {wrong}"));
        }
        match self.position.step {
            Step::StartTemporary => self.start_temporary(&step),
            Step::SettleTemporary => {
                let next = if self.course.judged {
                    Step::JudgeTemporary
                } else {
                    Step::StopOld
                };
                self.settle_instance(&step, Slot::Temporary, next)
            }
            Step::JudgeTemporary => self.judge_instance(&step, Slot::Temporary, Step::StopOld),
            Step::StopOld => self.stop_instance(&step, Slot::Canonical, Step::StartCanonical),
            Step::StartCanonical => self.start_canonical(&step),
            Step::SettleCanonical => {
                let judged =
                    self.course.emulated && step.target == Version::New && !self.interrupted;
                self.settle_instance(
                    &step,
                    Slot::Canonical,
                    if judged {
                        Step::JudgeCanonical
                    } else {
                        Step::StopTemporary
                    },
                )
            }
            Step::JudgeCanonical => {
                self.judge_instance(&step, Slot::Canonical, Step::StopTemporary)
            }
            Step::StopTemporary => self.stop_instance(&step, Slot::Temporary, Step::Verify),
            Step::Verify => step.verify_result(),
            Step::Withdraw => self.continue_withdrawal(&step),
        }
    }

    fn enter_step(&mut self, step: Step) -> Action {
        self.position.step = step;
        // A step that watches an instance is entered only after the step before has seen this
        // instance serve.
        (self.since, self.joined, self.lost) = (None, true, None);
        (self.stopping, self.drained, self.drains_failed, self.judged) = (None, false, 0, None);
        Action::Entered
    }

    fn turn_back(&mut self, version: Version, step: Step, why: &str) -> Action {
        self.position.target = version;
        self.position.why.get_or_insert_with(|| why.to_owned());
        self.enter_step(step)
    }

    fn withdraw_temporary(&mut self, why: &str) -> Action {
        self.turn_back(Version::Old, Step::Withdraw, why)
    }

    fn start_temporary(&mut self, view: &StepView<'_>) -> Action {
        if view.seen.temporary_file == Content::Absent {
            return if view.seen.temporary.alive {
                self.wait_for_pod_end(view)
            } else {
                let version = if self.course.emulated {
                    Version::Emulated
                } else {
                    Version::New
                };
                Action::Place(Slot::Temporary, version)
            };
        }
        self.advance_or_turn_back(
            Slot::Temporary,
            Step::SettleTemporary,
            view.poll_ready(Slot::Temporary),
        )
    }

    /// Enters the next step, goes back, or waits. `come` says whether the awaited instance serves.
    fn advance_or_turn_back(
        &mut self,
        slot: Slot,
        next: Step,
        come: Poll<Result<(), String>>,
    ) -> Action {
        match come {
            Poll::Ready(Ok(())) => self.enter_step(next),
            Poll::Ready(Err(why)) => self.reject_instance(slot, why),
            Poll::Pending => Action::Wait,
        }
    }

    /// Watches the instance of `slot` until it has been ready for the settle time.
    fn settle_instance(&mut self, view: &StepView<'_>, slot: Slot, next: Step) -> Action {
        let settled = match view.check_temporary_file(slot) {
            Some(why) => Poll::Ready(Err(why)),
            None => self.poll_settled(view, slot),
        };
        self.advance_or_turn_back(slot, next, settled)
    }

    /// Gives clients to the instance of `slot`, and judges it beside the other instance.
    fn judge_instance(&mut self, view: &StepView<'_>, slot: Slot, next: Step) -> Action {
        let interrupted = self.interrupted.then(|| INTERRUPTED.into());
        if let Some(why) = view
            .check_temporary_file(slot)
            .or_else(|| self.find_service_loss(view, slot))
            .or(interrupted)
        {
            return self.reject_instance(slot, why);
        }
        match self.judged.take() {
            None if self.joined => Action::Judge(slot),
            None => Action::Wait,
            Some(JudgeResult::GoOn) => self.enter_step(next),
            Some(JudgeResult::GoBack(why)) => {
                self.position.judged = true;
                self.reject_instance(slot, why)
            }
            Some(JudgeResult::Stop(why)) => Action::Halt(why),
        }
    }

    fn reject_instance(&mut self, slot: Slot, why: String) -> Action {
        match slot {
            Slot::Temporary => self.withdraw_temporary(&why),
            Slot::Canonical => self.fail_canonical(why),
        }
    }

    /// Stops the instance of `slot`. The other instance has to serve meanwhile.
    fn stop_instance(&mut self, view: &StepView<'_>, slot: Slot, next: Step) -> Action {
        let [goes, stays] = [slot, slot.opposite_slot()].map(|slot| view.seen.instance(slot));
        if view.seen.file(slot) == Content::Absent {
            return if goes.alive {
                self.wait_for_pod_end(view)
            } else {
                self.enter_step(next)
            };
        }
        let lost = self.find_service_loss(view, slot.opposite_slot());
        if stays.in_group {
            if slot == Slot::Canonical
                && goes.may_serve()
                && self.drains_failed >= MAX_FAILED_DRAINS
                && !self.drained
            {
                return self.withdraw_temporary("the old instance's shim cannot be drained");
            }
            return self.remove_file(view, slot);
        }
        match lost {
            // A drained shim does not come back, so from there the only way is forward.
            Some(why) if goes.in_group && !self.drained => {
                self.reject_instance(slot.opposite_slot(), why)
            }
            _ if self
                .lost
                .is_some_and(|since| view.now.saturating_sub(since) >= view.limits.ready) =>
            {
                Action::Halt(match slot {
                    Slot::Canonical => {
                        "the new instance is not ready any more, and the old one has left the port"
                            .into()
                    }
                    Slot::Temporary => "the canonical instance is not ready any more".into(),
                })
            }
            _ => Action::Wait,
        }
    }

    /// Stops an instance while the other one serves. Its shim is asked to leave first, if possible.
    /// Then the manifest file is removed.
    fn remove_file(&self, view: &StepView<'_>, slot: Slot) -> Action {
        let instance = view.seen.instance(slot);
        let waits = self.drains_failed < MAX_FAILED_DRAINS
            && !(self.drained && view.elapsed() >= LEAVE_TIMEOUT);
        if instance.may_serve() && instance.drains && waits {
            Action::Drain(slot)
        } else {
            Action::Remove(slot)
        }
    }

    fn start_canonical(&mut self, view: &StepView<'_>) -> Action {
        let NodeObservation {
            canonical,
            temporary,
            canonical_file,
            ..
        } = view.seen;
        if *canonical_file == Content::Absent {
            if canonical.alive {
                return self.wait_for_pod_end(view);
            }
            // The placed instance is watched from this moment. Earlier process ends in this slot do
            // not count.
            self.since = None;
            return Action::Place(Slot::Canonical, self.position.target);
        }
        if !view.canonical_file_holds(self.position.target) {
            // The failed pod goes first: the kubelet runs only one pod of a name.
            return match temporary.in_group {
                true => self.remove_file(view, Slot::Canonical),
                false if view.elapsed() < view.limits.ready => Action::Wait,
                false => Action::Halt("the temporary instance is not ready any more".into()),
            };
        }
        self.advance_or_turn_back(
            Slot::Canonical,
            Step::SettleCanonical,
            view.poll_ready(Slot::Canonical),
        )
    }

    /// Handles a canonical instance that does not serve or is bad, while the temporary one serves.
    fn fail_canonical(&mut self, why: String) -> Action {
        if self.position.target == Version::New && !self.course.same {
            // Without emulation the new version may have written objects that the old version
            // cannot read.
            let version = if self.course.emulated {
                Version::Emulated
            } else {
                Version::Old
            };
            self.turn_back(version, Step::StartCanonical, &why)
        } else {
            // The next run of the command waits for the instance again.
            self.enter_step(Step::StartCanonical);
            Action::Halt(why)
        }
    }

    fn continue_withdrawal(&mut self, view: &StepView<'_>) -> Action {
        let NodeObservation {
            canonical,
            temporary,
            temporary_file,
            ..
        } = view.seen;
        let is_removed = *temporary_file == Content::Absent;
        match (is_removed, canonical.in_group) {
            (true, _) if temporary.alive => self.wait_for_pod_end(view),
            (true, true) => Action::Finish(UpgradeOutcome::RolledBack),
            (false, true) => self.remove_file(view, Slot::Temporary),
            // After a reboot both pods start, and the instance that is to be removed may be ready
            // first.
            (_, false) if view.elapsed() < view.limits.ready => Action::Wait,
            (_, false) => Action::Halt("the old instance is not ready".into()),
        }
    }

    fn poll_settled(&mut self, view: &StepView<'_>, slot: Slot) -> Poll<Result<(), String>> {
        let instance = view.seen.instance(slot);
        let before = view.since.seen.instance(slot);
        let another = instance.process.is_some()
            && before.process.is_some()
            && instance.process != before.process;
        if self.joined && another {
            return Poll::Ready(Err(format!(
                "the instance started again within {}",
                format_seconds(view.limits.settle)
            )));
        }
        let over = self.joined && instance.in_group && view.elapsed() >= view.limits.settle;
        match self.find_service_loss(view, slot) {
            Some(why) if self.joined => Poll::Ready(Err(format!(
                "{why} {} after the instance was ready",
                format_seconds(view.elapsed())
            ))),
            Some(why) => Poll::Ready(Err(why)),
            None if over => Poll::Ready(Ok(())),
            None => Poll::Pending,
        }
    }

    /// Returns why the instance that the step watches does not serve any more. An instance that has
    /// not served in this run may still be starting, until the ready timeout. Its watch begins when
    /// it serves.
    fn find_service_loss(&mut self, view: &StepView<'_>, slot: Slot) -> Option<String> {
        let instance = view.seen.instance(slot);
        if instance.in_group {
            self.lost = None;
            if !self.joined {
                (self.joined, self.since) = (
                    true,
                    Some(StepStart {
                        at: view.now,
                        seen: *view.seen,
                    }),
                );
            }
            return None;
        }
        if instance.silent {
            self.lost = None;
            return None;
        }
        let since = *self.lost.get_or_insert(view.now);
        if !self.joined {
            return match view.poll_ready(slot) {
                Poll::Ready(Err(why)) => Some(why),
                Poll::Ready(Ok(())) | Poll::Pending => None,
            };
        }
        let ended = instance.ends > view.since.seen.instance(slot).ends;
        let how = if ended {
            "the instance's process ended"
        } else {
            "the instance got unready"
        };
        (view.now.saturating_sub(since) >= LOST_AFTER).then(|| how.into())
    }

    /// Waits until a pod without a manifest file has ended. Halts after the stop limit.
    fn wait_for_pod_end(&mut self, view: &StepView<'_>) -> Action {
        let since = *self.stopping.get_or_insert(view.now);
        if view.now.saturating_sub(since) < view.limits.stop {
            return Action::Wait;
        }
        Action::Halt(format!(
            "the kubelet has not stopped the pod in {}: check that the kubelet runs",
            format_seconds(view.limits.stop)
        ))
    }
}

/// An observation of the node, with the start and the limits of the current step.
struct StepView<'a> {
    seen: &'a NodeObservation,
    now: Duration,
    since: StepStart,
    limits: Limits,
    same: bool,
    target: Version,
}

impl StepView<'_> {
    /// Returns which file was written by someone other than berth.
    fn foreign_file(&self) -> Option<&'static str> {
        match (self.seen.canonical_file, self.seen.temporary_file) {
            (Content::Other, _) => Some("canonical"),
            (_, Content::Other) => Some("temporary"),
            _ => None,
        }
    }

    /// True if `kube-apiserver.yaml` holds the manifest of `version`.
    fn canonical_file_holds(&self, version: Version) -> bool {
        matches!(self.seen.canonical_file, Content::Holds(held) if held == version || self.same)
    }

    /// Returns what `kube-apiserver.yaml` should hold in this step, if it holds something else. A
    /// step that replaces the file checks the contents itself.
    fn find_changed_content(&self, step: Step) -> Option<&'static str> {
        let (version, name) = match step {
            Step::StopOld if self.seen.canonical_file == Content::Absent => return None,
            Step::StartTemporary
            | Step::SettleTemporary
            | Step::JudgeTemporary
            | Step::StopOld
            | Step::Withdraw => (Version::Old, "the old manifest any more"),
            Step::SettleCanonical | Step::JudgeCanonical | Step::StopTemporary => {
                (self.target, "the manifest that this upgrade wrote")
            }
            Step::StartCanonical | Step::Verify => return None,
        };
        (!self.canonical_file_holds(version)).then_some(name)
    }

    /// Returns why the upgrade cannot go on if the temporary pod's file is missing.
    /// `kube-apiserver.yaml` is checked elsewhere.
    fn check_temporary_file(&self, slot: Slot) -> Option<String> {
        (slot == Slot::Temporary && self.seen.temporary_file == Content::Absent)
            .then(|| TEMPORARY_REMOVED.into())
    }

    fn elapsed(&self) -> Duration {
        self.now.saturating_sub(self.since.at)
    }

    fn poll_ready(&self, slot: Slot) -> Poll<Result<(), String>> {
        let instance = self.seen.instance(slot);
        let ends = instance
            .ends
            .saturating_sub(self.since.seen.instance(slot).ends);
        if instance.in_group {
            Poll::Ready(Ok(()))
        } else if instance.not_started && self.target == Version::New {
            // On the way back, the kubelet's message may be about the new pod, which has not ended
            // yet. So the message counts only on the way forward.
            Poll::Ready(Err("the kubelet cannot start the instance".into()))
        } else if ends >= MAX_ENDS {
            Poll::Ready(Err(format!(
                "the instance's process ended {ends} times without getting ready"
            )))
        } else if self.elapsed() >= self.limits.ready {
            Poll::Ready(Err(format!(
                "the instance was not ready in {}",
                format_seconds(self.limits.ready)
            )))
        } else {
            Poll::Pending
        }
    }

    fn verify_result(&self) -> Action {
        let alone = self.seen.temporary_file == Content::Absent && !self.seen.temporary.alive;
        match (
            self.canonical_file_holds(self.target) && alone && self.seen.canonical.in_group,
            self.target,
        ) {
            (true, Version::New) => Action::Finish(UpgradeOutcome::Done),
            (true, Version::Emulated) => Action::Finish(UpgradeOutcome::Emulating),
            (true, Version::Old) => Action::Finish(UpgradeOutcome::RolledBack),
            (false, _) if self.elapsed() >= self.limits.ready => Action::Halt(
                "the canonical instance is not the only instance, or is not ready".into(),
            ),
            (false, _) => Action::Wait,
        }
    }
}

#[cfg(test)]
mod tests;
