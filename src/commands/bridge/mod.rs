//! Runs `berth bridge`: turns its options into a bridge, and the bridge's end into an exit status.

mod ask;

use super::{
    Exit, block_on, exit_code, format_json, format_numbered_steps, print, print_stderr,
    refusal_error, unavailable_error, usage_error,
};
use crate::cli::{BridgeAction, BridgeArgs, BridgeStartArgs, Words};
use anyhow::Context;
use berth_bridge::DIRECTORY;
use berth_bridge::caller::{WaitResult, accompany_bridge, ask_status};
use berth_bridge::localhost::uncovered_note;
use berth_bridge::machine::{Limits, OVERLAP, OnFailure};
use berth_bridge::plan::{BridgeOptions, BridgePlan, RunningInstance};
use berth_bridge::preflight::preflight;
use berth_bridge::process::{ForkSide, fork_bridge, isolate_mounts, run_bridge};
use berth_bridge::watch::NEXT_STEP;
use berth_manifest::command::find_executable;
use berth_manifest::report::Refusal;
use berth_options::check::{Checks, Mistakes};
use humantime::format_duration;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;

pub(super) fn run(args: &BridgeArgs) -> anyhow::Result<Exit> {
    match &args.action {
        Some(BridgeAction::Start(start)) => start_bridge(start, None),
        Some(BridgeAction::Status(args)) => block_on(ask::print_status(args))?,
        Some(BridgeAction::Restore(args)) => block_on(ask::restore_changes(args))?,
        Some(BridgeAction::End(args)) => block_on(ask::end_bridge(args))?,
        None => start_bridge(&args.start, Some(&args.run)),
    }
}

/// True if a bridge runs in the default directory. If the bridge does not answer, it counts as
/// none.
pub(super) fn is_bridge_on() -> bool {
    let on = block_on(ask_status(Path::new(DIRECTORY)));
    on.is_ok_and(|status| status.is_some_and(|status| status.outcome.is_none()))
}

/// Replaces this process by `berth bridge`, which runs another command of berth as its COMMAND.
pub(super) fn run_under_bridge(options: &[&OsStr], run: &[OsString]) -> anyhow::Result<Exit> {
    let mut bridge =
        std::process::Command::new(std::env::current_exe().context("cannot find this program")?);
    let failed = bridge
        .arg("bridge")
        .args(options)
        .arg("--")
        .args(run)
        .exec();
    Err(failed).context("cannot begin a bridge")
}

/// Returns the command line of this process, but without the argument `without`.
pub(super) fn command_line_without(without: &str) -> anyhow::Result<Vec<OsString>> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let words = std::env::args_os().skip(1).filter(|word| word != without);
    Ok(std::iter::once(program.into()).chain(words).collect())
}

fn start_bridge(args: &BridgeStartArgs, run: Option<&[OsString]>) -> anyhow::Result<Exit> {
    let options = check_options(args, run).map_err(usage_error)?;
    if args.dry_run {
        let mut plan = block_on(preflight(options))?.map_err(nothing_changed_error)?;
        // In a dry run, no bridge begins that could put the note about localhost into its status.
        // So add the note here.
        plan.notes
            .extend(plan.localhost.as_ref().err().map(|why| uncovered_note(why)));
        print_notes(&plan);
        let steps = list_steps(&plan, run);
        return print(&match args.dir.json {
            true => format_json(&serde_json::json!({"steps": steps, "notes": plan.notes}))?,
            false => format_numbered_steps(&steps),
        });
    }
    match fork_bridge().context("cannot divide this process")? {
        ForkSide::Bridge(begin) => {
            isolate_mounts(&options)
                .context("cannot create a mount namespace: run berth with CAP_SYS_ADMIN")?;
            block_on(run_bridge(options, begin, print_notes))?.map_err(nothing_changed_error)?;
            Ok(Exit::Ok)
        }
        ForkSide::Caller(bridge) => match bridge.wait_for_begin()? {
            Ok(asked) => to_exit(
                block_on(accompany_bridge(
                    &args.dir.state_dir,
                    args.dir.json,
                    run,
                    asked,
                ))?
                .map_err(unavailable_error)?,
            ),
            Err(Some(code)) => Ok(u8::try_from(code).map_or(Exit::Bug, Exit::Child)),
            Err(None) => Err(unavailable_error(
                "the bridge was killed before it began; nothing was changed",
            )),
        },
    }
}

fn to_exit(waited: WaitResult) -> anyhow::Result<Exit> {
    Ok(match waited {
        WaitResult::Well => Exit::Ok,
        WaitResult::Again => Exit::Again,
        WaitResult::NotBegun => Exit::Unavailable,
        WaitResult::Failed(status) => Exit::Child(exit_code(status)),
    })
}

fn print_notes(plan: &BridgePlan) {
    plan.notes
        .iter()
        .for_each(|note| print_stderr(format_args!("note: {note}")));
}

fn nothing_changed_error(mut refusal: Refusal) -> anyhow::Error {
    if let Refusal::Unavailable(why) = &mut refusal {
        why.push(format!("nothing was changed; {NEXT_STEP}"));
    }
    refusal_error(refusal)
}

/// Checks the options, and turns them into the options of a bridge.
fn check_options(
    args: &BridgeStartArgs,
    run: Option<&[OsString]>,
) -> Result<BridgeOptions, Mistakes> {
    args.speedup.speed_up_process();
    let mut checks = Checks::default();
    if run.is_some_and(<[_]>::is_empty) && !args.dry_run {
        checks.report(
            "COMMAND is missing: give it after --, or use `berth bridge start` (--dry-run needs no COMMAND)",
        );
    }
    if let Some(program) = run.and_then(<[_]>::first)
        && find_executable(program).is_none()
    {
        checks.report(format!(
            "COMMAND: there is no program {} to run: give its path",
            program.display()
        ));
    }
    if args.command.is_some() && args.on_failure == OnFailure::Restore {
        checks.report(
            "--on-failure restore: works only for a static pod; with --command give stay or end",
        );
    }
    let running = match &args.command {
        None => RunningInstance::Pod {
            manifest: args.manifest.clone(),
        },
        Some(Words(command)) => RunningInstance::Process {
            command: command.clone(),
        },
    };
    checks.finish(Some(BridgeOptions {
        running,
        limits: Limits {
            ready: args.ready_timeout,
            settle: args.settle,
            speedup: args.speedup,
        },
        on_failure: args.on_failure,
        etcd: args.etcd,
        probe_ca: args.probe_ca.clone(),
        probe_client: args.probe_cert.clone().zip(args.probe_key.clone()),
        probe_server_name: args.probe_server_name.clone(),
        probe_timeout: args.probe_timeout,
        directory: args.dir.state_dir.clone(),
        kubeconfig: args.kubeconfig.clone(),
    }))
}

fn list_steps(plan: &BridgePlan, run: Option<&[OsString]>) -> Vec<String> {
    let BridgePlan {
        options,
        port,
        temporary,
        own,
        ..
    } = plan;
    let Limits {
        ready,
        settle,
        speedup,
    } = options.limits;
    let (ready, settle, overlap) = (
        format_duration(ready),
        format_duration(settle),
        format_duration(speedup.shorten(OVERLAP)),
    );
    let run = match run {
        None => "keep steering until `berth bridge end`".to_owned(),
        Some([]) => "run COMMAND".to_owned(),
        Some(run) => format!("run {}", run.join(" ".as_ref()).display()),
    };
    let argv = plan.argv.join(" ".as_ref());
    vec![
        format!(
            "start a temporary kube-apiserver on {temporary}, as uid {}: {}",
            plan.like.uid,
            argv.display()
        ),
        format!("wait until the temporary kube-apiserver is ready (at most {ready}) and has been ready for {settle}"),
        format!(
            "steer new connections to port {port} to the temporary kube-apiserver; wait {overlap} for handshakes that began before steering"
        ),
        run,
        format!(
            "wait until the node's kube-apiserver is ready at {own} (at most {ready}) and has been ready for {settle}"
        ),
        format!("stop steering; wait {overlap} for handshakes that began before the stop"),
        "wait for the end of the temporary kube-apiserver's connections, and end the temporary kube-apiserver".to_owned(),
    ]
}
