//! A connection that a leaving shim cannot serve any more goes to its sibling as a socket.

use super::node::{Echo, Node, alone};
use super::support::net::{Backend, connect, hello, ping, read};
use nix::sys::signal::Signal;
use std::io::Write;

#[test]
fn what_was_accepted_after_sigterm_outlives_the_shim() {
    let _alone = alone();
    let (node, second) = (Node::new(), Echo::new());
    // It takes connections and never answers.
    let first = Backend::new();
    let options = ["--probe-interval", "1h", "--lease", "20s"];
    let mut a = node.joined("a", first.address(), &options);
    let b = node.joined("b", second.address, &options);
    a.until_counted("guard", 1);
    b.until_counted("guard", 1);
    // As long as B says nothing, A goes on accepting.
    b.freeze();
    a.running.signal(Signal::SIGTERM);
    a.running.logs("SIGTERM");
    let before = a.status().connections_total;
    let mut clients = Vec::new();
    while a.status().connections_total < before + 4 {
        assert!(clients.len() < 200, "A accepts nothing:\n{}", a.running.log());
        let mut client = connect(node.listen);
        client.write_all(&hello(64)).unwrap();
        clients.push(client);
    }
    // They are offered to B, which takes them when it wakes.
    b.running.signal(Signal::SIGCONT);
    drop(first);
    for client in &mut clients {
        assert_eq!(read(client, 64), hello(64));
    }
    assert!(b.counted("take", "ok") >= 4, "B took {}", b.counted("take", "ok"));
    let status = a.running.ended();
    assert!(status.success(), "{status}\n{}", a.running.log());
    for client in &mut clients {
        ping(client, b"still there");
    }
}
