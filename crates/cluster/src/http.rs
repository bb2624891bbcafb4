//! Sends an HTTP request over an open connection, and reads the response. The connection is then
//! closed.

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};

/// The body of a response, or the reason why the body is incomplete.
pub type Body = Result<Bytes, Box<dyn Error + Send + Sync>>;

/// Connects to an address. With `source`, the connection is bound to that source address.
///
/// # Errors
/// Nothing listens at the address, or this node does not have the source address.
pub async fn connect_from(source: Option<IpAddr>, address: SocketAddr) -> io::Result<TcpStream> {
    let Some(source) = source else {
        return TcpStream::connect(address).await;
    };
    let socket = if source.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.bind(SocketAddr::new(source, 0))?;
    socket.connect(address).await
}

/// Sends a request, and reads at most `limit` bytes of the response's body.
///
/// # Errors
/// The server sent no HTTP response.
pub async fn fetch_response(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    request: Request<Full<Bytes>>,
    limit: usize,
) -> Result<(StatusCode, Body), hyper::Error> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // hyper needs both futures to be polled: the connection transfers the bytes of the request and
    // the response.
    tokio::pin!(connection);
    let answer = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), limit).collect().await;
        Ok((status, body.map(http_body_util::Collected::to_bytes)))
    };
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        _ = &mut connection => answer.await,
    }
}
