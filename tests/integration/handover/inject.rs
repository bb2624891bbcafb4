//! Clients' sockets are passed to instances by `berth exec --pass inject`: what comes of these clients when a shim, an instance or its
//! supervisor ends.

use super::node::{Node, Shim, freeze};
use crate::support::eventually;
use crate::support::net::{client_hello, client_with_hello, connect, ping, read, served_client};
use crate::support::process::{Running, can_inject, has_all};
use berth_node::ipc::wire::Status;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::Write;
use std::net::TcpStream;

/// A node and an instance that gets its clients' sockets. `None` where that is not possible: the test is skipped.
fn supervised(silent: &str) -> Option<(Node, Running, Pid)> {
    let node = Node::new();
    let (supervisor, server) = can_inject().then(|| node.injected("a", "inject", silent))?;
    Some((node, supervisor, server))
}

/// A shim of instance a that is joined and knows so many instances that get sockets.
fn shim(node: &Node, pass: &str, instances: usize) -> Shim {
    let shim = node.launch("a", &["--pass", pass]);
    shim.until_joined();
    shim.until("links", |status| status.instances.iter().filter(|known| known.injected).count() == instances);
    shim
}

fn injected(shim: &Shim) -> u64 {
    shim.metric("berth_connections_total", &[("outcome", "injected")])
}

/// Whom the instance takes the client for.
fn known_as(client: &mut TcpStream) -> String {
    client.write_all(b"who").unwrap();
    let expected = client.local_addr().unwrap().to_string();
    String::from_utf8(read(client, expected.len())).unwrap()
}

#[test]
fn the_end_of_a_shim_cuts_no_client() {
    let Some((node, _supervisor, _)) = supervised("") else { return };
    let mut first = shim(&node, "inject", 1);
    let mut clients: Vec<_> = (0..20).map(|_| served_client(node.listen)).collect();
    eventually("20 clients of the instance alone", || (injected(&first) == 20).then_some(()));
    assert_eq!(first.status().connections_open, 0);
    has_all(&node.asked(&["status"]).1, &["the apiserver gets clients' sockets, none is relayed"]);
    first.running.kill();
    for client in &mut clients {
        assert_eq!(known_as(client), client.local_addr().unwrap().to_string());
    }
    let second = shim(&node, "auto", 1);
    let mut client = connect(node.listen);
    assert_eq!(known_as(&mut client), client.local_addr().unwrap().to_string());
    eventually("a client of the instance alone", || (injected(&second) == 1).then_some(()));
    // What leaves takes no client along.
    second.leave();
    clients.iter_mut().chain([&mut client]).for_each(|client| ping(client, b"still there"));
}

/// An instance that ends before its first byte: of its clients it has accepted none, has read nothing, or has read a ClientHello.
#[test]
fn a_client_without_an_answer_is_served_by_the_next_instance() {
    for silent in ["stopped", "accepted", "read"] {
        for supervisor_ends in [false, true] {
            let Some((node, supervisor, server)) = supervised(silent) else { return };
            let shim = shim(&node, "inject", 1);
            if silent == "stopped" {
                freeze(server);
            }
            let mut clients: Vec<_> = (0..5).map(|_| client_with_hello(node.listen)).collect();
            if silent != "stopped" {
                let line = format!("{silent} ");
                eventually("clients at the instance", || {
                    (supervisor.out().lines().filter(|out| out.starts_with(&line)).count() == 5).then_some(())
                });
            }
            let (_other, _) = node.injected("b", "inject", "");
            shim.until("the other instance", |status| {
                status.instances.iter().any(|known| !known.own && known.injected && known.health.as_str() == "ready")
            });
            kill(if supervisor_ends { supervisor.pid() } else { server }, Signal::SIGKILL).unwrap();
            for client in &mut clients {
                assert_eq!(read(client, 64), client_hello(64), "{silent} {supervisor_ends}\n{}", shim.running.log());
                ping(client, b"and more");
            }
            // A ClientHello that was read is relayed, again.
            let (passed, again) = (if silent == "read" { 0 } else { 5 }, shim.metric("berth_replays_total", &[]));
            eventually("clients of the instance alone", || (injected(&shim) == passed).then_some(()));
            assert_eq!(again, 5, "{silent} {supervisor_ends}");
        }
    }
}

/// An instance that is stuck, with clients that it has not accepted.
#[test]
fn clients_of_an_instance_that_stands_still_are_recalled_for_another() {
    let Some((node, _supervisor, server)) = supervised("") else { return };
    let (_other, _) = node.injected("b", "inject", "");
    let shim = node.launch("a", &["--pass", "inject", "--probe-timeout", "500ms"]);
    shim.until("both get sockets", |status| status.instances.iter().filter(|known| known.injected).count() == 2);
    freeze(server);
    // More than are under way at a time.
    let mut clients: Vec<_> = (0..80).map(|_| client_with_hello(node.listen)).collect();
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64), "{}", shim.running.log());
    }
    kill(server, Signal::SIGCONT).unwrap();
    clients.iter_mut().for_each(|client| ping(client, b"still there"));
}

/// A supervisor that hangs keeps the clients that it was sent; these go away, and occupy no thread of the shim.
#[test]
fn clients_that_leave_a_supervisor_that_hangs_disturb_no_other() {
    let Some((node, supervisor, _)) = supervised("") else { return };
    let (_other, _) = node.injected("b", "inject", "");
    let shim = node.launch("a", &["--pass", "inject", "--probe-timeout", "500ms", "--threads", "1"]);
    shim.until_joined();
    shim.until("both get sockets", |status| status.instances.iter().filter(|known| known.injected).count() == 2);
    freeze(supervisor.pid());
    let clients: Vec<_> = (0..5).map(|_| client_with_hello(node.listen)).collect();
    shim.until("its clients wait", |status| {
        status.instances.iter().any(|known| known.own && known.health.as_str() != "ready")
    });
    drop(clients);
    for _ in 0..5 {
        assert_eq!(read(&mut client_with_hello(node.listen), 64), client_hello(64), "{}", shim.running.log());
    }
    kill(supervisor.pid(), Signal::SIGCONT).unwrap();
}

#[test]
fn a_handshake_has_its_slot_until_the_first_byte() {
    const ONE: [&str; 4] = ["--pass", "inject", "--max-openings", "1"];
    let Some((node, supervisor, server)) = supervised("read") else { return };
    let shim = node.launch("a", &ONE);
    shim.until("a link", |status| status.instances.iter().any(|known| known.injected));
    shim.until_joined();
    let mut clients = [(); 3].map(|()| client_with_hello(node.listen));
    supervisor.prints("read ");
    let gate = |status: &Status| status.gate.as_ref().map(|gate| (gate.openings, gate.waiting));
    shim.until("two wait for their turn", |status| gate(status) == Some((1, 2)));
    assert_eq!(supervisor.out().matches("read ").count(), 1);
    // An instance that answers gets one after the other.
    let (_other, _) = node.injected("b", "inject", "");
    kill(server, Signal::SIGKILL).unwrap();
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64));
    }
    shim.until("no slot is taken", |status| status.gate.as_ref().is_some_and(|gate| gate.openings == 0));
}

#[test]
fn an_instance_without_a_supervisor_is_relayed_to_and_the_reason_is_told() {
    let node = Node::new();
    let (_instance, _) = node.injected("a", "relay", "");
    for pass in ["auto", "inject"] {
        let shim = shim(&node, pass, 0);
        shim.running.logs("its clients are relayed: its `berth exec` runs without --pass inject");
        let own = shim.status().instances.remove(0);
        assert!(own.relayed.is_some_and(|why| why.starts_with("its `berth exec` runs without")));
        has_all(&node.asked(&["status"]).1, &["clients are relayed: its `berth exec` runs without"]);
        drop(served_client(node.listen));
        shim.leave();
    }
}
