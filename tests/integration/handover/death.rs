//! A sibling that crashes or hangs.

use super::node::{Echo, LEASE, Node, Shim, know_one_another, read_number};
use crate::support::load::{self, Load};
use crate::support::net::{
    client_hello, client_with_hello, connect, expect_service, ping, queued_at, read, relayed_client,
};
use crate::support::{MOMENT, eventually};
use berth_node::terms::Phase;
use berth_os::explained;
use nix::sys::signal::Signal;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Starts two shims of an instance with their leases, waits until each holds the other's guard, and
/// returns the shims with the listener of the first.
fn start_two(
    node: &Node,
    instance: SocketAddr,
    leases: [&str; 2],
    options: &[&str],
) -> (Shim, Shim, u64) {
    let join =
        |id: &str, lease: &str| node.joined(id, instance, &[&["--lease", lease], options].concat());
    let a = join("a", leases[0]);
    let [listener] = node.listeners()[..] else {
        panic!("one shim, and {:?}", node.listeners())
    };
    let b = join("b", leases[1]);
    eventually("two listeners", || {
        (node.listeners().len() == 2).then_some(())
    });
    know_one_another(&a, &b);
    (a, b, listener)
}

#[test]
fn a_crash_loses_what_was_accepted_and_nothing_that_was_queued() {
    let (mut queued_in_all, mut lost_in_all, mut accepted_in_all) = (0, 0, 0);
    for _ in 0..read_number("BERTH_CRASHES", 5) {
        let (node, instance) = (Node::new(), Echo::new());
        // The lease must not expire: the end of the process must cause the takeover.
        let (mut a, b, listener) = start_two(&node, instance.address, [LEASE; 2], &[]);
        let mut kept: Vec<_> = (0..16).map(|_| connect(node.listen)).collect();
        for client in &mut kept {
            ping(client, &client_hello(64));
        }
        let accepted = a.status().connections_open;
        a.freeze();
        let mut clients: Vec<TcpStream> = Vec::new();
        while queued_at(listener) <= Some(20) {
            assert!(
                clients.len() < 1000,
                "nothing is queued: {:?}\n{}",
                queued_at(listener),
                b.running.log()
            );
            clients.push(client_with_hello(node.listen));
        }
        let queued = queued_at(listener).unwrap();
        a.running.kill();
        for client in &mut clients {
            assert_eq!(read(client, 64), client_hello(64));
        }
        let fails = |client: &mut TcpStream| {
            client.write_all(&client_hello(64)).is_err() || client.read_exact(&mut [0; 64]).is_err()
        };
        let lost = kept
            .iter_mut()
            .filter_map(|client| fails(client).then_some(()))
            .count() as u64;
        assert!(lost <= accepted, "{lost} lost, {accepted} accepted");
        for _ in 0..50 {
            expect_service(node.listen);
        }
        queued_in_all += queued;
        lost_in_all += lost;
        accepted_in_all += accepted;
    }
    println!("queued {queued_in_all}, all served; accepted {accepted_in_all}, lost {lost_in_all}");
}

/// A shim that starts after the death of another shim has never had a message from the dead shim.
/// The dead shim's lease has not expired. The new shim must join nevertheless, and serve alone when
/// the remaining older shim dies, too. With `BERTH_KILLS`, the deaths are 1 to 3 s apart. The test
/// prints the longest time without an answer, for clients of the shims and for clients that dial
/// the instance.
#[test]
fn consecutive_deaths_leave_no_client_waiting_for_a_lease() {
    const CLIENTS: u32 = 32;
    let kills = read_number("BERTH_KILLS", 3);
    let apart = |nth: usize| Duration::from_millis(1000 + 700 * nth as u64 % 2000);
    let (node, instance) = (Node::new(), Echo::new());
    let (a, b, _) = start_two(&node, instance.address, [LEASE; 2], &[]);
    let mut shims = std::collections::VecDeque::from([a, b]);
    let clients = [node.listen, instance.address]
        .map(|to| Load::start(CLIENTS, None, move |source| load::exchange(source, to)));
    for nth in 0..kills {
        clients[0].more(100);
        let mut killed = shims.pop_front().unwrap();
        killed.running.kill();
        shims.push_back(node.joined(&format!("c{nth}"), instance.address, &[]));
        if std::env::var_os("BERTH_KILLS").is_some() {
            std::thread::sleep(apart(nth));
        }
    }
    clients[0].more(100);
    let [through, past] = clients.map(Load::end);
    println!(
        "{kills} kills: {} served, lost {}; longest without an answer {:?}, past the shims {:?}",
        through.served,
        through.kinds(),
        through.gap,
        past.gap
    );
    // Only connections that the dead shim had accepted may be lost.
    let accepted = through
        .lost
        .keys()
        .all(|kind| kind.starts_with("read") || kind.starts_with("write"));
    assert!(
        accepted && through.lost() <= kills * CLIENTS as usize,
        "{}",
        through.kinds()
    );
    through.is_conclusive();
    past.expect_no_loss("");
}

/// Checks that a number of clients, connecting one by one, gets answers.
#[track_caller]
fn expect_flow(node: &Node, number: usize) {
    for _ in 0..number {
        expect_service(node.listen);
    }
}

/// A relaying thread hangs, and the other threads of the shim run. The lease must expire, although
/// the control thread could renew it.
#[test]
fn one_thread_that_hangs_expires_the_lease_too() {
    let (node, instance) = (Node::new(), Echo::new());
    let (a, b, _) = start_two(&node, instance.address, ["1s", LEASE], &["--threads", "2"]);
    // The stopped thread does not accept connections. If the accepting thread hung, connections in
    // the queue would wait.
    let stopped = a.stop("berth-relay-1");
    a.running.logs(explained::THREAD_HANGS);
    a.until("left", |status| status.state == Phase::Left);
    let before = b.status().connections_total;
    expect_flow(&node, 100);
    assert!(
        b.status().connections_total >= before + 100,
        "all of them are B's"
    );
    drop(stopped);
    a.running.logs("every relaying thread answers again");
    a.until_joined();
    expect_flow(&node, 100);
    assert_eq!(node.listeners().len(), 2);
}

/// While a shim hangs, its sibling takes over the waiting clients. The tests of `handover/machine`
/// show in virtual time that the takeover takes one lease at most. This test only prints the time.
#[test]
fn a_hang_makes_clients_wait_for_one_lease_at_most() {
    let (node, instance) = (Node::new(), Echo::new());
    // B's lease must be short, too: B regards A as alive for the length of B's own lease after its
    // last connection to A.
    let (a, b, listener) = start_two(&node, instance.address, ["1s", "2s"], &[]);
    // Try again if A had left before the test stopped A. With a short lease, A leaves as soon as
    // one of its threads does not run for a moment.
    let (before, accepted, frozen, mut waiting) = eventually("clients that wait for A", || {
        a.until_joined();
        let (before, accepted) = (b.status().connections_total, b.counted("accept", "ok"));
        a.freeze();
        let frozen = Instant::now();
        let clients: Vec<_> = (0..64).map(|_| client_with_hello(node.listen)).collect();
        if queued_at(listener) >= Some(8) {
            return Some((before, accepted, frozen, clients));
        }
        a.running.signal(Signal::SIGCONT);
        None
    });
    for client in &mut waiting {
        assert_eq!(read(client, 64), client_hello(64));
    }
    let longest = frozen.elapsed();
    expect_flow(&node, 100);
    let until = frozen + Duration::from_secs(read_number("BERTH_HANG_SECONDS", 0) as u64);
    while Instant::now() < until {
        expect_flow(&node, 20);
    }
    assert_eq!(queued_at(listener), Some(0));
    assert!(
        b.counted("accept", "ok") > accepted,
        "B accepts from A's listener"
    );
    let served = b.status().connections_total - before;
    assert!(
        served >= waiting.len() as u64 + 100,
        "all of them are B's, not {served}"
    );
    a.running.signal(Signal::SIGCONT);
    a.running
        .logs("stalled beyond its lease: siblings that did not stall accepted");
    println!("a hang: a client waited for {longest:?} at most");
    let before = [&a, &b].map(|shim| shim.status().connections_total);
    expect_flow(&node, 200);
    eventually("both serve", || {
        expect_flow(&node, 10);
        let now = [&a, &b].map(|shim| shim.status().connections_total);
        (now[0] > before[0] && now[1] > before[1]).then_some(())
    });
    a.until_joined();
    b.until_joined();
    assert_eq!(node.listeners().len(), 2);
}

/// No other shim could serve the clients while the shim hung, so the clients waited.
#[test]
fn a_lone_shim_that_hung_reports_no_sibling() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined("a", instance.address, &["--lease", "300ms"]);
    shim.freeze();
    std::thread::sleep(2 * MOMENT);
    shim.running.signal(Signal::SIGCONT);
    let warned = shim.running.logs(explained::STALLED);
    assert!(warned.contains("no sibling was there"), "{warned}");
}

/// A shim that has left stays until its last connection ends, and holds guards of all listeners.
/// When the last sibling dies, no other process accepts from these listeners. If the shim did not
/// accept again, queued connections would wait until its end.
#[test]
fn a_shim_that_has_left_serves_queued_clients_when_the_last_sibling_dies() {
    let (node, instance) = (Node::new(), Echo::new());
    let (mut a, mut b, _) = start_two(&node, instance.address, [LEASE; 2], &[]);
    let mut last = eventually("a client of A", || {
        let client = relayed_client(node.listen);
        (a.status().connections_open > 0).then_some(client)
    });
    a.running.signal(Signal::SIGTERM);
    a.until("left", |status| status.state == Phase::Left);
    b.freeze();
    let mut clients: Vec<_> = (0..16).map(|_| client_with_hello(node.listen)).collect();
    b.running.kill();
    for client in &mut clients {
        assert_eq!(read(client, 64), client_hello(64));
    }
    eventually("no listener", || node.listeners().is_empty().then_some(()));
    ping(&mut last, b"still there");
    drop((last, clients));
    a.running.ends(0);
}
