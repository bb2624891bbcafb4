//! One run: its timeline, its marks, its promises, its sums.

use super::state::{self, State};
use super::tables;
use crate::data::{Away, ByAddress, Informer, MarkKind, Ran, Run, RunOutcome, Tally, Via, count_of};
use crate::report::format;
use crate::report::plot::{self, Frame};
use maud::{Markup, html};

pub(super) fn section(run: &Run, index: usize, several: bool) -> Markup {
    let id = format!("run-{}", index + 1);
    html! {
        section.run id=(id) {
            @if several { h2 { (title(run)) " " (State::of_run(run).badge()) } } @else { h2 { "What happened" } }
            @match &run.outcome {
                RunOutcome::Skipped(reason) => p.skipped { "Not made: " (sentence(reason)) },
                RunOutcome::Ran(ran) => {
                    @if several {
                        p.lead { (ran.verdict.summary) }
                        p.quiet { (what(run, ran)) }
                        (tiles(ran))
                    }
                    (objections(ran))
                    (timeline(ran, &id))
                    (promises(ran))
                    (storm(ran))
                    (by_address(ran))
                    (away(ran))
                    (sums(ran))
                }
            }
        }
    }
}

/// What was rehearsed, in a line.
pub(super) fn what(run: &Run, ran: &Ran) -> String {
    let names = ran.instances.iter().map(|i| plot::named(&i.name, &i.version)).collect::<Vec<_>>().join(" → ");
    let load = format!("{} of load", format::wait(ran.load_ms as f64));
    let words = [names, run.topology.clone(), load];
    words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" · ")
}

/// The figures that matter most, large.
pub(super) fn tiles(ran: &Ran) -> Markup {
    let figures = &ran.figures;
    let missed: u64 = ran.watches.iter().map(|w| w.missed + w.duplicated).sum();
    let events = if missed == 0 {
        "none missed or duplicated".to_owned()
    } else {
        format!("{} missed or duplicated", format::count(missed))
    };
    let beside = match ran.allowed() {
        0 => format::of(figures.x509_errors, "certificate error", "certificate errors"),
        allowed => format!("and {} that a promise allows", format::count(allowed)),
    };
    let silent = match figures.silent_s {
        0 => "between two good answers".to_owned(),
        s => format!("{} without any good answer", format::of(s, "whole second", "whole seconds")),
    };
    html! {
        dl.tiles {
            (tile("Requests", &format::count(figures.requests), &format!("{} on a new connection", format::count(figures.new_connections))))
            (tile("Lost", &format::count(ran.verdict.lost()), &beside))
            (tile("Longest wait", &format::wait(figures.wait_max_ms), &format!("99 % within {}", format::wait(figures.wait_p99_ms))))
            (tile("Longest silence", &format::wait(figures.longest_silence_ms), &silent))
            (tile("Watch events", &format::count(figures.watch_events), &events))
            @if let Some(storm) = &ran.storm {
                (tile("Storm", &format::count(storm.clients), &format::storm(storm)))
            }
            @if let Some(direct) = &ran.direct {
                (tile("Steered", &format::count(direct.steered), &format!("past the shims, {} of the time", format::percent(direct.on_share))))
            }
            @if let Some(gap) = figures.endpoint_gap_ms {
                (tile("Endpoints empty", &format::wait(gap), "of the Service kubernetes"))
            }
        }
    }
}

/// With a full stop.
pub(super) fn sentence(words: &str) -> String {
    let words = words.trim_end();
    if words.ends_with(['.', '!', '?']) { words.to_owned() } else { format!("{words}.") }
}

fn tile(name: &str, value: &str, note: &str) -> Markup {
    let (number, unit) = value.split_once(' ').unwrap_or((value, ""));
    html! {
        div {
            dt { (name) }
            dd { span.value { (number) } @if !unit.is_empty() { " " span.unit { (unit) } } span.note { (note) } }
        }
    }
}

fn title(run: &Run) -> String {
    match run.via {
        Via::Berth | Via::Haproxy => format!("Through {}", run.via.words()),
        Via::PortSharing => "With port sharing".to_owned(),
        Via::None => "With nothing between".to_owned(),
    }
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
                                    @if mark.what != MarkKind::Fault && !mark.text.is_empty() { span.quiet { " " (mark.text) } }
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

/// Those that came at one moment, and all that waited.
fn storm(ran: &Ran) -> Markup {
    let after = |ms: Option<f64>| ms.map_or_else(|| "never".to_owned(), format::wait);
    let mut rows: Vec<(String, String)> = Vec::new();
    if let Some(storm) = &ran.storm {
        rows.push(("clients of the storm".into(), format::count(storm.clients)));
        rows.push(("of those served".into(), format::count(storm.served)));
        rows.push(("half were served within".into(), after(storm.half_served_ms)));
        rows.push(("all were served within".into(), after(storm.all_served_ms)));
        rows.push((
            "tries given up: no TLS handshake for 10 s, or no answer for 15 s".into(),
            format::count(storm.gave_up),
        ));
        rows.extend(
            storm.failed.iter().map(|tally| (format!("tries that failed: {}", tally.text), format::count(tally.count))),
        );
    }
    if let Some(gate) = &ran.gate {
        rows.push(("most that were seen to wait at the gate at a time".into(), format::count(gate.most_waiting)));
        rows.extend(
            gate.waited
                .iter()
                .map(|(class, count)| (format!("waited and had their turn: class {class}"), format::count(*count))),
        );
        rows.extend(
            gate.dropped
                .iter()
                .map(|(reason, count)| (format!("waited and had none: {reason}"), format::count(*count))),
        );
    }
    html! {
        @if !rows.is_empty() {
            h3 { "The storm, and who waited at the gate" }
            table.tallies {
                tbody { @for (what, count) in &rows { tr { th scope="row" { (what) } td.number { (count) } } } }
            }
            @if ran.gate.is_some() { p.quiet { "At the gate, all clients are counted, of the storm or not." } }
        }
    }
}

/// The Service, and each node.
fn by_address(ran: &Ran) -> Markup {
    let row = |at: &ByAddress| {
        let lost = at.lost.iter().map(|tally| tally.count).sum();
        let counts = [at.requests, at.new_connections, lost, at.allowed].map(format::count);
        let cells = [vec![at.address.clone()], counts.into(), vec![format::wait(at.wait_max_ms)]].concat();
        (at.name.clone(), cells)
    };
    let columns = ["Dialed", "Address", "Requests", "New connections", "Lost", "Allowed", "Longest wait"];
    html! {
        @if !ran.by_address.is_empty() {
            h3 { "By address" }
            (grid("By address", &columns, ran.by_address.iter().map(row)))
        }
    }
}

/// Nodes that went away.
fn away(ran: &Ran) -> Markup {
    let after = |ms: Option<f64>, never: &str| ms.map_or_else(|| never.to_owned(), format::wait);
    let row = |away: &Away| {
        let cells = vec![
            away.fault.clone(),
            format::moment(away.from_ms),
            after(away.reconciled_ms, "never"),
            after(away.named_ms, "never"),
            after(away.lost_ms, "none"),
            after(away.back_ms, "never"),
        ];
        (away.node.clone(), cells)
    };
    let columns =
        ["Node", "Fault", "At", "Taken out by kube-apiserver", "In no slice", "Last connection lost", "As before"];
    html! {
        @if !ran.away.is_empty() {
            h3 { "When the Service forgot a node" }
            (grid("When the Service forgot a node", &columns, ran.away.iter().map(row)))
            p.quiet { "Times after it went away. The last connection lost is one that the Service's clients began." }
        }
    }
}

/// A table that may be wider than the page: each row has a name, and a cell for each of the other columns.
fn grid(label: &str, columns: &[&str], rows: impl Iterator<Item = (String, Vec<String>)>) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(label) {
            table.steps {
                thead { tr { @for name in columns { th scope="col" { (name) } } } }
                tbody {
                    @for (name, cells) in rows {
                        tr { th scope="row" { (name) } @for cell in cells { td { (cell) } } }
                    }
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
                h3 { "Counted apart" }
                (tallies(&verdict.apart, verdict.control.as_deref()))
                @if verdict.control.is_none() {
                    p.quiet { "What an instance ends itself is not lost." }
                } @else {
                    p.quiet { "What an instance ends itself is not lost. The control is the run with nothing between." }
                }
            }
            div {
                h3 { "New connections by instance" }
                (shares(ran))
            }
            (beside(ran))
            @if !ran.informers.is_empty() { (informers(ran)) }
        }
    }
}

/// What was seen beside the requests and the watches.
fn beside(ran: &Ran) -> Markup {
    let figures = &ran.figures;
    let mut rows: Vec<(String, String)> = Vec::new();
    if figures.relists > 0 {
        rows.push(("lists again of watches and informers".into(), format::count(figures.relists)));
        rows.push(("of those after 410: a revision older than the instance".into(), format::count(figures.expired)));
    }
    if figures.slow_reads > 0 {
        rows.push(("large answers read slowly to their end".into(), format::count(figures.slow_reads)));
    }
    if let Some(errors) = figures.logged_x509_errors {
        rows.push(("certificate errors in the apiservers' logs".into(), format::count(errors)));
    }
    for period in ran.direct.iter().flat_map(|direct| &direct.on) {
        let from = format!("new connections steered past the shims, from {}", format::moment(period.from_ms));
        rows.push((from, format::wait((period.to_ms - period.from_ms) as f64)));
    }
    for gap in ran.endpoint_gaps.iter().flatten() {
        let from = format!("Service kubernetes empty, from {}", format::moment(gap.from_ms));
        rows.push((from, format::wait((gap.to_ms - gap.from_ms) as f64)));
    }
    html! {
        @if !rows.is_empty() || !ran.control_streams.is_empty() {
            div {
                h3 { "Seen beside" }
                table.tallies {
                    tbody { @for (what, count) in &rows { tr { th scope="row" { (what) } td.number { (count) } } } }
                }
                @if !ran.control_streams.is_empty() {
                    table.tallies {
                        thead { tr { td {} th scope="col" { "opened" } th scope="col" { "ended" } } }
                        tbody {
                            @for (instance, control) in &ran.control_streams {
                                tr {
                                    th scope="row" { "connections straight to " (instance) }
                                    td.number { (format::count(control.opened)) }
                                    td.number { (format::count(control.ended)) }
                                }
                            }
                        }
                    }
                    p.quiet { "With nothing in between, only the instance can have ended them." }
                }
            }
        }
    }
}

fn allowed(tallies: &[Tally]) -> String {
    let words: Vec<_> =
        tallies.iter().map(|t| format!("{} {}", format::count(t.count), plot::short(&t.kind))).collect();
    sentence(&words.join(", "))
}

fn tallies(tallies: &[Tally], control: Option<&[Tally]>) -> Markup {
    html! {
        table.tallies {
            @if control.is_some() {
                thead { tr { td {} th scope="col" { "here" } th scope="col" { "control" } } }
            }
            tbody {
                @for tally in tallies {
                    tr {
                        th scope="row" { (tally.text) }
                        td.number { (format::count(tally.count)) }
                        @if let Some(control) = control { td.number { (format::count(count_of(control, &tally.kind))) } }
                    }
                }
            }
        }
    }
}

fn shares(ran: &Ran) -> Markup {
    let by_instance = &ran.figures.new_connections_by_instance;
    let most = by_instance.values().copied().max().unwrap_or(0).max(1);
    let version = |name: &str| ran.instances.iter().find(|i| i.name == name).map_or("", |i| i.version.as_str());
    let known = ran.instances.iter().map(|i| &i.name).filter(|name| by_instance.contains_key(*name));
    let others = by_instance.keys().filter(|name| ran.instances.iter().all(|i| i.name != **name));
    html! {
        @if by_instance.is_empty() { p { "None." } }
        dl.shares {
            @for name in known.chain(others) {
                @let count = by_instance[name];
                dt { (plot::named(name, version(name))) }
                dd {
                    svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true" {
                        @let width = format!("{:.1}", count as f64 / most as f64 * 100.0);
                        rect.area.(plot::look(ran, name)) width=(width) height="8" {}
                    }
                    span.number { (format::count(count)) }
                }
            }
        }
    }
}

fn informers(ran: &Ran) -> Markup {
    let row = |i: &Informer| {
        let counts = [i.written, i.held, i.missing, i.stale, i.duplicated, i.relists, i.expired];
        (i.id.clone(), counts.map(format::count).into())
    };
    let columns = ["Client", "Written", "Held at the end", "Missing", "Stale", "Duplicated", "Lists again", "410"];
    html! {
        div.whole {
            h3 { "Informers" }
            p.quiet { "Clients that list, watch and list again, against the objects that were written. "
                "Those named quiet follow what nobody writes meanwhile: only bookmarks tell them a revision that a younger instance knows. They show who lists again." }
            (grid("Informers", &columns, ran.informers.iter().map(row)))
        }
    }
}
