//! Requests/s, and below them what was lost when.

use super::counts::{self, Stack};
use super::{FONT, Frame, Sign, View, WIDTH};
use crate::data::{Mark, Ran};
use crate::report::format;
use crate::report::labels::{self, Label, Placed, Room, Side};
use crate::report::svg::{Scale, px, text_width};
use maud::{Markup, html};

/// Height of a row of losses.
const ROW: f64 = 20.0;

/// Rows that losses may have.
const ROWS: usize = 3;

/// A step with this many times the usual rate is drawn cut off.
const BURST: f64 = 2.5;

/// Losses that are no more than this many steps apart have one sign.
const TOGETHER: usize = 2;

pub(super) fn plot(view: &View<'_>) -> Markup {
    let (frame, run) = (&view.frame, view.run);
    let stack = rates(run);
    let title = "Successful requests/s, by instance";
    let (heading, top) = frame.heading(title, &view.keys());
    let bottom = top + 170.0;
    let (y, axis) = counts::scale(most(&stack), 4, top, bottom);
    let lost = clusters(run);
    let (losses, below) = strip(frame, &lost, bottom + 24.0);
    let answered = format!("{} answers in all. ", format::count(run.timeline.answered.values().flatten().sum()));
    let body = html! {
        (axis)
        (frame.grid(&view.marks, top, below))
        (counts::areas(frame, run, &stack, &y))
        (bands(frame, run, &lost, top, bottom))
        (super::mark_lines(&view.marks, top, below))
        (counts::names(frame, run, &stack, bottom - 18.0))
        (cut_off(frame, run, &stack, &y, top))
        (heading)
        (frame.axis(bottom))
        (losses)
    };
    frame.svg(below + 8.0, title, &(answered + &in_words(&lost)), &body)
}

/// The same without a heading, for a comparison.
pub(super) fn small(frame: &Frame, name: &str, run: &Ran, words: &[&Mark], most: f64) -> Markup {
    let stack = rates(run);
    let label = |mark: &&Mark| Label { at: frame.x(mark.at_ms as f64), text: text_width(&mark.words(), FONT) + 4.0 };
    let room = Room { left: 0.0, right: WIDTH, badge: 8.0, rows: 2 };
    let placed = labels::place(&words.iter().map(label).collect::<Vec<_>>(), room);
    let rows = placed.iter().map(|p| p.row + 1).max().unwrap_or(0);
    let top = rows as f64 * 16.0 + 6.0;
    let bottom = top + 64.0;
    let (y, axis) = counts::scale(most, 2, top, bottom);
    let lost = clusters(run);
    let (losses, below) = strip(frame, &lost, bottom + 24.0);
    let body = html! {
        (axis)
        (frame.grid(&[], top, below))
        (counts::areas(frame, run, &stack, &y))
        (bands(frame, run, &lost, top, bottom))
        (cut_off(frame, run, &stack, &y, top))
        @for (mark, place) in words.iter().zip(&placed) {
            @let middle = top - 2.0 - 16.0 * (place.row as f64 + 0.5);
            path.mark-line d={ "M" (px(place.at)) "," (px(middle + 3.0)) "V" (px(bottom)) } {}
            circle.dot cx=(px(place.at)) cy=(px(middle)) r="3" {}
            (words_at(place, middle, 4.0, &mark.words()))
        }
        (frame.axis(bottom))
        (losses)
    };
    let title = format!("Successful requests/s: {name}");
    frame.svg(below + 4.0, &title, &in_words(&lost), &body)
}

/// A kind of loss in one or two words.
pub(in crate::report) fn short(kind: &str) -> String {
    match kind {
        "stream_ended" => "streams cut".to_owned(),
        "event_missed" => "events missed".to_owned(),
        "event_duplicated" | "event_doubled" => "events duplicated".to_owned(),
        "tls" | "http" => kind.to_uppercase(),
        _ => kind.replace('_', " "),
    }
}

/// The top of a scale. A step in which many clients came at once, such as that in which watches are
/// opened, would make all others flat: it is cut off and its value is written there.
pub(super) fn most(stack: &Stack<'_>) -> f64 {
    let mut totals = counts::totals(stack);
    totals.sort_unstable_by(f64::total_cmp);
    let usual = totals.get(totals.len() * 9 / 10).copied().unwrap_or(0.0);
    let most = totals.last().copied().unwrap_or(0.0);
    if usual > 0.0 && most > BURST * usual { usual * 1.3 } else { most }
}

/// The values of bursts that are cut off; the highest of those that are side by side.
fn cut_off(frame: &Frame, run: &Ran, stack: &Stack<'_>, y: &Scale, top: f64) -> Markup {
    let (edges, totals) = (frame.edges(run), counts::totals(stack));
    let mut bursts: Vec<(usize, f64)> = Vec::new();
    for (step, total) in totals.into_iter().enumerate().filter(|(_, total)| *total > y.end()) {
        match bursts.last_mut().filter(|last| edges[step] - edges[last.0] < 70.0) {
            Some(last) if total > last.1 => *last = (step, total),
            Some(_) => {}
            None => bursts.push((step, total)),
        }
    }
    html! {
        @for (step, total) in bursts {
            @let text = format!("↑ {}", format::count(total as u64));
            text.sign-words x=(px(edges[step + 1] + 3.0)) y=(px(top + 10.0)) { (text) }
        }
    }
}

pub(super) fn rates(run: &Ran) -> Stack<'_> {
    let step = run.timeline.step_ms.max(1) as f64;
    let mut stack = counts::stack(run, &run.timeline.answered);
    // The step in which the load ends is short: as a full one it would look like a dip.
    let last = (run.load_ms as f64 / step) as usize;
    let share = (run.load_ms as f64 / step).fract();
    for (_, values) in &mut stack {
        for (index, value) in values.iter_mut().enumerate() {
            let length = if index == last && share > 0.25 { step * share } else { step };
            *value *= 1e3 / length;
        }
    }
    stack
}

/// What happened together: from the first step to the last, and how often what.
struct LossCluster {
    sign: Sign,
    steps: (usize, usize),
    middle_ms: f64,
    text: String,
    count: u64,
}

fn clusters(run: &Ran) -> Vec<LossCluster> {
    let step = run.timeline.step_ms as f64;
    let lost = run.timeline.lost.iter().map(|(kind, counts)| (short(kind), counts.as_slice())).collect::<Vec<_>>();
    let ended = [
        ("ended by the instance".to_owned(), run.timeline.ended_by_instance.as_slice()),
        ("allowed by a promise".to_owned(), run.timeline.allowed.as_slice()),
    ];
    [group(Sign::Cross, &lost, step), group(Sign::Diamond, &ended, step)].into_iter().flatten().collect()
}

fn group(sign: Sign, kinds: &[(String, &[u64])], step_ms: f64) -> Vec<LossCluster> {
    let steps = kinds.iter().map(|(_, counts)| counts.len()).max().unwrap_or(0);
    let any = |step: &usize| kinds.iter().any(|(_, counts)| counts.get(*step).is_some_and(|count| *count > 0));
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for step in (0..steps).filter(any) {
        match spans.last_mut().filter(|span| step - span.1 <= TOGETHER) {
            Some(span) => span.1 = step,
            None => spans.push((step, step)),
        }
    }
    let cluster = |(from, to): (usize, usize)| {
        let sum = |counts: &[u64]| counts.iter().take(to + 1).skip(from).sum::<u64>();
        let sums = kinds.iter().map(|(kind, counts)| (kind, sum(counts))).filter(|(_, count)| *count > 0);
        let text = sums.clone().map(|(kind, count)| format!("{} {kind}", format::count(count)));
        let (text, count) = (text.collect::<Vec<_>>().join(", "), sums.map(|(_, count)| count).sum());
        let middle_ms = (from + to + 1) as f64 / 2.0 * step_ms;
        LossCluster { sign, steps: (from, to), middle_ms, text, count }
    };
    spans.into_iter().map(cluster).collect()
}

/// Where something was lost, over the answers.
fn bands(frame: &Frame, run: &Ran, clusters: &[LossCluster], top: f64, bottom: f64) -> Markup {
    let edges = frame.edges(run);
    let lost = clusters.iter().filter(|cluster| matches!(cluster.sign, Sign::Cross));
    html! {
        @for (from, to) in lost.map(|cluster| cluster.steps) {
            @let (left, right) = (edges[from.min(edges.len() - 1)], edges[(to + 1).min(edges.len() - 1)]);
            rect.loss x=(px(left)) y=(px(top)) width=(px((right - left).max(2.0))) height=(px(bottom - top)) {}
        }
    }
}

/// The signs below the axis: losses in rows of their own above what the instances ended.
fn strip(frame: &Frame, clusters: &[LossCluster], top: f64) -> (Markup, f64) {
    let mut y = top;
    let mut drawn = Vec::new();
    for wanted in [Sign::Cross, Sign::Diamond] {
        let ours: Vec<&LossCluster> =
            clusters.iter().filter(|c| std::mem::discriminant(&c.sign) == std::mem::discriminant(&wanted)).collect();
        if ours.is_empty() {
            continue;
        }
        let placed = place(frame, &ours);
        let rows = placed.iter().map(|place| place.row + 1).max().unwrap_or(1);
        for (cluster, place) in ours.into_iter().zip(placed) {
            let middle = y + ROW * (rows - place.row) as f64 - ROW / 2.0 + 4.0;
            drawn.push((cluster, place, middle));
        }
        y += rows as f64 * ROW;
    }
    let markup = html! {
        @for (cluster, place, middle) in &drawn {
            g.loss-sign {
                title { (cluster.text) }
                (cluster.sign.draw(place.at, *middle))
                (words_at(place, *middle, 8.0, &cluster.text))
            }
        }
    };
    (markup, y + 4.0)
}

fn place(frame: &Frame, clusters: &[&LossCluster]) -> Vec<Placed> {
    let label =
        |cluster: &&LossCluster| Label { at: frame.x(cluster.middle_ms), text: text_width(&cluster.text, FONT) + 6.0 };
    let room = Room { left: 0.0, right: WIDTH, badge: 14.0, rows: ROWS };
    labels::place(&clusters.iter().map(label).collect::<Vec<_>>(), room)
}

fn words_at(place: &Placed, middle: f64, away: f64, text: &str) -> Markup {
    let (x, anchor) = match place.side {
        Side::None => return html! {},
        Side::Left => (place.at - away - 2.0, "end"),
        Side::Right => (place.at + away + 2.0, "start"),
    };
    html! { text.sign-words x=(px(x)) y=(px(middle + FONT * 0.36)) text-anchor=(anchor) { (text) } }
}

fn in_words(clusters: &[LossCluster]) -> String {
    let lost = clusters.iter().filter(|c| matches!(c.sign, Sign::Cross));
    match lost.clone().map(|c| c.count).sum() {
        0 => "Nothing was lost.".to_owned(),
        _ => format!("Lost: {}.", lost.map(|c| c.text.as_str()).collect::<Vec<_>>().join("; ")),
    }
}
