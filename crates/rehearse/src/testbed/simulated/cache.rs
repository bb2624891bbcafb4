//! What kube-apiserver's watch cache is to it: all changes since it began, from which watches are served.
//!
//! It begins with a list when the instance starts, so a watch from an older revision cannot be served:
//! 410. How far the store has come it knows from changes, and where there are none from the store's notices,
//! as of etcd's (`--watch-progress-notify-interval`).

use super::store_client::{StoreClient, unexpected};
use crate::testbed::store::{Log, wire::Reply};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The changes since it began.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) log: Log,
    progress: AtomicU64,
}

impl Cache {
    /// Begins, and keeps the last `keep` changes. When it loses its store it goes on without changes:
    /// kube-apiserver does not end watches because etcd is away either.
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
                    // Earlier changes are in the log already.
                    Ok(Reply::Progress { revision }) => cache.progress.store(revision, Relaxed),
                    Ok(other) => {
                        return tracing::warn!(error = %unexpected(&other), "the store is lost");
                    }
                    Err(error) => return tracing::warn!(%error, "the store is lost"),
                }
            }
        });
        Ok(kept)
    }

    /// The revision up to which the log is complete, by the store's progress.
    pub(super) fn progress(&self) -> u64 {
        self.progress.load(Relaxed)
    }
}
