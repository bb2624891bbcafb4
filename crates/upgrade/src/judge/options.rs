//! The operator's options for the judge.

use crate::machine::JudgeResult;
use berth_judge::{Plan, Signal};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The operator's options. Saved with the upgrade.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JudgeOptions {
    pub plan: Plan,
    /// Time between two samples.
    pub interval: Duration,
    /// Findings that do not count.
    pub accepted: Vec<Signal>,
    pub undecided: Undecided,
    /// Where clients send too few requests, berth adds some.
    pub requests: bool,
    /// Clients on the node can reach the new instance, too.
    pub local: bool,
}

/// What happens if there was not enough to judge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Undecided {
    /// As without a judge, unless something speaks against the new instance
    #[default]
    GoOn,
    /// As after a bad verdict
    GoBack,
    /// Leave both as they are, with exit status 75
    Stop,
}

impl Undecided {
    /// Turns an undecided verdict into a result. `against` is true if something speaks against the
    /// new instance.
    pub fn decide(self, why: String, against: bool) -> JudgeResult {
        match self {
            Self::GoOn if !against => JudgeResult::GoOn,
            Self::GoOn | Self::GoBack => JudgeResult::GoBack(why),
            Self::Stop => JudgeResult::Stop(why),
        }
    }
}
