//! The stages of a run: one, or one a node and the worker's.

use super::directory::Directory;
use super::{Error, Stage};
use crate::address::{NETNS, free_address};
use crate::apiserver::this;
use crate::certs;
use crate::context::Context;
use crate::etcd::Etcd;
use crate::network::{Network, Node, WORKER};
use crate::plan::Via;
use crate::setting::StageSetting;
use crate::topology::Layout;
use berth_shim::config::DirectMode;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// All stages of a run.
#[derive(Debug)]
pub(crate) struct Stages {
    /// Those of instances.
    pub(crate) nodes: Vec<Stage>,
    /// What is apart from several nodes: etcd, kube-proxy, and the Service's address.
    worker: Option<Stage>,
    _network: Option<Network>,
    _dir: Directory,
}

impl Stages {
    /// Makes the directory, the certificates, and the network or an address in that which is there.
    pub(crate) fn new(context: &Context<'_>) -> Result<Self, Error> {
        let Context { plan, via, ref recorder, .. } = *context;
        let missing = |what: &str, error: io::Error| Error::Unavailable(format!("{what}: {error}"));
        let no_address = |error| missing("no free address in 127.0.0.0/8", error);
        let dir = Directory::new()
            .map_err(|e| missing("cannot make a temporary directory (TMPDIR names another place)", e))?;
        let network = plan.nodes.as_ref().map(|nodes| Network::new(nodes.count)).transpose();
        let network = network.map_err(|e| {
            let fix = if e.kind() == io::ErrorKind::PermissionDenied { " (root can)" } else { "" };
            Error::Unavailable(format!("cannot make the network of several nodes: {e}{fix}"))
        })?;
        let nodes: Vec<_> = network.iter().flat_map(|network| &network.nodes).collect();
        let worker = network.as_ref().map(|network| &network.worker);
        let addresses: Vec<SocketAddr> = match plan.netns {
            _ if network.is_some() => nodes.iter().chain(&worker).map(|node| node.address).collect(),
            true => vec![NETNS.into()],
            false => vec![free_address().map_err(no_address)?],
        };
        let ips: Vec<IpAddr> = addresses.iter().map(SocketAddr::ip).chain([WORKER.into()]).collect();
        let etcd = match &plan.etcd {
            Some(_) if network.is_some() => Some(Etcd::at(WORKER)),
            Some(_) => Some(Etcd::new().map_err(no_address)?),
            None => None,
        };
        let setting = StageSetting {
            dir: dir.path().to_owned(),
            address: addresses[0],
            node: None,
            berth: plan.berth.clone().unwrap_or_else(|| this().into()),
            certs: Arc::new(certs::make(dir.path(), &ips)?),
            etcd: etcd.map(|etcd| etcd.url()),
            probe_with_certificate: plan.old.wants_certificates() || plan.new.wants_certificates(),
            shutdown: plan.shutdown,
            direct: plan.direct == DirectMode::On && via == Via::Berth,
            hold: plan.timing.hold,
            speedup: plan.timing.speedup,
        };
        let (layout, joined) = (Layout { via, topology: plan.topology }, watch::Sender::default());
        let stage = |setting| Stage::new(setting, layout, recorder, &joined);
        let at = |node: &Node| StageSetting { address: node.address, node: Some(node.clone()), ..setting.clone() };
        let mut stages = Self {
            nodes: nodes.into_iter().map(|node| stage(at(node))).collect(),
            worker: worker.map(|node| stage(at(node))),
            _network: network,
            _dir: dir,
        };
        if stages.nodes.is_empty() {
            stages.nodes.push(stage(setting));
        }
        stages.front().etcd = plan.etcd.clone().zip(etcd);
        Ok(stages)
    }

    /// What clients dial first: the worker's, or the only one.
    pub(crate) fn front(&mut self) -> &mut Stage {
        self.worker.as_mut().unwrap_or(&mut self.nodes[0])
    }

    /// Ends what still runs, and removes the directory.
    pub(crate) async fn close(self) {
        let stages: JoinSet<()> = self.nodes.into_iter().chain(self.worker).map(Stage::close).collect();
        stages.join_all().await;
    }
}
