//! One watch: changes of the store as lines, until the client goes, its time is over, or the instance
//! shuts down.

use super::super::wire::{ChangeKind, Reason, Reply};
use super::connection::Connection;
use super::life::Life;
use super::objects;
use super::request::Query;
use super::store_client::{StoreClient, unexpected};
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

/// Time between two bookmarks, as in kube-apiserver.
const BOOKMARK_PERIOD: Duration = Duration::from_secs(60);

/// Which objects a watch or list wants.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// None: all.
    pub(super) namespace: Option<String>,
    name: Option<String>,
    field_namespace: Option<String>,
}

impl Wanted {
    pub(super) fn new(namespace: Option<String>, query: &Query) -> Self {
        Self { namespace, name: query.name.clone(), field_namespace: query.namespace.clone() }
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        let is =
            |field: &str, wanted: &Option<String>| wanted.as_ref().is_none_or(|w| object["metadata"][field] == **w);
        is("name", &self.name) && is("namespace", &self.namespace) && is("namespace", &self.field_namespace)
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
    store: &StoreClient,
    wanted: Wanted,
    query: &Query,
    ending: Ending,
) -> io::Result<mpsc::Receiver<Bytes>> {
    let (initial, revision) = match query.resource_version {
        Some(revision) => (Vec::new(), revision),
        None => {
            let (revision, items) = store.list(wanted.namespace.clone()).await?;
            (items, revision)
        }
    };
    let source = store.watch(wanted.namespace.clone(), revision).await?;
    let (lines, received) = mpsc::channel(QUEUE);
    let until = Instant::now() + query.timeout_seconds.map_or(LONGEST, |s| Duration::from_secs(s).min(LONGEST_ASKED));
    let watch = Watch { source, wanted, lines, revision: revision.to_string(), bookmarks: query.bookmarks };
    tokio::spawn(watch.run(initial, until, ending));
    Ok(received)
}

struct Watch {
    source: super::store_client::StoreWatch,
    wanted: Wanted,
    lines: mpsc::Sender<Bytes>,
    revision: String,
    bookmarks: bool,
}

impl Watch {
    /// Ends when the client is gone, the time is over, the history is gone or the instance shuts
    /// down. A watch that only lost its store goes on without events until then: kube-apiserver
    /// does not end watches because etcd is away either.
    async fn run(mut self, initial: Vec<Value>, until: Instant, ending: Ending) {
        for object in initial.iter().filter(|o| self.wanted.matches(o)) {
            if self.lines.send(objects::event(&ChangeKind::Added, object)).await.is_err() {
                return;
            }
        }
        let shutdown = async {
            ending.life.draining.cancelled().await;
            tokio::time::sleep(ending.after).await;
        };
        tokio::pin!(shutdown);
        let mut bookmarks = tokio::time::interval_at(Instant::now() + BOOKMARK_PERIOD, BOOKMARK_PERIOD);
        bookmarks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut store_is_there = true;
        let lines = self.lines.clone();
        loop {
            tokio::select! {
                () = &mut shutdown => return ending.connection.begin_end(),
                () = lines.closed() => return,
                () = tokio::time::sleep_until(until) => return self.bookmark().await,
                _ = bookmarks.tick() => self.bookmark().await,
                reply = self.source.next(), if store_is_there => match reply {
                    Ok(reply) => if self.pass_on(reply).await.is_err() {
                        return;
                    },
                    Err(error) => {
                        tracing::warn!(%error, "a watch lost the store");
                        store_is_there = false;
                    }
                },
            }
        }
    }

    async fn bookmark(&self) {
        if self.bookmarks {
            let _ = self.lines.send(objects::bookmark(&self.revision)).await;
        }
    }

    async fn pass_on(&mut self, reply: Reply) -> Result<(), mpsc::error::SendError<Bytes>> {
        match reply {
            Reply::Change(change) => {
                self.revision = change.revision.to_string();
                if !self.wanted.matches(&change.object) {
                    return Ok(());
                }
                self.lines.send(objects::event(&change.kind, &change.object)).await
            }
            Reply::Failed { reason: Reason::Gone } => {
                let message = format!("too old resource version: {}", self.revision);
                let status = objects::status_object(StatusCode::GONE, "Expired", &message, "");
                self.lines.send(objects::event(&"ERROR", &status)).await?;
                Err(mpsc::error::SendError(Bytes::new()))
            }
            other => {
                tracing::warn!(error = %unexpected(&other), "in a watch");
                Ok(())
            }
        }
    }
}
