//! Stacked areas, one style for each instance.

use super::{FONT, Frame, LEFT, RIGHT, View, instance_class, named};
use crate::data::Ran;
use crate::report::format;
use crate::report::svg::{self, Scale, px, text_width};
use maud::{Markup, html};
use std::collections::BTreeMap;

/// Values by step, by instance, in the order in which they are stacked.
pub(super) type Stack<'a> = Vec<(&'a str, Vec<f64>)>;

pub(super) fn stack<'a>(run: &'a Ran, by_instance: &'a BTreeMap<String, Vec<u64>>) -> Stack<'a> {
    // Lists of a file made by hand may be too short.
    let value = |counts: &[u64], step: usize| counts.get(step).copied().unwrap_or(0) as f64;
    let values = |counts: &[u64]| (0..super::steps(run)).map(|step| value(counts, step)).collect();
    super::ordered(run, by_instance).map(|(name, counts)| (name, values(counts))).collect()
}

/// The sums of all layers.
pub(super) fn totals(stack: &Stack<'_>) -> Vec<f64> {
    let steps = stack.first().map_or(0, |(_, values)| values.len());
    (0..steps).map(|step| stack.iter().map(|(_, values)| values[step]).sum()).collect()
}

/// The layers, without axes.
pub(super) fn areas(frame: &Frame, run: &Ran, stack: &Stack<'_>, y: &Scale) -> Markup {
    let edges = frame.edges(run);
    let mut below = vec![0.0; super::steps(run)];
    let mut layers = Vec::new();
    for (name, values) in stack {
        let above: Vec<f64> = below.iter().zip(values).map(|(below, value)| below + value).collect();
        let at = |values: &[f64]| values.iter().map(|value| y.at(*value)).collect::<Vec<_>>();
        layers.push((instance_class(run, name), svg::area(&edges, &at(&above), &at(&below))));
        below = above;
    }
    html! {
        @for (look, path) in layers {
            path.area.(look) d=(path) {}
            path.hatch.(look) d=(path) {}
        }
    }
}

/// The name of each instance where it has nearly all.
pub(super) fn names(frame: &Frame, run: &Ran, stack: &Stack<'_>, y: f64) -> Markup {
    let (edges, totals) = (frame.edges(run), totals(stack));
    let longest = |values: &[f64]| {
        let mostly = |step: usize| totals[step] > 0.0 && values[step] >= 0.7 * totals[step];
        let (mut best, mut from) = ((0.0, 0.0), None);
        for (step, edge) in edges.iter().copied().enumerate() {
            if step < values.len() && mostly(step) {
                from = from.or(Some(edge));
            } else if let Some(left) = from.take().filter(|left| edge - left > best.1 - best.0) {
                best = (left, edge);
            }
        }
        best
    };
    html! {
        @for (name, values) in stack {
            @let (text, (left, right)) = (named(run, name), longest(values));
            @let width = text_width(&text, FONT) + 14.0;
            @if right - left > width + 8.0 {
                @let middle = f64::midpoint(left, right);
                rect.pill x=(px(middle - width / 2.0)) y=(px(y - 10.0)) width=(px(width)) height="20" rx="10" {}
                text x=(px(middle)) y=(px(y + 4.0)) text-anchor="middle" { (text) }
            }
        }
    }
}

/// A scale for counts up to `most`, and its axis.
pub(super) fn scale(most: f64, wanted: usize, top: f64, bottom: f64) -> (Scale, Markup) {
    let ticks = svg::ticks(most, wanted);
    let y = Scale::linear((0.0, *ticks.last().unwrap_or(&1.0)), (bottom, top));
    (y, axis(&ticks, &y, |tick| format::count(tick as u64)))
}

/// Lines and numbers of the vertical axis.
pub(super) fn axis(ticks: &[f64], y: &Scale, text: impl Fn(f64) -> String) -> Markup {
    html! {
        path.grid d=(ticks.iter().map(|t| format!("M{},{}H{}", px(LEFT), px(y.at(*t)), px(RIGHT))).collect::<String>()) {}
        @for tick in ticks {
            text.tick x=(px(LEFT - 6.0)) y=(px(y.at(*tick) + 4.0)) text-anchor="end" { (text(*tick)) }
        }
    }
}

/// Open connections over time.
pub(super) fn connections(view: &View<'_>) -> Markup {
    let stack = stack(view.run, &view.run.timeline.open_connections);
    let title = "Open keep-alive connections and watches, by instance";
    let most = totals(&stack).into_iter().fold(0.0, f64::max);
    let ends = &view.run.timeline.ended_by_instance;
    let desc = format!(
        "At most {} were open at once. Instances ended {} of them.",
        format::count(most as u64),
        format::count(ends.iter().sum())
    );
    over_time(view, title, &desc, &stack)
}

/// A stack with its axes.
pub(super) fn over_time(view: &View<'_>, title: &str, desc: &str, stack: &Stack<'_>) -> Markup {
    view.draw((title, desc), &view.keys(), 90.0, |top, bottom| {
        let (y, axis) = scale(totals(stack).into_iter().fold(0.0, f64::max), 3, top, bottom);
        [axis, areas(&view.frame, view.run, stack, &y), html! {}]
    })
}
