//! One client, every step of which the caller decides and times: the storms of `crates/bench`.
//!
//! HTTP/2, as client-go speaks it, a whole TLS handshake each time, and a client certificate. Nothing here has a bound in time.

use super::dial::{Link, Target, Unsent, http_failure};
use super::objects::{self, get};
use crate::certs::Certs;
use crate::event::{Failure, Protocol};
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::{Bytes, Incoming};
use std::net::{IpAddr, SocketAddr};

/// Where it connects to, with its certificate.
#[derive(Clone)]
pub struct Visitor(Target);

/// A connection that is open. Dropping it closes the connection.
pub struct Visit(Link);

/// An answer of which the head is there.
pub struct Answer {
    pub status: u16,
    body: Incoming,
}

impl Visitor {
    /// A client of the group that [`grant`](super::grant) gives its rights.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn new(server: SocketAddr, certs: &Certs) -> Result<Self, rustls::Error> {
        Target::new(server, certs).map(Self)
    }

    /// One that may do everything.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn admin(server: SocketAddr, certs: &Certs) -> Result<Self, rustls::Error> {
        Target::admin(server, certs).map(Self)
    }

    /// TCP and TLS.
    ///
    /// # Errors
    /// Why there is no connection.
    pub async fn connect(&self, from: IpAddr) -> Result<Visit, Failure> {
        let target = self.0.from(from, "berth-storm".to_owned());
        target.dial(Protocol::Http2, from.to_string()).await.map(Visit)
    }
}

impl Visit {
    /// Sends a GET; the head of its answer.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn get(&mut self, path: &str) -> Result<Answer, Failure> {
        self.send(get(path.to_owned())).await
    }

    /// Sends a POST of JSON; the head of its answer.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn create(&mut self, path: &str, body: String) -> Result<Answer, Failure> {
        self.send(objects::Request { method: Method::POST, path: path.to_owned(), body }).await
    }

    async fn send(&mut self, request: objects::Request) -> Result<Answer, Failure> {
        match self.0.send(request).await {
            Ok(response) => Ok(Answer { status: response.status().as_u16(), body: response.into_body() }),
            Err(Unsent::NeverSent) => Err(Failure::Closed),
            Err(Unsent::Died(failure)) => Err(failure),
        }
    }
}

impl Answer {
    /// The next piece of its body; none at its end.
    ///
    /// # Errors
    /// Why it is not whole.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match self.body.frame().await {
            None => Ok(None),
            Some(Ok(frame)) => Ok(Some(frame.into_data().unwrap_or_default())),
            Some(Err(error)) => Err(http_failure(&error)),
        }
    }

    /// Reads the rest of its body.
    ///
    /// # Errors
    /// Why it is not whole.
    pub async fn rest(mut self) -> Result<(), Failure> {
        while self.next().await?.is_some() {}
        Ok(())
    }
}
