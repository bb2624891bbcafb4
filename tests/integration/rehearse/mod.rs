//! `berth rehearse` as a user runs it.

#[cfg(feature = "operate")]
mod bridge;
mod load;
mod report;
mod simulated;

use crate::support::process::{
    Running, can_inject, find_processes, has_all, rehearsal_command, run_rehearsal, was_too_busy,
};
use crate::support::{eventually, in_memory, too_busy};
use berth_rehearse::record::data::{Loss, Promise, Ran, Report, RunOutcome, Value, Verdict, Via};
use nix::sys::signal::Signal;
use std::path::Path;
use std::process::{Command, Stdio};

fn rehearse_command(tmp: &Path, args: &[&str]) -> Command {
    let mut command = rehearsal_command(env!("CARGO_BIN_EXE_berth"));
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
fn start_until(line: &str, tmp: &Path, args: &[&str]) -> Running {
    let running = Running::start(&mut rehearse_command(tmp, args));
    running.logs(line);
    running
}

fn wait_until_gone(tmp: &Path) {
    let word = tmp.display().to_string();
    eventually("the end of all its processes", || {
        find_processes(&word).is_empty().then_some(())
    });
}

/// Starts a rehearsal, and waits until the old instance is ready.
fn start_until_ready(tmp: &Path) -> Running {
    start_until("old is ready and joined", tmp, &["--rate=20"])
}

#[test]
fn an_upgrade_loses_nothing() {
    let tmp = in_memory();
    let output = run_rehearsal(&mut rehearse_command(
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
    wait_until_gone(tmp.path());
}

/// `berth rehearse 2>&1 | head`: the rehearsal runs to its end, and its verdict counts.
#[test]
fn a_rehearsal_runs_on_without_a_reader() {
    let tmp = in_memory();
    let closed = || std::io::pipe().unwrap().1;
    let mut command = rehearse_command(tmp.path(), &["--rate=30", "--phase=1s"]);
    let output = run_rehearsal(command.stdout(closed()).stderr(closed())).unwrap();
    if !was_too_busy(&output) {
        assert_eq!(output.status.code(), Some(0));
    }
    wait_until_gone(tmp.path());
}

/// Rehearses, checks that the verdict is good, and returns the run of the report. `None` if the
/// machine was too busy.
fn rehearse_to_report(args: &[&str]) -> Option<Ran> {
    let json = tempfile::NamedTempFile::new().unwrap();
    let file = format!("--json={}", json.path().display());
    rehearse_to_success(&[args, &[&file]].concat())?;
    let mut report: Report = serde_json::from_slice(&std::fs::read(json.path()).unwrap()).unwrap();
    match report.runs.pop().unwrap().outcome {
        RunOutcome::Ran(ran) => Some(*ran),
        RunOutcome::Skipped(why) => panic!("{why}"),
    }
}

/// Checks that a fault was injected in an instance, and that each promise under the fault was kept.
#[track_caller]
fn expect_promise_kept(ran: &Ran, fault: &str, instance: &str) {
    let promises = &ran.promises;
    let of_fault = |promise: &&Promise| promise.fault == fault;
    assert!(
        promises
            .iter()
            .any(|promise| of_fault(&promise) && promise.instance == instance)
            && promises.iter().filter(of_fault).all(|promise| promise.held),
        "{fault} at {instance}: {promises:#?}"
    );
}

/// Rehearses, checks that the verdict is good, and returns the output. `None` if the machine was
/// too busy.
fn rehearse_to_success(args: &[&str]) -> Option<String> {
    let tmp = in_memory();
    let output = run_rehearsal(&mut rehearse_command(
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
    wait_until_gone(tmp.path());
    Some(format!("{progress}{table}"))
}

#[test]
fn back_and_forth_with_versions_that_cannot_serve_and_a_shim_that_dies() {
    for pass in ["relay", "inject"] {
        if pass == "inject" && !can_inject() {
            continue;
        }
        let faults = "--fault=bad-flag,never-ready,kill-shim";
        let Some(ran) = rehearse_to_report(&[
            "--topology=sidecar",
            "--upgrades=3",
            faults,
            "--speedup=5",
            "--pass",
            pass,
        ]) else {
            continue;
        };
        for (fault, instance) in [
            ("bad-flag", "bad-flag"),
            ("never-ready", "never-ready"),
            ("kill-shim", "old"),
        ] {
            expect_promise_kept(&ran, fault, instance);
        }
        assert!(
            ran.find_figure("connections on new-2").is_some(),
            "{ran:#?}"
        );
        // A killed shim that relays takes its kept connections and watches with it. With passed
        // sockets these streams survive. A refused connection is never allowed.
        let is_allowed = |loss: Loss| ran.promises.iter().any(|of| of.allowed.contains_key(&loss));
        assert!(
            is_allowed(Loss::StreamEnded) == (pass == "relay") && !is_allowed(Loss::Refused),
            "{ran:#?}"
        );
    }
}

/// The options ask for supervisors, but the script removes `--pass`, so an instance has none.
#[test]
fn clients_that_are_relayed_nevertheless_are_reported_with_the_reason() {
    let dir = in_memory();
    let without =
        "for arg; do shift; case $arg in --pass=*) ;; *) set -- \"$@\" \"$arg\";; esac; done";
    let berth = env!("CARGO_BIN_EXE_berth");
    let other = write_script(
        dir.path(),
        &format!("case $1 in exec) {without};; esac\nexec '{berth}' \"$@\""),
    );
    let Some(said) = rehearse_to_success(&["--berth", &other, "--pass=auto", "--fault=kill-shim"])
    else {
        return;
    };
    has_all(
        &said,
        &[
            "note: --pass auto: clients are relayed: the instance's `berth exec` runs without",
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
    let Some(said) = rehearse_to_success(&args) else {
        return;
    };
    assert!(
        said.contains("hang at ") && said.contains("crash-after-ready at "),
        "{said}"
    );
}

/// Without berth, each upgrade loses connections, with any fault.
#[test]
fn rounds_without_berth_lose() {
    let tmp = in_memory();
    let json = tmp.path().join("report.json");
    let file = format!("--json={}", json.display());
    let args = [
        "--rate=30",
        "--phase=1s",
        "--via=none",
        "--for=1s",
        "--fault=crash-after-ready",
        "--start-delay=1s",
        &file,
    ];
    let output = run_rehearsal(&mut rehearse_command(tmp.path(), &args)).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let report: Report = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let ran = report
        .runs
        .iter()
        .find(|run| run.via == Via::None)
        .unwrap()
        .ran()
        .unwrap();
    assert_eq!(ran.verdict, Verdict::Lost, "{ran:#?}");
    assert!(!ran.lost.is_empty(), "{ran:#?}");
}

#[test]
fn native_sidecars_with_a_crash() {
    if let Some(ran) = rehearse_to_report(&[
        "--topology=native-sidecar",
        "--fault=crash-after-ready",
        "--speedup=5",
    ]) {
        expect_promise_kept(&ran, "crash-after-ready", "new");
    }
}

/// A watch of objects that no client writes gets a newer revision only from a bookmark. If no
/// bookmark comes while both instances serve, the new instance does not have the watch's revision,
/// and the client lists again.
#[test]
fn quiet_watches_list_again_after_a_switch() {
    if let Some(ran) = rehearse_to_report(&[]) {
        assert_eq!(ran.find_figure("relists"), Some(Value::Count(4)));
    }
}

#[test]
fn quiet_watches_continue_if_both_instances_serve_long_enough() {
    let often = "stand-in --stand-in-bookmark-period=200ms";
    // The store reports its progress every half a second. The arrival of the report depends on the
    // machine's load.
    let settles = ["--settle=2s", "--settle=4s", "--settle=8s", "--settle=16s"];
    let rehearsals =
        settles.map(|settle| move || rehearse_to_report(&["--old", often, settle, "--speedup=10"]));
    // A run for which the machine was too busy proves nothing.
    assert!(
        rehearsals
            .iter()
            .any(|run| run().is_none_or(|ran| ran.find_figure("relists") == Some(Value::Count(0)))),
        "they listed again, however long both served"
    );
}

/// Writes a shell script, and returns its path.
fn write_script(dir: &Path, body: &str) -> String {
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
    let other = write_script(
        dir.path(),
        &format!(
            "echo \"$PPID $1\" >>'{}'\nexec '{berth}' \"$@\"",
            started.display()
        ),
    );
    if rehearse_to_success(&["--berth", &other]).is_none() {
        return;
    }
    let started = std::fs::read_to_string(started).unwrap();
    // Only starts of the last rehearsal count, because a rehearsal that proves nothing is repeated.
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
    let html = dir.path().join("a.html");
    let berth = env!("CARGO_BIN_EXE_berth");
    let one = write_script(
        dir.path(),
        &format!("case $1 in serve) set -- \"$@\" --max-openings=1;; esac\nexec '{berth}' \"$@\""),
    );
    let page = format!("--report={}", html.display());
    let Some(ran) = rehearse_to_report(&["--storm=200", "--berth", &one, &page]) else {
        return;
    };
    expect_promise_kept(&ran, "storm", "storm");
    let count = |name: &str| match ran.find_figure(name) {
        Some(Value::Count(count)) => count,
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(count("clients of the storm"), 200);
    assert!(
        ran.find_figure("half of the storm served within").is_some()
            && ran.find_figure("storm served within").is_some()
    );
    // All clients dial from loopback, and the gate serves clients from loopback first.
    assert!(
        count("of the gate's class first") > 0 && count("of the gate's class others") == 0,
        "{ran:#?}"
    );
    let page = std::fs::read_to_string(html).unwrap();
    assert!(page.contains("Most clients queued at the gate"));
}

/// Without a certificate, the apiserver would answer the shims' probes with 401 for ever.
#[test]
fn apiservers_that_require_a_certificate_are_rehearsed_too() {
    rehearse_to_success(&[
        "--old",
        "stand-in --anonymous-auth=false",
        "--new",
        "stand-in --anonymous_auth=F",
    ]);
}

#[test]
fn a_unit_that_requires_a_certificate_is_rehearsed_too() {
    rehearse_to_success(&["--topology=run", "--new", "stand-in --anonymous-auth=false"]);
}

#[test]
fn a_killed_node_shim_comes_back() {
    if let Some(ran) = rehearse_to_report(&["--topology=node", "--fault=kill-shim"]) {
        expect_promise_kept(&ran, "kill-shim", "old");
    }
}

#[test]
#[ignore = "takes 40 s of real hangs: run by .ci/run"]
fn a_unit_hangs_and_then_the_shim_of_the_other() {
    for pass in ["--pass=relay", "--pass=auto"] {
        if let Some(ran) = rehearse_to_report(&["--topology=run", "--fault=hang,hang-shim", pass]) {
            expect_promise_kept(&ran, "hang", "new");
            expect_promise_kept(&ran, "hang-shim", "old");
        }
    }
}

#[test]
fn other_proxies_are_compared_and_do_not_decide_the_verdict() {
    let json = tempfile::NamedTempFile::new().unwrap();
    let file = format!("--json={}", json.path().display());
    let compare = "--compare=haproxy,port-sharing,none,berth";
    if rehearse_to_success(&[compare, "--start-delay=3s", &file]).is_none() {
        return;
    }
    let report: Report = serde_json::from_slice(&std::fs::read(json.path()).unwrap()).unwrap();
    let run = |via| report.runs.iter().find(|run| run.via == via).unwrap();
    if Command::new("haproxy").arg("-v").output().is_ok() {
        assert!(run(Via::Haproxy).ran().is_some());
    } else {
        eprintln!("without HAProxy, which is not in PATH");
    }
    // If one apiserver ends before the next starts, connections are refused. An apiserver that
    // listens before it is ready answers 403.
    for (via, lost) in [
        (Via::PortSharing, Loss::BadStatus),
        (Via::None, Loss::BadStatus),
        (Via::None, Loss::Refused),
    ] {
        let ran = run(via).ran().unwrap();
        if ran.verdict == Verdict::TooBusy {
            too_busy(&format!("{via:?}"));
            continue;
        }
        assert!(
            ran.lost.contains_key(&lost) && ran.simulated,
            "{via:?}: {lost:?}: {ran:#?}"
        );
    }
}

#[test]
fn a_program_that_is_not_there_is_reported() {
    let tmp = in_memory();
    let output = rehearse_command(tmp.path(), &["--via=haproxy"])
        .env("PATH", tmp.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{said}");

    let mut command = rehearse_command(tmp.path(), &["--compare=haproxy,berth"]);
    let mut running = Running::start(command.env("PATH", tmp.path()));
    running.logs("skipped: haproxy is not in PATH");
    running.signal(Signal::SIGTERM);
    running.ends(143);
    wait_until_gone(tmp.path());
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    for (signal, status) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let tmp = in_memory();
        let mut running = start_until_ready(tmp.path());
        running.signal(signal);
        running.ends(status);
        assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
        wait_until_gone(tmp.path());
    }
}

/// A process that is stopped by SIGSTOP handles only SIGKILL.
#[test]
fn a_process_stopped_on_purpose_is_not_left_behind() {
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let tmp = in_memory();
        let mut running = start_until(
            "fault hang at new",
            tmp.path(),
            &["--rate=20", "--phase=1s", "--fault=hang"],
        );
        running.signal(signal);
        running.ended();
        wait_until_gone(tmp.path());
    }
}

/// Returns the names in a directory.
fn list_names(dir: &Path) -> Vec<std::ffi::OsString> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect()
}

#[test]
fn a_killed_rehearsal_ends_its_children_and_the_next_removes_its_files() {
    let tmp = in_memory();
    let mut killed = start_until_ready(tmp.path());
    let left = tmp.path().join(&list_names(tmp.path())[0]);
    let mut other = start_until_ready(tmp.path());
    killed.kill();
    // A shim that is about to end may create its run directory again.
    wait_until_gone(&left);
    assert_eq!(list_names(tmp.path()).len(), 2);
    // Another program's directory with a similar name.
    std::fs::create_dir(tmp.path().join("berth-rehearse-results")).unwrap();

    let mut next = start_until(
        "left by a rehearsal that was killed",
        tmp.path(),
        &["--rate=20"],
    );
    next.signal(Signal::SIGTERM);
    next.ended();
    assert_eq!(
        list_names(tmp.path()).len(),
        2,
        "{:?}",
        list_names(tmp.path())
    );
    other.signal(Signal::SIGTERM);
    other.ends(143);
    assert_eq!(list_names(tmp.path()), ["berth-rehearse-results"]);
    wait_until_gone(tmp.path());
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let tmp = in_memory();
    let mistakes = |args: &[&str]| {
        let output = rehearse_command(tmp.path(), args).output().unwrap();
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
    let output = rehearse_command(Path::new("/nonexistent"), &[])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(69), "{said}");
}
