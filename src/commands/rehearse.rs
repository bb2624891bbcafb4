//! Runs `berth rehearse`, and the simulated apiserver that a rehearsal starts.

use super::{Exit, block_on, print, print_stderr, unavailable_error, usage_error};
use crate::cli::{RehearseArgs, StandInArgs};
use berth_options::check::Mistakes;
use berth_rehearse::config::Plan;
use berth_rehearse::record::data::{Run, Verdict};
use berth_rehearse::report::table;
use berth_rehearse::testbed::{address::NETNS_ADDRESS, netns, simulated};
use berth_rehearse::{Aborted, Error, Rehearsed, rehearse, report};

mod check;

pub(super) fn run(args: &RehearseArgs) -> anyhow::Result<Exit> {
    let plan = check::check_options(args).and_then(|plan| raise_file_limit(&plan).map(|()| plan));
    let mut plan = plan.map_err(usage_error)?;
    if plan.netns {
        // Enter the namespace before other threads start, because they would stay outside of it.
        netns::enter_netns(*NETNS_ADDRESS.ip()).map_err(unavailable_error)?;
    }
    let outcome = block_on(async {
        plan.ask_versions().await?;
        Ok(rehearse(&plan).await)
    })?;
    let outcome = outcome.map_err(usage_error)?;
    // The files below are written even if this write to standard output fails.
    let exit = print_results(&plan, &outcome, args.verbose);
    if args.json.is_none() && args.report.is_none() {
        return exit;
    }
    let report = report::assemble(&plan, outcome, &repeating_command(args, &plan));
    report::write(&report, args.json.as_deref(), args.report.as_deref())
        .map_err(unavailable_error)?;
    exit
}

/// Returns the command line that repeats this rehearsal: with its environment variables, its
/// options and its seed.
fn repeating_command(args: &RehearseArgs, plan: &Plan) -> Vec<String> {
    let set =
        std::env::vars_os().map(|(name, value)| format!("{}={}", name.display(), value.display()));
    let mut set: Vec<String> = set
        .filter(|word| word.starts_with("BERTH_REHEARSE_"))
        .collect();
    set.sort_unstable();
    let env = (!set.is_empty()).then(|| "env".to_owned());
    let typed = std::env::args_os()
        .skip(1)
        .map(|word| word.display().to_string());
    let seed = args
        .seed
        .is_none()
        .then(|| format!("--seed={}", plan.load.seed));
    env.into_iter()
        .chain(set)
        .chain(["berth".to_owned()])
        .chain(typed)
        .chain(seed)
        .collect()
}

/// Prints the results of a rehearsal, also of one that was aborted.
fn print_results(plan: &Plan, outcome: &Rehearsed, verbose: bool) -> anyhow::Result<Exit> {
    let mut text = String::new();
    let runs: Vec<_> = outcome
        .runs
        .iter()
        .filter_map(|run| Some((run.via, run.ran()?)))
        .collect();
    for (via, ran) in &runs {
        if plan.runs.len() > 1 {
            text.push_str(&format!("\n{}\n\n", via.describe()));
        }
        match outcome.failed.iter().find(|(failed, _)| failed == via) {
            None => text.push_str(&table::render(ran, verbose)),
            Some((_, why)) if *via != plan.via => text.push_str(&format!("no verdict: {why}\n")),
            Some(_) => {}
        }
    }
    if runs.len() > 1 {
        text.push_str(&format!("\n{}", table::compare(&runs, verbose)));
    }
    print(&text)?;
    outcome.aborted.iter().for_each(print_stderr);
    Ok(match &outcome.aborted {
        Some(Aborted::Failed(Error::Unavailable(_))) => Exit::Unavailable,
        Some(Aborted::Failed(Error::Instance { .. })) => Exit::No,
        Some(Aborted::Panicked(_)) => Exit::Bug,
        Some(Aborted::Signal(signal)) => Exit::Child(u8::try_from(128 + signal).unwrap_or(1)),
        None => match outcome
            .runs
            .iter()
            .find(|run| run.via == plan.via)
            .and_then(Run::ran)
        {
            Some(ran) => match ran.verdict {
                Verdict::Held => Exit::Ok,
                Verdict::TooBusy => Exit::Busy,
                Verdict::Unproven => Exit::Again,
                Verdict::Wrong | Verdict::Broken | Verdict::Lost => Exit::No,
            },
            None => Exit::No,
        },
    })
}

pub(super) fn stand_in(args: &StandInArgs) -> anyhow::Result<Exit> {
    Ok(match simulated::run(&args.flags) {
        0 => Exit::Ok,
        status => Exit::Child(status),
    })
}

/// Raises this process's limit of open files, which its children inherit. Fails if the load may
/// need more open files.
fn raise_file_limit(plan: &Plan) -> Result<(), Mistakes> {
    let load = &plan.load;
    match berth_os::process::raise_file_limit() {
        Ok(limit) if limit < load.max_descriptors() => Err(Mistakes(vec![format!(
            "--rate {}, --watches {} and --storm {} may need {} open files, and the limit is {limit}: raise the limit (ulimit -n), or give lower numbers",
            load.rate,
            load.watches,
            load.storm,
            load.max_descriptors()
        )])),
        _ => Ok(()),
    }
}
