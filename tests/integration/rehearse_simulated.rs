//! A simulated apiserver alone, as a process: the faults that a judge must find, and its phases on SIGTERM. The rehearsals
//! that use a simulated apiserver test the rest.

use berth_rehearse::data::MarkKind;
use berth_rehearse::event::{EndedBy, EventKind, STREAM_HEADER};
use berth_rehearse::log::Recorder;
use berth_rehearse::store::Store;
use berth_rehearse::{address, certs, store_server};
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::ExitStatus;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpStream, UnixListener};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Far beyond what anything here takes; only a hang comes near it.
const BOUND: Duration = Duration::from_secs(30);

const MAPS: &str = "/api/v1/namespaces/n/configmaps";

struct Simulated {
    child: Child,
    address: SocketAddr,
    recorder: Arc<Recorder>,
    store: Arc<Store>,
    tls: [tokio_rustls::TlsConnector; 2],
    _hub: tokio::task::JoinSet<()>,
    _dir: tempfile::TempDir,
}

impl Simulated {
    async fn start(flags: &[&str]) -> Self {
        let store = Arc::<Store>::default();
        let dir = tempfile::tempdir().unwrap();
        let address = address::free_address().unwrap();
        let certs = certs::make(dir.path(), &[address.ip()]).unwrap();
        certs.issue("it").unwrap();
        let recorder = Arc::new(Recorder::default());
        let socket = dir.path().join("store");
        let mut hub = tokio::task::JoinSet::new();
        hub.spawn(store_server::serve(UnixListener::bind(&socket).unwrap(), Arc::clone(&store), Arc::clone(&recorder)));
        let child = Command::new(env!("CARGO_BIN_EXE_berth"))
            .args(["stand-in", "--secure-port", &address.port().to_string(), "--stand-in-name=it"])
            .arg(format!("--bind_address={}", address.ip()))
            .arg(format!("--etcd-servers=unix://{}", socket.display()))
            .arg(format!("--tls-cert-file={}", certs.cert_file("it").display()))
            .arg(format!("--tls-private-key-file={}", certs.key_file("it").display()))
            .arg(format!("--client-ca-file={}", certs.ca_file.display()))
            .args(flags)
            .stderr(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certs.ca.clone()).unwrap();
        let roots = Arc::new(roots);
        let tls = [&b"http/1.1"[..], b"h2"].map(|alpn| {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let builder = rustls::ClientConfig::builder_with_provider(provider);
            let builder = builder.with_safe_default_protocol_versions().unwrap();
            let mut config = builder.with_root_certificates(Arc::clone(&roots)).with_no_client_auth();
            config.alpn_protocols = vec![alpn.to_vec()];
            tokio_rustls::TlsConnector::from(Arc::new(config))
        });
        let it = Self { child, address, recorder, store, tls, _hub: hub, _dir: dir };
        it.marked(MarkKind::Listening).await;
        it
    }

    async fn marked(&self, mark: MarkKind) {
        until(|| self.recorder.last("it", mark).is_some()).await;
    }

    /// Which end ended a stream, once the instance has reported it.
    async fn ended_by(&self, stream: &str) -> EndedBy {
        let mut by = None;
        until(|| {
            by = self.recorder.read(|log| {
                log.iter().find_map(|event| match &event.what {
                    EventKind::EndReport(report) if report.stream == stream => Some(report.by),
                    _ => None,
                })
            });
            by.is_some()
        })
        .await;
        by.unwrap()
    }

    fn signal(&self) {
        kill(Pid::from_raw(self.child.id().unwrap().try_into().unwrap()), Signal::SIGTERM).unwrap();
    }

    async fn exit(&mut self) -> ExitStatus {
        tokio::time::timeout(BOUND, self.child.wait()).await.unwrap().unwrap()
    }

    async fn connect(&self, http2: bool, stream: &'static str) -> std::io::Result<Client> {
        let tcp = TcpStream::connect(self.address).await?;
        let tls = self.tls[usize::from(http2)].connect("kubernetes".try_into().unwrap(), tcp).await?;
        let io = TokioIo::new(tls);
        Ok(if http2 {
            let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
            Client { sender: Sender::Two(sender), driver: tokio::spawn(connection), stream }
        } else {
            let (sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
            Client { sender: Sender::One(sender), driver: tokio::spawn(connection), stream }
        })
    }

    async fn client(&self) -> Client {
        self.connect(false, "other").await.unwrap()
    }

    async fn refuses(&self) {
        let deadline = tokio::time::Instant::now() + BOUND;
        while TcpStream::connect(self.address).await.is_ok() {
            assert!(tokio::time::Instant::now() < deadline, "still listens");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Waits for something that another process does.
async fn until(mut condition: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + BOUND;
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "it does not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A request body that is sent bit by bit.
struct Slow(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Slow {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

type Body = BoxBody<Bytes, Infallible>;

enum Sender {
    One(hyper::client::conn::http1::SendRequest<Body>),
    Two(hyper::client::conn::http2::SendRequest<Body>),
}

struct Client {
    sender: Sender,
    driver: JoinHandle<hyper::Result<()>>,
    stream: &'static str,
}

impl Client {
    async fn send(&mut self, method: &str, path: &str, body: Body) -> hyper::Result<Response<Incoming>> {
        let uri = match self.sender {
            Sender::One(_) => path.to_owned(),
            Sender::Two(_) => format!("https://kubernetes{path}"),
        };
        let request = Request::builder().method(method).uri(uri).header("host", "kubernetes");
        let request = request.header(STREAM_HEADER, self.stream).body(body).unwrap();
        match &mut self.sender {
            Sender::One(sender) => sender.send_request(request).await,
            Sender::Two(sender) => sender.send_request(request).await,
        }
    }

    async fn get(&mut self, path: &str) -> (StatusCode, Value) {
        let response = self.send("GET", path, Full::default().boxed()).await.unwrap();
        answer(response).await
    }

    /// The same connection once more.
    fn another(&self) -> Client {
        let Sender::Two(sender) = &self.sender else { panic!("only HTTP/2 can") };
        Client { sender: Sender::Two(sender.clone()), driver: tokio::spawn(async { Ok(()) }), stream: self.stream }
    }

    async fn watch(&mut self, from: u64) -> Watch {
        let path = format!("{MAPS}?watch=1&resourceVersion={from}");
        let response = self.send("GET", &path, Full::default().boxed()).await.unwrap();
        assert_eq!(response.status(), 200);
        Watch { body: response.into_body(), rest: Vec::new() }
    }
}

async fn answer(response: Response<Incoming>) -> (StatusCode, Value) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or_else(|_| json!(String::from_utf8_lossy(&body))))
}

struct Watch {
    body: Incoming,
    rest: Vec<u8>,
}

impl Watch {
    /// The next event; none when the watch ended as it should.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.rest.iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            match tokio::time::timeout(BOUND, self.body.frame()).await.unwrap() {
                Some(frame) => self.rest.extend_from_slice(&frame.unwrap().into_data().unwrap()),
                None => return None,
            }
        }
    }
}

fn map(name: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "n"}, "data": {"k": name}})
}

#[tokio::test]
async fn after_sigterm_it_is_unready_and_goes_on_serving() {
    let it = Simulated::start(&["--shutdown-delay-duration=1h"]).await;
    it.marked(MarkKind::Ready).await;
    let mut kept = it.client().await;
    assert_eq!(kept.get("/readyz").await.0, 200);
    let mut watch = it.connect(true, "watch").await.unwrap();
    let mut events = watch.watch(1).await;

    it.signal();
    it.marked(MarkKind::Terminating).await;
    assert_eq!(kept.get("/readyz").await.0, 500);
    assert_eq!(it.client().await.get(MAPS).await.0, 200);
    it.store.create(map("late")).unwrap();
    assert_eq!(events.next().await.unwrap()["object"]["metadata"]["name"], "late");
}

#[tokio::test]
async fn then_it_closes_what_is_idle_ends_its_watches_and_exits() {
    let mut it = Simulated::start(&[]).await;
    let mut idle = it.connect(false, "idle").await.unwrap();
    let mut idle2 = it.connect(true, "idle2").await.unwrap();
    let mut watch = it.connect(true, "watch").await.unwrap();
    let mut events = watch.watch(1).await;
    let mut gone = it.connect(false, "gone").await.unwrap();
    for client in [&mut idle, &mut idle2, &mut gone] {
        assert_eq!(client.get("/livez").await.0, 200);
    }
    drop(gone);
    assert_eq!(it.ended_by("gone").await, EndedBy::Peer);

    it.signal();
    it.marked(MarkKind::Draining).await;
    it.refuses().await;
    assert_eq!(events.next().await, None);
    for client in [idle.driver, idle2.driver] {
        tokio::time::timeout(BOUND, client).await.unwrap().unwrap().unwrap();
    }
    assert_eq!(it.exit().await.code(), Some(0));
    for stream in ["idle", "idle2", "watch"] {
        assert_eq!(it.ended_by(stream).await, EndedBy::Instance, "{stream}");
    }
}

#[tokio::test]
async fn a_request_under_way_is_finished() {
    for retry_after in [false, true] {
        let flag = format!("--shutdown-send-retry-after={retry_after}");
        let mut it = Simulated::start(&[&flag]).await;
        let (half, body) = mpsc::channel(2);
        let mut slow = it.connect(true, "slow").await.unwrap();
        let mut same = slow.another();
        let (sent, ()) = tokio::join!(slow.send("POST", MAPS, Slow(body).boxed()), async {
            half.send(Bytes::from_static(b"{\"metadata\":")).await.unwrap();
            // Sent later on the same connection, so what was sent before is under way.
            assert_eq!(same.get("/livez").await.0, 200);
            it.signal();
            it.marked(MarkKind::Terminating).await;
            if retry_after {
                let rejected = loop {
                    // Until the drain has begun, requests are served.
                    let (status, body) = it.client().await.get(MAPS).await;
                    if status != 200 {
                        break (status.as_u16(), body["reason"].clone());
                    }
                };
                assert_eq!(rejected, (429, json!("TooManyRequests")));
                assert_eq!(it.client().await.get("/livez").await.0, 200);
            } else {
                it.refuses().await;
            }
            half.send(Bytes::from_static(b"{\"name\":\"a\"}}")).await.unwrap();
            drop(half);
        });
        assert_eq!(answer(sent.unwrap()).await.0, 201);
        assert_eq!(it.exit().await.code(), Some(0));
        assert_eq!(it.ended_by("slow").await, EndedBy::Instance);
        it.refuses().await;
    }
}
