//! How long answers took: half, 99 %, and the longest of each step, by powers of ten.

use super::{Key, Look, View, WIDTH, counts};
use crate::report::format;
use crate::report::svg::{self, Scale, px};
use maud::{Markup, html};

/// Waits below are not worth a power of ten of their own.
const SHORTEST_MS: f64 = 0.1;

pub(super) fn plot(view: &View<'_>) -> Markup {
    let run = view.run;
    let lines = [
        ("p50", "median", &run.timeline.wait_p50_ms),
        ("p99", "99th percentile", &run.timeline.wait_p99_ms),
        ("max", "longest", &run.timeline.wait_max_ms),
    ];
    let keys = lines.map(|(class, text, _)| Key { look: Look::Line(class), text: text.to_owned() });
    let values = || lines.iter().flat_map(|(_, _, line)| line.iter().flatten()).copied();
    let least = values().fold(f64::MAX, f64::min).clamp(SHORTEST_MS, 1e3).log10().floor();
    let most = values().fold(0.0, f64::max).max(1.0).log10().ceil().max(least + 1.0);
    let desc = format!(
        "Half of all requests were answered within {}, 99 % within {}; the longest took {}. The scale is logarithmic.",
        format::wait(run.figures.wait_p50_ms),
        format::wait(run.figures.wait_p99_ms),
        format::wait(run.figures.wait_max_ms)
    );
    view.draw(("Latency, from when a request was due", &desc), &keys, 120.0, |top, bottom| {
        let y = Scale::log((10_f64.powf(least), 10_f64.powf(most)), (bottom, top));
        let ticks: Vec<f64> = (least as i32..=most as i32).map(|power| 10_f64.powi(power)).collect();
        let edges = view.frame.edges(run);
        let at = |line: &[Option<f64>]| line.iter().map(|ms| ms.map(|ms| y.at(ms))).collect::<Vec<_>>();
        let drawn = html! {
            path.line.max d=(svg::dashes(&edges, &at(&run.timeline.wait_max_ms))) {}
            path.line.p99 d=(svg::steps(&edges, &at(&run.timeline.wait_p99_ms))) {}
            path.line.p50 d=(svg::steps(&edges, &at(&run.timeline.wait_p50_ms))) {}
            @if let Some((at, ms)) = longest(view) {
                @let x = view.frame.x(at);
                @let (left, anchor) = if x > WIDTH * 0.6 { (x - 8.0, "end") } else { (x + 8.0, "start") };
                circle.dot cx=(px(x)) cy=(px(y.at(ms))) r="3" {}
                text.note x=(px(left)) y=(px((y.at(ms) + 4.0).max(top + 10.0))) text-anchor=(anchor) { "longest: " (format::wait(ms)) }
            }
        };
        [counts::axis(&ticks, &y, power), html! {}, drawn]
    })
}

/// A power of ten, in a short form.
fn power(ms: f64) -> String {
    if ms < 1.0 {
        format!("{ms} ms")
    } else if ms < 1e3 {
        format!("{ms:.0} ms")
    } else {
        format!("{} s", format::count((ms / 1e3) as u64))
    }
}

/// The middle of the step with the longest wait, and that wait.
fn longest(view: &View<'_>) -> Option<(f64, f64)> {
    let waits = view.run.timeline.wait_max_ms.iter().enumerate();
    let (step, ms) = waits.filter_map(|(step, ms)| Some((step, (*ms)?))).max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(((step as f64 + 0.5) * view.run.timeline.step_ms as f64, ms))
}
