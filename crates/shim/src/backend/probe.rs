//! Probes an instance: GET a path by HTTPS, or connect only.
//!
//! Each probe makes a new connection, like a new client. Certificates and tokens rotate: each probe
//! reads them again, and makes the TLS configuration again if they changed. While a disk stalls,
//! the probe uses the files as last read.

use super::health::Observation;
use berth_cluster::http;
use berth_cluster::tls::{self, TlsError};
use berth_os::explained;
use berth_os::file::{decode_text, open_regular_file, read_open_small, read_small};
use berth_os::off_thread::OffThread;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Request, StatusCode, header};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, InvalidMessage};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

/// How long a shim waits for the probe's files when it starts. As a node boots, its disk may take
/// seconds. A shim that ended because of that would be restarted later and later.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Most bytes of an answer that are read; `/readyz?verbose` has some 3 KB.
const BODY_LIMIT: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeKind {
    Https,
    /// Connect only.
    Tcp,
}

impl ProbeKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Tcp => "tcp",
        }
    }
}

#[derive(Debug, Clone)]
pub struct ProbeConfig {
    pub kind: ProbeKind,
    /// Path that answers 200 when the instance is ready.
    pub path: String,
    /// CAs to verify the instance's certificate. `None` if the certificate is not verified.
    pub ca: Option<PathBuf>,
    /// The probe's certificate and key.
    pub client: Option<(PathBuf, PathBuf)>,
    pub token: Option<PathBuf>,
    /// Name that the instance's certificate must carry.
    pub server_name: ServerName<'static>,
    pub timeout: Duration,
}

impl ProbeConfig {
    /// Like [`Probe::check_files`], but blocks while the files are read.
    ///
    /// # Errors
    /// A sentence naming the file, the option and the cause.
    pub fn check(&self) -> Result<(), String> {
        match self.kind {
            ProbeKind::Https => Files::new(self.clone()).read_credentials().map(drop),
            ProbeKind::Tcp => Ok(()),
        }
    }

    /// Replaces the paths of all files.
    #[must_use]
    pub fn with_files(mut self, other: impl Fn(&Path) -> PathBuf) -> Self {
        let client = self.client.iter_mut().flat_map(|(cert, key)| [cert, key]);
        for path in client.chain(&mut self.ca).chain(&mut self.token) {
            *path = other(path);
        }
        self
    }
}

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The observation that the instance's health (rise and fall) is computed from.
    pub seen: Observation,
    /// The label of the metric `berth_probes_total{result}`.
    pub result: &'static str,
    /// The result in words and, for a bad result, the fix.
    pub words: String,
}

/// The body of an answer with 200, or any other result.
type BodyResult = Result<Bytes, Answer>;

#[derive(Debug)]
pub struct Probe {
    files: Arc<Files>,
    reading: OffThread,
    /// Source address of the probe's connections. `None` if the kernel chooses it.
    source: Option<IpAddr>,
}

/// The files of a probe: CA, certificate, key and token.
#[derive(Debug)]
struct Files {
    config: ProbeConfig,
    /// The credentials as last read.
    read: Mutex<Option<Credentials>>,
    /// True if a file was replaced on the node while the container still has the old file (see
    /// [`read_file_and_link_state`]).
    replaced: AtomicBool,
}

#[derive(Debug, Clone)]
struct Credentials {
    /// CA, certificate and key from which the TLS configuration was made.
    of: [Vec<u8>; 3],
    tls: Arc<ClientConfig>,
    token: Option<String>,
}

impl Probe {
    /// Makes a probe, which reads its files anew each time that it is used.
    pub fn new(config: ProbeConfig) -> Self {
        Self {
            files: Arc::new(Files::new(config)),
            reading: OffThread::new("the probe's files"),
            source: None,
        }
    }

    /// Connects from the loopback address of this address's family. The kernel does not steer
    /// connections from loopback to another instance.
    #[must_use]
    pub fn with_loopback_source(self, to: IpAddr) -> Self {
        let source = if to.is_ipv4() {
            Ipv4Addr::LOCALHOST.into()
        } else {
            Ipv6Addr::LOCALHOST.into()
        };
        Self {
            source: Some(source),
            ..self
        }
    }

    /// Reads the files once, so that a missing file is known at start.
    ///
    /// # Errors
    /// A sentence naming the file, the option and the cause.
    pub async fn check_files(&self) -> Result<(), String> {
        match self.files.config.kind {
            ProbeKind::Https => self
                .credentials(START_TIMEOUT)
                .await
                .map(drop)
                .map_err(|answer| answer.words),
            ProbeKind::Tcp => Ok(()),
        }
    }

    /// Returns the files' content. If reading takes longer than `most`, returns the content as last
    /// read.
    async fn credentials(&self, most: Duration) -> Result<Credentials, Answer> {
        let files = self.files.clone();
        match self
            .reading
            .call_within(most, move || files.read_credentials())
            .await
        {
            Ok(read) => read.map_err(|why| failed_answer("config", why)),
            // The instance was not asked, so slow files say nothing about it, and the last content
            // is used.
            Err(error) => self
                .files
                .lock_credentials()
                .clone()
                .ok_or_else(|| failed_answer("config", error.to_string())),
        }
    }

    pub async fn probe_ready(&self, address: SocketAddr) -> Answer {
        self.ask(address, &self.files.config.path).await
    }

    /// Like [`Self::probe_ready`], but an open port is not enough: the clients of a stuck instance
    /// wait for a TLS handshake, so the probe makes a handshake too.
    pub(crate) async fn probe_handshake(&self, address: SocketAddr) -> Answer {
        match self.files.config.kind {
            ProbeKind::Https => self.probe_ready(address).await,
            ProbeKind::Tcp => {
                time_answer(self.with_timeout(self.handshake(address)), "answered").await
            }
        }
    }

    /// Checks that the instance lives, for a supervisor that restarts dead instances. Returns
    /// `None` if the probe passed, or the problem that keeps the probe from passing against a live
    /// instance. A problem of the probe is no sign of death, so the instance is asked again like
    /// the kubelet asks: without verifying the certificate, and without credentials.
    ///
    /// # Errors
    /// Why the instance does not live.
    pub async fn probe_alive(&self, address: SocketAddr) -> Result<Option<String>, Answer> {
        let began = Instant::now();
        let answer = self.probe_ready(address).await;
        match answer.result {
            "ok" => return Ok(None),
            "timeout" | "connect" | "refused" | "status" => return Err(answer),
            _ => {}
        }
        let timeout = self.files.config.timeout.saturating_sub(began.elapsed());
        let config = ProbeConfig {
            ca: None,
            client: None,
            token: None,
            timeout,
            ..self.files.config.clone()
        };
        let again = Self::new(config).probe_ready(address).await;
        match (again.result, again.seen) {
            ("ok" | "unauthorized" | "forbidden", _) | ("tls", Observation::Rejected) => {
                Ok(Some(answer.words))
            }
            _ => Err(again),
        }
    }

    /// Requests a path of the instance that should answer 200.
    pub async fn ask(&self, address: SocketAddr, path: &str) -> Answer {
        match self.files.config.kind {
            ProbeKind::Https => time_answer(self.get(address, path), "200").await,
            ProbeKind::Tcp => {
                time_answer(self.with_timeout(self.connect(address)), "connected").await
            }
        }
    }

    /// Returns how long an answer may take.
    pub(crate) fn timeout(&self) -> Duration {
        self.files.config.timeout
    }

    /// Returns the body of a path that answers 200.
    pub async fn get(&self, address: SocketAddr, path: &str) -> BodyResult {
        self.with_timeout(self.get_without_timeout(address, path))
            .await
    }

    async fn with_timeout<T>(
        &self,
        question: impl Future<Output = Result<T, Answer>>,
    ) -> Result<T, Answer> {
        let late = || {
            format!(
                "no answer in {} (--probe-timeout)",
                humantime::format_duration(self.timeout())
            )
        };
        tokio::time::timeout(self.timeout(), question)
            .await
            .unwrap_or_else(|_| Err(failed_answer("timeout", late())))
    }

    async fn connect(&self, address: SocketAddr) -> Result<TcpStream, Answer> {
        http::connect_from(self.source, address)
            .await
            .map_err(|error| {
                if error.kind() == io::ErrorKind::ConnectionRefused {
                    let words = format!("nothing listens on {address}");
                    Answer {
                        seen: Observation::Refused,
                        result: "refused",
                        words,
                    }
                } else {
                    failed_answer("connect", format!("cannot connect to {address}: {error}"))
                }
            })
    }

    async fn handshake(&self, address: SocketAddr) -> Result<(), Answer> {
        let Credentials { tls, .. } = self.credentials(self.timeout() / 2).await?;
        let stream = self.connect(address).await?;
        // Any answer, even the end of the connection, shows that the instance reads.
        let _ = TlsConnector::from(tls)
            .connect(self.files.config.server_name.clone(), stream)
            .await;
        Ok(())
    }

    async fn get_without_timeout(&self, address: SocketAddr, path: &str) -> BodyResult {
        let Credentials { tls, token, .. } = self.credentials(self.timeout() / 2).await?;
        let stream = self.connect(address).await?;
        let stream = TlsConnector::from(tls)
            .connect(self.files.config.server_name.clone(), stream)
            .await
            .map_err(|error| self.explain_tls(&error))?;
        let name = self.files.config.server_name.to_str();
        let mut request = Request::get(path)
            .header(header::HOST, &*name)
            .header(
                header::USER_AGENT,
                concat!("berth-probe/", env!("CARGO_PKG_VERSION")),
            )
            .header(header::CONNECTION, "close");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Full::default()).map_err(|error| {
            failed_answer(
                "config",
                format!("cannot request {path}: {error}; check the token"),
            )
        })?;
        let answered = http::fetch_response(stream, request, BODY_LIMIT).await;
        let (status, body) =
            answered.map_err(|error| failed_answer("http", format!("no HTTP answer: {error}")))?;
        let body = body.unwrap_or_default();
        if status == StatusCode::OK {
            Ok(body)
        } else {
            Err(self.explain_status(status, path, &body))
        }
    }

    fn explain_status(&self, status: StatusCode, path: &str, body: &[u8]) -> Answer {
        let credentials = match (&self.files.config.client, &self.files.config.token) {
            (None, None) => {
                "give the probe credentials with --probe-cert and --probe-key, or --probe-token-file"
            }
            (Some(_), _) => {
                "the user of --probe-cert has no access: grant access to the path (nonResourceURLs)"
            }
            (None, Some(_)) => {
                "the token of --probe-token-file gives no access: check the token and its user's rights"
            }
        };
        match status {
            StatusCode::UNAUTHORIZED => Answer {
                seen: Observation::Rejected,
                ..failed_answer(
                    "unauthorized",
                    format!("alive, but rejects the probe (401 for {path}): {credentials}"),
                )
            },
            StatusCode::FORBIDDEN => {
                let new = "a new cluster answers 403 until its default roles exist; if 403 lasts";
                failed_answer(
                    "forbidden",
                    format!("alive, but forbids the probe (403 for {path}): {new}, {credentials}"),
                )
            }
            _ => {
                // kube-apiserver lists its checks, one a line. Failed checks begin with [-].
                let body = String::from_utf8_lossy(body);
                let failed: Vec<&str> = body
                    .lines()
                    .filter(|line| line.starts_with("[-]"))
                    .take(3)
                    .collect();
                let detail = if failed.is_empty() {
                    String::new()
                } else {
                    format!(": {}", failed.join(" "))
                };
                failed_answer("status", format!("{} for {path}{detail}", status.as_u16()))
            }
        }
    }

    fn explain_tls(&self, error: &io::Error) -> Answer {
        let cause = error
            .get_ref()
            .and_then(|inner| inner.downcast_ref::<rustls::Error>());
        let fix = match cause {
            // A new CA often has the old CA's name: the error is then a wrong signature, not an
            // unknown issuer.
            Some(rustls::Error::InvalidCertificate(
                rustls::CertificateError::UnknownIssuer | rustls::CertificateError::BadSignature,
            )) if self.files.replaced.load(Ordering::Relaxed) => {
                "; the file of --probe-ca was replaced on the node, and this container still has the old file: \
                 recreate the pod (`berth upgrade`)"
            }
            Some(rustls::Error::InvalidCertificate(
                rustls::CertificateError::UnknownIssuer
                | rustls::CertificateError::BadSignature
                | rustls::CertificateError::Other(_),
            )) => {
                "; --probe-ca must hold the CA that signed the apiserver's serving certificate, or the certificate itself"
            }
            Some(rustls::Error::InvalidCertificate(
                rustls::CertificateError::NotValidForName
                | rustls::CertificateError::NotValidForNameContext { .. },
            )) => "; set --probe-server-name to a name in the apiserver's serving certificate",
            Some(rustls::Error::InvalidMessage(InvalidMessage::HandshakePayloadTooLarge)) => {
                "; keep only the certificate and its issuers in the file of --tls-cert-file: the probe reads at most 64 KiB"
            }
            Some(rustls::Error::InvalidMessage(_)) => {
                "; check that the apiserver speaks TLS at this address"
            }
            _ => "",
        };
        // The instance speaks TLS, and other clients may accept what the probe does not. An invalid
        // first message means that the instance does not speak TLS.
        let rejected = cause.is_some_and(|cause| match cause {
            rustls::Error::InvalidMessage(message) => {
                *message == InvalidMessage::HandshakePayloadTooLarge
            }
            _ => true,
        });
        let seen = if rejected {
            Observation::Rejected
        } else {
            Observation::Fail
        };
        let words = cause.map_or_else(|| error.to_string(), tls::describe_error);
        Answer {
            seen,
            ..failed_answer("tls", format!("TLS handshake failed: {words}{fix}"))
        }
    }
}

impl Files {
    fn new(config: ProbeConfig) -> Self {
        Self {
            config,
            read: Mutex::default(),
            replaced: AtomicBool::new(false),
        }
    }

    fn lock_credentials(&self) -> MutexGuard<'_, Option<Credentials>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_credentials(&self) -> Result<Credentials, String> {
        let read = |option: &str, path: &Path| {
            let (bytes, linked) = read_file_and_link_state(path).map_err(|error| {
                format!(
                    "cannot read {option} {}: {error}: check the path and the file's permissions",
                    path.display()
                )
            })?;
            if !linked && !self.replaced.swap(true, Ordering::Relaxed) {
                let file = path.display();
                tracing::warn!(
                    code = %explained::PROBE_FILE_REPLACED,
                    %file,
                    option,
                    "the probe's file was replaced on the node, and this container has the old one: recreate the pod"
                );
            }
            Ok::<_, String>(bytes)
        };
        let mut of = <[Vec<u8>; 3]>::default();
        if let Some(ca) = &self.config.ca {
            of[0] = read("--probe-ca", ca)?;
        }
        if let Some((cert, key)) = &self.config.client {
            of[1] = read("--probe-cert", cert)?;
            of[2] = read("--probe-key", key)?;
        }
        let token = self.read_token()?;
        let known = self
            .lock_credentials()
            .as_ref()
            .filter(|last| last.of == of)
            .map(|last| last.tls.clone());
        let tls = known.map_or_else(|| self.build_tls(&of).map(Arc::new), Ok)?;
        Ok(self
            .lock_credentials()
            .insert(Credentials { of, tls, token })
            .clone())
    }

    fn build_tls(&self, [ca, cert, key]: &[Vec<u8>; 3]) -> Result<ClientConfig, String> {
        let client = self.config.client.as_ref().map(|_| (&cert[..], &key[..]));
        tls::from_pem(self.config.ca.as_ref().map(|_| &ca[..]), client).map_err(|error| {
            let paths = self.config.client.as_ref();
            let (option, path, why) = match error {
                TlsError::Ca(why) => ("--probe-ca", self.config.ca.as_ref(), why),
                TlsError::Certificate(why) => (
                    "--probe-cert",
                    paths.map(|(certificate, _)| certificate),
                    why,
                ),
                TlsError::Key(why) => ("--probe-key", paths.map(|(_, key)| key), why),
            };
            format!(
                "{option} {} {why}",
                path.map_or(Path::new(""), PathBuf::as_path).display()
            )
        })
    }

    fn read_token(&self) -> Result<Option<String>, String> {
        let Some(path) = &self.config.token else {
            return Ok(None);
        };
        let token = read_small(path).and_then(decode_text).map_err(|error| {
            format!("cannot read --probe-token-file {}: {error}", path.display())
        })?;
        let token = token.trim();
        if token.is_empty() {
            Err(format!("--probe-token-file {} is empty", path.display()))
        } else {
            Ok(Some(token.to_owned()))
        }
    }
}

/// Reads a file. Also returns true if the file still has a name. A mount of a single file
/// (`subPath`) shows the file that existed when the container started. If a rename replaces the
/// file, as ansible and cert-manager do, the container keeps the old file, which has no name any
/// more. kubeadm writes in place and keeps the file.
fn read_file_and_link_state(path: &Path) -> io::Result<(Vec<u8>, bool)> {
    let file = open_regular_file(path)?;
    Ok((read_open_small(&file)?, file.metadata()?.nlink() > 0))
}

/// Waits for the result of a probe, and makes an answer with the time that it took.
async fn time_answer<T>(got: impl Future<Output = Result<T, Answer>>, what: &str) -> Answer {
    let started = Instant::now();
    match got.await {
        Ok(_) => Answer {
            seen: Observation::Pass,
            result: "ok",
            words: format!("{what} in {} ms", started.elapsed().as_millis()),
        },
        Err(answer) => answer,
    }
}

fn failed_answer(result: &'static str, words: String) -> Answer {
    Answer {
        seen: Observation::Fail,
        result,
        words: berth_os::strip_error_numbers(words),
    }
}

#[cfg(test)]
mod tests;
