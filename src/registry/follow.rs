//! Keeps the probing of instances in step with the run directory: with the records of `berth exec`, and
//! with the leases of siblings whose instance has no record (`--backend`).

use super::BerthDir;
use super::instance::{Problem, Record};
use super::watch::Watch;
use super::{instance, lease};
use crate::backend::prober::Probers;
use crate::instance::InstanceId;
use crate::os::clock;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::time::SystemTime;

/// Whose shim looks.
#[derive(Debug, Clone)]
pub struct Own {
    /// Its instance's name.
    pub id: InstanceId,
    /// Its instance's address was given: its record, if there is one, says nothing.
    pub given: bool,
    /// A node shim: an instance with a shim of its own is only its fallback.
    pub any: bool,
}

/// A live instance. Another value means another process.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Recorded(Box<Record>),
    Leased(SocketAddr),
}

impl Seen {
    fn address(&self) -> SocketAddr {
        match self {
            Self::Recorded(record) => record.address,
            Self::Leased(address) => *address,
        }
    }
}

/// What a look at the run directory shows.
#[derive(Debug, Default)]
struct Look {
    live: BTreeMap<InstanceId, Seen>,
    /// Instances with a live shim, the own one left out.
    shimmed: BTreeSet<InstanceId>,
    problems: BTreeSet<Problem>,
}

fn look(berth: &BerthDir, own: &Own) -> io::Result<Look> {
    let mut look = Look::default();
    let (boot, now) = (clock::boot_id()?, clock::boottime()?);
    for lease in lease::list(berth)?.leases {
        if lease.instance != own.id && lease.is_live(&boot, now) {
            look.live.extend(lease.backend.map(|address| (lease.instance.clone(), Seen::Leased(address))));
            look.shimmed.insert(lease.instance);
        }
    }
    let listing = instance::list(berth)?;
    look.problems.extend(listing.problems);
    for listed in listing.instances.into_iter().filter(|listed| listed.alive) {
        if !(own.given && listed.record.instance == own.id) {
            look.live.insert(listed.record.instance.clone(), Seen::Recorded(Box::new(listed.record)));
        }
    }
    Ok(look)
}

/// Follows a berth until it is dropped.
pub async fn follow(berth: BerthDir, own: Own, mut probers: Probers) {
    let mut watch = Watch::new(&berth);
    let mut known: BTreeMap<InstanceId, Seen> = BTreeMap::new();
    let mut told: BTreeSet<Problem> = BTreeSet::new();
    let mut broken = false;
    loop {
        match look(&berth, &own) {
            Ok(Look { live, shimmed, problems }) => {
                broken = false;
                for problem in problems.difference(&told) {
                    tracing::warn!("{problem}");
                }
                told = problems;
                for id in known.keys().filter(|id| !live.contains_key(id)) {
                    probers.strike(id);
                }
                for (id, seen) in &live {
                    let renewed = known.get(id).is_some_and(|before| before != seen);
                    probers.enter(id, seen.address(), *id == own.id, renewed);
                    probers.set_fallback(id, own.any && shimmed.contains(id));
                }
                known = live;
            }
            Err(error) if !broken => {
                broken = true;
                tracing::warn!(folder = %berth.path().display(), %error, "cannot look at the berth's folder, trying again");
            }
            Err(_) => {}
        }
        if let Err(error) = instance::prune(&berth, SystemTime::now()) {
            tracing::debug!(%error, "cannot prune instance records");
        }
        watch.changed().await;
    }
}
