//! `berth rehearse` as a user runs it.

#[cfg(feature = "operate")]
mod bridge;
mod load;
mod report;
mod simulated;

use crate::support::process::{
    Running, can_inject, has_all, processes, rehearsal, rehearsed, was_too_busy,
};
use crate::support::{eventually, in_memory, too_busy};
use berth_rehearse::record::data::{Report, Value};
use nix::sys::signal::Signal;
use std::path::Path;
use std::process::{Command, Stdio};

fn rehearse(tmp: &Path, args: &[&str]) -> Command {
    let mut command = rehearsal(env!("CARGO_BIN_EXE_berth"));
    // Settings of the environment must not reach the instances.
    command
        .env("TMPDIR", tmp)
        .env("BERTH_LISTEN", "nonsense")
        .env("BERTH_PROBE_CA", "/nonexistent");
    command
        .arg("rehearse")
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Starts a rehearsal, and waits for a line of its log.
fn at(line: &str, tmp: &Path, args: &[&str]) -> Running {
    let running = Running::start(&mut rehearse(tmp, args));
    running.logs(line);
    running
}

fn gone(tmp: &Path) {
    let word = tmp.display().to_string();
    eventually("the end of all its processes", || {
        processes(&word).is_empty().then_some(())
    });
}

/// Starts a rehearsal, and waits until the old instance is ready.
fn started(tmp: &Path) -> Running {
    at("old is ready and joined", tmp, &["--rate=20"])
}

#[test]
fn an_upgrade_loses_nothing() {
    let tmp = in_memory();
    let output = rehearsed(&mut rehearse(
        tmp.path(),
        &["--rate=30", "--phase=1s", "--pass=relay"],
    ))
    .unwrap();
    if was_too_busy(&output) {
        return;
    }
    let (table, progress) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(0), "{table}\n{progress}");
    for row in [
        "requests ",
        "lost  ",
        "longest wait ",
        "longest time without an answer ",
        "watch events ",
    ] {
        assert!(
            table.lines().any(|line| line.starts_with(row)),
            "{row}: {table}"
        );
    }
    assert!(
        table.lines().count() == 7 && table.ends_with("\n\nverdict: nothing was lost\n"),
        "{table}"
    );
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
    gone(tmp.path());
}

/// `berth rehearse 2>&1 | head`: the rehearsal runs to its end, and its verdict counts.
#[test]
fn a_rehearsal_runs_on_without_a_reader() {
    let tmp = in_memory();
    let closed = || std::io::pipe().unwrap().1;
    let mut command = rehearse(tmp.path(), &["--rate=30", "--phase=1s"]);
    let output = rehearsed(command.stdout(closed()).stderr(closed())).unwrap();
    if !was_too_busy(&output) {
        assert_eq!(output.status.code(), Some(0));
    }
    gone(tmp.path());
}

/// Rehearses, checks that the verdict is good, and returns the output. `None` if the machine was
/// too busy.
fn held(args: &[&str]) -> Option<String> {
    let tmp = in_memory();
    let output = rehearsed(&mut rehearse(
        tmp.path(),
        &[&["--rate=30", "--phase=1s", "-v"], args].concat(),
    ))
    .unwrap();
    if was_too_busy(&output) {
        return None;
    }
    let (table, progress) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(output.status.code(), Some(0), "{table}\n{progress}");
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
    gone(tmp.path());
    Some(format!("{progress}{table}"))
}

#[test]
fn back_and_forth_with_versions_that_cannot_serve_and_a_shim_that_dies() {
    for pass in ["relay", "inject"] {
        if pass == "inject" && !can_inject() {
            continue;
        }
        let faults = "--fault=bad-flag,never-ready,kill-shim";
        let Some(said) = held(&[
            "--topology=sidecar",
            "--upgrades=3",
            faults,
            "--speedup=5",
            "--pass",
            pass,
        ]) else {
            continue;
        };
        let lines = [
            "bad-flag: held",
            "unknown flag: --no-such-flag",
            "never-ready: held",
            "kill-shim at old: held",
            "connections on new-2 ",
        ];
        has_all(&said, &lines);
        assert!(!said.contains("bad-flag at bad-flag"), "{said}");
        // At most the kept connections and watches on the shim, and the connections that the shim
        // had just accepted.
        let allowed = said
            .lines()
            .find_map(|line| line.strip_prefix("  allowed: "))
            .unwrap_or_default();
        let (relays, named) = (
            pass == "relay",
            "note: --pass inject: clients' sockets become the apiservers' own",
        );
        assert!(
            allowed.contains(" streams") == relays && !allowed.contains("refused"),
            "{said}"
        );
        assert_eq!(said.contains(named), !relays, "{said}");
    }
}

/// An instance has no supervisor although the options want one.
#[test]
fn clients_that_are_relayed_nevertheless_are_reported_with_the_reason() {
    let dir = in_memory();
    let without =
        "for arg; do shift; case $arg in --pass=*) ;; *) set -- \"$@\" \"$arg\";; esac; done";
    let berth = env!("CARGO_BIN_EXE_berth");
    let other = script(
        dir.path(),
        &format!("case $1 in exec) {without};; esac\nexec '{berth}' \"$@\""),
    );
    let Some(said) = held(&["--berth", &other, "--pass=auto", "--fault=kill-shim"]) else {
        return;
    };
    has_all(
        &said,
        &[
            "note: --pass auto: clients are relayed: its `berth exec` runs without",
            "  allowed: ",
        ],
    );
}

/// Each round has a fault that is drawn by the seed.
#[test]
fn rounds_repeat_for_the_given_time() {
    let args = [
        "--topology=node",
        "--for=20s",
        "--fault=hang,crash-after-ready",
        "--seed=3",
        "--speedup=5",
        "--start-delay=0s",
    ];
    let Some(said) = held(&args) else { return };
    assert!(
        said.contains("hang at ") && said.contains("crash-after-ready at "),
        "{said}"
    );
    assert!(said.contains("verdict: nothing was lost"), "{said}");
}

/// Without berth, each upgrade loses connections, with any fault.
#[test]
fn rounds_without_berth_lose() {
    let tmp = in_memory();
    let args = [
        "--rate=30",
        "--phase=1s",
        "--via=none",
        "--for=1s",
        "--fault=crash-after-ready",
        "--start-delay=1s",
    ];
    let output = rehearsed(&mut rehearse(tmp.path(), &args)).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("verdict: something was lost"), "{said}");
}

#[test]
fn native_sidecars_with_a_crash() {
    let Some(said) = held(&[
        "--topology=native-sidecar",
        "--fault=crash-after-ready",
        "--speedup=5",
    ]) else {
        return;
    };
    assert!(said.contains("crash-after-ready at new: held"), "{said}");
}

/// A watch of objects that no client writes knows no revision that a later instance still has,
/// unless a bookmark brings one while both instances serve.
#[test]
fn quiet_watches_list_again_after_a_switch() {
    if let Some(said) = held(&[]) {
        assert_eq!(again(&said), ["4", "4"]);
    }
}

#[test]
fn quiet_watches_continue_if_both_instances_serve_long_enough() {
    let often = "stand-in --stand-in-bookmark-period=200ms";
    // The store reports its progress every half a second. The arrival of the report depends on the
    // machine's load.
    let settles = ["--settle=2s", "--settle=4s", "--settle=8s", "--settle=16s"];
    let rehearsals = settles.map(|settle| move || held(&["--old", often, settle, "--speedup=10"]));
    // A run for which the machine was too busy proves nothing.
    assert!(
        rehearsals
            .iter()
            .any(|said| said().is_none_or(|said| again(&said) == ["0", "0"])),
        "they listed again, however long both served"
    );
}

/// Returns how many watches listed again, and how many of them because they were too late.
fn again(said: &str) -> Vec<String> {
    let row = said
        .lines()
        .find_map(|line| line.strip_prefix("relists"))
        .unwrap();
    row.split_whitespace().take(2).map(str::to_owned).collect()
}

/// Writes a shell script, and returns its path.
fn script(dir: &Path, body: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join("berth");
    std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// A script records its start and becomes berth. Of the processes of a rehearsal, only the shims
/// run the script.
#[test]
fn another_berths_shims_are_rehearsed() {
    let dir = in_memory();
    let started = dir.path().join("started");
    let berth = env!("CARGO_BIN_EXE_berth");
    let other = script(
        dir.path(),
        &format!(
            "echo \"$PPID $1\" >>'{}'\nexec '{berth}' \"$@\"",
            started.display()
        ),
    );
    if held(&["--berth", &other]).is_none() {
        return;
    }
    let started = std::fs::read_to_string(started).unwrap();
    // Starts during the last rehearsal.
    let (by, _) = started.lines().last().unwrap().split_once(' ').unwrap();
    let mut started: Vec<_> = started
        .lines()
        .filter_map(|line| line.strip_prefix(by)?.strip_prefix(' '))
        .collect();
    started.sort_unstable();
    assert_eq!(started, ["exec", "exec", "serve", "serve"]);
}

/// The shims open one client at a time, so that a storm waits on any machine.
#[test]
fn each_client_of_a_storm_is_served_and_the_queue_is_seen() {
    let dir = in_memory();
    let (json, html) = (dir.path().join("a.json"), dir.path().join("a.html"));
    let berth = env!("CARGO_BIN_EXE_berth");
    let one = script(
        dir.path(),
        &format!("case $1 in serve) set -- \"$@\" --max-openings=1;; esac\nexec '{berth}' \"$@\""),
    );
    let files = [
        format!("--json={}", json.display()),
        format!("--report={}", html.display()),
    ];
    let Some(said) = held(&["--storm=200", "--berth", &one, &files[0], &files[1]]) else {
        return;
    };
    assert!(
        said.contains("storm: 200 clients come at once") && said.contains("storm: held: "),
        "{said}"
    );

    let report: Report = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let ran = report.runs[0].ran().unwrap();
    let count = |name: &str| match ran.figure(name) {
        Some(Value::Count(count)) => count,
        other => panic!("{name}: {other:?}: {said}"),
    };
    assert_eq!(count("clients of the storm"), 200);
    assert!(
        ran.figure("half of the storm served within").is_some()
            && ran.figure("storm served within").is_some()
    );
    // All clients dial from loopback, and go first.
    assert!(
        count("of the gate's class first") > 0 && count("of the gate's class others") == 0,
        "{said}"
    );
    let page = std::fs::read_to_string(html).unwrap();
    assert!(page.contains("Most clients queued at the gate"));
}

/// Without a certificate, the apiserver would answer the shims' probes with 401 for ever.
#[test]
fn apiservers_that_require_a_certificate_are_rehearsed_too() {
    held(&[
        "--old",
        "stand-in --anonymous-auth=false",
        "--new",
        "stand-in --anonymous_auth=F",
    ]);
}

#[test]
fn a_unit_that_requires_a_certificate_is_rehearsed_too() {
    held(&["--topology=run", "--new", "stand-in --anonymous-auth=false"]);
}

#[test]
fn a_killed_node_shim_comes_back() {
    let Some(said) = held(&["--topology=node", "--fault=kill-shim"]) else {
        return;
    };
    assert!(
        said.contains("kill-shim at old: held") && said.contains("the API was away for"),
        "{said}"
    );
}

#[test]
#[ignore = "takes 40 s of real hangs: run by .ci/run"]
fn a_unit_hangs_and_then_the_shim_of_the_other() {
    for pass in ["--pass=relay", "--pass=auto"] {
        let Some(said) = held(&["--topology=run", "--fault=hang,hang-shim", pass]) else {
            continue;
        };
        has_all(&said, &["hang at new: held", "hang-shim at old: held"]);
    }
}

#[test]
fn other_proxies_are_compared_and_do_not_decide_the_verdict() {
    let Some(said) = held(&[
        "--compare=haproxy,port-sharing,none,berth",
        "--start-delay=3s",
    ]) else {
        return;
    };
    let columns = if Command::new("haproxy").arg("-v").output().is_ok() {
        "       haproxy  port-sharing          none         berth"
    } else {
        eprintln!("without HAProxy, which is not in PATH");
        "  port-sharing          none         berth"
    };
    assert!(said.contains(columns), "{said}");
    // With one apiserver after the other, connections are refused. An apiserver that listens before
    // it is ready answers 403.
    let none = "without berth or a proxy";
    for (way, lost) in [
        ("with port sharing", "error status"),
        (none, "error status"),
        (none, "refused"),
    ] {
        let table = said.split(&format!("\n{way}\n")).last().unwrap();
        let (table, verdict) = table.split_once("verdict: ").unwrap();
        if verdict.starts_with("this machine was too busy to tell") {
            too_busy(way);
            continue;
        }
        assert!(
            table.contains(lost) && table.contains(", to simulated apiservers"),
            "{way}: {lost}: {said}"
        );
    }
}

#[test]
fn a_program_that_is_not_there_is_reported() {
    let tmp = in_memory();
    let output = rehearse(tmp.path(), &["--via=haproxy"])
        .env("PATH", tmp.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(69) && said.contains("haproxy is not in PATH"),
        "{said}"
    );

    let mut command = rehearse(tmp.path(), &["--compare=haproxy,berth"]);
    let mut running = Running::start(command.env("PATH", tmp.path()));
    running.logs("skipped: haproxy is not in PATH");
    running.signal(Signal::SIGTERM);
    running.ends(143);
    gone(tmp.path());
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    for (signal, status) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let tmp = in_memory();
        let mut running = started(tmp.path());
        running.signal(signal);
        running.ends(status);
        assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
        gone(tmp.path());
    }
}

/// A process that is stopped by SIGSTOP handles only SIGKILL.
#[test]
fn a_process_stopped_on_purpose_is_not_left_behind() {
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let tmp = in_memory();
        let mut running = at(
            "fault hang at new",
            tmp.path(),
            &["--rate=20", "--phase=1s", "--fault=hang"],
        );
        running.signal(signal);
        running.ended();
        gone(tmp.path());
    }
}

/// Returns the names in a directory.
fn names(dir: &Path) -> Vec<std::ffi::OsString> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect()
}

#[test]
fn a_killed_rehearsal_ends_its_children_and_the_next_removes_its_files() {
    let tmp = in_memory();
    let mut killed = started(tmp.path());
    let left = tmp.path().join(&names(tmp.path())[0]);
    let mut other = started(tmp.path());
    killed.kill();
    // A shim that is about to end may create its run directory again.
    gone(&left);
    assert_eq!(names(tmp.path()).len(), 2);
    // Another program's directory with a similar name.
    std::fs::create_dir(tmp.path().join("berth-rehearse-results")).unwrap();

    let mut next = at(
        "left by a rehearsal that was killed",
        tmp.path(),
        &["--rate=20"],
    );
    next.signal(Signal::SIGTERM);
    next.ended();
    assert_eq!(names(tmp.path()).len(), 2, "{:?}", names(tmp.path()));
    other.signal(Signal::SIGTERM);
    other.ends(143);
    assert_eq!(names(tmp.path()), ["berth-rehearse-results"]);
    gone(tmp.path());
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let tmp = in_memory();
    let mistakes = |args: &[&str]| {
        let output = rehearse(tmp.path(), args).output().unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (code, said) = mistakes(&[
        "--berth=/nonexistent",
        "--report=/",
        "--json=/nonexistent/a",
    ]);
    assert_eq!((code, said.lines().count()), (Some(64), 3), "{said}");
    for wrong in [
        "--rate=0",
        "--watches=-1",
        "--storm=20001",
        "--for=soon",
        "--old=",
        "--fault=hang,other",
        "--pass=foo",
    ] {
        let (code, said) = mistakes(&[wrong]);
        assert!(
            code == Some(64) && said.contains(wrong.split_once('=').unwrap().0),
            "{wrong}: {said}"
        );
    }
}

#[test]
fn without_a_directory_for_its_files_a_rehearsal_fails() {
    let output = rehearse(Path::new("/nonexistent"), &[]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(69) && said.contains("TMPDIR"),
        "{said}"
    );
}
