//! Runs all kinds of clients against any apiserver. The apiserver must accept the clients'
//! certificate and let them read and write everything.

use super::dial::Target;
use super::{Instances, Load};
use crate::config::LoadPlan;
use crate::record::{Record, log::Recorder};
use crate::testbed::certs::{self, Identity};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::watch::channel;

/// The server, and the clients to run against it.
#[derive(Debug)]
pub struct Known {
    /// The server's address. The certificate must contain the IP.
    pub server: SocketAddr,
    pub ca: Vec<CertificateDer<'static>>,
    pub cert: CertificateDer<'static>,
    pub key: PrivatePkcs8KeyDer<'static>,
    /// Number of clients of each kind.
    pub plan: LoadPlan,
}

impl Known {
    /// Sends requests until `stop`, and returns what the clients saw. The error says why the
    /// clients cannot begin, or how many of them panicked.
    ///
    /// The instances behind the server are unknown, so no answer names an instance.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<Record, String> {
        let Self {
            server,
            ca,
            cert,
            key,
            plan,
        } = self;
        let config = certs::client_config(ca, Some(&Identity { cert, key }))
            .map_err(|error| error.to_string())?;
        let target = Target::with_config(server, certs::Names::default(), &config);
        let (_none, instances) = channel(Instances::new());
        let recorder = Arc::new(Recorder::default());
        let load = Load::start(&plan, &target, &instances, &recorder).await?;
        stop.await;
        load.finish().await?;
        Ok(Record::of(recorder.drain()))
    }
}
