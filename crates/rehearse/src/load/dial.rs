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

/// User agent of the clients, for audit logs.
const USER_AGENT: &str = concat!("berth-rehearse/", env!("CARGO_PKG_VERSION"));

/// Time limit for the TLS close when this side closes a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Keepalive with which an idle connection ends 30 s after the last packet of its peer. client-go
/// notices a dead peer after 45 s, by pings of HTTP/2.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(15))
    .with_interval(Duration::from_secs(5))
    .with_retries(3);

/// Name of the answering instance if its certificate is trusted, but is no instance's.
const UNKNOWN_INSTANCE: &str = "unknown";

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
    /// A target at the berth's address, for which every serving certificate must be valid.
    pub fn new(address: SocketAddr, certs: &Certs) -> Result<Self, rustls::Error> {
        Ok(Self::with_config(
            address,
            certs.names.clone(),
            &certs.client_config()?,
        ))
    }

    /// Like [`Target::new`], with an admin's client certificate.
    pub(super) fn new_admin(address: SocketAddr, certs: &Certs) -> Result<Self, rustls::Error> {
        Ok(Self::with_config(
            address,
            certs.names.clone(),
            &certs.admin_config()?,
        ))
    }

    /// A target with the certificates of `config`.
    pub(super) fn with_config(
        address: SocketAddr,
        names: Names,
        config: &rustls::ClientConfig,
    ) -> Self {
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

    pub(super) fn with_instance(&self, instance: &Joined) -> Self {
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
    pub(super) fn instance_targets(&self, instances: &Instances) -> Vec<Self> {
        let mut targets: Vec<Self> = instances
            .iter()
            .rev()
            .map(|joined| self.with_instance(joined))
            .collect();
        if targets.is_empty() {
            targets.push(self.clone());
        }
        targets
    }

    /// A target dialled from a given source address, with a given user agent.
    pub(super) fn with_source(&self, source: IpAddr, agent: String) -> Self {
        Self {
            source: Some(source),
            agent,
            ..self.clone()
        }
    }

    /// Makes the socket of a connection, bound to the source address if the target has one.
    pub(super) fn open_socket(&self) -> Result<TcpSocket, Failure> {
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
        socket().map_err(|e| classify_io_error(&e))
    }

    /// Connects. There is no time limit here: callers have their own.
    pub(super) async fn dial(&self, protocol: Protocol, stream: StreamId) -> Result<Link, Failure> {
        self.dial_from(self.open_socket()?, protocol, stream).await
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
            .map_err(|e| classify_io_error(&e))?;
        let _ = tcp.set_nodelay(true);
        let connector = match protocol {
            Protocol::Http1 => &self.http1,
            Protocol::Http2 => &self.http2,
        };
        let tls = connector
            .connect(self.name.clone(), tcp)
            .await
            .map_err(|e| classify_io_error(&e))?;
        let instance = self
            .names
            .instance_of_chain(tls.get_ref().1.peer_certificates());
        let observed = Observed::new(tls, protocol == Protocol::Http2);
        let end_signals = observed.end_signals();
        let io = TokioIo::new(observed);
        let over = CancellationToken::new();
        let (sender, driver) = match protocol {
            Protocol::Http1 => {
                let (sender, connection) = http1::handshake(io)
                    .await
                    .map_err(|e| classify_http_error(&e))?;
                (
                    Sender::Http1(sender),
                    tokio::spawn(drive_connection(connection, over.clone())),
                )
            }
            Protocol::Http2 => {
                let handshake = http2::handshake(TokioExecutor::new(), io);
                let (sender, connection) = handshake.await.map_err(|e| classify_http_error(&e))?;
                (
                    Sender::Http2(sender),
                    tokio::spawn(drive_connection(connection, over.clone())),
                )
            }
        };
        Ok(Link {
            instance: instance.unwrap_or_else(|| UNKNOWN_INSTANCE.to_owned()),
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
    /// Name of the instance, known by its serving certificate.
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
    /// Ends the task that moves the connection's bytes, when dropped.
    _open: DropGuard,
}

/// Moves the bytes of a connection until it ends. If this side closes the connection, the TLS close
/// may take [`CLOSE_TIMEOUT`] at most, because an outstanding answer must not keep the connection
/// open.
async fn drive_connection(
    connection: impl Future<Output = hyper::Result<()>>,
    over: CancellationToken,
) -> hyper::Result<()> {
    let mut connection = pin!(connection);
    tokio::select! {
        result = connection.as_mut() => result,
        () = over.cancelled() => tokio::time::timeout(CLOSE_TIMEOUT, connection).await.unwrap_or(Ok(())),
    }
}

/// The reason why a request has no answer.
pub(super) enum SendError {
    /// Not a byte of the request left this process: the connection had ended already.
    NeverSent,
    /// The request, or a part of it, may have reached the instance.
    Died(Failure),
}

impl Link {
    /// Sends a request, and returns the answer's head.
    pub(super) async fn send(
        &mut self,
        request: objects::Request,
    ) -> Result<Response<Incoming>, SendError> {
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
            .map_err(|e| SendError::Died(Failure::Local(e.to_string())))?;
        let sent = match &mut self.sender {
            Sender::Http1(sender) => sender.try_send_request(request).await,
            Sender::Http2(sender) => sender.try_send_request(request).await,
        };
        let response = sent.map_err(|mut error| match error.take_message() {
            Some(_) => SendError::NeverSent,
            None => SendError::Died(classify_http_error(error.error())),
        })?;
        self.last_answer |= response
            .headers()
            .get(header::CONNECTION)
            .is_some_and(|value| value == "close");
        Ok(response)
    }

    /// Sends the first request of a connection, and returns the answer's head. A connection that
    /// has ended already is a failure of the request.
    pub(super) async fn send_first(
        &mut self,
        request: objects::Request,
    ) -> Result<Response<Incoming>, Failure> {
        match self.send(request).await {
            Ok(response) => Ok(response),
            Err(SendError::Died(failure)) => Err(failure),
            Err(SendError::NeverSent) => Err(self.wait_for_end().await),
        }
    }

    /// Sends the first request of a connection, and returns the whole answer.
    pub(super) async fn ask(
        &mut self,
        request: objects::Request,
    ) -> Result<(StatusCode, Bytes), Failure> {
        let response = self.send_first(request).await?;
        let status = response.status();
        Ok((status, read_body(response.into_body()).await?))
    }

    /// Classifies a status: good below 400.
    pub(super) fn to_answer(&self, status: StatusCode) -> Answer {
        let (instance, status) = (self.instance.clone(), status.as_u16());
        if status < 400 {
            Answer::Good { instance }
        } else {
            Answer::Bad { instance, status }
        }
    }

    /// Waits until the connection ends for another reason than a close by this side, and returns
    /// the reason. Cancel-safe.
    pub(super) async fn wait_for_end(&mut self) -> Failure {
        match (&mut self.driver).await {
            Ok(Ok(())) => Failure::Closed,
            Ok(Err(error)) => classify_http_error(&error),
            Err(error) => Failure::Local(error.to_string()),
        }
    }

    /// Describes the end of the connection, which the client sees now. `end_of_answer` is true if a
    /// streamed answer in flight ended regularly.
    pub(super) fn describe_end(
        &self,
        what: StreamKind,
        how: Failure,
        in_flight: bool,
        end_of_answer: bool,
    ) -> StreamEnd {
        let signed = if end_of_answer {
            Some(Signed::EndOfAnswer)
        } else if self.end_signals.has_close_notify() {
            Some(Signed::CloseNotify)
        } else if self.last_answer && !in_flight {
            Some(Signed::LastAnswer)
        } else if self.end_signals.has_goaway() && (!in_flight || matches!(how, Failure::Http(_))) {
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
pub(super) async fn limit_time<T>(
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
        .map_err(|e| classify_http_error(&e))
}

/// Classifies an I/O error of connect or TLS.
fn classify_io_error(error: &io::Error) -> Failure {
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
pub(super) fn classify_http_error(error: &hyper::Error) -> Failure {
    let mut source = error.source();
    while let Some(cause) = source {
        let io = cause.downcast_ref::<io::Error>();
        // An error of HTTP/2 does not have the I/O error as its source: `get_io` returns it.
        if let Some(io) = io.or_else(|| cause.downcast_ref::<h2::Error>()?.get_io()) {
            return classify_io_error(io);
        }
        source = cause.source();
    }
    if error.is_incomplete_message() || error.is_canceled() || error.is_closed() {
        return Failure::Closed;
    }
    Failure::Http(error.to_string())
}
