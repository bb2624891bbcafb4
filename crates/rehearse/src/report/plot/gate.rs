//! Who waits before the shims open a connection, and how many openings there are.

use super::{Key, Look, View, counts};
use crate::data::Gate;
use crate::report::format;
use crate::report::svg::{self, Scale};
use maud::{Markup, html};

/// A name, a look and a value a step. Looks differ by more than colour.
type Line<'a> = (&'a str, &'static str, &'a [u64]);

pub(super) fn plot(view: &View<'_>, gate: &Gate) -> Markup {
    // As they have their turns. A class of which nobody waited is not drawn.
    let mut waiting: Vec<Line<'_>> = Vec::new();
    for (class, look) in [("first", "p50"), ("others", "p99"), ("late", "max")] {
        let counts = gate.waiting.get(class).filter(|counts| counts.iter().any(|count| *count > 0));
        waiting.extend(counts.map(|counts| (class, look, &counts[..])));
    }
    let openings = [("openings", "p50", &gate.openings[..]), ("limit", "p99", &gate.limit[..])];
    let waited = format!("At most {} were seen to wait. {}.", format::count(gate.most_waiting), format::gate(gate));
    let most = |counts: &[u64]| format::count(counts.iter().copied().max().unwrap_or_default());
    let opened =
        format!("At most {} were in flight; the limit was at most {}.", most(&gate.openings), most(&gate.limit));
    html! {
        (over_time(view, "Clients that wait at the gate, by class", &waited, &waiting))
        (over_time(view, "Openings in flight, and their limit", &opened, &openings))
    }
}

fn over_time(view: &View<'_>, title: &str, desc: &str, lines: &[Line<'_>]) -> Markup {
    let (frame, run) = (&view.frame, view.run);
    let keys = lines.iter().map(|(name, look, _)| Key { look: Look::Line(look), text: (*name).to_owned() });
    let (heading, top) = frame.heading(title, &keys.collect::<Vec<_>>());
    let bottom = top + 90.0;
    let most = lines.iter().flat_map(|(_, _, counts)| counts.iter().copied()).max().unwrap_or_default();
    let ticks = svg::ticks(most as f64, 3);
    let y = Scale::linear((0.0, *ticks.last().unwrap_or(&1.0)), (bottom, top));
    let edges = frame.edges(run);
    let at = |counts: &[u64]| counts.iter().map(|count| Some(y.at(*count as f64))).collect::<Vec<_>>();
    let body = html! {
        (counts::axis(&ticks, &y, |tick| format::count(tick as u64)))
        (frame.grid(&view.marks, top, bottom))
        (super::mark_lines(&view.marks, top, bottom))
        @for (_, look, counts) in lines { path.line.(look) d=(svg::steps(&edges, &at(counts))) {} }
        (heading)
        (frame.axis(bottom))
    };
    frame.svg(bottom + 22.0, title, desc, &body)
}
