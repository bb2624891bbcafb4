//! The direct path: outside of changes, the kernel steers new IPv4 connections to the instance's own listener. No bytes are relayed,
//! and the instance sees the client's address. The shims' listeners get the connections that are not steered.
//!
//! It is calm when one instance is known and ready ([`target`]), and all shims are joined and can steer to it ([`Turn`]). During every
//! change (a start, a stop, a drain, a probe that fails, an accept queue that is full or not accepted from) the shims relay, because only
//! they replay and hold: on the direct path a killed instance resets its queue. One shim steers at a time, by a descriptor:
//! when its process ends in whatever way, the shims' listeners get new connections at once, and open ones, which are the instance's, live
//! on. When it hangs, its lease in the program's memory expires (`steering`). So nothing of it is on disk, and of what versions have to
//! agree on there is one field of the announcement.
//!
//! Another program that steers the port, such as a bridge's, has precedence, whichever began first: then the direct path has no effect.
//!
//! The listener is found by its address (`berth_os::bpf`), so no process has to pass a descriptor of it, and a
//! restarted shim finds it again.

use crate::backend::Table;
use crate::config::{CROWD, DirectMode, is_steered};
use crate::family::{counter, gauge};
use crate::state::{ShimState, Turn};
use crate::steering::{self, Counters, Purpose, Steering};
use berth_node::instance::InstanceId;
use berth_node::ipc::wire::DirectStatus;
use berth_node::terms::{InstanceHealth, shortened};
use berth_os::off_thread::OffThread;
use berth_os::{process, sock_diag};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long a count of open connections is valid: the kernel takes 1 µs a connection.
const COUNTED: Duration = Duration::from_millis(500);

/// How long an instance must go on serving after the direct path to it is off: a client whose handshake began before still gets it,
/// and a lost SYN-ACK is sent again after one second and three.
const HANDSHAKES: Duration = Duration::from_secs(5);

/// How long the shims get new connections after the last reason for it, such as a change, a crowd or steering that failed: longer
/// than an instance whose shim is gone serves until a probe of it fails, and long enough not to flap.
const QUIET: Duration = Duration::from_secs(8);

/// Window in which new connections are counted, and how often the count is checked.
const COUNTED_FOR: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_millis(250);

/// How long the kernel may take to make the programs, while nothing is steered.
const MAKING: Duration = Duration::from_secs(5);

/// Longest validity of one renewal, however long a sibling waits for a sign of life.
const LONGEST_LEASE: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no --listen address is one of IPv4 outside of 127.0.0.0/8, and those alone are steered: give one, or --direct off"
    )]
    NoAddress,
    #[error("{0}")]
    Steering(#[from] steering::Error),
}

/// A shim's part in the direct path.
#[derive(Debug)]
pub(crate) struct Direct {
    /// The addresses that are steered, by their ports.
    steered: BTreeMap<u16, Vec<Ipv4Addr>>,
    /// The others: their clients are always relayed.
    relayed: Vec<SocketAddr>,
    lease: Duration,
    /// This many new connections a second are a crowd, if there is a gate for them.
    crowd: Option<u64>,
    /// For all that the kernel is asked, and told but by memory.
    kernel: OffThread,
    now: Mutex<PathState>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Path {
    /// This shim steers to it.
    On(InstanceId),
    /// A sibling steers, or soon will.
    Sibling,
    /// The shims relay, and why.
    Off(String),
    /// They do, since it cannot be steered to, and why.
    Failed(String),
}

impl Path {
    /// Why this shim does not steer.
    fn why_not(&self) -> Option<&str> {
        match self {
            Self::On(_) => None,
            Self::Sibling => Some("a sibling steers"),
            Self::Off(why) | Self::Failed(why) => Some(why),
        }
    }

    /// This shim or a sibling steers.
    fn is_calm(&self) -> bool {
        matches!(self, Self::On(_) | Self::Sibling)
    }
}

#[derive(Debug)]
struct PathState {
    path: Path,
    /// Since when no shim steers; another one may have before this one started.
    ended: Option<Instant>,
    /// Until when the shims relay although it is calm.
    quiet: Instant,
    /// Open ones, as the kernel last listed them.
    open: Option<(Instant, u64)>,
    /// The accept queue as it was last sampled.
    sample: Option<QueueSample>,
    /// Connections that this shim steered with what is off again.
    opened: u64,
    /// What is on.
    ports: Weak<Vec<Steering>>,
}

impl PathState {
    fn opened(&self) -> u64 {
        self.opened + self.ports.upgrade().map_or(0, |ports| sum(&ports, |counters| counters.steered))
    }
}

/// What is to be steered to: an instance's listener, and another number for each process that listened there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    instance: InstanceId,
    pub(crate) address: SocketAddrV4,
    epoch: u64,
}

/// A sample of the accept queue, and the number of connections steered to it by then.
#[derive(Debug, Clone, Copy)]
struct QueueSample {
    listener: SocketAddrV4,
    at: Instant,
    waiting: u64,
    steered: u64,
    /// Since the previous sample, none of the waiting clients was accepted.
    stands_still: bool,
}

/// How many new connections there are a second. Pure.
#[derive(Debug)]
struct Pace {
    /// More are a crowd.
    most: u64,
    /// When the current second began, and the number of all connections by then.
    began: Instant,
    count: u64,
}

impl Pace {
    /// Whether a crowd has come in the current second, given the number of all connections so far.
    fn is_crowd(&mut self, count: u64, now: Instant) -> bool {
        let is_crowd = count > self.count + self.most;
        if now >= self.began + COUNTED_FOR {
            (self.began, self.count) = (now, count);
        }
        is_crowd
    }
}

/// Steering of each port, while it is on.
#[derive(Debug)]
struct SteeredPorts {
    target: Target,
    ports: Arc<Vec<Steering>>,
    /// Connections that did not get its listener until it was found last.
    failed: u64,
}

/// Turns it off with the shim, in whatever order its parts end.
struct Ends<'a> {
    direct: &'a Direct,
    on: Option<SteeredPorts>,
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.direct.off(&mut self.on);
        self.direct.record(Path::Off("the shim ends".to_owned()), Instant::now());
    }
}

impl Direct {
    /// The direct path of a berth on these addresses, if `mode` allows it and `self_test` passes.
    ///
    /// # Errors
    /// It is required and impossible.
    pub(crate) async fn new(
        mode: DirectMode,
        addresses: impl Iterator<Item = SocketAddr>,
        lease: Duration,
        has_gate: bool,
        self_test: impl Future<Output = Result<(), steering::Error>>,
    ) -> Result<Option<Arc<Self>>, Error> {
        if mode == DirectMode::Off {
            return Ok(None);
        }
        let mut steered = BTreeMap::<u16, Vec<Ipv4Addr>>::new();
        let mut relayed = Vec::new();
        for address in addresses {
            match address {
                SocketAddr::V4(v4) if is_steered(&address) => steered.entry(v4.port()).or_default().push(*v4.ip()),
                other => relayed.push(other),
            }
        }
        let tested = if steered.is_empty() { Err(Error::NoAddress) } else { self_test.await.map_err(Error::from) };
        match tested {
            Ok(()) => {
                let addresses: Vec<_> = addresses_of(&steered).collect();
                tracing::info!(
                    ?addresses,
                    ?relayed,
                    "the direct path can be: in calm, new connections go to the instance itself"
                );
                let path = Path::Off("not joined yet".to_owned());
                let at = Instant::now();
                let ports = Weak::new();
                let now = PathState { path, ended: Some(at), quiet: at, open: None, sample: None, opened: 0, ports };
                let lease = lease.min(LONGEST_LEASE);
                let crowd = has_gate.then(|| u64::from(CROWD) * process::cpus() as u64);
                let kernel = OffThread::new("the kernel");
                Ok(Some(Arc::new(Self { steered, relayed, lease, crowd, kernel, now: Mutex::new(now) })))
            }
            Err(error) if mode == DirectMode::Auto => {
                tracing::info!("--direct auto: no direct path, every connection is relayed: {error}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Steers while it is calm and this shim's turn, until the senders of either are gone. Ended or dropped, it no longer steers.
    /// `relayed` gives the number of all connections relayed so far.
    pub(crate) async fn keep(
        &self,
        mut table: watch::Receiver<Arc<Table>>,
        mut state: watch::Receiver<ShimState>,
        relayed: impl Fn() -> u64,
    ) {
        let mut on = Ends { direct: self, on: None };
        let opened = || self.now().opened() + relayed();
        let mut pace = self.crowd.map(|most| Pace { most, began: Instant::now(), count: opened() });
        loop {
            let calm = calm(state.borrow_and_update().turn, &table.borrow_and_update());
            let is_crowd = pace.as_mut().is_some_and(|pace| pace.is_crowd(opened(), Instant::now()));
            let calm = if is_crowd { Err("a crowd comes: it goes through the gate".to_owned()) } else { calm };
            let path = self.choose(&mut on.on, calm, Instant::now()).await;
            if !matches!(path, Path::On(_)) {
                self.off(&mut on.on);
            }
            self.record(path, Instant::now());
            tokio::select! {
                changed = table.changed() => if changed.is_err() { return },
                changed = state.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(INTERVAL.min(self.lease / steering::RENEWALS)) => {}
            }
        }
    }

    async fn choose(&self, on: &mut Option<SteeredPorts>, calm: Result<(bool, Target), String>, at: Instant) -> Path {
        let (own, target) = match calm {
            Ok(calm) => calm,
            Err(why) => return self.quiet(Path::Off(why), at),
        };
        if !own {
            return Path::Sibling;
        }
        if let Some(why) = self.why_not_accepted(target.address, at).await {
            return self.quiet(Path::Off(why.to_owned()), at);
        }
        let (is_quiet, before) = {
            let now = self.now();
            (at < now.quiet, now.path.clone())
        };
        if is_quiet {
            let failed = matches!(before, Path::Failed(_));
            return if failed { before } else { Path::Off("it was not calm a moment ago".to_owned()) };
        }
        let instance = target.instance.clone();
        match self.steer(on, target).await {
            Ok(()) => Path::On(instance),
            Err(path) => self.quiet(path, at),
        }
    }

    /// The shims relay, for this reason now and for [`QUIET`] after it.
    fn quiet(&self, path: Path, at: Instant) -> Path {
        self.now().quiet = at + shortened(QUIET);
        path
    }

    /// Why clients that are steered there might not be accepted.
    async fn why_not_accepted(&self, listener: SocketAddrV4, at: Instant) -> Option<&'static str> {
        // No listener, or no answer of the kernel: the probe or the program finds that.
        let queue = self.kernel.within(self.patience(), move || sock_diag::accept_queue(listener)).await;
        let queue = queue.flatten().ok().flatten()?;
        // The shims keep their own queues empty.
        let is_full = queue.waiting > queue.limit / 2;
        let stands_still = self.stands_still(listener, queue.waiting.into(), at);
        is_full
            .then_some("the instance's accept queue is full")
            .or(stands_still.then_some("the instance accepts no connection"))
    }

    /// Whether clients wait there, and none was accepted between two samples. A probe that only connects passes nevertheless.
    fn stands_still(&self, listener: SocketAddrV4, waiting: u64, at: Instant) -> bool {
        let mut now = self.now();
        let (steered, before) = (now.opened(), now.sample.filter(|sample| sample.listener == listener));
        if let Some(before) = before.filter(|before| at < before.at + INTERVAL) {
            return before.stands_still;
        }
        let stands_still = before.is_some_and(|before| {
            before.waiting > 0 && waiting >= before.waiting + steered.saturating_sub(before.steered)
        });
        now.sample = Some(QueueSample { listener, at, waiting, steered, stands_still });
        stands_still
    }

    /// How long the kernel is waited for: steering that is on is renewed in time.
    fn patience(&self) -> Duration {
        self.lease / (2 * steering::RENEWALS)
    }

    /// Renews what is on for this target, or turns it on.
    async fn steer(&self, on: &mut Option<SteeredPorts>, target: Target) -> Result<(), Path> {
        let address = target.address;
        match on {
            Some(on) if on.target == target => {
                let failed = sum(&on.ports, |counters| counters.failed);
                if failed > on.failed {
                    // It closed its listener, and may have another.
                    let ports = on.ports.clone();
                    let given = self.kernel.within(self.patience(), move || give(&ports, address)).await;
                    if !matches!(given, Ok(Ok(()))) {
                        return Err(Path::Off(format!("instance {} listens no more", target.instance)));
                    }
                    on.failed = failed;
                }
                on.ports.iter().for_each(Steering::renew);
            }
            _ => {
                self.off(on);
                let (steered, lease) = (self.steered.clone(), self.lease);
                let made = move || {
                    let ports = steered.iter().map(|(port, addresses)| {
                        let addresses: Vec<_> = addresses.iter().copied().map(IpAddr::V4).collect();
                        Steering::new(Purpose::DirectPath, *port, &addresses, lease)
                    });
                    let ports = ports.collect::<Result<Vec<_>, _>>()?;
                    give(&ports, address).map(|()| ports)
                };
                let made = self.kernel.within(MAKING, made).await.map_err(|error| Path::Failed(error.to_string()))?;
                let ports = made.map_err(|error: steering::Error| Path::Failed(error.to_string()))?;
                ports.iter().for_each(Steering::on);
                let ports = Arc::new(ports);
                self.now().ports = Arc::downgrade(&ports);
                *on = Some(SteeredPorts { target, ports, failed: 0 });
            }
        }
        Ok(())
    }

    fn off(&self, on: &mut Option<SteeredPorts>) {
        if on.is_some() {
            let mut now = self.now();
            now.opened = now.opened();
            now.ports = Weak::new();
        }
        *on = None;
    }

    fn record(&self, path: Path, at: Instant) {
        let mut now = self.now();
        if path.is_calm() {
            now.ended = None;
        } else if now.path.is_calm() {
            // A sibling that hangs steers until its last renewal expires.
            let sibling = if now.path == Path::Sibling { self.lease } else { Duration::ZERO };
            now.ended = Some(at + sibling);
        }
        if now.path == path {
            return;
        }
        if matches!(now.path, Path::On(_)) {
            tracing::info!(opened = now.opened(), "direct path off: {}", path.why_not().unwrap_or_default());
        }
        match &path {
            Path::On(instance) => {
                tracing::info!(%instance, "direct path on: new connections of IPv4 go to the instance itself");
            }
            Path::Failed(why) => tracing::warn!("no direct path, the shims relay: {why}"),
            path => tracing::debug!("no direct path: {}", path.why_not().unwrap_or_default()),
        }
        now.path = path;
    }

    fn now(&self) -> MutexGuard<'_, PathState> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the handshake of a client that was steered may not be over: its instance must not stop yet.
    pub(crate) fn is_settling(&self, at: Instant) -> bool {
        let now = self.now();
        now.path.is_calm() || now.ended.is_some_and(|ended| at < ended + shortened(HANDSHAKES))
    }

    /// Connections on the direct path that are open on this node, whichever shim steered them. Blocks while the kernel lists them.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub(crate) fn open(&self) -> io::Result<u64> {
        if let Some((_, open)) = self.now().open.filter(|(at, _)| at.elapsed() < COUNTED) {
            return Ok(open);
        }
        let open = |(port, addresses): (&u16, &Vec<Ipv4Addr>)| {
            sock_diag::connections(*port, addresses).map(|connections| connections.others)
        };
        let open = self.steered.iter().map(open).sum::<io::Result<u64>>()?;
        self.now().open = Some((Instant::now(), open));
        Ok(open)
    }

    /// With the number of [`Self::open`], if there is one.
    pub(crate) fn status(&self, open: Option<u64>) -> DirectStatus {
        let settling = self.is_settling(Instant::now());
        let now = self.now();
        let path = &now.path;
        DirectStatus {
            on: path.why_not().is_none(),
            why: path.why_not().map(ToOwned::to_owned),
            opened: now.opened(),
            open,
            settling,
            relayed: self.relayed.clone(),
        }
    }
}

fn addresses_of(steered: &BTreeMap<u16, Vec<Ipv4Addr>>) -> impl Iterator<Item = SocketAddrV4> {
    steered.iter().flat_map(|(port, addresses)| addresses.iter().map(|ip| SocketAddrV4::new(*ip, *port)))
}

fn sum(ports: &[Steering], of: impl Fn(Counters) -> u64) -> u64 {
    ports.iter().map(|port| of(port.counters())).sum()
}

fn give(ports: &[Steering], listener: SocketAddrV4) -> Result<(), steering::Error> {
    ports.iter().try_for_each(|port| port.give_to_listener_at(listener))
}

/// What can be steered to: the only instance that is known, if it is ready; or why there is none.
pub(crate) fn target(table: &Table) -> Result<Target, String> {
    let instances = &table.instances;
    let Some(instance) = instances.first() else { return Err("no instance is known".to_owned()) };
    // Each shim of an instance that was given by --backend has its own name for it.
    if let Some(other) = instances.iter().find(|other| other.address != instance.address) {
        return Err(format!("there are several instances: {} and {}", instance.id, other.id));
    }
    match (instance.health(), instance.address) {
        (InstanceHealth::Ready, _) if !instance.is_well() => {
            Err(format!("instance {} failed its last probe", instance.id))
        }
        (InstanceHealth::Ready, SocketAddr::V4(address)) => {
            Ok(Target { instance: instance.id.clone(), address, epoch: instance.epoch })
        }
        (InstanceHealth::Ready, _) => Err(format!("instance {} listens on IPv6", instance.id)),
        (health, _) => Err(format!("instance {} is {}", instance.id, health.as_str())),
    }
}

/// What is to be steered to, and whether by this shim; or why the shims are to get new connections.
fn calm(turn: Turn, table: &Table) -> Result<(bool, Target), String> {
    let target = target(table);
    match turn {
        Turn::Own => Ok((true, target?)),
        Turn::Sibling => Ok((false, target?)),
        Turn::NoShim(why) => target.and(Err(why.to_owned())),
        Turn::Shared => Err("the shims give each instance its share of new connections".to_owned()),
    }
}

/// What a registry of metrics takes.
#[derive(Debug)]
pub(crate) struct DirectMetrics(pub(crate) Arc<Direct>);

impl Collector for DirectMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let (on, opened) = {
            let now = self.0.now();
            (matches!(now.path, Path::On(_)), now.opened())
        };
        let help = "1 while this shim steers new connections to kube-apiserver, past its relay";
        gauge(&mut to, "berth_direct_on", help, u64::from(on))?;
        let help = "Connections that this shim steered to kube-apiserver, past its relay";
        counter(&mut to, "berth_direct_connections", help, opened)?;
        // They are the node's, so only the shim that steers exports them.
        if on && let Ok(open) = self.0.open() {
            let help = "Connections on the node's direct path that are open";
            gauge(&mut to, "berth_direct_connections_open", help, open)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
