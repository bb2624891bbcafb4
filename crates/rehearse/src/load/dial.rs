//! A client's connection: TCP, TLS with a checked certificate, and HTTP. Failures of the connection
//! are classified here, too.

use super::observe::{EndSignals, Observed};
use super::{Instances, Joined, objects};
use crate::record::{
    event::{Answer, Failure, Protocol, STREAM_HEADER, Signed, StreamEnd, StreamId, StreamKind},
    stamp::Stamp,
};
use crate::testbed::certs::{Certs, Names};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::{http1, http2};
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpSocket;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Names a client in audit logs.
const USER_AGENT: &str = concat!("berth-rehearse/", env!("CARGO_PKG_VERSION"));

/// Time limit for the TLS close when this side closes a connection.
const GOODBYE: Duration = Duration::from_secs(1);

/// Keepalive with which an idle connection ends 30 s after the last packet of its peer. client-go
/// notices a dead peer after 45 s, by pings of HTTP/2.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(15))
    .with_interval(Duration::from_secs(5))
    .with_retries(3);

/// Stands for a server with a trusted certificate that belongs to no instance.
const STRANGER: &str = "unknown";

/// The address to dial and the certificates to trust.
#[derive(Clone)]
pub struct Target {
    address: SocketAddr,
    /// The name that every server's certificate must contain, whatever address is dialled.
    name: ServerName<'static>,
    names: Names,
    http1: TlsConnector,
    http2: TlsConnector,
    source: Option<IpAddr>,
    agent: String,
}

impl Target {
    /// The berth's address. The certificates must contain the IP.
    pub fn new(address: SocketAddr, certs: &Certs) -> Result<Self, rustls::Error> {
        Ok(Self::of(
            address,
            certs.names.clone(),
            &certs.client_config()?,
        ))
    }

    /// Like [`Target::new`], as an admin.
    pub(super) fn admin(address: SocketAddr, certs: &Certs) -> Result<Self, rustls::Error> {
        Ok(Self::of(
            address,
            certs.names.clone(),
            &certs.admin_config()?,
        ))
    }

    /// A target with the certificates of `config`.
    pub(super) fn of(address: SocketAddr, names: Names, config: &rustls::ClientConfig) -> Self {
        let connector = |alpn: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols = vec![alpn.to_vec()];
            TlsConnector::from(Arc::new(config))
        };
        Self {
            address,
            name: ServerName::IpAddress(address.ip().into()),
            names,
            http1: connector(b"http/1.1"),
            http2: connector(b"h2"),
            source: None,
            agent: USER_AGENT.to_owned(),
        }
    }

    pub(super) fn at(&self, instance: &Joined) -> Self {
        Self {
            address: instance.address,
            ..self.clone()
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns a target for each instance, the latest first. If there are no instances, returns the
    /// berth's address as the only target.
    pub(super) fn direct(&self, instances: &Instances) -> Vec<Self> {
        let mut targets: Vec<Self> = instances
            .iter()
            .rev()
            .map(|joined| self.at(joined))
            .collect();
        if targets.is_empty() {
            targets.push(self.clone());
        }
        targets
    }

    /// A target dialled from a given source address, with a given user agent.
    pub(super) fn from(&self, source: IpAddr, agent: String) -> Self {
        Self {
            source: Some(source),
            agent,
            ..self.clone()
        }
    }

    /// A socket to dial from.
    pub(super) fn socket(&self) -> Result<TcpSocket, Failure> {
        let socket = || {
            let socket = if self.address.is_ipv4() {
                TcpSocket::new_v4()
            } else {
                TcpSocket::new_v6()
            }?;
            // With keepalive, an idle connection also ends when its peer is gone without a FIN.
            SockRef::from(&socket).set_tcp_keepalive(&KEEPALIVE)?;
            if let Some(source) = self.source {
                socket.bind((source, 0).into())?;
            }
            Ok(socket)
        };
        socket().map_err(|e| io_failure(&e))
    }

    /// Connects. There is no time limit here: callers have their own.
    pub(super) async fn dial(&self, protocol: Protocol, stream: StreamId) -> Result<Link, Failure> {
        self.dial_from(self.socket()?, protocol, stream).await
    }

    /// Connects from a given socket.
    pub(super) async fn dial_from(
        &self,
        socket: TcpSocket,
        protocol: Protocol,
        stream: StreamId,
    ) -> Result<Link, Failure> {
        let tcp = socket
            .connect(self.address)
            .await
            .map_err(|e| io_failure(&e))?;
        let _ = tcp.set_nodelay(true);
        let connector = match protocol {
            Protocol::Http1 => &self.http1,
            Protocol::Http2 => &self.http2,
        };
        let tls = connector
            .connect(self.name.clone(), tcp)
            .await
            .map_err(|e| io_failure(&e))?;
        let instance = self.names.instance(tls.get_ref().1.peer_certificates());
        let observed = Observed::new(tls, protocol == Protocol::Http2);
        let end_signals = observed.end_signals();
        let io = TokioIo::new(observed);
        let over = CancellationToken::new();
        let (sender, driver) = match protocol {
            Protocol::Http1 => {
                let (sender, connection) =
                    http1::handshake(io).await.map_err(|e| http_failure(&e))?;
                (
                    Sender::Http1(sender),
                    tokio::spawn(drive_connection(connection, over.clone())),
                )
            }
            Protocol::Http2 => {
                let handshake = http2::handshake(TokioExecutor::new(), io);
                let (sender, connection) = handshake.await.map_err(|e| http_failure(&e))?;
                (
                    Sender::Http2(sender),
                    tokio::spawn(drive_connection(connection, over.clone())),
                )
            }
        };
        Ok(Link {
            instance: instance.unwrap_or_else(|| STRANGER.to_owned()),
            stream,
            protocol,
            sender,
            driver,
            end_signals,
            last_answer: false,
            host: self.address.to_string(),
            agent: self.agent.clone(),
            _open: over.drop_guard(),
        })
    }
}

enum Sender {
    Http1(http1::SendRequest<Full<Bytes>>),
    Http2(http2::SendRequest<Full<Bytes>>),
}

/// An open connection. Dropping the value closes the connection.
pub(super) struct Link {
    /// The instance, by its certificate.
    pub(super) instance: String,
    pub(super) stream: StreamId,
    protocol: Protocol,
    sender: Sender,
    driver: JoinHandle<hyper::Result<()>>,
    end_signals: EndSignals,
    /// True if the instance announced its last answer.
    last_answer: bool,
    host: String,
    agent: String,
    /// Stops the driver on drop.
    _open: DropGuard,
}

/// Moves the bytes of a connection until it ends. When this side closes the connection, the TLS
/// close has [`GOODBYE`], because an outstanding answer must not keep the connection open.
async fn drive_connection(
    connection: impl Future<Output = hyper::Result<()>>,
    over: CancellationToken,
) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    tokio::select! {
        result = connection.as_mut() => result,
        () = over.cancelled() => tokio::time::timeout(GOODBYE, connection).await.unwrap_or(Ok(())),
    }
}

/// A request without an answer.
pub(super) enum Unsent {
    /// Not a byte of the request left this process: the connection had ended already.
    NeverSent,
    /// The request may have left.
    Died(Failure),
}

impl Link {
    /// Sends a request, and returns the answer's head.
    pub(super) async fn send(
        &mut self,
        request: objects::Request,
    ) -> Result<Response<Incoming>, Unsent> {
        let uri = match self.sender {
            Sender::Http1(_) => request.path,
            Sender::Http2(_) => format!("https://{}{}", self.host, request.path),
        };
        let mut builder = Request::builder()
            .method(request.method.clone())
            .uri(uri)
            .header(header::HOST, &self.host)
            .header(header::USER_AGENT, &self.agent)
            .header(header::ACCEPT, "application/json")
            .header(STREAM_HEADER, &self.stream);
        if request.method == Method::POST {
            builder = builder.header(header::CONTENT_TYPE, "application/json");
        }
        let request = builder
            .body(request.body.into())
            .map_err(|e| Unsent::Died(Failure::Local(e.to_string())))?;
        let sent = match &mut self.sender {
            Sender::Http1(sender) => sender.try_send_request(request).await,
            Sender::Http2(sender) => sender.try_send_request(request).await,
        };
        let response = sent.map_err(|mut error| match error.take_message() {
            Some(_) => Unsent::NeverSent,
            None => Unsent::Died(http_failure(error.error())),
        })?;
        self.last_answer |= response
            .headers()
            .get(header::CONNECTION)
            .is_some_and(|value| value == "close");
        Ok(response)
    }

    /// Sends the first request of a connection.
    pub(super) async fn first(
        &mut self,
        request: objects::Request,
    ) -> Result<Response<Incoming>, Failure> {
        match self.send(request).await {
            Ok(response) => Ok(response),
            Err(Unsent::Died(failure)) => Err(failure),
            Err(Unsent::NeverSent) => Err(self.ended().await),
        }
    }

    /// Sends the first request of a connection, and returns the whole answer.
    pub(super) async fn ask(
        &mut self,
        request: objects::Request,
    ) -> Result<(StatusCode, Bytes), Failure> {
        let response = self.first(request).await?;
        let status = response.status();
        Ok((status, read_body(response.into_body()).await?))
    }

    /// Turns a status into an answer.
    pub(super) fn answer_of(&self, status: StatusCode) -> Answer {
        let (instance, status) = (self.instance.clone(), status.as_u16());
        if status < 400 {
            Answer::Good { instance }
        } else {
            Answer::Bad { instance, status }
        }
    }

    /// Waits until the connection ends for another reason than a close by this side, and returns
    /// the reason. Cancel-safe.
    pub(super) async fn ended(&mut self) -> Failure {
        match (&mut self.driver).await {
            Ok(Ok(())) => Failure::Closed,
            Ok(Err(error)) => http_failure(&error),
            Err(error) => Failure::Local(error.to_string()),
        }
    }

    /// Describes the end of the connection, which the client sees now. `end_of_answer` is true if a
    /// streamed answer in flight ended regularly.
    pub(super) fn end(
        &self,
        what: StreamKind,
        how: Failure,
        in_flight: bool,
        end_of_answer: bool,
    ) -> StreamEnd {
        let signed = if end_of_answer {
            Some(Signed::EndOfAnswer)
        } else if self.end_signals.close_notify() {
            Some(Signed::CloseNotify)
        } else if self.last_answer && !in_flight {
            Some(Signed::LastAnswer)
        } else if self.end_signals.goaway() && (!in_flight || matches!(how, Failure::Http(_))) {
            Some(Signed::GoAway)
        } else {
            None
        };
        StreamEnd {
            stream: self.stream.clone(),
            what,
            protocol: self.protocol,
            instance: self.instance.clone(),
            at: Stamp::now(),
            how,
            in_flight,
            signed,
        }
    }
}

/// Turns a step that takes longer than `bound` into [`Failure::Unanswered`].
pub(super) async fn within<T>(
    bound: Duration,
    step: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    tokio::time::timeout(bound, step)
        .await
        .unwrap_or(Err(Failure::Unanswered))
}

/// Reads a body to its end.
pub(super) async fn read_body(body: Incoming) -> Result<Bytes, Failure> {
    body.collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .map_err(|e| http_failure(&e))
}

/// Classifies an I/O error of connect or TLS.
fn io_failure(error: &io::Error) -> Failure {
    use io::ErrorKind as Kind;
    match error
        .get_ref()
        .and_then(|e| e.downcast_ref::<rustls::Error>())
    {
        Some(x509 @ rustls::Error::InvalidCertificate(_)) => {
            return Failure::X509(x509.to_string());
        }
        Some(tls) => return Failure::Tls(tls.to_string()),
        None => {}
    }
    match error.kind() {
        Kind::ConnectionRefused => Failure::Refused,
        Kind::ConnectionReset | Kind::BrokenPipe | Kind::ConnectionAborted => Failure::Reset,
        Kind::UnexpectedEof => Failure::Closed,
        Kind::TimedOut => Failure::Unanswered,
        _ => Failure::Local(error.to_string()),
    }
}

/// Classifies an HTTP error, most often by an I/O error further down.
pub(super) fn http_failure(error: &hyper::Error) -> Failure {
    let mut source = error.source();
    while let Some(cause) = source {
        let io = cause.downcast_ref::<io::Error>();
        // HTTP/2's errors do not show their source.
        if let Some(io) = io.or_else(|| cause.downcast_ref::<h2::Error>()?.get_io()) {
            return io_failure(io);
        }
        source = cause.source();
    }
    if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        return Failure::Closed;
    }
    Failure::Http(error.to_string())
}
