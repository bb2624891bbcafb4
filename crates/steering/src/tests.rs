use super::*;
use berth_os::bpf::{Refused, Step};
use berth_os::netdevice::{self, InterfaceSetting};
use berth_testing::namespace;
use nix::sched::{CloneFlags, unshare};
use rustix::thread::CapabilitySet;
use std::fs;
use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::io::AsyncReadExt as _;

/// The port that clients dial, on the addresses of the simulated node.
const PORT: u16 = 6443;

const FOR_LONG: Duration = Duration::from_secs(600);

/// Tells what becomes of a test if the kernel lets this process load no program.
#[derive(Clone, Copy)]
enum Without {
    Skipped,
    /// The test runs, because it needs no program.
    Run,
    /// The test runs in another process, in which the module `unsteered` replaces the kernel's
    /// programs.
    Unsteered,
}

/// Runs a test in a network namespace of its own, which is like a node with two IPv4 addresses and
/// one IPv6 address. The test is skipped if no program can be attached there.
fn run_on_node(test: impl FnOnce() + Send + 'static) {
    run_on_node_without(Without::Skipped, test);
}

fn run_on_node_without(without: Without, test: impl FnOnce() + Send + 'static) {
    run_in_namespace(without, || {
        for (alias, address) in [("lo:1", [10, 77, 0, 1]), ("lo:2", [10, 77, 0, 2])] {
            netdevice::set_interface(alias, InterfaceSetting::Address(address.into())).unwrap();
            netdevice::set_interface(alias, InterfaceSetting::Netmask([255; 4].into())).unwrap();
        }
        netdevice::add_ipv6("lo", NODE[2].parse().unwrap()).unwrap();
        // For a moment after an IPv6 address was added, the kernel uses ::1 as the source instead.
        // Wait until it uses the new address.
        let listener = TcpListener::bind("[::]:0").unwrap();
        let to = SocketAddr::new(
            NODE[2].parse().unwrap(),
            listener.local_addr().unwrap().port(),
        );
        let source = || Ok::<_, io::Error>(TcpStream::connect(to)?.local_addr()?.ip());
        let since = Instant::now();
        while source().ok() != Some(to.ip()) {
            assert!(
                since.elapsed() < Duration::from_secs(60),
                "fd77::1 is not taken into use"
            );
            std::thread::yield_now();
        }
        drop(listener);
        test();
    });
}

/// Runs a test like [`run_on_node`], but the namespace has loopback addresses only.
fn run_in_namespace(without: Without, test: impl FnOnce() + Send + 'static) {
    namespace::run(CloneFlags::CLONE_NEWNET, move || {
        netdevice::set_interface("lo", InterfaceSetting::Up).unwrap();
        let missing = match Steering::new(Purpose::Bridge, PORT, &[], FOR_LONG) {
            Err(
                missing @ (Error::Kernel { .. } | Error::Capabilities { .. } | Error::Forbidden(_)),
            ) => missing,
            made => {
                drop(made.unwrap());
                test();
                return Ok(());
            }
        };
        match without {
            Without::Run => test(),
            #[cfg(debug_assertions)]
            Without::Unsteered => namespace::rerun_with(bpf::UNSTEERED),
            _ => return Err(missing.to_string()),
        }
        Ok(())
    });
}

/// A listener that sends its name to each client. Dropping this value stops the listener.
struct Server {
    listener: TcpListener,
    accepting: Option<JoinHandle<()>>,
}

impl Server {
    fn new(name: &'static str, at: &str) -> Self {
        let listener = TcpListener::bind(at).unwrap();
        let accepted = listener.try_clone().unwrap();
        let accepting = std::thread::spawn(move || {
            while let Ok((mut client, _)) = accepted.accept() {
                // A failed write only means that the client has closed the connection.
                let _ = client.write_all(name.as_bytes());
            }
        });
        Self {
            listener,
            accepting: Some(accepting),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        socket::refuse_clients(self.listener.as_fd()).unwrap();
        self.accepting.take().unwrap().join().unwrap();
    }
}

/// The listeners of a shim, one for each address family.
struct Shim([Server; 2]);

impl Shim {
    fn new(name: &'static str) -> Self {
        Self([
            Server::new(name, "127.0.0.1:0"),
            Server::new(name, "[::1]:0"),
        ])
    }

    fn steer_to_own_listeners(&self, steering: &Steering) {
        self.0
            .iter()
            .for_each(|server| steering.steer_to(server.listener.as_fd()).unwrap());
    }

    /// Steers connections to the port on these addresses to the shim's listeners.
    fn start_steering(&self, addresses: &[&str]) -> Steering {
        let addresses: Vec<_> = addresses
            .iter()
            .map(|address| address.parse().unwrap())
            .collect();
        let steering = Steering::new(Purpose::Bridge, PORT, &addresses, FOR_LONG).unwrap();
        self.steer_to_own_listeners(&steering);
        steering.start();
        steering
    }
}

/// Runs a future on this thread, because its connections must be made in this thread's network
/// namespace.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

/// Connects to an address, and returns the name of the listener that accepted the connection.
fn read_answer(to: &str) -> String {
    let to = SocketAddr::new(to.parse().unwrap(), PORT);
    let answer = async {
        let mut answer = String::new();
        tokio::net::TcpStream::connect(to)
            .await?
            .read_to_string(&mut answer)
            .await?;
        Ok::<_, io::Error>(answer)
    };
    block_on(answer).unwrap_or_else(|error| error.kind().to_string())
}

/// Returns the programs that are attached to this network namespace, and so steer.
fn list_attached() -> Vec<bpf::Attached> {
    bpf::list_attached(File::open(NAMESPACE).unwrap().as_fd()).unwrap()
}

const NODE: [&str; 3] = ["10.77.0.1", "10.77.0.2", "fd77::1"];

#[test]
fn connections_are_steered_while_steering_is_on_and_renewed_and_held() {
    run_on_node(|| {
        let _old = Server::new("old", "[::]:6443");
        let shim = Shim::new("shim");
        let steering = Steering::new(Purpose::Bridge, PORT, &[], FOR_LONG).unwrap();
        shim.steer_to_own_listeners(&steering);
        let arrive_at = |name, steers| {
            assert_eq!(NODE.map(read_answer), [name; 3]);
            assert_eq!(steering.is_steering(), steers);
        };
        arrive_at("old", false);
        steering.start();
        arrive_at("shim", true);
        steering.stop();
        arrive_at("old", false);
        steering.start();
        // Let the lease expire, as it does if the steering process hangs.
        steering
            .program
            .steer_until(clock::read_monotonic().unwrap());
        arrive_at("old", false);
        assert_eq!(steering.count_steered_connections(), 3);
        // A lapse stays until the holder steers anew.
        steering.renew_lease();
        arrive_at("old", false);
        steering.start();
        arrive_at("shim", true);
        // The lease is about to expire.
        let until = || steering.program.steering_deadline();
        let soon = clock::read_monotonic().unwrap() + FOR_LONG / 2;
        steering.program.steer_until(soon);
        steering.renew_lease();
        assert!(until() > soon);
        drop(steering);
        assert_eq!(NODE.map(read_answer), ["old"; 3]);
        assert!(list_attached().is_empty());
    });
}

#[test]
fn a_new_program_takes_precedence_until_it_ends() {
    run_on_node(|| {
        let _old = Server::new("old", "[::]:6443");
        let (first, second) = (Shim::new("first"), Shim::new("second"));
        let other = first.start_steering(&[]);
        assert_eq!(NODE.map(read_answer), ["first"; 3]);
        let steering = second.start_steering(&["10.77.0.1", "::"]);
        assert_eq!(NODE.map(read_answer), ["second", "first", "second"]);
        assert_eq!(list_attached()[0].known, Some(("berth_bridge".into(), 0)));
        steering.stop();
        assert_eq!(NODE.map(read_answer), ["first"; 3]);
        steering.start();
        drop(steering);
        assert_eq!(NODE.map(read_answer), ["first"; 3]);
        drop(other);
        assert_eq!(NODE.map(read_answer), ["old"; 3]);
    });
}

#[test]
fn siblings_share_connections_that_are_steered_to_one_of_them() {
    run_on_node(|| {
        let listen = |at| {
            let socket = socket::bind(at, false).unwrap();
            socket::start_listening(socket.as_fd(), 128).unwrap();
            socket
        };
        let one = listen("127.0.0.1:0".parse().unwrap());
        let other = listen(socket::local_address(one.as_fd()).unwrap());
        let steering = Steering::new(Purpose::Bridge, PORT, &[], FOR_LONG).unwrap();
        steering.steer_to(one.as_fd()).unwrap();
        steering.start();
        let clients: Vec<_> = (0..64)
            .map(|_| TcpStream::connect((NODE[0], PORT)).unwrap())
            .collect();
        let accept =
            |socket: &OwnedFd| std::iter::from_fn(|| socket::accept(socket.as_fd()).ok()).count();
        let (one, other) = (accept(&one), accept(&other));
        assert!(
            one > 0 && other > 0,
            "{one} and {other} of {}",
            clients.len()
        );
    });
}

#[test]
fn a_socket_that_cannot_be_steered_to_is_refused() {
    run_on_node_without(Without::Unsteered, || {
        let steering = Steering::new(Purpose::Bridge, PORT, &[], FOR_LONG).unwrap();
        let bound = socket::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
        assert!(matches!(
            steering.steer_to(bound.as_fd()),
            Err(Error::Other(_))
        ));
        let elsewhere = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            TcpListener::bind("0.0.0.0:0").unwrap()
        });
        let elsewhere = elsewhere.join().unwrap();
        assert!(matches!(
            steering.steer_to(elsewhere.as_fd()),
            Err(Error::Elsewhere)
        ));
        let file = File::open(NAMESPACE).unwrap();
        assert!(matches!(
            steering.steer_to(file.as_fd()),
            Err(Error::Listener(_))
        ));
    });
}

#[test]
fn a_full_namespace_is_an_error() {
    run_on_node(|| {
        let _all: Vec<_> = (0..64)
            .map(|_| Steering::new(Purpose::Bridge, PORT, &[], FOR_LONG).unwrap())
            .collect();
        assert!(matches!(
            Steering::new(Purpose::Bridge, PORT, &[], FOR_LONG),
            Err(Error::Full(_))
        ));
    });
}

/// Tries to steer from a thread that has only these capabilities.
fn steer_with_capabilities(kept: CapabilitySet) -> Result<Steering, Error> {
    let thread = std::thread::spawn(move || {
        let sets = rustix::thread::CapabilitySets {
            effective: kept,
            permitted: kept,
            inheritable: kept,
        };
        rustix::thread::set_capabilities(None, sets).unwrap();
        let shim = Shim::new("shim");
        let steering = Steering::new(Purpose::Bridge, PORT, &[], FOR_LONG)?;
        shim.steer_to_own_listeners(&steering);
        steering.start();
        assert_eq!(NODE.map(read_answer), ["shim"; 3]);
        Ok(steering)
    });
    thread.join().unwrap()
}

const BPF: CapabilitySet = CapabilitySet::BPF;
const NET_ADMIN: CapabilitySet = CapabilitySet::NET_ADMIN;

#[test]
fn two_capabilities_are_enough_to_steer() {
    run_on_node(|| {
        drop(steer_with_capabilities(NET_ADMIN | CapabilitySet::SYS_ADMIN).unwrap());
        drop(steer_with_capabilities(BPF | NET_ADMIN).unwrap());
    });
}

/// In the user namespace of an ordinary user, a process may have both capabilities, but they are
/// not enough. The error names the capabilities that the process lacks inside of the namespace.
#[test]
fn a_missing_capability_is_named() {
    run_on_node_without(Without::Run, || {
        for (kept, lacking) in [
            (BPF, vec!["CAP_NET_ADMIN"]),
            (NET_ADMIN, vec!["CAP_BPF"]),
            (CapabilitySet::empty(), vec!["CAP_BPF", "CAP_NET_ADMIN"]),
        ] {
            let error = steer_with_capabilities(kept).unwrap_err();
            assert!(
                matches!(&error, Error::Capabilities { lacks, .. } if *lacks == lacking),
                "{error}"
            );
        }
    });
}

#[test]
fn the_self_test_steers_in_both_families() {
    run_on_node(|| {
        assert_eq!(
            block_on(self_test()).unwrap(),
            [Tried::Arrived, Tried::Arrived]
        );
        // The self-test has left no program attached.
        assert!(list_attached().is_empty());
        fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap();
        let [ipv4, Tried::Skipped(why)] = block_on(self_test()).unwrap() else {
            panic!("there is no IPv6")
        };
        assert_eq!(ipv4, Tried::Arrived);
        assert!(why.starts_with("cannot listen on ::1: "), "{why}");
    });
}

#[test]
fn a_missing_cgroup_is_named() {
    run_in_namespace(Without::Unsteered, || {
        let error = block_on(self_test_of_localhost(Path::new("/proc/nonexistent"))).unwrap_err();
        assert!(
            matches!(&error, Error::Cgroup(path, _) if path == Path::new("/proc/nonexistent")),
            "{error}"
        );
    });
}

#[test]
fn a_self_test_without_addresses_names_the_reason() {
    run_in_namespace(Without::Run, || {
        let error = block_on(self_test()).unwrap_err();
        assert!(matches!(error, Error::Untried { .. }), "{error}");
        assert!(error.to_string().contains("no address of IPv4"), "{error}");
        assert!(error.to_string().contains("no address of IPv6"), "{error}");
    });
}

#[test]
fn a_connection_that_does_not_arrive_fails_the_self_test() {
    run_on_node_without(Without::Run, || {
        let error = block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let (_reserved, to) = self_test::free_port(true).unwrap();
            self_test::check_arrival(to, &listener).await.unwrap_err()
        });
        assert!(
            matches!(error, Error::NotArrived { to, .. } if to.ip().to_string() == NODE[0]),
            "{error}"
        );
        assert!(error.to_string().contains("refused"), "{error}");
    });
}

#[test]
fn errors_name_the_missing_permission_or_kernel_option() {
    let error = |step, number, log: &str, lacks: &[&'static str]| {
        let refused = Refused {
            step,
            source: io::Error::from_raw_os_error(number),
            log: log.into(),
        };
        error::explain_refusal(refused, lacks.to_vec(), || "5.4.0".into())
    };
    assert!(matches!(
        error(Step::Map, libc::EPERM, "", &["CAP_BPF"]),
        Error::Capabilities { lacks, .. } if lacks == ["CAP_BPF"]
    ));
    assert!(matches!(
        error(Step::Program, libc::EPERM, "", &[]),
        Error::Forbidden(_)
    ));
    for (step, number, lacks) in [
        (Step::Program, libc::EINVAL, &[][..]),
        (Step::Map, libc::ENOSYS, &["CAP_BPF"]),
    ] {
        assert!(matches!(
            error(step, number, "", lacks),
            Error::Kernel { kernel, .. } if kernel == "5.4.0"
        ));
    }
    let verifier = error(Step::Program, libc::EACCES, "R7 !read_ok", &[]);
    assert!(matches!(verifier, Error::Verifier { .. }));
    assert!(verifier.to_string().contains("R7 !read_ok"));
    assert!(matches!(
        error(Step::Link, libc::E2BIG, "", &[]),
        Error::Full(_)
    ));
    assert!(matches!(
        error(Step::Map, libc::ENOMEM, "", &[]),
        Error::Other(_)
    ));
}
