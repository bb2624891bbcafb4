//! The Leases of the instances that the shim represents, and those that have expired.

use crate::api::Api;
use crate::slices::remove_slice;
use crate::token::TokenFile;
use crate::{Facts, RepresentedInstance, jittered};
use berth_cluster::client;
use berth_cluster::lease::{self, Expiry, InstanceLease, RENEWAL, is_object_name};
use berth_cluster::service::{self, Family, MANAGER};
use berth_node::instance::InstanceId;
use berth_os::clock;
use humantime::format_rfc3339_seconds;
use hyper::StatusCode;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::Instant;

/// Time between two checks of the token.
const TOKEN: Duration = Duration::from_secs(600);

/// Renews the own Leases, and removes expired ones.
#[derive(Debug)]
pub(crate) struct Leases {
    pub(crate) api: Arc<Api>,
    pub(crate) node: String,
    /// What clients dial.
    pub(crate) address: SocketAddr,
    /// This process, whatever its pid.
    pub(crate) holder: String,
    /// Names files of this shim alone.
    pub(crate) instance: InstanceId,
    /// Those that are held, by name.
    pub(crate) held: BTreeMap<String, HeldLease>,
    pub(crate) expiry: Expiry,
}

/// A Lease that is held.
#[derive(Debug, Clone)]
pub(crate) struct HeldLease {
    instance: InstanceId,
    acquired: SystemTime,
    transitions: u32,
    /// As it was answered.
    object: Value,
}

impl Leases {
    /// Renews them for as long as it is polled. `going`: the shim is about to leave.
    pub(crate) async fn keep(
        &mut self,
        mut facts: watch::Receiver<Facts>,
        mut going: watch::Receiver<bool>,
    ) {
        let (mut renewal, mut token) = (Instant::now(), Instant::now());
        let mut before = None;
        loop {
            let now = facts.borrow_and_update().clone();
            let alone = *going.borrow_and_update() && !now.sibling;
            // The content or the holder of a Lease has changed.
            let content = (now.phase, now.instances.clone(), alone);
            if before.replace(content.clone()) != Some(content) || Instant::now() >= renewal {
                renewal = Instant::now() + jittered(RENEWAL);
                if alone {
                    // When the shim ends, there may be no apiserver left; but what it left in the Service is found by its
                    // Lease.
                    if self.api.has_slices() {
                        renewal = Instant::now() + jittered(Duration::from_millis(100));
                    } else {
                        self.remove(|_| true).await;
                    }
                } else {
                    self.round(&now).await;
                }
            }
            if Instant::now() >= token {
                self.keep_token().await;
                token = Instant::now() + jittered(TOKEN);
            }
            tokio::select! {
                changed = facts.changed() => if changed.is_err() { return },
                changed = going.changed() => if changed.is_err() { return },
                () = tokio::time::sleep_until(renewal.min(token)) => {}
            }
        }
    }

    async fn round(&mut self, facts: &Facts) {
        let gone = |held: &HeldLease| {
            facts
                .instances
                .iter()
                .all(|known| known.id != held.instance)
        };
        self.remove(gone).await;
        let ready: Vec<_> = facts
            .instances
            .iter()
            .filter(|instance| instance.ready)
            .collect();
        if facts.blocked || ready.is_empty() {
            // A shim that does not renew does not judge others either.
            self.expiry.failed();
            return;
        }
        let listed = self
            .api
            .ask("list_leases", "", async |client| {
                client.get(lease::OF_INSTANCES).await
            })
            .await;
        let list = listed
            .as_ref()
            .and_then(|list| list["items"].as_array())
            .map_or(&[][..], Vec::as_slice);
        match (&listed, clock::boottime()) {
            (Some(_), Ok(now)) => self.expiry.read(now, RENEWAL * 3 / 2, list),
            _ => self.expiry.failed(),
        }
        let list: Vec<_> = list
            .iter()
            .map(|object| (object, InstanceLease::parse(object)))
            .collect();
        let mut renewed = true;
        for instance in ready {
            renewed &= self.renew(instance, facts, &list).await;
        }
        if renewed {
            self.sweep(&list).await;
        } else {
            // If no Lease can be written, all seem expired.
            self.expiry.failed();
        }
    }

    /// Whether it was renewed.
    async fn renew(
        &mut self,
        instance: &RepresentedInstance,
        facts: &Facts,
        list: &[(&Value, Option<InstanceLease>)],
    ) -> bool {
        let name = lease::lease_name(&self.node, instance.id.as_str());
        if !is_object_name(&name) || instance.id.as_str().contains('.') {
            tracing::debug!(instance = %instance.id, "the name of its Lease would not be valid");
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
        let applied = self.api.ask("apply_lease", &name, async |client| {
            client.apply(&path, MANAGER, &object).await
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
        let renewed = rfc3339(lease.renewed);
        self.api
            .update_status(|status| status.lease_renewed = renewed);
        true
    }

    /// Removes those that are held, if they still are: another shim may represent the instance now.
    pub(crate) async fn remove(&mut self, which: impl Fn(&HeldLease) -> bool) {
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
            if self.delete(&name, &held.object).await {
                self.held.remove(&name);
            }
        }
    }

    /// Whether it is not this one any more.
    async fn delete(&self, name: &str, object: &Value) -> bool {
        let path = lease::lease_path(name);
        let deleted = self.api.ask("delete_lease", name, async |client| {
            match client::found(client.delete_read(&path, object).await) {
                // It was renewed meanwhile, by another.
                Err(error) if error.status() == Some(StatusCode::CONFLICT) => Ok(None),
                answer => answer,
            }
        });
        deleted.await.is_some()
    }

    /// Removes what expired, and the slices of nodes that have no other Lease: one live berth at a time, which is the one with
    /// the first Lease by name. Two that disagree for a moment do the same.
    async fn sweep(&self, list: &[(&Value, Option<InstanceLease>)]) {
        let name = |object: &Value| {
            object["metadata"]["name"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        let (expired, live): (Vec<_>, Vec<_>) = list
            .iter()
            .partition(|(object, _)| self.expiry.expired(&name(object)));
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
                    // Its Lease stays, as there is something left to do. What fails once may hang.
                    return;
                }
            }
            if !self.delete(&name(object), object).await {
                return;
            }
            tracing::warn!(
                lease = name(object),
                "a Lease has expired and is removed, with the slices of its node if that has no other Lease"
            );
        }
    }

    /// The kubeconfig may appear later, so its token's file is searched each time.
    async fn keep_token(&self) {
        if let Some(path) = self.api.token().await {
            let expires = TokenFile::new(&path, &self.instance)
                .renew_if_due(&self.api)
                .await
                .and_then(rfc3339);
            self.api
                .update_status(|status| status.token_expires = expires);
        }
    }
}

/// A time that can be written: in a token may be any.
fn rfc3339(time: SystemTime) -> Option<String> {
    const YEAR_10000: u64 = 253_402_300_800;
    let seconds = time.duration_since(UNIX_EPOCH).ok()?.as_secs();
    (seconds < YEAR_10000).then(|| format_rfc3339_seconds(time).to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Credentials;
    use berth_testing::{Server, answer, read_slowly, serve};
    use serde_json::json;
    use std::fs;
    use std::path::Path;

    const FILES: [&str; 3] = ["kubeconfig", "ca.crt", "token"];

    /// A server's API, by a kubeconfig in a directory; and the server's address.
    pub(crate) fn api(
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

    /// A disk that etcd keeps busy may take seconds, for which the shim would not probe.
    #[tokio::test]
    async fn files_are_read_off_the_thread_that_probes() {
        let server = serve(answer("200 OK", "{}")).await;
        let temp = tempfile::tempdir().unwrap();
        let file = |name: &str| temp.path().join(name);
        let (_sender, facts) = watch::channel(Facts::default());
        let (api, address) = api(&server, temp.path(), facts);
        let texts = FILES.map(|name| fs::read_to_string(file(name)).unwrap());
        for (name, text) in FILES.iter().zip(&texts) {
            let asked = api.ask("list_leases", "", async |client| client.get("/x").await);
            assert_eq!(
                read_slowly(&file(name), text, asked).await,
                (Some(json!({})), true),
                "{name}"
            );
        }
        let instance: InstanceId = "a".parse().unwrap();
        let token = TokenFile::new(&file("token"), &instance);
        assert_eq!(
            read_slowly(&file("token"), "t0ken", token.renew_if_due(&api)).await,
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
                read_slowly(&file(name), text, leases.keep_token()).await,
                ((), true),
                "{name}"
            );
        }
    }
}
