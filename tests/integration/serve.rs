//! The life of `berth serve` and of the commands that ask a shim, with the real binary.

use crate::support::net::{
    Backend, client_hello, connect, echo, expect_reset, expect_service, expect_silence,
    find_listening, free_address, ping, read, served_client,
};
use crate::support::process::{Running, berth_command, expect_status, output_of};
use crate::support::shim::Shim;
use crate::support::tls::{Api, Ca};
use crate::support::{MOMENT, PATIENCE, eventually, print_skipped};
use berth_node::terms::Phase;
use berth_os::explained;
use berth_os::seqpacket;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use socket2::{Domain, Socket, Type};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
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

    /// Writes a file and returns its path.
    fn file(&self, name: &str, text: &str) -> String {
        let path = self.temp.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    fn command(&self, backend: SocketAddr, options: &[&str]) -> Command {
        let mut command = berth_command([
            "serve",
            "--listen",
            &self.listen.to_string(),
            "--backend",
            &backend.to_string(),
        ]);
        command.args(["--run-dir", &self.run_dir(), "--probe-interval", "20ms"]);
        if !options.iter().any(|option| option.starts_with("--probe-")) {
            command.args(["--probe", "tcp"]);
        }
        command.args(options);
        command
    }

    fn serve(&self, backend: SocketAddr, options: &[&str]) -> Running {
        Running::start(&mut self.command(backend, options))
    }

    /// Starts a shim, and waits until it listens.
    fn joined(&self, backend: SocketAddr, options: &[&str]) -> Running {
        let shim = self.serve(backend, options);
        shim.logs("joined");
        shim
    }

    /// Returns a client that has sent something and has no answer yet, and the instance's end of
    /// the connection.
    fn unanswered(&self, backend: &Backend) -> (TcpStream, TcpStream) {
        let mut client = connect(self.listen);
        client.write_all(&client_hello(300)).unwrap();
        let mut instance = backend.accept();
        read(&mut instance, 300);
        (client, instance)
    }

    /// Returns the result of a command. A command waits a second for the shim, so the command is
    /// repeated while a busy shim does not answer.
    #[track_caller]
    fn ask(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let mut command = berth_command(args);
        command.args(["--run-dir", &self.run_dir()]);
        eventually("an answer of the shim", || {
            let (status, out, err) = output_of(&mut command);
            (![&out, &err]
                .iter()
                .any(|text| text.contains("does not answer")))
            .then_some((status, out, err))
        })
    }

    /// Returns the instances of `berth status --json`.
    #[track_caller]
    fn instances(&self) -> Vec<serde_json::Value> {
        let mut all: serde_json::Value =
            serde_json::from_str(&self.ask(&["status", "--json"]).1).unwrap();
        serde_json::from_value(all["instances"].take()).unwrap()
    }
}

#[test]
fn bind_wait_takes_the_port_when_it_is_free() {
    let node = Node::new();
    let holder = TcpListener::bind(node.listen).unwrap();
    let shim = node.serve(Backend::new().serve(echo), &["--bind-wait", "60s"]);
    let line = shim.logs("trying again");
    assert!(
        line.contains(&format!("pid {}", std::process::id())),
        "it names the holder: {line}"
    );
    drop(holder);
    shim.logs("joined");
    ping(&mut connect(node.listen), b"served");

    let other = Node::new();
    let _held = TcpListener::bind(other.listen).unwrap();
    let began = Instant::now();
    expect_status(
        &mut other.command(free_address(), &["--bind-wait", "400ms"]),
        69,
        &["SO_REUSEPORT"],
    );
    assert!(began.elapsed() >= Duration::from_millis(400));
}

/// A user who may write in the directory would get root's listeners. Read permission is harmless.
#[test]
fn root_uses_no_run_directory_of_another_uid() {
    if !nix::unistd::geteuid().is_root() {
        return print_skipped("it needs root");
    }
    let node = Node::new();
    std::fs::create_dir(node.run_dir()).unwrap();
    std::fs::set_permissions(
        node.run_dir(),
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )
    .unwrap();
    nix::unistd::chown(node.run_dir().as_str(), Some(65534.into()), None).unwrap();
    let mut exec = berth_command([
        "exec",
        "--listen",
        &node.listen.to_string(),
        "--run-dir",
        &node.run_dir(),
    ]);
    let mut run = berth_command([
        "run",
        "--listen",
        &node.listen.to_string(),
        "--run-dir",
        &node.run_dir(),
        "--probe",
        "tcp",
    ]);
    for command in [
        &mut node.command(free_address(), &[]),
        exec.args(["--", "true"]),
        run.args(["--", "true"]),
    ] {
        let (status, _, log) = output_of(command);
        assert_eq!(status, Some(69), "{command:?}: {log}");
    }
    assert_eq!(std::fs::read_dir(node.run_dir()).unwrap().count(), 0);
    assert_eq!(node.ask(&["status"]).0, Some(69));
}

/// The tests of crates/options cover each mistake.
#[test]
fn every_mistake_is_reported_at_once() {
    let mut command = berth_command([
        "serve", "--listen", "nowhere", "--hold", "8", "--lease", "25h",
    ]);
    let (out, log) = expect_status(
        &mut command,
        64,
        &[
            "--listen \"nowhere\"",
            "--hold 8",
            "--lease 25h: at most 1day",
        ],
    );
    assert!(
        out.is_empty() && log.lines().all(|line| line.starts_with("berth: ")),
        "{log}"
    );
}

#[test]
fn a_wrong_command_line_has_exit_status_64() {
    for args in [
        &["serve"][..],
        &["serve", "--no-such-option"],
        &["fly"],
        &[],
        &["serve", "--probe", "udp"],
    ] {
        let (status, out, log) = output_of(&mut berth_command(args));
        assert_eq!((status, out.as_str()), (Some(64), ""), "{args:?}: {log}");
        assert!(!log.is_empty());
    }
    for args in [&["--help"][..], &["--version"], &["serve", "--help"]] {
        let (status, out, log) = output_of(&mut berth_command(args));
        assert_eq!((status, log.as_str()), (Some(0), ""), "{args:?}");
        assert!(!out.is_empty());
    }
    // The files of the probe are read before anything is started.
    let node = Node::new();
    let nothing = node.file("nothing.pem", "no certificate");
    expect_status(
        &mut node.command(free_address(), &["--probe-ca", &nothing]),
        64,
        &["--probe-ca", "no certificate"],
    );
}

/// Returns the inodes of a process's sockets.
fn list_sockets(pid: u32) -> Vec<u64> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten();
    let targets = links.filter_map(|link| {
        std::fs::read_link(link.path())
            .ok()?
            .into_os_string()
            .into_string()
            .ok()
    });
    targets
        .filter_map(|target| {
            target
                .strip_prefix("socket:[")?
                .strip_suffix(']')?
                .parse()
                .ok()
        })
        .collect()
}

/// A bound socket that does not listen gets no connections.
#[test]
fn bound_at_start_and_listening_when_ready() {
    let node = Node::new();
    let backend = free_address();
    let shim = node.serve(backend, &[]);
    shim.logs("probe: nothing listens");
    assert!(
        find_listening(node.listen).is_empty(),
        "it listens before its instance does"
    );
    // Without SO_REUSEADDR, which std's listeners set.
    let taken = Socket::new(Domain::IPV4, Type::STREAM, None)
        .unwrap()
        .bind(&node.listen.into())
        .unwrap_err();
    assert_eq!(
        taken.kind(),
        std::io::ErrorKind::AddrInUse,
        "the port is had from the start"
    );
    let refused = TcpStream::connect(node.listen).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    let before = list_sockets(shim.child.id());

    Backend::at(backend).serve(echo);
    shim.logs("joined");
    let inodes = find_listening(node.listen);
    assert_eq!(inodes.len(), 1);
    assert!(
        before.contains(&inodes[0]),
        "the socket that was bound at start is the one that listens"
    );
    ping(&mut connect(node.listen), b"served");
}

/// Wraps a command so that its limit of open files is lower and cannot be raised.
fn wrap_limited(files: u64, command: &Command) -> Command {
    let mut limited = Command::new("sh");
    limited
        .args(["-c", &format!("ulimit -n {files} && exec \"$@\""), "sh"])
        .arg(command.get_program());
    limited.args(command.get_args()).stdin(Stdio::null());
    for (name, _) in command.get_envs() {
        limited.env_remove(name);
    }
    limited
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_reported() {
    let (node, backend) = (Node::new(), Backend::new().serve(echo));
    let mut none = wrap_limited(1024, &node.command(backend, &["--threads", "256"]));
    expect_status(
        &mut none,
        69,
        &["1024 open files", "256 threads", "--threads", "ulimit -Hn"],
    );

    let admin = free_address();
    let options = [
        "--threads",
        "4",
        "--instance",
        "a",
        "--admin",
        &admin.to_string(),
    ];
    let few = Running::start(&mut wrap_limited(1024, &node.command(backend, &options)));
    few.logs("joined");
    few.logs(explained::FEW_DESCRIPTORS);
    let line = few.logs("max_connections=");
    let room: usize = line
        .split("max_connections=")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let idle = std::fs::read_dir(format!("/proc/{}/fd", few.child.id()))
        .unwrap()
        .count();
    assert!(
        room > 1 && idle + 2 * room < 1024,
        "{idle} descriptors and {room} connections"
    );
    // Many clients may ask at the same time.
    let _scrapers: Vec<_> = (0..100).map(|_| connect(admin)).collect();
    let path = node
        .temp
        .path()
        .join("run")
        .join(node.listen.to_string())
        .join("a.sock");
    let _siblings: Vec<_> = (0..500)
        .map_while(|_| seqpacket::dial_path(&path).ok())
        .collect();
    for _ in 0..20 {
        let taken = std::fs::read_dir(format!("/proc/{}/fd", few.child.id()))
            .unwrap()
            .count();
        assert!(
            taken + 2 * room < 1024,
            "{taken} descriptors and {room} connections"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    ping(&mut connect(node.listen), b"served");
}

/// After a probe before the instance listens, the shim must not wait for a whole interval.
#[test]
fn an_instance_that_listens_later_is_asked_at_once() {
    let backend = free_address();
    let shim = Shim::launch("127.0.0.1:0", backend, "1", &["--probe-interval", "1h"]);
    shim.until("asked in vain", |status| {
        status
            .instances
            .iter()
            .any(|i| i.last_probe.contains("nothing listens"))
    });
    Backend::at(backend).serve(echo);
    shim.until_phase(Phase::Joined);
    ping(&mut shim.client(), b"served");
}

#[test]
fn ready_live_and_status() {
    let node = Node::new();
    let (status, out, _) = node.ask(&["ready"]);
    assert_eq!(
        (status, out.lines().count()),
        (Some(1), 1),
        "no instance: one line why: {out}"
    );
    assert_eq!(node.ask(&["status"]).0, Some(69));

    let backend = free_address();
    let shim = node.serve(backend, &["--instance", "a"]);
    shim.logs("probe: nothing listens");
    let (status, out, _) = node.ask(&["ready"]);
    assert_eq!((status, out.lines().count()), (Some(1), 1), "{out}");
    let (status, out, _) = node.ask(&["live", "--probe", "tcp"]);
    assert_eq!((status, out.lines().count()), (Some(1), 1), "{out}");
    let shown = &node.instances()[0]["shim"];
    assert_eq!(shown["berth"], node.listen.to_string());
    assert_eq!(shown["state"], "waiting");
    assert_eq!(shown["instances"][0]["health"], "unready");

    Backend::at(backend).serve(echo);
    shim.logs("joined");
    assert_eq!(
        node.ask(&["ready"]),
        (Some(0), String::new(), String::new())
    );
    assert_eq!(node.ask(&["ready", "--instance", "a"]).0, Some(0));
    assert_eq!(node.ask(&["live", "--probe", "tcp"]).0, Some(0));
    let mut client = connect(node.listen);
    ping(&mut client, b"one");
    assert_eq!(node.ask(&["status"]).0, Some(0));
    let shown = &node.instances()[0];
    assert_eq!(shown["instance"], "a");
    assert_eq!(shown["berth"], node.listen.to_string());
    assert_eq!(shown["shim"]["state"], "joined");
    assert_eq!(shown["shim"]["connections_open"], 1);
    assert_eq!(shown["shim"]["instances"][0]["health"], "ready");

    assert_eq!(node.ask(&["ready", "--instance", "b"]).0, Some(1));
    // A second shim of the berth, with a backend of its own.
    let other = node.joined(Backend::new().serve(echo), &["--instance", "b"]);
    for command in ["ready", "live"] {
        let (status, out, log) = node.ask(&[command]);
        assert_eq!((status, out.as_str()), (Some(64), ""), "{log}");
        for part in ["a at", "b at", "--instance"] {
            assert!(log.contains(part), "{part} in {log}");
        }
        assert_eq!(log.lines().count(), 1, "{log}");
    }
    assert_eq!(node.ask(&["ready", "--instance", "b"]).0, Some(0));
    drop(other);
    let shims: Vec<_> = node
        .instances()
        .iter()
        .map(|of| of["shim"].is_object())
        .collect();
    assert_eq!(shims, [true, false], "the second shim was killed");
}

#[test]
fn a_second_shim_of_an_instance_is_refused() {
    let node = Node::new();
    let backend = Backend::new().serve(echo);
    let _shim = node.joined(backend, &["--instance", "a"]);
    expect_status(
        &mut node.command(backend, &["--instance", "a"]),
        69,
        &["a shim of instance a runs already"],
    );
    assert_eq!(
        node.ask(&["ready"]).0,
        Some(0),
        "the first one is as before"
    );
}

#[test]
fn https_probe_live_and_version() {
    let (node, ca) = (Node::new(), Ca::new());
    let api = Api::start(&ca);
    let ca_file = &node.file("ca.crt", &ca.pem());
    api.answer("403 Forbidden");
    let shim = node.serve(api.address, &["--probe-ca", ca_file]);
    let line = shim.logs("403 for");
    assert!(
        line.contains("--probe-cert") && line.contains("--probe-token-file"),
        "what fixes it: {line}"
    );
    assert!(find_listening(node.listen).is_empty());
    api.answer("200 OK");
    shim.logs("joined");
    assert!(
        ca.get(connect(node.listen), "/")
            .starts_with("HTTP/1.1 200")
    );
    eventually("its version in the status", || {
        (node.instances()[0]["shim"]["instances"][0]["kube_version"] == "v1.2.3").then_some(())
    });
    // Where many tests share a processor, 2 s are too short.
    let live = || node.ask(&["live", "--probe-ca", ca_file, "--timeout", "60s"]);
    assert_eq!(live().0, Some(0));
    // A problem of berth alone must not make the kubelet restart kube-apiserver.
    for lacks in [
        &node.file("other.crt", &Ca::new().pem()),
        "/nonexistent/ca.crt",
    ] {
        let (status, out, log) = node.ask(&["live", "--probe-ca", lacks, "--timeout", "60s"]);
        assert!(
            status == Some(0) && out.starts_with("alive, but the shim's probe would fail: "),
            "{out}{log}"
        );
    }
    api.answer("500 Internal Server Error");
    assert_eq!(live().0, Some(1));
    let (_, out, _) = node.ask(&[
        "live",
        "--probe-ca",
        ca_file,
        "--timeout",
        "60s",
        "--path",
        "/livez?exclude=etcd",
    ]);
    assert!(out.contains("500 for /livez?exclude=etcd"), "{out}");
    let (status, _, log) = node.ask(&["live", "--probe-ca", ca_file, "--path", "livez"]);
    assert!(
        status == Some(64) && log.contains("give a path such as /livez?exclude=etcd"),
        "{log}"
    );
}

/// Under a storm of lists, an answer takes longer than the timeout of the shim's own probe. The
/// kubelet's timeout decides.
#[test]
fn live_waits_as_long_as_the_kubelet_lets_it() {
    let (node, ca) = (Node::new(), Ca::new());
    let api = Api::start(&ca);
    let ca_file = &node.file("ca.crt", &ca.pem());
    let shim = node.serve(api.address, &["--probe-ca", ca_file]);
    shim.logs("joined");
    assert_eq!(node.ask(&["ready", "--timeout", "30s"]).0, Some(0));
    assert_eq!(node.ask(&["ready", "--timeout", "soon"]).0, Some(64));
    let held = api.hold();
    let mut patient = Running::start(&mut berth_command([
        "live",
        "--probe-ca",
        ca_file,
        "--timeout",
        "60s",
        "--run-dir",
        &node.run_dir(),
    ]));
    let (status, out, _) = node.ask(&["live", "--probe-ca", ca_file, "--timeout", "300ms"]);
    assert_eq!(
        (status, out.as_str()),
        (Some(1), "no answer in 300ms (--timeout)\n")
    );
    let (status, out, _) = node.ask(&["live", "--probe-ca", ca_file]);
    assert_eq!(
        (status, out.as_str()),
        (Some(1), "no answer in 2s (--probe-timeout)\n")
    );
    assert!(patient.is_running(), "{}", patient.out());
    drop(held);
    assert_eq!(patient.ended().code(), Some(0), "{}", patient.out());
}

#[test]
fn sigterm_drains_and_exits_0() {
    let node = Node::new();
    let mut shim = node.joined(Backend::new().serve(echo), &[]);
    let mut client = served_client(node.listen);
    shim.signal(Signal::SIGTERM);
    shim.logs("left");
    assert!(find_listening(node.listen).is_empty());
    ping(&mut client, b"still served");
    assert!(shim.is_running());
    assert_eq!(node.ask(&["ready"]).0, Some(1));
    assert_eq!(node.instances()[0]["shim"]["state"], "left");
    drop(client);
    shim.ends(0);
    let left = std::fs::read_dir(node.run_dir()).unwrap().flatten();
    let sockets = left.flat_map(|berth| std::fs::read_dir(berth.path()).unwrap().flatten());
    let sockets: Vec<_> = sockets
        .filter(|file| file.file_name().to_string_lossy().ends_with(".sock"))
        .collect();
    assert!(sockets.is_empty(), "its socket is gone: {sockets:?}");
}

#[test]
fn sigterm_while_waiting_exits_0() {
    let node = Node::new();
    let mut shim = node.serve(free_address(), &[]);
    shim.logs("probe: nothing listens");
    shim.signal(Signal::SIGTERM);
    shim.ends(0);
}

#[test]
fn a_second_signal_ends_at_once() {
    let node = Node::new();
    for second in [Signal::SIGTERM, Signal::SIGINT] {
        let mut shim = node.joined(Backend::new().serve(echo), &["--drain-timeout", "1h"]);
        let mut client = served_client(node.listen);
        shim.signal(Signal::SIGTERM);
        shim.logs("left");
        ping(&mut client, b"still served");
        shim.signal(second);
        // A reset and not a FIN: the client must not regard a part of an answer as the whole.
        expect_reset(&mut client);
        shim.ends(0);
    }
}

/// The caller of a drain stops the apiserver next. A client that sent something and has no answer
/// is at that apiserver.
#[test]
fn drain_waits_for_first_bytes() {
    let node = Node::new();
    let backend = Backend::new();
    let shim = node.joined(backend.address(), &["--speedup", "10"]);
    let pending = || {
        // `None` if the shim does not answer at once.
        node.instances()[0]["shim"]["connections_pending"].as_u64()
    };
    let until = |what: &str, count| eventually(what, || (pending() == Some(count)).then_some(()));
    let _silent = connect(node.listen);
    let _silent_leg = backend.accept();
    until("a client that says nothing is not waited for", 0);
    let (mut client, mut instance) = node.unanswered(&backend);
    until("a client that is not answered", 1);
    let drain =
        || Running::start(berth_command(["drain", "--wait", "--run-dir"]).arg(node.run_dir()));
    let began = Instant::now();
    let mut drained = drain();
    shim.logs("left");
    std::thread::sleep(MOMENT);
    let waits = drained.is_running();
    // A shim that does not answer for a moment has not ended.
    shim.signal(Signal::SIGSTOP);
    std::thread::sleep(MOMENT * 10);
    shim.signal(Signal::SIGCONT);
    let waits_on = drained.is_running();
    // The drain waits for 5 s at most. On a slower machine, the test proves nothing.
    if began.elapsed() < Duration::from_secs(4) {
        assert!(waits, "it left, and a client is not answered");
        assert!(waits_on, "the shim was busy, and a client is not answered");
    }
    instance.write_all(b"answer").unwrap();
    drained.ends(0);
    until("no client that is not answered", 0);
    assert_eq!(read(&mut client, 6), b"answer");
    assert!(drained.out().is_empty() || !waits_on, "{}", drained.out());
}

/// The client's ClientHello comes a round trip after the accept.
#[test]
fn drain_waits_for_the_client_that_was_accepted_last() {
    let node = Node::new();
    let backend = Backend::new();
    let shim = node.joined(
        backend.address(),
        &["--drain-timeout", "1h", "--speedup", "10"],
    );
    let mut client = connect(node.listen);
    let mut instance = backend.accept();
    let began = Instant::now();
    let mut drained =
        Running::start(berth_command(["drain", "--wait", "--run-dir"]).arg(node.run_dir()));
    shim.logs("left");
    client.write_all(&client_hello(300)).unwrap();
    read(&mut instance, 300);
    // Counted from before the drain. If the machine stalled meanwhile, the test proves nothing.
    let in_time = began.elapsed() < Duration::from_millis(400);
    std::thread::sleep(MOMENT * 5);
    let waits = drained.is_running();
    assert!(
        waits || !in_time || began.elapsed() > Duration::from_secs(4),
        "a client is not answered"
    );
    instance.write_all(b"answer").unwrap();
    assert_eq!(
        (drained.ended().code(), read(&mut client, 6).as_slice()),
        (Some(0), &b"answer"[..])
    );
}

/// An apiserver that does not answer delays no client for long.
#[test]
fn drain_waits_for_first_bytes_and_not_for_ever() {
    let node = Node::new();
    let backend = Backend::new();
    let _shim = node.joined(backend.address(), &[]);
    let _unanswered = node.unanswered(&backend);
    let (status, out, _) = node.ask(&["drain", "--wait"]);
    assert_eq!(
        (status, out.trim()),
        (Some(0), "1 connections are not answered yet")
    );
}

/// The shim outlives its apiserver: while the apiserver listens, the deadline has not begun.
#[test]
fn the_deadline_begins_when_the_instance_listens_no_more() {
    const DEADLINE: Duration = Duration::from_secs(1);
    let node = Node::new();
    let backend = Backend::new();
    let mut shim = node.joined(backend.address(), &["--drain-timeout", "1s"]);
    let (mut client, instance) = node.unanswered(&backend);
    std::thread::spawn(move || echo(instance));
    shim.signal(Signal::SIGTERM);
    shim.logs("left");
    std::thread::sleep(DEADLINE * 2);
    ping(&mut client, b"still served");
    assert!(shim.is_running());

    let closed = Instant::now();
    drop(backend);
    shim.logs("the instance listens no more");
    expect_reset(&mut client);
    shim.ends(0);
    assert!(
        closed.elapsed() >= DEADLINE,
        "it ended after {:?}",
        closed.elapsed()
    );
}

/// Sets the soft limit of open files of a running process.
fn limit_files(pid: u32, soft: &str) {
    let status = Command::new("prlimit")
        .args(["--pid", &pid.to_string(), &format!("--nofile={soft}:")])
        .status();
    assert!(status.expect("prlimit of util-linux").success());
}

#[test]
fn running_out_of_descriptors_pauses_and_recovers() {
    let node = Node::new();
    let mut shim = node.joined(Backend::new().serve(echo), &["--threads", "1"]);
    let pid = shim.child.id();
    let mut client = served_client(node.listen);
    // The limit is the lowest free number, so no connection fits.
    limit_files(pid, &lowest_free_descriptor(pid).to_string());
    let mut waiting: Vec<_> = (0..20).map(|_| connect(node.listen)).collect();
    for client in &mut waiting {
        client.write_all(&client_hello(100)).unwrap();
    }
    shim.logs(explained::CANNOT_ACCEPT);
    expect_silence(&mut waiting[0]);
    ping(&mut client, b"those who are there are served");
    let (before, began) = (cpu_ticks(pid), Instant::now());
    std::thread::sleep(MOMENT * 4);
    let (ticks, slept) = (cpu_ticks(pid) - before, began.elapsed());
    assert!(
        u128::from(ticks) * 10 < slept.as_millis() / 2,
        "it spins: {ticks} ticks of 10 ms in {slept:?}"
    );

    limit_files(pid, "1000");
    for client in &mut waiting {
        assert!(read(client, 100) == client_hello(100));
    }
    let log = shim.log();
    assert_eq!(log.matches("cannot accept").count(), 1, "told once: {log}");
    drop((client, waiting));
    shim.signal(Signal::SIGTERM);
    shim.ends(0);
}

/// Returns the lowest number that a process has for a new descriptor, whether or not a probe uses
/// it now.
fn lowest_free_descriptor(pid: u32) -> u32 {
    let used = || -> BTreeSet<u32> {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .flatten();
        fds.filter_map(|fd| fd.file_name().to_str()?.parse().ok())
            .collect()
    };
    // After one of these polls, a running probe or write of a lease has ended.
    let kept = (0..20).fold(used(), |kept, _| {
        std::thread::sleep(MOMENT / 10);
        &kept & &used()
    });
    (0..).find(|number| !kept.contains(number)).unwrap()
}

/// Returns the CPU time of a process, in the clock ticks of /proc.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_ascii_whitespace()
        .collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// An accepted client needs a second descriptor, for the connection to the instance. Without that
/// descriptor the shim would reset the client.
#[test]
fn more_connections_than_descriptors_are_not_taken() {
    let node = Node::new();
    let command = node.command(
        Backend::new().serve(echo),
        &["--threads", "1", "--max-connections", "1000"],
    );
    let mut limited = Command::new("sh");
    limited
        .args(["-c", r#"ulimit -n 500; exec "$0" "$@""#])
        .arg(command.get_program())
        .args(command.get_args());
    let shim = Running::start(&mut limited);
    shim.logs(explained::TOO_MANY_CONNECTIONS);
    shim.logs("joined");
    let mut clients: Vec<_> = (0..150).map(|_| connect(node.listen)).collect();
    for client in &mut clients {
        client.write_all(&client_hello(100)).unwrap();
    }
    shim.logs("--max-connections is reached");
    for mut client in clients {
        assert!(read(&mut client, 100) == client_hello(100));
    }
}

#[test]
fn the_log_is_json_when_asked_and_names_connections() {
    let node = Node::new();
    let shim = node.joined(
        Backend::new().serve(echo),
        &["--log-format", "json", "--log-connections"],
    );
    let client = connect(node.listen);
    let address = client.local_addr().unwrap();
    let mut same = client.try_clone().unwrap();
    ping(&mut same, &client_hello(100));
    drop((client, same));
    let line = shim.logs("connection ended");
    let event: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(event["client"], address.to_string());
    assert_eq!(
        (&event["up"], &event["down"], &event["outcome"]),
        (&100.into(), &100.into(), &"closed".into())
    );
    assert!(
        event["source"]
            .as_str()
            .unwrap()
            .starts_with(&address.ip().to_string()),
        "{line}"
    );
    let first: serde_json::Value =
        serde_json::from_str(shim.log().lines().next().unwrap()).unwrap();
    assert_eq!(
        first["message"], "berth",
        "the first line is the effective configuration"
    );
    assert_eq!(first["berth"], node.listen.to_string());
}

/// Returns the number of pipe descriptors, without standard input and output.
fn count_pipes(pid: u32) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten();
    let own = fds.filter(|fd| {
        fd.file_name()
            .to_str()
            .and_then(|fd| fd.parse().ok())
            .is_some_and(|fd: u32| fd > 2)
    });
    own.filter(|fd| {
        std::fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().starts_with("pipe:"))
    })
    .count()
}

/// Stalled readers of large answers leave nothing in the shim: no pipe, since pipes are limited for
/// each uid, and no bytes.
#[test]
fn readers_that_stall_hold_no_pipe_and_no_memory() {
    const READERS: usize = 100;
    let node = Node::new();
    let backend = Backend::new().serve(|mut instance| {
        // A probe sends nothing. To a client, the instance writes until the client is gone.
        if matches!(instance.read(&mut [0; 100]), Ok(1..)) {
            while instance.write_all(&[7; 65536]).is_ok() {}
        }
    });
    let shim = node.joined(backend, &["--threads", "1"]);
    let reader = |_| {
        let mut client = connect(node.listen);
        client.write_all(&client_hello(100)).unwrap();
        read(&mut client, 4_000_000);
        client
    };
    let inherited = count_pipes(shim.child.id());
    let mut first = reader(0);
    let resident = || {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", shim.child.id())).unwrap();
        statm
            .split_ascii_whitespace()
            .nth(1)
            .unwrap()
            .parse::<usize>()
            .unwrap()
            * 4096
    };
    let before = resident();
    let stalled: Vec<_> = (0..READERS).map(reader).collect();
    read(&mut first, 4_000_000);
    let (pipes, grown) = (
        count_pipes(shim.child.id()) - inherited,
        resident().saturating_sub(before) / READERS,
    );
    println!("{pipes} descriptors of pipes, {grown} bytes a reader");
    assert!(pipes <= 2, "{pipes} descriptors of pipes");
    assert!(grown < 20_000, "{grown} bytes a reader");
    drop(stalled);
}

/// Clients may take all slots of the admin port and read no answer. They must not keep the slots.
#[test]
fn the_admin_port_answers_despite_clients_that_do_not_read() {
    let (node, admin) = (Node::new(), free_address());
    let _shim = node.joined(
        Backend::new().serve(echo),
        &["--admin", &admin.to_string(), "--speedup", "10"],
    );
    let requests = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n".repeat(10_000);
    let pipelining = |_| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        // A small buffer fills soon.
        socket.set_recv_buffer_size(4096).unwrap();
        socket.connect(&admin.into()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut stream = TcpStream::from(socket);
        // Write as many requests as fit.
        let _ = stream.write_all(&requests);
        stream
    };
    let unread: Vec<_> = (0..64).map(pipelining).collect();
    // Here a client has half a second for its request, so a client that was too slow tries again.
    let answer = eventually("an answer", || {
        let mut last = TcpStream::connect(admin).unwrap();
        last.set_read_timeout(Some(PATIENCE)).unwrap();
        last.write_all(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            .ok()?;
        let mut answer = String::new();
        last.read_to_string(&mut answer)
            .ok()
            .filter(|length| *length > 0)
            .map(|_| answer)
    });
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok\n"),
        "{answer}"
    );
    drop(unread);
}

/// A shim without free descriptors logs the shortage once, not for each attempt.
#[test]
fn an_admin_port_without_descriptors_is_one_line_of_log() {
    const LINE: &str = "cannot accept on the admin port";
    let (node, admin) = (Node::new(), free_address());
    let shim = node.joined(Backend::new().serve(echo), &["--admin", &admin.to_string()]);
    let mut none = Command::new("prlimit");
    if let Err(error) = none
        .args(["--nofile=3:", "--pid", &shim.child.id().to_string()])
        .status()
    {
        return print_skipped(&format!("prlimit cannot be run: {error}"));
    }
    let _client = connect(admin);
    shim.logs(LINE);
    // The shim tries again after 100 ms.
    std::thread::sleep(4 * MOMENT);
    assert_eq!(shim.log().matches(LINE).count(), 1, "{}", shim.log());
}

/// A process that is killed when the test ends.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// If a container runtime hangs, the log's pipe fills. Connections must not wait for it.
#[test]
fn a_log_without_a_reader_delays_no_client() {
    const CLIENTS: usize = 1000;
    let node = Node::new();
    let backend = Backend::new().serve(echo);
    let unread = || {
        let mut command = node.command(backend, &["--log-connections", "--threads", "1"]);
        let mut shim = Killed(command.stderr(Stdio::piped()).spawn().unwrap());
        eventually("a listener", || {
            (!find_listening(node.listen).is_empty()).then_some(())
        });
        for _ in 0..CLIENTS {
            expect_service(node.listen);
        }
        (shim.0.stderr.take().unwrap(), shim)
    };
    let stop = |shim: &Killed| {
        kill(
            Pid::from_raw(shim.0.id().try_into().unwrap()),
            Signal::SIGTERM,
        )
        .unwrap();
    };
    // A reader that pauses misses no line, including the last ones.
    let (mut log, shim) = unread();
    let (reads, reading_began) = std::sync::mpsc::channel();
    let reading = std::thread::spawn(move || {
        let mut all = vec![0; 1];
        log.read_exact(&mut all).unwrap();
        reads.send(()).unwrap();
        log.read_to_end(&mut all).unwrap();
        String::from_utf8(all).unwrap()
    });
    reading_began.recv().unwrap();
    stop(&shim);
    let log = reading.join().unwrap();
    assert_eq!(log.matches("connection ended").count(), CLIENTS);
    assert!(log.lines().last().unwrap().contains("drained"), "{log}");
    // A reader that never comes back does not keep the process from ending.
    let (_unread, mut shim) = unread();
    stop(&shim);
    assert!(eventually("the end", || shim.0.try_wait().unwrap()).success());
}
