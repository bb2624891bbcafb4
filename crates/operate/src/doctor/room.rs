//! Whether a further kube-apiserver fits on a node by what pods request of it.
//!
//! The kubelet takes a static pod in any case: where what is requested would be more than the node has to give, it ends other pods
//! to make room (`CriticalPodAdmissionHandler`). That is known from the cluster alone: cgroups do not show what memory is requested.

use super::checks::REQUESTS;
use super::{Case, Finding};
use crate::manifest::Manifest;
use berth_cluster::yaml::YamlNode;
use berth_cluster::{Client, Error};
use serde_json::Value;
use std::net::IpAddr;

/// kubeadm's kube-apiservers, by which the node is found: their pods have its address and its name.
const APISERVERS: &str = "/api/v1/namespaces/kube-system/pods?labelSelector=component%3Dkube-apiserver";

/// Resources: CPUs, and bytes of memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Resources {
    /// CPUs.
    pub cpu: f64,
    /// Bytes.
    pub memory: f64,
}

/// What a node has to give, and what is requested of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Room {
    /// Name of the node.
    pub node: String,
    /// Its allocatable resources.
    pub allocatable: Resources,
    /// What the pods that run there request.
    pub requested: Resources,
    /// How many pods may run there, if that is said, and how many do.
    pub pods: (Option<u64>, u64),
}

impl Room {
    /// Asks the cluster about the node with one of these addresses. None: it has no kube-apiserver of kubeadm's.
    ///
    /// # Errors
    /// It does not answer, or not to this user.
    pub async fn ask(client: &Client, own: &[IpAddr]) -> Result<Option<Self>, Error> {
        let Some(node) = node_of(&client.get(APISERVERS).await?, own) else { return Ok(None) };
        let object = client.get(&format!("/api/v1/nodes/{node}")).await?;
        let pods = client.get(&format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{node}")).await?;
        Ok(Some(Self::of(node, &object, &pods)))
    }

    fn of(node: String, object: &Value, pods: &Value) -> Self {
        let allocatable = &object["status"]["allocatable"];
        let ended = |pod: &&Value| matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let running: Vec<_> = array(&pods["items"]).iter().filter(|pod| !ended(pod)).collect();
        let requested = running.iter().map(|pod| requests(&pod["spec"])).fold(Resources::default(), sum);
        let most = allocatable["pods"].as_str().and_then(|text| text.parse().ok());
        Self { node, allocatable: resources(allocatable), requested, pods: (most, running.len() as u64) }
    }
}

pub(super) fn examine(case: &Case<'_>, room: &Room) -> Vec<Finding> {
    let wanted = of_manifest(case.manifest);
    let Room { node, allocatable, requested, pods } = room;
    let short = |have: f64, given: f64, wanted: f64| wanted > 0.0 && given + wanted > have;
    let mut found = Vec::new();
    if short(allocatable.cpu, requested.cpu, wanted.cpu) {
        found.push(format!(
            "{:.0}m of CPU of {:.0}m are requested, and a second kube-apiserver requests {:.0}m",
            requested.cpu * 1e3,
            allocatable.cpu * 1e3,
            wanted.cpu * 1e3
        ));
    }
    if short(allocatable.memory, requested.memory, wanted.memory) {
        let mib = |bytes: f64| bytes / 1_048_576.0;
        found.push(format!(
            "{:.0} MiB of memory of {:.0} MiB are requested, and a second kube-apiserver requests {:.0} MiB",
            mib(requested.memory),
            mib(allocatable.memory),
            mib(wanted.memory)
        ));
    }
    if let (Some(most), count) = *pods
        && count >= most
    {
        found.push(format!("{count} pods of {most} run, and a second kube-apiserver is one more"));
    }
    let finding = |cause| {
        REQUESTS.at(
            format!("node {node}"),
            format!("{cause}: the kubelet ends pods of lower priority to make room for it"),
            "move pods away (kubectl cordon, then delete some of them), or request less; --ignore-errors requests, if that is all right",
        )
    };
    found.into_iter().map(finding).collect()
}

/// What the pod of a manifest requests.
fn of_manifest(manifest: &Manifest) -> Resources {
    requests(&YamlNode::value(manifest.pod()))
}

/// Name of the node whose kube-apiserver has one of these addresses.
fn node_of(pods: &Value, own: &[IpAddr]) -> Option<String> {
    let here = |pod: &&Value| {
        pod["status"]["hostIP"].as_str().and_then(|ip| ip.parse().ok()).is_some_and(|ip| own.contains(&ip))
    };
    let name = array(&pods["items"]).iter().find(here)?["spec"]["nodeName"].as_str()?;
    // It becomes a part of a URL.
    let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'));
    plain.then(|| name.to_owned())
}

/// What a pod requests, as the scheduler and the kubelet sum it up: all its containers and those init containers that run on
/// beside them, or what one init container needs before, if that is more.
fn requests(spec: &Value) -> Resources {
    let (mut beside, mut before) = (Resources::default(), Resources::default());
    for container in array(&spec["initContainers"]) {
        let own = of_container(container);
        if container["restartPolicy"] == "Always" {
            beside = sum(beside, own);
            before = larger(before, beside);
        } else {
            before = larger(before, sum(beside, own));
        }
    }
    let all = array(&spec["containers"]).iter().map(of_container).fold(beside, sum);
    sum(larger(all, before), resources(&spec["overhead"]))
}

/// Without a request, the limit is one.
fn of_container(container: &Value) -> Resources {
    let of = |resource: &str| {
        let all = &container["resources"];
        amount(&all["requests"][resource]).or_else(|| amount(&all["limits"][resource])).unwrap_or(0.0)
    };
    Resources { cpu: of("cpu"), memory: of("memory") }
}

fn resources(value: &Value) -> Resources {
    Resources { cpu: amount(&value["cpu"]).unwrap_or(0.0), memory: amount(&value["memory"]).unwrap_or(0.0) }
}

fn sum(a: Resources, b: Resources) -> Resources {
    Resources { cpu: a.cpu + b.cpu, memory: a.memory + b.memory }
}

fn larger(a: Resources, b: Resources) -> Resources {
    Resources { cpu: a.cpu.max(b.cpu), memory: a.memory.max(b.memory) }
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// An amount, which in YAML may be a number too.
fn amount(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| quantity(value.as_str()?))
}

/// A quantity as Kubernetes writes it: `250m`, `512Mi`, `1G`, `1.5Gi`, `1000`.
pub(super) fn quantity(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 14] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("", 1.0),
    ];
    let (number, unit) = UNITS.into_iter().find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, unit)))?;
    let number: f64 = number.parse().ok()?;
    Some(number * unit).filter(|amount| amount.is_finite() && *amount >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn container(cpu: &str, memory: &str) -> Value {
        json!({"resources": {"requests": {"cpu": cpu, "memory": memory}}})
    }

    fn close(a: Resources, cpu: f64, memory: f64) -> bool {
        (a.cpu - cpu).abs() < 1e-6 && (a.memory - memory).abs() < 1.0
    }

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, amount) in [("250m", 0.25), ("2", 2.0), ("1.5Gi", 1_610_612_736.0), ("1G", 1e9), ("1e3", 1e3)] {
            assert!((quantity(text).unwrap() - amount).abs() < 1e-6, "{text}");
        }
        assert_eq!(["", "x", "-1", "inf", "1 Mi"].map(quantity), [None; 5]);
    }

    #[test]
    fn a_pod_requests_what_runs_at_once() {
        let mut sidecar = container("100m", "32Mi");
        sidecar["restartPolicy"] = "Always".into();
        let limited = json!({"resources": {"limits": {"cpu": 1}}});
        let spec = json!({
            "initContainers": [sidecar, container("100m", "64Mi")],
            "containers": [container("250m", "32Mi"), limited],
            "overhead": {"cpu": "50m"},
        });
        // Memory is most while the init container runs beside the sidecar.
        assert!(close(requests(&spec), 1.4, 96.0 * 1_048_576.0), "{:?}", requests(&spec));
        assert!(close(requests(&json!({})), 0.0, 0.0));
    }

    #[test]
    fn the_node_is_that_of_the_kube_apiserver_with_its_address() {
        let pod = |ip: &str, node: &str| json!({"spec": {"nodeName": node}, "status": {"hostIP": ip}});
        let pods = json!({"items": [pod("10.0.0.6", "b"), pod("10.0.0.5", "a.example"), pod("10.0.0.7", "../x")]});
        let of = |ip: &str| node_of(&pods, &[ip.parse().unwrap()]);
        assert_eq!(of("10.0.0.5").as_deref(), Some("a.example"));
        assert_eq!((of("10.0.0.7"), of("10.0.0.8"), node_of(&json!({}), &[])), (None, None, None));
    }

    #[test]
    fn pods_that_have_ended_need_no_room() {
        let pod = |phase: &str| json!({"spec": {"containers": [container("1", "1Gi")]}, "status": {"phase": phase}});
        let pods = json!({"items": [pod("Running"), pod("Succeeded"), pod("Failed"), pod("Pending")]});
        let node = json!({"status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"}}});
        let room = Room::of("a".into(), &node, &pods);
        assert!(close(room.requested, 2.0, 2.0 * 1_073_741_824.0));
        assert!(close(room.allocatable, 4.0, 8.0 * 1_073_741_824.0));
        assert_eq!(room.pods, (Some(110), 2));
    }
}
