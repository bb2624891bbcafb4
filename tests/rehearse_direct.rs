//! `berth rehearse --direct` as a user runs it.
#![cfg(feature = "rehearse")]

mod support;

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use support::skipped;

const SHORT: [&str; 3] = ["--phase=1s", "--rate=30", "--seed=7"];

fn rehearse(program: &str, before: &[&str], tmp: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(before).arg("rehearse").args(SHORT).args(args).env("TMPDIR", tmp);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What was printed, and the report; none if there can be no direct path here, which the rehearsal says.
fn held(args: &[&str]) -> Option<(String, Value)> {
    let (tmp, json) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let file = format!("--json={}", json.path().display());
    let args = [&["--direct=on", &file], args].concat();
    let output = rehearse(env!("CARGO_BIN_EXE_berth"), &[], tmp.path(), &args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(69) && ["--direct on: ", "network namespace"].iter().any(|why| said.contains(why)) {
        skipped(said.lines().find(|line| line.starts_with("berth: ")).unwrap());
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
    Some((said.into_owned(), serde_json::from_slice(&std::fs::read(json.path()).unwrap()).unwrap()))
}

#[test]
fn upgrades_lose_nothing_and_in_calm_connections_are_steered() {
    for topology in ["sidecar", "native-sidecar", "node", "run"] {
        let Some((said, report)) = held(&["--upgrades=2", "--topology", topology]) else { return };
        let direct = &report["runs"][0]["outcome"]["ran"]["direct"];
        assert!(direct["steered"].as_u64() > Some(0), "{topology}: {said}");
        // On before, between and after the two upgrades, off in each; the one shim of a node relays for a while after each.
        let least = if topology == "node" { 1 } else { 2 };
        assert!(direct["on"].as_array().unwrap().len() >= least, "{topology}: {direct}");
        assert!(direct["on_share"].as_f64() < Some(1.0), "{topology}: {direct}");
    }
}

/// What goes past a shim does not end with it; what is on an instance does.
#[test]
fn faults_in_calm_cost_what_is_promised() {
    let faults = "--fault=beside-kill-shim,beside-drain,calm-kill-shim,calm-crash";
    let Some((said, report)) = held(&[faults, "--settle=2s"]) else { return };
    let promises = report["runs"][0]["outcome"]["ran"]["promises"].as_array().unwrap();
    let kinds = |fault: &str| {
        let promise = promises.iter().find(|promise| promise["fault"] == fault).unwrap();
        promise["allowed"].as_array().unwrap().iter().map(|tally| tally["kind"].as_str().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((kinds("beside-kill-shim"), kinds("beside-drain")), (vec![], vec![]), "{said}");
    // What it relayed, or had in its queue, ends with it.
    let connections = ["refused", "reset", "closed"];
    assert!(kinds("calm-kill-shim").iter().all(|kind| connections.contains(kind)), "{said}");
    assert!(!kinds("calm-crash").contains(&"refused"), "{said}");
    assert!(said.contains("lost on the direct path when the instance was killed"), "{said}");
}

#[test]
fn what_is_beside_has_no_direct_path() {
    let Some((said, report)) = held(&["--compare=none"]) else { return };
    let ran = |run: usize| &report["runs"][run]["outcome"]["ran"];
    assert!(ran(0)["direct"].is_null() && !ran(0)["verdict"]["lost"].as_array().unwrap().is_empty(), "{said}");
    assert!(ran(1)["direct"]["steered"].as_u64() > Some(0), "{said}");
}

/// Root without what makes a namespace is as good as anybody.
#[test]
fn without_the_privilege_on_ends_before_it_begins_and_auto_relays() {
    let tmp = tempfile::tempdir().unwrap();
    let berth = env!("CARGO_BIN_EXE_berth");
    let before = ["--bounding-set=-sys_admin,-bpf,-net_admin", "--", berth];
    let run = |direct: &str| rehearse("setpriv", &before, tmp.path(), &[direct]).output();
    let output = match run("--direct=on") {
        Ok(output) if !String::from_utf8_lossy(&output.stderr).starts_with("setpriv: ") => output,
        _ => return skipped("setpriv is not there, or may not drop capabilities"),
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(69), 1), "{said}");
    assert!(output.stdout.is_empty() && said.contains("root"), "{said}");

    let output = run("--direct=auto").unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("note: --direct auto: no direct path: cannot make a network namespace in which BPF may be used"),
        "{said}"
    );
    assert!(!said.contains("connections steered"), "{said}");
}
