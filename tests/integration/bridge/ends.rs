//! The end of a bridge: a hang, a kill, the end of the caller or of its session.

use super::node::{NODE, Node, expect_no_loss, on_a_node, on_any_node, to_args};
use crate::support::process::{Running, berth_command, expect_status, output_of, wait_until_gone};
use crate::support::stopped::Stopped;
use crate::support::{eventually, print_skipped};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getsid};
use std::io::{self};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

/// The main thread, which makes the bridge's decisions, hangs. The relaying threads still run.
#[test]
fn a_bridge_whose_main_thread_hangs_stops_steering() {
    on_a_node(|node| {
        let mut bridge = Running::start(
            node.fast_bridge("", &["sh", "-c", "read -r line"])
                .stdin(Stdio::piped()),
        );
        bridge.logs("may be replaced now");
        let daemon = Pid::from_raw(node.daemon().try_into().unwrap());
        node.stop_own();
        node.answers();
        let hangs = Stopped::new(daemon);
        eventually("no connection is steered to it", || {
            let connected = std::net::TcpStream::connect(NODE);
            connected
                .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
                .then_some(())
        });
        drop(hangs);
        node.answers();
        node.start_own();
        drop(bridge.child.stdin.take());
        let code = bridge.ended().code();
        assert_eq!(code, Some(1), "{}", bridge.log());
    });
}

#[test]
fn the_end_of_the_callers_session_does_not_end_the_bridge() {
    on_any_node(|node| {
        let load = node.load();
        // COMMAND runs until it is killed.
        let mut command = node.bridge(
            "",
            &[
                "sh",
                "-c",
                "echo runs; while :; do read -r line || sleep 1000; done",
            ],
        );
        let mut bridge = Running::start(command.process_group(0).stdin(Stdio::null()));
        bridge.prints("runs");
        let daemon = Pid::from_raw(node.daemon().try_into().unwrap());
        assert_eq!(
            getsid(Some(daemon)).unwrap(),
            daemon,
            "it has a session of its own"
        );
        killpg(bridge.pid(), Signal::SIGKILL).unwrap();
        bridge.ended();
        let status = eventually("the end of COMMAND is seen", || {
            Some(node.status()).filter(|status| status["command"] == false)
        });
        // scripts/cluster/killed.sh waits for these words, too.
        let trouble = status["trouble"].as_str().unwrap();
        assert!(trouble.contains("went away"), "{status}");
        assert_eq!(status["steering"], true);
        load.more(50);
        expect_status(&mut node.part("end"), 0, &[]);
        expect_no_loss(load);
    });
}

#[test]
fn a_caller_that_ends_before_command_leaves_no_bridge() {
    on_any_node(|node| {
        let load = node.load();
        for _ in 0..10 {
            let mut bridge = Running::start(&mut node.bridge("", &["true"]));
            let daemon = node.daemon();
            bridge.logs("new connections go to the temporary kube-apiserver");
            let _ = kill(bridge.pid(), Signal::SIGKILL);
            bridge.ended();
            // If the machine stalled, COMMAND may have begun before the kill. The test is not about
            // this case, so the loop tries again.
            if bridge.log().contains("may be replaced now") {
                output_of(node.part("end").arg("--now"));
                wait_until_gone(daemon);
                continue;
            }
            wait_until_gone(daemon);
            expect_no_loss(load);
            return;
        }
        panic!("COMMAND begins before the command that began the bridge can end");
    });
}

#[test]
fn leftovers_of_a_killed_daemon_are_removed_by_bridge_end() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let root = mounts
        .lines()
        .find(|line| line.contains(" cgroup2 "))
        .and_then(|line| line.split(' ').nth(1));
    let Some(root) = root.map(Path::new) else {
        return print_skipped("no cgroups are mounted");
    };
    // The file of a temporary instance after its runner was killed, like that of a container. Files
    // with other names belong to other tests.
    let left = root.join(format!(
        "berth-bridge-kube-apiserver-{}",
        std::process::id()
    ));
    if let Err(error) = std::fs::create_dir(&left) {
        return print_skipped(&format!("no cgroup can be made: {error}"));
    }
    let temp = tempfile::tempdir().unwrap();
    expect_status(
        berth_command(["bridge", "end", "--state-dir"]).arg(temp.path()),
        69,
        &["no bridge is on: since this node started"],
    );
    assert!(!left.exists());
}

#[test]
fn a_daemon_that_is_killed_before_command_leaves_the_port_as_it_was() {
    killed_at(&[
        "a temporary kube-apiserver starts",
        "is watched",
        "new connections go to the temporary kube-apiserver",
    ]);
}

#[test]
fn a_daemon_that_is_killed_after_command_began_leaves_the_port_as_it_was() {
    killed_at(&[
        "may be replaced now",
        "waiting until",
        "new connections go to the node's kube-apiserver",
        "the temporary kube-apiserver ends when its connections have ended",
    ]);
}

/// Kills the bridge at each step, given by the line that is logged at the step's begin. Then the
/// port's own listener gets new connections at once, no process is left, and the next bridge
/// starts.
fn killed_at(steps: &'static [&'static str]) {
    on_any_node(move |node| {
        for said_at in steps {
            // Repeat the kill if the bridge had ended before it, because then the run shows
            // nothing.
            while !is_killed_at(node, said_at) {}
        }
        let mut bridge = Running::start(&mut node.fast_bridge("", &to_args(&node.restart())));
        bridge.ends(0);
    });
}

/// Returns false if the bridge had ended before the kill.
fn is_killed_at(node: &Node, said_at: &str) -> bool {
    let (ran, restart) = (node.path("ran"), node.path("restart"));
    let _ = std::fs::remove_file(&ran);
    let run = format!(
        "touch {}; echo runs; sh {}",
        ran.display(),
        restart.display()
    );
    let mut bridge = Running::start(&mut node.fast_bridge("", &["sh", "-c", &run]));
    let daemon = eventually("a bridge, or its end", || {
        let ended = !bridge.is_running();
        node.find_daemon().map(Some).or(ended.then_some(None))
    });
    let Some(daemon) = daemon else {
        bridge.ends(0);
        return false;
    };
    // For a kill during the drain: a silent connection makes the drain last longer.
    let _silent = said_at.contains("connections end").then(|| {
        bridge.logs("may be replaced now");
        std::net::TcpStream::connect(NODE)
    });
    bridge.logs(said_at);
    if said_at == "may be replaced now" {
        bridge.prints("runs");
    }
    let _ = kill(Pid::from_raw(daemon.try_into().unwrap()), Signal::SIGKILL);
    wait_until_gone(daemon);
    node.nothing_runs();
    let code = bridge.ended().code();
    if code == Some(0) {
        return false;
    }
    // The exit status shows the caller whether COMMAND ran.
    assert_eq!(
        code,
        Some(if ran.exists() { 75 } else { 69 }),
        "{said_at}: {}",
        bridge.log()
    );
    bridge.logs("has ended unexpectedly");
    node.answers();
    assert!(!node.is_on());
    true
}
