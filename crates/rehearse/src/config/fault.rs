//! What can be made to go wrong in a rehearsal, and what berth promises then.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A fault. Several happen one after the other, in this order, before and in the first upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The new apiserver has a flag that it does not know, and ends at once
    BadFlag,
    /// The new apiserver never gets ready
    NeverReady,
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
    /// A shim has no descriptor left for 3 s
    NoDescriptors,
    /// The clock of all shims jumps by a day or less (needs libfaketime)
    ClockJump,
}

/// What else could serve when something goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standby {
    /// Another instance.
    Sibling,
    /// The temporary one of a bridge; or, if it is hit itself, the node's own.
    Bridge,
    /// Nothing.
    Nothing,
}

impl Fault {
    /// What berth promises under it.
    pub fn promise(self, standby: Standby) -> &'static str {
        use Standby::{Bridge, Nothing, Sibling};
        match (self, standby) {
            (Self::BadFlag | Self::NeverReady, Bridge) => {
                "the new version never gets a connection, clients stay on the bridge until the old one is back, nothing is lost, and \
                 the reason is given"
            }
            (Self::BadFlag | Self::NeverReady, _) => {
                "the new version never gets a connection, the old one serves on, nothing is lost, and the reason is given"
            }
            (Self::CrashAfterReady | Self::Hang, Bridge) => {
                "clients stay on the bridge, and nothing is lost"
            }
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
            (Self::KillOld, _) => {
                "only what was still on it ends; new connections go to the bridge, and none is lost"
            }
            (Self::CrashAfterReady, Sibling) => {
                "only what was on the crashed apiserver ends; new connections go to the other one, and none is lost"
            }
            (Self::Hang, Sibling) => {
                "what it had begun to answer, or had accepted with --pass, waits; when probes have failed, the other one answers all other connections, those that waited \
                 within 3 s; nothing is lost"
            }
            (Self::NoDescriptors, _) => {
                "clients wait until the shim has descriptors again; nothing is lost"
            }
            (Self::ClockJump, _) => "nothing is lost, and no client waits",
            (Self::Hang | Self::HangShim, Nothing) => {
                "clients wait until it goes on; nothing is lost"
            }
            (Self::KillShim, Sibling) => {
                "only connections that the shim has are lost; none is refused, and new ones go to the sibling"
            }
            (Self::HangShim, Sibling) => {
                "connections that the shim has wait; when its lease has run out, the sibling accepts; nothing is lost"
            }
            (Self::CrashAfterReady | Self::KillShim, Nothing) => {
                "an outage until they are started again, and nothing is lost after that"
            }
        }
    }

    /// Whether it is an upgrade of its own, which fails, before the real one.
    pub fn fails_the_upgrade(self) -> bool {
        matches!(self, Self::BadFlag | Self::NeverReady)
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
        matches!(self, Self::KillShim | Self::HangShim) || self.is_of_shims()
    }
}
