//! The wiring of a shim, in one place. [`build_shim`] acquires what a shim needs (ports, threads,
//! files) and fails before any client is served. [`Bound::run`] serves until SIGTERM.
//!
//! A [`Bound`] knows its real addresses, so that a test runs a whole shim on port 0.
//!
//! The control plane (probes, records, socket, admin, this loop) runs on the caller's runtime,
//! which should be current-thread. Connections run on the threads of `workers`.

use crate::accept::Dispatcher;
use crate::admin::Admin;
use crate::backend::follow::{OwnShim, follow_berth};
use crate::backend::probe::{Probe, ProbeKind};
use crate::backend::prober::{Probers, SupervisorPath};
use crate::backend::{Table, TableWriter};
use crate::cluster::Cluster;
use crate::config::{Config, Listen, PassMode, RISE_COUNT};
use crate::drain::{FirstByteWait, drain_connections, has_listening_instance};
use crate::gate::{Gate, GateMetrics};
use crate::handover::run_handover;
use crate::limits;
use crate::metrics::Metrics;
use crate::relay::source::Sources;
use crate::relay::{Context, PassRequest, Refusal};
use crate::share::{ShareMetrics, Sharing};
use crate::shared::Shared;
use crate::state::{ShimState, Stop};
use crate::workers::Workers;
use berth_keeper::{Keeper, Withdrawal};
use berth_node::instance_id::InstanceId;
use berth_node::ipc::wire::{Ask, Reply};
use berth_node::ipc::{self, IncomingRequest};
use berth_node::registry::{self, BerthDir, RunDir};
use berth_node::terms::{InstanceHealth, Phase};
use berth_os::explained;
use berth_os::off_thread::OffThread;
use berth_os::{clock, proc_net, process, socket};
use humantime::format_duration;
use prometheus_client::collector::Collector;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Maximum number of clients that wait for an instance at once. Up to 16 KiB of each client are
/// kept in memory.
const MAX_HELD: usize = 1024;

/// Time between two tries for a port, within `--bind-wait`.
const BIND_PAUSE: Duration = Duration::from_millis(250);

/// Why a shim cannot be built. The message has the cause and the fix.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A port cannot be bound.
    #[error("{0}")]
    Port(String),
    /// The run directory cannot be used.
    #[error(transparent)]
    Registry(#[from] registry::Error),
    /// A shim of this instance runs already.
    #[expect(missing_docs, reason = "the message has both")]
    #[error(
        "a shim of instance {instance} runs already ({path} answers): stop that shim, or give another --instance"
    )]
    Taken { instance: InstanceId, path: String },
    /// A file or option of the probe is wrong.
    #[error("{0}")]
    Probe(String),
    /// The limit of open files is too low.
    #[expect(missing_docs, reason = "the message has both")]
    #[error(
        "a limit of {files} open files leaves no descriptor for connections ({besides}): raise the hard limit (ulimit -Hn, \
         LimitNOFILE=), or lower --threads"
    )]
    Files { files: u64, besides: String },
    /// A system call failed.
    #[expect(missing_docs, reason = "the message has both")]
    #[error("cannot {what}: {source}")]
    System {
        what: &'static str,
        source: io::Error,
    },
}

fn system_error(what: &'static str) -> impl FnOnce(io::Error) -> BuildError {
    move |source| BuildError::System { what, source }
}

/// The result of a shim that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShimEnd {
    /// Connections that were cut by the drain deadline or a second signal.
    pub cut: u64,
}

/// A shim with everything it needs, before serving.
#[derive(Debug)]
pub struct Bound {
    shared: Shared,
    sockets: Vec<OwnedFd>,
    writer: TableWriter,
    probe: Probe,
    data: DataPlane,
    server: ipc::Server,
    admin: Option<Admin>,
    keeper: Option<(Keeper, Withdrawal)>,
}

/// Acquires everything that a shim needs.
pub async fn build_shim(mut config: Config) -> Result<Bound, BuildError> {
    let room = Capacity::from_config(&config)?;
    let instance = match config.place.instance.clone() {
        Some(instance) => instance,
        None => InstanceId::random().map_err(|error| {
            system_error("choose a name for the instance")(io::Error::other(error))
        })?,
    };
    let probe = Probe::new(config.probe.clone());
    probe.check_files().await.map_err(BuildError::Probe)?;
    let run_dir = RunDir::open(&config.place.run_dir)?;

    let sockets = bind_all(&config.place.listen, config.bind_wait).await?;
    for (listen, socket) in config.place.listen.iter_mut().zip(&sockets) {
        listen.addr = socket::local_address(socket.as_fd())
            .map_err(system_error("read the address of a socket"))?;
    }
    let berth = run_dir.berth(config.place.berth_address())?;
    let path = berth.socket_path(&instance)?;
    let server = ipc::Server::bind(&path).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => BuildError::Taken {
            instance: instance.clone(),
            path: path.display().to_string(),
        },
        _ => system_error("listen on the shim's socket in the run directory")(error),
    })?;

    let gate = Gate::new(config.max_openings, config.first.clone());
    let mut collectors: Vec<Box<dyn Collector>> = Vec::new();
    collectors.extend(
        gate.clone()
            .map(|gate| Box::new(GateMetrics(gate)) as Box<dyn Collector>),
    );
    let share = Arc::<Sharing>::default();
    collectors.push(Box::new(ShareMetrics(share.clone())));
    let writer = TableWriter::new(RISE_COUNT, config.fall);
    let state = watch::Sender::<ShimState>::default();
    let metrics = Metrics::new(
        &instance,
        room.threads,
        MAX_HELD,
        writer.subscribe(),
        state.subscribe(),
        collectors,
    );
    let config = Arc::new(config);
    let shared = Shared {
        config: config.clone(),
        instance,
        berth,
        metrics: Arc::new(metrics),
        table: writer.subscribe(),
        state,
        cluster: Cluster::default(),
        gate,
        share,
        run_dir: OffThread::new("the run directory"),
        kernel: OffThread::new("the kernel"),
        ended: Arc::default(),
    };
    let data = DataPlane::start(&room, &shared)?;
    let admin = match config.admin {
        Some(address) => Some(Admin::bind(address).map_err(|error| port_error(address, &error))?),
        None => None,
    };
    let addresses: Vec<_> = config.place.addresses().collect();
    let links = || shared.cluster.make_links(shared.metrics.clone());
    let keeper = config
        .cluster
        .clone()
        .map(|cluster| Keeper::new(cluster, &addresses, &shared.instance, links()));
    let keeper = keeper
        .transpose()
        .map_err(|error| system_error("draw random bytes")(io::Error::other(error)))?;
    tracing::info!(
        version = berth_node::VERSION,
        berth = %config.place.berth_address(),
        listen = ?addresses,
        instance = %shared.instance,
        backend = config.backend.map(tracing::field::display),
        run_dir = %config.place.run_dir.display(),
        probe = config.probe.kind.as_str(),
        hold = %format_duration(config.hold),
        drain_timeout = %format_duration(config.drain_timeout),
        max_connections = room.connections,
        threads = room.threads,
        max_openings = %config.max_openings,
        first = ?config.first,
        pass = config.pass.as_str(),
        cluster = config.cluster.as_ref().map(|cluster| tracing::field::debug(&cluster.credentials)),
        node = config.cluster.as_ref().map(|cluster| cluster.node.as_str()),
        "berth"
    );
    room.warn_if_few_connections(&config);
    if config.probe.ca.is_none() && config.probe.kind == ProbeKind::Https {
        tracing::warn!(
            code = %explained::PROBE_INSECURE,
            "--probe-insecure: the probe does not verify the server's certificate; give --probe-ca instead"
        );
    }
    Ok(Bound {
        shared,
        sockets,
        writer,
        probe,
        data,
        server,
        admin,
        keeper,
    })
}

/// Numbers of threads and connections that fit into the limit of open files.
struct Capacity {
    files: u64,
    threads: usize,
    connections: u64,
}

impl Capacity {
    fn from_config(config: &Config) -> Result<Self, BuildError> {
        let files =
            process::raise_file_limit().map_err(system_error("raise the limit of open files"))?;
        let threads = limits::thread_count(config.threads);
        match limits::connection_limit(files, threads) {
            0 => Err(BuildError::Files {
                files,
                besides: limits::reserved_descriptors(threads).0,
            }),
            most => Ok(Self {
                files,
                threads,
                connections: config.max_connections.unwrap_or(most).min(most),
            }),
        }
    }

    fn warn_if_few_connections(&self, config: &Config) {
        let Self {
            files,
            threads,
            connections,
        } = *self;
        if let Some(wanted) = config
            .max_connections
            .filter(|wanted| *wanted > connections)
        {
            tracing::warn!(
                code = %explained::TOO_MANY_CONNECTIONS,
                "--max-connections {wanted} is more than a limit of {files} open files allows: the shim accepts \
                 {connections}; raise the hard limit (ulimit -Hn, LimitNOFILE=)"
            );
        } else if config.max_connections.is_none() && connections < limits::FEW_CONNECTIONS {
            tracing::warn!(
                code = %explained::FEW_DESCRIPTORS,
                "a limit of {files} open files leaves room for {connections} connections only ({}): raise the hard limit \
                 (ulimit -Hn, LimitNOFILE=), or lower --threads",
                limits::reserved_descriptors(threads).0
            );
        }
    }
}

/// The relaying threads, and the channels from their connections to the control plane.
#[derive(Debug)]
struct DataPlane {
    workers: Workers,
    dispatcher: Arc<Dispatcher>,
    refusals: mpsc::UnboundedReceiver<Refusal>,
    passes: mpsc::UnboundedReceiver<PassRequest>,
}

impl DataPlane {
    fn start(room: &Capacity, shared: &Shared) -> Result<Self, BuildError> {
        let workers = Workers::start(room.threads).map_err(system_error("start a thread"))?;
        let (report, refusals) = mpsc::unbounded_channel();
        let (pass, passes) = mpsc::unbounded_channel();
        let sources = Arc::new(Sources::new(
            &clock::boot_id().map_err(system_error("read the boot's ID"))?,
        ));
        let Shared {
            config, metrics, ..
        } = shared;
        let contexts = metrics.workers().iter().map(|stats| Context {
            table: shared.table.clone(),
            hold: config.hold,
            gate: shared.gate.clone(),
            share: shared.share.clone(),
            sources: sources.clone(),
            from_loopback: config.preferred.is_some(),
            peeks: config.pass != PassMode::Relay,
            held: metrics.held.clone(),
            refusals: report.clone(),
            stats: stats.clone(),
            connect_seconds: metrics.connect_seconds.clone(),
            first_byte_seconds: metrics.first_byte_seconds.clone(),
            ended: shared.ended.clone(),
            state: shared.state.subscribe(),
            stays: config.discover || config.preferred.is_some(),
            passes: pass.clone(),
            log_connections: config.log_connections,
        });
        let dispatcher = Dispatcher::new(
            workers.handles(),
            contexts,
            metrics.clone(),
            shared.ended.clone(),
            room.connections,
        );
        Ok(Self {
            workers,
            dispatcher: Arc::new(dispatcher),
            refusals,
            passes,
        })
    }
}

async fn bind_all(listen: &[Listen], wait: Duration) -> Result<Vec<OwnedFd>, BuildError> {
    let deadline = Instant::now() + wait;
    let mut warned = None;
    let mut sockets = Vec::new();
    for Listen { addr, freebind } in listen {
        loop {
            let error = match socket::bind(*addr, *freebind) {
                Ok(socket) => break sockets.push(socket),
                Err(error) => error,
            };
            let retry = matches!(
                error.kind(),
                io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable
            );
            let error = port_error(*addr, &error);
            if !retry || Instant::now() >= deadline {
                return Err(error);
            }
            if warned != Some(*addr) {
                warned = Some(*addr);
                tracing::warn!(
                    code = %explained::PORT_HELD,
                    bind_wait = %format_duration(wait),
                    "{error}; trying again"
                );
            }
            tokio::time::sleep_until((Instant::now() + BIND_PAUSE).min(deadline)).await;
        }
    }
    Ok(sockets)
}

fn port_error(address: SocketAddr, error: &io::Error) -> BuildError {
    BuildError::Port(match error.raw_os_error() {
        Some(libc::EADDRINUSE) => proc_net::explain_in_use(address),
        Some(libc::EADDRNOTAVAIL) => format!(
            "{address} is no address of this node: check --listen, or add ,freebind to --listen for a virtual IP that the node may get later"
        ),
        Some(libc::EACCES) => {
            format!("{address}: ports below 1024 need CAP_NET_BIND_SERVICE: give a higher port")
        }
        _ => format!("cannot bind {address}: {error}"),
    })
}

impl Bound {
    /// Returns the listen addresses, with the ports that the kernel chose.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.shared.config.place.addresses()
    }

    /// Returns the instance's ID, which was drawn if none was configured.
    pub fn instance(&self) -> &InstanceId {
        &self.shared.instance
    }

    /// Returns the directory of the berth, which the shim shares with its siblings.
    pub fn berth(&self) -> &BerthDir {
        &self.shared.berth
    }

    /// Returns the run directory, as configured.
    pub fn run_dir(&self) -> &Path {
        &self.shared.config.place.run_dir
    }

    /// Returns a receiver that gets each change of the shim's state.
    pub fn state(&self) -> watch::Receiver<ShimState> {
        self.shared.state.subscribe()
    }

    /// Returns duplicates of the listeners, for a caller that steers clients to this shim. Close
    /// the duplicates when the shim no longer listens: an open listener would queue connections
    /// that nothing accepts.
    ///
    /// # Errors
    /// Descriptors ran out.
    pub fn listeners(&self) -> io::Result<Vec<OwnedFd>> {
        self.sockets.iter().map(OwnedFd::try_clone).collect()
    }

    /// Returns a function that tells at any time whether every relaying thread responds.
    pub fn is_alive(&self) -> impl Fn() -> bool + Send + use<> {
        let shared = self.shared.clone();
        move || !shared.is_worker_blocked()
    }

    /// Returns a function that tells at any time how many connections are open.
    pub fn open_connections_counter(&self) -> impl Fn() -> u64 + Send + use<> {
        let metrics = self.shared.metrics.clone();
        move || metrics.open_connections()
    }

    /// Lets a caller wait for the first bytes that the instance owes to clients. The caller stops
    /// the instance afterwards, when the shim has left.
    pub fn first_byte_wait(&self) -> FirstByteWait {
        FirstByteWait::new(self.state(), self.shared.metrics.clone())
    }

    /// Serves until `stop` changes and the connections have ended.
    pub async fn run(self, stop: watch::Receiver<Stop>) -> ShimEnd {
        let Self {
            shared,
            sockets,
            writer,
            probe,
            data,
            server,
            admin,
            keeper,
        } = self;
        let (mut keeper, withdrawal) = keeper.unzip();
        let Shared {
            config,
            instance,
            berth,
            metrics,
            ..
        } = &shared;
        let mut tasks = JoinSet::new();
        let (to_handover, requests) = mpsc::unbounded_channel();
        let (shim, withdrawing) = (shared.clone(), withdrawal.clone());
        let answer = move |request| {
            answer_request(
                shim.clone(),
                to_handover.clone(),
                withdrawing.clone(),
                request,
            )
        };
        tasks.spawn(server.serve(answer));
        if let Some(admin) = admin {
            tasks.spawn(admin.serve(shared.clone()));
        }

        let mut probers = Probers::new(
            writer,
            probe,
            config.probe.kind,
            config.probe_interval,
            config.pass,
            metrics.clone(),
        );
        probers.record_refusals(data.refusals);
        if let Some(backend) = config.backend {
            probers.insert(
                instance,
                backend,
                true,
                false,
                SupervisorPath::without_record(),
            );
        } else if config.discover {
            tracing::info!(directory = %berth.instances_path().display(), "serving every instance that is recorded");
        } else {
            tracing::info!(%instance, directory = %berth.instances_path().display(), "waiting for the instance's record");
        }
        if let Some(preferred) = config.preferred.clone() {
            let probe =
                Probe::new(preferred.probe.clone()).with_loopback_source(preferred.address.ip());
            tasks.spawn(
                probers
                    .with_probe(probe)
                    .prefer_instance(preferred, instance.clone()),
            );
        }
        let own = OwnShim {
            id: instance.clone(),
            given: config.backend.is_some(),
            any: config.discover,
        };
        tasks.spawn(follow_berth(
            berth.clone(),
            own,
            shared.run_dir.clone(),
            probers,
        ));

        let sockets = config.place.addresses().zip(sockets).collect();
        let keeping = run_handover(
            &shared,
            sockets,
            data.dispatcher,
            data.workers.handles().to_vec(),
            data.passes,
            requests,
        );
        let keeping_cluster = run_part_forever(keeper.as_mut().map(Keeper::keep_slices_and_leases));
        let gate = run_part_forever(
            shared
                .gate
                .as_ref()
                .map(|gate| gate.keep_node_addresses_current()),
        );
        // The duplicates of siblings' listeners are held until the last connection has ended.
        let cut = tokio::select! {
            cut = wait_until_drained(&shared, config.drain_timeout) => cut,
            () = follow_stop(stop, &shared, withdrawal.as_ref()) => 0,
            () = rejoin_when_ready(&shared, withdrawal.as_ref()) => 0,
            () = keeping_cluster => 0,
            () = gate => 0,
            kept = keeping => {
                if let Err(error) = kept {
                    tracing::error!(
                        code = %explained::LEASE_NOT_WRITTEN,
                        %error,
                        "leases cannot be kept"
                    );
                }
                metrics.open_connections()
            }
        };
        if let Some(keeper) = &mut keeper
            && shared.stop() != Stop::Now
        {
            keeper.remove_leases_at_end().await;
        }
        // The connections that are left are reset when their threads end. Nothing serves from here
        // on.
        drop(data.workers);
        ShimEnd { cut }
    }
}

/// Runs an optional part of the shim, and never ends: other parts decide when the shim ends.
async fn run_part_forever(part: Option<impl Future<Output = ()>>) {
    if let Some(part) = part {
        part.await;
    }
    std::future::pending::<()>().await;
}

/// Waits until the shim has been told to stop and has left, and then until its connections have
/// ended. Returns the number of connections that are left at the deadline.
async fn wait_until_drained(shared: &Shared, timeout: Duration) -> u64 {
    let mut state = shared.state.subscribe();
    let _ = state.wait_for(|state| state.stop >= Stop::Drain).await;
    let _ = state
        .wait_for(|state| state.phase == Phase::Left || state.stop == Stop::Now)
        .await;
    let is_served = |table: &Table| has_listening_instance(table, shared.config.discover);
    drain_connections(
        &shared.metrics,
        &shared.ended,
        shared.table.clone(),
        state,
        is_served,
        timeout,
    )
    .await
}

/// Carries out the stop requests of the caller.
async fn follow_stop(
    mut stop: watch::Receiver<Stop>,
    shared: &Shared,
    withdrawal: Option<&Withdrawal>,
) {
    loop {
        let outside = *stop.borrow_and_update();
        if let Some(withdrawal) = withdrawal
            && outside > shared.stop()
            && outside < Stop::Now
        {
            // A second signal ends the wait for the withdrawal.
            tokio::select! {
                () = withdrawal.withdraw_slices() => {}
                Ok(_) = stop.wait_for(|stop| *stop == Stop::Now) => continue,
            }
        }
        shared.update_state(|state| state.stop = state.stop.max(outside));
        if stop.changed().await.is_err() {
            break;
        }
    }
    std::future::pending::<()>().await;
}

/// Undoes `berth drain` when the own instance is ready again as a new process. A preStop hook also
/// runs for a restart in place, and a native sidecar stays through such a restart.
async fn rejoin_when_ready(shared: &Shared, withdrawal: Option<&Withdrawal>) {
    let (mut state, mut table) = (shared.state.subscribe(), shared.table.clone());
    while state
        .wait_for(|state| state.stop == Stop::Leave)
        .await
        .is_ok()
    {
        let drained = table.borrow().own_instance().map(|own| own.started);
        let started_anew = |table: &Arc<Table>| {
            table.own_instance().is_some_and(|own| {
                Some(own.started) != drained && own.health() == InstanceHealth::Ready
            })
        };
        if table.wait_for(started_anew).await.is_err() {
            break;
        }
        let undone = shared.update_state(|state| {
            if state.stop == Stop::Leave {
                state.stop = Stop::No;
            }
        });
        if undone {
            withdrawal.inspect(|withdrawal| withdrawal.undo_withdrawal());
            tracing::info!("the instance was restarted and is ready: `berth drain` is undone");
        }
    }
    std::future::pending::<()>().await;
}

/// Replies to a request on the shim's socket. Requests of siblings go to the handover.
async fn answer_request(
    shim: Shared,
    handover: mpsc::UnboundedSender<IncomingRequest>,
    withdrawal: Option<Withdrawal>,
    request: IncomingRequest,
) {
    let reply = match request.ask {
        Ask::Status => Reply::Status(Box::new(shim.status().await)),
        Ask::Metrics => Reply::Metrics(shim.own_metrics().await),
        Ask::DrainIfSibling if !shim.has_joined_sibling().await => {
            tracing::info!(
                "drain requested if a sibling is joined: no sibling is joined, so this shim goes on"
            );
            Reply::Alone
        }
        Ask::Drain | Ask::DrainIfSibling => {
            tracing::info!("drain requested");
            if let Some(withdrawal) = withdrawal {
                withdrawal.withdraw_slices().await;
            }
            shim.update_state(|state| state.stop = state.stop.max(Stop::Leave));
            Reply::Done
        }
        Ask::Pass | Ask::Join { .. } | Ask::Share(_) => {
            let _ = handover.send(request);
            return;
        }
    };
    request.reply(&reply).await;
}
