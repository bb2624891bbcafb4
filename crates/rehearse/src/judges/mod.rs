//! The judges, each in a file. A judge reads the record, and adds rows of figures, objections and
//! losses to the [data](crate::record::data) of the run. Pure.
//!
//! A new figure is a row that a judge adds. The table, the page and the JSON show the row. `ends`
//! decides which end ended a stream.

mod busy;
mod ends;
mod faults;
mod gate;
mod growth;
mod instances;
mod losses;
mod marks;
mod requests;
mod service;
pub mod stats;
mod storm;
mod timeline;
mod watches;

use crate::config::Plan;
use crate::record::{
    Record,
    data::{Ran, Verdict},
    event::EventKind,
    stamp::Stamp,
};
use std::time::Duration;
use timeline::Steps;

/// All judges, in the order of their figures. Promises excuse losses, so `faults` comes before
/// `losses`.
const JUDGES: [fn(&Case<'_>, &mut Ran); 11] = [
    faults::judge,
    losses::judge,
    requests::judge,
    watches::judge,
    instances::judge,
    service::judge,
    storm::judge,
    gate::judge,
    growth::judge,
    marks::judge,
    timeline::judge,
];

/// Everything that a judge knows about a run.
struct Case<'a> {
    record: &'a Record,
    plan: &'a Plan,
    span: Span,
    steps: Steps,
}

/// Runs all judges. `failed` is the reason if the run did not come to its end.
pub fn judge(record: &Record, plan: &Plan, failed: Option<&str>) -> Ran {
    let mut ran = Ran::default();
    let unfinished = failed.map(|why| format!("the rehearsal did not come to its end: {why}"));
    unfinished
        .into_iter()
        .chain(record.troubles.iter().cloned())
        .for_each(|trouble| ran.add_objection(trouble));
    for event in &record.events {
        if let EventKind::Note(note) = &event.what {
            ran.notes.push(note.clone());
        }
    }
    let span = Span::of(record);
    let case = Case {
        record,
        plan,
        span,
        steps: Steps::of(&span),
    };
    ran.simulated = plan.old.is_simulated();
    ran.load_ms = span.over.since(span.began).as_millis() as u64;
    ran.timeline = case.steps.empty_timeline();
    JUDGES.iter().for_each(|judge| judge(&case, &mut ran));
    if !ran.lost.is_empty() {
        ran.verdict = Verdict::Lost;
    } else if ran.promises.iter().any(|promise| !promise.held) {
        ran.verdict = Verdict::Broken;
    }
    ran
}

/// The outcome of a promise in words: first the broken parts, then the observations.
fn describe_outcome(broken: Vec<String>, seen: Vec<String>) -> Vec<String> {
    broken
        .into_iter()
        .map(|why| format!("broken: {why}"))
        .chain(seen)
        .collect()
}

/// The period of the load, with the answers that came after its end.
#[derive(Debug, Clone, Copy)]
struct Span {
    /// The begin of the load, from which all times are counted.
    began: Stamp,
    /// End of the timetables.
    over: Stamp,
    /// The last answer, or `over` if later.
    last: Stamp,
}

impl Span {
    fn of(record: &Record) -> Self {
        let load = record.load_period();
        let last = record.attempts.iter().map(|a| a.done).max();
        Self {
            began: load.start,
            over: load.end,
            last: last.map_or(load.end, |last| last.max(load.end)),
        }
    }

    fn millis_since_load_began(&self, at: Stamp) -> i64 {
        let ms = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        if at < self.began {
            -ms(self.began.since(at))
        } else {
            ms(at.since(self.began))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
