//! COMMAND replaces or restarts the node's kube-apiserver, or fails to.

use super::node::{NODE, block_on, expect_no_loss, on_a_node, on_any_node, wait_for_more};
use crate::support::eventually;
use crate::support::process::{Running, expect_status, output_of, wait_until_gone};
use std::ffi::OsString;

#[test]
fn clients_lose_nothing_while_the_apiserver_is_replaced() {
    on_a_node(|node| {
        // The control, without a bridge.
        let load = node.load();
        load.more(50);
        node.stop_own();
        eventually("a loss, which this load would see", || {
            (load.so_far().lost() > 0).then_some(())
        });
        node.start_own();
        node.answers();
        let lost = load.end();

        let before = node.own_pid();
        let load = node.load();
        load.more(50);
        let run = format!(
            "echo runs; {}; sh {}",
            node.wait_code(),
            node.path("restart").display()
        );
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
        bridge.logs("may be replaced now");
        bridge.prints("runs");
        load.more(150);
        let steered = node.status();
        assert_eq!(steered["steering"], true);
        node.let_command_continue();
        bridge.logs("COMMAND is done");
        bridge.logs("waiting until");
        bridge.ends(0);
        load.more(50);
        let record = expect_no_loss(load);
        assert_ne!(node.own_pid(), before);
        assert!(
            steered["connections_steered"].as_u64().unwrap() > 100,
            "{steered}"
        );
        eprintln!(
            "lost: {} of {} without, 0 of {} with, slowest {:?}",
            lost.lost(),
            lost.begun.len(),
            record.served,
            record.slowest
        );

        // The bridge leaves only its logs and its lock. If `berth bridge` ended before the daemon's
        // last connection had ended, wait for the daemon.
        eventually("only what stays", || {
            let left = std::fs::read_dir(node.path("bridge"))
                .unwrap()
                .map(|entry| entry.unwrap().file_name());
            let mut left: Vec<_> = left.collect();
            left.sort();
            (left == ["bridge.lock", "bridge.log", "kube-apiserver.log"].map(OsString::from))
                .then_some(())
        });
        assert!(
            node.path("audit-bridge.log").exists(),
            "its audit log stays in the directory of the other"
        );
        assert!(!node.is_on());
    });
}

/// The old version must not answer requests of the new version's controllers while COMMAND still
/// runs.
#[test]
fn a_restarted_apiserver_serves_while_command_runs_and_can_be_replaced_again() {
    on_a_node(|node| {
        let versions = ["v1.34.0", "v1.35.0", "v1.36.0"];
        let wait = node.wait_code();
        let start = |version: &&str| {
            let options = format!(" --stand-in-version={version} --shutdown-delay-duration=1h >> ");
            format!("{}\n{wait}", node.start().replacen(" >> ", &options, 1))
        };
        // After SIGTERM, the kube-apiserver's /readyz fails, but the kube-apiserver serves for as
        // long as the delay of the shutdown lasts.
        let pid = node.path("pid").display().to_string();
        // A killed process listens until its last thread has ended, and meanwhile its successor
        // cannot listen.
        let free = "while grep -q ':192B [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.01; done";
        let stop = format!(
            "\nkill $(cat {pid})\n{wait}\n{}\nkill -9 $pid\n{free}\n",
            node.quiet_code()
        );
        let starts: Vec<_> = versions.iter().map(start).collect();
        let again = format!(". {}\n{}", node.path("stop").display(), starts.join(&stop));
        std::fs::write(node.path("again"), again).unwrap();
        let load = node.load();
        load.more(50);
        let get = node.get(NODE);
        let answers = |version: &'static str| {
            eventually(version, || {
                block_on(get())
                    .ok()
                    .filter(|answer| answer.contains(version))
            });
            load.more(50);
        };
        let mut bridge = Running::start(
            &mut node.bridge("", &["sh", &node.path("again").display().to_string()]),
        );
        for version in versions {
            answers(version);
            let status = eventually("it says so", || {
                Some(node.status()).filter(|status| status["own"]["preferred"] == true)
            });
            assert_eq!(
                (&status["command"], &status["steering"]),
                (&true.into(), &true.into()),
                "{status}"
            );
            if version != versions[2] {
                node.let_command_continue();
                // The temporary instance answers.
                answers("v1.33.0");
                node.let_command_continue();
            }
        }
        let daemon = node.daemon();
        // The kept connection outlives the bridge. Its first request is sent at once: a silent
        // client would go to an instance after 0.8 s, and the instance would close the connection
        // only after 32 s. Until then, the script that replaces the instance would wait for this
        // client.
        let mut stays = node.kept_client();
        assert!(stays().unwrap().contains(versions[2]));
        node.let_command_continue();
        bridge.ends(0);
        load.more(50);
        expect_no_loss(load);
        bridge.logs("the bridge has ended, and relays");
        assert!(stays().unwrap().contains(versions[2]) && !node.is_on());
        expect_status(node.part("end").arg("--now"), 0, &[]);
        wait_until_gone(daemon);
        assert!(stays().is_err());
    });
}

/// The new version may, for example, not know one of the flags. While it is not ready, the
/// temporary instance answers probes of kubeadm and the kubelet.
#[test]
fn an_apiserver_that_does_not_get_ready_is_reported_while_command_runs() {
    on_any_node(|node| {
        let bad = node
            .start()
            .replacen(" stand-in ", " stand-in --no-such-flag ", 1);
        let wait = node.wait_code();
        let run = format!(
            ". {}\n{bad}\n{wait}\n{}\n",
            node.path("stop").display(),
            node.start()
        );
        let mut bridge = Running::start(&mut node.fast_bridge("", &["sh", "-c", &run]));
        bridge.logs("the node's kube-apiserver has not been ready for 1m");
        let status = node.status();
        assert_eq!(
            (&status["command"], &status["own"]["late"]),
            (&true.into(), &true.into()),
            "{status}"
        );
        node.let_command_continue();
        bridge.ends(0);
    });
}

#[test]
fn a_command_that_fails_leaves_clients_on_the_bridge() {
    on_any_node(|node| {
        let load = node.load_throughout();
        let run = format!("sh {}; exit 7", node.path("restart").display());
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
        let status = bridge.ended();
        assert_eq!(status.code(), Some(7), "{}", bridge.log());
        bridge.logs("clients stay on the bridge");
        let status = node.status();
        assert_eq!(
            (&status["steering"], &status["step"]),
            (&true.into(), &"hold".into())
        );
        let trouble = status["trouble"].as_str().unwrap();
        assert!(trouble.contains('7'), "{status}");
        wait_for_more(load.as_ref(), 50);
        expect_status(&mut node.part("end"), 0, &[]);
        wait_for_more(load.as_ref(), 50);
        load.map(expect_no_loss);
    });
}

#[test]
fn a_command_that_fails_can_end_the_bridge() {
    on_any_node(|node| {
        let load = node.load();
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", "exit 7"]));
        bridge.ends(7);
        let daemon = node.daemon();
        expect_status(node.part("end").arg("--now"), 0, &[]);
        wait_until_gone(daemon);
        let mut bridge =
            Running::start(&mut node.bridge("--on-failure=end", &["sh", "-c", "exit 7"]));
        bridge.logs("done: ");
        bridge.ends(7);
        assert!(!node.is_on());
        load.more(50);
        expect_no_loss(load);
    });
}

#[test]
fn an_apiserver_that_does_not_come_back_is_reported() {
    on_any_node(|node| {
        let load = node.load_throughout();
        let stop = node.path("stop").display().to_string();
        // The option also limits the time for the temporary instance to get ready, and on a machine
        // that stalls this time may be too short. So the test repeats the bridge with longer times.
        let bridge = [1, 2, 4, 8, 16].into_iter().find_map(|seconds| {
            let options = format!("--ready-timeout={seconds}s");
            let mut bridge = Running::start(&mut node.bridge(&options, &["sh", &stop]));
            let code = bridge.ended().code();
            let is_late = "the temporary kube-apiserver is not ready after";
            if code == Some(69) && bridge.log().contains(is_late) {
                return None;
            }
            assert_eq!(code, Some(75), "{}", bridge.log());
            Some(bridge)
        });
        let bridge = bridge.expect("a temporary instance that gets ready in 16 s");
        bridge.logs("nothing listens on its port");
        // The bridge says that the kube-apiserver may be replaced only once, before COMMAND. It
        // must not say so again while the kube-apiserver has not come back.
        assert_eq!(
            bridge.log().matches("may be replaced now").count(),
            1,
            "{}",
            bridge.log()
        );
        expect_status(&mut node.part("end"), 75, &[]);
        // The operator has repaired the kube-apiserver.
        node.start_own();
        eventually("it is ready", || {
            (node.status()["own"]["ready"] == true).then_some(())
        });
        eventually(
            "it stays so for as long as it must, within its time",
            || {
                let (code, _, err) = output_of(&mut node.part("end"));
                assert!(matches!(code, Some(0 | 75)), "{err}");
                (code == Some(0)).then_some(())
            },
        );
        wait_for_more(load.as_ref(), 50);
        load.map(expect_no_loss);
    });
}
