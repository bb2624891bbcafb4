//! The peers: configuration and start.
//!
//! Every relay gets one thread or worker a core, no access log, no idle timeout that would matter,
//! room for as many connections as the file limit allows, and the longest backlog that the kernel
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

/// How long a peer may take to answer first.
const START: Duration = Duration::from_secs(10);

/// Time between two tries to get the first answer.
const RETRY: Duration = Duration::from_micros(200);

/// The address of the peers, and the address of berth's metrics. Metrics have the port of the peer.
const PEERS: Ipv4Addr = Ipv4Addr::new(127, 0, 3, 1);
const ADMIN: Ipv4Addr = Ipv4Addr::new(127, 0, 4, 1);

/// The name of the instance that gets sockets, the text in the shim's status while the shim passes
/// sockets, and the metric of passed sockets.
const INSTANCE: &str = "bench";
const PASSING_STATUS: &str = "\"injected\": true";
const PASSED_METRIC: &str = "berth_connections_total{shim=\"bench\",outcome=\"injected\"}";

/// How long berth may take to count all connections: it looks for an instance's first byte every 50
/// ms.
const COUNT_TIMEOUT: Duration = Duration::from_secs(5);

/// Descriptors for listeners, epoll, logs and pipes.
const RESERVED: u64 = 200;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PeerKind {
    /// No relay: the client dials the backend.
    None,
    Berth,
    /// berth with `--pass inject`: the server gets the clients' sockets. The path names the
    /// server's program, because berth has to start the server as its child.
    Inject(PathBuf),
    Haproxy {
        splice: bool,
    },
    /// With the path of nginx's stream module, if the module is not built in.
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

    /// The version that the program reports.
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
        // Envoy's version line begins with a path, and HAProxy's version line ends with " - " and a
        // link.
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

    /// Bytes of the program's files, without shared libraries.
    pub(super) fn size(&self) -> u64 {
        let module = match &self.kind {
            PeerKind::Nginx(module) => module.as_deref(),
            _ => None,
        };
        let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
        size(&self.program) + module.map_or(0, size)
    }

    /// Starts the peer before a backend, with an address and a directory of its own, and waits for
    /// the first answer.
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
                    .args(["exec", "--pass", "inject", "--instance", INSTANCE])
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
            .then(|| SocketAddr::new(ADMIN.into(), address.port()));
        let answers = || match admin {
            Some(admin) if !get_page(admin, "/status")?.contains(PASSING_STATUS) => {
                Err(io::Error::other("the server gets no sockets"))
            }
            _ => load::round_trip(address),
        };
        while let Err(error) = answers() {
            match tree.relay.exit_status() {
                Some(status) => bail!(
                    "the relay ended by itself, {status}: {}",
                    tree.relay.last_line()
                ),
                None if start.elapsed() < START => std::thread::sleep(RETRY),
                None => bail!(
                    "no answer within {START:?}, {error}: {}",
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
                // Connections are logged at debug, which is off.
                command.args(["serve", "--probe", "tcp", "--drain-timeout", "1s"]);
                command
                    .arg(format!("--listen={listen}"))
                    .arg("--run-dir")
                    .arg(directory.join("run"));
                match kind {
                    PeerKind::Inject(_) => {
                        command.args(["--pass", "inject", "--instance", INSTANCE]);
                        command.arg(format!("--admin={ADMIN}:{}", listen.port()))
                    }
                    _ => command.arg(format!("--backend={backend}")),
                };
            }
            PeerKind::Haproxy { splice } => {
                let config = haproxy_config(
                    listen,
                    backend,
                    cores,
                    (descriptors - RESERVED) / 2,
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
                    descriptors - RESERVED,
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

/// A running peer, until the value is dropped.
pub(super) struct RunningPeer {
    /// The address for clients.
    pub(super) address: SocketAddr,
    /// The server's own address.
    pub(super) backend: SocketAddr,
    /// `None` without a relay.
    pub(super) tree: Option<Tree>,
    /// Time from exec to the first answer.
    pub(super) until_answer: Duration,
    /// Admin address of a berth that passes sockets.
    admin: Option<SocketAddr>,
}

impl RunningPeer {
    /// Checks that the sockets of all clients were passed to the server and that no byte was
    /// relayed.
    pub(super) fn check(&self, clients: usize) -> Result<()> {
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
                "{relayed} bytes were relayed: the figure would not be that of --pass inject"
            );
            if passed >= clients as u64 {
                return Ok(());
            }
            ensure!(
                start.elapsed() < COUNT_TIMEOUT,
                "{passed} sockets of {clients} clients were passed to the server"
            );
            std::thread::sleep(RETRY);
        }
    }
}

/// Gets a page of berth's admin server.
fn get_page(admin: SocketAddr, path: &str) -> io::Result<String> {
    let (mut stream, mut page) = (TcpStream::connect(admin)?, String::new());
    stream.set_read_timeout(Some(START))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    stream.read_to_string(&mut page)?;
    Ok(page)
}

/// The sum of all lines with this beginning.
fn sum_metric(page: &str, begin: &str) -> u64 {
    let lines = page.lines().filter(|line| line.starts_with(begin));
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// Why this berth cannot pass sockets on this machine.
pub(super) fn find_obstacle(berth: &Path) -> Option<String> {
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

/// An address without a listener.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((PEERS, 0))?;
    Ok(listener.local_addr()?)
}

fn haproxy_config(
    listen: SocketAddr,
    backend: SocketAddr,
    threads: usize,
    connections: u64,
    splice: bool,
) -> String {
    // HAProxy counts two descriptors for each pipe, and allows as many pipes as a quarter of the
    // connections by default.
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

/// Uses `reuseport`, as nginx's documentation advises for many short connections. Without the
/// option one worker takes nearly all connections.
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

/// Sets `circuit_breakers`, without which Envoy would refuse the 1,025th connection.
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
