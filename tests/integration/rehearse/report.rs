//! Files that `berth rehearse` writes.

use crate::support::in_memory;
use crate::support::process::run_rehearsal;
use berth_rehearse::record::data::{MarkKind, Report, RunOutcome, SCHEMA_VERSION, Value, Verdict};
use std::process::{Command, Stdio};

#[test]
fn a_rehearsal_leaves_data_and_a_page() {
    let dir = in_memory();
    let (json, html) = (
        dir.path().join("report.json"),
        dir.path().join("report.html"),
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command.args([
        "rehearse",
        "--phase=1s",
        "--seed=7",
        "--watches=3",
        "--compare=berth",
        "--start-delay=0s",
    ]);
    command
        .arg(format!("--json={}", json.display()))
        .arg(format!("--report={}", html.display()));
    command
        .env("TMPDIR", dir.path())
        .env("BERTH_REHEARSE_RATE", "40")
        .stdin(Stdio::null());
    let status = run_rehearsal(&mut command).unwrap().status;

    let report: Report = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!((report.version, report.aborted), (SCHEMA_VERSION, None));
    assert!(
        report
            .command
            .starts_with("env BERTH_REHEARSE_RATE=40 berth rehearse --phase=1s --seed=7 ")
    );
    let [run] = report.runs.as_slice() else {
        panic!("{:#?}", report.runs)
    };
    let RunOutcome::Ran(ran) = &run.outcome else {
        panic!("{run:#?}")
    };
    assert_eq!(ran.verdict == Verdict::Held, status.success(), "{ran:#?}");
    assert_eq!(ran.instances.len(), 2);
    let figure = |name: &str| match ran.find_figure(name) {
        Some(Value::Count(count)) => count,
        other => panic!("{name}: {other:?}"),
    };
    let answered: u64 = ran.timeline.answered.values().flatten().sum();
    assert!(answered > 0 && answered <= figure("requests"), "{answered}");
    for what in [
        MarkKind::Started,
        MarkKind::Ready,
        MarkKind::Joined,
        MarkKind::Sigterm,
        MarkKind::Exited,
    ] {
        let instances: Vec<_> = ran
            .marks
            .iter()
            .filter(|m| m.what == what)
            .map(|m| m.instance.as_str())
            .collect();
        assert_eq!(instances, ["old", "new"], "{what}: {:#?}", ran.marks);
    }
    // Copies of written objects are complete. Quiet informers list again, because they got no
    // revision after the start of the new instance. Only in a slow run they may get a revision: the
    // store reports its progress every 5 s.
    let at = |what| {
        ran.marks
            .iter()
            .find(|mark| mark.what == what && mark.instance == "old")
            .unwrap()
            .at_ms
    };
    let slow = at(MarkKind::Exited) - at(MarkKind::Started) >= 5000;
    assert!(
        figure("informers") == 2 && (slow || figure("relists") == 4),
        "{ran:#?}"
    );
    assert!(std::fs::metadata(&html).unwrap().len() > 0);
}
