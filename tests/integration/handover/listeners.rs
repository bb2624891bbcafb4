//! Whose the listeners are, what their connections inherit, and when they are announced.

use super::node::{ACCEPTS, Echo, Node, know_one_another};
use crate::support::net::{free_address, ping, relayed_client, served, served_client};
use crate::support::process::{Running, berth, output_of};
use crate::support::{MOMENT, eventually, skipped};
use berth_node::terms::{InstanceHealth, Phase};
use berth_os::socket;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

/// Some user that is not us.
const STRANGER: u32 = 65534;

/// Another user's shim with a ready instance wants the port; it must not have it. None: it cannot be run here.
fn stranger_fails(listen: SocketAddr) -> Option<()> {
    let (instance, run_dir) = (Echo::new(), tempfile::tempdir().unwrap());
    nix::unistd::chown(run_dir.path(), Some(STRANGER.into()), Some(STRANGER.into())).ok()?;
    let mut version = berth(["--version"]);
    version
        .uid(STRANGER)
        .gid(STRANGER)
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let mut command = berth(["serve", "--probe", "tcp", "--instance", "stranger"]);
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
        return skipped(&format!("no process of uid {STRANGER} can be run here"));
    }
    let instance = Echo::at(address);
    shim.until_joined();
    served(node.listen);
    drop(instance);
    shim.until("refusing", |status| status.state == Phase::Refusing);
    stranger_fails(node.listen).unwrap();
    let _instance = Echo::at(address);
    shim.until_joined();
    served(node.listen);
}

/// The keepalive timers of the established connections of a local address, in seconds; none where there is none. No
/// answer while another timer is set, as until the last segment is acknowledged: a connection has one at a time.
fn keepalive_timers(local: SocketAddr) -> Option<Vec<Option<u64>>> {
    let text = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let timers = text.lines().filter_map(|line| {
        let entry = berth_os::proc_net::parse_line(line)?;
        let (timer, when) = line.split_ascii_whitespace().nth(5)?.split_once(':')?;
        // Its unit is a hundredth of a second (USER_HZ). 2 is the timer of keepalive, 0 is none.
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

/// A client that is gone without a word is found, by the kernel.
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
    // They are counted at each renewal, a third of its lease apart at least.
    let (lease, looks) = ("2s", Duration::from_secs(2) / 3);
    let a = node.joined("a", instance.address, &["--lease", lease]);
    a.until("one of others", |status| status.foreign_listeners == 1);
    eventually("a status that says so", || {
        let status = node.asked(&["status"]).1;
        status
            .contains("the port is shared with a listener that no responding shim holds")
            .then_some(())
    });
    drop(stranger);
    a.until("none of others", |status| status.foreign_listeners == 0);
    // A sibling's is none of others, not even while its guard is on its way. It counts if it is found by two renewals, so
    // a sibling shows nothing that took as long as that, as it does on a machine with much to do.
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

/// It hung before it gave a guard: its listener has to go, and its process with it.
#[test]
fn a_shim_that_hangs_is_said_to_hang_and_not_to_have_ended() {
    let (node, instance) = (Node::new(), Echo::new());
    let a = node.joined("a", instance.address, &["--lease", "1s"]);
    a.freeze();
    let b = node.joined("b", instance.address, &["--lease", "1s"]);
    let warned = b.running.logs("listeners on the berth's port");
    assert!(
        warned.contains("no shim that answers") && warned.contains("end a shim that hangs"),
        "{warned}"
    );
    let (status, out, log) =
        output_of(&mut node.berth_with(&["status", "--run-dir", node.run_dir().to_str().unwrap()]));
    assert_eq!(status, Some(1), "{out}{log}");
    let line = out.lines().find(|line| line.contains(" a ")).unwrap();
    assert!(
        line.contains("does not answer within 1s") && !line.contains("ended"),
        "{out}"
    );
    assert!(out.contains("end a shim that hangs"), "{out}");
}

#[test]
fn a_shim_has_left_when_its_accept_loops_have_ended() {
    let (node, instance) = (Node::new(), Echo::new());
    // The lease must not run out: what is tested is a leave, not a hang.
    let options = ["--lease", "10m", "--threads", "1"];
    let (a, b) = node.pair([instance.address, instance.address], &options);
    let stopped = a.stop(ACCEPTS);
    let drained = node.asked(&["drain", "--instance", "a"]);
    assert_eq!(drained.0, Some(0), "{drained:?}");
    // B covers A's listener: nothing but the accept loop keeps A.
    b.until_counted("accept", 2);
    let until = Instant::now() + 3 * MOMENT;
    while Instant::now() < until {
        let state = a.status().state;
        assert_eq!(state, Phase::Joined, "{}", a.running.log());
    }
    drop(stopped);
    a.until("left", |status| status.state == Phase::Left);
}

/// A sibling closes its duplicate of a listener when another reports that it accepts from it.
#[test]
fn a_shim_accepts_when_its_accept_loop_runs() {
    let (node, address) = (Node::new(), free_address());
    // The lease must not run out: what is tested is a start, not a hang.
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
    served(node.listen);
}

/// Nothing may wait for ever for a thread that is blocked: neither the deadline of the drain nor the end.
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
    let ready = node.asked(&["ready", "--timeout", "30s", "--instance", "a"]);
    assert_eq!(ready.0, Some(1), "{ready:?}");
    assert!(
        ready
            .1
            .contains("a relaying thread of the shim of instance a does not answer"),
        "{ready:?}"
    );
    a.running.signal(Signal::SIGTERM);
    a.until("left", |status| status.state == Phase::Left);
    drop(instance);
    a.running.logs("--drain-timeout has expired");
    a.running.logs("does not end");
    // It is this thread's to reap.
    waitpid(stopped.0, Some(WaitPidFlag::__WALL)).unwrap();
    assert!(a.running.ended().code().is_some(), "{}", a.running.log());
}

/// Its own socket was never listened on: it took an orphan into use. Its successor needs the port.
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
    let drained = node.asked(&["drain", "--instance", "c"]);
    assert_eq!(drained.0, Some(0), "{drained:?}");
    shim.until("left", |status| status.state == Phase::Left);
    // As an apiserver without berth does.
    let plain = std::net::TcpListener::bind(node.listen);
    assert!(plain.is_ok(), "{plain:?}\n{}", shim.running.log());
    ping(&mut stream, b"still there");
}
