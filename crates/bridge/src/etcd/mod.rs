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
use berth_cluster::kubeconfig::ServerUrl;
use berth_exec::args;
use berth_node::ipc::bridge::{BridgeOutcome, EtcdStatus, EtcdStep};
use berth_node::terms::Speedup;
use berth_os::explained;
use dials::MemberRelay;
use gateway::Gateway;
use keeping::{EtcdState, Keeping};
use members::{MemberChoice, OtherMembers};
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
    /// All URLs of this etcd in kube-apiserver's arguments, and the URL of this node's member.
    urls: Urls,
    own: String,
    others: OtherMembers,
    /// Relay that connects the node's kube-apiserver to another member. `None` if that is not
    /// possible, for example because no other member's certificate is valid for the dialled
    /// address.
    pub dials: Option<MemberRelay>,
}

impl Cluster {
    /// Probes this node's member continuously, and connects the node's kube-apiserver to another
    /// member while this node's is silent.
    pub fn follow_own_member(&self, tasks: &mut JoinSet<()>) -> watch::Receiver<bool> {
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
                let kept = dials.relay_steered_clients(answers).await;
                let why = kept.err().unwrap_or_default();
                tracing::warn!(
                    code = %explained::NO_OTHER_MEMBER,
                    "the node's kube-apiserver has no other member of etcd: {why}"
                );
            });
        }
        answers
    }
}

/// A bridge's plan for each etcd that the running kube-apiserver uses.
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
    /// Replaces the etcd URLs in a kube-apiserver's arguments: with the URLs of the other members,
    /// or with the address of the relay to the temporary etcd.
    pub fn replace_etcd_urls(&self, argv: &mut Vec<OsString>) {
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
            args::set_flag(argv, servers::SERVERS_FLAG, &temporary.server);
        }
    }
}

/// The tasks that keep etcd available while a bridge is on.
#[derive(Debug)]
pub struct EtcdHandle {
    members: Option<Keeping>,
    /// For each etcd with members on other nodes: true while this node's member answers.
    answers: Vec<watch::Receiver<bool>>,
    pub(super) temporary: Option<watch::Receiver<EtcdStatus>>,
    /// Result of comparing the revisions of the node's etcd and of the temporary etcd. A lower
    /// revision after a change from one to the other shows that writes are missing.
    revisions: watch::Receiver<Compared>,
    /// True while COMMAND runs or may run.
    commanding: watch::Sender<bool>,
}

impl EtcdPlan {
    /// Starts the work in `tasks`. The cluster's lock is requested at `instances`.
    ///
    /// # Errors
    /// The temporary etcd cannot be prepared.
    pub fn start_keeping_etcd(
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
            tasks.spawn(
                plan.revisions
                    .clone()
                    .compare_revisions(status.clone(), compared),
            );
            tasks.spawn(EtcdDaemon::new(plan, directory, speedup, to)?.run(commands));
            temporary = Some(status);
        }
        let answers = self
            .clusters
            .iter()
            .map(|cluster| cluster.follow_own_member(tasks))
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
    /// Prepares etcd for COMMAND, which is about to begin: checks the members, and moves the
    /// leadership.
    pub fn prepare_etcd(&self) {
        self.members.iter().for_each(Keeping::request_preparation);
    }

    pub fn state(&self) -> EtcdState {
        let nothing = EtcdState {
            prepared: true,
            ..EtcdState::default()
        };
        self.members.as_ref().map_or(nothing, Keeping::state)
    }

    pub fn set_command_may_run(&self, may_run: bool) {
        self.commanding.send_replace(may_run);
    }

    /// Releases the cluster's lock.
    pub fn release_lock(&mut self) {
        self.members = None;
    }

    /// True unless the temporary etcd has taken over from the node's etcd, or a change between the
    /// two is under way. Always true without a temporary etcd.
    pub fn own_etcd_has_data(&self) -> bool {
        self.temporary
            .as_ref()
            .is_none_or(|etcd| etcd.borrow().step == EtcdStep::Own)
    }

    /// True if the node's etcd serves: the only member, or the node's member of each etcd.
    pub fn serves(&self) -> bool {
        self.own_etcd_has_data() && self.answers.iter().all(|answers| *answers.borrow())
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
    pub fn abandon_if_writes_lost(&self, outcome: BridgeOutcome) -> BridgeOutcome {
        let Compared { missing, is_open } = self.revisions.borrow().clone();
        match (outcome, missing) {
            (BridgeOutcome::Done, Some(why)) => BridgeOutcome::Abandoned(why),
            (outcome, _) => {
                if is_open {
                    tracing::warn!(
                        code = %explained::REVISION_UNKNOWN,
                        "the node's etcd may lack writes from the time of its absence: the revision of this etcd is not known, see \
                         `etcdctl endpoint status`"
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

/// Finds the etcds of a running kube-apiserver that have a member on this node. Returns the etcds
/// that have more members, and the etcds that have only this member. `on_node` returns the node's
/// path of a file that an argument names.
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
            Ok(gateway) => gateway
                .fetch_sample(&own)
                .await
                .map(|sample| (gateway, sample)),
            Err(why) => Err(why),
        };
        let (gateway, sample) = match asked {
            Ok(asked) => asked,
            Err(why) => {
                report.add_note(format!(
                    "cannot ask the etcd on this node for its members: {why}; requests that need etcd time out while COMMAND restarts etcd"
                ));
                continue;
            }
        };
        match sample.choose_members() {
            Ok(MemberChoice::Alone) => alone.push(Alone {
                gateway,
                urls,
                version: sample.version,
            }),
            Ok(MemberChoice::Others(others)) => {
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
                report.add_note(format!(
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
                match MemberRelay::find(&cluster).await {
                    Ok(dials) => cluster.dials = Some(dials),
                    Err(why) => report.add_note(format!(
                        "etcd: requests that clients have sent to the running kube-apiserver wait while this node's etcd member is \
                         away, and another node may be reported as not ready if that node's kubelet has a connection to this \
                         kube-apiserver: {why}"
                    )),
                }
                clusters.push(cluster);
            }
            Err(all) => all
                .into_iter()
                .for_each(|why| report.add_error(format!("etcd: {why}"))),
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
    ServerUrl::parse(&secure)
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
