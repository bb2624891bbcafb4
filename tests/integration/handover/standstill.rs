//! Instances that accept connections and answer none, or answer slowly, each beside a healthy
//! instance.

use super::node::{Node, Shim};
use crate::support::eventually;
use crate::support::net::{Backend, client_with_hello, connect, fresh_ip};
use crate::support::process::Running;
use crate::support::tls::{Api, Ca, request_page};
use nix::sys::signal::Signal;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Options for HTTPS probes. 100 probes in a row would have to fail before the probe alone makes an
/// instance unready, which takes longer than a test.
const HTTPS: [&str; 5] = ["--probe", "https", "--probe-insecure", "--fall", "100"];
const TCP: [&str; 2] = ["--probe", "tcp"];

/// Address of the instance. If the variable is set, this process is the instance.
const INSTANCE: &str = "STANDSTILL_INSTANCE";

/// The stopped instance, and its shim.
struct Stopped {
    process: Running,
    ca: CertificateDer<'static>,
    shim: Shim,
}

impl Stopped {
    fn new(node: &Node, options: &[&str]) -> Self {
        let address = Backend::at((fresh_ip(), 0).into()).address();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "handover::standstill::instance", "--nocapture"])
            .env(INSTANCE, address.to_string());
        let process = Running::start(&mut command);
        let line = process.prints("certificate: ");
        let pem = line
            .split("certificate: ")
            .nth(1)
            .unwrap()
            .replace('|', "\n");
        let ca = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let shim = node.joined("a", address, options);
        process.signal(Signal::SIGSTOP);
        Self { process, ca, shim }
    }
}

/// Not a test: the process of the stopped instance.
#[test]
fn instance() {
    let Ok(address) = std::env::var(INSTANCE) else {
        return;
    };
    let ca = Ca::new();
    let _api = Api::start_at(&ca, address.parse().unwrap());
    println!("certificate: {}", ca.pem().replace('\n', "|"));
    std::thread::sleep(Duration::from_secs(600));
}

/// Returns a healthy instance and its shim, and an instance that was stopped (SIGSTOP) while both
/// shims regard it as ready.
fn start_healthy_and_stopped(node: &Node, ca: &Ca, options: &[&str]) -> (Api, Shim, Stopped) {
    let well = Api::start_with(ca, "by the one that is well");
    let b = node.joined("b", well.address, options);
    let stopped = Stopped::new(node, options);
    b.until_counted("guard", 1);
    stopped.shim.until("both are ready", |status| {
        status
            .instances
            .iter()
            .all(|i| i.health.as_str() == "ready")
    });
    (well, b, stopped)
}

/// Clients send whole ClientHellos and wait at the gate or at the stopped instance. The running
/// instance answers every client. The stopped instance gets clients again after SIGCONT.
#[test]
fn all_clients_are_answered_while_one_instance_hangs() {
    const CLIENTS: usize = 40;
    for probe in [&TCP[..], &HTTPS] {
        for openings in ["auto", "off"] {
            let (node, ca) = (Node::new(), Ca::new());
            let options = [
                probe,
                &["--probe-timeout", "1s", "--max-openings", openings],
            ]
            .concat();
            let (well, b, stopped) = start_healthy_and_stopped(&node, &ca, &options);
            let a = &stopped.shim;
            std::thread::scope(|scope| {
                let get = || ca.get(connect(node.listen), "/");
                let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(get)).collect();
                for client in clients {
                    let answer = client.join().unwrap();
                    assert!(answer.ends_with("by the one that is well"), "{answer}");
                }
            });
            assert!(
                a.running.log().contains("stalled; "),
                "it had no client:\n{}",
                a.running.log()
            );
            assert!(
                a.counted("pass", "ok") > 0,
                "none went to the sibling:\n{}",
                a.running.log()
            );
            stopped.process.signal(Signal::SIGCONT);
            a.until("both are ready again", |status| {
                status
                    .instances
                    .iter()
                    .all(|i| i.health.as_str() == "ready")
            });
            drop((b, well));
            let answer = request_page(&stopped.ca, connect(node.listen), "/");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
    }
}

/// If only a single client gets no answer, the cause may be what the client sent. So, if the probe
/// only connects, the shim sends a ClientHello of its own to the instance, and uses another
/// instance only if that gets no answer either.
#[test]
fn a_single_client_is_answered_while_one_instance_hangs() {
    let (node, ca) = (Node::new(), Ca::new());
    let options = [&TCP[..], &["--probe-timeout", "500ms"]].concat();
    let (_well, _b, stopped) = start_healthy_and_stopped(&node, &ca, &options);
    let a = &stopped.shim;
    eventually("one that came to the instance that stands still", || {
        assert!(
            ca.get(connect(node.listen), "/")
                .ends_with("by the one that is well")
        );
        a.running.log().contains("stalled; ").then_some(())
    });
}

/// In a storm, an instance is slow and answers its clients one after another. Even if the probe
/// fails, the clients must stay, since the whole storm would move to the sibling with them.
#[test]
fn clients_of_a_slow_instance_stay_with_it() {
    // `WAITING` clients, one every `PAUSE`, take twice the timeout of the probe.
    const WAITING: usize = 40;
    const PAUSE: Duration = Duration::from_millis(100);
    // Half of the timeout of the probe. If the instance itself had no time to answer for longer
    // than this, the shim may rightly regard it as stalled.
    const MAX_WAIT: Duration = Duration::from_secs(1);
    let mut probes = vec![&TCP[..], &HTTPS[..3]];
    while let Some(probe) = probes.pop() {
        let (node, ca) = (Node::new(), Ca::new());
        let options = [probe, &["--probe-timeout", "2s", "--max-openings", "off"]].concat();
        let (slow, attempts) = Api::start_silent(&ca);
        let a = node.joined("a", slow.address, &options);
        let well = Api::start(&ca);
        let b = node.joined("b", well.address, &options);
        b.until_counted("guard", 1);
        a.until("both are ready", |status| {
            status
                .instances
                .iter()
                .all(|i| i.health.as_str() == "ready")
        });
        let (answered, came) = (&AtomicUsize::new(0), &AtomicBool::new(false));
        let mut clients = Vec::new();
        let begun = std::thread::scope(|scope| {
            let serves = scope.spawn(move || {
                let (mut waiting, mut served) = (VecDeque::new(), Vec::new());
                let (mut turn, mut longest) = (Instant::now(), Duration::ZERO);
                loop {
                    longest = longest.max(turn.elapsed());
                    turn = Instant::now();
                    // `came` is read before the queue, so all clients are in the queue if `came` is
                    // true.
                    let came = came.load(SeqCst);
                    waiting.extend(attempts.try_iter());
                    match waiting.pop_front() {
                        Some(mut attempt) => {
                            // An error means that the shim has given up the attempt. The client
                            // then gets no answer, which the test notices.
                            let _: std::io::Result<()> = attempt
                                .read_exact(&mut [0; 64])
                                .and_then(|()| attempt.write_all(b"slow"));
                            served.push(attempt);
                            answered.fetch_add(1, SeqCst);
                        }
                        None if came => return (served.len(), longest),
                        None => {}
                    }
                    std::thread::sleep(PAUSE);
                }
            });
            eventually(
                "a storm at the slow one, and then a probe that fails",
                || {
                    let status = a.status();
                    if status
                        .instances
                        .iter()
                        .any(|i| i.address == slow.address && i.health.as_str() == "failing")
                    {
                        return Some(());
                    }
                    if status.connections_total as usize >= answered.load(SeqCst) + WAITING {
                        slow.answer("500 Internal Server Error");
                        return (probe == TCP).then_some(());
                    }
                    for _ in 0..20 {
                        clients.push(client_with_hello(node.listen));
                    }
                    None
                },
            );
            let slowly = clients.iter_mut().filter_map(|client| {
                let mut said = [0; 4];
                client
                    .read_exact(&mut said)
                    .ok()
                    .filter(|()| said == *b"slow")
            });
            let slowly = slowly.count();
            came.store(true, SeqCst);
            (slowly, serves.join().unwrap())
        });
        let (slowly, (served, longest)) = begun;
        if slowly != served && longest >= MAX_WAIT {
            probes.push(probe);
            continue;
        }
        assert_eq!(
            slowly,
            served,
            "clients whose handshake was begun and left:\n{}",
            a.running.log()
        );
    }
}
