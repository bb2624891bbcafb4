//! etcd under a bridge: COMMAND may restart this node's member, too.
//!
//! A stopping member accepts requests for 7 s more and answers none. If the other members are a
//! majority, the temporary kube-apiserver uses only those. If this node has the only member, a
//! temporary etcd serves its data. An etcd without a member on this node needs nothing.
//!
//! | module | contents |
//! | --- | --- |
//! | [`servers`] | the etcds that a kube-apiserver's arguments name. Pure |
//! | [`members`] | the members that are usable while this node's member is away. Pure |
//! | [`dials`] | connects the node's kube-apiserver to another member meanwhile |
//! | [`own`] | probes of this node's member |
//! | [`temporary`] | the temporary etcd, for an etcd with a single member |
//! | [`mod@gateway`] | calls of etcd's JSON gateway |
//! | [`types`] | answers of etcd's JSON gateway. Pure |
//! | [`keeping`] | the cluster's lock and the leadership, while the bridge is on |

pub mod dials;
pub mod gateway;
pub mod keeping;
pub mod members;
pub mod own;
pub mod servers;
pub mod temporary;
pub mod types;

use crate::report::Report;
use berth_cluster::Client;
use berth_cluster::kubeconfig::Place;
use berth_exec::args;
use berth_node::ipc::bridge::{BridgeOutcome, EtcdStatus, EtcdStep};
use berth_node::terms::Speedup;
use berth_os::explained;
use dials::Dials;
use gateway::Gateway;
use keeping::{EtcdState, Keeping};
use members::{Choice, Others};
use servers::Urls;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use temporary::EtcdDaemon;
use temporary::revisions::Compared;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The etcd that the temporary kube-apiserver uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum EtcdMode {
    /// Of several members the others, which must be a majority; of a single member, a temporary
    /// etcd on the same data
    #[default]
    Auto,
    /// The node's member, as the running kube-apiserver does: requests that need etcd time out
    /// while COMMAND restarts it
    Own,
}

/// An etcd with a member on this node, and other members that serve while the bridge is on.
#[derive(Debug, Clone)]
pub struct Cluster {
    gateway: Gateway,
    /// URLs as in the arguments, and the URL of this node's member.
    urls: Urls,
    own: String,
    others: Others,
    /// Relay for the node's kube-apiserver.
    pub dials: Option<Dials>,
}

impl Cluster {
    /// Probes this node's member continuously, and connects the node's kube-apiserver to another
    /// member while this node's is silent.
    pub fn follow(&self, tasks: &mut JoinSet<()>) -> watch::Receiver<bool> {
        let (to, answers) = watch::channel(true);
        let cluster = self.clone();
        tasks.spawn(async move {
            if let Err(why) = own::probe_own(&cluster, to).await {
                tracing::warn!(
                    code = %explained::MEMBER_UNKNOWN,
                    "cannot see whether this node's member of etcd serves: {why}"
                );
            }
        });
        if let Some(dials) = self.dials.clone() {
            let answers = answers.clone();
            tasks.spawn(async {
                let kept = dials.keep(answers).await;
                let why = kept.err().unwrap_or_default();
                tracing::warn!(
                    code = %explained::NO_OTHER_MEMBER,
                    "the node's own kube-apiserver has no other member of etcd: {why}"
                );
            });
        }
        answers
    }
}

/// Plan for the etcds of a bridge.
#[derive(Debug, Default)]
pub struct EtcdPlan {
    pub clusters: Vec<Cluster>,
    /// Plan for a temporary etcd, if the node has the only member.
    pub temporary: Option<temporary::Plan>,
    /// Client for the cluster's lock. `needs_lock` is true if a kubeconfig was given: without the
    /// lock there is no bridge.
    pub lock: Option<Client>,
    pub needs_lock: bool,
}

impl EtcdPlan {
    /// Makes a kube-apiserver use the other members.
    pub fn rewrite(&self, argv: &mut Vec<OsString>) {
        let others = |cluster: &Cluster| {
            cluster
                .others
                .members
                .iter()
                .map(|(_, url)| url.clone())
                .collect()
        };
        let instead: BTreeMap<_, _> = self
            .clusters
            .iter()
            .map(|cluster| (cluster.urls.clone(), others(cluster)))
            .collect();
        servers::replace_urls(argv, &instead);
        if let Some(temporary) = &self.temporary {
            args::set_flag(argv, servers::SERVERS, &temporary.server);
        }
    }
}

/// The etcd tasks of a running bridge.
#[derive(Debug)]
pub struct EtcdHandle {
    members: Option<Keeping>,
    /// True if this node's member answers, for each etcd with other members.
    answers: Vec<watch::Receiver<bool>>,
    pub(super) temporary: Option<watch::Receiver<EtcdStatus>>,
    /// Comparison of revisions, which tells if writes are missing.
    revisions: watch::Receiver<Compared>,
    /// True while COMMAND runs or may run.
    commanding: watch::Sender<bool>,
}

impl EtcdPlan {
    /// Starts the work in `tasks`. The cluster's lock is requested at `instances`.
    ///
    /// # Errors
    /// The temporary etcd cannot be prepared.
    pub fn begin(
        mut self,
        instances: [SocketAddr; 2],
        directory: &Path,
        speedup: Speedup,
        tasks: &mut JoinSet<()>,
    ) -> Result<EtcdHandle, String> {
        let (commanding, commands) = watch::channel(false);
        let (compared, revisions) = watch::channel(Compared::default());
        let mut temporary = None;
        if let Some(plan) = self.temporary.take() {
            let (to, status) = watch::channel(EtcdStatus::default());
            tasks.spawn(plan.revisions.clone().compare(status.clone(), compared));
            tasks.spawn(EtcdDaemon::new(plan, directory, speedup, to)?.run(commands));
            temporary = Some(status);
        }
        let answers = self
            .clusters
            .iter()
            .map(|cluster| cluster.follow(tasks))
            .collect();
        Ok(EtcdHandle {
            members: self.start(instances),
            answers,
            temporary,
            revisions,
            commanding,
        })
    }
}

impl EtcdHandle {
    /// Prepares etcd for COMMAND, which is about to begin.
    pub fn prepare(&self) {
        self.members.iter().for_each(Keeping::prepare);
    }

    pub fn state(&self) -> EtcdState {
        let nothing = EtcdState {
            prepared: true,
            ..EtcdState::default()
        };
        self.members.as_ref().map_or(nothing, Keeping::state)
    }

    pub fn command_may_run(&self, may_run: bool) {
        self.commanding.send_replace(may_run);
    }

    /// Releases the cluster's lock.
    pub fn release(&mut self) {
        self.members = None;
    }

    /// True if the temporary etcd does not serve.
    pub fn has_own(&self) -> bool {
        self.temporary
            .as_ref()
            .is_none_or(|etcd| etcd.borrow().step == EtcdStep::Own)
    }

    /// True if the node's etcd serves: the only member, or the node's member of each etcd.
    pub fn serves(&self) -> bool {
        self.has_own() && self.answers.iter().all(|answers| *answers.borrow())
    }

    /// Status of the temporary etcd, if any.
    pub fn status(&self) -> Option<EtcdStatus> {
        let status = self.temporary.as_ref()?.borrow().clone();
        let missing = self.revisions.borrow().missing.clone();
        Some(EtcdStatus {
            trouble: missing.or(status.trouble),
            ..status
        })
    }

    /// The bridge's outcome. `Done` becomes `Abandoned` if writes were lost, because a bridge that
    /// lost writes has not ended well.
    pub fn judge_outcome(&self, outcome: BridgeOutcome) -> BridgeOutcome {
        let Compared { missing, is_open } = self.revisions.borrow().clone();
        match (outcome, missing) {
            (BridgeOutcome::Done, Some(why)) => BridgeOutcome::Abandoned(why),
            (outcome, _) => {
                if is_open {
                    tracing::warn!(
                        code = %explained::REVISION_UNKNOWN,
                        "the node's etcd may lack writes of the time while it was away: the revision of this etcd is not known"
                    );
                }
                outcome
            }
        }
    }
}

/// An etcd with a single member, on this node.
#[derive(Debug, Clone)]
pub struct Alone {
    gateway: Gateway,
    urls: Urls,
    version: String,
}

/// Finds the etcds of a running kube-apiserver that have a member here: etcds with more members,
/// and etcds with a single member. `on_node` returns the node's path of a file that an argument
/// names.
pub async fn examine_etcds(
    command: &[OsString],
    node: &[IpAddr],
    on_node: impl Fn(&Path) -> PathBuf,
    report: &mut Report,
) -> (Vec<Cluster>, Vec<Alone>) {
    let (mut clusters, mut alone) = (Vec::new(), Vec::new());
    for urls in servers::find_etcds(command) {
        let Some(own) = find_own_url(&urls, node).await else {
            continue;
        };
        let asked = match build_gateway(command, &on_node) {
            Ok(gateway) => gateway.sample(&own).await.map(|sample| (gateway, sample)),
            Err(why) => Err(why),
        };
        let (gateway, sample) = match asked {
            Ok(asked) => asked,
            Err(why) => {
                report.note(format!(
                    "the etcd on this node was not asked for its members: {why}; requests that need it time out while COMMAND restarts it"
                ));
                continue;
            }
        };
        match sample.choose() {
            Ok(Choice::Alone) => alone.push(Alone {
                gateway,
                urls,
                version: sample.version,
            }),
            Ok(Choice::Others(others)) => {
                let used: Vec<_> = others
                    .members
                    .iter()
                    .map(|(member, url)| format!("{} at {url}", member.describe()))
                    .collect();
                let left_out = others
                    .left_out
                    .iter()
                    .map(|why| format!("; {why}"))
                    .collect::<String>();
                report.note(format!(
                    "etcd: the temporary kube-apiserver uses {}, not this node's member{left_out}",
                    used.join(" and ")
                ));
                let mut cluster = Cluster {
                    gateway,
                    urls,
                    own,
                    others,
                    dials: None,
                };
                match Dials::find(&cluster).await {
                    Ok(dials) => cluster.dials = Some(dials),
                    Err(why) => report.note(format!(
                        "etcd: what clients have sent to the running kube-apiserver waits while its member is away, and a node whose \
                         kubelet has a connection to it may be reported as not ready: {why}"
                    )),
                }
                clusters.push(cluster);
            }
            Err(all) => all
                .into_iter()
                .for_each(|why| report.error(format!("etcd: {why}"))),
        }
    }
    (clusters, alone)
}

/// The URL of this node's member, if any.
async fn find_own_url(urls: &Urls, node: &[IpAddr]) -> Option<String> {
    for url in urls {
        let Some((host, port)) = split_url(url) else {
            continue;
        };
        let is_here = |ip: IpAddr| ip.is_loopback() || node.contains(&ip);
        let found = tokio::net::lookup_host((host.as_str(), port)).await;
        if found.is_ok_and(|mut found| found.any(|address| is_here(address.ip()))) {
            return Some(url.clone());
        }
    }
    None
}

/// Host and port of a URL. A URL without TLS is treated like one with TLS.
fn split_url(url: &str) -> Option<(String, u16)> {
    let secure = url.replacen("http://", "https://", 1);
    Place::parse(&secure)
        .ok()
        .map(|place| (place.host, place.port))
}

/// A client for etcd, with the certificates of kube-apiserver.
fn build_gateway(
    command: &[OsString],
    on_node: impl Fn(&Path) -> PathBuf,
) -> Result<Gateway, String> {
    let path = |flag| args::flag_value(command, flag).map(|path| on_node(Path::new(path)));
    let read =
        |path: &PathBuf| fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
    let ca = path("--etcd-cafile").ok_or("kube-apiserver has no --etcd-cafile")?;
    let client = match (path("--etcd-certfile"), path("--etcd-keyfile")) {
        (Some(certificate), Some(key)) => Some((read(&certificate)?, read(&key)?)),
        _ => None,
    };
    Ok(Gateway::new(read(&ca)?, client))
}

#[cfg(test)]
mod tests;
