//! Attributes, logs and end of the temporary kube-apiserver.

use super::node::{CLIENTS, Node, block_on, on_a_node, on_any_node, to_args};
use crate::support::eventually;
use crate::support::process::{Running, expect_status, output_of, wait_until_gone};
use berth_os::process::ProcessAttributes;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::Command;

#[test]
fn the_temporary_instance_has_the_running_ones_attributes() {
    on_any_node(|node| {
        expect_status(&mut node.start_bridge(), 0, &[]);
        let status = node.status();
        let pid = i32::try_from(status["temporary"]["pid"].as_u64().unwrap()).unwrap();
        let (own, temporary) = (
            ProcessAttributes::of(node.own_pid()).unwrap(),
            ProcessAttributes::of(pid).unwrap(),
        );
        assert_eq!(
            (own.uid, own.gid, &own.groups, own.oom_score_adj),
            (
                temporary.uid,
                temporary.gid,
                &temporary.groups,
                temporary.oom_score_adj
            )
        );
        let environment =
            |like: &ProcessAttributes| like.environment.iter().cloned().collect::<BTreeMap<_, _>>();
        assert!(
            environment(&own) == environment(&temporary),
            "another environment"
        );
        assert_eq!(
            (&own.directory, &own.limits),
            (&temporary.directory, &temporary.limits)
        );
        let cmdline = std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .unwrap()
            .replace('\0', " ");
        let address = status["temporary"]["address"].as_str().unwrap();
        let (ip, port) = address.split_once(':').unwrap();
        let keys = node.path("bridge/bridge-files");
        for part in [
            format!("--bind-address={ip} "),
            format!("--secure-port={port} "),
            "--endpoint-reconciler-type=none ".into(),
        ] {
            assert!(cmdline.contains(&part), "{part} is not in {cmdline}");
        }
        // Files of another user are read with the other user's rights.
        let copied = format!("--tls-private-key-file={}/", keys.display());
        assert_eq!(
            cmdline.contains(&copied),
            own.uid == 0,
            "{copied} {cmdline}"
        );

        // Only one bridge may run. COMMAND runs under the first one, too.
        expect_status(&mut node.fast_bridge("", &["true"]), 69, &[]);
        let (code, _, err) = output_of(node.part("end").arg("--json"));
        let told: Vec<Value> = err
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert!(
            code == Some(0) && told.last().unwrap()["outcome"] == "done",
            "{err}"
        );
        wait_until_gone(pid.try_into().unwrap());
        expect_status(&mut node.part("end"), 69, &[]);
    });
}

/// All clients wait for the bridge's processes. Meanwhile the node has two kube-apiservers.
#[test]
fn the_kernel_ends_pods_before_the_bridge_where_memory_is_missing() {
    on_any_node(|node| {
        let (status, _, err) = output_of(&mut node.start_bridge());
        assert_eq!(status, Some(0), "{err}");
        let temporary = node.status()["temporary"]["pid"].as_i64().unwrap();
        let score = |pid: i64| {
            ProcessAttributes::of(pid.try_into().unwrap())
                .unwrap()
                .oom_score_adj
        };
        assert_eq!(score(temporary), score(node.own_pid().into()));
        let may = Command::new("sh")
            .args(["-c", "echo -998 > /proc/self/oom_score_adj"])
            .output()
            .unwrap();
        if may.status.success() {
            assert_eq!(score(node.daemon().into()), -998);
        } else {
            let log = std::fs::read_to_string(node.path("bridge/bridge.log")).unwrap();
            assert!(log.contains("cannot lower its OOM score"), "{log}");
        }
    });
}

#[test]
fn logs_are_bounded_and_kept_for_the_last_failed_bridge() {
    on_any_node(|node| {
        let read = |name: &str| {
            std::fs::read_to_string(node.path("bridge").join(name)).unwrap_or_default()
        };
        let names = ["bridge.log", "kube-apiserver.log"];
        let failed = names.map(|name| format!("{name}.failed"));
        expect_status(&mut node.start_bridge(), 0, &[]);
        let last = "the last line\n";
        for name in names {
            let mut log = std::fs::OpenOptions::new()
                .append(true)
                .open(node.path("bridge").join(name))
                .unwrap();
            log.write_all(&vec![b'\n'; 17 << 20]).unwrap();
            eventually("the log is short again", || {
                (log.metadata().unwrap().len() < 16 << 20).then_some(())
            });
            log.write_all(last.as_bytes()).unwrap();
            assert!(read(name).contains(last), "it cannot be added to");
        }
        let daemon = node.daemon();
        kill(Pid::from_raw(daemon.try_into().unwrap()), Signal::SIGKILL).unwrap();
        wait_until_gone(daemon);
        // Two successful bridges after the failed one.
        for _ in 0..2 {
            let mut bridge = Running::start(&mut node.fast_bridge("", &to_args(&node.restart())));
            bridge.ends(0);
            assert!(
                failed.iter().all(|name| read(name).contains(last)),
                "the failed one's logs are lost"
            );
            assert!(
                names.iter().all(|name| !read(name).contains(last)),
                "they are added to"
            );
        }
    });
}

#[test]
fn the_log_of_a_temporary_instance_that_does_not_start_is_shown() {
    on_any_node(|node| {
        // The path of the temporary instance's audit log is a directory.
        std::fs::create_dir(node.path("audit-bridge.log")).unwrap();
        expect_status(
            &mut node.fast_bridge("", &["true"]),
            69,
            &[
                "ended 3 times before it was ready",
                "last lines of the temporary",
            ],
        );
        assert!(!node.is_on());
    });
}

#[test]
fn a_temporary_instance_that_is_killed_is_replaced() {
    on_any_node(|node| {
        let run = format!("echo runs; {}", node.wait_code());
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
        bridge.prints("runs");
        let load = node.load();
        load.more(50);
        let temporary = |node: &Node| node.status()["temporary"].clone();
        let first = temporary(node)["pid"].as_i64().unwrap();
        kill(Pid::from_raw(first.try_into().unwrap()), Signal::SIGKILL).unwrap();
        eventually("another one that is ready", || {
            let now = temporary(node);
            (now["ready"] == true
                && now["pid"].as_i64() != Some(first)
                && node.status()["steering"] == true)
                .then_some(())
        });
        load.more(50);
        let record = load.end();
        // Only requests in flight are lost.
        assert!(record.lost() <= 2 * CLIENTS as usize, "{}", record.kinds());
        record.is_conclusive();
        kill(Pid::from_raw(node.own_pid()), Signal::SIGKILL).unwrap();
        wait_until_gone(node.own_pid().try_into().unwrap());
        node.start_own();
        node.answers();
        node.let_command_continue();
        bridge.ends(0);
    });
}

/// The temporary instance hangs, so new connections go to the node's kube-apiserver, which COMMAND
/// then stops.
#[test]
fn clients_wait_while_no_instance_serves() {
    on_a_node(|node| {
        let run = format!("echo runs; {}", node.wait_code());
        let mut bridge = Running::start(&mut node.fast_bridge("", &["sh", "-c", &run]));
        bridge.prints("runs");
        let pid = node.status()["temporary"]["pid"].as_i64().unwrap();
        let temporary = Pid::from_raw(pid.try_into().unwrap());
        let steers = |steers: bool| {
            eventually("a change of the steering", || {
                (node.status()["steering"] == steers).then_some(())
            });
        };
        kill(temporary, Signal::SIGSTOP).unwrap();
        steers(false);
        node.answers();
        node.stop_own();
        steers(true);
        let attempt = node.attempt();
        let client = std::thread::spawn(move || block_on(attempt([127, 0, 0, 1].into())));
        eventually("a client that waits", || {
            (node.status()["connections_open"].as_u64() > Some(0)).then_some(())
        });
        kill(temporary, Signal::SIGCONT).unwrap();
        client.join().unwrap().unwrap();
        node.start_own();
        node.let_command_continue();
        bridge.ends(0);
    });
}
