//! Is a loss seen? Load, stand-ins and verdict around small relays in this process, a good one and
//! some that each lose in their own way.
#![cfg(feature = "rehearse")]

use berth::rehearse::load::{Load, Target};
use berth::rehearse::plan::{LoadPlan, Plan};
use berth::rehearse::record::{Mark, Player, Recorder, Stamp};
use berth::rehearse::store::Store;
use berth::rehearse::verdict::{Loss, NEW, OLD, Verdict, judge};
use berth::rehearse::{certs, hub, stage};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::process::{Child, Command};
use tokio::task::{AbortHandle, JoinSet};

/// Far beyond what anything here takes.
const BOUND: Duration = Duration::from_secs(30);

/// How a relay behaves.
#[derive(Clone, Copy, PartialEq)]
enum Relay {
    /// Nothing is lost.
    Good,
    /// All connections are cut once while old serves.
    Cuts,
    /// It stops listening for a moment.
    Refuses,
    /// It closes new connections for a moment.
    Closes,
    /// It speaks itself for a moment, before the instance can.
    Garbles,
}

struct Proxy {
    backend: Mutex<SocketAddr>,
    /// Connections without a byte from the backend.
    young: AtomicUsize,
    closes: AtomicBool,
    garbles: AtomicBool,
    open: Mutex<Vec<AbortHandle>>,
}

impl Proxy {
    async fn run(self: Arc<Self>, listener: TcpListener) {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            if self.closes.load(SeqCst) {
                continue;
            }
            self.young.fetch_add(1, SeqCst);
            let relay = tokio::spawn(Arc::clone(&self).relay(client));
            self.open.lock().unwrap().push(relay.abort_handle());
        }
    }

    async fn relay(self: Arc<Self>, mut client: TcpStream) {
        let backend = *self.backend.lock().unwrap();
        if self.garbles.load(SeqCst) {
            let _ = client.write_all(b"HTTP/1.0 400 Bad Request\r\n\r\n").await;
        }
        let mut first = [0];
        let answered = async {
            let mut server = TcpStream::connect(backend).await?;
            let (mut from, mut to) = server.split();
            let mut hello = vec![0; 16 * 1024];
            loop {
                tokio::select! {
                    n = client.read(&mut hello) => match n? {
                        0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                        n => to.write_all(&hello[..n]).await?,
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
        self.young.fetch_sub(1, SeqCst);
        if let Ok(mut server) = answered
            && client.write_all(&first).await.is_ok()
        {
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        }
    }
}

struct Scene {
    dir: tempfile::TempDir,
    certs: certs::Certs,
    recorder: Arc<Recorder>,
}

impl Scene {
    async fn start(&self, name: &str) -> (Child, SocketAddr) {
        self.recorder.note(|r| r.players.push(Player { name: name.into(), version: None, serves: true }));
        let address = stage::free_address().unwrap();
        self.certs.issue(name).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_berth"))
            .arg("stand-in")
            .arg(format!("--bind-address={}", address.ip()))
            .arg(format!("--secure-port={}", address.port()))
            .arg(format!("--etcd-servers=unix://{}", self.dir.path().join("store").display()))
            .arg(format!("--tls-cert-file={}", self.certs.cert_file(name).display()))
            .arg(format!("--tls-private-key-file={}", self.certs.key_file(name).display()))
            .arg(format!("--stand-in-name={name}"))
            .stderr(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        until(|| {
            let mut ready = false;
            self.recorder.note(|r| ready = r.moments.first(name, Mark::Ready).is_some());
            ready
        })
        .await;
        (child, address)
    }
}

async fn until(mut condition: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + BOUND;
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "it does not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn stop(mut child: Child) {
    kill(Pid::from_raw(child.id().unwrap().try_into().unwrap()), Signal::SIGTERM).unwrap();
    assert!(tokio::time::timeout(BOUND, child.wait()).await.unwrap().unwrap().success());
}

/// An upgrade through such a relay.
async fn upgrade(relay: Relay) -> Verdict {
    let address = stage::free_address().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let certs = certs::make(dir.path(), &[address.ip()]).unwrap();
    let scene = Scene { dir, certs, recorder: Arc::default() };
    let store = Arc::new(Store::default());
    let mut background = JoinSet::new();
    let socket = UnixListener::bind(scene.dir.path().join("store")).unwrap();
    background.spawn(hub::serve(socket, Arc::clone(&store), Arc::clone(&scene.recorder)));

    let (old, backend) = scene.start(OLD).await;
    let proxy = Arc::new(Proxy {
        backend: Mutex::new(backend),
        young: AtomicUsize::new(0),
        closes: AtomicBool::new(false),
        garbles: AtomicBool::new(false),
        open: Mutex::default(),
    });
    let listening = background.spawn(Arc::clone(&proxy).run(TcpListener::bind(address).await.unwrap()));

    // Little load: what is tested is whether a loss is seen, and the tests run side by side.
    let load = LoadPlan { rate: 30, clients: 4, watches: 4, ..LoadPlan::default() };
    let plan = Plan { load, ..Plan::default() };
    let while_it_serves = Duration::from_secs(1);
    let target = Target::new(address, &scene.certs.ca).unwrap();
    let load = Load::start(&plan.load, &target, &store, &scene.recorder).unwrap();
    scene.recorder.note(|r| r.began = Some(Stamp::now()));
    tokio::time::sleep(while_it_serves).await;
    match relay {
        Relay::Good => {}
        Relay::Cuts => proxy.open.lock().unwrap().iter().for_each(AbortHandle::abort),
        Relay::Refuses => {
            listening.abort();
            tokio::time::sleep(Duration::from_millis(300)).await;
            let listener = TcpListener::bind(address).await.unwrap();
            background.spawn(Arc::clone(&proxy).run(listener));
        }
        Relay::Closes | Relay::Garbles => {
            let flag = if relay == Relay::Closes { &proxy.closes } else { &proxy.garbles };
            flag.store(true, SeqCst);
            tokio::time::sleep(Duration::from_millis(300)).await;
            flag.store(false, SeqCst);
        }
    }
    let (new, backend) = scene.start(NEW).await;
    tokio::time::sleep(while_it_serves).await;
    *proxy.backend.lock().unwrap() = backend;
    if relay == Relay::Good {
        // A request on a connection that old has just got would be turned away, which is allowed,
        // or reset in old's queue, which a relay without replay cannot mend.
        tokio::time::sleep(Duration::from_millis(20)).await;
        until(|| proxy.young.load(SeqCst) == 0).await;
    }
    stop(old).await;
    tokio::time::sleep(while_it_serves).await;
    scene.recorder.note(|r| r.over = Some(Stamp::now()));
    load.finish().await.unwrap();
    stop(new).await;
    judge(&scene.recorder.take(), &plan)
}

#[tokio::test]
async fn a_good_relay_loses_nothing() {
    let verdict = upgrade(Relay::Good).await;
    assert!(verdict.held(), "{verdict:#?}");
    // The kept connections (4) and watches (4) that were on old.
    assert_eq!(verdict.ended_by_instance, 8);
    assert!(verdict.watch_events > 80, "{verdict:#?}");
}

#[tokio::test]
async fn cut_connections_are_seen() {
    let verdict = upgrade(Relay::Cuts).await;
    assert!(verdict.ended_by_berth > 0 && verdict.lost[&Loss::StreamEnded] > 0, "{verdict:#?}");
    // Watches went on from where they were.
    assert!(!verdict.lost.contains_key(&Loss::EventMissed), "{verdict:#?}");
}

#[tokio::test]
async fn refused_connections_are_seen() {
    let verdict = upgrade(Relay::Refuses).await;
    assert!(verdict.lost.contains_key(&Loss::Refused) && !verdict.held(), "{verdict:#?}");
}

#[tokio::test]
async fn closed_connections_are_seen() {
    let verdict = upgrade(Relay::Closes).await;
    let seen = verdict.lost.contains_key(&Loss::Closed) || verdict.lost.contains_key(&Loss::Reset);
    assert!(seen && !verdict.held(), "{verdict:#?}");
}

#[tokio::test]
async fn wrong_bytes_are_seen() {
    let verdict = upgrade(Relay::Garbles).await;
    assert!(verdict.lost.contains_key(&Loss::Tls) && !verdict.held(), "{verdict:#?}");
}
