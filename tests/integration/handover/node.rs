//! A run directory, its shims, and echo servers that can go away.

use crate::stand_in::STAND_IN;
use crate::support::net::{find_listening, free_address, fresh_ip};
use crate::support::process::{BERTH, Running, berth_at, output_of, passes_sockets};
use crate::support::shim::send_ask;
use crate::support::stopped::Stopped;
use crate::support::{PATIENCE, eventually, in_memory};
use berth_node::instance_id::InstanceId;
use berth_node::ipc::supervisor::{FromShim, ToShim, VERSION, parse_message};
use berth_node::ipc::{self, SocketFile, wire};
use berth_node::registry::instance::{Claimant, InstanceClaim, claim};
use berth_node::registry::{BerthDir, RunDir, instance};
use berth_os::{make_awaitable, seqpacket, socket};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, chown};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex};
use std::time::Instant;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

/// Lease of shims by default. A shim leaves when one of its threads does not run for a third of its
/// lease, as happens on a busy machine. A test uses a shorter lease only if a lease has to expire,
/// or if it sends or checks something after the lease.
pub(crate) const LEASE: &str = "60s";

/// Name of the relaying thread that accepts.
pub(crate) const ACCEPTS: &str = "berth-relay-0";

/// Reads a number from the environment, for runs that are longer than usual. The default is for
/// normal runs.
#[track_caller]
pub(crate) fn read_number(name: &str, every_day: usize) -> usize {
    std::env::var(name).map_or(every_day, |number| {
        number.parse().unwrap_or_else(|_| panic!("{name}={number}"))
    })
}

pub(crate) fn make_runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// A berth and its run directory.
pub(crate) struct Node {
    temp: TempDir,
    pub(crate) listen: SocketAddr,
    /// Owner of the shims and the run directory. `None` for the test's user.
    uid: Option<u32>,
    /// Path of the berth binary for the next start.
    program: Mutex<PathBuf>,
}

impl Node {
    pub(crate) fn new() -> Self {
        let program = Mutex::new(BERTH.into());
        Self {
            temp: in_memory(),
            listen: free_address(),
            uid: None,
            program,
        }
    }

    /// Creates a node that belongs to another uid, or returns the obstacle.
    pub(crate) fn of(uid: u32) -> Result<Self, String> {
        let mut version = berth_at(Path::new(BERTH), ["--version"]);
        version
            .uid(uid)
            .gid(uid)
            .status()
            .map_err(|error| format!("berth cannot be run as uid {uid}: {error}"))?;
        let node = Self {
            uid: Some(uid),
            ..Self::new()
        };
        chown(node.temp.path(), Some(uid.into()), Some(uid.into()))
            .map_err(|error| error.to_string())?;
        Ok(node)
    }

    /// Sets the berth binary for later starts.
    pub(crate) fn install(&self, program: &Path) {
        program.clone_into(&mut self.program.lock().unwrap());
    }

    pub(crate) fn berth_with(&self, args: &[&str]) -> Command {
        let mut command = berth_at(&self.program.lock().unwrap(), args);
        command.env("BERTH_TEST_HANGS", self.hangs());
        command
    }

    /// Returns the node's temporary directory.
    pub(crate) fn temp(&self) -> &Path {
        self.temp.path()
    }

    /// Returns the path of a directory. A call of a shim hangs if the directory contains a file
    /// with the name of the call.
    pub(crate) fn hangs(&self) -> PathBuf {
        self.temp.path().join("hangs")
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.temp.path().join("run")
    }

    /// Returns the berth's directory, and creates it if missing.
    pub(crate) fn berth(&self) -> BerthDir {
        self.find().unwrap_or_else(|| {
            RunDir::open(&self.run_dir())
                .unwrap()
                .berth(self.listen)
                .unwrap()
        })
    }

    /// Returns the berth's directory if it exists.
    pub(crate) fn find(&self) -> Option<BerthDir> {
        let berths = RunDir::find(&self.run_dir()).ok()??.berths().ok()?;
        berths
            .into_iter()
            .find(|berth| berth.address() == self.listen)
    }

    fn command(&self, command: &str, id: &str) -> Command {
        let mut command = self.berth_with(&[
            command,
            "--listen",
            &self.listen.to_string(),
            "--instance",
            id,
        ]);
        command.arg("--run-dir").arg(self.run_dir());
        if let Some(uid) = self.uid {
            command.uid(uid).gid(uid);
        }
        command
    }

    /// Starts a stand-in for an apiserver under `berth exec`, and returns the supervisor with the
    /// stand-in's pid.
    pub(crate) fn injected(
        &self,
        id: &str,
        pass: &str,
        environment: &[(&str, &str)],
    ) -> (Running, Pid) {
        let mut command = self.command("exec", id);
        command.args(["--pass", pass, "--", "sh", "-c", STAND_IN, "kube-apiserver"]);
        command
            .env("TEST_BINARY", std::env::current_exe().unwrap())
            .envs(environment.iter().copied());
        let process = Running::start(&mut command);
        let pid = process
            .prints("listening, pid ")
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        (process, Pid::from_raw(pid))
    }

    fn exec_command(&self, id: &str) -> Command {
        let mut command = self.command("exec", id);
        command.args([
            "--",
            "sh",
            "-c",
            "echo lives; exec sleep 3600",
            "kube-apiserver",
        ]);
        command
    }

    /// Starts a process that `berth exec` turns into, and an echo server at its address.
    pub(crate) fn exec(&self, id: &str) -> (Running, Echo) {
        let process = Running::start(&mut self.exec_command(id));
        process.prints("lives");
        let listed = instance::list(&self.find().unwrap()).unwrap().found;
        let listed = listed
            .into_iter()
            .find(|listed| listed.record.instance.as_str() == id)
            .unwrap();
        (process, Echo::at(listed.record.address))
    }

    /// Records an instance, alive as long as the returned claim.
    pub(crate) fn record(&self, id: &str, address: SocketAddr) -> InstanceClaim {
        self.claim(id, address, None)
    }

    fn claim(
        &self,
        id: &str,
        address: SocketAddr,
        supervisor: Option<Result<(), String>>,
    ) -> InstanceClaim {
        let id = InstanceId::parse(id).unwrap();
        let claimant = Claimant {
            instance: &id,
            advertise: self.listen.ip(),
            supervisor,
            pid: None,
        };
        claim(&self.berth(), &claimant, |_, _| Ok(address)).unwrap()
    }

    /// Records an echo server as an instance with a supervisor, alive as long as the server.
    /// Returns false if tests do not pass sockets, or if the address has no echo server.
    pub(crate) fn supervises(&self, id: &str, address: SocketAddr) -> bool {
        let echo = ECHOES
            .lock()
            .unwrap()
            .get(&address)
            .filter(|echo| !echo.is_closed())
            .cloned();
        let Some(echo) = echo.filter(|_| passes_sockets() && self.uid.is_none()) else {
            return false;
        };
        let listed = instance::list(&self.berth()).unwrap().found;
        if !listed
            .iter()
            .any(|listed| listed.alive && listed.record.instance.as_str() == id)
        {
            let instance = InstanceId::parse(id).unwrap();
            let shims = ipc::listen_at(&self.berth().supervisor_path(&instance).unwrap()).unwrap();
            let _ = echo.send(Supervised {
                instance,
                shims,
                _record: self.claim(id, address, Some(Ok(()))),
            });
        }
        true
    }

    /// Starts a shim of an instance with the given address.
    pub(crate) fn start(&self, id: &str, backend: SocketAddr, options: &[&str]) -> Shim {
        if self.supervises(id, backend) {
            return self.launch(id, options);
        }
        self.launch(
            id,
            &[&["--backend", &backend.to_string()], options].concat(),
        )
    }

    /// Starts a shim of a recorded instance.
    pub(crate) fn launch(&self, id: &str, options: &[&str]) -> Shim {
        let mut command = self.command("serve", id);
        // A slow instance must not count as hanging, unless the test is about a hang.
        let defaults = [
            ["--probe", "tcp"],
            ["--probe-timeout", "60s"],
            ["--probe-interval", "50ms"],
            ["--lease", LEASE],
        ];
        for [option, value] in defaults {
            if !options.contains(&option) {
                command.args([option, value]);
            }
        }
        let running = Running::start(command.args(options));
        running.logs(" berth ");
        let path = self
            .berth()
            .socket_path(&InstanceId::parse(id).unwrap())
            .unwrap();
        Shim { running, path }
    }

    /// Starts a shim and waits until it has joined.
    pub(crate) fn joined(&self, id: &str, backend: SocketAddr, options: &[&str]) -> Shim {
        let shim = self.start(id, backend, options);
        shim.until_joined();
        if self.supervises(id, backend) && !options.contains(&"relay") {
            shim.until("a link", |status| {
                status
                    .instances
                    .iter()
                    .any(|known| known.own && known.injected)
            });
        }
        shim
    }

    /// Starts two shims, one for each instance, and waits until they have joined and have each
    /// other's guard.
    pub(crate) fn pair(&self, backends: [SocketAddr; 2], options: &[&str]) -> (Shim, Shim) {
        let (a, b) = (
            self.joined("a", backends[0], options),
            self.joined("b", backends[1], options),
        );
        know_one_another(&a, &b);
        (a, b)
    }

    /// Returns exit status, output and log of a command that asks shims. A command waits for a shim
    /// for a second, so the command is repeated while a busy shim does not answer.
    #[track_caller]
    pub(crate) fn ask_shims(&self, command: &[&str]) -> (Option<i32>, String, String) {
        eventually(&format!("an answer to {command:?}"), || {
            let told = output_of(
                self.berth_with(command)
                    .arg("--run-dir")
                    .arg(self.run_dir()),
            );
            Some(told).filter(|(_, out, _)| !out.contains("does not answer within"))
        })
    }

    /// Returns the inodes of the berth's listeners.
    pub(crate) fn listeners(&self) -> Vec<u64> {
        find_listening(self.listen)
    }
}

/// A `berth serve` process.
pub(crate) struct Shim {
    pub(crate) running: Running,
    pub(crate) path: PathBuf,
}

impl Shim {
    #[track_caller]
    pub(crate) fn status(&self) -> wire::Status {
        match send_ask(&make_runtime(), &self.path, &wire::Ask::Status) {
            Ok(wire::Reply::Status(status)) => *status,
            other => panic!("no status but {other:?}:\n{}", self.running.log()),
        }
    }

    /// Waits until the status satisfies `wanted`.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, wanted: impl Fn(&wire::Status) -> bool) -> wire::Status {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            let late = Instant::now() >= deadline;
            assert!(
                !late,
                "waited in vain: {what}: {status:?}\n{}",
                self.running.log()
            );
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[track_caller]
    pub(crate) fn until_joined(&self) {
        self.until("joined", |status| {
            status.state == berth_node::terms::Phase::Joined
        });
    }

    /// Returns a metric with the given labels.
    #[track_caller]
    pub(crate) fn metric(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let text = match send_ask(&make_runtime(), &self.path, &wire::Ask::Metrics) {
            Ok(wire::Reply::Metrics(text)) => text,
            other => panic!("no metrics but {other:?}:\n{}", self.running.log()),
        };
        let has = |line: &&str| {
            let labelled =
                |(label, value): &(&str, &str)| line.contains(&format!("{label}=\"{value}\""));
            line.split('{').next() == Some(name) && labels.iter().all(labelled)
        };
        text.lines()
            .find(has)
            .map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    }

    /// Returns a counter of handover steps.
    #[track_caller]
    pub(crate) fn counted(&self, step: &str, result: &str) -> u64 {
        self.metric(
            "berth_handover_steps_total",
            &[("step", step), ("result", result)],
        )
    }

    /// Waits until a counter of handover steps reaches `least`.
    #[track_caller]
    pub(crate) fn until_counted(&self, step: &str, least: u64) {
        eventually(&format!("{step} at {least}"), || {
            (self.counted(step, "ok") >= least).then_some(())
        });
    }

    /// Stops the process with SIGSTOP, and waits until it has stopped.
    #[track_caller]
    pub(crate) fn freeze(&self) {
        freeze_process(self.running.pid());
    }

    /// Stops one thread of the shim by its name. The other threads run on.
    #[track_caller]
    pub(crate) fn stop(&self, thread: &str) -> Stopped {
        Stopped::new(eventually(thread, || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.running.pid())).ok()?;
            let named = tasks.flatten().find(|task| {
                std::fs::read_to_string(task.path().join("comm"))
                    .is_ok_and(|comm| comm.trim() == thread)
            });
            named
                .and_then(|task| task.file_name().to_str()?.parse().ok())
                .map(Pid::from_raw)
        }))
    }

    /// Returns the shim's number of open descriptors.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.running.pid()))
            .unwrap()
            .count()
    }

    /// Sends SIGTERM and waits for exit status 0. Returns the log.
    #[track_caller]
    pub(crate) fn leave(mut self) -> String {
        self.running.signal(Signal::SIGTERM);
        self.running.ends(0);
        self.running.log()
    }
}

/// Stops a process with SIGSTOP, and waits until it has stopped.
#[track_caller]
pub(crate) fn freeze_process(process: Pid) {
    kill(process, Signal::SIGSTOP).unwrap();
    eventually("a process that stands still", || {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
        stat.rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('T')
            .then_some(())
    });
}

/// Waits until each shim has the other's guard.
#[track_caller]
pub(crate) fn know_one_another(a: &Shim, b: &Shim) {
    a.until_counted("guard", 1);
    b.until_counted("guard", 1);
}

/// An echo server as an instance. Dropping the value resets all connections and closes the
/// listener.
pub(crate) struct Echo {
    pub(crate) address: SocketAddr,
    task: Option<JoinHandle<()>>,
}

/// Echo servers by address. The channel tells a server that it is an instance with a supervisor.
static ECHOES: LazyLock<Mutex<HashMap<SocketAddr, mpsc::UnboundedSender<Supervised>>>> =
    LazyLock::new(Mutex::default);

/// An echo server as an instance with a supervisor.
struct Supervised {
    instance: InstanceId,
    /// Listening socket for shims, and its file.
    shims: (OwnedFd, SocketFile),
    _record: InstanceClaim,
}

/// Runtime of all echo servers, on a single thread.
fn echo_runtime() -> &'static Handle {
    static INSTANCES: LazyLock<Handle> = LazyLock::new(|| {
        let runtime = make_runtime();
        let handle = runtime.handle().clone();
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        handle
    });
    &INSTANCES
}

impl Echo {
    pub(crate) fn new() -> Self {
        Self::at((fresh_ip(), 0).into())
    }

    pub(crate) fn at(address: SocketAddr) -> Self {
        let _in = echo_runtime().enter();
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let listener = socket.listen(4096).unwrap();
        let address = listener.local_addr().unwrap();
        let (supervise, supervised) = mpsc::unbounded_channel();
        ECHOES.lock().unwrap().insert(address, supervise);
        Self {
            address,
            task: Some(echo_runtime().spawn(serve_echo(listener, supervised))),
        }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            eventually("the end of an instance", || {
                find_listening(self.address).is_empty().then_some(())
            });
        }
    }
}

async fn serve_echo(listener: TcpListener, mut supervised: mpsc::UnboundedReceiver<Supervised>) {
    let (mut connections, mut supervisors) = (JoinSet::new(), JoinSet::new());
    let (pass, mut passed) = mpsc::unbounded_channel();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(echo_bytes(stream))),
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            },
            Some(instance) = supervised.recv() => drop(supervisors.spawn(supervise_server(instance, pass.clone()))),
            Some(client) = passed.recv() => drop(connections.spawn(echo_bytes(client))),
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Acts as the supervisor of a server that always accepts. The crate `berth-supervisor` has the
/// supervisor of a server in a process of its own.
async fn supervise_server(
    Supervised {
        instance,
        shims: (shims, _file),
        _record,
    }: Supervised,
    pass: mpsc::UnboundedSender<TcpStream>,
) {
    let shims = make_awaitable(shims, Interest::READABLE).unwrap();
    let mut links = JoinSet::new();
    while let Ok(shim) = shims
        .async_io(Interest::READABLE, |shims| seqpacket::accept(shims.as_fd()))
        .await
    {
        links.spawn(serve_shim(shim, instance.clone(), pass.clone()));
    }
}

async fn serve_shim(shim: OwnedFd, instance: InstanceId, pass: mpsc::UnboundedSender<TcpStream>) {
    let shim = make_awaitable(shim, Interest::READABLE).unwrap();
    let say = |message: ToShim| {
        // An error means that the shim has ended.
        let _ = seqpacket::transmit_message(
            shim.get_ref().as_fd(),
            &serde_json::to_vec(&message).unwrap(),
            &[],
        );
    };
    say(ToShim::Hello {
        version: VERSION,
        instance,
    });
    say(ToShim::Listening);
    loop {
        match shim.async_io(Interest::READABLE, receive_client).await {
            Ok(Some((seq, client))) => {
                let _ = pass.send(client);
                say(ToShim::Taken { seqs: vec![seq] });
            }
            Ok(None) => return,
            // Messages that the shim sent before its end are still readable.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}"),
        }
    }
}

/// Returns the shim's next client with its number. `None` at the end of the connection.
fn receive_client(shim: &OwnedFd) -> io::Result<Option<(u64, TcpStream)>> {
    let mut buffer = [0; 1024];
    loop {
        let mut received = seqpacket::receive_message(shim.as_fd(), &mut buffer)?;
        if received.length == 0 {
            return Ok(None);
        }
        // A recalled client was accepted before.
        if let Ok(FromShim::Client { seq, .. }) = parse_message(&buffer[..received.length]) {
            let client = received
                .descriptors
                .pop()
                .ok_or(io::ErrorKind::InvalidData)?;
            socket::set_nonblocking(client.as_fd())?;
            return Ok(Some((seq, TcpStream::from_std(client.into())?)));
        }
    }
}

async fn echo_bytes(mut stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut buffer = [0; 1024];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        if stream.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
