//! A sibling that crashes or hangs.

use super::node::{Echo, Node, Shim, alone, number};
use super::support::eventually;
use super::support::net::{client_hello, connect, ping, queued_at, read};
use berth_node::terms::Phase;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time that a machine may need beside what is measured.
const SLACK: Duration = Duration::from_millis(700);

/// Two shims that hold one another's guards, and the listener of the first.
fn two(node: &Node, backends: [SocketAddr; 2], options: &[&str]) -> (Shim, Shim, u64) {
    let a = node.joined("a", backends[0], options);
    let [listener] = node.listeners()[..] else { panic!("one shim, and {:?}", node.listeners()) };
    let b = node.joined("b", backends[1], options);
    eventually("two listeners", || (node.listeners().len() == 2).then_some(()));
    a.until_counted("guard", 1);
    b.until_counted("guard", 1);
    (a, b, listener)
}

#[test]
fn a_crash_loses_what_was_accepted_and_nothing_that_was_queued() {
    let _alone = alone();
    let (mut queued_in_all, mut lost_in_all, mut accepted_in_all) = (0, 0, 0);
    for _ in 0..number("BERTH_CRASHES", 5) {
        let (node, instance) = (Node::new(), Echo::new());
        // The lease must not run out: it is the end of the process that hands over.
        let (mut a, b, listener) = two(&node, [instance.address; 2], &["--lease", "60s"]);
        let mut served: Vec<_> = (0..16).map(|_| connect(node.listen)).collect();
        for client in &mut served {
            ping(client, &client_hello(64));
        }
        let accepted = a.status().connections_open;
        a.freeze();
        let mut clients: Vec<TcpStream> = Vec::new();
        while queued_at(listener) <= Some(20) {
            assert!(clients.len() < 1000, "nothing is queued: {:?}\n{}", queued_at(listener), b.running.log());
            let mut client = connect(node.listen);
            client.write_all(&client_hello(64)).unwrap();
            clients.push(client);
        }
        let queued = queued_at(listener).unwrap();
        a.running.signal(Signal::SIGKILL);
        a.running.ended();
        for client in &mut clients {
            assert_eq!(read(client, 64), client_hello(64));
        }
        let fails = |client: &mut TcpStream| {
            client.write_all(&client_hello(64)).is_err() || client.read_exact(&mut [0; 64]).is_err()
        };
        let lost = served.iter_mut().filter_map(|client| fails(client).then_some(())).count() as u64;
        assert!(lost <= accepted, "{lost} lost, {accepted} accepted");
        for _ in 0..50 {
            ping(&mut connect(node.listen), &client_hello(64));
        }
        queued_in_all += queued;
        lost_in_all += lost;
        accepted_in_all += accepted;
    }
    println!("queued {queued_in_all}, all served; accepted {accepted_in_all}, lost {lost_in_all}");
}

/// Connects and exchanges; how long it took.
fn exchange(node: &Node) -> Duration {
    let begun = Instant::now();
    ping(&mut connect(node.listen), &client_hello(64));
    begun.elapsed()
}

/// No connection that is begun now waits.
#[track_caller]
fn flows(node: &Node, number: usize) {
    for _ in 0..number {
        let took = exchange(node);
        assert!(took < SLACK, "a connection took {took:?}");
    }
}

/// The rest of the shim goes on, so a lease that only its control thread renewed would tell nothing.
#[test]
fn one_thread_that_hangs_expires_the_lease_too() {
    let _alone = alone();
    let (node, instance) = (Node::new(), Echo::new());
    let (a, b, _) = two(&node, [instance.address; 2], &["--lease", "1s", "--threads", "2"]);
    // Not the one that accepts: what is distributed to the other would wait.
    let thread = eventually("the second relaying thread", || a.thread("berth-relay-1"));
    ptrace::seize(thread, ptrace::Options::empty()).unwrap();
    ptrace::interrupt(thread).unwrap();
    waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
    a.running.logs("a relaying thread does not answer");
    a.until("left", |status| status.state == Phase::Left);
    let before = b.status().connections_total;
    flows(&node, 100);
    assert!(b.status().connections_total >= before + 100, "all of them are B's");
    ptrace::detach(thread, None).unwrap();
    a.running.logs("every relaying thread answers again");
    a.until_joined();
    flows(&node, 100);
    assert_eq!(node.listeners().len(), 2);
}

#[test]
fn a_hang_makes_clients_wait_for_one_lease_at_most() {
    let _alone = alone();
    let lease = Duration::from_secs(1);
    let (node, instance) = (Node::new(), Echo::new());
    let (a, b, listener) = two(&node, [instance.address; 2], &["--lease", "1s"]);
    a.freeze();
    let frozen = Instant::now();
    // The first that waits; it waits for the rest of the lease.
    let mut longest = Duration::ZERO;
    while frozen.elapsed() < lease + SLACK {
        longest = longest.max(exchange(&node));
    }
    assert!(longest < lease + SLACK, "a client waited {longest:?}");
    let until = frozen + Duration::from_secs(number("BERTH_HANG_SECONDS", 3) as u64);
    while Instant::now() < until {
        flows(&node, 20);
    }
    assert_eq!(queued_at(listener), Some(0));
    a.running.signal(Signal::SIGCONT);
    a.running.logs("stalled beyond its lease");
    println!("a hang: a client waited for {longest:?} at most");
    let before = [&a, &b].map(|shim| shim.status().connections_total);
    flows(&node, 200);
    eventually("both serve", || {
        flows(&node, 10);
        let now = [&a, &b].map(|shim| shim.status().connections_total);
        (now[0] > before[0] && now[1] > before[1]).then_some(())
    });
    a.until_joined();
    b.until_joined();
    assert_eq!(node.listeners().len(), 2);
}
