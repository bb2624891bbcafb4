//! The plan of a judged upgrade: the new instance's share of clients' new connections, the time of
//! each step, and the end. Pure: the judge's outcome after each sample and the time are passed in.
//!
//! First, the new instance has no clients: the judge learns the usual rates, and berth's own
//! requests warm the instance. Then come steps with growing shares, and at last all connections,
//! while the old instance still runs. A bad verdict ends the upgrade at once. After a step with too
//! few requests for a verdict, the next step follows and brings more; so the final result is the
//! verdict of the last step.

use crate::verdict::Outcome;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Time between two samples of the instances' metrics.
pub const INTERVAL: Duration = Duration::from_secs(2);

/// All connections, in thousandths.
pub const ALL: u16 = 1000;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// How long the new instance runs without clients before the first step, while berth's own
    /// requests warm it.
    pub warm: Duration,
    /// The new instance's share in each step, in thousandths, always larger than in the step
    /// before.
    pub parts: Vec<u16>,
    /// How long the new instance keeps each share of `parts`.
    pub step: Duration,
    /// How long the new instance has all connections at the end of the plan.
    pub bake: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        let (minute, parts) = (Duration::from_secs(60), vec![50, 250, 500]);
        Self {
            warm: minute,
            parts,
            step: minute,
            bake: 2 * minute,
        }
    }
}

impl Plan {
    fn stages(&self) -> impl DoubleEndedIterator<Item = (u16, Duration)> {
        let steps = self.parts.iter().map(|part| (*part, self.step));
        [(0, self.warm)]
            .into_iter()
            .chain(steps)
            .chain([(ALL, self.bake)])
    }
}

/// Parses the new instance's shares into thousandths: `5%,25%,50%`.
///
/// # Errors
/// The text is no ascending list of percentages between 1 and 99.
pub fn parse_shares(text: &str) -> Result<Vec<u16>, String> {
    let part = |word: &str| {
        let percent: u16 = word.trim().strip_suffix('%')?.parse().ok()?;
        (1..100).contains(&percent).then_some(10 * percent)
    };
    let parts: Option<Vec<u16>> = text.split(',').map(part).collect();
    parts
        .filter(|parts| parts.is_sorted_by(|one, next| one < next))
        .ok_or_else(|| {
            "give percentages between 1% and 99%, each larger than the one before: 5%,25%,50%"
                .into()
        })
}

/// Formats a share in thousandths as a percentage, without fractions: 50 as `5 %`.
#[must_use]
pub fn format_percent(permille: u16) -> String {
    format!("{} %", permille / 10)
}

/// Tells the caller of [`Canary::next`] what to do until the next sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// The new instance's share of new connections, in thousandths. `begins` is true at the start
    /// of a step; if the share is above 0, the caller then calls [`crate::Judge::begin_step`].
    Share { permille: u16, begins: bool },
    /// The upgrade is over, and undecided if there were too few requests for a verdict.
    End(Outcome),
}

#[derive(Debug)]
pub struct Canary {
    /// The stages that have not begun, in reverse order. Each has the new instance's share and its
    /// duration.
    stages: Vec<(u16, Duration)>,
    /// The current share, and the time at which the current stage ends. `None` before the first
    /// sample.
    now: Option<(u16, Duration)>,
}

impl Canary {
    pub fn new(plan: &Plan) -> Self {
        // A stage without time is left out, because there would be no samples to judge by.
        Self {
            stages: plan
                .stages()
                .filter(|(_, time)| !time.is_zero())
                .rev()
                .collect(),
            now: None,
        }
    }

    /// Returns what to do until the next sample, and is called after each sample. `outcome` is the
    /// judge's verdict on the current step.
    pub fn next(&mut self, at: Duration, outcome: Outcome) -> Wanted {
        if outcome == Outcome::Bad {
            return Wanted::End(Outcome::Bad);
        }
        match self.now {
            Some((permille, until)) if at < until => Wanted::Share {
                permille,
                begins: false,
            },
            before => match self.stages.pop() {
                Some((permille, time)) => {
                    self.now = Some((permille, at + time));
                    Wanted::Share {
                        permille,
                        begins: true,
                    }
                }
                // The new instance has never had clients, and a verdict needs clients.
                None if before.is_none_or(|(permille, _)| permille == 0) => {
                    Wanted::End(Outcome::Undecided)
                }
                None => Wanted::End(outcome),
            },
        }
    }

    /// The current share, in thousandths.
    pub fn permille(&self) -> u16 {
        self.now.map_or(0, |(permille, _)| permille)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn share_of_new_step(permille: u16) -> Wanted {
        Wanted::Share {
            permille,
            begins: true,
        }
    }

    fn share_of_same_step(permille: u16) -> Wanted {
        Wanted::Share {
            permille,
            begins: false,
        }
    }

    #[test]
    fn the_share_grows_to_all_connections() {
        let plan = Plan::default();
        let mut canary = Canary::new(&plan);
        for (at, wanted) in [
            (7, share_of_new_step(0)),
            (66, share_of_same_step(0)),
            (67, share_of_new_step(50)),
            (127, share_of_new_step(250)),
            (187, share_of_new_step(500)),
            (247, share_of_new_step(1000)),
            (366, share_of_same_step(1000)),
        ] {
            assert_eq!(canary.next(seconds(at), Outcome::Undecided), wanted, "{at}");
        }
        assert_eq!(canary.permille(), ALL);
        assert_eq!(
            canary.next(seconds(367), Outcome::Good),
            Wanted::End(Outcome::Good)
        );
        assert_eq!(
            canary.next(seconds(368), Outcome::Undecided),
            Wanted::End(Outcome::Undecided)
        );
    }

    #[test]
    fn a_stage_without_time_is_skipped() {
        let none = Plan {
            warm: seconds(0),
            bake: seconds(0),
            ..Plan::default()
        };
        let mut canary = Canary::new(&none);
        assert_eq!(
            canary.next(seconds(0), Outcome::Good),
            share_of_new_step(50)
        );
        let nothing = Plan {
            step: seconds(0),
            ..none.clone()
        };
        assert_eq!(
            Canary::new(&nothing).next(seconds(0), Outcome::Good),
            Wanted::End(Outcome::Undecided)
        );
        let mut warm = Canary::new(&Plan {
            warm: seconds(1),
            ..nothing
        });
        assert_eq!(warm.next(seconds(0), Outcome::Good), share_of_new_step(0));
        assert_eq!(
            warm.next(seconds(1), Outcome::Good),
            Wanted::End(Outcome::Undecided)
        );
    }

    #[test]
    fn shares_are_ascending_percentages() {
        for (text, read) in [
            ("5%,25%,50%", vec![50, 250, 500]),
            (" 2% , 99% ", vec![20, 990]),
            ("1%", vec![10]),
        ] {
            assert_eq!(parse_shares(text), Ok(read));
        }
        assert_eq!(
            parse_shares(&format_percent(70).replace(' ', "")),
            Ok(vec![70])
        );
        for text in [
            "", "5", "5,25", "%", "5%,", "0%", "100%", "5%%", "-5%", "1.5%", "25%,5%", "5%,5%",
        ] {
            assert!(parse_shares(text).is_err(), "{text}");
        }
    }

    fn any_outcome() -> impl Strategy<Value = Outcome> {
        prop_oneof![20 => Just(Outcome::Good), 20 => Just(Outcome::Undecided), 1 => Just(Outcome::Bad)]
    }

    proptest! {
        /// Late samples never skip, shrink or shorten a step, and a bad verdict ends the upgrade.
        #[test]
        fn no_step_is_shortened_or_skipped(
            samples in prop::collection::vec((0..100u64, any_outcome()), 1..200),
            (warm, step, bake) in (0..200u64, 1..200u64, 0..200u64),
        ) {
            let plan = Plan { warm: seconds(warm), step: seconds(step), bake: seconds(bake), ..Plan::default() };
            let mut canary = Canary::new(&plan);
            let (mut at, mut since, mut seen) = (Duration::ZERO, Duration::ZERO, Vec::new());
            for (after, outcome) in samples {
                at += seconds(after);
                let wanted = canary.next(at, outcome);
                let of_step = seen.last().map(|part| match part { 0 => plan.warm, &ALL => plan.bake, _ => plan.step });
                match wanted {
                    Wanted::End(end) => {
                        prop_assert_eq!(end, outcome);
                        let all: Vec<_> = plan.stages().filter(|stage| !stage.1.is_zero()).map(|stage| stage.0).collect();
                        prop_assert!(end == Outcome::Bad || (seen == all && at - since >= of_step.unwrap_or_default()));
                        return Ok(());
                    }
                    Wanted::Share { permille, begins: true } => {
                        prop_assert!(seen.last() < Some(&permille) || seen.is_empty());
                        prop_assert!(of_step.is_none_or(|time| at - since >= time));
                        seen.push(permille);
                        since = at;
                    }
                    Wanted::Share { permille, .. } => prop_assert_eq!(seen.last(), Some(&permille)),
                }
                prop_assert!(outcome != Outcome::Bad);
            }
        }
    }
}
