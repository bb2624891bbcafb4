//! The steps of a bridge: from observations to the next action. Pure, time is an argument.
//!
//! No state is kept on disk: the steering, the temporary instance and the shim end with the process
//! that holds them, and the port is as before.
//!
//! Two rules hold in every step: nothing is steered to a temporary instance that is not ready, and
//! steering goes off only when the node's kube-apiserver is ready, or when the operator orders an
//! end.
//!
//! The steps do not decide where relayed connections go. After COMMAND has restarted the node's
//! kube-apiserver, the bridge's relay connects clients to the node's kube-apiserver while ready,
//! and to the temporary instance otherwise.

use berth_node::ipc::bridge::{BridgeOutcome, Step};
use berth_node::terms::Speedup;
use berth_upgrade::progress::format_seconds;
use std::time::Duration;

/// Time for clients that began a handshake before a switch to be accepted: a SYN is retransmitted
/// after 1 s and 3 s.
pub const OVERLAP: Duration = Duration::from_secs(5);

/// Time for the Service to name the node, from the same moment: COMMAND may remove the address of
/// the node's kube-apiserver from the Service.
const NAMED: Duration = Duration::from_secs(15);

/// Time before a failing probe of the temporary instance, or a silent etcd member of the node,
/// counts: a slow answer does not. The end of the temporary instance's process counts at once.
const LOST: Duration = Duration::from_secs(3);

/// Time for which the node's kube-apiserver may be away or not ready before a report. In a
/// successful `kubeadm upgrade apply` kube-apiserver is away for 40 to 50 s (README.md,
/// docs/measured.md).
pub const LATE: Duration = Duration::from_secs(60);

/// Number of exits before readiness after which the temporary instance is given up.
const ENDS: u32 = 3;

/// Reaction to a COMMAND that fails, or a node's kube-apiserver that does not come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum OnFailure {
    /// Clients stay on the bridge until `berth bridge end`
    #[default]
    Stay,
    /// Restore the static pod's manifest and the files that it names; if that does not help, stay
    Restore,
    /// End the bridge, at the latest after --ready-timeout
    End,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// Longest time until an instance is ready.
    pub ready: Duration,
    /// Time for which an instance must stay ready.
    pub settle: Duration,
    /// Divisor of the fixed times, for tests.
    pub speedup: Speedup,
}

/// State of the temporary instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TemporaryObservation {
    pub running: bool,
    /// True if the probe passes and the shim listens.
    pub ready: bool,
    /// Number of exits of the temporary instance's process.
    pub ends: u32,
}

/// State of the node's kube-apiserver, probed past the steering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnObservation {
    /// Inode of the listener on the port, which identifies the process.
    pub process: Option<u64>,
    pub ready: bool,
}

/// State of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BridgeObservation {
    pub temporary: TemporaryObservation,
    pub own: OwnObservation,
    pub steering: bool,
    /// True if the Service kubernetes names the node, or the bridge does not keep the Service.
    pub named: bool,
    /// True if the node's etcd member serves, or the bridge does not handle etcd.
    pub etcd: bool,
    /// True if the work of [`Action::Prepare`] is done, or there is none to do.
    pub prepared: bool,
    /// True if the temporary instance and its connections have ended, as [`Action::Drain`]
    /// requests.
    pub drained: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Observe again later.
    Wait,
    /// Observe again at once: another step has begun.
    Entered,
    /// Start the temporary instance.
    Start,
    /// Steer new connections to the temporary instance.
    Steer,
    /// Leave new connections to the node's kube-apiserver.
    Unsteer,
    /// Prepare etcd for COMMAND, which is about to begin.
    Prepare,
    /// Begin to restore the files that the node's kube-apiserver is started from.
    Restore,
    /// Stop the shim, then the temporary instance.
    Drain,
    Finish(BridgeOutcome),
}

#[derive(Debug, Clone, Default)]
pub struct Machine {
    limits: Limits,
    on_failure: OnFailure,
    step: Step,
    since: Option<Duration>,
    /// True if COMMAND shall begin once the temporary instance is observed to serve.
    wanted: bool,
    /// True while COMMAND runs.
    commanding: bool,
    /// True if the process that ran COMMAND went away: the end of COMMAND will never be reported.
    abandoned: bool,
    /// True if COMMAND has ended, or the operator said so, and the node's etcd has not served
    /// since.
    ended: bool,
    /// True if the node's kube-apiserver must become another process than `before`.
    must_restart: bool,
    /// Processes of the node's kube-apiserver: before the bridge, as last observed, and the process
    /// to be replaced (seen when COMMAND began, or when a restore was done).
    first: Option<u64>,
    process: Option<u64>,
    before: Option<u64>,
    /// Time from which a silent etcd member of the node counts.
    etcd_lost: Option<Duration>,
    /// The ready process of the node's kube-apiserver, and since when.
    own_ready: Option<(u64, Duration)>,
    /// Start of the current steering.
    steered: Option<Duration>,
    /// Time from which the failing probe of the temporary instance counts.
    lost: Option<Duration>,
    /// Time since which the node's kube-apiserver is not ready.
    own_lost: Option<Duration>,
    own_is_late: bool,
    trouble: Option<String>,
    /// The reason why new connections do not go to the bridge, although they should.
    steering_error: Option<String>,
    /// True until [`Action::Restore`] has been returned, in the step restore.
    restores: bool,
    outcome: BridgeOutcome,
}

impl Machine {
    pub fn new(limits: Limits, on_failure: OnFailure) -> Self {
        Self {
            limits,
            on_failure,
            ..Self::default()
        }
    }

    pub fn step(&self) -> Step {
        self.step
    }

    /// The reason why clients stay on the bridge although COMMAND has ended.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// The reason why new connections go to the node's kube-apiserver, which COMMAND may stop,
    /// although the bridge is on.
    pub fn steering_error(&self) -> Option<&str> {
        self.steering_error.as_deref()
    }

    /// True if COMMAND has replaced the node's kube-apiserver, which has not been ready for
    /// [`LATE`].
    pub fn own_is_late(&self) -> bool {
        self.own_is_late
    }

    pub fn is_commanding(&self) -> bool {
        self.commanding
    }

    /// True while a COMMAND runs or may run. Nobody reports the end of a command that is run after
    /// `berth bridge start`, or by hand after COMMAND failed. If etcd has served since COMMAND
    /// ended and stops again, such a command may have stopped etcd.
    pub fn command_may_run(&self) -> bool {
        self.commanding
            || self.abandoned
            || (matches!(self.step, Step::Hold | Step::Restore) && !self.ended)
    }

    /// The process of the node's kube-apiserver that gets steered connections while ready: a
    /// process started after the bridge or COMMAND began. An older process that COMMAND has not
    /// restarted yet may be restarted later, for example by a new kubelet, and gets no connections
    /// until it has settled.
    pub fn preferred(&self) -> Option<u64> {
        let process = self.process?;
        let is_awaited = match self.step {
            Step::Hold | Step::Restore => false,
            Step::AwaitOwn => Some(process) != self.before,
            Step::Linger | Step::Drain => true,
            Step::Start | Step::Settle | Step::Overlap => return None,
        };
        (is_awaited || Some(process) != self.first).then_some(process)
    }

    /// Requests COMMAND, which begins ([`Self::is_commanding`]) when the temporary instance is next
    /// observed to serve: the temporary instance may have died since.
    ///
    /// # Errors
    /// The bridge is not ready for COMMAND or is ending, or another COMMAND runs.
    pub fn command_begins(&mut self) -> Result<(), String> {
        match (self.step, self.commanding || self.wanted) {
            (Step::Hold, false) => {
                (self.wanted, self.trouble) = (true, None);
                Ok(())
            }
            (_, true) => Err("another COMMAND runs under this bridge: wait for it".into()),
            (step, false) => Err(format!(
                "the bridge is in the step {step}: COMMAND runs in the step hold"
            )),
        }
    }

    /// Records the end of COMMAND: an error, or true if the node's kube-apiserver must become
    /// another process.
    pub fn command_ended(&mut self, how: Result<bool, String>) {
        if !std::mem::take(&mut self.commanding) || self.step != Step::Hold {
            return;
        }
        self.ended = true;
        match (how, self.on_failure) {
            (Ok(must_restart), _) => self.await_own(must_restart),
            (Err(why), OnFailure::Stay) => self.trouble = Some(why),
            (Err(why), OnFailure::Restore) => self.begin_restore(why),
            (Err(why), OnFailure::End) => {
                self.trouble = Some(why);
                self.await_own(false);
            }
        }
    }

    /// Records that the process that ran COMMAND has gone without reporting an end. COMMAND may
    /// still run, so clients stay on the bridge, whatever the option for failures. A COMMAND that
    /// has not begun never will.
    pub fn command_abandoned(&mut self, why: &str) {
        if self.wanted {
            self.await_own(false);
        }
        if std::mem::take(&mut self.commanding) {
            self.abandoned = true;
            if self.step == Step::Hold {
                self.trouble = Some(why.into());
            }
        }
    }

    /// Restores the files of the node's kube-apiserver, at the operator's request.
    ///
    /// # Errors
    /// The step does not allow a restore.
    pub fn restore(&mut self) -> Result<(), String> {
        match self.step {
            Step::Hold if self.commanding => {
                Err("COMMAND runs and may write the files to be restored: wait for it".into())
            }
            Step::Hold | Step::AwaitOwn => {
                let why = self
                    .trouble
                    .take()
                    .unwrap_or_else(|| "the operator wanted it".into());
                self.begin_restore(why);
                Ok(())
            }
            step => Err(format!(
                "the bridge is in the step {step}: files are restored in the steps hold and await-own"
            )),
        }
    }

    /// Records the end of a restore: true if the node's kube-apiserver must become another process,
    /// or the error.
    pub fn record_restore(&mut self, how: Result<bool, String>) {
        // The operator may have ended the bridge at once meanwhile.
        if self.step != Step::Restore {
            return;
        }
        let why = self.trouble.take().unwrap_or_default();
        match how {
            Ok(must_restart) => {
                // A kube-apiserver that was started from the restored files is not restarted: the
                // kubelet may not have noticed that the manifest was changed and restored.
                self.before = self.process.filter(|process| Some(*process) != self.first);
                self.outcome = BridgeOutcome::Restored(why);
                self.await_own(must_restart);
            }
            Err(error) => {
                self.trouble = Some(format!("{why}; restoring the files failed: {error}"));
                self.enter(Step::Hold);
            }
        }
    }

    /// Ends the bridge at the operator's request: when the node's kube-apiserver is ready, whatever
    /// its process, or at once if `now`.
    ///
    /// # Errors
    /// COMMAND runs, and may be about to stop the node's kube-apiserver.
    pub fn end(&mut self, now: bool) -> Result<(), String> {
        match self.step {
            Step::Linger | Step::Drain => {}
            Step::Start | Step::Settle => self.give_up("the operator ended it"),
            _ if now => {
                self.trouble = None;
                self.outcome = BridgeOutcome::Abandoned("the operator ended it at once".into());
                self.enter(Step::Linger);
            }
            _ if self.commanding => {
                return Err(
                    "COMMAND runs and may be about to stop the node's own kube-apiserver: wait for it, or end \
                            the bridge at once with --now"
                        .into(),
                );
            }
            Step::Restore => return Err("a restore is under way: wait for it".into()),
            _ => {
                // Any process of the node's kube-apiserver will do.
                (self.trouble, self.before) = (None, None);
                self.await_own(false);
            }
        }
        Ok(())
    }

    /// Records that [`Action::Steer`] failed. Steering is tried again once clients depend on it.
    pub fn cannot_steer(&mut self, why: &str) {
        if self.step == Step::Overlap || self.wanted {
            self.outcome = BridgeOutcome::NotBegun(format!("cannot steer: {why}"));
            self.enter(Step::Linger);
        } else {
            self.steering_error = Some(why.into());
        }
    }

    /// Refuses COMMAND for the given reason.
    pub fn refuse(&mut self, why: &str) {
        match self.step {
            Step::Start | Step::Settle => self.give_up(why),
            Step::Overlap => {
                self.outcome = BridgeOutcome::NotBegun(why.into());
                self.enter(Step::Linger);
            }
            // Clients stay on the bridge, since the node's kube-apiserver may be away.
            Step::Hold if self.wanted => (self.wanted, self.trouble) = (false, Some(why.into())),
            _ => {}
        }
    }

    pub fn next(&mut self, seen: &BridgeObservation, now: Duration) -> Action {
        self.process = seen.own.process;
        self.first = self.first.or(self.process);
        self.ended &= !seen.etcd;
        self.etcd_lost = if seen.etcd {
            None
        } else {
            self.etcd_lost.or(Some(now + self.limits.speedup.of(LOST)))
        };
        let since = *self.since.get_or_insert(now);
        let elapsed = now.saturating_sub(since);
        let lost = self.has_lost_temporary(seen, now);
        self.steering_error.take_if(|_| seen.steering);
        self.steered = seen.steering.then(|| self.steered.unwrap_or(now));
        self.check_own(seen, now);
        match self.step {
            Step::Start => self.next_in_start(seen, elapsed),
            Step::Settle => self.next_in_settle(seen, elapsed, lost),
            // Nothing depends on the bridge yet.
            Step::Overlap | Step::Hold
                if lost && (self.step == Step::Overlap || self.wanted && seen.own.ready) =>
            {
                self.outcome = BridgeOutcome::NotBegun(describe_loss(seen, elapsed));
                self.enter(Step::Linger)
            }
            Step::Overlap | Step::Hold | Step::AwaitOwn | Step::Restore => {
                match keep_steered(seen, lost) {
                    // The step's own times run on, whether or not the temporary instance can be
                    // started again.
                    Some(Action::Start) => match self.next_while_steered(seen, now, elapsed) {
                        Action::Wait => Action::Start,
                        decided => decided,
                    },
                    Some(action) => action,
                    None => self.next_while_steered(seen, now, elapsed),
                }
            }
            Step::Linger if seen.steering => Action::Unsteer,
            Step::Linger if elapsed < self.overlap() => Action::Wait,
            Step::Linger => self.enter(Step::Drain),
            Step::Drain if seen.drained => Action::Finish(self.outcome.clone()),
            Step::Drain => Action::Drain,
        }
    }

    /// The next action while new connections go to the bridge.
    fn next_while_steered(
        &mut self,
        seen: &BridgeObservation,
        now: Duration,
        elapsed: Duration,
    ) -> Action {
        match self.step {
            Step::Overlap => self
                .next_before_command(seen, now)
                .unwrap_or_else(|| self.enter(Step::Hold)),
            Step::Restore => match std::mem::take(&mut self.restores) {
                true => Action::Restore,
                false => Action::Wait,
            },
            Step::Hold => {
                if !self.commanding {
                    self.before = seen.own.process;
                }
                if !self.wanted || !seen.temporary.ready {
                    return Action::Wait;
                }
                // The operator may have ended the overlap, or new connections have gone to the
                // node's kube-apiserver since.
                self.next_before_command(seen, now).unwrap_or_else(|| {
                    (self.wanted, self.commanding) = (false, true);
                    Action::Wait
                })
            }
            _ => self.next_while_awaiting_own(seen, now, elapsed),
        }
    }

    fn overlap(&self) -> Duration {
        self.limits.speedup.of(OVERLAP)
    }

    /// The action that must precede COMMAND while new connections go to the bridge. `None` if
    /// COMMAND may begin.
    fn next_before_command(&self, seen: &BridgeObservation, now: Duration) -> Option<Action> {
        let since = self.steered.map(|since| now.saturating_sub(since));
        let within = |time| since.is_none_or(|since| since < self.limits.speedup.of(time));
        // Handshakes that began before the switch may still complete.
        let waits = within(OVERLAP) || (within(NAMED) && !seen.named);
        if waits {
            Some(Action::Wait)
        } else {
            (!seen.prepared).then_some(Action::Prepare)
        }
    }

    fn enter(&mut self, step: Step) -> Action {
        (self.step, self.since, self.own_ready, self.wanted) = (step, None, None, false);
        Action::Entered
    }

    /// Ends a bridge that nothing was steered to yet.
    fn give_up(&mut self, why: &str) {
        self.outcome = BridgeOutcome::NotBegun(why.into());
        self.enter(Step::Drain);
    }

    fn await_own(&mut self, must_restart: bool) {
        (self.must_restart, self.ended) = (must_restart, true);
        self.enter(Step::AwaitOwn);
    }

    fn begin_restore(&mut self, why: String) {
        (self.trouble, self.restores) = (Some(why), true);
        self.enter(Step::Restore);
    }

    fn next_in_start(&mut self, seen: &BridgeObservation, elapsed: Duration) -> Action {
        let TemporaryObservation {
            running,
            ready,
            ends,
        } = seen.temporary;
        if ready {
            return self.enter(Step::Settle);
        }
        if ends >= ENDS {
            self.give_up(&format!(
                "the temporary kube-apiserver ended {ends} times before it was ready"
            ));
        } else if elapsed >= self.limits.ready {
            self.give_up(&format!(
                "the temporary kube-apiserver is not ready after {}",
                format_seconds(elapsed)
            ));
        } else {
            return if running { Action::Wait } else { Action::Start };
        }
        Action::Entered
    }

    fn next_in_settle(
        &mut self,
        seen: &BridgeObservation,
        elapsed: Duration,
        lost: bool,
    ) -> Action {
        if lost {
            self.give_up(&describe_loss(seen, elapsed));
            return Action::Entered;
        }
        if elapsed < self.limits.settle || !seen.temporary.ready {
            return Action::Wait;
        }
        self.before = seen.own.process;
        self.enter(Step::Overlap)
    }

    /// True if the temporary instance has stopped serving. A slow answer does not count.
    fn has_lost_temporary(&mut self, seen: &BridgeObservation, now: Duration) -> bool {
        if seen.temporary.ready {
            self.lost = None;
            return false;
        }
        let counts = self.lost.get_or_insert(now + self.limits.speedup.of(LOST));
        if !seen.temporary.running {
            // An exit counts even if the process has been started again since.
            *counts = now.min(*counts);
        }
        now >= *counts
    }

    /// Checks how long the node's kube-apiserver has not been ready since COMMAND replaced it.
    fn check_own(&mut self, seen: &BridgeObservation, now: Duration) {
        let counts = (self.commanding || self.step == Step::AwaitOwn) && !seen.own.ready;
        self.own_lost = counts.then(|| self.own_lost.unwrap_or(now));
        let late = self.limits.speedup.of(LATE);
        self.own_is_late = self
            .own_lost
            .is_some_and(|since| now.saturating_sub(since) >= late);
    }

    /// True for the process that must be replaced.
    fn is_before(&self, process: u64) -> bool {
        self.must_restart && Some(process) == self.before
    }

    /// The next action while the bridge waits for the node's kube-apiserver to be back for good.
    fn next_while_awaiting_own(
        &mut self,
        seen: &BridgeObservation,
        now: Duration,
        elapsed: Duration,
    ) -> Action {
        let same = seen
            .own
            .process
            .is_some_and(|process| self.is_before(process));
        // Readiness may depend on another etcd member, reachable only through the bridge.
        let has_etcd = self.etcd_lost.is_none_or(|counts| now < counts);
        let ready = seen
            .own
            .process
            .filter(|_| seen.own.ready && has_etcd && !same);
        self.own_ready = match (ready, self.own_ready) {
            (Some(process), Some((before, since))) if process == before => Some((process, since)),
            // A process that becomes ready after the time limit does not count.
            (Some(process), _) if elapsed < self.limits.ready => Some((process, now)),
            _ => None,
        };
        match self.own_ready {
            Some((_, since)) if now.saturating_sub(since) >= self.limits.settle && seen.etcd => {
                self.enter(Step::Linger)
            }
            None if elapsed >= self.limits.ready => {
                let what = match (same, seen.own.process) {
                    (true, _) => "is still the process from before: nothing has restarted it",
                    (false, None) => "does not run: nothing listens on its port",
                    (false, Some(_)) if !has_etcd => {
                        "has no etcd on this node: its member does not answer"
                    }
                    (false, Some(_)) => "does not stay ready",
                };
                self.fail(&format!(
                    "after {} the node's own kube-apiserver {what}",
                    format_seconds(elapsed)
                ))
            }
            _ => Action::Wait,
        }
    }

    fn fail(&mut self, why: &str) -> Action {
        // The first error is the one to be fixed.
        let why = self
            .trouble
            .take()
            .map_or_else(|| why.to_owned(), |first| format!("{first}; {why}"));
        match self.on_failure {
            OnFailure::Restore if !matches!(self.outcome, BridgeOutcome::Restored(_)) => {
                self.begin_restore(why);
                Action::Entered
            }
            OnFailure::Stay | OnFailure::Restore => {
                self.trouble = Some(why);
                self.enter(Step::Hold)
            }
            OnFailure::End => {
                self.outcome = BridgeOutcome::Abandoned(why);
                self.enter(Step::Linger)
            }
        }
    }
}

/// The action needed for new connections to reach the ready instance.
fn keep_steered(seen: &BridgeObservation, lost: bool) -> Option<Action> {
    let BridgeObservation {
        temporary,
        own,
        steering,
        ..
    } = seen;
    match (temporary.ready, steering) {
        (true, true) => None,
        (true, false) => Some(Action::Steer),
        (false, true) if lost && own.ready => Some(Action::Unsteer),
        (false, _) if !temporary.running => Some(Action::Start),
        // Clients are held until an instance is ready.
        (false, _) => None,
    }
}

/// Describes how the temporary instance was lost before COMMAND ran.
fn describe_loss(seen: &BridgeObservation, elapsed: Duration) -> String {
    let why = if seen.temporary.running {
        "is not ready any more"
    } else {
        "ended"
    };
    format!(
        "the temporary kube-apiserver {why} {} after it was ready",
        format_seconds(elapsed)
    )
}

#[cfg(test)]
mod tests;
