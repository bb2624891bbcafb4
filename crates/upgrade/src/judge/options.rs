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
    /// True if berth sends requests of its own where clients send too few.
    pub requests: bool,
    /// True if clients on the node can reach the new instance, too, while it is judged.
    pub local: bool,
}

/// The reaction if there was not enough to judge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Undecided {
    /// Go on as without a judge, but go back if there is weak evidence against the new instance
    #[default]
    GoOn,
    /// Go back, as after a bad verdict
    GoBack,
    /// Leave both instances as they are, and exit with status 75
    Stop,
}

impl Undecided {
    /// Turns an undecided verdict into a result. `against` is true if there is weak evidence
    /// against the new instance.
    pub fn into_judge_result(self, why: String, against: bool) -> JudgeResult {
        match self {
            Self::GoOn if !against => JudgeResult::GoOn,
            Self::GoOn | Self::GoBack => JudgeResult::GoBack(why),
            Self::Stop => JudgeResult::Stop(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undecided_verdict_goes_on_only_without_evidence_against_the_new_instance() {
        let back = JudgeResult::GoBack("why".into());
        let stop = JudgeResult::Stop("why".into());
        for (undecided, against, result) in [
            (Undecided::GoOn, false, JudgeResult::GoOn),
            (Undecided::GoOn, true, back.clone()),
            (Undecided::GoBack, false, back.clone()),
            (Undecided::GoBack, true, back),
            (Undecided::Stop, false, stop.clone()),
            (Undecided::Stop, true, stop),
        ] {
            assert_eq!(undecided.into_judge_result("why".into(), against), result);
        }
    }
}
