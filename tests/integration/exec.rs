//! The life of `berth exec`, with the real binary and a shell in place of the apiserver.

use crate::stand_in::STAND_IN;
use crate::support::eventually;
use crate::support::process::{BERTH, Running, berth_command, can_inject, passes_sockets};
use berth_node::instance_id::InstanceId;
use berth_node::registry::instance::{ListedInstance, list};
use berth_node::registry::{BerthDir, RunDir};
use nix::sys::signal::{SigSet, Signal};
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdin, Command, ExitStatus, Output, Stdio};
use tempfile::TempDir;

/// Prints the pid and the arguments, then waits for the end of input.
const LIVE: &str =
    r#"echo $$; for arg; do echo "$arg"; done; echo that is all; read -r line; exit 7"#;

/// A fresh run directory and berth.
struct Node {
    temp: TempDir,
    listen: SocketAddr,
    /// Keeps the port from wildcard listeners of other tests, and blocks no instance.
    _port: TcpListener,
}

impl Node {
    fn new() -> Self {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = held.local_addr().unwrap().port();
        let listen = SocketAddr::from(([10, 0, 0, 5], port));
        Self {
            temp: tempfile::tempdir().unwrap(),
            listen,
            _port: held,
        }
    }

    fn berth_dir(&self) -> BerthDir {
        RunDir::open(&self.temp.path().join("run"))
            .unwrap()
            .berth(self.listen)
            .unwrap()
    }

    fn listed(&self) -> Vec<ListedInstance> {
        let listing = list(&self.berth_dir()).unwrap();
        assert_eq!(listing.problems, []);
        listing.found
    }

    fn alive(&self, id: &str) -> Option<bool> {
        let id = InstanceId::parse(id).unwrap();
        self.listed()
            .iter()
            .find(|listed| listed.record.instance == id)
            .map(|listed| listed.alive)
    }

    fn exec(&self, options: &[&str], command: &[&str]) -> Command {
        let mut berth = berth_command(["exec", "--listen", &self.listen.to_string(), "--run-dir"]);
        berth
            .arg(self.temp.path().join("run"))
            .args(options)
            .arg("--")
            .args(command);
        berth
    }

    fn output(&self, options: &[&str], command: &[&str]) -> Output {
        self.exec(options, command)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    fn start(&self, id: &str, arguments: &[&str]) -> Live {
        let command = [&["sh", "-c", LIVE, "kube-apiserver"], arguments].concat();
        let mut running = Running::start(
            self.exec(&["--instance", id], &command)
                .stdin(Stdio::piped()),
        );
        running.prints("that is all");
        let out = running.out();
        let mut said = out.lines().map(str::to_owned);
        let pid = said.next().unwrap().parse().unwrap();
        let arguments = said.take_while(|line| line != "that is all").collect();
        Live {
            input: running.child.stdin.take(),
            running,
            pid,
            arguments,
        }
    }
}

/// A running simulated apiserver.
struct Live {
    running: Running,
    /// The apiserver ends when the pipe is closed.
    input: Option<ChildStdin>,
    /// Pid as the apiserver printed it.
    pid: u32,
    arguments: Vec<String>,
}

impl Live {
    fn value(&self, flag: &str) -> &str {
        let values: Vec<_> = self
            .arguments
            .iter()
            .filter_map(|arg| arg.strip_prefix(flag))
            .collect();
        assert_eq!(values.len(), 1, "{flag} in {:?}", self.arguments);
        values[0].strip_prefix('=').unwrap()
    }

    fn end(mut self) -> (ExitStatus, String) {
        drop(self.input.take());
        (self.running.ended(), self.running.log())
    }
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn becomes_the_apiserver_with_its_address() {
    let node = Node::new();
    let live = node.start(
        "a",
        &[
            "--audit-log-path=/var/log/{instance}.log",
            "--bind-address=0.0.0.0",
            "--v=2",
        ],
    );
    let pid = live.running.child.id();
    assert_eq!(
        live.pid == pid,
        !passes_sockets(),
        "the same process, or a child of the supervisor"
    );
    let listed = node.listed();
    assert!(listed[0].alive);
    let record = &listed[0].record;
    assert_eq!(record.pid, Some(pid));
    let address = record.address.ip().to_string();
    let port = node.listen.port().to_string();
    let expected = [
        "--audit-log-path=/var/log/a.log",
        "--v=2",
        &format!("--bind-address={address}"),
        &format!("--secure-port={port}"),
        "--advertise-address=10.0.0.5",
    ];
    assert_eq!(live.arguments, expected);
    let (status, _) = live.end();
    assert_eq!(status.code(), Some(7), "the exit status passes");
    assert_eq!(node.alive("a"), Some(false));
}

/// A log rotator, or a shell without `exec`, starts the apiserver as a child.
#[test]
fn an_apiserver_that_another_program_starts_accepts_by_itself_and_the_log_says_so() {
    if !can_inject() {
        return;
    }
    let (node, script) = (
        Node::new(),
        format!("trap 'kill $!' TERM; ({STAND_IN}) & wait; wait; exit 7"),
    );
    let mut exec = node.exec(
        &["--pass", "inject"],
        &["sh", "-c", &script, "kube-apiserver"],
    );
    let mut running = Running::start(exec.env("TEST_BINARY", std::env::current_exe().unwrap()));
    running.prints("listening, pid ");
    running.logs(
        "the server accepts clients by itself: a process that the server started binds the address",
    );
    running.signal(Signal::SIGTERM);
    running.ends(7);
}

#[test]
fn a_supervisor_stays_passes_signals_on_and_ends_as_the_apiserver_does() {
    if !can_inject() {
        return;
    }
    let node = Node::new();
    let inject = |mode, command: &[&str]| node.output(&["--pass", mode], command);
    assert_eq!(
        inject("inject", &["sh", "-c", "exit 7", "kube-apiserver"])
            .status
            .code(),
        Some(7)
    );
    let missing = inject("inject", &["/nonexistent/kube-apiserver"]);
    assert_eq!(missing.status.code(), Some(69));

    let mut exec = node.exec(
        &["--instance", "a", "--pass", "auto"],
        &["sh", "-c", LIVE, "kube-apiserver"],
    );
    let mut running = Running::start(exec.stdin(Stdio::piped()));
    running.prints("that is all");
    assert_ne!(
        running.out().lines().next(),
        Some(&*running.child.id().to_string()),
        "another process"
    );
    assert!(
        node.listed()
            .iter()
            .any(|listed| listed.alive && listed.record.supervised)
    );
    running.signal(Signal::SIGTERM);
    assert_eq!(
        running.ended().signal(),
        Some(Signal::SIGTERM as i32),
        "by the same signal"
    );
    assert_eq!(node.alive("a"), Some(false));

    // A `berth exec` starts another `berth exec`, so the apiserver would have two supervisors, but
    // the kernel allows only one for a process.
    let (listen, run_dir) = (
        node.listen.to_string(),
        node.temp.path().join("run").display().to_string(),
    );
    let inner = |mode| {
        let place = format!("--listen {listen} --run-dir {run_dir} --instance inner");
        let exec =
            format!("exec {BERTH} exec {place} --pass {mode} -- sh -c 'exit 7' kube-apiserver");
        inject("inject", &["sh", "-c", &exec, "kube-apiserver"])
    };
    let (refused, relayed) = (inner("inject"), inner("auto"));
    assert_eq!(
        (refused.status.code(), relayed.status.code()),
        (Some(69), Some(7))
    );
    let listed = node.listed();
    let inner = listed
        .iter()
        .find(|listed| listed.record.instance.as_str() == "inner")
        .unwrap();
    assert!(!inner.record.supervised);
    assert!(
        inner
            .record
            .unsupervised
            .as_ref()
            .is_some_and(|why| why.starts_with("another process"))
    );
}

#[test]
fn a_kept_advertise_address_is_recorded() {
    let node = Node::new();
    let live = node.start("a", &["--advertise-address=192.0.2.7"]);
    assert_eq!(live.value("--advertise-address"), "192.0.2.7");
    assert_eq!(node.listed()[0].record.advertise.to_string(), "192.0.2.7");
    live.end();
}

#[test]
fn an_instance_keeps_its_address_and_no_two_share_one() {
    let node = Node::new();
    let first = node.start("a", &[]);
    let other = node.start("b", &[]);
    let address = first.value("--bind-address").to_owned();
    assert_ne!(other.value("--bind-address"), address);

    let refused = node.output(&["--instance", "a"], &["true"]);
    assert_eq!(refused.status.code(), Some(69));
    assert_eq!(
        node.alive("a"),
        Some(true),
        "the refused one took nothing away"
    );

    first.end();
    let again = node.start("a", &[]);
    assert_eq!(again.value("--bind-address"), address);
    again.end();
    other.end();

    // The address is in use, so the instance gets a different one.
    let _held = TcpListener::bind((address.as_str(), node.listen.port())).unwrap();
    let moved = node.start("a", &[]);
    assert_ne!(moved.value("--bind-address"), address);
    moved.end();
}

#[test]
fn signals_reach_the_apiserver_and_end_its_record() {
    let node = Node::new();
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut live = node.start("a", &[]);
        assert_eq!(node.alive("a"), Some(true));
        live.running.signal(signal);
        assert_eq!(live.running.ended().signal(), Some(signal as i32));
        // If the supervisor was killed, the apiserver ends a moment later.
        eventually("the end of the record's lock", || {
            (node.alive("a") == Some(false)).then_some(())
        });
    }
}

/// kube-apiserver ends at once on a second SIGTERM.
#[test]
fn each_signal_reaches_the_apiserver_as_often_as_it_is_sent() {
    let script = "trap 'echo told; told=$told.; [ $told != .. ] || exit 5' TERM; echo begun; while :; do sleep 0.05; done";
    let node = Node::new();
    let mut exec = Running::start(&mut node.exec(
        &["--instance", "a"],
        &["sh", "-c", script, "kube-apiserver"],
    ));
    exec.prints("begun");
    exec.signal(Signal::SIGTERM);
    exec.prints("told");
    exec.signal(Signal::SIGTERM);
    exec.ends(5);
}

#[test]
fn signal_mask_and_dispositions_are_as_without_berth() {
    let signals = |mut command: Command| {
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text
            .lines()
            .filter(|line| line.starts_with("Sig") && !line.starts_with("SigQ"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    // The instance is awk and not a shell, since a shell may change its signal mask. awk ignores
    // arguments after its program.
    let script = r#"BEGIN { while ((getline line < "/proc/self/status") > 0) print line }"#;
    let node = Node::new();
    // The signal mask of the thread is inherited by its children.
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGUSR2);
    blocked.thread_block().unwrap();
    let through = signals(node.exec(&[], &["awk", script]));
    let mut direct = Command::new("awk");
    direct.arg(script);
    assert_eq!(through, signals(direct));

    let field = |lines: &[String], name: &str| {
        let line = lines
            .iter()
            .find_map(|line| line.strip_prefix(name))
            .unwrap();
        u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap()
    };
    let bit = |signal: Signal| 1_u64 << (signal as i32 - 1);
    assert_eq!(field(&through, "SigBlk"), bit(Signal::SIGUSR2));
    // Some awks ignore SIGPIPE by themselves, and no shell does.
    let cat = signals(node.exec(&[], &["sh", "-c", "exec cat /proc/self/status"]));
    assert_eq!(field(&cat, "SigIgn") & bit(Signal::SIGPIPE), 0);
}

#[test]
fn instances_without_an_id_get_one_each() {
    let node = Node::new();
    for count in 1..=2 {
        assert!(node.output(&[], &["true"]).status.success());
        assert_eq!(node.listed().len(), count);
    }
}

#[test]
fn a_program_that_cannot_be_run_leaves_no_record() {
    let node = Node::new();
    let plain = node.temp.path().join("plain");
    fs::write(&plain, "").unwrap();
    for program in ["no-such-apiserver", plain.to_str().unwrap()] {
        // With an unreadable directory in PATH, the error would differ.
        let output = node
            .exec(&["--instance", "a"], &[program])
            .env("PATH", "/usr/bin:/bin")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(69));
        assert_eq!(node.listed(), []);
    }
}

#[test]
fn every_mistake_is_reported_at_once() {
    let node = Node::new();
    let options = [
        "--listen",
        "nowhere",
        "--listen",
        "10.0.0.5:1,fast",
        "--instance",
        "../a",
    ];
    let output = node.output(&options, &["kube-apiserver", "--secure-port"]);
    assert_eq!(output.status.code(), Some(64));
    for part in [
        "--listen \"nowhere\"",
        "\"fast\"",
        "--instance: ",
        "--secure-port is the last argument",
    ] {
        assert!(
            stderr_of(&output).contains(part),
            "{part} in {}",
            stderr_of(&output)
        );
    }
    assert_eq!(stderr_of(&output).lines().count(), 4);
    assert!(!node.temp.path().join("run").exists(), "nothing was begun");
}

#[test]
fn wildcards_are_refused_with_advice() {
    let mut node = Node::new();
    for (first, further, advised) in [
        ("0.0.0.0:6443", &[][..], "10.0.0.5:6443"),
        (
            "10.0.0.5:6443",
            &["--listen", "0.0.0.0:6443"],
            "10.0.0.5:7443",
        ),
    ] {
        node.listen = first.parse().unwrap();
        let output = node.output(further, &["true"]);
        assert_eq!(output.status.code(), Some(64));
        let refusal = stderr_of(&output);
        assert!(refusal.contains(advised), "{refusal}");
    }
    assert_eq!(node.output(&[], &[]).status.code(), Some(64), "no command");
}
