//! Several runs side by side: a table, and their timelines on one scale.

use super::run;
use super::state::State;
use crate::data::{Ran, Run, RunOutcome};
use crate::judges;
use crate::report::format;
use crate::report::plot::{self, Frame};
use crate::section::Place;
use maud::{Markup, html};

pub(super) fn section(runs: &[&Run]) -> Markup {
    let made: Vec<&Ran> = runs.iter().filter_map(|run| run.ran()).collect();
    let frame = Frame::of(&made);
    let most = made.iter().map(|ran| plot::most_a_second(ran)).fold(0.0, f64::max);
    let rows = judges::compared(&runs.iter().map(|run| run.ran()).collect::<Vec<_>>(), Place::Compared);
    html! {
        section.comparison aria-labelledby="comparison" {
            h2 #comparison { "Side by side" }
            p.quiet {
                "The same rehearsal" @if let Some(ran) = made.first() { " with " (ran.apiservers()) } ", one way after the other, on one scale."
                @if made.iter().any(|ran| !ran.promises.is_empty()) { " Faults of a shim are injected only where there is one, or a proxy." }
            }
            div.scroll tabindex="0" role="region" aria-labelledby="comparison" {
                table.compare {
                    thead {
                        tr {
                            td {}
                            @for (index, run) in runs.iter().enumerate() {
                                th scope="col" {
                                    a href={ "#run-" (index + 1) } { (run.via.words()) }
                                    @if same_way(runs, run) { br; span.quiet { (run.topology) } }
                                }
                            }
                        }
                    }
                    tbody {
                        tr { th scope="row" { "Verdict" } @for run in runs { td { (State::of_run(run).badge()) } } }
                        @for (name, cells) in rows {
                            tr { th scope="row" { (format::capital(&name)) } @for cell in cells { (value(cell)) } }
                        }
                    }
                }
            }
            @for run in runs {
                div.small-multiple {
                    h3 { (run.via.words()) " " (State::of_run(run).badge()) }
                    @match &run.outcome {
                        RunOutcome::Ran(ran) => div.plot-scroll {
                            div.plots { (plot::small(frame, run, ran, most)) }
                        },
                        RunOutcome::Skipped(reason) => p.skipped { (run::sentence(reason)) },
                    }
                }
            }
            p.quiet { "Successful requests/s by instance; below each, × is what was lost and ◇ what an instance ended itself or a promise allows." }
        }
    }
}

/// Whether several runs go the same way.
fn same_way(runs: &[&Run], run: &Run) -> bool {
    runs.iter().filter(|other| other.via == run.via).count() > 1
}

fn value(value: Option<String>) -> Markup {
    html! { td.number { @if let Some(value) = value { (value) } @else { span.quiet { "–" } } } }
}
