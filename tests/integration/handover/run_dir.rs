//! A run directory that is removed, replaced or locked while shims use it.

use super::node::{Echo, LEASE, Node, Shim, know_one_another};
use crate::support::load;
use crate::support::net::expect_service;
use crate::support::process::Running;
use crate::support::{eventually, print_skipped};
use berth_node::instance_id::InstanceId;
use berth_node::registry::lease;
use berth_os::explained;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

const HOLD: &str = "300ms";

/// Connects and exchanges bytes for longer than [`HOLD`], and for longer than the interval of a
/// shim's checks.
#[track_caller]
fn serves_on(node: &Node) {
    let until = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < until {
        expect_service(node.listen);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the shim has renewed its lease at the original path.
#[track_caller]
fn until_renewed(node: &Node, id: &str) {
    let (id, from) = (InstanceId::parse(id).unwrap(), SystemTime::now());
    eventually("a lease that is renewed", || {
        // `find` does not create the directory.
        let lease = lease::read(&node.find()?, &id).unwrap()?;
        (lease.renew_time > from).then_some(())
    });
}

/// Removes the directory like `rm -rf`, and tries again if a shim writes its lease meanwhile.
#[track_caller]
fn remove_run_dir(node: &Node) {
    eventually("a directory that is removed", || {
        fs::remove_dir_all(node.run_dir()).ok()
    });
}

/// Exchanges the directory for another file in one step.
#[track_caller]
fn exchange_run_dir(node: &Node, other: &Path) {
    renameat2(
        AT_FDCWD,
        other,
        AT_FDCWD,
        &node.run_dir(),
        RenameFlags::RENAME_EXCHANGE,
    )
    .unwrap();
}

fn start_lone(node: &Node, lease: &str) -> (Echo, Running, Shim) {
    let (process, echo) = node.exec("a");
    let shim = node.launch("a", &["--hold", HOLD, "--lease", lease]);
    shim.until_joined();
    (echo, process, shim)
}

/// The instance is alive while it holds the lock of its record, even if the record's name is gone.
/// Only the lease is written again.
#[test]
fn a_run_directory_that_is_removed_ends_nothing() {
    let node = Node::new();
    let (echo, process, shim) = start_lone(&node, "1s");
    remove_run_dir(&node);
    serves_on(&node);
    until_renewed(&node, "a");
    drop((process, echo));
    shim.running.logs("gone instance=a");

    let (_process, _echo) = node.exec("a");
    eventually("the next instance is found", || {
        (shim.running.log().matches("probing instance=a").count() == 2).then_some(())
    });
    // Until an instance has answered a probe, the shim refuses.
    eventually("a listener", || TcpStream::connect(node.listen).ok());
    serves_on(&node);
    shim.leave();
}

/// An unusable file replaces the directory until the directory is restored.
#[test]
fn a_run_directory_that_cannot_be_used_ends_nothing() {
    let node = Node::new();
    let (_echo, _process, shim) = start_lone(&node, "1s");
    let other = node.run_dir().with_file_name("other");
    fs::write(&other, "a file").unwrap();
    exchange_run_dir(&node, &other);
    serves_on(&node);
    shim.running.warns(explained::LEASE_NOT_WRITTEN);
    exchange_run_dir(&node, &other);
    until_renewed(&node, "a");
    shim.until_joined();
    shim.leave();
}

/// Connected shims keep each other's listeners, and dial a newcomer. Their own sockets are gone.
#[test]
fn siblings_hand_over_in_a_run_directory_that_was_removed() {
    let node = Node::new();
    let options = ["--hold", "60s", "--lease", "1s"];
    let (_process_a, _echo_a) = node.exec("a");
    let a = node.launch("a", &options);
    a.until_joined();
    let (_process_b, _echo_b) = node.exec("b");
    let b = node.launch("b", &options);
    b.until_joined();
    know_one_another(&a, &b);
    let load = load::start_load(node.listen, 16, Duration::from_millis(100));
    load.more(100);
    remove_run_dir(&node);
    load.more(100);
    // Wait until both shims have written their leases again. The old leases have expired, and with
    // them each shim would regard the other as hanging.
    until_renewed(&node, "a");
    until_renewed(&node, "b");
    let (_process_c, _echo_c) = node.exec("c");
    let c = node.launch("c", &options);
    c.until_joined();
    c.until_counted("guard", 2);
    a.leave();
    load.more(200);
    let record = load.end();
    if !record.expect_no_loss(&b.running.log()) {
        return;
    }
    for shim in [&b, &c] {
        assert!(
            !shim.running.log().contains("ERROR"),
            "{}",
            shim.running.log()
        );
    }
}

/// Not as root, since root may read every file.
#[test]
fn a_record_that_cannot_be_read_for_a_while_is_alive() {
    let node = match Node::of(65534) {
        Ok(node) => node,
        Err(why) => return print_skipped(&why),
    };
    let (_echo, _process, shim) = start_lone(&node, LEASE);
    let record = node
        .run_dir()
        .join(node.listen.to_string())
        .join("instances/a.json");
    fs::set_permissions(&record, fs::Permissions::from_mode(0o000)).unwrap();
    shim.running
        .logs("a.json is ignored: the file cannot be opened");
    serves_on(&node);
    fs::set_permissions(&record, fs::Permissions::from_mode(0o600)).unwrap();
    expect_service(node.listen);
    assert!(
        !shim.running.log().contains("gone instance=a"),
        "{}",
        shim.running.log()
    );
    shim.leave();
}
