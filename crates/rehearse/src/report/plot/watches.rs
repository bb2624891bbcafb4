//! A lane a watch: on which instance it was, and where it was on none.

use super::counts::{self, Stack};
use super::{Frame, Key, LEFT, Look, RIGHT, Sign, View, instance_class};
use crate::data::{Gap, Ran, Watch};
use crate::report::format;
use crate::report::svg::{px, text_width};
use maud::{Markup, html};
use std::collections::BTreeMap;

/// Most lanes that can be distinguished.
const LANES: usize = 40;

/// Lanes that are shown of more, if fewer have flaws.
const EXAMPLES: usize = 12;

/// Width of a sign.
const SIGN: f64 = 8.0;

/// A gap is shown at least this wide.
const NARROWEST: f64 = 3.0;

pub(super) fn plot(view: &View<'_>) -> Markup {
    let run = view.run;
    if run.watches.is_empty() {
        return html! {};
    }
    let shown = shown(&run.watches);
    let all = shown.len() == run.watches.len();
    let title = match all {
        true => "Watches, a row each".to_owned(),
        false => {
            format!("{} of {} watches: those with the worst gaps", shown.len(), format::count(run.watches.len() as u64))
        }
    };
    let mut keys = view.keys();
    let gaps = || run.watches.iter().flat_map(|watch| &watch.gaps);
    let moved = match (gaps().any(|gap| gap.by_instance), gaps().any(|gap| gap.allowed)) {
        (true, true) => Some("ended by its instance, or as a promise allows"),
        (true, false) => Some("ended by its instance, opened again"),
        (false, true) => Some("cut as a promise allows"),
        (false, false) => None,
    };
    let cut = run.watches.iter().any(flawed);
    keys.extend(moved.map(|text| Key { look: Look::Sign(Sign::Diamond), text: text.into() }));
    keys.extend(cut.then(|| Key { look: Look::Sign(Sign::Cross), text: "cut, or events lost".into() }));
    let lane = if shown.len() > 16 { 13.0 } else { 18.0 };
    let height = lane * shown.len() as f64 + 2.0;
    let lanes = view.draw((&title, &in_words(&run.watches)), &keys, height, |top, _| {
        let lanes = html! {
            @for (index, watch) in shown.iter().enumerate() {
                (one(&view.frame, run, watch, top + lane * index as f64 + 1.0, lane - 4.0))
            }
        };
        [html! {}, lanes, html! {}]
    });
    html! {
        @if !all { (summary(view)) }
        (lanes)
    }
}

/// All of a few, else those that lost something and those with the longest gaps, in their order.
fn shown(watches: &[Watch]) -> Vec<&Watch> {
    let mut order: Vec<(usize, &Watch)> = watches.iter().enumerate().collect();
    if order.len() > LANES {
        let longest = |watch: &Watch| watch.gaps.iter().map(|gap| gap.to_ms - gap.from_ms).max();
        order.sort_by_key(|(_, watch)| std::cmp::Reverse((flawed(watch), longest(watch))));
        let flaws = order.iter().take_while(|(_, watch)| flawed(watch)).count();
        order.truncate(flaws.clamp(EXAMPLES, LANES));
        order.sort_by_key(|(index, _)| *index);
    }
    order.into_iter().map(|(_, watch)| watch).collect()
}

fn flawed(watch: &Watch) -> bool {
    watch.missed + watch.duplicated > 0 || watch.gaps.iter().any(Gap::lost)
}

fn one(frame: &Frame, run: &Ran, watch: &Watch, y: f64, height: f64) -> Markup {
    let x = |ms: i64| frame.x(ms as f64);
    let flaws = [(watch.missed, "missed"), (watch.duplicated, "duplicated")];
    let flaws =
        flaws.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{} {what}", format::count(*count)));
    let flaws = flaws.collect::<Vec<_>>().join(", ");
    let id = watch.id.strip_prefix("watch-").unwrap_or(&watch.id);
    // Names of other clients may be longer than the room for them.
    let id: String = id.chars().take(7).collect();
    let middle = y + height / 2.0;
    html! {
        text.tick x=(px(LEFT - 6.0)) y=(px(middle + 3.6)) text-anchor="end" font-size="10" { (id) }
        @for segment in &watch.segments {
            @let (left, right) = (x(segment.from_ms), x(segment.to_ms));
            @let look = instance_class(run, &segment.instance);
            g {
                title { (watch.id) " on " (segment.instance) ", " (format::moment(segment.from_ms)) " to " (format::moment(segment.to_ms)) }
                rect.area.(look) x=(px(left)) y=(px(y)) width=(px((right - left).max(0.5))) height=(px(height)) {}
                rect.hatch.(look) x=(px(left)) y=(px(y)) width=(px((right - left).max(0.5))) height=(px(height)) {}
            }
        }
        @for gap in &watch.gaps {
            (between(frame, watch, gap, y, height))
        }
        @for (at, moment) in noticed(frame, watch) {
            g transform={ "translate(" (px(at)) "," (px(middle)) ") scale(0.75)" } {
                title { (watch.id) " noticed at " (format::moment(moment)) " that it missed events or saw them again" }
                (Sign::Cross.draw(0.0, 0.0))
            }
        }
        @if !flaws.is_empty() {
            @let width = text_width(&flaws, 10.5) + 10.0;
            rect.flaw-pill x=(px(RIGHT - 2.0 - width)) y=(px(y - 1.0)) width=(px(width)) height=(px(height + 2.0)) rx="4" {}
            text.flaw x=(px(RIGHT - 7.0)) y=(px(middle + 3.8)) text-anchor="end" font-size="10.5" { (flaws) }
        }
    }
}

/// Where a watch noticed flaws; one of those that would cover each other.
fn noticed(frame: &Frame, watch: &Watch) -> Vec<(f64, i64)> {
    let mut signs: Vec<(f64, i64)> = Vec::new();
    for flaw in &watch.flaws {
        let at = frame.x(flaw.at_ms as f64);
        if signs.last().is_none_or(|(before, _)| at - before >= SIGN) {
            signs.push((at, flaw.at_ms));
        }
    }
    signs
}

fn between(frame: &Frame, watch: &Watch, gap: &Gap, y: f64, height: f64) -> Markup {
    let (left, right) = (frame.x(gap.from_ms as f64), frame.x(gap.to_ms as f64));
    let middle = f64::midpoint(left, right);
    let width = (right - left).max(NARROWEST);
    let (class, sign) = if gap.lost() { ("gap cut", Sign::Cross) } else { ("gap moved", Sign::Diamond) };
    html! {
        g {
            title {
                (watch.id) " " (ended(gap)) " (" (gap.reason) "), not open for " (format::wait((gap.to_ms - gap.from_ms) as f64))
                " from " (format::moment(gap.from_ms))
            }
            rect class=(class) x=(px(middle - width / 2.0)) y=(px(y - 0.5)) width=(px(width)) height=(px(height + 1.0)) {}
            g transform={ "translate(" (px(middle)) "," (px(y + height / 2.0)) ") scale(" (if height < 11.0 { 0.75 } else { 0.9 }) ")" } {
                (sign.draw(0.0, 0.0))
            }
        }
    }
}

/// How a watch ended before a gap.
pub(in crate::report) fn ended(gap: &Gap) -> &'static str {
    match (gap.by_instance, gap.allowed) {
        (true, _) => "ended by its instance",
        (false, true) => "cut as a promise allows",
        (false, false) => "cut",
    }
}

/// How many watches were on which instance: for more than can have a lane.
fn summary(view: &View<'_>) -> Markup {
    let counts = on_instances(view.run);
    let stack: Stack<'_> = counts::stack(view.run, &counts);
    let title = format!("All {} watches, by instance", format::count(view.run.watches.len() as u64));
    counts::over_time(view, &title, &in_words(&view.run.watches), &stack)
}

/// Watches that are open at the end of each step, by instance.
pub(in crate::report) fn on_instances(run: &Ran) -> BTreeMap<String, Vec<u64>> {
    let (steps, length) = (super::steps(run), run.timeline.step_ms.max(1));
    let mut counts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let step = |ms: i64| usize::try_from(ms).map_or(0, |ms| ms / length as usize).min(steps);
    for segment in run.watches.iter().flat_map(|watch| &watch.segments) {
        let counts = counts.entry(segment.instance.clone()).or_insert_with(|| vec![0; steps]);
        // To the end of the load is to the end of the last step.
        let to = if segment.to_ms >= run.load_ms as i64 { steps } else { step(segment.to_ms) };
        counts.iter_mut().take(to).skip(step(segment.from_ms)).for_each(|count| *count += 1);
    }
    counts
}

fn in_words(watches: &[Watch]) -> String {
    let gaps = || watches.iter().flat_map(|watch| &watch.gaps);
    let longest = gaps().map(|gap| gap.to_ms - gap.from_ms).max().unwrap_or(0);
    let allowed = match gaps().filter(|gap| gap.allowed).count() as u64 {
        0 => String::new(),
        times => format!(", and {} as promises allow", format::count(times)),
    };
    format!(
        "{}. Their instances ended them {} times and they were cut {} times{allowed}; the longest gap was {}. Events missed: {}, duplicated: {}.",
        format::of(watches.len() as u64, "watch", "watches"),
        format::count(gaps().filter(|gap| gap.by_instance).count() as u64),
        format::count(gaps().filter(|gap| gap.lost()).count() as u64),
        format::wait(longest as f64),
        format::count(watches.iter().map(|watch| watch.missed).sum()),
        format::count(watches.iter().map(|watch| watch.duplicated).sum()),
    )
}
