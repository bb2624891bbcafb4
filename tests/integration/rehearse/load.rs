//! Tests of the rehearsal's own judgement. The load, the simulated apiservers and the judges are
//! real. Between clients and instances is a small relay in this process, which loses nothing or
//! loses connections in one of several ways. Some instances have a store that loses events.

use crate::support::in_memory;
use berth_rehearse::config::{LoadPlan, Plan};
use berth_rehearse::judges::judge;
use berth_rehearse::load::{Instances, Joined, Load, Target};
use berth_rehearse::record::{
    Record,
    data::{MarkKind, Ran, Value, Verdict},
    event::{Answer, Attempt, ConnectionKind, Event, EventKind, Failure, Signed, StreamKind},
    log::{Recorder, attempts_at_tested_address},
    verdict::{Loss, NEW, OLD},
};
use berth_rehearse::testbed::{
    address, certs,
    store::{self, Store},
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

/// Time limit of a step of these tests, far longer than any step takes.
pub(crate) const BOUND: Duration = Duration::from_secs(120);

/// A time longer than the lag that a judge allows between two clients that see the same event.
const LAG: Duration = Duration::from_millis(100);

/// Numbers of clients with a kept connection, and of watches.
const CLIENTS: u32 = 4;
const WATCHES: u32 = 4;

/// Number of long-lived streams: kept connections, watches, and those of six informers.
const STREAMS: u32 = CLIENTS + WATCHES + 6;

/// Behaviour of a relay.
#[derive(Clone, Copy, PartialEq)]
enum Relay {
    /// Nothing is lost.
    Good,
    /// All connections are cut once while the old instance serves.
    Cuts,
    /// The relay ends connections only in the direction of the instance, and the instance answers
    /// with a close_notify.
    HalfCloses,
    /// Four faults in turn, each for a moment: the relay closes new connections, sends bytes before
    /// the instance can, relays to a server with a certificate that no client trusts, and stops
    /// listening.
    FailsNew,
    /// All connections are cut, and the relay stops listening for a moment.
    CutsAndRefuses,
}

/// Course of an upgrade.
struct Plot {
    relay: Relay,
    /// The old simulated apiserver does not get the tenth write, gets the eleventh twice, and does
    /// not get the removal of the ninth object.
    misreports: bool,
    load: LoadPlan,
    /// Number of changes that instances keep for watches.
    history: usize,
}

impl Plot {
    fn relay(relay: Relay) -> Self {
        // The load is small, because the tests only ask whether a loss is seen, and run side by
        // side. `catch_up` is short, because a client that missed an event waits for this time at
        // the end.
        let catch_up = Duration::from_secs(2);
        let load = LoadPlan {
            rate: 60,
            clients: CLIENTS,
            watches: WATCHES,
            seed: 7,
            catch_up,
            ..LoadPlan::default()
        };
        Self {
            relay,
            misreports: false,
            load,
            history: 10_000,
        }
    }
}

struct Proxy {
    backend: Mutex<SocketAddr>,
    /// Counts connections without a byte from the backend: each such connection holds a clone.
    young: Arc<()>,
    /// Counts connections to each backend: each connection holds a clone.
    on: Mutex<BTreeMap<SocketAddr, Arc<()>>>,
    closes: AtomicBool,
    garbles: AtomicBool,
    half_close: Notify,
    cut: Notify,
}

impl Proxy {
    async fn run(self: Arc<Self>, listener: TcpListener) {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            if self.closes.load(SeqCst) {
                continue;
            }
            let proxy = Arc::clone(&self);
            tokio::spawn(async move {
                let mut client = client;
                tokio::select! {
                    () = proxy.relay(&mut client) => {}
                    // Bytes that wait to be sent are lost, too.
                    () = proxy.cut.notified() => socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap(),
                }
            });
        }
    }

    fn young(&self) -> usize {
        Arc::strong_count(&self.young) - 1
    }

    fn on(&self, backend: SocketAddr) -> usize {
        Arc::strong_count(&self.on.lock().unwrap()[&backend]) - 1
    }

    async fn relay(&self, client: &mut TcpStream) {
        let young = self.young.clone();
        let backend = *self.backend.lock().unwrap();
        let _on = self.on.lock().unwrap().entry(backend).or_default().clone();
        if self.garbles.load(SeqCst) {
            let _ = client.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n").await;
        }
        let mut first = [0];
        let answered = async {
            let mut server = TcpStream::connect(backend).await?;
            let (mut from, mut to) = server.split();
            let mut client_hello = vec![0; 16 * 1024];
            loop {
                tokio::select! {
                    n = client.read(&mut client_hello) => match n? {
                        0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                        n => to.write_all(&client_hello[..n]).await?,
                    },
                    n = from.read(&mut first) => match n? {
                        0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                        _ => break,
                    },
                }
            }
            Ok::<_, std::io::Error>(server)
        };
        let answered = answered.await;
        drop(young);
        let Ok(mut server) = answered else { return };
        let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
            (client.split(), server.split());
        let up = async {
            tokio::select! {
                _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
                () = self.half_close.notified() => {}
            }
            let _ = to_server.shutdown().await;
        };
        let down = async {
            if to_client.write_all(&first).await.is_ok() {
                let _ = tokio::io::copy(&mut from_server, &mut to_client).await;
            }
            let _ = to_client.shutdown().await;
        };
        tokio::join!(up, down);
    }
}

/// Runs between a simulated apiserver and its store: passes every change, or misreports three
/// changes.
async fn run_middle(listener: UnixListener, store: std::path::PathBuf, misreports: bool) {
    let mut lines = JoinSet::new();
    loop {
        let (simulated, _) = listener.accept().await.unwrap();
        let store = UnixStream::connect(&store).await.unwrap();
        lines.spawn(async move {
            let (mut from_apiserver, mut to_apiserver) = simulated.into_split();
            let (from_store, mut to_store) = store.into_split();
            let calls = async {
                let _ = tokio::io::copy(&mut from_apiserver, &mut to_store).await;
                let _ = to_store.shutdown().await;
            };
            let replies = async {
                let mut replies = BufReader::new(from_store).lines();
                while let Ok(Some(line)) = replies.next_line().await {
                    let of = |kind: &str, name: &str| line.contains(kind) && line.contains(name);
                    let lost = of("\"ADDED\"", "-write-10\"") || of("\"DELETED\"", "-write-9\"");
                    let times = match misreports {
                        true if lost => 0,
                        true if of("\"ADDED\"", "-write-11\"") => 2,
                        _ => 1,
                    };
                    for _ in 0..times {
                        let _ = to_apiserver.write_all(format!("{line}\n").as_bytes()).await;
                    }
                }
            };
            tokio::join!(calls, replies);
        });
    }
}

struct Scene {
    dir: TempDir,
    certs: certs::Certs,
    recorder: Arc<Recorder>,
    joined: watch::Sender<Instances>,
    history: usize,
}

impl Scene {
    /// Returns the longest delay of clients behind their timetable.
    fn behind(&self) -> Duration {
        let behind = |event: &Event| {
            if let EventKind::Behind(behind) = event.what {
                Some(behind)
            } else {
                None
            }
        };
        self.recorder
            .read(|log| log.iter().filter_map(behind).max().unwrap_or_default())
    }

    async fn start(&self, name: &str) -> (Child, SocketAddr) {
        self.recorder.add(name, EventKind::Player(true));
        let store = if name == OLD { "middle" } else { "store" };
        let history = format!("--default-watch-cache-size={}", self.history);
        let (child, address) =
            start_simulated(name, &self.dir.path().join(store), &self.certs, &[&history]);
        wait_until(|| {
            self.recorder
                .last_mark_time(name, MarkKind::Ready)
                .is_some()
        })
        .await;
        let joined = Joined::at_current_time(name, address);
        self.joined.send_modify(|instances| instances.push(joined));
        (child, address)
    }

    /// True if a client saw a failure of the kind.
    fn failed(&self, is_of_kind: impl Fn(&Failure) -> bool) -> bool {
        let failed =
            |a: &Attempt| matches!(&a.answer, Answer::Failed(failure) if is_of_kind(failure));
        self.recorder
            .read(|log| attempts_at_tested_address(log).any(failed))
    }

    /// True if a client's connection was refused.
    fn refused(&self, client: &str) -> bool {
        let refused = |a: &Attempt| a.answer == Answer::Failed(Failure::Refused);
        let its_own = |a: &&Attempt| {
            a.stream
                .strip_prefix(client)
                .is_some_and(|rest| rest.starts_with('-'))
        };
        self.recorder
            .read(|log| attempts_at_tested_address(log).filter(its_own).any(refused))
    }

    /// Returns how many attempts of a client an instance answered.
    fn answers(&self, client: &str, name: &str) -> usize {
        let its_own = |a: &&Attempt| {
            a.stream
                .strip_prefix(client)
                .is_some_and(|rest| rest.starts_with('-'))
        };
        let by = |a: &&Attempt| matches!(&a.answer, Answer::Good { instance } if instance == name);
        self.recorder.read(|log| {
            attempts_at_tested_address(log)
                .filter(its_own)
                .filter(by)
                .count()
        })
    }

    /// True if each client with a kept connection has it. A client that watches has listed before.
    fn all_open(&self) -> bool {
        let kept = (0..CLIENTS).all(|index| self.answers(&format!("kept-{index}"), OLD) > 0);
        kept && follower_names().all(|follower| self.answers(&follower, OLD) > 1)
    }

    /// Returns how many new connections an instance has served.
    fn served(&self, name: &str) -> usize {
        let by = |a: &&Attempt| {
            a.kind == ConnectionKind::New
                && matches!(&a.answer, Answer::Good { instance } if instance == name)
        };
        self.recorder
            .read(|log| attempts_at_tested_address(log).filter(by).count())
    }
}

pub(crate) fn start_simulated(
    name: &str,
    store: &Path,
    certs: &certs::Certs,
    flags: &[&str],
) -> (Child, SocketAddr) {
    let address = address::free_address().unwrap();
    certs.issue_certificate(name).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_berth"))
        .arg("stand-in")
        .arg(format!("--bind-address={}", address.ip()))
        .arg(format!("--secure-port={}", address.port()))
        .arg(format!("--etcd-servers=unix://{}", store.display()))
        .arg(format!(
            "--tls-cert-file={}",
            certs.cert_file(name).display()
        ))
        .arg(format!(
            "--tls-private-key-file={}",
            certs.key_file(name).display()
        ))
        .arg(format!("--stand-in-name={name}"))
        .args(flags)
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    (child, address)
}

/// Returns the names of clients that watch.
fn follower_names() -> impl Iterator<Item = String> {
    let named = |kind: &'static str, count| (0..count).map(move |index| format!("{kind}-{index}"));
    named("watch", WATCHES)
        .chain(named("informer", 2))
        .chain(named("quiet", 4))
}

/// Waits for an event in another process.
pub(crate) async fn wait_until(mut condition: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + BOUND;
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "it does not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn stop_child(child: Child) {
    terminate_child(&child);
    expect_end(child).await;
}

pub(crate) fn terminate_child(child: &Child) {
    kill(
        Pid::from_raw(child.id().unwrap().try_into().unwrap()),
        Signal::SIGTERM,
    )
    .unwrap();
}

pub(crate) async fn expect_end(mut child: Child) {
    assert!(
        tokio::time::timeout(BOUND, child.wait())
            .await
            .unwrap()
            .unwrap()
            .success()
    );
}

/// Runs an upgrade and records it.
async fn record_upgrade(plot: Plot) -> (Record, Plan) {
    let address = address::free_address().unwrap();
    let dir = in_memory();
    let certs = certs::make_certs(dir.path(), &[address.ip()]).unwrap();
    let scene = Scene {
        dir,
        certs,
        recorder: Arc::default(),
        joined: watch::Sender::default(),
        history: plot.history,
    };
    let mut background = JoinSet::new();
    let bind = |name: &str| UnixListener::bind(scene.dir.path().join(name)).unwrap();
    let store = Arc::new(Store::default());
    background.spawn(store::serve(
        bind("store"),
        Arc::clone(&store),
        Arc::clone(&scene.recorder),
    ));
    background.spawn(run_middle(
        bind("middle"),
        scene.dir.path().join("store"),
        plot.misreports,
    ));

    let (old, backend) = scene.start(OLD).await;
    let proxy = Arc::new(Proxy {
        backend: Mutex::new(backend),
        young: Arc::default(),
        on: Mutex::default(),
        closes: AtomicBool::new(false),
        garbles: AtomicBool::new(false),
        half_close: Notify::new(),
        cut: Notify::new(),
    });
    let mut listens = async || {
        background.spawn(Arc::clone(&proxy).run(TcpListener::bind(address).await.unwrap()))
    };
    let listening = listens().await;

    let plan = Plan {
        load: plot.load,
        ..Plan::default()
    };
    let target = Target::new(address, &scene.certs).unwrap();
    let load = Load::start(
        &plan.load,
        &target,
        &scene.joined.subscribe(),
        &scene.recorder,
    )
    .await
    .unwrap();
    scene.recorder.add("", EventKind::LoadBegan);
    let written = || {
        let number = |name: &str| name.rsplit_once("-write-")?.1.parse::<u64>().ok();
        let objects = store.list(Some("default")).1;
        objects
            .iter()
            .filter_map(|o| number(o["metadata"]["name"].as_str().unwrap()))
            .max()
            .unwrap_or(0)
    };
    wait_until(|| scene.all_open() && scene.served(OLD) > 20).await;
    // Wait until all clients have seen a dozen writes. A store that misreports writes does so
    // before the thirteenth write.
    let open = written();
    wait_until(|| written() >= 13.max(open + 12)).await;
    match plot.relay {
        Relay::Good => {}
        Relay::Cuts => proxy.cut.notify_waiters(),
        Relay::HalfCloses => proxy.half_close.notify_waiters(),
        Relay::FailsNew => {
            let ended: fn(&Failure) -> bool =
                |failure| matches!(failure, Failure::Closed | Failure::Reset);
            let garbled: fn(&Failure) -> bool = |failure| matches!(failure, Failure::Tls(_));
            for (flag, seen) in [(&proxy.closes, ended), (&proxy.garbles, garbled)] {
                flag.store(true, SeqCst);
                wait_until(|| scene.failed(seen)).await;
                flag.store(false, SeqCst);
            }
            let other = in_memory();
            let certs = certs::make_certs(other.path(), &[address.ip()]).unwrap();
            let (stranger, its) =
                start_simulated("stranger", &scene.dir.path().join("store"), &certs, &[]);
            wait_until(|| {
                scene
                    .recorder
                    .last_mark_time("stranger", MarkKind::Ready)
                    .is_some()
            })
            .await;
            *proxy.backend.lock().unwrap() = its;
            wait_until(|| scene.failed(|failure| matches!(failure, Failure::X509(_)))).await;
            *proxy.backend.lock().unwrap() = backend;
            // The test stops the stranger only when no client is connected to it, so that no client
            // sees that end.
            wait_until(|| proxy.on(its) == 0).await;
            stop_child(stranger).await;
            listening.abort();
            wait_until(|| scene.failed(|failure| *failure == Failure::Refused)).await;
            drop(listens().await);
        }
        Relay::CutsAndRefuses => {
            listening.abort();
            proxy.cut.notify_waiters();
            wait_until(|| follower_names().all(|follower| scene.refused(&follower))).await;
            // Wait until the old instance has dropped every revision that a client saw last.
            let (seen, history) = (store.list(None).0, plot.history as u64);
            wait_until(|| store.list(None).0 > seen + history).await;
            drop(listens().await);
        }
    }
    let done = Instant::now();
    let (old, its) = (old, backend);
    let (new, backend) = scene.start(NEW).await;
    // Wait until the old instance has changes that were written after the start of the new
    // instance.
    let begun = written();
    wait_until(|| written() > begun + 1).await;
    *proxy.backend.lock().unwrap() = backend;
    // Wait until no connection is new at the old instance. When the old instance stops, it would
    // reject a request on a new connection, which is allowed, or reset a connection in its queue,
    // which a relay without replay cannot prevent.
    wait_until(|| proxy.young() == 0 && proxy.on(its) <= STREAMS as usize).await;
    // The time between the relay's fault and the stop of the old instance must be longer than the
    // clients' delay, which can be long on a busy machine. If an instance reports nothing, judges
    // attribute streams that ended around its stop to the instance.
    wait_until(|| done.elapsed() > LAG + 2 * scene.behind()).await;
    stop_child(old).await;
    // Wait until the new instance has answered all clients.
    wait_until(|| {
        scene.served(NEW) > 20 && follower_names().all(|follower| scene.answers(&follower, NEW) > 0)
    })
    .await;
    let moved = written();
    wait_until(|| written() > moved + 1).await;
    scene.recorder.add("", EventKind::LoadEnded);
    load.finish().await.unwrap();
    stop_child(new).await;
    (Record::of(scene.recorder.drain()), plan)
}

/// Runs an upgrade and returns the judges' result. The result is the same if instances report
/// nothing, as real apiservers do.
async fn judge_upgrade(plot: Plot) -> Ran {
    let (mut record, plan) = record_upgrade(plot).await;
    let reported = judge(&record, &plan, None);
    assert!(!record.reports.is_empty());
    record.reports.clear();
    let mut seen = judge(&record, &plan, None);
    // The reasons in the examples differ.
    seen.examples.clone_from(&reported.examples);
    assert_eq!(reported, seen, "{:#?}", record.ends);
    reported
}

/// Returns the number of losses of a kind.
fn count_lost(ran: &Ran, loss: Loss) -> u64 {
    ran.lost.get(&loss).copied().unwrap_or_default()
}

fn read_figure(ran: &Ran, name: &str) -> u64 {
    match ran.find_figure(name) {
        Some(Value::Count(count)) => count,
        other => panic!("{name}: {other:?}"),
    }
}

#[tokio::test]
async fn a_good_relay_loses_nothing() {
    let (record, plan) = record_upgrade(Plot::relay(Relay::Good)).await;
    let ran = judge(&record, &plan, None);
    assert!(ran.verdict == Verdict::Held, "{ran:#?}");
    // The old instance ended the kept connections (4), watches (4) and informers (6). The control
    // has 8 streams on each of the two instances, and the stop of the old instance ended 8 of the
    // 16 while the load ran.
    let control = (
        record.control.streams.values().map(BTreeSet::len).sum(),
        record.control.ends.len(),
    );
    assert_eq!(
        (read_figure(&ran, "streams ended by the instance"), control),
        (14, (16, 8))
    );
    assert!(read_figure(&ran, "watch events") > 40, "{ran:#?}");
    assert_eq!(record.informers.len(), 6);
    for informer in &record.informers {
        assert_eq!(informer.held, informer.written, "{informer:?}");
        // The quiet clients got no revision after the start of the new instance, so each listed
        // again. The other clients saw events.
        let (written, again) = match informer.id.as_str() {
            "informer-0" | "informer-1" => (31.., 0),
            "quiet-0" | "quiet-1" => (20.., 1),
            _ => (0.., 1),
        };
        assert!(
            written.contains(&informer.written)
                && (informer.relists, informer.expired) == (again, again),
            "{informer:?}"
        );
    }
    assert_eq!(record.watches.iter().map(|w| w.relists).sum::<u64>(), 0);

    // Without the instances' reports, the other evidence alone gives the same result.
    for end in &record.ends {
        assert!(end.signed.is_some() && end.instance == OLD, "{end:?}");
        assert!(
            end.signed != Some(Signed::EndOfAnswer) || end.what == StreamKind::Watch,
            "{end:?}"
        );
    }
    let unreported = judge(
        &Record {
            reports: Vec::new(),
            ..record
        },
        &plan,
        None,
    );
    assert!(
        unreported.verdict == Verdict::Held
            && read_figure(&unreported, "streams ended by the instance") == 14,
        "{unreported:#?}"
    );
}

#[tokio::test]
async fn cut_connections_are_seen() {
    let ran = judge_upgrade(Plot::relay(Relay::Cuts)).await;
    // The streams of all long-lived clients are lost. New connections may be lost, too.
    assert_eq!(count_lost(&ran, Loss::StreamEnded), 14, "{ran:#?}");
    // Watches continued at their last revision.
    assert!(count_lost(&ran, Loss::EventMissed) == 0, "{ran:#?}");
}

#[tokio::test]
async fn a_goodbye_that_the_relay_made_an_instance_say_is_no_excuse() {
    let ran = judge_upgrade(Plot::relay(Relay::HalfCloses)).await;
    assert_eq!(count_lost(&ran, Loss::StreamEnded), 14, "{ran:#?}");
}

#[tokio::test]
async fn new_connections_that_fail_are_seen_each_for_what_it_is() {
    let ran = judge_upgrade(Plot::relay(Relay::FailsNew)).await;
    assert!(
        ran.verdict == Verdict::Lost && count_lost(&ran, Loss::Refused) > 0,
        "{ran:#?}"
    );
    assert!(
        count_lost(&ran, Loss::Closed) + count_lost(&ran, Loss::Reset) > 0,
        "{ran:#?}"
    );
    // Wrong bytes do not count as a wrong certificate.
    assert!(
        count_lost(&ran, Loss::Tls) > read_figure(&ran, "x509 errors")
            && read_figure(&ran, "x509 errors") > 0,
        "{ran:#?}"
    );
    let of_new = [Loss::Refused, Loss::Closed, Loss::Reset, Loss::Tls];
    assert!(
        ran.lost.keys().all(|loss| of_new.contains(loss)),
        "{ran:#?}"
    );
}

#[tokio::test]
async fn changes_that_are_lost_or_told_twice_are_seen() {
    let (record, plan) = record_upgrade(Plot {
        misreports: true,
        ..Plot::relay(Relay::Good)
    })
    .await;
    // Each watch and each informer misses one write and sees another write twice. Each informer
    // keeps one removed object.
    let lost = judge(&record, &plan, None).lost;
    assert_eq!(
        lost,
        [(Loss::EventMissed, 8), (Loss::EventDuplicated, 6)].into(),
        "{record:#?}"
    );
    for watch in &record.watches {
        let flaws: Vec<_> = watch
            .flaws
            .iter()
            .map(|(_, loss, count)| (*loss, *count))
            .collect();
        assert_eq!(
            flaws,
            [(Loss::EventMissed, 1), (Loss::EventDuplicated, 1)],
            "{watch:?}"
        );
    }
    let informers = || {
        record
            .informers
            .iter()
            .filter(|i| i.id.starts_with("informer"))
    };
    assert!(informers().all(|i| i.stale == 1), "{:?}", record.informers);
}

#[tokio::test]
async fn a_client_that_was_away_for_too_long_lists_again_and_has_all() {
    let plot = Plot {
        history: 6,
        ..Plot::relay(Relay::CutsAndRefuses)
    };
    let (record, plan) = record_upgrade(plot).await;
    let informers = || {
        record
            .informers
            .iter()
            .filter(|i| i.id.starts_with("informer"))
    };
    assert!(
        informers().count() == 2 && informers().all(|i| i.relists >= 1),
        "{:?}",
        record.informers
    );
    assert!(
        record.informers.iter().all(|i| i.relists == i.expired),
        "{:?}",
        record.informers
    );
    let ran = judge(&record, &plan, None);
    assert!(count_lost(&ran, Loss::Refused) > 0, "{ran:#?}");
    for loss in [Loss::EventMissed, Loss::EventDuplicated, Loss::BadStatus] {
        assert!(count_lost(&ran, loss) == 0, "{ran:#?}");
    }
}
