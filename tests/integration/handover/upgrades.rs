//! Consecutive upgrades.

use super::node::{ACCEPTS, Echo, Node, Shim, number};
use crate::support::eventually;
use crate::support::load;
use crate::support::net::{
    client_hello, client_with_hello, ping, queued_at, read, relayed_client, served_client,
};
use crate::support::process::{BERTH, passes_sockets};
use berth_node::terms::Phase;
use berth_os::socket;
use nix::sys::signal::Signal;
use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

const CLIENTS: u32 = 128;

/// Together 6,400 connections a second.
const PERIOD: Duration = Duration::from_millis(20);

/// This many clients are in the queue of a listener when its owner closes it.
const QUEUED: u64 = 32;

/// No renewal comes while a relaying thread is stopped: the shim would be one that hangs. Nor does a client's turn at the gate, which is
/// waited for 15 s at most: nobody lines up.
const OPTIONS: &[&str] = &[
    "--lease",
    "10m",
    "--threads",
    "1",
    "--max-openings",
    "10000",
];

/// Clients that send something, until [`QUEUED`] wait at each of these listeners. The shims that accept from them are stopped.
#[track_caller]
fn clients(berth: SocketAddr, listeners: &[u64]) -> Vec<TcpStream> {
    let mut clients = Vec::new();
    while !listeners
        .iter()
        .all(|listener| queued_at(*listener) >= Some(QUEUED))
    {
        assert!(
            clients.len() < 1000,
            "too few of {} clients wait",
            clients.len()
        );
        clients.push(client_with_hello(berth));
    }
    clients
}

/// Asks a shim to leave, and stops its accepting thread and its sibling's in such a way that it closes its listener
/// with [`QUEUED`] clients in the queue, which only its sibling can take out; all of them must be served. Returns whether
/// it took out none of them itself: it does if it does not know yet that its sibling accepts.
#[track_caller]
fn switch(node: &Node, shim: &Shim, next: &Shim) -> bool {
    let listeners = node.listeners();
    assert_eq!(listeners.len(), 2, "one of each");
    let [leaving, staying] = [shim, next].map(|shim| shim.stop(ACCEPTS));
    let mut waiting = clients(node.listen, &listeners);
    drop(staying);
    let before = shim.status().connections_total;
    shim.running.signal(Signal::SIGTERM);
    eventually("a sibling that accepts from both listeners", || {
        listeners
            .iter()
            .all(|listener| queued_at(*listener) < Some(QUEUED))
            .then_some(())
    });
    let staying = next.stop(ACCEPTS);
    waiting.extend(clients(node.listen, &listeners));
    drop(leaving);
    let took = shim
        .until("left", |status| status.state == Phase::Left)
        .connections_total
        - before;
    drop(staying);
    for client in &mut waiting {
        assert_eq!(read(client, 64), client_hello(64));
    }
    took == 0
}

#[test]
fn consecutive_upgrades_lose_nothing() {
    upgrades(&[Path::new(BERTH)], number("BERTH_UPGRADES", 10));
}

/// Each upgrade is between two shims alone, under load, and to the next of these programs in turn. At least so many are shown to
/// depend on the sibling, from each of the programs as many.
#[track_caller]
pub(crate) fn upgrades(programs: &[&Path], times: usize) {
    let migrate = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req").unwrap_or_default();
    assert_ne!(
        migrate.trim(),
        "1",
        "with net.ipv4.tcp_migrate_req=1 the kernel does it: nothing is shown"
    );

    let node = Node::new();
    node.install(programs[0]);
    // Not one goes before the end: to wait for it is to read a table of all sockets, and the load is there.
    let mut instances = vec![Echo::new()];
    let mut shim = node.joined("i0", instances[0].address, OPTIONS);
    let (mut certain, mut switches, mut passed) = (vec![0; programs.len()], 0, 0);
    // The first shim is alone, so these clients are its own; each of the next gets two of its own when it is alone.
    let clients = || (relayed_client(node.listen), served_client(node.listen));
    let (mut relayed, mut served) = clients();
    let load = load::start(node.listen, CLIENTS, PERIOD);
    load.more(100);
    while certain
        .iter()
        .any(|certain| certain * programs.len() < times)
    {
        assert!(
            switches < 10 * times,
            "{certain:?} of {switches} upgrades count"
        );
        let from = switches % programs.len();
        switches += 1;
        node.install(programs[switches % programs.len()]);
        let instance = Echo::new();
        let next = node.joined(&format!("i{switches}"), instance.address, OPTIONS);
        instances.push(instance);
        certain[from] += usize::from(switch(&node, &shim, &next));
        passed += shim.metric("berth_connections_total", &[("outcome", "injected")]);
        // It lived as long as its client.
        ping(&mut relayed, b"still there");
        ping(&mut served, b"still there");
        (relayed, served) = clients();
        shim.running.ends(0);
        load.more(100);
        shim = next;
    }
    let record = load.end();
    println!(
        "{switches} upgrades, {certain:?} with {QUEUED} clients in the queue: {} connections, slowest {:?}, lost: {}",
        record.begun.len(),
        record.slowest,
        record.kinds()
    );
    if !record.nothing_lost(&shim.running.log()) {
        return;
    }
    assert_eq!(record.begun.len(), record.served as usize);
    assert_eq!(passed > 0, passes_sockets(), "{passed} sockets were passed");

    let (queued, lost) = plain_close();
    println!("control, plain close: {lost} of {queued} in the queue lost");
    assert_eq!(
        lost, queued,
        "the test proves nothing: closing plainly lost {lost} of {queued} in the queue"
    );
}

/// The control: a listener that is closed with clients in its queue, while another one of the port listens on. Returns how many
/// were in the queue, and how many were lost.
fn plain_close() -> (u64, u64) {
    let listener = |address| {
        let listener = socket::bind(address, false).unwrap();
        socket::start_listening(listener.as_fd(), 1000).unwrap();
        listener
    };
    let closed = listener((Ipv4Addr::LOCALHOST, 0).into());
    let address = socket::local_address(closed.as_fd()).unwrap();
    let _stays = listener(address);
    let inode = socket::inode(closed.as_fd()).unwrap();
    let mut clients = clients(address, &[inode]);
    let queued = queued_at(inode).unwrap();
    drop(closed);
    // The child of another test has a duplicate of it until execve.
    eventually("a listener that is closed", || {
        queued_at(inode).is_none().then_some(())
    });
    // Nothing accepts the others.
    let is_lost = |client: &mut TcpStream| {
        client.set_nonblocking(true).unwrap();
        client
            .read(&mut [0])
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
    };
    (
        queued,
        clients
            .iter_mut()
            .filter_map(|client| is_lost(client).then_some(()))
            .count() as u64,
    )
}

#[test]
fn upgrades_leave_no_listeners_behind() {
    let node = Node::new();
    let instance = Echo::new();
    let mut shim = node.joined("i0", instance.address, &[]);
    let mut counts = Vec::new();
    for time in 1..=number("BERTH_LISTENER_UPGRADES", 10) {
        let next = node.joined(&format!("i{time}"), instance.address, &[]);
        std::mem::replace(&mut shim, next).leave();
        counts.push(node.listeners().len());
    }
    assert_eq!(counts.last(), counts.get(1), "{counts:?}");
    assert!(
        counts.iter().all(|count| *count <= 2),
        "never more than two shims were alive: {counts:?}"
    );
}
