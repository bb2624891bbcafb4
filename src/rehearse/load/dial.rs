//! A client's connection: TCP, TLS with the certificate checked, HTTP. And what its failures mean.

use super::super::record::{Failure, INSTANCE_HEADER, STREAM_HEADER, StreamId};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response, header};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::{CertificateDer, ServerName};
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Names a client in audit logs.
const USER_AGENT: &str = concat!("berth-rehearse/", env!("CARGO_PKG_VERSION"));

/// Time for the goodbye of a connection that this side closes.
const GOODBYE: Duration = Duration::from_secs(1);

/// HTTP version of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

impl Protocol {
    /// Half of the clients each.
    pub(super) fn of(index: u64) -> Self {
        if index.is_multiple_of(2) { Self::Http1 } else { Self::Http2 }
    }
}

/// Where to dial and whom to trust.
#[derive(Clone)]
pub struct Target {
    address: SocketAddr,
    name: ServerName<'static>,
    http1: TlsConnector,
    http2: TlsConnector,
}

impl Target {
    /// The berth's address; its IP must be in the certificate, signed by `ca`.
    pub fn new(address: SocketAddr, ca: &CertificateDer<'static>) -> Result<Self, rustls::Error> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca.clone())?;
        let roots = Arc::new(roots);
        let connector = |alpn: &[u8]| -> Result<TlsConnector, rustls::Error> {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let mut config = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()?
                .with_root_certificates(Arc::clone(&roots))
                .with_no_client_auth();
            config.alpn_protocols = vec![alpn.to_vec()];
            // A new connection is to be a whole handshake, whoever answers.
            config.resumption = rustls::client::Resumption::disabled();
            Ok(TlsConnector::from(Arc::new(config)))
        };
        let name = ServerName::IpAddress(address.ip().into());
        Ok(Self { address, name, http1: connector(b"http/1.1")?, http2: connector(b"h2")? })
    }

    /// Connects. There is no bound here: callers have their own.
    pub(super) async fn dial(&self, protocol: Protocol, stream: StreamId) -> Result<Link, Failure> {
        let tcp = TcpStream::connect(self.address).await.map_err(|e| io_failure(&e))?;
        let _ = tcp.set_nodelay(true);
        let connector = match protocol {
            Protocol::Http1 => &self.http1,
            Protocol::Http2 => &self.http2,
        };
        let tls = connector.connect(self.name.clone(), tcp).await.map_err(|e| io_failure(&e))?;
        let io = TokioIo::new(tls);
        let over = CancellationToken::new();
        let (sender, driver) = match protocol {
            Protocol::Http1 => {
                let (sender, connection) = http1::handshake(io).await.map_err(|e| http_failure(&e))?;
                (Sender::Http1(sender), tokio::spawn(drive(connection, over.clone())))
            }
            Protocol::Http2 => {
                let handshake = http2::handshake(TokioExecutor::new(), io);
                let (sender, connection) = handshake.await.map_err(|e| http_failure(&e))?;
                (Sender::Http2(sender), tokio::spawn(drive(connection, over.clone())))
            }
        };
        Ok(Link { sender, driver, stream, host: self.address.to_string(), _open: over.drop_guard() })
    }
}

enum Sender {
    Http1(http1::SendRequest<Empty<Bytes>>),
    Http2(http2::SendRequest<Empty<Bytes>>),
}

/// An open connection. Dropping it closes the connection.
pub(super) struct Link {
    sender: Sender,
    driver: JoinHandle<hyper::Result<()>>,
    pub(super) stream: StreamId,
    host: String,
    /// Tells the driver that this side wants no more.
    _open: DropGuard,
}

/// Moves the bytes of a connection until it is over. When this side wants no more, it gets a moment
/// for the TLS close; an answer that never comes must not keep it open.
async fn drive(connection: impl Future<Output = hyper::Result<()>>, over: CancellationToken) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    tokio::select! {
        result = connection.as_mut() => result,
        () = over.cancelled() => tokio::time::timeout(GOODBYE, connection).await.unwrap_or(Ok(())),
    }
}

/// A request that was not answered.
pub(super) enum Unsent {
    /// Not a byte of it left this process: the connection was over already.
    NeverSent,
    /// It may have left.
    Died(Failure),
}

impl Link {
    /// Sends a GET; the answer's head.
    pub(super) async fn get(&mut self, path: &str) -> Result<Response<Incoming>, Unsent> {
        let uri = match self.sender {
            Sender::Http1(_) => path.to_owned(),
            Sender::Http2(_) => format!("https://{}{path}", self.host),
        };
        let request = Request::get(uri)
            .header(header::HOST, &self.host)
            .header(header::USER_AGENT, USER_AGENT)
            .header(header::ACCEPT, "application/json")
            .header(STREAM_HEADER, &self.stream)
            .body(Empty::new())
            .map_err(|e| Unsent::Died(Failure::Local(e.to_string())))?;
        let sent = match &mut self.sender {
            Sender::Http1(sender) => sender.try_send_request(request).await,
            Sender::Http2(sender) => sender.try_send_request(request).await,
        };
        sent.map_err(|mut error| match error.take_message() {
            Some(_) => Unsent::NeverSent,
            None => Unsent::Died(http_failure(error.error())),
        })
    }

    /// Waits until the connection ends without this side wanting it; how it did. Cancel-safe.
    pub(super) async fn ended(&mut self) -> Failure {
        match (&mut self.driver).await {
            Ok(Ok(())) => Failure::Closed,
            Ok(Err(error)) => http_failure(&error),
            Err(error) => Failure::Local(error.to_string()),
        }
    }
}

/// Who answered.
pub(super) fn instance<B>(response: &Response<B>) -> String {
    let header = response.headers().get(INSTANCE_HEADER).and_then(|v| v.to_str().ok());
    header.unwrap_or("unknown").to_owned()
}

/// Reads a body to its end.
pub(super) async fn whole(body: Incoming) -> Result<Bytes, Failure> {
    body.collect().await.map(http_body_util::Collected::to_bytes).map_err(|e| http_failure(&e))
}

/// What an I/O error of connect or TLS means.
fn io_failure(error: &io::Error) -> Failure {
    use io::ErrorKind as Kind;
    if let Some(tls) = error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
        return Failure::Tls(tls.to_string());
    }
    match error.kind() {
        Kind::ConnectionRefused => Failure::Refused,
        Kind::ConnectionReset | Kind::BrokenPipe | Kind::ConnectionAborted => Failure::Reset,
        Kind::UnexpectedEof => Failure::Closed,
        Kind::TimedOut => Failure::Unanswered,
        _ => Failure::Local(error.to_string()),
    }
}

/// What an error of HTTP means: most often an I/O error further down.
pub(super) fn http_failure(error: &hyper::Error) -> Failure {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(io) = cause.downcast_ref::<io::Error>() {
            return io_failure(io);
        }
        source = cause.source();
    }
    if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        return Failure::Closed;
    }
    Failure::Http(error.to_string())
}
