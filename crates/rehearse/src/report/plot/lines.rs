//! Lines of counts, which a judge has by steps of the timeline.

use super::{Key, Look, View, counts};
use crate::report::svg;
use crate::section::{Line, Series};
use maud::{Markup, html};

pub(super) fn plot(view: &View<'_>, Series { title, words, lines }: &Series) -> Markup {
    let keys: Vec<_> =
        lines.iter().map(|line| Key { look: Look::Line(line.look), text: line.name.to_owned() }).collect();
    let most = lines.iter().flat_map(|line| line.counts.iter().copied()).max().unwrap_or_default();
    view.draw((title, words), &keys, 90.0, |top, bottom| {
        let (y, axis) = counts::scale(most as f64, 3, top, bottom);
        let edges = view.frame.edges(view.run);
        let at = |counts: &[u64]| counts.iter().map(|count| Some(y.at(*count as f64))).collect::<Vec<_>>();
        let lines = html! {
            @for Line { look, counts, .. } in lines { path.line.(look) d=(svg::steps(&edges, &at(counts))) {} }
        };
        [axis, html! {}, lines]
    })
}
