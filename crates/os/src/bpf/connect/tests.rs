//! The kernel has no test run for programs of connect(2), so these tests connect. They run in a
//! network namespace of their own, away from the connections of other processes.

use crate::bpf::{Link, Purpose, Slot, Steerer};
use crate::{netdevice, socket};
use berth_testing::namespace;
use nix::sched::{CloneFlags, unshare};
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

const PORT: u16 = 6443;
const EXEMPT: &str = "kube-apiserver";
const BOTH: [&str; 2] = ["0.0.0.0", "::"];

/// A network namespace with two listeners, and a steerer that is on and steers connections to these
/// listeners.
struct Node {
    steerer: Steerer,
    listeners: [TcpListener; 2],
    cgroup: File,
}

impl Node {
    fn new() -> io::Result<Self> {
        netdevice::set_interface("lo", netdevice::InterfaceSetting::Up)?;
        let root = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
            .into_iter()
            .map(Path::new);
        let root = root
            .into_iter()
            .find(|root| root.join("cgroup.controllers").exists());
        let cgroup = File::open(root.ok_or_else(|| io::Error::other("no cgroup v2 is mounted"))?)?;
        let listeners = [
            TcpListener::bind("127.9.9.9:0")?,
            TcpListener::bind("[::1]:0")?,
        ];
        let steerer = Steerer::load(Purpose::Bridge, PORT, &[]).map_err(
            |refused| match &refused.log[..] {
                "" => io::Error::other(refused),
                log => panic!("{log}"),
            },
        )?;
        for (slot, listener) in [Slot::Ipv4, Slot::Ipv6].into_iter().zip(&listeners) {
            steerer
                .set_listener(slot, listener.as_fd())
                .map_err(io::Error::other)?;
        }
        steerer.steer_until(Duration::MAX);
        steerer.set_steering(true);
        let node = Self {
            steerer,
            listeners,
            cgroup,
        };
        // If a capability or a kernel feature is missing, this call fails, and the test is skipped.
        match node.try_steer_addresses(&BOTH) {
            Err(refused) if refused.log.is_empty() => return Err(io::Error::other(refused)),
            covered => drop(covered.unwrap()),
        }
        Ok(node)
    }

    fn try_steer_addresses(&self, addresses: &[&str]) -> Result<Vec<Link>, crate::bpf::Refused> {
        let addresses: Vec<IpAddr> = addresses
            .iter()
            .map(|address| address.parse().unwrap())
            .collect();
        let to = (self.cgroup.as_fd(), socket::namespace_cookie().unwrap());
        self.steerer
            .attach_localhost_programs(to, EXEMPT, PORT, &addresses)
    }

    fn steer_addresses(&self, addresses: &[&str]) -> Vec<Link> {
        self.try_steer_addresses(addresses).unwrap()
    }

    /// True if a connection to `to` reaches a listener, false if the connection is refused.
    fn is_connection_steered(&self, to: &str) -> bool {
        let to: SocketAddr = to.parse().unwrap();
        let listener = self.listeners[usize::from(to.is_ipv6())]
            .local_addr()
            .unwrap();
        match TcpStream::connect(to) {
            Ok(stream) => {
                assert_eq!(stream.peer_addr().unwrap(), listener, "{to}");
                true
            }
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{to}");
                false
            }
        }
    }

    /// Calls [`Self::is_connection_steered`] on a thread with the given name.
    fn is_connection_of_thread_steered(&self, name: &str, to: &str) -> bool {
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name(name.into())
                .spawn_scoped(scope, || self.is_connection_steered(to))
                .unwrap()
                .join()
                .unwrap()
        })
    }
}

fn run_on_node(test: impl FnOnce(&Node) + Send + 'static) {
    namespace::run(CloneFlags::CLONE_NEWNET, || {
        let node = Node::new().map_err(|error| error.to_string())?;
        test(&node);
        Ok(())
    });
}

const LOCALHOST: [&str; 3] = ["127.0.0.1:6443", "127.0.1.1:6443", "[::1]:6443"];

#[test]
fn localhost_is_steered_except_from_one_thread_name_while_steering_is_on() {
    run_on_node(|node| {
        let all = || LOCALHOST.map(|to| node.is_connection_steered(to));
        assert_eq!(all(), [false; 3]);
        let links = node.steer_addresses(&BOTH);
        assert_eq!(all(), [true; 3]);
        assert_eq!(node.steerer.count_steered_connections(), 3);
        assert_eq!(
            LOCALHOST.map(|to| node.is_connection_of_thread_steered(EXEMPT, to)),
            [false; 3]
        );
        for other in [
            "kube-apiserver2",
            "kube-apiserve",
            "Kube-apiserver",
            "berth-temporary",
        ] {
            assert_eq!(
                LOCALHOST.map(|to| node.is_connection_of_thread_steered(other, to)),
                [true; 3],
                "{other}"
            );
        }
        node.steerer.set_steering(false);
        assert_eq!(all(), [false; 3]);
        node.steerer.set_steering(true);
        node.steerer.steer_until(Duration::ZERO);
        assert_eq!(all(), [false; 3], "it was not renewed");
        assert_eq!(node.steerer.count_steered_connections(), 15);
        node.steerer.steer_until(Duration::MAX);
        assert_eq!(all(), [true; 3]);
        node.listeners
            .iter()
            .for_each(|listener| socket::refuse_clients(listener.as_fd()).unwrap());
        assert_eq!(all(), [false; 3], "the port's own listener, not none");
        drop(links);
        assert_eq!(
            (all(), node.steerer.count_steered_connections()),
            ([false; 3], 18)
        );
    });
}

#[test]
fn connections_to_other_addresses_ports_and_namespaces_are_left_alone() {
    run_on_node(|node| {
        let links = node.steer_addresses(&BOTH);
        // berth's instances listen on addresses like the first two. The other two have another
        // port.
        for to in [
            "127.9.9.9:6443",
            "127.1.0.1:6443",
            "127.0.0.1:11033",
            "[::1]:443",
        ] {
            assert!(!node.is_connection_steered(to), "{to}");
        }
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.connect(LOCALHOST[0]).unwrap();
        assert_eq!(udp.peer_addr().unwrap().to_string(), LOCALHOST[0]);
        let elsewhere = std::thread::scope(|scope| {
            let elsewhere = scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNET).unwrap();
                netdevice::set_interface("lo", netdevice::InterfaceSetting::Up).unwrap();
                LOCALHOST.map(|to| node.is_connection_steered(to))
            });
            elsewhere.join().unwrap()
        });
        assert_eq!(elsewhere, [false; 3], "in another network namespace");
        assert_eq!(node.steerer.count_steered_connections(), 0);
        drop(links);
        for (addresses, steered) in [
            (&["0.0.0.0"][..], [true, true, false]),
            (&["::"], [false, false, true]),
            (&["127.0.0.1", "10.0.0.5"], [true, false, false]),
            (&["10.0.0.5", "::1"], [false, false, true]),
            (&["10.0.0.5", "fd00::5"], [false; 3]),
            (&[], [false; 3]),
        ] {
            let _links = node.steer_addresses(addresses);
            assert_eq!(
                LOCALHOST.map(|to| node.is_connection_steered(to)),
                steered,
                "{addresses:?}"
            );
        }
    });
}
