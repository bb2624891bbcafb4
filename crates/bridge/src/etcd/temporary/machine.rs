//! Who serves etcd's data: from observations to what is wanted. Pure, time is an argument.
//!
//! The bridge orders the two processes: the temporary etcd is started only while nobody has the data, is killed where the node's own has
//! the lock, and no client is let through to a process whose database is another file than the one that its path names. etcd's lock on the
//! database is the second guard.

use berth_node::ipc::bridge::EtcdStep;
use berth_node::terms::Speedup;
use std::time::Duration;

/// How long an etcd that does not answer may take to answer calls in flight, before its connections are ended. An etcd that stops waits
/// 7 s for streams that never end. An etcd that gets no CPU may answer yet, and to end its connections costs writes.
const GRACE: Duration = Duration::from_secs(1);

/// How long connections of an etcd that stops are ended.
const ENDS_CONNECTIONS: Duration = Duration::from_secs(12);

/// How long the temporary etcd may give no answer until it is killed, and may take to end.
const HUNG: Duration = Duration::from_secs(10);

/// How long a change of hands takes beside [`GRACE`], and how much longer for each GiB of the database: 602 MiB took 1.8 s, 2.6 GiB 12.7 s
/// (two processors, all of it in memory).
const PAUSE: Duration = Duration::from_secs(2);
const PAUSE_PER_GIB: Duration = Duration::from_secs(5);

/// How much longer than [`HUNG`] it may take to open its database, for each GiB.
const HUNG_PER_GIB: Duration = Duration::from_secs(30);

/// How long it may take from its start until it has the lock, which nobody has as it is started.
const STARTS: Duration = Duration::from_secs(60);

/// How long another file must be seen in the place of the node's own etcd's database. A defragmentation that ends well never shows one.
const SEEN_TWICE: Duration = Duration::from_millis(100);

/// How long the database of a process that answers may be unseen until an operator is told.
const UNSEEN: Duration = Duration::from_secs(10);

/// When the temporary etcd gives the data back although the node's own is not there, while COMMAND may run: a `kubeadm upgrade` whose etcd
/// is not healthy for 150 s copies its backup over the data.
const GIVES_BACK: Duration = Duration::from_secs(90);

/// How long the node's own must have served without a break until its absence is over: kubeadm asks it that often, and it may be well for
/// less between two ends.
const BACK: Duration = Duration::from_secs(15);

/// How long an own etcd that had the data and ended must wait for its next try.
const RETRY: Duration = Duration::from_secs(60);

/// Ends of its process before it served after which the temporary etcd is given up.
const ENDS: u32 = 3;

/// What a process has open as its database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Opened {
    /// Nothing that is seen.
    #[default]
    Unseen,
    /// The file that its path names, without the lock on it.
    Waits,
    /// The file that its path names, locked.
    Named,
    /// A locked file that has another name by now, or none.
    Other,
}

/// Who has the lock on the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Holder {
    /// It cannot be seen, or a process that had it has not ended.
    #[default]
    Unknown,
    /// Nobody has the lock, any other file of the data, or may get it in the next moment.
    Nobody,
    Temporary,
    Another,
}

/// State of the node's own etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnEtcd {
    /// The process that listens on its port.
    pub process: Option<i32>,
    /// It answers handshakes.
    pub answers: bool,
    pub opened: Opened,
}

/// State of the temporary etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TemporaryEtcd {
    pub running: bool,
    /// It was told to end.
    pub ending: bool,
    /// How often its process ended by itself.
    pub ends: u32,
    pub answers: bool,
    pub opened: Opened,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EtcdObservation {
    pub own: OwnEtcd,
    pub temporary: TemporaryEtcd,
    pub holder: Holder,
    /// Of the database, in bytes.
    pub size: u64,
    /// COMMAND runs, or may.
    pub commanding: bool,
    /// The node's own had a database to which no name leads, and the bridge did not end that process: what the path names may lack what
    /// was acknowledged.
    pub unrecovered: bool,
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
    /// The node's own etcd has a database to which no name leads: it is to be saved.
    pub rescues: bool,
}

#[derive(Debug, Clone, Default)]
pub struct EtcdMachine {
    speedup: Speedup,
    step: EtcdStep,
    since: Duration,
    /// Calls in flight have had their time in this step.
    has_stopped: bool,
    /// Since when the node's own does not answer, or not without a break for [`BACK`]; and since when it has served.
    away: Option<Duration>,
    back: Option<Duration>,
    /// The temporary one's ends before this step.
    ends: u32,
    /// Since when the temporary one has given no answer, and whether it has had the lock since.
    silent: Option<(Duration, bool)>,
    /// Since when it has been told to end.
    ending: Option<Duration>,
    /// It is to be killed: that is no end by itself.
    kills: bool,
    /// Since when the node's own has had another file than its path names, and has answered without a database that is seen.
    other: Option<Duration>,
    unseen: Option<Duration>,
    /// It has served: it ends on SIGTERM. As the first process of its namespace, one that waits for the lock ignores that.
    served: bool,
    /// In the step returning: nobody keeps the node's own from the data.
    had_data: bool,
    /// In the step returning: the node's own is ended by the bridge.
    rescued: bool,
    /// How often it had the data since it last served, and ended; and when it may have it again.
    failed: u32,
    retry: Duration,
    given_up: bool,
    is_unseen: bool,
}

/// How long the temporary etcd may take from the lock to its first answer, with a database of this size.
pub fn patience(bytes: u64) -> Duration {
    HUNG + HUNG_PER_GIB.mul_f64(bytes as f64 / f64::from(1_u32 << 30))
}

/// How long clients wait at a change of hands, with a database of this size in memory.
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

    /// One that is slow to answer does not count as one that stops.
    pub fn step(&self) -> EtcdStep {
        if self.step == EtcdStep::Stopping && !self.has_stopped {
            EtcdStep::Own
        } else {
            self.step
        }
    }

    /// What an operator has to decide.
    pub fn trouble(&self) -> Option<String> {
        match self.step() {
            EtcdStep::Own if self.is_unseen => Some(
                "the node's own etcd answers, and which database it has cannot be seen: see whether it is etcd with the data directory of \
                 before"
                    .into(),
            ),
            _ if self.is_unseen => Some(
                "the node's own etcd answers, and which database it has cannot be seen: no client is let through to it; see whether it is \
                 etcd with the data directory of before, then `berth bridge end --now`"
                    .into(),
            ),
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
        self.note(seen, now);
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
                if seen.unrecovered || self.is_due_back(seen, now) =>
            {
                EtcdStep::GivenBack
            }
            EtcdStep::Stopping if temporary.ends.saturating_sub(self.ends) >= ENDS => {
                self.given_up = true;
                EtcdStep::GivenBack
            }
            EtcdStep::Stopping if is_other || self.is_hung(seen, now) => EtcdStep::Returning,
            EtcdStep::Temporary if !temporary.running || must_not_run(seen) => EtcdStep::Stopping,
            // One that answers has other data: COMMAND wanted that.
            EtcdStep::Temporary
                if own.answers
                    || is_other
                    || (own.waits() && now >= self.retry)
                    || self.is_hung(seen, now) =>
            {
                EtcdStep::Returning
            }
            EtcdStep::Returning if !temporary.running && own.process.is_none() => {
                if self.had_data && !self.rescued {
                    (self.failed, self.retry) = (self.failed + 1, now + self.speedup.of(RETRY));
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
            // What has another database gets no time to acknowledge more, and who ended or was given back has no calls in flight.
            self.has_stopped = is_other || next == EtcdStep::Stopping && self.step != EtcdStep::Own;
            (self.step, self.since, self.ends) = (next, now, temporary.ends);
            (self.had_data, self.rescued) = (false, false);
            if next == EtcdStep::Own {
                (self.failed, self.retry, self.given_up) = (0, Duration::ZERO, false);
            }
            Duration::ZERO
        };
        let mut wanted = self.wanted(seen, now, elapsed);
        let is_alone = holder != Holder::Temporary && !temporary.running;
        wanted.rescues = is_other && is_alone;
        self.rescued |= wanted.rescues;
        self.kills = wanted.temporary == Process::Kill && temporary.running;
        wanted
    }

    /// Notes since when things have been as they are seen.
    fn note(&mut self, seen: &EtcdObservation, now: Duration) {
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
            .is_some_and(|since| now.saturating_sub(since) >= self.speedup.of(BACK));
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

    fn wanted(&self, seen: &EtcdObservation, now: Duration, elapsed: Duration) -> EtcdWanted {
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
                // One that was told to end may do so at any time.
                let may_begin = seen.holder == Holder::Nobody && !seen.unrecovered;
                let may_run = !ending && !must_not_run(seen) && (running || may_begin);
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

    /// The temporary one has given no answer for long.
    fn is_hung(&self, seen: &EtcdObservation, now: Duration) -> bool {
        self.silent.is_some_and(|(since, has_lock)| {
            let most = match (has_lock, self.served) {
                (false, false) => STARTS,
                (true, false) => patience(seen.size),
                (_, true) => HUNG,
            };
            now.saturating_sub(since) >= most
        })
    }

    fn is_due_back(&self, seen: &EtcdObservation, now: Duration) -> bool {
        let waits = seen.own.waits() && self.failed == 0;
        let away = self
            .away
            .map_or(Duration::ZERO, |since| now.saturating_sub(since));
        seen.commanding && !waits && away >= self.speedup.of(GIVES_BACK)
    }
}

impl OwnEtcd {
    /// It has the database open, and another process the lock.
    fn waits(&self) -> bool {
        self.opened == Opened::Waits
    }

    /// It may have clients.
    fn serves(&self) -> bool {
        self.answers && self.opened == Opened::Named
    }
}

impl TemporaryEtcd {
    /// It may have clients.
    fn serves(&self) -> bool {
        self.running && self.answers && self.opened == Opened::Named
    }
}

/// The temporary etcd waits for the data that another process has, or serves what no name leads to: the next one has all that is in the log.
fn must_not_run(seen: &EtcdObservation) -> bool {
    seen.temporary.running
        && (seen.holder == Holder::Another || seen.temporary.opened == Opened::Other)
}

#[cfg(test)]
mod tests;
