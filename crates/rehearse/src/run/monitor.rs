//! Requests through the berth in addition to the load: for versions, and for the addresses of the
//! Service `kubernetes`. Each request has a new connection. Missing answers are ignored, because
//! only the load counts losses.

use super::processes::settings::Settings;
use crate::record::{event::EventKind, log::Recorder, stamp::Stamp};
use crate::testbed::certs::ADMIN;
use berth_cluster::service::SERVICE_SLICES;
use berth_shim::backend::health::Observation;
use berth_shim::backend::probe::{Probe, ProbeConfig, ProbeKind};
use rustls::pki_types::ServerName;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Sends requests as an admin.
#[derive(Debug, Clone)]
pub(crate) struct Monitor {
    address: SocketAddr,
    probe: Arc<Probe>,
    /// The addresses of the Service at the last poll, and the time of that poll.
    named: Arc<watch::Sender<(Stamp, BTreeSet<IpAddr>)>>,
}

impl Monitor {
    /// Creates a monitor that dials the berth.
    pub(crate) fn new(settings: &Settings) -> Self {
        let certs = &settings.certs;
        let probe = Probe::new(ProbeConfig {
            kind: ProbeKind::Https,
            path: "/readyz".into(),
            ca: Some(certs.ca_file.clone()),
            client: Some((certs.cert_file(ADMIN), certs.key_file(ADMIN))),
            token: None,
            server_name: ServerName::IpAddress(settings.address.ip().into()),
            timeout: Duration::from_secs(5),
        });
        Self {
            address: settings.address,
            probe: Arc::new(probe),
            named: Arc::new(watch::Sender::new((Stamp(0), BTreeSet::new()))),
        }
    }

    /// Checks that `/readyz` is 200. The error says why not.
    pub(crate) async fn is_ready(&self) -> Result<(), String> {
        let answer = self.probe.probe_ready(self.address).await;
        if answer.seen == Observation::Pass {
            Ok(())
        } else {
            Err(answer.words)
        }
    }

    /// Returns the `gitVersion` of `/version`.
    pub(crate) async fn version(&self) -> Result<String, String> {
        let body = self
            .probe
            .get(self.address, "/version")
            .await
            .map_err(|answer| answer.words)?;
        let version: Value = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        version["gitVersion"]
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| "the answer has no gitVersion".into())
    }

    /// Logs until dropped whether the Service has an address.
    pub(crate) async fn watch_service(self, recorder: Arc<Recorder>) {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let asked = Stamp::now();
            let Ok(body) = self.probe.get(self.address, SERVICE_SLICES).await else {
                continue;
            };
            let Some(named) = service_addresses(&body) else {
                continue;
            };
            recorder.add("kubernetes", EventKind::Service(!named.is_empty()));
            self.named.send_replace((asked, named));
        }
    }

    /// Waits until the Service has this address. Earlier polls do not count. Without
    /// `watch_service` the wait never ends.
    pub(crate) async fn wait_for_address(&self, address: IpAddr) {
        let now = Stamp::now();
        // An error is impossible, because `self` keeps the sender.
        let _ = self
            .named
            .subscribe()
            .wait_for(|(asked, named)| *asked >= now && named.contains(&address))
            .await;
    }
}

/// Returns the addresses in a list of EndpointSlices. `None` if the text is no list.
fn service_addresses(list: &[u8]) -> Option<BTreeSet<IpAddr>> {
    let list: Value = serde_json::from_slice(list).ok()?;
    Some(
        list["items"]
            .as_array()?
            .iter()
            .flat_map(berth_cluster::service::slice_addresses)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_slices_count_and_each_may_be_empty() {
        let slice = |name, endpoints| json!({"metadata": {"name": name}, "endpoints": endpoints});
        let list = json!({"items": [
            slice("kubernetes", json!([{"addresses": []}, {"addresses": ["10.0.0.5"]}])),
            slice("berth-cp-2-ipv4", json!(null)),
        ]});
        let named = service_addresses(list.to_string().as_bytes()).unwrap();
        assert_eq!(named, ["10.0.0.5".parse().unwrap()].into());
        assert_eq!(
            service_addresses(br#"{"items": []}"#),
            Some(BTreeSet::new())
        );
        assert!(service_addresses(b"{}").is_none() && service_addresses(b"").is_none());
    }
}
