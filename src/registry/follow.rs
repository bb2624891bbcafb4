//! Keeps the probing of instances in step with the records in the run directory.

use super::BerthDir;
use super::instance::{Listing, Problem, Record, list, prune};
use super::watch::Watch;
use crate::backend::prober::Probers;
use crate::instance::InstanceId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

/// Which instance is the shim's own, and whether its address is looked up here.
#[derive(Debug, Clone)]
pub struct Own {
    /// Its name.
    pub id: InstanceId,
    /// Its address was given: its record, if there is one, says nothing.
    pub given: bool,
}

/// Follows the records of a berth until it is dropped.
pub async fn follow(berth: BerthDir, own: Own, mut probers: Probers) {
    let mut watch = Watch::new(&berth);
    let mut known: BTreeMap<InstanceId, Record> = BTreeMap::new();
    let mut told: BTreeSet<Problem> = BTreeSet::new();
    let mut broken = false;
    loop {
        match list(&berth) {
            Ok(Listing { instances, problems }) => {
                broken = false;
                for problem in &problems {
                    if !told.contains(problem) {
                        tracing::warn!("{problem}");
                    }
                }
                told = problems.into_iter().collect();
                let live = instances.into_iter().filter(|listed| listed.alive).map(|listed| listed.record);
                let live: BTreeMap<_, _> = live
                    .filter(|record| !(own.given && record.instance == own.id))
                    .map(|record| (record.instance.clone(), record))
                    .collect();
                for id in known.keys().filter(|id| !live.contains_key(id)) {
                    probers.strike(id);
                }
                for (id, record) in &live {
                    let renewed = known.get(id).is_some_and(|before| before != record);
                    probers.enter(id, record.address, *id == own.id, renewed);
                }
                known = live;
            }
            Err(error) if !broken => {
                broken = true;
                tracing::warn!(folder = %berth.instances().display(), %error, "cannot list the instance records, trying again");
            }
            Err(_) => {}
        }
        if let Err(error) = prune(&berth, SystemTime::now()) {
            tracing::debug!(%error, "cannot prune instance records");
        }
        watch.changed().await;
    }
}
