//! The machine's input and output.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Version {
    /// The one that was there.
    Old,
    /// The one that shall be there, and as long as it is judged behaves as the old one's release.
    Emulated,
    /// The one that shall be there.
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

/// Which of the two files, and the pod that the kubelet makes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// `kube-apiserver.yaml`.
    Canonical,
    /// The one for the time of the upgrade; it holds the new manifest under another pod name.
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
    /// The temporary pod is placed and shall get ready.
    #[default]
    StartTemporary,
    /// It is ready and is watched for a while.
    SettleTemporary,
    /// It gets clients in steps, and is judged beside the old one.
    JudgeTemporary,
    /// The old instance leaves the port, its file goes, and its streams end.
    StopOld,
    /// The canonical file comes, and its instance shall get ready.
    StartCanonical,
    /// It is ready and is watched for a while.
    SettleCanonical,
    /// It gets clients in steps, and is judged beside the temporary one, which emulates the old one's release.
    JudgeCanonical,
    /// The temporary instance leaves, its file goes, and its streams end.
    StopTemporary,
    /// One instance, from the right file, ready.
    Verify,
    /// Back, while the old one serves: the temporary pod goes.
    Withdraw,
}

impl Step {
    /// Whose instance has to serve in it. The other one may be stopped.
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
    /// As it is in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// What is kept on disk of an upgrade's course.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    pub step: Step,
    /// What the canonical file shall hold in the end.
    pub target: Version,
    /// Why it is not the new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// That is a verdict.
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
    /// It is not there.
    Absent,
    /// A manifest of this upgrade's.
    Holds(Version),
    /// Something else: another wrote it.
    Other,
}

/// What is seen of a pod's instance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InstanceObservation {
    /// Its apiserver or its shim runs.
    pub alive: bool,
    /// It is ready, and a shim listens for it.
    pub in_group: bool,
    /// A shim of its own runs, which can be drained; one for the whole node cannot.
    pub drains: bool,
    /// Its shim does not answer now, as on a busy node, and its last answer was that the instance is in the group: that may be so
    /// still.
    pub silent: bool,
    /// Tells one process from the one before.
    pub process: Option<u64>,
    /// How many of its processes were seen to end.
    pub ends: u32,
    /// The kubelet cannot get its image, or has no room for it: it will not get ready, however long it is waited for.
    pub not_started: bool,
}

impl InstanceObservation {
    /// It is in the group, as far as is known.
    pub fn may_serve(&self) -> bool {
        self.in_group || self.silent
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeObservation {
    pub canonical_file: Content,
    pub temporary_file: Content,
    /// Instances on this node but the temporary one.
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

/// What is to be done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Nothing; observe again when something may have changed.
    Wait,
    /// Put this manifest into this file.
    Place(Slot, Version),
    Remove(Slot),
    /// Let this slot's shim leave; the result goes to [`super::Machine::drained`].
    Drain(Slot),
    /// Give this slot's instance its part of the clients and judge it beside the other one; what comes out goes to
    /// [`super::Machine::judged`].
    Judge(Slot),
    /// The position changed: keep it before anything else is done.
    Entered,
    Finish(UpgradeOutcome),
    /// It does not go on by itself. What serves is left alone. The position may have changed, and is kept.
    Halt(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpgradeOutcome {
    /// The new one serves, from the canonical file.
    Done,
    /// The old one does.
    RolledBack,
    /// The new one does, and emulates the old one's release.
    Emulating,
}

/// What an upgrade is besides its position.
#[derive(Debug, Clone, Copy, Default)]
pub struct Course {
    /// Old and new are one text: a rolling restart.
    pub same: bool,
    /// The new one gets clients in steps, and is judged.
    pub judged: bool,
    /// The temporary instance emulates the old one's release.
    pub emulated: bool,
}

/// What came out of judging.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judged {
    GoOn,
    /// And why.
    GoBack(String),
    /// Neither: the operator decides.
    Stop(String),
}

/// How long what may take.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    /// To get ready.
    pub ready: Duration,
    /// That an instance must stay ready.
    pub settle: Duration,
    /// To stop: the pod's grace period and what the kubelet needs.
    pub stop: Duration,
}
