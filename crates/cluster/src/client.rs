//! A client of the cluster's API, which speaks JSON over HTTPS with the credentials of a kubeconfig
//! or a service account.
//!
//! The client is small on purpose: berth needs few kinds of objects, so they have no types here.
//! Each request has a connection of its own. So a request through a shim reaches an instance that
//! serves now, and no idle connection delays an instance's end.

use crate::http;
use crate::kubeconfig::{Access, KubeconfigError, Mistake, ServerUrl, Token};
use crate::tls::{self, TlsError};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Time limit of a request, unless [`Client::with_patience`] sets another.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// Size limit of a response's body. etcd stores no object above 1.5 MB.
const BODY_LIMIT: usize = 4 << 20;

/// Size limit of a response that is text, or a page of a list. The metrics of an apiserver in a
/// large cluster have some 10 MB.
const TEXT_LIMIT: usize = 64 << 20;

/// Length to which berth cuts the message of an apiserver in its own errors, in characters.
const MESSAGE_LIMIT: usize = 500;

/// Content type of a server-side apply. The name says YAML, but JSON is valid YAML.
const APPLY_CONTENT_TYPE: &str = "application/apply-patch+yaml";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig or its files cannot be used.
    #[error(transparent)]
    Credentials(#[from] KubeconfigError),
    /// The server sent no response, or a response that is not HTTP.
    #[error("{server}: {why}")]
    Unreachable {
        /// The server's URL, as written in the kubeconfig.
        server: String,
        why: String,
    },
    /// The server responded with an HTTP status that is an error.
    #[error("{server} answers {status} to {method} {path}: {message}")]
    Status {
        /// The server's URL, as written in the kubeconfig.
        server: String,
        status: StatusCode,
        method: Method,
        path: String,
        /// The message in the apiserver's response.
        message: String,
    },
}

impl Error {
    /// Returns the HTTP status, if the server responded.
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Status { status, .. } => Some(*status),
            Self::Credentials(_) | Self::Unreachable { .. } => None,
        }
    }
}

/// Turns a response with status 404 into `None`.
///
/// # Errors
/// Every error except 404.
pub fn none_if_missing(answer: Result<Value, Error>) -> Result<Option<Value>, Error> {
    match answer {
        Err(error) if error.status() == Some(StatusCode::NOT_FOUND) => Ok(None),
        other => other.map(Some),
    }
}

#[derive(Debug, Clone)]
pub struct Client {
    access: Arc<Access>,
    place: ServerUrl,
    /// Addresses that the client dials instead of the server's address, one after the other.
    dial: Vec<SocketAddr>,
    name: ServerName<'static>,
    tls: Arc<ClientConfig>,
    patience: Duration,
}

struct Ask<'a> {
    method: Method,
    path: &'a str,
    body: Option<(&'a str, &'a Value)>,
}

impl<'a> Ask<'a> {
    fn get(path: &'a str) -> Self {
        Self {
            method: Method::GET,
            path,
            body: None,
        }
    }

    fn with_object(method: Method, path: &'a str, object: &'a Value) -> Self {
        Self {
            method,
            path,
            body: Some(("application/json", object)),
        }
    }
}

impl Client {
    /// Makes a client from a kubeconfig's current context. The kubeconfig's files are read once,
    /// here; only a token's file is read again for every request.
    ///
    /// # Errors
    /// The kubeconfig's mistake, with its path.
    pub fn from_kubeconfig(path: &Path) -> Result<Self, KubeconfigError> {
        Access::read(path).and_then(|access| Self::new(&access).map_err(|why| why.with_path(path)))
    }

    /// Makes a client from a parsed kubeconfig.
    ///
    /// # Errors
    /// The server, a certificate or a key is invalid.
    pub fn new(access: &Access) -> Result<Self, Mistake> {
        let place = ServerUrl::parse(&access.server)?;
        let name = access.server_name.as_deref().unwrap_or(&place.host);
        let wrong = |_| {
            Mistake::new(
                "server",
                "the server's host is neither a name nor an address",
            )
        };
        let name = ServerName::try_from(name.to_owned()).map_err(wrong)?;
        if let Some(Token::Text(token)) = &access.token {
            bearer_value(token).map_err(|why| Mistake::new("token", why))?;
        }
        let tls = Arc::new(tls_config(access)?);
        Ok(Self {
            access: Arc::new(access.clone()),
            place,
            dial: Vec::new(),
            name,
            tls,
            patience: DEFAULT_TIMEOUT,
        })
    }

    /// Returns the client with another time limit for each request.
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Returns a client that dials these addresses instead of the kubeconfig's server, which may be
    /// any of several control-plane nodes. The first address that completes a TLS handshake is
    /// used. CA and credentials remain those of the kubeconfig.
    pub fn with_addresses(self, addresses: impl IntoIterator<Item = SocketAddr>) -> Self {
        Self {
            dial: addresses.into_iter().collect(),
            ..self
        }
    }

    /// Returns a client that expects `name` in the server's certificate, and also trusts the CAs in
    /// `ca` (PEM). It can dial instances directly: they may lack the name of the kubeconfig's
    /// server, which may be a load balancer with another CA.
    ///
    /// # Errors
    /// `name` is neither a DNS name nor an address.
    pub fn with_trust(self, name: &str, ca: &[u8]) -> Result<Self, Mistake> {
        let ca = [&self.access.ca, ca].join(&b'\n');
        let access = Access {
            server_name: Some(name.to_owned()),
            ca,
            ..(*self.access).clone()
        };
        Ok(Self {
            dial: self.dial,
            patience: self.patience,
            ..Self::new(&access)?
        })
    }

    /// Returns the server's URL, as written in the kubeconfig.
    pub fn server(&self) -> &str {
        &self.access.server
    }

    /// Reads an object, or a list.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn get(&self, path: &str) -> Result<Value, Error> {
        self.request_json(Ask::get(path)).await
    }

    /// Reads a response that is not JSON, such as metrics.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn get_text(&self, path: &str) -> Result<String, Error> {
        let body = self.fetch_body(Ask::get(path), TEXT_LIMIT).await?;
        String::from_utf8(body.into())
            .map_err(|_| self.unreachable_error(format!("the response to GET {path} is no UTF-8")))
    }

    /// Replaces an object. An object with a `resourceVersion` is replaced only if the version is
    /// unchanged.
    ///
    /// # Errors
    /// See [`Error`]; 409 if the `resourceVersion` has changed.
    pub async fn put(&self, path: &str, object: &Value) -> Result<Value, Error> {
        self.request_json(Ask::with_object(Method::PUT, path, object))
            .await
    }

    /// Creates an object. `path` is that of the list to which the object is added.
    ///
    /// # Errors
    /// See [`Error`]; 409 if the object exists.
    pub async fn post(&self, path: &str, object: &Value) -> Result<Value, Error> {
        self.request_json(Ask::with_object(Method::POST, path, object))
            .await
    }

    /// Server-side apply: creates or changes the object, and makes `manager` the owner of its
    /// fields, even if another manager owned them.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn apply(&self, path: &str, manager: &str, object: &Value) -> Result<Value, Error> {
        self.send_apply(&format!("{path}?fieldManager={manager}&force=true"), object)
            .await
    }

    /// Checks by a dry run that [`Self::apply`] would succeed. Nothing is written.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn try_apply(&self, path: &str, manager: &str, object: &Value) -> Result<(), Error> {
        self.send_apply(
            &format!("{path}?fieldManager={manager}&force=true&dryRun=All"),
            object,
        )
        .await
        .map(drop)
    }

    async fn send_apply(&self, path: &str, object: &Value) -> Result<Value, Error> {
        self.request_json(Ask {
            method: Method::PATCH,
            path,
            body: Some((APPLY_CONTENT_TYPE, object)),
        })
        .await
    }

    /// Deletes the object at a path, whatever its version.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn delete(&self, path: &str) -> Result<Value, Error> {
        self.request_json(Ask {
            method: Method::DELETE,
            path,
            body: None,
        })
        .await
    }

    /// Deletes an object that the caller has read, if its uid and resourceVersion are still those
    /// of `object`.
    ///
    /// # Errors
    /// See [`Error`]; 409 if they have changed.
    pub async fn delete_unchanged(&self, path: &str, object: &Value) -> Result<Value, Error> {
        let meta = &object["metadata"];
        let preconditions = json!({"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]});
        let options =
            json!({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions});
        self.request_json(Ask::with_object(Method::DELETE, path, &options))
            .await
    }

    /// True if the server answers `/readyz` with a success.
    pub async fn is_ready(&self) -> bool {
        self.fetch_body(Ask::get("/readyz"), BODY_LIMIT)
            .await
            .is_ok()
    }

    async fn request_json(&self, ask: Ask<'_>) -> Result<Value, Error> {
        let (method, path) = (ask.method.clone(), ask.path);
        let body = self.fetch_body(ask, BODY_LIMIT).await?;
        let json = serde_json::from_slice(&body).ok();
        json.ok_or_else(|| {
            self.unreachable_error(format!("the response to {method} {path} is no JSON"))
        })
    }

    async fn fetch_body(&self, ask: Ask<'_>, limit: usize) -> Result<Bytes, Error> {
        let (method, path) = (ask.method.clone(), ask.path);
        let answer = timeout(self.patience, self.exchange(ask, limit)).await;
        let answer = answer.unwrap_or_else(|_| {
            Err(format!(
                "no answer in {}",
                humantime::format_duration(self.patience)
            ))
        });
        let (status, body) = answer.map_err(|why| self.unreachable_error(why))?;
        if status.is_success() {
            Ok(body)
        } else {
            Err(self.refused_error(status, method, path, &body))
        }
    }

    fn unreachable_error(&self, why: String) -> Error {
        Error::Unreachable {
            server: self.server().to_owned(),
            why,
        }
    }

    /// Makes an error from a response. The error's message is the message of the Status object in
    /// the body, or else the body as text.
    fn refused_error(&self, status: StatusCode, method: Method, path: &str, body: &[u8]) -> Error {
        let json = serde_json::from_slice::<Value>(body).ok();
        let message = json
            .as_ref()
            .and_then(|json| json["message"].as_str())
            .map(ToOwned::to_owned);
        let message = message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
        // The message must fit into one line of a log or of a command's output.
        let message = message
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .chars()
            .take(MESSAGE_LIMIT)
            .collect();
        Error::Status {
            server: self.server().to_owned(),
            status,
            method,
            path: path.to_owned(),
            message,
        }
    }

    async fn exchange(&self, ask: Ask<'_>, limit: usize) -> Result<(StatusCode, Bytes), String> {
        let request = self.build_request(ask).await?;
        let answered = http::fetch_response(self.connect().await?, request, limit).await;
        let (status, body) = answered.map_err(|error| format!("no HTTP answer: {error}"))?;
        Ok((
            status,
            body.map_err(|error| format!("its answer broke off: {error}"))?,
        ))
    }

    /// Connects to the first address that completes a TLS handshake. Each address but the last gets
    /// a quarter of the timeout.
    async fn connect(&self) -> Result<TlsStream<TcpStream>, String> {
        let Some((last, first)) = self.dial.split_last() else {
            return self
                .handshake(TcpStream::connect((self.place.host.as_str(), self.place.port)).await)
                .await;
        };
        for address in first {
            let dialled = async {
                self.handshake(http::connect_from(None, *address).await)
                    .await
            };
            if let Ok(Ok(stream)) = timeout(self.patience / 4, dialled).await {
                return Ok(stream);
            }
        }
        self.handshake(http::connect_from(None, *last).await)
            .await
            .map_err(|why| format!("at {last}: {why}"))
    }

    async fn handshake(
        &self,
        stream: std::io::Result<TcpStream>,
    ) -> Result<TlsStream<TcpStream>, String> {
        let stream = stream.map_err(|error| format!("cannot connect: {error}"))?;
        let stream = TlsConnector::from(self.tls.clone())
            .connect(self.name.clone(), stream)
            .await;
        stream.map_err(|error| format!("TLS handshake failed: {error}"))
    }

    async fn build_request(&self, ask: Ask<'_>) -> Result<Request<Full<Bytes>>, String> {
        let Ask { method, path, body } = ask;
        let ServerUrl { host, port, prefix } = &self.place;
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host.clone()
        };
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{prefix}{path}"))
            .header(header::HOST, format!("{host}:{port}"))
            .header(
                header::USER_AGENT,
                concat!("berth/", env!("CARGO_PKG_VERSION")),
            )
            .header(header::ACCEPT, "application/json")
            .header(header::CONNECTION, "close");
        let mut bytes = Vec::new();
        if let Some((content_type, object)) = body {
            request = request.header(header::CONTENT_TYPE, content_type);
            bytes = serde_json::to_vec(object).map_err(|error| error.to_string())?;
        }
        match &self.access.token {
            None => {}
            Some(Token::Text(token)) => {
                request = request.header(header::AUTHORIZATION, bearer_value(token)?);
            }
            Some(Token::File(path)) => {
                let failed = |what: String| format!("token file {}: {what}", path.display());
                // Another thread reads the file: a read may take seconds on a disk that etcd keeps
                // busy, and a shim sends its probes on this thread.
                let file = path.clone();
                let read = tokio::task::spawn_blocking(move || fs::read_to_string(file)).await;
                let token = read.unwrap_or_else(|error| Err(error.into()));
                let token = token.map_err(|error| failed(format!("cannot be read: {error}")))?;
                let value = bearer_value(token.trim()).map_err(|why| failed(why.to_owned()))?;
                request = request.header(header::AUTHORIZATION, value);
            }
        }
        request
            .body(Full::new(Bytes::from(bytes)))
            .map_err(|error| error.to_string())
    }
}

fn bearer_value(token: &str) -> Result<header::HeaderValue, &'static str> {
    let value = header::HeaderValue::try_from(format!("Bearer {token}"));
    let mut value = value.map_err(|_| "the token has characters that no token may have")?;
    value.set_sensitive(true);
    Ok(value)
}

fn tls_config(access: &Access) -> Result<ClientConfig, Mistake> {
    let client = access
        .client
        .as_ref()
        .map(|(certificate, key)| (&certificate[..], &key[..]));
    tls::from_pem(Some(&access.ca), client).map_err(|error| {
        let (field, why) = match error {
            TlsError::Ca(why) => ("certificate-authority", why),
            TlsError::Certificate(why) => ("client-certificate", why),
            TlsError::Key(why) => ("client-key", why),
        };
        Mistake::new(field, &format!("the value {why}"))
    })
}
