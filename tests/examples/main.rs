//! The files of `examples/`, tried as they are written, and the Helm chart that is made from them.
//! In `scripts/manifests.sh`, a real kube-apiserver accepts the Kubernetes manifests and the chart.
//!
//! A test that cannot run here counts as ignored and prints the reason. Rust's harness decides that
//! at compile time, so this target has a harness of its own.

mod addresses;
mod chart;
mod cluster_api;
mod kubespray;
mod made;
mod migration;
mod monitoring;
#[path = "../support/mod.rs"]
mod support;
mod table;
mod units;

use berth_testing::namespace;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let trials = vec![
        make_trial(
            "every_example_is_in_the_table",
            table::every_example_is_in_the_table,
        ),
        make_trial(
            "berth_takes_the_commands_of_units_and_pods",
            units::berth_takes_the_commands,
        ),
        make_trial(
            "the_role_for_kubespray_calls_berth",
            kubespray::the_role_calls_berth,
        ),
        make_trial(
            "cluster_api_finds_its_files",
            cluster_api::cluster_api_finds_its_files,
        ),
        make_trial(
            "berth_upgrade_refuses_arguments",
            cluster_api::berth_upgrade_refuses_arguments,
        ),
        make_trial(
            "a_reboot_starts_the_new_version",
            units::a_reboot_starts_the_new_version,
        ),
        make_trial("systemd_takes_the_units", units::systemd_takes_the_units),
        make_trial(
            "metrics_that_are_named_exist",
            monitoring::metrics_that_are_named_exist,
        ),
        make_trial(
            "metrics_follow_conventions",
            monitoring::metrics_follow_conventions,
        ),
        make_trial("the_dashboard_is_whole", monitoring::the_dashboard_is_whole),
        make_trial(
            "alerts_fire_when_they_should",
            monitoring::alerts_fire_when_they_should,
        ),
        make_trial(
            "several_addresses_answer",
            addresses::several_addresses_answer,
        ),
        make_trial(
            "made_manifests_are_what_their_command_makes",
            made::made_manifests_are_what_their_command_makes,
        ),
        make_trial("doctor_finds_nothing", made::doctor_finds_nothing),
        make_trial(
            "the_charts_files_are_those_of_the_examples",
            chart::the_charts_files_are_those_of_the_examples,
        ),
        make_trial(
            "the_chart_renders_what_kustomize_builds",
            chart::the_chart_renders_what_kustomize_builds,
        ),
        make_trial(
            "values_change_what_they_name",
            chart::values_change_what_they_name,
        ),
        make_trial("wrong_values_are_refused", chart::wrong_values_are_refused),
        make_trial("from_haproxy_to_berth", migration::from_haproxy_to_berth),
        make_trial("back_to_haproxy", migration::back_to_haproxy),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Wraps a test in a thread. Some tests enter a network namespace, which every later thread of
/// theirs shares.
fn make_trial(name: &str, test: fn() -> Result<Completion, Failed>) -> Trial {
    let thread = std::thread::Builder::new().name(name.to_owned());
    Trial::ignorable_test(name, move || {
        thread
            .spawn(test)?
            .join()
            .unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// Returns the text of a file below examples/.
#[track_caller]
fn read_example(name: &str) -> String {
    std::fs::read_to_string(root().join("examples").join(name))
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the files below examples/ with the ending, without the programs.
fn list_examples(end: &str) -> Vec<String> {
    let (mut directories, mut found) = (vec![root().join("examples")], Vec::new());
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.to_str().is_some_and(|path| path.ends_with(end)) {
                found.push(
                    path.strip_prefix(root().join("examples"))
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .to_owned(),
                );
            }
        }
    }
    found.sort();
    found
}

/// Returns the path of a program in PATH, or the reason to skip the test.
fn find_tool(tool: &str) -> Result<PathBuf, Completion> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|dir| dir.join(tool))
        .find(|file| file.is_file());
    found.ok_or_else(|| Completion::ignored_with(format!("it needs {tool}")))
}

/// Returns the result of a test if the current user cannot create a network namespace: the test has
/// run where it can, or is skipped.
fn no_namespace() -> Option<Completion> {
    let unshared =
        std::thread::spawn(|| nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)).join();
    if matches!(unshared, Ok(Ok(()))) {
        return None;
    }
    namespace::rerun_in_user_namespace("no network namespace can be had");
    Some(Completion::Completed)
}
