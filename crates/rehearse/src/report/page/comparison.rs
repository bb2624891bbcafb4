//! Several runs side by side: a table, and their timelines on one scale.

use super::run;
use super::state::State;
use crate::data::{Gap, Ran, Run, RunOutcome};
use crate::report::format;
use crate::report::plot::{self, Frame};
use maud::{Markup, html};

type Measure = (&'static str, fn(&Ran) -> String);

const MEASURES: [Measure; 13] = [
    ("Requests", |r| format::count(r.figures.requests)),
    ("New connections", |r| format::count(r.figures.new_connections)),
    ("Lost", |r| format::count(r.verdict.lost())),
    ("Allowed by promises", |r| format::count(r.allowed())),
    ("Longest wait", |r| format::wait(r.figures.wait_max_ms)),
    ("99 % within", |r| format::wait(r.figures.wait_p99_ms)),
    ("Longest silence", |r| format::wait(r.figures.longest_silence_ms)),
    ("Watch events missed or duplicated", |r| format::count(r.watches.iter().map(|w| w.missed + w.duplicated).sum())),
    ("Watches cut", |r| gaps(r, Gap::lost)),
    ("Watches cut as promises allow", |r| gaps(r, |gap| gap.allowed)),
    ("Lists again", |r| format::count(r.figures.relists)),
    ("Told 410", |r| format::count(r.figures.expired)),
    ("Certificate errors", |r| format::count(r.figures.x509_errors)),
];

fn gaps(ran: &Ran, which: fn(&Gap) -> bool) -> String {
    format::count(ran.watches.iter().flat_map(|watch| &watch.gaps).filter(|gap| which(gap)).count() as u64)
}

pub(super) fn section(runs: &[Run]) -> Markup {
    let made: Vec<&Ran> = runs.iter().filter_map(Run::ran).collect();
    let frame = Frame::of(&made);
    let most = made.iter().map(|ran| plot::most_a_second(ran)).fold(0.0, f64::max);
    let gap = made.iter().any(|ran| ran.figures.endpoint_gap_ms.is_some());
    html! {
        section.comparison aria-labelledby="comparison" {
            h2 #comparison { "Side by side" }
            p.quiet { "The same rehearsal, one way after the other, on one scale." }
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
                        @for (name, measure) in MEASURES {
                            tr { th scope="row" { (name) } @for run in runs { (cell(run, measure)) } }
                        }
                        @if made.iter().any(|ran| !ran.away.is_empty()) {
                            tr {
                                th scope="row" { "A node out of the Service after" }
                                @for run in runs { (cell(run, |r| format::named(r.longest_named()))) }
                            }
                        }
                        @if made.iter().any(|ran| ran.storm.is_some()) {
                            tr {
                                th scope="row" { "Storm served within" }
                                @for run in runs { (cell(run, |r| r.storm.as_ref().map_or("–".into(), |storm| format::named(storm.all_served_ms)))) }
                            }
                            tr {
                                th scope="row" { "Storm: tries given up" }
                                @for run in runs { (cell(run, |r| r.storm.as_ref().map_or("–".into(), |storm| format::count(storm.gave_up)))) }
                            }
                        }
                        @if gap {
                            tr {
                                th scope="row" { "Endpoints empty for" }
                                @for run in runs { (cell(run, |r| r.figures.endpoint_gap_ms.map_or("not seen".into(), format::wait))) }
                            }
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

/// Whether the way alone does not tell a run.
fn same_way(runs: &[Run], run: &Run) -> bool {
    runs.iter().filter(|other| other.via == run.via).count() > 1
}

fn cell(run: &Run, measure: fn(&Ran) -> String) -> Markup {
    html! { td.number { @if let Some(ran) = run.ran() { (measure(ran)) } @else { span.quiet { "–" } } } }
}
