//! Measures the highest rate of an apiserver: each client sends its next request as soon as it has
//! an answer.
//!
//! Without a timetable, clients send no requests while the server stalls. So the result is only a
//! rate, and waits are not measured.

use super::dial::{Link, Target};
use super::objects::get_request;
use crate::record::event::{Failure, Protocol};
use crate::testbed::certs::{self, Identity};
use hyper::StatusCode;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use std::net::SocketAddr;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
pub struct Closed {
    /// The server's address. The certificate must contain the IP.
    pub server: SocketAddr,
    pub ca: Vec<CertificateDer<'static>>,
    pub cert: CertificateDer<'static>,
    pub key: PrivatePkcs8KeyDer<'static>,
    pub path: String,
    /// Number of concurrent clients.
    pub clients: u32,
    /// True for a new HTTP/1.1 connection per request. Otherwise each client keeps an HTTP/2
    /// connection, as client-go does.
    pub fresh: bool,
}

impl Closed {
    /// Asks until `stop`, and returns the number of answers.
    ///
    /// # Errors
    /// A request was not answered with 200, or could not be made.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<u64, String> {
        let Self {
            server,
            ca,
            cert,
            key,
            path,
            clients,
            fresh,
        } = self;
        let config = certs::client_config(ca, Some(&Identity { cert, key }))
            .map_err(|error| error.to_string())?;
        let target = Target::with_config(server, certs::Names::default(), &config);
        let over = CancellationToken::new();
        let mut asking = JoinSet::new();
        for _ in 0..clients {
            asking.spawn(run_client(
                target.clone(),
                path.clone(),
                fresh,
                over.clone(),
            ));
        }
        tokio::select! {
            () = stop => over.cancel(),
            // A client ends before `stop` only if a request failed.
            Some(ended) = asking.join_next() => {
                ended.map_err(|error| error.to_string())??;
            }
        }
        let mut answers = 0;
        while let Some(ended) = asking.join_next().await {
            answers += ended.map_err(|error| error.to_string())??;
        }
        Ok(answers)
    }
}

async fn run_client(
    target: Target,
    path: String,
    fresh: bool,
    over: CancellationToken,
) -> Result<u64, String> {
    let mut kept: Option<Link> = None;
    let mut answers = 0;
    while !over.is_cancelled() {
        let asked = async {
            let mut link = match kept.take() {
                Some(link) => link,
                None => {
                    let protocol = if fresh {
                        Protocol::Http1
                    } else {
                        Protocol::Http2
                    };
                    target.dial(protocol, "closed".into()).await?
                }
            };
            let (status, _) = link.ask(get_request(path.clone())).await?;
            Ok::<_, Failure>((status, link))
        };
        let (status, link) = asked.await.map_err(|failure| failure.to_string())?;
        if status != StatusCode::OK {
            return Err(status.to_string());
        }
        kept = (!fresh).then_some(link);
        answers += 1;
    }
    Ok(answers)
}
