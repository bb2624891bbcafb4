//! Connections that a leaving shim cannot serve any more, and passes to its sibling as sockets.

use super::node::{Echo, Node, Shim, know_one_another};
use crate::support::eventually;
use crate::support::net::{Backend, client_hello, client_with_hello, ping, queued_at, read};
use crate::support::process::{BERTH, passes_sockets};
use berth_node::ipc;
use nix::sys::signal::Signal;
use socket2::SockRef;
use std::net::TcpStream;
use std::path::Path;

/// With a relay, a shim connects to its sibling's instance only for connections that the sibling
/// does not take. With passed sockets, that instance gets the sockets directly.
const RELAY: [&str; 2] = ["--pass", "relay"];

/// Starts two shims of the given programs that have each other's guard, with options of each and
/// the time for which they hold clients. The instance of A accepts and never answers. The instance
/// of B echoes.
fn start_pair(
    [program_a, program_b]: [impl AsRef<Path>; 2],
    hold: &str,
    of_a: &[&str],
    of_b: &[&str],
) -> (Node, (Backend, Echo), Shim, Shim) {
    let (node, first, second) = (Node::new(), Backend::new(), Echo::new());
    SockRef::from(&first.0).listen(4096).unwrap();
    let options = ["--hold", hold, "--max-openings", "off"];
    node.install(program_a.as_ref());
    let a = node.joined(
        "a",
        first.address(),
        &[&options[..], &["--probe-interval", "1h"], of_a].concat(),
    );
    node.install(program_b.as_ref());
    let b = node.joined("b", second.address, &[&options[..], of_b].concat());
    know_one_another(&a, &b);
    (node, (first, second), a, b)
}

#[test]
fn clients_accepted_after_sigterm_outlive_the_shim() {
    let (node, (first, _second), mut a, b) =
        start_pair([BERTH; 2], "60s", &["--log-connections"], &[]);
    // A goes on accepting until B reports that it accepts from A's listener.
    b.freeze();
    a.running.signal(Signal::SIGTERM);
    a.running.logs("SIGTERM");
    let accepted = a.status().connections_total;
    let mut clients = connect_clients(&node, &a, accepted + 4, 4);
    // A offers the clients to B. B takes them after waking.
    b.running.signal(Signal::SIGCONT);
    drop(first);
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64));
    }
    a.running.ends(0);
    let outcome = if passes_sockets() {
        "outcome=\"injected\""
    } else {
        "outcome=\"passed\""
    };
    assert!(
        a.running.log().matches(outcome).count() >= 4,
        "{}",
        a.running.log()
    );
    for client in &mut clients {
        ping(client, b"still there");
    }
}

/// Most clients in a test. A shim that has not accepted the wanted number by then must not accept
/// yet.
const MOST: usize = 2_000;

/// Connects clients that send their ClientHello, in rows, until A has accepted the wanted number.
#[track_caller]
fn connect_clients(node: &Node, a: &Shim, wanted: u64, row: usize) -> Vec<TcpStream> {
    let mut clients = Vec::new();
    eventually("clients that A accepted", || {
        if a.status().connections_total >= wanted {
            return Some(());
        }
        let row = row.min(MOST - clients.len());
        clients.extend((0..row).map(|_| client_with_hello(node.listen)));
        None
    });
    clients
}

/// Checks that all clients are answered, that at least `passes` were passed and no pass failed, and
/// that the clients outlive A.
#[track_caller]
fn all_outlive(mut a: Shim, mut clients: Vec<TcpStream>, passes: u64) {
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64));
    }
    let failed = eventually("all passes to be counted", || {
        let (passed, failed) = (a.counted("pass", "ok"), a.counted("pass", "failed"));
        (passed + failed >= passes).then_some(failed)
    });
    assert_eq!(failed, 0, "not passed:\n{}", a.running.log());
    a.running.signal(Signal::SIGTERM);
    a.running.ends(0);
    for client in &mut clients {
        ping(client, b"still there");
    }
}

/// A shim passes all clients at one moment, and there are more clients than the queue of its
/// sibling's socket can hold. A client that is not passed would end with the leaving shim.
#[test]
fn many_at_once_outlive_the_shim() {
    many_at_once([BERTH; 2]);
}

/// Runs the test with shims of two programs.
#[track_caller]
pub(crate) fn many_at_once(programs: [impl AsRef<Path>; 2]) {
    const CLIENTS: u64 = 300;
    let (node, (first, _second), a, _b) =
        start_pair(programs, "60s", &["--drain-timeout", "1s"], &[]);
    let clients = connect_clients(&node, &a, CLIENTS, 50);
    drop(first);
    all_outlive(a, clients, CLIENTS);
}

/// A sibling that stalled beyond its lease finds the offer when it wakes. By then the first shim
/// serves the client, and the sibling must not: two relays on one socket would send every byte
/// twice.
#[test]
fn a_shim_without_an_answer_from_its_sibling_serves_the_client() {
    let (node, first, second) = (Node::new(), Echo::new(), Echo::new());
    // A shim waits for its sibling as long as it may hold a client.
    let a = node.joined(
        "a",
        first.address,
        &[&["--hold", "1s"], &RELAY[..]].concat(),
    );
    let [listener] = node.listeners()[..] else {
        panic!("one shim, and {:?}", node.listeners())
    };
    let b = node.joined("b", second.address, &[]);
    know_one_another(&a, &b);
    b.freeze();
    drop(first);
    let before = a.status().connections_total;
    let mut clients = connect_clients(&node, &a, before + 2, 1);
    let answered = |clients: &[TcpStream]| {
        clients.iter().position(|client| {
            client.set_nonblocking(true).unwrap();
            let there = client.peek(&mut [0; 64]).is_ok_and(|length| length == 64);
            client.set_nonblocking(false).unwrap();
            there
        })
    };
    let at = eventually("A to serve one by B's instance", || answered(&clients));
    // Wait until every offer has failed, because B may take a client that is still offered.
    eventually("A to wait no more", || {
        let none = queued_at(listener) == Some(0);
        let accepted = a.status().connections_total - before;
        (none && a.counted("pass", "failed") >= accepted).then_some(())
    });
    b.running.signal(Signal::SIGCONT);
    eventually("B to find that it is late", || {
        (b.counted("take", "late") >= 1).then_some(())
    });
    let client = &mut clients[at];
    assert_eq!(read(client, 64), client_hello(64));
    ping(client, b"once");
    assert_eq!(b.counted("take", "ok"), 0);
}

/// A sibling that has its maximum of connections declines the offer. The offering shim then serves
/// the connections itself, by relaying them to the sibling's instance.
#[test]
fn a_sibling_that_is_full_takes_no_connection() {
    const MOST: u64 = 5;
    let (node, (first, _second), a, b) = start_pair(
        [BERTH; 2],
        "60s",
        &RELAY,
        &["--max-connections", "5", "--pass", "relay"],
    );
    let mut clients = Vec::new();
    let of_a = eventually("clients of both, and B is full", || {
        let (of_a, of_b) = (a.status().connections_open, b.status().connections_open);
        if of_a >= 4 && of_b >= MOST {
            return Some(of_a);
        }
        clients.push(client_with_hello(node.listen));
        None
    });
    drop(first);
    // The other clients wait in B's backlog.
    for client in &clients {
        client.set_nonblocking(true).unwrap();
    }
    eventually("an answer for all that were accepted", || {
        let answered = clients
            .iter()
            .filter(|client| client.peek(&mut [0; 64]).is_ok_and(|length| length == 64));
        // A may have accepted some of its clients only now.
        (answered.count() as u64 == a.status().connections_open + MOST).then_some(())
    });
    assert_eq!(
        (b.status().connections_open, b.counted("take", "ok")),
        (MOST, 0)
    );
    assert!(b.counted("take", "full") >= of_a, "{}", b.running.log());
}

/// A sibling hangs for less than its lease. The leaving shim holds all clients, whether it has
/// offered them or not, until the sibling answers. If the shim relayed a client to the sibling's
/// instance, the client would end with the shim.
#[test]
fn a_shim_waits_for_a_sibling_that_hangs_as_long_as_its_lease_holds() {
    const CLIENTS: u64 = 60;
    let (node, (first, _second), a, b) =
        start_pair([BERTH; 2], "60s", &["--drain-timeout", "1s"], &[]);
    let clients = connect_clients(&node, &a, CLIENTS, 10);
    b.freeze();
    drop(first);
    // Wait for longer than commands wait for an answer of a shim.
    let until = std::time::Instant::now() + ipc::PATIENCE * 3 / 2;
    while std::time::Instant::now() < until {
        assert_eq!(
            a.counted("pass", "failed"),
            0,
            "not waited for:\n{}",
            a.running.log()
        );
    }
    b.running.signal(Signal::SIGCONT);
    all_outlive(a, clients, CLIENTS);
}

/// A sibling hangs for longer than its lease. Its instance serves the clients as soon as the lease
/// has expired.
#[test]
fn a_shim_does_not_wait_for_a_sibling_with_an_expired_lease() {
    // With a long hold, only the end of the lease lets clients be served within this test.
    let (node, (first, _second), a, b) =
        start_pair([BERTH; 2], "1h", &["--lease", "6s"], &["--lease", "6s"]);
    let _clients = connect_clients(&node, &a, 40, 10);
    let accepted = a.status().connections_total;
    b.freeze();
    drop(first);
    eventually("A to wait no more", || {
        (a.counted("pass", "failed") >= accepted).then_some(())
    });
}
