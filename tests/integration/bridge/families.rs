//! Nodes of IPv4, of IPv6, and of both.

use super::node::{
    CLIENTS, DUAL, Kind, NODE, NODE_IPV6, Node, PERIOD, expect_no_loss, on_a_node_of,
    on_any_node_of, to_args, wait_for_more,
};
use crate::support::load::Load;
use crate::support::process::{Running, expect_status};

#[test]
fn clients_of_both_families_are_served() {
    on_a_node_of(DUAL, |node| {
        let loads =
            [NODE, NODE_IPV6].map(|to| Load::start(CLIENTS, Some(PERIOD), node.attempt_at(to)));
        loads.iter().for_each(|load| load.more(51));
        let mut bridge = Running::start(&mut node.bridge("", &to_args(&node.restart())));
        bridge.ends(0);
        for load in loads {
            load.more(50);
            let served = expect_no_loss(load).served;
            assert!(served > 100, "{served} served");
        }
    });
}

#[test]
fn a_node_of_ipv6_alone_is_bridged() {
    on_any_node_of(
        Kind {
            has_ipv4: false,
            at: NODE_IPV6,
            ..DUAL
        },
        bridged_by_ipv6,
    );
}

#[test]
fn a_node_that_advertises_ipv6_is_bridged_by_ipv6() {
    // kube-apiserver advertises an address of its bind address's family, unless a flag sets the
    // address.
    for flags in ["--bind-address=:: --advertise-address=fd77::1", DUAL.flags] {
        on_any_node_of(
            Kind {
                flags,
                at: NODE_IPV6,
                ..DUAL
            },
            bridged_by_ipv6,
        );
    }
}

/// The bridge asks the node's kube-apiserver at its IPv6 address, and the temporary instance
/// advertises that address.
fn bridged_by_ipv6(node: &Node) {
    let (plan, _) = expect_status(&mut node.bridge("--dry-run", &["true"]), 0, &[]);
    for part in [
        "--advertise-address=fd77::1 ",
        "kube-apiserver is ready at [fd77::1]:6443 ",
    ] {
        assert!(plan.contains(part), "{part} is not in {plan}");
    }
    let load = node.load_throughout();
    wait_for_more(load.as_ref(), 50);
    let mut bridge = Running::start(&mut node.bridge("", &to_args(&node.restart())));
    bridge.logs("may be replaced now");
    assert_eq!(node.status()["own"]["address"], NODE_IPV6);
    bridge.ends(0);
    wait_for_more(load.as_ref(), 50);
    load.map(expect_no_loss);
}
