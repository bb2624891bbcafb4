//! The Service `kubernetes`: when it named nobody.

use super::Span;
use crate::data::{Period, Ran};
use crate::record::Record;
use crate::report::format::{moment, wait};
use crate::section::{Row, Section};

pub(super) fn gaps(record: &Record, span: &Span) -> Option<Vec<Period>> {
    Some(record.endpoint_gaps.as_ref()?.iter().map(|gap| span.period(gap)).collect())
}

pub(super) fn section(ran: &Ran) -> Section {
    let empty = |gap: &Period| {
        let from = format!("Service kubernetes empty, from {}", moment(gap.from_ms));
        Row::page(from, wait((gap.to_ms - gap.from_ms) as f64))
    };
    let note = "the instance that stops removes the address, even if another serves";
    let all = ran.figures.endpoint_gap_ms.map(|gap| Row::main("Service kubernetes was empty for", wait(gap), note));
    Section {
        rows: all.into_iter().chain(ran.endpoint_gaps.iter().flatten().map(empty)).collect(),
        ..Section::default()
    }
}
