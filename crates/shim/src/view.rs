//! Status and metrics of a running shim, for its socket and its admin server.

use crate::shared::Shared;
use crate::state::ShimState;
use berth_node::instance_id::InstanceId;
use berth_node::ipc;
use berth_node::ipc::wire::{self, Ask, InstanceStatus, Reply, Status};
use berth_node::registry::lease;
use berth_node::terms::{InstanceHealth, Phase};
use berth_os::explained;
use berth_os::{clock, locks};
use humantime::format_rfc3339_seconds;
use serde_json::{Value, json};
use std::io;

impl Shared {
    pub(crate) async fn all_metrics(&self) -> String {
        let mut pages = vec![self.own_metrics().await];
        for (instance, reply) in self.ask_siblings(Ask::Metrics).await {
            match reply {
                Ok(Reply::Metrics(page)) => pages.push(page),
                other => {
                    tracing::warn!(
                        code = %explained::SIBLING_METRICS,
                        %instance,
                        ?other,
                        "a sibling does not send its metrics"
                    );
                }
            }
        }
        crate::metrics::merge_pages(&pages)
    }

    pub(crate) async fn own_metrics(&self) -> String {
        let metrics = self.metrics.clone();
        self.kernel
            .call_within(ipc::PATIENCE, move || metrics.encode())
            .await
            .unwrap_or_else(|error| {
                tracing::warn!(
                    code = %explained::NO_METRICS,
                    %error,
                    "there are no metrics of this shim now"
                );
                String::new()
            })
    }

    /// Returns the JSON of `/status`: every live shim of the berth, this shim first, and the
    /// siblings that do not answer.
    pub(crate) async fn all_status(&self) -> serde_json::Result<Value> {
        let (mut shims, mut silent) = (vec![self.status().await.to_public_json()?], Vec::new());
        for (instance, reply) in self.ask_siblings(Ask::Status).await {
            match reply {
                Ok(Reply::Status(status)) => shims.push(status.to_public_json()?),
                Ok(_) => silent.push(json!({"instance": instance, "why": "unexpected reply"})),
                Err(why) => silent.push(json!({"instance": instance, "why": why})),
            }
        }
        Ok(json!({"version": wire::STATE_VERSION, "shims": shims, "silent": silent}))
    }

    /// True if a sibling listens now. Asks the siblings, because this shim may have hung since the
    /// last announcement. A sibling that does not reply takes nothing over.
    pub(crate) async fn has_joined_sibling(&self) -> bool {
        let joined =
            |reply| matches!(reply, Ok(Reply::Status(status)) if status.state == Phase::Joined);
        self.ask_siblings(Ask::Status)
            .await
            .into_iter()
            .any(|(_, reply)| joined(reply))
    }

    /// Sends a request to all siblings with a live lease at once. A sibling without a reply for a
    /// second is named, not waited for.
    async fn ask_siblings(&self, ask: Ask) -> Vec<(InstanceId, Result<Reply, String>)> {
        let berth = self.berth.clone();
        let read = move || {
            (
                clock::boot_id(),
                clock::read_boottime(),
                lease::list(&berth),
            )
        };
        let Ok((Ok(boot), Ok(now), Ok(found))) =
            self.run_dir.call_within(ipc::PATIENCE, read).await
        else {
            return Vec::new();
        };
        let siblings = found
            .found
            .into_iter()
            .filter(|l| l.instance != self.instance && l.is_live(&boot, now));
        let asked: Vec<_> = siblings
            .filter_map(|lease| {
                Some((
                    self.berth.socket_path(&lease.instance).ok()?,
                    lease.instance,
                ))
            })
            .map(|(path, instance)| {
                let ask = ask.clone();
                let task =
                    tokio::spawn(async move { ipc::ask_shim(&path, ask, ipc::PATIENCE).await });
                (instance, task)
            })
            .collect();
        let mut replies = Vec::new();
        for (instance, task) in asked {
            let reply = task.await.map_err(io::Error::from).flatten();
            replies.push((instance, reply.map_err(|error| error.to_string())));
        }
        replies
    }

    pub(crate) async fn status(&self) -> Status {
        let Self {
            config, metrics, ..
        } = self;
        let connections_injected = match metrics.injected_connections() {
            0 => 0,
            // If the kernel does not count open sockets, the number of passed connections is an
            // upper bound.
            passed => match self
                .kernel
                .call_within(ipc::PATIENCE / 2, locks::count_locked_sockets)
                .await
            {
                Ok(Ok(open)) => open,
                _ => passed,
            },
        };
        let ShimState {
            phase,
            since,
            blocked,
            unconnected,
            ..
        } = self.state.borrow().clone();
        let table = self.table.borrow();
        let instances = table.instances.iter().map(|instance| InstanceStatus {
            instance: instance.id.clone(),
            address: instance.address,
            own: instance.own,
            health: instance.health(),
            since: format_rfc3339_seconds(instance.since).to_string(),
            injected: instance.link.is_some(),
            relayed: instance.relayed.as_deref().map(ToOwned::to_owned),
            kube_version: instance.version.as_deref().map(ToOwned::to_owned),
            last_probe: instance.last_probe.to_string(),
            probe_rejected: instance.probe_rejected,
        });
        Status {
            version: wire::STATE_VERSION,
            berth: config.place.berth_address(),
            listen: config.place.addresses().collect(),
            instance: self.instance.clone(),
            discover: config.discover,
            shim_version: berth_node::VERSION.to_owned(),
            pid: std::process::id(),
            state: phase,
            since: format_rfc3339_seconds(since).to_string(),
            connections_open: metrics.open_connections(),
            connections_injected,
            connections_pending: metrics.pending_connections(),
            connections_total: metrics.total_connections(),
            held: metrics.held_clients() as u64,
            fail_open: table
                .pick_instance(|_| true)
                .is_some_and(|picked| picked.health() == InstanceHealth::Failing),
            foreign_listeners: metrics.foreign_listeners.get().unsigned_abs(),
            instances: instances.collect(),
            gate: self.gate.as_ref().map(|gate| gate.status()),
            share: self.share.status(),
            unconnected,
            blocked,
            cluster: self.cluster.status.borrow().clone(),
        }
    }
}
