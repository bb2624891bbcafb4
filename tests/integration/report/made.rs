//! What `berth rehearse` writes.

use crate::support::in_memory;
use crate::support::process::rehearsed;
use berth_rehearse::data::{MarkKind, Report, RunOutcome, VERSION};
use std::collections::BTreeSet;
use std::process::{Command, Stdio};

#[test]
fn a_rehearsal_leaves_data_and_a_page() {
    let dir = in_memory();
    let (json, html) = (dir.path().join("report.json"), dir.path().join("report.html"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command.args(["rehearse", "--phase=1s", "--seed=7", "--watches=3", "--compare=berth", "--start-delay=0s"]);
    command.arg(format!("--json={}", json.display())).arg(format!("--report={}", html.display()));
    command.env("TMPDIR", dir.path()).env("BERTH_REHEARSE_CLIENTS", "4").stdin(Stdio::null());
    let status = rehearsed(&mut command).unwrap().status;

    let report: Report = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!((report.version, report.seed, report.aborted), (VERSION, Some(7), None));
    assert!(report.command.shell.starts_with("env BERTH_REHEARSE_CLIENTS=4 berth rehearse --phase=1s --seed=7 "));
    let [run] = report.runs.as_slice() else { panic!("{:#?}", report.runs) };
    let RunOutcome::Ran(ran) = &run.outcome else { panic!("{run:#?}") };
    assert_eq!(ran.verdict.held, status.success(), "{:#?}", ran.verdict);
    assert_eq!((ran.instances.len(), ran.watches.len()), (2, 3));
    let answered: u64 = ran.timeline.answered.values().flatten().sum();
    assert!(answered > 0 && answered <= ran.figures.requests, "{answered}");
    for what in [MarkKind::Started, MarkKind::Ready, MarkKind::Joined, MarkKind::Sigterm, MarkKind::Exited] {
        let instances: Vec<_> = ran.marks.iter().filter(|m| m.what == what).map(|m| m.instance.as_str()).collect();
        assert_eq!(instances, ["old", "new"], "{what}: {:#?}", ran.marks);
    }
    // Each watch was on both, at times perhaps for more than one connection, and its lane has no hole that is not in the table.
    for watch in &ran.watches {
        let on: BTreeSet<_> = watch.segments.iter().map(|segment| segment.instance.as_str()).collect();
        assert_eq!((on, watch.gaps.len()), (["new", "old"].into(), watch.segments.len() - 1), "{watch:#?}");
    }
    // Other clients are there too: copies of all objects, and connections that go around the berth.
    assert_eq!(
        ran.informers.iter().map(|i| i.id.as_str()).collect::<Vec<_>>(),
        ["informer-0", "informer-1", "quiet-0", "quiet-1", "quiet-2", "quiet-3"]
    );
    // They listed again, as nothing brought them a revision since the new one began; unless the run was so slow that the old one's store
    // did, which it does every 5 s.
    let again: Vec<_> = ran.informers.iter().map(|informer| (informer.relists, informer.expired)).collect();
    let at = |what| ran.marks.iter().find(|mark| mark.what == what && mark.instance == "old").unwrap().at_ms;
    if at(MarkKind::Exited) - at(MarkKind::Started) < 5000 {
        assert_eq!(again, [[(0, 0); 2], [(1, 1); 2], [(1, 1); 2]].concat());
    }
    let sum = again.iter().fold((0, 0), |sum, again| (sum.0 + again.0, sum.1 + again.1));
    assert!(
        (ran.figures.relists, ran.figures.expired) == sum && sum.0 == sum.1 && again[..2] == [(0, 0); 2],
        "{again:?}"
    );
    assert_eq!(ran.control_streams.keys().collect::<Vec<_>>(), ["new", "old"]);
    assert!(ran.control_streams.values().all(|control| control.opened >= control.ended && control.opened > 0));
    assert!(std::fs::read_to_string(&html).unwrap().contains("What happened"));
}
