//! A run cut into steps.

use super::{Case, JUDGE, Judge, Span};
use crate::data::{Ran, Timeline};
use crate::event::Answer;
use crate::stamp::{Stamp, millis};
use crate::stats::percentile;
use std::collections::BTreeMap;
use std::time::Duration;

pub(super) const TIMELINE: Judge = Judge { judge, ..JUDGE };

/// Steps that a timeline has at most: about as many as a plot can show.
const STEPS: u64 = 200;

/// Lengths of a step from which the first that makes few enough is taken, in ms.
const LENGTHS: [u64; 7] = [50, 250, 500, 1_000, 2_000, 5_000, 10_000];

/// What was lost, allowed or ended is added by its judge.
fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Case { record, span, steps, lives, .. } = case;
    let timeline = &mut ran.timeline;
    let mut waits = vec![Vec::new(); steps.count];
    for attempt in &record.attempts {
        let Some(step) = steps.at(attempt.done) else { continue };
        if let Answer::Good { instance } = &attempt.answer {
            steps.count(&mut timeline.answered, instance, step, 1);
        }
        if !matches!(attempt.answer, Answer::Failed(_)) {
            waits[step].push(attempt.done.since(attempt.due));
        }
    }
    for waits in &mut waits {
        waits.sort_unstable();
        timeline.wait_p50_ms.push(percentile(waits, 0.5).map(millis));
        timeline.wait_p99_ms.push(percentile(waits, 0.99).map(millis));
        timeline.wait_max_ms.push(percentile(waits, 1.0).map(millis));
    }
    for life in lives.values().flatten() {
        let open = (0..steps.count).filter(|step| (life.from..life.to).contains(&steps.end(*step, span)));
        open.for_each(|step| steps.count(&mut timeline.open_connections, life.instance, step, 1));
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
        let few_enough = LENGTHS.into_iter().find(|length| all / length < STEPS);
        let length_ms = few_enough.unwrap_or_else(|| (all / STEPS).next_multiple_of(10_000));
        // The last moment is in a step too.
        Self { began: span.began, length_ms, count: usize::try_from(all / length_ms).unwrap_or(0) + 1 }
    }

    /// One in which nothing has happened yet.
    pub(super) fn timeline(self) -> Timeline {
        let nothing = vec![0; self.count];
        let (allowed, ended_by_instance) = (nothing.clone(), nothing);
        Timeline { step_ms: self.length_ms, allowed, ended_by_instance, ..Timeline::default() }
    }

    pub(super) fn at(self, at: Stamp) -> Option<usize> {
        let step = at.since(self.began).as_millis() / u128::from(self.length_ms);
        usize::try_from(step).ok().filter(|step| at >= self.began && *step < self.count)
    }

    /// The last step ends with the load, when connections are still there.
    fn end(self, step: usize, span: &Span) -> Stamp {
        let end = self.began.plus(Duration::from_millis(self.length_ms * (step as u64 + 1)));
        end.min(Stamp(span.over.0.saturating_sub(1)))
    }

    pub(super) fn count(self, series: &mut BTreeMap<String, Vec<u64>>, key: &str, step: usize, more: u64) {
        if let Some(counts) = series.get_mut(key) {
            counts[step] += more;
        } else {
            let mut counts = vec![0; self.count];
            counts[step] = more;
            series.insert(key.to_owned(), counts);
        }
    }
}
