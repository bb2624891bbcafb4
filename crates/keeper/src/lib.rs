//! Keeps the node in the Service `kubernetes`, and a Lease for each instance (`--cluster`).
//!
//! Clients inside a cluster dial the Service's address. kube-apiserver's reconciler knows instances
//! by address, and the two instances of a node share an address: the reconciler removes the address
//! whenever either instance stops, and adds it up to 10 s later. So a node that is alone has an
//! EndpointSlice of berth in the Service (`rule` decides when, `slices` writes). Siblings write
//! the same slice by server-side apply, so there is no conflict, and nothing to hand over.
//!
//! Only a shim that is alive in every thread renews the Lease of an instance (`leases`), and only
//! while the instance passes its probe. One live berth removes expired Leases, and the slices of
//! nodes that have no live Lease.
//!
//! The keeper is not needed to serve clients: unreadable credentials, and requests that fail or are
//! forbidden, are logged, counted, shown in the status, and tried again (`api`). [`Facts`] are
//! everything that the keeper knows about the shim.

#![forbid(unsafe_code)]

mod api;
mod leases;
pub mod rule;
mod slices;
mod token;

use api::Api;
use berth_cluster::kubeconfig::{Mistake, Token};
use berth_cluster::lease::Expiry;
use berth_cluster::{Access, Client, KubeconfigError};
use berth_node::instance::InstanceId;
use berth_node::ipc::wire::ClusterStatus;
use berth_node::terms::Phase;
use berth_os::explained;
use berth_os::file::{decode_text, read_open_small};
use leases::Leases;
use slices::Slices;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Timeout of the removal of a leaving shim's slices and Leases.
const WITHDRAWAL: Duration = Duration::from_secs(2);

/// The configuration of the keeper.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    pub credentials: Credentials,
    /// The node's name in the cluster.
    pub node: String,
}

/// Credentials of a shim, read for each request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credentials {
    /// The pod's service account. The API is at `server`, and the server's certificate must contain
    /// `name`.
    InCluster {
        /// The berth's address.
        server: SocketAddr,
        /// A name in kube-apiserver's certificate.
        name: String,
    },
    /// A kubeconfig of `berth grant`.
    Kubeconfig(PathBuf),
}

impl Credentials {
    /// Reads every file and makes a client. The token is read here, too: a client that reads the
    /// token itself would start a thread for each request while a disk hangs.
    fn read(&self) -> Result<Client, KubeconfigError> {
        let path = self.path();
        let mut access = match self {
            Self::InCluster { server, name } => Access::in_cluster(*server, name)?,
            Self::Kubeconfig(path) => Access::read(path)?,
        };
        let (None, Some(Token::File(file))) = (&access.client, &access.token) else {
            let why = "it has a client certificate, or no tokenFile: these are an operator's credentials, which a running shim \
                       must not have; give a kubeconfig that berth grant wrote";
            return Err(Mistake::new("user", why).of(path));
        };
        let token = File::open(file)
            .and_then(read_open_small)
            .and_then(decode_text)
            .map_err(|error| {
                Mistake::new(
                    "tokenFile",
                    &format!("cannot read {}: {error}", file.display()),
                )
                .of(path)
            })?;
        access.token = Some(Token::Text(token.trim().to_owned()));
        Client::new(&access).map_err(|mistake| mistake.of(path))
    }

    /// Returns the credentials' path for messages.
    fn path(&self) -> &Path {
        match self {
            Self::InCluster { .. } => "in-cluster".as_ref(),
            Self::Kubeconfig(path) => path,
        }
    }

    /// Returns the token's file, if the shim renews the token itself. The kubelet renews the token
    /// of a service account.
    fn token(&self) -> Option<PathBuf> {
        let Self::Kubeconfig(path) = self else {
            return None;
        };
        match Access::read(path).ok()?.token {
            Some(Token::File(file)) => Some(file),
            _ => None,
        }
    }
}

/// The shim's state, as far as the keeper needs it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// The phase of the shim's life.
    pub phase: Phase,
    /// True if a sibling has joined, does not leave, and has a ready instance.
    pub sibling: bool,
    /// True if a relaying thread gives no sign of life.
    pub blocked: bool,
    /// The instances that the shim represents: its own instance, or a node shim's instances that
    /// have no shim of their own.
    pub instances: Vec<RepresentedInstance>,
}

/// An instance that a shim represents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepresentedInstance {
    /// The instance's name on the node.
    pub id: InstanceId,
    pub address: SocketAddr,
    /// True if the instance passes its probe.
    pub ready: bool,
    /// The version that the instance reports.
    pub version: Option<Arc<str>>,
}

/// The labels of the counted requests.
pub const REQUESTS: [&str; 8] = [
    "read_service",
    "read_slice",
    "apply_slice",
    "delete_slice",
    "list_leases",
    "apply_lease",
    "delete_lease",
    "renew_token",
];

pub const FAILURES: [&str; 5] = [
    "credentials",
    "unauthorized",
    "forbidden",
    "unreachable",
    "failed",
];

/// Counts a request: the label of the request, and the label of its result.
pub type Count = Arc<dyn Fn(&'static str, &'static str) + Send + Sync>;

/// The connection of a keeper to its shim.
#[derive(Clone)]
pub struct Links {
    pub facts: watch::Receiver<Facts>,
    pub status: watch::Sender<Option<ClusterStatus>>,
    pub count: Count,
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Links").finish_non_exhaustive()
    }
}

/// Tells the keeper that the shim is about to leave, or stays after all.
#[derive(Debug, Clone)]
pub struct Withdrawal {
    going: watch::Sender<bool>,
    out: watch::Receiver<bool>,
    facts: watch::Receiver<Facts>,
}

impl Withdrawal {
    /// Must be called before the shim stops listening. Removes the slices if no sibling takes over,
    /// and waits for the removal, at most 2 s.
    pub async fn withdraw(&self) {
        self.going.send_replace(true);
        let mut out = self.out.clone();
        let alone = self.facts.borrow().phase == Phase::Joined && !self.facts.borrow().sibling;
        if alone
            && tokio::time::timeout(WITHDRAWAL, out.wait_for(|out| *out))
                .await
                .is_err()
        {
            tracing::warn!(
                code = %explained::SLICE_NOT_WITHDRAWN,
                "the cluster's API did not take the slice out in {} s: the Service kubernetes may name this node until its Lease \
                 has expired",
                WITHDRAWAL.as_secs()
            );
        }
    }

    /// Tells the keeper that the shim continues to serve, because `berth drain` is undone.
    pub fn undo(&self) {
        self.going.send_replace(false);
    }
}

/// The keeper of a shim.
#[derive(Debug)]
pub struct Keeper {
    slices: Slices,
    leases: Leases,
    facts: watch::Receiver<Facts>,
    going: watch::Receiver<bool>,
}

impl Keeper {
    /// Makes the keeper of a shim with these addresses; the berth's address is the first.
    /// `instance` is used in the names of files that belong to this shim alone.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub fn new(
        config: ClusterConfig,
        addresses: &[SocketAddr],
        instance: &InstanceId,
        links: Links,
    ) -> Result<(Self, Withdrawal), getrandom::Error> {
        let Links {
            facts,
            status,
            count,
        } = links;
        status.send_replace(Some(ClusterStatus::default()));
        let going = watch::Sender::new(false);
        let (to, out) = watch::channel(false);
        let api = Arc::new(Api::new(
            config.credentials,
            addresses[0],
            facts.clone(),
            status,
            count,
        ));
        let keeper = Self {
            slices: Slices::new(api.clone(), &config.node, addresses, to),
            leases: Leases {
                api,
                holder: format!("{}_{:016x}", config.node, getrandom::u64()?),
                node: config.node,
                address: addresses[0],
                instance: instance.clone(),
                held: BTreeMap::new(),
                expiry: Expiry::default(),
            },
            facts: facts.clone(),
            going: going.subscribe(),
        };
        Ok((keeper, Withdrawal { going, out, facts }))
    }

    /// Keeps slices and Leases until the future is dropped. Begins when the shim has joined:
    /// before, there is nothing to keep, and in a new cluster no apiserver.
    pub async fn keep(&mut self) {
        if self
            .facts
            .wait_for(|facts| facts.phase != Phase::Waiting)
            .await
            .is_err()
        {
            return;
        }
        tokio::join!(
            self.slices.keep(self.facts.clone(), self.going.clone()),
            self.leases.keep(self.facts.clone(), self.going.clone())
        );
    }

    /// Removes this shim's Leases, because the shim ends. The Leases stay if the node's slice is
    /// still in the Service and no sibling is left: another node finds the slice by its Lease.
    pub async fn finish(&mut self) {
        if !self.leases.api.has_slices() || self.facts.borrow().sibling {
            let _ = tokio::time::timeout(WITHDRAWAL, self.leases.remove(|_| true)).await;
        }
    }
}

/// True if an EndpointSlice accepts the address as a node's address: the API refuses further kinds.
fn is_node_address(ip: IpAddr) -> bool {
    let local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !local && !ip.is_unspecified() && !ip.is_loopback() && !ip.is_multicast()
}

/// Returns a time that is up to a tenth shorter or longer, so that the shims of a cluster do not
/// send their requests at the same moment.
fn add_jitter(time: Duration) -> Duration {
    let drawn = getrandom::u32().unwrap_or(u32::MAX / 2);
    time.mul_f64(0.9 + 0.2 * f64::from(drawn) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operators_credentials_are_not_used() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("kubeconfig");
        let write = |user: &str| {
            let text = format!(
                "current-context: a\nclusters: [{{name: c, cluster: {{server: 'https://10.0.0.5:6443', \
                 certificate-authority-data: Q0E=}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\ncontexts: [{{name: a, context: \
                 {{cluster: c, user: u}}}}]\n"
            );
            std::fs::write(&path, text).unwrap();
            Credentials::Kubeconfig(path.clone())
                .read()
                .unwrap_err()
                .to_string()
        };
        for operators in [
            "client-certificate-data: QQ==, client-key-data: QQ==",
            "token: t0ken",
        ] {
            assert!(
                write(operators).contains("an operator's credentials"),
                "{operators}"
            );
        }
        assert!(write("tokenFile: token").contains("tokenFile: cannot read"));
        std::fs::write(temp.path().join("token"), "t0ken").unwrap();
        assert!(write("tokenFile: token").contains("it holds no certificate"));
        assert_eq!(
            Credentials::Kubeconfig(path).token(),
            Some(temp.path().join("token"))
        );
    }

    #[test]
    fn link_local_and_special_addresses_are_no_node_addresses() {
        let can = |ip: &str| is_node_address(ip.parse().unwrap());
        assert!(can("10.0.0.5") && can("fd00::5"));
        for not in [
            "0.0.0.0",
            "::",
            "127.0.0.1",
            "::1",
            "169.254.0.5",
            "fe80::1",
            "224.0.0.1",
        ] {
            assert!(!can(not), "{not}");
        }
    }
}
