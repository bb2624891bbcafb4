//! The direct path: each test on a node in a network namespace of its own, whose clients have addresses that are steered.

use super::node::{Echo, LEASE, NODE, Node, Shim, from_afar, number, on_a_node_of_its_own, on_a_node_that, runtime};
use super::upgrades::{CLIENTS, PERIOD};
use crate::support::load::{Load, Record, exchange};
use crate::support::net::{client_hello, connect_from, fresh_ip, ping, queued, read};
use crate::support::process::{BERTH, ends};
use crate::support::shim::ask;
use crate::support::{eventually, skipped, too_busy};
use berth_node::ipc::wire::{Ask, DirectStatus, Reply, Share, Status};
use berth_shim::steering::{Error, self_test_by_address};
use nix::sys::signal::Signal;
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

/// Without a gate, for which more connections a second than 100 for each processor would be a crowd. What passes sooner is
/// how long it is waited until the path is on again, and for handshakes that began before it was off.
const ON: &[&str] = &["--direct", "on", "--max-openings", "off", "--speedup", "10"];

/// This many clients of the control wait at an instance that ends.
const QUEUED: u64 = 32;

/// Runs a test on a node; skipped where none can be made, or nothing can be steered.
fn on_a_node(test: impl FnOnce(&Node) + Send + 'static) {
    on_a_node_that(|| cannot_steer().map_or(Ok(false), Err), test);
}

/// As [`on_a_node`], for a test of what is decided: on a node on which nothing is steered, where nothing can be.
fn on_any_node(test: impl FnOnce(&Node) + Send + 'static) {
    let is_unsteered = || match cannot_steer() {
        // Only a debug build can do without.
        Some(why) if !cfg!(debug_assertions) => Err(why),
        cannot => Ok(cannot.is_some()),
    };
    on_a_node_that(is_unsteered, test);
}

/// Why nothing can be steered here.
fn cannot_steer() -> Option<String> {
    match runtime().block_on(self_test_by_address()) {
        Err(missing @ (Error::Kernel { .. } | Error::Capabilities { .. } | Error::Forbidden(_))) => {
            Some(missing.to_string())
        }
        tested => {
            tested.unwrap();
            None
        }
    }
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

/// This many clients that a shim steered, and that were answered: none of them was relayed.
#[track_caller]
fn steered(node: &Node, shim: &Shim, number: u64) -> Vec<TcpStream> {
    eventually("clients that are steered", || {
        let before = shim.status();
        let clients: Vec<_> = (0..number).map(|_| served(node)).collect();
        let after = shim.status();
        let counts =
            (direct(&after).opened - direct(&before).opened, after.connections_total - before.connections_total);
        (counts == (number, 0)).then_some(clients)
    })
}

/// As many upgrades: the new shim joins, `berth drain --wait` lets the old one leave, its instance ends, and it gets
/// SIGTERM. If not `planned`, the instance ends first, with [`QUEUED`] clients. Also how many connections were steered.
fn upgrade(node: &Node, times: usize, planned: bool) -> (Record, u64) {
    let (mut instance, mut steered) = (Some(Echo::new()), 0);
    let mut shim = node.joined("i0", instance.as_ref().unwrap().address, ON);
    until_on(&shim);
    let load = load(node, CLIENTS, PERIOD);
    let some = |shim: &Shim| eventually("clients that are steered", || (opened(shim) >= 300).then_some(()));
    some(&shim);
    for time in 1..=times {
        if let Some(instance) = instance.take_if(|_| !planned) {
            // Clients that are steered from now on wait there; if the path was off meanwhile, they may have been relayed.
            let offs = || shim.running.log().matches("direct path off").count();
            eventually("clients that were steered in the queue", || {
                until_on(&shim);
                let before = offs();
                instance.stand(true);
                eventually("clients in the queue", || (instance.queued() >= QUEUED).then_some(()));
                let steered = direct(&shim.status()).on && offs() == before;
                instance.stand(steered);
                steered.then_some(())
            });
        }
        let next_instance = Echo::new();
        let next = node.joined(&format!("i{time}"), next_instance.address, ON);
        let (code, out, log) = node.asked(&["drain", "--wait", "--instance", &format!("i{}", time - 1)]);
        assert_eq!(code, Some(0), "{out}{log}");
        if let Some(old) = instance.replace(next_instance) {
            // No more clients come. Those that came in time may not have been answered yet, on a machine with much to do.
            old.end_idle();
        }
        steered += opened(&shim);
        std::mem::replace(&mut shim, next).leave();
        until_on(&shim);
        some(&shim);
    }
    let record = load.end();
    steered += opened(&shim);
    shim.leave();
    (record, steered)
}

#[test]
fn consecutive_upgrades_lose_nothing() {
    on_a_node(|node| {
        let times = number("BERTH_DIRECT_UPGRADES", 2);
        let (record, steered) = upgrade(node, times, true);
        println!(
            "{times} upgrades: {} connections, {steered} steered, slowest {:?}, lost: {}",
            record.begun.len(),
            record.slowest,
            record.kinds()
        );
        if !record.nothing_lost("") {
            return;
        }
        assert!(steered as usize >= (times + 1) * 300, "{steered} of {}", record.begun.len());
        let (control, steered) = upgrade(node, 1, false);
        println!(
            "control, the instance ends first: {} connections, {steered} steered, lost: {}",
            control.begun.len(),
            control.kinds()
        );
        if control.lost() == 0 && control.was_late() {
            return too_busy("the control lost nothing");
        }
        assert!(control.lost() > 0, "the test proves nothing: {} connections", control.begun.len());
    });
}

/// Two shims of one instance, as on a node where a node shim is replaced: the one that started last steers first.
fn two(node: &Node, instance: &Echo, leases: [&str; 2]) -> (Shim, Shim) {
    let join = |id: &str, lease: &str| node.joined(id, instance.address, &[ON, &["--lease", lease]].concat());
    let (a, b) = (join("a", leases[1]), join("b", leases[0]));
    eventually("b steers, and it alone", || {
        ([&a, &b].map(|shim| direct(&shim.status()).on) == [false, true]).then_some(())
    });
    (b, a)
}

#[test]
fn with_a_sibling_the_death_of_the_shim_that_steers_loses_nothing() {
    on_a_node(|node| {
        for signal in [Signal::SIGKILL, Signal::SIGSTOP, Signal::SIGTERM] {
            let instance = Echo::new();
            // A shim that hangs is noticed after its lease, and after its sibling's since they got to know one another.
            let leases = if signal == Signal::SIGSTOP { ["1s", "2s"] } else { [LEASE; 2] };
            let (mut owner, mut sibling) = two(node, &instance, leases);
            let mut clients = steered(node, &owner, 32);
            // Few enough for a shim that relays.
            let load = load(node, 16, PERIOD);
            load.more(200);
            // What it relays would end with it: it does where it could not renew in time what steers.
            eventually("a shim that steers, and relays nothing", || {
                let status = owner.status();
                (direct(&status).on && status.connections_open == 0).then_some(())
            });
            match signal {
                Signal::SIGSTOP => owner.freeze(),
                _ => owner.running.signal(signal),
            }
            until_on(&sibling);
            load.more(200);
            eventually("clients that the sibling steers", || (opened(&sibling) > 0).then_some(()));
            if signal == Signal::SIGSTOP {
                owner.running.signal(Signal::SIGCONT);
                eventually("one steers", || {
                    let on = [&owner, &sibling].map(|shim| direct(&shim.status()).on);
                    (on.iter().filter(|on| **on).count() == 1).then_some(())
                });
                load.more(200);
            }
            let record = load.end();
            if !record.nothing_lost(signal.as_str()) {
                return;
            }
            for client in &mut clients {
                ping(client, &client_hello(64));
            }
            println!("{signal}: {} connections, slowest {:?}", record.begun.len(), record.slowest);
            drop(clients);
            for shim in [&mut owner, &mut sibling] {
                shim.running.kill();
            }
            std::fs::remove_dir_all(node.run_dir()).unwrap();
        }
    });
}

/// Alone, it takes the relay with it: nothing listens. What was steered is the instance's.
#[test]
fn alone_the_death_of_the_shim_that_steers_is_as_behind_the_relay() {
    on_a_node(|node| {
        let instance = Echo::new();
        let mut shim = node.joined("a", instance.address, ON);
        until_on(&shim);
        let mut clients = steered(node, &shim, 1);
        shim.running.kill();
        let refused = TcpStream::connect(node.listen).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        ping(&mut clients[0], &client_hello(64));

        let shim = node.joined("a", instance.address, &[ON, &["--lease", "1s"]].concat());
        until_on(&shim);
        // The listener is found again.
        clients.extend(steered(node, &shim, 1));
        shim.freeze();
        let mut waiting = Vec::new();
        eventually("a client that waits for the shim", || {
            let mut client = TcpStream::connect(node.listen).unwrap();
            client.write_all(&client_hello(64)).unwrap();
            waiting.push(client);
            (queued(node.listen) > 0).then_some(())
        });
        clients.iter_mut().for_each(|client| ping(client, &client_hello(64)));
        shim.running.signal(Signal::SIGCONT);
        for client in &mut waiting {
            assert_eq!(read(client, 64), client_hello(64));
        }
        until_on(&shim);
    });
}

#[test]
fn beside_a_sibling_that_cannot_the_shims_relay() {
    on_any_node(|node| {
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
        // Another instance that is recorded, though it is not known yet whether it will ever listen.
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
        let a = node.joined("a", address, &[ON, &["--probe-interval", "1h"]].concat());
        // The probes that made it ready are accepted, so it does not stand still.
        mptcp.accept().unwrap();
        mptcp.accept().unwrap();
        let why = a.running.logs("no direct path, the shims relay:");
        assert!(why.contains("multipathtcp=0"), "{why}");
        let mut client = TcpStream::connect(node.listen).unwrap();
        client.write_all(&client_hello(64)).unwrap();
        let (relayed, _) = mptcp.accept().unwrap();
        assert!(relayed.peek(&mut [MaybeUninit::new(0)]).is_ok_and(|length| length > 0), "it is no probe");
    });
}

/// A node whose berth has no capability that steering needs.
fn without_rights() -> Option<Node> {
    const LESS: &str = "exec setpriv --bounding-set=-bpf,-net_admin,-sys_admin --";
    let can = Command::new("sh").args(["-c", &format!("{LESS} true")]).output().ok()?;
    let node = Node::new();
    let program = node.temp().join("berth");
    std::fs::write(&program, format!("#!/bin/sh\n{LESS} {BERTH} \"$@\"\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    node.install(&program);
    can.status.success().then_some(node)
}

#[test]
fn without_the_rights_auto_relays_and_on_does_not_start() {
    on_a_node_of_its_own(|_| {
        // Where there is no other user, as in a user namespace, root without capabilities.
        let node = match Node::of(65534).or_else(|why| without_rights().ok_or(why)) {
            Ok(node) => node.listening_at(NODE),
            Err(why) => return skipped(&why),
        };
        let instance = Echo::new();
        let a = node.joined("a", instance.address, &["--direct", "auto"]);
        let why = a.running.logs("--direct auto: no direct path, every connection is relayed:");
        assert!(why.contains("CAP_BPF"), "{why}");
        served(&node);
        assert_eq!((a.status().direct, a.status().connections_total), (None, 1));
        let (code, log) = node.cannot_serve("b", instance.address, ON);
        assert_eq!(code, Some(69), "{log}");
        assert!(log.contains("--direct on: ") && log.contains("CAP_BPF"), "{log}");
    });
}

/// A port takes connections whatever becomes of its process, and a probe that only connects finds nothing: few clients are to wait
/// in that queue, where nothing can be replayed.
#[test]
fn an_instance_that_accepts_no_connection_is_not_steered_to() {
    // Half of the queue's room has a reason of its own.
    const FEW: usize = 2000;
    on_a_node(|node| {
        let instance = Echo::new();
        let shim = node.joined("a", instance.address, ON);
        until_on(&shim);
        instance.stand(true);
        let mut clients = Vec::new();
        let why = eventually("the direct path is off", || {
            assert!(clients.len() < FEW, "{:?}", direct(&shim.status()));
            let mut client = TcpStream::connect(node.listen).unwrap();
            client.write_all(&client_hello(64)).unwrap();
            clients.push(client);
            direct(&shim.status()).why.clone()
        });
        assert_eq!(why, "the instance accepts no connection");
        instance.stand(false);
        for client in &mut clients {
            assert_eq!(read(client, 64), client_hello(64));
        }
        until_on(&shim);
    });
}

/// The handshakes that are late, as where a SYN-ACK or its answer takes long: what a client sends after its SYN is dropped while this
/// lives. (To delay packets needs sch_netem, which many kernels lack.)
struct Late;

impl Late {
    /// Or why that cannot be had.
    fn new(client: Ipv4Addr) -> Result<Self, String> {
        let rules = format!(
            "table ip late {{ chain input {{ type filter hook input priority 0; \
             ip saddr {client} tcp dport 6443 tcp flags & syn == 0 drop; }}; }}"
        );
        let output = Command::new("nft").arg(rules).output().map_err(|error| format!("nft: {error}"))?;
        let why = String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(Self) } else { Err(format!("nft cannot drop packets: {why}")) }
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        ends(Command::new("nft").args(["delete", "table", "ip", "late"]), 0, &[]);
    }
}

/// A client whose handshake began on the direct path is its instance's, although the rest of the handshake comes when the path is
/// off and the shim has been notified to leave: `berth drain --wait` returns after that. The control does not wait.
#[test]
fn a_handshake_that_is_late_is_waited_for() {
    on_a_node(|node| {
        let client = from_afar(fresh_ip());
        for waits in [true, false] {
            let late = match Late::new(client) {
                Ok(late) => late,
                Err(why) => return skipped(&why),
            };
            let instance = Echo::new();
            let speedup = if waits { "1" } else { "1000" };
            let shim =
                node.joined("a", instance.address, &["--direct", "on", "--max-openings", "off", "--speedup", speedup]);
            until_on(&shim);
            let before = opened(&shim);
            // For the client it has ended.
            let mut client = connect_from(client.into(), node.listen);
            client.write_all(&client_hello(64)).unwrap();
            eventually("a client that was steered", || (opened(&shim) > before).then_some(()));
            let said = std::thread::scope(|scope| {
                let ends = scope.spawn(|| {
                    let (code, out, log) = node.asked(&["drain", "--wait", "--instance", "a"]);
                    assert_eq!(code, Some(0), "{out}{log}");
                    drop(instance);
                });
                shim.running.logs("direct path off");
                if !waits {
                    ends.join().unwrap();
                    drop(late);
                    return client.read_exact(&mut [0; 64]);
                }
                drop(late);
                client.read_exact(&mut [0; 64])
            });
            assert_eq!(said.is_ok(), waits, "{said:?}");
            shim.leave();
            std::fs::remove_dir_all(node.run_dir()).unwrap();
        }
    });
}

/// The shims, which know which instance a connection belongs to, distribute all of them.
#[test]
fn a_share_of_new_connections_turns_it_off() {
    on_any_node(|node| {
        let instance = Echo::new();
        let shims = ["a", "b"].map(|id| node.joined(id, instance.address, ON));
        until_on(&shims[1]);
        let put = |lease_ms| {
            let [old, new] = ["a", "b"].map(|id| id.parse().unwrap());
            let share = Share { old, new, permille: 500, salt: 1, lease_ms, local: false };
            for shim in &shims {
                assert_eq!(ask(&runtime(), &shim.path, &Ask::Share(share.clone())).unwrap(), Reply::Done);
            }
        };
        put(600_000);
        for shim in &shims {
            shim.until("the direct path is off for a share", |status| {
                direct(status).why.as_deref() == Some("the shims give each instance its share of new connections")
            });
        }
        let steered = opened(&shims[1]);
        (0..20).for_each(|_| drop(served(node)));
        assert_eq!(opened(&shims[1]), steered);
        put(0);
        until_on(&shims[1]);
    });
}

/// What comes in a crowd goes through the gate, and directly again after that.
#[test]
fn a_crowd_is_relayed() {
    on_a_node(|node| {
        let instance = Echo::new();
        let shim = node.joined("a", instance.address, &["--direct", "on", "--speedup", "5"]);
        until_on(&shim);
        let crowd = load(node, CLIENTS, PERIOD);
        let off = shim.until("the direct path is off for a crowd", |status| {
            direct(status).why.as_ref().is_some_and(|why| why.contains("a crowd comes"))
        });
        let steered = direct(&off).opened;
        crowd.more(1000);
        if opened(&shim) != steered {
            // Unless it had ended: on a busy machine this many may not come in a second.
            let on_again = || shim.running.log().matches("direct path on").count() >= 2;
            eventually("a path that is on again, or all would be relayed", || on_again().then_some(()));
        }
        if crowd.end().nothing_lost("") {
            until_on(&shim);
        }
    });
}
