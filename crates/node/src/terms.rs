//! Types that shims, their messages and records, and the commands share.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// ID of a shim's process, used because a pid could be reused. A shim that starts later has a
/// larger ID. Its text form is 16 lower-case hexadecimal digits; messages carry the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ShimId(pub u64);

impl ShimId {
    /// Number of random low bits of an ID. The 40 bits above them count milliseconds for 34 years.
    const RANDOM_BITS: u32 = 24;

    /// Returns the ID of a shim that starts at `start`, a time since the boot. All processes of a
    /// node share the boot.
    pub fn new(start: Duration, random: u64) -> Self {
        let start = u64::try_from(start.as_millis()).unwrap_or(u64::MAX);
        Self(start << Self::RANDOM_BITS | random & ((1 << Self::RANDOM_BITS) - 1))
    }
}

impl fmt::Display for ShimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for ShimId {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let id = u64::from_str_radix(text, 16).map(Self).ok();
        // Reject a sign, capitals, or fewer digits: each shim has exactly one name.
        id.filter(|id| id.to_string() == text)
            .ok_or("a holder is 16 lower-case hexadecimal digits")
    }
}

/// The [`Speedup`] of this process.
static DIVISOR: AtomicU32 = AtomicU32::new(1);

/// Returns the duration of a fixed time that no option sets: `usual`, shortened by
/// [`Speedup::apply`].
pub fn shorten_wait(usual: Duration) -> Duration {
    usual / DIVISOR.load(Relaxed)
}

/// Divisor of the fixed times that no option sets. A test of a whole process then does not wait for
/// the long intervals of a real network. 1 for users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speedup(NonZeroU32);

impl Speedup {
    pub const NONE: Self = Self(NonZeroU32::MIN);

    /// Shortens the fixed times of this process. Call this once, before anything runs.
    pub fn apply(self) {
        DIVISOR.store(self.0.get(), Relaxed);
    }

    /// Returns the usual time, shortened.
    pub fn of(self, usual: Duration) -> Duration {
        usual / self.0.get()
    }
}

impl Default for Speedup {
    fn default() -> Self {
        Self::NONE
    }
}

impl fmt::Display for Speedup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Speedup {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse()
            .map(Self)
            .map_err(|_| "give a whole number from 1")
    }
}

/// ID of a listening socket and all its duplicates (`SO_COOKIE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cookie(pub u64);

/// The state of a shim. Messages call this field `phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Joined,
    /// The shim no longer listens, lets its connections end, and holds guards until it exits.
    Left,
    /// No instance was reachable for longer than `--hold`: clients are refused at once.
    #[serde(rename = "dry")]
    Refusing,
    /// The shim's ports are bound and do not listen: its instance was not ready yet, or the shim
    /// had left and is about to listen again. The shim holds guards, and accepts from orphans. An
    /// unknown phase of a later version is read as `Waiting`, in which a shim does nothing for
    /// others.
    #[default]
    #[serde(other)]
    Waiting,
}

impl Phase {
    pub const ALL: [Self; 4] = [Self::Waiting, Self::Joined, Self::Left, Self::Refusing];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Joined => "joined",
            Self::Left => "left",
            Self::Refusing => "refusing",
        }
    }
}

/// Health of an instance, which decides about new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceHealth {
    /// `rise` consecutive probes passed.
    Ready,
    /// The instance was ready, then `fall` consecutive probes failed, but no connection was
    /// refused. The instance is used when no instance is ready, because a probe that times out
    /// under load must not cause an outage.
    Failing,
    /// The instance has not passed a probe since it was discovered or last refused a connection,
    /// and gets no connections. An unknown health of a later version is read as `Unready`.
    #[serde(other)]
    Unready,
}

impl InstanceHealth {
    pub const ALL: [Self; 3] = [Self::Unready, Self::Ready, Self::Failing];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unready => "unready",
            Self::Ready => "ready",
            Self::Failing => "failing",
        }
    }
}

/// The state that a shim announces to its siblings.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Announce {
    pub phase: Phase,
    pub ready: bool,
    /// True if the shim knows an instance that can get connections.
    pub reachable: bool,
    /// True if the shim leaves for good and takes over no more listeners.
    pub leaving: bool,
    pub owns: BTreeSet<Cookie>,
    pub accepts: BTreeSet<Cookie>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shim_that_starts_later_has_a_larger_id() {
        let (random, at) = ([0, 1, u64::MAX], |ms| Duration::from_millis(ms));
        for (first, then) in [(0, 1), (1_000, 1_001), (86_400_000, 86_400_001)] {
            for (one, other) in random
                .into_iter()
                .flat_map(|one| random.map(|other| (one, other)))
            {
                assert!(
                    ShimId::new(at(first), one) < ShimId::new(at(then), other),
                    "{first} {then}"
                );
            }
        }
        assert_ne!(ShimId::new(at(1), 1), ShimId::new(at(1), 2));
    }
}
