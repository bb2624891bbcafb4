//! Owners of listeners, socket options that connections inherit, and the moment at which listeners
//! are announced.

use super::node::{ACCEPTS, Echo, Node, know_one_another};
use crate::support::net::{expect_service, free_address, ping, relayed_client, served_client};
use crate::support::process::{Running, berth_command, output_of};
use crate::support::{MOMENT, eventually, print_skipped};
use berth_node::ipc;
use berth_node::terms::{InstanceHealth, Phase};
use berth_os::{explained, socket};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

/// Some user other than the test's.
const STRANGER: u32 = 65534;

/// Starts another user's shim with a ready instance, which must not get the port. `None` if the
/// test cannot run as two users here.
fn stranger_fails(listen: SocketAddr) -> Option<()> {
    let (instance, run_dir) = (Echo::new(), tempfile::tempdir().unwrap());
    nix::unistd::chown(run_dir.path(), Some(STRANGER.into()), Some(STRANGER.into())).ok()?;
    let mut version = berth_command(["--version"]);
    version
        .uid(STRANGER)
        .gid(STRANGER)
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let mut command = berth_command(["serve", "--probe", "tcp", "--instance", "stranger"]);
    command.args([
        "--listen",
        &listen.to_string(),
        "--backend",
        &instance.address.to_string(),
    ]);
    let mut running = Running::start(
        command
            .arg("--run-dir")
            .arg(run_dir.path().join("run"))
            .uid(STRANGER)
            .gid(STRANGER),
    );
    eventually("a stranger that fails", || {
        let log = running.log();
        assert!(
            !log.contains(" joined"),
            "the stranger has the port:\n{log}"
        );
        (!running.is_running() || log.contains("cannot listen")).then_some(())
    });
    Some(())
}

#[test]
fn another_user_cannot_take_a_port_without_a_listener() {
    let (node, address) = (Node::new(), free_address());
    let shim = node.start("a", address, &["--hold", "100ms"]);
    if stranger_fails(node.listen).is_none() {
        return print_skipped(&format!("no process of uid {STRANGER} can be run here"));
    }
    let instance = Echo::at(address);
    shim.until_joined();
    expect_service(node.listen);
    drop(instance);
    shim.until("refusing", |status| status.state == Phase::Refusing);
    stranger_fails(node.listen).unwrap();
    let _instance = Echo::at(address);
    shim.until_joined();
    expect_service(node.listen);
}

/// Returns the keepalive timers of the established connections of a local address, in seconds, with
/// `None` for a connection without timer. The kernel shows one timer of a connection at a time. If
/// it shows another timer than keepalive, as until the last segment is acknowledged, the function
/// returns `None`.
fn keepalive_timers(local: SocketAddr) -> Option<Vec<Option<u64>>> {
    let text = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let timers = text.lines().filter_map(|line| {
        let entry = berth_os::proc_net::parse_line(line)?;
        let (timer, when) = line.split_ascii_whitespace().nth(5)?.split_once(':')?;
        // The unit is a hundredth of a second (USER_HZ). 2 is the keepalive timer, 0 means no
        // timer.
        let seconds = u64::from_str_radix(when, 16).ok()? / 100;
        let keepalive = match timer {
            "00" => Some(None),
            "02" => Some(Some(seconds)),
            _ => None,
        };
        (entry.local == local && entry.state == 0x01).then_some(keepalive)
    });
    timers.collect()
}

/// The kernel finds clients that disappeared without FIN or RST.
#[test]
fn connections_have_keepalive() {
    let (node, instance) = (Node::new(), Echo::new());
    let _shim = node.joined("a", instance.address, &[]);
    let _client = served_client(node.listen);
    let timers = eventually("a connection without another timer", || {
        keepalive_timers(node.listen)
    });
    assert!(
        !timers.is_empty()
            && timers
                .iter()
                .all(|timer| timer.is_some_and(|seconds| seconds <= 30)),
        "{timers:?}"
    );
}

#[test]
fn foreign_listeners_are_counted_before_anybody_leaves() {
    let (node, instance) = (Node::new(), Echo::new());
    let stranger = socket::bind(node.listen, false).unwrap();
    socket::start_listening(stranger.as_fd(), 16).unwrap();
    // The shim counts foreign listeners when it renews its lease, and two renewals are at least a
    // third of the lease apart.
    let (lease, looks) = ("2s", Duration::from_secs(2) / 3);
    let a = node.joined("a", instance.address, &["--lease", lease]);
    a.until("one of others", |status| status.foreign_listeners == 1);
    drop(stranger);
    a.until("none of others", |status| status.foreign_listeners == 0);
    // A sibling's listener is not foreign, even while its guard is in transit. A foreign listener
    // is counted only when two renewals have found it. If the guard took longer than that, as on a
    // busy machine, the count proves nothing, and the test tries the next sibling.
    eventually("a sibling whose guard came soon", || {
        let (began, before) = (Instant::now(), a.counted("guard", "ok"));
        let b = node.joined("b", instance.address, &[]);
        b.until_counted("guard", 1);
        a.until_counted("guard", before + 1);
        let (counted, took) = (
            [&a, &b].map(|shim| shim.status().foreign_listeners),
            began.elapsed(),
        );
        assert!(
            took >= looks || counted == [0, 0],
            "{counted:?}: {}",
            a.running.log()
        );
        b.leave();
        (took < looks).then_some(())
    });
}

/// The shim hangs before its sibling has a guard of its listener. The listener is gone only when
/// the process is gone, too.
#[test]
fn a_shim_that_hangs_is_reported_as_hanging_and_not_as_ended() {
    let (node, instance) = (Node::new(), Echo::new());
    let a = node.joined("a", instance.address, &["--lease", "1s"]);
    a.freeze();
    let b = node.joined("b", instance.address, &["--lease", "1s"]);
    b.running.warns(explained::FOREIGN_LISTENER);
    let (status, out, log) =
        output_of(&mut node.berth_with(&["status", "--run-dir", node.run_dir().to_str().unwrap()]));
    assert_eq!(status, Some(1), "{out}{log}");
    assert!(out.contains(ipc::HANGS) && !out.contains("ended"), "{out}");
}

#[test]
fn a_shim_has_left_when_its_accept_loops_have_ended() {
    let (node, instance) = (Node::new(), Echo::new());
    // The lease must not expire: the test is about a leave, not a hang.
    let options = ["--lease", "10m", "--threads", "1"];
    let (a, b) = node.pair([instance.address, instance.address], &options);
    let stopped = a.stop(ACCEPTS);
    let drained = node.ask_shims(&["drain", "--instance", "a"]);
    assert_eq!(drained.0, Some(0), "{drained:?}");
    // B accepts from A's listener, so A waits for nothing but its own accept loop.
    b.until_counted("accept", 2);
    let until = Instant::now() + 3 * MOMENT;
    while Instant::now() < until {
        let state = a.status().state;
        assert_eq!(state, Phase::Joined, "{}", a.running.log());
    }
    drop(stopped);
    a.until("left", |status| status.state == Phase::Left);
}

/// When a shim reports that it accepts, a sibling closes its duplicate of the shim's listener. So
/// the shim must not report that too early.
#[test]
fn a_shim_accepts_when_its_accept_loop_runs() {
    let (node, address) = (Node::new(), free_address());
    // The lease must not expire: the test is about a start, not a hang.
    let shim = node.start("a", address, &["--lease", "10m", "--threads", "1"]);
    let stopped = shim.stop(ACCEPTS);
    let _instance = Echo::at(address);
    shim.until("its instance is ready", |status| {
        status
            .instances
            .iter()
            .any(|instance| instance.own && instance.health == InstanceHealth::Ready)
    });
    shim.until_counted("accept", 1);
    let until = Instant::now() + 3 * MOMENT;
    while Instant::now() < until {
        let state = shim.status().state;
        assert_eq!(state, Phase::Waiting, "{}", shim.running.log());
    }
    drop(stopped);
    shim.until_joined();
    expect_service(node.listen);
}

/// The deadline of the drain and the end of the shim must not wait for a blocked thread.
#[test]
fn a_shim_whose_thread_is_blocked_leaves_and_ends() {
    let (node, instance, second) = (Node::new(), Echo::new(), Echo::new());
    let options = [
        "--lease",
        "1s",
        "--threads",
        "1",
        "--drain-timeout",
        "1s",
        "--speedup",
        "10",
    ];
    let mut a = node.joined("a", instance.address, &options);
    let _client = relayed_client(node.listen);
    let b = node.joined("b", second.address, &[]);
    know_one_another(&a, &b);
    let stopped = a.stop(ACCEPTS);
    a.until("blocked", |status| status.blocked);
    let ready = node.ask_shims(&["ready", "--timeout", "30s", "--instance", "a"]);
    assert_eq!(ready.0, Some(1), "{ready:?}");
    a.running.signal(Signal::SIGTERM);
    a.until("left", |status| status.state == Phase::Left);
    drop(instance);
    a.running.logs(explained::DRAIN_TIMEOUT);
    a.running.logs(explained::THREAD_DOES_NOT_END);
    // The test's thread has to reap the traced thread.
    waitpid(stopped.0, Some(WaitPidFlag::__WALL)).unwrap();
    assert!(a.running.ended().code().is_some(), "{}", a.running.log());
}

/// The shim took over the listener of a shim that left, and never listened on a socket of its own.
/// When the shim has left, its successor must be able to bind the port.
#[test]
fn a_shim_that_took_an_orphan_frees_the_port_when_it_has_left() {
    let (node, instance) = (Node::new(), Echo::new());
    let mut shim = node.joined("a", instance.address, &[]);
    for id in ["b", "c"] {
        let next = node.joined(id, instance.address, &[]);
        know_one_another(&shim, &next);
        shim.leave();
        shim = next;
    }
    assert_eq!(
        shim.counted("listen", "ok"),
        0,
        "C took A's listener into use"
    );
    let mut stream = served_client(node.listen);
    let drained = node.ask_shims(&["drain", "--instance", "c"]);
    assert_eq!(drained.0, Some(0), "{drained:?}");
    shim.until("left", |status| status.state == Phase::Left);
    // An apiserver without berth binds the same way.
    let plain = std::net::TcpListener::bind(node.listen);
    assert!(plain.is_ok(), "{plain:?}\n{}", shim.running.log());
    ping(&mut stream, b"still there");
}
