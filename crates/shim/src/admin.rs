//! The admin server: /metrics, /livez, /readyz and /status by HTTP.
//!
//! The admin port is shared (SO_REUSEPORT), because two pods of a template share the host's
//! network. So /metrics and /status answer for every live shim of the berth, whichever shim gets
//! the request.

use crate::shared::Shared;
use berth_node::terms::shorten_wait;
use berth_os::explained;
use berth_os::socket;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Maximum number of connections to the admin port at once. Each connection holds a descriptor, and
/// more descriptors while siblings are asked. Scrapers and probes are few.
pub(crate) const MAX_CONNECTIONS: usize = 32;

/// How long a client may take to send its request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a client may be connected, and how much longer an answer on its way may take.
/// Afterwards, a scraper that keeps its connection has to open a new connection, and a client that
/// does not read answers releases its place.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

const METRICS_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The admin server, which listens and does not answer yet.
#[derive(Debug)]
pub(crate) struct Admin {
    listener: TcpListener,
}

impl Admin {
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Self> {
        let bound = socket::bind(address, false)?;
        socket::start_listening(bound.as_fd(), 128)?;
        Ok(Self {
            listener: TcpListener::from_std(StdTcpListener::from(bound))?,
        })
    }

    /// Answers until dropped.
    pub(crate) async fn serve(self, shim: Shared) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut troubled = false;
        loop {
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => {
                    troubled = false;
                    stream
                }
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        tracing::warn!(
                            code = %explained::SOCKET_NOT_ACCEPTED,
                            %error,
                            "cannot accept on the admin port, trying again"
                        );
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let shim = shim.clone();
            tokio::spawn(async move {
                let service = service_fn(async |request| {
                    Ok::<_, Infallible>(answer_request(&shim, &request).await)
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(shorten_wait(HEAD_TIMEOUT))
                    .serve_connection(TokioIo::new(stream), service);
                let mut connection = pin!(connection);
                let mut served =
                    timeout(shorten_wait(CONNECTION_TIMEOUT), connection.as_mut()).await;
                if served.is_err() {
                    connection.as_mut().graceful_shutdown();
                    served = timeout(shorten_wait(LAST_ANSWER_TIMEOUT), connection).await;
                }
                match served {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "an admin connection ended"),
                    Err(_) => {
                        tracing::debug!("an admin connection was ended: its answers were not read");
                    }
                }
                drop(place);
            });
        }
    }
}

async fn answer_request(shim: &Shared, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    const TEXT_CONTENT_TYPE: &str = "text/plain; charset=utf-8";
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return build_response(
            StatusCode::METHOD_NOT_ALLOWED,
            TEXT_CONTENT_TYPE,
            "only GET\n".into(),
        );
    }
    match request.uri().path() {
        "/metrics" => build_response(
            StatusCode::OK,
            METRICS_CONTENT_TYPE,
            shim.all_metrics().await,
        ),
        "/livez" => build_response(StatusCode::OK, TEXT_CONTENT_TYPE, "ok\n".into()),
        "/readyz" => match shim.status().await.check_ready() {
            Ok(()) => build_response(StatusCode::OK, TEXT_CONTENT_TYPE, "ok\n".into()),
            Err(why) => build_response(
                StatusCode::SERVICE_UNAVAILABLE,
                TEXT_CONTENT_TYPE,
                format!("{why}\n"),
            ),
        },
        "/status" => match shim
            .all_status()
            .await
            .and_then(|all| serde_json::to_string_pretty(&all))
        {
            Ok(json) => build_response(StatusCode::OK, "application/json", json + "\n"),
            Err(error) => build_response(
                StatusCode::INTERNAL_SERVER_ERROR,
                TEXT_CONTENT_TYPE,
                format!("{error}\n"),
            ),
        },
        _ => build_response(
            StatusCode::NOT_FOUND,
            TEXT_CONTENT_TYPE,
            "no such page: there are /metrics, /livez, /readyz and /status\n".into(),
        ),
    }
}

fn build_response(
    status: StatusCode,
    content_type: &'static str,
    body: String,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static(content_type),
    );
    response
}
