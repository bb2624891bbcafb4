//! `berth upgrade`: its options, and how it ended.

use super::bridge::{around, is_on, this_again};
use super::{Exit, block_on, mistaken, numbered, print, say, unavailable};
use crate::cli::UpgradeArgs;
use berth_operate::upgrade::begin::{Begun, FILE, NotBegun, Options, begin, dry_run, is_first_switch};
use berth_operate::upgrade::drive::{self, DriveError, Ended};
use berth_operate::upgrade::pod::PREFIX;
use berth_operate::upgrade::say::Say;
use berth_operate::upgrade::state::Store;
use berth_options::check::{Checks, Mistakes};
use std::ffi::OsStr;
use std::rc::Rc;
use std::time::Duration;

pub(super) fn run(args: &UpgradeArgs) -> anyhow::Result<Exit> {
    let mut checks = Checks::default();
    let options = options(args, &mut checks);
    options.mistakes().into_iter().for_each(|mistake| checks.wrong(mistake));
    match checks.finish(Some(options)) {
        // The first switch is one restart: kube-apiserver holds its port alone. Who goes on with one may have a bridge still.
        Ok(options) if !args.accept_gap && is_first_switch(&options) && !is_on() => under_a_bridge(&options, args),
        Ok(options) => block_on(upgrade(options, args.dry_run))?,
        Err(mistakes) => Ok(mistaken(&mistakes)),
    }
}

/// Does it with --accept-gap, with a temporary kube-apiserver that serves meanwhile. What keeps it from beginning is looked for before.
fn under_a_bridge(options: &Options, args: &UpgradeArgs) -> anyhow::Result<Exit> {
    let manifest = options.canonical.clone();
    let known = block_on(async { dry_run(options, &Say::default()).await.err() })?;
    if let Some(why) = known {
        return Ok(not_begun(why));
    }
    let mut words = vec!["--manifest".as_ref(), manifest.as_os_str()];
    words.extend(["--settle", &args.settle, "--ready-timeout", &args.ready_timeout].map(OsStr::new));
    if args.dry_run {
        words.push("--dry-run".as_ref());
    }
    if let Some(kubeconfig) = &args.kubeconfig {
        words.extend(["--kubeconfig".as_ref(), kubeconfig.as_os_str()]);
    }
    say("this first switch is one restart, done under `berth bridge` (without one: --accept-gap)");
    around(&words, &this_again("--dry-run", Some("--accept-gap"))?)
}

fn options(args: &UpgradeArgs, checks: &mut Checks) -> Options {
    // Absolute, so that an upgrade that goes on from another directory means the same files.
    let directory = args.kubelet.manifests_dir.canonicalize().unwrap_or_else(|_| args.kubelet.manifests_dir.clone());
    Options {
        manifest: args.manifest.clone(),
        canonical: directory.join(FILE),
        temporary: directory.join(format!("{PREFIX}{FILE}")),
        backup_dir: args.kept.backup_dir.clone(),
        ready: checks.duration("--ready-timeout", &args.ready_timeout, Duration::from_secs(1)),
        settle: checks.duration("--settle", &args.settle, Duration::ZERO),
        run_dir: args.run_dir.clone(),
        pod_logs_dir: args.pod_logs_dir.clone(),
        kubeconfig: args.kubeconfig.clone(),
        ignore_errors: args.excused.ignore_errors.clone(),
        break_lock: args.break_lock,
        command: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" "),
    }
}

async fn upgrade(options: Options, only_steps: bool) -> anyhow::Result<Exit> {
    let say = Rc::new(Say::default());
    if only_steps {
        return match dry_run(&options, &say).await {
            Ok(steps) => print(&numbered(&steps)).map(|_| Exit::Ok),
            Err(why) => Ok(not_begun(why)),
        };
    }
    let Begun { state, store, setting } = match begin(&options, &say).await {
        Ok(begun) => begun,
        Err(why) => return Ok(not_begun(why)),
    };
    Ok(match drive::drive(state, &store, &setting, say.clone()).await {
        Ok(Ended::Done) => Exit::Ok,
        Ok(Ended::RolledBack(_)) => Exit::No,
        Ok(Ended::Halted(_) | Ended::Stopped) => again(&say, &store),
        Err(error @ (DriveError::State(_) | DriveError::File(_) | DriveError::Look(_))) => {
            say.line(&format!("failed: {error}"));
            again(&say, &store)
        }
    })
}

fn not_begun(why: NotBegun) -> Exit {
    match why {
        NotBegun::Mistakes(mistakes) => mistaken(&Mistakes(mistakes)),
        NotBegun::Unavailable(why) => unavailable(&why),
        NotBegun::Errors => Exit::No,
    }
}

fn again(say: &Say, store: &Store) -> Exit {
    say.line("neither done nor rolled back. What serves is left alone: see `berth status`.");
    say.more(&format!(
        "When the cause is fixed, run the same command again; it goes on from {}.",
        store.path().display()
    ));
    Exit::Again
}
