//! What all judges make of a run.

use crate::Rehearsed;
use crate::data::{
    ControlStreams, Flaw, Gap, Informer, MarkKind, Period, Ran, Run, RunOutcome, Segment, Timeline, Watch,
};
use crate::event::{
    Answer, Attempt, ConnectionKind, EndReport, EndedBy, Event, EventKind, Failure, Protocol, StreamEnd, StreamKind,
    WatchSum,
};
use crate::fault::{Fault, Standby};
use crate::gate::{Counted, GateMetrics, Sample};
use crate::judges::judge;
use crate::loss::Loss;
use crate::plan::{LoadPlan, Plan, Via};
use crate::record::{Control, Injected, Player, Record};
use crate::report::assemble;
use crate::stamp::Stamp;
use crate::verdict::{NEW, OLD};
use std::collections::BTreeMap;

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

/// All lists of a timeline are equally long, which a page relies on.
fn same_length(timeline: &Timeline) -> bool {
    let steps = timeline.wait_max_ms.len();
    let maps = [&timeline.answered, &timeline.lost, &timeline.open_connections];
    maps.into_iter().flat_map(BTreeMap::values).all(|counts| counts.len() == steps)
        && [&timeline.wait_p50_ms, &timeline.wait_p99_ms].iter().all(|waits| waits.len() == steps)
        && timeline.ended_by_instance.len() == steps
}

#[test]
fn a_clean_run() {
    let ran = judged(&record());
    assert!(ran.verdict.held && ran.verdict.lost.is_empty(), "{:#?}", ran.verdict);
    assert_eq!(
        ran.verdict.summary,
        "All of 302 requests were answered, 302 of them on a new connection; the longest took 7.0 ms. The watch saw every write once."
    );
    assert_eq!((ran.load_ms, ran.instances.len(), ran.figures.watch_events), (3_000, 2, 30));
    assert_eq!(ran.figures.new_connections_by_instance, [(NEW.to_owned(), 101), (OLD.to_owned(), 201)].into());
    assert_eq!(ran.verdict.apart[0].count, 1);
    assert_eq!((ran.figures.wait_p50_ms, ran.figures.wait_max_ms), (2.0, 7.0));
}

#[test]
fn the_timeline_has_every_series() {
    let timeline = judged(&record()).timeline;
    assert!(same_length(&timeline));
    assert_eq!((timeline.step_ms, timeline.wait_max_ms.len()), (50, 61));
    let sum = |name: &str| timeline.answered[name].iter().sum::<u64>();
    assert_eq!((sum(OLD), sum(NEW)), (201, 101));
    assert_eq!(timeline.answered[OLD][..2], [6, 5]);
    assert_eq!((timeline.wait_p50_ms[0], timeline.wait_max_ms[0]), (Some(2.0), Some(5.0)));
    // The last step has the end of the load only.
    assert_eq!(timeline.wait_p50_ms[60], None);
    assert_eq!(timeline.ended_by_instance.iter().position(|n| *n == 1), Some(40));
    let mut slow = record();
    slow.attempts.push(attempt(ConnectionKind::New, "slow-0-1", 100, 110, good(OLD)));
    assert_eq!(judged(&slow).timeline.open_connections, timeline.open_connections);
    // At the end of a step: old until 2,001 ms, new from 2,008 ms to the end.
    assert_eq!(timeline.open_connections[OLD].iter().sum::<u64>(), 40);
    assert_eq!(timeline.open_connections[NEW].iter().sum::<u64>(), 21);
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
fn watches_have_segments_and_gaps() {
    let segment = |from_ms, to_ms, instance: &str| Segment { from_ms, to_ms, instance: instance.into() };
    let gap =
        |from_ms, to_ms, by_instance| Gap { from_ms, to_ms, by_instance, allowed: false, reason: "closed".into() };
    let expected = [Watch {
        id: "watch-0".into(),
        events: 30,
        missed: 0,
        duplicated: 0,
        relists: 0,
        expired: 0,
        segments: vec![segment(10, 2_001, OLD), segment(2_008, 3_000, NEW)],
        gaps: vec![gap(2_001, 2_008, true)],
        flaws: Vec::new(),
    }];
    assert_eq!(judged(&record()).watches, expected);

    let mut cut = record();
    cut.reports.clear();
    assert_eq!(judged(&cut).watches[0].gaps, [gap(2_001, 2_008, false)]);

    // The same while its shim was killed.
    let mut killed = record();
    killed.reports.clear();
    killed.injected.push(Injected {
        fault: Fault::KillShim,
        instance: OLD.into(),
        standby: Standby::Sibling,
        at: at(2_000),
        noticed: None,
        over: Some(at(2_500)),
        seen: Vec::new(),
    });
    assert_eq!(judged(&killed).watches[0].gaps, [Gap { allowed: true, ..gap(2_001, 2_008, false) }]);

    // It never came back.
    let mut gone = record();
    gone.attempts.retain(|a| a.stream != "watch-0-2");
    assert_eq!(judged(&gone).watches[0].gaps, [gap(2_001, 3_000, true)]);

    // It never came to be; the others are in the order of their numbers.
    let mut more = record();
    more.watches.push(WatchSum { client: "watch-10".into(), ..WatchSum::default() });
    more.watches.push(WatchSum {
        client: "watch-9".into(),
        flaws: vec![(at(3_000), Loss::EventMissed, 2)],
        ..WatchSum::default()
    });
    let watches = judged(&more).watches;
    assert_eq!(watches.iter().map(|w| w.id.as_str()).collect::<Vec<_>>(), ["watch-0", "watch-9", "watch-10"]);
    assert_eq!(watches[1].gaps[0].reason, "never opened");
    assert_eq!((watches[1].missed, watches[1].gaps[0].to_ms), (2, 3_000));
}

#[test]
fn losses_are_where_they_happened() {
    let mut record = record();
    record.attempts.push(attempt(ConnectionKind::New, "new-300", 1_000, 1_049, Answer::Failed(Failure::Reset)));
    record.attempts.push(attempt(
        ConnectionKind::New,
        "new-301",
        1_000,
        1_050,
        Answer::Failed(Failure::X509("UnknownIssuer".into())),
    ));
    record.watches[0].flaws = vec![(at(2_008), Loss::EventMissed, 2)];
    let ran = judged(&record);
    assert!(!ran.verdict.held && same_length(&ran.timeline));
    assert_eq!(
        ran.verdict.summary,
        "Of 304 requests, 304 of them on a new connection: 1 connection reset, 1 TLS error, 2 watch events missed."
    );
    assert_eq!(ran.timeline.lost["reset"].iter().position(|n| *n == 1), Some(20));
    assert_eq!(ran.timeline.lost["tls"].iter().position(|n| *n == 1), Some(21));
    assert_eq!(ran.timeline.lost["event_missed"].iter().position(|n| *n == 2), Some(40));
    assert_eq!(ran.watches[0].flaws, [Flaw { at_ms: 2_008, missed: 2, duplicated: 0 }]);
    assert_eq!((ran.figures.x509_errors, ran.verdict.lost(), ran.verdict.examples.len()), (1, 4, 2));
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
    let storm = ran.storm.unwrap();
    assert_eq!((storm.from_ms, storm.clients, storm.served, storm.gave_up), (2_100, 3, 3, 1));
    assert_eq!((storm.half_served_ms, storm.all_served_ms), (Some(500.0), Some(800.0)));
    assert_eq!(storm.failed, [Loss::Reset.tally(1), Loss::BadStatus.tally(1)]);
    assert_eq!((ran.promises[0].fault.as_str(), ran.promises[0].held, ran.figures.requests), ("storm", true, 302));
    assert!(ran.marks.iter().any(|mark| mark.words() == "storm"));
}

#[test]
fn clients_queued_at_the_gate_are_counted_in_the_steps_of_the_timeline() {
    let mut record = record();
    let sample = |others, first, openings| Sample {
        waiting: [("first", first), ("others", others)].map(|(class, count)| (class.to_owned(), count)).into(),
        openings,
        limit: 4,
    };
    // Before the load, twice in a step, and after some in which no shim was asked.
    record.events = [(-10, sample(99, 0, 9)), (100, sample(7, 1, 4)), (110, sample(5, 2, 3)), (270, sample(0, 0, 1))]
        .map(|(ms, now)| {
            // Three since the first sample.
            let dropped = [("left".to_owned(), if ms < 0 { 0 } else { 3 })].into();
            let counted = Counted { dropped, ..Counted::default() };
            event(ms, EventKind::Gates(vec![("old".into(), GateMetrics { now, counted })]))
        })
        .into();
    let ran = judged(&record);
    let gate = ran.gate.unwrap();
    assert_eq!(ran.timeline.step_ms, 50);
    assert_eq!(gate.waiting["others"][..8], [0, 0, 7, 5, 5, 0, 0, 0]);
    assert_eq!(gate.waiting["first"][..8], [0, 0, 2, 2, 2, 0, 0, 0]);
    assert_eq!((&gate.openings[..6], &gate.limit[..4]), (&[0, 0, 4, 3, 3, 1][..], &[0, 0, 4, 4][..]));
    assert!([&gate.openings, &gate.limit].iter().all(|counts| counts.len() == ran.timeline.allowed.len()));
    assert_eq!((gate.most_waiting, gate.dropped["left"]), (8, 3));
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
    assert!(kept.verdict.held && same_length(&kept.timeline), "{kept:#?}");
    assert!(
        kept.verdict.summary.contains("nothing was lost beyond 2 losses that promises allow;"),
        "{}",
        kept.verdict.summary
    );
    let promise = &kept.promises[0];
    assert_eq!(
        (promise.fault.as_str(), promise.from_ms, promise.to_ms, promise.allowed[0].count),
        ("kill-shim", 500, Some(600), 2)
    );
    assert_eq!((kept.timeline.allowed[10], kept.verdict.apart[2].count), (2, 2));
    assert!(kept.marks.iter().any(|m| (m.at_ms, m.what, m.text.as_str()) == (500, MarkKind::Fault, "kill-shim")));

    let mut record = killed(Fault::KillShim, Standby::Sibling);
    record.injected[0].over = None;
    let broken = judged(&record);
    assert!(!broken.verdict.held && !broken.promises[0].held && broken.promises[0].to_ms.is_none());
    assert_eq!(broken.promises[0].what_happened, ["broken: its end was not seen", "seen"]);
    assert_eq!(broken.verdict.summary, "Of 304 requests nothing else was lost. 1 promise was broken.");
}

#[test]
fn a_run_that_failed_proves_nothing() {
    let ran = judged_with(&record(), Some("old ended; its last lines of log:\n  x"));
    assert!(!ran.verdict.held);
    let summary = "Of 302 requests nothing was seen to be lost, but it did not come to its end: old ended; its last lines of log.";
    assert_eq!(ran.verdict.summary, summary);
}

#[test]
fn what_is_noticed_after_the_end_is_in_the_last_step() {
    let mut record = record();
    record.watches[0].flaws = vec![(at(9_000), Loss::EventDuplicated, 3)];
    let timeline = judged(&record).timeline;
    assert!(same_length(&timeline));
    assert_eq!(timeline.lost["event_duplicated"].last(), Some(&3));
}

#[test]
fn what_other_clients_than_those_of_requests_saw() {
    let mut record = record();
    let kept =
        |id: &str, stale| Informer { id: id.into(), written: 30, held: 30 + stale, stale, ..Informer::default() };
    record.informers = vec![kept("quiet-0", 0), kept("informer-1", 0), kept("informer-0", 0)];
    record.events = vec![event(100, EventKind::SlowRead); 4];
    let streams = (1..=8).map(|n| format!("control-old-{n}")).collect();
    record.control = Control { streams: [(OLD.to_owned(), streams)].into(), ends: vec![end("control-old-1-1", 2_001)] };
    let looks = [(0, true), (2_000, false), (2_400, true), (2_500, false), (2_600, true)];
    record.events.extend(looks.map(|(ms, named)| event(ms, EventKind::Service(named))));
    record.events.push(event(0, EventKind::Note("worth knowing".into())));
    let ran = judged(&record);
    assert!(ran.verdict.held, "{:#?}", ran.verdict);
    assert!(ran.verdict.summary.ends_with(" 2 informers hold exactly what was written."), "{}", ran.verdict.summary);
    assert_eq!(
        ran.informers.iter().map(|i| (i.id.as_str(), i.held)).collect::<Vec<_>>(),
        [("informer-0", 30), ("informer-1", 30), ("quiet-0", 30)]
    );
    assert_eq!(ran.control_streams, [(OLD.to_owned(), ControlStreams { opened: 8, ended: 1 })].into());
    assert_eq!((ran.figures.slow_reads, ran.figures.endpoint_gap_ms), (4, Some(500.0)));
    assert_eq!(ran.endpoint_gaps.unwrap()[1], Period { from_ms: 2_500, to_ms: 2_600 });
    assert_eq!((ran.verdict.notes.len(), ran.figures.logged_x509_errors, ran.simulated), (1, Some(0), true));
}

#[test]
fn an_informer_that_holds_too_much_is_a_loss() {
    let mut record = record();
    record.informers =
        vec![Informer { id: "informer-0".into(), written: 30, held: 31, stale: 1, ..Informer::default() }];
    let ran = judged(&record);
    assert_eq!((ran.verdict.held, ran.verdict.lost(), ran.informers[0].stale), (false, 1, 1));
}

#[test]
fn silence_is_seen() {
    let mut quiet = record();
    quiet.attempts.retain(|a| !(at(400)..at(2_100)).contains(&a.done));
    let figures = judged(&quiet).figures;
    assert_eq!((figures.longest_silence_ms, figures.silent_s), (1_710.0, 1));
    let figures = judged(&record()).figures;
    assert_eq!((figures.longest_silence_ms, figures.silent_s), (10.0, 0));
}

#[test]
fn an_aborted_run_is_what_there_was() {
    let mut part = record();
    part.over = None;
    part.watches.clear();
    part.attempts.retain(|a| a.done < at(1_000));
    let ran = judged(&part);
    assert!(!ran.verdict.held && same_length(&ran.timeline));
    assert_eq!((ran.load_ms, ran.watches.len()), (992, 1));

    let ran = judged(&Record::default());
    assert_eq!((ran.load_ms, ran.marks.len(), ran.watches.len()), (0, 0, 0));
    assert!(!ran.verdict.held && same_length(&ran.timeline), "{ran:#?}");
    assert_eq!((ran.figures.longest_silence_ms, ran.figures.silent_s), (0.0, 0));
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
    let mut rehearsed = Rehearsed {
        runs: vec![run(Via::Haproxy, RunOutcome::Skipped("no haproxy".into())), ran(Via::Berth), ran(Via::None)],
        failed: Vec::new(),
        aborted: Some(crate::Aborted::Signal(libc::SIGINT)),
    };
    rehearsed.compare();
    let report = assemble(&Plan::default(), rehearsed, vec!["berth".into()]);
    assert_eq!(report.runs.iter().map(|run| run.via).collect::<Vec<_>>(), [Via::Haproxy, Via::Berth, Via::None]);
    assert_eq!(report.runs[0].outcome, RunOutcome::Skipped("no haproxy".into()));
    for run in &report.runs[1..] {
        let verdict = &run.ran().unwrap().verdict;
        assert_eq!((verdict.control.as_ref().unwrap()[0].count, verdict.control.as_ref()), (1, Some(&verdict.apart)));
    }
    assert!(report.aborted.unwrap().contains("SIGINT"));
    assert_eq!(report.environment.programs.len(), 2);
}
