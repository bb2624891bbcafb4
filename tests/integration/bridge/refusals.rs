//! Reports and refusals of `berth bridge`, before the command changes anything.

use super::node::{on_any_node, to_args};
use crate::support::eventually;
use crate::support::process::{Running, berth_command, expect_status, output_of, wrap_command};
use berth_testing::create_ca;
use std::path::Path;
use std::process::Command;

#[test]
fn all_obstacles_are_reported_at_once() {
    on_any_node(|node| {
        let elsewhere = std::net::TcpListener::bind("10.77.0.1:7000").unwrap();
        let mut command = node.berth_bridge([
            "--command",
            "kube-apiserver --secure-port=7000",
            "--state-dir",
        ]);
        command.arg(node.path("bridge")).args(["--", "true"]);
        let parts = [
            "10.77.0.1:7000 is listened on by",
            "bind kube-apiserver to 0.0.0.0",
            "nothing was changed",
        ];
        expect_status(&mut command, 69, &parts);
        drop(elsewhere);
        expect_status(&mut command, 69, &["nothing listens on port 7000"]);
        // The bridge tries the probe's CA before it starts.
        std::fs::write(node.path("other-ca"), create_ca().pem()).unwrap();
        let mut command = node.berth_bridge(["--probe-timeout=10s", "--probe-ca"]);
        command
            .arg(node.path("other-ca"))
            .args(["--command", &node.own_command(), "--state-dir"])
            .arg(node.path("bridge"));
        expect_status(command.args(["--", "true"]), 69, &["--probe-ca must hold"]);
        let (out, _) = expect_status(
            &mut node.bridge("--dry-run", &["sh", "restart", "kube-apiserver"]),
            0,
            &[],
        );
        assert!(out.contains("--endpoint-reconciler-type=none"), "{out}");
        expect_status(
            &mut node.bridge("", &["no-such-program"]),
            64,
            &["no program no-such-program"],
        );
        // With other arguments, the temporary instance would differ from the running
        // kube-apiserver.
        let mut command = node.berth_bridge(["--probe-timeout=10s", "--probe-ca"]);
        command.arg(&node.certs.ca_file).args([
            "--command",
            &format!("{} --v=2", node.own_command()),
            "--state-dir",
        ]);
        expect_status(
            command.arg(node.path("bridge")).args(["--", "true"]),
            69,
            &["other arguments than --command"],
        );
        assert!(
            !Path::new(&node.path("bridge")).exists(),
            "nothing is changed"
        );
        // The directory of another program stays as it is.
        std::fs::create_dir(node.path("bridge")).unwrap();
        std::fs::write(node.path("bridge/lock"), "").unwrap();
        expect_status(
            &mut node.bridge("", &["true"]),
            69,
            &["has files that no bridge wrote"],
        );
        assert_eq!(std::fs::read_dir(node.path("bridge")).unwrap().count(), 1);
    });
}

#[test]
fn of_two_bridges_at_the_same_time_one_is_refused() {
    on_any_node(|node| {
        let run = node.wait_code();
        let bridge = |directory: &str| {
            let mut command = node.berth_bridge([
                "--settle=50ms",
                "--speedup=20",
                "--probe-timeout=10s",
                "--state-dir",
            ]);
            command
                .arg(node.path(directory))
                .args(["--command", &node.own_command(), "--probe-ca"])
                .arg(&node.certs.ca_file);
            Running::start(command.args(["--", "sh", "-c", &run]))
        };
        let mut both = ["bridge", "other"].map(bridge);
        let refused = eventually("the end of one", || {
            both.iter_mut()
                .position(|it| it.child.try_wait().unwrap().is_some())
        });
        both[refused].ends(69);
        let begun = &mut both[1 - refused];
        begun.logs("may be replaced now");
        node.let_command_continue();
        node.stop_own();
        node.start_own();
        begun.ends(0);
    });
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_raised_or_reported() {
    on_any_node(|node| {
        let dry = node.bridge("--dry-run", &["true"]);
        for (files, code) in [(256, 69), (1024, 0)] {
            let limit = format!("--nofile={files}");
            let (status, _, err) = output_of(&mut wrap_command(
                &["setpriv", "--bounding-set=-sys_resource", "prlimit", &limit],
                &dry,
            ));
            assert_eq!(status, Some(code), "{err}");
            assert!(
                err.contains(&format!("a limit of {files} open files leaves room for")),
                "{err}"
            );
        }
        let raises = Command::new("prlimit")
            .args(["--nofile=256", "prlimit", "--nofile=512", "true"])
            .output()
            .unwrap();
        // Without CAP_SYS_RESOURCE, the hard limit cannot be raised.
        let limit = if raises.status.success() {
            "--nofile=256"
        } else {
            "--nofile=256:"
        };
        let bridge = node.fast_bridge("", &to_args(&node.restart()));
        let mut bridge = Running::start(&mut wrap_command(&["prlimit", limit], &bridge));
        bridge.ends(0);
    });
}

#[test]
fn a_wrong_command_line_is_refused() {
    for (wrong, part) in [
        (&["--settle=x"][..], "--settle"),
        (&["--ready-timeout=0s"], "at least 1s"),
        (&["--command='"], "missing closing quote"),
        (&["--command=k", "--manifest=/x"], "cannot be used with"),
        (&["--probe-cert=/x"], "--probe-key"),
        (&[], "COMMAND is missing"),
        (
            &["--command=k", "--on-failure=restore", "--", "true"],
            "give stay or end",
        ),
        (
            &["--command", "k --secure-port", "--", "true"],
            "--secure-port",
        ),
    ] {
        expect_status(
            &mut berth_command(["bridge"].iter().chain(wrong)),
            64,
            &[part],
        );
    }
}
