//! Judges, a file each: what the record has of one thing becomes its part of the [data](crate::data), and that a
//! [section](crate::section). Pure.
//!
//! A new kind of client, or a new figure, is a judge, its events in the [log](crate::log) and its field in the data. `streams` makes lives of
//! connections out of attempts and ends, `timeline` cuts all into steps.

mod gate;
mod instances;
mod marks;
mod nodes;
mod promises;
mod requests;
mod service;
mod steering;
mod storm;
mod streams;
mod timeline;
mod watches;

use crate::data::{Period, Ran};
use crate::record::{Record, Stamp};
use crate::section::Section;
use crate::verdict::Verdict;
use std::time::Duration;

/// All of a run but what is said of it as a whole.
pub(crate) fn judge(record: &Record, judged: &Verdict) -> Ran {
    let span = &Span::of(record);
    let lives = streams::lives(record, span);
    Ran {
        load_ms: span.over.since(span.began).as_millis() as u64,
        instances: record.players.iter().map(instances::judge).collect(),
        figures: judged.figures.clone(),
        promises: judged.promises.iter().map(|promise| promises::judge(promise, span)).collect(),
        timeline: timeline::judge(record, judged, &lives, span),
        marks: marks::judge(record, judged, span),
        watches: streams::watches(record, judged, &lives, span),
        gate: record.gates.as_ref().map(|gates| timeline::gate(gates, span)),
        informers: watches::informers(record),
        control_streams: instances::control(record),
        endpoint_gaps: service::gaps(record, span),
        storm: record.storm.as_ref().map(|storm| storm::judge(storm, span)),
        direct: steering::judge(record, span),
        by_address: nodes::by_address(record, judged),
        away: nodes::away(record, span),
        ..Ran::default()
    }
}

/// What each judge says of a run, in the order in which it is drawn.
pub(crate) fn sections(ran: &Ran) -> Vec<Section> {
    let all = [
        requests::section,
        watches::section,
        instances::section,
        service::section,
        storm::section,
        gate::section,
        steering::section,
        nodes::section,
    ];
    all.map(|section| section(ran)).into()
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
