//! Checks that watches and informers saw each write once, and counts how often they listed again.

use super::Case;
use crate::record::{
    Record,
    data::{Ran, Value},
    event::{Informer, WatchSum},
    format::format_count,
    loss::Loss,
};

pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let Case { record, plan, .. } = case;
    let Record {
        watches, informers, ..
    } = record;
    let gaps =
        ran.lost.contains_key(&Loss::EventMissed) || ran.lost.contains_key(&Loss::EventDuplicated);
    let events = watches.iter().flat_map(|w| w.events.values()).sum();
    let seen = if gaps {
        "with gaps"
    } else {
        "no write missed or duplicated"
    };
    ran.add("watch events", Value::Count(events))
        .mark_as_main()
        .set_note(seen);
    // Nobody writes the objects of quiet informers, so their copies are no evidence.
    let copies = || {
        informers
            .iter()
            .filter(|informer| !informer.follows_objects_without_writes())
    };
    let whole = copies()
        .filter(|informer| informer.missing + informer.stale + informer.duplicated == 0)
        .count();
    let words = format!("of {} hold exactly what was written", copies().count());
    ran.add("informers", Value::Count(whole as u64))
        .set_note(words);
    let both = |watch: fn(&WatchSum) -> u64, informer: fn(&Informer) -> u64| -> u64 {
        watches
            .iter()
            .map(watch)
            .chain(informers.iter().map(informer))
            .sum()
    };
    let words = format!(
        "{} after 410 Gone: the watch's resourceVersion was older than the instance (--settle)",
        format_count(both(|w| w.expired, |i| i.expired))
    );
    ran.add("relists", Value::Count(both(|w| w.relists, |i| i.relists)))
        .set_note(words);
    if watches.len() < plan.load.watches as usize {
        ran.add_objection(format!(
            "only {} of {} watches finished",
            watches.len(),
            plan.load.watches
        ));
    }
    if !watches
        .iter()
        .any(|w| w.events.values().filter(|events| **events > 0).count() > 1)
    {
        ran.add_doubt("no watch saw events from more than one instance".into());
    }
}
