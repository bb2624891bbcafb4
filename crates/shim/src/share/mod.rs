//! The share of the node's new connections that each of two instances gets, while the shims of both
//! instances are joined ([`Share`]). `sides` decides. A connection of the sibling's side is passed
//! to the sibling as a socket (`relay/attempt.rs`).
//!
//! A share yields to everything else. A shim that leaves, or has no ready instance, ignores the
//! share. A sibling that is not ready, or does not take a client at once, gets no client. Without a
//! share in force, a new connection costs an atomic load; with a share, two hashes behind a lock.

mod sides;

use crate::family::{encode_family, encode_gauge};
use berth_node::instance_id::InstanceId;
use berth_node::ipc::wire::{Share, ShareStatus, Side};
use berth_node::registry::BerthDir;
use humantime::{format_duration, format_rfc3339_millis};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use sides::Sides;
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// Longest lease of a share. The share of a sender that died ends after this time.
const MAX_LEASE: Duration = Duration::from_secs(600);

/// How a new connection was placed while a share was in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// The connection is on the own instance's side.
    Kept,
    Passed,
    /// The sibling did not take the connection: the own instance serves it.
    Declined,
}

impl Placement {
    const ALL: [(Self, &'static str); 3] = [
        (Self::Kept, "kept"),
        (Self::Passed, "passed"),
        (Self::Declined, "declined"),
    ];
}

/// How new connections are divided between this shim and a sibling. Nothing is divided if no share
/// is in force.
#[derive(Debug, Default)]
pub struct Sharing {
    is_on: AtomicBool,
    now: Mutex<Option<ActiveShare>>,
    connections: [AtomicU64; Placement::ALL.len()],
}

#[derive(Debug)]
struct ActiveShare {
    share: Share,
    /// Side of this shim's instance: old or new.
    side: Side,
    /// The socket of the sibling.
    sibling: Arc<Path>,
    until: Instant,
    sides: Sides,
}

impl Sharing {
    /// Puts a share in force, renews the share, or ends the share.
    ///
    /// # Errors
    /// The share is for other shims, or out of bounds.
    pub(crate) fn set_share(
        &self,
        share: Share,
        own: &InstanceId,
        berth: &BerthDir,
        at: Instant,
    ) -> Result<(), String> {
        let Share {
            old,
            new,
            permille,
            salt,
            local,
            ..
        } = &share;
        let lease = Duration::from_millis(share.lease_ms);
        let (side, sibling) = match () {
            () if old == new => {
                return Err(format!(
                    "a share between instance {old} and itself: name two instances"
                ));
            }
            () if own == old => (Side::Old, new),
            () if own == new => (Side::New, old),
            () => {
                return Err(format!(
                    "a share between instances {old} and {new}, and this is the shim of {own}"
                ));
            }
        };
        if *permille > 1000 {
            return Err(format!("a share of {permille} thousandths: give 0 to 1000"));
        }
        if lease > MAX_LEASE {
            let [lease, most] = [lease, MAX_LEASE].map(format_duration);
            return Err(format!(
                "a share for {lease}: give {most} at most, and send the share again before the share ends"
            ));
        }
        let sibling = berth
            .socket_path(sibling)
            .map_err(|error| error.to_string())?
            .into();
        if lease.is_zero() {
            self.end_share("as requested");
            return Ok(());
        }
        self.expire(at);
        let mut now = self.lock_share();
        let before = now.take();
        let is_renewed = |before: &ActiveShare| {
            Share {
                lease_ms: share.lease_ms,
                ..before.share.clone()
            } == share
        };
        if !before.as_ref().is_some_and(is_renewed) {
            let what = if before.is_some() {
                "changes"
            } else {
                "begins"
            };
            let lease = format_duration(lease);
            tracing::info!(%old, %new, permille, salt, local, %lease, "a share of new connections {what}");
        }
        let sides = before
            .map(|before| before.sides)
            .filter(|sides| sides.salt == *salt);
        let sides = sides.unwrap_or_else(|| Sides::new(*salt));
        *now = Some(ActiveShare {
            side,
            sibling,
            until: at + lease,
            sides,
            share,
        });
        self.is_on.store(true, Relaxed);
        Ok(())
    }

    /// Returns the time at which the share in force ends.
    pub(crate) fn expiry(&self) -> Option<Instant> {
        self.lock_share().as_ref().map(|now| now.until)
    }

    /// Ends a share with an expired lease.
    pub(crate) fn expire(&self, at: Instant) {
        if self.expiry().is_some_and(|until| until <= at) {
            self.end_share("the lease of the share has run out, and was not renewed");
        }
    }

    fn end_share(&self, why: &str) {
        self.is_on.store(false, Relaxed);
        if let Some(ActiveShare {
            share: Share {
                old, new, permille, ..
            },
            ..
        }) = self.lock_share().take()
        {
            tracing::info!(%old, %new, permille, "the share of new connections ends: {why}");
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.is_on.load(Relaxed)
    }

    /// Returns the socket of the sibling that gets a new connection. `None` if the connection is on
    /// the own side. `listener` is the address that the client dialled.
    pub(crate) fn choose_sibling(
        &self,
        client: SocketAddr,
        listener: Option<SocketAddr>,
        at: Instant,
    ) -> Option<Arc<Path>> {
        let mut now = self.lock_share();
        // The control plane may end the share too late, so the time is checked here.
        let now = now.as_mut().filter(|now| at < now.until)?;
        let ip = client.ip().to_canonical();
        let is_local =
            ip.is_loopback() || listener.is_some_and(|listener| listener.ip().to_canonical() == ip);
        let side = if is_local && !now.share.local {
            Side::Old
        } else {
            now.sides.choose_side(now.share.permille, client)
        };
        if side == now.side {
            self.count_placement(Placement::Kept);
            return None;
        }
        Some(now.sibling.clone())
    }

    pub(crate) fn count_placement(&self, placed: Placement) {
        self.connections[placed as usize].fetch_add(1, Relaxed);
    }

    pub(crate) fn status(&self) -> Option<ShareStatus> {
        let now = self.lock_share();
        let ActiveShare {
            share,
            side,
            until,
            sides,
            ..
        } = now.as_ref()?;
        let left = until.checked_duration_since(Instant::now())?;
        Some(ShareStatus {
            share: share.clone(),
            side: *side,
            by_address: sides.by_address,
            by_connection: sides.by_connection,
            until: format_rfc3339_millis(SystemTime::now() + left).to_string(),
        })
    }

    fn lock_share(&self) -> MutexGuard<'_, Option<ActiveShare>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes metrics of the share in force and of its counters.
#[derive(Debug)]
pub(crate) struct ShareMetrics(pub(crate) Arc<Sharing>);

impl Collector for ShareMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        if let Some(ShareStatus { share, side, .. }) = self.0.status() {
            let own = if side == Side::New {
                share.permille
            } else {
                1000 - share.permille
            };
            let help =
                "Part of the node's new connections that kube-apiserver is to get, from 0 to 1";
            encode_gauge(&mut to, "berth_share_ratio", help, f64::from(own) / 1000.0)?;
        }
        let connections = Placement::ALL.map(|(placed, result)| {
            (
                [("result", result)],
                ConstCounter::new(self.0.connections[placed as usize].load(Relaxed)),
            )
        });
        let help = "New connections while a share of new connections was in force, by result";
        encode_family(
            &mut to,
            "berth_share_connections",
            help,
            MetricType::Counter,
            connections,
        )
    }
}

#[cfg(test)]
mod tests;
