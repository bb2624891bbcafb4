//! The node's address in the Service `kubernetes`, while `berth bridge` or `berth upgrade` replaces
//! an instance.
//!
//! A kube-apiserver that stops removes its address, even if another instance of the node serves,
//! and the address is put back up to 10 s later. In between, the only control-plane node would be
//! missing in the Service. Meanwhile berth keeps an EndpointSlice for the node, by the rule of the
//! shims' slices ([`berth_keeper::rule`]) and with the operator's credentials, which the running
//! cluster does not need.
//!
//! A slice left by a killed command is recognized by its node and boot, and for an upgrade also by
//! the time of its last renewal. The next bridge or upgrade removes the slice, and so does any
//! `berth bridge end`. An upgrade that is resumed soon takes over its own slice.

use berth_cluster::client::none_if_missing;
use berth_cluster::service::{self, Family, LOOK, MANAGER, RECONCILED};
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

/// Timeout of a request. After a timeout, another instance is asked.
const PATIENCE: Duration = Duration::from_secs(2);

/// Consequence for pods under a bridge if the Service cannot be kept.
pub const LOST: &str = "the Service kubernetes is not kept: on the only control-plane node, pods lose it while COMMAND restarts kube-apiserver";

const NODES: &str = "/api/v1/nodes";

/// Label of a Node with the host's name, which may differ from the Node's name.
const HOST_NAME: &str = "kubernetes.io/hostname";

/// Maximum time until kube-apiserver lists an instance: a round of its reconciler, and a margin.
const ROUND: Duration = Duration::from_secs(11);

/// Time between two checks of kube-apiserver's list.
const AGAIN: Duration = Duration::from_millis(500);

/// Maximum time for the API to remove a slice at the end.
const WITHDRAWAL: Duration = Duration::from_secs(5);

/// Annotations of a slice: its node, the node's boot, and the time of the last renewal.
const NODE: &str = "berth/node";
const BOOT: &str = "berth/boot-id";
const RENEWED: &str = "berth/renewed";

/// Time between two renewals of a slice. Each renewal is an event for all kube-proxies.
const RENEWAL: Duration = Duration::from_secs(60);

/// Age of the last renewal from which a slice counts as left by a killed command. The clocks of two
/// hosts may differ by minutes.
const SILENT: Duration = Duration::from_secs(600);

/// Why the Service's state is unknown.
pub const UNKNOWN: &str = "its EndpointSlices have not been read";

/// True if the slice is in the Service; an error if the slice should be there and may not be.
pub type SliceState = Result<bool, String>;

/// The command that keeps a slice. The purpose is part of the slice's name: a node has at most one
/// slice of a bridge and one of an upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Bridge,
    Upgrade,
}

impl Purpose {
    const ALL: [Self; 2] = [Self::Bridge, Self::Upgrade];

    fn prefix(self) -> &'static str {
        match self {
            Self::Bridge => "berth-bridge-",
            Self::Upgrade => "berth-upgrade-",
        }
    }
}

/// Says whether the node should have a slice, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand {
    /// An instance of this node serves.
    Serving,
    /// No instance of this node serves, so the slice is removed if another node is in the Service.
    NotServing,
    /// The slice is needed only until kube-apiserver lists the node itself.
    Ending,
}

/// Keeps a node's address in the Service.
#[derive(Debug, Clone)]
pub struct ServiceKeeper {
    client: Client,
    purpose: Purpose,
    node: String,
    boot: String,
    /// The address that the node's instances advertise.
    address: SocketAddr,
}

/// Handle of a kept slice. The slice is removed when the handle is dropped.
#[derive(Debug)]
pub struct Keeping {
    name: String,
    demand: watch::Sender<Demand>,
    state: watch::Receiver<SliceState>,
    task: JoinHandle<()>,
}

impl Keeping {
    pub fn demand(&self, demand: Demand) {
        self.demand
            .send_if_modified(|was| std::mem::replace(was, demand) != demand);
    }

    pub fn state(&self) -> SliceState {
        self.state.borrow().clone()
    }

    /// Waits until kube-apiserver lists the node itself and the slice is removed, for `ROUND` at
    /// most.
    pub async fn hand_back(&mut self) {
        self.demand(Demand::Ending);
        let _ = timeout(ROUND, self.state.wait_for(|state| *state == Ok(false))).await;
    }

    /// Removes the slice.
    ///
    /// # Errors
    /// The slice's name, if the slice may still exist.
    pub async fn end(self) -> Result<(), String> {
        let Self {
            name, demand, task, ..
        } = self;
        drop(demand);
        timeout(WITHDRAWAL, task).await.map(drop).map_err(|_| name)
    }
}

impl ServiceKeeper {
    /// Uses the credentials of an operator's `client`.
    ///
    /// # Errors
    /// The boot id cannot be read.
    pub fn new(client: &Client, purpose: Purpose, address: SocketAddr) -> Result<Self, String> {
        let boot =
            clock::boot_id().map_err(|error| format!("the boot id cannot be read: {error}"))?;
        let client = client.clone().with_patience(PATIENCE);
        Ok(Self {
            client,
            purpose,
            node: host_name(),
            boot,
            address,
        })
    }

    /// Asks these instances instead of the kubeconfig's server.
    #[must_use]
    pub fn at(mut self, instances: impl IntoIterator<Item = SocketAddr>) -> Self {
        self.client = self.client.at(instances);
        self
    }

    /// Checks that the Service may be read and the slice written (as a dry run). The slice counts
    /// only in an address family of the Service.
    ///
    /// # Errors
    /// Reading or writing is forbidden, the address family is wrong, or the cluster does not
    /// answer.
    pub async fn check(&self) -> Result<(), String> {
        let (ip, text) = (self.address.ip(), |error: Error| error.to_string());
        self.client.get(service::OF_SERVICE).await.map_err(text)?;
        let families =
            service::Service::parse(&self.client.get(service::SERVICE).await.map_err(text)?)
                .families;
        if !families.contains(&Family::of(ip)) {
            let families = families
                .iter()
                .map(|family| family.as_str())
                .collect::<Vec<_>>()
                .join(" and ");
            return Err(format!(
                "the Service kubernetes has addresses of {families}, and the node's kube-apiserver advertises {ip}: give it \
                 another with --advertise-address"
            ));
        }
        let slice = self.slice().await.map_err(text)?;
        self.client
            .try_apply(&service::slice_path(&self.name()), MANAGER, &slice)
            .await
            .map_err(text)?;
        self.listed_addresses().await.map(drop).map_err(text)
    }

    /// True if kube-apiserver lists the node. If the node is missing because an instance stopped a
    /// moment ago, or if an API server does not answer at once, the question is repeated for
    /// `ROUND`.
    ///
    /// # Errors
    /// The API cannot be asked.
    pub async fn names_node(&self) -> Result<bool, Error> {
        let ask = async || {
            self.listed_addresses()
                .await
                .map(|named| named.contains(&self.address.ip()))
        };
        let counts = |named: &Result<bool, Error>| match named {
            Ok(named) => *named,
            Err(error) => error.status().is_some(),
        };
        ask_until(ROUND, AGAIN, ask, counts).await
    }

    /// The addresses in the slice that kube-apiserver keeps.
    async fn listed_addresses(&self) -> Result<Vec<IpAddr>, Error> {
        let slice = none_if_missing(self.client.get(RECONCILED).await)?.unwrap_or_default();
        Ok(service::slice_addresses(&slice).collect())
    }

    /// Keeps a slice as demanded. Before an instance serves, there is no slice.
    #[must_use]
    pub fn start(self) -> Keeping {
        let (demand, demanded) = watch::channel(Demand::Ending);
        let (sender, state) = watch::channel(Err(UNKNOWN.into()));
        Keeping {
            name: self.name(),
            demand,
            state,
            task: tokio::spawn(self.keep(demanded, sender)),
        }
    }

    /// Keeps the slice until the sender of `demanded` is dropped, and then removes the slice in any
    /// case.
    async fn keep(self, mut demanded: watch::Receiver<Demand>, state: watch::Sender<SliceState>) {
        let mut rule = Rule::default();
        // The Service is not read before an instance serves.
        let mut reads_service = false;
        // `tried` is true if the slice may exist: a write without an answer may have been carried
        // out, and a resumed upgrade may have a slice from before.
        let (mut there, mut tried) = (false, self.purpose == Purpose::Upgrade);
        // Time of the last apply. Afterwards, someone else may have removed the slice.
        let mut applied: Option<Instant> = None;
        let mut in_trouble = false;
        loop {
            let demand = *demanded.borrow_and_update();
            if demand == Demand::Serving && !reads_service {
                // A resumed upgrade goes on with its own slice.
                let own = Some(&*self.node).filter(|_| self.purpose == Purpose::Bridge);
                if let Err(error) = sweep_slices(&self.client, own).await {
                    tracing::info!(%error, "EndpointSlices left in the Service kubernetes by earlier commands were not looked for");
                }
                reads_service = true;
            }
            let read = async {
                match reads_service {
                    true => self
                        .listed_addresses()
                        .await
                        .map_err(|error| error.to_string()),
                    false => Err(UNKNOWN.into()),
                }
            };
            let addresses = tokio::select! {
                // The loop reads the new demand.
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
                // Removal of the slice while no other node is listed would leave the Service empty.
                // One bad sample is not enough reason for an empty Service.
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
                    if there && applied.is_some_and(|at| at.elapsed() < lease::RENEWAL) =>
                {
                    Ok(true)
                }
                SliceDecision::Present => {
                    (tried, applied) = (true, Some(Instant::now()));
                    self.apply().await.map(|()| true)
                }
                // At the end, the slice stays until kube-apiserver lists the node itself.
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
                // If the addresses cannot be read, a state that is known already stays as it is.
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
                    // An upgrade prints a lasting error itself.
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
                () = sleep(LOOK) => {}
            }
        }
        if tried && let Err(error) = remove_slice(&self.client, &self.name()).await {
            tracing::warn!(
                code = %explained::SLICE_STAYS,
                %error,
                slice = self.name(),
                "the slice stays in the Service kubernetes: remove it"
            );
        }
    }

    fn name(&self) -> String {
        format!(
            "{}{}-{}",
            self.purpose.prefix(),
            self.node,
            Family::of(self.address.ip()).as_str().to_ascii_lowercase()
        )
    }

    async fn apply(&self) -> Result<(), Error> {
        self.client
            .apply(
                &service::slice_path(&self.name()),
                MANAGER,
                &self.slice().await?,
            )
            .await
            .map(drop)
    }

    async fn slice(&self) -> Result<Value, Error> {
        let port_name =
            service::Service::parse(&self.client.get(service::SERVICE).await?).port_name;
        let mut slice = service::build_slice(&self.node, self.address, &port_name);
        slice["metadata"]["name"] = self.name().into();
        slice["metadata"]["annotations"] =
            json!({NODE: self.node, BOOT: self.boot, RENEWED: renewal_time()});
        Ok(slice)
    }
}

/// The time of the last due renewal: the current time, rounded down to a multiple of `RENEWAL`.
fn renewal_time() -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    humantime::format_rfc3339_seconds(
        UNIX_EPOCH + Duration::from_secs(now - now % RENEWAL.as_secs()),
    )
    .to_string()
}

async fn remove_slice(client: &Client, name: &str) -> Result<(), Error> {
    none_if_missing(client.delete(&service::slice_path(name)).await).map(drop)
}

/// Removes the slices of bridges and upgrades that have ended, and returns their names. `own` is
/// this node's name, if no bridge runs on the node.
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

/// Names of the slices of bridges and upgrades that have ended. A slice is left over in three
/// cases:
///
/// - The node `own`, on which no bridge runs, has a bridge's slice.
/// - No node of the cluster runs the slice's boot. If the host is no Node of the cluster, its boot
///   is unknown, so the slice must also be silent (not renewed for `SILENT`).
/// - An upgrade's slice is silent, whatever its boot. The upgrade's process may be on another node
///   and cannot be asked; a running upgrade applies its slice again.
///
/// # Errors
/// The cluster cannot be asked.
pub async fn leftover_slices(client: &Client, own: Option<&str>) -> Result<Vec<String>, Error> {
    let items = |list: &Value| list["items"].as_array().cloned().unwrap_or_default();
    let slices = items(&client.get(service::OF_SERVICE).await?);
    let kept: Vec<_> = slices.iter().filter_map(KeptSlice::parse).collect();
    if kept.is_empty() {
        return Ok(Vec::new());
    }
    // Nodes are matched by boot id, since a node's name in the cluster may differ from its host
    // name.
    let nodes = items(&client.get(NODES).await?);
    let booted = |boot: &str| {
        nodes
            .iter()
            .any(|node| node["status"]["nodeInfo"]["bootID"] == boot)
    };
    let is_node = |name: &str| {
        let names = |node: &Value| {
            [
                node["metadata"]["name"].clone(),
                node["metadata"]["labels"][HOST_NAME].clone(),
            ]
        };
        nodes.iter().flat_map(names).any(|other| other == name)
    };
    let ended = kept.into_iter().filter(|slice| {
        let is_own = own == Some(slice.node) && slice.is_of(Purpose::Bridge);
        let is_gone = !booted(slice.boot) && (is_node(slice.node) || slice.is_silent());
        is_own || is_gone || (slice.is_of(Purpose::Upgrade) && slice.is_silent())
    });
    Ok(ended.map(|slice| slice.name.to_owned()).collect())
}

/// A slice that a bridge or an upgrade keeps.
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
                .any(|purpose| name.starts_with(purpose.prefix()))
        };
        let name = meta["name"].as_str().filter(is_ours)?;
        let annotation = |name: &str| meta["annotations"][name].as_str();
        Some(Self {
            name,
            node: annotation(NODE)?,
            boot: annotation(BOOT)?,
            renewed: annotation(RENEWED),
        })
    }

    fn is_of(&self, purpose: Purpose) -> bool {
        self.name.starts_with(purpose.prefix())
    }

    fn is_silent(&self) -> bool {
        let renewed = self
            .renewed
            .and_then(|time| humantime::parse_rfc3339(time).ok());
        renewed.is_none_or(|renewed| renewed.elapsed().is_ok_and(|age| age >= SILENT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::{Objects, format_answer, serve_with};
    use tokio::sync::mpsc::UnboundedReceiver;

    const IP: &str = "10.0.0.5";

    /// A cluster with these addresses in the slice that kube-apiserver keeps.
    async fn start_cluster(
        named: &[&str],
        items: Vec<Value>,
    ) -> (Objects, ServiceKeeper, UnboundedReceiver<(String, usize)>) {
        let objects = Objects::default();
        let reconciled =
            json!({"metadata": {"name": "kubernetes"}, "endpoints": [{"addresses": named}]});
        objects.set(RECONCILED, Some(reconciled));
        objects.set(service::SLICES, Some(json!({"items": items})));
        objects.set(
            service::SERVICE,
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

    /// Keeps the slice of a node that serves.
    fn start_serving(keeper: ServiceKeeper) -> Keeping {
        let keeping = keeper.start();
        keeping.demand(Demand::Serving);
        keeping
    }

    async fn end_keeping(keeping: Keeping) {
        drop(keeping.demand);
        keeping.task.await.unwrap();
    }

    /// The slice of a killed bridge. `age` is the time since its last renewal, if known.
    fn slice(node: &str, boot: &str, age: Option<Duration>) -> Value {
        let mut slice = service::build_slice(node, "10.0.0.9:6443".parse().unwrap(), "https");
        slice["metadata"]["name"] = format!("berth-bridge-{node}-ipv4").into();
        slice["metadata"]["annotations"] = json!({NODE: node, BOOT: boot});
        if let Some(age) = age {
            let time = humantime::format_rfc3339_seconds(SystemTime::now() - age);
            slice["metadata"]["annotations"][RENEWED] = time.to_string().into();
        }
        slice
    }

    #[tokio::test]
    async fn the_only_node_is_named_until_the_bridge_is_over() {
        let (objects, keeper, _asked) = start_cluster(&[], Vec::new()).await;
        let path = service::slice_path(&keeper.name());
        let mut keeping = start_serving(keeper);
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
            (&annotations[NODE], &annotations[BOOT]),
            (&json!("cp-1"), &json!("b"))
        );
        let time =
            humantime::parse_rfc3339(annotations["berth/renewed"].as_str().unwrap()).unwrap();
        assert!(
            time.elapsed()
                .is_ok_and(|age| age < Duration::from_secs(600)),
            "{annotations}"
        );
        // kube-apiserver does not list the node yet, so no removal is requested before the bridge
        // has ended.
        keeping.demand(Demand::Ending);
        end_keeping(keeping).await;
        assert_eq!(objects.get(&path), None);
    }

    #[tokio::test]
    async fn a_slice_has_the_family_of_the_address_that_the_node_advertises() {
        let (objects, keeper, _asked) = start_cluster(&[], Vec::new()).await;
        let keeper = ServiceKeeper {
            address: "[fd00::5]:6443".parse().unwrap(),
            ..keeper
        };
        // kube-proxy ignores slices of an address family that the Service does not have.
        let why = keeper.check().await.unwrap_err();
        assert!(
            why.contains("has addresses of IPv4, and") && why.contains("fd00::5: give it"),
            "{why}"
        );
        let ports = json!([{"name": "https"}]);
        objects.set(
            service::SERVICE,
            Some(json!({"spec": {"ipFamilies": ["IPv6", "IPv4"], "ports": ports}})),
        );
        keeper.check().await.unwrap();
        let mut keeping = start_serving(keeper);
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
        keeper.check().await.unwrap();
        assert_eq!(objects.get(&service::slice_path(&keeper.name())), None);
        let mut tried = std::iter::from_fn(|| asked.try_recv().ok());
        assert!(
            tried
                .any(|(request, _)| request.starts_with("PATCH") && request.contains("dryRun=All"))
        );
    }

    /// If a request is forbidden, the Service stays as it is, and the operator has to know the
    /// reason.
    #[tokio::test]
    async fn an_operator_who_may_not_write_or_not_read_is_told() {
        for refused in ["PATCH /", RECONCILED] {
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
                keeper.check().await.is_err_and(|why| is_told(&why)),
                "{refused}"
            );
            start_serving(keeper)
                .state
                .wait_for(|state| state.as_ref().is_err_and(is_told))
                .await
                .unwrap();
        }
    }

    /// Other nodes serve, so a node that does not serve must not be in the Service.
    #[tokio::test]
    async fn a_node_that_serves_nothing_is_taken_out() {
        let (objects, keeper, _asked) = start_cluster(&["10.0.0.6"], Vec::new()).await;
        let keeper = ServiceKeeper {
            purpose: Purpose::Upgrade,
            ..keeper
        };
        let path = service::slice_path(&keeper.name());
        // The slice exists already, as for a resumed upgrade.
        objects.set(&path, Some(keeper.slice().await.unwrap()));
        let mut keeping = start_serving(keeper);
        keeping.state.wait_for(SliceState::is_ok).await.unwrap();
        assert!(objects.get(&path).is_some());
        keeping.demand(Demand::NotServing);
        while objects.get(&path).is_some() {
            sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn the_only_node_stays_named_when_it_serves_nothing() {
        let (objects, keeper, _asked) = start_cluster(&[], Vec::new()).await;
        let path = service::slice_path(&keeper.name());
        let mut keeping = start_serving(keeper);
        keeping
            .state
            .wait_for(|state| *state == Ok(true))
            .await
            .unwrap();
        keeping.demand(Demand::NotServing);
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
        assert!(keeper.names_node().await.unwrap());
        assert_eq!(
            keeper.names_node().await.unwrap_err().status(),
            Some(hyper::StatusCode::FORBIDDEN)
        );
    }

    #[tokio::test]
    async fn no_slice_is_kept_if_other_nodes_serve() {
        let (objects, keeper, mut asked) = start_cluster(&["10.0.0.6"], Vec::new()).await;
        let path = service::slice_path(&keeper.name());
        let mut keeping = start_serving(keeper);
        keeping.state.wait_for(SliceState::is_ok).await.unwrap();
        end_keeping(keeping).await;
        assert_eq!(objects.get(&path), None);
        while let Ok((request, _)) = asked.try_recv() {
            assert!(!request.starts_with("PATCH"), "{request}");
        }
    }

    #[tokio::test]
    async fn slices_of_ended_bridges_and_upgrades_are_found() {
        let [short, long] = [2, 20].map(|minutes| Some(Duration::from_secs(minutes * 60)));
        let mut nameless = slice("x", "b", None);
        nameless["metadata"]["annotations"] = json!({NODE: "x"});
        // An upgrade's slice, on a node that has not booted since.
        let upgrade = |node: &str, age| {
            let mut slice = slice(node, "3", age);
            slice["metadata"]["name"] = format!("berth-upgrade-{node}-ipv4").into();
            slice
        };
        let all = vec![
            slice("own", "1", None),
            slice("booted", "2", None),
            slice("bridged", "3", None),
            slice("gone", "4", None),
            nameless,
            // Two hosts that are no Node of the cluster, and one host that is a Node.
            slice("no-node", "5", short),
            slice("silent", "5", long),
            slice("a-node", "5", short),
            upgrade("running", short),
            upgrade("killed", long),
        ];
        let (objects, keeper, _) = start_cluster(&[], all).await;
        let node = |boot| json!({"metadata": {"name": "a-node"}, "status": {"nodeInfo": {"bootID": boot}}});
        objects.set(
            NODES,
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
