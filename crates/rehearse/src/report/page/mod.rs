//! One page for people: verdict first, then what happened, then where and how to make it again.
//!
//! It loads nothing and runs nothing; a policy in its head forbids both. Whatever a program or a user
//! wrote is text to [`maud`], which escapes it. What a colour means, a shape or a word means too.

mod comparison;
mod run;
mod state;
mod tables;

use super::format;
use crate::data::{Environment, Ran, Report, Run, Via};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use state::State;

const STYLE: &str = include_str!("style.css");

/// Nothing from elsewhere: no script, no font, no picture.
const POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'";

pub fn render(report: &Report) -> String {
    let main = main_run(report);
    // First the one that the page is about.
    let mut runs: Vec<&Run> = report.runs.iter().collect();
    runs.sort_by_key(|run| run.via != Via::Berth);
    let state = State::of_report(report, main);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="generator" content={ "berth " (report.berth_version) };
                link rel="icon" href="data:,";
                title { "Rehearsal: " (state.headline()) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (patterns())
                (header(report))
                main {
                    (hero(report, &runs, main, &state))
                    @if runs.len() > 1 { (comparison::section(&runs)) }
                    @for (index, run) in runs.iter().enumerate() {
                        (run::section(run, index, runs.len() > 1))
                    }
                    (environment(&report.environment, report.seed))
                    (command(report))
                }
                footer {
                    "Made by berth " (report.berth_version) " on " time datetime=(report.made_at) { (day(&report.made_at)) } ". "
                    strong { "Lost" } " is a new connection that was refused, reset or not answered within 15 s with no retry by its client, "
                    "or a stream that ended before its instance ended it. Times count from the start of the load; "
                    "waits count from when a request was due."
                }
            }
        }
    };
    page.into_string()
}

/// The run that the page is about: berth's, if there is one.
fn main_run(report: &Report) -> Option<(&Run, &Ran)> {
    let mut made = report.runs.iter().filter_map(|run| Some((run, run.ran()?)));
    made.clone().find(|(run, _)| run.via == Via::Berth).or_else(|| made.next())
}

fn header(report: &Report) -> Markup {
    html! {
        header.top {
            span.brand {
                svg viewBox="0 0 24 24" width="24" height="24" aria-hidden="true" {
                    path.quay d="M3 3v18" {}
                    rect.hull x="6" y="4.5" width="14" height="6" rx="3" {}
                    rect.hull.second x="6" y="13.5" width="14" height="6" rx="3" {}
                }
                "berth " span.quiet { "rehearsal" }
            }
            time.quiet datetime=(report.made_at) { (day(&report.made_at)) }
        }
    }
}

fn hero(report: &Report, runs: &[&Run], main: Option<(&Run, &Ran)>, state: &State) -> Markup {
    html! {
        section.hero.(state.class()) aria-labelledby="verdict" {
            (state.shape())
            div.words {
                h1 #verdict { (state.headline()) }
                @if let Some(reason) = &report.aborted {
                    p.lead { "The rehearsal was aborted: " (reason) ". What it saw until then is below; nothing can be concluded from it." }
                } @else if let Some((_, ran)) = main {
                    p.lead { (ran.verdict.summary) }
                } @else {
                    p.lead { "There is no run to judge." }
                }
                @if let Some((run, ran)) = main {
                    p.quiet { (run::what(run, ran)) }
                }
                @if runs.len() > 1 {
                    ul.others aria-label="The other ways" {
                        @for (index, run) in runs.iter().enumerate().filter(|(_, run)| main.is_none_or(|(main, _)| !std::ptr::eq(main, **run))) {
                            li { a href={ "#run-" (index + 1) } { (run.via.words()) } " " (State::of_run(run).badge()) }
                        }
                    }
                }
            }
            @if let Some((_, ran)) = main { (run::tiles(ran)) }
        }
    }
}

fn environment(environment: &Environment, seed: Option<u64>) -> Markup {
    let has = |text: &str| !text.is_empty();
    html! {
        section aria-labelledby="environment" {
            h2 #environment { "Environment" }
            div.columns {
                div {
                    h3 { "Machine" }
                    dl {
                        @if has(&environment.kernel) { dt { "Kernel" } dd { (environment.kernel) } }
                        @if has(&environment.cpu_model) {
                            dt { "CPUs" } dd { (environment.cpus) " × " (environment.cpu_model) }
                        }
                        dt { "Memory" } dd { (format::bytes(environment.memory_bytes)) }
                        dt { "Open files (ulimit -n)" } dd { (format::count(environment.open_files_limit)) }
                    }
                }
                @if !environment.programs.is_empty() || seed.is_some() {
                    div {
                        h3 { "Programs" }
                        dl {
                            @for program in &environment.programs { dt { (program.role) } dd { (program.version) } }
                            @if let Some(seed) = seed { dt { "Seed" } dd { code { (seed) } } }
                        }
                    }
                }
                div {
                    h3 { "Kernel settings" }
                    dl.mono {
                        @for (name, value) in &environment.sysctls { dt { (name) } dd { (value) } }
                    }
                }
            }
        }
    }
}

fn command(report: &Report) -> Markup {
    html! {
        section aria-labelledby="again" {
            h2 #again { "Run it again" }
            pre.command tabindex="0" aria-label="Command" { code { (report.command.shell) } }
        }
    }
}

/// `2026-05-04T03:02:01Z` as people write it; anything else as it is.
fn day(made_at: &str) -> String {
    match made_at.strip_suffix('Z').and_then(|text| text.split_once('T')) {
        Some((day, time)) => format!("{day} {time} UTC"),
        None => made_at.to_owned(),
    }
}

/// The hatchings, which all drawings of the page use.
fn patterns() -> Markup {
    html! {
        svg.patterns width="0" height="0" aria-hidden="true" {
            defs {
                pattern #h0 width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" { path.h0 d="M0,0V6" {} }
                pattern #h2 width="6" height="6" patternUnits="userSpaceOnUse" { circle.h2 cx="3" cy="3" r="1.2" {} }
                pattern #h3 width="7" height="7" patternUnits="userSpaceOnUse" { path.h3 d="M0,0L7,7M7,0L0,7" {} }
                pattern #h4 width="5" height="5" patternUnits="userSpaceOnUse" { path.h4 d="M0,2.5H5" {} }
            }
        }
    }
}
