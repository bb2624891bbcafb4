//! The start of a shim, and what it refuses.

use super::node::Node;
use crate::support::net::{Backend, connect, echo, find_listening, free_address, ping};
use crate::support::print_skipped;
use crate::support::process::{
    Running, berth_command, expect_status, output_of, read_field, wrap_command,
};
use crate::support::shim::Shim;
use berth_node::terms::Phase;
use berth_os::{explained, seqpacket};
use socket2::{Domain, Socket, Type};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

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

/// Starts a command with a limit of 1024 open files, which the command cannot raise.
const LIMITED: [&str; 4] = ["sh", "-c", "ulimit -n 1024 && exec \"$@\"", "sh"];

#[test]
fn a_limit_of_open_files_that_is_too_low_is_reported() {
    let (node, backend) = (Node::new(), Backend::new().serve(echo));
    let mut none = wrap_command(&LIMITED, &node.command(backend, &["--threads", "256"]));
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
    let few = Running::start(&mut wrap_command(
        &LIMITED,
        &node.command(backend, &options),
    ));
    few.logs("joined");
    few.logs(explained::FEW_DESCRIPTORS);
    let line = few.logs("max_connections=");
    let room: usize = read_field(&line, "max_connections=");
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
