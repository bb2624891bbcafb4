//! One HTTP request over an open connection, and its response. Then the connection is closed.

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};

/// A body, or why it is incomplete.
pub type Body = Result<Bytes, Box<dyn Error + Send + Sync>>;

/// A connection to an address, from another one if that matters.
///
/// # Errors
/// Nothing listens there, or the source is no address of this node.
pub async fn connect(source: Option<IpAddr>, address: SocketAddr) -> io::Result<TcpStream> {
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

/// Sends a request, and reads at most this many bytes of the answer's body.
///
/// # Errors
/// There is no answer in HTTP.
pub async fn ask(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    request: Request<Full<Bytes>>,
    limit: usize,
) -> Result<(StatusCode, Body), hyper::Error> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // The connection is driven at the same time as the request.
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
