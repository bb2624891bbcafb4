//! The network of several nodes: a namespace each, one for a worker, and the clients in this process's own.
//!
//! ```text
//! clients ── worker (routes; kube-proxy; etcd) ─┬─ cp-1
//!                                               ├─ cp-2
//!                                               └─ …
//! ```
//!
//! Each line is a pair of veth. A node whose link is down is as one without power: nothing reports that it is gone. So the
//! worker knows the nodes' link addresses once and for all, and never has to ask for one.

use super::address;
use super::netns::{Namespace, ip};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Where the Service `kubernetes` is: the first address of `--service-cluster-ip-range`.
pub(crate) const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 96, 0, 1)), 443);

/// The worker's own address, where etcd listens.
pub(crate) const WORKER: Ipv4Addr = Ipv4Addr::new(10, 123, 255, 1);

const WORKER_NAME: &str = "worker";

/// The clients' address.
const CLIENTS: Ipv4Addr = Ipv4Addr::new(10, 123, 255, 2);

/// The secure port of every node.
const PORT: u16 = 6443;

/// A node's interface, and the clients'.
const LINK: &str = "eth0";

/// What runs in a namespace of its own.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    /// Its name in the cluster.
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    pub(crate) namespace: Namespace,
    /// The worker's end of its link.
    gateway: Ipv4Addr,
}

/// All of them. It goes when this and its nodes are dropped.
#[derive(Debug)]
pub(crate) struct Network {
    /// Clients dial the Service there.
    pub(crate) worker: Node,
    pub(crate) nodes: Vec<Node>,
}

impl Drop for Network {
    /// At once, for the kernel takes its time with the other end.
    fn drop(&mut self) {
        let _ = ip(None, &format!("link del {LINK}\n"));
    }
}

impl Network {
    /// Makes one of this many nodes. Needs root in this process's own namespace.
    pub(crate) fn new(nodes: u8) -> io::Result<Self> {
        // conntrack remembers where a client's port was sent, for minutes. With the usual range a port comes again after some
        // 3,000 connections.
        set("ip_local_port_range", "1024 65535")?;
        let worker = Namespace::new(WORKER_NAME)?;
        ip(
            None,
            &format!(
                "link add {LINK} type veth peer name clients netns {}\naddr add {CLIENTS}/30 dev {LINK}\n\
                 link set {LINK} up\nroute add default via {WORKER}\n",
                worker.path()
            ),
        )?;
        let [_, storm] = address::STORM;
        ip(
            Some(&worker),
            &format!(
                "link set lo up\naddr add {WORKER}/30 dev clients\nlink set clients up\nroute add {storm}/16 via {CLIENTS}\n"
            ),
        )?;
        worker.within(|| {
            set("ip_forward", "1")?;
            // Each client is answered that the Service has no endpoint: by default the kernel limits these answers to one a second.
            set("icmp_ratelimit", "0")
        })?;
        let nodes: Vec<_> = (1..=nodes).map(|number| node(&worker, number)).collect::<io::Result<_>>()?;
        if let Some(first) = nodes.first() {
            // Packets to an address without a host are forwarded on any node, and so meets kube-proxy's rule that rejects.
            ip(Some(&worker), &format!("route add default via {}\n", first.address.ip()))?;
        }
        Ok(Self {
            worker: Node { name: WORKER_NAME.into(), address: SERVICE, namespace: worker, gateway: WORKER },
            nodes,
        })
    }
}

/// Sets a sysctl of this thread's network namespace.
fn set(name: &str, value: &str) -> io::Result<()> {
    let path = format!("/proc/sys/net/ipv4/{name}");
    std::fs::write(&path, value).map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
}

fn node(worker: &Namespace, number: u8) -> io::Result<Node> {
    let (name, mac) = (format!("cp-{number}"), format!("02:00:00:00:00:{number:02x}"));
    let namespace = Namespace::new(&name)?;
    let (gateway, own) = (Ipv4Addr::new(10, 123, number, 1), Ipv4Addr::new(10, 123, number, 2));
    ip(
        Some(worker),
        &format!(
            "link add {name} type veth peer name {LINK} address {mac} netns {}\naddr add {gateway}/30 dev {name}\n\
             link set {name} up\nneigh replace {own} lladdr {mac} nud permanent dev {name}\n",
            namespace.path()
        ),
    )?;
    let set = format!("link set lo up\naddr add {own}/30 dev {LINK}\nlink set {LINK} up\n");
    ip(Some(&namespace), &format!("{set}route add default via {gateway}\n"))?;
    Ok(Node { name, address: (own, PORT).into(), namespace, gateway })
}

impl Node {
    pub(crate) fn link_down(&self) -> io::Result<()> {
        ip(Some(&self.namespace), &format!("link set {LINK} down\n"))
    }

    /// Gives it back, and the route that went with it.
    pub(crate) fn link_up(&self) -> io::Result<()> {
        ip(Some(&self.namespace), &format!("link set {LINK} up\nroute replace default via {}\n", self.gateway))
    }
}
