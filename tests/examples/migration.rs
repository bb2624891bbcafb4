//! The migration from HAProxy as a sidecar to berth, by the steps of
//! `docs/migrate-from-haproxy.md`: the HAProxy of `examples/haproxy-migration`, simulated
//! apiservers, and clients that never retry. The control leaves out leave-port.sh.

use crate::support::eventually;
use crate::support::load::{Load, Record, connect, describe_failure};
use crate::support::net::{find_listening, fresh_ip, queued_at};
use crate::support::process::{Running, berth_command, expect_status};
use crate::{find_tool, no_namespace, root};
use berth_rehearse::record::log::Recorder;
use berth_rehearse::testbed::{
    certs, netns,
    store::{self, Store},
};
use libtest_mimic::{Completion, Failed};
use nix::sys::signal::Signal;
use socket2::{Domain, Socket, Type};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsConnector;

/// The node's address, in the test's network namespace.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);
const BERTH: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(HOST), 6443);

/// Number of clients that connect in a loop.
const CLIENTS: u32 = 64;

/// For the case of a full HAProxy: HAProxy's limit of connections, the number of silent
/// connections, and how many silent connections must wait in HAProxy's queue at least. The kernel
/// gives half of the silent connections to HAProxy.
const FULL: &str = "100";
const SILENT: usize = 300;
const CROWD: usize = 16;

/// A way to remove HAProxy from the port that it shares with berth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The pod is deleted: HAProxy gets its stop signal when kube-apiserver gets SIGTERM.
    Pod,
    /// HAProxy gets its soft stop first, and the pod is deleted when HAProxy has left the port.
    SoftStop,
    /// As documented: leave-port.sh runs first, and then the pod is deleted.
    LeavePort,
}

pub(crate) fn from_haproxy_to_berth() -> Result<Completion, Failed> {
    if let Some(ignored) = find_obstacle() {
        return Ok(ignored);
    }
    netns::enter_netns(HOST).map_err(|error| error.to_string())?;
    // The figures in the documentation come from more rounds.
    let rounds: u32 = match std::env::var("BERTH_MIGRATIONS") {
        Ok(rounds) => rounds
            .parse()
            .map_err(|_| format!("BERTH_MIGRATIONS={rounds}"))?,
        Err(_) => 0,
    };
    for (way, full) in [Way::Pod, Way::SoftStop, Way::LeavePort]
        .into_iter()
        .flat_map(|way| [(way, false), (way, true)])
    {
        let mut sum = Sum::default();
        (0..rounds).for_each(|_| sum.add(&run_migration(way, full)));
        if rounds > 0 {
            println!("{way:?}, full: {full}, {rounds} times: {sum}");
        }
        if way == Way::LeavePort && sum.lost() > 0 {
            return Err(format!("lost: {sum}").into());
        }
    }
    let control = run_migration(Way::SoftStop, true);
    println!("control, without leave-port.sh: {control}");
    if control.crowd < CROWD {
        return Err(format!(
            "the control lost {} of a crowd, so what follows shows nothing",
            control.crowd
        )
        .into());
    }
    let record = run_migration(Way::LeavePort, true);
    println!("with leave-port.sh: {record}");
    if record.lost() > 0 {
        return Err(format!("lost: {record}").into());
    }
    Ok(Completion::Completed)
}

/// The way back from berth to HAProxy: HAProxy leaves the port and resumes, and berth drains.
pub(crate) fn back_to_haproxy() -> Result<Completion, Failed> {
    if let Some(ignored) = find_obstacle() {
        return Ok(ignored);
    }
    netns::enter_netns(HOST).map_err(|error| error.to_string())?;
    let node = Node::new();
    let old = OldPod::start(&node, &[]);
    let load = node.client.load();
    let new = NewPod::start(&node);
    load.more(100);
    leave_port();
    load.more(100);
    old.haproxy.signal(Signal::SIGTTIN);
    eventually("HAProxy's listener", || {
        (find_listening(BERTH).len() == 2).then_some(())
    });
    load.more(100);
    new.drain(&node);
    assert_eq!(find_listening(BERTH).len(), 1, "HAProxy alone listens");
    load.more(100);
    new.delete();
    load.more(100);
    let record = Sum::of(load.end(), 0);
    println!("back again: {record}");
    if record.lost() > 0 {
        return Err(format!("lost: {record}").into());
    }
    drop(old);
    Ok(Completion::Completed)
}

/// Returns the reason why the test cannot run here, if any.
fn find_obstacle() -> Option<Completion> {
    let missing = ["haproxy", "ss", "bash"]
        .into_iter()
        .find_map(|tool| find_tool(tool).err());
    let old = !Path::new("/proc/sys/net/ipv4/tcp_migrate_req").exists();
    let old =
        old.then(|| Completion::ignored_with("it needs Linux 5.14, for net.ipv4.tcp_migrate_req"));
    missing.or_else(no_namespace).or(old)
}

/// Runs one migration under load, from a fresh old pod.
fn run_migration(way: Way, full: bool) -> Sum {
    let node = Node::new();
    let limit: &[&str] = if full { &["-n", FULL] } else { &[] };
    let old = OldPod::start(&node, limit);
    let mut kept = node
        .runtime
        .block_on(node.client.connect(fresh_ip()))
        .unwrap();
    let load = node.client.load();
    load.more(100);

    let new = NewPod::start(&node);
    assert_eq!(find_listening(BERTH).len(), 2, "HAProxy and berth listen");
    load.more(100);
    let silent = if full { SILENT } else { 0 };
    let crowd: Vec<_> = (0..silent).map(|_| begin_to_connect()).collect();
    if full {
        eventually("a crowd in HAProxy's queue", || {
            (queued_at(old.listener)? >= CROWD as u64).then_some(())
        });
    }
    match way {
        Way::Pod => {}
        Way::SoftStop => old.haproxy.signal(Signal::SIGUSR1),
        Way::LeavePort => leave_port(),
    }
    let mut reset = 0;
    if way != Way::Pod {
        eventually("HAProxy's leave", || {
            queued_at(old.listener).is_none().then_some(())
        });
        reset = crowd.iter().filter(|stream| is_reset(stream)).count();
        load.more(100);
        // Open connections through HAProxy stay.
        node.runtime.block_on(Client::get(&mut kept)).unwrap();
    }
    old.stop();
    eventually("HAProxy's end", || {
        queued_at(old.listener).is_none().then_some(())
    });
    drop((kept, crowd));
    old.ended();
    load.more(200);
    let record = load.end();
    new.delete();
    Sum::of(record, reset)
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs `examples/haproxy-migration/leave-port.sh`, as on a node.
#[track_caller]
fn leave_port() {
    let status = Command::new(migration_path().join("leave-port.sh"))
        .arg(BERTH.to_string())
        .status()
        .unwrap();
    assert!(status.success(), "leave-port.sh: {status}");
}

fn migration_path() -> PathBuf {
    root().join("examples/haproxy-migration")
}

/// Begins to connect without waiting. If a queue overflows, the kernel drops further packets, and
/// clients send them again.
fn begin_to_connect() -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).unwrap();
    socket
        .bind(&SocketAddr::from((fresh_ip(), 0)).into())
        .unwrap();
    let error = socket
        .connect(&BERTH.into())
        .err()
        .and_then(|error| error.raw_os_error());
    assert!(matches!(error, None | Some(libc::EINPROGRESS)), "{error:?}");
    socket.into()
}

fn is_reset(mut stream: &TcpStream) -> bool {
    stream
        .read(&mut [0])
        .is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

/// Common parts of all pods of a node.
struct Node {
    dir: tempfile::TempDir,
    certs: certs::Certs,
    runtime: Runtime,
    client: Client,
}

impl Node {
    fn new() -> Self {
        std::fs::write("/proc/sys/net/ipv4/tcp_migrate_req", "0").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let certs = certs::make_certs(dir.path(), &[HOST.into()]).unwrap();
        let (store, recorder) = (
            Arc::new(Store::with_history(8)),
            Arc::new(Recorder::default()),
        );
        let socket = dir.path().join("store");
        // The simulated apiservers' store. Its thread ends with the process.
        std::thread::spawn(move || {
            runtime().block_on(async {
                store::serve(UnixListener::bind(socket).unwrap(), store, recorder).await;
            });
        });
        eventually("the store", || {
            dir.path().join("store").exists().then_some(())
        });
        let tls = TlsConnector::from(Arc::new(certs.client_config().unwrap()));
        Self {
            dir,
            certs,
            runtime: runtime(),
            client: Client { tls },
        }
    }

    /// Returns the flags of a simulated apiserver.
    fn flags(&self, name: &str) -> Vec<String> {
        self.certs.issue_certificate(name).unwrap();
        vec![
            format!("--stand-in-name={name}"),
            format!(
                "--etcd-servers=unix://{}",
                self.dir.path().join("store").display()
            ),
            format!("--tls-cert-file={}", self.certs.cert_file(name).display()),
            format!(
                "--tls-private-key-file={}",
                self.certs.key_file(name).display()
            ),
        ]
    }
}

/// A pod with HAProxy as a sidecar.
struct OldPod {
    haproxy: Running,
    apiserver: Running,
    /// Inode of HAProxy's listener.
    listener: u64,
}

impl OldPod {
    fn start(node: &Node, limit: &[&str]) -> Self {
        let address = write_configuration(node.dir.path());
        let mut command =
            berth_command(["stand-in", "--bind-address", &address, "--secure-port=6443"]);
        let apiserver = Running::start(command.args(node.flags("old")));
        let own = SocketAddr::new(address.parse().unwrap(), BERTH.port());
        eventually("the old apiserver", || TcpStream::connect(own).ok());
        let mut command = Command::new("haproxy");
        command
            .args(["-db", "-f"])
            .arg(node.dir.path().join("haproxy.cfg"))
            .args(limit);
        let haproxy = Running::start(&mut command);
        let listener = eventually("HAProxy's listener", || {
            find_listening(BERTH).first().copied()
        });
        Self {
            haproxy,
            apiserver,
            listener,
        }
    }

    /// Stops the pod as the kubelet does: all containers at once, HAProxy by its image's stop
    /// signal.
    fn stop(&self) {
        self.haproxy.signal(Signal::SIGUSR1);
        self.apiserver.signal(Signal::SIGTERM);
    }

    fn ended(mut self) {
        self.apiserver.ended();
        self.haproxy.kill();
    }
}

/// Runs the script of the manifest's first container, which chooses the apiserver's address and
/// writes HAProxy's configuration, here into `dir`.
fn write_configuration(dir: &Path) -> String {
    let manifest = std::fs::read_to_string(migration_path().join("1-haproxy.yaml")).unwrap();
    let (_, script) = manifest.split_once("            - |\n").unwrap();
    let script: String = script
        .lines()
        .map_while(|line| line.strip_prefix("              "))
        .flat_map(|line| [line, "\n"])
        .collect();
    let script = script.replace("/run/address", dir.to_str().unwrap());
    let mut shell = Command::new("sh");
    let status = shell
        .args(["-euc", &script])
        .env("HOST_IP", HOST.to_string())
        .status()
        .unwrap();
    assert!(status.success(), "{script}");
    std::fs::read_to_string(dir.join("address"))
        .unwrap()
        .trim()
        .to_owned()
}

/// A pod behind berth.
struct NewPod {
    apiserver: Running,
    shim: Running,
}

impl NewPod {
    /// Starts the pod, and waits until its shim has joined.
    fn start(node: &Node) -> Self {
        let place = |command: &str| {
            let mut command =
                berth_command([command, "--listen", &BERTH.to_string(), "--instance", "new"]);
            command.arg("--run-dir").arg(node.dir.path().join("run"));
            command
        };
        let shim = Running::start(place("serve").arg("--probe-ca").arg(&node.certs.ca_file));
        let simulated = [env!("CARGO_BIN_EXE_berth"), "stand-in"];
        let apiserver = Running::start(
            place("exec")
                .arg("--")
                .args(simulated)
                .args(node.flags("new")),
        );
        shim.logs("joined");
        Self { apiserver, shim }
    }

    /// Drains the shim, and waits until it has left the port.
    fn drain(&self, node: &Node) {
        let mut command = berth_command(["drain", "--wait", "--instance", "new"]);
        expect_status(
            command.arg("--run-dir").arg(node.dir.path().join("run")),
            0,
            &[],
        );
    }

    fn delete(mut self) {
        self.apiserver.signal(Signal::SIGTERM);
        self.shim.signal(Signal::SIGTERM);
        self.apiserver.ended();
        self.shim.ended();
    }
}

/// A maker of TLS connections to the berth.
#[derive(Clone)]
struct Client {
    tls: TlsConnector,
}

type Stream = tokio_rustls::client::TlsStream<tokio::net::TcpStream>;

impl Client {
    async fn connect(&self, source: Ipv4Addr) -> Result<Stream, String> {
        let stream = connect(source, BERTH).await?;
        let name = "kubernetes".try_into().map_err(|_| "no name")?;
        self.tls
            .connect(name, stream)
            .await
            .map_err(describe_failure("handshake"))
    }

    /// Starts clients that connect, send a request and close, again and again.
    fn load(&self) -> Load {
        let client = self.clone();
        Load::start(CLIENTS, None, move |source| {
            let client = client.clone();
            async move { Self::get(&mut client.connect(source).await?).await }
        })
    }

    /// Requests the version, and reads the whole answer.
    async fn get(stream: &mut Stream) -> Result<(), String> {
        stream
            .write_all(b"GET /version HTTP/1.1\r\nHost: kubernetes\r\n\r\n")
            .await
            .map_err(describe_failure("write"))?;
        let mut answer = Vec::new();
        // The version is the end of a JSON object.
        while !answer.ends_with(b"}") {
            match stream
                .read_buf(&mut answer)
                .await
                .map_err(describe_failure("read"))?
            {
                0 => return Err("read: the end".into()),
                _ if answer.starts_with(b"HTTP/1.1 200 ") => {}
                _ => {
                    return Err(String::from_utf8_lossy(&answer)
                        .lines()
                        .next()
                        .unwrap_or_default()
                        .into());
                }
            }
        }
        Ok(())
    }
}

/// Results of the connections of one or more migrations.
#[derive(Debug, Default)]
struct Sum {
    served: u64,
    lost: BTreeMap<String, usize>,
    /// Number of silent connections that were reset when HAProxy left.
    crowd: usize,
    slowest: Duration,
}

impl Sum {
    fn of(record: Record, crowd: usize) -> Self {
        let lost = record
            .lost
            .into_iter()
            .map(|(kind, when)| (kind, when.len()))
            .collect();
        Self {
            served: record.served,
            lost,
            crowd,
            slowest: record.slowest,
        }
    }

    fn lost(&self) -> usize {
        self.crowd + self.lost.values().sum::<usize>()
    }

    fn add(&mut self, other: &Self) {
        self.served += other.served;
        self.crowd += other.crowd;
        self.slowest = self.slowest.max(other.slowest);
        for (kind, number) in &other.lost {
            *self.lost.entry(kind.clone()).or_default() += number;
        }
    }
}

impl std::fmt::Display for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (lost, total) = (self.lost(), self.served + self.lost() as u64);
        let slowest = self.slowest.as_millis();
        write!(
            f,
            "{lost} of {total} lost: {} silent, {:?}; slowest {slowest} ms",
            self.crowd, self.lost
        )
    }
}
