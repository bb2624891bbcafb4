//! `berth rehearse --topology bridge` as a user runs it.

use super::expect_promise_kept;
use crate::support::process::{find_processes, rehearsal_command, run_rehearsal, was_too_busy};
use crate::support::{eventually, in_memory, print_skipped};
use berth_rehearse::record::data::{Report, Value};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

const BRIDGE: [&str; 7] = [
    "--topology=bridge",
    "--pass=relay",
    "--netns",
    "--phase=1s",
    "--rate=40",
    "--seed=7",
    "--speedup=10",
];

fn rehearse_command(tmp: &Path, args: &[&str]) -> Command {
    let mut command = rehearsal_command(env!("CARGO_BIN_EXE_berth"));
    command
        .env("TMPDIR", tmp)
        .arg("rehearse")
        .args(BRIDGE)
        .args(args);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// True if the rehearsal reports that this machine cannot steer. Then the test does nothing.
fn is_unable_to_steer(status: Option<i32>, said: &str) -> bool {
    let missing = status == Some(69) && said.contains("nothing was changed")
        || said.contains("make a network namespace");
    if missing {
        print_skipped(
            said.lines()
                .find(|line| line.starts_with("berth: "))
                .unwrap(),
        );
    }
    missing
}

/// Rehearses, and returns the output and the report. `None` if this machine cannot steer.
fn rehearse_to_success(args: &[&str]) -> Option<(String, Report)> {
    let tmp = in_memory();
    let json = tempfile::NamedTempFile::new().unwrap();
    let file = format!("--json={}", json.path().display());
    let output = run_rehearsal(&mut rehearse_command(
        tmp.path(),
        &[args, &[&file]].concat(),
    ))
    .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if is_unable_to_steer(output.status.code(), &said) || was_too_busy(&output) {
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
    assert_eq!(find_processes(&tmp.path().display().to_string()), [""; 0]);
    let report = serde_json::from_slice(&std::fs::read(json.path()).unwrap()).unwrap();
    Some((said.into_owned(), report))
}

#[test]
fn an_apiserver_that_knows_nothing_of_berth_is_replaced_in_place() {
    let Some((said, report)) = rehearse_to_success(&["--compare=none", "--fault=kill-temporary"])
    else {
        return;
    };
    // The run without a bridge has no temporary instance, so the fault is left out.
    assert!(report.runs[0].ran().unwrap().promises.is_empty(), "{said}");
    expect_promise_kept(
        report.runs[1].ran().unwrap(),
        "kill-temporary",
        "old-bridge",
    );
    // Without a bridge, the old apiserver ends before the new apiserver starts, and connections are
    // refused meanwhile.
    assert!(
        !report.runs[0].ran().unwrap().lost.is_empty()
            && report.runs[1].ran().unwrap().lost.is_empty(),
        "{said}"
    );
    each_served(&report, 1);
    assert_eq!(report.runs[1].topology, "bridge");
}

#[test]
fn a_bridge_that_is_killed_costs_no_client_anything() {
    let Some((said, report)) = rehearse_to_success(&["--fault=kill-shim"]) else {
        return;
    };
    expect_promise_kept(report.runs[0].ran().unwrap(), "kill-shim", "old-bridge");
    assert!(report.runs[0].ran().unwrap().lost.is_empty(), "{said}");
    each_served(&report, 0);
}

/// Checks that each instance, including the temporary one, answered new connections.
fn each_served(report: &Report, run: usize) {
    for name in ["old", "old-bridge", "new"] {
        let served = report.runs[run]
            .ran()
            .unwrap()
            .find_figure(&format!("connections on {name}"));
        assert!(
            matches!(served, Some(Value::Count(1..))),
            "{name}: {served:?}"
        );
    }
}

/// Starts a rehearsal and waits until its bridge is on. `None` if this machine cannot steer.
fn start_bridged(tmp: &Path) -> Option<Child> {
    let mut child = rehearse_command(tmp, &[]).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let said: Vec<_> = lines
        .by_ref()
        .take_while(|line| !line.contains("stop old"))
        .collect();
    // Keep reading, so that the rehearsal never waits for a reader.
    let reader = std::thread::spawn(move || lines.collect::<Vec<_>>());
    if !said.iter().any(|line| line.contains("may be replaced")) {
        let status = child.wait().unwrap();
        let said = [said, reader.join().unwrap()].concat().join("\n");
        assert!(is_unable_to_steer(status.code(), &said), "{said}");
        return None;
    }
    Some(child)
}

/// Ends a rehearsal by a signal. The bridge is not a child of the rehearsal, so the rehearsal's
/// end, or `after`, has to end the bridge.
fn is_not_left_behind(signal: Signal, after: impl FnOnce(&Path, ExitStatus)) {
    let tmp = in_memory();
    let Some(mut child) = start_bridged(tmp.path()) else {
        return;
    };
    kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
    let status = child.wait().unwrap();
    after(tmp.path(), status);
    let word = tmp.path().display().to_string();
    eventually("nothing runs", || {
        find_processes(&word).is_empty().then_some(())
    });
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
}

#[test]
fn a_bridge_is_not_left_behind_by_an_interrupt() {
    is_not_left_behind(Signal::SIGINT, |_, status| {
        assert_eq!(status.code(), Some(130));
    });
}

#[test]
fn a_bridge_is_not_left_behind_by_a_kill() {
    is_not_left_behind(Signal::SIGKILL, |tmp, _| {
        let next = rehearse_command(tmp, &["--via=none", "--compare=none"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&next.stderr);
        assert!(
            said.contains("left by a rehearsal that was killed"),
            "{said}"
        );
    });
}
