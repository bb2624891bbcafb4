//! A run directory that is removed, replaced or closed while shims use it.

use super::load;
use super::node::{Echo, Node, Shim};
use super::support::net::{client_hello, connect, ping};
use super::support::{eventually, skipped};
use berth_node::instance::InstanceId;
use berth_node::registry::{instance, lease};
use berth_node::terms::Phase;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const HOLD: &str = "300ms";

/// Connects and exchanges for longer than nothing may be reachable ([`HOLD`]), and than a shim takes between two looks.
#[track_caller]
fn serves_on(node: &Node) {
    let until = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < until {
        ping(&mut connect(node.listen), &client_hello(64));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until an instance and its shim are where newcomers and commands look.
#[track_caller]
fn until_recorded(node: &Node, id: &str) {
    let id = InstanceId::parse(id).unwrap();
    eventually(&format!("{id} is recorded again"), || {
        // Not by way of a function that makes the directory.
        let berth = node.find()?;
        let alive = |listed: &instance::ListedInstance| listed.alive && listed.record.instance == id;
        let recorded = instance::list(&berth).unwrap().found.iter().any(alive);
        (recorded && lease::read(&berth, &id).unwrap().is_some() && berth.socket_path(&id).unwrap().exists())
            .then_some(())
    });
}

/// As `rm -rf` does: shims may put things back meanwhile.
#[track_caller]
fn remove(node: &Node) {
    eventually("a directory that is removed", || fs::remove_dir_all(node.run_dir()).ok());
}

/// Puts another file in the directory's place, at once: so nothing can be put back between.
#[track_caller]
fn exchange(node: &Node, other: &Path) {
    renameat2(AT_FDCWD, other, AT_FDCWD, &node.run_dir(), RenameFlags::RENAME_EXCHANGE).unwrap();
}

/// The next instance of the name can claim it, and the shim finds it.
#[track_caller]
fn is_ready_again(node: &Node, shim: &Shim) {
    let (_process, _echo) = node.exec("a");
    shim.until("ready again", |status| {
        status.instances.iter().any(|instance| instance.own && instance.health.as_str() == "ready")
    });
}

/// The probes of the instance's container pass.
#[track_caller]
fn probes_pass(node: &Node, id: &str) {
    for probe in [&["ready", "--timeout", "30s"][..], &["live", "--timeout", "60s", "--probe", "tcp"]] {
        let (status, out, log) = node.asked(&[probe, &["--instance", id]].concat());
        assert_eq!(status, Some(0), "{probe:?}: {out}{log}");
    }
}

fn lone(node: &Node) -> (Echo, super::support::process::Running, Shim) {
    let (process, echo) = node.exec("a");
    let shim = node.launch("a", &["--hold", HOLD]);
    shim.until_joined();
    (echo, process, shim)
}

/// A lone shim's instance is alive for as long as its lock is held, whatever becomes of the directory.
#[test]
fn a_run_directory_that_is_removed_is_made_again() {
    let node = Node::new();
    let (echo, process, shim) = lone(&node);
    // The second time it is the shim's record that goes.
    for _ in 0..2 {
        remove(&node);
        serves_on(&node);
        until_recorded(&node, "a");
    }
    let warned = shim.running.logs("the run directory was removed");
    assert!(warned.contains("WARN"), "{warned}");
    shim.running.logs("the record of a live instance was removed: it is written again");
    eventually("repairs that are counted", || {
        (shim.repaired("directory", "ok") >= 2 && shim.repaired("record", "ok") >= 2).then_some(())
    });
    probes_pass(&node, "a");
    // Another instance that starts in it now is found, and one of the same name is refused as ever.
    let (_other, _its_echo) = node.exec("b");
    let (status, log) = node.cannot_exec("a");
    assert!(status == Some(69) && log.contains("the instance a is alive"), "{log}");
    shim.running.logs("probing instance=b");

    // The record that the shim keeps is as dead as the instance when that ends, and the next one finds its address.
    drop((process, echo));
    shim.running.logs("gone instance=a");
    eventually("a dead record", || {
        let listed = instance::list(&node.find()?).unwrap().found;
        listed.iter().any(|listed| listed.record.instance.as_str() == "a" && !listed.alive).then_some(())
    });
    is_ready_again(&node, &shim);
}

/// What the shim locked in the instance's stead is unlocked when it dies: the instance's listener shows that it lives.
#[test]
fn an_instance_whose_record_was_removed_is_found_by_the_next_shim() {
    let node = Node::new();
    let (echo, process, shim) = lone(&node);
    remove(&node);
    until_recorded(&node, "a");
    drop(shim);
    let shim = node.launch("a", &["--hold", HOLD]);
    shim.until_joined();
    shim.running.logs("the shim that locked this instance's record is gone: this one locks it");
    serves_on(&node);
    probes_pass(&node, "a");
    let (status, log) = node.cannot_exec("a");
    assert!(status == Some(69) && log.contains("the instance a is alive"), "{log}");

    drop((process, echo));
    shim.running.logs("gone instance=a");
    is_ready_again(&node, &shim);
}

/// As a mount over it does, and a rename: the directory that is watched is not the one that has the name.
#[test]
fn a_run_directory_that_is_replaced_is_filled_again() {
    let node = Node::new();
    let (_echo, _process, shim) = lone(&node);
    let other = node.run_dir().with_file_name("other");
    fs::create_dir(&other).unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).unwrap();
    exchange(&node, &other);
    serves_on(&node);
    until_recorded(&node, "a");
    probes_pass(&node, "a");
    shim.leave();
}

/// A directory that others may write to is not used: what is known goes on, and it is said.
#[test]
fn a_run_directory_that_cannot_be_used_ends_nothing() {
    let node = Node::new();
    let (_echo, _process, shim) = lone(&node);
    let other = node.run_dir().with_file_name("other");
    fs::write(&other, "a file").unwrap();
    exchange(&node, &other);
    serves_on(&node);
    let warned = shim.running.logs("the run directory was removed and cannot be made again");
    assert!(warned.contains("WARN") && warned.contains("is a file"), "{warned}");
    fs::remove_file(node.run_dir()).unwrap();
    until_recorded(&node, "a");
    assert!(shim.repaired("directory", "failed") > 0);
    shim.leave();
}

#[test]
fn an_upgrade_goes_on_in_a_run_directory_that_was_removed() {
    let node = Node::new();
    let options = ["--hold", "60s"];
    let (_process_a, _echo_a) = node.exec("a");
    let a = node.launch("a", &options);
    a.until_joined();
    let (_process_b, _echo_b) = node.exec("b");
    let b = node.launch("b", &options);
    b.until_joined();
    a.until_counted("guard", 1);
    b.until_counted("guard", 1);
    let load = load::start(node.listen, 16, Duration::from_millis(100));
    load.more(100);
    remove(&node);
    load.more(100);
    until_recorded(&node, "a");
    until_recorded(&node, "b");
    let (_process_c, _echo_c) = node.exec("c");
    let c = node.launch("c", &options);
    c.until_joined();
    // It takes the listener over that the first one leaves, and no other is made.
    c.until_counted("guard", 2);
    a.leave();
    load.more(200);
    let record = load.end();
    assert_eq!(record.lost(), 0, "{}\n{}", record.kinds(), b.running.log());
    for shim in [&b, &c] {
        assert_eq!(shim.status().state, Phase::Joined);
        assert!(!shim.running.log().contains("ERROR"), "{}", shim.running.log());
    }
}

/// Not as root, who may read everything.
#[test]
fn a_record_that_cannot_be_read_for_a_while_is_alive() {
    let node = match Node::of(65534) {
        Ok(node) => node,
        Err(why) => return skipped(&format!("a_record_that_cannot_be_read_for_a_while_is_alive: {why}")),
    };
    let (_echo, _process, shim) = lone(&node);
    let record = node.run_dir().join(node.listen.to_string()).join("instances/a.json");
    fs::set_permissions(&record, fs::Permissions::from_mode(0o000)).unwrap();
    shim.running.logs("a.json is ignored: it cannot be opened");
    serves_on(&node);
    fs::set_permissions(&record, fs::Permissions::from_mode(0o600)).unwrap();
    ping(&mut connect(node.listen), &client_hello(64));
    assert!(!shim.running.log().contains("gone instance=a"), "{}", shim.running.log());
    shim.leave();
}

/// Leases are listed at least each second, for as long as the shim lives.
#[test]
fn leases_that_cannot_be_listed_are_said_once() {
    let (node, backend) = (Node::new(), Echo::new());
    let shim = node.joined("a", backend.address, &["--lease", "1s"]);
    let leases = node.berth().leases();
    eventually("a file in the place of the leases", || {
        fs::remove_dir_all(&leases).ok();
        fs::write(&leases, "").ok()
    });
    shim.running.logs("cannot list the leases");
    let failed = || shim.metric("berth_lease_renewals_total", &[("result", "failed")]);
    let before = failed();
    eventually("three more renewals that fail", || (failed() >= before + 3).then_some(()));
    let log = shim.running.log();
    assert_eq!(log.matches("cannot list the leases").count(), 1, "{log}");
}
