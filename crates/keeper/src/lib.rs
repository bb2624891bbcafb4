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
use berth_node::instance_id::InstanceId;
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

/// Time limit for removing the slices and Leases of a shim that leaves.
const WITHDRAWAL_TIMEOUT: Duration = Duration::from_secs(2);

/// The configuration of the keeper.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    pub credentials: Credentials,
    /// The node's name in the cluster.
    pub node: String,
}

/// Credentials for the cluster's API. Their files are read again for each request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credentials {
    /// The token of the pod's service account. The API is at the address `server`, and the server's
    /// certificate must contain `name`.
    InCluster {
        /// The berth's address.
        server: SocketAddr,
        /// A name that kube-apiserver's certificate contains.
        name: String,
    },
    /// The path of a kubeconfig that `berth grant` wrote.
    Kubeconfig(PathBuf),
}

impl Credentials {
    /// Reads the files and makes a client. The client gets the token and not its path: otherwise
    /// each request would start a thread to read the token, even while a disk hangs.
    fn read_client(&self) -> Result<Client, KubeconfigError> {
        let path = self.display_path();
        let mut access = match self {
            Self::InCluster { server, name } => Access::in_cluster(*server, name)?,
            Self::Kubeconfig(path) => Access::read(path)?,
        };
        let (None, Some(Token::File(file))) = (&access.client, &access.token) else {
            let why = "the kubeconfig has a client certificate, or no tokenFile: these are an operator's \
                 credentials, which a running shim must not have; give a kubeconfig that berth grant wrote";
            return Err(Mistake::new("user", why).with_path(path));
        };
        let token = File::open(file)
            .and_then(read_open_small)
            .and_then(decode_text)
            .map_err(|error| {
                Mistake::new(
                    "tokenFile",
                    &format!("cannot read {}: {error}", file.display()),
                )
                .with_path(path)
            })?;
        access.token = Some(Token::Text(token.trim().to_owned()));
        Client::new(&access).map_err(|mistake| mistake.with_path(path))
    }

    /// Returns the path that messages name for these credentials.
    fn display_path(&self) -> &Path {
        match self {
            Self::InCluster { .. } => "in-cluster".as_ref(),
            Self::Kubeconfig(path) => path,
        }
    }

    /// Returns the path of the token's file. `None` for the token of a pod's service account, which
    /// the kubelet renews.
    fn token_path(&self) -> Option<PathBuf> {
        let Self::Kubeconfig(path) = self else {
            return None;
        };
        match Access::read(path).ok()?.token {
            Some(Token::File(file)) => Some(file),
            _ => None,
        }
    }
}

/// The state of the shim that the keeper serves, as far as the keeper needs it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// The state of the shim in its group, for example whether it has joined.
    pub phase: Phase,
    /// True if a sibling has joined, is not about to leave, and has a ready instance.
    pub sibling: bool,
    /// True if a thread that relays connections does not respond.
    pub blocked: bool,
    /// The instances for which this shim keeps Leases: the shim's own instance, or for a node shim
    /// every instance without a shim.
    pub instances: Vec<RepresentedInstance>,
}

/// An instance for which the shim keeps a Lease.
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

/// The kinds of requests, as values of a metric's label.
pub const REQUEST_LABELS: [&str; 8] = [
    "read_service",
    "read_slice",
    "apply_slice",
    "delete_slice",
    "list_leases",
    "apply_lease",
    "delete_lease",
    "renew_token",
];

pub const FAILURE_LABELS: [&str; 5] = [
    "credentials",
    "unauthorized",
    "forbidden",
    "unreachable",
    "failed",
];

/// Counts a request in the metrics. The arguments are the kind of request and its result.
pub type CountRequest = Arc<dyn Fn(&'static str, &'static str) + Send + Sync>;

/// The channels between a keeper and its shim.
#[derive(Clone)]
pub struct Links {
    pub facts: watch::Receiver<Facts>,
    pub status: watch::Sender<Option<ClusterStatus>>,
    pub count: CountRequest,
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Links").finish_non_exhaustive()
    }
}

/// Tells the keeper that the shim is about to leave, or that it stays after all.
#[derive(Debug, Clone)]
pub struct Withdrawal {
    going: watch::Sender<bool>,
    out: watch::Receiver<bool>,
    facts: watch::Receiver<Facts>,
}

impl Withdrawal {
    /// Removes the slices if no sibling takes over, and waits for the removal, at most 2 s. Must be
    /// called before the shim stops listening.
    pub async fn withdraw_slices(&self) {
        self.going.send_replace(true);
        let mut out = self.out.clone();
        let alone = self.facts.borrow().phase == Phase::Joined && !self.facts.borrow().sibling;
        if alone
            && tokio::time::timeout(WITHDRAWAL_TIMEOUT, out.wait_for(|out| *out))
                .await
                .is_err()
        {
            tracing::warn!(
                code = %explained::SLICE_NOT_WITHDRAWN,
                "the cluster's API did not take the slice out in {} s: the Service kubernetes may name this node until the node's Lease has expired",
                WITHDRAWAL_TIMEOUT.as_secs()
            );
        }
    }

    /// Tells the keeper that the shim stays and continues to serve, because `berth drain` was
    /// undone.
    pub fn undo_withdrawal(&self) {
        self.going.send_replace(false);
    }
}

/// Keeps the slices and Leases of one shim.
#[derive(Debug)]
pub struct Keeper {
    slices: Slices,
    leases: Leases,
    facts: watch::Receiver<Facts>,
    going: watch::Receiver<bool>,
}

impl Keeper {
    /// Makes the keeper of a shim that listens on these addresses. The first address is that of the
    /// berth. `instance` is for the names of files that only this shim writes.
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

    /// Keeps slices and Leases until the future is dropped. Waits first until the shim has joined
    /// its group: before, there is nothing to keep, and a new cluster has no apiserver to ask.
    pub async fn keep_slices_and_leases(&mut self) {
        if self
            .facts
            .wait_for(|facts| facts.phase != Phase::Waiting)
            .await
            .is_err()
        {
            return;
        }
        tokio::join!(
            self.slices
                .keep_slices(self.facts.clone(), self.going.clone()),
            self.leases
                .keep_leases(self.facts.clone(), self.going.clone())
        );
    }

    /// Removes this shim's Leases when the shim ends. If the node's slice is still in the Service
    /// and no sibling is left, the Leases stay, because another node finds the slice by them.
    pub async fn remove_leases_at_end(&mut self) {
        if !self.leases.api.has_slices() || self.facts.borrow().sibling {
            let _ =
                tokio::time::timeout(WITHDRAWAL_TIMEOUT, self.leases.remove_leases(|_| true)).await;
        }
    }
}

/// True if the API accepts the address as a node's address in an EndpointSlice.
fn is_node_address(ip: IpAddr) -> bool {
    let local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !local && !ip.is_unspecified() && !ip.is_loopback() && !ip.is_multicast()
}

/// Lengthens or shortens a time by up to a tenth, at random, so that the shims of a cluster do not
/// all send their requests at the same moment.
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
                .read_client()
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
        assert!(write("tokenFile: token").contains("the value holds no certificate"));
        assert_eq!(
            Credentials::Kubeconfig(path).token_path(),
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
