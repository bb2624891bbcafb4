//! All kinds of clients, against an apiserver that is not of a rehearsal and knows them by a certificate: one that may
//! read and write everything.

use super::dial::Target;
use super::{Instances, Load};
use crate::certs::{self, Identity};
use crate::log::Recorder;
use crate::plan::LoadPlan;
use crate::record::Record;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::watch::channel;

/// The clients, and where they connect to.
#[derive(Debug)]
pub struct Known {
    /// Where to connect to; its IP is to be in the certificate.
    pub server: SocketAddr,
    pub ca: Vec<CertificateDer<'static>>,
    pub cert: CertificateDer<'static>,
    pub key: PrivatePkcs8KeyDer<'static>,
    /// How many there are.
    pub plan: LoadPlan,
}

impl Known {
    /// Sends requests until it is stopped; what the clients saw. The error is why they cannot begin, or which broke down.
    ///
    /// The instances behind the server are not known, so that no answer names one.
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
        let target = Target::of(server, certs::Names::default(), &config);
        let (_none, instances) = channel(Instances::new());
        let recorder = Arc::new(Recorder::default());
        let load = Load::start(&plan, &target, &instances, &recorder).await?;
        stop.await;
        load.finish().await?;
        Ok(Record::of(recorder.drain()))
    }
}
