//! Puts back what was removed from a run directory while it is in use: the directories, and the records of instances
//! that live. (A shim's lease comes back with its next renewal; [`berth_node::ipc::Server`] puts its socket back.)
//!
//! That the directory is empty is no reason to stop: whoever holds a lock, a listener or a connection lives. But it
//! is where newcomers and commands look.

use crate::metrics::Metrics;
use berth_node::instance::InstanceId;
use berth_node::registry::BerthDir;
use berth_node::registry::instance::{self, ClaimError, HeldRecord, InstanceClaim};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long a record must be missing. A `berth exec` that could not become its command removes its own and ends a
/// moment later.
const MISSING: Duration = Duration::from_millis(300);

/// What is put back.
#[derive(Debug)]
pub(super) struct Repair {
    berth: BerthDir,
    metrics: Arc<Metrics>,
    /// Since when the record of a live instance is missing.
    missing: BTreeMap<InstanceId, Instant>,
    /// Records that were written again. The instance's own lock is on a file without a name.
    kept: BTreeMap<InstanceId, InstanceClaim>,
    /// Failures that were logged, until something succeeds.
    told: BTreeSet<String>,
}

impl Repair {
    pub(super) fn new(berth: BerthDir, metrics: Arc<Metrics>) -> Self {
        Self { berth, metrics, missing: BTreeMap::new(), kept: BTreeMap::new(), told: BTreeSet::new() }
    }

    /// Whether there is something to look after before the next notice.
    pub(super) fn is_busy(&self) -> bool {
        !self.missing.is_empty() || !self.kept.is_empty()
    }

    /// Makes directories again that are gone.
    pub(super) fn directories(&mut self) {
        match self.berth.restore() {
            Ok(false) => {}
            Ok(true) => {
                let path = self.berth.path().display();
                tracing::warn!(
                    "the run directory was removed: {path} is made again, and what lives is recorded there again"
                );
                self.metrics.repaired("directory", "ok");
                self.told.clear();
            }
            Err(error) => {
                self.metrics.repaired("directory", "failed");
                if self.told.insert(error.to_string()) {
                    tracing::warn!(
                        "the run directory was removed and cannot be made again: what is known goes on, newcomers and \
                         commands find nobody: {error}"
                    );
                }
            }
        }
    }

    /// An instance has ended: its record is dead for everybody.
    pub(super) fn ended(&mut self, id: &InstanceId) {
        self.missing.remove(id);
        self.kept.remove(id);
    }

    /// Writes the record of a live instance again, if it is missing and not only for a moment, or the shim that wrote
    /// it is gone, which locked it.
    pub(super) fn record(&mut self, held: &HeldRecord) {
        let id = &held.record().instance;
        let orphaned = held.is_restored() && !self.kept.contains_key(id);
        if !orphaned && !instance::is_missing(&self.berth, id) {
            self.missing.remove(id);
            return;
        }
        let since = *self.missing.entry(id.clone()).or_insert_with(Instant::now);
        if !orphaned && since.elapsed() < MISSING {
            return;
        }
        match instance::restore(&self.berth, held.record()) {
            Ok(None) => drop(self.missing.remove(id)),
            Err(ClaimError::Busy { .. }) => {}
            Ok(Some(claim)) => {
                if orphaned {
                    tracing::info!(instance = %id, "the shim that locked this instance's record is gone: this one locks it");
                } else {
                    tracing::warn!(
                        instance = %id,
                        "the record of a live instance was removed: it is written again, and this shim locks it until \
                         the instance ends"
                    );
                }
                self.metrics.repaired("record", "ok");
                self.missing.remove(id);
                self.kept.insert(id.clone(), claim);
            }
            Err(error) => {
                self.metrics.repaired("record", "failed");
                if self.told.insert(error.to_string()) {
                    tracing::warn!(instance = %id, "the record of a live instance was removed and cannot be written again: {error}");
                }
            }
        }
    }
}
