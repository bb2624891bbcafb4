//! Renews the Leases of the instances that this shim represents, and removes expired Leases.

use crate::api::Api;
use crate::slices::remove_slice;
use crate::token::TokenFile;
use crate::{Facts, RepresentedInstance, add_jitter};
use berth_cluster::client;
use berth_cluster::lease::{self, Expiry, InstanceLease, RENEWAL_INTERVAL, is_object_name};
use berth_cluster::service::{self, FIELD_MANAGER, Family};
use berth_node::instance_id::InstanceId;
use berth_os::clock;
use berth_os::explained;
use humantime::format_rfc3339_seconds;
use hyper::StatusCode;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::Instant;

/// Time between two checks whether the token must be renewed.
const TOKEN_CHECK_INTERVAL: Duration = Duration::from_secs(600);

/// Renews this shim's Leases, and removes expired ones.
#[derive(Debug)]
pub(crate) struct Leases {
    pub(crate) api: Arc<Api>,
    pub(crate) node: String,
    /// The address that clients dial.
    pub(crate) address: SocketAddr,
    /// Name of this process as the holder of Leases: a random name, because another process may get
    /// the same process ID.
    pub(crate) holder: String,
    /// The instance's ID, for the names of files that only this shim writes.
    pub(crate) instance: InstanceId,
    /// The Leases that this shim holds, by the name of the Lease.
    pub(crate) held: BTreeMap<String, HeldLease>,
    pub(crate) expiry: Expiry,
}

/// A Lease that this shim holds.
#[derive(Debug, Clone)]
pub(crate) struct HeldLease {
    instance: InstanceId,
    acquired: SystemTime,
    transitions: u32,
    /// The Lease object, as the API returned it last.
    object: Value,
}

impl Leases {
    /// Renews and removes Leases until the future is dropped. `going` is true while the shim is
    /// about to leave.
    pub(crate) async fn keep_leases(
        &mut self,
        mut facts: watch::Receiver<Facts>,
        mut going: watch::Receiver<bool>,
    ) {
        let (mut renewal, mut token) = (Instant::now(), Instant::now());
        let mut before = None;
        loop {
            let now = facts.borrow_and_update().clone();
            let alone = *going.borrow_and_update() && !now.sibling;
            // These values decide the content and the holder of the Leases. If they differ from the
            // last round's, renew or remove Leases at once.
            let content = (now.phase, now.instances.clone(), alone);
            if before.replace(content.clone()) != Some(content) || Instant::now() >= renewal {
                renewal = Instant::now() + add_jitter(RENEWAL_INTERVAL);
                if alone {
                    // The slices must go first: when the shim ends, there may be no apiserver left
                    // that could remove them. Until then the Leases stay, so that another berth can
                    // find and remove the slices.
                    if self.api.has_slices() {
                        renewal = Instant::now() + add_jitter(Duration::from_millis(100));
                    } else {
                        self.remove_leases(|_| true).await;
                    }
                } else {
                    self.renew_leases(&now).await;
                }
            }
            if Instant::now() >= token {
                self.keep_token().await;
                token = Instant::now() + add_jitter(TOKEN_CHECK_INTERVAL);
            }
            tokio::select! {
                changed = facts.changed() => if changed.is_err() { return },
                changed = going.changed() => if changed.is_err() { return },
                () = tokio::time::sleep_until(renewal.min(token)) => {}
            }
        }
    }

    async fn renew_leases(&mut self, facts: &Facts) {
        let gone = |held: &HeldLease| {
            facts
                .instances
                .iter()
                .all(|known| known.id != held.instance)
        };
        self.remove_leases(gone).await;
        let ready: Vec<_> = facts
            .instances
            .iter()
            .filter(|instance| instance.ready)
            .collect();
        if facts.blocked || ready.is_empty() {
            // This shim renews no Leases now, so it must not judge the Leases of others either.
            self.expiry.record_failure();
            return;
        }
        let listed = self
            .api
            .make_request("list_leases", "", async |client| {
                client.get(lease::INSTANCE_LEASES).await
            })
            .await;
        let list = listed
            .as_ref()
            .and_then(|list| list["items"].as_array())
            .map_or(&[][..], Vec::as_slice);
        match (&listed, clock::read_boottime()) {
            (Some(_), Ok(now)) => self.expiry.record_list(now, RENEWAL_INTERVAL * 3 / 2, list),
            _ => self.expiry.record_failure(),
        }
        let list: Vec<_> = list
            .iter()
            .map(|object| (object, InstanceLease::parse(object)))
            .collect();
        let mut renewed = true;
        for instance in ready {
            renewed &= self.renew_lease(instance, facts, &list).await;
        }
        if renewed {
            self.sweep_leases(&list).await;
        } else {
            // While no shim can write a Lease, every Lease would seem to expire. Do not count this
            // time.
            self.expiry.record_failure();
        }
    }

    /// Renews the Lease of an instance. Returns true if the Lease was renewed. Also returns true if
    /// the instance has no valid name for a Lease, so that a further attempt would be useless.
    async fn renew_lease(
        &mut self,
        instance: &RepresentedInstance,
        facts: &Facts,
        list: &[(&Value, Option<InstanceLease>)],
    ) -> bool {
        let name = lease::lease_name(&self.node, instance.id.as_str());
        if !is_object_name(&name) || instance.id.as_str().contains('.') {
            tracing::debug!(instance = %instance.id, "an instance gets no Lease: the Lease's name would be invalid");
            return true;
        }
        let known = list
            .iter()
            .find_map(|(_, known)| known.as_ref().filter(|known| known.name() == name));
        let (acquired, transitions) = match (self.held.get(&name), known) {
            (Some(held), None) => (held.acquired, held.transitions),
            (_, Some(known)) if known.holder == self.holder => (known.acquired, known.transitions),
            (_, Some(known)) => (SystemTime::now(), known.transitions.saturating_add(1)),
            (None, None) => (SystemTime::now(), 0),
        };
        let lease = InstanceLease {
            node: self.node.clone(),
            instance: instance.id.to_string(),
            holder: self.holder.clone(),
            address: self.address,
            version: instance.version.as_deref().map(ToOwned::to_owned),
            state: facts.phase.as_str().to_owned(),
            acquired,
            renewed: SystemTime::now(),
            transitions,
        };
        let (path, object) = (lease::lease_path(&name), lease.object());
        let applied = self.api.make_request("apply_lease", &name, async |client| {
            client.apply(&path, FIELD_MANAGER, &object).await
        });
        let Some(object) = applied.await else {
            return false;
        };
        self.held.insert(
            name,
            HeldLease {
                instance: instance.id.clone(),
                acquired,
                transitions,
                object,
            },
        );
        let renewed = format_time(lease.renewed);
        self.api
            .update_status(|status| status.lease_renewed = renewed);
        true
    }

    /// Removes the selected Leases. If another shim has renewed a Lease meanwhile, that shim
    /// represents the instance now, and the Lease stays.
    pub(crate) async fn remove_leases(&mut self, which: impl Fn(&HeldLease) -> bool) {
        let gone: Vec<_> = self
            .held
            .iter()
            .filter(|(_, held)| which(held))
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            let Some(held) = self.held.get(&name) else {
                continue;
            };
            if self.delete_lease(&name, &held.object).await {
                self.held.remove(&name);
            }
        }
    }

    /// Deletes a Lease if its resourceVersion is unchanged. Returns true if the Lease is gone, or
    /// belongs to another holder now.
    async fn delete_lease(&self, name: &str, object: &Value) -> bool {
        let path = lease::lease_path(name);
        let deleted = self.api.make_request("delete_lease", name, async |client| {
            match client::none_if_missing(client.delete_unchanged(&path, object).await) {
                // Another holder has renewed the Lease meanwhile, so it stays.
                Err(error) if error.status() == Some(StatusCode::CONFLICT) => Ok(None),
                answer => answer,
            }
        });
        deleted.await.is_some()
    }

    /// Removes expired Leases, and the slices of nodes without a live Lease. Only the holder of the
    /// first live Lease by name does so. For a moment, two berths may both hold themselves for the
    /// first. Then both remove the same objects, which does no harm.
    async fn sweep_leases(&self, list: &[(&Value, Option<InstanceLease>)]) {
        let name = |object: &Value| {
            object["metadata"]["name"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        let (expired, live): (Vec<_>, Vec<_>) = list
            .iter()
            .partition(|(object, _)| self.expiry.is_expired(&name(object)));
        let first = live
            .iter()
            .min_by_key(|(object, _)| name(object))
            .and_then(|(_, lease)| lease.as_ref());
        if first.is_none_or(|first| first.holder != self.holder) {
            return;
        }
        let nodes: BTreeSet<_> = live
            .iter()
            .filter_map(|(_, lease)| Some(&lease.as_ref()?.node))
            .collect();
        for (object, lease) in expired {
            let lease = lease.as_ref().filter(|lease| !nodes.contains(&lease.node));
            let slices = lease
                .map(|lease| Family::ALL.map(|family| service::slice_name(&lease.node, family)));
            for slice in slices.iter().flatten() {
                if !remove_slice(&self.api, slice).await {
                    // The Lease stays until its node's slices are removed. End the round here: if
                    // this request failed, the next one may hang.
                    return;
                }
            }
            if !self.delete_lease(&name(object), object).await {
                return;
            }
            tracing::warn!(
                code = %explained::LEASE_EXPIRED,
                lease = name(object),
                "a Lease has expired and is removed, with the slices of its node if the node has no other Lease"
            );
        }
    }

    /// Renews the service account's token if it is due. The kubeconfig may appear at any time, so
    /// the path of the token is looked up each time.
    async fn keep_token(&self) {
        if let Some(path) = self.api.token_path().await {
            let expires = TokenFile::new(&path, &self.instance)
                .renew_if_due(&self.api)
                .await
                .and_then(format_time);
            self.api
                .update_status(|status| status.token_expires = expires);
        }
    }
}

/// Formats a time as RFC 3339. Returns `None` beyond the year 9999, which RFC 3339 cannot express:
/// a token may contain any time.
fn format_time(time: SystemTime) -> Option<String> {
    const YEAR_10000: u64 = 253_402_300_800;
    let seconds = time.duration_since(UNIX_EPOCH).ok()?.as_secs();
    (seconds < YEAR_10000).then(|| format_rfc3339_seconds(time).to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Credentials;
    use berth_testing::{Server, delay_file_read, format_answer, start_server};
    use serde_json::json;
    use std::fs;
    use std::path::Path;

    const FILES: [&str; 3] = ["kubeconfig", "ca.crt", "token"];

    /// Writes a kubeconfig for a server into a directory. Returns an API that uses the kubeconfig,
    /// and the server's address.
    pub(crate) fn make_api(
        server: &Server,
        directory: &Path,
        facts: watch::Receiver<Facts>,
    ) -> (Arc<Api>, SocketAddr) {
        let kubeconfig = format!(
            "current-context: a\nclusters: [{{name: c, cluster: {{server: '{}', certificate-authority: ca.crt}}}}]\nusers: [{{name: u, \
             user: {{tokenFile: token}}}}]\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n",
            server.access.server
        );
        let ca = String::from_utf8(server.access.ca.clone()).unwrap();
        for (name, text) in FILES
            .into_iter()
            .zip([kubeconfig.as_str(), ca.as_str(), "t0ken"])
        {
            fs::write(directory.join(name), text).unwrap();
        }
        let address = server
            .access
            .server
            .strip_prefix("https://")
            .unwrap()
            .strip_suffix("/k")
            .unwrap();
        let address = address.parse().unwrap();
        let credentials = Credentials::Kubeconfig(directory.join("kubeconfig"));
        (
            Arc::new(Api::new(
                credentials,
                address,
                facts,
                watch::channel(None).0,
                Arc::new(|_, _| {}),
            )),
            address,
        )
    }

    /// The disk hangs, as a disk may that etcd keeps busy. The shim must go on probing meanwhile.
    #[tokio::test]
    async fn files_are_read_on_another_thread_than_the_probe() {
        let server = start_server(format_answer("200 OK", "{}")).await;
        let temp = tempfile::tempdir().unwrap();
        let file = |name: &str| temp.path().join(name);
        let (_sender, facts) = watch::channel(Facts::default());
        let (api, address) = make_api(&server, temp.path(), facts);
        let texts = FILES.map(|name| fs::read_to_string(file(name)).unwrap());
        for (name, text) in FILES.iter().zip(&texts) {
            let asked = api.make_request("list_leases", "", async |client| client.get("/x").await);
            assert_eq!(
                delay_file_read(&file(name), text, asked).await,
                (Some(json!({})), true),
                "{name}"
            );
        }
        let instance: InstanceId = "a".parse().unwrap();
        let token = TokenFile::new(&file("token"), &instance);
        assert_eq!(
            delay_file_read(&file("token"), "t0ken", token.renew_if_due(&api)).await,
            (None, true)
        );
        let (holder, held, expiry) = (String::new(), BTreeMap::new(), Expiry::default());
        let leases = Leases {
            api,
            node: "cp-1".into(),
            address,
            holder,
            instance,
            held,
            expiry,
        };
        for (name, text) in FILES.iter().zip(&texts) {
            assert_eq!(
                delay_file_read(&file(name), text, leases.keep_token()).await,
                ((), true),
                "{name}"
            );
        }
    }
}
