//! Failing instances: one of two, or the only one.

use super::node::{Echo, Node, Shim, know_one_another};
use crate::support::load;
use crate::support::net::{
    client_hello, client_with_hello, expect_service, free_address, fresh_ip, read,
};
use crate::support::process::expect_status;
use crate::support::{PATIENCE, eventually};
use berth_node::terms::Phase;
use berth_os::explained;
use nix::sys::signal::Signal;
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

#[test]
fn a_siblings_instance_that_dies_is_not_missed() {
    a_sibling_loses_its_instance(false);
}

#[test]
fn a_recorded_siblings_instance_that_dies_is_not_missed() {
    a_sibling_loses_its_instance(true);
}

fn a_sibling_loses_its_instance(recorded: bool) {
    let node = Node::new();
    let instances = [Echo::new(), Echo::new()];
    let _claims = recorded
        .then(|| ["a", "b"].map(|id| node.record(id, instances[usize::from(id == "b")].address)));
    let [first, second] = instances;
    // Shims hold clients for a long time, so that no client is refused only because the machine is
    // slow.
    let join = |id: &str, instance: &Echo| {
        let shim = match recorded {
            true => node.launch(id, &["--hold", "60s"]),
            false => node.start(id, instance.address, &["--hold", "60s"]),
        };
        shim.until_joined();
        shim
    };
    let (a, b) = (join("a", &first), join("b", &second));
    know_one_another(&a, &b);
    let load = load::start_load(node.listen, 32, Duration::from_millis(100));
    load.more(200);
    drop(second);
    load.more(500);
    b.until("left", |status| status.state == Phase::Left);
    let record = load.end();
    println!(
        "an instance died: {} connections, slowest {:?}, lost: {}",
        record.begun.len(),
        record.slowest,
        record.kinds()
    );
    if !record.expect_no_loss(&b.running.log()) {
        return;
    }
    assert!(
        a.running.log().lines().all(|line| !line.contains("ERROR")),
        "{}",
        a.running.log()
    );
}

/// Leaves a process one free descriptor, or removes the limit.
fn limit_descriptors(pid: nix::unistd::Pid, one: bool) {
    let numbers = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten();
    let open: std::collections::BTreeSet<u64> = numbers
        .map(|entry| entry.file_name().to_str().unwrap().parse().unwrap())
        .collect();
    let free = |limit: u64| limit - open.range(..limit).count() as u64;
    let soft = if one {
        (1..).find(|limit| free(*limit) == 1).unwrap()
    } else {
        1024
    };
    expect_status(
        std::process::Command::new("prlimit")
            .args([format!("--pid={pid}"), format!("--nofile={soft}:")]),
        0,
        &[],
    );
}

/// Returns a stopped shim (SIGSTOP) with one free descriptor, and clients in its queue.
fn frozen_without_descriptors(node: &Node, instance: &Echo) -> (Shim, Vec<TcpStream>) {
    // With these options, nothing but clients needs descriptors. The shim accepts a client before
    // it dials the instance, so the accepted client gets the free descriptor.
    let a = node.joined(
        "a",
        instance.address,
        &["--probe-interval", "1h", "--hold", "60s", "--threads", "1"],
    );
    a.freeze();
    limit_descriptors(a.running.pid(), true);
    let clients = (0..8).map(|_| client_with_hello(node.listen)).collect();
    (a, clients)
}

#[test]
fn a_client_waits_while_there_is_no_descriptor_for_its_instance() {
    let (node, instance) = (Node::new(), Echo::new());
    let (a, mut clients) = frozen_without_descriptors(&node, &instance);
    a.running.signal(Signal::SIGCONT);
    a.running.logs(explained::CANNOT_ACCEPT);
    limit_descriptors(a.running.pid(), false);
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64));
    }
}

/// A leaving shim without sibling accepts the clients in its queue as soon as descriptors are free.
#[test]
fn clients_queued_when_the_last_shim_leaves_wait_for_descriptors() {
    let (node, instance) = (Node::new(), Echo::new());
    let (a, mut clients) = frozen_without_descriptors(&node, &instance);
    // The shim handles SIGTERM as soon as SIGCONT wakes it.
    a.running.signal(Signal::SIGTERM);
    a.running.signal(Signal::SIGCONT);
    a.running.logs(explained::CANNOT_ACCEPT);
    a.running.logs("SIGTERM");
    limit_descriptors(a.running.pid(), false);
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64));
    }
}

fn try_connect(to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(fresh_ip().into(), 0).into())?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    Ok(socket)
}

/// A refused client learns at once that there is no instance. After the hold, a client that waited
/// would learn the same, but late.
#[test]
fn beyond_the_hold_clients_are_refused_at_once() {
    let (node, instance) = (Node::new(), Echo::new());
    let address = instance.address;
    let a = node.joined("a", address, &["--hold", "1s"]);
    let b = node.start("b", free_address(), &["--hold", "1s"]);
    b.until_counted("guard", 1);
    drop(instance);
    a.until("refusing", |status| status.state == Phase::Refusing);
    eventually("the end of listening", || {
        node.listeners().is_empty().then_some(())
    });
    for _ in 0..50 {
        let error = try_connect(node.listen).expect_err("nothing listens");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
    assert_eq!(b.status().state, Phase::Waiting);
    let _instance = Echo::at(address);
    node.supervises("a", address);
    a.until_joined();
    eventually("listening again", || {
        (!node.listeners().is_empty()).then_some(())
    });
    for _ in 0..50 {
        expect_service(node.listen);
    }
}
