mod run;

use super::*;
use crate::data::{Losses, MarkKind, Value};
use crate::event::{
    Answer, Attempt, ConnectionKind, EndReport, EndedBy, Event, EventKind, Failure, Footprint, Informer, Protocol,
    Signed, StreamEnd, StreamKind, WatchSum,
};
use crate::loss::Loss;
use crate::plan::LoadPlan;
use crate::record::Player;
use crate::verdict::{NEW, OLD};

fn judge(record: &Record, plan: &Plan) -> Ran {
    super::judge(record, plan, None)
}

/// How many losses there were.
fn lost(ran: &Ran) -> u64 {
    ran.lost.values().sum()
}

fn figure(ran: &Ran, name: &str) -> u64 {
    match ran.figure(name) {
        Some(Value::Count(count)) => count,
        other => panic!("{name}: {other:?}"),
    }
}

fn ended_by_instance(ran: &Ran) -> u64 {
    figure(ran, "streams ended by the instance")
}

fn plan() -> Plan {
    Plan { load: LoadPlan { watches: 1, ..LoadPlan::default() }, ..Plan::default() }
}

fn attempt(kind: ConnectionKind, stream: &str, at: u64, answer: Answer) -> Attempt {
    Attempt { kind, writes: false, stream: stream.into(), due: Stamp(at), done: Stamp(at + 1_000_000), answer }
}

/// A run in which all went well: new is ready at 1000 ms, old stops from 2000 to 2100 ms.
fn good() -> Record {
    let mut record = Record::default();
    for n in 0..300_u64 {
        let at = n * 10_000_000;
        let instance = if at < 2_000_000_000 { OLD } else { NEW }.to_owned();
        record.attempts.push(attempt(ConnectionKind::New, &format!("new-{n}"), at, Answer::Good { instance }));
    }
    for (instance, mark, ms) in [
        (OLD, MarkKind::Ready, 0),
        (NEW, MarkKind::Ready, 1000),
        (OLD, MarkKind::Terminating, 2000),
        (OLD, MarkKind::Drained, 2100),
    ] {
        record.moments.add(instance, mark, Stamp(ms * 1_000_000));
    }
    record.players = [OLD, NEW].map(|name| Player { name: name.into(), version: None, serves: true }).into();
    let events = [(OLD.to_owned(), 20), (NEW.to_owned(), 10)].into();
    record.watches.push(WatchSum { client: "watch-0".into(), events, ..WatchSum::default() });
    record
}

fn report(stream: &str, by: EndedBy, at: u64) -> (String, EndReport) {
    let peer = ([127, 0, 0, 1], 1).into();
    (OLD.into(), EndReport { stream: stream.into(), peer, by, at: Stamp(at), rejected: 0 })
}

fn end(stream: &str, at: u64) -> StreamEnd {
    StreamEnd {
        stream: stream.into(),
        what: StreamKind::Kept,
        protocol: Protocol::Http1,
        instance: OLD.into(),
        at: Stamp(at),
        how: Failure::Closed,
        in_flight: false,
        signed: None,
    }
}

#[test]
fn a_good_run_holds() {
    let ran = judge(&good(), &plan());
    assert!(ran.verdict == Verdict::Held, "{ran:#?}");
    assert_eq!(
        ["requests", "connections on old", "connections on new"].map(|name| figure(&ran, name)),
        [300, 200, 100]
    );
    for name in ["median wait", "99th percentile", "longest wait"] {
        assert_eq!(ran.figure(name), Some(Value::Ms(1.0)), "{name}");
    }
}

#[test]
fn a_storm_is_judged_by_whether_it_came_and_which_clients_were_served() {
    let plan = Plan { load: LoadPlan { storm: 2, ..plan().load }, ..plan() };
    let with = |answers: &[Answer]| {
        let event = |ms: u64, what| Event { at: Stamp(ms * 1_000_000), subject: String::new(), what };
        let tries = answers.iter().map(|answer| event(2_300, EventKind::StormTry(answer.clone())));
        let (began, over) = (event(2_200, EventKind::StormBegan(2)), event(2_400, EventKind::StormEnded));
        judge(&Record { events: [began].into_iter().chain(tries).chain([over]).collect(), ..good() }, &plan)
    };
    let served = || Answer::Good { instance: NEW.into() };
    let [gave_up, local] = [Failure::Unanswered, Failure::Local("no port".into())].map(Answer::Failed);
    // A client that retried and was served lost nothing.
    let ran = with(&[served(), gave_up.clone(), served()]);
    assert!(ran.verdict == Verdict::Held && lost(&ran) == 0 && figure(&ran, "requests") == 300, "{ran:#?}");
    let ran = with(&[served(), gave_up]);
    assert!(ran.verdict == Verdict::Broken, "{ran:#?}");
    assert_eq!(with(&[served(), local, served()]).objections.len(), 1);
    assert_eq!(judge(&good(), &plan).objections, ["there was no storm"]);
}

/// The temporary instance of a bridge takes over at 1000 ms, new at 2000 ms; this is ready at 1500 ms.
fn bridged() -> Record {
    let mut record = good();
    let bridge = "old-bridge";
    for attempt in record.attempts.iter_mut().filter(|a| (1_000_000_000..2_000_000_000).contains(&a.due.0)) {
        attempt.answer = Answer::Good { instance: bridge.into() };
    }
    record.moments.0.clear();
    for (instance, mark, ms) in [
        (OLD, MarkKind::Ready, 0),
        (bridge, MarkKind::Ready, 900),
        (OLD, MarkKind::Terminating, 1100),
        (OLD, MarkKind::Drained, 1150),
        (NEW, MarkKind::Ready, 1500),
        (bridge, MarkKind::Terminating, 2000),
        (bridge, MarkKind::Drained, 2100),
    ] {
        record.moments.add(instance, mark, Stamp(ms * 1_000_000));
    }
    let player = Player { name: bridge.into(), ..record.players[0].clone() };
    record.players.insert(1, player);
    record
}

#[test]
fn what_a_bridge_brings_takes_over_and_is_taken_over_from() {
    let ran = judge(&bridged(), &plan());
    assert!(ran.verdict == Verdict::Held && figure(&ran, "connections on old-bridge") == 100, "{ran:#?}");

    let mut early = bridged();
    early.moments.0[4].at = Stamp(2_001_000_000);
    let objections = judge(&early, &plan()).objections;
    assert_eq!(objections, ["old-bridge was stopped before new was ready"]);

    let mut idle = bridged();
    for attempt in &mut idle.attempts {
        if matches!(&attempt.answer, Answer::Good { instance } if instance == "old-bridge") {
            attempt.answer = Answer::Good { instance: OLD.into() };
        }
    }
    let objections = judge(&idle, &plan()).objections;
    assert_eq!(objections[0], "old-bridge served only 0 new connections", "{objections:?}");
}

#[test]
fn every_failure_of_a_new_connection_is_lost() {
    for (failure, loss) in [
        (Failure::Refused, Loss::Refused),
        (Failure::Reset, Loss::Reset),
        (Failure::Closed, Loss::Closed),
        (Failure::Unanswered, Loss::Unanswered),
        (Failure::Tls("alert".into()), Loss::Tls),
        (Failure::X509("x509".into()), Loss::Tls),
        (Failure::Http("h2".into()), Loss::Http),
    ] {
        let mut record = good();
        record.attempts.push(attempt(ConnectionKind::New, "x", 0, Answer::Failed(failure)));
        let ran = judge(&record, &plan());
        assert_eq!(ran.lost, Losses::from([(loss, 1)]));
        assert!(ran.verdict != Verdict::Held && ran.examples.len() == 1);
    }
}

#[test]
fn an_instance_cannot_excuse_what_never_reached_it() {
    for failure in [Failure::Refused, Failure::Unanswered, Failure::Tls("x509".into())] {
        let mut record = good();
        record.attempts.push(attempt(ConnectionKind::New, "x", 5, Answer::Failed(failure)));
        record.reports.push(report("x", EndedBy::Instance, 1));
        assert_eq!(lost(&judge(&record, &plan())), 1);
    }
}

#[test]
fn streams_that_their_instance_ended_are_counted_apart() {
    let mut record = good();
    record.ends.push(end("kept", 10));
    record.attempts.push(attempt(ConnectionKind::Kept, "kept", 9, Answer::Failed(Failure::Reset)));
    record.reports.push(report("kept", EndedBy::Instance, 10));
    let ran = judge(&record, &plan());
    assert!(ran.verdict == Verdict::Held, "{ran:#?}");
    assert_eq!((ended_by_instance(&ran), lost(&ran)), (1, 0));
}

#[test]
fn other_ends_are_berths() {
    let others = [
        None,
        Some(report("kept", EndedBy::Peer, 5)),
        Some(report("kept", EndedBy::PeerEarly, 5)),
        // The instance ended it after the client had seen the end.
        Some(report("kept", EndedBy::Instance, 11)),
        Some(report("another", EndedBy::Instance, 5)),
    ];
    for other in others {
        let mut record = good();
        record.ends.push(end("kept", 10));
        record.reports.extend(other);
        let ran = judge(&record, &plan());
        assert_eq!(ended_by_instance(&ran), 0);
        assert_eq!(ran.lost, Losses::from([(Loss::StreamEnded, 1)]));
    }
}

#[test]
fn error_statuses_are_lost_unless_the_instance_turned_them_away() {
    let bad =
        |stream: &str| attempt(ConnectionKind::Kept, stream, 1, Answer::Bad { instance: OLD.into(), status: 503 });
    let mut record = good();
    record.attempts.extend([bad("a"), bad("a"), bad("b")]);
    let (name, mut once) = report("a", EndedBy::Instance, 2);
    once.rejected = 1;
    record.reports.push((name, once));
    let ran = judge(&record, &plan());
    assert_eq!((figure(&ran, "rejected by the instance"), lost(&ran)), (1, 2));
}

#[test]
fn without_reports_the_status_of_a_stopping_instance_shows_that_it_rejected() {
    let bad = |status| {
        let ms = 2_050_000_000;
        attempt(ConnectionKind::Kept, "a", ms, Answer::Bad { instance: OLD.into(), status })
    };
    let mut record = good();
    record.attempts.extend([bad(429), bad(503), bad(500), Attempt { done: Stamp(1), ..bad(503) }]);
    let ran = judge(&record, &plan());
    assert_eq!((figure(&ran, "rejected by the instance"), lost(&ran)), (2, 2));
}

#[test]
fn a_new_connection_that_its_instance_ends_is_counted_apart() {
    for (signed, count) in [(Some(Signed::GoAway), 0), (None, 1)] {
        let mut record = good();
        let at = 2_050_000_000;
        record.attempts.push(attempt(
            ConnectionKind::New,
            "new-x",
            at,
            Answer::Failed(Failure::Http("go away".into())),
        ));
        record.ends.push(StreamEnd { what: StreamKind::New, signed, ..end("new-x", at) });
        let ran = judge(&record, &plan());
        assert_eq!((lost(&ran), ended_by_instance(&ran)), (count, 1 - count));
        assert!(!ran.lost.contains_key(&Loss::StreamEnded));
    }
}

#[test]
fn an_informer_must_hold_what_was_written() {
    for (spoil, loss) in [
        (Informer { missing: 1, ..Informer::default() }, Loss::EventMissed),
        (Informer { stale: 1, ..Informer::default() }, Loss::EventMissed),
        (Informer { duplicated: 1, ..Informer::default() }, Loss::EventDuplicated),
    ] {
        let mut record = good();
        record.informers.extend([Informer { written: 9, held: 9, relists: 1, ..Informer::default() }, spoil]);
        let ran = judge(&record, &plan());
        assert_eq!(ran.lost, Losses::from([(loss, 1)]));
        assert_eq!(figure(&ran, "informers"), 1);
    }
}

#[test]
fn informers_of_what_no_client_writes_are_no_evidence_that_nothing_was_missed() {
    let mut record = good();
    let quiet = Informer { id: "quiet-0".into(), relists: 1, expired: 1, ..Informer::default() };
    record.informers.extend([Informer { written: 9, held: 9, ..Informer::default() }, quiet.clone(), quiet]);
    let ran = judge(&record, &plan());
    assert_eq!(record.informers.iter().filter(|informer| informer.is_quiet()).count(), 2);
    assert_eq!(lost(&ran), 0);
    assert_eq!(figure(&ran, "relists"), 2);
}

#[test]
fn silence_is_the_longest_time_without_a_good_answer() {
    let mut record = good();
    (record.began, record.over) = (Some(Stamp(0)), Some(Stamp(3_500_000_000)));
    record.attempts.retain(|a| !(500_000_000..1_500_000_000).contains(&a.due.0));
    let ran = judge(&record, &plan());
    assert_eq!(ran.figure("longest time without an answer"), Some(Value::Ms(1010.0)));
}

#[test]
fn gaps_in_watches_are_lost() {
    let mut record = good();
    record.watches[0].flaws = vec![(Stamp(5), Loss::EventMissed, 3), (Stamp(6), Loss::EventDuplicated, 1)];
    assert_eq!(lost(&judge(&record, &plan())), 4);
}

#[test]
fn a_run_that_tests_nothing_does_not_hold() {
    fn forget(r: &mut Record, name: &str, mark: Option<MarkKind>) {
        r.moments.0.retain(|m| m.instance != name || mark.is_some_and(|mark| m.mark != mark));
    }
    type Spoil = fn(&mut Record);
    use Verdict::{TooBusy, Unproven, Wrong};
    let spoils: [(Spoil, Verdict); 13] = [
        (|r| r.players.truncate(1), Wrong),
        (|r| r.behind = Duration::from_secs(2), TooBusy),
        (|r| r.attempts.truncate(30), Unproven),
        (|r| r.attempts.retain(|a| matches!(&a.answer, Answer::Good { instance } if instance == OLD)), Unproven),
        (|r| r.watches.clear(), Wrong),
        (|r| r.watches[0].events.retain(|name, _| name == OLD), Unproven),
        (|r| forget(r, OLD, None), Wrong),
        (|r| forget(r, NEW, None), Wrong),
        (|r| forget(r, OLD, Some(MarkKind::Drained)), Wrong),
        (|r| r.moments.0[1].at = Stamp(2_500_000_000), Wrong),
        (|r| r.troubles.push("old had to be killed".into()), Wrong),
        (
            |r| r.attempts.push(attempt(ConnectionKind::New, "x", 0, Answer::Failed(Failure::Local("EMFILE".into())))),
            Unproven,
        ),
        (|r| (r.behind, r.troubles) = (Duration::from_secs(2), vec!["old had to be killed".into()]), Wrong),
    ];
    for (n, (spoil, verdict)) in spoils.iter().enumerate() {
        let mut record = good();
        spoil(&mut record);
        let ran = judge(&record, &plan());
        assert!(lost(&ran) == 0 && !ran.objections.is_empty(), "{n}: {ran:#?}");
        assert_eq!(ran.verdict, *verdict, "{n}: {ran:#?}");
    }
    let mut lost = good();
    lost.behind = Duration::from_secs(2);
    lost.attempts.push(attempt(ConnectionKind::New, "x", 0, Answer::Failed(Failure::Refused)));
    assert_eq!(judge(&lost, &plan()).verdict, Verdict::Lost);
    assert_eq!(judge(&Record::default(), &plan()).verdict, Wrong);
}

#[test]
fn a_wait_in_vain_is_lost_unless_this_machine_was_too_busy_to_tell() {
    let ended = |failure: Failure, late: &[(u64, u64)], done: u64| {
        let mut record = good();
        let waited = attempt(ConnectionKind::New, "x", 1_000_000_000, Answer::Failed(failure));
        record.attempts.push(Attempt { done: Stamp(done * 1_000_000), ..waited });
        record.late = late.iter().map(|(from, to)| (Stamp(from * 1_000_000), Stamp(to * 1_000_000))).collect();
        judge(&record, &plan())
    };
    let failing = |failure, late: &[(u64, u64)]| ended(failure, late, 16_000);
    let busy = [(2_000, 14_000)];
    let ran = failing(Failure::Unanswered, &busy);
    assert!(ran.verdict == Verdict::TooBusy && lost(&ran) == 0, "{ran:#?}");
    insta::assert_snapshot!(ran.objections.join("\n"), @"1 request unanswered for 15 s, and meanwhile the clients were far behind their timetable, or their own timers were late by 500ms and more for half of the time at least");

    // It was not, or at another time.
    for late in [&[][..], &[(0, 1_000), (16_000, 90_000)]] {
        let ran = failing(Failure::Unanswered, late);
        assert_eq!((ran.verdict, ran.lost), (Verdict::Lost, [(Loss::Unanswered, 1)].into()));
    }
    // With its timer in time, the client had given up before.
    for failure in [Failure::Reset, Failure::Closed] {
        assert_eq!(failing(failure.clone(), &busy).verdict, Verdict::TooBusy);
        assert_eq!(failing(failure, &[]).verdict, Verdict::Lost);
    }
    // Clients that were far behind all along waited on their own machine.
    let mut slow = good();
    slow.behind = Duration::from_millis(1_001);
    let waited = attempt(ConnectionKind::New, "x", 1_000_000_000, Answer::Failed(Failure::Unanswered));
    slow.attempts.push(Attempt { done: Stamp(16_000_000_000), ..waited });
    assert_eq!(judge(&slow, &plan()).verdict, Verdict::TooBusy);
    slow.behind = Duration::from_secs(1);
    assert_eq!(judge(&slow, &plan()).verdict, Verdict::Lost);
    // What has nothing to do with time is lost, however busy it was.
    let others = [
        (Failure::Refused, Loss::Refused),
        (Failure::Reset, Loss::Reset),
        (Failure::Closed, Loss::Closed),
        (Failure::Tls("alert".into()), Loss::Tls),
        (Failure::Http("h2".into()), Loss::Http),
    ];
    for (failure, loss) in others {
        let ran = ended(failure, &busy, 15_900);
        assert_eq!((ran.verdict, ran.lost), (Verdict::Lost, [(loss, 1)].into()));
    }

    // Beside a real loss, or what a process did wrong, it is not what the run came to.
    let mut spoiled = good();
    spoiled.behind = Duration::from_secs(2);
    assert_eq!(judge(&spoiled, &plan()).verdict, Verdict::TooBusy);
    spoiled.troubles.push("old had to be killed".into());
    assert_ne!(judge(&spoiled, &plan()).verdict, Verdict::TooBusy);
    spoiled.troubles.clear();
    spoiled.attempts.push(attempt(ConnectionKind::New, "y", 0, Answer::Bad { instance: OLD.into(), status: 500 }));
    assert_ne!(judge(&spoiled, &plan()).verdict, Verdict::TooBusy);
    // Too little to tell is not too much to do.
    let mut few = good();
    few.attempts.truncate(30);
    assert_eq!(judge(&few, &plan()).verdict, Verdict::Unproven);
}

#[test]
fn a_shim_that_has_more_threads_from_round_to_round_is_wrong() {
    let with = |more: u64| {
        let footprint = |n: u64| Event {
            at: Stamp(n),
            subject: "node".into(),
            what: EventKind::Footprint(Footprint { pid: 7, memory_kib: 3000, descriptors: 30, threads: 4 + n * more }),
        };
        judge(&Record { events: (0..12).map(footprint).collect(), ..good() }, &plan()).verdict
    };
    assert_eq!((with(0), with(1)), (Verdict::Held, Verdict::Wrong));
}
