//! Faults that a rehearsal can inject, and the promises of berth under them.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A fault that a rehearsal injects. The script injects several faults one after another, in the
/// order of this list, before and during the first upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The new apiserver gets an unknown flag and exits at once
    BadFlag,
    /// The new apiserver never gets ready
    NeverReady,
    /// The new apiserver gets SIGKILL while both instances serve (or while a bridge serves)
    CrashAfterReady,
    /// The new apiserver gets SIGSTOP while both instances serve, until its shim has noticed
    Hang,
    /// The old instance's shim, or the bridge, gets SIGKILL while both instances serve
    KillShim,
    /// The old instance's shim, or the bridge, gets SIGSTOP for longer than its lease
    HangShim,
    /// The temporary instance of a bridge gets SIGKILL while the old instance still runs
    KillTemporary,
    /// The old instance gets SIGKILL while a bridge serves, before it would be stopped
    KillOld,
    /// A shim has no free file descriptor for 3 s
    NoDescriptors,
    /// The clock of all shims jumps by a day or less (needs libfaketime)
    ClockJump,
}

/// The instance, if any, that can serve clients in place of the faulty one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standby {
    /// The other instance.
    Sibling,
    /// The temporary instance of a bridge, or the node's kube-apiserver if the fault hits the
    /// temporary instance.
    Bridge,
    /// No instance.
    Nothing,
}

impl Fault {
    /// Returns, in words, what berth promises to clients if the fault happens.
    pub fn promise(self, standby: Standby) -> &'static str {
        use Standby::{Bridge, Nothing, Sibling};
        match (self, standby) {
            (Self::BadFlag | Self::NeverReady, Bridge) => {
                "the new version never gets a connection, clients stay on the bridge until the old version is back, nothing is lost, and \
                 the reason is reported"
            }
            (Self::BadFlag | Self::NeverReady, _) => {
                "the new version never gets a connection, the old version continues to serve, nothing is lost, and the reason is reported"
            }
            (Self::CrashAfterReady | Self::Hang, Bridge) => {
                "clients stay on the bridge, and nothing is lost"
            }
            (Self::KillShim, Bridge) => {
                "only connections that the bridge had accepted are lost; no connection is refused, and new connections go to the node's kube-apiserver"
            }
            (Self::HangShim, Bridge) => {
                "connections that the bridge had accepted wait; when the bridge's time stamp is too old, new connections go to the node's \
                 kube-apiserver; nothing is lost"
            }
            (Self::KillTemporary, _) => {
                "only connections on the temporary kube-apiserver end; new connections go to the node's kube-apiserver until another \
                 temporary kube-apiserver is ready, and no new connection is lost"
            }
            (Self::KillOld, _) => {
                "only connections still on the old kube-apiserver end; new connections go to the bridge, and no new connection is lost"
            }
            (Self::CrashAfterReady, Sibling) => {
                "only connections on the crashed apiserver end; new connections go to the other apiserver, and no new connection is lost"
            }
            (Self::Hang, Sibling) => {
                "requests that the hanging apiserver had begun to answer wait, and so do connections that it had accepted with --pass; when \
                 probes have failed, the other apiserver answers all other connections, waiting connections within 3 s; nothing is lost"
            }
            (Self::NoDescriptors, _) => {
                "clients wait until the shim has file descriptors again; nothing is lost"
            }
            (Self::ClockJump, _) => "nothing is lost, and no client waits",
            (Self::Hang | Self::HangShim, Nothing) => {
                "clients wait until the process continues; nothing is lost"
            }
            (Self::KillShim, Sibling) => {
                "only connections that the shim has are lost; no connection is refused, and new connections go to the sibling"
            }
            (Self::HangShim, Sibling) => {
                "connections that the shim has wait; when the shim's lease has expired, the sibling accepts new connections; nothing is lost"
            }
            (Self::CrashAfterReady | Self::KillShim, Nothing) => {
                "an outage until the process is started again; nothing is lost after the restart"
            }
        }
    }

    /// True if the fault makes an upgrade fail. The script then tries an extra upgrade with the
    /// fault, before the real upgrade.
    pub fn fails_the_upgrade(self) -> bool {
        matches!(self, Self::BadFlag | Self::NeverReady)
    }

    /// True if the fault is only possible under a bridge.
    pub fn needs_a_bridge(self) -> bool {
        matches!(self, Self::KillTemporary | Self::KillOld)
    }

    /// True if the fault can be injected only in a shim: HAProxy, the other relay, cannot have it.
    pub fn harms_shims(self) -> bool {
        matches!(self, Self::NoDescriptors | Self::ClockJump)
    }

    /// True if the fault is injected in a relay (a shim or HAProxy), and not in an apiserver.
    pub fn needs_a_shim(self) -> bool {
        matches!(self, Self::KillShim | Self::HangShim) || self.harms_shims()
    }
}
