//! The verdicts of all judges on a run.

use super::*;
use crate::config::{
    LoadPlan,
    fault::{Fault, Standby},
};
use crate::record::{
    Control, InjectedFault, Player,
    data::{Losses, MarkKind, Timeline, Value},
    event::{
        Answer, Attempt, ConnectionKind, EndReport, EndedBy, Event, Failure, Footprint, Informer,
        Protocol, Signed, StreamEnd, StreamKind, WatchSum,
    },
    gate_metrics::GateMetrics,
    loss::Loss,
    verdict::{NEW, OLD},
};

/// Returns the stamp of a moment, given in milliseconds from the begin of the load. The load begins
/// at 10 s of the clock.
pub(crate) fn stamp_at(ms: i64) -> Stamp {
    Stamp((10_000 + ms) as u64 * 1_000_000)
}

pub(crate) fn good_answer(instance: &str) -> Answer {
    Answer::Good {
        instance: instance.into(),
    }
}

/// An attempt on a new connection.
pub(crate) fn attempt(stream: &str, due: i64, done: i64, answer: Answer) -> Attempt {
    let kind = ConnectionKind::New;
    Attempt {
        kind,
        writes: false,
        stream: stream.into(),
        due: stamp_at(due),
        done: stamp_at(done),
        answer,
    }
}

/// The end of a stream on the instance `old`.
pub(crate) fn end(what: StreamKind, stream: &str, ms: i64) -> StreamEnd {
    StreamEnd {
        stream: stream.into(),
        what,
        protocol: Protocol::Http2,
        instance: OLD.into(),
        at: stamp_at(ms),
        how: Failure::Closed,
        in_flight: true,
        signed: None,
    }
}

/// A report of the instance `old` about the end of a stream.
pub(crate) fn report(stream: &str, by: EndedBy, ms: i64) -> (String, EndReport) {
    let peer = ([127, 0, 0, 1], 1).into();
    (
        OLD.into(),
        EndReport {
            stream: stream.into(),
            peer,
            by,
            at: stamp_at(ms),
            rejected: 0,
        },
    )
}

/// A fault of an instance that has a sibling. `until` is `None` if the end of the fault was not
/// seen.
pub(crate) fn injected(
    fault: Fault,
    instance: &str,
    from: i64,
    until: Option<i64>,
) -> InjectedFault {
    let (instance, at, over, seen) = (
        instance.into(),
        stamp_at(from),
        until.map(stamp_at),
        vec!["seen".into()],
    );
    InjectedFault {
        fault,
        instance,
        standby: Standby::Sibling,
        at,
        noticed: None,
        over,
        has: None,
        seen,
    }
}

/// A good run of 3 s, with an answer every 10 ms: by the instance `old` for 2 s, and then by `new`,
/// which is ready after 1 s.
pub(crate) fn record() -> Record {
    let mut record = Record {
        began: Some(stamp_at(0)),
        over: Some(stamp_at(3_000)),
        ..Record::default()
    };
    for n in 0..300 {
        let answer = good_answer(if n < 200 { OLD } else { NEW });
        record
            .attempts
            .push(attempt(&format!("new-{n}"), n * 10, n * 10 + 2, answer));
    }
    let events = [(OLD.to_owned(), 20), (NEW.to_owned(), 10)].into();
    record.watches.push(WatchSum {
        client: "watch-0".into(),
        events,
        ..WatchSum::default()
    });
    push_marks(
        &mut record,
        &[
            (OLD, MarkKind::Started, -500),
            (OLD, MarkKind::Ready, -100),
            (OLD, MarkKind::Ready, -50),
            (NEW, MarkKind::Listening, 900),
            (NEW, MarkKind::Ready, 1_000),
            (OLD, MarkKind::Sigterm, 1_990),
            (OLD, MarkKind::Terminating, 1_995),
            (OLD, MarkKind::Drained, 2_100),
        ],
    );
    record.players = [(OLD, "v1.33.0"), (NEW, "v1.34.0")]
        .map(|(name, version)| player(name, version))
        .into();
    record
}

fn player(name: &str, version: &str) -> Player {
    Player {
        name: name.into(),
        version: Some(version.into()),
        serves: true,
    }
}

fn push_marks(record: &mut Record, marks: &[(&str, MarkKind, i64)]) {
    marks
        .iter()
        .for_each(|(instance, mark, ms)| record.moments.add(instance, *mark, stamp_at(*ms)));
}

fn event(ms: i64, what: EventKind) -> Event {
    Event {
        at: stamp_at(ms),
        subject: String::new(),
        what,
    }
}

/// A plan with one watch, and a storm of `storm` clients.
pub(crate) fn plan(storm: u32) -> Plan {
    Plan {
        load: LoadPlan {
            watches: 1,
            storm,
            ..LoadPlan::default()
        },
        ..Plan::default()
    }
}

fn judge_record(record: &Record) -> Ran {
    let ran = judge(record, &plan(0), None);
    // The page can draw a timeline only if all of its lists have the same length.
    let Timeline {
        answered,
        lost,
        allowed,
        ended_by_instance,
        ..
    } = &ran.timeline;
    let lists = || {
        answered
            .values()
            .chain(lost.values())
            .chain([ended_by_instance])
    };
    assert!(lists().all(|list| list.len() == allowed.len()));
    ran
}

/// Judges a good run that `spoil` has changed.
fn judge_spoiled(spoil: impl FnOnce(&mut Record)) -> Ran {
    let mut record = record();
    spoil(&mut record);
    judge_record(&record)
}

/// Number of losses.
fn count_lost(ran: &Ran) -> u64 {
    ran.lost.values().sum()
}

fn read_figure(ran: &Ran, name: &str) -> u64 {
    match ran.find_figure(name) {
        Some(Value::Count(count)) => count,
        other => panic!("{name}: {other:?}"),
    }
}

fn read_ms(ran: &Ran, name: &str) -> f64 {
    match ran.find_figure(name) {
        Some(Value::Ms(ms)) => ms,
        other => panic!("{name}: {other:?}"),
    }
}

fn read_note<'a>(ran: &'a Ran, name: &str) -> &'a str {
    &ran.rows.iter().find(|row| row.name == name).unwrap().note
}

/// Every kind of failure except failures of this machine, each with the loss that it causes.
fn all_failures() -> [(Failure, Loss); 7] {
    [
        (Failure::Refused, Loss::Refused),
        (Failure::Reset, Loss::Reset),
        (Failure::Closed, Loss::Closed),
        (Failure::Tls("alert".into()), Loss::Tls),
        (Failure::X509("x509".into()), Loss::Tls),
        (Failure::Http("h2".into()), Loss::Http),
        (Failure::Unanswered, Loss::Unanswered),
    ]
}

#[test]
fn a_run_without_losses_gets_the_verdict_held() {
    let ran = judge_record(&record());
    assert!(
        ran.verdict == Verdict::Held && ran.lost.is_empty(),
        "{ran:#?}"
    );
    assert_eq!((ran.load_ms, ran.instances.len()), (3_000, 2));
    let counts = [
        "requests",
        "connections on old",
        "connections on new",
        "watch events",
    ];
    assert_eq!(
        counts.map(|name| read_figure(&ran, name)),
        [300, 200, 100, 30]
    );
    for name in ["median wait", "99th percentile", "longest wait"] {
        assert_eq!(ran.find_figure(name), Some(Value::Ms(2.0)), "{name}");
    }
    let timeline = ran.timeline;
    assert_eq!((timeline.step_ms, timeline.allowed.len()), (50, 61));
    assert_eq!(
        [OLD, NEW].map(|name| timeline.answered[name].iter().sum::<u64>()),
        [200, 100]
    );
    assert_eq!(timeline.answered[OLD][..2], [5, 5]);
}

#[test]
fn a_storm_shows_when_its_clients_were_served_and_what_failed_before() {
    let bad = || Answer::Bad {
        instance: NEW.into(),
        status: 429,
    };
    let storm = |tries: Vec<(i64, Answer)>| {
        let tries = tries
            .into_iter()
            .map(|(ms, answer)| event(ms, EventKind::StormTry(answer)));
        let (began, over) = (
            event(2_100, EventKind::StormBegan(3)),
            event(2_900, EventKind::StormEnded),
        );
        judge(
            &Record {
                events: [began].into_iter().chain(tries).chain([over]).collect(),
                ..record()
            },
            &plan(3),
            None,
        )
    };
    let served = [
        (2_110, good_answer(NEW)),
        (2_900, good_answer(NEW)),
        (2_600, good_answer(NEW)),
    ];
    let [gave_up, reset, x509, local] = [
        Failure::Unanswered,
        Failure::Reset,
        Failure::X509("other".into()),
        Failure::Local("no port".into()),
    ]
    .map(Answer::Failed);
    let failed = [(2_100, reset), (2_120, bad()), (2_400, gave_up.clone())];
    // A client that retried and was served lost nothing.
    let ran = storm([&served[..], &failed].concat());
    assert_eq!(
        (ran.verdict, count_lost(&ran), read_figure(&ran, "requests")),
        (Verdict::Held, 0, 300)
    );
    let name = "clients of the storm";
    assert_eq!(read_figure(&ran, name), 3);
    assert_eq!(
        read_note(&ran, name),
        "all served within 800 ms; 1 try given up, 1 connection reset, 1 error status"
    );
    assert_eq!(
        ["half of the storm served within", "storm served within"].map(|name| read_ms(&ran, name)),
        [500.0, 800.0]
    );
    let promise = &ran.promises[0];
    assert_eq!(
        (promise.fault.as_str(), promise.held, promise.to_ms),
        ("storm", true, Some(2_900))
    );
    let seen = [
        "all 3 clients were served within 800.0ms",
        "3 tries failed, of which 1 were given up",
    ];
    assert_eq!(promise.what_happened, seen);
    assert!(ran.marks.iter().any(|mark| mark.describe_mark() == "storm"));
    for (tries, why) in [
        (
            [&served[..2], &[(2_400, gave_up)]].concat(),
            "broken: of 3 clients only 2 were served",
        ),
        (
            [&served[..], &[(2_400, x509)]].concat(),
            "broken: untrusted certificates: 1",
        ),
    ] {
        let ran = storm(tries);
        let promise = &ran.promises[0];
        assert_eq!(
            (ran.verdict, promise.held, promise.what_happened[0].as_str()),
            (Verdict::Broken, false, why)
        );
    }
    assert_eq!(
        storm([&served[..], &[(2_400, local)]].concat())
            .objections
            .len(),
        1
    );
    assert_eq!(
        judge(&record(), &plan(3), None).objections,
        ["there was no storm"]
    );
}

/// A run in which a bridge's temporary instance takes over at 1000 ms, and the instance `new` at
/// 2000 ms. `new` is ready at 1500 ms.
fn bridged_record() -> Record {
    let mut record = record();
    let bridge = "old-bridge";
    for attempt in record
        .attempts
        .iter_mut()
        .filter(|attempt| (stamp_at(1_000)..stamp_at(2_000)).contains(&attempt.due))
    {
        attempt.answer = good_answer(bridge);
    }
    record.moments.0.clear();
    push_marks(
        &mut record,
        &[
            (OLD, MarkKind::Ready, 0),
            (bridge, MarkKind::Ready, 900),
            (OLD, MarkKind::Terminating, 1_100),
            (OLD, MarkKind::Drained, 1_150),
            (NEW, MarkKind::Ready, 1_500),
            (bridge, MarkKind::Terminating, 2_000),
            (bridge, MarkKind::Drained, 2_100),
        ],
    );
    record.players.insert(1, player(bridge, "v1.33.0"));
    record
}

#[test]
fn the_temporary_instance_of_a_bridge_takes_over_and_is_taken_over_from() {
    let ran = judge_record(&bridged_record());
    assert!(
        ran.verdict == Verdict::Held && read_figure(&ran, "connections on old-bridge") == 100,
        "{ran:#?}"
    );

    let mut early = bridged_record();
    early.moments.0[4].at = stamp_at(2_001);
    assert_eq!(
        judge_record(&early).objections,
        ["old-bridge was stopped before new was ready"]
    );

    let mut idle = bridged_record();
    for attempt in idle
        .attempts
        .iter_mut()
        .filter(|attempt| attempt.answer == good_answer("old-bridge"))
    {
        attempt.answer = good_answer(OLD);
    }
    assert_eq!(
        judge_record(&idle).objections[0],
        "old-bridge served only 0 new connections"
    );
}

#[test]
fn every_failure_of_a_new_connection_is_lost() {
    for (failure, loss) in all_failures() {
        let ran = judge_spoiled(|record| {
            record
                .attempts
                .push(attempt("x", 0, 1, Answer::Failed(failure)));
        });
        assert_eq!(
            (ran.verdict, ran.lost, ran.examples.len()),
            (Verdict::Lost, [(loss, 1)].into(), 1)
        );
    }
}

#[test]
fn an_instance_cannot_excuse_what_never_reached_it() {
    for failure in [
        Failure::Refused,
        Failure::Unanswered,
        Failure::Tls("x509".into()),
    ] {
        let ran = judge_spoiled(|record| {
            record
                .attempts
                .push(attempt("x", 5, 6, Answer::Failed(failure)));
            record.reports.push(report("x", EndedBy::Instance, 1));
        });
        assert_eq!(count_lost(&ran), 1);
    }
}

/// Only the counting of ends is tested here. The evidence for who ended a stream is tested in
/// `ends`.
#[test]
fn streams_that_their_instance_ended_are_counted_apart_and_others_are_lost() {
    for (reported, losses, ended) in [
        (Some(EndedBy::Instance), Losses::new(), 1),
        (None, [(Loss::StreamEnded, 1)].into(), 0),
    ] {
        let ran = judge_spoiled(|record| {
            record.ends.push(end(StreamKind::Kept, "kept", 510));
            let failed = attempt("kept", 509, 510, Answer::Failed(Failure::Reset));
            record.attempts.push(Attempt {
                kind: ConnectionKind::Kept,
                ..failed
            });
            record
                .reports
                .extend(reported.map(|by| report("kept", by, 510)));
        });
        assert_eq!(
            (
                &ran.lost,
                read_figure(&ran, "streams ended by the instance")
            ),
            (&losses, ended)
        );
        assert_eq!(ran.timeline.ended_by_instance[10], ended);
    }
}

#[test]
fn error_statuses_are_lost_unless_the_instance_turned_them_away() {
    let bad = |stream: &str, ms: i64, status: u16| {
        let answer = Answer::Bad {
            instance: OLD.into(),
            status,
        };
        Attempt {
            kind: ConnectionKind::Kept,
            ..attempt(stream, ms, ms + 1, answer)
        }
    };
    let rejected_and_lost = |ran: &Ran| {
        (
            read_figure(ran, "rejected by the instance"),
            count_lost(ran),
        )
    };
    let ran = judge_spoiled(|record| {
        record
            .attempts
            .extend(["a", "a", "b"].map(|stream| bad(stream, 1, 503)));
        let (name, report) = report("a", EndedBy::Instance, 2);
        record.reports.push((
            name,
            EndReport {
                rejected: 1,
                ..report
            },
        ));
    });
    assert_eq!(rejected_and_lost(&ran), (1, 2));
    // Without a report, the status of a stopping instance shows a rejection.
    let answers = [(2_050, 429), (2_050, 503), (2_050, 500), (1, 503)];
    let ran = judge_spoiled(|record| {
        record
            .attempts
            .extend(answers.map(|(ms, status)| bad("a", ms, status)));
    });
    assert_eq!(rejected_and_lost(&ran), (2, 2));
}

#[test]
fn a_new_connection_that_its_instance_ends_is_counted_apart() {
    for (signed, count) in [(Some(Signed::GoAway), 0), (None, 1)] {
        let ran = judge_spoiled(|record| {
            let failed = Answer::Failed(Failure::Http("go away".into()));
            record.attempts.push(attempt("new-x", 2_050, 2_051, failed));
            record.ends.push(StreamEnd {
                signed,
                ..end(StreamKind::New, "new-x", 2_050)
            });
        });
        assert_eq!(
            (
                count_lost(&ran),
                read_figure(&ran, "streams ended by the instance")
            ),
            (count, 1 - count)
        );
        assert!(!ran.lost.contains_key(&Loss::StreamEnded));
    }
}

#[test]
fn an_informer_must_hold_what_was_written() {
    let nothing = Informer::default;
    for (informer, loss) in [
        (
            Informer {
                missing: 1,
                ..nothing()
            },
            Loss::EventMissed,
        ),
        (
            Informer {
                stale: 1,
                ..nothing()
            },
            Loss::EventMissed,
        ),
        (
            Informer {
                duplicated: 1,
                ..nothing()
            },
            Loss::EventDuplicated,
        ),
    ] {
        let whole = Informer {
            written: 9,
            held: 9,
            relists: 1,
            ..nothing()
        };
        let ran = judge_spoiled(|record| record.informers.extend([whole, informer]));
        assert_eq!(
            (&ran.lost, read_figure(&ran, "informers")),
            (&[(loss, 1)].into(), 1)
        );
    }
}

#[test]
fn a_run_that_tests_nothing_does_not_hold() {
    fn remove_marks(r: &mut Record, name: &str, mark: Option<MarkKind>) {
        r.moments
            .0
            .retain(|m| m.instance != name || mark.is_some_and(|mark| m.mark != mark));
    }
    fn add_failed_attempt(r: &mut Record, failure: Failure) {
        r.attempts.push(attempt("x", 0, 1, Answer::Failed(failure)));
    }
    fn add_kill_trouble(r: &mut Record) {
        r.troubles.push("old had to be killed".into());
    }
    fn set_clients_behind(r: &mut Record) {
        r.behind = Duration::from_secs(2);
    }
    type Spoil = fn(&mut Record);
    use Verdict::{Lost, TooBusy, Unproven, Wrong};
    let spoils: [(Spoil, Verdict); 15] = [
        (|r| *r = Record::default(), Wrong),
        (|r| r.players.truncate(1), Wrong),
        (set_clients_behind, TooBusy),
        (|r| r.attempts.truncate(30), Unproven),
        (
            |r| {
                r.attempts
                    .retain(|attempt| attempt.answer == good_answer(OLD));
            },
            Unproven,
        ),
        (|r| r.watches.clear(), Wrong),
        (
            |r| r.watches[0].events.retain(|name, _| name == OLD),
            Unproven,
        ),
        (|r| remove_marks(r, OLD, None), Wrong),
        (|r| remove_marks(r, NEW, None), Wrong),
        (|r| remove_marks(r, OLD, Some(MarkKind::Drained)), Wrong),
        (|r| r.moments.0[4].at = stamp_at(2_500), Wrong),
        (add_kill_trouble, Wrong),
        (
            |r| add_failed_attempt(r, Failure::Local("EMFILE".into())),
            Unproven,
        ),
        (
            |r| {
                set_clients_behind(r);
                add_kill_trouble(r);
            },
            Wrong,
        ),
        (
            |r| {
                set_clients_behind(r);
                add_failed_attempt(r, Failure::Refused);
            },
            Lost,
        ),
    ];
    for (n, (spoil, verdict)) in spoils.into_iter().enumerate() {
        let ran = judge_spoiled(spoil);
        assert!(
            ran.verdict == verdict && !ran.objections.is_empty(),
            "{n}: {ran:#?}"
        );
        assert_eq!(
            count_lost(&ran),
            u64::from(verdict == Lost),
            "{n}: {ran:#?}"
        );
    }
    let ran = judge(&record(), &plan(0), Some("old ended"));
    assert_eq!(
        (ran.verdict, ran.objections[0].as_str()),
        (Wrong, "the rehearsal did not come to its end: old ended")
    );
}

/// Which late timers explain a wait is tested in `busy`.
#[test]
fn a_wait_in_vain_is_lost_unless_this_machine_was_too_busy_to_tell() {
    let ended = |failure: &Failure, done: i64, behind_ms: u64, late: &[(i64, i64)]| {
        judge_spoiled(|record| {
            record
                .attempts
                .push(attempt("x", 1_000, done, Answer::Failed(failure.clone())));
            record.behind = Duration::from_millis(behind_ms);
            record.late = late
                .iter()
                .map(|(from, to)| (stamp_at(*from), stamp_at(*to)))
                .collect();
        })
    };
    let busy = [(2_000, 14_000)];
    // A reset or close after 15 s counts as unanswered. Unless the client's timer was late, the
    // client would have given up before.
    for failure in [Failure::Unanswered, Failure::Reset, Failure::Closed] {
        let untold = ended(&failure, 16_000, 0, &busy);
        assert_eq!((untold.verdict, count_lost(&untold)), (Verdict::TooBusy, 0));
        let told = ended(&failure, 16_000, 0, &[]);
        assert_eq!((told.verdict, count_lost(&told)), (Verdict::Lost, 1));
    }
    let objections = ended(&Failure::Unanswered, 16_000, 0, &busy)
        .objections
        .join("\n");
    insta::assert_snapshot!(objections, @"1 request unanswered for 15 s, and this machine was too busy to tell why: the clients were far behind their timetable, or for half of the wait the clients' timers were late by 500ms or more");
    // If the clients were more than 1 s behind their timetable, the machine explains every wait.
    for (behind_ms, verdict) in [(1_001, Verdict::TooBusy), (1_000, Verdict::Lost)] {
        assert_eq!(
            ended(&Failure::Unanswered, 16_000, behind_ms, &[]).verdict,
            verdict
        );
    }
    // A loss that has nothing to do with time is a loss on any machine.
    for (failure, loss) in &all_failures()[..6] {
        assert_eq!(ended(failure, 15_900, 0, &busy).lost, [(*loss, 1)].into());
    }
}

#[test]
fn a_shim_that_has_more_threads_from_round_to_round_is_wrong() {
    let with = |more: u64| {
        let footprint = |n: u64| {
            let footprint = Footprint {
                pid: 7,
                memory_kib: 3000,
                descriptors: 30,
                threads: 4 + n * more,
            };
            Event {
                subject: "node".into(),
                ..event(n as i64, EventKind::Footprint(footprint))
            }
        };
        judge_spoiled(|record| record.events = (0..12).map(footprint).collect()).verdict
    };
    assert_eq!((with(0), with(1)), (Verdict::Held, Verdict::Wrong));
}

#[test]
fn marks_are_from_the_script_and_from_instances() {
    let marks: Vec<_> = judge_record(&record())
        .marks
        .iter()
        .map(|m| (m.at_ms, m.instance.clone(), m.what))
        .collect();
    let mark = |ms, instance: &str, what| (ms, instance.to_owned(), what);
    assert_eq!(
        marks,
        [
            mark(-500, OLD, MarkKind::Started),
            mark(-100, OLD, MarkKind::Ready),
            mark(1_000, NEW, MarkKind::Ready),
            mark(1_990, OLD, MarkKind::Sigterm),
            mark(2_100, OLD, MarkKind::Drained),
        ]
    );
    let marks = judge_spoiled(|record| {
        record
            .moments
            .0
            .retain(|moment| moment.mark != MarkKind::Sigterm);
    })
    .marks;
    assert!(
        marks
            .iter()
            .any(|m| (m.at_ms, m.what) == (1_995, MarkKind::Sigterm)),
        "{marks:?}"
    );
}

#[test]
fn losses_are_counted_in_the_step_of_their_time() {
    let x509 = Answer::Failed(Failure::X509("UnknownIssuer".into()));
    let ran = judge_spoiled(|record| {
        record.attempts.push(attempt(
            "new-300",
            1_000,
            1_049,
            Answer::Failed(Failure::Reset),
        ));
        record.attempts.push(attempt("new-301", 1_000, 1_050, x509));
        // A flaw noticed after the end of the load is in the last step.
        record.watches[0].flaws = vec![
            (stamp_at(2_008), Loss::EventMissed, 2),
            (stamp_at(9_000), Loss::EventDuplicated, 3),
        ];
    });
    let counts = [
        (Loss::Reset, 1),
        (Loss::Tls, 1),
        (Loss::EventMissed, 2),
        (Loss::EventDuplicated, 3),
    ];
    assert_eq!((ran.verdict, &ran.lost), (Verdict::Lost, &counts.into()));
    assert_eq!(
        read_note(&ran, "lost"),
        "1 connection reset, 1 TLS error, 2 watch events missed, 3 watch events duplicated"
    );
    let steps = [
        (Loss::Reset, 20),
        (Loss::Tls, 21),
        (Loss::EventMissed, 40),
        (Loss::EventDuplicated, 60),
    ];
    for ((loss, step), (_, count)) in steps.into_iter().zip(counts) {
        assert_eq!(ran.timeline.lost[&loss][step], count, "{loss:?}");
    }
    assert_eq!(
        (read_figure(&ran, "x509 errors"), ran.examples.len()),
        (1, 2)
    );
}

#[test]
fn clients_queued_at_the_gate_are_counted_over_the_lives_of_its_shims() {
    let counts = |counts: &[(&str, u64)]| {
        counts
            .iter()
            .map(|(key, count)| ((*key).to_owned(), *count))
            .collect()
    };
    let gate = |shim: &str, first, others, waited, left| {
        let metrics = GateMetrics {
            waiting: counts(&[("first", first), ("others", others)]),
            waited: counts(&[("others", waited)]),
            dropped: counts(&[("left", left), ("full", 0)]),
        };
        (shim.into(), metrics)
    };
    let ran = judge_spoiled(|record| {
        record.events = [
            (-10, vec![gate(OLD, 0, 99, 5, 0)]),
            (100, vec![gate(OLD, 1, 3, 7, 3), gate(NEW, 0, 4, 1, 0)]),
            (110, vec![gate(NEW, 2, 5, 9, 0)]),
            // The shim was restarted.
            (120, vec![gate(NEW, 0, 0, 2, 0)]),
        ]
        .map(|(ms, gates)| event(ms, EventKind::Gates(gates)))
        .into();
    });
    let name = "most clients queued at the gate";
    assert_eq!(
        (
            read_figure(&ran, name),
            read_figure(&ran, "of the gate's class others")
        ),
        (8, 13)
    );
    assert_eq!(
        read_note(&ran, name),
        "16 clients had to wait, dropped: 3 that had left"
    );
}

#[test]
fn a_promise_allows_the_losses_of_its_fault_only_while_it_is_kept() {
    // The shim of `old` was killed, and two of its connections were cut.
    let killed = |until| {
        judge_spoiled(|record| {
            for (stream, seen) in [("new-1000", 510), ("new-1001", 520)] {
                record
                    .attempts
                    .push(attempt(stream, 490, seen, Answer::Failed(Failure::Reset)));
            }
            record
                .injected
                .push(injected(Fault::KillShim, OLD, 500, until));
        })
    };
    let kept = killed(Some(600));
    assert_eq!(
        (kept.verdict, read_note(&kept, "lost")),
        (Verdict::Held, "and 2 that a promise allows")
    );
    let promise = &kept.promises[0];
    assert_eq!(
        (promise.fault.as_str(), promise.from_ms, promise.to_ms),
        ("kill-shim", 500, Some(600))
    );
    assert_eq!(
        (kept.timeline.allowed[10], &promise.allowed),
        (2, &[(Loss::Reset, 2)].into())
    );
    assert!(
        kept.marks
            .iter()
            .any(|m| (m.at_ms, m.what, m.text.as_str()) == (500, MarkKind::Fault, "kill-shim"))
    );

    // The promise allows as many ended streams as the shim had connections. Further ended streams
    // are losses.
    for (has, lost) in [
        (None, Losses::new()),
        (Some(1), [(Loss::StreamEnded, 1)].into()),
    ] {
        let cut = judge_spoiled(|record| {
            record
                .ends
                .extend(["a", "b"].map(|stream| end(StreamKind::Watch, stream, 510)));
            record.injected.push(InjectedFault {
                has,
                ..injected(Fault::KillShim, OLD, 500, Some(600))
            });
        });
        assert_eq!(
            (cut.lost, cut.promises[0].allowed[&Loss::StreamEnded]),
            (lost, has.unwrap_or(2))
        );
    }

    let broken = killed(None);
    let promise = &broken.promises[0];
    assert_eq!(
        (broken.verdict, promise.held, promise.to_ms),
        (Verdict::Broken, false, None)
    );
    assert_eq!(
        promise.what_happened,
        ["broken: the end of the fault was not seen", "seen"]
    );
}

#[test]
fn informers_the_control_and_the_service_are_in_the_result() {
    let copy = |id: &str, stale| Informer {
        id: id.into(),
        written: 30,
        held: 30 + stale,
        stale,
        relists: 1,
        ..Informer::default()
    };
    let looks = [
        (0, true),
        (2_000, false),
        (2_400, true),
        (2_500, false),
        (2_600, true),
    ];
    let ran = judge_spoiled(|record| {
        record.informers = vec![
            copy("quiet-0", 0),
            copy("informer-1", 0),
            copy("informer-0", 0),
        ];
        let streams = (1..=8).map(|n| format!("control-old-{n}")).collect();
        let ends = vec![end(StreamKind::Watch, "control-old-1-1", 2_001)];
        record.control = Control {
            streams: [(OLD.to_owned(), streams)].into(),
            ends,
        };
        record
            .events
            .extend(looks.map(|(ms, named)| event(ms, EventKind::Service(named))));
        record
            .events
            .push(event(0, EventKind::Note("worth knowing".into())));
    });
    assert_eq!(
        (ran.verdict, ran.simulated, ran.notes.len()),
        (Verdict::Held, true, 1),
        "{ran:#?}"
    );
    // A quiet informer sees no writes, so its copy does not count as evidence that nothing was
    // missed.
    assert_eq!(
        (
            read_figure(&ran, "informers"),
            read_note(&ran, "informers"),
            read_figure(&ran, "relists")
        ),
        (2, "of 2 hold exactly what was written", 3)
    );
    assert!(read_note(&ran, "streams ended by the instance").ends_with(" 1 of 8"));
    assert_eq!(read_ms(&ran, "Service kubernetes was empty for"), 500.0);
    assert_eq!(read_figure(&ran, "x509 errors of apiservers"), 0);
}

#[test]
fn a_time_without_answers_is_in_the_result() {
    let name = "longest time without an answer";
    let quiet = judge_spoiled(|record| {
        record
            .attempts
            .retain(|a| !(stamp_at(400)..stamp_at(2_100)).contains(&a.done));
    });
    assert_eq!(
        (read_ms(&quiet, name), read_note(&quiet, name)),
        (1_710.0, "1 whole second without any good answer")
    );
    let ran = judge_record(&record());
    assert_eq!((read_ms(&ran, name), read_note(&ran, name)), (10.0, ""));
}

#[test]
fn an_aborted_run_is_judged_by_what_was_recorded() {
    let ran = judge_spoiled(|part| {
        part.over = None;
        part.watches.clear();
        part.attempts.retain(|a| a.done < stamp_at(1_000));
    });
    assert!(ran.verdict != Verdict::Held);
    assert_eq!(ran.load_ms, 992);

    let ran = judge_record(&Record::default());
    assert_eq!(
        (
            ran.load_ms,
            ran.marks.len(),
            read_ms(&ran, "longest time without an answer")
        ),
        (0, 0, 0.0)
    );
}

#[test]
fn a_longer_run_has_longer_steps_in_its_timeline() {
    for (load_ms, step_ms) in [
        (9_000, 50),
        (11_000, 250),
        (40_000, 250),
        (120_000, 1_000),
        (3_600_000, 20_000),
    ] {
        let long = judge_spoiled(|record| record.over = Some(stamp_at(load_ms)));
        assert_eq!(long.timeline.step_ms, step_ms, "{load_ms}");
    }
}
