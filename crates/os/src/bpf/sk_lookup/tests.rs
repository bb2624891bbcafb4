use super::*;
use crate::bpf::list_attached;
use crate::bpf::sys::test_run::{Lookup, run};
use crate::{clock, socket};
use berth_testing::namespace;
use nix::sched::CloneFlags;
use proptest::prelude::*;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

const PORT: u16 = 6443;

/// Runs a test in a network namespace of its own. Skips the test if no BPF program can be loaded.
fn run_in_namespace(test: impl FnOnce() + Send + 'static) {
    namespace::run(CloneFlags::CLONE_NEWNET, || {
        match Steerer::load(Purpose::Bridge, PORT, &[]) {
            // If the kernel's verifier wrote a log, the program is wrong, so the test fails.
            // Otherwise this machine lacks a feature.
            Err(refused) if refused.log.is_empty() => return Err(refused.to_string()),
            loaded => drop(loaded.unwrap()),
        }
        test();
        Ok(())
    });
}

/// A listener for each address family. There is no IPv6 listener if the kernel has no IPv6.
struct Listeners {
    ipv4: TcpListener,
    ipv6: Option<TcpListener>,
}

impl Listeners {
    fn new() -> Self {
        let any = |ip: IpAddr| TcpListener::bind((ip, 0));
        Self {
            ipv4: any(Ipv4Addr::UNSPECIFIED.into()).unwrap(),
            ipv6: any(Ipv6Addr::UNSPECIFIED.into()).ok(),
        }
    }

    fn set_steerer_listeners(&self, steerer: &Steerer) {
        steerer.set_listener(Slot::Ipv4, self.ipv4.as_fd()).unwrap();
        if let Some(ipv6) = &self.ipv6 {
            steerer.set_listener(Slot::Ipv6, ipv6.as_fd()).unwrap();
        }
    }

    /// Returns the cookie of the listener to which the program steers a client with this address.
    fn listener_cookie(&self, of: IpAddr) -> Option<u64> {
        let listener = if of.is_ipv4() {
            Some(&self.ipv4)
        } else {
            self.ipv6.as_ref()
        };
        listener.map(|listener| socket::read_cookie(listener.as_fd()).unwrap())
    }
}

/// Describes a new TCP connection as the input of a test run.
fn make_lookup(from: IpAddr, to: SocketAddr) -> Lookup {
    let (protocol, local_port) = (libc::IPPROTO_TCP as u32, u32::from(to.port()));
    let lookup = Lookup {
        protocol,
        local_port,
        remote_port: 40_000_u16.to_be_bytes(),
        ..Lookup::default()
    };
    match (from, to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => Lookup {
            family: libc::AF_INET as u32,
            remote_ip4: from.octets(),
            local_ip4: to.octets(),
            ..lookup
        },
        (IpAddr::V6(from), IpAddr::V6(to)) => Lookup {
            family: libc::AF_INET6 as u32,
            remote_ip6: from.octets(),
            local_ip6: to.octets(),
            ..lookup
        },
        mixed => panic!("a connection has one family: {mixed:?}"),
    }
}

/// Loads a program that steers to `listeners`, is on, and does not expire.
fn start_steerer(addresses: &[IpAddr], listeners: &Listeners) -> Steerer {
    start_steerer_for(Purpose::Bridge, addresses, listeners)
}

fn start_steerer_for(purpose: Purpose, addresses: &[IpAddr], listeners: &Listeners) -> Steerer {
    let steerer = Steerer::load(purpose, PORT, addresses).unwrap();
    listeners.set_steerer_listeners(&steerer);
    steerer.steer_until(Duration::MAX);
    steerer.set_steering(true);
    steerer
}

fn parse_ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn chosen_cookie(steerer: &Steerer, from: &str, to: &str) -> Option<u64> {
    run(
        steerer.program.as_fd(),
        &make_lookup(parse_ip(from), to.parse().unwrap()),
    )
    .unwrap()
}

#[test]
fn a_program_steers_only_while_it_is_on_and_not_expired() {
    run_in_namespace(|| {
        let listeners = Listeners::new();
        let steerer = Steerer::load(Purpose::Bridge, PORT, &[]).unwrap();
        listeners.set_steerer_listeners(&steerer);
        let client = || chosen_cookie(&steerer, "10.0.0.9", "10.0.0.5:6443");
        assert_eq!(client(), None, "a new program is off");
        steerer.set_steering(true);
        assert_eq!(client(), None, "a new program has expired");
        let now = clock::read_monotonic().unwrap();
        steerer.steer_until(now + Duration::from_secs(600));
        assert_eq!(
            (client(), steerer.count_steered_connections()),
            (listeners.listener_cookie(parse_ip("10.0.0.5")), 1)
        );
        steerer.steer_until(now);
        assert_eq!(client(), None, "it has expired");
        assert!(!steerer.replace_deadline(Duration::ZERO, Duration::MAX));
        assert_eq!(steerer.steering_deadline(), now, "the deadline is another");
        assert!(steerer.replace_deadline(now, Duration::MAX));
        steerer.set_steering(false);
        assert_eq!((client(), steerer.count_steered_connections()), (None, 1));
    });
}

#[test]
fn connections_from_the_dialled_address_are_steered_for_etcd_only() {
    run_in_namespace(|| {
        let listeners = Listeners::new();
        let steerer = start_steerer_for(Purpose::Etcd, &[parse_ip("127.0.0.1")], &listeners);
        assert_eq!(
            chosen_cookie(&steerer, "127.0.0.1", "127.0.0.1:6443"),
            listeners.listener_cookie(parse_ip("127.0.0.1"))
        );
        for (from, to) in [
            ("127.9.9.9", "127.0.0.1:6443"),
            ("10.0.0.9", "10.0.0.5:6443"),
            ("::1", "[::1]:6443"),
        ] {
            assert_eq!(chosen_cookie(&steerer, from, to), None, "{from} to {to}");
        }
        assert_eq!(steerer.count_steered_connections(), 1);
    });
}

#[test]
fn unrelated_connections_are_neither_steered_nor_counted() {
    run_in_namespace(|| {
        let listeners = Listeners::new();
        let steerer = start_steerer(&[parse_ip("10.0.0.5"), parse_ip("fd00::5")], &listeners);
        for (from, to) in [
            ("10.0.0.9", "10.0.0.5:6444"),
            ("10.0.0.9", "10.0.0.6:6443"),
            ("127.0.0.1", "10.0.0.5:6443"),
            ("127.255.255.255", "10.0.0.5:6443"),
            ("fd00::9", "[fd00::6]:6443"),
            ("fd00::9", "[fd00::5]:443"),
            ("::1", "[fd00::5]:6443"),
        ] {
            assert_eq!(chosen_cookie(&steerer, from, to), None, "{from} to {to}");
        }
        let udp = Lookup {
            protocol: libc::IPPROTO_UDP as u32,
            ..make_lookup(parse_ip("10.0.0.9"), "10.0.0.5:6443".parse().unwrap())
        };
        assert_eq!(run(steerer.program.as_fd(), &udp).unwrap(), None);
        assert_eq!(steerer.count_steered_connections(), 0);
        for near in ["126.0.0.1", "128.0.0.1", "1.0.0.127"] {
            assert_eq!(
                chosen_cookie(&steerer, near, "10.0.0.5:6443"),
                listeners.listener_cookie(parse_ip(near)),
                "{near} is no loopback"
            );
        }
        assert_eq!(steerer.count_steered_connections(), 3);
    });
}

#[test]
fn a_closed_listener_or_one_of_the_wrong_family_gets_no_connection() {
    run_in_namespace(|| {
        let listeners = Listeners::new();
        let steerer = start_steerer(&[], &listeners);
        let ipv4 = || chosen_cookie(&steerer, "10.0.0.9", "10.0.0.5:6443");
        assert!(ipv4().is_some());
        // An IPv4 listener accepts only IPv4 clients, so the kernel refuses to give it an IPv6
        // connection.
        steerer
            .set_listener(Slot::Ipv6, listeners.ipv4.as_fd())
            .unwrap();
        assert_eq!(chosen_cookie(&steerer, "fd00::9", "[fd00::5]:6443"), None);
        assert_eq!(steerer.count_steered_connections(), 1);
        socket::refuse_clients(listeners.ipv4.as_fd()).unwrap();
        assert_eq!(
            (ipv4(), steerer.count_steered_connections()),
            (None, 1),
            "it listens no more"
        );
        socket::start_listening(listeners.ipv4.as_fd(), 16).unwrap();
        listeners.set_steerer_listeners(&steerer);
        assert!(ipv4().is_some());
        drop(listeners);
        // Another test may have forked a child that still holds a duplicate of the listener, until
        // its execve.
        let mut found = 2;
        while ipv4().is_some() {
            found += 1;
            assert!(found < 1_000_000, "it is closed");
            std::thread::yield_now();
        }
        assert_eq!(steerer.count_steered_connections(), found);

        let bound = socket::bind("0.0.0.0:0".parse().unwrap(), false).unwrap();
        let refused = steerer.set_listener(Slot::Ipv4, bound.as_fd()).unwrap_err();
        assert_eq!(
            (refused.step, refused.source.raw_os_error()),
            (Step::Listener, Some(libc::EOPNOTSUPP))
        );
    });
}

/// Generates addresses from few values. So a listed and a dialled address are often equal, or
/// differ in one place.
fn any_address() -> impl Strategy<Value = IpAddr> {
    let ipv4 = (prop::sample::select(vec![0_u8, 10, 127]), 0_u8..2, 0_u8..2)
        .prop_map(|(a, c, d)| [a, 0, c, d].into());
    let ipv6 = (
        prop::sample::select(vec![0_u16, 0xfd00]),
        0_u16..2,
        0_u16..2,
        0_u16..2,
    )
        .prop_map(|(a, d, f, h)| [a, 0, 0, d, 0, f, 0, h].into());
    let mapped = (0_u8..2).prop_map(|d| Ipv4Addr::new(10, 0, 0, d).to_ipv6_mapped().into());
    prop_oneof![4 => ipv4, 4 => ipv6, 1 => mapped]
}

/// Decides what [`Steerer::load`]'s documentation promises, without a program: true if the program
/// must steer this connection.
fn is_steered(addresses: &[IpAddr], from: IpAddr, to: SocketAddr) -> bool {
    let covers = |listed: IpAddr| {
        let listed = listed.to_canonical();
        listed == to.ip() || listed.is_unspecified() && listed.is_ipv4() == to.is_ipv4()
    };
    to.port() == PORT
        && !from.is_loopback()
        && (addresses.is_empty() || addresses.iter().copied().any(covers))
}

#[test]
fn a_program_steers_as_the_model_says() {
    run_in_namespace(|| {
        let listeners = Listeners::new();
        let port = prop_oneof![8 => Just(PORT), 1 => Just(PORT.swap_bytes()), 1 => any::<u16>()];
        let connections = prop::collection::vec((any_address(), any_address(), port), 1..20);
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        });
        let strategy = (prop::collection::vec(any_address(), 0..5), connections);
        let outcome = runner.run(&strategy, |(addresses, connections)| {
            let steerer = start_steerer(&addresses, &listeners);
            for (from, to, port) in connections {
                if from.is_ipv4() != to.is_ipv4() || (from.is_ipv6() && listeners.ipv6.is_none()) {
                    continue;
                }
                let to = SocketAddr::new(to, port);
                let chosen = run(steerer.program.as_fd(), &make_lookup(from, to)).unwrap();
                let expected = if is_steered(&addresses, from, to) {
                    listeners.listener_cookie(to.ip())
                } else {
                    None
                };
                prop_assert_eq!(chosen, expected, "{:?}: {} to {}", addresses, from, to);
            }
            Ok(())
        });
        outcome.unwrap_or_else(|failure| panic!("{failure}"));
    });
}

#[test]
fn dropping_a_link_detaches_the_program_despite_a_duplicate() {
    run_in_namespace(|| {
        let namespace = File::open("/proc/thread-self/ns/net").unwrap();
        let count = || list_attached(namespace.as_fd()).unwrap().len();
        let link = Steerer::load(Purpose::Bridge, PORT, &[])
            .unwrap()
            .attach(namespace.as_fd())
            .unwrap();
        // A child that another thread forks holds such a duplicate until its execve.
        let _duplicate = link.0.try_clone().unwrap();
        assert_eq!(count(), 1, "the link is enough");
        drop(link);
        assert_eq!(count(), 0);
    });
}

#[test]
fn many_addresses_fit_until_a_jump_is_too_long() {
    run_in_namespace(|| {
        let many = |count: u16| -> Vec<IpAddr> {
            (0..count)
                .map(|n| Ipv6Addr::from([0xfd00, 0, 0, 0, 0, 0, 1, n]).into())
                .collect()
        };
        let listeners = Listeners::new();
        let steerer = start_steerer(&many(1000), &listeners);
        assert_eq!(
            chosen_cookie(&steerer, "fd00::9", "[fd00::1:3e7]:6443"),
            listeners.listener_cookie(parse_ip("::"))
        );
        assert_eq!(
            chosen_cookie(&steerer, "fd00::9", "[fd00::1:3e8]:6443"),
            None
        );
        let refused = Steerer::load(Purpose::Bridge, PORT, &many(5000)).unwrap_err();
        assert_eq!(refused.step, Step::Assemble);
    });
}

#[test]
fn a_refused_program_comes_with_the_verifiers_log() {
    run_in_namespace(|| {
        let mut asm = Assembler::default();
        asm.copy(Reg::R0, Reg::R7);
        asm.exit();
        let refused = sys::load_program(
            ProgramType::SocketLookup,
            "berth_test",
            &asm.finish().unwrap(),
        )
        .unwrap_err();
        assert_eq!(
            (refused.step, refused.source.raw_os_error()),
            (Step::Program, Some(libc::EACCES))
        );
        assert!(!refused.log.is_empty());
    });
}
