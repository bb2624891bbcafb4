//! Tests of servers under a supervisor. This process acts as the shim. `CASES` lists the tests.
//!
//! The tests use no harness with threads, since a supervisor forks. This program is also the
//! supervisor and the servers.

use berth_node::instance_id::InstanceId;
use berth_node::ipc;
use berth_node::ipc::supervisor::{
    FromShim, MAX_TAKEN, ToShim, UNACKNOWLEDGED, VERSION, parse_message,
};
use berth_os::process::{HeldProcess, die_with_parent, send_signal};
use berth_os::{seqpacket, socket};
use berth_supervisor::{Config, Supervisor, self_test};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::Signal;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::iter;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time limit that only a hang reaches.
const HANG: Duration = Duration::from_secs(120);

const INSTANCE: &str = "a";

/// Kinds of servers. One waits in a blocking accept(2), the other with an edge-triggered epoll(7),
/// as Go does.
const KINDS: [&str; 2] = ["blocking", "edge"];

type Case = (&'static str, fn(&'static str) -> Result<(), Failed>);

const CASES: [Case; 14] = [
    (
        "no_client_is_lost_and_the_server_knows_each_address",
        no_client_is_lost_and_the_server_knows_each_address,
    ),
    (
        "a_client_of_the_servers_own_address_is_served",
        a_client_of_the_servers_own_address_is_served,
    ),
    (
        "other_listeners_of_the_server_and_its_children_are_left_alone",
        other_listeners_of_the_server_and_its_children_are_left_alone,
    ),
    (
        "clients_of_a_shim_that_died_are_served",
        clients_of_a_shim_that_died_are_served,
    ),
    (
        "garbage_ends_a_connection_and_gives_its_clients_back",
        garbage_ends_a_connection_and_gives_its_clients_back,
    ),
    (
        "a_bounded_number_of_clients_waits_for_each_shim",
        a_bounded_number_of_clients_waits_for_each_shim,
    ),
    (
        "further_clients_of_the_servers_own_address_wait_in_the_kernel",
        further_clients_of_the_servers_own_address_wait_in_the_kernel,
    ),
    (
        "several_shims_are_served_one_after_another",
        several_shims_are_served_one_after_another,
    ),
    (
        "a_shim_that_connects_while_no_descriptor_is_left_is_served_later",
        a_shim_that_connects_while_no_descriptor_is_left_is_served_later,
    ),
    ("orphans_are_reaped", orphans_are_reaped),
    (
        "signals_and_the_status_are_passed_on",
        signals_and_the_status_are_passed_on,
    ),
    (
        "the_server_ends_with_its_supervisor",
        the_server_ends_with_its_supervisor,
    ),
    (
        "a_program_that_is_not_there_is_an_error",
        a_program_that_is_not_there_is_an_error,
    ),
    (
        "a_second_supervisor_is_refused",
        a_second_supervisor_is_refused,
    ),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "--supervise", directory, address, ref command @ ..] => {
            run_supervisor(directory, address, command)
        }
        [_, "--serve", kind, address] => run_server(kind, address.parse().unwrap()),
        [_, "--self-test"] => match self_test() {
            Ok(()) => ExitCode::SUCCESS,
            Err(obstacle) => {
                println!("{obstacle}");
                ExitCode::FAILURE
            }
        },
        _ => {
            let obstacle = this_program("--self-test").output().unwrap();
            let why = String::from_utf8(obstacle.stdout).unwrap();
            let trials = CASES
                .into_iter()
                .flat_map(|(name, case)| KINDS.map(|kind| make_trial(name, kind, &why, case)));
            let of_one_kind = [
                make_trial(
                    "a_closed_listener_gives_clients_back",
                    "edge",
                    &why,
                    a_closed_listener_gives_clients_back,
                ),
                make_trial(
                    "a_bell_rings_after_another_holder_accepted_the_parked_connection",
                    "edge",
                    &why,
                    a_bell_rings_after_another_holder_accepted_the_parked_connection,
                ),
                make_trial(
                    "a_listener_that_is_shut_down_ends_the_wait_for_clients",
                    "blocking",
                    &why,
                    a_listener_that_is_shut_down_ends_the_wait_for_clients,
                ),
            ];
            libtest_mimic::run(&Arguments::from_args(), trials.chain(of_one_kind).collect())
                .exit_code()
        }
    }
}

fn make_trial(
    name: &str,
    kind: &'static str,
    obstacle: &str,
    case: fn(&'static str) -> Result<(), Failed>,
) -> Trial {
    let obstacle = obstacle.trim().to_owned();
    Trial::ignorable_test(format!("{kind}::{name}"), move || match obstacle.as_str() {
        "" => case(kind).map(|()| Completion::Completed),
        why => Ok(Completion::ignored_with(why)),
    })
}

fn this_program(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(role);
    command
}

// Functions for the processes that this program starts: the supervisor and the servers.

fn run_supervisor(directory: &str, address: &str, command: &[&str]) -> ExitCode {
    nix::sys::prctl::set_child_subreaper(true).unwrap();
    let (shims, _file) = ipc::listen_at(&PathBuf::from(directory).join("a.accept")).unwrap();
    let (instance, address) = (
        InstanceId::parse(INSTANCE).unwrap(),
        address.parse().unwrap(),
    );
    let config = Config {
        instance,
        address,
        shims,
        once: false,
    };
    let mut server = Command::new(command[0]);
    server.args(&command[1..]);
    match Supervisor::start(config, || server.exec()) {
        Err(error) => {
            println!("{error:?}");
            ExitCode::from(126)
        }
        Ok(supervisor) => {
            println!("{}", supervisor.pid());
            let status = supervisor.run().unwrap();
            ExitCode::from(
                status
                    .code()
                    .or(status.signal().map(|signal| 128 + signal))
                    .unwrap() as u8,
            )
        }
    }
}

/// Runs a server that sends each client the client's address, and then answers the client's lines.
fn run_server(kind: &str, address: SocketAddr) -> ExitCode {
    let listener = TcpListener::bind(address).unwrap();
    if kind == "child" {
        println!("{}", listener.local_addr().unwrap());
    }
    *DUPLICATE.lock().unwrap() = Some(listener.try_clone().unwrap());
    if kind != "edge" {
        loop {
            match listener.accept() {
                Ok((client, peer)) => greet_client(client, peer, None),
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    return ExitCode::from(9);
                }
                // The supervisor has ended, so the call fails. The server is killed soon.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    return ExitCode::FAILURE;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    // As Go does, call accept(2) until it fails, and then wait.
    listener.set_nonblocking(true).unwrap();
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    epoll
        .add(
            &listener,
            EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0),
        )
        .unwrap();
    let (closes, close) = UnixStream::pair().unwrap();
    epoll
        .add(&closes, EpollEvent::new(EpollFlags::EPOLLIN, 1))
        .unwrap();
    let mut listener = Some(listener);
    loop {
        while let Some(accepted) = listener
            .as_ref()
            .map(|listener| socket::accept(listener.as_fd()))
        {
            match accepted {
                Ok((client, peer)) => greet_client(client, peer, Some(close.try_clone().unwrap())),
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    return ExitCode::FAILURE;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        let mut events = [EpollEvent::empty()];
        let _ = epoll.wait(&mut events, EpollTimeout::NONE);
        if events[0].data() == 1 {
            (listener, *DUPLICATE.lock().unwrap()) = (None, None);
            (&closes).read_exact(&mut [0]).unwrap();
            (&closes).write_all(&[0]).unwrap();
        }
    }
}

/// A second descriptor of the server's listener. Commands of clients take it.
static DUPLICATE: Mutex<Option<TcpListener>> = Mutex::new(None);

/// The standard input of a process, which ends when a client says `end` and the input is closed.
static KEPT: Mutex<Option<ChildStdin>> = Mutex::new(None);

fn greet_client(client: TcpStream, peer: SocketAddr, close: Option<UnixStream>) {
    std::thread::spawn(move || {
        client.set_nonblocking(false).unwrap();
        let same = client.peer_addr().unwrap() == peer;
        let say = |line: &str| (&client).write_all(format!("{line}\n").as_bytes());
        let _ = say(&if same {
            peer.to_string()
        } else {
            format!("accept(2) said {peer}")
        });
        for line in BufReader::new(&client).lines().map_while(Result::ok) {
            match line.as_str() {
                "close" => {
                    let mut close = close.as_ref().unwrap();
                    close.write_all(&[0]).unwrap();
                    close.read_exact(&mut [0]).unwrap();
                }
                "exit" => std::process::exit(7),
                // The server accepts through another descriptor, which the supervisor does not
                // know.
                "steal" => {
                    let duplicate = DUPLICATE.lock().unwrap().take().unwrap();
                    let _ = say(&format!("{:?}", duplicate.accept().is_ok()));
                }
                "shutdown" => {
                    let duplicate = DUPLICATE.lock().unwrap().take().unwrap();
                    socket::refuse_clients(duplicate.as_fd()).unwrap();
                }
                "other" => {
                    let other = TcpListener::bind("127.0.0.1:0").unwrap();
                    let _ = say(&other.local_addr().unwrap().to_string());
                    let (client, peer) = other.accept().unwrap();
                    greet_client(client, peer, None);
                }
                // The listeners of the child and of the server have the same descriptor number,
                // because each is the first descriptor that its process opened.
                "child" => {
                    let mut child = this_program("--serve");
                    child.args(["child", "127.0.0.1:0"]).stdout(Stdio::piped());
                    // The child is killed when this thread ends, which is when the client has left.
                    die_with_parent(&mut child, Signal::SIGKILL);
                    let mut child = child.spawn().unwrap();
                    let says = child.stdout.take().unwrap();
                    std::thread::spawn(move || child.wait());
                    let mut address = String::new();
                    BufReader::new(says).read_line(&mut address).unwrap();
                    let _ = say(address.trim());
                }
                // Starts a process and ends its parent, so that the process becomes an orphan.
                "orphan" => {
                    let mut shell = Command::new("sh")
                        .args(["-c", "exec 3<&0; cat <&3 &"])
                        .stdin(Stdio::piped())
                        .spawn()
                        .unwrap();
                    *KEPT.lock().unwrap() = shell.stdin.take();
                    shell.wait().unwrap();
                }
                "end" => *KEPT.lock().unwrap() = None,
                _ => {}
            }
            let _ = say(&line);
        }
    });
}

// The shim.

/// A supervisor's process and its server's process ID, with a temporary directory.
struct RunningSupervisor {
    address: SocketAddr,
    supervisor: Child,
    server: i32,
    directory: tempfile::TempDir,
}

impl Drop for RunningSupervisor {
    fn drop(&mut self) {
        let _ = self.supervisor.kill();
        let _ = self.supervisor.wait();
    }
}

impl RunningSupervisor {
    fn new(kind: &str) -> Self {
        // An unused address.
        let [b, c, ..] = getrandom::u32().unwrap().to_ne_bytes();
        let free = TcpListener::bind(SocketAddr::from(([127, b | 1, c, 1], 0))).unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let program = std::env::current_exe().unwrap();
        Self::start_with(
            address,
            &[
                program.to_str().unwrap(),
                "--serve",
                kind,
                &address.to_string(),
            ],
        )
        .unwrap()
    }

    /// # Errors
    /// The supervisor's output, if it is not the server's process ID.
    fn start_with(address: SocketAddr, command: &[&str]) -> Result<Self, String> {
        let directory = tempfile::tempdir().unwrap();
        let mut supervisor = this_program("--supervise");
        supervisor
            .arg(directory.path())
            .arg(address.to_string())
            .args(command);
        let mut supervisor = supervisor.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(supervisor.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let mut started = Self {
            address,
            supervisor,
            server: 0,
            directory,
        };
        started.server = line.trim().parse().map_err(|_| line)?;
        Ok(started)
    }

    /// Connects to the supervisor as a shim does, and waits until the server listens.
    fn connect_shim(&self) -> Shim {
        let socket = seqpacket::dial_path(&self.directory.path().join("a.accept")).unwrap();
        let mut shim = Shim { socket, sent: 0 };
        let instance = InstanceId::parse(INSTANCE).unwrap();
        assert_eq!(
            shim.receive_message(),
            Some(ToShim::Hello {
                version: VERSION,
                instance
            })
        );
        assert_eq!(shim.receive_message(), Some(ToShim::Listening));
        shim
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.supervisor.id()).unwrap()
    }

    fn wait_for_status(&mut self) -> i32 {
        self.supervisor.wait().unwrap().code().unwrap()
    }

    fn send_signal_to_supervisor(&self, signal: Signal) {
        send_signal(self.pid(), signal as i32).unwrap();
    }

    /// Waits until the supervisor has exactly `count` children.
    fn await_children(&self, count: usize) {
        let (path, end) = (
            format!("/proc/{0}/task/{0}/children", self.pid()),
            Instant::now() + HANG,
        );
        while std::fs::read_to_string(&path)
            .unwrap()
            .split_whitespace()
            .count()
            != count
        {
            assert!(Instant::now() < end, "there are not {count}");
            std::thread::yield_now();
        }
    }
}

struct Shim {
    socket: OwnedFd,
    sent: u64,
}

impl Shim {
    /// Receives the supervisor's next message. Returns `None` when the connection has ended.
    fn receive_message(&mut self) -> Option<ToShim> {
        let mut buffer = [0; 1024];
        let mut waits = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        assert_eq!(
            poll(&mut waits, PollTimeout::try_from(HANG).unwrap()),
            Ok(1),
            "the supervisor hangs"
        );
        let received = match seqpacket::receive_message(self.socket.as_fd(), &mut buffer) {
            // The supervisor ended before it read every message. The messages that it sent can
            // still be read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return self.receive_message();
            }
            received => received.unwrap(),
        };
        assert!(received.descriptors.is_empty());
        (received.length > 0).then(|| parse_message(&buffer[..received.length]).unwrap())
    }

    fn send_accepted(&mut self, accepted: &TcpStream) {
        self.sent += 1;
        let message = serde_json::to_vec(&FromShim::Client { seq: self.sent }).unwrap();
        seqpacket::transmit_message(self.socket.as_fd(), &message, &[accepted.as_fd()]).unwrap();
    }

    /// Sends a new client to the supervisor, and closes this process's duplicate of the client's
    /// socket.
    fn send_client(&mut self, public: &Public) -> Client {
        let (client, accepted) = public.connect();
        self.send_accepted(&accepted);
        client
    }

    /// Receives messages about the last `count` clients, in any order. Asserts that all of them are
    /// `Taken`, or with `taken` false that all are `Back`.
    fn expect_outcomes(&mut self, count: u64, taken: bool) {
        let mut numbers = Vec::new();
        while (numbers.len() as u64) < count {
            match self.receive_message() {
                Some(ToShim::Taken { seqs }) if taken && seqs.len() <= MAX_TAKEN => {
                    numbers.extend(seqs);
                }
                Some(ToShim::Back { seq }) if !taken => numbers.push(seq),
                other => panic!("{other:?}"),
            }
        }
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(self.sent + 1 - count..=self.sent));
    }
}

/// A shim's listener.
struct Public(TcpListener);

impl Public {
    fn new() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    /// Makes a connection to this listener. Returns the client's end and the accepted end.
    fn connect(&self) -> (Client, TcpStream) {
        let client = TcpStream::connect(self.0.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(HANG)).unwrap();
        let (accepted, peer) = self.0.accept().unwrap();
        assert_eq!(peer, client.local_addr().unwrap());
        // The sockets of a real shim are non-blocking.
        accepted.set_nonblocking(true).unwrap();
        (Client(client), accepted)
    }
}

#[derive(Debug)]
struct Client(TcpStream);

impl Client {
    /// Sends a line to the server, and returns the answer.
    fn exchange_line(&self, line: &str) -> String {
        (&self.0).write_all(format!("{line}\n").as_bytes()).unwrap();
        self.receive_line()
    }

    fn receive_line(&self) -> String {
        let mut line = Vec::new();
        // Read byte by byte: a buffer would take bytes of the next line, and would be lost after
        // this call.
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            assert_eq!(
                (&self.0).read(&mut byte).unwrap(),
                1,
                "the server has closed the connection"
            );
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap().trim().to_owned()
    }

    /// Asserts that the server has told the client its address, and that it answers.
    fn expect_served(&self) {
        assert_eq!(
            self.receive_line(),
            self.0.local_addr().unwrap().to_string()
        );
        assert_eq!(self.exchange_line("ping"), "ping");
    }
}

// The cases.

/// Sends 1,000 clients in groups. While some groups come, the server or the supervisor is stopped.
fn no_client_is_lost_and_the_server_knows_each_address(kind: &'static str) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let (mut shim, public) = (started.connect_shim(), Public::new());
    let mut old = VecDeque::new();
    for group in 0..20 {
        let stopped = [None, Some(started.server), Some(started.pid()), None][group % 4];
        let send = |signal| stopped.map_or(Ok(()), |pid| send_signal(pid, signal as i32));
        send(Signal::SIGSTOP)?;
        let clients: Vec<_> = (0..50).map(|_| shim.send_client(&public)).collect();
        send(Signal::SIGCONT)?;
        if group % 4 == 3 {
            // Stop and continue both processes many times while clients are handed over.
            for pid in [started.server, started.pid()].into_iter().cycle().take(20) {
                send_signal(pid, Signal::SIGSTOP as i32)?;
                send_signal(pid, Signal::SIGCONT as i32)?;
            }
        }
        shim.expect_outcomes(50, true);
        clients.iter().for_each(Client::expect_served);
        old.push_back(clients);
        if old.len() > 5 {
            old.pop_front();
        }
    }
    // Send an IPv6 client too, if the machine has IPv6.
    match TcpListener::bind("[::1]:0") {
        Ok(six) => {
            let client = shim.send_client(&Public(six));
            shim.expect_outcomes(1, true);
            client.expect_served();
        }
        Err(error) => eprintln!("left out: this machine has no [::1]: {error}"),
    }
    for client in old.iter().flatten() {
        assert_eq!(client.exchange_line("still"), "still");
    }
    Ok(())
}

fn a_client_of_the_servers_own_address_is_served(kind: &'static str) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let (mut shim, public) = (started.connect_shim(), Public::new());
    for _ in 0..50 {
        let clients: Vec<_> = (0..3)
            .map(|_| Client(TcpStream::connect(started.address).unwrap()))
            .collect();
        let passed = shim.send_client(&public);
        clients
            .iter()
            .chain([&passed])
            .for_each(Client::expect_served);
        shim.expect_outcomes(1, true);
    }
    Ok(())
}

fn other_listeners_of_the_server_and_its_children_are_left_alone(
    kind: &'static str,
) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let client = started.connect_shim().send_client(&Public::new());
    client.expect_served();
    let other: SocketAddr = client.exchange_line("other").parse()?;
    Client(TcpStream::connect(other)?).expect_served();
    assert_eq!(client.receive_line(), "other");
    let other: SocketAddr = client.exchange_line("child").parse()?;
    assert_eq!(client.receive_line(), "child");
    Client(TcpStream::connect(other)?).expect_served();
    Ok(())
}

/// Kills a shim twice: once after the supervisor has read the shim's messages, and once before.
fn clients_of_a_shim_that_died_are_served(kind: &'static str) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    for stopped in [started.server, started.pid()] {
        let (mut shim, public) = (started.connect_shim(), Public::new());
        send_signal(stopped, Signal::SIGSTOP as i32)?;
        let clients: Vec<_> = (0..UNACKNOWLEDGED)
            .map(|_| shim.send_client(&public))
            .collect();
        drop(shim);
        send_signal(stopped, Signal::SIGCONT as i32)?;
        clients.iter().for_each(Client::expect_served);
    }
    Ok(())
}

fn garbage_ends_a_connection_and_gives_its_clients_back(kind: &'static str) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let (mut shim, mut other) = (started.connect_shim(), started.connect_shim());
    let public = Public::new();
    send_signal(started.server, Signal::SIGSTOP as i32)?;
    // The supervisor ignores the first message, which a later version may send.
    seqpacket::transmit_message(shim.socket.as_fd(), br#"{"message":"later"}"#, &[])?;
    seqpacket::transmit_message(shim.socket.as_fd(), b"garbage", &[])?;
    assert_eq!(shim.receive_message(), None);
    let mut shim = started.connect_shim();
    let clients: Vec<_> = (0..2).map(|_| shim.send_client(&public)).collect();
    seqpacket::transmit_message(shim.socket.as_fd(), b"garbage", &[])?;
    // The server is stopped. A blocking call that already waits for a client still returns the
    // first client.
    let told: Vec<_> = iter::from_fn(|| shim.receive_message()).collect();
    let first = if kind == "blocking" {
        ToShim::Taken { seqs: vec![1] }
    } else {
        ToShim::Back { seq: 1 }
    };
    assert!(
        told.len() == 2 && told.contains(&first) && told.contains(&ToShim::Back { seq: 2 }),
        "{told:?}"
    );
    drop(clients);
    let without = serde_json::to_vec(&FromShim::Client { seq: 1 })?;
    let mut shim = started.connect_shim();
    seqpacket::transmit_message(shim.socket.as_fd(), &without, &[])?;
    assert_eq!(shim.receive_message(), None);
    // The peer of this client's socket has gone, so the supervisor gives the client back.
    let (left, accepted) = public.connect();
    socket::reset_on_close(&left.0);
    drop(left);
    other.send_accepted(&accepted);
    other.expect_outcomes(1, false);
    let client = other.send_client(&public);
    send_signal(started.server, Signal::SIGCONT as i32)?;
    other.expect_outcomes(1, true);
    client.expect_served();
    Ok(())
}

fn a_bounded_number_of_clients_waits_for_each_shim(kind: &'static str) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let (mut shim, mut other, public) = (
        started.connect_shim(),
        started.connect_shim(),
        Public::new(),
    );
    send_signal(started.server, Signal::SIGSTOP as i32)?;
    // The server is stopped. A blocking call that already waits for a client still returns one.
    let at_once = u64::from(kind == "blocking");
    let mut clients = Vec::new();
    for _ in 0..at_once {
        clients.push(shim.send_client(&public));
        shim.expect_outcomes(1, true);
    }
    clients.extend((0..UNACKNOWLEDGED).map(|_| shim.send_client(&public)));
    drop(shim.send_client(&public));
    shim.expect_outcomes(1, false);
    let others = other.send_client(&public);
    send_signal(started.server, Signal::SIGCONT as i32)?;
    other.expect_outcomes(1, true);
    clients
        .iter()
        .chain([&others])
        .for_each(Client::expect_served);
    Ok(())
}

fn further_clients_of_the_servers_own_address_wait_in_the_kernel(
    kind: &'static str,
) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    drop(started.connect_shim());
    send_signal(started.server, Signal::SIGSTOP as i32)?;
    // These clients fit into the listener's accept queue.
    let clients: Vec<_> = (0..150)
        .map(|_| Client(TcpStream::connect(started.address).unwrap()))
        .collect();
    // When a shim gets a message, the supervisor has seen the clients that came before.
    for _ in 0..3 {
        drop(started.connect_shim());
    }
    let open = std::fs::read_dir(format!("/proc/{}/fd", started.pid()))?.count();
    assert!(open < UNACKNOWLEDGED + 30, "{open}");
    send_signal(started.server, Signal::SIGCONT as i32)?;
    clients.iter().for_each(Client::expect_served);
    Ok(())
}

fn a_bell_rings_after_another_holder_accepted_the_parked_connection(
    kind: &'static str,
) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let (mut shim, public) = (started.connect_shim(), Public::new());
    let first = shim.send_client(&public);
    first.expect_served();
    first.0.set_read_timeout(Some(HANG))?;
    assert_eq!(first.exchange_line("steal"), "true");
    assert_eq!(first.receive_line(), "steal");
    let second = shim.send_client(&public);
    second.expect_served();
    shim.expect_outcomes(2, true);
    Ok(())
}

fn a_listener_that_is_shut_down_ends_the_wait_for_clients(
    kind: &'static str,
) -> Result<(), Failed> {
    let mut started = RunningSupervisor::new(kind);
    let mut shim = started.connect_shim();
    let client = shim.send_client(&Public::new());
    client.expect_served();
    shim.expect_outcomes(1, true);
    let server = HeldProcess::of(started.server)?;
    (&client.0).write_all(b"shutdown\n")?;
    assert!(server.ends_within(HANG)?);
    assert_eq!(started.wait_for_status(), 9);
    Ok(())
}

fn several_shims_are_served_one_after_another(kind: &'static str) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let public = Public::new();
    for _ in 0..3 {
        let (mut first, mut second) = (started.connect_shim(), started.connect_shim());
        let clients = [first.send_client(&public), second.send_client(&public)];
        clients.iter().for_each(Client::expect_served);
        first.expect_outcomes(1, true);
        second.expect_outcomes(1, true);
    }
    Ok(())
}

fn a_closed_listener_gives_clients_back(kind: &'static str) -> Result<(), Failed> {
    let mut started = RunningSupervisor::new(kind);
    let (mut shim, public) = (started.connect_shim(), Public::new());
    let first = shim.send_client(&public);
    first.expect_served();
    shim.expect_outcomes(1, true);
    assert_eq!(first.exchange_line("close"), "close");
    let kept: Vec<_> = (0..UNACKNOWLEDGED).map(|_| public.connect()).collect();
    for (_, accepted) in &kept {
        shim.send_accepted(accepted);
    }
    assert_eq!(shim.receive_message(), Some(ToShim::Closed));
    shim.expect_outcomes(UNACKNOWLEDGED as u64, false);
    for (client, accepted) in &kept {
        accepted.set_nonblocking(false)?;
        (&*accepted).write_all(b"from the shim\n")?;
        assert_eq!(client.receive_line(), "from the shim");
    }
    // The server has closed its listener, so its port is free. Open connections stay open.
    assert!(TcpStream::connect(started.address).is_err());
    assert_eq!(first.exchange_line("ping"), "ping");
    // A shim that connects only now must get [`ToShim::Closed`] too.
    let socket = seqpacket::dial_path(&started.directory.path().join("a.accept"))?;
    let mut late = Shim { socket, sent: 0 };
    late.receive_message();
    assert_eq!(late.receive_message(), Some(ToShim::Closed));
    started.send_signal_to_supervisor(Signal::SIGTERM);
    assert_eq!(started.wait_for_status(), 128 + 15);
    Ok(())
}

fn a_shim_that_connects_while_no_descriptor_is_left_is_served_later(
    kind: &'static str,
) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let client = started.connect_shim().send_client(&Public::new());
    client.expect_served();
    let limit = |soft: &str| {
        let pid = started.pid().to_string();
        let set = Command::new("prlimit")
            .args(["--pid", &pid, &format!("--nofile={soft}:")])
            .status();
        assert!(set.expect("prlimit of util-linux").success());
    };
    limit("1");
    let socket = seqpacket::dial_path(&started.directory.path().join("a.accept"))?;
    let (mut shim, instance) = (
        Shim { socket, sent: 0 },
        InstanceId::parse(INSTANCE).unwrap(),
    );
    // The answer shows that the supervisor has handled a bind(2) of the server, and so has tried to
    // accept the shim before.
    client.exchange_line("other");
    let mut ready = [PollFd::new(shim.socket.as_fd(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut ready, PollTimeout::ZERO)?, 0);
    limit("1024");
    // Any event makes the supervisor try again to accept the shim. Here a client causes one.
    let _own = TcpStream::connect(started.address)?;
    assert_eq!(
        shim.receive_message(),
        Some(ToShim::Hello {
            version: VERSION,
            instance
        })
    );
    Ok(())
}

fn orphans_are_reaped(kind: &'static str) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    let client = started.connect_shim().send_client(&Public::new());
    client.expect_served();
    assert_eq!(client.exchange_line("orphan"), "orphan");
    started.await_children(2);
    assert_eq!(client.exchange_line("end"), "end");
    started.await_children(1);
    Ok(())
}

fn signals_and_the_status_are_passed_on(kind: &'static str) -> Result<(), Failed> {
    // By default, each of these signals ends a process. One is a real-time signal.
    for signal in [Signal::SIGTERM as i32, Signal::SIGHUP as i32, 37] {
        let mut started = RunningSupervisor::new(kind);
        send_signal(started.pid(), signal)?;
        assert_eq!(started.wait_for_status(), 128 + signal);
    }
    let mut started = RunningSupervisor::new(kind);
    let (mut shim, public) = (started.connect_shim(), Public::new());
    send_signal(started.server, Signal::SIGSTOP as i32)?;
    let kept: Vec<_> = (0..10).map(|_| public.connect()).collect();
    for (_, accepted) in &kept {
        shim.send_accepted(accepted);
    }
    send_signal(started.server, Signal::SIGKILL as i32)?;
    // Before it was killed, the server was stopped, and a waiting call may have returned the first
    // client. The other clients come back, or belong to the shim again when the connection ends.
    while let Some(message) = shim.receive_message() {
        let known = matches!(message, ToShim::Closed | ToShim::Back { .. });
        assert!(
            known || message == ToShim::Taken { seqs: vec![1] },
            "{message:?}"
        );
    }
    assert_eq!(started.wait_for_status(), 128 + 9);
    let mut started = RunningSupervisor::new(kind);
    let client = started.connect_shim().send_client(&Public::new());
    client.expect_served();
    (&client.0).write_all(b"exit\n")?;
    assert_eq!(started.wait_for_status(), 7);
    Ok(())
}

fn the_server_ends_with_its_supervisor(kind: &'static str) -> Result<(), Failed> {
    let started = RunningSupervisor::new(kind);
    drop(started.connect_shim());
    let server = HeldProcess::of(started.server)?;
    started.send_signal_to_supervisor(Signal::SIGKILL);
    assert!(server.ends_within(HANG)?);
    Ok(())
}

fn a_program_that_is_not_there_is_an_error(_: &'static str) -> Result<(), Failed> {
    let address = "127.3.9.1:6443".parse()?;
    let error = RunningSupervisor::start_with(address, &["/nowhere"])
        .map(drop)
        .unwrap_err();
    assert!(error.contains("NotFound"), "{error}");
    Ok(())
}

fn a_second_supervisor_is_refused(_: &'static str) -> Result<(), Failed> {
    let directory = tempfile::tempdir()?;
    let mut supervisor = this_program("--supervise");
    supervisor
        .arg(directory.path())
        .arg("127.3.9.2:6443")
        .arg(std::env::current_exe()?)
        .arg("--self-test");
    let output = String::from_utf8(supervisor.output()?.stdout)?;
    assert!(output.contains("listenerPath"), "{output}");
    Ok(())
}
