//! The rehearsal's own store of ConfigMaps, in the place of etcd: one revision for all, and a history
//! that watches read. Both stand-ins get their objects here (through [`super::hub`]), so both serve
//! the same objects with the same resourceVersions.
//!
//! What is a valid object is decided by the stand-in, not here.

use super::wire::{Change, ChangeKind, Reason};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;
use tokio::sync::watch;

/// Changes that are kept for watches. A rehearsal writes some hundred.
const HISTORY: usize = 10_000;

type Key = (String, String);

/// The store. Cheap to share behind an `Arc`.
#[derive(Debug)]
pub struct Store {
    inner: Mutex<Inner>,
    revision: watch::Sender<u64>,
    keep: usize,
}

#[derive(Debug)]
struct Inner {
    revision: u64,
    objects: BTreeMap<Key, Value>,
    history: VecDeque<Change>,
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
        let inner = Inner { revision: 1, objects: BTreeMap::new(), history: VecDeque::new() };
        Self { inner: Mutex::new(inner), revision: watch::Sender::new(1), keep }
    }

    /// The object of that name.
    pub fn get(&self, namespace: &str, name: &str) -> Result<Value, Reason> {
        self.lock().objects.get(&(namespace.into(), name.into())).cloned().ok_or(Reason::NotFound)
    }

    /// The revision, and all objects (of one namespace) in order.
    pub fn list(&self, namespace: Option<&str>) -> (u64, Vec<Value>) {
        let inner = self.lock();
        let here = |(key, _): &(&Key, &Value)| namespace.is_none_or(|n| key.0 == n);
        (inner.revision, inner.objects.iter().filter(here).map(|(_, object)| object.clone()).collect())
    }

    /// Adds an object; gives it back with uid, creationTimestamp and resourceVersion.
    pub fn create(&self, object: Value) -> Result<Value, Reason> {
        let key = key(&object)?;
        let mut inner = self.lock();
        if inner.objects.contains_key(&key) {
            return Err(Reason::Exists);
        }
        let made = json!({"uid": uid(inner.revision), "creationTimestamp": timestamp()});
        Ok(self.write(&mut inner, key, object, &made, ChangeKind::Added))
    }

    /// Replaces an object, if the `resourceVersion` in it (where there is one) is the present one.
    pub fn update(&self, object: Value) -> Result<Value, Reason> {
        let key = key(&object)?;
        let mut inner = self.lock();
        let old = inner.objects.get(&key).ok_or(Reason::NotFound)?;
        let wanted = object.pointer("/metadata/resourceVersion").and_then(Value::as_str).unwrap_or_default();
        if !wanted.is_empty() && old.pointer("/metadata/resourceVersion").and_then(Value::as_str) != Some(wanted) {
            return Err(Reason::Conflict);
        }
        let kept = json!({"uid": old["metadata"]["uid"], "creationTimestamp": old["metadata"]["creationTimestamp"]});
        Ok(self.write(&mut inner, key, object, &kept, ChangeKind::Modified))
    }

    /// Removes an object; gives it back as it was, with the revision of its removal.
    pub fn delete(&self, namespace: &str, name: &str) -> Result<Value, Reason> {
        let mut inner = self.lock();
        let object = inner.objects.remove(&(namespace.into(), name.into())).ok_or(Reason::NotFound)?;
        Ok(self.change(&mut inner, object, ChangeKind::Deleted))
    }

    /// Changes after a revision, from the history and then as they come.
    pub fn watch(&self, after: u64) -> Changes<'_> {
        Changes { store: self, after, revision: self.revision.subscribe() }
    }

    fn write(&self, inner: &mut Inner, key: Key, mut object: Value, metadata: &Value, kind: ChangeKind) -> Value {
        for field in ["uid", "creationTimestamp"] {
            object["metadata"][field] = metadata[field].clone();
        }
        let object = self.change(inner, object, kind);
        inner.objects.insert(key, object.clone());
        object
    }

    /// Gives an object the next revision, and tells watches.
    fn change(&self, inner: &mut Inner, mut object: Value, kind: ChangeKind) -> Value {
        inner.revision += 1;
        object["metadata"]["resourceVersion"] = json!(inner.revision.to_string());
        inner.history.push_back(Change { revision: inner.revision, kind, object: object.clone() });
        if inner.history.len() > self.keep {
            inner.history.pop_front();
        }
        self.revision.send_replace(inner.revision);
        object
    }

    fn since(&self, after: u64) -> Result<Vec<Change>, Reason> {
        let inner = self.lock();
        // Every write makes one revision and one change, so the oldest kept change says how far back
        // the history goes.
        let oldest = inner.history.front().map_or(inner.revision + 1, |c| c.revision);
        let first = after.saturating_add(1);
        if first < oldest {
            return Err(Reason::Gone);
        }
        let skip = usize::try_from(first - oldest).unwrap_or(usize::MAX);
        Ok(inner.history.iter().skip(skip).cloned().collect())
    }

    /// A panic elsewhere leaves whole objects behind: each write is one insertion.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reader of changes.
#[derive(Debug)]
pub struct Changes<'a> {
    store: &'a Store,
    after: u64,
    revision: watch::Receiver<u64>,
}

impl Changes<'_> {
    /// Waits for changes and returns them all, oldest first; [`Reason::Gone`] when some were
    /// forgotten already. Nothing is skipped when the future is dropped.
    pub async fn next(&mut self) -> Result<Vec<Change>, Reason> {
        loop {
            self.revision.borrow_and_update();
            let changes = self.store.since(self.after)?;
            if let Some(last) = changes.last() {
                self.after = last.revision;
                return Ok(changes);
            }
            // The sender lives in the store that is borrowed here.
            let _ = self.revision.changed().await;
        }
    }
}

fn key(object: &Value) -> Result<Key, Reason> {
    let field = |name| object.pointer(name).and_then(Value::as_str).map(str::to_owned).ok_or(Reason::Protocol);
    Ok((field("/metadata/namespace")?, field("/metadata/name")?))
}

fn uid(seed: u64) -> String {
    // Unique within one store is enough: it lives as long as the rehearsal.
    format!("00000000-0000-4000-8000-{seed:012x}")
}

fn timestamp() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(name: &str) -> Value {
        json!({"metadata": {"namespace": "n", "name": name}, "data": {}})
    }

    #[test]
    fn revisions_rise_and_conflicts_are_seen() {
        let store = Store::default();
        let a = store.create(map("a")).unwrap();
        assert_eq!(a["metadata"]["resourceVersion"], "2");
        assert_eq!(store.create(map("a")), Err(Reason::Exists));
        let b = store.update(a.clone()).unwrap();
        assert_eq!(b["metadata"]["resourceVersion"], "3");
        assert_eq!(b["metadata"]["uid"], a["metadata"]["uid"]);
        assert_eq!(store.update(a), Err(Reason::Conflict));
        assert_eq!(store.update(map("x")), Err(Reason::NotFound));
        assert_eq!(store.get("n", "a"), Ok(b));
        assert_eq!(store.create(json!({"metadata": 3})), Err(Reason::Protocol));
        assert_eq!(store.list(Some("other")), (3, vec![]));
        assert_eq!(store.list(None).1.len(), 1);
        assert_eq!(store.delete("n", "x"), Err(Reason::NotFound));
        assert_eq!(store.delete("n", "a").unwrap()["metadata"]["resourceVersion"], "4");
        assert_eq!(store.get("n", "a"), Err(Reason::NotFound));
    }

    #[tokio::test]
    async fn a_watch_sees_history_then_what_comes() {
        let store = Store::default();
        store.create(map("a")).unwrap();
        let mut changes = store.watch(1);
        assert_eq!(changes.next().await.unwrap()[0].revision, 2);
        let (seen, _) = tokio::join!(changes.next(), async { store.create(map("b")) });
        let seen = seen.unwrap();
        assert_eq!((seen.len(), seen[0].revision, seen[0].kind), (1, 3, ChangeKind::Added));
        store.delete("n", "a").unwrap();
        assert_eq!(changes.next().await.unwrap()[0].kind, ChangeKind::Deleted);
    }

    #[tokio::test]
    async fn a_watch_from_before_the_history_is_told() {
        let store = Store::with_history(2);
        for name in ["a", "b", "c"] {
            store.create(map(name)).unwrap();
        }
        assert_eq!(store.watch(1).next().await, Err(Reason::Gone));
        assert_eq!(store.watch(2).next().await.unwrap().len(), 2);
    }
}
