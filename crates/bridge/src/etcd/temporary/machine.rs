//! The process that serves etcd's data: from observations to wanted states. Pure, time is an
//! argument.
//!
//! The bridge orders the two processes. The temporary etcd is started only while no process has the
//! data, and is killed if the node's etcd has the lock. No client is let through to a process that
//! has opened another file than the database's path names. etcd's lock on the database is the
//! second guard.

use berth_node::ipc::bridge::EtcdStep;
use berth_node::terms::Speedup;
use std::time::Duration;

/// Time for an etcd that does not answer to finish calls in flight, before its connections are
/// ended. A stopping etcd waits 7 s for streams that never end. An etcd without CPU may still
/// answer, and ending its connections costs writes.
const GRACE: Duration = Duration::from_secs(1);

/// Time for which connections of a stopping etcd are ended.
const ENDS_CONNECTIONS: Duration = Duration::from_secs(12);

/// Time after which a silent temporary etcd is killed, and time for the temporary etcd to end.
const HUNG: Duration = Duration::from_secs(10);

/// Time of a change of hands beside [`GRACE`], and additional time for each GiB of the database:
/// 602 MiB took 1.8 s, 2.6 GiB 12.7 s (two processors, all data in memory).
const PAUSE: Duration = Duration::from_secs(2);
const PAUSE_PER_GIB: Duration = Duration::from_secs(5);

/// Additional time beside [`HUNG`] to open the database, for each GiB.
const HUNG_PER_GIB: Duration = Duration::from_secs(30);

/// Time from the temporary etcd's start to its lock, which no process has at the start.
const STARTS: Duration = Duration::from_secs(60);

/// Time for which another file must be seen in place of the node's etcd's database. A successful
/// defragmentation never shows another file.
const SEEN_TWICE: Duration = Duration::from_millis(100);

/// Time after which the operator is told that an answering process has no visible database.
const UNSEEN: Duration = Duration::from_secs(10);

/// Time after which the temporary etcd gives the data back although the node's etcd is away, while
/// COMMAND may run: a `kubeadm upgrade` that finds etcd unhealthy for 150 s copies its backup over
/// the data.
const GIVES_BACK: Duration = Duration::from_secs(90);

/// Time for which the node's etcd must have served without a break to end its absence: kubeadm asks
/// etcd that often, and etcd may be well for a shorter time between two crashes.
const BACK: Duration = Duration::from_secs(15);

/// Time until the node's etcd gets the data again after it had the data and ended.
const RETRY: Duration = Duration::from_secs(60);

/// Number of exits before service after which the temporary etcd is given up.
const ENDS: u32 = 3;

/// The file that a process has opened as its database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Opened {
    /// No visible file.
    #[default]
    Unseen,
    /// The file that the database's path names, without the lock.
    Waits,
    /// The file that the database's path names, locked.
    Named,
    /// A locked file that was renamed or deleted.
    Other,
}

/// Holder of the lock on the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Holder {
    /// The holder cannot be seen, or an earlier holder has not ended.
    #[default]
    Unknown,
    /// No process has a lock on any file of the data, or may get a lock in the next moment.
    Nobody,
    Temporary,
    Another,
}

/// State of the node's etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnEtcd {
    /// The process that listens on the node's etcd's port.
    pub process: Option<i32>,
    /// True if TLS handshakes are answered.
    pub answers: bool,
    pub opened: Opened,
}

/// State of the temporary etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TemporaryEtcd {
    pub running: bool,
    /// True if the process was told to end.
    pub ending: bool,
    /// Number of exits without a request by the bridge.
    pub ends: u32,
    pub answers: bool,
    pub opened: Opened,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EtcdObservation {
    pub own: OwnEtcd,
    pub temporary: TemporaryEtcd,
    pub holder: Holder,
    /// Size of the database, in bytes.
    pub size: u64,
    /// True while COMMAND runs or may run.
    pub commanding: bool,
    /// True if the node's etcd had a database without a name, and the bridge did not end the
    /// process: the file at the path may lack acknowledged writes.
    pub unrecovered: bool,
}

/// Destination of the relay's clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Route {
    #[default]
    Own,
    /// Clients wait for a destination.
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

/// The wanted state until the next observation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EtcdWanted {
    pub route: Route,
    /// End the connections of the stopping etcd.
    pub ends_connections: bool,
    /// Steer the node's kube-apiserver to the relay, too.
    pub steers: bool,
    pub temporary: Process,
    /// Save the database of the node's etcd, which has no name.
    pub rescues: bool,
}

#[derive(Debug, Clone, Default)]
pub struct EtcdMachine {
    speedup: Speedup,
    step: EtcdStep,
    since: Duration,
    /// True once calls in flight have had their time in this step.
    has_stopped: bool,
    /// Time since which the node's etcd is silent, or has not answered without a break for
    /// [`BACK`]; and start of its current service.
    away: Option<Duration>,
    back: Option<Duration>,
    /// Exits of the temporary etcd before this step.
    ends: u32,
    /// Time since which the temporary etcd is silent, and true if it has had the lock since.
    silent: Option<(Duration, bool)>,
    /// Time since which the temporary etcd has been told to end.
    ending: Option<Duration>,
    /// True if the bridge kills the temporary etcd: the exit does not count as one without a
    /// request.
    kills: bool,
    /// Time since which the node's etcd has opened another file than the path names; and time since
    /// which it has answered without a visible database.
    other: Option<Duration>,
    unseen: Option<Duration>,
    /// True if the temporary etcd has served, and so ends on SIGTERM. An etcd that waits for the
    /// lock ignores SIGTERM, as the first process of its namespace.
    served: bool,
    /// In the step returning: nothing keeps the node's etcd from the data.
    had_data: bool,
    /// In the step returning: the bridge ends the node's etcd.
    rescued: bool,
    /// Number of times that the node's etcd had the data and ended since it last served; and time
    /// at which it may have the data again.
    failed: u32,
    retry: Duration,
    given_up: bool,
    is_unseen: bool,
}

/// Time for the temporary etcd from the lock to the first answer, with a database of the given
/// size.
pub fn startup_patience(bytes: u64) -> Duration {
    HUNG + HUNG_PER_GIB.mul_f64(bytes as f64 / f64::from(1_u32 << 30))
}

/// Time for which clients wait at a change of hands, with a database of the given size in memory.
pub fn expected_pause(bytes: u64) -> Duration {
    GRACE + PAUSE + PAUSE_PER_GIB.mul_f64(bytes as f64 / f64::from(1_u32 << 30))
}

impl EtcdMachine {
    pub fn new(speedup: Speedup) -> Self {
        Self {
            speedup,
            ..Self::default()
        }
    }

    /// The step for the status. An etcd that is slow to answer does not count as stopping.
    pub fn step(&self) -> EtcdStep {
        if self.step == EtcdStep::Stopping && !self.has_stopped {
            EtcdStep::Own
        } else {
            self.step
        }
    }

    /// Trouble for the operator to resolve.
    pub fn trouble(&self) -> Option<String> {
        match self.step() {
            EtcdStep::Own if self.is_unseen => Some(
                "the node's etcd answers, but its database cannot be seen: check that the process is an etcd with the data \
                 directory of before"
                    .into(),
            ),
            _ if self.is_unseen => Some(
                "the node's etcd answers, but its database cannot be seen: no client is let through to this etcd; check that the \
                 process is an etcd with the data directory of before, then run `berth bridge end --now`"
                    .into(),
            ),
            _ if self.given_up => Some(
                "the temporary etcd does not start, and etcd.log says why: only the node's etcd uses the data, as without berth".into(),
            ),
            EtcdStep::GivenBack => Some(format!(
                "the node's etcd has not served for 15 s without a break in the last {} s, and COMMAND may put a backup in the place of the data: the temporary etcd \
                 has ended before this can happen; see why the node's etcd does not start",
                GIVES_BACK.as_secs()
            )),
            _ if self.failed > 0 => Some(format!(
                "the node's etcd got the data and ended, {} times: the temporary etcd serves, and gives the data to the node's own \
                 etcd again once a minute; see the log of the node's etcd; the old manifest may help",
                self.failed
            )),
            _ => None,
        }
    }

    pub fn next(&mut self, seen: &EtcdObservation, now: Duration) -> EtcdWanted {
        self.record_times(seen, now);
        let EtcdObservation {
            own,
            temporary,
            holder,
            ..
        } = *seen;
        let is_other = self
            .other
            .is_some_and(|since| now.saturating_sub(since) >= SEEN_TWICE);
        let elapsed = now.saturating_sub(self.since);
        let next = match self.step {
            EtcdStep::Own if is_other => EtcdStep::Returning,
            EtcdStep::Own if own.answers => EtcdStep::Own,
            EtcdStep::Own => EtcdStep::Stopping,
            _ if own.serves() && !(self.step == EtcdStep::Temporary && temporary.running) => {
                EtcdStep::Own
            }
            EtcdStep::Stopping if temporary.serves() && !temporary.ending => EtcdStep::Temporary,
            EtcdStep::Stopping | EtcdStep::Temporary
                if seen.unrecovered || self.is_time_to_give_back(seen, now) =>
            {
                EtcdStep::GivenBack
            }
            EtcdStep::Stopping if temporary.ends.saturating_sub(self.ends) >= ENDS => {
                self.given_up = true;
                EtcdStep::GivenBack
            }
            EtcdStep::Stopping if is_other || self.is_hung(seen, now) => EtcdStep::Returning,
            EtcdStep::Temporary if !temporary.running || temporary_must_end(seen) => {
                EtcdStep::Stopping
            }
            // An answering etcd of the node has other data, as COMMAND wanted.
            EtcdStep::Temporary
                if own.answers
                    || is_other
                    || (own.waits_for_lock() && now >= self.retry)
                    || self.is_hung(seen, now) =>
            {
                EtcdStep::Returning
            }
            EtcdStep::Returning if !temporary.running && own.process.is_none() => {
                if self.had_data && !self.rescued {
                    (self.failed, self.retry) =
                        (self.failed + 1, now + self.speedup.shorten(RETRY));
                }
                EtcdStep::Stopping
            }
            EtcdStep::GivenBack if !seen.commanding && !self.given_up && !seen.unrecovered => {
                EtcdStep::Stopping
            }
            step => step,
        };
        let elapsed = if next == self.step {
            self.has_stopped |= elapsed >= GRACE;
            elapsed
        } else {
            // A process with another database gets no time to acknowledge more, and an etcd that
            // ended or was given back has no calls in flight.
            self.has_stopped = is_other || next == EtcdStep::Stopping && self.step != EtcdStep::Own;
            (self.step, self.since, self.ends) = (next, now, temporary.ends);
            (self.had_data, self.rescued) = (false, false);
            if next == EtcdStep::Own {
                (self.failed, self.retry, self.given_up) = (0, Duration::ZERO, false);
            }
            Duration::ZERO
        };
        let mut wanted = self.decide_wanted(seen, now, elapsed);
        let is_alone = holder != Holder::Temporary && !temporary.running;
        wanted.rescues = is_other && is_alone;
        self.rescued |= wanted.rescues;
        self.kills = wanted.temporary == Process::Kill && temporary.running;
        wanted
    }

    /// Notes since when the observed conditions hold.
    fn record_times(&mut self, seen: &EtcdObservation, now: Duration) {
        let EtcdObservation {
            own,
            temporary,
            holder,
            ..
        } = *seen;
        let since = |known: Option<Duration>, is_so: bool| is_so.then(|| known.unwrap_or(now));
        // A slow answer is no absence.
        let serves = own.serves() || self.back.is_some() && self.step() == EtcdStep::Own;
        self.back = since(self.back, serves);
        let is_back = self
            .back
            .is_some_and(|since| now.saturating_sub(since) >= self.speedup.shorten(BACK));
        self.away = since(self.away, !own.answers || self.away.is_some() && !is_back);
        self.ending = since(self.ending, temporary.ending);
        self.other = since(self.other, own.opened == Opened::Other);
        self.unseen = since(self.unseen, own.answers && own.opened == Opened::Unseen);
        self.is_unseen = self
            .unseen
            .is_some_and(|since| now.saturating_sub(since) >= UNSEEN);
        let has_lock = holder == Holder::Temporary;
        let silent = self
            .silent
            .filter(|(_, had_lock)| *had_lock == has_lock)
            .unwrap_or((now, has_lock));
        self.silent = (temporary.running && !temporary.serves()).then_some(silent);
        self.served = temporary.running && (self.served || temporary.serves());
        self.had_data |=
            self.step == EtcdStep::Returning && !temporary.running && own.process.is_some();
        if self.kills && !temporary.running {
            self.ends = self.ends.saturating_add(1);
        }
    }

    fn decide_wanted(
        &self,
        seen: &EtcdObservation,
        now: Duration,
        elapsed: Duration,
    ) -> EtcdWanted {
        let ends_connections = self.has_stopped && elapsed < ENDS_CONNECTIONS;
        let is_late = self
            .ending
            .is_some_and(|since| now.saturating_sub(since) >= HUNG);
        let end = if self.served && !is_late && seen.temporary.opened != Opened::Other {
            Process::Terminate
        } else {
            Process::Kill
        };
        let hold = EtcdWanted {
            route: Route::Hold,
            temporary: end,
            ..EtcdWanted::default()
        };
        match self.step {
            EtcdStep::Own if seen.own.opened == Opened::Other => hold,
            EtcdStep::Own => EtcdWanted {
                route: Route::Own,
                ..hold
            },
            EtcdStep::GivenBack => hold,
            EtcdStep::Stopping => {
                let TemporaryEtcd {
                    running, ending, ..
                } = seen.temporary;
                // An etcd that was told to end may exit at any time.
                let may_begin = seen.holder == Holder::Nobody && !seen.unrecovered;
                let may_run = !ending && !temporary_must_end(seen) && (running || may_begin);
                let temporary = if may_run { Process::Run } else { Process::Kill };
                EtcdWanted {
                    ends_connections,
                    steers: true,
                    temporary,
                    ..hold
                }
            }
            EtcdStep::Temporary => EtcdWanted {
                route: Route::Temporary,
                steers: true,
                temporary: Process::Run,
                ..hold
            },
            EtcdStep::Returning => EtcdWanted {
                ends_connections,
                ..hold
            },
        }
    }

    /// True if the temporary etcd has been silent for too long.
    fn is_hung(&self, seen: &EtcdObservation, now: Duration) -> bool {
        self.silent.is_some_and(|(since, has_lock)| {
            let most = match (has_lock, self.served) {
                (false, false) => STARTS,
                (true, false) => startup_patience(seen.size),
                (_, true) => HUNG,
            };
            now.saturating_sub(since) >= most
        })
    }

    fn is_time_to_give_back(&self, seen: &EtcdObservation, now: Duration) -> bool {
        let waits = seen.own.waits_for_lock() && self.failed == 0;
        let away = self
            .away
            .map_or(Duration::ZERO, |since| now.saturating_sub(since));
        seen.commanding && !waits && away >= self.speedup.shorten(GIVES_BACK)
    }
}

impl OwnEtcd {
    /// True if the process has the database open, and another process has the lock.
    fn waits_for_lock(&self) -> bool {
        self.opened == Opened::Waits
    }

    /// True if the process may have clients.
    fn serves(&self) -> bool {
        self.answers && self.opened == Opened::Named
    }
}

impl TemporaryEtcd {
    /// True if the process may have clients.
    fn serves(&self) -> bool {
        self.running && self.answers && self.opened == Opened::Named
    }
}

/// True if the temporary etcd waits for data that another process has, or serves a file without a
/// name: the next process gets everything from the log.
fn temporary_must_end(seen: &EtcdObservation) -> bool {
    seen.temporary.running
        && (seen.holder == Holder::Another || seen.temporary.opened == Opened::Other)
}

#[cfg(test)]
mod tests;
