//! Who serves etcd's data: from observations to what is wanted. Pure, time is an argument.
//!
//! The lock on etcd's database orders the two: whoever has it serves, and the other one waits for it, however they were started. So no
//! decision here can let both write; a wrong one costs a pause.

use berth_node::ipc::bridge::EtcdStep;
use berth_node::terms::Speedup;
use std::time::Duration;

/// How long calls in flight may take to be answered by an etcd that stops, before its connections are ended: without that it waits 7 s
/// for streams that never end.
const GRACE: Duration = Duration::from_millis(300);

/// The same for one that gets no CPU: it may answer yet, and what ends the connections of one that serves costs writes.
const STARVED_GRACE: Duration = Duration::from_secs(3);

/// How long new connections are held while neither serves. kube-apiserver gives up a dial after 20 s, and its clients theirs after 10 s.
const HOLD: Duration = Duration::from_secs(12);

/// How long the temporary etcd may give no answer until it is killed, and may take to end.
const HUNG: Duration = Duration::from_secs(10);

/// When the temporary etcd gives the data back although the node's own is not there, while COMMAND runs: a `kubeadm upgrade` whose etcd
/// is not healthy for 150 s copies its backup over the data.
const GIVES_BACK: Duration = Duration::from_secs(90);

/// How long an own etcd that had the data and ended must wait for its next try.
const RETRY: Duration = Duration::from_secs(60);

/// Ends of its process before it served after which the temporary etcd is given up.
const ENDS: u32 = 3;

/// State of the node's own etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnEtcd {
    /// The process that listens on its port.
    pub process: Option<i32>,
    /// It answers handshakes.
    pub answers: bool,
    /// It has the database open, and another process the lock.
    pub waits: bool,
    /// Since it answers no more, it has waited for CPU much of the time.
    pub starved: bool,
}

/// State of the temporary etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TemporaryEtcd {
    pub running: bool,
    /// It was told to end.
    pub ending: bool,
    /// How often its process ended by itself.
    pub ends: u32,
    /// It has the lock, and answers.
    pub serves: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EtcdObservation {
    pub own: OwnEtcd,
    pub temporary: TemporaryEtcd,
    /// COMMAND runs.
    pub commanding: bool,
}

/// Where the relay connects its clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Route {
    #[default]
    Own,
    /// Nowhere yet: they wait.
    Hold,
    Temporary,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Process {
    Run,
    #[default]
    Terminate,
    Kill,
}

/// What is to be, until the next observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EtcdWanted {
    pub route: Route,
    /// The connections of whoever stops are ended.
    pub ends_connections: bool,
    /// The node's kube-apiserver comes to the relay, too.
    pub steers: bool,
    pub temporary: Process,
}

#[derive(Debug, Default)]
pub struct EtcdMachine {
    speedup: Speedup,
    step: EtcdStep,
    since: Duration,
    /// Calls in flight have had their time in this step.
    has_stopped: bool,
    /// Since when the node's own does not answer.
    away: Option<Duration>,
    /// The temporary one's ends before this step.
    ends: u32,
    /// Since when the temporary one has given no answer, and has been told to end.
    silent: Option<Duration>,
    ending: Option<Duration>,
    /// It has served: it ends on SIGTERM. As the first process of its namespace, one that waits for the lock ignores that.
    served: bool,
    /// In the step returning: nobody keeps the node's own from the data.
    had_data: bool,
    /// How often it had the data since it last served, and ended; and when it may have it again.
    failed: u32,
    retry: Duration,
    given_up: bool,
}

impl EtcdMachine {
    pub fn new(speedup: Speedup) -> Self {
        Self { speedup, ..Self::default() }
    }

    /// One that is slow to answer does not count as one that stops.
    pub fn step(&self) -> EtcdStep {
        if self.step == EtcdStep::Stopping && !self.has_stopped { EtcdStep::Own } else { self.step }
    }

    /// What an operator has to decide.
    pub fn trouble(&self) -> Option<String> {
        match self.step() {
            EtcdStep::Own => None,
            _ if self.given_up => Some(
                "the temporary etcd does not start: the node's own has the data alone, as without berth; etcd.log says why".into(),
            ),
            EtcdStep::GivenBack => Some(format!(
                "the node's own etcd is not there, {} s after it stopped, and COMMAND may put a backup in the place of its data: the \
                 temporary etcd has ended before that; see why the node's own does not start",
                GIVES_BACK.as_secs()
            )),
            _ if self.failed > 0 => Some(format!(
                "the node's own etcd had the data and ended, {} times: the temporary one serves, and the node's own gets it again once a \
                 minute; its log says why, and its old manifest may help",
                self.failed
            )),
            _ => None,
        }
    }

    pub fn next(&mut self, seen: &EtcdObservation, now: Duration) -> EtcdWanted {
        let EtcdObservation { own, temporary, .. } = *seen;
        if own.answers {
            self.away = None;
        } else {
            self.away.get_or_insert(now);
        }
        if temporary.serves || !temporary.running {
            self.silent = None;
        } else {
            self.silent.get_or_insert(now);
        }
        self.ending = if temporary.ending { self.ending.or(Some(now)) } else { None };
        self.served = temporary.running && (self.served || temporary.serves);
        self.had_data |= self.step == EtcdStep::Returning && !temporary.running && own.process.is_some();
        let elapsed = now.saturating_sub(self.since);
        let next = match self.step {
            EtcdStep::Own if own.answers => EtcdStep::Own,
            EtcdStep::Own => EtcdStep::Stopping,
            _ if own.answers && !(self.step == EtcdStep::Temporary && temporary.running) => EtcdStep::Own,
            EtcdStep::Stopping if temporary.serves && !temporary.ending => EtcdStep::Temporary,
            EtcdStep::Stopping | EtcdStep::Temporary if self.is_due_back(seen, now) => EtcdStep::GivenBack,
            EtcdStep::Stopping if temporary.ends.saturating_sub(self.ends) >= ENDS => {
                self.given_up = true;
                EtcdStep::GivenBack
            }
            EtcdStep::Stopping if own.waits && self.is_hung(now) => EtcdStep::Returning,
            EtcdStep::Temporary if !temporary.running => EtcdStep::Stopping,
            // One that answers has other data: COMMAND wanted that.
            EtcdStep::Temporary if own.answers || (own.waits && now >= self.retry) || self.is_hung(now) => {
                EtcdStep::Returning
            }
            EtcdStep::Returning if !temporary.running && own.process.is_none() => {
                if self.had_data {
                    (self.failed, self.retry) = (self.failed + 1, now + self.speedup.of(RETRY));
                }
                EtcdStep::Stopping
            }
            EtcdStep::GivenBack if !seen.commanding && !self.given_up => EtcdStep::Stopping,
            step => step,
        };
        if next != self.step {
            (self.step, self.since, self.ends, self.had_data) = (next, now, temporary.ends, false);
            self.has_stopped = false;
            if next == EtcdStep::Own {
                (self.failed, self.retry, self.given_up) = (0, Duration::ZERO, false);
            }
            return self.wanted(seen, now, Duration::ZERO);
        }
        let starved = own.starved && self.step == EtcdStep::Stopping;
        self.has_stopped |= elapsed >= if starved { STARVED_GRACE } else { GRACE };
        self.wanted(seen, now, elapsed)
    }

    fn wanted(&self, seen: &EtcdObservation, now: Duration, elapsed: Duration) -> EtcdWanted {
        let held = if elapsed < HOLD { Route::Hold } else { Route::Own };
        let ends_connections = self.has_stopped && held == Route::Hold;
        let is_late = self.ending.is_some_and(|since| now.saturating_sub(since) >= HUNG);
        let end = if self.served && !is_late { Process::Terminate } else { Process::Kill };
        match self.step {
            EtcdStep::Own | EtcdStep::GivenBack => EtcdWanted { temporary: end, ..EtcdWanted::default() },
            EtcdStep::Stopping => {
                // One that was told to end may do so at any time.
                let temporary = if seen.temporary.ending { Process::Kill } else { Process::Run };
                EtcdWanted { route: held, ends_connections, steers: true, temporary }
            }
            EtcdStep::Temporary => {
                EtcdWanted { route: Route::Temporary, ends_connections: false, steers: true, temporary: Process::Run }
            }
            EtcdStep::Returning => EtcdWanted { route: held, ends_connections, steers: false, temporary: end },
        }
    }

    /// The temporary one has given no answer for long. (One that waits for the lock gives none either.)
    fn is_hung(&self, now: Duration) -> bool {
        self.silent.is_some_and(|since| now.saturating_sub(since) >= HUNG)
    }

    fn is_due_back(&self, seen: &EtcdObservation, now: Duration) -> bool {
        let waits = seen.own.waits && self.failed == 0;
        let away = self.away.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        seen.commanding && !waits && away >= self.speedup.of(GIVES_BACK)
    }
}

#[cfg(test)]
mod tests;
