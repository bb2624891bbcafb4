//! The cluster's API, as an admin sees it: JSON by HTTPS, with what a kubeconfig says.
//!
//! Small on purpose. What berth asks of a cluster are a few objects with known names, so there are neither
//! types for them nor watches, and each request is a connection of its own: through the berth it comes to
//! an instance that is in the group now, and keeps none from ending.

use crate::http;
use crate::kubeconfig::{Access, KubeconfigError, Mistake, Place};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Longest time that an answer may take, unless another is set.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest answer that is read. Etcd keeps no object above 1.5 MB.
const BODY_LIMIT: usize = 4 << 20;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answered, or not in HTTP.
    #[error("{server}: {why}")]
    Unreachable {
        /// Where, as the kubeconfig says it.
        server: String,
        /// Cause.
        why: String,
    },
    /// The answer is not what was asked for.
    #[error("{server} says {status} to {method} {path}: {message}")]
    Status {
        /// Where, as the kubeconfig says it.
        server: String,
        /// HTTP status.
        status: StatusCode,
        /// What was asked.
        method: Method,
        /// Of what.
        path: String,
        /// What the apiserver says of it.
        message: String,
    },
}

impl Error {
    /// The HTTP status, if there was an answer.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Status { status, .. } => Some(*status),
            Self::Unreachable { .. } => None,
        }
    }
}

/// Asks an apiserver.
#[derive(Debug, Clone)]
pub struct Client {
    server: String,
    host: String,
    port: u16,
    /// Dialled instead.
    dial: Option<SocketAddr>,
    prefix: String,
    name: ServerName<'static>,
    tls: Arc<ClientConfig>,
    bearer: Option<header::HeaderValue>,
    patience: Duration,
}

impl Client {
    /// With a kubeconfig's current context. Its files are read once, here.
    ///
    /// # Errors
    /// What is wrong with the kubeconfig, with its path.
    pub fn from_kubeconfig(path: &Path) -> Result<Self, KubeconfigError> {
        Access::read(path).and_then(|access| Self::new(&access).map_err(|why| why.of(path)))
    }

    /// With what a kubeconfig said.
    ///
    /// # Errors
    /// The server, a certificate or a key is none.
    pub fn new(access: &Access) -> Result<Self, Mistake> {
        let place = Place::parse(&access.server)?;
        let name = access.server_name.as_deref().unwrap_or(&place.host).to_owned();
        let name = ServerName::try_from(name)
            .map_err(|_| Mistake::new("server", "its host is neither a name nor an address"))?;
        let bearer = access.token.as_deref().map(|token| {
            let mut value = header::HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(|_| Mistake::new("token", "it has characters that no token has"))?;
            value.set_sensitive(true);
            Ok(value)
        });
        Ok(Self {
            server: access.server.clone(),
            host: place.host,
            port: place.port,
            dial: None,
            prefix: place.prefix,
            name,
            tls: Arc::new(tls(access)?),
            bearer: bearer.transpose()?,
            patience: PATIENCE,
        })
    }

    /// The same, less or more patient with an answer.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// The same at this address: with several control-plane nodes the kubeconfig's server may be any of them. Certificate and
    /// credentials are those of the kubeconfig.
    #[must_use]
    pub fn at(self, address: SocketAddr) -> Self {
        Self { dial: Some(address), ..self }
    }

    /// Where it asks, as the kubeconfig says it.
    #[must_use]
    pub fn server(&self) -> &str {
        &self.server
    }

    /// Reads an object.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn get(&self, path: &str) -> Result<Value, Error> {
        self.ask(Method::GET, path, None).await
    }

    /// Replaces an object; with its `resourceVersion`, only if it is still the one that was read.
    ///
    /// # Errors
    /// See [`Error`]; 409 if it is not.
    pub async fn put(&self, path: &str, object: &Value) -> Result<Value, Error> {
        self.ask(Method::PUT, path, Some(object)).await
    }

    /// Creates an object.
    ///
    /// # Errors
    /// See [`Error`]; 409 if it is there.
    pub async fn post(&self, path: &str, object: &Value) -> Result<Value, Error> {
        self.ask(Method::POST, path, Some(object)).await
    }

    /// Deletes an object.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn delete(&self, path: &str) -> Result<Value, Error> {
        self.ask(Method::DELETE, path, None).await
    }

    /// Whether the apiserver says that it is ready.
    pub async fn ready(&self) -> bool {
        let answer = tokio::time::timeout(self.patience, self.exchange(Method::GET, "/readyz", None)).await;
        matches!(answer, Ok(Ok((StatusCode::OK, _))))
    }

    async fn ask(&self, method: Method, path: &str, object: Option<&Value>) -> Result<Value, Error> {
        let unreachable = |why| Error::Unreachable { server: self.server.clone(), why };
        let answer = tokio::time::timeout(self.patience, self.exchange(method.clone(), path, object)).await;
        let (status, body) = answer
            .unwrap_or_else(|_| Err(format!("no answer in {}", humantime::format_duration(self.patience))))
            .map_err(unreachable)?;
        let json: Option<Value> = serde_json::from_slice(&body).ok();
        if !status.is_success() {
            // An object of kind Status, or a line of text.
            let message = json.as_ref().and_then(|json| json["message"].as_str()).map(ToOwned::to_owned);
            let text = || String::from_utf8_lossy(&body).chars().take(200).collect();
            let message = message.unwrap_or_else(text);
            return Err(Error::Status { server: self.server.clone(), status, method, path: path.to_owned(), message });
        }
        json.ok_or_else(|| unreachable(format!("what it says to {method} {path} is no JSON")))
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        object: Option<&Value>,
    ) -> Result<(StatusCode, Bytes), String> {
        let stream = match self.dial {
            Some(address) => TcpStream::connect(address).await,
            None => TcpStream::connect((self.host.as_str(), self.port)).await,
        };
        let stream = stream.map_err(|error| format!("cannot connect: {error}"))?;
        let stream = TlsConnector::from(self.tls.clone()).connect(self.name.clone(), stream).await;
        let stream = stream.map_err(|error| format!("TLS handshake failed: {error}"))?;
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let body = object.map(serde_json::to_vec).transpose().map_err(|error| error.to_string())?;
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(header::HOST, format!("{host}:{}", self.port))
            .header(header::USER_AGENT, concat!("berth/", env!("CARGO_PKG_VERSION")))
            .header(header::ACCEPT, "application/json")
            .header(header::CONNECTION, "close");
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(bearer) = &self.bearer {
            request = request.header(header::AUTHORIZATION, bearer);
        }
        let request = request.body(Full::new(Bytes::from(body.unwrap_or_default()))).map_err(|e| e.to_string())?;
        let answered = http::ask(stream, request, BODY_LIMIT).await;
        let (status, body) = answered.map_err(|error| format!("no HTTP answer: {error}"))?;
        Ok((status, body.map_err(|error| format!("its answer broke off: {error}"))?))
    }
}

fn tls(access: &Access) -> Result<ClientConfig, Mistake> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| Mistake::new("server", &format!("no TLS: {error}")))?;
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&access.authority).flatten());
    if added == 0 {
        return Err(Mistake::new("certificate-authority", "it holds no certificate in PEM form"));
    }
    let builder = builder.with_root_certificates(roots);
    let Some((certificate, key)) = &access.client else { return Ok(builder.with_no_client_auth()) };
    let chain: Vec<_> = CertificateDer::pem_slice_iter(certificate).flatten().collect();
    if chain.is_empty() {
        return Err(Mistake::new("client-certificate", "it holds no certificate in PEM form"));
    }
    let key = PrivateKeyDer::from_pem_slice(key)
        .map_err(|error| Mistake::new("client-key", &format!("it holds no key in PEM form: {error}")))?;
    builder
        .with_client_auth_cert(chain, key)
        .map_err(|error| Mistake::new("client-key", &format!("it does not fit the client-certificate: {error}")))
}
