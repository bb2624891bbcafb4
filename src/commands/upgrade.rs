//! Runs `berth upgrade`: turns its options into an upgrade, and the upgrade's result into an exit
//! status.

use super::{
    Exit, block_on, format_numbered_steps, is_version, print, refusal_error, suggest_upgrade,
    usage_error,
};
use crate::cli::{JudgeArgs, UpgradeArgs};
use berth_options::check::Mistakes;
use berth_upgrade::begin::{MANIFEST_NAME, StartedUpgrade, UpgradeOptions, begin_upgrade, dry_run};
use berth_upgrade::drive::{self, DriveOutcome};
use berth_upgrade::judge::{INTERVAL, JudgeOptions, Plan};
use berth_upgrade::pod::TEMPORARY_PREFIX;
use berth_upgrade::progress::Progress;
use berth_upgrade::state::Store;
use std::path::Path;
use std::rc::Rc;

pub(super) fn run(args: &UpgradeArgs) -> anyhow::Result<Exit> {
    let options = upgrade_options(args);
    let mut mistakes = options.find_mistakes();
    let word = args
        .manifest
        .as_deref()
        .and_then(Path::to_str)
        .unwrap_or_default();
    if is_version(word) && !Path::new(word).exists() {
        mistakes.push(suggest_upgrade(word));
    }
    if !mistakes.is_empty() {
        return Err(usage_error(Mistakes(mistakes)));
    }
    block_on(run_upgrade(options, args.dry_run))?
}

fn upgrade_options(args: &UpgradeArgs) -> UpgradeOptions {
    // Use an absolute path, because an upgrade may be resumed from another working directory.
    let directory = args
        .kubelet
        .manifests_dir
        .canonicalize()
        .unwrap_or_else(|_| args.kubelet.manifests_dir.clone());
    UpgradeOptions {
        manifest: args.manifest.clone(),
        canonical: directory.join(MANIFEST_NAME),
        temporary: directory.join(format!("{TEMPORARY_PREFIX}{MANIFEST_NAME}")),
        state_dir: args.state.state_dir.clone(),
        ready: args.ready_timeout,
        settle: args.settle,
        pod_logs_dir: args.pod_logs_dir.clone(),
        kubeconfig: args.kubeconfig.clone(),
        ignore_errors: args.ignored.ignore_errors.clone(),
        judge: args.judge.judge.then(|| judge_options(&args.judge)),
        emulate: !args.judge.no_emulate,
        break_lock: args.break_lock,
    }
}

fn judge_options(args: &JudgeArgs) -> JudgeOptions {
    JudgeOptions {
        plan: Plan {
            warm: args.speedup.shorten(Plan::default().warm),
            parts: args.canary.clone(),
            step: args.canary_time,
            bake: 2 * args.canary_time,
        },
        interval: args.speedup.shorten(INTERVAL),
        accepted: args.accept.clone(),
        undecided: args.undecided,
        requests: args.judge_requests,
        local: args.canary_local,
    }
}

async fn run_upgrade(options: UpgradeOptions, only_steps: bool) -> anyhow::Result<Exit> {
    let progress = Rc::new(Progress::default());
    if only_steps {
        let steps = dry_run(&options, &progress).await.map_err(refusal_error)?;
        return print(&format_numbered_steps(&steps)).map(|_| Exit::Ok);
    }
    let StartedUpgrade {
        state,
        store,
        context,
    } = begin_upgrade(&options, &progress)
        .await
        .map_err(refusal_error)?;
    Ok(
        match drive::drive_upgrade(state, &store, &context, progress.clone()).await {
            Ok(DriveOutcome::Done) => Exit::Ok,
            Ok(DriveOutcome::RolledBack) => Exit::No,
            Ok(DriveOutcome::Judged) => Exit::Again,
            Ok(DriveOutcome::Halted | DriveOutcome::Stopped) => {
                print_resume_hint(&progress, &store)
            }
            Err(error) => {
                progress.print_line(&format!("failed: {error}"));
                print_resume_hint(&progress, &store)
            }
        },
    )
}

fn print_resume_hint(progress: &Progress, store: &Store) -> Exit {
    progress.print_line(
        "neither done nor rolled back. Instances that serve are left alone: see `berth status`.",
    );
    progress.print_detail(&format!(
        "When the cause is fixed, run the same command again; it continues from {}.",
        store.path().display()
    ));
    Exit::Again
}
