//! What is asked through the berth beside the load: for versions, and for whom the Service
//! `kubernetes` names. Each question is a connection of its own, and one without an answer says
//! nothing: what is lost is the load's to say.

use super::record::{Recorder, Stamp};
use super::setting::Setting;
use berth_shim::backend::health::Observation;
use berth_shim::backend::probe::{Probe, ProbeConfig, ProbeKind};
use rustls::pki_types::ServerName;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, sleep};

/// Where kube-apiserver's own reconciler writes its addresses.
const SERVICE: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Asks as an admin.
#[derive(Debug, Clone)]
pub(crate) struct Monitor {
    address: SocketAddr,
    probe: Arc<Probe>,
    /// Whether the Service names somebody.
    named: Arc<watch::Sender<bool>>,
}

impl Monitor {
    /// One that asks at the berth.
    pub(crate) fn new(setting: &Setting) -> Self {
        let certs = &setting.certs;
        let probe = Probe::new(ProbeConfig {
            kind: ProbeKind::Https,
            path: "/readyz".into(),
            ca: Some(certs.ca_file.clone()),
            client: Some((certs.admin_cert_file.clone(), certs.admin_key_file.clone())),
            token: None,
            server_name: ServerName::IpAddress(setting.address.ip().into()),
            timeout: Duration::from_secs(5),
        });
        Self { address: setting.address, probe: Arc::new(probe), named: Arc::new(watch::Sender::new(false)) }
    }

    /// Waits until `/readyz` is 200.
    pub(crate) async fn ready(&self) {
        while self.probe.ready(self.address).await.seen != Observation::Pass {
            sleep(LOOK_EVERY).await;
        }
    }

    /// What `/version` says.
    pub(crate) async fn version(&self) -> Result<String, String> {
        let body = self.probe.get(self.address, "/version").await.map_err(|answer| answer.words)?;
        let version: Value = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        version["gitVersion"].as_str().map(str::to_owned).ok_or_else(|| "it has no gitVersion".into())
    }

    /// Notes the times for which the Service names nobody, from the first time on that it names
    /// somebody, until it is dropped.
    pub(crate) async fn watch_service(self, recorder: Arc<Recorder>) {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut empty = None;
        loop {
            ticks.tick().await;
            let Ok(body) = self.probe.get(self.address, SERVICE).await else { continue };
            let (now, named) = (Stamp::now(), names_somebody(&body));
            recorder.note(|r| match (&mut r.endpoint_gaps, named) {
                (None, true) => r.endpoint_gaps = Some(Vec::new()),
                (None, false) => {}
                (Some(gaps), false) if empty.is_none() => {
                    empty = Some(gaps.len());
                    gaps.push((now, now));
                }
                // Up to now, also when there is no later look.
                (Some(gaps), named) => {
                    if let Some(gap) = empty.and_then(|at: usize| gaps.get_mut(at)) {
                        gap.1 = now;
                    }
                    if named {
                        empty = None;
                    }
                }
            });
            self.named.send_replace(named);
        }
    }

    /// Waits until the Service names somebody, if it is watched.
    pub(crate) async fn service_back(&self) {
        // An error is impossible: this very value can send.
        let _ = self.named.subscribe().wait_for(|named| *named).await;
    }
}

/// Whether an EndpointSlice has an address.
fn names_somebody(slice: &[u8]) -> bool {
    let slice: Value = serde_json::from_slice(slice).unwrap_or_default();
    let endpoints = slice["endpoints"].as_array();
    endpoints.is_some_and(|all| all.iter().any(|one| one["addresses"].as_array().is_some_and(|a| !a.is_empty())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_without_an_address_names_nobody() {
        assert!(names_somebody(br#"{"endpoints": [{"addresses": []}, {"addresses": ["10.0.0.5"]}]}"#));
        for slice in ["{}", "", r#"{"endpoints": null}"#, r#"{"endpoints": [{"addresses": []}]}"#] {
            assert!(!names_somebody(slice.as_bytes()), "{slice}");
        }
    }
}
