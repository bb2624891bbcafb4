//! A watch: sends the changes of the cache as lines, until the client leaves, its time is over, or
//! the instance shuts down.

use super::cache::Cache;
use super::connection::Connection;
use super::life::Life;
use super::objects::{self, ObjectKind};
use super::request::Query;
use super::server::Server;
use crate::testbed::store::{
    Changes,
    wire::{Change, ChangeKind, Reason},
};
use hyper::StatusCode;
use hyper::body::Bytes;
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};

/// Length of the queue of lines for a slow client.
const QUEUE_LENGTH: usize = 64;

/// Longest watch if the client sends no `timeoutSeconds` (kube-apiserver draws 30 to 60 minutes),
/// and if the client sends one.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Selects the objects of a watch or a list.
#[derive(Debug, Clone)]
pub(super) struct WatchFilter {
    pub(super) kind: ObjectKind,
    /// The namespace. `None` for all namespaces.
    pub(super) namespace: Option<String>,
}

impl WatchFilter {
    pub(super) fn matches(&self, object: &Value) -> bool {
        let namespace = &object["metadata"]["namespace"];
        self.kind == ObjectKind::ConfigMap
            && self
                .namespace
                .as_ref()
                .is_none_or(|wanted| namespace == wanted)
    }
}

/// How a watch ends when the instance shuts down.
#[derive(Debug)]
pub(super) struct WatchEnding {
    pub(super) life: Life,
    /// Delay of the watch's end after the drain began.
    pub(super) after: Duration,
    pub(super) connection: Arc<Connection>,
}

/// Starts a task that sends the lines of a watch to the returned receiver.
pub(super) async fn start_watch(
    server: &Server,
    wanted: WatchFilter,
    query: &Query,
    ending: WatchEnding,
) -> io::Result<mpsc::Receiver<Bytes>> {
    let (initial, revision) = match query.resource_version {
        Some(revision) => (Vec::new(), revision),
        None => {
            let (revision, items) = server.store.list(wanted.namespace.clone()).await?;
            (items, revision)
        }
    };
    let (lines, received) = mpsc::channel(QUEUE_LENGTH);
    let until = Instant::now()
        + query
            .timeout_seconds
            .map_or(DEFAULT_TIMEOUT, |s| Duration::from_secs(s).min(MAX_TIMEOUT));
    let bookmarks = query.bookmarks.then_some(server.flags.bookmark_period);
    let watch = Watch {
        cache: Arc::clone(&server.cache),
        wanted,
        lines,
        revision,
        bookmarks,
    };
    tokio::spawn(watch.run(initial, until, ending));
    Ok(received)
}

struct Watch {
    cache: Arc<Cache>,
    wanted: WatchFilter,
    lines: mpsc::Sender<Bytes>,
    /// The last revision sent to the client.
    revision: u64,
    /// Time between two bookmarks. `None` if the client wants no bookmarks.
    bookmarks: Option<Duration>,
}

/// The error that ends a watch: the client left, or the requested history is gone.
struct WatchEnded;

impl Watch {
    /// Sends lines until the client leaves, the time is over, the history is gone, or the instance
    /// shuts down.
    async fn run(mut self, initial: Vec<Value>, until: Instant, ending: WatchEnding) {
        for object in initial.iter().filter(|o| self.wanted.matches(o)) {
            if self
                .lines
                .send(objects::event_line(&ChangeKind::Added, object))
                .await
                .is_err()
            {
                return;
            }
        }
        let shutdown = async {
            ending.life.draining.cancelled().await;
            tokio::time::sleep(ending.after).await;
        };
        tokio::pin!(shutdown);
        let period = self.bookmarks.unwrap_or(DEFAULT_TIMEOUT);
        let mut bookmarks = tokio::time::interval_at(Instant::now() + period, period);
        bookmarks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (cache, lines) = (Arc::clone(&self.cache), self.lines.clone());
        let mut changes = cache.log.watch(self.revision);
        loop {
            let passed = tokio::select! {
                () = &mut shutdown => return ending.connection.record_closing(),
                () = lines.closed() => return,
                () = tokio::time::sleep_until(until) => {
                    let _ = self.send_bookmark(&mut changes).await;
                    return;
                }
                _ = bookmarks.tick() => self.send_bookmark(&mut changes).await,
                batch = changes.next() => self.send_batch(batch).await,
            };
            if passed.is_err() {
                return;
            }
        }
    }

    /// Sends the cache's revision as a bookmark, after all changes up to that revision.
    async fn send_bookmark(&mut self, changes: &mut Changes<'_>) -> Result<(), WatchEnded> {
        let progress = self.cache.progress_revision();
        self.send_batch(changes.unread_changes()).await?;
        self.revision = self.revision.max(progress);
        if self.bookmarks.is_none() {
            return Ok(());
        }
        self.send(objects::bookmark_line(self.wanted.kind, self.revision))
            .await
    }

    async fn send_batch(&mut self, batch: Result<Vec<Change>, Reason>) -> Result<(), WatchEnded> {
        let Ok(batch) = batch else {
            let message = format!(
                "too old resource version: {} ({})",
                self.revision,
                self.cache.log.revision_before_oldest()
            );
            let status = objects::status_object(StatusCode::GONE, "Expired", &message, "");
            self.send(objects::event_line(&"ERROR", &status)).await?;
            return Err(WatchEnded);
        };
        for change in batch {
            // All changes are of ConfigMaps. As kube-apiserver's cache of Secrets does not see
            // them, a watch of Secrets gets its revision from the store's progress notifications
            // alone.
            if self.wanted.kind == ObjectKind::ConfigMap {
                self.revision = change.revision;
            }
            if self.wanted.matches(&change.object) {
                self.send(objects::event_line(&change.kind, &change.object))
                    .await?;
            }
        }
        Ok(())
    }

    async fn send(&self, line: Bytes) -> Result<(), WatchEnded> {
        self.lines.send(line).await.map_err(|_| WatchEnded)
    }
}
