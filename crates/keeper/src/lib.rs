//! Keeps the Service `kubernetes` whole, and says in Leases who is there (`--cluster`).
//!
//! Clients inside a cluster dial the Service's address. kube-apiserver's reconciler knows instances by their address,
//! and the two of a node share one: it goes whenever either stops, and comes back up to 10 s later. So a node that is alone
//! has an EndpointSlice of berth's in the Service (`slice` says when). Siblings write the same one by server-side
//! apply, so there is no fight, and nothing to hand over.
//!
//! The Lease of an instance is renewed only by a shim that is alive in every thread and whose instance passes its
//! probe. Those that have expired are removed by one live berth, together with the slices of a node that has none left.
//!
//! Nothing here is needed to serve: a cluster's API that does not answer, or forbids, is logged, counted, shown in
//! the status, and tried again. It knows of the shim what [`Facts`] say.

#![forbid(unsafe_code)]

mod api;
mod slice;
mod token;

use api::Api;
use berth_cluster::lease::{self, Expiry, InstanceLease, RENEWAL};
use berth_cluster::service::{self, Family, MANAGER, Service};
use berth_cluster::watch::{Objects, follow};
use berth_cluster::{Client, Error, client};
use berth_node::instance::InstanceId;
use berth_node::ipc::wire::ClusterStatus;
use berth_node::terms::Phase;
use berth_os::clock;
use humantime::format_rfc3339_seconds;
use hyper::StatusCode;
use serde_json::Value;
use slice::{Rule, Sight, Want};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use token::TokenFile;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Longest time that a shim which goes waits for its slice to be removed.
const WITHDRAWAL: Duration = Duration::from_secs(2);

/// Time between two tries of what failed.
const RETRY: Duration = Duration::from_secs(1);

/// Time between two looks at the token.
const TOKEN: Duration = Duration::from_secs(600);

/// What is told of the cluster.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// With the shim's own credentials.
    pub client: Client,
    /// The token's file, where the shim renews it itself.
    pub token: Option<PathBuf>,
    /// The node's name in the cluster.
    pub node: String,
}

/// What is known of the shim.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// Where it is in its life.
    pub phase: Phase,
    /// A sibling is joined, and its instance is ready.
    pub sibling: bool,
    /// A relaying thread gives no sign of life.
    pub blocked: bool,
    /// The instances that it speaks for: its own, or all of a node shim's.
    pub instances: Vec<Instance>,
}

/// An instance that a shim speaks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Its name on the node.
    pub id: InstanceId,
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether it passes its probe.
    pub ready: bool,
    /// What it says of its version.
    pub version: Option<Arc<str>>,
}

/// What is counted of a request: which, and how it ended.
pub type Count = Arc<dyn Fn(&'static str, &'static str) + Send + Sync>;

/// Where a keeper is: what it knows of its shim, and whom it tells.
#[derive(Clone)]
pub struct Links {
    /// Of the shim.
    pub facts: watch::Receiver<Facts>,
    /// What the keeper does.
    pub status: watch::Sender<Option<ClusterStatus>>,
    /// Requests.
    pub count: Count,
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Links").finish_non_exhaustive()
    }
}

/// Tells the keeper that the shim is about to leave.
#[derive(Debug, Clone)]
pub struct Withdrawal {
    ask: mpsc::UnboundedSender<oneshot::Sender<()>>,
    facts: watch::Receiver<Facts>,
}

impl Withdrawal {
    /// Removes the slice if nobody takes over, before the shim stops listening; not for longer than 2 s.
    pub async fn withdraw(&self) {
        if self.facts.borrow().sibling {
            return;
        }
        let (done, removed) = oneshot::channel();
        if self.ask.send(done).is_ok() && tokio::time::timeout(WITHDRAWAL, removed).await.is_err() {
            tracing::warn!(
                "the cluster's API did not answer in {} s: the Service kubernetes may name this node until its Lease expires",
                WITHDRAWAL.as_secs()
            );
        }
    }
}

/// The keeper of a shim.
#[derive(Debug)]
pub struct Keeper {
    api: Arc<Api>,
    /// The node's name.
    node: String,
    /// The shim's, the berth's first.
    addresses: Vec<SocketAddr>,
    facts: watch::Receiver<Facts>,
    status: watch::Sender<Option<ClusterStatus>>,
    token: Option<TokenFile>,
    token_due: Instant,
    slices: Vec<Slice>,
    service: Option<Service>,
    leases: Leases,
    withdrawn: bool,
    withdrawals: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
}

/// The node's own slice of a family.
#[derive(Debug)]
struct Slice {
    address: SocketAddr,
    rule: Rule,
    /// What it was made last, and when.
    made: Option<(bool, Instant)>,
}

/// The Leases of the instances.
#[derive(Debug)]
struct Leases {
    /// This process, whatever its pid.
    holder: String,
    /// Those that are held, with the instance, the time of the first renewal and the transitions.
    held: BTreeMap<String, Held>,
    expiry: Expiry,
}

#[derive(Debug, Clone)]
struct Held {
    instance: InstanceId,
    acquired: SystemTime,
    transitions: u32,
}

impl Keeper {
    /// Of a shim at these addresses. A wildcard is no address of the node, and the API refuses loopback.
    /// `instance` names files of this shim alone.
    ///
    /// # Errors
    /// The system gives no random bytes.
    pub fn new(
        config: ClusterConfig,
        addresses: &[SocketAddr],
        instance: &InstanceId,
        links: Links,
    ) -> Result<(Self, Withdrawal), getrandom::Error> {
        let first_of = |family| addresses.iter().find(|address| Family::of(address.ip()) == family);
        let named = |address: &&SocketAddr| !address.ip().is_unspecified() && !address.ip().is_loopback();
        let slices = Family::ALL.into_iter().filter_map(|family| first_of(family).filter(named));
        let slices: Vec<_> =
            slices.map(|address| Slice { address: *address, rule: Rule::default(), made: None }).collect();
        if slices.is_empty() {
            tracing::warn!("--listen has no address that other nodes could dial: the Service kubernetes is not kept");
        }
        let Links { facts, status, count } = links;
        status.send_replace(Some(ClusterStatus::default()));
        let (ask, withdrawals) = mpsc::unbounded_channel();
        let keeper = Self {
            api: Arc::new(Api::new(config.client, addresses[0], facts.clone(), status.clone(), count)),
            token: config.token.map(|path| TokenFile::new(&path, instance)),
            token_due: Instant::now(),
            slices,
            service: None,
            leases: Leases {
                holder: format!("{}_{:016x}", config.node, getrandom::u64()?),
                held: BTreeMap::new(),
                expiry: Expiry::default(),
            },
            node: config.node,
            addresses: addresses.to_vec(),
            facts: facts.clone(),
            status,
            withdrawn: false,
            withdrawals,
        };
        Ok((keeper, Withdrawal { ask, facts }))
    }

    /// Keeps slices and Leases for as long as it is polled, from when the shim has joined.
    pub async fn keep(&mut self) {
        let (tell, mut seen) = watch::channel(None);
        let mut following = None;
        let mut changes = self.facts.clone();
        let mut waiting = Vec::<oneshot::Sender<()>>::new();
        // Before that there is nothing to keep, and in a cluster that begins nobody to ask.
        tokio::select! {
            _ = changes.wait_for(|facts| facts.phase != Phase::Waiting) => {}
            Some(withdrawn) = self.withdrawals.recv() => {
                self.withdrawn = true;
                waiting.push(withdrawn);
            }
        }
        let mut renewal = Instant::now();
        loop {
            if self.facts.borrow().phase == Phase::Left {
                // It may have come through the berth to this very shim, which waits for its connections to end.
                following = None;
                tell.send_replace(None);
            } else {
                following.get_or_insert_with(|| follow_reconciled(self.api.clone(), tell.clone()));
            }
            let reconciled = seen.borrow_and_update().clone();
            let mut wake = self.keep_slices(reconciled.as_ref()).await;
            if self.withdrawn && self.is_alone() {
                // Now: when the shim ends, there may be nobody left who could be asked.
                self.leases.remove(&self.api, |_| true).await;
            }
            for withdrawn in waiting.drain(..) {
                // Whoever waited may have given up.
                let _: Result<(), ()> = withdrawn.send(());
            }
            if Instant::now() >= renewal {
                self.keep_leases().await;
                self.keep_token().await;
                renewal = Instant::now() + jittered(RENEWAL);
            }
            wake = wake.min(renewal);
            let before = changes.borrow_and_update().clone();
            tokio::select! {
                Some(withdrawn) = self.withdrawals.recv() => {
                    self.withdrawn = true;
                    waiting.push(withdrawn);
                }
                changed = seen.changed() => if changed.is_err() { return },
                changed = changes.changed() => {
                    if changed.is_err() { return }
                    let now = changes.borrow().clone();
                    // Joined anew: what `berth drain` said is over.
                    self.withdrawn &= now.phase != Phase::Joined || before.phase == Phase::Joined;
                    if (now.phase, ready(&now)) != (before.phase, ready(&before)) {
                        renewal = Instant::now();
                    }
                }
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    /// Removes the Leases that are held: the shim ends.
    pub async fn finish(&mut self) {
        let _ = tokio::time::timeout(WITHDRAWAL, self.leases.remove(&self.api, |_| true)).await;
    }

    fn is_alone(&self) -> bool {
        !self.facts.borrow().sibling
    }

    /// Brings each slice to what it should be. When to look again, at the latest.
    async fn keep_slices(&mut self, reconciled: Option<&Value>) -> Instant {
        let now = Instant::now();
        let later = now + RENEWAL;
        if self.slices.is_empty() {
            return later;
        }
        if self.service.is_none() {
            let object = self.api.note("read_service", self.api.client().get(service::SERVICE).await);
            self.service = object.as_ref().map(Service::parse);
        }
        let Some(service) = &self.service else { return now + jittered(RETRY) };
        let time = clock::boottime().unwrap_or_default();
        let own: Vec<_> = self.addresses.iter().map(SocketAddr::ip).collect();
        let others = |slice: &Value| service::addresses(slice).filter(|ip| !own.contains(ip)).collect::<Vec<_>>();
        let others = reconciled.map(others);
        if let (Some(others), Some(port)) = (&others, reconciled.and_then(|slice| service::ports(slice).next())) {
            self.api.set_others(others.iter().map(|ip| SocketAddr::new(*ip, port)).collect());
        }
        let Facts { phase, sibling, .. } = *self.facts.borrow();
        let mut wake = later;
        let mut failed = false;
        for slice in &mut self.slices {
            let family = Family::of(slice.address.ip());
            if !service.families.contains(&family) {
                continue;
            }
            let others = others.as_ref().map(|others| others.iter().any(|ip| Family::of(*ip) == family));
            let want = slice.rule.decide(time, Sight { phase, sibling, withdrawn: self.withdrawn, others });
            failed |= !slice.make(want, &self.api, &self.node, service).await;
            wake = slice.rule.wake(time).map_or(wake, |at| wake.min(now + at.saturating_sub(time)));
        }
        let kept = self.slices.iter().filter(|slice| matches!(slice.made, Some((true, _))));
        let kept = kept.map(|slice| service::slice_name(&self.node, Family::of(slice.address.ip()))).collect();
        self.tell(|status| status.slices = kept);
        if failed { now + jittered(RETRY) } else { wake }
    }

    async fn keep_leases(&mut self) {
        let listed = self.api.note("list_leases", self.api.client().get(lease::OF_INSTANCES).await);
        let list = listed.as_ref().and_then(|list| list["items"].as_array()).map_or(&[][..], Vec::as_slice);
        match (&listed, clock::boottime()) {
            (Some(_), Ok(now)) => self.leases.expiry.read(now, RENEWAL * 3 / 2, list),
            _ => self.leases.expiry.failed(),
        }
        if self.withdrawn && self.is_alone() {
            return;
        }
        let facts = self.facts.borrow().clone();
        let gone = |held: &Held| facts.instances.iter().all(|known| known.id != held.instance);
        self.leases.remove(&self.api, gone).await;
        if facts.blocked {
            tracing::debug!("a relaying thread does not answer: no Lease is renewed");
            return;
        }
        for Instance { id: instance, version, .. } in ready(&facts) {
            let known = list.iter().filter_map(InstanceLease::parse);
            let known = known.into_iter().find(|known| known.node == self.node && known.instance == instance.as_str());
            let held = self.leases.take(instance, known.as_ref());
            let lease = InstanceLease {
                node: self.node.clone(),
                instance: instance.to_string(),
                holder: self.leases.holder.clone(),
                address: self.addresses[0],
                version: version.as_deref().map(ToOwned::to_owned),
                state: facts.phase.as_str().to_owned(),
                acquired: held.acquired,
                renewed: SystemTime::now(),
                transitions: held.transitions,
            };
            let (name, object) = (lease.name(), lease.object());
            let applied = self.api.client().apply(&lease::lease_path(&name), MANAGER, &object).await;
            if self.api.note("apply_lease", applied).is_some() {
                self.leases.held.insert(name, held);
                let renewed = Some(format_rfc3339_seconds(lease.renewed).to_string());
                self.tell(|status| status.lease_renewed = renewed);
            }
        }
        self.leases.sweep(&self.api, list).await;
    }

    async fn keep_token(&mut self) {
        if let Some(token) = self.token.as_ref().filter(|_| Instant::now() >= self.token_due) {
            let expires = token.look(&self.api).await.map(|at| format_rfc3339_seconds(at).to_string());
            self.tell(|status| status.token_expires = expires);
            self.token_due = Instant::now() + jittered(TOKEN);
        }
    }

    fn tell(&self, change: impl FnOnce(&mut ClusterStatus)) {
        self.status.send_modify(|status| status.as_mut().map_or((), change));
    }
}

/// Tells what kube-apiserver's own slice is, and `None` while that is not known.
fn follow_reconciled(api: Arc<Api>, tell: watch::Sender<Option<Value>>) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        let asked = api.clone();
        let told = |objects: Result<&Objects, &Error>| {
            api.noted("watch_slice", objects.err());
            let slice = objects.ok().map(|objects| objects.get("kubernetes").cloned().unwrap_or_default());
            tell.send_replace(slice);
        };
        follow(move || asked.client(), service::RECONCILED, told).await;
    }))
}

impl Slice {
    /// Whether it is what it should be.
    async fn make(&mut self, want: Want, api: &Api, node: &str, service: &Service) -> bool {
        let name = service::slice_name(node, Family::of(self.address.ip()));
        let path = service::slice_path(&name);
        let (present, before) = (want == Want::Present, self.made);
        match (want, before) {
            (Want::AsItIs, _) | (Want::Absent, Some((false, _))) => return true,
            // Somebody may have removed it; an apply that changes nothing is no write in etcd.
            (Want::Present, Some((true, at))) if at.elapsed() < RENEWAL => return true,
            _ => {}
        }
        let made = if present {
            let slice = service::slice(node, self.address, &service.port_name);
            api.note("apply_slice", api.client().apply(&path, MANAGER, &slice).await).is_some()
        } else {
            api.note("delete_slice", client::found(api.client().delete(&path).await)).is_some()
        };
        if made {
            self.made = Some((present, Instant::now()));
            if before.map(|(was, _)| was) != Some(present) {
                let what = if present { "is in" } else { "is out of" };
                tracing::info!(slice = name, address = %self.address, "the node's own slice {what} the Service kubernetes");
            }
        }
        made
    }
}

impl Leases {
    /// The Lease of an instance as it is held from now on, if a renewal succeeds.
    fn take(&self, instance: &InstanceId, known: Option<&InstanceLease>) -> Held {
        let (acquired, transitions) = match known {
            Some(known) if known.holder == self.holder => (known.acquired, known.transitions),
            Some(known) => (SystemTime::now(), known.transitions.saturating_add(1)),
            None => (SystemTime::now(), 0),
        };
        Held { instance: instance.clone(), acquired, transitions }
    }

    async fn remove(&mut self, api: &Api, which: impl Fn(&Held) -> bool) {
        let gone: Vec<_> = self.held.iter().filter(|(_, held)| which(held)).map(|(name, _)| name.clone()).collect();
        for name in gone {
            let removed = client::found(api.client().delete(&lease::lease_path(&name)).await);
            if api.note("delete_lease", removed).is_some() {
                self.held.remove(&name);
            }
        }
    }

    /// Removes what expired, and the slices of nodes that have no other Lease: one live berth at a time, which is the one with
    /// the first Lease by name. Two that disagree for a moment do the same.
    async fn sweep(&self, api: &Api, list: &[Value]) {
        let name = |object: &Value| object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let (expired, live): (Vec<_>, Vec<_>) = list.iter().partition(|object| self.expiry.expired(&name(object)));
        let first = live.iter().min_by_key(|object| name(object)).and_then(|object| InstanceLease::parse(object));
        if first.is_none_or(|first| first.holder != self.holder) {
            return;
        }
        let nodes: BTreeSet<_> = live.iter().filter_map(|object| Some(InstanceLease::parse(object)?.node)).collect();
        for object in expired {
            let lease = InstanceLease::parse(object);
            if let Some(lease) = lease.filter(|lease| !nodes.contains(&lease.node)) {
                tracing::warn!(
                    node = lease.node,
                    instance = lease.instance,
                    "the node's Lease has expired: its slice is taken out of the Service kubernetes, if there is one"
                );
                let mut removed = true;
                for family in Family::ALL {
                    let path = service::slice_path(&service::slice_name(&lease.node, family));
                    removed &= api.note("delete_slice", client::found(api.client().delete(&path).await)).is_some();
                }
                if !removed {
                    continue;
                }
            }
            // Not if it was renewed meanwhile.
            let removed = api.client().delete_read(&lease::lease_path(&name(object)), object).await;
            match removed {
                Err(error) if error.status() == Some(StatusCode::CONFLICT) => {}
                removed => drop(api.note("delete_lease", client::found(removed))),
            }
        }
    }
}

fn ready(facts: &Facts) -> Vec<&Instance> {
    facts.instances.iter().filter(|instance| instance.ready).collect()
}

/// A time, up to a tenth less or more: not all shims of a cluster come at once.
fn jittered(time: Duration) -> Duration {
    let drawn = getrandom::u32().unwrap_or(u32::MAX / 2);
    time.mul_f64(0.9 + 0.2 * f64::from(drawn) / f64::from(u32::MAX))
}
