//! Observations and decisions of the upgrade's state machine.

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

/// A manifest file of the node's kube-apiserver, and the pod that the kubelet runs from the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// `kube-apiserver.yaml`.
    Canonical,
    /// The file for the time of the upgrade: the new manifest under another pod name.
    Temporary,
}

impl Slot {
    #[must_use]
    pub fn opposite_slot(self) -> Self {
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
    /// Watches the temporary instance until it has been ready for the settle time.
    SettleTemporary,
    /// Gives the temporary instance clients in steps, and judges it beside the old one.
    JudgeTemporary,
    /// The old instance leaves the port, its file is removed, and its streams end.
    StopOld,
    /// Writes the canonical file and waits until its instance is ready.
    StartCanonical,
    /// Watches the canonical instance until it has been ready for the settle time.
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
    /// Returns the slot of the instance that must serve in this step. The instance of the other
    /// slot may be stopped.
    pub fn watched_slot(self) -> Slot {
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

/// How far an upgrade has come, and which version it leads to. This is stored on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub step: Step,
    /// The version that `kube-apiserver.yaml` must hold at the end.
    pub target: Version,
    /// Why the upgrade goes back. `None` if it leads to the new version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// True if `why` is a verdict of the judge.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub judged: bool,
}

impl Position {
    /// Returns the position of an upgrade that has done nothing yet.
    pub fn initial() -> Self {
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
    /// True if the shim does not answer now, as on a busy node, and said in its last answer that
    /// the instance serves. The instance may still serve.
    pub silent: bool,
    /// Identifies the instance's process: a new process has another number.
    pub process: Option<u64>,
    /// Number of the instance's processes that were seen to end.
    pub ends: u32,
    /// True if the kubelet cannot pull the image or has no room for the pod. Such an instance never
    /// gets ready.
    pub not_started: bool,
}

impl InstanceObservation {
    /// True if the instance serves, or served when its shim last answered.
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

/// An order of the machine to its caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Do nothing. Observe again when something may have changed.
    Wait,
    /// Write the manifest of a version into a slot's file.
    Place(Slot, Version),
    Remove(Slot),
    /// Ask the shim of a slot's instance to leave its port. The result goes to
    /// [`super::Machine::record_drain`].
    Drain(Slot),
    /// Give the instance of a slot its share of the clients, and judge it beside the other
    /// instance. The result goes to [`super::Machine::record_judge_result`].
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
    /// The new version serves from `kube-apiserver.yaml`.
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

/// The consequence of a judge's verdict for the upgrade.
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
    /// How long an instance may take to get ready.
    pub ready: Duration,
    /// How long an instance must stay ready.
    pub settle: Duration,
    /// How long a pod may take to stop: its grace period plus the time that the kubelet needs.
    pub stop: Duration,
}
