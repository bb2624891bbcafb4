//! Consecutive upgrades.

use super::node::{ACCEPTS, Echo, Node, Shim, read_number};
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

/// Period of a client: all clients together begin 6,400 connections a second.
const PERIOD: Duration = Duration::from_millis(20);

/// Number of clients in the queue of a listener when its owner closes it.
const QUEUED: u64 = 32;

/// The lease is long, because a shim with a stopped relaying thread does not renew its lease and
/// would count as hanging. The gate is wide open, because a client waits for its turn at a gate for
/// 15 s at most.
const OPTIONS: &[&str] = &[
    "--lease",
    "10m",
    "--threads",
    "1",
    "--max-openings",
    "10000",
];

/// Connects clients that send something, until [`QUEUED`] wait at each of the listeners. The
/// accepting threads of the shims are stopped.
#[track_caller]
fn queue_clients(berth: SocketAddr, listeners: &[u64]) -> Vec<TcpStream> {
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

/// Asks a shim to leave, and stops the accepting threads of both shims, so that the shim closes its
/// listener with [`QUEUED`] clients in the queue. Only the sibling can accept these clients, and
/// each client must be served. Returns true if the leaving shim accepted none of these clients,
/// because it already knew that the sibling accepts.
#[track_caller]
fn switch_shims(node: &Node, shim: &Shim, next: &Shim) -> bool {
    let listeners = node.listeners();
    assert_eq!(listeners.len(), 2, "one of each");
    let [leaving, staying] = [shim, next].map(|shim| shim.stop(ACCEPTS));
    let mut waiting = queue_clients(node.listen, &listeners);
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
    waiting.extend(queue_clients(node.listen, &listeners));
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
    run_upgrades(&[Path::new(BERTH)], read_number("BERTH_UPGRADES", 10));
}

/// Makes at least `times` upgrades under load. Each upgrade replaces a shim by a shim of the next
/// program in turn. For each program, a minimum number of upgrades must count: those in which only
/// the sibling could accept the queued clients.
#[track_caller]
pub(crate) fn run_upgrades(programs: &[&Path], times: usize) {
    let migrate = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req").unwrap_or_default();
    assert_ne!(
        migrate.trim(),
        "1",
        "with net.ipv4.tcp_migrate_req=1 the kernel does it: nothing is shown"
    );

    let node = Node::new();
    node.install(programs[0]);
    // Instances stay until the end of the test, because waiting for the end of an instance would
    // mean reading a table of all sockets, of which the load has very many.
    let mut instances = vec![Echo::new()];
    let mut shim = node.joined("i0", instances[0].address, OPTIONS);
    let (mut certain, mut switches, mut passed) = (vec![0; programs.len()], 0, 0);
    // The first shim is the only shim, so it accepts these two clients. Each later shim gets two
    // clients, too, as soon as it is the only shim.
    let clients = || (relayed_client(node.listen), served_client(node.listen));
    let (mut relayed, mut served) = clients();
    let load = load::start_load(node.listen, CLIENTS, PERIOD);
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
        certain[from] += usize::from(switch_shims(&node, &shim, &next));
        passed += shim.metric("berth_connections_total", &[("outcome", "injected")]);
        // The old shim must have lived until now, because its client is still connected.
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
    if !record.expect_no_loss(&shim.running.log()) {
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

/// The control: closes a listener with clients in its queue, while another listener of the port
/// stays open. Returns the number of clients in the queue, and of lost clients.
fn plain_close() -> (u64, u64) {
    let listener = |address| {
        let listener = socket::bind(address, false).unwrap();
        socket::start_listening(listener.as_fd(), 1000).unwrap();
        listener
    };
    let closed = listener((Ipv4Addr::LOCALHOST, 0).into());
    let address = socket::local_address(closed.as_fd()).unwrap();
    let _stays = listener(address);
    let inode = socket::read_inode(closed.as_fd()).unwrap();
    let mut clients = queue_clients(address, &[inode]);
    let queued = queued_at(inode).unwrap();
    drop(closed);
    // A child that another test has just forked may hold a duplicate of the listener until its
    // execve.
    eventually("a listener that is closed", || {
        queued_at(inode).is_none().then_some(())
    });
    // Clients at the listener that stays are not lost, but nothing accepts them.
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
    for time in 1..=read_number("BERTH_LISTENER_UPGRADES", 10) {
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
