//! Keeps the node's address in the Service `kubernetes` while `berth bridge` or `berth upgrade`
//! replaces an instance.
//!
//! A kube-apiserver that stops removes its address, even if another instance of the node serves,
//! and the address is put back up to 10 s later. In between, the Service of a cluster with one
//! control-plane node would be empty. So berth keeps an EndpointSlice for the node meanwhile, by
//! the rule of the shims' slices ([`berth_keeper::rule`]) and with the operator's credentials,
//! which the running cluster does not need.
//!
//! A slice left by a killed command is recognized by its node and boot, and for an upgrade also by
//! the time of its last renewal. The next bridge or upgrade removes the slice, and so does any
//! `berth bridge end`. An upgrade that is resumed soon takes over its own slice.

use berth_cluster::client::none_if_missing;
use berth_cluster::service::{self, FIELD_MANAGER, Family, READ_INTERVAL, RECONCILED_SLICE};
use berth_cluster::{Client, Error, lease};
use berth_keeper::rule::{Rule, SliceDecision, SliceObservation};
use berth_manifest::wait::ask_until;
use berth_node::terms::Phase;
use berth_options::cluster::host_name;
use berth_os::clock;
use berth_os::explained;
use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// Time limit of a request to an instance. After that, the next instance is asked.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Message for the operator: what it means for pods if a bridge cannot keep the Service.
pub const LOST: &str = "the Service kubernetes is not kept: on the only control-plane node, pods lose it while COMMAND restarts kube-apiserver";

const NODES_PATH: &str = "/api/v1/nodes";

/// Label of a Node. The label's value is the host's name. The Node's own name may differ from the
/// host's name.
const HOST_NAME_LABEL: &str = "kubernetes.io/hostname";

/// Longest time until kube-apiserver lists an instance in the Service: a round of its reconciler
/// (10 s), and a margin.
const RECONCILE_TIMEOUT: Duration = Duration::from_secs(11);

/// Time between two reads of the addresses that kube-apiserver lists.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Time limit for removing the slice at the end.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Annotations of berth's slices, with the node, the ID of the node's boot, and the time of the
/// last renewal.
const NODE_ANNOTATION: &str = "berth/node";
const BOOT_ANNOTATION: &str = "berth/boot-id";
const RENEWED_ANNOTATION: &str = "berth/renewed";

/// Time between two renewals of a slice. It is long, because each renewal is an event for all
/// kube-proxies.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(60);

/// Time without a renewal after which a slice counts as left by a killed command. The time is long,
/// because the clocks of two hosts may differ by minutes.
const LEFTOVER_AGE: Duration = Duration::from_secs(600);

/// Text for the time in which the state of the Service is not known yet.
pub const NOT_READ: &str = "the EndpointSlices of the Service have not been read";

/// True if the slice is in the Service. An error if the slice should be in the Service, and may be
/// missing.
pub type SliceState = Result<bool, String>;

/// The command for which a slice is kept. The slice's name contains it, so a node has at most one
/// slice for a bridge and one for an upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Bridge,
    Upgrade,
}

impl Purpose {
    const ALL: [Self; 2] = [Self::Bridge, Self::Upgrade];

    fn slice_name_prefix(self) -> &'static str {
        match self {
            Self::Bridge => "berth-bridge-",
            Self::Upgrade => "berth-upgrade-",
        }
    }
}

/// A command's demand: whether the node should have a slice, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand {
    /// An instance of this node serves, so the node's address belongs into the Service.
    Serving,
    /// No instance of this node serves. The slice is removed, unless the Service would then be
    /// empty.
    NotServing,
    /// The command ends. The slice stays only until kube-apiserver itself lists the node.
    Ending,
}

/// Keeps the address of a node in the Service `kubernetes`, by an EndpointSlice.
#[derive(Debug, Clone)]
pub struct ServiceKeeper {
    client: Client,
    purpose: Purpose,
    node: String,
    boot: String,
    /// The address that the node's instances advertise.
    address: SocketAddr,
}

/// A slice that a task keeps in the Service. Dropping this value makes the task remove the slice.
#[derive(Debug)]
pub struct Keeping {
    name: String,
    demand: watch::Sender<Demand>,
    state: watch::Receiver<SliceState>,
    task: JoinHandle<()>,
}

impl Keeping {
    pub fn set_demand(&self, demand: Demand) {
        self.demand
            .send_if_modified(|was| std::mem::replace(was, demand) != demand);
    }

    pub fn state(&self) -> SliceState {
        self.state.borrow().clone()
    }

    /// Ends the keeping: waits until kube-apiserver itself lists the node and the slice is removed,
    /// at most for `RECONCILE_TIMEOUT`.
    pub async fn remove_slice_when_reconciled(&mut self) {
        self.set_demand(Demand::Ending);
        let _ = timeout(
            RECONCILE_TIMEOUT,
            self.state.wait_for(|state| *state == Ok(false)),
        )
        .await;
    }

    /// Ends the keeping, and waits until the slice is removed.
    ///
    /// # Errors
    /// The slice's name, if the slice may still exist.
    pub async fn stop_keeping_slice(self) -> Result<(), String> {
        let Self {
            name, demand, task, ..
        } = self;
        drop(demand);
        timeout(REMOVAL_TIMEOUT, task)
            .await
            .map(drop)
            .map_err(|_| name)
    }
}

impl ServiceKeeper {
    /// Makes a keeper that sends its requests with the credentials of an operator's `client`.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn new(client: &Client, purpose: Purpose, address: SocketAddr) -> Result<Self, String> {
        let boot =
            clock::boot_id().map_err(|error| format!("the boot id cannot be read: {error}"))?;
        let client = client.clone().with_patience(REQUEST_TIMEOUT);
        Ok(Self {
            client,
            purpose,
            node: host_name(),
            boot,
            address,
        })
    }

    /// Sends requests to these instances, instead of the kubeconfig's server.
    #[must_use]
    pub fn with_addresses(mut self, instances: impl IntoIterator<Item = SocketAddr>) -> Self {
        self.client = self.client.with_addresses(instances);
        self
    }

    /// Checks that the Service can be read, and that the slice could be written (dry run). Also
    /// checks that the Service has the address family of the slice, because other slices have no
    /// effect.
    ///
    /// # Errors
    /// Reading or writing is forbidden, the address family is wrong, or the cluster does not
    /// answer.
    pub async fn check_access(&self) -> Result<(), String> {
        let (ip, text) = (self.address.ip(), |error: Error| error.to_string());
        self.client
            .get(service::SERVICE_SLICES)
            .await
            .map_err(text)?;
        let families =
            service::Service::parse(&self.client.get(service::SERVICE_PATH).await.map_err(text)?)
                .families;
        if !families.contains(&Family::of_address(ip)) {
            let families = families
                .iter()
                .map(|family| family.as_str())
                .collect::<Vec<_>>()
                .join(" and ");
            return Err(format!(
                "the Service kubernetes has addresses of {families}, and the node's kube-apiserver advertises {ip}: give \
                 kube-apiserver an address of the other family with --advertise-address"
            ));
        }
        let slice = self.build_slice().await.map_err(text)?;
        self.client
            .try_apply(&service::slice_path(&self.name()), FIELD_MANAGER, &slice)
            .await
            .map_err(text)?;
        self.listed_addresses().await.map(drop).map_err(text)
    }

    /// True if kube-apiserver lists the node in the Service. The node may be missing because an
    /// instance stopped a moment ago, and an API server may not answer at once. So the question is
    /// repeated for at most `RECONCILE_TIMEOUT`.
    ///
    /// # Errors
    /// The API cannot be asked.
    pub async fn service_names_node(&self) -> Result<bool, Error> {
        let ask = async || {
            self.listed_addresses()
                .await
                .map(|named| named.contains(&self.address.ip()))
        };
        let counts = |named: &Result<bool, Error>| match named {
            Ok(named) => *named,
            Err(error) => error.status().is_some(),
        };
        ask_until(RECONCILE_TIMEOUT, CHECK_INTERVAL, ask, counts).await
    }

    /// Returns the addresses in the slice that kube-apiserver writes.
    async fn listed_addresses(&self) -> Result<Vec<IpAddr>, Error> {
        let slice = none_if_missing(self.client.get(RECONCILED_SLICE).await)?.unwrap_or_default();
        Ok(service::slice_addresses(&slice).collect())
    }

    /// Starts a task that keeps a slice as [`Keeping::set_demand`] says. There is no slice until an
    /// instance serves.
    #[must_use]
    pub fn start_keeping_slice(self) -> Keeping {
        let (demand, demanded) = watch::channel(Demand::Ending);
        let (sender, state) = watch::channel(Err(NOT_READ.into()));
        Keeping {
            name: self.name(),
            demand,
            state,
            task: tokio::spawn(self.keep_slice(demanded, sender)),
        }
    }

    /// Keeps the slice until the sender of `demanded` is dropped. Then removes the slice, whatever
    /// the last demand was.
    async fn keep_slice(
        self,
        mut demanded: watch::Receiver<Demand>,
        state: watch::Sender<SliceState>,
    ) {
        let mut rule = Rule::default();
        // Do not read the Service before an instance of this node serves.
        let mut reads_service = false;
        // `there` is true if the slice is known to be in the Service. `tried` is true if the slice
        // may exist: a write without an answer may have been carried out, and a resumed upgrade may
        // have a slice from before.
        let (mut there, mut tried) = (false, self.purpose == Purpose::Upgrade);
        // Time at which the slice was last applied. Someone else may have removed it since.
        let mut applied: Option<Instant> = None;
        let mut in_trouble = false;
        loop {
            let demand = *demanded.borrow_and_update();
            if demand == Demand::Serving && !reads_service {
                // An upgrade that is resumed goes on with the slice that it had, so it must not be
                // swept away.
                let own = Some(&*self.node).filter(|_| self.purpose == Purpose::Bridge);
                if let Err(error) = sweep_slices(&self.client, own).await {
                    tracing::info!(%error, "cannot look for EndpointSlices that earlier commands left in the Service kubernetes");
                }
                reads_service = true;
            }
            let read = async {
                match reads_service {
                    true => self
                        .listed_addresses()
                        .await
                        .map_err(|error| error.to_string()),
                    false => Err(NOT_READ.into()),
                }
            };
            let addresses = tokio::select! {
                // The next round of the loop reads the new demand.
                changed = demanded.changed() => if changed.is_ok() { continue } else { break },
                addresses = read => addresses,
            };
            let named = addresses
                .as_ref()
                .is_ok_and(|all| all.contains(&self.address.ip()));
            let others = addresses
                .as_ref()
                .ok()
                .map(|all| all.iter().any(|ip| *ip != self.address.ip()));
            let phase = match demand {
                // Without another node, removing the slice would leave the Service empty. This node
                // may not serve only for a moment, so the slice stays.
                Demand::NotServing if others == Some(true) => Phase::Refusing,
                Demand::NotServing => Phase::Waiting,
                Demand::Serving | Demand::Ending => Phase::Joined,
            };
            let sight = SliceObservation {
                phase,
                sibling: false,
                withdrawn: demand == Demand::Ending,
                others,
            };
            let brought = match rule.decide(clock::read_boottime().unwrap_or_default(), sight) {
                SliceDecision::Present
                    if there
                        && applied.is_some_and(|at| at.elapsed() < lease::RENEWAL_INTERVAL) =>
                {
                    Ok(true)
                }
                SliceDecision::Present => {
                    (tried, applied) = (true, Some(Instant::now()));
                    self.apply_slice().await.map(|()| true)
                }
                // When the command ends, the slice stays until kube-apiserver itself lists the
                // node.
                SliceDecision::Absent if tried && (demand != Demand::Ending || named) => {
                    remove_slice(&self.client, &self.name()).await.map(|()| {
                        tried = false;
                        false
                    })
                }
                SliceDecision::Absent | SliceDecision::Unchanged => Ok(there),
            };
            let is = match (&brought, addresses) {
                (Err(error), _) => Err(error.to_string()),
                // Reading the addresses failed. If the state was known before, it stays as it is.
                (Ok(_), Err(why)) if state.borrow().is_err() => Err(why),
                (Ok(is), _) => Ok(*is),
            };
            state.send_modify(|state| *state = is);
            match brought {
                Ok(is) => {
                    if std::mem::replace(&mut there, is) != is {
                        let what = if is { "is in" } else { "is out of" };
                        tracing::info!(slice = self.name(), address = %self.address, "the slice {what} the Service kubernetes");
                    }
                    in_trouble = false;
                }
                Err(error) => {
                    // A bridge logs the error here. An upgrade prints an error that lasts by
                    // itself.
                    if self.purpose == Purpose::Bridge && !std::mem::replace(&mut in_trouble, true)
                    {
                        tracing::warn!(
                            code = %explained::SERVICE_NOT_KEPT,
                            %error,
                            "the Service kubernetes cannot be kept"
                        );
                    }
                }
            }
            tokio::select! {
                changed = demanded.changed() => if changed.is_err() { break },
                () = sleep(READ_INTERVAL) => {}
            }
        }
        if tried && let Err(error) = remove_slice(&self.client, &self.name()).await {
            tracing::warn!(
                code = %explained::SLICE_STAYS,
                %error,
                slice = self.name(),
                "the slice stays in the Service kubernetes: remove the slice"
            );
        }
    }

    fn name(&self) -> String {
        format!(
            "{}{}-{}",
            self.purpose.slice_name_prefix(),
            self.node,
            Family::of_address(self.address.ip())
                .as_str()
                .to_ascii_lowercase()
        )
    }

    async fn apply_slice(&self) -> Result<(), Error> {
        self.client
            .apply(
                &service::slice_path(&self.name()),
                FIELD_MANAGER,
                &self.build_slice().await?,
            )
            .await
            .map(drop)
    }

    async fn build_slice(&self) -> Result<Value, Error> {
        let port_name =
            service::Service::parse(&self.client.get(service::SERVICE_PATH).await?).port_name;
        let mut slice = service::build_slice(&self.node, self.address, &port_name);
        slice["metadata"]["name"] = self.name().into();
        slice["metadata"]["annotations"] = json!({NODE_ANNOTATION: self.node, BOOT_ANNOTATION: self.boot, RENEWED_ANNOTATION: renewal_time()});
        Ok(slice)
    }
}

/// Returns the time at which a renewal was last due, which is a multiple of `RENEWAL_INTERVAL`. So
/// slices that are applied in between do not change.
fn renewal_time() -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    humantime::format_rfc3339_seconds(
        UNIX_EPOCH + Duration::from_secs(now - now % RENEWAL_INTERVAL.as_secs()),
    )
    .to_string()
}

async fn remove_slice(client: &Client, name: &str) -> Result<(), Error> {
    none_if_missing(client.delete(&service::slice_path(name)).await).map(drop)
}

/// Removes the slices that bridges and upgrades have left, and returns the slices' names. `own` is
/// this node's name if no bridge runs on this node, otherwise `None`.
///
/// # Errors
/// The cluster does not answer, or does not allow the removal.
pub async fn sweep_slices(client: &Client, own: Option<&str>) -> Result<Vec<String>, Error> {
    let removed = leftover_slices(client, own).await?;
    for name in &removed {
        remove_slice(client, name).await?;
        tracing::info!(
            slice = name,
            "removed an EndpointSlice that a killed command left in the Service kubernetes"
        );
    }
    Ok(removed)
}

/// Returns the names of slices that bridges and upgrades have left. A slice counts as left in three
/// cases:
///
/// - The node `own`, on which no bridge runs, has a bridge's slice.
/// - No node of the cluster has the boot ID of the slice. If the host is no Node of the cluster,
///   its boot is unknown, so the slice must also be silent (not renewed for `SILENT`).
/// - An upgrade's slice is silent, whatever its boot. The upgrade's process may be on another node
///   and cannot be asked; a running upgrade applies its slice again.
///
/// # Errors
/// The cluster cannot be asked.
pub async fn leftover_slices(client: &Client, own: Option<&str>) -> Result<Vec<String>, Error> {
    let items = |list: &Value| list["items"].as_array().cloned().unwrap_or_default();
    let slices = items(&client.get(service::SERVICE_SLICES).await?);
    let kept: Vec<_> = slices.iter().filter_map(KeptSlice::parse).collect();
    if kept.is_empty() {
        return Ok(Vec::new());
    }
    // Compare boot IDs, because a node's name in the cluster may differ from the host name in the
    // slice.
    let nodes = items(&client.get(NODES_PATH).await?);
    let booted = |boot: &str| {
        nodes
            .iter()
            .any(|node| node["status"]["nodeInfo"]["bootID"] == boot)
    };
    let is_node = |name: &str| {
        let names = |node: &Value| {
            [
                node["metadata"]["name"].clone(),
                node["metadata"]["labels"][HOST_NAME_LABEL].clone(),
            ]
        };
        nodes.iter().flat_map(names).any(|other| other == name)
    };
    let ended = kept.into_iter().filter(|slice| {
        let is_own = own == Some(slice.node) && slice.has_purpose(Purpose::Bridge);
        let is_gone = !booted(slice.boot) && (is_node(slice.node) || slice.is_renewal_overdue());
        is_own || is_gone || (slice.has_purpose(Purpose::Upgrade) && slice.is_renewal_overdue())
    });
    Ok(ended.map(|slice| slice.name.to_owned()).collect())
}

/// A slice of the Service that a bridge or an upgrade made, as its annotations describe it.
struct KeptSlice<'a> {
    name: &'a str,
    node: &'a str,
    boot: &'a str,
    renewed: Option<&'a str>,
}

impl<'a> KeptSlice<'a> {
    fn parse(slice: &'a Value) -> Option<Self> {
        let meta = &slice["metadata"];
        let is_ours = |name: &&str| {
            Purpose::ALL
                .iter()
                .any(|purpose| name.starts_with(purpose.slice_name_prefix()))
        };
        let name = meta["name"].as_str().filter(is_ours)?;
        let annotation = |name: &str| meta["annotations"][name].as_str();
        Some(Self {
            name,
            node: annotation(NODE_ANNOTATION)?,
            boot: annotation(BOOT_ANNOTATION)?,
            renewed: annotation(RENEWED_ANNOTATION),
        })
    }

    fn has_purpose(&self, purpose: Purpose) -> bool {
        self.name.starts_with(purpose.slice_name_prefix())
    }

    fn is_renewal_overdue(&self) -> bool {
        let renewed = self
            .renewed
            .and_then(|time| humantime::parse_rfc3339(time).ok());
        renewed.is_none_or(|renewed| renewed.elapsed().is_ok_and(|age| age >= LEFTOVER_AGE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::{Objects, format_answer, serve_with};
    use tokio::sync::mpsc::UnboundedReceiver;

    const IP: &str = "10.0.0.5";

    /// Starts a simulated cluster. kube-apiserver's slice has the addresses `named`, and berth's
    /// slices are `items`.
    async fn start_cluster(
        named: &[&str],
        items: Vec<Value>,
    ) -> (Objects, ServiceKeeper, UnboundedReceiver<(String, usize)>) {
        let objects = Objects::default();
        let reconciled =
            json!({"metadata": {"name": "kubernetes"}, "endpoints": [{"addresses": named}]});
        objects.set(RECONCILED_SLICE, Some(reconciled));
        objects.set(service::SLICES_PATH, Some(json!({"items": items})));
        objects.set(
            service::SERVICE_PATH,
            Some(json!({"spec": {"ports": [{"name": "https"}]}})),
        );
        let answers = objects.clone();
        let server = serve_with(move |request| answers.answer(request)).await;
        let client = Client::new(&server.access).unwrap();
        let address = SocketAddr::new(IP.parse().unwrap(), 6443);
        let keeper = ServiceKeeper {
            client,
            purpose: Purpose::Bridge,
            node: "cp-1".into(),
            boot: "b".into(),
            address,
        };
        (objects, keeper, server.asked)
    }

    /// Starts to keep the slice, with the demand of a node that serves.
    fn start_keeper_with_demand(keeper: ServiceKeeper) -> Keeping {
        let keeping = keeper.start_keeping_slice();
        keeping.set_demand(Demand::Serving);
        keeping
    }

    async fn stop_keeper_task(keeping: Keeping) {
        drop(keeping.demand);
        keeping.task.await.unwrap();
    }

    /// Makes the slice that a killed bridge has left. `age` is the time since its last renewal, if
    /// it was ever renewed.
    fn make_slice(node: &str, boot: &str, age: Option<Duration>) -> Value {
        let mut slice = service::build_slice(node, "10.0.0.9:6443".parse().unwrap(), "https");
        slice["metadata"]["name"] = format!("berth-bridge-{node}-ipv4").into();
        slice["metadata"]["annotations"] = json!({NODE_ANNOTATION: node, BOOT_ANNOTATION: boot});
        if let Some(age) = age {
            let time = humantime::format_rfc3339_seconds(SystemTime::now() - age);
            slice["metadata"]["annotations"][RENEWED_ANNOTATION] = time.to_string().into();
        }
        slice
    }

    #[tokio::test]
    async fn the_only_node_is_named_until_the_bridge_is_over() {
        let (objects, keeper, _asked) = start_cluster(&[], Vec::new()).await;
        let path = service::slice_path(&keeper.name());
        let mut keeping = start_keeper_with_demand(keeper);
        keeping
            .state
            .wait_for(|state| *state == Ok(true))
            .await
            .unwrap();
        let there = objects.get(&path).unwrap();
        assert_eq!(
            service::slice_addresses(&there).collect::<Vec<_>>(),
            [IP.parse::<IpAddr>().unwrap()]
        );
        let annotations = &there["metadata"]["annotations"];
        assert_eq!(
            (&annotations[NODE_ANNOTATION], &annotations[BOOT_ANNOTATION]),
            (&json!("cp-1"), &json!("b"))
        );
        let time =
            humantime::parse_rfc3339(annotations["berth/renewed"].as_str().unwrap()).unwrap();
        assert!(
            time.elapsed()
                .is_ok_and(|age| age < Duration::from_secs(600)),
            "{annotations}"
        );
        // kube-apiserver does not list the node yet, so the slice is removed only after the bridge
        // has ended.
        keeping.set_demand(Demand::Ending);
        stop_keeper_task(keeping).await;
        assert_eq!(objects.get(&path), None);
    }

    #[tokio::test]
    async fn a_slice_has_the_family_of_the_address_that_the_node_advertises() {
        let (objects, keeper, _asked) = start_cluster(&[], Vec::new()).await;
        let keeper = ServiceKeeper {
            address: "[fd00::5]:6443".parse().unwrap(),
            ..keeper
        };
        // The Service has IPv4 only. kube-proxy would ignore an IPv6 slice, so the check fails.
        keeper.check_access().await.unwrap_err();
        let ports = json!([{"name": "https"}]);
        objects.set(
            service::SERVICE_PATH,
            Some(json!({"spec": {"ipFamilies": ["IPv6", "IPv4"], "ports": ports}})),
        );
        keeper.check_access().await.unwrap();
        let mut keeping = start_keeper_with_demand(keeper);
        keeping
            .state
            .wait_for(|state| *state == Ok(true))
            .await
            .unwrap();
        let there = objects
            .get(&service::slice_path("berth-bridge-cp-1-ipv6"))
            .unwrap();
        assert_eq!(there["addressType"], "IPv6");
        assert_eq!(
            service::slice_addresses(&there).collect::<Vec<_>>(),
            ["fd00::5".parse::<IpAddr>().unwrap()]
        );
    }

    #[tokio::test]
    async fn check_tries_the_write_as_a_dry_run() {
        let (objects, keeper, mut asked) = start_cluster(&[], Vec::new()).await;
        keeper.check_access().await.unwrap();
        assert_eq!(objects.get(&service::slice_path(&keeper.name())), None);
        let mut tried = std::iter::from_fn(|| asked.try_recv().ok());
        assert!(
            tried
                .any(|(request, _)| request.starts_with("PATCH") && request.contains("dryRun=All"))
        );
    }

    /// A request is forbidden, so the Service stays as it is. The operator has to learn the reason.
    #[tokio::test]
    async fn an_operator_who_may_not_write_or_not_read_is_told() {
        for refused in ["PATCH /", RECONCILED_SLICE] {
            let (objects, keeper, _asked) = start_cluster(&[], Vec::new()).await;
            let server = serve_with(move |request| match request.contains(refused) {
                true => format_answer(
                    "403 Forbidden",
                    r#"{"message": "endpointslices is forbidden"}"#,
                ),
                false => objects.answer(request),
            });
            let keeper = ServiceKeeper {
                client: Client::new(&server.await.access).unwrap(),
                ..keeper
            };
            let is_told = |why: &String| why.contains("endpointslices is forbidden");
            assert!(
                keeper.check_access().await.is_err_and(|why| is_told(&why)),
                "{refused}"
            );
            start_keeper_with_demand(keeper)
                .state
                .wait_for(|state| state.as_ref().is_err_and(is_told))
                .await
                .unwrap();
        }
    }

    /// The Service lists another node, so a node that does not serve must be removed from it.
    #[tokio::test]
    async fn a_node_that_serves_nothing_is_taken_out() {
        let (objects, keeper, _asked) = start_cluster(&["10.0.0.6"], Vec::new()).await;
        let keeper = ServiceKeeper {
            purpose: Purpose::Upgrade,
            ..keeper
        };
        let path = service::slice_path(&keeper.name());
        // The slice exists from before, as it does for an upgrade that is resumed.
        objects.set(&path, Some(keeper.build_slice().await.unwrap()));
        let mut keeping = start_keeper_with_demand(keeper);
        keeping.state.wait_for(SliceState::is_ok).await.unwrap();
        assert!(objects.get(&path).is_some());
        keeping.set_demand(Demand::NotServing);
        while objects.get(&path).is_some() {
            sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn the_only_node_stays_named_when_it_serves_nothing() {
        let (objects, keeper, _asked) = start_cluster(&[], Vec::new()).await;
        let path = service::slice_path(&keeper.name());
        let mut keeping = start_keeper_with_demand(keeper);
        keeping
            .state
            .wait_for(|state| *state == Ok(true))
            .await
            .unwrap();
        keeping.set_demand(Demand::NotServing);
        let out = timeout(
            Duration::from_millis(200),
            keeping.state.wait_for(|state| *state != Ok(true)),
        )
        .await;
        assert!(out.is_err() && objects.get(&path).is_some());
    }

    #[tokio::test]
    async fn a_silent_api_is_asked_again_and_a_refusing_api_is_not() {
        let slice = json!({"addressType": "IPv4", "endpoints": [{"addresses": [IP]}]}).to_string();
        let mut answers = vec![
            format_answer("403 Forbidden", "{}"),
            format_answer("200 OK", &slice),
            "no HTTP\r\n\r\n".into(),
        ];
        let server = serve_with(move |_| answers.pop().unwrap()).await;
        let (_, keeper, _) = start_cluster(&[], Vec::new()).await;
        let keeper = ServiceKeeper {
            client: Client::new(&server.access).unwrap(),
            ..keeper
        };
        assert!(keeper.service_names_node().await.unwrap());
        assert_eq!(
            keeper.service_names_node().await.unwrap_err().status(),
            Some(hyper::StatusCode::FORBIDDEN)
        );
    }

    #[tokio::test]
    async fn no_slice_is_kept_if_other_nodes_serve() {
        let (objects, keeper, mut asked) = start_cluster(&["10.0.0.6"], Vec::new()).await;
        let path = service::slice_path(&keeper.name());
        let mut keeping = start_keeper_with_demand(keeper);
        keeping.state.wait_for(SliceState::is_ok).await.unwrap();
        stop_keeper_task(keeping).await;
        assert_eq!(objects.get(&path), None);
        while let Ok((request, _)) = asked.try_recv() {
            assert!(!request.starts_with("PATCH"), "{request}");
        }
    }

    #[tokio::test]
    async fn slices_of_ended_bridges_and_upgrades_are_found() {
        let [short, long] = [2, 20].map(|minutes| Some(Duration::from_secs(minutes * 60)));
        let mut nameless = make_slice("x", "b", None);
        nameless["metadata"]["annotations"] = json!({NODE_ANNOTATION: "x"});
        // Makes the slice of an upgrade. Its node has not booted since.
        let upgrade = |node: &str, age| {
            let mut slice = make_slice(node, "3", age);
            slice["metadata"]["name"] = format!("berth-upgrade-{node}-ipv4").into();
            slice
        };
        let all = vec![
            make_slice("own", "1", None),
            make_slice("booted", "2", None),
            make_slice("bridged", "3", None),
            make_slice("gone", "4", None),
            nameless,
            // Slices of two hosts that are no Node of the cluster, and of one host that is.
            make_slice("no-node", "5", short),
            make_slice("silent", "5", long),
            make_slice("a-node", "5", short),
            upgrade("running", short),
            upgrade("killed", long),
        ];
        let (objects, keeper, _) = start_cluster(&[], all).await;
        let node = |boot| json!({"metadata": {"name": "a-node"}, "status": {"nodeInfo": {"bootID": boot}}});
        objects.set(
            NODES_PATH,
            Some(json!({"items": [node("1"), node("later"), node("3")]})),
        );
        let names = |nodes: &[&str]| {
            let bridges = nodes.iter().map(|node| format!("berth-bridge-{node}-ipv4"));
            bridges
                .chain(["berth-upgrade-killed-ipv4".into()])
                .collect::<Vec<_>>()
        };
        assert_eq!(
            leftover_slices(&keeper.client, None).await.unwrap(),
            names(&["booted", "gone", "silent", "a-node"])
        );
        assert_eq!(
            leftover_slices(&keeper.client, Some("own")).await.unwrap(),
            names(&["own", "booted", "gone", "silent", "a-node"])
        );
    }
}
