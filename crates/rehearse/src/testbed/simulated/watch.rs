//! One watch: changes of the cache as lines, until the client goes, its time has passed, or the instance
//! shuts down.

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

/// Lines that may wait for a slow client.
const QUEUE: usize = 64;

/// Longest watch without `timeoutSeconds` (kube-apiserver: 30 to 60 minutes), and with it.
const LONGEST: Duration = Duration::from_secs(30 * 60);
const LONGEST_ASKED: Duration = Duration::from_secs(24 * 60 * 60);

/// Which objects a watch or list wants.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) kind: ObjectKind,
    /// None: all.
    pub(super) namespace: Option<String>,
}

impl Wanted {
    pub(super) fn matches(&self, object: &Value) -> bool {
        let namespace = &object["metadata"]["namespace"];
        self.kind == ObjectKind::ConfigMap
            && self
                .namespace
                .as_ref()
                .is_none_or(|wanted| namespace == wanted)
    }
}

/// How a watch is to be ended when the instance shuts down.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) life: Life,
    /// After the drain began.
    pub(super) after: Duration,
    pub(super) connection: Arc<Connection>,
}

/// Starts a watch; its lines come out of the receiver.
pub(super) async fn start(
    server: &Server,
    wanted: Wanted,
    query: &Query,
    ending: Ending,
) -> io::Result<mpsc::Receiver<Bytes>> {
    let (initial, revision) = match query.resource_version {
        Some(revision) => (Vec::new(), revision),
        None => {
            let (revision, items) = server.store.list(wanted.namespace.clone()).await?;
            (items, revision)
        }
    };
    let (lines, received) = mpsc::channel(QUEUE);
    let until = Instant::now()
        + query
            .timeout_seconds
            .map_or(LONGEST, |s| Duration::from_secs(s).min(LONGEST_ASKED));
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
    wanted: Wanted,
    lines: mpsc::Sender<Bytes>,
    /// The last revision that the client got.
    revision: u64,
    /// Time between two, if it wants any.
    bookmarks: Option<Duration>,
}

/// The client is gone, or what it wants.
struct WatchEnded;

impl Watch {
    /// Ends when the client is gone, the time has passed, the history is gone or the instance shuts
    /// down.
    async fn run(mut self, initial: Vec<Value>, until: Instant, ending: Ending) {
        for object in initial.iter().filter(|o| self.wanted.matches(o)) {
            if self
                .lines
                .send(objects::event(&ChangeKind::Added, object))
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
        let period = self.bookmarks.unwrap_or(LONGEST);
        let mut bookmarks = tokio::time::interval_at(Instant::now() + period, period);
        bookmarks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (cache, lines) = (Arc::clone(&self.cache), self.lines.clone());
        let mut changes = cache.log.watch(self.revision);
        loop {
            let passed = tokio::select! {
                () = &mut shutdown => return ending.connection.begin_end(),
                () = lines.closed() => return,
                () = tokio::time::sleep_until(until) => {
                    let _ = self.bookmark(&mut changes).await;
                    return;
                }
                _ = bookmarks.tick() => self.bookmark(&mut changes).await,
                batch = changes.next() => self.pass_on(batch).await,
            };
            if passed.is_err() {
                return;
            }
        }
    }

    /// Sends the cache's revision, after all changes up to it.
    async fn bookmark(&mut self, changes: &mut Changes<'_>) -> Result<(), WatchEnded> {
        let progress = self.cache.progress();
        self.pass_on(changes.now()).await?;
        self.revision = self.revision.max(progress);
        if self.bookmarks.is_none() {
            return Ok(());
        }
        self.send(objects::bookmark(self.wanted.kind, self.revision))
            .await
    }

    async fn pass_on(&mut self, batch: Result<Vec<Change>, Reason>) -> Result<(), WatchEnded> {
        let Ok(batch) = batch else {
            let message = format!(
                "too old resource version: {} ({})",
                self.revision,
                self.cache.log.after()
            );
            let status = objects::status_object(StatusCode::GONE, "Expired", &message, "");
            self.send(objects::event(&"ERROR", &status)).await?;
            return Err(WatchEnded);
        };
        for change in batch {
            // Of a resource without writes, the cache sees no change.
            if self.wanted.kind == ObjectKind::ConfigMap {
                self.revision = change.revision;
            }
            if self.wanted.matches(&change.object) {
                self.send(objects::event(&change.kind, &change.object))
                    .await?;
            }
        }
        Ok(())
    }

    async fn send(&self, line: Bytes) -> Result<(), WatchEnded> {
        self.lines.send(line).await.map_err(|_| WatchEnded)
    }
}
