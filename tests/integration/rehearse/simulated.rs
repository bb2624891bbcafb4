//! A simulated apiserver alone, as a process, after SIGTERM. The tests in `load.rs` show that it
//! ends idle connections and watches, and reports the ends.

use super::load::{BOUND, expect_end, start_simulated, terminate_child, wait_until};
use berth_rehearse::record::{data::MarkKind, log::Recorder};
use berth_rehearse::testbed::{
    certs,
    store::{self, Store},
};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener};
use tokio::process::Child;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

const MAPS: &str = "/api/v1/namespaces/n/configmaps";

struct Simulated {
    child: Child,
    address: SocketAddr,
    recorder: Arc<Recorder>,
    store: Arc<Store>,
    tls: TlsConnector,
    _hub: JoinSet<()>,
    _dir: tempfile::TempDir,
}

impl Simulated {
    /// Starts an apiserver, and waits until it is ready.
    async fn start(flag: &str) -> Self {
        let (dir, store, recorder) = (
            tempfile::tempdir().unwrap(),
            Arc::<Store>::default(),
            Arc::<Recorder>::default(),
        );
        let certs = certs::make_certs(dir.path(), &[]).unwrap();
        let (socket, mut hub) = (dir.path().join("store"), JoinSet::new());
        hub.spawn(store::serve(
            UnixListener::bind(&socket).unwrap(),
            store.clone(),
            recorder.clone(),
        ));
        let (child, address) = start_simulated("it", &socket, &certs, &[flag]);
        let tls = TlsConnector::from(Arc::new(certs.client_config().unwrap()));
        let it = Self {
            child,
            address,
            recorder,
            store,
            tls,
            _hub: hub,
            _dir: dir,
        };
        it.comes_to(MarkKind::Ready).await;
        it
    }

    async fn comes_to(&self, mark: MarkKind) {
        wait_until(|| self.recorder.last_mark_time("it", mark).is_some()).await;
    }

    async fn client(&self) -> Client {
        let tcp = TcpStream::connect(self.address).await.unwrap();
        Client(
            self.tls
                .connect("kubernetes".try_into().unwrap(), tcp)
                .await
                .unwrap(),
        )
    }

    /// Connects a client for a single request, and returns the answer.
    async fn get(&self, path: &str) -> String {
        let mut client = self.client().await;
        client
            .says(&format!(
                "GET {path} HTTP/1.1\r\nhost: kubernetes\r\nconnection: close\r\n\r\n"
            ))
            .await;
        let mut answer = String::new();
        client.0.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn refuses(&self) {
        while TcpStream::connect(self.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }
}

/// A client of a simulated apiserver that keeps its connection.
struct Client(tokio_rustls::client::TlsStream<TcpStream>);

impl Client {
    async fn says(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Reads until `wanted` has come.
    async fn reads(&mut self, wanted: &str) {
        let mut read = Vec::new();
        while !String::from_utf8_lossy(&read).contains(wanted) {
            let more = tokio::time::timeout(BOUND, self.0.read_buf(&mut read)).await;
            assert!(
                matches!(more, Ok(Ok(1..))),
                "{more:?}: no {wanted:?} in {}",
                String::from_utf8_lossy(&read)
            );
        }
    }
}

#[tokio::test]
async fn after_sigterm_it_is_unready_and_goes_on_serving() {
    let it = Simulated::start("--shutdown-delay-duration=1h").await;
    let (mut kept, mut watch) = (it.client().await, it.client().await);
    let ready = "GET /readyz HTTP/1.1\r\nhost: kubernetes\r\n\r\n";
    kept.says(ready).await;
    kept.reads("HTTP/1.1 200 ").await;
    watch
        .says(&format!(
            "GET {MAPS}?watch=1&resourceVersion=1 HTTP/1.1\r\nhost: kubernetes\r\n\r\n"
        ))
        .await;
    watch.reads("HTTP/1.1 200 ").await;

    terminate_child(&it.child);
    it.comes_to(MarkKind::Terminating).await;
    kept.says(ready).await;
    kept.reads("HTTP/1.1 500 ").await;
    assert!(it.get(MAPS).await.starts_with("HTTP/1.1 200 "));
    it.store
        .create(json!({"metadata": {"name": "late", "namespace": "n"}}))
        .unwrap();
    watch.reads("\"late\"").await;
}

#[tokio::test]
async fn a_request_under_way_is_finished() {
    for retry_after in [false, true] {
        let it = Simulated::start(&format!("--shutdown-send-retry-after={retry_after}")).await;
        let mut slow = it.client().await;
        let (half, rest) = (r#"{"metadata":"#, r#"{"name":"a"}}"#);
        let length = half.len() + rest.len();
        let head =
            format!("POST {MAPS} HTTP/1.1\r\nhost: kubernetes\r\ncontent-length: {length}\r\n");
        slow.says(&format!("{head}expect: 100-continue\r\n\r\n"))
            .await;
        slow.reads("HTTP/1.1 100 ").await;
        slow.says(half).await;
        terminate_child(&it.child);
        it.comes_to(MarkKind::Terminating).await;
        if retry_after {
            let rejected = loop {
                // The apiserver serves requests as long as the drain has not begun.
                let answer = it.get(MAPS).await;
                if !answer.starts_with("HTTP/1.1 200 ") {
                    break answer;
                }
            };
            assert!(rejected.starts_with("HTTP/1.1 429 "), "{rejected}");
            assert!(it.get("/livez").await.starts_with("HTTP/1.1 200 "));
        } else {
            it.refuses().await;
        }
        slow.says(rest).await;
        slow.reads("HTTP/1.1 201 ").await;
        it.refuses().await;
        expect_end(it.child).await;
    }
}
