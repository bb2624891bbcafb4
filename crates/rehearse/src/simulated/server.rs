//! What all connections of a simulated apiserver share, and which of them are open.

use super::cache::Cache;
use super::connection::Connection;
use super::flags::Flags;
use super::life::{Life, ROLES_AFTER};
use super::metrics::Metrics;
use super::store_client::StoreClient;
use crate::fault::Fault;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::task::TaskTracker;

/// The admission webhook of each new object: that there is one is simulated, too.
const WEBHOOK: &str = "simulated.berth.example";

/// A leak: so many pieces of 1 MiB, one in this time.
const LEAKED: usize = 512;
const LEAK_EVERY: Duration = Duration::from_millis(20);

/// What all connections share.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) flags: Flags,
    pub(super) store: StoreClient,
    pub(super) cache: Arc<Cache>,
    pub(super) life: Life,
    pub(super) metrics: Metrics,
    leak: Once,
    began: Instant,
    open: Mutex<HashMap<u64, Arc<Connection>>>,
    /// One task a connection.
    pub(super) tasks: TaskTracker,
}

impl Server {
    pub(super) fn new(flags: Flags, store: StoreClient, cache: Arc<Cache>, life: Life) -> Self {
        let (began, open, tasks) = (Instant::now(), Mutex::default(), TaskTracker::new());
        let (metrics, leak) = (Metrics::default(), Once::new());
        Self { flags, store, cache, life, metrics, leak, began, open, tasks }
    }

    /// Whether RBAC knows its roles.
    pub(super) fn has_roles(&self) -> bool {
        self.began.elapsed() >= self.flags.start_delay.min(ROLES_AFTER)
    }

    pub(super) fn has(&self, fault: Fault) -> bool {
        self.flags.fault == Some(fault)
    }

    /// A client is there: what waits for that begins.
    pub(super) fn used(&self) {
        if self.has(Fault::Leak) {
            self.leak.call_once(|| drop(tokio::spawn(leak())));
        }
    }

    /// Calls the admission webhook; the error is why it cannot be called.
    pub(super) fn call_webhook(&self) -> Result<(), String> {
        let failed = self.has(Fault::Webhook);
        self.metrics.webhook(WEBHOOK, failed, Duration::ZERO);
        if failed { Err(format!("failed calling webhook {WEBHOOK:?}: connection refused")) } else { Ok(()) }
    }

    pub(super) fn opened(&self, id: u64, connection: &Arc<Connection>) {
        self.lock().insert(id, Arc::clone(connection));
    }

    /// Reports its end, unless it was reported as abandoned.
    pub(super) async fn closed(&self, id: u64, connection: &Connection) {
        if self.lock().remove(&id).is_some()
            && let Some(report) = connection.report()
        {
            self.store.ended(report).await;
        }
    }

    /// Reports connections that are still open when the process is about to end.
    pub(super) async fn abandon(&self) {
        let open: Vec<_> = self.lock().drain().map(|(_, connection)| connection).collect();
        for report in open.iter().filter_map(|c| c.report_abandoned()) {
            self.store.ended(report).await;
        }
    }

    /// A panic elsewhere leaves the map whole.
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes memory, and writes to it, so that it counts.
async fn leak() {
    let (mut leaked, mut ticks) = (Vec::new(), tokio::time::interval(LEAK_EVERY));
    while leaked.len() < LEAKED {
        ticks.tick().await;
        leaked.push(vec![1_u8; 1 << 20]);
    }
    std::future::pending::<()>().await;
}
