//! Names of siblings: a process with another sibling's name, and a sibling that comes back.

use super::liars::Peer;
use super::node::{Echo, Node};
use crate::support::load;
use crate::support::net::expect_service;
use crate::support::{eventually, print_skipped};
use berth_node::instance_id::InstanceId;
use berth_node::registry::BerthDir;
use berth_node::registry::lease::{self, Lease};
use berth_node::terms::{Phase, ShimId};
use berth_os::{clock, explained, seqpacket, socket};
use nix::sys::signal::Signal;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};

/// A sibling played by the test: a lease and a socket.
struct Sibling {
    berth: BerthDir,
    lease: Lease,
    listener: OwnedFd,
}

impl Sibling {
    fn new(node: &Node, holder: u64) -> Self {
        let (berth, instance) = (node.berth(), InstanceId::parse("z").unwrap());
        let listener = seqpacket::bind_listener(&berth.socket_path(&instance).unwrap()).unwrap();
        let lease = Lease {
            version: lease::VERSION,
            instance,
            holder_identity: ShimId(holder),
            // The shim waits for its own lease before it reports a missing connection to a live
            // sibling. The sibling's lease has to last longer.
            lease_duration_seconds: 60,
            acquire_time: SystemTime::now(),
            renew_time: SystemTime::now(),
            lease_transitions: 0,
            backend: None,
            state: Phase::Waiting,
            ready: false,
            reachable: false,
            listen: vec![node.listen],
            berth_version: "0.1.0".to_owned(),
            boot_id: clock::boot_id().unwrap(),
            expires_boottime_ms: 0,
        };
        let mut sibling = Self {
            berth,
            lease,
            listener,
        };
        sibling.renew();
        sibling
    }

    fn renew(&mut self) {
        self.lease
            .renew(clock::read_boottime().unwrap(), SystemTime::now());
        lease::write(&self.berth, &self.lease).unwrap();
    }

    /// Renews the sibling's lease. If the shim has dialled, answers as the given holder. The shim
    /// may have closed the connection before, since it waits only a second for an answer.
    #[track_caller]
    fn dialled(&mut self, holder: u64) -> Option<Peer> {
        self.renew();
        let peer = Peer(seqpacket::accept(self.listener.as_fd()).ok()?);
        let asked = peer.receives()?;
        assert!(asked.contains("join"), "{asked}");
        let reply = format!(r#"{{"joined":{{"holder":{holder}}}}}"#);
        seqpacket::transmit_message(peer.0.as_fd(), reply.as_bytes(), &[]).ok()?;
        Some(peer)
    }

    /// Renews the lease until the shim dials, answers as the sibling, and gets the shim's listener.
    #[track_caller]
    fn connected(&mut self, node: &Node) -> Peer {
        let holder = self.lease.holder_identity.0;
        eventually("a connection of the shim", || {
            self.dialled(holder).filter(|peer| gets_guards(peer, node))
        })
    }
}

/// True if the peer gets the shim's listener before the connection ends.
#[track_caller]
fn gets_guards(peer: &Peer, node: &Node) -> bool {
    while let Some(update) = peer.receives() {
        if update.contains("\"guards\":[[") && update.contains(&node.listen.to_string()) {
            return true;
        }
    }
    false
}

#[test]
fn a_connection_that_ends_is_made_again_while_the_sibling_lives() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined("a", instance.address, &[]);
    // Of two siblings, the one with the smaller name dials.
    let mut sibling = Sibling::new(&node, u64::MAX);
    for _ in 0..2 {
        let peer = sibling.connected(&node);
        peer.sends("an end", &[]);
        peer.receives_the_end();
    }
    // The sibling may dial, too. Meanwhile the shim does not dial, since the sibling's lease was
    // not renewed.
    let peer = Peer::joined(&shim.path, u64::MAX);
    assert!(gets_guards(&peer, &node));
    expect_service(node.listen);
}

#[test]
fn a_process_with_a_connected_siblings_name_is_refused() {
    let (node, instance) = (Node::new(), Echo::new());
    let (a, b) = node.pair([instance.address, instance.address], &[]);
    let berth = node.berth();
    let holder = |id: &str| {
        lease::read(&berth, &InstanceId::parse(id).unwrap())
            .unwrap()
            .unwrap()
            .holder_identity
            .0
    };
    for (name, why) in [
        (holder("b"), "connected already"),
        (holder("a"), "this shim's own"),
    ] {
        let peer = Peer::dial(&a.path);
        peer.sends(
            &format!(r#"{{"version":1,"ask":{{"join":{{"holder":{name}}}}}}}"#),
            &[],
        );
        peer.receives_refusal(why);
        a.running.logs(explained::FALSE_NAME);
    }
    eventually("two conflicts", || {
        (a.counted("connect", "conflict") == 2).then_some(())
    });
    // The real sibling is not regarded as gone. Its lease is long, so only a message from the
    // sibling can hand its listener over.
    assert!(
        !a.running.log().contains("a sibling is gone"),
        "{}",
        a.running.log()
    );
    let load = load::start_load(node.listen, 16, Duration::from_millis(100));
    load.more(50);
    b.leave();
    load.more(50);
    let record = load.end();
    record.expect_no_loss(&a.running.log());
}

/// A sibling that starts while a shim hangs dials again and again. Its earlier requests are not a
/// second process with the same name.
#[test]
fn requests_that_waited_while_a_shim_hung_are_no_conflict() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined("a", instance.address, &[]);
    let join = format!(
        r#"{{"version":1,"ask":{{"join":{{"holder":{}}}}}}}"#,
        u64::MAX
    );
    shim.freeze();
    for _ in 0..3 {
        Peer::dial(&shim.path).sends(&join, &[]);
    }
    let last = Peer::dial(&shim.path);
    last.sends(&join, &[]);
    shim.running.signal(Signal::SIGCONT);
    assert!(
        last.receives()
            .is_some_and(|reply| reply.contains("joined")),
        "{}",
        shim.running.log()
    );
    assert_eq!(
        shim.counted("connect", "conflict"),
        0,
        "{}",
        shim.running.log()
    );
}

/// While the shim waits for a sibling, the shim checks whether the sibling has died. Events must
/// not make it check too often.
#[test]
fn a_shim_that_waits_for_a_sibling_does_not_dial_at_each_event() {
    let (node, instance) = (Node::new(), Echo::new());
    let began = Instant::now();
    // Of two siblings, the one with the smaller name dials, so every connection here is such a
    // check.
    let sibling = Sibling::new(&node, 0);
    let shim = node.start("a", instance.address, &[]);
    let id = InstanceId::parse("a").unwrap();
    let own = eventually("a lease", || lease::read(&node.berth(), &id).unwrap())
        .holder_identity
        .0;
    for _ in 0..300 {
        let peer = Peer::dial(&shim.path);
        peer.sends(
            &format!(r#"{{"version":1,"ask":{{"join":{{"holder":{own}}}}}}}"#),
            &[],
        );
        peer.receives_refusal("");
    }
    let looks = std::iter::from_fn(|| seqpacket::accept(sibling.listener.as_fd()).ok()).count();
    let most = 2 + began.elapsed().as_millis() as usize / 50;
    assert!((1..=most).contains(&looks), "{looks} looks, at most {most}");
}

/// A sibling has a lease, but its socket cannot be reached. SELinux, another mount or a full /run
/// have this effect.
#[test]
fn a_sibling_that_cannot_be_reached_is_reported_within_a_lease() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined("a", instance.address, &["--lease", "1s"]);
    // A sibling that the shim dials, and a sibling that should dial the shim.
    for (said_before, holder) in [u64::MAX, 0].into_iter().enumerate() {
        let mut sibling = Sibling::new(&node, holder);
        let path = node.berth().socket_path(&sibling.lease.instance).unwrap();
        std::fs::remove_file(&path).unwrap();
        eventually("a sibling without a connection", || {
            sibling.renew();
            (shim.metric("berth_siblings_unconnected", &[]) == 1).then_some(())
        });
        assert_eq!(shim.status().unconnected, [sibling.lease.instance.clone()]);
        // With a short lease, the shim itself may not be ready on a busy machine.
        eventually("the shim is ready", || {
            let (status, ..) = node.ask_shims(&["ready", "--timeout", "30s", "--instance", "a"]);
            (status == Some(0)).then_some(())
        });
        let warnings = || {
            shim.running
                .log()
                .matches(explained::SIBLING_NOT_CONNECTED)
                .count()
        };
        eventually("a warning", || {
            (warnings() == said_before + 1).then_some(())
        });

        // From now on, the shim can dial the sibling.
        sibling.listener = seqpacket::bind_listener(&path).unwrap();
        let peer = sibling.connected(&node);
        eventually("all is well", || {
            sibling.renew();
            (shim.metric("berth_siblings_unconnected", &[]) == 0).then_some(())
        });
        assert_eq!(
            warnings(),
            said_before + 1,
            "said once: {}",
            shim.running.log()
        );
        drop(peer);
        lease::remove(&node.berth(), &sibling.lease).unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}

/// No shim here has a guard of the sibling's listener. The listener still does not count as
/// foreign.
#[test]
fn the_listener_of_a_sibling_that_cannot_be_reached_is_not_foreign() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined("a", instance.address, &["--lease", "1s"]);
    let mut sibling = Sibling::new(&node, u64::MAX);
    std::fs::remove_file(node.berth().socket_path(&sibling.lease.instance).unwrap()).unwrap();
    let theirs = socket::bind(node.listen, false).unwrap();
    socket::start_listening(theirs.as_fd(), 16).unwrap();
    let looks = || shim.metric("berth_lease_renewals_total", &[("result", "ok")]);
    let before = looks();
    eventually("a sibling without a connection, and three looks", || {
        sibling.renew();
        (shim.status().unconnected.len() == 1 && looks() >= before + 3).then_some(())
    });
    assert_eq!(shim.status().foreign_listeners, 0, "{}", shim.running.log());
    // Remove both records of the sibling: its lease, and its name in the shim.
    lease::remove(&node.berth(), &sibling.lease).unwrap();
    drop(Peer::joined(&shim.path, u64::MAX));
    shim.until("one of others", |status| status.foreign_listeners == 1);
}

/// A root shim could reach the sibling, and would give its listeners to another uid.
#[test]
fn a_sibling_that_is_dialled_must_be_of_the_same_uid() {
    let other = match Node::of(65534) {
        Ok(node) => node,
        Err(why) => return print_skipped(&why),
    };
    let (node, instance) = (Node::new(), Echo::new());
    let stranger = other.start("z", instance.address, &[]);
    let shim = node.joined("a", instance.address, &[]);
    let mut sibling = Sibling::new(&node, u64::MAX);
    let path = node.berth().socket_path(&sibling.lease.instance).unwrap();
    // The stranger's socket gets the sibling's name and keeps its own name. Without its own name,
    // the stranger would listen on a new socket.
    std::fs::remove_file(&path).unwrap();
    std::fs::hard_link(&stranger.path, &path).unwrap();
    eventually("a refusal", || {
        sibling.renew();
        (shim.counted("connect", "refused") > 0).then_some(())
    });
    shim.running.logs(explained::LISTENERS_NOT_SHARED);
    assert!(
        !stranger
            .running
            .log()
            .contains(explained::SIBLING_OF_ANOTHER_UID),
        "{}",
        stranger.running.log()
    );
}

#[test]
fn a_process_that_answers_for_a_sibling_must_hold_its_lease() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined("a", instance.address, &[]);
    let mut sibling = Sibling::new(&node, u64::MAX);
    eventually("an answer that the shim got", || {
        if let Some(peer) = sibling.dialled(7) {
            peer.receives_the_end();
        }
        (shim.counted("connect", "conflict") > 0).then_some(())
    });
    shim.running.logs(explained::FALSE_NAME);
    // The shim still connects to the real sibling.
    sibling.connected(&node);
}
