//! What all judges make of a run.

use crate::Rehearsed;
use crate::data::{MarkKind, Ran, Run, RunOutcome, Timeline, Value, Verdict};
use crate::event::{
    Answer, Attempt, ConnectionKind, EndReport, EndedBy, Event, EventKind, Failure, Informer, Protocol, StreamEnd,
    StreamKind, WatchSum,
};
use crate::fault::{Fault, Standby};
use crate::gate::GateMetrics;
use crate::judges::judge;
use crate::loss::Loss;
use crate::plan::{LoadPlan, Plan, Via};
use crate::record::{Control, Injected, Player, Record};
use crate::report::assemble;
use crate::stamp::Stamp;
use crate::verdict::{NEW, OLD};

const MS: u64 = 1_000_000;

/// The load begins at 10 s of the clock and lasts 3 s.
fn at(ms: i64) -> Stamp {
    Stamp((10_000 + ms) as u64 * MS)
}

fn good(instance: &str) -> Answer {
    Answer::Good { instance: instance.into() }
}

fn attempt(kind: ConnectionKind, stream: &str, due: i64, done: i64, answer: Answer) -> Attempt {
    Attempt { kind, writes: false, stream: stream.into(), due: at(due), done: at(done), answer }
}

/// One answer every 10 ms: by old for 2 s, then by new. A watch that old ends at 2 s.
fn record() -> Record {
    let mut record = Record { began: Some(at(0)), over: Some(at(3_000)), ..Record::default() };
    for n in 0..300 {
        let answer = good(if n < 200 { OLD } else { NEW });
        record.attempts.push(attempt(ConnectionKind::New, &format!("new-{n}"), n * 10, n * 10 + 2, answer));
    }
    record.attempts.push(attempt(ConnectionKind::New, "watch-0-1", 5, 10, good(OLD)));
    record.attempts.push(attempt(ConnectionKind::New, "watch-0-2", 2_001, 2_008, good(NEW)));
    record.ends.push(end("watch-0-1", 2_001));
    record.reports.push(end_report("watch-0-1", 2_000));
    record.watches.push(WatchSum {
        client: "watch-0".into(),
        events: [(OLD.to_owned(), 20), (NEW.to_owned(), 10)].into(),
        ..WatchSum::default()
    });
    for (instance, mark, ms) in [
        (OLD, MarkKind::Started, -500),
        (OLD, MarkKind::Ready, -100),
        (OLD, MarkKind::Ready, -50),
        (NEW, MarkKind::Listening, 900),
        (NEW, MarkKind::Ready, 1_000),
        (OLD, MarkKind::Sigterm, 1_990),
        (OLD, MarkKind::Terminating, 1_995),
        (OLD, MarkKind::Drained, 2_005),
    ] {
        record.moments.add(instance, mark, at(ms));
    }
    let player =
        |(name, version): (&str, &str)| Player { name: name.into(), version: Some(version.into()), serves: true };
    record.players = [(OLD, "v1.33.0"), (NEW, "v1.34.0")].map(player).into();
    record
}

fn end(stream: &str, ms: i64) -> StreamEnd {
    StreamEnd {
        stream: stream.into(),
        what: StreamKind::Watch,
        protocol: Protocol::Http2,
        instance: "old".into(),
        at: at(ms),
        how: Failure::Closed,
        in_flight: true,
        signed: None,
    }
}

fn end_report(stream: &str, ms: i64) -> (String, EndReport) {
    let peer = ([127, 0, 0, 1], 1).into();
    (OLD.into(), EndReport { stream: stream.into(), peer, by: EndedBy::Instance, at: at(ms), rejected: 0 })
}

fn event(ms: i64, what: EventKind) -> Event {
    Event { at: at(ms), subject: String::new(), what }
}

fn judged(record: &Record) -> Ran {
    judged_with(record, None)
}

fn judged_with(record: &Record, failed: Option<&str>) -> Ran {
    let plan = Plan::default();
    judge(record, &Plan { load: LoadPlan { watches: 1, ..plan.load }, ..plan }, failed)
}

fn note<'a>(ran: &'a Ran, name: &str) -> &'a str {
    &ran.rows.iter().find(|row| row.name == name).unwrap().note
}

/// All lists of a timeline are equally long, which a page relies on.
fn same_length(Timeline { answered, lost, allowed, ended_by_instance, .. }: &Timeline) -> bool {
    let mut counts = answered.values().chain(lost.values()).chain([ended_by_instance]);
    counts.all(|counts| counts.len() == allowed.len())
}

#[test]
fn a_clean_run() {
    let ran = judged(&record());
    assert!(ran.verdict == Verdict::Held && ran.lost.is_empty(), "{ran:#?}");
    assert_eq!((ran.load_ms, ran.instances.len()), (3_000, 2));
    for (name, value) in [("requests", 302), ("watch events", 30), ("streams ended by the instance", 1)] {
        assert_eq!(ran.figure(name), Some(Value::Count(value)), "{name}");
    }
    assert_eq!(
        [OLD, NEW].map(|name| ran.figure(&format!("connections on {name}"))),
        [201, 101].map(|n| Some(Value::Count(n)))
    );
    assert_eq!(["median wait", "longest wait"].map(|name| ran.figure(name)), [2.0, 7.0].map(|ms| Some(Value::Ms(ms))));
}

#[test]
fn the_timeline_has_every_series() {
    let timeline = judged(&record()).timeline;
    assert!(same_length(&timeline));
    assert_eq!((timeline.step_ms, timeline.allowed.len()), (50, 61));
    let sum = |name: &str| timeline.answered[name].iter().sum::<u64>();
    assert_eq!((sum(OLD), sum(NEW)), (201, 101));
    assert_eq!(timeline.answered[OLD][..2], [6, 5]);
    assert_eq!(timeline.ended_by_instance.iter().position(|n| *n == 1), Some(40));
}

#[test]
fn marks_are_those_of_the_script_and_what_only_instances_know() {
    let marks: Vec<_> = judged(&record()).marks.iter().map(|m| (m.at_ms, m.instance.clone(), m.what)).collect();
    let mark = |ms, instance: &str, what| (ms, instance.to_owned(), what);
    assert_eq!(
        marks,
        [
            mark(-500, OLD, MarkKind::Started),
            mark(-100, OLD, MarkKind::Ready),
            mark(1_000, NEW, MarkKind::Ready),
            mark(1_990, OLD, MarkKind::Sigterm),
            mark(2_005, OLD, MarkKind::Drained),
        ]
    );
    let mut without = record();
    without.moments.0.retain(|moment| moment.mark != MarkKind::Sigterm);
    let marks = judged(&without).marks;
    assert!(marks.iter().any(|m| (m.at_ms, m.what) == (1_995, MarkKind::Sigterm)), "{marks:?}");
}

#[test]
fn losses_are_where_they_happened() {
    let mut record = record();
    record.attempts.push(attempt(ConnectionKind::New, "new-300", 1_000, 1_049, Answer::Failed(Failure::Reset)));
    let x509 = Answer::Failed(Failure::X509("UnknownIssuer".into()));
    record.attempts.push(attempt(ConnectionKind::New, "new-301", 1_000, 1_050, x509));
    record.watches[0].flaws = vec![(at(2_008), Loss::EventMissed, 2)];
    let ran = judged(&record);
    assert!(ran.verdict == Verdict::Lost && same_length(&ran.timeline));
    assert_eq!(ran.lost, [(Loss::Reset, 1), (Loss::Tls, 1), (Loss::EventMissed, 2)].into());
    assert_eq!(note(&ran, "lost"), "1 connection reset, 1 TLS error, 2 watch events missed");
    let first = |loss| ran.timeline.lost[&loss].iter().position(|count| *count > 0);
    assert_eq!([Loss::Reset, Loss::Tls, Loss::EventMissed].map(first), [20, 21, 40].map(Some));
    assert_eq!((ran.figure("x509 errors"), ran.examples.len()), (Some(Value::Count(1)), 2));
}

#[test]
fn a_storm_shows_when_its_clients_were_served_and_what_failed_before() {
    let mut record = record();
    let [gave_up, reset] = [Failure::Unanswered, Failure::Reset].map(Answer::Failed);
    let bad = Answer::Bad { instance: NEW.into(), status: 429 };
    let tries =
        [(2_110, good(NEW)), (2_100, reset), (2_120, bad), (2_400, gave_up), (2_900, good(NEW)), (2_600, good(NEW))];
    record.events.push(event(2_100, EventKind::StormBegan(3)));
    record.events.extend(tries.map(|(ms, answer)| event(ms, EventKind::StormTry(answer))));
    record.events.push(event(2_900, EventKind::StormEnded));
    let ran = judged(&record);
    assert_eq!(ran.figure("clients of the storm"), Some(Value::Count(3)));
    assert_eq!(
        note(&ran, "clients of the storm"),
        "all served within 800 ms; 1 try given up, 1 connection reset, 1 error status"
    );
    assert_eq!(ran.figure("half of the storm served within"), Some(Value::Ms(500.0)));
    assert_eq!(ran.figure("storm served within"), Some(Value::Ms(800.0)));
    assert_eq!((ran.promises[0].fault.as_str(), ran.promises[0].held), ("storm", true));
    assert_eq!(ran.figure("requests"), Some(Value::Count(302)));
    assert!(ran.marks.iter().any(|mark| mark.words() == "storm"));
}

#[test]
fn clients_queued_at_the_gate_are_counted() {
    let mut record = record();
    let gates = |ms, first, others, dropped| {
        let counts = |counts: [(&str, u64); 2]| counts.map(|(key, count)| (key.to_owned(), count)).into();
        let waiting = counts([("first", first), ("others", others)]);
        let gate = GateMetrics { waiting, dropped: counts([("left", dropped), ("full", 0)]), ..GateMetrics::default() };
        event(ms, EventKind::Gates(vec![("old".into(), gate)]))
    };
    // The first is from before the load.
    record.events = vec![gates(-10, 0, 99, 0), gates(100, 1, 7, 3), gates(110, 2, 5, 3)];
    let ran = judged(&record);
    assert_eq!(ran.figure("most clients queued at the gate"), Some(Value::Count(8)));
    assert_eq!(note(&ran, "most clients queued at the gate"), "3 clients had to wait, dropped: 3 that had left");
}

#[test]
fn promises_and_what_they_allow() {
    // Something was on old when it was killed, and cut by that.
    let killed = |fault, standby| {
        let mut record = record();
        for (stream, seen) in [("new-1000", 510), ("new-1001", 520)] {
            record.attempts.push(attempt(ConnectionKind::New, stream, 490, seen, Answer::Failed(Failure::Reset)));
        }
        record.injected.push(Injected {
            fault,
            instance: OLD.into(),
            standby,
            at: at(500),
            noticed: None,
            over: Some(at(600)),
            seen: vec!["seen".into()],
        });
        record
    };
    let kept = judged(&killed(Fault::KillShim, Standby::Sibling));
    assert!(kept.verdict == Verdict::Held && same_length(&kept.timeline), "{kept:#?}");
    assert_eq!(note(&kept, "lost"), "and 2 that a promise allows");
    let promise = &kept.promises[0];
    assert_eq!((promise.fault.as_str(), promise.from_ms, promise.to_ms), ("kill-shim", 500, Some(600)));
    assert_eq!((kept.timeline.allowed[10], &promise.allowed), (2, &[(Loss::Reset, 2)].into()));
    assert!(kept.marks.iter().any(|m| (m.at_ms, m.what, m.text.as_str()) == (500, MarkKind::Fault, "kill-shim")));

    let mut record = killed(Fault::KillShim, Standby::Sibling);
    record.injected[0].over = None;
    let broken = judged(&record);
    assert!(broken.verdict == Verdict::Broken && !broken.promises[0].held && broken.promises[0].to_ms.is_none());
    assert_eq!(broken.promises[0].what_happened, ["broken: its end was not seen", "seen"]);
}

#[test]
fn a_run_that_failed_proves_nothing() {
    let ran = judged_with(&record(), Some("old ended"));
    assert_eq!((ran.verdict, ran.objections[0].as_str()), (Verdict::Wrong, "it did not come to its end: old ended"));
}

#[test]
fn what_is_noticed_after_the_end_is_in_the_last_step() {
    let mut record = record();
    record.watches[0].flaws = vec![(at(9_000), Loss::EventDuplicated, 3)];
    let timeline = judged(&record).timeline;
    assert!(same_length(&timeline));
    assert_eq!(timeline.lost[&Loss::EventDuplicated].last(), Some(&3));
}

#[test]
fn what_other_clients_than_those_of_requests_saw() {
    let mut record = record();
    let kept =
        |id: &str, stale| Informer { id: id.into(), written: 30, held: 30 + stale, stale, ..Informer::default() };
    record.informers = vec![kept("quiet-0", 0), kept("informer-1", 0), kept("informer-0", 0)];
    let streams = (1..=8).map(|n| format!("control-old-{n}")).collect();
    record.control = Control { streams: [(OLD.to_owned(), streams)].into(), ends: vec![end("control-old-1-1", 2_001)] };
    let looks = [(0, true), (2_000, false), (2_400, true), (2_500, false), (2_600, true)];
    record.events.extend(looks.map(|(ms, named)| event(ms, EventKind::Service(named))));
    record.events.push(event(0, EventKind::Note("worth knowing".into())));
    let ran = judged(&record);
    assert_eq!((ran.verdict, ran.simulated, ran.notes.len()), (Verdict::Held, true, 1), "{ran:#?}");
    // What the quiet one holds is no evidence.
    assert_eq!(
        (ran.figure("informers"), note(&ran, "informers")),
        (Some(Value::Count(2)), "of 2 hold exactly what was written")
    );
    assert!(note(&ran, "streams ended by the instance").ends_with("of those straight to it 1 of 8"));
    assert_eq!(ran.figure("Service kubernetes was empty for"), Some(Value::Ms(500.0)));
    assert_eq!(ran.figure("x509 errors of apiservers"), Some(Value::Count(0)));
}

#[test]
fn an_informer_that_holds_too_much_is_a_loss() {
    let mut record = record();
    record.informers =
        vec![Informer { id: "informer-0".into(), written: 30, held: 31, stale: 1, ..Informer::default() }];
    let ran = judged(&record);
    assert_eq!((ran.verdict, ran.lost), (Verdict::Lost, [(Loss::EventMissed, 1)].into()));
}

#[test]
fn silence_is_seen() {
    let silence = |record: &Record| {
        let ran = judged(record);
        let name = "longest time without an answer";
        (ran.figure(name).unwrap(), note(&ran, name).to_owned())
    };
    let mut quiet = record();
    quiet.attempts.retain(|a| !(at(400)..at(2_100)).contains(&a.done));
    assert_eq!(silence(&quiet), (Value::Ms(1_710.0), "1 whole second without any good answer".into()));
    assert_eq!(silence(&record()), (Value::Ms(10.0), String::new()));
}

#[test]
fn an_aborted_run_is_what_there_was() {
    let mut part = record();
    part.over = None;
    part.watches.clear();
    part.attempts.retain(|a| a.done < at(1_000));
    let ran = judged(&part);
    assert!(ran.verdict != Verdict::Held && same_length(&ran.timeline));
    assert_eq!(ran.load_ms, 992);

    let ran = judged(&Record::default());
    assert_eq!((ran.load_ms, ran.marks.len()), (0, 0));
    assert!(ran.verdict != Verdict::Held && same_length(&ran.timeline), "{ran:#?}");
    assert_eq!(ran.figure("longest time without an answer"), Some(Value::Ms(0.0)));
}

#[test]
fn long_runs_have_long_steps() {
    for (load_ms, step_ms) in [(9_000, 50), (11_000, 250), (40_000, 250), (120_000, 1_000), (3_600_000, 20_000)] {
        let mut long = record();
        long.over = Some(at(load_ms));
        assert_eq!(judged(&long).timeline.step_ms, step_ms, "{load_ms}");
    }
}

#[test]
fn runs_are_in_the_order_of_the_plan() {
    let run = |via, outcome| Run { via, topology: String::new(), outcome };
    let ran = |via| run(via, RunOutcome::Ran(Box::new(judged(&record()))));
    let rehearsed = Rehearsed {
        runs: vec![run(Via::Haproxy, RunOutcome::Skipped("no haproxy".into())), ran(Via::Berth), ran(Via::None)],
        failed: Vec::new(),
        aborted: Some(crate::Aborted::Signal(libc::SIGINT)),
    };
    let report = assemble(&Plan::default(), rehearsed, &["berth".into()]);
    assert_eq!(report.runs.iter().map(|run| run.via).collect::<Vec<_>>(), [Via::Haproxy, Via::Berth, Via::None]);
    assert_eq!(report.runs[0].outcome, RunOutcome::Skipped("no haproxy".into()));
    assert!(report.aborted.unwrap().contains("SIGINT"));
    assert_eq!(report.environment.programs.len(), 2);
}
