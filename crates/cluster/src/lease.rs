//! Leases: objects of `coordination.k8s.io/v1`, one for each instance, with the instance's node and
//! version.
//!
//! The Leases have a namespace of their own: their names are not known in advance, and a Role for
//! them in kube-system would cover every leader election there. The lease of a shim is something
//! else: a file in a node's run directory.

use humantime::{format_rfc3339_micros, parse_rfc3339};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

/// The namespace of berth's objects.
pub const NAMESPACE: &str = "berth-system";

/// API path of the namespace's Leases.
pub const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases";

/// API path of the instances' Leases.
pub const OF_INSTANCES: &str = "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases?labelSelector=app.kubernetes.io/component%3Dinstance";

/// Validity of a Lease without a renewal: four renewals, like kube-apiserver's own lease of its
/// address.
pub const DURATION: Duration = Duration::from_secs(40);

/// Time between two renewals.
pub const RENEWAL: Duration = Duration::from_secs(10);

const NODE: &str = "berth/node";
const INSTANCE: &str = "berth/instance";
const ADDRESS: &str = "berth/address";
const VERSION: &str = "berth/version";
const STATE: &str = "berth/state";

/// The content of an instance's Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceLease {
    pub node: String,
    /// The instance's ID on the node.
    pub instance: String,
    /// The shim that renews the Lease: its node and process.
    pub holder: String,
    /// The address that clients dial.
    pub address: SocketAddr,
    /// The version that the instance reports.
    pub version: Option<String>,
    /// The state of the instance's shim.
    pub state: String,
    /// Time of the holder's first renewal.
    pub acquired: SystemTime,
    /// Time of the holder's last renewal.
    pub renewed: SystemTime,
    /// Number of changes of the holder.
    pub transitions: u32,
}

impl InstanceLease {
    pub fn name(&self) -> String {
        lease_name(&self.node, &self.instance)
    }

    /// Returns the whole object, ready for an apply.
    pub fn object(&self) -> Value {
        let mut annotations = json!({
            NODE: self.node,
            INSTANCE: self.instance,
            ADDRESS: self.address,
            STATE: self.state,
        });
        if let Some(version) = &self.version {
            annotations[VERSION] = json!(version);
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

    /// Parses an object. `None` if the object is not the Lease of an instance.
    pub fn parse(object: &Value) -> Option<Self> {
        let (annotations, spec) = (&object["metadata"]["annotations"], &object["spec"]);
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let time = |value: &Value| parse_rfc3339(value.as_str()?).ok();
        Some(Self {
            node: text(&annotations[NODE])?,
            instance: text(&annotations[INSTANCE])?,
            holder: text(&spec["holderIdentity"])?,
            address: annotations[ADDRESS].as_str()?.parse().ok()?,
            version: text(&annotations[VERSION]),
            state: text(&annotations[STATE]).unwrap_or_default(),
            acquired: time(&spec["acquireTime"])?,
            renewed: time(&spec["renewTime"])?,
            transitions: spec["leaseTransitions"].as_u64()?.try_into().ok()?,
        })
    }
}

/// Returns a Lease of berth with this namespace, name and component, held for [`DURATION`].
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
            "leaseDurationSeconds": DURATION.as_secs(),
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
    format!("{LEASES}/{name}")
}

/// True if a text can be an object's name, or a part of one: a DNS subdomain.
pub fn is_object_name(text: &str) -> bool {
    let inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_label = |label: &str| {
        !label.is_empty() && label.chars().all(inside) && label.trim_matches('-') == label
    };
    text.len() <= 253 && text.split('.').all(is_label)
}

/// Decides which Leases have expired, by the time since a Lease was last *seen* to change. Clocks
/// of nodes are not compared. Time counts only between two successful reads, because after an
/// outage of etcd every Lease looks expired.
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
    /// Takes a list of Leases. The list must be read from etcd, not from an apiserver's cache, and
    /// `now` must come from a monotonic clock of this process. Time between two reads counts only
    /// up to `gap`: a longer pause counts as zero.
    pub fn read<'a>(
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

    /// Notes that a read failed: time until the next successful read does not count.
    pub fn record_failure(&mut self) {
        self.last = None;
    }

    /// True if a Lease was seen unchanged for longer than its validity.
    pub fn is_expired(&self, name: &str) -> bool {
        self.seen
            .get(name)
            .is_some_and(|seen| seen.unchanged > DURATION)
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

    fn at(version: u32) -> Value {
        json!({"metadata": {"name": "a", "resourceVersion": version.to_string()}})
    }

    #[test]
    fn an_unchanged_lease_expires_and_a_renewed_lease_does_not() {
        let mut expiry = Expiry::default();
        for second in (0..=40).step_by(10) {
            expiry.read(Duration::from_secs(second), GAP, [&at(1)]);
            assert!(!expiry.is_expired("a"), "{second}");
        }
        expiry.read(Duration::from_secs(50), GAP, [&at(1)]);
        assert!(expiry.is_expired("a") && !expiry.is_expired("b"));
        expiry.read(Duration::from_secs(60), GAP, [&at(2)]);
        assert!(!expiry.is_expired("a"));
    }

    proptest! {
        /// A Lease that changes at least every 40 s of successful reads never expires, whatever the
        /// outages: the process stopped, the apiserver did not answer, or answered with an error.
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
                expiry.read(Duration::from_secs(now), GAP, [&at(version)]);
                prop_assert!(!expiry.is_expired("a"));
            }
        }
    }
}
