//! The Service `kubernetes` and its EndpointSlices.
//!
//! kube-proxy merges all slices that have a Service's label. kube-apiserver writes the slice named
//! `kubernetes`, from the addresses that its instances renew. The instances of a node share one
//! address in this slice. berth writes its own slices, one per node and address family, and never
//! the slice `kubernetes`.

use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

pub const SERVICE_PATH: &str = "/api/v1/namespaces/default/services/kubernetes";

/// API path of all EndpointSlices in the namespace `default`.
pub const SLICES_PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";

/// API path of the EndpointSlice that kube-apiserver writes.
pub const RECONCILED_SLICE: &str =
    "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";

/// Time between two reads of kube-apiserver's slice. Kubernetes' leader elections renew their
/// leases in the same rhythm.
pub const READ_INTERVAL: Duration = Duration::from_secs(2);

/// API path that lists all slices of the Service `kubernetes`.
pub const SERVICE_SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name%3Dkubernetes";

/// berth's name in the cluster: the field manager of its objects, and the manager of its slices.
pub const FIELD_MANAGER: &str = "berth";

/// An IP family, IPv4 or IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub fn of_address(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the family's name in the field `addressType` of an EndpointSlice and in `ipFamilies`
    /// of a Service.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }
}

/// The fields of the Service `kubernetes` that berth copies into its slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    pub families: Vec<Family>,
    /// The name of the Service's first port.
    pub port_name: String,
}

impl Service {
    /// Parses the Service object. A missing field gets kube-apiserver's default.
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

/// Returns the name of berth's own slice for a node and an address family.
pub fn slice_name(node: &str, family: Family) -> String {
    format!("berth-{node}-{}", family.as_str().to_ascii_lowercase())
}

pub fn slice_path(name: &str) -> String {
    format!("{SLICES_PATH}/{name}")
}

pub fn build_slice(node: &str, address: SocketAddr, port_name: &str) -> Value {
    let family = Family::of_address(address.ip());
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": slice_name(node, family),
            "namespace": "default",
            "labels": {
                "kubernetes.io/service-name": "kubernetes",
                "endpointslice.kubernetes.io/managed-by": FIELD_MANAGER,
            },
        },
        "addressType": family.as_str(),
        "endpoints": [{"addresses": [address.ip()], "conditions": {"ready": true}, "nodeName": node}],
        "ports": [{"name": port_name, "port": address.port(), "protocol": "TCP"}],
    })
}

/// Returns the addresses in a slice, without those that are marked unready.
pub fn slice_addresses(slice: &Value) -> impl Iterator<Item = IpAddr> + '_ {
    let endpoints = slice["endpoints"].as_array().into_iter().flatten();
    let ready = endpoints.filter(|endpoint| endpoint["conditions"]["ready"] != false);
    let addresses =
        ready.flat_map(|endpoint| endpoint["addresses"].as_array().into_iter().flatten());
    addresses.filter_map(|address| address.as_str()?.parse().ok())
}

/// Returns the ports in a slice.
pub fn slice_ports(slice: &Value) -> impl Iterator<Item = u16> + '_ {
    let ports = slice["ports"].as_array().into_iter().flatten();
    ports.filter_map(|port| port["port"].as_u64()?.try_into().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_names_the_node_and_its_address() {
        let six = build_slice("cp-1", "[fd00::5]:6443".parse().unwrap(), "https");
        assert_eq!(
            (&six["metadata"]["name"], &six["addressType"]),
            (&json!("berth-cp-1-ipv6"), &json!("IPv6"))
        );
        assert_eq!(six["endpoints"][0]["nodeName"], "cp-1");
        assert_eq!(
            slice_addresses(&six).collect::<Vec<_>>(),
            ["fd00::5".parse::<IpAddr>().unwrap()]
        );
        assert_eq!(slice_ports(&six).collect::<Vec<_>>(), [6443]);
    }

    #[test]
    fn unready_and_missing_endpoints_have_no_addresses() {
        let mut four = build_slice("cp-1", "10.0.0.5:6443".parse().unwrap(), "https");
        four["endpoints"][0]["conditions"]["ready"] = json!(false);
        assert_eq!(slice_addresses(&four).count(), 0);
        for empty in [
            json!({}),
            json!({"endpoints": null, "ports": null}),
            json!({"endpoints": [{"addresses": [7, "x"]}]}),
        ] {
            assert_eq!(
                (slice_addresses(&empty).count(), slice_ports(&empty).count()),
                (0, 0)
            );
        }
    }

    #[test]
    fn a_services_families_and_port_name_are_parsed() {
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
