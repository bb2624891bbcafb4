//! Judges, a file each. A judge reads the record, adds its part to the [data](crate::data) of the run, and draws that as a
//! section (`section.rs`). Pure.
//!
//! A new kind of client, or a new figure, is a judge, its events in the [log](crate::log) and its field in the data. `ends` decides
//! which end ended a stream, `streams` makes lives of connections out of attempts and ends.

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
mod steering;
mod storm;
mod streams;
mod timeline;
mod watches;

use crate::data::{Period, Ran};
use crate::event::EventKind;
use crate::plan::Plan;
use crate::record::Record;
use crate::section::Place::{self, Compared};
use crate::section::Section;
use crate::stamp::Stamp;
use crate::verdict::summary;
use std::collections::HashSet;
use std::time::Duration;
use timeline::Steps;

/// What a judge does.
struct Judge {
    /// Adds its sums, its promises, what was lost, and its objections.
    judge: for<'a> fn(&mut Case<'a>, &mut Ran),
    section: fn(&Ran) -> Section,
}

/// One that does nothing.
const JUDGE: Judge = Judge { judge: |_, _| {}, section: |_| Section::default() };

/// In the order in which sections are drawn. What is lost is excused by promises, so that these come before it.
const JUDGES: [Judge; 12] = [
    requests::REQUESTS,
    faults::FAULTS,
    losses::LOSSES,
    watches::WATCHES,
    instances::INSTANCES,
    service::SERVICE,
    storm::STORM,
    gate::GATE,
    steering::STEERING,
    growth::GROWTH,
    marks::MARKS,
    timeline::TIMELINE,
];

/// A run that is judged.
struct Case<'a> {
    record: &'a Record,
    plan: &'a Plan,
    span: Span,
    steps: Steps,
    lives: streams::Lives<'a>,
    /// The streams that their instance ended.
    ended: HashSet<&'a str>,
    /// The streams whose end a promise under a fault allows.
    allowed: HashSet<&'a str>,
}

/// What all judges find in a run. `failed` is why it did not come to its end.
pub fn judge(record: &Record, plan: &Plan, failed: Option<&str>) -> Ran {
    let mut ran = Ran::default();
    // Until something is wrong with what was rehearsed.
    ran.verdict.inconclusive = true;
    let unfinished = failed.map(|why| format!("it did not come to its end: {why}"));
    unfinished.into_iter().chain(record.troubles.iter().cloned()).for_each(|trouble| ran.verdict.object(trouble));
    for event in &record.events {
        if let EventKind::Note(note) = &event.what {
            ran.verdict.notes.push(note.clone());
        }
    }
    let span = Span::of(record);
    let (steps, lives) = (Steps::of(&span), streams::lives(record, &span));
    let mut case = Case { record, plan, span, steps, lives, ended: HashSet::new(), allowed: HashSet::new() };
    ran.load_ms = span.over.since(span.began).as_millis() as u64;
    ran.timeline = steps.timeline();
    JUDGES.iter().for_each(|judge| (judge.judge)(&mut case, &mut ran));
    let (clean, kept) = (ran.verdict.objections.is_empty(), ran.verdict.lost() == 0 && ran.broken() == 0);
    ran.verdict.held = clean && kept;
    ran.verdict.inconclusive &= !clean && kept;
    ran.verdict.too_busy &= ran.verdict.inconclusive;
    ran.verdict.summary = summary(&ran);
    ran
}

/// The sections of all judges.
pub(crate) fn sections(ran: &Ran) -> Vec<Section> {
    JUDGES.iter().map(|judge| (judge.section)(ran)).collect()
}

/// Runs side by side: a name, and a value for each run that has one, of the rows that are drawn in `place` too.
pub(crate) fn compared(runs: &[Option<&Ran>], place: Place) -> Vec<(String, Vec<Option<String>>)> {
    let mut rows: Vec<(String, Vec<Option<String>>)> = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let sections = run.map(sections).unwrap_or_default();
        for row in sections.iter().flat_map(|section| section.rows(Compared)).filter(|row| row.is_in(place)) {
            let place = rows.iter().position(|(name, _)| *name == row.name).unwrap_or_else(|| {
                rows.push((row.name.clone(), vec![None; runs.len()]));
                rows.len() - 1
            });
            rows[place].1[index] = Some(row.value.clone());
        }
    }
    rows
}

/// What a promise came to, in words: why it was broken, then what was seen.
fn what_happened(broken: Vec<String>, seen: Vec<String>) -> Vec<String> {
    broken.into_iter().map(|why| format!("broken: {why}")).chain(seen).collect()
}

/// The load, and all that came of it.
#[derive(Debug, Clone, Copy)]
struct Span {
    /// Zero of all times.
    began: Stamp,
    /// End of the timetables.
    over: Stamp,
    /// The last answer, or `over` if that is later.
    last: Stamp,
}

impl Span {
    fn of(record: &Record) -> Self {
        let load = record.load();
        let last = record.attempts.iter().map(|a| a.done).max();
        Self { began: load.start, over: load.end, last: last.map_or(load.end, |last| last.max(load.end)) }
    }

    fn ms(&self, at: Stamp) -> i64 {
        let ms = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        if at < self.began { -ms(self.began.since(at)) } else { ms(at.since(self.began)) }
    }

    fn period(&self, (from, to): &(Stamp, Stamp)) -> Period {
        Period { from_ms: self.ms(*from), to_ms: self.ms(*to) }
    }
}

#[cfg(test)]
mod tests;
