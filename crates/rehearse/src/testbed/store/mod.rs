//! The rehearsal's own store of ConfigMaps, in the place of etcd: one revision for all, and a `Log`
//! that watches read. Both simulated apiservers get their objects here (through [`crate::testbed::store::server`]), so both serve
//! the same objects with the same resourceVersions.
//!
//! What is a valid object is decided by the simulated apiserver, not here.

mod server;
pub(crate) mod wire;

pub use server::serve;

use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::sync::watch;
use wire::{Change, ChangeKind, Reason};

/// Time between two notices of how far a watch has come: what kubeadm sets for etcd
/// (`--watch-progress-notify-interval`).
pub(crate) const NOTIFY_EVERY: Duration = Duration::from_secs(5);

/// Changes that are kept for watches. A rehearsal writes some hundred.
pub(crate) const HISTORY: usize = 10_000;

type Key = (String, String);

/// The store. Cheap to share behind an `Arc`.
#[derive(Debug)]
pub struct Store {
    inner: Mutex<Inner>,
    /// Written under the lock of the objects.
    log: Log,
    notify_every: Duration,
}

#[derive(Debug)]
struct Inner {
    revision: u64,
    objects: BTreeMap<Key, Value>,
}

impl Default for Store {
    fn default() -> Self {
        Self::with_history(HISTORY)
    }
}

impl Store {
    /// A store that keeps `keep` changes for watches.
    pub fn with_history(keep: usize) -> Self {
        // Revision 0 means "any" to a Kubernetes client, so an empty store is at 1, as etcd is.
        let inner = Inner {
            revision: 1,
            objects: BTreeMap::new(),
        };
        Self {
            inner: Mutex::new(inner),
            log: Log::new(1, keep),
            notify_every: NOTIFY_EVERY,
        }
    }

    /// One that sends watches their progress at this interval.
    pub(crate) fn notifying_every(self, notify_every: Duration) -> Self {
        Self {
            notify_every,
            ..self
        }
    }

    pub(crate) fn notify_every(&self) -> Duration {
        self.notify_every
    }

    /// The object of that name.
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Result<Value, Reason> {
        self.lock()
            .objects
            .get(&(namespace.into(), name.into()))
            .cloned()
            .ok_or(Reason::NotFound)
    }

    /// The revision, and all objects (of one namespace) in order.
    pub fn list(&self, namespace: Option<&str>) -> (u64, Vec<Value>) {
        let inner = self.lock();
        let here = |(key, _): &(&Key, &Value)| namespace.is_none_or(|n| key.0 == n);
        (
            inner.revision,
            inner
                .objects
                .iter()
                .filter(here)
                .map(|(_, object)| object.clone())
                .collect(),
        )
    }

    /// Adds an object; gives it back with uid, creationTimestamp and resourceVersion.
    pub fn create(&self, mut object: Value) -> Result<Value, Reason> {
        let key = key(&object)?;
        let mut inner = self.lock();
        if inner.objects.contains_key(&key) {
            return Err(Reason::Exists);
        }
        object["metadata"]["uid"] = uid(inner.revision).into();
        object["metadata"]["creationTimestamp"] = timestamp().into();
        let object = self.change(&mut inner, object, ChangeKind::Added);
        inner.objects.insert(key, object.clone());
        Ok(object)
    }

    /// Removes an object; gives it back as it was, with the revision of its removal.
    pub(crate) fn delete(&self, namespace: &str, name: &str) -> Result<Value, Reason> {
        let mut inner = self.lock();
        let object = inner
            .objects
            .remove(&(namespace.into(), name.into()))
            .ok_or(Reason::NotFound)?;
        Ok(self.change(&mut inner, object, ChangeKind::Deleted))
    }

    /// Changes after a revision, from the history and then as they come.
    pub(crate) fn watch(&self, after: u64) -> Changes<'_> {
        self.log.watch(after)
    }

    /// Gives an object the next revision, and notifies watches.
    fn change(&self, inner: &mut Inner, mut object: Value, kind: ChangeKind) -> Value {
        inner.revision += 1;
        object["metadata"]["resourceVersion"] = json!(inner.revision.to_string());
        self.log.add(Change {
            revision: inner.revision,
            kind,
            object: object.clone(),
        });
        object
    }

    /// A panic elsewhere leaves whole objects behind: each write is one insertion.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The changes after a revision, as far back as they are kept.
#[derive(Debug)]
pub(crate) struct Log {
    kept: Mutex<KeptChanges>,
    added: watch::Sender<u64>,
    keep: usize,
}

#[derive(Debug)]
struct KeptChanges {
    /// All changes after this revision are here.
    after: u64,
    /// Changes that were here and are not any more.
    forgotten: u64,
    changes: VecDeque<Change>,
}

impl Log {
    /// One that begins after a revision and keeps the last `keep` changes.
    pub(crate) fn new(after: u64, keep: usize) -> Self {
        let kept = KeptChanges {
            after,
            forgotten: 0,
            changes: VecDeque::new(),
        };
        Self {
            kept: Mutex::new(kept),
            added: watch::Sender::new(0),
            keep,
        }
    }

    /// Adds the next change and notifies those that wait for it.
    pub(crate) fn add(&self, change: Change) {
        let mut kept = self.lock();
        kept.changes.push_back(change);
        if kept.changes.len() > self.keep
            && let Some(forgotten) = kept.changes.pop_front()
        {
            kept.after = forgotten.revision;
            kept.forgotten += 1;
        }
        self.added.send_modify(|added| *added += 1);
    }

    /// The revision before the oldest change that is kept.
    pub(crate) fn after(&self) -> u64 {
        self.lock().after
    }

    /// Changes after a revision, those that are kept and then as they come.
    pub(crate) fn watch(&self, after: u64) -> Changes<'_> {
        Changes {
            log: self,
            after,
            read: None,
            added: self.added.subscribe(),
        }
    }

    /// A panic elsewhere leaves whole changes behind.
    fn lock(&self) -> MutexGuard<'_, KeptChanges> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct Changes<'a> {
    log: &'a Log,
    after: u64,
    /// How many changes there were when it read last.
    read: Option<u64>,
    added: watch::Receiver<u64>,
}

impl Changes<'_> {
    /// Waits for changes and returns them all, oldest first; [`Reason::Gone`] when some were
    /// forgotten already. Nothing is skipped when the future is dropped.
    pub(crate) async fn next(&mut self) -> Result<Vec<Change>, Reason> {
        loop {
            self.added.borrow_and_update();
            let changes = self.now()?;
            if !changes.is_empty() {
                return Ok(changes);
            }
            // The sender lives in the log that is borrowed here.
            let _ = self.added.changed().await;
        }
    }

    /// The changes that are there, without waiting.
    pub(crate) fn now(&mut self) -> Result<Vec<Change>, Reason> {
        let kept = self.log.lock();
        let gone = self
            .read
            .map_or(self.after < kept.after, |read| read < kept.forgotten);
        if gone {
            return Err(Reason::Gone);
        }
        let skip = self.read.map_or(0, |read| read - kept.forgotten);
        let unread = kept
            .changes
            .iter()
            .skip(usize::try_from(skip).unwrap_or(usize::MAX));
        self.read = Some(kept.forgotten + kept.changes.len() as u64);
        // A log may begin before the revision from which it is read.
        Ok(unread
            .filter(|change| change.revision > self.after)
            .cloned()
            .collect())
    }
}

fn key(object: &Value) -> Result<Key, Reason> {
    let field = |name| {
        object
            .pointer(name)
            .and_then(Value::as_str)
            .map(str::to_owned)
            .ok_or(Reason::Protocol)
    };
    Ok((field("/metadata/namespace")?, field("/metadata/name")?))
}

fn uid(seed: u64) -> String {
    // Unique within one store is enough: it lives as long as the rehearsal.
    format!("00000000-0000-4000-8000-{seed:012x}")
}

fn timestamp() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
