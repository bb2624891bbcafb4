use super::*;
use crate::rehearse::plan::Plan;
use crate::rehearse::record::{Attempt, EndReport, EndedBy, Kind, Moment, StreamEnd, WatchSum, What};
use crate::rehearse::verdict::{NEW, OLD, judge};
use crate::report::data::{Gap, Segment, Timeline, Watch};

const MS: u64 = 1_000_000;

/// The load begins at 10 s of the clock and lasts 3 s.
fn at(ms: i64) -> Stamp {
    Stamp((10_000 + ms) as u64 * MS)
}

fn good(instance: &str) -> Answer {
    Answer::Good { instance: instance.into() }
}

fn attempt(kind: Kind, stream: &str, due: i64, done: i64, answer: Answer) -> Attempt {
    Attempt { kind, stream: stream.into(), due: at(due), done: at(done), answer }
}

fn moment(ms: i64, instance: &str, what: Happened) -> Moment {
    Moment { at: at(ms), instance: instance.into(), what, text: String::new() }
}

/// One answer every 10 ms: by old for 2 s, then by new. A watch that old ends at 2 s.
fn record() -> Record {
    let mut record = Record { began: Some(at(0)), over: Some(at(3_000)), ..Record::default() };
    for n in 0..300 {
        let answer = good(if n < 200 { OLD } else { NEW });
        record.attempts.push(attempt(Kind::New, &format!("new-{n}"), n * 10, n * 10 + 2, answer));
    }
    record.attempts.push(attempt(Kind::New, "watch-0-1", 5, 10, good(OLD)));
    record.attempts.push(attempt(Kind::New, "watch-0-2", 2_001, 2_008, good(NEW)));
    record.ends.push(end("watch-0-1", 2_001));
    record.reports.push(report("watch-0-1", 2_000));
    record.watches.push(WatchSum {
        client: "watch-0".into(),
        events: [(OLD.to_owned(), 20), (NEW.to_owned(), 10)].into(),
        ..WatchSum::default()
    });
    record.moments.extend([moment(-500, OLD, Happened::Started), moment(1_990, OLD, Happened::Sigterm)]);
    record.marks.insert(
        OLD.into(),
        [(Told::Ready, at(-100)), (Told::Terminating, at(1_995)), (Told::Drained, at(2_005))].into(),
    );
    record.marks.insert(NEW.into(), [(Told::Listening, at(900)), (Told::Ready, at(1_000))].into());
    record
}

fn end(stream: &str, ms: i64) -> StreamEnd {
    StreamEnd { stream: stream.into(), what: What::Watch, at: at(ms), how: Failure::Closed, in_flight: true }
}

fn report(stream: &str, ms: i64) -> (String, EndReport) {
    let peer = ([127, 0, 0, 1], 1).into();
    (OLD.into(), EndReport { stream: stream.into(), peer, by: EndedBy::Instance, at: at(ms), turned_away: 0 })
}

fn gathered(record: &Record) -> Ran {
    gathered_with(record, Vec::new())
}

fn gathered_with(record: &Record, promises: Vec<Promise>) -> Ran {
    let verdict = judge(record, &Plan::new(100, 8, 1, Duration::ZERO));
    let instances = [(OLD, "v1.33.0"), (NEW, "v1.34.0")];
    let run = run(Source {
        via: Via::Berth,
        topology: "node",
        instances: &instances,
        record,
        verdict: &verdict,
        control: Some(&verdict),
        promises,
    });
    assert_eq!((run.via, run.topology.as_str()), (Via::Berth, "node"));
    run.ran().unwrap().clone()
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
    let ran = gathered(&record());
    assert!(ran.verdict.held && ran.verdict.lost.is_empty(), "{:#?}", ran.verdict);
    assert_eq!(
        ran.verdict.summary,
        "All of 302 requests were answered, 302 of them on a new connection; the longest took 7.0 ms. The watch saw every write once."
    );
    assert_eq!((ran.load_ms, ran.instances.len(), ran.figures.watch_events), (3_000, 2, 30));
    assert_eq!(ran.figures.new_connections_by_instance, [(NEW.to_owned(), 101), (OLD.to_owned(), 201)].into());
    assert_eq!(ran.verdict.apart[0].count, 1);
    assert_eq!(ran.verdict.control.as_ref().unwrap(), &ran.verdict.apart);
    assert_eq!((ran.figures.wait_p50_ms, ran.figures.wait_max_ms), (2.0, 7.0));
}

#[test]
fn the_timeline_has_all_of_it() {
    let timeline = gathered(&record()).timeline;
    assert!(same_length(&timeline));
    assert_eq!((timeline.step_ms, timeline.wait_max_ms.len()), (50, 61));
    let sum = |name: &str| timeline.answered[name].iter().sum::<u64>();
    assert_eq!((sum(OLD), sum(NEW)), (201, 101));
    assert_eq!(timeline.answered[OLD][..2], [6, 5]);
    assert_eq!((timeline.wait_p50_ms[0], timeline.wait_max_ms[0]), (Some(2.0), Some(5.0)));
    // The last step has the end of the load only.
    assert_eq!(timeline.wait_p50_ms[60], None);
    assert_eq!(timeline.ended_by_instance.iter().position(|n| *n == 1), Some(40));
    // At the end of a step: old until 2,001 ms, new from 2,008 ms to the end.
    assert_eq!(timeline.open_connections[OLD].iter().sum::<u64>(), 40);
    assert_eq!(timeline.open_connections[NEW].iter().sum::<u64>(), 21);
}

#[test]
fn marks_are_those_of_the_script_and_what_only_instances_know() {
    let marks: Vec<_> = gathered(&record()).marks.iter().map(|m| (m.at_ms, m.instance.clone(), m.what)).collect();
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
    without.moments.clear();
    let marks = gathered(&without).marks;
    assert!(marks.iter().any(|m| (m.at_ms, m.what) == (1_995, MarkKind::Sigterm)), "{marks:?}");
}

#[test]
fn watches_have_segments_and_gaps() {
    let segment = |from_ms, to_ms, instance: &str| Segment { from_ms, to_ms, instance: instance.into() };
    let gap = |from_ms, to_ms, by_instance| Gap { from_ms, to_ms, by_instance, reason: "closed".into() };
    let expected = [Watch {
        id: "watch-0".into(),
        events: 30,
        missed: 0,
        doubled: 0,
        segments: vec![segment(10, 2_001, OLD), segment(2_008, 3_000, NEW)],
        gaps: vec![gap(2_001, 2_008, true)],
    }];
    assert_eq!(gathered(&record()).watches, expected);

    let mut cut = record();
    cut.reports.clear();
    assert_eq!(gathered(&cut).watches[0].gaps, [gap(2_001, 2_008, false)]);

    // It never came back.
    let mut gone = record();
    gone.attempts.retain(|a| a.stream != "watch-0-2");
    assert_eq!(gathered(&gone).watches[0].gaps, [gap(2_001, 3_000, true)]);

    // It never came to be; the others are in the order of their numbers.
    let mut more = record();
    more.watches.push(WatchSum { client: "watch-10".into(), ..WatchSum::default() });
    more.watches.push(WatchSum { client: "watch-9".into(), missed: 2, ..WatchSum::default() });
    let watches = gathered(&more).watches;
    assert_eq!(watches.iter().map(|w| w.id.as_str()).collect::<Vec<_>>(), ["watch-0", "watch-9", "watch-10"]);
    assert_eq!(watches[1].gaps[0].reason, "never opened");
    assert_eq!((watches[1].missed, watches[1].gaps[0].to_ms), (2, 3_000));
}

#[test]
fn losses_are_where_they_happened() {
    let mut record = record();
    record.attempts.push(attempt(Kind::New, "new-300", 1_000, 1_049, Answer::Failed(Failure::Reset)));
    record.attempts.push(attempt(
        Kind::New,
        "new-301",
        1_000,
        1_050,
        Answer::Failed(Failure::Tls("invalid peer certificate: UnknownIssuer".into())),
    ));
    record.watches[0].missed = 2;
    let ran = gathered(&record);
    assert!(!ran.verdict.held && same_length(&ran.timeline));
    assert_eq!(
        ran.verdict.summary,
        "Of 304 requests, 304 of them on a new connection: 1 connection reset, 1 TLS error, 2 watch events missed."
    );
    assert_eq!(ran.timeline.lost["reset"].iter().position(|n| *n == 1), Some(20));
    assert_eq!(ran.timeline.lost["tls"].iter().position(|n| *n == 1), Some(21));
    assert_eq!((ran.figures.x509_errors, ran.verdict.lost(), ran.verdict.examples.len()), (1, 4, 2));
}

#[test]
fn a_broken_promise_does_not_hold() {
    let promise = Promise { fault: "hang".into(), promise: "p".into(), held: false, what_happened: "w".into() };
    let ran = gathered_with(&record(), vec![promise]);
    assert!(!ran.verdict.held);
    assert_eq!(ran.verdict.summary, "Of 302 requests nothing was lost. 1 promise was broken.");
}

#[test]
fn silence_is_seen() {
    let mut quiet = record();
    quiet.attempts.retain(|a| !(at(400)..at(2_100)).contains(&a.done));
    let figures = gathered(&quiet).figures;
    assert_eq!((figures.longest_silence_ms, figures.silent_s), (1_710.0, 1));
    let figures = gathered(&record()).figures;
    assert_eq!((figures.longest_silence_ms, figures.silent_s), (10.0, 0));
}

#[test]
fn an_aborted_run_is_what_there_was() {
    let mut part = record();
    part.over = None;
    part.watches.clear();
    part.attempts.retain(|a| a.done < at(1_000));
    let ran = gathered(&part);
    assert!(!ran.verdict.held && same_length(&ran.timeline));
    assert_eq!((ran.load_ms, ran.watches.len()), (992, 1));

    let ran = gathered(&Record::default());
    assert_eq!((ran.load_ms, ran.marks.len(), ran.watches.len()), (0, 0, 0));
    assert!(!ran.verdict.held && same_length(&ran.timeline), "{ran:#?}");
    assert_eq!((ran.figures.longest_silence_ms, ran.figures.silent_s), (0.0, 0));
}

#[test]
fn long_runs_have_long_steps() {
    for (load_ms, step_ms) in [(9_000, 50), (11_000, 100), (120_000, 1_000), (3_600_000, 20_000)] {
        let mut long = record();
        long.over = Some(at(load_ms));
        assert_eq!(gathered(&long).timeline.step_ms, step_ms, "{load_ms}");
    }
}

#[test]
fn skipped_is_said() {
    let run = skipped(Via::Haproxy, "node", "no haproxy".into());
    assert!(run.ran().is_none() && run.outcome == Outcome::Skipped("no haproxy".into()));
}
