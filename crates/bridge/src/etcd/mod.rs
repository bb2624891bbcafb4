//! etcd under a bridge: COMMAND may restart this node's member too.
//!
//! A member that stops takes requests for 7 s more and answers none. So where others are a majority without it, the temporary
//! kube-apiserver knows only those; where it is the only one, a temporary etcd serves its data. An etcd of which no member is on this
//! node needs none of this.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`servers`] | the etcds that a kube-apiserver's arguments name. Pure |
//! | [`members`] | which members can be used while this node's own is away. Pure |
//! | [`dials`] | what the node's own kube-apiserver dials while its member is away |
//! | [`own`] | whether this node's member serves |
//! | [`temporary`] | what serves while the only member is away |
//! | [`gateway`] | etcd's JSON gateway: calls |
//! | [`types`] | and their answers. Pure |
//! | [`keeping`] | while the bridge is on: the cluster's lock, and the leadership |

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

/// Which etcd the temporary kube-apiserver uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum EtcdMode {
    /// Of several members the others, which must be a majority without this node's; of one a temporary etcd on the same data
    #[default]
    Auto,
    /// The node's own, as the running one does: requests that need it time out while COMMAND restarts it
    Own,
}

/// An etcd with a member on this node, whose others serve while the bridge is on.
#[derive(Debug, Clone)]
pub struct Cluster {
    gateway: Gateway,
    /// As in the arguments, and which of them is this node's.
    urls: Urls,
    own: String,
    others: Others,
    /// For the node's own kube-apiserver.
    pub dials: Option<Dials>,
}

impl Cluster {
    /// Follows whether this node's member serves, and what the node's own kube-apiserver dials where it does not.
    pub fn follow(&self, tasks: &mut JoinSet<()>) -> watch::Receiver<bool> {
        let (to, answers) = watch::channel(true);
        let cluster = self.clone();
        tasks.spawn(async move {
            if let Err(why) = own::follow(&cluster, to).await {
                tracing::warn!("whether this node's member of etcd serves is not known: {why}");
            }
        });
        if let Some(dials) = self.dials.clone() {
            let answers = answers.clone();
            tasks.spawn(async {
                let kept = dials.keep(answers).await;
                let why = kept.err().unwrap_or_default();
                tracing::warn!("the node's own kube-apiserver has no other member of etcd: {why}");
            });
        }
        answers
    }
}

/// What a bridge does about etcd.
#[derive(Debug, Default)]
pub struct EtcdPlan {
    pub clusters: Vec<Cluster>,
    /// For the node's own, where it is the only member.
    pub temporary: Option<temporary::Plan>,
    /// For the cluster's lock, and whether there is no bridge without it: a kubeconfig was given.
    pub lock: Option<Client>,
    pub needs_lock: bool,
}

impl EtcdPlan {
    /// Lets a kube-apiserver use the others.
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
        servers::replace(argv, &instead);
        if let Some(temporary) = &self.temporary {
            args::set(argv, servers::SERVERS, &temporary.server);
        }
    }
}

/// What a bridge does about etcd while it is on.
#[derive(Debug)]
pub struct EtcdHandle {
    members: Option<Keeping>,
    /// Whether this node's member answers, of each etcd that has others.
    answers: Vec<watch::Receiver<bool>>,
    pub(super) temporary: Option<watch::Receiver<EtcdStatus>>,
    /// Whether writes of one that served before are missing.
    revisions: watch::Receiver<Compared>,
    /// COMMAND runs, or may.
    commanding: watch::Sender<bool>,
}

impl EtcdPlan {
    /// Begins it, in these tasks. `instances` are asked for the cluster's lock.
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
    /// COMMAND is to begin.
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

    /// Gives the cluster's lock back.
    pub fn release(&mut self) {
        self.members = None;
    }

    /// The temporary etcd does not serve.
    pub fn has_own(&self) -> bool {
        self.temporary
            .as_ref()
            .is_none_or(|etcd| etcd.borrow().step == EtcdStep::Own)
    }

    /// The node's own serves, or its member of each etcd.
    pub fn serves(&self) -> bool {
        self.has_own() && self.answers.iter().all(|answers| *answers.borrow())
    }

    /// Of the temporary etcd, if there is one.
    pub fn status(&self) -> Option<EtcdStatus> {
        let status = self.temporary.as_ref()?.borrow().clone();
        let missing = self.revisions.borrow().missing.clone();
        Some(EtcdStatus {
            trouble: missing.or(status.trouble),
            ..status
        })
    }

    /// A bridge under which writes were lost has not ended well.
    pub fn judged(&self, outcome: BridgeOutcome) -> BridgeOutcome {
        let Compared { missing, is_open } = self.revisions.borrow().clone();
        match (outcome, missing) {
            (BridgeOutcome::Done, Some(why)) => BridgeOutcome::Abandoned(why),
            (outcome, _) => {
                if is_open {
                    tracing::warn!(
                        "whether the node's own etcd has all that was written while it was away is not known: it did not answer when it \
                         was asked for its revision"
                    );
                }
                outcome
            }
        }
    }
}

/// An etcd whose only member is on this node.
#[derive(Debug, Clone)]
pub struct Alone {
    gateway: Gateway,
    urls: Urls,
    version: String,
}

/// Finds the etcds of a running kube-apiserver that have a member here: those with others, and those without. `on_node` is where a file
/// is that an argument names.
pub async fn examine(
    command: &[OsString],
    node: &[IpAddr],
    on_node: impl Fn(&Path) -> PathBuf,
    report: &mut Report,
) -> (Vec<Cluster>, Vec<Alone>) {
    let (mut clusters, mut alone) = (Vec::new(), Vec::new());
    for urls in servers::named(command) {
        let Some(own) = of_node(&urls, node).await else {
            continue;
        };
        let asked = match gateway(command, &on_node) {
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

/// The URL that is of this node, if one is.
async fn of_node(urls: &Urls, node: &[IpAddr]) -> Option<String> {
    for url in urls {
        let Some((host, port)) = place(url) else {
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

/// Without TLS, etcd is where it would be with it.
fn place(url: &str) -> Option<(String, u16)> {
    let secure = url.replacen("http://", "https://", 1);
    Place::parse(&secure)
        .ok()
        .map(|place| (place.host, place.port))
}

/// With the certificates of the kube-apiserver.
fn gateway(command: &[OsString], on_node: impl Fn(&Path) -> PathBuf) -> Result<Gateway, String> {
    let path = |flag| args::value(command, flag).map(|path| on_node(Path::new(path)));
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
