//! Listeners on the shim's addresses that no shim of the berth holds: another proxy of the same uid, or a shim
//! with another run directory. (One of a sibling without a connection is told of as such.) The kernel gives them a
//! share of new connections, and nobody can guard them.

use crate::metrics::Metrics;
use berth_os::proc_net::{self, Owner};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

/// Those that were found, by their inodes.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    /// Seen once: maybe a sibling's, whose guard is on its way.
    suspects: BTreeSet<u64>,
    known: BTreeMap<u64, SocketAddr>,
}

impl Strangers {
    /// Looks at who listens on `addresses` beside `ours`, and says what is new.
    pub(super) fn look(&mut self, addresses: &[SocketAddr], ours: &BTreeSet<u64>, metrics: &Metrics) {
        // What cannot be read is no news of strangers: it is looked at again with the next renewal.
        let listeners = addresses.iter().flat_map(|address| proc_net::listeners_at(*address).unwrap_or_default());
        let found: Vec<_> = listeners.filter(|listener| !ours.contains(&listener.inode)).collect();
        self.known.retain(|inode, address| {
            let stays = found.iter().any(|listener| listener.inode == *inode);
            if !stays {
                tracing::info!(%address, "shared with shims only, again");
            }
            stays
        });
        for listener in &found {
            if self.suspects.contains(&listener.inode) && self.known.insert(listener.inode, listener.local).is_none() {
                let owner = Owner::of(listener);
                tracing::warn!(
                    address = %listener.local,
                    "the port is shared with {owner}, which is no shim of this berth: it gets a share of new connections, \
                     and what waits in its queue is reset when it ends; stop it without loss (docs/migrate-from-haproxy.md), \
                     or give both shims one --run-dir"
                );
            }
        }
        self.suspects = found.iter().map(|listener| listener.inode).collect();
        metrics.foreign_listeners.set(i64::try_from(self.known.len()).unwrap_or(i64::MAX));
    }

    /// There may be siblings' listeners among them.
    pub(super) fn forget_suspects(&mut self) {
        self.suspects.clear();
    }

    /// A listener is closed whose last clients nobody else can take out.
    pub(super) fn tell_of_close(&self) {
        for address in self.known.values() {
            tracing::warn!(
                %address,
                "the port is shared with a process that is no shim: what comes between the last accept and the close is \
                 reset; net.ipv4.tcp_migrate_req=1 would make it exact"
            );
        }
    }
}
