//! The record of a rehearsal: its [`log`], sorted by subject. Contains every request of a client,
//! every end of a connection that a client saw, and every end that an instance reported. The
//! [judges](crate::judges) read the record.

pub mod data;
pub mod event;
pub mod format;
pub mod gate_metrics;
pub mod log;
pub(crate) mod loss;
pub(crate) mod progress;
pub mod stamp;
pub mod verdict;

use crate::config::fault::{Fault, Standby};
use data::MarkKind;
use event::{
    Answer, Attempt, Dialed, EndReport, Event, EventKind, FaultStep, Informer, StreamEnd, StreamId,
    WatchSum,
};
use stamp::Stamp;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

/// An event in the life of an instance, such as its start or SIGTERM, and its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    pub instance: String,
    pub mark: MarkKind,
    pub at: Stamp,
    /// Details, such as an exit status. May be empty.
    pub text: String,
}

/// All events in the lives of the instances. A restarted instance has some events twice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Moments(pub Vec<Moment>);

impl Moments {
    #[cfg(test)]
    pub(crate) fn add(&mut self, instance: &str, mark: MarkKind, at: Stamp) {
        self.0.push(Moment {
            instance: instance.to_owned(),
            mark,
            at,
            text: String::new(),
        });
    }

    /// Returns the first time at which an instance had an event of this kind.
    pub fn first_time(&self, instance: &str, mark: MarkKind) -> Option<Stamp> {
        self.times_of_mark(instance, mark).min()
    }

    /// Returns the last time at which an instance had an event of this kind.
    pub(crate) fn last_time(&self, instance: &str, mark: MarkKind) -> Option<Stamp> {
        self.times_of_mark(instance, mark).max()
    }

    fn times_of_mark(&self, instance: &str, mark: MarkKind) -> impl Iterator<Item = Stamp> {
        self.0
            .iter()
            .filter(move |m| m.instance == instance && m.mark == mark)
            .map(|m| m.at)
    }
}

/// An instance of the run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Player {
    pub name: String,
    /// The instance's `/version`. `None` until known.
    pub version: Option<String>,
    /// True for the old and the new instance, false for a version that must never serve.
    pub serves: bool,
}

/// An injected fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectedFault {
    pub fault: Fault,
    pub instance: String,
    pub standby: Standby,
    pub at: Stamp,
    /// When shims or clients noticed the fault. Under a bridge: when the killed process was gone.
    pub noticed: Option<Stamp>,
    /// When the fault was over. `None` if the end was not seen.
    pub over: Option<Stamp>,
    /// Number of connections that the faulty shim had. If known, this is the largest number of
    /// connections that the fault may end or delay.
    pub has: Option<u64>,
    /// Observations, in words.
    pub seen: Vec<String>,
}

/// The control group: clients that dial the instances directly. No proxy can have caused the ends
/// that they saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Control {
    /// Streams by instance.
    pub streams: BTreeMap<String, BTreeSet<StreamId>>,
    /// Ends of streams.
    pub ends: Vec<StreamEnd>,
}

/// The whole log, sorted by what the events are about.
#[derive(Debug, Default)]
pub struct Record {
    /// Attempts, in the order of their answers.
    pub attempts: Vec<Attempt>,
    pub ends: Vec<StreamEnd>,
    pub reports: Vec<(String, EndReport)>,
    /// When the load began. `None` if the load never began.
    pub began: Option<Stamp>,
    /// When the timetables ended. `None` if the load did not come to its end.
    pub over: Option<Stamp>,
    pub moments: Moments,
    /// The instances, in the order of their start.
    pub players: Vec<Player>,
    /// Injected faults.
    pub injected: Vec<InjectedFault>,
    pub watches: Vec<WatchSum>,
    /// Results of the clients that keep a copy of objects.
    pub informers: Vec<Informer>,
    /// Connections that clients dialled to the instances directly, without berth between, and their
    /// ends.
    pub control: Control,
    /// The clients' largest delay behind their timetable.
    pub behind: Duration,
    /// Periods in which a timer of the clients was late.
    pub late: Vec<(Stamp, Stamp)>,
    /// Unexpected errors of processes, in words.
    pub troubles: Vec<String>,
    /// Events that only one judge reads, in the order of the log.
    pub events: Vec<Event>,
}

impl Record {
    /// Returns the period of the load. The load of an aborted run may lack an end, and even a
    /// beginning.
    pub(crate) fn load_period(&self) -> Range<Stamp> {
        let first = self.attempts.iter().map(|a| a.due).min();
        let last = self.attempts.iter().map(|a| a.done).max();
        let began = self.began.or(first).unwrap_or(Stamp(0));
        began..self.over.or(last).unwrap_or(began).max(began)
    }
}

impl Record {
    pub fn of(log: Vec<Event>) -> Self {
        let mut record = Self::default();
        log.into_iter().for_each(|event| record.add(event));
        record
    }

    fn add(&mut self, Event { at, subject, what }: Event) {
        match what {
            EventKind::LoadBegan => self.began = Some(at),
            EventKind::LoadEnded => self.over = Some(at),
            EventKind::Attempt(Dialed::Front, attempt) => self.attempts.push(attempt),
            EventKind::Attempt(
                Dialed::Instance(name),
                Attempt {
                    stream,
                    answer: Answer::Good { .. },
                    ..
                },
            ) => {
                self.control.streams.entry(name).or_default().insert(stream);
            }
            EventKind::Attempt(Dialed::Instance(_), _) => {}
            EventKind::StreamEnd(Dialed::Front, end) => self.ends.push(end),
            EventKind::StreamEnd(Dialed::Instance(_), end) => self.control.ends.push(end),
            EventKind::Behind(behind) => self.behind = self.behind.max(behind),
            EventKind::Late(late) => self.late.push((at.before(late), at)),
            EventKind::Watch(sum) => self.watches.push(sum),
            EventKind::Informer(informer) => self.informers.push(informer),
            EventKind::EndReport(report) => self.reports.push((subject, report)),
            EventKind::Mark { mark, text } => self.moments.0.push(Moment {
                instance: subject,
                mark,
                at,
                text,
            }),
            EventKind::Player(_) if self.players.iter().any(|player| player.name == subject) => {}
            EventKind::Player(serves) => self.players.push(Player {
                name: subject,
                version: None,
                serves,
            }),
            EventKind::Version(version) => {
                self.players
                    .iter_mut()
                    .filter(|player| player.name == subject)
                    .for_each(|player| {
                        player.version = Some(version.clone());
                    });
            }
            EventKind::Fault { fault, standby } => {
                let (noticed, over, has, seen) = (None, None, None, Vec::new());
                self.injected.push(InjectedFault {
                    fault,
                    instance: subject,
                    standby,
                    at,
                    noticed,
                    over,
                    has,
                    seen,
                });
            }
            EventKind::FaultStep(number, step) => {
                if let Some(injected) = self.injected.get_mut(number) {
                    injected.record_fault_step(at, step);
                }
            }
            EventKind::Trouble(trouble) => self.troubles.push(trouble),
            what => self.events.push(Event { at, subject, what }),
        }
    }
}

impl InjectedFault {
    fn record_fault_step(&mut self, at: Stamp, step: FaultStep) {
        match step {
            FaultStep::Noticed => self.noticed = Some(at),
            FaultStep::Over => self.over = Some(at),
            FaultStep::Has(connections) => self.has = Some(connections),
            FaultStep::Seen(seen) => self.seen.push(seen),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judges::tests::{attempt, good_answer};
    use crate::record::{event::Failure, verdict::OLD};
    use EventKind::{
        Attempt as Attempted, Fault as FaultBegan, FaultStep as Step, Player as Plays,
    };

    /// Makes a record of these events, at increasing times. The log is first written as JSON and
    /// read again.
    fn record(events: Vec<(&str, EventKind)>) -> Record {
        let event = |(n, (subject, what)): (usize, (&str, EventKind))| Event {
            at: Stamp(n as u64),
            subject: subject.into(),
            what,
        };
        let log: Vec<Event> = events.into_iter().enumerate().map(event).collect();
        let lines: Vec<String> = log
            .iter()
            .map(|event| serde_json::to_string(event).unwrap())
            .collect();
        let read: Vec<Event> = lines
            .iter()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(read, log);
        Record::of(read)
    }

    #[test]
    fn attempts_are_sorted_by_the_dialled_address() {
        let attempt = |stream: &str, answer| attempt(stream, 1, 2, answer);
        let control =
            |stream, answer| Attempted(Dialed::Instance(OLD.into()), attempt(stream, answer));
        let refused = Answer::Failed(Failure::Refused);
        let sorted = record(vec![
            ("", EventKind::LoadBegan),
            (
                "new-0",
                Attempted(
                    Dialed::Front,
                    attempt(
                        "new-0",
                        Answer::Bad {
                            instance: "old".into(),
                            status: 429,
                        },
                    ),
                ),
            ),
            ("control-old-1", control("control-old-1", good_answer(OLD))),
            ("control-old-1", control("control-old-1", good_answer(OLD))),
            ("control-old-2", control("control-old-2", refused)),
            ("", EventKind::Behind(Duration::from_millis(7))),
            ("", EventKind::Late(Duration::from_nanos(3))),
            ("", EventKind::Note("worth knowing".into())),
            ("", EventKind::LoadEnded),
        ]);
        let streams = |attempts: &[Attempt]| {
            attempts
                .iter()
                .map(|a| a.stream.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (streams(&sorted.attempts), sorted.events.len()),
            (vec!["new-0".to_owned()], 1)
        );
        assert_eq!(
            sorted.control.streams,
            [("old".to_owned(), ["control-old-1".to_owned()].into())].into()
        );
        assert_eq!(
            (sorted.began, sorted.over, sorted.behind),
            (Some(Stamp(0)), Some(Stamp(8)), Duration::from_millis(7))
        );
        assert_eq!(sorted.late, [(Stamp(3), Stamp(6))]);
    }

    #[test]
    fn a_fault_has_its_observations() {
        let sorted = record(vec![
            (
                "new",
                FaultBegan {
                    fault: Fault::Hang,
                    standby: Standby::Sibling,
                },
            ),
            ("", Step(0, FaultStep::Seen("why".into()))),
            ("", Step(0, FaultStep::Over)),
            ("old", Plays(true)),
            ("old", Plays(true)),
            ("old", EventKind::Version("v1.33.0".into())),
        ]);
        let [hang] = &sorted.injected[..] else {
            panic!("{sorted:?}")
        };
        assert_eq!(
            (hang.over, &hang.seen[..], hang.noticed),
            (Some(Stamp(2)), &["why".to_owned()][..], None)
        );
        assert_eq!(
            (sorted.players.len(), sorted.players[0].version.as_deref()),
            (1, Some("v1.33.0"))
        );
    }

    #[test]
    fn stamps_go_forward_and_do_not_overflow() {
        let a = Stamp::now();
        let b = Stamp::now();
        assert!(b >= a && a.0 > 0);
        assert_eq!(a.since(b.plus(Duration::from_secs(1))), Duration::ZERO);
        assert_eq!(Stamp(u64::MAX).plus(Duration::MAX), Stamp(u64::MAX));
        assert_eq!(
            Stamp(5).plus(Duration::from_nanos(2)).since(Stamp(5)),
            Duration::from_nanos(2)
        );
    }
}
