//! `berth ready`, `berth live`, `berth status` and the admin port.

use super::node::Node;
use crate::support::net::{Backend, connect, echo, find_listening, free_address, ping};
use crate::support::process::{Running, berth_command};
use crate::support::tls::{Api, Ca};
use crate::support::{MOMENT, PATIENCE, eventually, print_skipped};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

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
fn https_probe_live_and_version() {
    let (node, ca) = (Node::new(), Ca::new());
    let api = Api::start(&ca);
    let ca_file = &node.file("ca.crt", &ca.pem());
    api.answer("403 Forbidden");
    let shim = node.serve(api.address, &["--probe-ca", ca_file]);
    let line = shim.logs("403 for");
    assert!(line.contains("--probe-token-file"), "what fixes it: {line}");
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
    assert_eq!(status, Some(64), "{log}");
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
        // The client's receive buffer is small, so that it is full soon.
        socket.set_recv_buffer_size(4096).unwrap();
        socket.connect(&admin.into()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut stream = TcpStream::from(socket);
        // Write as many requests as fit.
        let _ = stream.write_all(&requests);
        stream
    };
    let unread: Vec<_> = (0..64).map(pipelining).collect();
    // While the slots are taken, the shim gives a client half a second for its request. A client
    // that was too slow tries again.
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
