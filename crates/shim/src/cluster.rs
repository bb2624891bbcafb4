//! Channels between the shim and the keeper, which keeps the Service `kubernetes` (`--cluster`).

use crate::backend::Table;
use crate::metrics::Metrics;
use berth_keeper::{Facts, Links, RepresentedInstance};
use berth_node::ipc::wire::ClusterStatus;
use berth_node::terms::{InstanceHealth, Phase};
use std::sync::Arc;
use tokio::sync::watch;

/// The shim's ends of the channels to the keeper. Clones are the ends of the same channels.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cluster {
    facts: watch::Sender<Facts>,
    /// The keeper's status, if a keeper runs.
    pub(crate) status: watch::Sender<Option<ClusterStatus>>,
}

impl Cluster {
    /// Returns the ends of the channels that the keeper needs.
    pub(crate) fn make_links(&self, metrics: Arc<Metrics>) -> Links {
        metrics.register_cluster_requests();
        Links {
            facts: self.facts.subscribe(),
            status: self.status.clone(),
            count: Arc::new(move |request, result| metrics.count_cluster_request(request, result)),
        }
    }

    /// Tells the keeper the facts about this shim and its instances. With `any`, for a node shim,
    /// the facts include the instances that have no shim of their own.
    pub(crate) fn publish_facts(
        &self,
        phase: Phase,
        sibling: bool,
        blocked: bool,
        table: &Table,
        any: bool,
    ) {
        let spoken_for = table
            .instances
            .iter()
            .filter(|instance| instance.own || (any && !instance.fallback));
        let instances = spoken_for.map(|instance| RepresentedInstance {
            id: instance.id.clone(),
            address: instance.address,
            ready: instance.health() == InstanceHealth::Ready,
            version: instance.version.clone(),
        });
        let facts = Facts {
            phase,
            sibling,
            blocked,
            instances: instances.collect(),
        };
        self.facts.send_if_modified(|published| {
            let changed = *published != facts;
            *published = facts;
            changed
        });
    }
}
