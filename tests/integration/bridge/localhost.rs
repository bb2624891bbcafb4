//! Clients that dial kube-apiserver at localhost.

use super::node::{
    DUAL, Kind, LOCALHOST, NODE, PERIOD, block_on, expect_no_loss, on_a_node_of, on_any_node,
};
use crate::support::load::Load;
use crate::support::process::{Running, expect_status, output_of};
use crate::support::{eventually, print_skipped};
use berth_bridge::cgroup;
use berth_bridge::localhost::{OWN_NAME, TEMPORARY_NAME};
use berth_steering::self_test_of_localhost;
use std::io::{self};
use std::process::Command;

#[test]
fn clients_that_dial_localhost_are_reported_before_the_bridge() {
    on_any_node(|node| {
        let (code, _, err) = output_of(&mut node.bridge("--dry-run", &["true"]));
        // The other program has the same process name as the test's kube-apiserver.
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains("localhost is not covered"), "{err}");
        assert!(!err.contains("reaches kube-apiserver at"), "{err}");
        let _client = std::net::TcpStream::connect("127.0.0.1:6443").unwrap();
        let _steered = std::net::TcpStream::connect(NODE).unwrap();
        let (code, steps, err) = output_of(&mut node.bridge("--dry-run", &[]));
        assert!(steps.contains("\n4  run COMMAND\n"), "{steps}");
        let named = format!(
            "(pid {}) reaches kube-apiserver at 127.0.0.1:6443: let the client dial an address",
            std::process::id()
        );
        assert!(code == Some(0) && err.contains(&named), "{err}");
        assert_eq!(err.matches("reaches kube-apiserver at").count(), 1, "{err}");
        let (_, err) = expect_status(&mut node.start_bridge(), 0, &[]);
        assert_eq!(err.matches("localhost is not covered").count(), 1, "{err}");
        expect_status(node.part("end").arg("--now"), 0, &[]);
    });
}

/// Clients that dial localhost are steered, too, but kube-apiserver's own connections are not.
/// berth recognizes kube-apiserver by its process name, so the test's clients have another process
/// name.
#[test]
fn clients_that_dial_localhost_are_served_too() {
    on_a_node_of(
        Kind {
            called: OWN_NAME,
            ..DUAL
        },
        |node| {
            let Some(cgroup) = cgroup::find_cgroup_root() else {
                return print_skipped("no cgroup v2 is mounted");
            };
            if let Err(error) = block_on(self_test_of_localhost(&cgroup)) {
                return print_skipped(&error.to_string());
            }
            let start = || LOCALHOST.map(|to| Load::start(2, Some(PERIOD), node.attempt_at(to)));
            // The control, without a bridge.
            let loads = start();
            loads.iter().for_each(|load| load.more(10));
            node.stop_own();
            for load in &loads {
                eventually("a loss, which this load would see", || {
                    (load.so_far().lost() > 0).then_some(())
                });
            }
            node.start_own();
            node.answers();
            loads.into_iter().for_each(|load| drop(load.end()));

            let loads = start();
            loads.iter().for_each(|load| load.more(10));
            let wait = node.wait_code();
            let run = format!(
                ". {}\necho away\n{wait}\n{}",
                node.path("stop").display(),
                node.start()
            );
            let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
            bridge.prints("away");
            loads.iter().for_each(|load| load.more(10));
            let dial = || {
                LOCALHOST.map(|to| std::net::TcpStream::connect(to).map_err(|error| error.kind()))
            };
            let named = |name: &str| {
                std::thread::Builder::new()
                    .name(name.into())
                    .spawn(dial)
                    .unwrap()
                    .join()
                    .unwrap()
            };
            assert!(named(TEMPORARY_NAME).iter().all(Result::is_ok));
            let refused = Err(io::ErrorKind::ConnectionRefused);
            assert_eq!(
                named(OWN_NAME).map(|dialled| dialled.map(drop)),
                [refused; 3]
            );
            let status = node.status();
            assert!(status.get("notes").is_none(), "{status}");
            let temporary = status["temporary"]["pid"].as_u64().unwrap().to_string();
            let read =
                |file: &str| std::fs::read_to_string(format!("/proc/{temporary}/{file}")).unwrap();
            assert_eq!(read("comm").trim_end(), TEMPORARY_NAME);
            assert!(read("cmdline").starts_with(&format!("{TEMPORARY_NAME}\0")));
            for tool in [&["pgrep"][..], &["pidof"], &["killall", "-v", "-s0"]] {
                let finds = |name| {
                    let output = Command::new(tool[0])
                        .args(&tool[1..])
                        .arg(name)
                        .output()
                        .ok()?;
                    let found = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
                    Some(
                        found
                            .split(|c: char| !c.is_ascii_digit())
                            .any(|number| number == temporary),
                    )
                };
                match [TEMPORARY_NAME, OWN_NAME].map(finds) {
                    [Some(as_temporary), Some(as_own)] => {
                        assert_eq!((as_temporary, as_own), (true, false), "{tool:?}");
                    }
                    _ => print_skipped(&format!("no {}", tool[0])),
                }
            }
            node.let_command_continue();
            bridge.ends(0);
            loads.iter().for_each(|load| load.more(10));
            loads
                .into_iter()
                .for_each(|load| drop(expect_no_loss(load)));
        },
    );
}
