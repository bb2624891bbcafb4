//! The peers, and how each is configured and started.
//!
//! Every relay gets one thread or worker a core, no access log, no idle timeout that would cut in, room
//! for as many connections as the file limit allows and the longest backlog that the kernel grants;
//! everything else is the default. A peer runs only while it is measured.

use super::load;
use super::usage::Tree;
use crate::process::ChildProcess;
use anyhow::{Result, bail};
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// How long a peer may take until it answers.
const START: Duration = Duration::from_secs(10);

/// Time between two tries to get that answer.
const RETRY: Duration = Duration::from_micros(200);

/// berth's log lines about its direct path.
const ON: &str = "direct path on";
const OFF: [&str; 2] = ["direct path off", "no direct path"];

/// Descriptors for listeners, epoll, logs and pipes.
const RESERVED: u64 = 200;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PeerKind {
    /// No relay: the client dials the backend.
    None,
    Berth,
    /// The same, with `--direct on`.
    DirectPath,
    Haproxy {
        splice: bool,
    },
    /// With the path of its stream module, if that is not built in.
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

    /// Berth, with a direct path or without.
    pub(super) fn is_judged(&self) -> bool {
        matches!(self.kind, PeerKind::Berth | PeerKind::DirectPath)
    }

    /// The version that it reports.
    pub(super) fn version(&self) -> String {
        let option = match self.kind {
            PeerKind::None => return "no relay, the client dials the backend".to_owned(),
            PeerKind::Berth | PeerKind::DirectPath | PeerKind::Envoy => "--version",
            PeerKind::Haproxy { .. } | PeerKind::Nginx(_) => "-v",
        };
        let output =
            Command::new(&self.program).arg(option).output().map(|output| [output.stdout, output.stderr].concat());
        let output = String::from_utf8_lossy(&output.unwrap_or_default()).into_owned();
        let line = output.lines().find(|line| !line.trim().is_empty()).unwrap_or("unknown version");
        // Envoy begins with its path, and HAProxy ends with a link.
        let words = line.split_ascii_whitespace().take_while(|word| *word != "-");
        let mut text = words.filter(|word| !word.starts_with('/')).collect::<Vec<_>>().join(" ");
        match self.kind {
            PeerKind::Haproxy { splice: true } => text.push_str(", with option splice-auto"),
            PeerKind::DirectPath => text.push_str(", with --direct on"),
            _ => {}
        }
        text
    }

    /// Bytes of its files, without shared libraries.
    pub(super) fn size(&self) -> u64 {
        let module = match &self.kind {
            PeerKind::Nginx(module) => module.as_deref(),
            _ => None,
        };
        let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
        size(&self.program) + module.map_or(0, size)
    }

    /// Starts it before a backend, with an address and a directory of its own, and waits until it answers.
    pub(super) fn start(&self, node: Ipv4Addr, backend: SocketAddr, work: &Path) -> Result<Running> {
        if self.kind == PeerKind::None {
            return Ok(Running { address: backend, tree: None, until_answer: Duration::ZERO, is_direct: false });
        }
        let directory = tempfile::tempdir_in(work)?.keep();
        let address = free_address(node)?;
        let mut command = self.command(address, backend, &directory)?;
        command.current_dir(&directory);
        let start = Instant::now();
        let mut process = ChildProcess::start(command, directory.join("log"))?;
        let is_direct = self.kind == PeerKind::DirectPath;
        let answers = |process: &ChildProcess| match is_direct && !process.log().contains(ON) {
            true => Err(io::Error::other("its direct path is off")),
            false => load::round_trip(address),
        };
        while let Err(error) = answers(&process) {
            match process.exited() {
                Some(status) => bail!("it ended by itself, {status}: {}", process.last_line()),
                None if start.elapsed() < START => std::thread::sleep(RETRY),
                None => bail!("no answer within {START:?}, {error}: {}", process.last_line()),
            }
        }
        Ok(Running { address, until_answer: start.elapsed(), tree: Some(Tree(process)), is_direct })
    }

    fn command(&self, listen: SocketAddr, backend: SocketAddr, directory: &Path) -> Result<Command> {
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
            kind @ (PeerKind::Berth | PeerKind::DirectPath) => {
                command.args(["serve", "--probe", "tcp", "--drain-timeout", "1s"]);
                // Connections are logged at debug, which is off.
                command.args(match kind {
                    // This load is a crowd, which the gate would keep off the direct path.
                    PeerKind::DirectPath => &["--direct", "on", "--max-openings", "off"][..],
                    _ => &[],
                });
                command.arg(format!("--listen={listen}")).arg(format!("--backend={backend}"));
                command.arg("--run-dir").arg(directory.join("run"));
            }
            PeerKind::Haproxy { splice } => {
                let config = haproxy(listen, backend, cores, (descriptors - RESERVED) / 2, *splice);
                command.arg("-db").arg("-f").arg(write("haproxy.cfg", config)?);
            }
            PeerKind::Nginx(module) => {
                let config = nginx(listen, backend, module.as_deref(), directory, descriptors - RESERVED);
                command.arg("-p").arg(directory).arg("-e").arg("stderr").arg("-c").arg(write("nginx.conf", config)?);
            }
            PeerKind::Envoy => {
                let config = write("envoy.json", envoy(listen, backend))?;
                command.arg("-c").arg(config).arg("--concurrency").arg(cores.to_string());
                command.args(["--disable-hot-restart", "--log-level", "error"]);
            }
        }
        Ok(command)
    }
}

/// A peer that runs, until it is dropped.
pub(super) struct Running {
    /// Where clients dial.
    pub(super) address: SocketAddr,
    /// None: there is no relay.
    pub(super) tree: Option<Tree>,
    /// From exec to the first answer.
    pub(super) until_answer: Duration,
    is_direct: bool,
}

impl Running {
    /// An error if a direct path was off while it was measured.
    pub(super) fn check(&self) -> Result<()> {
        let Some(tree) = self.tree.as_ref().filter(|_| self.is_direct) else { return Ok(()) };
        let log = tree.0.log();
        let off =
            log.lines().skip_while(|line| !line.contains(ON)).find(|line| OFF.iter().any(|off| line.contains(off)));
        off.map_or(Ok(()), |line| bail!("the direct path was off for a time: {line}"))
    }
}

/// An address of the node on which nothing listens.
fn free_address(node: Ipv4Addr) -> Result<SocketAddr> {
    let listener = TcpListener::bind((node, 0))?;
    Ok(listener.local_addr()?)
}

fn haproxy(listen: SocketAddr, backend: SocketAddr, threads: usize, connections: u64, splice: bool) -> String {
    // HAProxy counts two descriptors for each pipe, and by default as many pipes as a quarter of the connections.
    let (splice, connections) = if splice { ("    option splice-auto\n", connections / 2) } else { ("", connections) };
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

/// `reuseport`, as nginx's documentation advises for many short connections: without it one worker takes nearly all.
fn nginx(listen: SocketAddr, backend: SocketAddr, module: Option<&Path>, directory: &Path, connections: u64) -> String {
    let module = module.map(|path| format!("load_module {};\n", path.display())).unwrap_or_default();
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

/// Without `circuit_breakers` it would refuse the 1,025th connection.
fn envoy(listen: SocketAddr, backend: SocketAddr) -> String {
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
