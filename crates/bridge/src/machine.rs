//! The steps of a bridge: from observations to the next action. Pure, time is an argument.
//!
//! No state is kept on disk: the steering, the temporary instance and the shim end with the process
//! that holds them, and the port is as before.
//!
//! Two rules hold in every step. Steering goes on only when the temporary instance is ready, or
//! when nothing listens on the port: clients then wait at the bridge for a limited time, and are
//! not refused at once. Steering goes off only when the node's kube-apiserver is ready, or when the
//! operator orders an end.
//!
//! While the node's kube-apiserver listens, clients are not steered to a bridge that would hold
//! them: a kube-apiserver that is not ready may serve, for example while it shuts down.
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
/// successful `kubeadm upgrade apply` kube-apiserver is away for 40 to 50 s (docs/measured.md).
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
    /// True if the bridge accepts clients, and holds them while no instance is ready.
    pub listens: bool,
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
    /// to be replaced (seen when COMMAND or a restore began).
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
    pub fn own_apiserver_is_late(&self) -> bool {
        self.own_is_late
    }

    pub fn is_command_running(&self) -> bool {
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
    pub fn preferred_process(&self) -> Option<u64> {
        let process = self.process?;
        let is_awaited = match self.step {
            Step::Hold | Step::Restore => false,
            Step::AwaitOwn => Some(process) != self.before,
            Step::Linger | Step::Drain => true,
            Step::Start | Step::Settle | Step::Overlap => return None,
        };
        (is_awaited || Some(process) != self.first).then_some(process)
    }

    /// Requests COMMAND, which begins ([`Self::is_command_running`]) when the temporary instance is
    /// next observed to serve: the temporary instance may have died since.
    ///
    /// # Errors
    /// The bridge is not ready for COMMAND or is ending, or another COMMAND runs.
    pub fn request_command(&mut self) -> Result<(), String> {
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
    pub fn record_command_end(&mut self, how: Result<bool, String>) {
        if !std::mem::take(&mut self.commanding) || self.step != Step::Hold {
            return;
        }
        self.ended = true;
        match (how, self.on_failure) {
            (Ok(must_restart), _) => self.enter_await_own(must_restart),
            (Err(why), OnFailure::Stay) => self.trouble = Some(why),
            (Err(why), OnFailure::Restore) => self.begin_restore(why),
            (Err(why), OnFailure::End) => {
                self.trouble = Some(why);
                self.enter_await_own(false);
            }
        }
    }

    /// Records that the process that ran COMMAND has gone without reporting an end. COMMAND may
    /// still run, so clients stay on the bridge, whatever the option for failures. A COMMAND that
    /// has not begun never will.
    pub fn record_abandoned_command(&mut self, why: &str) {
        if self.wanted {
            self.enter_await_own(false);
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
    pub fn request_restore(&mut self) -> Result<(), String> {
        match self.step {
            Step::Hold if self.commanding => {
                Err("COMMAND runs and may write the files to be restored: wait for it".into())
            }
            Step::Hold | Step::AwaitOwn => {
                let why = self
                    .trouble
                    .take()
                    .unwrap_or_else(|| "the operator requested a restore".into());
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
                self.outcome = BridgeOutcome::Restored(why);
                self.enter_await_own(must_restart);
            }
            Err(error) => {
                self.trouble = Some(format!("{why}; restoring the files failed: {error}"));
                self.enter_step(Step::Hold);
            }
        }
    }

    /// Ends the bridge at the operator's request: when the node's kube-apiserver is ready, whatever
    /// its process, or at once if `now`.
    ///
    /// # Errors
    /// COMMAND runs, and may be about to stop the node's kube-apiserver.
    pub fn request_end(&mut self, now: bool) -> Result<(), String> {
        match self.step {
            Step::Linger | Step::Drain => {}
            Step::Start | Step::Settle => {
                self.give_up("the operator ended the bridge", Step::Drain);
            }
            _ if now => {
                self.trouble = None;
                self.outcome =
                    BridgeOutcome::Abandoned("the operator ended the bridge at once".into());
                self.enter_step(Step::Linger);
            }
            _ if self.commanding => {
                return Err(
                    "COMMAND runs and may be about to stop the node's kube-apiserver: wait for it, or end \
                            the bridge at once with --now"
                        .into(),
                );
            }
            Step::Restore => return Err("a restore is under way: wait for it".into()),
            _ => {
                // Any process of the node's kube-apiserver will do.
                (self.trouble, self.before) = (None, None);
                self.enter_await_own(false);
            }
        }
        Ok(())
    }

    /// Records that [`Action::Steer`] failed. Steering is tried again once clients depend on it, or
    /// the node's kube-apiserver has ended.
    pub fn record_steering_failure(&mut self, why: &str) {
        if self.process.is_some() && (self.step == Step::Overlap || self.wanted) {
            self.give_up(&format!("cannot steer: {why}"), Step::Linger);
        } else {
            self.steering_error = Some(why.into());
        }
    }

    /// Refuses COMMAND for the given reason. `own` is the process of the node's kube-apiserver. The
    /// caller calls this again as long as the reason lasts.
    pub fn refuse_command(&mut self, why: &str, own: Option<u64>) {
        self.process = own;
        match self.step {
            Step::Start | Step::Settle => {
                self.give_up(why, Step::Drain);
            }
            Step::Overlap if own.is_some() => {
                self.give_up(why, Step::Linger);
            }
            // While the node's kube-apiserver is away, nobody serves without the bridge.
            Step::Overlap => {
                self.enter_step(Step::Hold);
                self.trouble = Some(why.into());
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
            self.etcd_lost
                .or(Some(now + self.limits.speedup.shorten(LOST)))
        };
        let since = *self.since.get_or_insert(now);
        let elapsed = now.saturating_sub(since);
        let lost = self.has_lost_temporary(seen, now);
        self.steering_error.take_if(|_| seen.steering);
        self.steered = seen.steering.then(|| self.steered.unwrap_or(now));
        self.note_own_readiness(seen, now);
        match self.step {
            Step::Start => self.next_in_start(seen, elapsed),
            Step::Settle => self.next_in_settle(seen, elapsed, lost),
            // Nobody serves: an instance comes first.
            Step::Overlap if lost && self.process.is_none() => self.keep_steered(seen, lost),
            // Nothing depends on the bridge yet.
            Step::Overlap | Step::Hold
                if lost && (self.step == Step::Overlap || self.wanted && seen.own.ready) =>
            {
                self.give_up(&describe_loss(seen, elapsed), Step::Linger)
            }
            Step::Overlap | Step::Hold | Step::AwaitOwn | Step::Restore => {
                // The step's own times run on, whether or not the temporary instance can be started
                // again and new connections can be steered.
                match self.next_while_steered(seen, now, elapsed) {
                    Action::Wait => self.keep_steered(seen, lost),
                    decided => decided,
                }
            }
            Step::Linger if seen.steering => Action::Unsteer,
            Step::Linger if elapsed < self.overlap_time() => Action::Wait,
            Step::Linger => self.enter_step(Step::Drain),
            Step::Drain if seen.drained => Action::Finish(self.outcome.clone()),
            Step::Drain => Action::Drain,
        }
    }

    /// The action needed for new connections to reach the ready instance, or to be held. After a
    /// failure to steer, clients are not held before a temporary instance has started.
    fn keep_steered(&self, seen: &BridgeObservation, lost: bool) -> Action {
        let holds = seen.listens && seen.own == OwnObservation::default();
        let may_hold = self.steering_error.is_none() || seen.temporary.running;
        match (seen.temporary.ready, seen.steering) {
            (false, true) if lost && seen.own.ready => Action::Unsteer,
            (ready, false) if ready || holds && may_hold => Action::Steer,
            (false, _) if !seen.temporary.running => Action::Start,
            _ => Action::Wait,
        }
    }

    /// The next action while new connections go to the bridge. [`Action::Wait`] if they need not.
    fn next_while_steered(
        &mut self,
        seen: &BridgeObservation,
        now: Duration,
        elapsed: Duration,
    ) -> Action {
        match self.step {
            Step::Overlap => self
                .next_before_command(seen, now)
                .unwrap_or_else(|| self.enter_step(Step::Hold)),
            Step::Restore if std::mem::take(&mut self.restores) => {
                // A process that the kubelet starts during the restore counts as the new one. A
                // kube-apiserver from before the bridge is not restarted: the kubelet may not have
                // noticed that the manifest was changed and restored.
                self.before = self.process.filter(|process| Some(*process) != self.first);
                Action::Restore
            }
            Step::Restore => Action::Wait,
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

    fn overlap_time(&self) -> Duration {
        self.limits.speedup.shorten(OVERLAP)
    }

    /// The action that must precede COMMAND while new connections go to the bridge. `None` if
    /// COMMAND may begin.
    fn next_before_command(&self, seen: &BridgeObservation, now: Duration) -> Option<Action> {
        let since = self.steered.map(|since| now.saturating_sub(since));
        let within = |time| since.is_none_or(|since| since < self.limits.speedup.shorten(time));
        // Handshakes that began before the switch may still complete.
        let waits = within(OVERLAP) || (within(NAMED) && !seen.named);
        if waits {
            Some(Action::Wait)
        } else {
            (!seen.prepared).then_some(Action::Prepare)
        }
    }

    fn enter_step(&mut self, step: Step) -> Action {
        (self.step, self.since, self.own_ready, self.wanted) = (step, None, None, false);
        Action::Entered
    }

    /// Ends a bridge before COMMAND, from [`Step::Linger`] on if clients were steered to the bridge,
    /// and otherwise from [`Step::Drain`] on.
    fn give_up(&mut self, why: &str, step: Step) -> Action {
        self.outcome = BridgeOutcome::NotBegun(why.into());
        self.enter_step(step)
    }

    fn enter_await_own(&mut self, must_restart: bool) {
        (self.must_restart, self.ended) = (must_restart, true);
        self.enter_step(Step::AwaitOwn);
    }

    fn begin_restore(&mut self, why: String) {
        (self.trouble, self.restores) = (Some(why), true);
        self.enter_step(Step::Restore);
    }

    fn next_in_start(&mut self, seen: &BridgeObservation, elapsed: Duration) -> Action {
        let TemporaryObservation {
            running,
            ready,
            ends,
        } = seen.temporary;
        if ready {
            return self.enter_step(Step::Settle);
        }
        if ends >= ENDS {
            self.give_up(
                &format!("the temporary kube-apiserver ended {ends} times before it was ready"),
                Step::Drain,
            )
        } else if elapsed >= self.limits.ready {
            let elapsed = format_seconds(elapsed);
            self.give_up(
                &format!("the temporary kube-apiserver is not ready after {elapsed}"),
                Step::Drain,
            )
        } else if running {
            Action::Wait
        } else {
            Action::Start
        }
    }

    fn next_in_settle(
        &mut self,
        seen: &BridgeObservation,
        elapsed: Duration,
        lost: bool,
    ) -> Action {
        if lost {
            return self.give_up(&describe_loss(seen, elapsed), Step::Drain);
        }
        if elapsed < self.limits.settle || !seen.temporary.ready {
            return Action::Wait;
        }
        self.before = seen.own.process;
        self.enter_step(Step::Overlap)
    }

    /// True if the temporary instance has stopped serving. A slow answer does not count.
    fn has_lost_temporary(&mut self, seen: &BridgeObservation, now: Duration) -> bool {
        if seen.temporary.ready {
            self.lost = None;
            return false;
        }
        let counts = self
            .lost
            .get_or_insert(now + self.limits.speedup.shorten(LOST));
        if !seen.temporary.running {
            // An exit counts even if the process has been started again since.
            *counts = now.min(*counts);
        }
        now >= *counts
    }

    /// Checks how long the node's kube-apiserver has not been ready since COMMAND replaced it.
    fn note_own_readiness(&mut self, seen: &BridgeObservation, now: Duration) {
        let counts = (self.commanding || self.step == Step::AwaitOwn) && !seen.own.ready;
        self.own_lost = counts.then(|| self.own_lost.unwrap_or(now));
        let late = self.limits.speedup.shorten(LATE);
        self.own_is_late = self
            .own_lost
            .is_some_and(|since| now.saturating_sub(since) >= late);
    }

    /// The next action while the bridge waits for the node's kube-apiserver to be back for good.
    fn next_while_awaiting_own(
        &mut self,
        seen: &BridgeObservation,
        now: Duration,
        elapsed: Duration,
    ) -> Action {
        let same = self.must_restart && seen.own.process == self.before;
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
                self.enter_step(Step::Linger)
            }
            None if elapsed >= self.limits.ready => {
                let what = match seen.own.process {
                    None => "does not run: nothing listens on its port",
                    _ if same => "is still the process from before: nothing has restarted it",
                    _ if !has_etcd => "has no etcd on this node: the etcd member does not answer",
                    _ => "does not stay ready",
                };
                self.report_own_not_back(&format!(
                    "after {} the node's kube-apiserver {what}",
                    format_seconds(elapsed)
                ))
            }
            _ => Action::Wait,
        }
    }

    fn report_own_not_back(&mut self, why: &str) -> Action {
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
                self.enter_step(Step::Hold)
            }
            OnFailure::End => {
                self.outcome = BridgeOutcome::Abandoned(why);
                self.enter_step(Step::Linger)
            }
        }
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
