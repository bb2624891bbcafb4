//! The life of `berth run`, with the real binary and a stand-in for the apiserver: a shell script
//! if no port is needed, else this test binary ([`stand_in`]).

use crate::stand_in::STAND_IN;
use crate::support::net::{
    client_hello, connect, expect_end, expect_reset, find_listening, free_address, ping, read,
    relayed_client, served_client,
};
use crate::support::process::{
    Running, berth_command, can_inject, expect_status, output_of, passes_sockets, read_field,
    wait_until_gone,
};
use crate::support::{MOMENT, eventually};
use berth_os::explained;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::Write;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A fresh run directory and berth.
struct Node {
    temp: TempDir,
    listen: SocketAddr,
}

impl Node {
    fn new() -> Self {
        Self {
            temp: tempfile::tempdir().unwrap(),
            listen: free_address(),
        }
    }

    fn run_dir(&self) -> String {
        self.temp.path().join("run").display().to_string()
    }

    fn command(&self, options: &[&str], command: &[&str]) -> Command {
        let mut run = berth_command([
            "run",
            "--listen",
            &self.listen.to_string(),
            "--run-dir",
            &self.run_dir(),
        ]);
        run.args(["--probe", "tcp", "--probe-interval", "20ms"]);
        if !options.contains(&"--instance") {
            run.args(["--instance", "a"]);
        }
        run.args(options).arg("--").args(command);
        run.env("TEST_BINARY", std::env::current_exe().unwrap())
            .env("STAND_IN_STATUS", "3");
        run
    }

    /// Returns a command with a shell script in place of the apiserver.
    fn script(&self, script: &str) -> Command {
        self.command(&[], &["sh", "-c", script, "kube-apiserver"])
    }

    /// Starts `berth run` with a stand-in, and waits until it has joined.
    fn joined(&self, options: &[&str]) -> (Running, u32) {
        let run =
            Running::start(&mut self.command(options, &["sh", "-c", STAND_IN, "kube-apiserver"]));
        let line = run.prints("listening, pid ");
        run.logs("joined");
        if passes_sockets() || options.contains(&"--pass") {
            eventually("sockets for the apiserver", || {
                (self.status()["instances"][0]["injected"] == true).then_some(())
            });
        }
        (run, line.rsplit(' ').next().unwrap().parse().unwrap())
    }

    /// Returns the shim's status.
    fn status(&self) -> serde_json::Value {
        self.instance()["shim"].take()
    }

    /// Returns the instance in `berth status --json`.
    fn instance(&self) -> serde_json::Value {
        let (_, out, _) = output_of(&mut berth_command([
            "status",
            "--json",
            "--run-dir",
            &self.run_dir(),
        ]));
        serde_json::from_str::<serde_json::Value>(&out).unwrap()["instances"][0].take()
    }
}

#[test]
fn an_apiserver_gets_its_clients_and_one_sigterm_through_its_supervisor() {
    if !can_inject() {
        return;
    }
    let node = Node::new();
    let (mut run, _) = node.joined(&["--pass", "inject", "--log-connections"]);
    let mut client = served_client(node.listen);
    assert!(
        run.logs("connection ended")
            .contains("outcome=\"injected\""),
        "{}",
        run.log()
    );
    run.signal(Signal::SIGTERM);
    run.prints("told to end by SIGTERM");
    run.logs("drained");
    // The shim has ended. The apiserver runs as long as it has a client.
    ping(&mut client, b"still served");
    assert!(run.is_running());
    drop(client);
    run.ends(3);
    expect_told_once(&run);
}

#[test]
fn the_exit_status_and_the_output_pass() {
    let node = Node::new();
    for status in [0, 1, 7, 255] {
        let script = format!("echo to output; echo to the log >&2; exit {status}");
        let (out, log) = expect_status(&mut node.script(&script), status, &[]);
        assert_eq!(out, "to output\n");
        assert!(log.lines().any(|line| line == "to the log"), "{log}");
    }
}

#[test]
fn a_death_by_a_signal_is_exit_status_128_plus_its_number() {
    let node = Node::new();
    for signal in [Signal::SIGKILL, Signal::SIGSEGV, Signal::SIGTERM] {
        let (code, _, log) = output_of(&mut node.script(&format!("kill -{} $$", signal as i32)));
        assert_eq!(code, Some(128 + signal as i32), "{log}");
    }
}

#[test]
fn a_wrong_command_line_has_exit_status_64() {
    let node = Node::new();
    expect_status(
        &mut node.command(&["--hold", "soon"], &["kube-apiserver", "--secure-port"]),
        64,
        &["--hold soon", "--secure-port is the last argument"],
    );
    expect_status(&mut node.command(&[], &[]), 64, &[]);
    assert!(!node.temp.path().join("run").exists(), "nothing was begun");
}

/// A new version with an unknown flag: its shim never joins, and `berth status` shows that its
/// apiserver has ended.
#[test]
fn an_apiserver_that_never_serves_never_gets_a_connection() {
    let node = Node::new();
    let mut run = node.script("echo 'unknown flag: --nope' >&2; exit 1");
    let (_, log) = expect_status(&mut run, 1, &[]);
    assert!(
        log.contains("unknown flag: --nope") && !log.contains("joined"),
        "{log}"
    );
    assert_eq!(node.instance()["running"], false);
}

#[test]
fn sigterm_is_passed_on_once_after_leaving() {
    let node = Node::new();
    let (mut run, pid) = node.joined(&[]);
    let mut client = relayed_client(node.listen);
    run.signal(Signal::SIGTERM);
    run.prints("told to end");
    assert!(
        find_listening(node.listen).is_empty(),
        "it left before the apiserver got SIGTERM"
    );
    ping(&mut client, b"still served");
    run.logs("the instance listens no more: draining");
    assert!(run.is_running());
    drop(client);
    run.ends(3);
    wait_until_gone(pid);
    expect_told_once(&run);
    let log = run.log();
    assert_eq!(
        log.matches("passed on to the apiserver").count(),
        1,
        "{log}"
    );
    assert!(!log.contains(explained::APISERVER_ENDED), "{log}");
}

/// Asserts that the stand-in got a single signal.
#[track_caller]
fn expect_told_once(run: &Running) {
    assert!(!run.out().contains("told again"), "{}", run.out());
}

/// Time for which a shim waits for first bytes.
const ANSWERING: Duration = Duration::from_secs(5);

/// SIGTERM is passed on late, because it makes the apiserver close its listener, and an accepted
/// connection without an answer could be lost then.
#[test]
fn sigterm_is_passed_on_when_first_bytes_have_come() {
    // Repeat the test if the machine stalled for too long, because then the run shows nothing.
    while !is_passed_on_when_first_bytes_have_come() {}
}

/// Returns false if the run took too long to show the result.
fn is_passed_on_when_first_bytes_have_come() -> bool {
    let node = Node::new();
    let (mut run, pid) = node.joined(&[]);
    let signal = |signal| kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    signal(Signal::SIGSTOP);
    let stat = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("stat"))
    };
    eventually("each of its threads stands still", || {
        let mut tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
            .unwrap()
            .map(stat);
        let stopped = |stat: String| {
            stat.rsplit(')')
                .next()
                .unwrap()
                .trim_start()
                .starts_with('T')
        };
        tasks.all(|stat| stat.is_ok_and(stopped)).then_some(())
    });
    let mut client = connect(node.listen);
    client.write_all(&client_hello(100)).unwrap();
    eventually("the shim has read it", || {
        (node.status()["connections_pending"] == 1).then_some(())
    });
    let told = Instant::now();
    run.signal(Signal::SIGTERM);
    run.logs("left");
    std::thread::sleep(MOMENT);
    let early = run.log().contains("passed on to the apiserver");
    let took = told.elapsed();
    signal(Signal::SIGCONT);
    if early && took >= ANSWERING {
        return false;
    }
    assert!(!early, "{}", run.log());
    assert_eq!(read(&mut client, 100), client_hello(100));
    run.logs("passed on to the apiserver");
    drop(client);
    run.ends(3);
    true
}

/// An apiserver that ends before it is ready gets SIGTERM, too.
#[test]
fn sigterm_before_ready() {
    let node = Node::new();
    let script = "trap 'echo told; exit 5' TERM; echo begun; while :; do sleep 0.05; done";
    let mut run = Running::start(&mut node.script(script));
    run.prints("begun");
    run.signal(Signal::SIGTERM);
    run.ends(5);
    assert_eq!(run.out().matches("told").count(), 1);
}

#[test]
fn a_second_sigterm_ends_both_at_once() {
    let node = Node::new();
    let (mut run, pid) = node.joined(&["--drain-timeout", "1h"]);
    let line = run.logs("becoming the apiserver");
    let address: SocketAddr = read_field(&line, "address=");
    // This connection keeps the stand-in from ending by itself.
    let mut direct = connect(address);
    ping(&mut direct, b"served");
    let mut client = served_client(node.listen);
    run.signal(Signal::SIGTERM);
    run.prints("told to end");
    ping(&mut client, b"still served");
    run.signal(Signal::SIGTERM);
    if passes_sockets() {
        // The apiserver has the client's socket, so the client sees the same end as without berth.
        expect_end(&mut client);
    } else {
        // The shim resets the client, before the apiserver's death can look like the end of an
        // answer.
        expect_reset(&mut client);
    }
    run.ends(128 + Signal::SIGKILL as i32);
    wait_until_gone(pid);
}

/// There is a process between berth and its apiserver. Although it is killed, the apiserver must
/// end, too.
#[test]
fn the_child_dies_with_its_parent() {
    let node = Node::new();
    let (mut run, pid) = node.joined(&[]);
    kill(process_between(&run, pid), Signal::SIGKILL).unwrap();
    wait_until_gone(pid);
    run.ends(128 + Signal::SIGKILL as i32);
}

/// Returns the process between berth and its apiserver.
fn process_between(run: &Running, apiserver: u32) -> Pid {
    let stat = std::fs::read_to_string(format!("/proc/{apiserver}/stat")).unwrap();
    let parent = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_ascii_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    assert_ne!(parent, run.pid().as_raw());
    Pid::from_raw(parent)
}

/// A signal to berth's child is passed to the apiserver, which can end as usual.
#[test]
fn a_signal_to_the_child_reaches_the_apiserver_once() {
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        let node = Node::new();
        let (mut run, pid) = node.joined(&[]);
        let mut client = served_client(node.listen);
        let child = process_between(&run, pid);
        kill(child, signal).unwrap();
        run.prints(&format!("told to end by {signal}"));
        kill(child, signal).unwrap();
        ping(&mut client, b"still served");
        drop(client);
        run.ends(3);
        expect_told_once(&run);
    }
}

/// kube-apiserver regards a second SIGTERM as "stop at once". When a process with several threads
/// dies, the kernel may notify a child once for each thread.
#[test]
fn the_death_of_berth_is_one_sigterm() {
    let node = Node::new();
    for _ in 0..20 {
        let (mut run, pid) = node.joined(&["--threads", "16"]);
        let address: SocketAddr = node.instance()["record"]["address"]
            .as_str()
            .unwrap()
            .parse()
            .unwrap();
        // The stand-in ends when this client has ended, and handles SIGTERM until then.
        let mut client = connect(address);
        ping(&mut client, b"served");
        let child = process_between(&run, pid);
        run.kill();
        run.prints("told to end");
        ping(&mut client, b"still served");
        drop(client);
        wait_until_gone(pid);
        // Wait for the supervisor, too: it also holds the instance's record.
        wait_until_gone(child.as_raw().unsigned_abs());
        expect_told_once(&run);
    }
    eventually("status shows that the process ended", || {
        (node.instance()["running"] == false).then_some(())
    });
}

/// A stopped apiserver (SIGSTOP) gets SIGCONT after SIGTERM, as from systemd.
#[test]
fn a_stopped_apiserver_is_continued_so_that_it_can_end() {
    let node = Node::new();
    let (mut run, pid) = node.joined(&[]);
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGSTOP).unwrap();
    run.signal(Signal::SIGTERM);
    run.prints("told to end");
    run.ended();
}

/// The kernel ends the apiserver's connections, and its exit status becomes berth's.
#[test]
fn a_child_that_ends_by_itself() {
    let node = Node::new();
    let (mut run, pid) = node.joined(&[]);
    let mut client = relayed_client(node.listen);
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
    run.logs("the apiserver ended by itself");
    expect_end(&mut client);
    assert!(run.is_running(), "the client has not ended yet");
    drop(client);
    run.ends(128 + Signal::SIGKILL as i32);
}
