//! Keeps the node's slices in the Service `kubernetes`, or removes them, as [`Rule`] decides.

use crate::api::Api;
use crate::rule::{Rule, SliceDecision, SliceObservation};
use crate::{Facts, add_jitter, is_node_address};
use berth_cluster::client;
use berth_cluster::lease::RENEWAL_INTERVAL;
use berth_cluster::service::{self, FIELD_MANAGER, Family, READ_INTERVAL, Service};
use berth_node::terms::Phase;
use berth_os::clock;
use berth_os::explained;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct Slices {
    api: Arc<Api>,
    node: String,
    addresses: Vec<SocketAddr>,
    slices: Vec<Slice>,
    service: Option<Service>,
    /// The port in kube-apiserver's own slice, as read last.
    port: Option<u16>,
    /// True if this shim has removed all of its slices from the Service.
    out: watch::Sender<bool>,
}

/// The slice of this node for one address family.
#[derive(Debug)]
struct Slice {
    address: SocketAddr,
    name: String,
    rule: Rule,
    /// The last request for this slice, and its time. True if the request applied the slice, false
    /// if it removed the slice.
    applied: Option<(bool, Instant)>,
}

impl Slices {
    /// Makes the slices of a shim. Each address family gets one slice, with the first of the shim's
    /// addresses that fits.
    pub(crate) fn new(
        api: Arc<Api>,
        node: &str,
        addresses: &[SocketAddr],
        out: watch::Sender<bool>,
    ) -> Self {
        let first_of = |family| {
            addresses
                .iter()
                .find(|a| Family::of_address(a.ip()) == family && is_node_address(a.ip()))
        };
        let slices = Family::ALL.into_iter().filter_map(|family| {
            let (address, name) = (*first_of(family)?, service::slice_name(node, family));
            Some(Slice {
                address,
                name,
                rule: Rule::default(),
                applied: None,
            })
        });
        let slices: Vec<_> = slices.collect();
        if slices.is_empty() {
            tracing::warn!(
                code = %explained::NOT_DIALLABLE,
                "--listen has no address that other nodes could dial: berth cannot keep this node in the Service kubernetes"
            );
        }
        Self {
            api,
            node: node.to_owned(),
            addresses: addresses.to_vec(),
            slices,
            service: None,
            port: None,
            out,
        }
    }

    /// Applies and removes the slices until the future is dropped. `going` is true while the shim
    /// is about to leave.
    pub(crate) async fn keep_slices(
        &mut self,
        mut facts: watch::Receiver<Facts>,
        mut going: watch::Receiver<bool>,
    ) {
        if self.slices.is_empty() {
            self.out.send_replace(true);
            return;
        }
        let mut before = Facts::default();
        loop {
            let now = facts.borrow_and_update().clone();
            if (now.phase, now.sibling) != (before.phase, before.sibling) {
                // A sibling that leaves may have removed a slice by a late request. So apply or
                // remove each slice again.
                self.slices
                    .iter_mut()
                    .for_each(|slice| slice.applied = None);
            }
            let gone = *going.borrow_and_update();
            before = now;
            let (phase, sibling) = (before.phase, before.sibling);
            tokio::select! {
                () = self.update_slices(&before, gone) => {}
                // A request in progress may hang. Drop it here; it can be repeated.
                changed = going.changed() => if changed.is_ok() { continue } else { return },
                changed = facts.wait_for(|now| (now.phase, now.sibling) != (phase, sibling)) => {
                    if changed.is_ok() { continue } else { return }
                }
            }
            tokio::select! {
                changed = facts.changed() => if changed.is_err() { return },
                changed = going.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(add_jitter(READ_INTERVAL)) => {}
            }
        }
    }

    /// Reads kube-apiserver's own slice. Returns JSON's null if the slice does not exist, and
    /// `None` if it cannot be read.
    async fn read_reconciled_slice(&self) -> Option<Value> {
        let read = self
            .api
            .make_request("read_slice", "kubernetes", async |client| {
                client::none_if_missing(client.get(service::RECONCILED_SLICE).await)
            });
        read.await.map(Option::unwrap_or_default)
    }

    /// Applies or removes each slice, as its rule decides.
    async fn update_slices(&mut self, facts: &Facts, going: bool) {
        // Read kube-apiserver's slice only if the decision depends on it. Before a shim has joined,
        // it decides nothing. A shim that leaves without a sibling removes its own slices in any
        // case, and has only 2 s for that.
        let mut reconciled = None;
        if facts.phase == Phase::Joined && (facts.sibling || !going) {
            reconciled = self.read_reconciled_slice().await;
            if self.service.is_none() {
                let read = self
                    .api
                    .make_request("read_service", "kubernetes", async |client| {
                        client.get(service::SERVICE_PATH).await
                    });
                self.service = read.await.as_ref().map(Service::parse);
            }
        }
        let time = clock::read_boottime().unwrap_or_default();
        let own: Vec<_> = self.addresses.iter().map(SocketAddr::ip).collect();
        let others = |slice: &Value| {
            service::slice_addresses(slice)
                .filter(|ip| !own.contains(ip))
                .collect::<Vec<_>>()
        };
        let others = reconciled.as_ref().map(others);
        self.port = reconciled
            .as_ref()
            .and_then(|slice| service::slice_ports(slice).next())
            .or(self.port);
        if let (Some(others), Some(port)) = (&others, self.port) {
            self.api
                .set_other_addresses(others.iter().map(|ip| SocketAddr::new(*ip, port)).collect());
        }
        for slice in &mut self.slices {
            let family = Family::of_address(slice.address.ip());
            let others = others
                .as_ref()
                .map(|others| others.iter().any(|ip| Family::of_address(*ip) == family));
            let observation = SliceObservation {
                phase: facts.phase,
                sibling: facts.sibling,
                withdrawn: going,
                others,
            };
            let decision = slice.rule.decide(time, observation);
            let service = self
                .service
                .as_ref()
                .filter(|service| service.families.contains(&family));
            // kube-apiserver's slice may belong to another berth of the node, with another port.
            // Then do not apply this berth's slice.
            let service =
                service.filter(|_| self.port.is_none_or(|port| port == slice.address.port()));
            match (decision, service) {
                (SliceDecision::Absent, _) => slice.remove_if_present(&self.api).await,
                (SliceDecision::Present, Some(service)) => {
                    slice.apply_when_due(&self.api, &self.node, service).await;
                }
                (SliceDecision::Present, None) | (SliceDecision::Unchanged, _) => {}
            }
        }
        let names = self
            .slices
            .iter()
            .filter(|slice| slice.is_in_service())
            .map(|slice| slice.name.clone())
            .collect();
        self.api.update_status(|status| status.slices = names);
        let out = self
            .slices
            .iter()
            .all(|slice| matches!(slice.applied, Some((false, _))));
        self.out
            .send_if_modified(|now| std::mem::replace(now, out) != out);
    }
}

/// Removes a slice. Returns true if the slice is not in the Service.
pub(crate) async fn remove_slice(api: &Api, name: &str) -> bool {
    let path = service::slice_path(name);
    api.make_request("delete_slice", name, async |client| {
        client::none_if_missing(client.delete(&path).await)
    })
    .await
    .is_some()
}

impl Slice {
    fn is_in_service(&self) -> bool {
        matches!(self.applied, Some((true, _)))
    }

    async fn apply_when_due(&mut self, api: &Api, node: &str, service: &Service) {
        // Apply the slice again after a while, because somebody may have removed it. If nothing has
        // changed, etcd writes nothing.
        if matches!(self.applied, Some((true, at)) if at.elapsed() < RENEWAL_INTERVAL) {
            return;
        }
        let object = service::build_slice(node, self.address, &service.port_name);
        let path = service::slice_path(&self.name);
        let applied = api.make_request("apply_slice", &self.name, async |client| {
            client.apply(&path, FIELD_MANAGER, &object).await
        });
        if applied.await.is_some() {
            self.record_presence(true);
        }
    }

    async fn remove_if_present(&mut self, api: &Api) {
        if !matches!(self.applied, Some((false, _))) && remove_slice(api, &self.name).await {
            self.record_presence(false);
        }
    }

    fn record_presence(&mut self, present: bool) {
        let before = self
            .applied
            .replace((present, Instant::now()))
            .map(|(was, _)| was);
        if before != Some(present) {
            let what = if present { "is in" } else { "is out of" };
            tracing::info!(slice = self.name, address = %self.address, "the node's slice {what} the Service kubernetes");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leases::tests::make_api;
    use berth_testing::{Objects, serve_with};
    use serde_json::json;

    /// berth's slice exists while the Service names no other node. The shim removes the slice
    /// before it leaves.
    #[tokio::test]
    async fn a_lone_node_has_a_slice_until_its_shim_leaves() {
        let (objects, temp) = (Objects::default(), tempfile::tempdir().unwrap());
        objects.set(
            service::SERVICE_PATH,
            Some(json!({"spec": {"ports": [{"name": "https"}]}})),
        );
        objects.set(
            service::RECONCILED_SLICE,
            Some(json!({"endpoints": [{"addresses": ["10.0.0.5"]}]})),
        );
        let answers = objects.clone();
        let mut server = serve_with(move |request| answers.answer(request)).await;
        let (_facts, facts) = watch::channel(Facts {
            phase: Phase::Joined,
            ..Facts::default()
        });
        let (api, _) = make_api(&server, temp.path(), facts.clone());
        let (out, mut is_out) = watch::channel(false);
        let (goes, going) = watch::channel(false);
        let mut slices = Slices::new(api, "cp-1", &["10.0.0.5:6443".parse().unwrap()], out);
        let keeping = tokio::spawn(async move { slices.keep_slices(facts, going).await });
        let path = service::slice_path("berth-cp-1-ipv4");
        while !server.asked.recv().await.unwrap().0.starts_with("PATCH") {}
        assert_eq!(
            objects.get(&path).unwrap()["endpoints"][0]["addresses"],
            json!(["10.0.0.5"])
        );
        goes.send_replace(true);
        is_out.wait_for(|out| *out).await.unwrap();
        assert_eq!(objects.get(&path), None);
        keeping.abort();
    }

    /// A shim that leaves without a sibling removes its slice without a read before. It has 2 s at
    /// most, and a read could not change its decision.
    #[tokio::test]
    async fn a_lone_shim_that_leaves_only_requests_the_removal() {
        let temp = tempfile::tempdir().unwrap();
        let mut server = serve_with(|_| berth_testing::format_answer("404 Not Found", "{}")).await;
        let (_facts, facts) = watch::channel(Facts {
            phase: Phase::Joined,
            ..Facts::default()
        });
        let (api, _) = make_api(&server, temp.path(), facts.clone());
        let (out, is_out) = watch::channel(false);
        let mut slices = Slices::new(api, "cp-1", &["10.0.0.5:6443".parse().unwrap()], out);
        let facts = facts.borrow().clone();
        slices.update_slices(&facts, true).await;
        assert!(
            server.asked.recv().await.unwrap().0.starts_with("DELETE "),
            "the removal is not the first request"
        );
        assert!(server.asked.try_recv().is_err() && *is_out.borrow());
    }
}
