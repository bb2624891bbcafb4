//! New connections from given addresses to any apiserver, without a certificate, for paths that any
//! client may read.

use super::dial::{Target, limit_time};
use super::fresh::begin_attempts;
use super::objects::get_request;
use super::timetable::Seed;
use super::{ANSWER_TIMEOUT, Due};
use crate::record::event::Protocol;
use crate::testbed::certs;
use hyper::StatusCode;
use rustls::pki_types::CertificateDer;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// A request to repeat on new connections, with their rate and source addresses.
#[derive(Debug)]
pub struct Anonymous {
    /// The server's address. The certificate must contain the IP.
    pub server: SocketAddr,
    pub ca: Vec<CertificateDer<'static>>,
    pub path: String,
    /// New connections a second.
    pub rate: u32,
    /// Addresses to connect from, by turns.
    pub sources: Vec<IpAddr>,
    /// First part of the user agents: each is this text, a slash and the source address, so that
    /// the results can be compared with an audit log.
    pub agent: &'static str,
}

/// The outcome of a connection.
#[derive(Debug)]
pub struct Connection {
    pub began: SystemTime,
    /// The source address, with the port if the port is known. A shim's log names the client by the
    /// same text.
    pub client: String,
    /// Time from when the connection was due until the answer was complete, or until the failure.
    pub took: Duration,
    pub result: Result<(), String>,
}

impl Anonymous {
    /// Connects until `stop`, and waits for open attempts. Uses HTTP/1.1, because a stopping
    /// apiserver answers every request on a new HTTP/1.1 connection. With HTTP/2, the apiserver may
    /// send GOAWAY while the request is on the way, and nothing here could tell that request from a
    /// loss.
    pub async fn run(
        self,
        stop: impl Future<Output = ()>,
        tell: impl Fn(Connection) + Send + Sync + 'static,
    ) -> Result<(), rustls::Error> {
        let config = certs::client_config(self.ca, None)?;
        let target = Target::with_config(self.server, certs::Names::default(), &config);
        let from =
            |source: &IpAddr| target.with_source(*source, format!("{}/{source}", self.agent));
        let targets: Vec<_> = self.sources.iter().map(from).collect();
        let (path, tell) = (self.path, Arc::new(tell));
        begin_attempts(stop, Seed(0).fresh_entries(self.rate), |entry, due| {
            let index = entry.number as usize % targets.len();
            let (target, source) = (targets[index].clone(), self.sources[index]);
            let (path, tell) = (path.clone(), tell.clone());
            async move { tell(try_connection(&target, source, path, due).await) }
        })
        .await;
        Ok(())
    }
}

async fn try_connection(target: &Target, source: IpAddr, path: String, due: Due) -> Connection {
    let began = SystemTime::now();
    let mut client = source.to_string();
    let mut step = "connect";
    let asked = limit_time(ANSWER_TIMEOUT, async {
        let socket = target.open_socket()?;
        if let Ok(address) = socket.local_addr() {
            client = address.to_string();
        }
        let mut link = target
            .dial_from(socket, Protocol::Http1, client.clone())
            .await?;
        step = "request";
        Ok(link.ask(get_request(path)).await?.0)
    });
    let result = match asked.await {
        Ok(StatusCode::OK) => Ok(()),
        Ok(status) => Err(format!("{step}: {status}")),
        Err(failure) => Err(format!("{step}: {failure}")),
    };
    Connection {
        began,
        client,
        took: due.instant.elapsed(),
        result,
    }
}
