//! etcd under `berth bridge`, one member, with a real kube-apiserver: it is replaced, and it, the temporary one and the bridge are killed
//! at each step; the bridge hangs, and the database is defragmented and replaced. What a client numbered and was told is written is there in the end, and a clean hand-over changes no revision before it.

use crate::grant::{Cluster, on_a_node};
use crate::support::eventually;
use crate::support::process::{berth, ends, gone, output_of};
use berth_cluster::{Access, Client};
use libtest_mimic::Failed;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The node's address, which is steered.
const NODE: &str = "10.77.0.1";

/// Kills at each of the steps, if the environment does not name another number.
const ROUNDS: &str = "BERTH_TEST_ETCD_ROUNDS";

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// How long a request may take, as a handshake of client-go may.
const PATIENCE: Duration = Duration::from_secs(10);

/// At which step what gets SIGKILL.
#[derive(Debug, Clone, Copy)]
enum Kill {
    /// The node's own while it serves; it is started again at once.
    Own,
    /// The temporary one while the node's own stops.
    TemporaryEarly,
    /// The temporary one while it serves.
    Temporary,
    /// The node's own while it waits for the data, or just has it.
    OwnBack,
    /// The bridge, with the temporary one, while that serves.
    Bridge,
    /// The bridge while the node's own comes back.
    BridgeLate,
    /// Nothing, but the bridge hangs while the temporary one serves, and the node's own comes back.
    BridgeHangs,
    /// The temporary one by its defragmentation, which cannot replace the database.
    Defragmented,
    /// The node's own by the bridge, as its database was replaced under it.
    Replaced,
}

const KILLS: [Kill; 9] = [
    Kill::Own,
    Kill::TemporaryEarly,
    Kill::Temporary,
    Kill::OwnBack,
    Kill::Bridge,
    Kill::BridgeLate,
    Kill::BridgeHangs,
    Kill::Defragmented,
    Kill::Replaced,
];

pub(crate) fn replaced(apiserver: &str, etcd: &str) -> Result<(), Failed> {
    on_a_node(&["addr add 10.77.0.1/32 dev lo"], || on_the_node(apiserver, etcd))
}

fn on_the_node(apiserver: &str, etcd: &str) -> Result<(), Failed> {
    let temp = tempfile::tempdir()?;
    let flags = [format!("--advertise-address={NODE}"), "--service-cluster-ip-range=10.99.0.0/24".into()];
    let mut cluster = Cluster::start_on(temp.path(), apiserver, etcd, [127, 0, 0, 1].into(), &flags)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(cluster.ready())?;
    let access = Access { server: format!("https://{NODE}:6443"), ..Access::read(&cluster.admin)? };
    let client = Client::new(&access).map_err(|error| error.to_string())?.with_patience(PATIENCE);
    let bridge = Bridge { directory: temp.path().join("bridge") };
    let file = |name: &str| std::fs::read(temp.path().join(name));
    let (server, ca, client_certificate) =
        ("https://127.0.0.1:2379".into(), file("ca.crt")?, (file("etcd.crt")?, file("etcd.key")?));
    let access = Access { server, server_name: None, ca, client: Some(client_certificate), token: None };
    let database = Client::new(&access).map_err(|error| error.to_string())?;
    // Of all keys and revisions up to one, by etcd's gateway; revision 0 is the last.
    let hash = |revision: &Value| -> Result<_, Failed> {
        let mut answer = runtime.block_on(database.post("/v3/maintenance/hashkv", &json!({"revision": revision})))?;
        let compacted = answer["compact_revision"].take();
        Ok((answer["header"]["revision"].take(), (answer["hash"].take(), compacted)))
    };

    // The control: without a bridge.
    let writer = Writer::start("control", &client);
    writer.more();
    cluster.stop_etcd(Signal::SIGTERM);
    let away = Instant::now();
    eventually("a request that is lost", || (!writer.failed().is_empty()).then_some(()));
    cluster.start_etcd();
    let control = writer.end();
    println!("without a bridge: {} writes failed, {:.1} s", control.failed.len(), away.elapsed().as_secs_f64());

    runtime.block_on(cluster.ready())?;
    bridge.start(&cluster, temp.path());
    // A clean hand-over: nothing is lost.
    let writer = Writer::start("clean", &client);
    let (revision, before) = hash(&json!("0"))?;
    for round in 0..rounds() {
        writer.more();
        cluster.stop_etcd(Signal::SIGTERM);
        bridge.reaches("temporary");
        writer.more();
        cluster.start_etcd();
        bridge.reaches("own");
        // Later, kube-apiserver compacts it.
        if round == 0 {
            let (_, after) = hash(&revision)?;
            if after != before {
                return Err(format!(
                    "up to revision {revision} the hash of etcd's keys was {before:?}, and is {after:?}"
                )
                .into());
            }
        }
    }
    writer.more();
    let clean = writer.end();
    println!(
        "replaced: {} writes, {} failed, longest {:?}; pauses of {} ms",
        clean.written.len(),
        clean.failed.len(),
        clean.longest,
        bridge.status()["etcd"]["pauses"]
    );
    if !clean.failed.is_empty() {
        return Err(format!("lost: {:?}\n{}", clean.failed, bridge.logs()).into());
    }

    // What is steered reaches the temporary one, while that serves.
    let defragment = || drop(runtime.block_on(database.post("/v3/maintenance/defragment", &json!({}))));
    let writer = Writer::start("kills", &client);
    for kill in (0..rounds()).flat_map(|_| KILLS) {
        writer.more();
        bridge.kill_at(kill, &mut cluster, temp.path(), &defragment);
        println!("{kill:?}: {} written, {} failed", writer.written(), writer.failed().len());
    }
    writer.more();
    let kills = writer.end();
    ends(&mut bridge.command("end"), 0, &[]);

    let listed = runtime.block_on(client.get(MAPS))?;
    let there: BTreeSet<_> =
        listed["items"].as_array().into_iter().flatten().filter_map(|map| map["metadata"]["name"].as_str()).collect();
    for written in [control, clean, kills].iter().flat_map(|record| &record.written) {
        if !there.contains(written.as_str()) {
            return Err(format!("{written} was written, and is not there").into());
        }
    }
    println!("all that was written is there: {} of {}", there.len(), there.len());
    Ok(())
}

fn rounds() -> usize {
    std::env::var(ROUNDS).ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1)
}

struct Bridge {
    directory: PathBuf,
}

impl Drop for Bridge {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}\n{}", self.status(), self.logs());
        }
        output_of(self.command("end").arg("--now"));
    }
}

impl Bridge {
    fn command(&self, part: &str) -> Command {
        let mut command = berth(["bridge", part, "--state-dir"]);
        command.arg(&self.directory);
        command
    }

    /// As soon as the kube-apiserver is ready: after an etcd that was killed it dials in growing steps.
    fn start(&self, cluster: &Cluster, certificates: &Path) {
        let mut start = self.command("start");
        start.args(["--settle=1s", "--command", &cluster.command, "--kubeconfig"]).arg(&cluster.admin);
        start.arg("--probe-ca").arg(certificates.join("ca.crt"));
        let mut refused = String::new();
        eventually("a bridge", || {
            let (code, _, err) = output_of(&mut start);
            (code == Some(0)).then_some(()).or_else(|| {
                (err != refused).then(|| println!("{err}"));
                refused = err;
                None
            })
        });
    }

    fn status(&self) -> Value {
        let (_, out, _) = output_of(self.command("status").arg("--json"));
        serde_json::from_str(&out).unwrap_or_default()
    }

    fn logs(&self) -> String {
        let read = |name: &str| std::fs::read_to_string(self.directory.join(name)).unwrap_or_default();
        ["bridge.log", "etcd.log"].map(read).join("\n")
    }

    fn reaches(&self, step: &str) {
        eventually(step, || (self.status()["etcd"]["step"] == step).then_some(()));
    }

    fn kill(&self, pid: &Value) {
        let pid = pid.as_i64().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            gone(pid.unsigned_abs());
        }
    }

    fn kill_at(&self, kill: Kill, cluster: &mut Cluster, certificates: &Path, defragment: &dyn Fn()) {
        let data = certificates.join("etcd");
        match kill {
            Kill::Replaced => {
                replace_database(&data, cluster);
                cluster.etcd.take().unwrap().ended();
                self.reaches("temporary");
            }
            Kill::Own => cluster.stop_etcd(Signal::SIGKILL),
            Kill::TemporaryEarly => {
                cluster.stop_etcd(Signal::SIGTERM);
                let pid = eventually("the temporary etcd", || self.status()["etcd"]["pid"].as_i64());
                self.kill(&pid.into());
                self.reaches("temporary");
            }
            _ => {
                cluster.stop_etcd(Signal::SIGTERM);
                self.reaches("temporary");
            }
        }
        match kill {
            Kill::Own | Kill::TemporaryEarly => cluster.start_etcd(),
            Kill::Temporary => {
                self.kill(&self.status()["etcd"]["pid"]);
                self.reaches("temporary");
                cluster.start_etcd();
            }
            Kill::OwnBack => {
                cluster.start_etcd();
                eventually("its return", || (self.status()["etcd"]["step"] != "temporary").then_some(()));
                cluster.stop_etcd(Signal::SIGKILL);
                cluster.start_etcd();
            }
            Kill::Bridge => {
                self.kill(&self.status()["pid"]);
                cluster.start_etcd();
                self.start(cluster, certificates);
            }
            Kill::BridgeHangs => {
                let status = self.status();
                signal(&status["pid"], Signal::SIGSTOP);
                cluster.start_etcd();
                eventually("the end of the temporary etcd", || has_ended(&status["etcd"]["pid"]).then_some(()));
                signal(&status["pid"], Signal::SIGCONT);
            }
            Kill::Defragmented => {
                let inode = || std::fs::metadata(data.join("member/snap/db")).unwrap().ino();
                let before = inode();
                defragment();
                eventually("its end by that", || self.logs().contains("failed to rename tmp database").then_some(()));
                self.reaches("temporary");
                cluster.start_etcd();
                defragment();
                assert_eq!(inode(), before, "the database is the same file");
            }
            Kill::Replaced => {
                let trouble = self.status()["etcd"]["trouble"].to_string();
                assert!(trouble.contains("a copy of that is") && trouble.contains("it was ended"), "{trouble}");
                cluster.start_etcd();
            }
            Kill::BridgeLate => {
                cluster.start_etcd();
                eventually("its return", || (self.status()["etcd"]["step"] != "temporary").then_some(()));
                self.kill(&self.status()["pid"]);
                self.start(cluster, certificates);
            }
        }
        self.reaches("own");
    }
}

/// Another file takes the database's place while the node's own serves, as after a defragmentation of another process. No write is half
/// done in the copy.
fn replace_database(data: &Path, cluster: &Cluster) {
    let pid = cluster.etcd.as_ref().unwrap().child.id();
    signal(&pid.into(), Signal::SIGSTOP);
    std::thread::sleep(Duration::from_millis(100));
    let [database, copy] = ["db", "db.copy"].map(|name| data.join("member/snap").join(name));
    std::fs::copy(&database, &copy).unwrap();
    std::fs::rename(&copy, &database).unwrap();
    signal(&pid.into(), Signal::SIGCONT);
}

fn signal(pid: &Value, signal: Signal) {
    let pid = i32::try_from(pid.as_i64().unwrap()).unwrap();
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// Whether a process runs no more; its parent may not know yet.
fn has_ended(pid: &Value) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('Z'))
}

/// What came of a writer's requests.
#[derive(Default, Clone)]
struct Record {
    written: Vec<String>,
    failed: Vec<String>,
    longest: Duration,
}

/// A client that numbers what it writes, each on a new connection.
struct Writer {
    record: Arc<Mutex<Record>>,
    ends: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Writer {
    fn start(name: &'static str, client: &Client) -> Self {
        let (record, ends) = (Arc::<Mutex<Record>>::default(), Arc::<AtomicBool>::default());
        let (to, over, client) = (record.clone(), ends.clone(), client.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            for number in 0.. {
                if over.load(Relaxed) {
                    return;
                }
                let map = format!("{name}-{number}");
                let began = Instant::now();
                let answer = runtime.block_on(client.post(MAPS, &json!({"metadata": {"name": map}})));
                let mut record = to.lock().unwrap();
                record.longest = record.longest.max(began.elapsed());
                match answer {
                    Ok(_) => record.written.push(map),
                    Err(error) => record.failed.push(format!("{map} after {:?}: {error}", began.elapsed())),
                }
            }
        });
        Self { record, ends, thread }
    }

    fn written(&self) -> usize {
        self.record.lock().unwrap().written.len()
    }

    fn failed(&self) -> Vec<String> {
        self.record.lock().unwrap().failed.clone()
    }

    /// Waits until it has written some more.
    fn more(&self) {
        let more = self.written() + 10;
        eventually("10 more writes", || (self.written() >= more).then_some(()));
    }

    fn end(self) -> Record {
        self.ends.store(true, Relaxed);
        self.thread.join().unwrap();
        Arc::into_inner(self.record).and_then(|record| record.into_inner().ok()).unwrap_or_default()
    }
}
