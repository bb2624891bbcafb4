//! What stands between a cluster and a release of Kubernetes (`berth doctor --to`, and before `berth upgrade` and `berth bridge`): clients,
//! objects, nodes and flags that the release does not take any more.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `apis` | requests for APIs that are removed, from metrics and the audit log |
//! | `objects` | CRDs, and Services that kube-apiserver calls |
//! | `skew` | versions of components, of container runtimes and of etcd. Pure |
//! | `flags` | flags and feature gates that the new kube-apiserver does not know: asked of itself |

mod apis;
mod flags;
mod objects;
mod skew;

use super::checks::*;
use super::cluster::endpoints;
use super::layout::Layout;
use super::manifest::peer_proxy;
use super::{Finding, Severity};
use crate::manifest::{Manifest, basename};
use apis::Uses;
use berth_cluster::service::OF_SERVICE;
use berth_cluster::yaml::YamlNode;
use berth_cluster::{Client, Error};
use berth_judge::metrics::samples;
use serde_json::Value;
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;
use tokio::task::JoinSet;

/// A name that the certificate of each kube-apiserver has; clients in pods rely on those of the Service, too.
const NAME: &str = "kubernetes";

/// Longest time that one instance or one kubelet may take to answer: the others are asked meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many kubelets are asked at once.
const AT_ONCE: usize = 16;

/// Names that are shown of many.
const SHOWN: usize = 3;

/// The metric of a kubelet.
const CGROUP_VERSION: &str = "kubelet_cgroup_version";

const NODES: &str = "/api/v1/nodes";
const PODS: &str = "/api/v1/namespaces/kube-system/pods?labelSelector=tier%3Dcontrol-plane";

/// A minor release of Kubernetes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    pub major: u64,
    pub minor: u64,
}

impl Release {
    const fn v1(minor: u64) -> Self {
        Self { major: 1, minor }
    }

    /// The release of a manifest's kube-apiserver.
    pub fn of(manifest: &Manifest) -> Option<Self> {
        manifest.version().map(|(major, minor)| Self { major, minor })
    }

    /// The release that a command names, such as `kubeadm upgrade apply v1.36.3`.
    pub fn named(words: &[OsString]) -> Option<Self> {
        let words = words.iter().filter_map(|word| word.to_str());
        words.filter(|word| word.starts_with('v')).find_map(|word| word.parse().ok())
    }
}

impl Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}.{}", self.major, self.minor)
    }
}

/// `v1.36`, also with a patch, and without the `v`.
impl FromStr for Release {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match numbers(text).as_deref() {
            Some([major, minor] | [major, minor, _]) => Ok(Self { major: *major, minor: *minor }),
            _ => Err("it is no release of Kubernetes: give one such as v1.36"),
        }
    }
}

/// The numbers of a version, without what is behind `-` or `+`.
fn numbers(version: &str) -> Option<Vec<u64>> {
    let version = version.strip_prefix('v').unwrap_or(version);
    version.split(['-', '+']).next()?.split('.').map(|number| number.parse().ok()).collect()
}

/// What is asked about a release.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    pub to: Release,
    /// As an admin; none: the cluster is not asked.
    pub client: Option<&'a Client>,
    /// The manifest and its name in findings.
    pub name: &'a str,
    pub manifest: &'a Manifest,
    /// Below which the files are of its node; none: it is another's.
    pub root: Option<&'a Path>,
    /// The kube-apiserver of the release; none: the one on the PATH of its node.
    pub binary: Option<&'a Path>,
}

/// All findings.
pub async fn survey(question: Question<'_>) -> Vec<Finding> {
    let mut survey = Survey { question, findings: Vec::new() };
    let mut uses = Uses::default();
    match question.client {
        Some(client) => survey.cluster(client, &mut uses).await,
        None => survey.unseen(
            "what clients, objects and nodes of the cluster need",
            "give --kubeconfig (/etc/kubernetes/admin.conf)",
        ),
    }
    survey.audit_log(&mut uses);
    survey.findings.extend(uses.examine(question.to));
    match flags::unknown(&question).await {
        Ok(found) => survey.findings.extend(found),
        Err(why) => survey.unseen(
            &format!("flags and feature gates ({why})"),
            "give the new kube-apiserver with --apiserver (of an image that was pulled: `ctr -n k8s.io images mount IMAGE /mnt`)",
        ),
    }
    if Layout::of(question.manifest).is_none() {
        survey.findings.extend(peer_proxy(question.name, question.manifest));
    }
    survey.findings
}

/// What another command, which goes on, reports of it: warnings.
pub async fn warnings(question: Question<'_>) -> impl Iterator<Item = Finding> {
    let seen = survey(question).await.into_iter().filter(|finding| finding.severity != Severity::Info);
    seen.map(warning)
}

struct Survey<'a> {
    question: Question<'a>,
    findings: Vec<Finding>,
}

impl Survey<'_> {
    fn unseen(&mut self, what: &str, fix: &str) {
        let (place, cause) = (format!("release {}", self.question.to), format!("not looked at: {what}"));
        self.findings.push(NOT_CHECKED.at(place, cause, fix));
    }

    /// What was asked for, or a finding that it was not seen.
    fn seen<T>(&mut self, what: &str, answer: Result<T, impl Display>) -> Option<T> {
        let fix = "see that it answers, and that the kubeconfig's user may ask for it";
        answer.map_err(|error| self.unseen(&format!("{what} ({error})"), fix)).ok()
    }

    async fn cluster(&mut self, client: &Client, uses: &mut Uses) {
        // One that does not answer would not answer the rest, either, and each takes its time.
        if let Some(error) = client.get("/version").await.err().filter(|error| error.status().is_none()) {
            let fix = "see that it answers: kubectl get --raw /version";
            return self.unseen(&format!("the cluster ({error})"), fix);
        }
        let to = self.question.to;
        let mut running = Vec::new();
        let mut metrics = Vec::new();
        for (place, answer) in instances(client).await {
            let Some((version, text)) = self.seen(&format!("the kube-apiserver at {place}"), answer) else { continue };
            running.extend(version.parse().ok().map(|release: Release| (release, place)));
            metrics.push(text);
        }
        uses.count(&metrics);
        self.findings.extend(skew::apiservers(to, &running));
        self.objects(client).await;
        let oldest = running.iter().map(|(release, _)| *release).fold(to, Ord::min);
        if let Some(nodes) = self.seen("nodes", client.list(NODES).await) {
            self.findings.extend(skew::kubelets(to, oldest, &nodes));
            self.findings.extend(skew::runtimes(to, &nodes));
            self.cgroups(client, &nodes).await;
        }
        let pods = self.seen("pods of the control plane", client.list(PODS).await).unwrap_or_default();
        self.findings.extend(skew::managers(to, &pods));
        let etcds: Vec<_> = pods.iter().filter(|pod| skew::component(pod) == "etcd").collect();
        if etcds.is_empty() {
            self.unseen("the version of etcd, of which there is no pod", "etcdctl endpoint status --cluster");
        }
        self.findings.extend(skew::learners(to, &etcds));
    }

    async fn objects(&mut self, client: &Client) {
        let crds = self.seen("CRDs", client.list(objects::CRDS).await).unwrap_or_default();
        let mut called: Vec<_> = objects::conversions(&crds).collect();
        self.findings.extend(objects::stored(&crds));
        for (kind, path) in objects::WEBHOOKS {
            let found = self.seen(kind, client.list(path).await).unwrap_or_default();
            called.extend(objects::admissions(kind, &found));
        }
        let found = self.seen("APIServices", client.list(objects::API_SERVICES).await).unwrap_or_default();
        called.extend(objects::aggregated(&found));
        let unready = objects::unready(client, called).await;
        let unready = self.seen("Services of webhooks and APIs", unready).unwrap_or_default();
        self.findings.extend(unready);
    }

    /// Asks each kubelet, through kube-apiserver, on which cgroup version it runs, if that counts.
    async fn cgroups(&mut self, client: &Client, nodes: &[Value]) {
        if self.question.to < skew::NO_CGROUP_V1 {
            return;
        }
        let (mut first, mut silent) = (Vec::new(), Vec::new());
        for some in nodes.chunks(AT_ONCE) {
            let mut asking = JoinSet::new();
            for (at, node) in some.iter().enumerate() {
                let client = client.clone().with_patience(PATIENCE);
                let path = format!("{NODES}/{}/proxy/metrics", objects::name(node));
                asking.spawn(async move { (at, client.text(&path).await.unwrap_or_default()) });
            }
            let mut pages = asking.join_all().await;
            pages.sort_by_key(|(at, _)| *at);
            for (at, page) in pages {
                match samples(&page, |name| name == CGROUP_VERSION).next() {
                    Some(version) if version.value >= 2.0 => {}
                    Some(_) => first.push(&some[at]),
                    None => silent.push(objects::name(&some[at]).to_owned()),
                }
            }
        }
        self.findings.extend(skew::cgroups(&first));
        if !silent.is_empty() {
            let what = format!("the cgroup version of {}, whose kubelet does not answer it", few(&silent));
            self.unseen(&what, "stat -fc %T /sys/fs/cgroup there: cgroup2fs is version 2");
        }
    }

    /// Who asks for what is removed: from the audit log of this node, if it has one.
    fn audit_log(&mut self, uses: &mut Uses) {
        let Question { root, manifest, .. } = self.question;
        let flag = manifest.flag("audit-log-path").filter(|flag| !matches!(flag.value, "" | "-"));
        let (Some(root), Some(flag)) = (root, flag) else { return };
        let Some(path) = manifest.container().on_node(flag.value) else { return };
        let read = uses.read(&root.join(path.trim_start_matches('/')));
        self.seen(&format!("the audit log {path}"), read);
    }
}

/// The command line of a manifest's kube-apiserver, without berth's own.
fn arguments(manifest: &Manifest) -> Vec<&YamlNode> {
    let mut words = manifest.arguments();
    let begin = words.iter().position(|word| word.text().is_some_and(|word| basename(word) == "kube-apiserver"));
    words.split_off(begin.unwrap_or_default())
}

/// The version and the metrics of each instance that the Service names, by its address; of the kubeconfig's server if there is none.
async fn instances(client: &Client) -> Vec<(String, Result<(String, String), Error>)> {
    let addresses = client.get(OF_SERVICE).await.map(|slices| endpoints(&slices)).unwrap_or_default();
    if addresses.is_empty() {
        return vec![(client.server().to_owned(), instance(client).await)];
    }
    let mut asking = JoinSet::new();
    for address in addresses {
        let client = client.clone().with_patience(PATIENCE).at([address]);
        asking.spawn(async move { (address, reached(&client).await) });
    }
    let mut answers: Vec<(SocketAddr, _)> = asking.join_all().await;
    answers.sort_by_key(|(address, _)| *address);
    answers.into_iter().map(|(address, answer)| (address.to_string(), answer)).collect()
}

/// The kubeconfig's name may be in this node's certificate alone, or the only one.
async fn reached(client: &Client) -> Result<(String, String), Error> {
    let named = client.clone().named(NAME).unwrap_or_else(|_| client.clone());
    match instance(&named).await {
        Err(Error::Unreachable { .. }) => instance(client).await,
        answer => answer,
    }
}

async fn instance(client: &Client) -> Result<(String, String), Error> {
    let version = client.get("/version").await?["gitVersion"].as_str().unwrap_or_default().to_owned();
    Ok((version, client.text("/metrics").await?))
}

/// The first names of many.
fn few(names: &[String]) -> String {
    let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn warning(finding: Finding) -> Finding {
    Finding { severity: Severity::Warning, ..finding }
}

#[cfg(test)]
mod tests;
