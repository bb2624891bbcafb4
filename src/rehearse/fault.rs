//! What can be made to go wrong in a rehearsal.

use clap::ValueEnum;
use serde::Serialize;

/// A thing that goes wrong. Several happen one after the other, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The new apiserver has a flag that it does not know, and ends at once
    BadFlag,
    /// The new apiserver listens and never gets ready
    NeverReady,
    /// The new apiserver takes long to get ready
    SlowStart,
    /// The new apiserver gets SIGKILL while both serve
    CrashAfterReady,
    /// The new apiserver gets SIGSTOP while both serve, until its shim has noticed
    Hang,
    /// The new instance's shim gets SIGKILL while both serve
    KillShim,
    /// The new instance's shim gets SIGSTOP while both serve, for longer than its lease
    HangShim,
    /// All shims get SIGKILL while both serve
    BothKilled,
}
