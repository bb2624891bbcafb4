//! `berth bridge` on a node in a network namespace of its own. The node's kube-apiserver is a
//! simulated apiserver without any knowledge of berth.

use crate::support::load::{Load, Record};
use crate::support::process::{Running, berth_command, expect_status, output_of, wait_until_gone};
use crate::support::stopped::Stopped;
use crate::support::{PATIENCE, eventually, print_skipped};
use berth_bridge::cgroup;
use berth_bridge::localhost::{OWN, TEMPORARY};
use berth_os::netdevice::{self, InterfaceSetting};
use berth_os::process::ProcessAttributes;
use berth_rehearse::record::log::Recorder;
use berth_rehearse::testbed::{
    certs,
    store::{self, Store},
};
use berth_steering::{Error, self_test, self_test_of_localhost};
use berth_testing::etcd::{self, Members};
use berth_testing::{create_ca, namespace};
use nix::mount::{MsFlags, mount};
use nix::sched::CloneFlags;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, chroot, geteuid, getsid};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Once};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener};

mod kills;

const NODE: &str = "10.77.0.1:6443";
const NODE_IPV6: &str = "[fd77::1]:6443";
/// Loopback addresses of the secure port. In /etc/hosts of some distributions, 127.0.1.1 is the
/// address of the node's name.
const LOCALHOST: [&str; 3] = ["127.0.0.1:6443", "127.0.1.1:6443", "[::1]:6443"];

/// Number of clients, and the period in which each client begins a connection.
const CLIENTS: u32 = 8;
const PERIOD: Duration = Duration::from_millis(40);

/// Lines of each log that are printed when a test fails.
const SHOWN: usize = 60;

thread_local! {
    /// Directory of the node that the current thread tests.
    static TESTED: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
}

/// Installs a panic hook. If a test of a node fails, the hook prints the state that an operator
/// would look at, before the test's clients and processes end.
fn explain_failures() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            print(panic);
            if let Ok(Some(node)) = TESTED.try_with(RefCell::take) {
                print_state(&node);
            }
        }));
    });
}

/// Prints the state of a node. A panic in this function would end the process.
fn print_state(node: &Path) {
    let bridge = node.join("bridge");
    let mut status = berth_command(["bridge", "status", "--state-dir"]);
    status.arg(&bridge);
    // A child's /proc/net shows the network namespace of the current thread.
    let mut connections = Command::new("sh");
    let listed = "grep -hE ':192B ' /proc/net/tcp /proc/net/tcp6 | grep -v ' 06 '; ls -l /proc/$(cat \"$0\")/fd";
    connections.args(["-c", listed]).arg(node.join("pid"));
    for (what, command) in [("status", &mut status), ("connections", &mut connections)] {
        match command.output() {
            Ok(output) => eprintln!(
                "{what}:\n{}",
                String::from_utf8_lossy(&[output.stdout, output.stderr].concat())
            ),
            Err(error) => eprintln!("{what}: {error}"),
        }
    }
    for log in [
        bridge.join("bridge.log"),
        bridge.join("kube-apiserver.log"),
        node.join("own.log"),
    ] {
        let text = std::fs::read(&log).unwrap_or_else(|error| error.to_string().into());
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(SHOWN)..];
        eprintln!(
            "{}, {} of {} lines:\n{}",
            log.display(),
            last.len(),
            lines.len(),
            last.join("\n")
        );
    }
}

/// A node with a kube-apiserver on all its addresses.
struct Node {
    dir: tempfile::TempDir,
    certs: certs::Certs,
    kind: Kind,
    _hub: Hub,
    /// True if the kernel accepts BPF programs here. If false, `berth bridge` does everything
    /// except steering, and new connections may go to the node's kube-apiserver at any time.
    steers: bool,
}

/// Properties of a node. Every node has an IPv6 address.
#[derive(Clone, Copy)]
struct Kind {
    has_ipv4: bool,
    /// Flags of the node's kube-apiserver about addresses. `DIR` stands for the node's directory.
    flags: &'static str,
    /// Address that clients dial.
    at: &'static str,
    /// Process name of the node's kube-apiserver.
    called: &'static str,
}

/// A node whose kube-apiserver accepts IPv4 clients only.
const IPV4: Kind = Kind {
    has_ipv4: true,
    flags: "--bind-address=0.0.0.0",
    at: NODE,
    called: "berth",
};

/// A node on which the kube-apiserver has one listener for both families. In Go, 0.0.0.0 has the
/// same effect.
const DUAL: Kind = Kind {
    flags: "--bind-address=::",
    ..IPV4
};

/// The etcd of the simulated apiservers: a thread that ends when the value is dropped.
struct Hub(Option<tokio::sync::oneshot::Sender<()>>);

impl Hub {
    fn start(socket: PathBuf) -> Self {
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let (up, is_up) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            block_on(async {
                let listener = UnixListener::bind(socket).unwrap();
                up.send(()).unwrap();
                tokio::select! {
                    () = store::serve(listener, Arc::<Store>::default(), Arc::<Recorder>::default()) => {}
                    _ = ended => {}
                }
            });
        });
        is_up.recv().unwrap();
        Self(Some(end))
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

/// Runs a test on a node. The test is skipped if no node can be made, or if the kernel accepts no
/// BPF programs.
fn on_a_node(test: impl FnOnce(&Node) + Send + 'static) {
    on_a_node_of(IPV4, test);
}

fn on_a_node_of(kind: Kind, test: impl FnOnce(&Node) + Send + 'static) {
    run_on_node(kind, true, test);
}

/// Runs a test that does not depend on steering. Unlike [`on_a_node`], the test also runs without
/// BPF.
fn on_any_node(test: impl FnOnce(&Node) + Send + 'static) {
    on_any_node_of(IPV4, test);
}

fn on_any_node_of(kind: Kind, test: impl FnOnce(&Node) + Send + 'static) {
    // Only a debug build of berth runs without steering.
    run_on_node(kind, !cfg!(debug_assertions), test);
}

fn run_on_node(kind: Kind, must_steer: bool, test: impl FnOnce(&Node) + Send + 'static) {
    let kinds = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS;
    namespace::run_in(&namespace::AS_ONESELF, kinds, move || {
        let dir = if geteuid().is_root() {
            tempfile::tempdir().unwrap()
        } else {
            own_root()?;
            tempfile::tempdir_in("/").unwrap()
        };
        netdevice::set_interface("lo", InterfaceSetting::Up).unwrap();
        netdevice::add_ipv6("lo", "fd77::1".parse().unwrap())
            .map_err(|error| format!("no IPv6: {error}"))?;
        if kind.has_ipv4 {
            netdevice::set_interface("lo:1", InterfaceSetting::Address([10, 77, 0, 1].into()))
                .unwrap();
            netdevice::set_interface("lo:1", InterfaceSetting::Netmask([255; 4].into())).unwrap();
        }
        // The kernel uses a new IPv6 address only a moment after it was added.
        let listener = std::net::TcpListener::bind("[::]:0").unwrap();
        let ip = NODE_IPV6.parse::<SocketAddr>().unwrap().ip();
        let to = SocketAddr::new(ip, listener.local_addr().unwrap().port());
        eventually("fd77::1", || {
            let source = std::net::TcpStream::connect(to).and_then(|stream| stream.local_addr());
            source.is_ok_and(|source| source.ip() == ip).then_some(())
        });
        drop(listener);
        explain_failures();
        TESTED.set(Some(dir.path().to_owned()));
        let steers = match block_on(self_test()) {
            Err(
                missing @ (Error::Kernel { .. } | Error::Capabilities { .. } | Error::Forbidden(_)),
            ) => {
                if must_steer {
                    return Err(missing.to_string());
                }
                false
            }
            tested => tested.map(|_| true).unwrap(),
        };
        let certs = certs::make_certs(dir.path(), &["10.77.0.1".parse().unwrap()]).unwrap();
        certs.issue("own").unwrap();
        let hub = Hub::start(dir.path().join("store"));
        let node = Node {
            dir,
            certs,
            kind,
            _hub: hub,
            steers,
        };
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_berth"), node.path(kind.called)).unwrap();
        // The part of COMMAND: end the kube-apiserver and start its successor.
        std::fs::write(
            node.path("stop"),
            format!("{}\n{}\n", node.quiet(), node.stop()),
        )
        .unwrap();
        std::fs::write(
            node.path("restart"),
            format!(". {}\n{}\n", node.path("stop").display(), node.start()),
        )
        .unwrap();
        node.start_own();
        node.answers();
        test(&node);
        Ok(())
    });
}

/// Gives the thread and its children a root directory that the test's user owns, with the real
/// root's directories mounted in it. In a user namespace, the real root belongs to nobody, and a
/// bridge keeps its files only in a directory that no user but root and its own may write.
fn own_root() -> Result<(), String> {
    let failed = |error: nix::errno::Errno| format!("no root directory of its own: {error}");
    let is_empty = |at: &Path| std::fs::read_dir(at).is_ok_and(|mut files| files.next().is_none());
    let at = ["/mnt", "/media", "/srv", "/opt"]
        .map(Path::new)
        .into_iter()
        .find(|at| is_empty(at));
    let at = at.ok_or("no directory that is empty, for a root directory of its own")?;
    let (none, here) = (None::<&str>, std::env::current_dir().unwrap());
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).map_err(failed)?;
    let all: Vec<_> = std::fs::read_dir("/")
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    mount(
        Some("tmpfs"),
        at,
        Some("tmpfs"),
        MsFlags::empty(),
        Some("mode=0755"),
    )
    .map_err(failed)?;
    for from in all.iter().filter(|from| *from != at) {
        let to = at.join(from.file_name().unwrap());
        if let Ok(link) = std::fs::read_link(from) {
            std::os::unix::fs::symlink(link, &to).unwrap();
        } else if from.is_dir() {
            std::fs::create_dir(&to).unwrap();
            mount(
                Some(from),
                &to,
                none,
                MsFlags::MS_BIND | MsFlags::MS_REC,
                none,
            )
            .map_err(failed)?;
        }
    }
    chroot(at).map_err(failed)?;
    std::env::set_current_dir(here).unwrap();
    Ok(())
}

/// Returns shell code that starts a program, with a log and a pid file. The shell, or a process that
/// the shell starts, may be killed at any time, and the pid file always has a whole number.
fn start_in_background(command: &str, log: &Path, pid: &Path) -> String {
    let (log, pid) = (log.display(), pid.display());
    format!(
        "{command} >> {log} 2>&1 < /dev/null & echo $! > {pid}.new && \
         {{ mv {pid}.new {pid} || mv {pid}.new {pid}; }}"
    )
}

impl Node {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns shell code that waits until [`go`](Self::go). A reader may read the previous line
    /// again if its writer has not closed the FIFO yet; then the code waits again.
    fn wait(&self) -> String {
        let go = self.path("go");
        nix::unistd::mkfifo(&go, nix::sys::stat::Mode::S_IRWXU).unwrap();
        format!("until read -r line < {}; do :; done", go.display())
    }

    fn go(&self) {
        std::fs::write(self.path("go"), "\n").unwrap();
    }

    /// Returns the command line of the node's kube-apiserver.
    fn own(&self) -> String {
        let has_etcd = self.kind.flags.contains("--etcd-servers=");
        let store = if has_etcd {
            String::new()
        } else {
            format!(" --etcd-servers=unix://{}", self.path("store").display())
        };
        format!(
            "{} stand-in {} --secure-port=6443 --stand-in-name=own{} --tls-cert-file={} --tls-private-key-file={} --client-ca-file={} \
             --audit-log-path={}",
            self.path(self.kind.called).display(),
            self.kind
                .flags
                .replace("DIR", &self.dir.path().display().to_string()),
            store,
            self.certs.cert_file("own").display(),
            self.certs.key_file("own").display(),
            self.certs.ca_file.display(),
            self.path("audit.log").display(),
        )
    }

    /// Returns shell code that starts the node's kube-apiserver.
    fn start(&self) -> String {
        start_in_background(&self.own(), &self.path("own.log"), &self.path("pid"))
    }

    /// Returns shell code that waits until the node's kube-apiserver has no client, accepted or
    /// not. By then, new clients go to the bridge.
    ///
    /// The code waits for handshakes that began before steering. They take milliseconds, but on a
    /// machine that stalls they may take longer than a sped-up bridge waits. A shell reads byte by
    /// byte, so the code leaves out the thousands of lines of closed connections. The bridge's
    /// probes, from 127.0.0.1 or ::1, are no clients: on a busy machine there is always a probe.
    /// Connections that the bridge has not accepted are no clients of the node's kube-apiserver
    /// either. So the code reads its unaccepted connections from the receive queue of its listener,
    /// the only listener that is bound to the port.
    fn quiet(&self) -> String {
        let pid = self.path("pid").display().to_string();
        // List the sockets before the files: a connection that is accepted meanwhile is among the
        // files.
        format!(
            r#"pid=$(cat {pid})
until
    sockets=$(grep -hE '^ *[0-9]+: [0-9A-F]+:192B [0-9A-F]+:[0-9A-F]+ 0[1-5789AB] ' /proc/net/tcp /proc/net/tcp6 |
        grep -vE ':192B (0100007F|0{{24}}01000000):')
    files=$(ls -l /proc/$pid/fd)
    echo "$sockets" | {{
        while read -r number at from state queues timer resent uid timeout inode rest; do
            case "$state $queues" in
                '0A '*:00000000) continue ;;
                '0A '*|'03 '*) exit 1 ;;
            esac
            case "$files" in *"socket:[$inode]"*) exit 1 ;; esac
        done
    }}
do sleep 0.01; done"#
        )
    }

    /// Returns shell code that ends the node's kube-apiserver. The parent may notice the end late.
    fn stop(&self) -> String {
        let pid = self.path("pid").display().to_string();
        format!(
            r#"pid=$(cat {pid})
kill $pid
while read -r stat 2>/dev/null < /proc/$pid/stat; do
    case "$stat" in *") Z "*|*") X "*) break ;; esac
    sleep 0.01
done"#
        )
    }

    /// Ends the node's kube-apiserver even if it has clients.
    fn stop_own(&self) {
        assert!(
            Command::new("sh")
                .args(["-c", &self.stop()])
                .status()
                .unwrap()
                .success()
        );
    }

    fn start_own(&self) {
        assert!(
            Command::new("sh")
                .args(["-c", &self.start()])
                .status()
                .unwrap()
                .success()
        );
    }

    fn own_pid(&self) -> i32 {
        std::fs::read_to_string(self.path("pid"))
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }

    /// Returns a `berth bridge` command that steers if the kernel can.
    fn berth_bridge<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = berth_command(["bridge"].iter().chain(&args));
        if !self.steers {
            command.env("BERTH_TEST_UNSTEERED", "1");
        }
        command
    }

    /// Returns `berth bridge` with options, for a test in which no client may be lost. Handshakes
    /// have 0.8 s.
    fn bridge(&self, options: &str, run: &[&str]) -> Command {
        self.bridge_at(6, "100ms", options, run)
    }

    /// Returns `berth bridge` with options, for a test without clients.
    fn fast_bridge(&self, options: &str, run: &[&str]) -> Command {
        self.bridge_at(20, "50ms", options, run)
    }

    fn bridge_at(&self, speedup: u32, settle: &str, options: &str, run: &[&str]) -> Command {
        let [speedup, settle] = [format!("--speedup={speedup}"), format!("--settle={settle}")];
        // Where many tests share a processor, 2 s are too short.
        let mut command =
            self.berth_bridge([&settle, &speedup, "--probe-timeout=10s", "--state-dir"]);
        command
            .arg(self.path("bridge"))
            .args(["--command", &self.own(), "--probe-ca"])
            .arg(&self.certs.ca_file);
        command.args(options.split_whitespace()).arg("--").args(run);
        command
    }

    /// Returns `berth bridge start`, for a test in which clients may be lost.
    fn start_bridge(&self) -> Command {
        let mut start = self.berth_bridge([
            "start",
            "--settle=100ms",
            "--speedup=20",
            "--probe-timeout=10s",
            "--state-dir",
        ]);
        start
            .arg(self.path("bridge"))
            .args(["--command", &self.own(), "--probe-ca"])
            .arg(&self.certs.ca_file);
        start
    }

    fn restart(&self) -> [String; 2] {
        ["sh".into(), self.path("restart").display().to_string()]
    }

    fn part(&self, part: &str) -> Command {
        let mut command = berth_command(["bridge", part, "--state-dir"]);
        command.arg(self.path("bridge"));
        command
    }

    fn status(&self) -> Value {
        let (status, out, err) = output_of(self.part("status").arg("--json"));
        assert_eq!(status, Some(0), "{err}");
        serde_json::from_str(&out).unwrap()
    }

    /// Waits for the daemon, and returns its pid.
    fn daemon(&self) -> u32 {
        eventually("a bridge", || self.find_daemon())
    }

    fn find_daemon(&self) -> Option<u32> {
        let (_, out, _) = output_of(self.part("status").arg("--json"));
        serde_json::from_str::<Value>(&out).ok()?["pid"]
            .as_u64()?
            .try_into()
            .ok()
    }

    /// Waits until no process runs with files of the bridge.
    fn nothing_runs(&self) {
        let files = self.path("bridge/bridge-files").display().to_string();
        let runs = |process: std::fs::DirEntry| {
            std::fs::read(process.path().join("cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&files))
        };
        eventually("the end of the temporary kube-apiserver", || {
            (!std::fs::read_dir("/proc").unwrap().flatten().any(runs)).then_some(())
        });
    }

    /// Returns a function that makes one client's connection.
    fn attempt(&self) -> impl Fn(std::net::Ipv4Addr) -> Attempt + Clone + Send + 'static {
        self.attempt_at(self.kind.at)
    }

    fn attempt_at(
        &self,
        to: &'static str,
    ) -> impl Fn(std::net::Ipv4Addr) -> Attempt + Clone + Send + 'static {
        let get = self.get(to);
        move |_| {
            let answer = get();
            Box::pin(async move { answer.await.map(drop) })
        }
    }

    /// Returns a function that makes one client's connection and returns the answer.
    fn get(&self, to: &'static str) -> impl Fn() -> Answer + Clone + Send + 'static {
        let tls = tokio_rustls::TlsConnector::from(self.tls());
        move || {
            let tls = tls.clone();
            Box::pin(async move {
                let failed = |what| crate::support::load::describe_failure(what);
                let to: SocketAddr = to.parse().unwrap();
                let tcp = TcpStream::connect(to).await.map_err(failed("connect"))?;
                let mut stream = tls
                    .connect("kubernetes".try_into().unwrap(), tcp)
                    .await
                    .map_err(failed("handshake"))?;
                let asked = stream
                    .write_all(
                        b"GET /version HTTP/1.1\r\nHost: kubernetes\r\nConnection: close\r\n\r\n",
                    )
                    .await;
                asked.map_err(failed("write"))?;
                let mut answer = Vec::new();
                let read = stream.read_to_end(&mut answer).await;
                match String::from_utf8_lossy(&answer).lines().next() {
                    Some(line) if line.contains(" 200") => {
                        Ok(String::from_utf8_lossy(&answer).into_owned())
                    }
                    Some(line) => Err(line.to_owned()),
                    None => Err(format!("no answer: {read:?}")),
                }
            })
        }
    }

    fn tls(&self) -> Arc<rustls::ClientConfig> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.certs.ca.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        Arc::new(config.with_root_certificates(roots).with_no_client_auth())
    }

    /// Returns a client that sends requests on one kept connection.
    fn stays(&self) -> impl FnMut() -> io::Result<String> {
        let tls =
            rustls::ClientConnection::new(self.tls(), "kubernetes".try_into().unwrap()).unwrap();
        let tcp = std::net::TcpStream::connect(self.kind.at).unwrap();
        tcp.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut stream = rustls::StreamOwned::new(tls, tcp);
        move || {
            stream.write_all(b"GET /version HTTP/1.1\r\nHost: kubernetes\r\n\r\n")?;
            let (mut answer, mut part) = (String::new(), [0; 4096]);
            while !answer.ends_with('}') {
                match stream.read(&mut part)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    length => answer.push_str(&String::from_utf8_lossy(&part[..length])),
                }
            }
            Ok(answer)
        }
    }

    fn load(&self) -> Load {
        Load::start(CLIENTS, Some(PERIOD), self.attempt())
    }

    /// Starts clients that also connect while the node's kube-apiserver is away. `None` if nothing
    /// is steered, since these clients would lose connections.
    fn load_throughout(&self) -> Option<Load> {
        self.steers.then(|| self.load())
    }

    /// Waits until a client gets an answer.
    fn answers(&self) {
        let attempt = self.attempt();
        eventually("an answer", || {
            block_on(attempt([127, 0, 0, 1].into())).ok()
        });
    }
}

type Answer = std::pin::Pin<Box<dyn Future<Output = Result<String, String>> + Send>>;
type Attempt = std::pin::Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

impl Drop for Node {
    fn drop(&mut self) {
        self.kill_bridge();
        let _ = kill(Pid::from_raw(self.own_pid()), Signal::SIGKILL);
    }
}

impl Node {
    fn kill_bridge(&self) {
        if let Some(pid) = self.find_daemon() {
            let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL);
            wait_until_gone(pid);
        }
    }

    fn is_on(&self) -> bool {
        output_of(&mut self.part("status")).0 == Some(0)
    }
}

/// Waits until the given number of further clients was served.
#[track_caller]
fn wait_for_more(load: Option<&Load>, clients: usize) {
    if let Some(load) = load {
        load.more(clients);
    }
}

/// Stops the clients, and fails if a connection was lost.
#[track_caller]
fn expect_no_loss(load: Load) -> Record {
    let record = load.end();
    // If the machine was too busy to know, the test continues: its other assertions hold.
    record.expect_no_loss("");
    record
}

fn to_args(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

#[test]
fn clients_lose_nothing_while_the_apiserver_is_replaced() {
    on_a_node(|node| {
        // The control, without a bridge.
        let load = node.load();
        load.more(50);
        node.stop_own();
        eventually("a loss, which this load would see", || {
            (load.so_far().lost() > 0).then_some(())
        });
        node.start_own();
        node.answers();
        let lost = load.end();

        let before = node.own_pid();
        let load = node.load();
        load.more(50);
        let run = format!(
            "echo runs; {}; sh {}",
            node.wait(),
            node.path("restart").display()
        );
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
        bridge.logs("may be replaced now");
        bridge.prints("runs");
        load.more(150);
        let steered = node.status();
        assert_eq!(steered["steering"], true);
        node.go();
        bridge.logs("COMMAND is done");
        bridge.logs("waiting until");
        bridge.ends(0);
        load.more(50);
        let record = expect_no_loss(load);
        assert_ne!(node.own_pid(), before);
        assert!(
            steered["connections_steered"].as_u64().unwrap() > 100,
            "{steered}"
        );
        eprintln!(
            "lost: {} of {} without, 0 of {} with, slowest {:?}",
            lost.lost(),
            lost.begun.len(),
            record.served,
            record.slowest
        );

        // The bridge leaves only its logs and its lock. If `berth bridge` ended before the daemon's
        // last connection had ended, wait for the daemon.
        eventually("only what stays", || {
            let left = std::fs::read_dir(node.path("bridge"))
                .unwrap()
                .map(|entry| entry.unwrap().file_name());
            let mut left: Vec<_> = left.collect();
            left.sort();
            (left == ["bridge.lock", "bridge.log", "kube-apiserver.log"].map(OsString::from))
                .then_some(())
        });
        assert!(
            node.path("audit-bridge.log").exists(),
            "its audit log stays in the directory of the other"
        );
        assert!(!node.is_on());
    });
}

/// The old version must not answer requests of the new version's controllers while COMMAND still
/// runs.
#[test]
fn a_restarted_apiserver_serves_while_command_runs_and_can_be_replaced_again() {
    on_a_node(|node| {
        let versions = ["v1.34.0", "v1.35.0", "v1.36.0"];
        let wait = node.wait();
        let start = |version: &&str| {
            let options = format!(" --stand-in-version={version} --shutdown-delay-duration=1h >> ");
            format!("{}\n{wait}", node.start().replacen(" >> ", &options, 1))
        };
        // After SIGTERM, the kube-apiserver's /readyz fails, but the kube-apiserver serves for as
        // long as the delay of the shutdown lasts.
        let pid = node.path("pid").display().to_string();
        // A killed process listens until its last thread has ended, and meanwhile its successor
        // cannot listen.
        let free = "while grep -q ':192B [0-9A-F:]* 0A ' /proc/net/tcp /proc/net/tcp6; do sleep 0.01; done";
        let stop = format!(
            "\nkill $(cat {pid})\n{wait}\n{}\nkill -9 $pid\n{free}\n",
            node.quiet()
        );
        let starts: Vec<_> = versions.iter().map(start).collect();
        let again = format!(". {}\n{}", node.path("stop").display(), starts.join(&stop));
        std::fs::write(node.path("again"), again).unwrap();
        let load = node.load();
        load.more(50);
        let get = node.get(NODE);
        let answers = |version: &'static str| {
            eventually(version, || {
                block_on(get())
                    .ok()
                    .filter(|answer| answer.contains(version))
            });
            load.more(50);
        };
        let mut bridge = Running::start(
            &mut node.bridge("", &["sh", &node.path("again").display().to_string()]),
        );
        for version in versions {
            answers(version);
            let status = eventually("it says so", || {
                Some(node.status()).filter(|status| status["own"]["preferred"] == true)
            });
            assert_eq!(
                (&status["command"], &status["steering"]),
                (&true.into(), &true.into()),
                "{status}"
            );
            if version != versions[2] {
                node.go();
                // The temporary instance answers.
                answers("v1.33.0");
                node.go();
            }
        }
        let daemon = node.daemon();
        // The kept connection outlives the bridge. Its first request is sent at once: a silent
        // client would go to an instance after 0.8 s, and the instance would close the connection
        // only after 32 s. Until then, the script that replaces the instance would wait for this
        // client.
        let mut stays = node.stays();
        assert!(stays().unwrap().contains(versions[2]));
        node.go();
        bridge.ends(0);
        load.more(50);
        expect_no_loss(load);
        bridge.logs("the bridge has ended, and relays");
        assert!(stays().unwrap().contains(versions[2]) && !node.is_on());
        expect_status(node.part("end").arg("--now"), 0, &[]);
        wait_until_gone(daemon);
        assert!(stays().is_err());
    });
}

/// The main thread, which makes the bridge's decisions, hangs. The relaying threads still run.
#[test]
fn a_bridge_whose_main_thread_hangs_stops_steering() {
    on_a_node(|node| {
        let mut bridge = Running::start(
            node.fast_bridge("", &["sh", "-c", "read -r line"])
                .stdin(Stdio::piped()),
        );
        bridge.logs("may be replaced now");
        let daemon = Pid::from_raw(node.daemon().try_into().unwrap());
        node.stop_own();
        node.answers();
        let hangs = Stopped::new(daemon);
        eventually("no connection is steered to it", || {
            let connected = std::net::TcpStream::connect(NODE);
            connected
                .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
                .then_some(())
        });
        drop(hangs);
        node.answers();
        node.start_own();
        drop(bridge.child.stdin.take());
        let code = bridge.ended().code();
        assert_eq!(code, Some(1), "{}", bridge.log());
    });
}

#[test]
fn the_temporary_instance_has_the_running_ones_attributes() {
    on_any_node(|node| {
        expect_status(&mut node.start_bridge(), 0, &[]);
        let status = node.status();
        let pid = i32::try_from(status["temporary"]["pid"].as_u64().unwrap()).unwrap();
        let (own, temporary) = (
            ProcessAttributes::of(node.own_pid()).unwrap(),
            ProcessAttributes::of(pid).unwrap(),
        );
        assert_eq!(
            (own.uid, own.gid, &own.groups, own.oom_score_adj),
            (
                temporary.uid,
                temporary.gid,
                &temporary.groups,
                temporary.oom_score_adj
            )
        );
        let environment =
            |like: &ProcessAttributes| like.environment.iter().cloned().collect::<BTreeMap<_, _>>();
        assert!(
            environment(&own) == environment(&temporary),
            "another environment"
        );
        assert_eq!(
            (&own.directory, &own.limits),
            (&temporary.directory, &temporary.limits)
        );
        let cmdline = std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .unwrap()
            .replace('\0', " ");
        let address = status["temporary"]["address"].as_str().unwrap();
        let (ip, port) = address.split_once(':').unwrap();
        let keys = node.path("bridge/bridge-files");
        for part in [
            format!("--bind-address={ip} "),
            format!("--secure-port={port} "),
            "--endpoint-reconciler-type=none ".into(),
        ] {
            assert!(cmdline.contains(&part), "{part} is not in {cmdline}");
        }
        // Files of another user are read with the other user's rights.
        let copied = format!("--tls-private-key-file={}/", keys.display());
        assert_eq!(
            cmdline.contains(&copied),
            own.uid == 0,
            "{copied} {cmdline}"
        );

        // Only one bridge may run. COMMAND runs under the first one, too.
        expect_status(&mut node.fast_bridge("", &["true"]), 69, &[]);
        let (code, _, err) = output_of(node.part("end").arg("--json"));
        let told: Vec<Value> = err
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert!(
            code == Some(0) && told.last().unwrap()["outcome"] == "done",
            "{err}"
        );
        wait_until_gone(pid.try_into().unwrap());
        expect_status(&mut node.part("end"), 69, &[]);
    });
}

/// All clients wait for the bridge's processes. Meanwhile the node has two kube-apiservers.
#[test]
fn the_kernel_ends_pods_before_the_bridge_where_memory_is_missing() {
    on_any_node(|node| {
        let (status, _, err) = output_of(&mut node.start_bridge());
        assert_eq!(status, Some(0), "{err}");
        let temporary = node.status()["temporary"]["pid"].as_i64().unwrap();
        let score = |pid: i64| {
            ProcessAttributes::of(pid.try_into().unwrap())
                .unwrap()
                .oom_score_adj
        };
        assert_eq!(score(temporary), score(node.own_pid().into()));
        let may = Command::new("sh")
            .args(["-c", "echo -998 > /proc/self/oom_score_adj"])
            .output()
            .unwrap();
        if may.status.success() {
            assert_eq!(score(node.daemon().into()), -998);
        } else {
            let log = std::fs::read_to_string(node.path("bridge/bridge.log")).unwrap();
            assert!(log.contains("keeps its OOM score"), "{log}");
        }
    });
}

#[test]
fn logs_are_bounded_and_kept_for_the_last_failed_bridge() {
    on_any_node(|node| {
        let read = |name: &str| {
            std::fs::read_to_string(node.path("bridge").join(name)).unwrap_or_default()
        };
        let names = ["bridge.log", "kube-apiserver.log"];
        let failed = names.map(|name| format!("{name}.failed"));
        expect_status(&mut node.start_bridge(), 0, &[]);
        let last = "the last line\n";
        for name in names {
            let mut log = std::fs::OpenOptions::new()
                .append(true)
                .open(node.path("bridge").join(name))
                .unwrap();
            log.write_all(&vec![b'\n'; 17 << 20]).unwrap();
            eventually("the log is short again", || {
                (log.metadata().unwrap().len() < 16 << 20).then_some(())
            });
            log.write_all(last.as_bytes()).unwrap();
            assert!(read(name).contains(last), "it cannot be added to");
        }
        let daemon = node.daemon();
        kill(Pid::from_raw(daemon.try_into().unwrap()), Signal::SIGKILL).unwrap();
        wait_until_gone(daemon);
        // Two successful bridges after the failed one.
        for _ in 0..2 {
            let mut bridge = Running::start(&mut node.fast_bridge("", &to_args(&node.restart())));
            bridge.ends(0);
            assert!(
                failed.iter().all(|name| read(name).contains(last)),
                "the failed one's logs are lost"
            );
            assert!(
                names.iter().all(|name| !read(name).contains(last)),
                "they are added to"
            );
        }
    });
}

/// The new version may, for example, not know one of the flags. While it is not ready, the
/// temporary instance answers probes of kubeadm and the kubelet.
#[test]
fn an_apiserver_that_does_not_get_ready_is_reported_while_command_runs() {
    on_any_node(|node| {
        let bad = node
            .start()
            .replacen(" stand-in ", " stand-in --no-such-flag ", 1);
        let wait = node.wait();
        let run = format!(
            ". {}\n{bad}\n{wait}\n{}\n",
            node.path("stop").display(),
            node.start()
        );
        let mut bridge = Running::start(&mut node.fast_bridge("", &["sh", "-c", &run]));
        bridge.logs("the node's own kube-apiserver has not been ready for 1m");
        let status = node.status();
        assert_eq!(
            (&status["command"], &status["own"]["late"]),
            (&true.into(), &true.into()),
            "{status}"
        );
        node.go();
        bridge.ends(0);
    });
}

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

#[test]
fn a_command_that_fails_leaves_clients_on_the_bridge() {
    on_any_node(|node| {
        let load = node.load_throughout();
        let run = format!("sh {}; exit 7", node.path("restart").display());
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
        let status = bridge.ended();
        assert_eq!(status.code(), Some(7), "{}", bridge.log());
        bridge.logs("clients stay on the bridge");
        let status = node.status();
        assert_eq!(
            (&status["steering"], &status["step"]),
            (&true.into(), &"hold".into())
        );
        let trouble = status["trouble"].as_str().unwrap();
        assert!(trouble.contains("exit status: 7"), "{status}");
        wait_for_more(load.as_ref(), 50);
        expect_status(&mut node.part("end"), 0, &[]);
        wait_for_more(load.as_ref(), 50);
        load.map(expect_no_loss);
    });
}

#[test]
fn the_log_of_a_temporary_instance_that_does_not_start_is_shown() {
    on_any_node(|node| {
        // The path of the temporary instance's audit log is a directory.
        std::fs::create_dir(node.path("audit-bridge.log")).unwrap();
        expect_status(
            &mut node.fast_bridge("", &["true"]),
            69,
            &[
                "ended 3 times before it was ready",
                "last lines of the temporary",
            ],
        );
        assert!(!node.is_on());
    });
}

#[test]
fn a_command_that_fails_can_end_the_bridge() {
    on_any_node(|node| {
        let load = node.load();
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", "exit 7"]));
        bridge.ends(7);
        let daemon = node.daemon();
        expect_status(node.part("end").arg("--now"), 0, &[]);
        wait_until_gone(daemon);
        let mut bridge =
            Running::start(&mut node.bridge("--on-failure=end", &["sh", "-c", "exit 7"]));
        bridge.logs("done: ");
        bridge.ends(7);
        assert!(!node.is_on());
        load.more(50);
        expect_no_loss(load);
    });
}

#[test]
fn an_apiserver_that_does_not_come_back_is_reported() {
    on_any_node(|node| {
        let load = node.load_throughout();
        let stop = node.path("stop").display().to_string();
        // The option also limits the time for the temporary instance to get ready, and on a machine
        // that stalls this time may be too short. So the test repeats the bridge with longer times.
        let bridge = [1, 2, 4, 8, 16].into_iter().find_map(|seconds| {
            let options = format!("--ready-timeout={seconds}s");
            let mut bridge = Running::start(&mut node.bridge(&options, &["sh", &stop]));
            let code = bridge.ended().code();
            let is_late = "the temporary kube-apiserver is not ready after";
            if code == Some(69) && bridge.log().contains(is_late) {
                return None;
            }
            assert_eq!(code, Some(75), "{}", bridge.log());
            Some(bridge)
        });
        let bridge = bridge.expect("a temporary instance that gets ready in 16 s");
        bridge.logs("nothing listens on its port");
        // The bridge says that the kube-apiserver may be replaced only once, before COMMAND. It
        // must not say so again while the kube-apiserver has not come back.
        assert_eq!(
            bridge.log().matches("may be replaced now").count(),
            1,
            "{}",
            bridge.log()
        );
        expect_status(&mut node.part("end"), 75, &[]);
        // The operator has repaired the kube-apiserver.
        node.start_own();
        eventually("it is ready", || {
            (node.status()["own"]["ready"] == true).then_some(())
        });
        eventually(
            "it stays so for as long as it must, within its time",
            || {
                let (code, _, err) = output_of(&mut node.part("end"));
                assert!(matches!(code, Some(0 | 75)), "{err}");
                (code == Some(0)).then_some(())
            },
        );
        wait_for_more(load.as_ref(), 50);
        load.map(expect_no_loss);
    });
}

#[test]
fn the_end_of_the_callers_session_does_not_end_the_bridge() {
    on_any_node(|node| {
        let load = node.load();
        // COMMAND runs until it is killed.
        let mut command = node.bridge(
            "",
            &[
                "sh",
                "-c",
                "echo runs; while :; do read -r line || sleep 1000; done",
            ],
        );
        let mut bridge = Running::start(command.process_group(0).stdin(Stdio::null()));
        bridge.prints("runs");
        let daemon = Pid::from_raw(node.daemon().try_into().unwrap());
        assert_eq!(
            getsid(Some(daemon)).unwrap(),
            daemon,
            "it has a session of its own"
        );
        killpg(bridge.pid(), Signal::SIGKILL).unwrap();
        bridge.ended();
        let status = eventually("the end of COMMAND is seen", || {
            Some(node.status()).filter(|status| status["command"] == false)
        });
        // scripts/cluster/killed.sh waits for these words, too.
        let trouble = status["trouble"].as_str().unwrap();
        assert!(trouble.contains("went away"), "{status}");
        assert_eq!(status["steering"], true);
        load.more(50);
        expect_status(&mut node.part("end"), 0, &[]);
        expect_no_loss(load);
    });
}

#[test]
fn a_caller_that_ends_before_command_leaves_no_bridge() {
    on_any_node(|node| {
        let load = node.load();
        for _ in 0..10 {
            let mut bridge = Running::start(&mut node.bridge("", &["true"]));
            let daemon = node.daemon();
            bridge.logs("new connections go to the temporary kube-apiserver");
            let _ = kill(bridge.pid(), Signal::SIGKILL);
            bridge.ended();
            // If the machine stalled, COMMAND may have begun before the kill. The test is not about
            // this case, so the loop tries again.
            if bridge.log().contains("may be replaced now") {
                output_of(node.part("end").arg("--now"));
                wait_until_gone(daemon);
                continue;
            }
            wait_until_gone(daemon);
            expect_no_loss(load);
            return;
        }
        panic!("COMMAND begins before the command that began the bridge can end");
    });
}

#[test]
fn a_temporary_instance_that_is_killed_is_replaced() {
    on_any_node(|node| {
        let run = format!("echo runs; {}", node.wait());
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
        bridge.prints("runs");
        let load = node.load();
        load.more(50);
        let temporary = |node: &Node| node.status()["temporary"].clone();
        let first = temporary(node)["pid"].as_i64().unwrap();
        kill(Pid::from_raw(first.try_into().unwrap()), Signal::SIGKILL).unwrap();
        eventually("another one that is ready", || {
            let now = temporary(node);
            (now["ready"] == true
                && now["pid"].as_i64() != Some(first)
                && node.status()["steering"] == true)
                .then_some(())
        });
        load.more(50);
        let record = load.end();
        // Only requests in flight are lost.
        assert!(record.lost() <= 2 * CLIENTS as usize, "{}", record.kinds());
        record.is_conclusive();
        kill(Pid::from_raw(node.own_pid()), Signal::SIGKILL).unwrap();
        wait_until_gone(node.own_pid().try_into().unwrap());
        node.start_own();
        node.answers();
        node.go();
        bridge.ends(0);
    });
}

#[test]
fn leftovers_of_a_killed_daemon_are_removed_by_bridge_end() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let root = mounts
        .lines()
        .find(|line| line.contains(" cgroup2 "))
        .and_then(|line| line.split(' ').nth(1));
    let Some(root) = root.map(Path::new) else {
        return print_skipped("no cgroups are mounted");
    };
    // The file of a temporary instance after its runner was killed, like that of a container. Files
    // with other names belong to other tests.
    let left = root.join(format!(
        "berth-bridge-kube-apiserver-{}",
        std::process::id()
    ));
    if let Err(error) = std::fs::create_dir(&left) {
        return print_skipped(&format!("no cgroup can be made: {error}"));
    }
    let temp = tempfile::tempdir().unwrap();
    expect_status(
        berth_command(["bridge", "end", "--state-dir"]).arg(temp.path()),
        69,
        &["no bridge is on in"],
    );
    assert!(!left.exists());
}

#[test]
fn a_daemon_that_is_killed_before_command_leaves_the_port_as_it_was() {
    killed_at(&[
        "a temporary kube-apiserver starts",
        "is watched",
        "new connections go to the temporary kube-apiserver",
    ]);
}

#[test]
fn a_daemon_that_is_killed_after_command_began_leaves_the_port_as_it_was() {
    killed_at(&[
        "may be replaced now",
        "waiting until",
        "new connections go to the node's own",
        "the temporary kube-apiserver ends after its connections",
    ]);
}

/// Kills the bridge at each step, given by the line that is logged at the step's begin. Then the
/// port's own listener gets new connections at once, no process is left, and the next bridge
/// starts.
fn killed_at(steps: &'static [&'static str]) {
    on_any_node(move |node| {
        for said_at in steps {
            // Repeat the kill if the bridge had ended before it, because then the run shows
            // nothing.
            while !is_killed_at(node, said_at) {}
        }
        let mut bridge = Running::start(&mut node.fast_bridge("", &to_args(&node.restart())));
        bridge.ends(0);
    });
}

/// Returns false if the bridge had ended before the kill.
fn is_killed_at(node: &Node, said_at: &str) -> bool {
    let (ran, restart) = (node.path("ran"), node.path("restart"));
    let _ = std::fs::remove_file(&ran);
    let run = format!(
        "touch {}; echo runs; sh {}",
        ran.display(),
        restart.display()
    );
    let mut bridge = Running::start(&mut node.fast_bridge("", &["sh", "-c", &run]));
    let daemon = eventually("a bridge, or its end", || {
        let ended = !bridge.is_running();
        node.find_daemon().map(Some).or(ended.then_some(None))
    });
    let Some(daemon) = daemon else {
        bridge.ends(0);
        return false;
    };
    // For a kill during the drain: a silent connection makes the drain last longer.
    let _silent = said_at.contains("connections end").then(|| {
        bridge.logs("may be replaced now");
        std::net::TcpStream::connect(NODE)
    });
    bridge.logs(said_at);
    if said_at == "may be replaced now" {
        bridge.prints("runs");
    }
    let _ = kill(Pid::from_raw(daemon.try_into().unwrap()), Signal::SIGKILL);
    wait_until_gone(daemon);
    node.nothing_runs();
    let code = bridge.ended().code();
    if code == Some(0) {
        return false;
    }
    // The exit status shows the caller whether COMMAND ran.
    assert_eq!(
        code,
        Some(if ran.exists() { 75 } else { 69 }),
        "{said_at}: {}",
        bridge.log()
    );
    bridge.logs("has ended unexpectedly");
    node.answers();
    assert!(!node.is_on());
    true
}

#[test]
fn all_obstacles_are_reported_at_once() {
    on_any_node(|node| {
        let elsewhere = std::net::TcpListener::bind("10.77.0.1:7000").unwrap();
        let mut command = node.berth_bridge([
            "--command",
            "kube-apiserver --secure-port=7000",
            "--state-dir",
        ]);
        command.arg(node.path("bridge")).args(["--", "true"]);
        let parts = [
            "10.77.0.1:7000 is listened on by",
            "bind it to 0.0.0.0",
            "nothing was changed",
        ];
        expect_status(&mut command, 69, &parts);
        drop(elsewhere);
        expect_status(&mut command, 69, &["nothing listens on port 7000"]);
        // The bridge tries the probe's CA before it starts.
        std::fs::write(node.path("other-ca"), create_ca().pem()).unwrap();
        let mut command = node.berth_bridge(["--probe-timeout=10s", "--probe-ca"]);
        command
            .arg(node.path("other-ca"))
            .args(["--command", &node.own(), "--state-dir"])
            .arg(node.path("bridge"));
        expect_status(command.args(["--", "true"]), 69, &["--probe-ca must hold"]);
        let (out, _) = expect_status(
            &mut node.bridge("--dry-run", &["sh", "restart", "kube-apiserver"]),
            0,
            &[],
        );
        assert!(
            out.contains("run sh restart kube-apiserver")
                && out.contains("--endpoint-reconciler-type=none"),
            "{out}"
        );
        expect_status(
            &mut node.bridge("", &["no-such-program"]),
            64,
            &["no program no-such-program"],
        );
        // With other arguments, the temporary instance would differ from the running
        // kube-apiserver.
        let mut command = node.berth_bridge(["--probe-timeout=10s", "--probe-ca"]);
        command.arg(&node.certs.ca_file).args([
            "--command",
            &format!("{} --v=2", node.own()),
            "--state-dir",
        ]);
        expect_status(
            command.arg(node.path("bridge")).args(["--", "true"]),
            69,
            &["other arguments than --command"],
        );
        assert!(
            !Path::new(&node.path("bridge")).exists(),
            "nothing is changed"
        );
        // The directory of another program stays as it is.
        std::fs::create_dir(node.path("bridge")).unwrap();
        std::fs::write(node.path("bridge/lock"), "").unwrap();
        expect_status(
            &mut node.bridge("", &["true"]),
            69,
            &["has other files than a bridge's"],
        );
        assert_eq!(std::fs::read_dir(node.path("bridge")).unwrap().count(), 1);
    });
}

#[test]
fn clients_that_dial_localhost_are_reported_before_the_bridge() {
    on_any_node(|node| {
        let (code, _, err) = output_of(&mut node.bridge("--dry-run", &["true"]));
        // The other program has the same process name as the test's kube-apiserver.
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains("localhost is not covered"), "{err}");
        assert!(!err.contains("reaches kube-apiserver at"), "{err}");
        let _client = std::net::TcpStream::connect("127.0.0.1:6443").unwrap();
        let _steered = std::net::TcpStream::connect(NODE).unwrap();
        let (code, steps, err) = output_of(&mut node.bridge("--dry-run", &[]));
        assert!(steps.contains("\n4  run COMMAND\n"), "{steps}");
        let named = format!(
            "(pid {}) reaches kube-apiserver at 127.0.0.1:6443: let it dial an address",
            std::process::id()
        );
        assert!(code == Some(0) && err.contains(&named), "{err}");
        assert_eq!(err.matches("reaches kube-apiserver at").count(), 1, "{err}");
        let (_, err) = expect_status(&mut node.start_bridge(), 0, &[]);
        assert_eq!(err.matches("localhost is not covered").count(), 1, "{err}");
        expect_status(node.part("end").arg("--now"), 0, &[]);
    });
}

/// Clients that dial localhost are steered, too, but kube-apiserver's own connections are not.
/// berth recognizes kube-apiserver by its process name, so the test's clients have another process
/// name.
#[test]
fn clients_that_dial_localhost_are_served_too() {
    on_a_node_of(
        Kind {
            called: OWN,
            ..DUAL
        },
        |node| {
            let Some(cgroup) = cgroup::find_root() else {
                return print_skipped("no cgroup v2 is mounted");
            };
            if let Err(error) = block_on(self_test_of_localhost(&cgroup)) {
                return print_skipped(&error.to_string());
            }
            let start = || LOCALHOST.map(|to| Load::start(2, Some(PERIOD), node.attempt_at(to)));
            // The control, without a bridge.
            let loads = start();
            loads.iter().for_each(|load| load.more(10));
            node.stop_own();
            for load in &loads {
                eventually("a loss, which this load would see", || {
                    (load.so_far().lost() > 0).then_some(())
                });
            }
            node.start_own();
            node.answers();
            loads.into_iter().for_each(|load| drop(load.end()));

            let loads = start();
            loads.iter().for_each(|load| load.more(10));
            let wait = node.wait();
            let run = format!(
                ". {}\necho away\n{wait}\n{}",
                node.path("stop").display(),
                node.start()
            );
            let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
            bridge.prints("away");
            loads.iter().for_each(|load| load.more(10));
            let dial = || {
                LOCALHOST.map(|to| std::net::TcpStream::connect(to).map_err(|error| error.kind()))
            };
            let named = |name: &str| {
                std::thread::Builder::new()
                    .name(name.into())
                    .spawn(dial)
                    .unwrap()
                    .join()
                    .unwrap()
            };
            assert!(named(TEMPORARY).iter().all(Result::is_ok));
            let refused = Err(io::ErrorKind::ConnectionRefused);
            assert_eq!(named(OWN).map(|dialled| dialled.map(drop)), [refused; 3]);
            let status = node.status();
            assert!(status.get("notes").is_none(), "{status}");
            let temporary = status["temporary"]["pid"].as_u64().unwrap().to_string();
            let read =
                |file: &str| std::fs::read_to_string(format!("/proc/{temporary}/{file}")).unwrap();
            assert_eq!(read("comm").trim_end(), TEMPORARY);
            assert!(read("cmdline").starts_with(&format!("{TEMPORARY}\0")));
            for tool in [&["pgrep"][..], &["pidof"], &["killall", "-v", "-s0"]] {
                let finds = |name| {
                    let output = Command::new(tool[0])
                        .args(&tool[1..])
                        .arg(name)
                        .output()
                        .ok()?;
                    let found = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
                    Some(
                        found
                            .split(|c: char| !c.is_ascii_digit())
                            .any(|number| number == temporary),
                    )
                };
                match [TEMPORARY, OWN].map(finds) {
                    [Some(as_temporary), Some(as_own)] => {
                        assert_eq!((as_temporary, as_own), (true, false), "{tool:?}");
                    }
                    _ => print_skipped(&format!("no {}", tool[0])),
                }
            }
            node.go();
            bridge.ends(0);
            loads.iter().for_each(|load| load.more(10));
            loads
                .into_iter()
                .for_each(|load| drop(expect_no_loss(load)));
        },
    );
}

#[test]
fn of_two_bridges_at_the_same_time_one_is_refused() {
    on_any_node(|node| {
        let run = node.wait();
        let bridge = |directory: &str| {
            let mut command = node.berth_bridge([
                "--settle=50ms",
                "--speedup=20",
                "--probe-timeout=10s",
                "--state-dir",
            ]);
            command
                .arg(node.path(directory))
                .args(["--command", &node.own(), "--probe-ca"])
                .arg(&node.certs.ca_file);
            Running::start(command.args(["--", "sh", "-c", &run]))
        };
        let mut both = ["bridge", "other"].map(bridge);
        let refused = eventually("the end of one", || {
            both.iter_mut()
                .position(|it| it.child.try_wait().unwrap().is_some())
        });
        both[refused].ends(69);
        let begun = &mut both[1 - refused];
        begun.logs("may be replaced now");
        node.go();
        node.stop_own();
        node.start_own();
        begun.ends(0);
    });
}

/// A node whose kube-apiserver stores events in an etcd with three members. The first member runs
/// on the node.
const ETCD: Kind = Kind {
    flags: "--bind-address=0.0.0.0 --etcd-servers-overrides=/events#https://127.0.0.1:2379 --etcd-cafile=DIR/etcd-ca.crt",
    ..IPV4
};

/// Starts the members, on threads that end with the test.
fn etcd_of(node: &Node) -> Arc<std::sync::Mutex<Members>> {
    let (up, is_up) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        block_on(async {
            let all = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
                .map(|ip| (SocketAddr::new(ip.parse().unwrap(), 2379), ip));
            let (members, servers) = etcd::start_members(&all).await;
            up.send((members, servers[0].access.ca.clone())).unwrap();
            std::future::pending::<()>().await;
        });
    });
    let (members, ca) = is_up.recv().unwrap();
    std::fs::write(node.path("etcd-ca.crt"), ca).unwrap();
    members
}

#[test]
fn the_temporary_instance_uses_the_other_members_of_an_etcd() {
    on_any_node_of(ETCD, |node| {
        let members = etcd_of(node);
        let load = node.load_throughout();
        wait_for_more(load.as_ref(), 20);
        let run = format!(
            "echo runs; {}; sh {}",
            node.wait(),
            node.path("restart").display()
        );
        let mut bridge = Running::start(&mut node.bridge("", &["sh", "-c", &run]));
        bridge.logs("the temporary kube-apiserver uses member cp-2 (2) at https://127.0.0.2:2379 and member cp-3");
        bridge.logs("etcd: the cluster's lock is not held without --kubeconfig");
        bridge.prints("runs");
        assert_eq!(
            members.lock().unwrap().transfers,
            ["2"],
            "the leadership is moved before COMMAND"
        );
        let pid = node.status()["temporary"]["pid"].as_u64().unwrap();
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        let others =
            "\0--etcd-servers-overrides=/events#https://127.0.0.2:2379;https://127.0.0.3:2379\0";
        assert!(command.contains(others), "{command}");
        members.lock().unwrap().stopped = vec![1, 3];
        node.go();
        bridge.ends(0);
        load.map(expect_no_loss);
        // One member is stopped. With a bridge, no majority would be left.
        members.lock().unwrap().stopped = vec![3];
        expect_status(
            &mut node.bridge("--dry-run", &["true"]),
            69,
            &[
                "etcd: member cp-3 (3) cannot be used",
                "of 3 voters 2 must serve",
                "--etcd own",
            ],
        );
        let (code, plan, err) = output_of(&mut node.bridge("--dry-run --etcd=own", &["true"]));
        assert!(
            code == Some(0) && plan.contains("=/events#https://127.0.0.1:2379 "),
            "{plan}{err}"
        );
    });
}

/// Returns a command that runs `command` through a starter.
fn wrap_command(starter: &[&str], command: &Command) -> Command {
    let mut by = Command::new(starter[0]);
    by.args(&starter[1..])
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => by.env(name, value),
            None => by.env_remove(name),
        };
    }
    by
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_raised_or_reported() {
    on_any_node(|node| {
        let dry = node.bridge("--dry-run", &["true"]);
        for (files, code) in [(256, 69), (1024, 0)] {
            let limit = format!("--nofile={files}");
            let (status, _, err) = output_of(&mut wrap_command(
                &["setpriv", "--bounding-set=-sys_resource", "prlimit", &limit],
                &dry,
            ));
            assert_eq!(status, Some(code), "{err}");
            assert!(
                err.contains(&format!("a limit of {files} open files leaves room for")),
                "{err}"
            );
        }
        let raises = Command::new("prlimit")
            .args(["--nofile=256", "prlimit", "--nofile=512", "true"])
            .output()
            .unwrap();
        // Without CAP_SYS_RESOURCE, the hard limit cannot be raised.
        let limit = if raises.status.success() {
            "--nofile=256"
        } else {
            "--nofile=256:"
        };
        let bridge = node.fast_bridge("", &to_args(&node.restart()));
        let mut bridge = Running::start(&mut wrap_command(&["prlimit", limit], &bridge));
        bridge.ends(0);
    });
}

#[test]
fn a_wrong_command_line_is_refused() {
    for (wrong, part) in [
        (&["--settle=x"][..], "--settle"),
        (&["--ready-timeout=0s"], "at least 1s"),
        (&["--command='"], "missing closing quote"),
        (&["--command=k", "--manifest=/x"], "cannot be used with"),
        (&["--probe-cert=/x"], "--probe-key"),
        (&[], "COMMAND is missing"),
        (
            &["--command=k", "--on-failure=restore", "--", "true"],
            "give stay or end",
        ),
        (
            &["--command", "k --secure-port", "--", "true"],
            "--secure-port",
        ),
    ] {
        expect_status(
            &mut berth_command(["bridge"].iter().chain(wrong)),
            64,
            &[part],
        );
    }
}
