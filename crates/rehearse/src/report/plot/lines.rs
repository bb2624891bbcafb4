//! Lines of counts, which a judge has by steps of the timeline.

use super::{Key, Look, View, counts};
use crate::report::format;
use crate::report::svg::{self, Scale};
use crate::section::{Line, Series};
use maud::{Markup, html};

pub(super) fn plot(view: &View<'_>, Series { title, words, lines }: &Series) -> Markup {
    let (frame, run) = (&view.frame, view.run);
    let keys = lines.iter().map(|line| Key { look: Look::Line(line.look), text: line.name.to_owned() });
    let (heading, top) = frame.heading(title, &keys.collect::<Vec<_>>());
    let bottom = top + 90.0;
    let most = lines.iter().flat_map(|line| line.counts.iter().copied()).max().unwrap_or_default();
    let ticks = svg::ticks(most as f64, 3);
    let y = Scale::linear((0.0, *ticks.last().unwrap_or(&1.0)), (bottom, top));
    let edges = frame.edges(run);
    let at = |counts: &[u64]| counts.iter().map(|count| Some(y.at(*count as f64))).collect::<Vec<_>>();
    let body = html! {
        (counts::axis(&ticks, &y, |tick| format::count(tick as u64)))
        (frame.grid(&view.marks, top, bottom))
        (super::mark_lines(&view.marks, top, bottom))
        @for Line { look, counts, .. } in lines { path.line.(look) d=(svg::steps(&edges, &at(counts))) {} }
        (heading)
        (frame.axis(bottom))
    };
    frame.svg(bottom + 22.0, title, words, &body)
}
