//! Results as one SVG: a row of bars a case, what comes through on the left, what it takes on the
//! right. Readable on light and on dark ground; no script, no fonts of its own.

use crate::results::Results;
use crate::setting::Setting;
use crate::work::{Case, Metric};
use std::fmt::Write;

const WIDTH: usize = 960;
const MARGIN: usize = 24;
/// From one column of panels to the next.
const COLUMN: usize = 468;
/// Of the peers' names and of the longest bar; figures stand behind the bar.
const NAMES: usize = 98;
const BAR: f64 = 186.0;
/// From one bar to the next, and its own height.
const LINE: usize = 19;
const THICK: usize = 12;
/// Of a panel beside its bars: title above, air below.
const TITLE: usize = 24;
const AIR: usize = 18;
/// Of the heading.
const HEAD: usize = 78;

const STYLE: &str = "
text { font: 12px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
.head { font-size: 17px; font-weight: 600; } .title { font-weight: 600; } .note { fill: #59636e; }
.strong { font-weight: 600; } .end { text-anchor: end; }
.ground { fill: #ffffff; } .bar { fill: #8c959f; } .none { fill: #d1d9e0; } .berth { fill: #0969da; }
.spread { stroke: #1f2328; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; } .note { fill: #9198a1; }
.ground { fill: #0d1117; } .bar { fill: #656c76; } .none { fill: #3d444d; } .berth { fill: #4493f8; }
.spread { stroke: #f0f6fc; }
}
";

/// Draws the figures that most people look for.
pub(crate) fn svg(results: &Results, setting: &Setting) -> String {
    let mut body = String::new();
    let mut top = HEAD;
    for case in results.key_cases() {
        for pair in case.key_metrics().chunks(2) {
            let mut tallest = 0;
            for (column, metric) in pair.iter().enumerate() {
                tallest = tallest.max(panel(&mut body, results, case, *metric, MARGIN + column * COLUMN, top));
            }
            top += tallest;
        }
    }
    let height = top + MARGIN / 2;
    let note = format!(
        "Medians of {} rounds, with least and most. Client, relay and backend share {}.",
        setting.rounds,
        setting.machine()
    );
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="berth and other TCP relays on loopback">
<style>{STYLE}</style>
<rect class="ground" width="{WIDTH}" height="{height}"/>
<text class="head" x="{MARGIN}" y="32">berth and other TCP relays on loopback</text>
<text class="note" x="{MARGIN}" y="52">{}</text>
{body}</svg>
"#,
        escape(&note)
    )
}

/// Draws one and says how tall it is.
fn panel(body: &mut String, results: &Results, case: Case, metric: Metric, left: usize, top: usize) -> usize {
    let none = results.none();
    let without_none = none.is_none_or(|none| results.summary(case, none, metric).is_none());
    let peers: Vec<_> =
        results.peers_of(case).into_iter().filter(|&peer| !(without_none && Some(peer) == none)).collect();
    let most = peers
        .iter()
        .filter_map(|&peer| results.summary(case, peer, metric))
        .map(|summary| summary.most)
        .fold(0.0, f64::max);
    let better = if metric.higher_is_better() { "more is better" } else { "less is better" };
    let _ = writeln!(
        body,
        r#"<text class="title" x="{left}" y="{}">{}<tspan class="note" font-weight="400">&#160;· {}, {better}</tspan></text>"#,
        top + 12,
        escape(&case.to_string()),
        escape(metric.title())
    );
    for (line, &peer) in peers.iter().enumerate() {
        let y = top + TITLE + line * LINE;
        let (middle, base) = (y + THICK / 2, y + THICK - 2);
        let start = left + NAMES;
        let is_berth = results.peers[peer].is_berth();
        let (bar, text) = match (is_berth, Some(peer) == none) {
            (true, _) => ("berth", " strong"),
            (_, true) => ("none", ""),
            _ => ("bar", ""),
        };
        let name = escape(&results.peers[peer].name);
        let _ = writeln!(body, r#"<text class="end{text}" x="{}" y="{base}">{name}</text>"#, start - 8);
        let Some(summary) = results.summary(case, peer, metric) else {
            let _ = writeln!(body, r#"<text class="note" x="{start}" y="{base}">failed</text>"#);
            continue;
        };
        let length = |value: f64| if most > 0.0 { value.max(0.0) / most * BAR } else { 0.0 };
        let (end, least, most) = (length(summary.median), length(summary.least), length(summary.most));
        let _ = writeln!(body, r#"<rect class="{bar}" x="{start}" y="{y}" width="{end:.1}" height="{THICK}" rx="2"/>"#);
        if most - least >= 1.0 {
            let x = start as f64;
            let _ = writeln!(
                body,
                r#"<line class="spread" x1="{:.1}" x2="{:.1}" y1="{middle}" y2="{middle}"/>"#,
                x + least,
                x + most
            );
        }
        let mut figure = metric.show(summary.median);
        if is_berth && let Some(best) = results.best_other(case, peer, metric) {
            let ratio = results.ratio(case, peer, best, metric).unwrap_or(0.0);
            let _ = write!(figure, " = {ratio:.2} × {}", results.peers[best].name);
        }
        let x = start as f64 + end.max(most) + 6.0;
        let _ = writeln!(body, r#"<text class="figure{text}" x="{x:.1}" y="{base}">{}</text>"#, escape(&figure));
    }
    TITLE + peers.len() * LINE + AIR
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::{results, setting};

    #[test]
    fn bars_are_to_scale_and_labelled() {
        let svg = svg(&results(), &setting());
        // The most of 120 is the longest bar; the median without a relay is 110 and envoy's 21.
        assert!(
            svg.contains(&format!(r#"<rect class="none" x="122" y="102" width="{:.1}""#, BAR * 110.0 / 120.0)),
            "{svg}"
        );
        assert!(
            svg.contains(&format!(r#"<rect class="bar" x="122" y="159" width="{:.1}""#, BAR * 21.0 / 120.0)),
            "{svg}"
        );
        assert!(svg.contains("60 = 1.50 × haproxy</text>"), "{svg}");
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }

    #[test]
    fn what_was_not_measured_is_said() {
        let mut results = results();
        results.samples.retain(|sample| sample.peer != 1 || sample.outcome.is_err());
        results.peers[1].name = "<new>".to_owned();
        let svg = svg(&results, &setting());
        assert!(svg.contains(">failed</text>") && svg.contains("&lt;new&gt;"), "{svg}");
    }
}
