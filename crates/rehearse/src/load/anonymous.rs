//! New connections from given addresses to any apiserver, without a certificate, for paths that any
//! client may read.

use super::dial::{Target, within};
use super::fresh::begin_attempts;
use super::objects::get_request;
use super::timetable::Seed;
use super::{Due, UNANSWERED};
use crate::record::event::Protocol;
use crate::testbed::certs;
use hyper::StatusCode;
use rustls::pki_types::CertificateDer;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// A request, with the source addresses and the rate.
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
    /// Connects until `stop`, and waits for open attempts. Uses HTTP/1.1: a stopping apiserver
    /// answers every request on a new HTTP/1.1 connection, whereas with HTTP/2 the server may send
    /// GOAWAY while the request is on the way. Only a judge of the instance's end can tell a
    /// crossed request from a loss.
    pub async fn run(
        self,
        stop: impl Future<Output = ()>,
        tell: impl Fn(Connection) + Send + Sync + 'static,
    ) -> Result<(), rustls::Error> {
        let config = certs::client_config(self.ca, None)?;
        let target = Target::of(self.server, certs::Names::default(), &config);
        let from = |source: &IpAddr| target.from(*source, format!("{}/{source}", self.agent));
        let targets: Vec<_> = self.sources.iter().map(from).collect();
        let (path, tell) = (self.path, Arc::new(tell));
        begin_attempts(stop, Seed(0).fresh(self.rate), |entry, due| {
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
    let asked = within(UNANSWERED, async {
        let socket = target.socket()?;
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
