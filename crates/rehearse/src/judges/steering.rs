//! The direct path: how many connections went past the shims, and when a shim steered.

use super::Span;
use crate::data::{Direct, Ran, count_of};
use crate::record::Record;
use crate::report::format::{count, moment, percent, wait};
use crate::section::{Row, Section};

pub(super) fn judge(record: &Record, span: &Span) -> Option<Direct> {
    let used = record.direct.as_ref()?;
    let load = span.over.since(span.began).as_secs_f64();
    let share = used.on_within(span.began, span.over).as_secs_f64() / load;
    let on = used.on.iter().map(|on| span.period(on)).collect();
    Some(Direct { steered: used.steered, on_share: if load > 0.0 { share } else { 0.0 }, on })
}

pub(super) fn section(ran: &Ran) -> Section {
    let Some(direct) = &ran.direct else { return Section::default() };
    let share = percent(direct.on_share);
    let note = format!("by the kernel, past the shims, {share} of the time");
    let mut rows = vec![Row::main("connections steered", count(direct.steered), note)];
    let lost = count_of(&ran.verdict.apart, "allowed_direct");
    if lost > 0 {
        let note = "allowed: when the instance was killed that they were steered to";
        rows.push(Row::table("  lost there", count(lost), note));
    }
    rows.extend(direct.on.iter().map(|on| {
        let from = format!("new connections steered past the shims, from {}", moment(on.from_ms));
        Row::page(from, wait((on.to_ms - on.from_ms) as f64))
    }));
    Section { rows, ..Section::default() }
}
