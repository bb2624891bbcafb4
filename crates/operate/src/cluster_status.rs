//! `berth status --cluster`: the instances of all nodes as their Leases have them, and whether the Service `kubernetes` names
//! their addresses.

use crate::report;
use crate::upgrade::lock::{self, Holder, NAME};
use berth_cluster::lease::{DURATION, Expiry, InstanceLease, LEASES, RENEWAL};
use berth_cluster::service::{OF_SERVICE, addresses};
use berth_cluster::{Client, Error};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

/// Version of the JSON form.
const VERSION: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterStatus {
    pub version: u32,
    /// By node and name.
    pub instances: Vec<ClusterInstance>,
    /// Addresses in the Service that are no instance's here.
    pub others: Vec<OtherAddress>,
    /// The upgrade that has the cluster's lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<UpgradeLock>,
}

/// An upgrade of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UpgradeLock {
    #[serde(flatten)]
    pub holder: Holder,
    /// It does not renew the lock: it has ended, or was interrupted.
    pub expired: bool,
}

/// An instance that has a Lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterInstance {
    pub node: String,
    /// The instance's ID on that node.
    pub instance: String,
    /// Of its shim.
    pub state: String,
    /// Its version, as it reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// What clients dial.
    pub address: SocketAddr,
    /// When its holder renewed it, by the clock there.
    pub renewed: String,
    /// Time since then. Once it was seen to change, since that.
    pub age_seconds: u64,
    /// That is longer than a Lease is good for.
    pub expired: bool,
    /// The Service's slices that name its address. For a wildcard they cannot be known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<Vec<String>>,
}

/// An address in the Service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OtherAddress {
    pub address: IpAddr,
    /// The slices that name it.
    pub service: Vec<String>,
}

/// Samples a cluster, once or repeatedly. With several samples, a Lease's age is the time since it was observed to change: clocks
/// of nodes may differ.
#[derive(Debug, Default)]
pub struct Observer {
    expiry: Expiry,
    /// Of the lock. A node's token could call a Lease of an instance like it.
    lock: Expiry,
}

impl Observer {
    /// Samples the cluster: by the system's clock, and by one that never goes back.
    ///
    /// # Errors
    /// It does not answer, or not to these credentials.
    pub async fn sample(&mut self, client: &Client, time: SystemTime, now: Duration) -> Result<ClusterStatus, Error> {
        let asked =
            async { Ok((client.get(LEASES).await?, client.get(lock::LEASES).await?, client.get(OF_SERVICE).await?)) };
        match asked.await {
            Ok((leases, locks, slices)) => Ok(self.status([&leases, &locks, &slices], time, now)),
            Err(error) => {
                self.expiry.failed();
                self.lock.failed();
                Err(error)
            }
        }
    }

    /// Of lists: instances' Leases, those of the lock's namespace, slices.
    fn status(&mut self, lists: [&Value; 3], time: SystemTime, now: Duration) -> ClusterStatus {
        let items = |list: &Value| list["items"].as_array().cloned().unwrap_or_default();
        let [leases, locks, slices] = lists.map(items);
        self.expiry.read(now, RENEWAL, &leases);
        self.lock.read(now, RENEWAL, &locks);
        let mut named: BTreeMap<IpAddr, Vec<String>> = BTreeMap::new();
        for slice in &slices {
            let name = slice["metadata"]["name"].as_str().unwrap_or_default();
            addresses(slice).for_each(|ip| named.entry(ip).or_default().push(name.to_owned()));
        }
        let mut instances: Vec<_> = leases.iter().filter_map(InstanceLease::parse).collect();
        instances.sort_by(|a, b| (&a.node, &a.instance).cmp(&(&b.node, &b.instance)));
        let others = named.iter().filter(|(ip, _)| instances.iter().all(|known| known.address.ip() != **ip));
        ClusterStatus {
            version: VERSION,
            others: others.map(|(ip, service)| OtherAddress { address: *ip, service: service.clone() }).collect(),
            instances: instances.into_iter().map(|lease| self.instance(lease, &named, time)).collect(),
            upgrade: locks.iter().find(|lease| lease["metadata"]["name"] == NAME).map(|lease| UpgradeLock {
                holder: Holder::parse(lease),
                expired: age(
                    &self.lock,
                    NAME,
                    lease["spec"]["renewTime"].as_str().and_then(|time| humantime::parse_rfc3339(time).ok()),
                    time,
                ) > DURATION,
            }),
        }
    }

    fn instance(
        &self,
        lease: InstanceLease,
        named: &BTreeMap<IpAddr, Vec<String>>,
        time: SystemTime,
    ) -> ClusterInstance {
        let age = age(&self.expiry, &lease.name(), Some(lease.renewed), time);
        let ip = lease.address.ip();
        let service = (!ip.is_unspecified()).then(|| named.get(&ip).cloned().unwrap_or_default());
        ClusterInstance {
            node: lease.node,
            instance: lease.instance,
            state: lease.state,
            version: lease.version,
            address: lease.address,
            renewed: humantime::format_rfc3339_seconds(lease.renewed).to_string(),
            age_seconds: age.as_secs(),
            expired: age > DURATION,
            service,
        }
    }
}

/// Time since a Lease changed.
fn age(expiry: &Expiry, name: &str, renewed: Option<SystemTime>, time: SystemTime) -> Duration {
    let by_clock = renewed.and_then(|renewed| time.duration_since(renewed).ok());
    expiry.age(name, by_clock.unwrap_or_default())
}

/// Why a request to the cluster failed, and the fix.
pub fn explain(error: &Error) -> String {
    report::explain(
        error,
        [
            "the kubeconfig's credentials are not known there, or have expired: give another with --kubeconfig",
            "give the --kubeconfig of a user who may list Leases in berth-system and berth-upgrade, and EndpointSlices in default",
            "try again",
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::{answer, serve};
    use serde_json::json;

    fn lease(node: &str, address: &str, renewed: u64) -> Value {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(renewed);
        let lease = InstanceLease {
            node: node.into(),
            instance: "a".into(),
            holder: "x".into(),
            address: address.parse().unwrap(),
            version: Some("v1.36.3".into()),
            state: "joined".into(),
            acquired: time,
            renewed: time,
            transitions: 0,
        };
        let mut object = lease.object();
        object["metadata"]["resourceVersion"] = json!(renewed.to_string());
        object
    }

    fn list(items: &[Value]) -> Value {
        json!({"items": items})
    }

    fn slice(name: &str, addresses: &[&str]) -> Value {
        json!({"metadata": {"name": name}, "endpoints": [{"addresses": addresses}]})
    }

    fn at(second: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(second)
    }

    #[test]
    fn instances_are_told_with_what_names_them() {
        let upgrade = json!({"metadata": {"name": "upgrade", "annotations": {"berth/node": "cp-2"}},
            "spec": {"renewTime": "1970-01-01T00:15:00.000000Z"}});
        let leases = [
            lease("cp-2", "10.0.0.6:6443", 950),
            lease("cp-1", "10.0.0.5:6443", 995),
            lease("cp-3", "[::]:6443", 1010),
            json!({"metadata": {"name": "upgrade", "annotations": {"berth/node": "forged"}}}),
        ];
        let slices = [slice("kubernetes", &["10.0.0.5", "10.0.0.9"]), slice("berth-cp-1-ipv4", &["10.0.0.5"])];
        let status =
            Observer::default().status([&list(&leases), &list(&[upgrade]), &list(&slices)], at(1000), Duration::ZERO);
        let shown = status.instances.iter().map(|one| (one.node.as_str(), one.age_seconds, one.expired));
        assert_eq!(shown.collect::<Vec<_>>(), [("cp-1", 5, false), ("cp-2", 50, true), ("cp-3", 0, false)]);
        let services: Vec<_> = status.instances.iter().map(|one| one.service.as_deref()).collect();
        let both = ["kubernetes".to_owned(), "berth-cp-1-ipv4".to_owned()];
        assert_eq!(services, [Some(&both[..]), Some(&[]), None]);
        let other = OtherAddress { address: "10.0.0.9".parse().unwrap(), service: vec!["kubernetes".into()] };
        assert_eq!(status.others, [other]);
        let upgrade = status.upgrade.unwrap();
        assert!(upgrade.expired && upgrade.holder.node == "cp-2" && upgrade.holder.changed, "{upgrade:?}");
        let empty = Observer::default().status([&json!({}); 3], at(0), Duration::ZERO);
        assert_eq!(serde_json::to_value(empty).unwrap(), json!({"version": 1, "instances": [], "others": []}));
    }

    /// A node's clock is an hour behind, and another's an hour ahead: reading for a while shows which of them lives.
    #[test]
    fn who_looks_again_goes_by_changes_and_not_by_clocks() {
        let mut observer = Observer::default();
        let mut expired = Vec::new();
        for second in (0..=50).step_by(5) {
            let behind = lease("behind", "10.0.0.5:6443", 10_000 - 3600 + second / 10 * 10);
            let leases = list(&[behind, lease("dead-ahead", "10.0.0.6:6443", 10_000 + 3600)]);
            let status =
                observer.status([&leases, &json!({}), &json!({})], at(10_000 + second), Duration::from_secs(second));
            expired.push([status.instances[0].expired, status.instances[1].expired]);
        }
        assert_eq!(expired[0], [true, false], "at first there are only clocks");
        assert_eq!(expired[3], [false, false], "it was seen to be renewed");
        assert_eq!(expired[10], [false, true], "it was not for 50 s");
    }

    #[tokio::test]
    async fn why_it_cannot_be_asked_is_one_line_with_the_fix() {
        for (status, fix) in
            [("403 Forbidden", "may list Leases"), ("401 Unauthorized", "expired"), ("500 No", "again")]
        {
            let server = serve(answer(status, r#"{"message": "no"}"#)).await;
            let client = Client::new(&server.access).unwrap();
            let error = Observer::default().sample(&client, at(0), Duration::ZERO).await.unwrap_err();
            let shown = explain(&error);
            assert!(shown.contains(fix) && shown.contains("leases: no: ") && shown.lines().count() == 1, "{shown}");
        }
    }
}
