//! Functions and types that the tests of several crates share.

pub mod etcd;
pub mod namespace;
pub mod pages;
pub mod states;
pub mod supervise;

use berth_cluster::Access;
use berth_cluster::kubeconfig::Token;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

/// Time limit that only a hang reaches.
const HANG: Duration = Duration::from_secs(10);

/// A small HTTPS server that stands for an apiserver, and accepts client certificates.
#[derive(Debug)]
pub struct Server {
    /// The server's address and CA, and credentials for it, as a kubeconfig would contain them.
    pub access: Access,
    /// Requests that the server has received (head and body), each with the number of certificates
    /// that the client sent.
    pub asked: mpsc::UnboundedReceiver<(String, usize)>,
}

/// Starts a server that answers every request with the same bytes. If the answer is empty, the
/// server sends nothing.
///
/// # Panics
/// Panics if the server cannot be set up, so that the test fails.
pub async fn start_server(answer: String) -> Server {
    serve_with(move |_| answer.clone()).await
}

/// Starts a server. `answer` gets each request as text, and returns the bytes of the response. If
/// they are empty, the server sends nothing. Connections are served at the same time.
///
/// # Panics
/// Panics if the server cannot be set up, so that the test fails.
pub async fn serve_with(answer: impl FnMut(&str) -> String + Send + 'static) -> Server {
    let mut server = serve_at(
        &create_ca(),
        ([127, 0, 0, 1], 0).into(),
        "127.0.0.1",
        answer,
    )
    .await;
    server.access.server += "/k";
    server
}

/// Creates a CA.
///
/// # Panics
/// Panics if the CA cannot be created, so that the test fails.
#[must_use]
pub fn create_ca() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Issues a certificate that contains the names, signed by the CA. Returns the certificate and its
/// key in PEM form.
///
/// # Panics
/// Panics if the certificate cannot be created, so that the test fails.
#[must_use]
pub fn issue_certificate(
    ca: &CertifiedIssuer<'static, KeyPair>,
    names: &[&str],
) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let params =
        CertificateParams::new(names.iter().copied().map(str::to_owned).collect::<Vec<_>>())
            .unwrap();
    (
        params.signed_by(&key, ca).unwrap().pem(),
        key.serialize_pem(),
    )
}

/// Starts a server like [`serve_with`], at the given address. The CA issues its certificate, for
/// the given name.
///
/// # Panics
/// Panics if the server cannot be set up, so that the test fails.
pub async fn serve_at(
    ca: &CertifiedIssuer<'static, KeyPair>,
    address: SocketAddr,
    name: &str,
    answer: impl FnMut(&str) -> String + Send + 'static,
) -> Server {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(ca.der().clone()).unwrap();
    let clients = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone());
    let clients = clients.allow_unauthenticated().build().unwrap();
    let (certificate, key) = issue_certificate(ca, &[name]);
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = builder
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(address).await.unwrap();
    let server = format!("https://{}", listener.local_addr().unwrap());
    let (asks, asked) = mpsc::unbounded_channel();
    let answer = Arc::new(Mutex::new(answer));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, answer, asks) = (acceptor.clone(), answer.clone(), asks.clone());
            tokio::spawn(async move {
                let Ok(mut tls) = acceptor.accept(stream).await else {
                    return;
                };
                let request = read_request(&mut tls).await;
                // The client sent no request: it wanted only a TLS handshake.
                if request.is_empty() {
                    return;
                }
                let certificates = tls.get_ref().1.peer_certificates().map_or(0, <[_]>::len);
                let answer = answer.lock().unwrap()(&request);
                let is_silent = answer.is_empty();
                let _ = asks.send((request, certificates));
                let _ = tls.write_all(answer.as_bytes()).await;
                if is_silent {
                    std::future::pending::<()>().await;
                }
                let _ = tls.shutdown().await;
            });
        }
    });
    let (certificate, key) = issue_certificate(ca, &["admin"]);
    let ca = ca.pem().into_bytes();
    let client = Some((certificate.into_bytes(), key.into_bytes()));
    Server {
        access: Access {
            server,
            ca,
            client,
            token: Some(Token::Text("t0ken".into())),
            server_name: None,
        },
        asked,
    }
}

/// Reads a request with its body. The body may arrive later than the head.
async fn read_request(from: &mut (impl AsyncRead + Unpin)) -> String {
    let (mut all, mut part) = (Vec::new(), vec![0; 4096]);
    loop {
        let length = from.read(&mut part).await.unwrap_or(0);
        all.extend_from_slice(&part[..length]);
        let text = String::from_utf8_lossy(&all);
        let whole = text
            .split_once("\r\n\r\n")
            .is_some_and(|(head, _)| all.len() >= head.len() + 4 + body_length(head));
        if length == 0 || whole {
            return text.into_owned();
        }
    }
}

/// Returns the length of a request's body, as the head says.
fn body_length(head: &str) -> usize {
    let mut lines = head.lines();
    let length = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse().ok())?
    });
    length.unwrap_or_default()
}

/// Runs `read` while its file seems to be on a slow disk. The file gets its content, `text`, only
/// after another task on this thread has run. Returns the result of `read`, and true if another
/// task has run.
///
/// # Panics
/// The file does not exist.
pub async fn delay_file_read<T>(
    path: &Path,
    text: &str,
    read: impl Future<Output = T>,
) -> (T, bool) {
    std::fs::remove_file(path).unwrap();
    nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (ran, finished) = std::sync::mpsc::channel();
    let (path, text) = (path.to_owned(), text.to_owned());
    let disk = std::thread::spawn(move || {
        let ran = finished.recv_timeout(HANG).is_ok();
        // Opening a FIFO waits until `read` has opened it. `read` may open the path again later, so
        // a plain file takes its place.
        let mut slow = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &text).unwrap();
        slow.write_all(text.as_bytes()).unwrap();
        ran
    });
    let (done, _) = tokio::join!(read, async { ran.send(()) });
    (done, disk.join().unwrap())
}

/// The shortest time that a duration can express.
pub const NANOSECOND: Duration = Duration::from_nanos(1);

/// Asserts that `step_at` returns `before` until a nanosecond before `time`, and `next` at `time`.
///
/// # Panics
/// A step differs.
#[track_caller]
pub fn assert_changes_after<S: Copy + PartialEq + Debug>(
    time: Duration,
    before: S,
    next: S,
    mut step_at: impl FnMut(Duration) -> S,
) {
    for now in [Duration::ZERO, time - NANOSECOND] {
        assert_eq!(step_at(now), before, "{now:?}");
    }
    assert_eq!(step_at(time), next);
}

/// Returns the number of cases that a property test tries: `usual`, or `PROPTEST_CASES` if set, for
/// example for a long run.
#[must_use]
pub fn case_count(usual: u32) -> u32 {
    std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(usual)
}

/// Returns an HTTP response with this status and body, as bytes.
#[must_use]
pub fn format_answer(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Simulates the objects of an apiserver, by path. POST creates an object. PUT replaces an object,
/// and DELETE removes one, only if the client has read its latest version.
#[derive(Debug, Clone, Default)]
pub struct Objects {
    all: Arc<Mutex<BTreeMap<String, Value>>>,
    version: Arc<AtomicU64>,
}

impl Objects {
    /// Returns the object at a path.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<Value> {
        self.all.lock().unwrap().get(path).cloned()
    }

    /// Returns all objects by path.
    #[must_use]
    pub fn all_objects(&self) -> BTreeMap<String, Value> {
        self.all.lock().unwrap().clone()
    }

    /// Writes an object, or with `None` removes it, as another client of the apiserver would.
    pub fn set(&self, path: &str, object: Option<Value>) {
        let mut all = self.all.lock().unwrap();
        match object {
            Some(mut object) => {
                let version = self.version.fetch_add(1, Ordering::Relaxed);
                object["metadata"]["resourceVersion"] = version.to_string().into();
                all.insert(path.to_owned(), object);
            }
            None => drop(all.remove(path)),
        }
    }

    /// Answers a request as an apiserver does, for [`serve_with`].
    #[must_use]
    pub fn answer(&self, request: &str) -> String {
        let mut words = request.split(' ');
        let (method, path) = (
            words.next().unwrap_or_default(),
            words.next().unwrap_or_default(),
        );
        let path = path
            .strip_prefix("/k")
            .unwrap_or(path)
            .split('?')
            .next()
            .unwrap_or_default();
        let body = request.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        let body: Value = serde_json::from_str(body).unwrap_or_default();
        let no = |status: &str| format_answer(status, &format!(r#"{{"message": "{status}"}}"#));
        let meta = &body["metadata"];
        let namespace = path
            .split_once("/namespaces/")
            .and_then(|(_, rest)| rest.split('/').next());
        let namespace = format!("/api/v1/namespaces/{}", namespace.unwrap_or_default());
        let there = self.get(path);
        if method == "PATCH"
            && request
                .lines()
                .next()
                .is_some_and(|line| line.contains("dryRun=All"))
        {
            return format_answer("200 OK", &body.to_string());
        }
        let path = match method {
            "POST" => format!("{path}/{}", meta["name"].as_str().unwrap_or_default()),
            _ => path.to_owned(),
        };
        let read = if method == "DELETE" {
            &body["preconditions"]
        } else {
            meta
        };
        let stale = |there: &Value| there["metadata"]["resourceVersion"] != read["resourceVersion"];
        match (method, there) {
            ("GET", Some(there)) => return format_answer("200 OK", &there.to_string()),
            ("POST", _) if self.get(&namespace).is_none() => return no("404 Not Found"),
            ("POST", _) if self.get(&path).is_some() => return no("409 Conflict"),
            ("PUT" | "DELETE", Some(there)) if !read.is_null() && stale(&there) => {
                return no("409 Conflict");
            }
            ("DELETE", Some(_)) => self.set(&path, None),
            ("POST" | "PATCH", _) | ("PUT", Some(_)) => self.set(&path, Some(body)),
            _ => return no("404 Not Found"),
        }
        format_answer("200 OK", &self.get(&path).unwrap_or_default().to_string())
    }
}
