//! Configures and starts the relays under test (peers).
//!
//! Every relay gets one thread or worker a core, no access log, no idle timeout that would matter,
//! as many connections as the limit of open files allows, and the longest backlog that the kernel
//! grants. Everything else is the default. A peer runs only while it is measured.

use super::load;
use super::usage::Tree;
use crate::process::ChildProcess;
use anyhow::{Result, bail, ensure};
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// Time limit until a peer gives its first answer.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between two attempts to get something from a peer that starts.
const RETRY_PAUSE: Duration = Duration::from_micros(200);

/// Addresses on which relays listen, and on which berth serves metrics. Relays and metrics
/// use the same port number.
const PEER_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 3, 1);
const ADMIN_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 4, 1);

/// Texts of the shim with `--pass inject`: the name of its instance, the text in its status when it
/// can pass sockets, and the metric that counts passed sockets.
const INSTANCE_NAME: &str = "bench";
const PASSING_STATUS: &str = "\"injected\": true";
const PASSED_METRIC: &str = "berth_connections_total{shim=\"bench\",outcome=\"injected\"}";

/// Time limit until berth has counted all connections. berth looks for the first byte of an
/// instance every 50 ms.
const COUNT_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of descriptors that a relay needs for other things than connections: listeners, epoll,
/// logs and pipes.
const RESERVED_DESCRIPTORS: u64 = 200;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PeerKind {
    /// No relay: the clients connect to the backend.
    None,
    Berth,
    /// berth with `--pass inject`: the server gets the clients' sockets. The path is that of the
    /// server's program, which berth has to start as its child.
    Inject(PathBuf),
    Haproxy {
        splice: bool,
    },
    /// nginx, with the path of its stream module if the module is not built in.
    Nginx(Option<PathBuf>),
    Envoy,
}

#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) name: String,
    pub(super) kind: PeerKind,
    pub(super) program: PathBuf,
}

impl Peer {
    pub(super) fn is_berth(&self) -> bool {
        self.kind == PeerKind::Berth
    }

    pub(super) fn is_inject(&self) -> bool {
        matches!(self.kind, PeerKind::Inject(_))
    }

    /// Returns the version that the peer's program reports.
    pub(super) fn version(&self) -> String {
        let option = match self.kind {
            PeerKind::None => return "no relay, the client dials the server".to_owned(),
            PeerKind::Berth | PeerKind::Inject(_) | PeerKind::Envoy => "--version",
            PeerKind::Haproxy { .. } | PeerKind::Nginx(_) => "-v",
        };
        let output = Command::new(&self.program)
            .arg(option)
            .output()
            .map(|output| [output.stdout, output.stderr].concat());
        let output = String::from_utf8_lossy(&output.unwrap_or_default()).into_owned();
        let line = output
            .lines()
            .find(|line| !line.trim().is_empty())
            .unwrap_or("unknown version");
        // Leave out the path at the beginning of Envoy's version line, and the " - " with a link at
        // the end of HAProxy's.
        let words = line
            .split_ascii_whitespace()
            .take_while(|word| *word != "-");
        let mut text = words
            .filter(|word| !word.starts_with('/'))
            .collect::<Vec<_>>()
            .join(" ");
        match self.kind {
            PeerKind::Haproxy { splice: true } => text.push_str(", with option splice-auto"),
            PeerKind::Inject(_) => text.push_str(", exec and serve with --pass inject: no relay"),
            _ => {}
        }
        text
    }

    /// Returns the size of the program's files in bytes, without shared libraries.
    pub(super) fn program_size(&self) -> u64 {
        let module = match &self.kind {
            PeerKind::Nginx(module) => module.as_deref(),
            _ => None,
        };
        let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
        size(&self.program) + module.map_or(0, size)
    }

    /// Starts the peer as a relay to the backend, and waits for the first answer. The peer has an
    /// address and a directory of its own.
    pub(super) fn start(&self, backend: SocketAddr, work: &Path) -> Result<RunningPeer> {
        if self.kind == PeerKind::None {
            return Ok(RunningPeer {
                address: backend,
                backend,
                tree: None,
                until_answer: Duration::ZERO,
                admin: None,
            });
        }
        let directory = tempfile::tempdir_in(work)?.keep();
        let address = free_address()?;
        let mut backend = backend;
        let supervisor = match &self.kind {
            PeerKind::Inject(server) => {
                let mut command = Command::new(&self.program);
                command
                    .args(["exec", "--pass", "inject", "--instance", INSTANCE_NAME])
                    .arg(format!("--listen={address}"));
                command
                    .arg("--run-dir")
                    .arg(directory.join("run"))
                    .arg("--")
                    .arg(server);
                let mut supervisor = ChildProcess::start(command, directory.join("server"))?;
                backend = supervisor.address()?;
                Some(supervisor)
            }
            _ => None,
        };
        let mut command = self.command(address, backend, &directory)?;
        command.current_dir(&directory);
        let start = Instant::now();
        let mut tree = Tree {
            relay: ChildProcess::start(command, directory.join("log"))?,
            supervisor,
        };
        let admin = self
            .is_inject()
            .then(|| SocketAddr::new(ADMIN_ADDRESS.into(), address.port()));
        let answers = || match admin {
            Some(admin) if !get_page(admin, "/status")?.contains(PASSING_STATUS) => {
                Err(io::Error::other("the server gets no sockets"))
            }
            _ => load::make_round_trip(address),
        };
        while let Err(error) = answers() {
            match tree.relay.exit_status() {
                Some(status) => bail!(
                    "the relay ended by itself, {status}: {}",
                    tree.relay.last_line()
                ),
                None if start.elapsed() < START_TIMEOUT => std::thread::sleep(RETRY_PAUSE),
                None => bail!(
                    "no answer within {START_TIMEOUT:?}, {error}: {}",
                    tree.relay.last_line()
                ),
            }
        }
        Ok(RunningPeer {
            address,
            backend,
            until_answer: start.elapsed(),
            tree: Some(tree),
            admin,
        })
    }

    fn command(
        &self,
        listen: SocketAddr,
        backend: SocketAddr,
        directory: &Path,
    ) -> Result<Command> {
        let mut command = Command::new(&self.program);
        let cores = available_parallelism()?.get();
        let descriptors = berth_os::process::raise_file_limit()?;
        let write = |name: &str, text: String| -> Result<PathBuf> {
            let path = directory.join(name);
            fs::write(&path, text)?;
            Ok(path)
        };
        match &self.kind {
            PeerKind::None => bail!("nothing to start"),
            kind @ (PeerKind::Berth | PeerKind::Inject(_)) => {
                // At the default level, berth does not log connections.
                command.args(["serve", "--probe", "tcp", "--drain-timeout", "1s"]);
                command
                    .arg(format!("--listen={listen}"))
                    .arg("--run-dir")
                    .arg(directory.join("run"));
                match kind {
                    PeerKind::Inject(_) => {
                        command.args(["--pass", "inject", "--instance", INSTANCE_NAME]);
                        command.arg(format!("--admin={ADMIN_ADDRESS}:{}", listen.port()))
                    }
                    _ => command.arg(format!("--backend={backend}")),
                };
            }
            PeerKind::Haproxy { splice } => {
                let config = haproxy_config(
                    listen,
                    backend,
                    cores,
                    (descriptors - RESERVED_DESCRIPTORS) / 2,
                    *splice,
                );
                command
                    .arg("-db")
                    .arg("-f")
                    .arg(write("haproxy.cfg", config)?);
            }
            PeerKind::Nginx(module) => {
                let config = nginx_config(
                    listen,
                    backend,
                    module.as_deref(),
                    directory,
                    descriptors - RESERVED_DESCRIPTORS,
                );
                command
                    .arg("-p")
                    .arg(directory)
                    .arg("-e")
                    .arg("stderr")
                    .arg("-c")
                    .arg(write("nginx.conf", config)?);
            }
            PeerKind::Envoy => {
                let config = write("envoy.json", envoy_config(listen, backend))?;
                command
                    .arg("-c")
                    .arg(config)
                    .arg("--concurrency")
                    .arg(cores.to_string());
                command.args(["--disable-hot-restart", "--log-level", "error"]);
            }
        }
        Ok(command)
    }
}

/// A peer that runs until this value is dropped.
pub(super) struct RunningPeer {
    /// The address to which clients connect.
    pub(super) address: SocketAddr,
    /// The address of the server itself, past the relay.
    pub(super) backend: SocketAddr,
    /// The processes of the relay. `None` if the clients connect to the server directly.
    pub(super) tree: Option<Tree>,
    /// Time from the start of the relay's program (exec) to its first answer.
    pub(super) until_answer: Duration,
    /// Address of berth's admin server, if berth passes sockets.
    admin: Option<SocketAddr>,
}

impl RunningPeer {
    /// Checks that the sockets of all clients were passed to the server and that no byte was
    /// relayed.
    pub(super) fn check_passed_sockets(&self, clients: usize) -> Result<()> {
        let Some(admin) = self.admin else {
            return Ok(());
        };
        let start = Instant::now();
        loop {
            let page = get_page(admin, "/metrics")?;
            let (passed, relayed) = (
                sum_metric(&page, PASSED_METRIC),
                sum_metric(&page, "berth_bytes_total"),
            );
            ensure!(
                relayed == 0,
                "{relayed} bytes were relayed: the figure would not measure --pass inject"
            );
            if passed >= clients as u64 {
                return Ok(());
            }
            ensure!(
                start.elapsed() < COUNT_TIMEOUT,
                "only {passed} of the sockets of {clients} clients were passed to the server"
            );
            std::thread::sleep(RETRY_PAUSE);
        }
    }
}

/// Requests a page of berth's admin server, and returns the response.
fn get_page(admin: SocketAddr, path: &str) -> io::Result<String> {
    let (mut stream, mut page) = (TcpStream::connect(admin)?, String::new());
    stream.set_read_timeout(Some(START_TIMEOUT))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    stream.read_to_string(&mut page)?;
    Ok(page)
}

/// Adds up the values of all lines that begin with `begin`.
fn sum_metric(page: &str, begin: &str) -> u64 {
    let lines = page.lines().filter(|line| line.starts_with(begin));
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// Returns the reason why this berth cannot pass sockets on this machine. `None` if it can.
pub(super) fn find_passing_obstacle(berth: &Path) -> Option<String> {
    let directory = tempfile::tempdir().ok()?;
    let mut command = Command::new(berth);
    command
        .args([
            "exec",
            "--pass",
            "inject",
            "--listen",
            "10.0.0.5:6443",
            "--run-dir",
        ])
        .arg(directory.path());
    let output = command.args(["--", "true"]).output().ok()?;
    let why = String::from_utf8_lossy(&output.stderr)
        .lines()
        .last()
        .unwrap_or_default()
        .to_owned();
    (!output.status.success()).then_some(why)
}

/// Returns an address for a relay, with a port on which nothing listens.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((PEER_ADDRESS, 0))?;
    Ok(listener.local_addr()?)
}

fn haproxy_config(
    listen: SocketAddr,
    backend: SocketAddr,
    threads: usize,
    connections: u64,
    splice: bool,
) -> String {
    // HAProxy needs two descriptors for each pipe. By default it has one pipe for four connections.
    let (splice, connections) = if splice {
        ("    option splice-auto\n", connections / 2)
    } else {
        ("", connections)
    };
    format!(
        "global
    nbthread {threads}
    maxconn {connections}
defaults
    mode tcp
    timeout connect 5s
    timeout client 24h
    timeout server 24h
    timeout tunnel 24h
{splice}listen bench
    bind {listen} backlog 65535
    maxconn {connections}
    server backend {backend}
"
    )
}

/// Makes nginx's configuration. It uses `reuseport`, as nginx's documentation advises for many
/// short connections: without it, one worker takes nearly all connections.
fn nginx_config(
    listen: SocketAddr,
    backend: SocketAddr,
    module: Option<&Path>,
    directory: &Path,
    connections: u64,
) -> String {
    let module = module
        .map(|path| format!("load_module {};\n", path.display()))
        .unwrap_or_default();
    format!(
        "{module}daemon off;
user root;
pid {directory}/nginx.pid;
worker_processes auto;
error_log stderr error;
events {{
    worker_connections {connections};
}}
stream {{
    access_log off;
    server {{
        listen {listen} reuseport backlog=65535;
        proxy_pass {backend};
        proxy_connect_timeout 5s;
        proxy_timeout 24h;
    }}
}}
",
        directory = directory.display()
    )
}

/// Makes Envoy's configuration. Without `circuit_breakers`, Envoy would refuse the 1,025th
/// connection.
fn envoy_config(listen: SocketAddr, backend: SocketAddr) -> String {
    let address = |address: SocketAddr| serde_json::json!({"socket_address": {"address": address.ip(), "port_value": address.port()}});
    let many = 1_000_000;
    serde_json::json!({"static_resources": {
        "listeners": [{
            "name": "bench",
            "address": address(listen),
            "tcp_backlog_size": 65535,
            "filter_chains": [{"filters": [{
                "name": "envoy.filters.network.tcp_proxy",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
                    "stat_prefix": "bench",
                    "cluster": "backend",
                    "idle_timeout": "0s",
                },
            }]}],
        }],
        "clusters": [{
            "name": "backend",
            "type": "STATIC",
            "connect_timeout": "5s",
            "circuit_breakers": {"thresholds": [{
                "max_connections": many, "max_pending_requests": many, "max_requests": many,
            }]},
            "load_assignment": {
                "cluster_name": "backend",
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address(backend)}}]}],
            },
        }],
    }})
    .to_string()
}
