//! The steps of an upgrade: from its position and an observation to the next action. Pure, time is an argument.
//!
//! Only the [`Position`] is kept on disk, and it is written before what it allows is done. What was done
//! is not stored but observed: each step compares the files and the instances with its goal and does what is missing. So
//! a run that was killed anywhere continues as if it had only been slow, and doing a thing twice is
//! the same as doing it once.
//!
//! If the new version is judged, the step after the temporary instance has settled gives it clients beside the old one, which
//! goes only for one that was not found bad. Where the temporary one emulates the old one's release, the canonical one, which
//! does not, is judged beside it in the same way, and what it is sent back to is the emulation: the old version may not
//! read what came without it.
//!
//! Two rules hold in every step: no file goes while the other instance is not in the group,
//! and a file that holds what berth did not put there is not touched.

mod terms;

use super::progress::seconds;
use std::task::Poll;
use std::time::Duration;
pub use terms::{
    Action, Content, Course, InstanceObservation, Judged, Limits, NodeObservation, Position, Slot,
    Step, UpgradeOutcome, Version,
};

/// How long an instance may be out of the group, once it was in it, before that counts: one slow answer does not.
const LOST: Duration = Duration::from_secs(3);

/// How long a shim may take to accept a drain, and then to leave. Then it is stopped all the same: SIGTERM makes it leave too.
pub const LEAVING: Duration = Duration::from_secs(30);

/// Ends of a process after which it is not waited for any more: the kubelet starts it again later and later.
const ENDS: u32 = 3;

/// Consecutive drains that may fail.
const DRAINS: u32 = 3;

/// Why it goes back if the operator wants it to.
pub const INTERRUPTED: &str = "it was interrupted";

const REMOVED: &str = "the temporary file was removed";

#[derive(Debug, Clone, Default)]
pub struct Machine {
    position: Position,
    limits: Limits,
    course: Course,
    interrupted: bool,
    /// Of the step; from its first observation on, or from when the instance that it watches has joined in this run.
    since: Option<Since>,
    /// The instance that the step watches has been in the group in this run. A run that resumes a step cannot know that
    /// it was: after a reboot all pods start again.
    joined: bool,
    /// It has been out of the group since.
    lost: Option<Duration>,
    /// A file has gone and its pod has not, since.
    stopping: Option<Duration>,
    /// Only in this run: a run that resumes waits for the other instance as long as one may take to get ready, and a shim that a killed run
    /// drained has left by then (after two leases at most; the default of --ready-timeout is longer), so nothing leads back to it.
    drained: bool,
    drains_failed: u32,
    /// What came out of the step.
    judged: Option<Judged>,
}

/// What a step found at its beginning.
#[derive(Debug, Clone, Copy)]
struct Since {
    at: Duration,
    seen: NodeObservation,
}

impl Machine {
    /// Goes on from a position, which may be one of a run that was killed.
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

    /// The operator wants it back. As long as the old instance is in the group it goes back; then the
    /// shortest way to a whole node is on.
    pub fn interrupt(&mut self) {
        self.interrupted = true;
    }

    /// Whether an interrupt now leads back.
    pub fn goes_back(&self) -> bool {
        self.can_withdraw()
            || matches!(self.position.step, Step::JudgeCanonical | Step::Withdraw)
            || self.position.target != Version::New
    }

    /// The old instance serves, and nothing of it has gone.
    fn can_withdraw(&self) -> bool {
        matches!(
            self.position.step,
            Step::StartTemporary | Step::SettleTemporary | Step::JudgeTemporary
        )
    }

    /// How an [`Action::Drain`] went.
    pub fn drained(&mut self, asked: bool) {
        self.drained |= asked;
        self.drains_failed = if asked { 0 } else { self.drains_failed + 1 };
    }

    /// What came out of an [`Action::Judge`].
    pub fn judged(&mut self, judged: Judged) {
        self.judged = Some(judged);
    }

    pub fn next(&mut self, seen: &NodeObservation, now: Duration) -> Action {
        let since = *self.since.get_or_insert(Since {
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
        if let Some(path) = step.foreign() {
            return Action::Halt(format!(
                "the {path} file is not what this upgrade put there, so it is left alone"
            ));
        }
        if self.interrupted && self.can_withdraw() {
            return self.withdraw(INTERRUPTED);
        }
        if let Some(wrong) = step.changed(self.position.step) {
            return Action::Halt(format!("the canonical file is not {wrong}"));
        }
        match self.position.step {
            Step::StartTemporary => self.start_temporary(&step),
            Step::SettleTemporary => {
                let next = if self.course.judged {
                    Step::JudgeTemporary
                } else {
                    Step::StopOld
                };
                self.settle(&step, Slot::Temporary, next)
            }
            Step::JudgeTemporary => self.judge(&step, Slot::Temporary, Step::StopOld),
            Step::StopOld => self.stop(&step, Slot::Canonical, Step::StartCanonical),
            Step::StartCanonical => self.start_canonical(&step),
            Step::SettleCanonical => {
                let judged =
                    self.course.emulated && step.target == Version::New && !self.interrupted;
                self.settle(
                    &step,
                    Slot::Canonical,
                    if judged {
                        Step::JudgeCanonical
                    } else {
                        Step::StopTemporary
                    },
                )
            }
            Step::JudgeCanonical => self.judge(&step, Slot::Canonical, Step::StopTemporary),
            Step::StopTemporary => self.stop(&step, Slot::Temporary, Step::Verify),
            Step::Verify => step.verify(),
            Step::Withdraw => self.go_back(&step),
        }
    }

    fn enter(&mut self, step: Step) -> Action {
        self.position.step = step;
        // A step that watches an instance comes after one that saw it in the group.
        (self.since, self.joined, self.lost) = (None, true, None);
        (self.stopping, self.drained, self.drains_failed, self.judged) = (None, false, 0, None);
        Action::Entered
    }

    fn back_to(&mut self, version: Version, step: Step, why: &str) -> Action {
        self.position.target = version;
        self.position.why.get_or_insert_with(|| why.to_owned());
        self.enter(step)
    }

    fn withdraw(&mut self, why: &str) -> Action {
        self.back_to(Version::Old, Step::Withdraw, why)
    }

    fn start_temporary(&mut self, view: &StepView<'_>) -> Action {
        if view.seen.temporary_file == Content::Absent {
            return if view.seen.temporary.alive {
                self.stopping(view)
            } else {
                let version = if self.course.emulated {
                    Version::Emulated
                } else {
                    Version::New
                };
                Action::Place(Slot::Temporary, version)
            };
        }
        self.go_on(
            Slot::Temporary,
            Step::SettleTemporary,
            view.start(Slot::Temporary),
        )
    }

    /// What comes of a wait for a slot's instance.
    fn go_on(&mut self, slot: Slot, next: Step, come: Poll<Result<(), String>>) -> Action {
        match come {
            Poll::Ready(Ok(())) => self.enter(next),
            Poll::Ready(Err(why)) => self.send_back(slot, why),
            Poll::Pending => Action::Wait,
        }
    }

    /// A slot's instance is watched, and stays for a while.
    fn settle(&mut self, view: &StepView<'_>, slot: Slot, next: Step) -> Action {
        let settled = match view.removed(slot) {
            Some(why) => Poll::Ready(Err(why)),
            None => self.settled(view, slot),
        };
        self.go_on(slot, next, settled)
    }

    /// A slot's instance gets clients and is judged, beside the other one.
    fn judge(&mut self, view: &StepView<'_>, slot: Slot, next: Step) -> Action {
        let interrupted = self.interrupted.then(|| INTERRUPTED.into());
        if let Some(why) = view
            .removed(slot)
            .or_else(|| self.lost(view, slot))
            .or(interrupted)
        {
            return self.send_back(slot, why);
        }
        match self.judged.take() {
            None if self.joined => Action::Judge(slot),
            None => Action::Wait,
            Some(Judged::GoOn) => self.enter(next),
            Some(Judged::GoBack(why)) => {
                self.position.judged = true;
                self.send_back(slot, why)
            }
            Some(Judged::Stop(why)) => Action::Halt(why),
        }
    }

    fn send_back(&mut self, slot: Slot, why: String) -> Action {
        match slot {
            Slot::Temporary => self.withdraw(&why),
            Slot::Canonical => self.fail_canonical(why),
        }
    }

    /// A slot's instance goes for the other one, which stays.
    fn stop(&mut self, view: &StepView<'_>, slot: Slot, next: Step) -> Action {
        let [goes, stays] = [slot, slot.other()].map(|slot| view.seen.instance(slot));
        if view.seen.file(slot) == Content::Absent {
            return if goes.alive {
                self.stopping(view)
            } else {
                self.enter(next)
            };
        }
        let lost = self.lost(view, slot.other());
        if stays.in_group {
            if slot == Slot::Canonical
                && goes.may_serve()
                && self.drains_failed >= DRAINS
                && !self.drained
            {
                return self.withdraw("the old instance's shim cannot be drained");
            }
            return self.remove(view, slot);
        }
        match lost {
            // Once drained, it does not come back: then there is only the way on.
            Some(why) if goes.in_group && !self.drained => self.send_back(slot.other(), why),
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

    /// A file goes, its shim first; the other slot's instance is in the group.
    fn remove(&self, view: &StepView<'_>, slot: Slot) -> Action {
        let instance = view.seen.instance(slot);
        let waits = self.drains_failed < DRAINS && !(self.drained && view.elapsed() >= LEAVING);
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
                return self.stopping(view);
            }
            // The instance that is placed is watched from here on: how often another one ended there before is not counted.
            self.since = None;
            return Action::Place(Slot::Canonical, self.position.target);
        }
        if !view.holds(self.position.target) {
            // What failed goes first: the kubelet runs one pod of a name.
            return match temporary.in_group {
                true => self.remove(view, Slot::Canonical),
                false if view.elapsed() < view.limits.ready => Action::Wait,
                false => Action::Halt("the temporary instance is not ready any more".into()),
            };
        }
        self.go_on(
            Slot::Canonical,
            Step::SettleCanonical,
            view.start(Slot::Canonical),
        )
    }

    /// The canonical instance does not serve, or is bad; the temporary one serves.
    fn fail_canonical(&mut self, why: String) -> Action {
        if self.position.target == Version::New && !self.course.same {
            // What came without emulation may have written what the old one cannot read.
            let version = if self.course.emulated {
                Version::Emulated
            } else {
                Version::Old
            };
            self.back_to(version, Step::StartCanonical, &why)
        } else {
            // Given again, the command waits for it once more.
            self.enter(Step::StartCanonical);
            Action::Halt(why)
        }
    }

    fn go_back(&mut self, view: &StepView<'_>) -> Action {
        let NodeObservation {
            canonical,
            temporary,
            temporary_file,
            ..
        } = view.seen;
        let is_removed = *temporary_file == Content::Absent;
        match (is_removed, canonical.in_group) {
            (true, _) if temporary.alive => self.stopping(view),
            (true, true) => Action::Finish(UpgradeOutcome::RolledBack),
            (false, true) => self.remove(view, Slot::Temporary),
            // After a reboot both start, and an instance that is not in the group may be the first to be ready.
            (_, false) if view.elapsed() < view.limits.ready => Action::Wait,
            (_, false) => Action::Halt("the old instance is not ready".into()),
        }
    }

    fn settled(&mut self, view: &StepView<'_>, slot: Slot) -> Poll<Result<(), String>> {
        let instance = view.seen.instance(slot);
        let before = view.since.seen.instance(slot);
        let another = instance.process.is_some()
            && before.process.is_some()
            && instance.process != before.process;
        if self.joined && another {
            return Poll::Ready(Err(format!(
                "it started again within {}",
                seconds(view.limits.settle)
            )));
        }
        let over = self.joined && instance.in_group && view.elapsed() >= view.limits.settle;
        match self.lost(view, slot) {
            Some(why) if self.joined => Poll::Ready(Err(format!(
                "{why} {} after it was ready",
                seconds(view.elapsed())
            ))),
            Some(why) => Poll::Ready(Err(why)),
            None if over => Poll::Ready(Ok(())),
            None => Poll::Pending,
        }
    }

    /// Why the instance that the step watches is not ready any more. As long as it has not been in the group in this
    /// run, it starts and has the time for that; what is watched begins when it is ready.
    fn lost(&mut self, view: &StepView<'_>, slot: Slot) -> Option<String> {
        let instance = view.seen.instance(slot);
        if instance.in_group {
            self.lost = None;
            if !self.joined {
                (self.joined, self.since) = (
                    true,
                    Some(Since {
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
            return match view.start(slot) {
                Poll::Ready(Err(why)) => Some(why),
                Poll::Ready(Ok(())) | Poll::Pending => None,
            };
        }
        let ended = instance.ends > view.since.seen.instance(slot).ends;
        let how = if ended {
            "its process ended"
        } else {
            "it got unready"
        };
        (view.now.saturating_sub(since) >= LOST).then(|| how.into())
    }

    /// What was stopped has not ended yet.
    fn stopping(&mut self, view: &StepView<'_>) -> Action {
        let since = *self.stopping.get_or_insert(view.now);
        if view.now.saturating_sub(since) < view.limits.stop {
            return Action::Wait;
        }
        Action::Halt(format!(
            "the kubelet has not stopped the pod in {}: does it run?",
            seconds(view.limits.stop)
        ))
    }
}

/// One observation, within one step.
struct StepView<'a> {
    seen: &'a NodeObservation,
    now: Duration,
    since: Since,
    limits: Limits,
    same: bool,
    target: Version,
}

impl StepView<'_> {
    /// The file that another wrote.
    fn foreign(&self) -> Option<&'static str> {
        match (self.seen.canonical_file, self.seen.temporary_file) {
            (Content::Other, _) => Some("canonical"),
            (_, Content::Other) => Some("temporary"),
            _ => None,
        }
    }

    /// Whether the canonical file holds this.
    fn holds(&self, version: Version) -> bool {
        matches!(self.seen.canonical_file, Content::Holds(held) if held == version || self.same)
    }

    /// What the canonical file is to be in this step, if it is that no longer. While it is replaced the step itself checks it.
    fn changed(&self, step: Step) -> Option<&'static str> {
        let (version, name) = match step {
            Step::StopOld if self.seen.canonical_file == Content::Absent => return None,
            Step::StartTemporary
            | Step::SettleTemporary
            | Step::JudgeTemporary
            | Step::StopOld
            | Step::Withdraw => (Version::Old, "the old one any more"),
            Step::SettleCanonical | Step::JudgeCanonical | Step::StopTemporary => {
                (self.target, "the one that was put there")
            }
            Step::StartCanonical | Step::Verify => return None,
        };
        (!self.holds(version)).then_some(name)
    }

    /// The file of the temporary one is not to go.
    fn removed(&self, slot: Slot) -> Option<String> {
        (slot == Slot::Temporary && self.seen.temporary_file == Content::Absent)
            .then(|| REMOVED.into())
    }

    fn elapsed(&self) -> Duration {
        self.now.saturating_sub(self.since.at)
    }

    fn start(&self, slot: Slot) -> Poll<Result<(), String>> {
        let instance = self.seen.instance(slot);
        let ends = instance
            .ends
            .saturating_sub(self.since.seen.instance(slot).ends);
        if instance.in_group {
            Poll::Ready(Ok(()))
        } else if instance.not_started && self.target == Version::New {
            // On the way back that may be the new one's, which is going still.
            Poll::Ready(Err("the kubelet cannot start it".into()))
        } else if ends >= ENDS {
            Poll::Ready(Err(format!(
                "its process ended {ends} times without getting ready"
            )))
        } else if self.elapsed() >= self.limits.ready {
            Poll::Ready(Err(format!(
                "it was not ready in {}",
                seconds(self.limits.ready)
            )))
        } else {
            Poll::Pending
        }
    }

    fn verify(&self) -> Action {
        let alone = self.seen.temporary_file == Content::Absent && !self.seen.temporary.alive;
        match (
            self.holds(self.target) && alone && self.seen.canonical.in_group,
            self.target,
        ) {
            (true, Version::New) => Action::Finish(UpgradeOutcome::Done),
            (true, Version::Emulated) => Action::Finish(UpgradeOutcome::Emulating),
            (true, Version::Old) => Action::Finish(UpgradeOutcome::RolledBack),
            (false, _) if self.elapsed() >= self.limits.ready => {
                Action::Halt("the canonical instance is not the only one, or not ready".into())
            }
            (false, _) => Action::Wait,
        }
    }
}

#[cfg(test)]
mod tests;
