//! Types that shims, their messages and records, and the commands share.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Identifies a shim's process; a pid could be reused. A shim that starts later has a larger one. As text it is 16 lower-case
/// hexadecimal digits; messages have the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ShimId(pub u64);

impl ShimId {
    /// Low bits of an ID that are random. The 40 above them count milliseconds for 34 years.
    const RANDOM_BITS: u32 = 24;

    /// Of a shim that starts at this time since the boot, which is the same for all processes of a node.
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
        // Not a sign, a capital, or fewer digits: one shim has one name.
        id.filter(|id| id.to_string() == text)
            .ok_or("a holder is 16 lower-case hexadecimal digits")
    }
}

/// The [`Speedup`] of this process.
static DIVISOR: AtomicU32 = AtomicU32::new(1);

/// A fixed time, which no option sets: the usual one, shortened by [`Speedup::apply`].
pub fn shortened(usual: Duration) -> Duration {
    usual / DIVISOR.load(Relaxed)
}

/// By how much the fixed times, which no option sets, are shortened: a test that runs a whole process does not wait for
/// what a real network repeats after seconds. 1 for users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speedup(NonZeroU32);

impl Speedup {
    pub const NONE: Self = Self(NonZeroU32::MIN);

    /// Shortens the fixed times of this process: once, before anything runs.
    pub fn apply(self) {
        DIVISOR.store(self.0.get(), Relaxed);
    }

    /// The usual time, shortened.
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

/// Identifies a listening socket and all its duplicates (`SO_COOKIE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cookie(pub u64);

/// The state of a shim. On the wire it is its `phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Joined,
    /// It no longer listens and lets its connections end; it holds guards until it exits.
    Left,
    /// Nothing was reachable for longer than `--hold`: clients are refused at once.
    #[serde(rename = "dry")]
    Refusing,
    /// Its ports are bound and do not listen: its own instance was not ready yet, or the shim had left and is about to listen again. It holds
    /// guards, and accepts from orphans. An unknown phase of a later version is read as this one, in which a shim does nothing for others.
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

/// Whether an instance can get connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceHealth {
    /// `rise` consecutive probes passed.
    Ready,
    /// It was ready, then `fall` consecutive probes failed, but no connection was refused: it is used when
    /// no instance is ready, because a probe that times out under load must not cause an outage.
    Failing,
    /// It has not passed a probe since it was discovered or last refused a connection: it gets none. An unknown health of a later
    /// version is read as this one.
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
    /// Whether it knows any instance that can get connections.
    pub reachable: bool,
    /// Whether it leaves for good: it takes nothing over any more.
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
