//! The machine's input and output.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Version {
    /// The version that ran before the upgrade.
    Old,
    /// The version to upgrade to, behaving as the old release while it is judged.
    Emulated,
    /// The version to upgrade to.
    #[default]
    New,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Old => "old",
            Self::Emulated => "new, emulating",
            Self::New => "new",
        })
    }
}

/// One of the two manifest files, and the pod that the kubelet runs from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// `kube-apiserver.yaml`.
    Canonical,
    /// The file for the time of the upgrade: the new manifest under another pod name.
    Temporary,
}

impl Slot {
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Canonical => Self::Temporary,
            Self::Temporary => Self::Canonical,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Places the temporary pod and waits until it is ready.
    #[default]
    StartTemporary,
    /// Watches the ready temporary instance for a while.
    SettleTemporary,
    /// Gives the temporary instance clients in steps, and judges it beside the old one.
    JudgeTemporary,
    /// The old instance leaves the port, its file is removed, and its streams end.
    StopOld,
    /// Writes the canonical file and waits until its instance is ready.
    StartCanonical,
    /// Watches the ready canonical instance for a while.
    SettleCanonical,
    /// Gives the canonical instance clients in steps, and judges it beside the temporary one, which
    /// emulates the old release.
    JudgeCanonical,
    /// The temporary instance leaves the port, its file is removed, and its streams end.
    StopTemporary,
    /// Checks that a single instance runs, from the right file, and is ready.
    Verify,
    /// Goes back while the old instance serves: removes the temporary pod.
    Withdraw,
}

impl Step {
    /// Returns the slot whose instance must serve in this step. The other slot's instance may be
    /// stopped.
    pub fn watched(self) -> Slot {
        match self {
            Self::StartTemporary | Self::SettleTemporary | Self::JudgeTemporary | Self::StopOld => {
                Slot::Temporary
            }
            _ => Slot::Canonical,
        }
    }
}

impl fmt::Display for Step {
    /// Writes the name as serialized in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The course of an upgrade, as stored on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub step: Step,
    /// The version that the canonical file must hold at the end.
    pub target: Version,
    /// Why the target is not the new version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// True if `why` is a verdict of the judge.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub judged: bool,
}

impl Position {
    /// The beginning of an upgrade.
    pub fn begin() -> Self {
        Self::default()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The file does not exist.
    Absent,
    /// A manifest of this upgrade.
    Holds(Version),
    /// Other contents: someone else wrote the file.
    Other,
}

/// The observed state of a pod's instance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InstanceObservation {
    /// True if the apiserver or the shim runs.
    pub alive: bool,
    /// True if the instance is ready and a shim listens for it.
    pub in_group: bool,
    /// True if the instance has a shim of its own, which can be drained. A shim for the whole node
    /// cannot.
    pub drains: bool,
    /// True if the shim does not answer now, as on a busy node, and last reported that the instance
    /// is in the group. The instance may still be there.
    pub silent: bool,
    /// Distinguishes a process from its predecessor.
    pub process: Option<u64>,
    /// How many processes of the instance were seen to end.
    pub ends: u32,
    /// True if the kubelet cannot pull the image or has no room for the pod. Such an instance never
    /// gets ready.
    pub not_started: bool,
}

impl InstanceObservation {
    /// True if the instance is in the group, as far as is known.
    pub fn may_serve(&self) -> bool {
        self.in_group || self.silent
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeObservation {
    pub canonical_file: Content,
    pub temporary_file: Content,
    /// The canonical pod's instance: every instance on the node except the temporary one.
    pub canonical: InstanceObservation,
    pub temporary: InstanceObservation,
}

impl NodeObservation {
    pub fn file(&self, slot: Slot) -> Content {
        match slot {
            Slot::Canonical => self.canonical_file,
            Slot::Temporary => self.temporary_file,
        }
    }

    pub fn instance(&self, slot: Slot) -> InstanceObservation {
        match slot {
            Slot::Canonical => self.canonical,
            Slot::Temporary => self.temporary,
        }
    }
}

/// The next thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Do nothing. Observe again when something may have changed.
    Wait,
    /// Write the manifest of a version into a slot's file.
    Place(Slot, Version),
    Remove(Slot),
    /// Ask a slot's shim to leave. The result goes to [`super::Machine::record_drain`].
    Drain(Slot),
    /// Give a slot's instance its share of the clients, and judge it beside the other slot's. The
    /// result goes to [`super::Machine::record_judge_result`].
    Judge(Slot),
    /// The position changed: save the position before the next action.
    Entered,
    Finish(UpgradeOutcome),
    /// The upgrade cannot continue by itself. Serving instances are left alone. The position may
    /// have changed, and is saved.
    Halt(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpgradeOutcome {
    /// The new version serves from the canonical file.
    Done,
    /// The old version serves.
    RolledBack,
    /// The new version serves and emulates the old release.
    Emulating,
}

/// The kind of an upgrade. Never changes, unlike the position.
#[derive(Debug, Clone, Copy, Default)]
pub struct Course {
    /// The old and the new manifest have the same text: a rolling restart.
    pub same: bool,
    /// The new version gets clients in steps, and is judged.
    pub judged: bool,
    /// The temporary instance emulates the old release.
    pub emulated: bool,
}

/// The result of judging.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JudgeResult {
    GoOn,
    /// The verdict is bad, with the reason.
    GoBack(String),
    /// No verdict: the operator decides.
    Stop(String),
}

/// Time limits of the steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// For an instance to get ready.
    pub ready: Duration,
    /// How long an instance must stay ready.
    pub settle: Duration,
    /// For a pod to stop: its grace period plus the time that the kubelet needs.
    pub stop: Duration,
}
