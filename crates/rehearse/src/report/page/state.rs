//! A verdict as a shape and words.

use crate::data::{Ran, Report, Run, RunOutcome, Via};
use crate::report::format;
use maud::{Markup, html};

/// How a run or a whole report ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct State {
    kind: StateKind,
    /// The way, where there are several.
    via: Option<Via>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum StateKind {
    /// Nothing was lost.
    Clean,
    /// What was lost was allowed.
    Kept,
    Lost(u64),
    Broken,
    ProvesNothing,
    TooBusy,
    Aborted,
    Skipped,
}

impl State {
    pub(super) fn of_report(report: &Report, main: Option<(&Run, &Ran)>) -> Self {
        let kind = match main {
            _ if report.aborted.is_some() => StateKind::Aborted,
            Some((_, ran)) => kind(ran),
            None => StateKind::Skipped,
        };
        let several = report.runs.len() > 1 && kind != StateKind::Aborted;
        Self { kind, via: main.filter(|_| several).map(|(run, _)| run.via) }
    }

    pub(super) fn of_run(run: &Run) -> Self {
        let kind = match &run.outcome {
            RunOutcome::Ran(ran) => kind(ran),
            RunOutcome::Skipped(_) => StateKind::Skipped,
        };
        Self { kind, via: None }
    }

    /// In big letters.
    pub(super) fn headline(&self) -> String {
        let words = match self.kind {
            StateKind::Clean => "Nothing was lost".to_owned(),
            StateKind::Kept => "Nothing but what faults may cost was lost".to_owned(),
            StateKind::Lost(count) => format!("{} lost", format::count(count)),
            StateKind::Broken => "A promise was broken".to_owned(),
            StateKind::ProvesNothing => "This run proves nothing".to_owned(),
            StateKind::TooBusy => "This machine was too busy to tell".to_owned(),
            StateKind::Aborted => "Stopped before its end".to_owned(),
            StateKind::Skipped => "Nothing was rehearsed".to_owned(),
        };
        match self.via {
            None => words,
            Some(via) => format!("{words} {}", via.way()),
        }
    }

    /// In a word or two.
    pub(super) fn word(&self) -> String {
        match self.kind {
            StateKind::Clean => "nothing lost".to_owned(),
            StateKind::Kept => "nothing lost but by faults".to_owned(),
            StateKind::Lost(count) => format!("{} lost", format::count(count)),
            StateKind::Broken => "promise broken".to_owned(),
            StateKind::ProvesNothing => "proves nothing".to_owned(),
            StateKind::TooBusy => "too busy to tell".to_owned(),
            StateKind::Aborted => "aborted".to_owned(),
            StateKind::Skipped => "skipped".to_owned(),
        }
    }

    pub(super) fn class(&self) -> &'static str {
        match self.kind {
            StateKind::Clean | StateKind::Kept => "good",
            StateKind::Lost(_) | StateKind::Broken => "bad",
            StateKind::ProvesNothing | StateKind::TooBusy | StateKind::Aborted => "unsure",
            StateKind::Skipped => "none",
        }
    }

    /// A tick in a circle, a cross in an octagon, a call in a triangle, a bar in a square.
    pub(super) fn shape(&self) -> Markup {
        let (outline, sign) = match self.kind {
            StateKind::Clean | StateKind::Kept => ("M24 4a20 20 0 1 1-.01 0z", "M15 24.5l6.5 6.5L34 18"),
            StateKind::Lost(_) | StateKind::Broken => {
                ("M16 4h16l12 12v16L32 44H16L4 32V16z", "M17 17l14 14M31 17L17 31")
            }
            StateKind::ProvesNothing | StateKind::TooBusy => ("M24 4.5L45 42H3z", "M24 18v12M24 35.4v.4"),
            StateKind::Aborted | StateKind::Skipped => {
                ("M10 5h28a5 5 0 0 1 5 5v28a5 5 0 0 1-5 5H10a5 5 0 0 1-5-5V10a5 5 0 0 1 5-5z", "M15 24h18")
            }
        };
        html! {
            svg.shape.(self.class()) viewBox="0 0 48 48" aria-hidden="true" {
                path.outline d=(outline) {}
                path.sign d=(sign) {}
            }
        }
    }

    /// Shape and word in a line of text.
    pub(super) fn badge(&self) -> Markup {
        html! { span.badge.(self.class()) { (self.shape()) (self.word()) } }
    }
}

fn kind(ran: &Ran) -> StateKind {
    match (ran.verdict.held, ran.verdict.lost()) {
        (true, 0) if ran.allowed() == 0 => StateKind::Clean,
        (true, _) => StateKind::Kept,
        (false, 0) if ran.promises.iter().any(|p| !p.held) => StateKind::Broken,
        (false, 0) if ran.verdict.too_busy => StateKind::TooBusy,
        (false, 0) => StateKind::ProvesNothing,
        (false, lost) => StateKind::Lost(lost),
    }
}

/// The same for a promise.
pub(super) fn promise(held: bool) -> Markup {
    let state = State { kind: if held { StateKind::Kept } else { StateKind::Broken }, via: None };
    html! { span.badge.(state.class()) { (state.shape()) (if held { "kept" } else { "broken" }) } }
}
