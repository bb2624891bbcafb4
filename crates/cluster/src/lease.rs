//! Leases of instances. A Lease is an object of `coordination.k8s.io/v1`. Each instance has one,
//! with the instance's node and version.
//!
//! The Leases have a namespace of their own. A Role cannot list their names, which are not known in
//! advance, so in kube-system the Role would also cover the Lease of every leader election. The
//! lease of a shim is not a Lease but a file in a node's run directory.

use humantime::{format_rfc3339_micros, parse_rfc3339};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

/// The namespace that berth's objects have in the cluster.
pub const NAMESPACE: &str = "berth-system";

/// API path of all Leases in berth's namespace.
pub const ALL_LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases";

/// API path that lists the Leases of instances, and no other Leases of the namespace.
pub const INSTANCE_LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases?labelSelector=app.kubernetes.io/component%3Dinstance";

/// Time without a renewal after which a Lease is expired: four times [`RENEWAL_INTERVAL`], like
/// kube-apiserver's own lease of its address.
pub const LEASE_DURATION: Duration = Duration::from_secs(40);

/// Time between two renewals of a Lease.
pub const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);

const NODE_LABEL: &str = "berth/node";
const INSTANCE_LABEL: &str = "berth/instance";
const ADDRESS_LABEL: &str = "berth/address";
const VERSION_LABEL: &str = "berth/version";
const STATE_LABEL: &str = "berth/state";

/// The content of an instance's Lease object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceLease {
    pub node: String,
    /// The instance's ID on the node.
    pub instance: String,
    /// The shim that renews the Lease: its node and process.
    pub holder: String,
    /// The address that clients dial.
    pub address: SocketAddr,
    /// The version that the instance reports. `None` if it is not known.
    pub version: Option<String>,
    /// The state of the shim that serves the instance, as text.
    pub state: String,
    /// Time at which the present holder renewed the Lease for the first time.
    pub acquired: SystemTime,
    /// Time at which the present holder renewed the Lease last.
    pub renewed: SystemTime,
    /// Number of times that the Lease got another holder.
    pub transitions: u32,
}

impl InstanceLease {
    pub fn name(&self) -> String {
        lease_name(&self.node, &self.instance)
    }

    /// Returns the complete Lease object for a server-side apply.
    pub fn object(&self) -> Value {
        let mut annotations = json!({
            NODE_LABEL: self.node,
            INSTANCE_LABEL: self.instance,
            ADDRESS_LABEL: self.address,
            STATE_LABEL: self.state,
        });
        if let Some(version) = &self.version {
            annotations[VERSION_LABEL] = json!(version);
        }
        let times = [self.acquired, self.renewed];
        lease_object(
            [NAMESPACE, &self.name(), "instance"],
            &annotations,
            &self.holder,
            times,
            self.transitions,
        )
    }

    /// Parses a Lease object. Returns `None` if it is not the Lease of an instance.
    pub fn parse(object: &Value) -> Option<Self> {
        let (annotations, spec) = (&object["metadata"]["annotations"], &object["spec"]);
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let time = |value: &Value| parse_rfc3339(value.as_str()?).ok();
        Some(Self {
            node: text(&annotations[NODE_LABEL])?,
            instance: text(&annotations[INSTANCE_LABEL])?,
            holder: text(&spec["holderIdentity"])?,
            address: annotations[ADDRESS_LABEL].as_str()?.parse().ok()?,
            version: text(&annotations[VERSION_LABEL]),
            state: text(&annotations[STATE_LABEL]).unwrap_or_default(),
            acquired: time(&spec["acquireTime"])?,
            renewed: time(&spec["renewTime"])?,
            transitions: spec["leaseTransitions"].as_u64()?.try_into().ok()?,
        })
    }
}

/// Returns a Lease object of berth with this namespace, name and component. The Lease is valid for
/// [`LEASE_DURATION`] after each renewal.
pub fn lease_object(
    [namespace, name, component]: [&str; 3],
    annotations: &Value,
    holder: &str,
    [acquired, renewed]: [SystemTime; 2],
    transitions: u32,
) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "berth", "app.kubernetes.io/component": component},
            "annotations": annotations,
        },
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": LEASE_DURATION.as_secs(),
            "acquireTime": format_rfc3339_micros(acquired).to_string(),
            "renewTime": format_rfc3339_micros(renewed).to_string(),
            "leaseTransitions": transitions,
        },
    })
}

/// Returns the name of an instance's Lease. The name begins with the node, because an instance's ID
/// is unique only on its node, while node names are unique in the cluster.
pub fn lease_name(node: &str, instance: &str) -> String {
    format!("{node}.{instance}")
}

pub fn lease_path(name: &str) -> String {
    format!("{ALL_LEASES}/{name}")
}

/// True if a text can be an object's name, or a part of one: it must be a DNS subdomain.
pub fn is_object_name(text: &str) -> bool {
    let inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_label = |label: &str| {
        !label.is_empty() && label.chars().all(inside) && label.trim_matches('-') == label
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Decides which Leases have expired, by the time since this process last *saw* a Lease change.
/// Clocks of nodes are not compared. Only time between two successful reads counts. Otherwise every
/// Lease would look expired after an outage of etcd, in which no Lease can be renewed.
#[derive(Debug, Default)]
pub struct Expiry {
    seen: BTreeMap<String, ObservedLease>,
    last: Option<Duration>,
}

#[derive(Debug)]
struct ObservedLease {
    version: Value,
    unchanged: Duration,
}

impl Expiry {
    /// Takes a list of Leases that this process has read, and notes which ones are unchanged. The
    /// list must be read from etcd, not from an apiserver's cache, and `now` must come from a
    /// monotonic clock of this process. Time between two reads counts only up to `gap`: a longer
    /// pause counts as zero.
    pub fn record_list<'a>(
        &mut self,
        now: Duration,
        gap: Duration,
        leases: impl IntoIterator<Item = &'a Value>,
    ) {
        let passed = self
            .last
            .replace(now)
            .map_or(Duration::ZERO, |last| now.saturating_sub(last));
        let passed = if passed > gap { Duration::ZERO } else { passed };
        let mut seen = BTreeMap::new();
        for lease in leases {
            let meta = &lease["metadata"];
            let (Some(name), version) = (meta["name"].as_str(), &meta["resourceVersion"]) else {
                continue;
            };
            let same = self
                .seen
                .get(name)
                .filter(|before| before.version == *version);
            let unchanged = same.map_or(Duration::ZERO, |before| before.unchanged + passed);
            seen.insert(
                name.to_owned(),
                ObservedLease {
                    version: version.clone(),
                    unchanged,
                },
            );
        }
        self.seen = seen;
    }

    /// Notes that a read failed. The time until the next successful read does not count for any
    /// Lease.
    pub fn record_failure(&mut self) {
        self.last = None;
    }

    /// True if this process has seen the Lease unchanged for longer than [`LEASE_DURATION`].
    pub fn is_expired(&self, name: &str) -> bool {
        self.seen
            .get(name)
            .is_some_and(|seen| seen.unchanged > LEASE_DURATION)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GAP: Duration = Duration::from_secs(15);

    fn test_lease() -> InstanceLease {
        let time = SystemTime::UNIX_EPOCH + Duration::from_micros(1_000_001);
        InstanceLease {
            node: "cp-1".into(),
            instance: "3f2a".into(),
            holder: "cp-1_00ff".into(),
            address: "[fd00::5]:6443".parse().unwrap(),
            version: Some("v1.36.3".into()),
            state: "joined".into(),
            acquired: time,
            renewed: time + Duration::from_secs(10),
            transitions: 2,
        }
    }

    #[test]
    fn a_written_lease_is_parsed_back() {
        let object = test_lease().object();
        assert_eq!(object["metadata"]["name"], "cp-1.3f2a");
        assert_eq!(object["spec"]["renewTime"], "1970-01-01T00:00:11.000001Z");
        assert_eq!(InstanceLease::parse(&object), Some(test_lease()));
        let unknown = InstanceLease {
            version: None,
            ..test_lease()
        };
        assert_eq!(InstanceLease::parse(&unknown.object()), Some(unknown));
        assert_eq!(
            InstanceLease::parse(&json!({"spec": {"holderIdentity": "x"}})),
            None
        );
    }

    #[test]
    fn object_names_are_dns_subdomains() {
        for good in ["a", "cp-1.3f2a", "0.9", &"a".repeat(253)] {
            assert!(is_object_name(good), "{good}");
        }
        for bad in ["", "A", "a_b", "-a", "a-", "a..b", ".a", &"a".repeat(254)] {
            assert!(!is_object_name(bad), "{bad}");
        }
    }

    fn lease_at_version(version: u32) -> Value {
        json!({"metadata": {"name": "a", "resourceVersion": version.to_string()}})
    }

    #[test]
    fn an_unchanged_lease_expires_and_a_renewed_lease_does_not() {
        let mut expiry = Expiry::default();
        for second in (0..=40).step_by(10) {
            expiry.record_list(Duration::from_secs(second), GAP, [&lease_at_version(1)]);
            assert!(!expiry.is_expired("a"), "{second}");
        }
        expiry.record_list(Duration::from_secs(50), GAP, [&lease_at_version(1)]);
        assert!(expiry.is_expired("a") && !expiry.is_expired("b"));
        expiry.record_list(Duration::from_secs(60), GAP, [&lease_at_version(2)]);
        assert!(!expiry.is_expired("a"));
    }

    proptest! {
        /// Tries random histories of reads, failures and stops of this process. A Lease that
        /// changes within 40 s of successful reads must never expire.
        #[test]
        fn a_lease_that_is_renewed_never_expires(steps in prop::collection::vec((0u64..60, any::<bool>()), 0..60)) {
            let (mut expiry, mut now, mut version, mut counted) = (Expiry::default(), 0, 0, 0);
            let mut good = false;
            for (pause, fails) in steps {
                now += pause;
                if fails {
                    expiry.record_failure();
                    good = false;
                    continue;
                }
                counted += if good && pause <= GAP.as_secs() { pause } else { 0 };
                good = true;
                if counted > 40 {
                    (version, counted) = (version + 1, 0);
                }
                expiry.record_list(Duration::from_secs(now), GAP, [&lease_at_version(version)]);
                prop_assert!(!expiry.is_expired("a"));
            }
        }
    }
}
