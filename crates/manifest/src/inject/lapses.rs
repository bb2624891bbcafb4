//! Applies inject's rules to a manifest that is already behind berth, by `inject` or by hand. A
//! change that the rules would still make is a lapse.

use super::flags::{DRAIN, OWN};
use super::{BINARY, Change, Edit, InjectOptions, Manifest, PROBES, Planner, YamlNode, basename};
use crate::write::Style;
use crate::{exec_words, split_cause_and_fix};
use serde_json::{Map, Value};
use std::time::Duration;

/// The check of how an update replaces the pod.
const ROLLOUT: &str = "update-strategy";

/// A place where a manifest breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lapse {
    /// Name of the check of `berth doctor`.
    pub check: &'static str,
    /// Line of the file, from 1.
    pub line: usize,
    /// The problem and its cause.
    pub cause: String,
    /// The edit that fixes the problem.
    pub fix: String,
}

/// How kube-apiserver is behind berth.
#[derive(Debug, Clone, Copy)]
pub struct Wrapping<'a> {
    /// Path of berth's binary in kube-apiserver's container.
    pub binary: &'a str,
    /// Number of berth's arguments that the edits insert before the command.
    pub words: usize,
    /// True if the probe has credentials.
    pub credentials: bool,
    /// How long connections may take to end.
    pub drain: Duration,
}

impl Default for Wrapping<'_> {
    /// The wrapping that [`super::plan`] writes.
    fn default() -> Self {
        Self {
            binary: BINARY,
            words: 3,
            credentials: false,
            drain: DRAIN,
        }
    }
}

/// Finds the lapses of a manifest that is already behind berth, as `wrapping` describes.
/// `wrapping.words` must be 0.
pub fn find_lapses(manifest: &Manifest, wrapping: Wrapping<'_>) -> Vec<Lapse> {
    let options = InjectOptions::default();
    let mut judge = Judge {
        planner: Planner::new(manifest, &options, wrapping),
        lapses: Vec::new(),
    };
    // An invalid port is reported by the code that reads the port.
    let port = manifest.secure_port().unwrap_or(6443);
    judge.check("host-network", "", Planner::check_host_network);
    judge.check(ROLLOUT, "", Planner::check_rollout);
    for flag in OWN {
        judge.check(
            "shared-file",
            "two instances would write one file",
            |planner| planner.make_file_unique(flag),
        );
    }
    let lack = "kube-apiserver stops listening the moment it gets SIGTERM";
    let delay = judge.check("shutdown-delay", lack, Planner::shutdown_delay);
    for probe in PROBES {
        let lack = "a probe asks the shared port, where the other instance may answer";
        judge.check("probe-on-shared-port", lack, |planner| {
            planner.probe(probe, port);
        });
        judge.check("probe-elsewhere", "", |planner| {
            planner.problems.extend(planner.check_foreign(probe, port));
        });
        if manifest.apiserver().get(probe).is_some_and(asks_berth) {
            judge.check(
                "probe-pace",
                "a probe of berth runs too often, or its timeout is too short",
                |planner| {
                    planner.raise_period(probe, &mut Map::new());
                    planner.add_timeout(probe);
                },
            );
        }
    }
    let lack = "there is no readiness probe, so an update does not wait for the new instance";
    judge.check("readiness-missing", lack, Planner::add_readiness);
    judge.check(
        "declared-ports",
        "ports are declared, and on one node only one pod can have them",
        Planner::ports,
    );
    judge.check("other-container", "", |planner| {
        planner.problems.extend(planner.other_containers());
    });
    let lack =
        "there is no preStop hook, so kube-apiserver receives SIGTERM before a sibling takes over";
    judge.check("pre-stop", lack, Planner::pre_stop);
    judge.check(
        "grace-period",
        "the grace period ends before the shutdown and the drain can",
        |planner| {
            let watches = planner.given_watch_grace();
            planner.grace(delay, watches);
        },
    );
    judge.check("anonymous-auth", "", Planner::check_anonymous);
    judge.lapses
}

struct Judge<'a> {
    planner: Planner<'a>,
    lapses: Vec<Lapse>,
}

impl<'a> Judge<'a> {
    /// Checks a rule. All edits of the rule together are one lapse, with `lack` as the cause.
    fn check<T>(
        &mut self,
        check: &'static str,
        lack: &str,
        plan: impl FnOnce(&mut Planner<'a>) -> T,
    ) -> T {
        let answer = plan(&mut self.planner);
        let (planner, lapses) = (&mut self.planner, &mut self.lapses);
        let manifest = planner.manifest;
        let edits = std::mem::take(&mut planner.edits);
        if let Some(first) = edits.first() {
            let texts: Vec<_> = edits.iter().map(|edit| describe(manifest, edit)).collect();
            let fix = format!("{} ({})", texts.join(", "), first.reason);
            lapses.push(Lapse {
                check,
                line: manifest.line_of(&first.path),
                cause: lack.to_owned(),
                fix,
            });
        }
        let lapse = |line, message: &str| {
            let (cause, fix) = split_cause_and_fix(message);
            Lapse {
                check,
                line,
                cause: cause.to_owned(),
                fix: fix.to_owned(),
            }
        };
        lapses.extend(
            planner
                .problems
                .drain(..)
                .map(|problem| lapse(problem.line, &problem.message)),
        );
        let line = match check {
            ROLLOUT => manifest.root().line,
            _ => manifest.line_of(&planner.container.key("lifecycle").key("preStop")),
        };
        lapses.extend(planner.notes.drain(..).map(|note| lapse(line, &note)));
        answer
    }
}

/// An edit as text, with a path relative to the container or the pod.
fn describe(manifest: &Manifest, edit: &Edit) -> String {
    let style = Style {
        indented: true,
        sorted: false,
        json: false,
    };
    let path = manifest.relative_path(&edit.path);
    let list = |values: &[Value]| {
        values
            .iter()
            .map(|value| style.flow(value))
            .collect::<Vec<_>>()
            .join(", ")
    };
    match &edit.change {
        Change::Set(value) => format!("set {path}: {}", style.flow(value)),
        Change::Remove => format!("remove {path}"),
        Change::Prepend(values) | Change::Append(values) => {
            format!("add {} to {path}", list(values))
        }
    }
}

/// True if a probe runs berth.
fn asks_berth(probe: &YamlNode) -> bool {
    exec_words(probe)
        .first()
        .is_some_and(|program| basename(program) == "berth")
}
