//! What is asked through the berth beside the load: for versions, and for whom the Service
//! `kubernetes` names. Each question is a connection of its own, and one without an answer says
//! nothing: what is lost is the load's to say.

use super::record::{Named, Recorder, Stamp};
use super::setting::Setting;
use berth_cluster::lease::LEASES;
use berth_shim::backend::health::Observation;
use berth_shim::backend::probe::{Probe, ProbeConfig, ProbeKind};
use rustls::pki_types::ServerName;
use serde_json::Value;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, sleep};

/// All of the Service's: kube-apiserver's own reconciler writes the one named `kubernetes`, shims their nodes'.
const SLICES: &str =
    "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name%3Dkubernetes";

/// The slice that kube-apiserver's own reconciler writes.
pub(crate) const RECONCILED: &str = "kubernetes";

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Asks as an admin.
#[derive(Debug, Clone)]
pub(crate) struct Monitor {
    address: SocketAddr,
    probe: Arc<Probe>,
    /// Whom the Service names.
    named: Arc<watch::Sender<Named>>,
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
        Self { address: setting.address, probe: Arc::new(probe), named: Arc::default() }
    }

    /// The same at another address.
    pub(crate) fn at(&self, address: SocketAddr) -> Self {
        Self { address, ..self.clone() }
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

    /// Notes whom the Service names, and the times for which that is nobody, from the first time on that it names
    /// somebody, until it is dropped. Asks at the first of these addresses that answers.
    pub(crate) async fn watch_service(self, addresses: Vec<SocketAddr>, recorder: Arc<Recorder>) {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut empty = None;
        loop {
            ticks.tick().await;
            let Some(named) = self.named_at(&addresses).await else { continue };
            let (now, somebody) = (Stamp::now(), named.values().any(|addresses| !addresses.is_empty()));
            recorder.note(|r| {
                if r.named.last().is_none_or(|(_, last)| *last != named) {
                    r.named.push((now, named.clone()));
                }
            });
            recorder.note(|r| match (&mut r.endpoint_gaps, somebody) {
                (None, true) => r.endpoint_gaps = Some(Vec::new()),
                (None, false) => {}
                (Some(gaps), false) if empty.is_none() => {
                    empty = Some(gaps.len());
                    gaps.push((now, now));
                }
                // Up to now, also when there is no later look.
                (Some(gaps), somebody) => {
                    if let Some(gap) = empty.and_then(|at: usize| gaps.get_mut(at)) {
                        gap.1 = now;
                    }
                    if somebody {
                        empty = None;
                    }
                }
            });
            self.named.send_replace(named);
        }
    }

    /// Waits until there are Leases with these names, of instances.
    pub(crate) async fn leases(&self, wanted: &[String]) {
        loop {
            let body = self.probe.get(self.address, LEASES).await.unwrap_or_default();
            let list: Value = serde_json::from_slice(&body).unwrap_or_default();
            let found: Vec<_> = list["items"].as_array().into_iter().flatten().collect();
            let there = |name: &String| found.iter().any(|lease| lease["metadata"]["name"] == **name);
            if wanted.iter().all(there) {
                return;
            }
            sleep(LOOK_EVERY).await;
        }
    }

    async fn named_at(&self, addresses: &[SocketAddr]) -> Option<Named> {
        for address in addresses {
            if let Ok(body) = self.probe.get(*address, SLICES).await {
                return Some(named(&body));
            }
        }
        None
    }

    /// Waits until the Service names whom it should, if it is watched.
    pub(crate) async fn service_is(&self, right: impl Fn(&Named) -> bool) {
        // An error is impossible: this very value can send.
        let _ = self.named.subscribe().wait_for(right).await;
    }
}

/// What a list of EndpointSlices names.
fn named(list: &[u8]) -> Named {
    let list: Value = serde_json::from_slice(list).unwrap_or_default();
    let slices = list["items"].as_array().into_iter().flatten();
    let slice = |slice: &Value| {
        let name = slice["metadata"]["name"].as_str()?.to_owned();
        Some((name, berth_cluster::service::addresses(slice).collect()))
    };
    slices.filter_map(slice).collect()
}

/// Whether any slice of the Service names this address.
pub(crate) fn names(named: &Named, address: IpAddr) -> bool {
    named.values().any(|addresses| addresses.contains(&address))
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
        let named = named(list.to_string().as_bytes());
        assert!(names(&named, "10.0.0.5".parse().unwrap()) && named.len() == 2 && named["berth-cp-2-ipv4"].is_empty());
        assert!(super::named(b"{}").is_empty() && super::named(b"").is_empty());
    }
}
