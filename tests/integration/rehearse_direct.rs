//! `berth rehearse --direct` as a user runs it.

use crate::support::process::{rehearsal, rehearsed, was_too_busy};
use crate::support::{in_memory, skipped};
use berth_rehearse::data::{Report, Value};
use nix::unistd::geteuid;
use std::path::Path;
use std::process::{Command, Stdio};

const SHORT: [&str; 3] = ["--rate=30", "--seed=7", "--speedup=5"];

fn rehearse(program: &str, before: &[&str], tmp: &Path, args: &[&str]) -> Command {
    let mut command = rehearsal(program);
    command.args(before).arg("rehearse").args(SHORT).args(args).env("TMPDIR", tmp);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What was printed, and the report; none if there can be no direct path here, which the rehearsal reports.
fn held(args: &[&str]) -> Option<(String, Report)> {
    held_by(&["--phase=1s"], args)
}

fn held_by(times: &[&str], args: &[&str]) -> Option<(String, Report)> {
    let (tmp, json) = (in_memory(), tempfile::NamedTempFile::new().unwrap());
    let file = format!("--json={}", json.path().display());
    let args = [&["--direct=on", &file], times, args].concat();
    let output = rehearsed(&mut rehearse(env!("CARGO_BIN_EXE_berth"), &[], tmp.path(), &args)).unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(69) && ["--direct on: ", "network namespace"].iter().any(|why| said.contains(why)) {
        skipped(said.lines().find(|line| line.starts_with("berth: ")).unwrap());
        return None;
    }
    if was_too_busy(&output) {
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
    Some((said.into_owned(), serde_json::from_slice(&std::fs::read(json.path()).unwrap()).unwrap()))
}

/// Upgrades lose nothing, and in calm connections are steered: so often at least.
fn is_on_in_calm(topology: &str, least: u64) {
    // How soon it is on again after an upgrade, depends on what else the machine does.
    let mut seen = Vec::new();
    for phase in ["--phase=1s", "--phase=2s", "--phase=4s", "--phase=8s"] {
        let Some((said, report)) = held_by(&[phase], &["--upgrades=2", "--topology", topology]) else { return };
        assert!(steered(&report, 0) > 0, "{topology}: {said}");
        // On before, between and after the two upgrades, off in each.
        let times = count(&report, 0, "times that steering was on");
        if times >= Some(least) {
            return;
        }
        seen.push(times);
    }
    panic!("{topology}: {seen:?}");
}

#[test]
fn it_is_on_in_calm_with_sidecars() {
    is_on_in_calm("sidecar", 2);
}

#[test]
fn it_is_on_in_calm_with_native_sidecars() {
    is_on_in_calm("native-sidecar", 2);
}

/// It relays for a while after each upgrade.
#[test]
fn it_is_on_in_calm_with_one_shim_for_a_node() {
    is_on_in_calm("node", 1);
}

#[test]
fn it_is_on_in_calm_with_units() {
    is_on_in_calm("run", 2);
}

fn count(report: &Report, run: usize, name: &str) -> Option<u64> {
    match report.runs[run].ran().unwrap().figure(name) {
        Some(Value::Count(count)) => Some(count),
        _ => None,
    }
}

fn steered(report: &Report, run: usize) -> u64 {
    count(report, run, "connections steered").unwrap_or_default()
}

#[test]
fn what_is_compared_has_no_direct_path() {
    let Some((said, report)) = held(&["--compare=none"]) else { return };
    assert!(steered(&report, 0) == 0 && !report.runs[0].ran().unwrap().lost.is_empty(), "{said}");
    assert!(steered(&report, 1) > 0, "{said}");
}

/// Root without the capability to make a namespace is like any user.
#[test]
fn without_the_privilege_on_ends_before_it_begins_and_auto_relays() {
    let tmp = in_memory();
    let berth = env!("CARGO_BIN_EXE_berth");
    let before = ["--bounding-set=-sys_admin,-bpf,-net_admin", "--", berth];
    // Any other user is without it anyway.
    let (program, before) = if geteuid().is_root() { ("setpriv", &before[..]) } else { (berth, &[][..]) };
    let run = |direct: &str| rehearsed(&mut rehearse(program, before, tmp.path(), &["--phase=1s", direct]));
    let output = match run("--direct=on") {
        Ok(output) if !String::from_utf8_lossy(&output.stderr).starts_with("setpriv: ") => output,
        _ => return skipped("setpriv is not there, or may not drop capabilities"),
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(69), 1), "{said}");
    assert!(output.stdout.is_empty() && said.contains("root"), "{said}");

    let output = run("--direct=auto").unwrap();
    if was_too_busy(&output) {
        return;
    }
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("note: --direct auto: no direct path: cannot make a network namespace in which BPF may be used"),
        "{said}"
    );
    assert!(!said.contains("connections steered"), "{said}");
}
