//! Applies inject's rules to a manifest that is already behind berth, by `inject` or by hand. A
//! change that the rules would still make is a lapse.

use super::flags::{DRAIN_TIMEOUT, PER_INSTANCE_PATHS};
use super::{BINARY, Change, Edit, InjectOptions, Manifest, PROBES, Planner, YamlNode, basename};
use crate::write::Style;
use crate::{exec_words, split_cause_and_fix};
use serde_json::{Map, Value};
use std::time::Duration;

/// Name of the check in `berth doctor` of how an update replaces the pod.
const ROLLOUT_CHECK: &str = "update-strategy";

/// A place where a manifest breaks one of inject's rules.
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

/// How a manifest starts kube-apiserver behind berth. A manifest written by hand may do it
/// differently from `inject`.
#[derive(Debug, Clone, Copy)]
pub struct Wrapping<'a> {
    /// Path of berth's binary in kube-apiserver's container.
    pub binary: &'a str,
    /// Number of berth's arguments that the edits insert before kube-apiserver's command. 0 if they
    /// are there already.
    pub inserted_arguments: usize,
    /// True if the probe authenticates itself to kube-apiserver.
    pub credentials: bool,
    /// How long the shim lets connections end after kube-apiserver has stopped listening.
    pub drain: Duration,
}

impl Default for Wrapping<'_> {
    /// How `berth inject` itself starts kube-apiserver behind berth.
    fn default() -> Self {
        Self {
            binary: BINARY,
            inserted_arguments: 3,
            credentials: false,
            drain: DRAIN_TIMEOUT,
        }
    }
}

/// Finds the places where a manifest that is already behind berth breaks one of inject's rules.
/// `wrapping.words` must be 0.
pub fn find_lapses(manifest: &Manifest, wrapping: Wrapping<'_>) -> Vec<Lapse> {
    let options = InjectOptions::default();
    let mut judge = LapseFinder {
        planner: Planner::new(manifest, &options, wrapping),
        lapses: Vec::new(),
    };
    // An invalid port is reported by another check, so the default does here.
    let port = manifest.secure_port().unwrap_or(6443);
    judge.check_for_lapse("host-network", "", Planner::check_host_network);
    judge.check_for_lapse(ROLLOUT_CHECK, "", Planner::check_rollout);
    for flag in PER_INSTANCE_PATHS {
        judge.check_for_lapse(
            "shared-file",
            "two instances would write one file",
            |planner| planner.make_flag_path_unique(flag),
        );
    }
    let lack = "kube-apiserver stops listening the moment it gets SIGTERM";
    let delay = judge.check_for_lapse("shutdown-delay", lack, Planner::set_shutdown_delay);
    for probe in PROBES {
        let lack = "a probe asks the shared port, where the other instance may answer";
        judge.check_for_lapse("probe-on-shared-port", lack, |planner| {
            planner.replace_probe(probe, port);
        });
        judge.check_for_lapse("probe-elsewhere", "", |planner| {
            planner
                .problems
                .extend(planner.check_probe_of_other_server(probe, port));
        });
        if manifest
            .apiserver()
            .get(probe)
            .is_some_and(probe_runs_berth)
        {
            judge.check_for_lapse(
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
    judge.check_for_lapse("readiness-missing", lack, Planner::add_readiness);
    judge.check_for_lapse(
        "declared-ports",
        "the pod declares ports, and only one pod of a node can have a declared port",
        Planner::remove_ports,
    );
    judge.check_for_lapse("other-container", "", |planner| {
        planner
            .problems
            .extend(planner.problems_of_other_containers());
    });
    let lack =
        "there is no preStop hook, so kube-apiserver receives SIGTERM before a sibling takes over";
    judge.check_for_lapse("pre-stop", lack, Planner::add_pre_stop);
    judge.check_for_lapse(
        "grace-period",
        "the grace period is shorter than the shutdown and the drain",
        |planner| {
            let watches = planner.read_watch_grace();
            planner.raise_grace_period(delay, watches);
        },
    );
    judge.check_for_lapse("anonymous-auth", "", Planner::check_anonymous);
    judge.lapses
}

struct LapseFinder<'a> {
    planner: Planner<'a>,
    lapses: Vec<Lapse>,
}

impl<'a> LapseFinder<'a> {
    /// Checks one of inject's rules by planning its edits. If there are any, they are one lapse
    /// together, with `lack` as the cause.
    fn check_for_lapse<T>(
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
            let texts: Vec<_> = edits
                .iter()
                .map(|edit| describe_edit(manifest, edit))
                .collect();
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
            ROLLOUT_CHECK => manifest.root().line,
            _ => manifest.line_of(&planner.container.key("lifecycle").key("preStop")),
        };
        lapses.extend(planner.notes.drain(..).map(|note| lapse(line, &note)));
        answer
    }
}

/// Describes an edit for people. Its path is relative to the container or to the pod.
fn describe_edit(manifest: &Manifest, edit: &Edit) -> String {
    let style = Style {
        indented: true,
        sorted: false,
        json: false,
    };
    let path = manifest.relative_path(&edit.path);
    let list = |values: &[Value]| {
        values
            .iter()
            .map(|value| style.write_flow(value))
            .collect::<Vec<_>>()
            .join(", ")
    };
    match &edit.change {
        Change::Set(value) => format!("set {path}: {}", style.write_flow(value)),
        Change::Remove => format!("remove {path}"),
        Change::Prepend(values) | Change::Append(values) => {
            format!("add {} to {path}", list(values))
        }
    }
}

/// True if a probe runs berth.
fn probe_runs_berth(probe: &YamlNode) -> bool {
    exec_words(probe)
        .first()
        .is_some_and(|program| basename(program) == "berth")
}
