//! Versions of what serves and of what runs on nodes, by Kubernetes' version skew policy
//! (<https://kubernetes.io/releases/version-skew-policy/>); and what is known of container runtimes and of etcd. Pure.

use super::super::checks::{CGROUP_V1, COMPONENT_SKEW, CONTAINERD_1, ETCD_LEARNER};
use super::objects::{items, name};
use super::{Finding, Release, few, numbers, warning};
use crate::manifest::tag;
use serde_json::Value;
use std::collections::BTreeMap;

/// How many minor versions a kubelet may be older than kube-apiserver.
const KUBELET: u64 = 3;

/// From here on a kubelet does not start on cgroup v1, unless its configuration says `failCgroupV1: false`.
pub(super) const NO_CGROUP_V1: Release = Release::v1(35);

/// The last release that Kubernetes supports with containerd 1.x, and the one from which on its kubelet needs what containerd has
/// from 2.0 on (RuntimeConfig); that was announced for 1.36 and 1.37 before: kubernetes#139121.
const LAST_WITH_CONTAINERD_1: Release = Release::v1(35);
const NO_CONTAINERD_1: Release = Release::v1(38);

/// From here on kubeadm brings etcd 3.6, which reads its members from where 3.5.1 to 3.5.19 did not write all.
const ETCD_3_6: Release = Release::v1(34);

/// Defects of etcd: etcd#19557, etcd#20793 and etcd#20340.
const PROMOTION_LOST: &str = "in etcd 3.6, members that were promoted from learners may be learners again, and it ends (too many learner members)";
const SNAPSHOT: &str =
    "a snapshot of a member before 3.5.20 may have brought members that are learners again in etcd 3.6";
const REPLACED: &str = "after members were promoted and replaced, it may end when it starts (too many learner members)";

/// kube-apiservers by where they are: the newest and the oldest may be one minor version apart.
pub(super) fn apiservers(to: Release, running: &[(Release, String)]) -> impl Iterator<Item = Finding> {
    let far =
        running.iter().filter(move |(release, _)| release.major != to.major || release.minor.abs_diff(to.minor) > 1);
    far.map(move |(release, place)| {
        COMPONENT_SKEW.at(
            format!("kube-apiserver at {place}"),
            format!("this kube-apiserver is {release}: kube-apiservers of a cluster may be one minor version apart, and one of {to} is to be beside it"),
            "go by way of each minor version between them, on all control-plane nodes",
        )
    })
}

/// Kubelets may be older by three minor versions, and not newer than any kube-apiserver.
pub(super) fn kubelets(to: Release, oldest: Release, nodes: &[Value]) -> Vec<Finding> {
    let mut by_release: BTreeMap<Release, Vec<String>> = BTreeMap::new();
    for node in nodes {
        if let Ok(release) = info(node, "kubeletVersion").parse() {
            by_release.entry(release).or_default().push(name(node).to_owned());
        }
    }
    let finding = |(release, nodes): (Release, Vec<String>)| {
        let place = format!("nodes {}", few(&nodes));
        if release > oldest {
            let cause = format!(
                "kubelets are {release}: a kubelet must not be newer than a kube-apiserver, and one is {oldest}"
            );
            return Some(COMPONENT_SKEW.at(place, cause, "upgrade kube-apiservers first, and kubelets last"));
        }
        let old = release.major != to.major || release.minor.saturating_add(KUBELET) < to.minor;
        old.then(|| {
            let cause = format!(
                "kubelets are {release}: with kube-apiserver {to}, a kubelet may be three minor versions older"
            );
            COMPONENT_SKEW.at(
                place,
                cause,
                format!("upgrade these kubelets first, to v{}.{} or newer", to.major, to.minor.saturating_sub(KUBELET)),
            )
        })
    };
    by_release.into_iter().filter_map(finding).collect()
}

/// kube-controller-manager and kube-scheduler may be older by one, and not newer.
pub(super) fn managers(to: Release, pods: &[Value]) -> Vec<Finding> {
    let judge = |pod: &Value| {
        let component = component(pod);
        let release: Release = version(pod).parse().ok()?;
        let fits = release <= to && release.major == to.major && release.minor.saturating_add(1) >= to.minor;
        (matches!(component, "kube-controller-manager" | "kube-scheduler") && !fits).then(|| {
            COMPONENT_SKEW.at(
                format!("Pod kube-system/{}", name(pod)),
                format!("{component} is {release}: with kube-apiserver {to}, it may be one minor version older, and not newer"),
                "bring it to the version of the kube-apiservers that run, then upgrade by one minor version",
            )
        })
    };
    pods.iter().filter_map(judge).collect()
}

/// Nodes with containerd 1.x.
pub(super) fn runtimes(to: Release, nodes: &[Value]) -> Option<Finding> {
    let old = nodes.iter().filter(|node| info(node, "containerRuntimeVersion").starts_with("containerd://1."));
    let old: Vec<_> = old.map(|node| name(node).to_owned()).collect();
    if old.is_empty() || to <= LAST_WITH_CONTAINERD_1 {
        return None;
    }
    let finding = |cause: String| {
        CONTAINERD_1.at(format!("nodes {}", few(&old)), cause, "upgrade containerd to 2.x on these nodes first")
    };
    let known =
        format!("containerd is 1.x, and {LAST_WITH_CONTAINERD_1} is the last release that Kubernetes supports with it");
    Some(match to < NO_CONTAINERD_1 {
        true => warning(finding(format!("{known}; kubelets before {NO_CONTAINERD_1} start with it still"))),
        false => finding(format!(
            "{known}; from {NO_CONTAINERD_1} on, by what is announced, a kubelet does not start with it"
        )),
    })
}

/// Nodes on cgroup v1. Kubelets that are new enough start there already: their configuration allows it.
pub(super) fn cgroups(nodes: &[&Value]) -> Option<Finding> {
    let names: Vec<_> = nodes.iter().map(|node| name(node).to_owned()).collect();
    let finding = CGROUP_V1.at(
        format!("nodes {}", few(&names)),
        format!(
            "kubelets are on cgroup v1, where one from {NO_CGROUP_V1} on does not start without failCgroupV1: false"
        ),
        "boot these nodes with cgroup v2 (systemd.unified_cgroup_hierarchy=1)",
    );
    let mut releases = nodes.iter().filter_map(|node| info(node, "kubeletVersion").parse::<Release>().ok());
    let fails = releases.any(|release| release < NO_CGROUP_V1);
    (!nodes.is_empty()).then(|| if fails { finding } else { warning(finding) })
}

/// Defects of etcd that keep members from starting where there are several, by the images of their pods.
pub(super) fn learners(to: Release, etcds: &[&Value]) -> Vec<Finding> {
    let judge = |pod: &&Value| {
        let finding = |why: &str, fix: &str| {
            let cause = format!("this member of etcd is {}: {why}", version(pod));
            ETCD_LEARNER.at(format!("Pod kube-system/{}", name(pod)), cause, fix)
        };
        let before = "upgrade all members to 3.5.24 or newer before one gets 3.6";
        Some(match numbers(version(pod))?[..] {
            [3, 5, 1..20] if to >= ETCD_3_6 => finding(PROMOTION_LOST, before),
            [3, 5, 20..24] if to >= ETCD_3_6 => warning(finding(SNAPSHOT, before)),
            [3, 6, 0..4] => warning(finding(REPLACED, "upgrade all members to 3.6.4 or newer")),
            _ => return None,
        })
    };
    if etcds.len() < 2 { Vec::new() } else { etcds.iter().filter_map(judge).collect() }
}

fn info<'a>(node: &'a Value, field: &str) -> &'a str {
    node["status"]["nodeInfo"][field].as_str().unwrap_or_default()
}

pub(super) fn component(pod: &Value) -> &str {
    pod["metadata"]["labels"]["component"].as_str().unwrap_or_default()
}

/// By the tag of its image.
fn version(pod: &Value) -> &str {
    let image = items(&pod["spec"]["containers"]).find_map(|container| container["image"].as_str());
    image.and_then(tag).unwrap_or_default()
}
