//! Whose the listeners are, what their connections inherit, and when they are said to be there.

use super::node::{Echo, Node, Shim, alone};
use super::support::net::{client_hello, connect, free_address, ping};
use super::support::process::{Running, berth, said};
use super::support::{MOMENT, eventually, skipped};
use berth_node::terms::{InstanceHealth, Phase};
use berth_os::socket;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;

/// Some user that is not us.
const STRANGER: u32 = 65534;

/// A thread that stands still until this is dropped: nobody can wait for a process that has one.
struct Stopped(Pid);

impl Stopped {
    fn new(thread: Pid) -> Self {
        ptrace::seize(thread, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(thread).unwrap();
        waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
        Self(thread)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have ended with its process.
        let _ = ptrace::detach(self.0, None);
    }
}

/// Another user's shim with a ready instance wants the port; it must not have it. None: it cannot be run here.
fn stranger_fails(listen: SocketAddr) -> Option<()> {
    let (instance, run_dir) = (Echo::new(), tempfile::tempdir().unwrap());
    nix::unistd::chown(run_dir.path(), Some(STRANGER.into()), Some(STRANGER.into())).ok()?;
    let mut version = berth(["--version"]);
    version.uid(STRANGER).gid(STRANGER).output().ok().filter(|output| output.status.success())?;
    let mut command = berth(["serve", "--probe", "tcp", "--rise", "1", "--instance", "stranger"]);
    command.args(["--listen", &listen.to_string(), "--backend", &instance.address.to_string()]);
    let mut running =
        Running::start(command.arg("--run-dir").arg(run_dir.path().join("run")).uid(STRANGER).gid(STRANGER));
    eventually("a stranger that fails", || {
        let log = running.log();
        assert!(!log.contains(" joined"), "the stranger has the port:\n{log}");
        (!running.is_running() || log.contains("cannot listen")).then_some(())
    });
    Some(())
}

#[test]
fn a_stranger_cannot_take_a_port_that_nobody_listens_on() {
    let _alone = alone();
    let (node, address) = (Node::new(), free_address());
    let shim = node.start("a", address, &["--hold", "100ms"]);
    if stranger_fails(node.listen).is_none() {
        return skipped(&format!("no process of uid {STRANGER} can be run here"));
    }
    let instance = Echo::at(address);
    shim.until_joined();
    ping(&mut connect(node.listen), &client_hello(64));
    drop(instance);
    shim.until("refusing", |status| status.state == Phase::Refusing);
    stranger_fails(node.listen).unwrap();
    let _instance = Echo::at(address);
    shim.until_joined();
    ping(&mut connect(node.listen), &client_hello(64));
}

/// The keepalive timers of the established connections of a local address, in seconds; none where there is none.
fn keepalive_timers(local: SocketAddr) -> Vec<Option<u64>> {
    let text = std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
    let timers = text.lines().filter_map(|line| {
        let entry = berth_os::proc_net::parse_line(line)?;
        let (timer, when) = line.split_ascii_whitespace().nth(5)?.split_once(':')?;
        // Its unit is a hundredth of a second (USER_HZ). 2 is the timer of keepalive.
        let seconds = u64::from_str_radix(when, 16).ok()? / 100;
        (entry.local == local && entry.state == 0x01).then_some((timer == "02").then_some(seconds))
    });
    timers.collect()
}

/// Connections through every listener that there is; what their timers say.
fn timers_of_many(node: &Node) -> Vec<Option<u64>> {
    let mut clients: Vec<_> = (0..32).map(|_| connect(node.listen)).collect();
    clients.iter_mut().for_each(|client| ping(client, &client_hello(64)));
    keepalive_timers(node.listen)
}

#[test]
fn connections_inherit_from_who_accepts_not_from_who_made_the_listener() {
    let _alone = alone();
    let (node, instance) = (Node::new(), Echo::new());
    let join = |id: &str, idle: &str, before: Option<Shim>| {
        let shim = node.joined(id, instance.address, &["--keepalive-idle", idle]);
        shim.until_counted("guard", u64::from(before.is_some()));
        before.map(Shim::leave);
        shim
    };
    let near = |expected: u64| move |timer: &Option<u64>| timer.is_some_and(|s| s <= expected && s > expected / 2);
    let a = join("a", "1000s", None);
    let timers = timers_of_many(&node);
    assert!(timers.len() >= 32 && timers.iter().all(near(1000)), "{timers:?}");
    let b = join("b", "9000s", Some(a));
    eventually("connections of a have ended", || keepalive_timers(node.listen).is_empty().then_some(()));
    let timers = timers_of_many(&node);
    assert!(timers.len() >= 32 && timers.iter().all(near(9000)), "{timers:?}");
    let _c = join("c", "0s", Some(b));
    eventually("connections of b have ended", || keepalive_timers(node.listen).is_empty().then_some(()));
    let timers = timers_of_many(&node);
    assert!(timers.len() >= 32 && timers.iter().all(Option::is_none), "{timers:?}");
    assert_eq!(node.listeners().len(), 2, "of the first two: both were taken over");
}

#[test]
fn others_who_share_the_port_are_noticed_before_anybody_leaves() {
    let _alone = alone();
    let (node, instance) = (Node::new(), Echo::new());
    let stranger = socket::bind(node.listen, false).unwrap();
    socket::start_listening(stranger.as_fd(), 16).unwrap();
    let a = node.joined("a", instance.address, &["--lease", "1s"]);
    let line = a.running.logs("the port is shared with");
    assert!(line.contains("WARN") && line.contains(&format!("pid {}", std::process::id())), "{line}");
    a.until("one of others", |status| status.foreign_listeners == 1);
    let status = said(berth(["status", "--run-dir"]).arg(node.run_dir())).1;
    assert!(status.contains("the port is shared with a listener of others"), "{status}");
    drop(stranger);
    a.until("none of others", |status| status.foreign_listeners == 0);
    // A sibling's is none of others, not even while its guard is on its way.
    let b = node.joined("b", instance.address, &["--lease", "1s"]);
    b.until_counted("guard", 1);
    let said = a.running.log() + &b.leave();
    assert_eq!(said.matches("the port is shared with").count(), 1, "{said}");
}

#[test]
fn a_shim_has_left_when_its_accept_loops_have_ended() {
    let _alone = alone();
    let (node, instance) = (Node::new(), Echo::new());
    // The lease must not run out: what is looked at is a leave, not a hang.
    let options = ["--lease", "60s", "--threads", "1"];
    let a = node.joined("a", instance.address, &options);
    let b = node.joined("b", instance.address, &options);
    a.until_counted("guard", 1);
    b.until_counted("guard", 1);
    let thread = eventually("the relaying thread", || a.thread("berth-relay-0"));
    let stopped = Stopped::new(thread);
    let drained = said(berth(["drain", "--instance", "a", "--run-dir"]).arg(node.run_dir()));
    assert_eq!(drained.0, Some(0), "{drained:?}");
    // B covers A's listener: nothing but the accept loop keeps A.
    b.until_counted("accept", 2);
    let until = std::time::Instant::now() + 3 * MOMENT;
    while std::time::Instant::now() < until {
        let state = a.status().state;
        assert_eq!(state, Phase::Joined, "{}", a.running.log());
    }
    drop(stopped);
    a.until("left", |status| status.state == Phase::Left);
}

/// A sibling lets go of a listener when another says that it accepts from it.
#[test]
fn a_shim_accepts_when_its_accept_loop_runs() {
    let _alone = alone();
    let (node, address) = (Node::new(), free_address());
    // The lease must not run out: what is looked at is a start, not a hang.
    let shim = node.start("a", address, &["--lease", "60s", "--threads", "1"]);
    let thread = eventually("the relaying thread", || shim.thread("berth-relay-0"));
    let stopped = Stopped::new(thread);
    let _instance = Echo::at(address);
    shim.until("its instance is ready", |status| {
        status.instances.iter().any(|instance| instance.own && instance.health == InstanceHealth::Ready)
    });
    shim.until_counted("accept", 1);
    let until = std::time::Instant::now() + 3 * MOMENT;
    while std::time::Instant::now() < until {
        let state = shim.status().state;
        assert_eq!(state, Phase::Waiting, "{}", shim.running.log());
    }
    drop(stopped);
    shim.until_joined();
    ping(&mut connect(node.listen), &client_hello(64));
}

/// Nothing may wait for ever for a thread that is blocked: neither the deadline of the drain nor the end.
#[test]
fn a_shim_whose_thread_is_blocked_leaves_and_ends() {
    let _alone = alone();
    let (node, instance, second) = (Node::new(), Echo::new(), Echo::new());
    let options = ["--lease", "1s", "--threads", "1", "--drain-timeout", "1s"];
    let mut a = node.joined("a", instance.address, &options);
    let mut client = connect(node.listen);
    ping(&mut client, &client_hello(64));
    let b = node.joined("b", second.address, &options);
    a.until_counted("guard", 1);
    b.until_counted("guard", 1);
    let thread = eventually("the relaying thread", || a.thread("berth-relay-0"));
    let _stopped = Stopped::new(thread);
    a.until("blocked", |status| status.blocked);
    let ready = said(berth(["ready", "--instance", "a", "--run-dir"]).arg(node.run_dir()));
    assert_eq!(ready.0, Some(1), "{ready:?}");
    assert!(ready.1.contains("does not answer"), "{ready:?}");
    a.running.signal(Signal::SIGTERM);
    a.until("left", |status| status.state == Phase::Left);
    drop(instance);
    a.running.logs("--drain-timeout is over");
    a.running.logs("does not end");
    // It is this thread's to reap.
    waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
    assert!(a.running.ended().code().is_some(), "{}", a.running.log());
}

/// Each try that fails costs system calls, and a look into every socket of the host, on the thread that keeps the lease.
#[test]
fn a_port_that_another_holds_is_tried_four_times_a_second() {
    const TRIES: u32 = 8;
    let _alone = alone();
    let (node, first) = (Node::new(), Echo::new());
    let a = node.launch("a", &[]);
    let old = node.record("a", first.address);
    a.until_joined();
    assert_eq!(said(berth(["drain", "--instance", "a", "--run-dir"]).arg(node.run_dir())).0, Some(0));
    a.until("left", |status| status.state == Phase::Left);
    let plain = std::net::TcpListener::bind(node.listen).unwrap();
    drop((first, old));
    a.until("its instance is gone", |status| status.instances.iter().all(|instance| !instance.own));
    let again = Echo::new();
    let _new = node.record("a", again.address);
    eventually("a try", || (a.counted("listen", "failed") > 0).then_some(()));
    let (began, before) = (std::time::Instant::now(), a.counted("listen", "failed"));
    eventually("more tries", || (a.counted("listen", "failed") >= before + u64::from(TRIES)).then_some(()));
    let took = began.elapsed();
    assert!(took >= (TRIES - 1) * std::time::Duration::from_millis(250), "{TRIES} tries in {took:?}");
    drop(plain);
    a.until_joined();
    let log = a.running.log();
    assert_eq!(log.matches("cannot listen, trying again").count(), 1, "{log}");
    assert!(log.contains(&format!("pid {}", std::process::id())), "{log}");
}

/// Its own socket was never listened on: it took an orphan into use. Whoever comes after it needs the port.
#[test]
fn a_shim_that_took_an_orphan_frees_the_port_when_it_has_left() {
    let _alone = alone();
    let (node, instance) = (Node::new(), Echo::new());
    let mut shim = node.joined("a", instance.address, &[]);
    for id in ["b", "c"] {
        let next = node.joined(id, instance.address, &[]);
        shim.until_counted("guard", 1);
        next.until_counted("guard", 1);
        shim.leave();
        shim = next;
    }
    assert_eq!(shim.counted("listen", "ok"), 0, "C took A's listener into use");
    let mut stream = connect(node.listen);
    ping(&mut stream, &client_hello(64));
    let drained = said(berth(["drain", "--instance", "c", "--run-dir"]).arg(node.run_dir()));
    assert_eq!(drained.0, Some(0), "{drained:?}");
    shim.until("left", |status| status.state == Phase::Left);
    // As an apiserver without berth does.
    let plain = std::net::TcpListener::bind(node.listen);
    assert!(plain.is_ok(), "{plain:?}\n{}", shim.running.log());
    ping(&mut stream, b"still there");
}
