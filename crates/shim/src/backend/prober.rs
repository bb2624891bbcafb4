//! Probes every known instance, with a task each, and records the results with the [`TableWriter`].

use super::hang::HangDetector;
use super::health::Observation;
use super::probe::{Answer, Probe, ProbeKind};
use super::supervisor;
use super::{BackendInstance, TableWriter};
use crate::config::{PassMode, Preferred};
use crate::metrics::Metrics;
use crate::relay::Refusal;
use berth_node::instance_id::InstanceId;
use berth_node::registry::BerthDir;
use berth_node::registry::instance::Record;
use berth_node::terms::InstanceHealth;
use berth_os::explained;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

/// Time between two probes of an instance that is not ready, if shorter than the interval: a
/// newcomer should not wait for the next probe. With several nodes, kube-apiserver puts its address
/// into the Service `kubernetes` as soon as kube-apiserver is ready, and clients of that address
/// are refused until the shim listens.
const START_INTERVAL: Duration = Duration::from_millis(100);

/// How long `START_INTERVAL` applies after an instance began to listen. A version that never gets
/// ready is not probed ten times a second for ever.
const START_PERIOD: Duration = Duration::from_secs(120);

/// Probes all instances, each in a task of its own, until dropped.
#[derive(Debug)]
pub(crate) struct Probers {
    shared: Arc<ProberContext>,
    tasks: HashMap<InstanceId, AbortHandle>,
}

#[derive(Debug)]
struct ProberContext {
    writer: Arc<Mutex<TableWriter>>,
    probe: Probe,
    kind: ProbeKind,
    interval: Duration,
    pass: PassMode,
    metrics: Arc<Metrics>,
}

/// The path of an instance's supervisor socket, or why the instance's record has none.
pub(crate) struct SupervisorPath(Result<PathBuf, String>);

impl SupervisorPath {
    pub(crate) fn from_record(berth: &BerthDir, record: Option<&Record>) -> Self {
        const NO_PASSING: &str =
            "the instance's `berth exec` runs without --pass inject and --pass auto";
        Self(match record {
            Some(record) if record.supervised => berth
                .supervisor_path(&record.instance)
                .map_err(|error| error.to_string()),
            Some(record) => Err(record
                .unsupervised
                .clone()
                .unwrap_or_else(|| NO_PASSING.into())),
            None => Self::without_record().0,
        })
    }

    pub(crate) fn without_record() -> Self {
        Self(Err("no `berth exec` has recorded the instance".into()))
    }
}

impl Probers {
    pub(crate) fn new(
        writer: TableWriter,
        probe: Probe,
        kind: ProbeKind,
        interval: Duration,
        pass: PassMode,
        metrics: Arc<Metrics>,
    ) -> Self {
        let shared = ProberContext {
            writer: Arc::new(Mutex::new(writer)),
            probe,
            kind,
            interval,
            pass,
            metrics,
        };
        Self {
            shared: Arc::new(shared),
            tasks: HashMap::new(),
        }
    }

    /// Makes probers with the same table and another probe.
    pub(crate) fn with_probe(&self, probe: Probe) -> Self {
        let ProberContext {
            writer,
            kind,
            interval,
            pass,
            metrics,
            ..
        } = &*self.shared;
        let (writer, metrics) = (writer.clone(), metrics.clone());
        let shared = ProberContext {
            writer,
            probe,
            kind: *kind,
            interval: *interval,
            pass: *pass,
            metrics,
        };
        Self {
            shared: Arc::new(shared),
            tasks: HashMap::new(),
        }
    }

    /// Adds the instance of `preferred` while its process exists, and makes the instance `to` a
    /// fallback meanwhile. Never ends.
    pub(crate) async fn prefer_instance(mut self, preferred: Preferred, to: InstanceId) {
        let Preferred {
            id,
            address,
            mut process,
            ..
        } = preferred;
        loop {
            let now = *process.borrow_and_update();
            match now {
                Some(_) => self.insert(&id, address, false, true, SupervisorPath::without_record()),
                None => self.remove(&id),
            }
            self.set_fallback(&to, now.is_some());
            if process.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Begins to probe an instance. Begins again if its address has changed, or if `renewed` is
    /// true.
    pub(crate) fn insert(
        &mut self,
        id: &InstanceId,
        address: SocketAddr,
        own: bool,
        renewed: bool,
        passing: SupervisorPath,
    ) {
        if self
            .shared
            .lock_writer()
            .insert(id, address, own, renewed)
            .is_none()
        {
            return;
        }
        tracing::info!(instance = %id, %address, own, "probing");
        let task = tokio::spawn(
            self.shared
                .clone()
                .follow_instance(id.clone(), address, passing),
        );
        if let Some(old) = self.tasks.insert(id.clone(), task.abort_handle()) {
            old.abort();
        }
    }

    /// Makes an instance a fallback, used only while no other instance is ready, or ends the
    /// fallback.
    pub(crate) fn set_fallback(&self, id: &InstanceId, fallback: bool) {
        self.shared.lock_writer().set_fallback(id, fallback);
    }

    pub(crate) fn remove(&mut self, id: &InstanceId) {
        if let Some(task) = self.tasks.remove(id) {
            task.abort();
            self.shared.lock_writer().remove(id);
            tracing::info!(instance = %id, "gone");
        }
    }

    /// Records the refusals that connections met, until the senders are gone.
    pub(crate) fn record_refusals(&self, mut refusals: mpsc::UnboundedReceiver<Refusal>) {
        let shared = self.shared.clone();
        tokio::spawn(async move {
            while let Some(Refusal { id, epoch }) = refusals.recv().await {
                shared.observe(
                    &id,
                    epoch,
                    Observation::Refused,
                    "the instance refused a connection",
                );
            }
        });
    }
}

impl Drop for Probers {
    fn drop(&mut self) {
        for task in self.tasks.values() {
            task.abort();
        }
    }
}

impl ProberContext {
    fn lock_writer(&self) -> MutexGuard<'_, TableWriter> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn follow_instance(
        self: Arc<Self>,
        id: InstanceId,
        address: SocketAddr,
        passing: SupervisorPath,
    ) {
        let suspect = AtomicBool::new(false);
        tokio::join!(
            self.probe_forever(&id, address, &suspect),
            self.watch_handshakes(&id, &suspect),
            self.keep_link(&id, passing),
        );
    }

    /// Keeps the link to an instance's supervisor, or records why there is none.
    async fn keep_link(&self, id: &InstanceId, SupervisorPath(passing): SupervisorPath) {
        let why = match passing {
            _ if self.pass == PassMode::Relay => return,
            Ok(path) => {
                supervisor::keep_connection(&path, id, |link| self.lock_writer().set_link(id, link))
                    .await
            }
            Err(why) => why,
        };
        self.lock_writer().set_relay_reason(id, &why);
        if self.pass == PassMode::Inject {
            tracing::warn!(
                code = %explained::RELAYED,
                instance = %id,
                "--pass inject: the instance's clients are relayed: {why}"
            );
        } else {
            tracing::info!(instance = %id, "--pass auto: the instance's clients are relayed: {why}");
        }
    }

    /// Detects by its clients' TLS handshakes that an instance is stuck, whatever the results of
    /// its probe.
    async fn watch_handshakes(&self, id: &InstanceId, suspect: &AtomicBool) {
        let mut detector = HangDetector::new(self.probe.timeout());
        loop {
            tokio::time::sleep(detector.interval).await;
            let Some(instance) = self.lock_writer().find_instance(id) else {
                return;
            };
            detector.sample_handshakes(&instance.handshakes);
            let is_certain = instance.hangs || detector.is_certain(instance.is_well());
            suspect.store(is_certain || detector.is_suspect(), Relaxed);
            if is_certain && !instance.hangs {
                let words = format!(
                    "no handshake ended for {}",
                    humantime::format_duration(self.probe.timeout())
                );
                self.observe(id, instance.epoch, Observation::Hangs, &words);
            }
        }
    }

    async fn probe_forever(&self, id: &InstanceId, address: SocketAddr, suspect: &AtomicBool) {
        let mut last_result = "";
        let mut began = tokio::time::Instant::now();
        loop {
            let started = tokio::time::Instant::now();
            let Some(BackendInstance { epoch, .. }) = self.lock_writer().find_instance(id) else {
                return;
            };
            let is_suspect = suspect.load(Relaxed);
            let answer = if is_suspect {
                self.probe.probe_handshake(address).await
            } else {
                self.probe.probe_ready(address).await
            };
            if !is_suspect && suspect.load(Relaxed) {
                // The instance became suspect during this probe, and a suspect instance needs a
                // probe with a handshake, so this result does not count.
                continue;
            }
            let Answer {
                seen,
                result,
                words,
            } = answer;
            self.metrics.count_probe(result);
            let became_ready = self.observe(id, epoch, seen, &words);
            if result != last_result && seen != Observation::Pass {
                tracing::info!(instance = %id, result, "probe: {words}");
            }
            last_result = result;
            if became_ready && self.kind == ProbeKind::Https {
                let version = self.read_version(address).await;
                self.lock_writer().set_version(id, version);
            }
            let Some(instance) = self.lock_writer().find_instance(id) else {
                return;
            };
            let pause = match seen {
                _ if instance.is_rising() => continue,
                Observation::Refused => {
                    began = started;
                    self.interval.min(START_INTERVAL)
                }
                Observation::Fail
                    if instance.health() == InstanceHealth::Unready
                        && started - began < START_PERIOD =>
                {
                    self.interval.min(START_INTERVAL)
                }
                _ => self.interval,
            };
            tokio::time::sleep_until(started + pause).await;
        }
    }

    /// Records an observation and logs a change. Returns true if the instance became ready.
    fn observe(&self, id: &InstanceId, epoch: u64, seen: Observation, words: &str) -> bool {
        let Some((before, after)) = self.lock_writer().observe(id, epoch, seen, words) else {
            return false;
        };
        match (before, after) {
            (before, after) if before == after => return false,
            (_, InstanceHealth::Ready) => tracing::info!(instance = %id, "ready"),
            (_, InstanceHealth::Failing) if seen == Observation::Hangs => {
                tracing::warn!(
                    code = %explained::STANDSTILL,
                    instance = %id,
                    "has stalled; the instance still gets connections if no other is ready: {words}"
                );
            }
            (_, InstanceHealth::Failing) => {
                tracing::warn!(
                    code = %explained::PROBE_FAILS,
                    instance = %id,
                    "fails its probe; the instance still gets connections if no other is ready: {words}"
                );
            }
            // A warning is for this shim's own instance only: a sibling's instance ends with every
            // upgrade.
            (_, InstanceHealth::Unready) if self.is_own(id) => {
                tracing::warn!(
                    code = %explained::NOT_READY,
                    instance = %id,
                    "not ready any more: {words}"
                );
            }
            (_, InstanceHealth::Unready) => {
                tracing::info!(instance = %id, "a sibling's instance is not ready any more: {words}");
            }
        }
        after == InstanceHealth::Ready
    }

    fn is_own(&self, id: &InstanceId) -> bool {
        self.lock_writer()
            .table()
            .own_instance()
            .is_some_and(|own| own.id == *id)
    }

    async fn read_version(&self, address: SocketAddr) -> Option<Arc<str>> {
        let body = self.probe.get(address, "/version").await.ok()?;
        let version: serde_json::Value = serde_json::from_slice(&body).ok()?;
        Some(version.get("gitVersion")?.as_str()?.into())
    }
}
