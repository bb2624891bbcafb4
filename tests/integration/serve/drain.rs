//! SIGTERM: a shim drains and ends.

use super::node::Node;
use crate::support::net::{
    Backend, client_hello, connect, echo, expect_reset, find_listening, free_address, ping, read,
    served_client,
};
use crate::support::process::{Running, berth_command};
use crate::support::{MOMENT, eventually};
use nix::sys::signal::Signal;
use std::io::Write;
use std::time::{Duration, Instant};

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

/// The caller of a drain stops the apiserver next. So the drain waits for a client that sent
/// something and has no answer from that apiserver yet.
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
    // The drain must go on waiting for a shim that does not answer for a moment.
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

/// A client's ClientHello comes a round trip after its connection was accepted, so the drain must
/// wait for it.
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
    // The time is measured from before the drain. If the machine stalled meanwhile, the test proves
    // nothing.
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
