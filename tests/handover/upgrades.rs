//! Consecutive upgrades.

use super::load::{self, Record};
use super::node::{Echo, Node, alone, number};
use std::time::{Duration, Instant};

pub(crate) const CLIENTS: u32 = 128;

/// Together 6,400 connections a second. With a quarter of it one run in six of the control lost nothing.
pub(crate) const PERIOD: Duration = Duration::from_millis(20);

/// A run counts only if so many connections were begun so near to each switch.
const LEAST: usize = 100;
const NEAR: Duration = Duration::from_millis(100);

/// Most upgrades of the control until one loses something.
const CONTROL: usize = 60;

/// Most runs until one counts: the machine may pause.
const RUNS: usize = 8;

/// Upgrades until there were so many or `enough`; when each switch was.
fn upgrade(times: usize, options: &[&str], enough: impl Fn(&Record) -> bool) -> (Record, Vec<Instant>) {
    let node = Node::new();
    // Not one goes before the end: to wait for it is to read a table of all sockets, and the load is there.
    let mut instances = vec![Echo::new()];
    let mut shim = node.joined("i0", instances[0].address, options);
    let load = load::start(node.listen, CLIENTS, PERIOD);
    load.more(1000);
    let mut switches = Vec::new();
    while switches.len() < times && !enough(&load.so_far()) {
        let next_instance = Echo::new();
        let next = node.joined(&format!("i{}", switches.len() + 1), next_instance.address, options);
        switches.push(Instant::now());
        let log = shim.leave();
        load.more(2 * LEAST);
        if options.is_empty() && load.so_far().lost() > 0 {
            eprintln!("who left:\n{log}\nwho came:\n{}", next.running.log());
        }
        instances.push(next_instance);
        shim = next;
    }
    load.more(2 * LEAST);
    let record = load.end();
    (record, switches)
}

#[test]
fn consecutive_upgrades_lose_nothing() {
    let _alone = alone();
    let migrate = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req").unwrap_or_default();
    assert_ne!(migrate.trim(), "1", "with net.ipv4.tcp_migrate_req=1 the kernel does it: nothing is shown");

    let times = number("BERTH_UPGRADES", 20);
    // A run that does not count is made again; one that loses something counts always.
    let mut least = 0;
    for _ in 0..RUNS {
        let (record, switches) = upgrade(times, &[], |_| false);
        least = switches.iter().map(|switch| record.near(*switch, NEAR)).min().unwrap();
        println!(
            "{times} upgrades: {} connections, at least {least} within {NEAR:?} of a switch, slowest {:?}, lost: {}",
            record.begun.len(),
            record.slowest,
            record.kinds()
        );
        assert_eq!(record.lost(), 0, "{}", record.kinds());
        assert_eq!(record.begun.len(), record.served as usize);
        if least >= LEAST {
            break;
        }
    }
    assert!(least >= LEAST, "none of {RUNS} runs counts: {least} connections near a switch in the last");
    let (control, plain) = upgrade(CONTROL.max(times), &["--plain-close"], |record| record.lost() > 0);
    println!(
        "control, plain close: {} upgrades, {} connections, lost: {}",
        plain.len(),
        control.begun.len(),
        control.kinds()
    );
    assert!(control.lost() > 0, "the test proves nothing: closing plainly lost none of {}", control.begun.len());
}

#[test]
fn upgrades_leave_no_listeners_behind() {
    let _alone = alone();
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
    assert!(counts.iter().all(|count| *count <= 2), "never more than two shims were alive: {counts:?}");
}
