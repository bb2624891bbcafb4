//! State shared by all connections of a simulated apiserver, and the open connections.

use super::cache::Cache;
use super::connection::Connection;
use super::flags::Flags;
use super::life::{Life, ROLES_DELAY};
use super::store_client::StoreClient;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio_util::task::TaskTracker;

/// State shared by all connections.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) flags: Flags,
    pub(super) store: StoreClient,
    pub(super) cache: Arc<Cache>,
    pub(super) life: Life,
    began: Instant,
    open: Mutex<HashMap<u64, Arc<Connection>>>,
    /// Tasks, one for each connection.
    pub(super) tasks: TaskTracker,
}

impl Server {
    pub(super) fn new(flags: Flags, store: StoreClient, cache: Arc<Cache>, life: Life) -> Self {
        let (began, open, tasks) = (Instant::now(), Mutex::default(), TaskTracker::new());
        Self {
            flags,
            store,
            cache,
            life,
            began,
            open,
            tasks,
        }
    }

    /// True if RBAC knows its roles.
    pub(super) fn has_rbac_roles(&self) -> bool {
        self.began.elapsed() >= self.flags.start_delay.min(ROLES_DELAY)
    }

    pub(super) fn add_connection(&self, id: u64, connection: &Arc<Connection>) {
        self.lock().insert(id, Arc::clone(connection));
    }

    /// Reports the end of a connection, unless `report_open_connections` reported it before.
    pub(super) async fn remove_connection(&self, id: u64, connection: &Connection) {
        if self.lock().remove(&id).is_some()
            && let Some(report) = connection.report()
        {
            self.store.report_end(report).await;
        }
    }

    /// Reports the connections that are still open just before the process ends.
    pub(super) async fn report_open_connections(&self) {
        let open: Vec<_> = self
            .lock()
            .drain()
            .map(|(_, connection)| connection)
            .collect();
        for report in open.iter().filter_map(|c| c.report_abandoned()) {
            self.store.report_end(report).await;
        }
    }

    /// Locks the map. A poisoned lock is safe: a panic leaves no partial entry.
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
