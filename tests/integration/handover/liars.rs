//! A peer on the shim's socket that sends invalid messages.

use super::node::{Echo, Node, Shim};
use crate::support::net::{expect_service, fresh_ip};
use crate::support::{eventually, print_skipped};
use berth_os::explained;
use berth_os::{seqpacket, socket};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// A connection to the shim's socket.
pub(super) struct Peer(pub(super) OwnedFd);

impl Peer {
    pub(super) fn dial(path: &Path) -> Self {
        Self(seqpacket::dial_path(path).unwrap())
    }

    /// Connects and joins under a name, once the shim has seen the end of the last peer with the
    /// name.
    #[track_caller]
    pub(super) fn joined(path: &Path, holder: u64) -> Self {
        eventually("a place among the siblings", || {
            let peer = Self::dial(path);
            peer.sends(
                &format!(r#"{{"version":1,"ask":{{"join":{{"holder":{holder}}}}}}}"#),
                &[],
            );
            peer.receives()
                .is_some_and(|reply| reply.contains("joined"))
                .then_some(peer)
        })
    }

    pub(super) fn sends(&self, message: &str, descriptors: &[BorrowedFd<'_>]) {
        seqpacket::transmit_message(self.0.as_fd(), message.as_bytes(), descriptors).unwrap();
    }

    /// Returns the next message. `None` at the end of the connection.
    #[track_caller]
    pub(super) fn receives(&self) -> Option<String> {
        let mut buffer = vec![0; seqpacket::MAX_MESSAGE];
        let received = eventually("a message or the end", || {
            seqpacket::receive_message(self.0.as_fd(), &mut buffer).ok()
        });
        (received.length > 0)
            .then(|| String::from_utf8_lossy(&buffer[..received.length]).into_owned())
    }

    #[track_caller]
    pub(super) fn receives_the_end(&self) {
        while self.receives().is_some() {}
    }

    /// Checks that the shim refuses the request and ends the connection.
    #[track_caller]
    pub(super) fn receives_refusal(&self, part: &str) {
        let reply = self.receives().expect("a reply");
        let json: serde_json::Value = serde_json::from_str(&reply).unwrap();
        assert!(
            json["refused"]
                .as_str()
                .is_some_and(|why| why.contains(part)),
            "{reply}"
        );
        self.receives_the_end();
    }
}

fn cookie_of(listener: &impl AsFd) -> u64 {
    socket::read_cookie(listener.as_fd()).unwrap()
}

/// Builds a sibling's message with listeners.
fn format_update(version: u32, guards: &[(u64, SocketAddr)]) -> String {
    let guards: Vec<_> = guards
        .iter()
        .map(|(cookie, address)| format!("[{cookie},\"{address}\"]"))
        .collect();
    format!(
        r#"{{"version":{version},"announce":{{"phase":"joined","ready":true,"reachable":true,"leaving":false,"owns":[],"accepts":[]}},"guards":[{}]}}"#,
        guards.join(",")
    )
}

/// Checks that a message is refused with a line of the log, that no descriptor of the message stays
/// open, and that the berth still serves.
#[track_caller]
fn expect_refusal(
    node: &Node,
    shim: &Shim,
    line: &str,
    message: &str,
    descriptors: &[BorrowedFd<'_>],
) {
    let before = shim.descriptors();
    let peer = Peer::joined(&shim.path, u64::MAX);
    peer.sends(message, descriptors);
    let told = shim.running.logs(line);
    assert!(told.contains("WARN"), "{told}");
    peer.receives_the_end();
    drop(peer);
    expect_service(node.listen);
    eventually("as many descriptors as before", || {
        (shim.descriptors() <= before).then_some(())
    });
}

#[test]
fn a_peer_that_lies_is_refused() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined("a", instance.address, &[]);
    expect_service(node.listen);
    eventually("a connection that ended", || {
        (shim.status().connections_open == 0).then_some(())
    });

    let peer = Peer::dial(&shim.path);
    peer.sends(r#"{"version":99,"ask":{"join":{"holder":7}}}"#, &[]);
    peer.receives_refusal("version 99");
    shim.running.logs("version 99 is not known");

    let ours = socket::bind(node.listen, false).unwrap();
    let name = cookie_of(&ours);
    let fd = ours.as_fd();
    expect_refusal(&node, &shim, "version 0", &format_update(0, &[]), &[]);
    expect_refusal(&node, &shim, "not an update", "{}", &[]);
    expect_refusal(
        &node,
        &shim,
        "2 listeners, and 1 descriptors",
        &format_update(1, &[(name, node.listen), (7, node.listen)]),
        &[fd],
    );
    expect_refusal(
        &node,
        &shim,
        "0 listeners, and 1 descriptors",
        &format_update(1, &[]),
        &[fd],
    );
    // More descriptors than fit: the shim must close those that the kernel installed.
    expect_refusal(
        &node,
        &shim,
        "Message too long",
        &format_update(1, &[]),
        &[fd; 70],
    );
    expect_refusal(
        &node,
        &shim,
        "the socket is not the announced one",
        &format_update(1, &[(7, node.listen)]),
        &[fd],
    );

    let (pipe, _other) = std::io::pipe().unwrap();
    expect_refusal(
        &node,
        &shim,
        "the socket's options cannot be read: Socket operation on non-socket",
        &format_update(1, &[(7, node.listen)]),
        &[pipe.as_fd()],
    );
    let udp = UdpSocket::bind((fresh_ip(), 0)).unwrap();
    expect_refusal(
        &node,
        &shim,
        "the descriptor is no TCP socket",
        &format_update(1, &[(cookie_of(&udp), node.listen)]),
        &[udp.as_fd()],
    );
    let connection = TcpStream::connect(instance.address).unwrap();
    let said = format_update(
        1,
        &[(cookie_of(&connection), connection.local_addr().unwrap())],
    );
    expect_refusal(
        &node,
        &shim,
        "the socket is a connection, not a listener",
        &said,
        &[connection.as_fd()],
    );
    let foreign = TcpListener::bind((fresh_ip(), 0)).unwrap();
    let said = format_update(1, &[(cookie_of(&foreign), node.listen)]);
    expect_refusal(
        &node,
        &shim,
        "the socket is bound to",
        &said,
        &[foreign.as_fd()],
    );
    let lonely = TcpListener::bind((fresh_ip(), 0)).unwrap();
    let said = format_update(1, &[(cookie_of(&lonely), lonely.local_addr().unwrap())]);
    expect_refusal(
        &node,
        &shim,
        "the socket does not share its port",
        &said,
        &[lonely.as_fd()],
    );

    assert_eq!(node.listeners().len(), 1);
    shim.leave();
}

#[test]
fn a_listener_of_another_address_is_not_taken() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined("a", instance.address, &[]);
    // The socket shares its port, like a shim's listener, but has no address of this berth.
    let foreign = socket::bind((fresh_ip(), 0).into(), false).unwrap();
    socket::start_listening(foreign.as_fd(), 16).unwrap();
    let address = socket::local_address(foreign.as_fd()).unwrap();
    let before = shim.descriptors();
    let peer = Peer::joined(&shim.path, u64::MAX);
    peer.sends(
        &format_update(1, &[(cookie_of(&foreign), address)]),
        &[foreign.as_fd()],
    );
    peer.sends("an end", &[]);
    peer.receives_the_end();
    drop(peer);
    eventually("as many descriptors as before", || {
        (shim.descriptors() <= before).then_some(())
    });
    expect_service(node.listen);
}

#[test]
fn a_silent_peer_delays_nothing() {
    let (node, instance) = (Node::new(), Echo::new());
    let shim = node.joined(
        "a",
        instance.address,
        &["--lease", "1s", "--log-level", "debug"],
    );
    let before = shim.descriptors();
    let silent = Peer::dial(&shim.path);
    silent.receives_the_end();
    shim.running.logs(explained::REQUEST_REFUSED);
    let joined = Peer::joined(&shim.path, u64::MAX);
    for _ in 0..20 {
        expect_service(node.listen);
    }
    shim.running.logs(explained::SIBLING_SILENT);
    // A silent sibling delays a join or a leave for one lease at most.
    let next = node.joined("b", instance.address, &[]);
    shim.leave();
    expect_service(node.listen);
    drop((silent, joined));
    eventually("few more descriptors than before", || {
        (next.descriptors() <= before + 8).then_some(())
    });
}

/// A root process may read and command. A root process could not listen on the port, so the shim
/// gives it no listener and no connection.
#[test]
fn a_sibling_of_another_uid_is_refused() {
    let node = match Node::of(65534) {
        Ok(node) => node,
        Err(why) => return print_skipped(&why),
    };
    let instance = Echo::new();
    let shim = node.joined("a", instance.address, &[]);
    for ask in [r#"{"join":{"holder":7}}"#, r#""pass""#] {
        let peer = Peer::dial(&shim.path);
        peer.sends(&format!(r#"{{"version":1,"ask":{ask}}}"#), &[]);
        peer.receives_refusal("uid");
    }
    shim.running.logs(explained::SIBLING_OF_ANOTHER_UID);
    expect_service(node.listen);
    shim.leave();
}
