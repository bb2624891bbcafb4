//! A store of ConfigMaps in place of etcd: one revision for the whole store, and a `Log` for
//! watches. Both simulated apiservers use the store (through `server`), so both serve the same
//! objects with the same resourceVersions.
//!
//! The simulated apiserver validates objects, not the store.

mod server;
pub(crate) mod wire;

pub use server::serve;

use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::sync::watch;
use wire::{Change, ChangeKind, Reason};

/// Time between two progress notifications of a watch, as kubeadm configures etcd
/// (`--watch-progress-notify-interval`).
pub(crate) const NOTIFY_INTERVAL: Duration = Duration::from_secs(5);

/// Number of changes in the history for watches. A rehearsal writes a few hundred.
pub(crate) const HISTORY_LENGTH: usize = 10_000;

type Key = (String, String);

/// The store. Share it behind an `Arc`.
#[derive(Debug)]
pub struct Store {
    inner: Mutex<Inner>,
    /// History of changes, written under the lock of the objects.
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
        Self::with_history(HISTORY_LENGTH)
    }
}

impl Store {
    /// Creates a store with a history of `keep` changes.
    pub fn with_history(keep: usize) -> Self {
        // Revision 0 means "any" to a Kubernetes client, so an empty store has revision 1, like
        // etcd.
        let inner = Inner {
            revision: 1,
            objects: BTreeMap::new(),
        };
        Self {
            inner: Mutex::new(inner),
            log: Log::new(1, keep),
            notify_every: NOTIFY_INTERVAL,
        }
    }

    /// Sets the interval of progress notifications.
    pub(crate) fn with_notify_interval(self, notify_every: Duration) -> Self {
        Self {
            notify_every,
            ..self
        }
    }

    pub(crate) fn notify_every(&self) -> Duration {
        self.notify_every
    }

    /// Returns an object by namespace and name.
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Result<Value, Reason> {
        self.lock()
            .objects
            .get(&(namespace.into(), name.into()))
            .cloned()
            .ok_or(Reason::NotFound)
    }

    /// Returns the revision and the objects in order. The objects are those of one namespace, or of
    /// all namespaces if `namespace` is `None`.
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

    /// Adds an object. Returns the object with uid, creationTimestamp and resourceVersion.
    pub fn create(&self, mut object: Value) -> Result<Value, Reason> {
        let key = object_key(&object)?;
        let mut inner = self.lock();
        if inner.objects.contains_key(&key) {
            return Err(Reason::Exists);
        }
        object["metadata"]["uid"] = format_uid(inner.revision).into();
        object["metadata"]["creationTimestamp"] = format_now().into();
        let object = self.apply_change(&mut inner, object, ChangeKind::Added);
        inner.objects.insert(key, object.clone());
        Ok(object)
    }

    /// Removes an object. Returns the last state of the object, with the revision of the removal.
    pub(crate) fn delete(&self, namespace: &str, name: &str) -> Result<Value, Reason> {
        let mut inner = self.lock();
        let object = inner
            .objects
            .remove(&(namespace.into(), name.into()))
            .ok_or(Reason::NotFound)?;
        Ok(self.apply_change(&mut inner, object, ChangeKind::Deleted))
    }

    /// Returns the changes after a revision, first from the history, then live.
    pub(crate) fn watch(&self, after: u64) -> Changes<'_> {
        self.log.watch(after)
    }

    /// Sets the next revision in an object and notifies watches.
    fn apply_change(&self, inner: &mut Inner, mut object: Value, kind: ChangeKind) -> Value {
        inner.revision += 1;
        object["metadata"]["resourceVersion"] = json!(inner.revision.to_string());
        self.log.add(Change {
            revision: inner.revision,
            kind,
            object: object.clone(),
        });
        object
    }

    /// Locks the objects. A poisoned lock is safe: each write is a single insertion, so a panic
    /// leaves no partial objects.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A history of changes after a revision, limited in length.
#[derive(Debug)]
pub(crate) struct Log {
    kept: Mutex<KeptChanges>,
    added: watch::Sender<u64>,
    keep: usize,
}

#[derive(Debug)]
struct KeptChanges {
    /// The revision before the oldest change in the history.
    after: u64,
    /// Number of changes that were dropped from the history.
    forgotten: u64,
    changes: VecDeque<Change>,
}

impl Log {
    /// Creates a history that begins after a revision and keeps the last `keep` changes.
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

    /// Adds the next change and wakes watches.
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

    /// Returns the revision before the oldest change in the history.
    pub(crate) fn revision_before_oldest(&self) -> u64 {
        self.lock().after
    }

    /// Returns the changes after a revision, first from the history, then live.
    pub(crate) fn watch(&self, after: u64) -> Changes<'_> {
        Changes {
            log: self,
            after,
            read: None,
            added: self.added.subscribe(),
        }
    }

    /// Locks the history. A poisoned lock is safe: a panic leaves no partial changes.
    fn lock(&self) -> MutexGuard<'_, KeptChanges> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct Changes<'a> {
    log: &'a Log,
    after: u64,
    /// Number of changes that had ever been added to the history at the last read. `None` before
    /// the first read.
    read: Option<u64>,
    added: watch::Receiver<u64>,
}

impl Changes<'_> {
    /// Waits for changes and returns them, oldest first. Returns [`Reason::Gone`] if a change was
    /// already dropped. No change is skipped if the future is dropped.
    pub(crate) async fn next(&mut self) -> Result<Vec<Change>, Reason> {
        loop {
            self.added.borrow_and_update();
            let changes = self.unread_changes()?;
            if !changes.is_empty() {
                return Ok(changes);
            }
            // An error is impossible: the borrowed log owns the sender.
            let _ = self.added.changed().await;
        }
    }

    /// Returns the changes since the last read without waiting, perhaps none.
    pub(crate) fn unread_changes(&mut self) -> Result<Vec<Change>, Reason> {
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
        // The history may begin before the requested revision.
        Ok(unread
            .filter(|change| change.revision > self.after)
            .cloned()
            .collect())
    }
}

fn object_key(object: &Value) -> Result<Key, Reason> {
    let field = |name| {
        object
            .pointer(name)
            .and_then(Value::as_str)
            .map(str::to_owned)
            .ok_or(Reason::Protocol)
    };
    Ok((field("/metadata/namespace")?, field("/metadata/name")?))
}

fn format_uid(seed: u64) -> String {
    // The uid must be unique in this store only, which lives as long as the rehearsal.
    format!("00000000-0000-4000-8000-{seed:012x}")
}

fn format_now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
