//! Every kill of a bridge.

use super::etcd::{ETCD, etcd_of};
use super::node::{IPV4, Kind, Node, on_a_node_of, on_any_node_of, start_in_background, to_args};
use crate::kills::{Scene, every_kill};
use crate::support::process::{Running, expect_status, output_of};
use crate::support::{eventually, print_skipped};
use berth_testing::create_ca;
use berth_testing::etcd::Members;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A bridge on a node of an etcd with three members.
#[test]
fn bridge() {
    on_any_node_of(ETCD, |node| {
        let etcd = Etcd::Members(etcd_of(node));
        every_kill(1, 700, || Bridged::of(node, &etcd));
    });
}

/// A bridge with a real etcd that is the only member, which COMMAND restarts, too. `ETCD` is the
/// path of the program, as `scripts/kube-apiserver.sh` prints it.
#[test]
#[ignore = "takes minutes: run by .ci/run kills"]
fn bridge_with_a_temporary_etcd() {
    let Some(program) = std::env::var_os("ETCD") else {
        return print_skipped("ETCD names no program");
    };
    on_a_node_of(ALONE, move |node| {
        let etcd = Etcd::Alone(Only::start(node, Path::new(&program)));
        let mut bridge = Running::start(&mut Bridged::of(node, &etcd).command());
        bridge.ends(0);
        let log = fs::read_to_string(node.path("bridge/bridge.log")).unwrap();
        assert!(
            log.contains("etcd step=temporary"),
            "the temporary etcd has not served: {log}"
        );
        every_kill(1, 800, || Bridged::of(node, &etcd));
    });
}

/// A node with the only etcd of its cluster.
const ALONE: Kind = Kind {
    flags: "--bind-address=0.0.0.0 --etcd-servers=https://127.0.0.1:2379 --etcd-servers-overrides=/events#unix://DIR/store \
            --etcd-cafile=DIR/etcd-ca.crt",
    ..IPV4
};

/// Time between two writes of a client.
const PACE: Duration = Duration::from_millis(100);

/// Logs of a failed bridge, which the next bridge keeps.
const LOGS: [&str; 3] = [
    "bridge.log.failed",
    "kube-apiserver.log.failed",
    "etcd.log.failed",
];

struct Bridged<'a> {
    node: &'a Node,
    etcd: &'a Etcd,
    /// Pids of the node's kube-apiserver and etcd, before COMMAND.
    before: [i32; 2],
}

enum Etcd {
    Members(Arc<Mutex<Members>>),
    Alone(Only),
}

impl<'a> Bridged<'a> {
    fn of(node: &'a Node, etcd: &'a Etcd) -> Self {
        // A failed point may have left a bridge.
        node.kill_bridge();
        Self {
            node,
            etcd,
            before: [node.own_pid(), etcd.pid()],
        }
    }

    /// True if no process holds the bridge's lock.
    fn is_off(&self) -> bool {
        let lock = fs::File::open(self.node.path("bridge/bridge.lock"));
        lock.is_err() || lock.is_ok_and(|lock| lock.try_lock().is_ok())
    }
}

impl Scene for Bridged<'_> {
    const MISSED: usize = 25;

    fn root(&self) -> PathBuf {
        self.node.dir.path().to_owned()
    }

    /// Pid files are in memory, too: COMMAND's `mv` writes them, and the test reads them after a
    /// power loss.
    fn memory(&self) -> Vec<PathBuf> {
        ["bridge", "pid", "pid.new", "etcd.pid", "etcd.pid.new"]
            .map(|name| self.node.path(name))
            .into()
    }

    fn directories(&self) -> Vec<PathBuf> {
        vec![self.node.path("bridge")]
    }

    fn command(&self) -> Command {
        match self.etcd {
            Etcd::Members(members) => {
                // Between two bridges, the leadership returns to the node's member.
                members.lock().unwrap().leader = 1;
                self.node.fast_bridge("", &to_args(&self.node.restart()))
            }
            Etcd::Alone(only) => self
                .node
                .bridge("", &["sh", &only.restart.display().to_string()]),
        }
    }

    fn settles(&self) {
        let command = self.node.path("restart").display().to_string();
        let runs = || crate::support::process::find_processes(&command).into_iter();
        // COMMAND runs on without the bridge, and the bridge without the command that started it:
        // such a bridge waits for the operator, who waits for COMMAND.
        eventually("the end of COMMAND and of the bridge", || {
            let (_, status, _) = output_of(&mut self.node.part("status"));
            let is_left = status.contains("the process that ran COMMAND went away");
            if is_left && runs().all(|line| line.contains("berth bridge ")) {
                expect_status(&mut self.node.part("end"), 0, &[]);
            }
            (self.is_off() && runs().next().is_none()).then_some(())
        });
    }

    fn is_whole(&mut self) {
        self.settles();
        self.node.nothing_runs();
        self.node.answers();
        if let Etcd::Alone(only) = self.etcd {
            only.is_whole();
        }
    }

    fn is_done(&mut self) {
        let now = [self.node.own_pid(), self.etcd.pid()];
        assert_ne!(now[0], self.before[0], "COMMAND has not run");
        assert_eq!(
            kill(Pid::from_raw(now[0]), None),
            Ok(()),
            "the pid file names a process that has ended"
        );
        assert!(
            now[1] != self.before[1] || now[1] == 0,
            "COMMAND has not restarted etcd"
        );
    }

    fn reboots(&mut self) {
        let was = [self.node.own_pid(), self.etcd.pid()];
        let _ = kill(Pid::from_raw(self.node.own_pid()), Signal::SIGKILL);
        self.node.nothing_runs();
        let _ = fs::remove_dir_all(self.node.path("bridge"));
        eventually("the end of the node's own", || {
            std::net::TcpListener::bind("0.0.0.0:6443").ok().map(drop)
        });
        if let Etcd::Alone(only) = self.etcd {
            only.reboots();
        }
        self.node.start_own();
        // If COMMAND has run, the bridge may have been close to its end.
        if was[0] == self.before[0] {
            self.before = [self.node.own_pid(), self.etcd.pid()];
        }
    }

    fn diagnosis(&self) -> String {
        let (_, out, log) = output_of(&mut self.node.part("status"));
        let directory = self.node.path("bridge").display().to_string();
        let names_logs = format!("the last bridge in {directory} ");
        let logs = LOGS.map(|name| format!("{directory}/{name}\n"));
        let logs = logs.into_iter().filter(|_| log.contains(&names_logs));
        out + &log + &logs.collect::<String>()
    }
}

impl Etcd {
    /// Returns the pid of the node's etcd if it is a process.
    fn pid(&self) -> i32 {
        match self {
            Self::Members(_) => 0,
            Self::Alone(only) => only.pid(),
        }
    }
}

/// A real etcd with one member, and a client that writes to one key all the time, each time another
/// number.
struct Only {
    directory: PathBuf,
    /// Shell script of COMMAND.
    restart: PathBuf,
    start: String,
    writes: Arc<Mutex<Writes>>,
    stop: Arc<AtomicBool>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Writes {
    acknowledged: u64,
    /// Revision and number of the last acknowledged write.
    revision: u64,
    last: u64,
    /// Numbers that the key may have: of the last acknowledged write, and of writes without an
    /// answer, which etcd may carry out at any time.
    possible: BTreeSet<u64>,
    /// An error: two writes got the same revision, or the later write a smaller one, or a write
    /// found another number than a possible one.
    lost: Option<String>,
}

impl Only {
    fn start(node: &Node, program: &Path) -> Self {
        let directory = node.dir.path().to_owned();
        let ca = create_ca();
        let (certificate, key) = berth_testing::issue_certificate(&ca, &["127.0.0.1"]);
        for (file, text) in [
            ("etcd-ca.crt", ca.pem()),
            ("etcd.crt", certificate),
            ("etcd.key", key),
        ] {
            fs::write(node.path(file), text).unwrap();
        }
        std::os::unix::fs::symlink(program, node.path("etcd")).unwrap();
        let at = directory.display();
        let command = format!(
            "{at}/etcd --name=cp-1 --data-dir={at}/etcd-data --listen-client-urls=https://127.0.0.1:2379 \
             --advertise-client-urls=https://127.0.0.1:2379 --listen-peer-urls=http://127.0.0.1:2380 \
             --initial-advertise-peer-urls=http://127.0.0.1:2380 --initial-cluster=cp-1=http://127.0.0.1:2380 \
             --listen-metrics-urls=http://127.0.0.1:2381 --cert-file={at}/etcd.crt --key-file={at}/etcd.key --snapshot-count=500"
        );
        let start =
            start_in_background(&command, &node.path("etcd-own.log"), &node.path("etcd.pid"));
        // COMMAND waits until the temporary etcd serves, if the bridge has one.
        let restart = format!(
            r#"{stop}
looks=0
until [ $looks -ge 400 ] || grep -qs 'ready to serve client requests' {at}/bridge/etcd.log || flock -n {at}/bridge/bridge.lock true; do
    looks=$((looks + 1))
    sleep 0.05
done
{start}
. {at}/restart
"#,
            stop = node.stop().replace(
                &node.path("pid").display().to_string(),
                &format!("{at}/etcd.pid")
            ),
        );
        let file = node.path("restart-etcd");
        fs::write(&file, restart).unwrap();
        let (writes, stop) = (
            Arc::<Mutex<Writes>>::default(),
            Arc::<AtomicBool>::default(),
        );
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        let tls = Arc::new(tls.with_root_certificates(roots).with_no_client_auth());
        let (known, stopped) = (writes.clone(), stop.clone());
        let writer = std::thread::spawn(move || {
            for number in 1.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let answer = put_key(tls.clone(), number);
                known.lock().unwrap().note(number, answer);
                std::thread::sleep(PACE);
            }
        });
        let only = Self {
            directory,
            restart: file,
            start,
            writes,
            stop,
            writer: Some(writer),
        };
        only.run(&only.start);
        only.answers();
        only
    }

    fn run(&self, script: &str) {
        assert!(
            Command::new("sh")
                .args(["-c", script])
                .status()
                .unwrap()
                .success()
        );
    }

    fn pid(&self) -> i32 {
        fs::read_to_string(self.directory.join("etcd.pid"))
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    }

    /// Waits until two more writes are acknowledged. The first of them may have begun before.
    fn answers(&self) {
        let before = self.writes.lock().unwrap().acknowledged;
        eventually("a write", || {
            (self.writes.lock().unwrap().acknowledged >= before + 2).then_some(())
        });
    }

    /// Checks that only the node's etcd runs, with the file at the database's path, that no
    /// write is lost, and that no copy is left.
    fn is_whole(&self) {
        self.answers();
        let data = self.directory.join("etcd-data");
        let argument = format!("--data-dir={}", data.display());
        eventually("the end of the temporary etcd", || {
            (crate::support::process::find_processes(&argument).len() == 1).then_some(())
        });
        let database = data.join("member/snap/db");
        let opened = fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .flatten();
        let opened: Vec<_> = opened
            .filter_map(|file| fs::read_link(file.path()).ok())
            .collect();
        assert!(
            opened.contains(&database),
            "etcd serves from another database: {opened:?}"
        );
        let names = fs::read_dir(&self.directory)
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name());
        let copies: Vec<_> = names
            .filter(|name| name.to_string_lossy().contains("-berth-"))
            .collect();
        assert!(copies.is_empty(), "{copies:?}");
        let lost = self.writes.lock().unwrap().lost.take();
        assert!(lost.is_none(), "{lost:?}");
    }

    fn reboots(&self) {
        let _ = kill(Pid::from_raw(self.pid()), Signal::SIGKILL);
        eventually("the end of etcd", || {
            std::net::TcpListener::bind("127.0.0.1:2379").ok().map(drop)
        });
        self.run(&self.start);
    }
}

impl Drop for Only {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.writer.take().unwrap().join();
        let _ = kill(Pid::from_raw(self.pid()), Signal::SIGKILL);
    }
}

impl Writes {
    /// Notes a write of a number, and the answer: the revision, and the number that the key had
    /// before. `None` if no answer came.
    fn note(&mut self, number: u64, answer: Option<(u64, Option<u64>)>) {
        let Some((revision, before)) = answer else {
            self.possible.insert(number);
            return;
        };
        if revision <= self.revision {
            self.lost = Some(format!(
                "a write has revision {revision}, and another one had {} before",
                self.revision
            ));
        }
        let is_possible = match before {
            Some(before) => self.possible.contains(&before),
            None => self.acknowledged == 0,
        };
        if !is_possible {
            self.lost = Some(format!(
                "the write of {number} found {before:?}, and not one of {:?}",
                self.possible
            ));
        }
        // The last acknowledged write, and the write that was found, are replaced.
        let acknowledged = std::mem::replace(&mut self.last, number);
        self.possible
            .retain(|it| *it != acknowledged && Some(*it) != before);
        self.possible.insert(number);
        (self.acknowledged, self.revision) = (self.acknowledged + 1, revision);
    }
}

#[test]
fn a_lost_write_is_noticed_behind_a_later_one() {
    let mut writes = Writes::default();
    writes.note(1, Some((2, None)));
    writes.note(2, None);
    writes.note(3, None);
    // The write of 2 was carried out, and the write of 3 is carried out late.
    writes.note(4, Some((4, Some(2))));
    writes.note(5, Some((6, Some(3))));
    writes.note(6, Some((7, Some(5))));
    assert_eq!(writes.lost, None);
    // The write of 6 is lost: by the next revision alone, nobody can tell.
    writes.note(7, Some((8, Some(5))));
    assert!(writes.lost.is_some());
}

/// Puts a number into a key, as a client on the node, and returns the key's revision and the number
/// before. `None` unless etcd acknowledges the put.
fn put_key(tls: Arc<rustls::ClientConfig>, number: u64) -> Option<(u64, Option<u64>)> {
    let tls = rustls::ClientConnection::new(tls, "127.0.0.1".try_into().unwrap()).unwrap();
    let tcp = std::net::TcpStream::connect("127.0.0.1:2379").ok()?;
    tcp.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut stream = rustls::StreamOwned::new(tls, tcp);
    // Eight digits are the base64 form of six bytes.
    let body = format!(r#"{{"key":"YQ==","value":"{number:08}","prev_kv":true}}"#);
    let length = body.len();
    let request = format!(
        "POST /v3/kv/put HTTP/1.1\r\nHost: etcd\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = Vec::new();
    // An end without close_notify is an error after the answer.
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let body = answer
        .strip_prefix("HTTP/1.1 200 OK")?
        .split_once("\r\n\r\n")?
        .1
        .to_owned();
    let answer: Value = serde_json::from_str(&body).ok()?;
    let number = |value: &Value| value.as_str()?.parse().ok();
    Some((
        number(&answer["header"]["revision"])?,
        number(&answer["prev_kv"]["value"]),
    ))
}
