//! The Service `kubernetes` and its EndpointSlices.
//!
//! kube-proxy joins all slices that carry a Service's label. kube-apiserver writes the one that is named
//! `kubernetes`, and makes it from the addresses that its instances renew: those of a node share one. berth writes slices of its own, one
//! a node and address family, and never that one.

use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

pub const SERVICE: &str = "/api/v1/namespaces/default/services/kubernetes";

/// The slices of the namespace.
pub const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";

/// The slice that kube-apiserver writes.
pub const RECONCILED: &str =
    "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";

/// Time between two reads of it: as often as a leader election of Kubernetes renews.
pub const LOOK: Duration = Duration::from_secs(2);

/// All slices of the Service.
pub const OF_SERVICE: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name%3Dkubernetes";

/// berth as the field manager of objects, and as the manager of slices.
pub const MANAGER: &str = "berth";

/// An IP family, as an EndpointSlice and a Service write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// As an EndpointSlice's `addressType` and a Service's `ipFamilies` have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

/// What berth's slices take over from the Service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    pub families: Vec<Family>,
    /// The name of its first port.
    pub port_name: String,
}

impl Service {
    /// Of the object; a field that is missing is as kube-apiserver makes it.
    pub fn parse(object: &Value) -> Self {
        let families = object["spec"]["ipFamilies"]
            .as_array()
            .into_iter()
            .flatten();
        let of = |value: &Value| {
            Family::ALL
                .into_iter()
                .find(|family| value == family.as_str())
        };
        let families: Vec<_> = families.filter_map(of).collect();
        Self {
            families: if families.is_empty() {
                vec![Family::V4]
            } else {
                families
            },
            port_name: object["spec"]["ports"][0]["name"]
                .as_str()
                .unwrap_or("https")
                .to_owned(),
        }
    }
}

/// Name of a node's own slice.
pub fn slice_name(node: &str, family: Family) -> String {
    format!("berth-{node}-{}", family.as_str().to_ascii_lowercase())
}

pub fn slice_path(name: &str) -> String {
    format!("{SLICES}/{name}")
}

pub fn slice(node: &str, address: SocketAddr, port_name: &str) -> Value {
    let family = Family::of(address.ip());
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": slice_name(node, family),
            "namespace": "default",
            "labels": {
                "kubernetes.io/service-name": "kubernetes",
                "endpointslice.kubernetes.io/managed-by": MANAGER,
            },
        },
        "addressType": family.as_str(),
        "endpoints": [{"addresses": [address.ip()], "conditions": {"ready": true}, "nodeName": node}],
        "ports": [{"name": port_name, "port": address.port(), "protocol": "TCP"}],
    })
}

/// The addresses in a slice that are not marked unready.
pub fn addresses(slice: &Value) -> impl Iterator<Item = IpAddr> + '_ {
    let endpoints = slice["endpoints"].as_array().into_iter().flatten();
    let ready = endpoints.filter(|endpoint| endpoint["conditions"]["ready"] != false);
    let addresses =
        ready.flat_map(|endpoint| endpoint["addresses"].as_array().into_iter().flatten());
    addresses.filter_map(|address| address.as_str()?.parse().ok())
}

/// The ports in a slice.
pub fn ports(slice: &Value) -> impl Iterator<Item = u16> + '_ {
    let ports = slice["ports"].as_array().into_iter().flatten();
    ports.filter_map(|port| port["port"].as_u64()?.try_into().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_names_the_node_and_its_address() {
        let six = slice("cp-1", "[fd00::5]:6443".parse().unwrap(), "https");
        assert_eq!(
            (&six["metadata"]["name"], &six["addressType"]),
            (&json!("berth-cp-1-ipv6"), &json!("IPv6"))
        );
        assert_eq!(six["endpoints"][0]["nodeName"], "cp-1");
        assert_eq!(
            addresses(&six).collect::<Vec<_>>(),
            ["fd00::5".parse::<IpAddr>().unwrap()]
        );
        assert_eq!(ports(&six).collect::<Vec<_>>(), [6443]);
    }

    #[test]
    fn who_is_unready_does_not_count_and_what_is_missing_is_nobody() {
        let mut four = slice("cp-1", "10.0.0.5:6443".parse().unwrap(), "https");
        four["endpoints"][0]["conditions"]["ready"] = json!(false);
        assert_eq!(addresses(&four).count(), 0);
        for empty in [
            json!({}),
            json!({"endpoints": null, "ports": null}),
            json!({"endpoints": [{"addresses": [7, "x"]}]}),
        ] {
            assert_eq!((addresses(&empty).count(), ports(&empty).count()), (0, 0));
        }
    }

    #[test]
    fn a_services_families_and_port_are_taken_over() {
        let service = json!({"spec": {"ipFamilies": ["IPv6", "IPv4"], "ports": [{"name": "api"}]}});
        let parsed = Service::parse(&service);
        assert_eq!(
            (parsed.families, parsed.port_name.as_str()),
            (vec![Family::V6, Family::V4], "api")
        );
        let parsed = Service::parse(&json!({}));
        assert_eq!(
            (parsed.families, parsed.port_name.as_str()),
            (vec![Family::V4], "https")
        );
    }
}
