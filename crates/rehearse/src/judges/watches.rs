//! Watches and informers: whether they saw each write once, and how often they listed again.

use super::{Case, Judge, streams};
use crate::data::{Gap, Informer, Ran, count_of};
use crate::event::{EventKind, WatchSum};
use crate::loss::Loss;
use crate::record::Record;
use crate::report::format::count;
use crate::section::Place::{Table, Tile};
use crate::section::{Grid, Row, Section};

pub(super) const WATCHES: Judge = Judge { judge, section };

fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Case { record, plan, .. } = case;
    let Record { watches, informers, .. } = record;
    let both = |watch: fn(&WatchSum) -> u64, informer: fn(&Informer) -> u64| -> u64 {
        watches.iter().map(watch).chain(informers.iter().map(informer)).sum()
    };
    let slow_reads = record.events.iter().filter(|event| event.what == EventKind::SlowRead).count() as u64;
    let figures = &mut ran.figures;
    figures.relists = both(|w| w.relists, |i| i.relists);
    figures.expired = both(|w| w.expired, |i| i.expired);
    figures.watch_events = watches.iter().flat_map(|w| w.events.values()).sum();
    figures.slow_reads = slow_reads;
    for (at, loss, count) in watches.iter().flat_map(|w| &w.flaws) {
        loss.add(*count, &mut ran.verdict.lost);
        // Writes that were never seen are noticed after the end of the load.
        let step = case.steps.at(*at).unwrap_or(case.steps.count - 1);
        case.steps.count(&mut ran.timeline.lost, loss.kind(), step, *count);
    }
    // An object too many is an event that was missed: that of its end.
    let verdict = &mut ran.verdict;
    Loss::EventMissed.add(informers.iter().map(|i| i.missing + i.stale).sum(), &mut verdict.lost);
    Loss::EventDuplicated.add(informers.iter().map(|i| i.duplicated).sum(), &mut verdict.lost);
    if watches.len() < plan.load.watches as usize {
        verdict.object(format!("only {} of {} watches came to their end", watches.len(), plan.load.watches));
    }
    if plan.load.slow_readers > 0 && slow_reads == 0 {
        verdict.doubt("no slow reader came to the end of an answer".into());
    }
    if !watches.iter().any(|w| w.events.values().filter(|events| **events > 0).count() > 1) {
        verdict.doubt("no watch saw events from more than one instance".into());
    }
    ran.watches = streams::watches(case);
    // They are logged as they come to their end.
    ran.informers.clone_from(informers);
    ran.informers.sort_unstable_by(|a, b| a.id.cmp(&b.id));
}

fn section(ran: &Ran) -> Section {
    let figures = &ran.figures;
    let missed: u64 = ran.watches.iter().map(|watch| watch.missed + watch.duplicated).sum();
    let gaps = ["event_missed", "event_duplicated"].iter().any(|kind| count_of(&ran.verdict.lost, kind) > 0);
    let seen = if gaps { "with gaps" } else { "no write missed or duplicated" };
    let cut = |which: fn(&Gap) -> bool| {
        count(ran.watches.iter().flat_map(|watch| &watch.gaps).filter(|gap| which(gap)).count() as u64)
    };
    let informers = || ran.informers.iter().filter(|informer| !informer.is_quiet());
    let whole = informers().filter(|informer| informer.is_whole()).count() as u64;
    let (again, expired) = (count(figures.relists), count(figures.expired));
    let mut rows = vec![
        Row::at(&[Table, Tile], "watch events", count(figures.watch_events), seen),
        Row::compared("watch events missed or duplicated", count(missed)),
        Row::compared("watches cut", cut(Gap::lost)),
        Row::compared("watches cut as promises allow", cut(|gap| gap.allowed)),
        Row::table("informers", count(whole), format!("of {} hold exactly what was written", informers().count())),
        Row::both(
            "relists",
            again.clone(),
            format!("{expired} after 410 Gone: their resourceVersion was older than the instance (--settle)"),
        ),
        Row::compared("of those after 410 Gone", expired.clone()),
    ];
    if figures.relists > 0 {
        rows.push(Row::page("relists of watches and informers", again));
        rows.push(Row::page("of those after 410 Gone: a resourceVersion older than the instance", expired));
    }
    let row = |i: &Informer| {
        let counts = [i.written, i.held, i.missing, i.stale, i.duplicated, i.relists, i.expired];
        (i.id.clone(), counts.map(count).into())
    };
    let grid = Grid {
        title: "Informers",
        columns: &["Client", "Written", "Held at the end", "Missing", "Stale", "Duplicated", "Relists", "410 Gone"],
        rows: ran.informers.iter().map(row).collect(),
        note: "Clients that list, watch and list again, against the objects that were written. Those named quiet follow what nothing \
               writes meanwhile: only bookmarks give them a revision that a newer instance knows. They show which clients list again.",
    };
    Section { rows, grids: vec![grid], ..Section::default() }
}
