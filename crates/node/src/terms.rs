//! Types that shims, commands, messages and records all use.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// ID of a shim's process. A process ID would not do, because another process can get it later. A
/// shim that starts later has a larger ID. Its text form is 16 lower-case hexadecimal digits;
/// messages carry the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ShimId(pub u64);

impl ShimId {
    /// Number of random bits at the end of an ID. The 40 bits before them count milliseconds, which
    /// suffices for 34 years.
    const RANDOM_BITS: u32 = 24;

    /// Returns the ID of a shim that starts at `start`, a time since the node's boot.
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
        // The text must have exactly the form that `Display` writes, so that each shim has one name
        // only. A sign, capitals or fewer digits are refused.
        id.filter(|id| id.to_string() == text)
            .ok_or("a holder is 16 lower-case hexadecimal digits")
    }
}

/// The divisor that [`Speedup::speed_up_process`] sets for this process.
static WAIT_DIVISOR: AtomicU32 = AtomicU32::new(1);

/// Shortens a time that no option sets: returns `usual`, divided as [`Speedup`] says.
pub fn shorten_wait(usual: Duration) -> Duration {
    usual / WAIT_DIVISOR.load(Relaxed)
}

/// Divides the fixed times that no option sets, so that a test of a whole process need not wait for
/// the long intervals of a real network. Outside of tests, the divisor is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speedup(NonZeroU32);

impl Speedup {
    pub const NONE: Self = Self(NonZeroU32::MIN);

    /// Divides the fixed times of this process from now on. Call this once, before anything runs.
    pub fn speed_up_process(self) {
        WAIT_DIVISOR.store(self.0.get(), Relaxed);
    }

    /// Returns the usual time, divided by this divisor.
    pub fn shorten(self, usual: Duration) -> Duration {
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

/// The kernel's number for a listening socket (`SO_COOKIE`). All duplicates of a socket have the
/// same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cookie(pub u64);

/// The state of a shim in its group of siblings. In messages, the field is named `phase`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Joined,
    /// The shim no longer listens, and lets its connections end. Until it exits, it holds
    /// duplicates of its siblings' listeners (guards).
    Left,
    /// The shim refuses clients at once, because no instance was reachable for longer than
    /// `--hold`.
    #[serde(rename = "dry")]
    Refusing,
    /// The shim has bound its ports and does not listen: its instance has not been ready yet, or
    /// the shim had left and is about to listen again. The shim holds duplicates of its siblings'
    /// listeners (guards). When the owner of a guard is gone, the shim accepts from the guard. An
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

/// Health of an instance. It decides whether the instance gets new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceHealth {
    /// The instance has passed `rise` consecutive probes.
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
    /// True if the shim knows an instance to which connections can go.
    pub reachable: bool,
    /// True if the shim leaves for good, and takes over no listeners any more.
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
