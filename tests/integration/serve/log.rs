//! The log of a shim.

use super::node::Node;
use crate::support::eventually;
use crate::support::net::{
    Backend, client_hello, connect, echo, expect_service, find_listening, ping,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::Read;
use std::process::{Child, Stdio};

#[test]
fn the_log_is_json_when_asked_and_names_connections() {
    let node = Node::new();
    let shim = node.joined(
        Backend::new().serve(echo),
        &["--log-format", "json", "--log-connections"],
    );
    let client = connect(node.listen);
    let address = client.local_addr().unwrap();
    let mut same = client.try_clone().unwrap();
    ping(&mut same, &client_hello(100));
    drop((client, same));
    let line = shim.logs("connection ended");
    let event: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(event["client"], address.to_string());
    assert_eq!(
        (&event["up"], &event["down"], &event["outcome"]),
        (&100.into(), &100.into(), &"closed".into())
    );
    assert!(
        event["source"]
            .as_str()
            .unwrap()
            .starts_with(&address.ip().to_string()),
        "{line}"
    );
    let first: serde_json::Value =
        serde_json::from_str(shim.log().lines().next().unwrap()).unwrap();
    assert_eq!(
        first["message"], "berth",
        "the first line is the effective configuration"
    );
    assert_eq!(first["berth"], node.listen.to_string());
}

/// A process that is killed when the test ends.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// If a container runtime hangs, the log's pipe fills. Connections must not wait for it.
#[test]
fn a_log_without_a_reader_delays_no_client() {
    const CLIENTS: usize = 1000;
    let node = Node::new();
    let backend = Backend::new().serve(echo);
    let unread = || {
        let mut command = node.command(backend, &["--log-connections", "--threads", "1"]);
        let mut shim = Killed(command.stderr(Stdio::piped()).spawn().unwrap());
        eventually("a listener", || {
            (!find_listening(node.listen).is_empty()).then_some(())
        });
        for _ in 0..CLIENTS {
            expect_service(node.listen);
        }
        (shim.0.stderr.take().unwrap(), shim)
    };
    let stop = |shim: &Killed| {
        kill(
            Pid::from_raw(shim.0.id().try_into().unwrap()),
            Signal::SIGTERM,
        )
        .unwrap();
    };
    // A reader that pauses misses no line, including the last ones.
    let (mut log, shim) = unread();
    let (reads, reading_began) = std::sync::mpsc::channel();
    let reading = std::thread::spawn(move || {
        let mut all = vec![0; 1];
        log.read_exact(&mut all).unwrap();
        reads.send(()).unwrap();
        log.read_to_end(&mut all).unwrap();
        String::from_utf8(all).unwrap()
    });
    reading_began.recv().unwrap();
    stop(&shim);
    let log = reading.join().unwrap();
    assert_eq!(log.matches("connection ended").count(), CLIENTS);
    assert!(log.lines().last().unwrap().contains("drained"), "{log}");
    // A reader that never comes back does not keep the process from ending.
    let (_unread, mut shim) = unread();
    stop(&shim);
    assert!(eventually("the end", || shim.0.try_wait().unwrap()).success());
}
