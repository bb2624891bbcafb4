//! A node, and an etcd of several members. The node's kube-apiserver uses the etcd.

use super::node::{IPV4, Kind, Node, block_on, expect_no_loss, on_any_node_of, wait_for_more};
use crate::support::process::{Running, expect_status, output_of};
use berth_testing::etcd::{self, Members};
use std::net::SocketAddr;
use std::sync::Arc;

/// A node, and an etcd with three members. The node's kube-apiserver stores events in the etcd. The
/// first member runs on the node.
pub(super) const ETCD: Kind = Kind {
    flags: "--bind-address=0.0.0.0 --etcd-servers-overrides=/events#https://127.0.0.1:2379 --etcd-cafile=DIR/etcd-ca.crt",
    ..IPV4
};

/// Starts the members, on threads that end with the test.
pub(super) fn etcd_of(node: &Node) -> Arc<std::sync::Mutex<Members>> {
    let (up, is_up) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        block_on(async {
            let all = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
                .map(|ip| (SocketAddr::new(ip.parse().unwrap(), 2379), ip));
            let (members, servers) = etcd::start_members(&all).await;
            up.send((members, servers[0].access.ca.clone())).unwrap();
            std::future::pending::<()>().await;
        });
    });
    let (members, ca) = is_up.recv().unwrap();
    std::fs::write(node.path("etcd-ca.crt"), ca).unwrap();
    members
}

#[test]
fn the_temporary_instance_uses_the_other_members_of_an_etcd() {
    on_any_node_of(ETCD, |node| {
        let members = etcd_of(node);
        let load = node.load_throughout();
        wait_for_more(load.as_ref(), 20);
        let run = format!(
            "echo runs; {}; sh {}",
            node.wait_code(),
            node.path("restart").display()
        );
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
        bridge.logs("the temporary kube-apiserver uses member cp-2 (2) at https://127.0.0.2:2379 and member cp-3");
        bridge.logs("etcd: the cluster's lock is not held without --kubeconfig");
        bridge.prints("runs");
        assert_eq!(
            members.lock().unwrap().transfers,
            ["2"],
            "the leadership is moved before COMMAND"
        );
        let pid = node.status()["temporary"]["pid"].as_u64().unwrap();
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        let others =
            "\0--etcd-servers-overrides=/events#https://127.0.0.2:2379;https://127.0.0.3:2379\0";
        assert!(command.contains(others), "{command}");
        members.lock().unwrap().stopped = vec![1, 3];
        node.let_command_continue();
        bridge.ends(0);
        load.map(expect_no_loss);
        // A member is stopped. With a bridge, no majority would be left.
        members.lock().unwrap().stopped = vec![3];
        expect_status(
            &mut node.bridge("--dry-run", &["true"]),
            69,
            &[
                "etcd: member cp-3 (3) cannot be used",
                "2 of 3 voters must serve",
                "--etcd own",
            ],
        );
        let (code, plan, err) = output_of(&mut node.bridge("--dry-run --etcd=own", &["true"]));
        assert!(
            code == Some(0) && plan.contains("=/events#https://127.0.0.1:2379 "),
            "{plan}{err}"
        );
    });
}
