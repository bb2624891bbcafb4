//! Ends of a shim, an instance or its supervisor, and the consequences for clients. `berth exec
//! --pass inject` passes the sockets of these clients to instances. Some tests also run with a
//! relay, either because clients must see no difference, or as the control.

use super::node::{Node, Shim, freeze_process};
use crate::stand_in::{API, BROKEN, EMULATES, SILENT};
use crate::support::net::{
    client_hello, client_with_hello, connect, expect_end, expect_reset, ping, read, relayed_client,
    reset_stream, served_client,
};
use crate::support::process::{Running, can_inject, has_all};
use crate::support::tls::Ca;
use crate::support::{eventually, too_busy};
use berth_node::ipc::wire::Status;
use berth_node::terms::InstanceHealth;
use berth_testing::issue_certificate;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Values of `--pass`, and the number of instances that get sockets with each value.
const WAYS: [(&str, usize); 2] = [("relay", 0), ("inject", 1)];

/// Returns a node, and an instance that gets clients by the given way. `None` if this machine
/// cannot pass sockets: the test is skipped.
fn supervised_by(pass: &str, silent: &str) -> Option<(Node, Running, Pid)> {
    let node = Node::new();
    let (supervisor, server) =
        can_inject().then(|| node.injected("a", pass, &[(SILENT, silent)]))?;
    Some((node, supervisor, server))
}

fn start_supervised(silent: &str) -> Option<(Node, Running, Pid)> {
    supervised_by("inject", silent)
}

/// Starts a shim of instance a, and waits until the shim has joined and has links to the given
/// number of instances.
fn start_shim(node: &Node, pass: &str, instances: usize) -> Shim {
    let shim = node.launch("a", &["--pass", pass]);
    shim.until_joined();
    shim.until("links", |status| count_links(status) == instances);
    shim
}

/// Returns the number of instances that get clients' sockets.
fn count_links(status: &Status) -> usize {
    let known = status.instances.iter();
    known.filter(|known| known.injected).count()
}

fn count_injected(shim: &Shim) -> u64 {
    shim.metric("berth_connections_total", &[("outcome", "injected")])
}

/// Returns the client's address as the instance sees it.
fn address_seen_by_instance(client: &mut TcpStream) -> String {
    client.write_all(b"who").unwrap();
    let expected = client.local_addr().unwrap().to_string();
    String::from_utf8(read(client, expected.len())).unwrap()
}

#[test]
fn the_end_of_a_shim_cuts_no_client() {
    // The control: a killed shim cuts each relayed client.
    let Some((node, _instance, _)) = supervised_by("relay", "") else {
        return;
    };
    let mut relays = start_shim(&node, "inject", 0);
    let mut clients: Vec<_> = (0..20).map(|_| served_client(node.listen)).collect();
    relays.running.kill();
    for client in &mut clients {
        let cut = client.read(&mut [0]).map_err(|error| error.kind());
        assert!(
            matches!(cut, Ok(0) | Err(ErrorKind::ConnectionReset)),
            "{cut:?}"
        );
    }

    let Some((node, _supervisor, _)) = start_supervised("") else {
        return;
    };
    let mut first = start_shim(&node, "inject", 1);
    let mut clients: Vec<_> = (0..20).map(|_| served_client(node.listen)).collect();
    eventually("20 clients of the instance alone", || {
        (count_injected(&first) == 20).then_some(())
    });
    first.until("20 open sockets that were passed", |status| {
        (status.connections_open, status.connections_injected) == (0, 20)
    });
    let line = "the apiserver gets clients' sockets; 20 of these connections are open";
    has_all(&node.ask_shims(&["status"]).1, &[line]);
    first.running.kill();
    for client in &mut clients {
        assert_eq!(
            address_seen_by_instance(client),
            client.local_addr().unwrap().to_string()
        );
    }
    let second = start_shim(&node, "auto", 1);
    let mut client = connect(node.listen);
    assert_eq!(
        address_seen_by_instance(&mut client),
        client.local_addr().unwrap().to_string()
    );
    eventually("a client of the instance alone", || {
        (count_injected(&second) == 1).then_some(())
    });
    // A leaving shim cuts no client.
    second.leave();
    clients
        .iter_mut()
        .chain([&mut client])
        .for_each(|client| ping(client, b"still there"));
}

/// An instance ends before it has answered. There are three cases: the instance has not accepted
/// its clients, has accepted them and read nothing, or has read a ClientHello.
#[test]
fn a_client_without_an_answer_is_served_by_the_next_instance() {
    for silent in ["stopped", "accepted", "read"] {
        for supervisor_ends in [false, true] {
            let Some((node, supervisor, server)) = start_supervised(silent) else {
                return;
            };
            // Wait for the second instance before clients come. An instance keeps its clients if it
            // has not answered for 10 s.
            let (_other, _) = node.injected("b", "inject", &[]);
            let shim = start_shim(&node, "inject", 2);
            shim.until("the other instance", |status| {
                status
                    .instances
                    .iter()
                    .any(|known| !known.own && known.health.as_str() == "ready")
            });
            if silent == "stopped" {
                freeze_process(server);
            }
            let descriptors = || {
                std::fs::read_dir(format!("/proc/{}/fd", supervisor.pid()))
                    .unwrap()
                    .count()
            };
            let (before, began) = (descriptors(), Instant::now());
            let mut clients: Vec<_> = (0..5).map(|_| client_with_hello(node.listen)).collect();
            // The control: a request without TLS may have had an effect at the first instance, so
            // the shim must not replay it.
            let mut plain = connect(node.listen);
            plain.write_all(b"POST /once").unwrap();
            let line = format!("{silent} ");
            eventually("clients at the instance, or its supervisor", || {
                let told = supervisor
                    .out()
                    .lines()
                    .filter(|out| out.starts_with(&line))
                    .count();
                (told == 6 || silent == "stopped" && descriptors() >= before + 6).then_some(())
            });
            kill(
                if supervisor_ends {
                    supervisor.pid()
                } else {
                    server
                },
                Signal::SIGKILL,
            )
            .unwrap();
            if began.elapsed() > Duration::from_secs(9) {
                return too_busy("clients without an answer for 10 s");
            }
            for client in &mut clients {
                assert_eq!(
                    read(client, 64),
                    client_hello(64),
                    "{silent} {supervisor_ends}\n{}",
                    shim.running.log()
                );
                ping(client, b"and more");
            }
            // If the instance had read the ClientHello, the shim relays the client to the next
            // instance. In the case "stopped", the shim may relay a client that comes back while
            // the supervisor ends.
            let passed = match silent {
                "read" => {
                    expect_reset(&mut plain);
                    0..=0
                }
                "accepted" => {
                    assert_eq!(read(&mut plain, 10), b"POST /once");
                    6..=6
                }
                _ => 0..=6,
            };
            eventually("clients of the instance alone", || {
                passed.contains(&count_injected(&shim)).then_some(())
            });
            // In the case "stopped", the test counted the supervisor's descriptors, and some of
            // them may not be sockets of clients.
            let least = if silent == "stopped" { 1 } else { 5 };
            assert!(
                shim.metric("berth_replays_total", &[]) >= least,
                "{silent} {supervisor_ends}"
            );
        }
    }
}

/// An instance hangs before it has accepted its clients.
#[test]
fn clients_of_an_instance_that_hangs_are_recalled_for_another() {
    // Repeat the test if the shim noticed the hang before clients came, because then the run shows
    // nothing.
    while can_inject() && !clients_are_recalled() {}
}

/// Returns false if no client was sent to the hanging instance.
fn clients_are_recalled() -> bool {
    let Some((node, _supervisor, server)) = start_supervised("") else {
        return true;
    };
    let (_other, _) = node.injected("b", "inject", &[]);
    let shim = node.launch("a", &["--pass", "inject", "--probe-timeout", "500ms"]);
    shim.until("both get sockets", |status| count_links(status) == 2);
    shim.until_joined();
    freeze_process(server);
    // More clients than the shim has in transit at a time.
    let mut clients: Vec<_> = (0..80).map(|_| client_with_hello(node.listen)).collect();
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64), "{}", shim.running.log());
    }
    kill(server, Signal::SIGCONT).unwrap();
    clients
        .iter_mut()
        .for_each(|client| ping(client, b"still there"));
    shim.metric("berth_replays_total", &[]) > 0
}

/// A supervisor hangs, and clients that the shim sent stay in the supervisor's socket. When these
/// clients leave, no thread of the shim may wait for the supervisor.
#[test]
fn clients_that_leave_a_supervisor_that_hangs_disturb_no_other_client() {
    let Some((node, supervisor, _)) = start_supervised("") else {
        return;
    };
    let (_other, _) = node.injected("b", "inject", &[]);
    let shim = node.launch(
        "a",
        &[
            "--pass",
            "inject",
            "--probe-timeout",
            "500ms",
            "--threads",
            "1",
        ],
    );
    shim.until_joined();
    shim.until("both get sockets", |status| count_links(status) == 2);
    freeze_process(supervisor.pid());
    let clients: Vec<_> = (0..5).map(|_| client_with_hello(node.listen)).collect();
    shim.until("its clients wait", |status| {
        status
            .instances
            .iter()
            .any(|known| known.own && known.health.as_str() != "ready")
    });
    drop(clients);
    for _ in 0..5 {
        assert_eq!(
            read(&mut client_with_hello(node.listen), 64),
            client_hello(64),
            "{}",
            shim.running.log()
        );
    }
    kill(supervisor.pid(), Signal::SIGCONT).unwrap();
}

#[test]
fn a_handshake_has_its_slot_until_the_first_byte() {
    const ONE: [&str; 4] = ["--pass", "inject", "--max-openings", "1"];
    let Some((node, supervisor, server)) = start_supervised("read") else {
        return;
    };
    let shim = node.launch("a", &ONE);
    shim.until("a link", |status| {
        status.instances.iter().any(|known| known.injected)
    });
    shim.until_joined();
    // The second instance runs before a client is accepted, because a busy machine may take 10 s to
    // start it: then an accepted client without an answer is the first instance's alone.
    let (_other, _) = node.injected("b", "inject", &[]);
    let mut clients = [(); 3].map(|()| client_with_hello(node.listen));
    supervisor.prints("read ");
    shim.until("two wait for their turn", |status| {
        let gate = status.gate.as_ref();
        gate.is_some_and(|gate| (gate.openings, gate.waiting) == (1, 2))
    });
    assert_eq!(supervisor.out().matches("read ").count(), 1);
    // The clients go to the second instance one after another, because each waits for its turn.
    kill(server, Signal::SIGKILL).unwrap();
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64));
    }
    shim.until("no slot is taken", |status| {
        status.gate.as_ref().is_some_and(|gate| gate.openings == 0)
    });
}

#[test]
fn an_instance_without_a_supervisor_gets_relayed_clients_and_the_reason_is_logged() {
    let node = Node::new();
    let (_instance, _) = node.injected("a", "relay", &[]);
    for pass in ["auto", "inject"] {
        let shim = start_shim(&node, pass, 0);
        shim.running.logs(
            "the instance's clients are relayed: the instance's `berth exec` runs without --pass inject",
        );
        let own = shim.status().instances.remove(0);
        assert!(
            own.relayed
                .is_some_and(|why| why.starts_with("the instance's `berth exec` runs without"))
        );
        has_all(
            &node.ask_shims(&["status"]).1,
            &["clients are relayed: the instance's `berth exec` runs without"],
        );
        drop(served_client(node.listen));
        assert_eq!(count_injected(&shim), 0);
        shim.leave();
    }
}

/// When one end closes the connection, the other end sees a FIN. When one end resets the
/// connection, the other end sees an RST.
#[test]
fn each_end_sees_what_the_other_did() {
    for (pass, links) in WAYS {
        let Some((node, instance, _)) = supervised_by(pass, "") else {
            return;
        };
        let shim = start_shim(&node, "inject", links);
        let asks = |what: &[u8]| {
            let mut client = served_client(node.listen);
            client.write_all(what).unwrap();
            client
        };
        let asks_late = || {
            let mut client = served_client(node.listen);
            ping(&mut client, b"late");
            client
        };
        let mut client = asks_late();
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read(&mut client, 6), b"answer");
        expect_end(&mut client);
        instance.prints(r#"after "" the client has ended: Ok"#);

        let mut client = asks(b"end");
        expect_end(&mut client);
        client.write_all(b"more").unwrap();
        drop(client);
        instance.prints(r#"after "more" the client has ended: Ok"#);

        reset_stream(asks_late());
        instance.prints(r#"after "" the client has ended: Err(ConnectionReset)"#);
        expect_reset(&mut asks(b"reset"));
        eventually("all of them", || {
            (count_injected(&shim) == 4 * links as u64).then_some(())
        });
    }
}

/// An instance that was ready and does not answer its probe still gets clients. An instance that
/// was never ready gets no client by any way.
#[test]
fn a_failed_probe_keeps_an_instance_and_an_unready_one_gets_no_client() {
    let ca = Ca::new();
    for (pass, links) in WAYS {
        if !can_inject() {
            return;
        }
        let node = Node::new();
        let (certificate, key) = issue_certificate(&ca.0, &["kubernetes"]);
        for (name, text) in [("kube.crt", certificate), ("kube.key", key)] {
            std::fs::write(node.temp().join(name), text).unwrap();
        }
        let api = (API, node.temp().to_str().unwrap());
        let (_own, server) = node.injected("a", pass, &[api, (EMULATES, "1.35")]);
        let (_newborn, _) = node.injected("b", pass, &[api, (EMULATES, "1.36"), (BROKEN, "")]);
        let https = [
            "--pass",
            "inject",
            "--probe",
            "https",
            "--probe-insecure",
            "--probe-timeout",
            "500ms",
        ];
        let newborn = node.launch("b", &https);
        let shim = node.launch("a", &https);
        shim.until_joined();
        shim.until("links", |status| {
            status.instances.len() == 2 && count_links(status) == 2 * links
        });
        freeze_process(server);
        let failing = shim.until("it is failing", |status| status.fail_open);
        assert!(
            failing
                .instances
                .iter()
                .all(|known| known.own || known.health == InstanceHealth::Unready)
        );
        std::thread::scope(|scope| {
            let client = connect(node.listen);
            let answer = scope.spawn(|| ca.get(client, "/metrics"));
            shim.until("a client at the instance", |status| {
                status.connections_pending == 1 && status.held == 0
            });
            kill(server, Signal::SIGCONT).unwrap();
            has_all(
                &answer.join().unwrap(),
                &["HTTP/1.1 200", r#"emulation="1.35""#],
            );
        });
        eventually("the client", || {
            (count_injected(&shim) == links as u64).then_some(())
        });
        assert!(
            !newborn.running.log().contains("joined"),
            "{}",
            newborn.running.log()
        );
    }
}

/// The caller of a drain stops the apiserver next, so the drain also waits for connections that the
/// shim has passed to the instance.
#[test]
fn a_drain_waits_for_connections_passed_to_the_instance() {
    for (pass, links) in WAYS {
        let Some((node, _instance, _)) = supervised_by(pass, "") else {
            return;
        };
        let first = start_shim(&node, "inject", links);
        let (relayed, passed) = (relayed_client(node.listen), served_client(node.listen));
        eventually("one of the instance alone", || {
            (count_injected(&first) == links as u64).then_some(())
        });
        let drain =
            |wait: &str| node.ask_shims(&["drain", "--wait-streams", wait, "--instance", "a"]);
        assert_eq!(drain("0s").1.trim(), "2 connections are left");
        drop(relayed);
        eventually("the one that is passed", || {
            (drain("0s").1.trim() == "1 connections are left").then_some(())
        });
        drop(passed);
        let (code, out, log) = drain("1h");
        assert_eq!(code, Some(0), "{out}{log}");
    }
}
