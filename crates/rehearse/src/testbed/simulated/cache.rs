//! The watch cache, like kube-apiserver's: all changes since the instance started. Watches are
//! served from the cache.
//!
//! The cache begins with a list when the instance starts. A watch from an older revision gets 410.
//! The cache learns the store's revision from changes, and between changes from progress
//! notifications, like etcd's (`--watch-progress-notify-interval`).

use super::store_client::{StoreClient, unexpected_reply};
use crate::testbed::store::{Log, wire::Reply};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The changes since the start of the cache.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) log: Log,
    progress: AtomicU64,
}

impl Cache {
    /// Starts a cache of the last `keep` changes. After a loss of the store the cache goes on
    /// without changes, just as kube-apiserver does not end watches while etcd is away.
    pub(super) async fn start(store: &StoreClient, keep: usize) -> io::Result<Arc<Self>> {
        let (revision, _) = store.list(None).await?;
        let mut source = store.watch(revision).await?;
        let cache = Arc::new(Self {
            log: Log::new(revision, keep),
            progress: AtomicU64::new(revision),
        });
        let kept = Arc::clone(&cache);
        tokio::spawn(async move {
            loop {
                match source.next().await {
                    Ok(Reply::Change(change)) => cache.log.add(change),
                    // The store sends a revision after all changes up to that revision, so these
                    // changes are in the log already.
                    Ok(Reply::Progress { revision }) => cache.progress.store(revision, Relaxed),
                    Ok(other) => {
                        return tracing::warn!(error = %unexpected_reply(&other), "the store is lost");
                    }
                    Err(error) => return tracing::warn!(%error, "the store is lost"),
                }
            }
        });
        Ok(kept)
    }

    /// Returns the revision up to which the log is complete, according to the store's progress
    /// notifications.
    pub(super) fn progress_revision(&self) -> u64 {
        self.progress.load(Relaxed)
    }
}
