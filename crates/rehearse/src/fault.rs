//! What can be made to go wrong in a rehearsal, and what berth promises then.

use berth_judge::Signal;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long a new apiserver that starts slowly takes, beyond what it needs.
pub const SLOW: Duration = Duration::from_secs(5);

/// A fault. Several happen one after the other, in this order, before and in the first upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The new apiserver has a flag that it does not know, and ends at once
    BadFlag,
    /// The new apiserver never gets ready
    NeverReady,
    /// Before the upgrade, a second shim of the only instance gets SIGKILL; with a direct path, while it steers
    BesideKillShim,
    /// The same gets SIGSTOP, for longer than its lease
    BesideHangShim,
    /// The same gets SIGTERM
    BesideDrain,
    /// Before the upgrade, the only shim gets SIGKILL
    CalmKillShim,
    /// The same gets SIGSTOP, for longer than its lease
    CalmHangShim,
    /// Before the upgrade, the only apiserver gets SIGSTOP, until its shim has noticed
    CalmHang,
    /// The same gets SIGKILL
    CalmCrash,
    /// The new apiserver takes long to get ready
    SlowStart,
    /// The new apiserver gets SIGKILL while both serve (with a bridge: while that serves)
    CrashAfterReady,
    /// The new apiserver gets SIGSTOP while both serve, until its shim has noticed
    Hang,
    /// The old instance's shim, or the bridge, gets SIGKILL while both serve
    KillShim,
    /// The same gets SIGSTOP while both serve, for longer than its lease
    HangShim,
    /// The temporary instance of a bridge gets SIGKILL while the old one could serve, too
    KillTemporary,
    /// The old instance gets SIGKILL while a bridge serves, before it is to stop
    KillOld,
    /// All shims get SIGKILL while both serve
    BothKilled,
    /// A shim has no descriptor left for 3 s
    NoDescriptors,
    /// The clock of all shims jumps by a day or less (needs libfaketime)
    ClockJump,
    /// The new version answers 500 to one resource
    Errors,
    /// It lists 10 times slower
    SlowLists,
    /// One of its admission webhooks cannot be called
    Webhook,
    /// It lacks one API
    MissingApi,
    /// From its first client on it takes 50 MiB of memory a second, 512 MiB in all
    Leak,
}

/// What else could serve when something goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standby {
    /// Another instance.
    Sibling,
    /// The temporary one of a bridge; or, if it is hit itself, the node's own.
    Bridge,
    /// Nothing, but its shim holds clients until it is back.
    Shim,
    /// The direct path: an instance without a shim, or a sibling that steers. What is queued or unanswered at an instance, no shim holds.
    Direct,
    /// The old version, beside which the new one is judged.
    Judged,
    /// Nothing.
    Nothing,
}

impl Fault {
    /// Those of a new version that is judged.
    pub const JUDGED: [Self; 6] =
        [Self::Errors, Self::SlowLists, Self::Webhook, Self::MissingApi, Self::Leak, Self::Hang];

    /// What berth promises under it.
    pub fn promise(self, standby: Standby) -> &'static str {
        use Standby::{Bridge, Direct, Judged, Nothing, Shim, Sibling};
        match (self, standby) {
            (Self::Errors | Self::SlowLists | Self::Webhook | Self::MissingApi | Self::Leak, _) | (_, Judged) => {
                "the judge finds it and the old version gets all new connections again; nothing is lost but what the new one answered \
                 with an error"
            }
            (Self::BadFlag | Self::NeverReady, Bridge) => {
                "the new version never gets a connection, clients stay on the bridge until the old one is back, nothing is lost, and \
                 the reason is given"
            }
            (Self::BadFlag | Self::NeverReady, _) => {
                "the new version never gets a connection, the old one serves on, nothing is lost, and the reason is given"
            }
            (Self::SlowStart, _) => "the new version gets connections only when it is ready, and nothing is lost",
            (Self::CrashAfterReady | Self::Hang, Bridge) => "clients stay on the bridge, and nothing is lost",
            (Self::KillShim, Bridge) => {
                "only what the bridge had accepted is lost; no connection is refused, and new ones go to the node's own apiserver"
            }
            (Self::HangShim, Bridge) => {
                "what the bridge had accepted waits; when its time stamp is old, new connections go to the node's own apiserver; \
                 nothing is lost"
            }
            (Self::KillTemporary, _) => {
                "only what was on it ends; new connections go to the node's own apiserver until another is ready, and none is lost"
            }
            (Self::KillOld, _) => "only what was still on it ends; new connections go to the bridge, and none is lost",
            (Self::BesideKillShim | Self::BesideDrain, Direct) => {
                "what goes past the shim does not end with it, a sibling steers next, and nothing is lost"
            }
            (Self::BesideHangShim, Direct) => {
                "until its lease has run out new connections go past the shim, then a sibling accepts; nothing is lost"
            }
            (Self::BesideDrain, _) => "the sibling accepts what comes next; nothing is lost",
            (Self::CalmKillShim, Direct) => {
                "new connections are refused until it is back; what went past the shim does not end with it; nothing else is lost"
            }
            (Self::CalmHangShim, Direct) => {
                "for as long as its lease lasts new connections go past the shim, then clients wait until it goes on; nothing is lost"
            }
            (Self::CalmCrash, Direct) => {
                "what was on it ends, and with that new connections which it had not answered: the relay would replay those; all later \
                 ones are held until it is back, and none is lost"
            }
            (Self::CalmCrash, Shim) => {
                "only what it had begun to answer ends; all other new connections are held until it is back, and none is lost"
            }
            (Self::CrashAfterReady, Sibling) => {
                "only what was on the crashed apiserver ends; new connections go to the other one, and none is lost"
            }
            (Self::Hang, Sibling) => {
                "what it had begun to answer waits; when probes have failed, the other one answers all other connections, those that waited \
                 within 3 s; nothing is lost"
            }
            (Self::NoDescriptors, _) => "clients wait until the shim has descriptors again; nothing is lost",
            (Self::ClockJump, _) => "nothing is lost, and no client waits",
            (Self::CalmHang | Self::CalmHangShim, _) | (Self::Hang | Self::HangShim, Nothing) => {
                "clients wait until it goes on; nothing is lost"
            }
            (Self::KillShim | Self::BesideKillShim, Sibling) => {
                "only what the shim had accepted is lost; no connection is refused, and new ones go to the sibling"
            }
            (Self::Hang | Self::HangShim | Self::BesideHangShim, _) => {
                "what the shim had accepted waits; when its lease has run out, the sibling accepts; nothing is lost"
            }
            (
                Self::BothKilled
                | Self::CrashAfterReady
                | Self::KillShim
                | Self::BesideKillShim
                | Self::CalmKillShim
                | Self::CalmCrash,
                _,
            ) => "an outage until they are started again, and nothing is lost after that",
        }
    }

    /// Whether it is an upgrade of its own, which fails, before the real one.
    pub fn fails_the_upgrade(self) -> bool {
        matches!(self, Self::BadFlag | Self::NeverReady)
    }

    /// What the judge can find it by.
    pub(crate) fn signals(self) -> &'static [Signal] {
        match self {
            Self::Errors => &[Signal::Errors],
            Self::SlowLists => &[Signal::Latency],
            Self::Webhook => &[Signal::WebhookErrors, Signal::Errors],
            Self::MissingApi => &[Signal::MissingApi],
            Self::Leak => &[Signal::Memory],
            Self::Hang => &[Signal::NoAnswer],
            _ => &[],
        }
    }

    /// Whether only a new version that is judged can have it.
    pub fn is_of_judge(self) -> bool {
        Self::JUDGED.contains(&self) && self != Self::Hang
    }

    /// Whether it is done before the upgrade, to the one instance that serves.
    pub fn is_of_calm(self) -> bool {
        matches!(self, Self::CalmKillShim | Self::CalmHangShim | Self::CalmHang | Self::CalmCrash)
            || self.needs_a_second_shim()
    }

    /// Whether it is done to a second shim of an instance.
    pub fn needs_a_second_shim(self) -> bool {
        matches!(self, Self::BesideKillShim | Self::BesideHangShim | Self::BesideDrain)
    }

    /// Whether it is done under a bridge and nowhere else.
    pub fn needs_a_bridge(self) -> bool {
        matches!(self, Self::KillTemporary | Self::KillOld)
    }

    /// Whether it is done to a shim and never to another relay.
    pub fn is_of_shims(self) -> bool {
        matches!(self, Self::NoDescriptors | Self::ClockJump)
    }

    /// Whether it is done to what relays to an instance.
    pub fn needs_a_shim(self) -> bool {
        matches!(self, Self::KillShim | Self::HangShim | Self::BothKilled | Self::CalmKillShim | Self::CalmHangShim)
            || self.needs_a_second_shim()
            || self.is_of_shims()
    }
}
