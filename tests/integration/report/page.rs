//! What is in the page, without a browser.

use super::fixture::*;
use berth_rehearse::data::*;
use berth_rehearse::report::page::render;

/// What readers of version 1 have: a change of it shows here what that does to them.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/report-v1.json");

/// `BERTH_BLESS=1 cargo test --test integration golden` writes it.
#[test]
fn the_golden_report_is_read_and_written_as_it_is() {
    let losses = vec![(2_600, "reset", 9, 3)];
    let model = Model { load_ms: 4_000, handover: (2_000, 2_600), watches: 2, losses, ..Model::lossy(Via::Haproxy) };
    let mut report = report(vec![run(&model), skipped(Via::PortSharing)]);
    storm(&mut report.runs[0]);
    if let RunOutcome::Ran(ran) = &mut report.runs[0].outcome {
        ran.promises.extend(promises());
        ran.informers.push(informer());
        ran.figures.endpoint_gap_ms = Some(1_250.0);
        ran.endpoint_gaps = Some(vec![Period { from_ms: 2_610, to_ms: 3_860 }]);
        ran.figures.logged_x509_errors = Some(4);
        ran.figures.slow_reads = 2;
        (ran.figures.relists, ran.figures.expired) = (1, 1);
        ran.control_streams.insert("old".into(), ControlStreams { opened: 8, ended: 8 });
        ran.verdict.notes.push("old had to be killed".into());
    }
    let text = serde_json::to_string_pretty(&report).unwrap() + "\n";
    if std::env::var_os("BERTH_BLESS").is_some() {
        std::fs::write(GOLDEN, &text).unwrap();
    }
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    assert!(serde_json::from_str::<Report>(&golden).unwrap() == report, "it is not read as what it was made of");
    assert!(text == golden, "the golden file is another: BERTH_BLESS=1 cargo test --test integration golden");
}

/// A later berth may write more under the same version.
#[test]
fn a_field_that_came_later_is_passed_over() {
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    let mut later: serde_json::Value = serde_json::from_str(&golden).unwrap();
    for place in ["", "/environment", "/runs/0", "/runs/0/outcome/ran/figures", "/runs/0/outcome/ran/informers/0"] {
        later.pointer_mut(place).unwrap()["later"] = 1.into();
    }
    let read: Report = serde_json::from_value(later).unwrap();
    assert!(read == serde_json::from_str(&golden).unwrap());
}

#[test]
fn a_clean_run_begins_with_its_verdict() {
    let page = render(&report(vec![run(&Model::clean(Via::Berth))]));
    let heading = page.split_once("</h1>").unwrap().0.rsplit_once('>').unwrap().1;
    assert_eq!(heading, "Nothing was lost");
    let what = "simulated apiservers · old v1.33.4 → new v1.34.1";
    for text in ["All of 2,", what, "net.ipv4.tcp_migrate_req", "--seed=7", "Run it again"] {
        assert!(page.contains(text), "{text}");
    }
    assert!(!page.contains("Side by side") && !page.contains("class=\"sign cross\""));
}

#[test]
fn losses_gaps_and_broken_promises_are_shown() {
    let page = render(&report(vec![lossy()]));
    for text in [
        "81 lost",
        "20 refused, 27 reset, 3 streams cut",
        "9 missed",
        "class=\"gap cut\"",
        "broken",
        "kill-shim",
        "new-727",
    ] {
        assert!(page.contains(text), "{text}");
    }
}

/// A fault may cost what its promise allows; then the page does not claim that nothing was lost.
#[test]
fn what_promises_allow_is_not_hidden() {
    let mut allowed = run(&Model::clean(Via::Berth));
    let RunOutcome::Ran(ran) = &mut allowed.outcome else { unreachable!() };
    ran.promises = vec![Promise { held: true, ..promises()[1].clone() }];
    let page = render(&report(vec![allowed]));
    assert!(page.contains("Nothing but what faults may cost was lost") && page.contains("and 3 that a promise allows"));
    assert!(!page.contains("Nothing was lost</h1>"));
}

#[test]
fn a_storm_and_clients_queued_at_the_gate_are_shown() {
    let mut run = run(&Model::clean(Via::Berth));
    storm(&mut run);
    let page = render(&report(vec![run.clone()]));
    for text in [
        "Nothing was lost</h1>",
        "all served within 2.0 s; 13 tries given up, 3 connections reset",
        "2,038 clients had to wait, dropped: 13 that had left",
        "Clients queued at the gate, by class",
        "TLS handshakes in flight, and their limit",
        "queued: others",
    ] {
        assert!(page.contains(text), "{text}");
    }
    let RunOutcome::Ran(ran) = &mut run.outcome else { unreachable!() };
    (ran.gate, ran.promises[0].held, ran.verdict.held) = (None, false, false);
    let page = render(&report(vec![run]));
    assert!(page.contains("A promise was broken</h1>") && !page.contains("at the gate, by class"));
}

/// What a promise allows is not cut, wherever cuts are counted or drawn.
#[test]
fn watches_that_a_promise_lets_be_cut_are_distinguished() {
    let mut allowed = lossy();
    let RunOutcome::Ran(ran) = &mut allowed.outcome else { unreachable!() };
    for watch in &mut ran.watches {
        watch.gaps.iter_mut().for_each(|gap| gap.allowed = !gap.by_instance);
        (watch.missed, watch.flaws) = (0, Vec::new());
    }
    let page = render(&report(vec![lossy(), allowed]));
    for (row, counts) in [("Watches cut", ["3", "0"]), ("Watches cut as promises allow", ["0", "3"])] {
        let cells = counts.map(|count| format!("<td class=\"number\">{count}</td>")).concat();
        assert!(page.contains(&format!("<th scope=\"row\">{row}</th>{cells}")), "{row}");
    }
    let (cut, kept) = page.split_once("id=\"run-2\"").unwrap();
    assert!(cut.contains("class=\"gap cut\"") && cut.contains("they were cut 3 times;"));
    assert!(!kept.contains("class=\"gap cut\"") && kept.contains("they were cut 0 times, and 3 as promises allow;"));
    assert!(kept.contains("cut as a promise allows (reset)"));
}

#[test]
fn a_name_is_shown_once() {
    let mut run = run(&Model::clean(Via::Berth));
    let RunOutcome::Ran(ran) = &mut run.outcome else { unreachable!() };
    let mark = |instance: &str, text: &str| Mark {
        at_ms: 1_000,
        instance: instance.into(),
        what: MarkKind::Fault,
        text: text.into(),
    };
    ran.marks = vec![mark("bad-flag", "bad-flag"), mark("old", "kill-shim")];
    ran.promises = vec![Promise { fault: "bad-flag".into(), instance: "bad-flag".into(), ..promises()[0].clone() }];
    let page = render(&report(vec![run]));
    assert!(
        page.contains("<title>bad-flag at 1.00 s</title>") && page.contains("<title>old kill-shim at 1.00 s</title>")
    );
    assert!(!page.contains("at bad-flag"));
}

#[test]
fn three_are_compared_and_a_peer_that_is_missing_is_named() {
    let page = render(&report(vec![lossy(), skipped(Via::PortSharing), run(&Model::clean(Via::Berth))]));
    for text in
        ["Nothing was lost through berth", "Side by side", "there is no haproxy in PATH", "skipped", "Through HAProxy"]
    {
        assert!(page.contains(text), "{text}");
    }
    assert!((1..=3).all(|n| page.contains(&format!("id=\"run-{n}\""))));
    // First the one that the page is about.
    assert!(page.contains("<a href=\"#run-1\">berth</a>"));
}

#[test]
fn an_aborted_rehearsal_concludes_nothing() {
    let mut aborted = report(vec![run(&Model::clean(Via::Berth))]);
    aborted.aborted = Some("SIGINT".into());
    let page = render(&aborted);
    assert!(page.contains("Stopped before its end") && page.contains("aborted: SIGINT"));
    assert!(!page.contains("Nothing was lost<"));
}

#[test]
fn empty_and_spoiled_reports_are_pages_too() {
    assert!(render(&report(Vec::new())).contains("Nothing was rehearsed"));
    let empty = Run { via: Via::None, topology: String::new(), outcome: RunOutcome::Ran(Box::default()) };
    let page = render(&report(vec![empty.clone(), skipped(Via::Berth)]));
    assert!(page.contains("No load was started") && page.contains("This run proves nothing"));

    // Lists of different lengths, times beyond the load, instances that are not known.
    let mut spoiled = lossy();
    let RunOutcome::Ran(ran) = &mut spoiled.outcome else { unreachable!() };
    ran.timeline.answered.insert("stranger".into(), vec![u64::from(u32::MAX); 3]);
    ran.timeline.lost.insert("reset".into(), vec![1; 10_000]);
    ran.timeline.wait_p50_ms.clear();
    ran.timeline.wait_p99_ms[3] = Some(f64::NAN);
    ran.timeline.step_ms = 0;
    ran.watches[0].segments[0].from_ms = i64::from(i32::MIN);
    ran.watches[0].segments[0].to_ms = i64::MAX;
    ran.marks[0].at_ms = i64::MAX / 2;
    ran.marks[1].at_ms = i64::MIN / 2;
    ran.figures.wait_max_ms = f64::INFINITY;
    let page = render(&report(vec![spoiled]));
    assert!(page.contains("stranger") && !page.contains("NaN"));
}

#[test]
fn a_burst_does_not_flatten_the_rest() {
    let mut burst = run(&Model::clean(Via::Berth));
    let RunOutcome::Ran(ran) = &mut burst.outcome else { unreachable!() };
    ran.timeline.answered.get_mut("old").unwrap()[1] = 135;
    let page = render(&report(vec![burst]));
    // The scale ends where it would have ended, and the value is there in words.
    assert!(page.contains("↑ 1,350") && !page.contains(">1,500<"));
}

#[test]
fn of_500_watches_the_worst_are_shown() {
    let model = Model { watches: 500, cut_one_of: Some(25), ..Model::lossy(Via::Berth) };
    let page = render(&report(vec![run(&model)]));
    assert!(page.contains("20 of 500 watches: those with the worst gaps") && page.contains("All 500 watches"));
    // One title a lane's segment.
    assert_eq!(page.matches("watch-26 on old").count(), 1);
    assert_eq!(page.matches("watch-27 on old").count(), 0);
    assert!(page.len() < 600_000, "{} bytes", page.len());
}

#[test]
fn what_was_seen_other_figures_the_requests_is_shown() {
    let mut steered = run(&Model::clean(Via::Berth));
    let RunOutcome::Ran(ran) = &mut steered.outcome else { panic!("it ran") };
    let on = vec![Period { from_ms: 0, to_ms: 2_000 }];
    ran.direct = Some(Direct { steered: 1_234, on_share: 0.25, on });
    let page = render(&report(vec![steered]));
    assert!(
        page.contains("1,234")
            && page.contains("past the shims, 25 % of the time")
            && page.contains("steered past the shims, from 0.00 s")
    );

    let mut other_figures = run(&Model::clean(Via::Berth));
    assert!(!render(&report(vec![other_figures.clone()])).contains("Other figures"));
    let RunOutcome::Ran(ran) = &mut other_figures.outcome else { unreachable!() };
    ran.control_streams.insert("old".into(), ControlStreams { opened: 8, ended: 7 });
    ran.figures.slow_reads = 2;
    (ran.figures.relists, ran.figures.expired) = (5, 4);
    ran.figures.logged_x509_errors = Some(4);
    ran.figures.endpoint_gap_ms = Some(1_250.0);
    ran.endpoint_gaps = Some(vec![Period { from_ms: 8_100, to_ms: 9_350 }]);
    ran.informers = vec![informer()];
    ran.verdict.notes = vec!["old had to be killed".into()];
    let page = render(&report(vec![other_figures]));
    for text in [
        "connections straight to old",
        "large answers read slowly",
        "relists of watches and informers</th><td class=\"number\">5<",
        "older than the instance</th><td class=\"number\">4<",
        "errors in the apiservers' logs",
        "Service kubernetes empty, from ",
        "informer-0",
        "Note: old had to be killed.",
    ] {
        assert!(page.contains(text), "{text}");
    }
}

/// Whatever a program wrote is text, in markup, attributes and drawings.
#[test]
fn hostile_text_is_only_text() {
    const EVIL: &str = "</title></script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\u{0}";
    let evil = || EVIL.to_owned();
    let mut report =
        report(vec![lossy(), Run { via: Via::None, topology: evil(), outcome: RunOutcome::Skipped(evil()) }]);
    report.berth_version = evil();
    report.made_at = evil();
    report.command = Command::new(vec![evil()]);
    report.aborted = Some(evil());
    report.environment = Environment {
        kernel: evil(),
        cpu_model: evil(),
        sysctls: [(evil(), evil())].into(),
        programs: vec![Program { role: evil(), version: evil() }],
        ..report.environment
    };
    let RunOutcome::Ran(ran) = &mut report.runs[0].outcome else { unreachable!() };
    ran.instances.push(Instance { name: evil(), version: evil() });
    ran.timeline.answered.insert(evil(), ran.timeline.answered["old"].clone());
    ran.timeline.open_connections.insert(evil(), ran.timeline.answered["old"].clone());
    ran.timeline.lost.insert(evil(), ran.timeline.answered["old"].clone());
    ran.figures.new_connections_by_instance.insert(evil(), 7);
    ran.marks.push(Mark { at_ms: 100, instance: evil(), what: MarkKind::Fault, text: evil() });
    ran.watches[0].id = evil();
    ran.watches[0].segments[0].instance = evil();
    ran.watches[0].gaps[0].reason = evil();
    ran.promises = vec![Promise {
        fault: evil(),
        instance: evil(),
        promise: evil(),
        what_happened: vec![evil()],
        allowed: vec![Tally { kind: evil(), text: evil(), count: 1 }],
        ..promises()[1].clone()
    }];
    ran.informers = vec![Informer { id: evil(), ..informer() }];
    ran.verdict.summary = evil();
    ran.verdict.objections = vec![evil()];
    ran.verdict.examples = vec![evil()];
    ran.verdict.lost.push(Tally { kind: evil(), text: evil(), count: 1 });
    let page = render(&report);
    assert!(page.contains("&lt;script&gt;alert(1)"));
    for forbidden in ["<script", "<img", "\"'>"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    // Markup of its own: the page without the text has as many elements as before.
    assert_eq!(page.matches("<title>").count(), page.matches("</title>").count());
}

fn lossy() -> Run {
    let mut run = run(&Model::lossy(Via::Haproxy));
    if let RunOutcome::Ran(ran) = &mut run.outcome {
        ran.promises = promises();
    }
    run
}
