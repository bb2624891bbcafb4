//! The plots of a run. All of a width share their horizontal scale and the lines of the marks, so that
//! they read as one instrument when they are put one below the other.
//!
//! On a narrow page they are scrolled, as scaled text could not be read. Instances differ by hatching as well as by colour.

mod counts;
mod lines;
mod marks;
mod requests;
mod waits;
mod watches;

pub(super) use requests::short;
pub(super) use watches::{ended, on_instances};

use super::format;
use super::labels::Placed;
use super::svg::{self, Scale, px, text_width};
use crate::data::{Mark, Ran, Run};
use crate::judges;
use maud::{Markup, html};
use std::collections::BTreeMap;

/// Styles that instances can have; further ones begin again.
const LOOKS: usize = 5;

/// Room for marks before and after the load, as a share of it. What is further away is drawn at the edge;
/// its time is in the list.
const BEYOND: f64 = 0.12;

/// Width of a drawing, and of its text.
const WIDTH: f64 = 1040.0;
const FONT: f64 = 12.0;

/// Where a horizontal scale begins and ends.
const LEFT: f64 = 52.0;
const RIGHT: f64 = WIDTH - 12.0;

#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    /// In ms.
    span: (f64, f64),
    x: Scale,
}

impl Frame {
    /// For all of these runs.
    pub(super) fn of(runs: &[&Ran]) -> Self {
        let end = |run: &Ran| (run.timeline.step_ms * steps(run) as u64).max(run.load_ms) as f64;
        let end = runs.iter().map(|run| end(run)).fold(1.0, f64::max);
        let marks = || runs.iter().flat_map(|run| &run.marks).map(|mark| mark.at_ms as f64);
        let from = marks().fold(0.0, f64::min).max(-end * BEYOND);
        let to = marks().fold(end, f64::max).min(end * (1.0 + BEYOND));
        // A little more, so that a mark at zero is not on the axis.
        let span = (from - end * 0.01, to + end * 0.01);
        Self { span, x: Scale::linear(span, (LEFT, RIGHT)) }
    }

    fn x(&self, ms: f64) -> f64 {
        self.x.at(ms)
    }

    /// Edges of a run's steps.
    fn edges(&self, run: &Ran) -> Vec<f64> {
        (0..=steps(run)).map(|step| self.x((run.timeline.step_ms * step as u64) as f64)).collect()
    }

    /// A drawing with its name and its words for those who cannot see it.
    fn svg(&self, height: f64, title: &str, desc: &str, body: &Markup) -> Markup {
        html! {
            svg.plot viewBox={ "0 0 " (px(WIDTH)) " " (px(height)) } role="img"
                xmlns="http://www.w3.org/2000/svg" font-size=(FONT) {
                title { (title) }
                desc { (desc) }
                (body)
            }
        }
    }

    /// A title, and after or below it the key of the styles. Also its height.
    fn heading(&self, title: &str, keys: &[Key]) -> (Markup, f64) {
        let size = FONT + 1.0;
        let mut at = (text_width(title, size) + 20.0, 15.0);
        let row = size + 6.0;
        let mut drawn = Vec::new();
        // Where each row ends.
        let mut rows = vec![at];
        for key in keys {
            let width = 20.0 + text_width(&key.text, FONT) + 14.0;
            if at.0 + width > WIDTH && at.0 > 0.0 {
                at = (0.0, at.1 + row);
                rows.push(at);
            }
            drawn.push((at, key));
            at.0 += width;
            rows.pop();
            rows.push(at);
        }
        let heading = html! {
            // The lines of marks end at the words.
            @for (end, y) in rows {
                rect.paper x="0" y=(px(y - size - 2.0)) width=(px(end - 8.0)) height=(px(row)) {}
            }
            text.title x="0" y="15" font-size=(size) { (title) }
            @for ((x, y), key) in drawn {
                g.key transform={ "translate(" (px(x)) "," (px(y)) ")" } {
                    @match key.look {
                        Look::Area(class) => {
                            rect.area.(class) x="0" y="-10" width="14" height="11" rx="2" {}
                            rect.hatch.(class) x="0" y="-10" width="14" height="11" rx="2" {}
                        }
                        Look::Line(class) => path.line.(class) d="M0,-4H15" {},
                        Look::Sign(sign) => (sign.draw(7.0, -4.5)),
                    }
                    text x="20" y="0" { (key.text) }
                }
            }
        };
        (heading, at.1 + 10.0)
    }

    /// The horizontal axis below `y`.
    fn axis(&self, y: f64) -> Markup {
        html! {
            path.axis d={ "M" (px(LEFT)) "," (px(y)) "H" (px(RIGHT)) } {}
            @for (at, x) in self.seconds() {
                text.tick x=(px(x)) y=(px(y + FONT + 3.0)) text-anchor="middle" { (at) }
            }
        }
    }

    /// Round seconds, and where they are.
    fn seconds(&self) -> impl Iterator<Item = (String, f64)> {
        let step = svg::nice_step((self.span.1 - self.span.0) / 1e3, 12);
        let first = (self.span.0 / 1e3 / step).ceil() as i64;
        let last = (self.span.1 / 1e3 / step).floor() as i64;
        let text = move |n: i64| {
            let sign = if n < 0 { "−" } else { "" };
            format!("{sign}{} s", format::count((n.unsigned_abs() as f64 * step) as u64))
        };
        (first..=last).map(move |n| (text(n), self.x(n as f64 * step * 1e3)))
    }

    /// Lines for round seconds from `top` to `bottom`, and those of marks above, where the last drawing
    /// ends. Below `top` they are drawn over what is there.
    fn grid(&self, marks: &[Placed], top: f64, bottom: f64) -> Markup {
        html! {
            path.grid d=(self.seconds().map(|(_, x)| format!("M{},{}V{}", px(x), px(top), px(bottom))).collect::<String>()) {}
            (mark_lines(marks, 0.0, top))
        }
    }
}

fn mark_lines(marks: &[Placed], top: f64, bottom: f64) -> Markup {
    let lines = marks.iter().map(|mark| format!("M{},{}V{}", px(mark.at), px(top), px(bottom)));
    html! { path.mark-line d=(lines.collect::<String>()) {} }
}

/// What a style means.
struct Key {
    look: Look,
    text: String,
}

#[derive(Clone, Copy)]
enum Look {
    Area(&'static str),
    Line(&'static str),
    Sign(Sign),
}

/// Signs, which differ by their shape.
#[derive(Debug, Clone, Copy)]
enum Sign {
    /// Lost.
    Cross,
    /// Ended by the instance.
    Diamond,
}

impl Sign {
    fn draw(self, x: f64, y: f64) -> Markup {
        let (class, path) = match self {
            Self::Cross => ("cross", "m-4.5,-4.5l9,9m0,-9l-9,9"),
            Self::Diamond => ("diamond", "m0,-5l5,5l-5,5l-5,-5z"),
        };
        html! { path.sign.(class) d={ "M" (px(x)) "," (px(y)) (path) } {} }
    }
}

/// A run in a frame.
struct View<'a> {
    frame: Frame,
    run: &'a Ran,
    marks: Vec<Placed>,
}

impl View<'_> {
    fn keys(&self) -> Vec<Key> {
        let instances = self.run.instances.iter();
        instances
            .map(|i| Key { look: Look::Area(instance_class(self.run, &i.name)), text: named(self.run, &i.name) })
            .collect()
    }

    /// A drawing with a heading above and seconds below. Its layers are given where they begin and end: a vertical axis, what is below the
    /// lines of the marks, and what is above them.
    fn draw(
        &self,
        (title, words): (&str, &str),
        keys: &[Key],
        height: f64,
        layers: impl FnOnce(f64, f64) -> [Markup; 3],
    ) -> Markup {
        let (heading, top) = self.frame.heading(title, keys);
        let bottom = top + height;
        let [axis, below, above] = layers(top, bottom);
        let body = html! {
            (axis)
            (self.frame.grid(&self.marks, top, bottom))
            (below)
            (mark_lines(&self.marks, top, bottom))
            (above)
            (heading)
            (self.frame.axis(bottom))
        };
        self.frame.svg(bottom + 22.0, title, words, &body)
    }
}

/// All plots of a run in a frame.
pub(super) fn all(frame: Frame, run: &Ran) -> Markup {
    let (marks, placed) = marks::header(&frame, &run.marks);
    let view = View { frame, run, marks: placed };
    html! {
        (marks)
        (requests::plot(&view))
        (waits::plot(&view))
        @for series in judges::sections(run).iter().flat_map(|section| &section.series) { (lines::plot(&view, series)) }
        (counts::connections(&view))
        (watches::plot(&view))
    }
}

/// A run among others: requests, losses and the longest waits, without words that are elsewhere on the page.
pub(super) fn small(frame: Frame, run: &Run, ran: &Ran, most: f64) -> Markup {
    let words: Vec<&Mark> = ran.marks.iter().filter(|mark| marks::matters(mark)).collect();
    requests::small(&frame, run.via.words(), ran, &words, most)
}

/// Most successful requests/s that a scale should reach to.
pub(super) fn most_a_second(run: &Ran) -> f64 {
    requests::most(&requests::rates(run))
}

/// Number of steps of a run.
pub(super) fn steps(run: &Ran) -> usize {
    run.timeline.wait_max_ms.len()
}

/// The CSS class of what is drawn of an instance.
pub(super) fn instance_class(run: &Ran, instance: &str) -> &'static str {
    let known = run.instances.iter().position(|i| i.name == instance);
    known.map_or("ix", |index| ["i0", "i1", "i2", "i3", "i4"][index % LOOKS])
}

/// An instance with its version, if that is known.
pub(super) fn named(run: &Ran, instance: &str) -> String {
    let version = run.instances.iter().find(|i| i.name == instance).map_or("", |i| &i.version);
    if version.is_empty() { instance.to_owned() } else { format!("{instance} {version}") }
}

/// The instances of which there is something, in the order of the run's instances; others after them.
pub(super) fn ordered<'a, T>(
    run: &'a Ran,
    by_instance: &'a BTreeMap<String, T>,
) -> impl Iterator<Item = (&'a str, &'a T)> {
    let known = run.instances.iter().map(|i| &i.name);
    let others = by_instance.keys().filter(|name| run.instances.iter().all(|i| i.name != **name));
    known.chain(others).filter_map(|name| Some((name.as_str(), by_instance.get(name)?)))
}
