//! The processes of a rehearsal: where they listen, how they are started, asked and stopped.
//!
//! An instance is this very binary as `berth run`, with a stand-in as its apiserver, exactly as a
//! unit on bare metal would have it.

use super::certs::{self, Certs};
use super::plan::Plan;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// This very binary, even if its file was replaced meanwhile.
const THIS: &str = "/proc/self/exe";

/// Time between two questions whether an instance is ready.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// Bound of one such question.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// Time that children get to end when a rehearsal is aborted: half of it until they are told again.
const ABORT: Duration = Duration::from_secs(2);

/// Lines of an instance's log that are kept, for when it fails.
const LOG_LINES: usize = 12;

/// How long the output of an instance that has ended may take to arrive.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Addresses that are tried before it is said that none is free.
const TRIES: usize = 100;

/// Why the stage is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something that every rehearsal needs is not there.
    #[error("{0}")]
    Unavailable(String),
    /// An instance did not do what it should.
    #[error("{instance} {what}; its last lines of log:\n{log}")]
    Instance {
        /// Which.
        instance: String,
        /// What it did instead.
        what: String,
        /// Its last lines of log.
        log: String,
    },
}

impl From<certs::Error> for Error {
    fn from(error: certs::Error) -> Self {
        Self::Unavailable(error.to_string())
    }
}

/// A folder, an address, certificates, and the instances that were started.
#[derive(Debug)]
pub struct Stage {
    dir: TempDir,
    /// The berth.
    pub address: SocketAddr,
    /// For the clients.
    pub certs: Certs,
    shutdown_delay: Duration,
    instances: Vec<Instance>,
}

#[derive(Debug)]
struct Instance {
    name: &'static str,
    child: Child,
    log: Arc<Mutex<VecDeque<String>>>,
    /// The tasks that read its output; they end with it.
    readers: Vec<JoinHandle<()>>,
}

/// How an instance ended when it was stopped.
#[derive(Debug)]
pub struct Stopped {
    /// Its exit status; none if it had to be killed.
    pub status: Option<ExitStatus>,
    /// It had ended before it was told to.
    pub early: bool,
}

impl Stage {
    /// Makes the folder and the certificates, and finds an address.
    pub fn new(plan: &Plan) -> Result<Self, Error> {
        let missing = |what: &str, error: io::Error| Error::Unavailable(format!("{what}: {error}"));
        let dir = tempfile::Builder::new()
            .prefix("berth-rehearse-")
            .tempdir()
            .map_err(|e| missing("cannot make a temporary folder (TMPDIR names another place)", e))?;
        let address = free_address().map_err(|e| missing("no free address in 127.0.0.0/8", e))?;
        let certs = certs::make(dir.path(), &[address.ip()])?;
        Ok(Self { dir, address, certs, shutdown_delay: plan.shutdown_delay, instances: Vec::new() })
    }

    /// Socket of the store.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Starts `berth run` with a stand-in.
    pub fn start(&mut self, name: &'static str, version: &str) -> Result<(), Error> {
        let mut command = self.command();
        command.args(self.arguments(name, version)).process_group(0);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .map_err(|error| Error::Unavailable(format!("cannot start `berth run` for {name}: {error}")))?;
        let log = Arc::default();
        let mut readers = Vec::new();
        if let Some(out) = child.stdout.take() {
            readers.push(tokio::spawn(keep_log(out, Arc::clone(&log))));
        }
        if let Some(err) = child.stderr.take() {
            readers.push(tokio::spawn(keep_log(err, Arc::clone(&log))));
        }
        self.instances.push(Instance { name, child, log, readers });
        Ok(())
    }

    /// Waits until `berth ready` says that an instance is ready and joined; how long that took.
    pub async fn ready(&mut self, name: &'static str, within: Duration) -> Result<Duration, Error> {
        let began = Instant::now();
        let mut why;
        loop {
            let mut command = self.command();
            command.args(["ready", "--instance", name, "--run-dir"]).arg(self.run_dir());
            match timeout(ASK_TIMEOUT, command.output()).await {
                Ok(Ok(output)) if output.status.success() => return Ok(began.elapsed()),
                Ok(Ok(output)) => why = last_line(&[output.stderr, output.stdout].concat()),
                Ok(Err(error)) => why = format!("cannot ask: {error}"),
                Err(_) => why = format!("`berth ready` did not answer within {ASK_TIMEOUT:?}"),
            }
            if let Some(status) = self.exited(name) {
                return Err(self.failed(name, format!("ended before it was ready ({status})")).await);
            }
            if began.elapsed() > within {
                return Err(self.failed(name, format!("was not ready within {within:?} ({why})")).await);
            }
            sleep(ASK_EVERY).await;
        }
    }

    /// The exit status of an instance that has ended by itself.
    pub fn exited(&mut self, name: &str) -> Option<ExitStatus> {
        let instance = self.instances.iter_mut().find(|i| i.name == name)?;
        instance.child.try_wait().ok().flatten()
    }

    /// Stops an instance as systemd stops a unit: SIGTERM to `berth run`, and SIGKILL when it is
    /// there after `grace`.
    pub async fn stop(&mut self, name: &str, grace: Duration) -> Stopped {
        let early = self.exited(name).is_some();
        let Some(instance) = self.instances.iter_mut().find(|i| i.name == name) else {
            return Stopped { status: None, early };
        };
        instance.terminate();
        let status = timeout(grace, instance.child.wait()).await.ok().and_then(Result::ok);
        if status.is_none() {
            let _ = instance.child.kill().await;
        }
        Stopped { status, early }
    }

    /// The last lines that an instance logged. When it has ended, all of its output is waited for.
    pub async fn log(&mut self, name: &str) -> String {
        let ended = self.exited(name).is_some();
        let Some(instance) = self.instances.iter_mut().find(|i| i.name == name) else {
            return String::new();
        };
        if ended {
            let output = async {
                for reader in &mut instance.readers {
                    let _ = reader.await;
                }
            };
            // A child of its own may still hold the pipe.
            let _ = timeout(LAST_WORDS, output).await;
            instance.readers.retain(|reader| !reader.is_finished());
        }
        let log = instance.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().map(|line| format!("  {}", readable(line))).collect::<Vec<_>>().join("\n")
    }

    /// Ends what still runs, and removes the folder.
    pub async fn close(mut self) {
        for wait in [ABORT / 2, ABORT / 2] {
            for instance in &self.instances {
                instance.terminate();
            }
            let all = async {
                for instance in &mut self.instances {
                    let _ = instance.child.wait().await;
                }
            };
            if timeout(wait, all).await.is_ok() {
                break;
            }
        }
        for instance in &mut self.instances {
            let _ = instance.child.kill().await;
        }
    }

    /// This binary, without settings of the environment: the rehearsal is what it says it is.
    fn command(&self) -> Command {
        let mut command = Command::new(THIS);
        command.arg0("berth");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"BERTH_")) {
            command.env_remove(name);
        }
        crate::os::process::die_with_parent(command.as_std_mut());
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    fn arguments(&self, name: &str, version: &str) -> Vec<OsString> {
        let flag = |name: &str, path: &Path| {
            let mut flag = OsString::from(name);
            flag.push(path);
            flag
        };
        vec![
            "run".into(),
            format!("--listen={}", self.address).into(),
            flag("--run-dir=", &self.run_dir()),
            format!("--instance={name}").into(),
            flag("--probe-ca=", &self.certs.ca_file),
            "--probe-server-name=kubernetes".into(),
            "--log-format=json".into(),
            "--".into(),
            THIS.into(),
            "stand-in".into(),
            flag("--etcd-servers=unix://", &self.socket()),
            flag("--tls-cert-file=", &self.certs.cert_file),
            flag("--tls-private-key-file=", &self.certs.key_file),
            format!("--shutdown-delay-duration={}ms", self.shutdown_delay.as_millis()).into(),
            flag("--audit-log-path=", &self.dir.path().join("audit-{instance}.log")),
            "--stand-in-name={instance}".into(),
            format!("--stand-in-version={version}").into(),
        ]
    }

    async fn failed(&mut self, name: &str, what: String) -> Error {
        Error::Instance { instance: name.to_owned(), what, log: self.log(name).await }
    }
}

impl Instance {
    fn terminate(&self) {
        // No id: it was waited for already.
        if let Some(pid) = self.child.id().and_then(|id| i32::try_from(id).ok()) {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM);
        }
    }
}

async fn keep_log(from: impl AsyncRead + Unpin, log: Arc<Mutex<VecDeque<String>>>) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.len() == LOG_LINES {
            log.pop_front();
        }
        log.push_back(line);
    }
}

/// A line of a JSON log as a person reads it; other lines as they are.
fn readable(line: &str) -> String {
    let Ok(serde_json::Value::Object(mut fields)) = serde_json::from_str(line) else {
        return line.to_owned();
    };
    let mut take = |name: &str| {
        let value = fields.remove(name).unwrap_or_default();
        value.as_str().map_or_else(|| value.to_string(), str::to_owned)
    };
    let (level, message) = (take("level"), take("message"));
    fields.retain(|name, _| name != "timestamp" && name != "target");
    let rest: String = fields.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    format!("{level} {message}{rest}")
}

fn last_line(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().lines().last().unwrap_or("no reason given").to_owned()
}

/// A random address that nobody uses: never in 127.0.0.0/16, the last octet neither 0 nor 255, and a
/// port below the range of outgoing connections.
pub fn free_address() -> io::Result<SocketAddr> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES {
        let mut random = [0; 5];
        getrandom::fill(&mut random).map_err(|e| io::Error::other(e.to_string()))?;
        let [x, y, z, high, low] = random;
        if x == 0 || z == 0 || z == 255 {
            continue;
        }
        let port = 10_000 + u16::from_be_bytes([high, low]) % 20_000;
        // The port must be free on all of 127/8: the apiservers get it too, on addresses of their own.
        match TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)) {
            Ok(_) => return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, x, y, z)), port)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_where_they_should_be() {
        for _ in 0..50 {
            let address = free_address().unwrap();
            let IpAddr::V4(ip) = address.ip() else { panic!("{address}") };
            let [a, x, _, z] = ip.octets();
            assert!(a == 127 && x != 0 && z != 0 && z != 255, "{address}");
            assert!((10_000..30_000).contains(&address.port()), "{address}");
        }
    }

    /// This test's own binary knows no `run --listen`: it ends at once and says so.
    #[tokio::test]
    async fn an_instance_that_cannot_start_is_shown_with_its_log() {
        let mut stage = Stage::new(&Plan::new(100, 2, 1, Duration::ZERO)).unwrap();
        let dir = stage.dir.path().to_owned();
        stage.start("old", "v1").unwrap();
        let error = stage.ready("old", Duration::from_secs(30)).await.unwrap_err().to_string();
        assert!(error.contains("old ended before it was ready (exit status: ") && error.contains("listen"), "{error}");
        let stopped = stage.stop("old", Duration::from_secs(30)).await;
        assert!(stopped.early && !stopped.status.unwrap().success());
        stage.close().await;
        assert!(!dir.exists());
    }

    #[test]
    fn json_logs_are_shown_as_text() {
        let line = r#"{"timestamp":"t","level":"WARN","message":"cannot bind","port":7,"target":"berth"}"#;
        assert_eq!(readable(line), "WARN cannot bind port=7");
        assert_eq!(readable("Error: unknown flag: --x"), "Error: unknown flag: --x");
        assert_eq!(readable("[1]"), "[1]");
    }

    #[test]
    fn the_last_line_says_why() {
        assert_eq!(last_line(b"a\nnot joined\n\n"), "not joined");
        assert_eq!(last_line(b""), "no reason given");
    }
}
