//! One run: its timeline, its marks, its promises, its sums.

use super::state::{self, State};
use super::tables;
use crate::data::{MarkKind, Ran, Run, RunOutcome, Tally, count_of};
use crate::judges;
use crate::report::format;
use crate::report::plot::{self, Frame};
use crate::section::{Place, Row, Section};
use maud::{Markup, html};

pub(super) fn section(run: &Run, index: usize, several: bool) -> Markup {
    let id = format!("run-{}", index + 1);
    html! {
        section.run id=(id) {
            @if several { h2 { (title(run)) " " (State::of_run(run).badge()) } } @else { h2 { "What happened" } }
            @match &run.outcome {
                RunOutcome::Skipped(reason) => p.skipped { "Skipped: " (sentence(reason)) },
                RunOutcome::Ran(ran) => {
                    @if several {
                        p.lead { (ran.verdict.summary) }
                        p.quiet { (what(run, ran)) }
                        (tiles(ran))
                    }
                    (objections(ran))
                    (timeline(ran, &id))
                    (promises(ran))
                    (details(&judges::sections(ran)))
                    (sums(ran))
                }
            }
        }
    }
}

/// What was rehearsed, in a line.
pub(super) fn what(run: &Run, ran: &Ran) -> String {
    let names = ran.instances.iter().map(|i| plot::named(ran, &i.name)).collect::<Vec<_>>().join(" → ");
    let load = format!("{} of load", format::wait(ran.load_ms as f64));
    let words = [ran.apiservers().to_owned(), names, run.topology.clone(), load];
    words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" · ")
}

/// The figures that matter most, large.
pub(super) fn tiles(ran: &Ran) -> Markup {
    html! {
        dl.tiles {
            @for tile in judges::sections(ran).iter().flat_map(|section| section.rows(Place::Tile)) { (self::tile(tile)) }
        }
    }
}

/// With a full stop.
pub(super) fn sentence(words: &str) -> String {
    let words = words.trim_end();
    if words.ends_with(['.', '!', '?']) { words.to_owned() } else { format!("{words}.") }
}

fn tile(Row { name, value, note, .. }: &Row) -> Markup {
    let (number, unit) = value.split_once(' ').unwrap_or((value, ""));
    html! {
        div {
            dt { (format::capital(name)) }
            dd { span.value { (number) } @if !unit.is_empty() { " " span.unit { (unit) } } span.note { (note) } }
        }
    }
}

fn title(run: &Run) -> String {
    format::capital(run.via.way())
}

fn objections(ran: &Ran) -> Markup {
    html! {
        @if !ran.verdict.objections.is_empty() {
            div.notice role="note" {
                h3 { "Not as it should be" }
                ul { @for objection in &ran.verdict.objections { li { (objection) } } }
            }
        }
        @for note in &ran.verdict.notes { p.quiet { "Note: " (sentence(note)) } }
    }
}

fn timeline(ran: &Ran, id: &str) -> Markup {
    if plot::steps(ran) == 0 {
        return html! { p.skipped { "No load was started, so there is nothing to draw." } };
    }
    html! {
        figure.timeline {
            div.plot-scroll {
                div.plots { (plot::all(Frame::of(&[ran]), ran)) }
            }
            figcaption {
                @if !ran.marks.is_empty() {
                    ol.marks {
                        @for (index, mark) in ran.marks.iter().enumerate() {
                            li.fault[mark.what == MarkKind::Fault].sigterm[mark.what == MarkKind::Sigterm] {
                                span.number { (index + 1) }
                                span.when { (format::moment(mark.at_ms)) }
                                span {
                                    (mark.words())
                                    @if !mark.more().is_empty() { span.quiet { " " (mark.more()) } }
                                }
                            }
                        }
                    }
                }
            }
            (tables::all(ran, id))
        }
    }
}

fn promises(ran: &Ran) -> Markup {
    html! {
        @if !ran.promises.is_empty() {
            h3 { (if ran.storm.is_some() { "What was promised" } else { "What each fault did" }) }
            div.promises {
                @for promise in &ran.promises {
                    article.promise.broken[!promise.held] {
                        header { code { (promise.fault) } (state::promise(promise.held)) }
                        p.quiet {
                            // A version that is wrong on purpose is named by what is wrong with it.
                            @if promise.instance != promise.fault { "at " (promise.instance) ", " }
                            "from " (format::moment(promise.from_ms))
                            @match promise.to_ms { Some(to) => { " to " (format::moment(to)) } None => " on" }
                        }
                        p { strong { "Promise: " } (sentence(&promise.promise)) }
                        @if !promise.what_happened.is_empty() {
                            p { strong { "Seen: " } (sentence(&promise.what_happened.join("; "))) }
                        }
                        @if !promise.allowed.is_empty() {
                            p { strong { "Allowed: " } (allowed(&promise.allowed)) }
                        }
                    }
                }
            }
        }
    }
}

/// The judges' tables.
fn details(sections: &[Section]) -> Markup {
    html! {
        @for section in sections {
            @if !section.title.is_empty() {
                h3 { (section.title) }
                (rows(section.rows(Place::Page)))
            }
            @for grid in section.grids.iter().filter(|grid| !grid.rows.is_empty()) {
                h3 { (grid.title) }
                // It may be wider than the page.
                div.scroll tabindex="0" role="region" aria-label=(grid.title) {
                    (tables::table(grid.columns, grid.columns.len(), &grid.rows))
                }
                @if !grid.note.is_empty() { p.quiet { (grid.note) } }
            }
        }
    }
}

fn rows<'a>(rows: impl Iterator<Item = &'a Row>) -> Markup {
    names(&[], rows.map(|row| (row.name.as_str(), vec![row.value.clone()])))
}

/// Names, each with a number for each column. One column alone has no heading.
fn names<'a>(columns: &[&str], rows: impl Iterator<Item = (&'a str, Vec<String>)>) -> Markup {
    html! {
        table.tallies {
            @if !columns.is_empty() { thead { tr { td {} @for column in columns { th scope="col" { (column) } } } } }
            tbody {
                @for (name, cells) in rows {
                    tr { th scope="row" { (name) } @for cell in cells { td.number { (cell) } } }
                }
            }
        }
    }
}

fn sums(ran: &Ran) -> Markup {
    let verdict = &ran.verdict;
    html! {
        div.columns {
            div {
                h3 { "Lost" }
                @if verdict.lost.is_empty() { p { "Nothing." } } @else { (tallies(&verdict.lost, None)) }
                @if !verdict.examples.is_empty() {
                    h4 { "The first of each kind" }
                    ul.examples { @for example in &verdict.examples { li { code { (example) } } } }
                }
            }
            div {
                h3 { "Ended by the instance, or allowed" }
                (tallies(&verdict.apart, verdict.control.as_deref()))
                @if verdict.control.is_none() {
                    p.quiet { "What an instance ends itself is not lost." }
                } @else {
                    p.quiet { "What an instance ends itself is not lost. The control is the run without berth or a proxy." }
                }
            }
            div {
                h3 { "New connections by instance" }
                (shares(ran))
            }
            (also_seen(&judges::sections(ran)))
        }
    }
}

/// Rows of judges that have no heading of their own.
fn also_seen(sections: &[Section]) -> Markup {
    let untitled = sections.iter().filter(|section| section.title.is_empty());
    let mut seen = untitled.flat_map(|section| section.rows(Place::Page)).peekable();
    html! {
        @if seen.peek().is_some() { div { h3 { "Other figures" } (rows(seen)) } }
    }
}

fn allowed(tallies: &[Tally]) -> String {
    let words: Vec<_> =
        tallies.iter().map(|t| format!("{} {}", format::count(t.count), plot::short(&t.kind))).collect();
    sentence(&words.join(", "))
}

fn tallies(tallies: &[Tally], control: Option<&[Tally]>) -> Markup {
    let columns: &[&str] = if control.is_some() { &["here", "control"] } else { &[] };
    let row = |tally: &Tally| {
        let counts = [tally.count].into_iter().chain(control.map(|control| count_of(control, &tally.kind)));
        counts.map(format::count).collect()
    };
    names(columns, tallies.iter().map(|tally| (tally.text.as_str(), row(tally))))
}

fn shares(ran: &Ran) -> Markup {
    let by_instance = &ran.figures.new_connections_by_instance;
    let most = by_instance.values().copied().max().unwrap_or(0).max(1);
    html! {
        @if by_instance.is_empty() { p { "None." } }
        dl.shares {
            @for (name, &count) in plot::ordered(ran, by_instance) {
                dt { (plot::named(ran, name)) }
                dd {
                    svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true" {
                        @let width = format!("{:.1}", count as f64 / most as f64 * 100.0);
                        rect.area.(plot::instance_class(ran, name)) width=(width) height="8" {}
                    }
                    span.number { (format::count(count)) }
                }
            }
        }
    }
}
