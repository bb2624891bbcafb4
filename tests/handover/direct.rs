//! The direct path: each test on a node in a network namespace of its own, whose clients have addresses that are steered.

use super::load::{Load, Record, exchange};
use super::node::{Echo, NODE, Node, Shim, from_afar, number, on_a_node_of_its_own};
use super::support::net::{client_hello, ping, read};
use super::support::process::{berth, said};
use super::support::{MOMENT, PATIENCE, eventually, skipped};
use super::upgrades::{CLIENTS, PERIOD};
use berth_node::ipc::wire::{DirectStatus, Status};
use berth_shim::steering::{Error, self_test_by_address};
use nix::sys::signal::Signal;
use socket2::{Domain, Protocol, Socket, Type};
use std::io::Write;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Without a gate, for which more connections a second than 100 for each processor would be a crowd.
const ON: &[&str] = &["--direct", "on", "--max-openings", "off"];

/// A shim that hangs is noticed after this time.
const LEASE: &[&str] = &["--direct", "on", "--max-openings", "off", "--lease", "1s"];

/// Runs a test on a node; skipped where none can be made, or nothing can be steered.
fn on_a_node(test: impl FnOnce(&Node) + Send + 'static) {
    on_a_node_of_its_own(|node| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        match runtime.block_on(self_test_by_address()) {
            Err(missing @ (Error::Kernel { .. } | Error::Capabilities { .. } | Error::Forbidden(_))) => {
                skipped(&missing.to_string());
            }
            tested => {
                tested.unwrap();
                test(node);
            }
        }
    });
}

/// Clients of the node, each with an address that is steered.
fn load(node: &Node, clients: u32, period: Duration) -> Load {
    let to = node.listen;
    Load::start(clients, Some(period), move |source| exchange(from_afar(source), to))
}

fn direct(status: &Status) -> &DirectStatus {
    status.direct.as_ref().expect("a shim with a direct path")
}

#[track_caller]
fn until_on(shim: &Shim) {
    shim.until("the direct path is on", |status| direct(status).on);
}

fn opened(shim: &Shim) -> u64 {
    direct(&shim.status()).opened
}

/// A client whose first bytes were answered.
fn served(node: &Node) -> TcpStream {
    let mut client = TcpStream::connect(node.listen).unwrap();
    ping(&mut client, &client_hello(64));
    client
}

/// As many upgrades, until there were `enough`: the new shim joins, `berth drain --wait` lets the old one leave, its instance ends with
/// all that is queued there, and it gets SIGTERM. If not `planned`, the instance ends first, with a queue. Also how many connections
/// were steered.
fn upgrade(node: &Node, times: usize, planned: bool, enough: impl Fn(&Record) -> bool) -> (Record, u64) {
    let (mut instance, mut steered) = (Some(Echo::new()), 0);
    let mut shim = node.joined("i0", instance.as_ref().unwrap().address, ON);
    until_on(&shim);
    let load = load(node, CLIENTS, PERIOD);
    load.more(1000);
    for time in 1..=times {
        if let Some(instance) = instance.take_if(|_| !planned) {
            instance.end_with(8);
        }
        let next_instance = Echo::new();
        let next = node.joined(&format!("i{time}"), next_instance.address, ON);
        let mut drain = berth(["drain", "--wait", "--instance", &format!("i{}", time - 1)]);
        let (code, out, log) = said(drain.arg("--run-dir").arg(node.run_dir()));
        assert_eq!(code, Some(0), "{out}{log}");
        instance.replace(next_instance);
        steered += opened(&shim);
        std::mem::replace(&mut shim, next).leave();
        until_on(&shim);
        load.more(3000);
        if enough(&load.so_far()) {
            break;
        }
    }
    let record = load.end();
    (record, steered + opened(&shim))
}

#[test]
fn consecutive_upgrades_lose_nothing() {
    on_a_node(|node| {
        let times = number("BERTH_DIRECT_UPGRADES", 4);
        let (record, steered) = upgrade(node, times, true, |_| false);
        println!(
            "{times} upgrades: {} connections, {steered} steered, slowest {:?}, lost: {}",
            record.begun.len(),
            record.slowest,
            record.kinds()
        );
        assert_eq!(record.lost(), 0, "{}", record.kinds());
        assert!(steered as usize >= times * 1000, "{steered} of {}", record.begun.len());
        let (control, steered) = upgrade(node, 3, false, |record| record.lost() > 0);
        println!(
            "control, the instance ends first: {} connections, {steered} steered, lost: {}",
            control.begun.len(),
            control.kinds()
        );
        assert!(control.lost() > 0, "the test proves nothing: {} connections", control.begun.len());
    });
}

/// Two shims of one instance, as on a node where a node shim is replaced: who steers first, the one that started last.
fn two(node: &Node, instance: &Echo) -> (Shim, Shim) {
    let [a, b] = ["a", "b"].map(|id| node.joined(id, instance.address, LEASE));
    eventually("b steers, and it alone", || {
        ([&a, &b].map(|shim| direct(&shim.status()).on) == [false, true]).then_some(())
    });
    (b, a)
}

#[test]
fn beside_a_sibling_the_death_of_who_steers_loses_nothing() {
    on_a_node(|node| {
        for signal in [Signal::SIGKILL, Signal::SIGSTOP, Signal::SIGTERM] {
            let instance = Echo::new();
            let (mut owner, sibling) = two(node, &instance);
            let mut clients: Vec<_> = (0..32).map(|_| served(node)).collect();
            assert_eq!((opened(&owner), owner.status().connections_total), (32, 0), "all are steered");
            // Few enough for a shim that relays.
            let load = load(node, 16, PERIOD);
            load.more(200);
            match signal {
                Signal::SIGSTOP => owner.freeze(),
                _ => owner.running.signal(signal),
            }
            until_on(&sibling);
            load.more(500);
            if signal == Signal::SIGSTOP {
                owner.running.signal(Signal::SIGCONT);
                eventually("one steers", || {
                    let on = [&owner, &sibling].map(|shim| direct(&shim.status()).on);
                    (on.iter().filter(|on| **on).count() == 1).then_some(())
                });
                load.more(200);
            }
            let record = load.end();
            assert_eq!(record.lost(), 0, "{signal}: {}", record.kinds());
            assert!(opened(&sibling) > 0, "{:?}", sibling.status());
            for client in &mut clients {
                ping(client, &client_hello(64));
            }
            println!("{signal}: {} connections, slowest {:?}", record.begun.len(), record.slowest);
            drop(clients);
            for shim in [&owner, &sibling] {
                shim.running.signal(Signal::SIGKILL);
            }
            owner.running.ended();
            std::fs::remove_dir_all(node.run_dir()).unwrap();
        }
    });
}

/// A client that says something, and whether its answer begins soon.
fn ask(node: &Node) -> (TcpStream, bool) {
    let mut client = TcpStream::connect(node.listen).unwrap();
    client.write_all(&client_hello(64)).unwrap();
    client.set_read_timeout(Some(MOMENT)).unwrap();
    let answered = client.peek(&mut [0]).is_ok();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    (client, answered)
}

#[test]
fn alone_the_death_of_who_steers_is_as_behind_the_relay() {
    on_a_node(|node| {
        let instance = Echo::new();
        let mut shim = node.joined("a", instance.address, LEASE);
        until_on(&shim);
        let mut client = served(node);
        shim.running.signal(Signal::SIGKILL);
        shim.running.ended();
        let refused = TcpStream::connect(node.listen).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        ping(&mut client, &client_hello(64));

        let shim = node.joined("a", instance.address, LEASE);
        until_on(&shim);
        served(node);
        assert_eq!(opened(&shim), 1, "the listener is found again");
        shim.freeze();
        let (mut waits, _) = eventually("a client that waits for the shim", || Some(ask(node)).filter(|ask| !ask.1));
        ping(&mut client, &client_hello(64));
        shim.running.signal(Signal::SIGCONT);
        assert_eq!(read(&mut waits, 64), client_hello(64));
        until_on(&shim);
    });
}

#[test]
fn beside_a_sibling_that_cannot_the_shims_relay() {
    on_a_node(|node| {
        let instance = Echo::new();
        let a = node.joined("a", instance.address, ON);
        until_on(&a);
        let mut b = node.joined("b", instance.address, &[]);
        a.until("off for b", |status| direct(status).why.as_deref() == Some("a sibling cannot steer"));
        served(node);
        assert_eq!(opened(&a), 0);
        b.running.signal(Signal::SIGTERM);
        b.running.ended();
        until_on(&a);
        // Another instance that is recorded, though nobody knows yet whether it will ever listen.
        let record = node.record("c", "127.9.9.9:6443".parse().unwrap());
        a.running.logs("direct path off: there are several instances: a and c");
        drop(record);
        until_on(&a);
    });
}

#[test]
fn where_the_kernel_cannot_steer_to_it_the_shims_relay() {
    on_a_node(|node| {
        // Of MPTCP, as Go makes them.
        let Ok(mptcp) = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::MPTCP)) else {
            return skipped("the kernel has no MPTCP");
        };
        mptcp.bind(&"127.3.3.3:6443".parse::<SocketAddr>().unwrap().into()).unwrap();
        mptcp.listen(128).unwrap();
        let address = mptcp.local_addr().unwrap().as_socket().unwrap();
        let a = node.joined("a", address, ON);
        a.running.logs("no direct path, the shims relay:");
        assert!(a.running.log().contains("multipathtcp=0"), "{}", a.running.log());
        let mut client = TcpStream::connect(node.listen).unwrap();
        client.write_all(&client_hello(64)).unwrap();
        // Probes come too.
        let said = |one: &Socket| one.peek(&mut [MaybeUninit::new(0)]).is_ok_and(|length| length > 0);
        assert!((0..100).any(|_| said(&mptcp.accept().unwrap().0)), "only probes come");
    });
}

#[test]
fn without_the_rights_auto_relays_and_on_does_not_start() {
    on_a_node(|_| {
        let node = match Node::of(65534) {
            Ok(node) => node.listening_at(NODE),
            Err(why) => return skipped(&why),
        };
        let instance = Echo::new();
        let a = node.joined("a", instance.address, &["--direct", "auto"]);
        a.running.logs("--direct auto: no direct path, every connection is relayed:");
        assert!(a.running.log().contains("CAP_BPF"), "{}", a.running.log());
        served(&node);
        assert_eq!((a.status().direct, a.status().connections_total), (None, 1));
        let (code, log) = node.cannot_serve("b", instance.address, ON);
        assert_eq!(code, Some(69), "{log}");
        assert!(log.contains("--direct on: ") && log.contains("CAP_BPF"), "{log}");
    });
}

/// What comes in a crowd goes through the gate, and directly again when that is over.
#[test]
fn a_crowd_is_relayed() {
    on_a_node(|node| {
        let instance = Echo::new();
        let shim = node.joined("a", instance.address, &["--direct", "on"]);
        until_on(&shim);
        let crowd = load(node, CLIENTS, PERIOD);
        let off = shim.until("the direct path is off", |status| !direct(status).on);
        assert!(direct(&off).why.as_ref().unwrap().contains("a crowd comes"), "{off:?}");
        let steered = direct(&off).opened;
        crowd.more(1000);
        assert_eq!(opened(&shim), steered, "all are relayed");
        assert_eq!(crowd.end().lost(), 0);
        until_on(&shim);
    });
}
