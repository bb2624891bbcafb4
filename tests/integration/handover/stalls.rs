//! A shim uses files, locks and processes that may hang: a disk stalls, another process holds a
//! lock, or a process behind a file does not answer. Such a hang must not cost the shim its lease,
//! an answer to the kubelet, or a client at the end of the shim.

use super::node::{Echo, Node, Shim};
use crate::support::net::{client_hello, connect, expect_service, free_address, ping, read};
use crate::support::tls::{Api, Ca};
use crate::support::{PATIENCE, eventually};
use berth_node::instance_id::InstanceId;
use berth_node::registry::lease;
use berth_node::terms::Phase;
use berth_testing::issue_certificate;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::SystemTime;

/// Returns the answer of the admin server.
fn get_page(admin: SocketAddr, path: &str) -> String {
    let mut client = TcpStream::connect(admin).unwrap();
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    client
        .write_all(
            format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").as_bytes(),
        )
        .unwrap();
    let mut answer = String::new();
    client
        .read_to_string(&mut answer)
        .unwrap_or_else(|error| panic!("no answer to {path}: {error}"));
    answer
}

/// Runs a shim with a client, beside a ready shim. `hangs` makes a file or call of the shim hang
/// until the shim has ended.
#[track_caller]
fn outlive_hangs(what: &str, hangs: impl FnOnce(&Node)) {
    let (node, ca, second) = (Node::new(), Ca::new(), Echo::new());
    let (api, clients) = Api::start_silent(&ca);
    let (certificate, key) = issue_certificate(&ca.0, &["probe"]);
    let (pem, admin) = (ca.pem(), free_address());
    let file = |name: &str, text: &str| {
        let path = node.temp().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let files = [
        ("ca.crt", &*pem),
        ("client.crt", &certificate),
        ("client.key", &key),
        ("token", "t0ken"),
    ];
    let [ca_file, certificate, key, token] = files.map(|(name, text)| file(name, text));
    let kubeconfig = file("kubeconfig", "none");
    let probe = [
        "--probe",
        "https",
        "--probe-ca",
        &ca_file,
        "--probe-cert",
        &certificate,
        "--probe-key",
        &key,
    ];
    let rest = [
        "--probe-token-file",
        &token,
        "--cluster",
        &kubeconfig,
        "--node-name",
        "cp-1",
        "--speedup",
        "2",
    ];
    let admin_port = admin.to_string();
    let mut a: Shim = node.joined(
        "a",
        api.address,
        &[
            &probe[..],
            &rest,
            &["--admin", &admin_port, "--lease", "3s"],
        ]
        .concat(),
    );
    let mut client = connect(node.listen);
    client.write_all(&client_hello(64)).unwrap();
    let mut instance = clients.recv_timeout(PATIENCE).unwrap();
    assert_eq!(read(&mut instance, 64), client_hello(64));
    instance.write_all(b"answer").unwrap();
    assert_eq!(read(&mut client, 6), b"answer");
    let b = node.joined("b", second.address, &["--lease", "3s"]);
    a.until_counted("guard", 1);

    hangs(&node);
    for path in ["/livez", "/metrics", "/status", "/livez"] {
        let answer = get_page(admin, path);
        assert!(
            answer.starts_with("HTTP/1.1 200 "),
            "{what}: {path}: {answer}"
        );
    }
    let marker = node.hangs().join(format!("{what}.hangs"));
    eventually(what, || {
        (!node.hangs().exists() || marker.exists()).then_some(())
    });
    if what != "the run directory" {
        let (id, mut renewals) = (InstanceId::parse("a").unwrap(), 0);
        let mut from = SystemTime::now();
        eventually(&format!("{what}: a lease that is renewed"), || {
            let lease = lease::read(&node.find()?, &id).ok()??;
            if lease.renew_time > from {
                (renewals, from) = (renewals + 1, lease.renew_time);
            }
            (renewals >= 2).then_some(())
        });
    }
    a.running.signal(Signal::SIGTERM);
    a.until("left", |status| status.state == Phase::Left);
    for _ in 0..20 {
        expect_service(node.listen);
    }
    instance.write_all(b"more").unwrap();
    assert_eq!(read(&mut client, 4), b"more", "{what}");
    drop((client, instance));
    a.running.ends(0);
    ping(&mut connect(node.listen), b"still served");
    drop(b);
}

/// Runs a test for each of the names, all at the same time, because these tests mostly wait.
fn outlive_each<'a>(whats: impl IntoIterator<Item = &'a str>, hangs: impl Fn(&Node, &str) + Sync) {
    std::thread::scope(|scope| {
        for what in whats {
            let hangs = &hangs;
            scope.spawn(move || outlive_hangs(what, |node| hangs(node, what)));
        }
    });
}

/// A FIFO blocks open(2), like a file on a disk that stalls.
#[test]
fn a_file_that_does_not_answer_costs_no_lease_and_no_client() {
    outlive_each(
        ["ca.crt", "client.crt", "client.key", "token", "kubeconfig"],
        |node, name| {
            let (new, path) = (node.temp().join("new"), node.temp().join(name));
            mkfifo(&new, Mode::S_IRWXU).unwrap();
            fs::rename(new, path).unwrap();
        },
    );
}

#[test]
fn a_call_that_hangs_costs_no_lease_and_no_client() {
    let calls = [
        "the run directory",
        "a shim's socket",
        "the kernel",
        "the node's addresses",
        "the probe's files",
        "the credentials' files",
    ];
    outlive_each(calls, |node, what| {
        fs::create_dir_all(node.hangs()).unwrap();
        fs::write(node.hangs().join(what), "").unwrap();
    });
}
