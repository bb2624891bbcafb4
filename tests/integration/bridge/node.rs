//! A node with a kube-apiserver, in a network namespace of its own, and the bridge on it.

use crate::support::load::{Load, Record};
use crate::support::process::{berth_command, output_of, wait_until_gone};
use crate::support::{PATIENCE, eventually};
use berth_os::netdevice::{self, InterfaceSetting};
use berth_rehearse::record::log::Recorder;
use berth_rehearse::testbed::certs;
use berth_rehearse::testbed::store::{self, Store};
use berth_steering::{Error, self_test};
use berth_testing::namespace;
use nix::mount::{MsFlags, mount};
use nix::sched::CloneFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, chroot, geteuid};
use serde_json::Value;
use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Once};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener};

pub(super) const NODE: &str = "10.77.0.1:6443";

pub(super) const NODE_IPV6: &str = "[fd77::1]:6443";

/// Loopback addresses of the secure port. In /etc/hosts of some distributions, 127.0.1.1 is the
/// address of the node's name.
pub(super) const LOCALHOST: [&str; 3] = ["127.0.0.1:6443", "127.0.1.1:6443", "[::1]:6443"];

/// Number of clients, and the period in which each client begins a connection.
pub(super) const CLIENTS: u32 = 8;

pub(super) const PERIOD: Duration = Duration::from_millis(40);

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
pub(super) struct Node {
    pub(super) dir: tempfile::TempDir,
    pub(super) certs: certs::Certs,
    pub(super) kind: Kind,
    pub(super) _hub: Hub,
    /// True if the kernel accepts BPF programs here. If false, `berth bridge` does everything
    /// except steering, and new connections may go to the node's kube-apiserver at any time.
    pub(super) steers: bool,
}

/// Properties of a node. Every node has an IPv6 address.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub(super) has_ipv4: bool,
    /// Flags of the node's kube-apiserver about addresses. `DIR` stands for the node's directory.
    pub(super) flags: &'static str,
    /// Address that clients dial.
    pub(super) at: &'static str,
    /// Process name of the node's kube-apiserver.
    pub(super) called: &'static str,
}

/// A node with a kube-apiserver that accepts IPv4 clients only.
pub(super) const IPV4: Kind = Kind {
    has_ipv4: true,
    flags: "--bind-address=0.0.0.0",
    at: NODE,
    called: "berth",
};

/// A node on which the kube-apiserver has one listener for both families. In Go, 0.0.0.0 has the
/// same effect.
pub(super) const DUAL: Kind = Kind {
    flags: "--bind-address=::",
    ..IPV4
};

/// The etcd of the simulated apiservers: a thread that ends when the value is dropped.
pub(super) struct Hub(Option<tokio::sync::oneshot::Sender<()>>);

impl Hub {
    pub(super) fn start(socket: PathBuf) -> Self {
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

pub(super) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

/// Runs a test on a node. The test is skipped if no node can be made, or if the kernel accepts no
/// BPF programs.
pub(super) fn on_a_node(test: impl FnOnce(&Node) + Send + 'static) {
    on_a_node_of(IPV4, test);
}

pub(super) fn on_a_node_of(kind: Kind, test: impl FnOnce(&Node) + Send + 'static) {
    run_on_node(kind, true, test);
}

/// Runs a test that does not depend on steering. Unlike [`on_a_node`], the test also runs without
/// BPF.
pub(super) fn on_any_node(test: impl FnOnce(&Node) + Send + 'static) {
    on_any_node_of(IPV4, test);
}

pub(super) fn on_any_node_of(kind: Kind, test: impl FnOnce(&Node) + Send + 'static) {
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
        certs.issue_certificate("own").unwrap();
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
            format!("{}\n{}\n", node.quiet_code(), node.stop()),
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

/// Returns shell code that starts a program, with a log and a pid file. The shell, or a process
/// that the shell starts, may be killed at any time, and the pid file always has a whole number.
pub(super) fn start_in_background(command: &str, log: &Path, pid: &Path) -> String {
    let (log, pid) = (log.display(), pid.display());
    format!(
        "{command} >> {log} 2>&1 < /dev/null & echo $! > {pid}.new && \
         {{ mv {pid}.new {pid} || mv {pid}.new {pid}; }}"
    )
}

impl Node {
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns shell code that waits until [`let_command_continue`](Self::let_command_continue). A
    /// reader may read the previous line again if its writer has not closed the FIFO yet; then the
    /// code waits again.
    pub(super) fn wait_code(&self) -> String {
        let go = self.path("go");
        nix::unistd::mkfifo(&go, nix::sys::stat::Mode::S_IRWXU).unwrap();
        format!("until read -r line < {}; do :; done", go.display())
    }

    pub(super) fn let_command_continue(&self) {
        std::fs::write(self.path("go"), "\n").unwrap();
    }

    /// Returns the command line of the node's kube-apiserver.
    pub(super) fn own_command(&self) -> String {
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
    pub(super) fn start(&self) -> String {
        start_in_background(
            &self.own_command(),
            &self.path("own.log"),
            &self.path("pid"),
        )
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
    pub(super) fn quiet_code(&self) -> String {
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
    pub(super) fn stop(&self) -> String {
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
    pub(super) fn stop_own(&self) {
        assert!(
            Command::new("sh")
                .args(["-c", &self.stop()])
                .status()
                .unwrap()
                .success()
        );
    }

    pub(super) fn start_own(&self) {
        assert!(
            Command::new("sh")
                .args(["-c", &self.start()])
                .status()
                .unwrap()
                .success()
        );
    }

    pub(super) fn own_pid(&self) -> i32 {
        std::fs::read_to_string(self.path("pid"))
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }

    /// Returns a `berth bridge` command that steers if the kernel can.
    pub(super) fn berth_bridge<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = berth_command(["bridge"].iter().chain(&args));
        if !self.steers {
            command.env("BERTH_TEST_UNSTEERED", "1");
        }
        command
    }

    /// Returns `berth bridge` with options, for a test in which no client may be lost. Handshakes
    /// have 0.8 s.
    pub(super) fn bridge(&self, options: &str, run: &[&str]) -> Command {
        self.bridge_at(6, "100ms", options, run)
    }

    /// Returns `berth bridge` with options, for a test without clients.
    pub(super) fn fast_bridge(&self, options: &str, run: &[&str]) -> Command {
        self.bridge_at(20, "50ms", options, run)
    }

    pub(super) fn bridge_at(
        &self,
        speedup: u32,
        settle: &str,
        options: &str,
        run: &[&str],
    ) -> Command {
        let [speedup, settle] = [format!("--speedup={speedup}"), format!("--settle={settle}")];
        // Where many tests share a processor, 2 s are too short.
        let mut command =
            self.berth_bridge([&settle, &speedup, "--probe-timeout=10s", "--state-dir"]);
        command
            .arg(self.path("bridge"))
            .args(["--command", &self.own_command(), "--probe-ca"])
            .arg(&self.certs.ca_file);
        command.args(options.split_whitespace()).arg("--").args(run);
        command
    }

    /// Returns `berth bridge start`, for a test in which clients may be lost.
    pub(super) fn start_bridge(&self) -> Command {
        let mut start = self.berth_bridge([
            "start",
            "--settle=100ms",
            "--speedup=20",
            "--probe-timeout=10s",
            "--state-dir",
        ]);
        start
            .arg(self.path("bridge"))
            .args(["--command", &self.own_command(), "--probe-ca"])
            .arg(&self.certs.ca_file);
        start
    }

    pub(super) fn restart(&self) -> [String; 2] {
        ["sh".into(), self.path("restart").display().to_string()]
    }

    pub(super) fn part(&self, part: &str) -> Command {
        let mut command = berth_command(["bridge", part, "--state-dir"]);
        command.arg(self.path("bridge"));
        command
    }

    pub(super) fn status(&self) -> Value {
        let (status, out, err) = output_of(self.part("status").arg("--json"));
        assert_eq!(status, Some(0), "{err}");
        serde_json::from_str(&out).unwrap()
    }

    /// Waits for the daemon, and returns its pid.
    pub(super) fn daemon(&self) -> u32 {
        eventually("a bridge", || self.find_daemon())
    }

    pub(super) fn find_daemon(&self) -> Option<u32> {
        let (_, out, _) = output_of(self.part("status").arg("--json"));
        serde_json::from_str::<Value>(&out).ok()?["pid"]
            .as_u64()?
            .try_into()
            .ok()
    }

    /// Waits until no process runs with files of the bridge.
    pub(super) fn nothing_runs(&self) {
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
    pub(super) fn attempt(
        &self,
    ) -> impl Fn(std::net::Ipv4Addr) -> Attempt + Clone + Send + 'static {
        self.attempt_at(self.kind.at)
    }

    pub(super) fn attempt_at(
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
    pub(super) fn get(&self, to: &'static str) -> impl Fn() -> Answer + Clone + Send + 'static {
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

    pub(super) fn tls(&self) -> Arc<rustls::ClientConfig> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.certs.ca.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        Arc::new(config.with_root_certificates(roots).with_no_client_auth())
    }

    /// Returns a client that sends requests on one kept connection.
    pub(super) fn kept_client(&self) -> impl FnMut() -> io::Result<String> {
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

    pub(super) fn load(&self) -> Load {
        Load::start(CLIENTS, Some(PERIOD), self.attempt())
    }

    /// Starts clients that also connect while the node's kube-apiserver is away. `None` if nothing
    /// is steered, since these clients would lose connections.
    pub(super) fn load_throughout(&self) -> Option<Load> {
        self.steers.then(|| self.load())
    }

    /// Waits until a client gets an answer.
    pub(super) fn answers(&self) {
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
    pub(super) fn kill_bridge(&self) {
        if let Some(pid) = self.find_daemon() {
            let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL);
            wait_until_gone(pid);
        }
    }

    pub(super) fn is_on(&self) -> bool {
        output_of(&mut self.part("status")).0 == Some(0)
    }
}

/// Waits until the given number of further clients was served.
#[track_caller]
pub(super) fn wait_for_more(load: Option<&Load>, clients: usize) {
    if let Some(load) = load {
        load.more(clients);
    }
}

/// Stops the clients, and fails if a connection was lost.
#[track_caller]
pub(super) fn expect_no_loss(load: Load) -> Record {
    let record = load.end();
    // If the machine was too busy to know, the test continues: its other assertions hold.
    record.expect_no_loss("");
    record
}

pub(super) fn to_args(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}
