//! Cuts a run into steps of equal length, and counts the good answers of each step.

use super::{Case, Span};
use crate::record::{
    data::{Ran, Timeline},
    event::Answer,
    stamp::Stamp,
};
use std::collections::BTreeMap;

/// Most steps of a timeline: about as many as a plot can show.
const MAX_STEPS: u64 = 200;

/// Possible lengths of a step, in ms. A run gets the first length that cuts the run into at most
/// [`MAX_STEPS`] steps.
const STEP_LENGTHS: [u64; 7] = [50, 250, 500, 1_000, 2_000, 5_000, 10_000];

/// Counts good answers. Losses, allowed losses and ended streams are added by their judges.
pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let Case { record, steps, .. } = case;
    for attempt in &record.attempts {
        if let (Some(step), Answer::Good { instance }) =
            (steps.step_at(attempt.done), &attempt.answer)
        {
            steps.add_to_step(&mut ran.timeline.answered, instance.clone(), step, 1);
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    began: Stamp,
    length_ms: u64,
    pub(super) count: usize,
}

impl Steps {
    pub(super) fn of(span: &Span) -> Self {
        let all = u64::try_from(span.last.since(span.began).as_millis()).unwrap_or(u64::MAX);
        let few_enough = STEP_LENGTHS
            .into_iter()
            .find(|length| all / length < MAX_STEPS);
        let length_ms = few_enough.unwrap_or_else(|| (all / MAX_STEPS).next_multiple_of(10_000));
        // The last moment needs a step, too, so there is one step more than whole steps.
        Self {
            began: span.began,
            length_ms,
            count: usize::try_from(all / length_ms).unwrap_or(0) + 1,
        }
    }

    /// An empty timeline.
    pub(super) fn empty_timeline(self) -> Timeline {
        let nothing = vec![0; self.count];
        let (allowed, ended_by_instance) = (nothing.clone(), nothing);
        Timeline {
            step_ms: self.length_ms,
            allowed,
            ended_by_instance,
            ..Timeline::default()
        }
    }

    pub(super) fn step_at(self, at: Stamp) -> Option<usize> {
        let step = at.since(self.began).as_millis() / u128::from(self.length_ms);
        usize::try_from(step)
            .ok()
            .filter(|step| at >= self.began && *step < self.count)
    }

    pub(super) fn add_to_step<K: Ord>(
        self,
        series: &mut BTreeMap<K, Vec<u64>>,
        key: K,
        step: usize,
        more: u64,
    ) {
        series.entry(key).or_insert_with(|| vec![0; self.count])[step] += more;
    }
}
