//! Commands of operators: `berth drain`, `berth ready`, and one shim for a node.

use super::node::{Echo, Node};
use crate::support::MOMENT;
use crate::support::eventually;
use crate::support::net::{
    Backend, client_with_hello, expect_service, free_address, ping, read, served_client,
};
use berth_node::terms::Phase;
use berth_os::seqpacket;
use nix::sys::signal::Signal;
use std::io::Write;
use std::os::fd::AsFd;

#[test]
fn drain_leaves_and_keeps_streams() {
    let (node, first, second) = (Node::new(), Echo::new(), Echo::new());
    let a = node.joined("a", first.address, &[]);
    let mut stream = served_client(node.listen);
    let drain =
        |options: &[&str]| node.ask_shims(&[&["drain", "--instance", "a"], options].concat());
    let (code, out, _) = drain(&["--wait", "--if-sibling"]);
    assert_eq!(
        (code, out.trim()),
        (Some(0), "not drained: no sibling of a is joined")
    );
    assert_eq!(a.status().state, Phase::Joined, "a lone shim serves on");
    let b = node.joined("b", second.address, &[]);
    a.until_counted("guard", 1);
    // A sibling that does not answer within a second counts as absent.
    eventually("a drain while the sibling serves", || {
        let (code, out, log) = drain(&["--wait", "--if-sibling"]);
        assert_eq!(code, Some(0), "{out}{log}");
        (!out.contains("not drained")).then_some(())
    });
    assert_eq!(
        a.status().state,
        Phase::Left,
        "it returned when the handover was done"
    );
    let before = b.status().connections_total;
    expect_service(node.listen);
    assert_eq!(b.status().connections_total, before + 1);
    ping(&mut stream, b"still there");
    let (code, out, _) = drain(&["--wait-streams", "0s"]);
    assert_eq!((code, out.trim()), (Some(1), "1 connections are left"));
    drop(stream);
    assert_eq!(drain(&["--wait-streams", "30s"]).0, Some(0));
    assert_eq!(drain(&["--wait-streams", "soon"]).0, Some(64));
    a.leave();
}

/// The shim hung while a preStop hook asked it to leave, and its sibling died meanwhile. A command
/// that gave up waiting has asked for nothing.
#[test]
fn a_shim_that_hung_when_it_was_asked_to_leave_serves_on_if_it_is_the_last() {
    let (node, instance) = (Node::new(), Echo::new());
    let (a, mut b) = (
        node.joined("a", instance.address, &[]),
        node.joined("b", instance.address, &[]),
    );
    a.until_counted("guard", 1);
    a.freeze();
    let asks = |ask: &str| {
        let socket = seqpacket::dial_path(&a.path).unwrap();
        seqpacket::transmit_message(
            socket.as_fd(),
            format!(r#"{{"version":1,"ask":"{ask}"}}"#).as_bytes(),
            &[],
        )
        .unwrap();
        socket
    };
    drop(asks("drain"));
    let waits = asks("drain_if_sibling");
    b.running.kill();
    a.running.signal(Signal::SIGCONT);
    let reply = eventually("a reply", || {
        let mut reply = [0; 64];
        let length = seqpacket::receive_message(waits.as_fd(), &mut reply)
            .ok()?
            .length;
        Some(String::from_utf8_lossy(&reply[..length]).into_owned())
    });
    assert_eq!(reply, r#""alone""#, "{}", a.running.log());
    assert_eq!(a.status().state, Phase::Joined);
    assert_eq!(a.counted("left", "ok"), 0, "{}", a.running.log());
    expect_service(node.listen);
}

#[test]
fn a_drained_shim_joins_again_when_its_apiserver_was_restarted_in_place() {
    let (node, first, second) = (Node::new(), Echo::new(), Echo::new());
    let a = node.launch("a", &[]);
    let old = node.record("a", first.address);
    a.until_joined();
    let b = node.joined("b", second.address, &[]);
    a.until_counted("guard", 1);
    assert_eq!(
        node.ask_shims(&["drain", "--wait", "--instance", "a"]).0,
        Some(0)
    );
    assert_eq!(a.status().state, Phase::Left);
    drop((first, old));
    a.until("its instance is gone", |status| {
        status.instances.iter().all(|instance| !instance.own)
    });
    assert_eq!(a.status().state, Phase::Left);
    let again = Echo::new();
    let _new = node.record("a", again.address);
    a.until_joined();
    b.leave();
    expect_service(node.listen);
}

#[test]
fn a_node_shim_serves_every_instance_that_is_recorded() {
    let node = Node::new();
    let shim = node.launch("node", &["--discover"]);
    let (old, new) = (Echo::new(), Echo::new());
    let ready = |id: &str| node.ask_shims(&["ready", "--timeout", "30s", "--instance", id]);
    let first = node.record("old", old.address);
    shim.until_joined();
    assert_eq!(ready("old").0, Some(0), "{:?}", ready("old"));
    let never = node.record("never", free_address());
    shim.until("one that does not listen", |status| {
        status.instances.len() == 2
    });
    // The shim's first answers may come before the first probe, and then they do not have the
    // reason yet.
    eventually("why it is not ready", || {
        let (code, out, _) = ready("never");
        assert_eq!(code, Some(1), "{out}");
        out.starts_with("instance never is unready: nothing listens on ")
            .then_some(())
    });
    drop(never);
    shim.until("it is gone", |status| status.instances.len() == 1);
    expect_service(node.listen);
    let _second = node.record("new", new.address);
    shim.until("both are known", |status| status.instances.len() == 2);
    drop((old, first));
    eventually("the new one serves alone", || {
        (shim.status().instances.len() == 1).then_some(())
    });
    for _ in 0..20 {
        expect_service(node.listen);
    }
    assert!(shim.status().check_ready().is_ok());
    shim.leave();
}

/// A node shim has no instance of its own. It outlives every instance, and its deadline begins when
/// the last instance stops listening.
#[test]
fn a_node_shim_that_leaves_stays_as_long_as_an_instance_listens() {
    const DEADLINE: &str = "the instance listens no more: draining";
    let (node, instance) = (Node::new(), Backend::new());
    let mut shim = node.launch(
        "node",
        &[
            "--discover",
            "--probe-interval",
            "500ms",
            "--drain-timeout",
            "10ms",
        ],
    );
    let _record = node.record("a", instance.address());
    shim.until_joined();
    let mut client = client_with_hello(node.listen);
    let mut attempt = instance.accept();
    attempt.write_all(b"answer").unwrap();
    assert_eq!(read(&mut client, 6), b"answer");
    shim.running.signal(Signal::SIGTERM);
    shim.until("left", |status| status.state == Phase::Left);
    // Wait for longer than the deadline of the drain, which must not have begun.
    std::thread::sleep(MOMENT);
    assert!(
        !shim.running.log().contains(DEADLINE),
        "{}",
        shim.running.log()
    );
    attempt.write_all(b"more").unwrap();
    assert_eq!(read(&mut client, 4), b"more");
    drop(instance);
    shim.running.logs(DEADLINE);
    shim.running.ends(0);
}
