//! The direct path in a rehearsal: whether it can be, in a network namespace of the rehearsal's own, and how much of a
//! run it was used. The shims are asked, so what one steered after the last time, before its SIGKILL, is not seen.

use super::address::NETNS;
use super::event::EventKind;
use super::log::Recorder;
use super::netns;
use super::plan::Plan;
use super::setting::StageSetting;
use super::stage::{Error, of_shims};
use berth_node::ipc::wire::{Ask, Reply, Status};
use berth_shim::config::DirectMode;
use berth_shim::steering::self_test_by_address;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, sleep, timeout};

/// Time between two polls: for each, shims ask the kernel for all connections of the node.
const POLL_EVERY: Duration = Duration::from_millis(250);

/// How long shims may take to find that it is calm: 8 s after it was not, a lease, and as long again on a busy machine.
const CALM_WITHIN: Duration = Duration::from_secs(30);

/// Moves this process, which must have one thread only, to a network namespace if one is needed. In the user namespace that others
/// get along with it no BPF program may be loaded.
///
/// # Errors
/// There can be none.
pub fn enter(plan: &mut Plan) -> Result<(), Error> {
    let unavailable = |error: netns::Error| Error::Unavailable(error.to_string());
    if plan.direct != DirectMode::Off {
        match netns::enter_as_root(*NETNS.ip()) {
            Ok(()) => {
                plan.netns = true;
                return Ok(());
            }
            Err(netns::Error::Unshare(error)) => {
                cannot(
                    plan,
                    &format!("cannot make a network namespace in which BPF may be used: {error}; run it as root"),
                )?;
            }
            Err(error) => return Err(unavailable(error)),
        }
    }
    if plan.netns { netns::enter(*NETNS.ip()).map_err(unavailable) } else { Ok(()) }
}

/// Tries it in the rehearsal's own network namespace. With `auto`, the plan goes on without it.
///
/// # Errors
/// It is wanted and cannot be.
pub async fn settle(plan: &mut Plan) -> Result<(), Error> {
    match self_test_by_address().await {
        Ok(()) => plan.direct = DirectMode::On,
        Err(error) => cannot(plan, &error.to_string())?,
    }
    Ok(())
}

fn cannot(plan: &mut Plan, why: &str) -> Result<(), Error> {
    if plan.direct == DirectMode::On {
        let why = format!("--direct on: {why}; nothing was started, and --direct auto goes on without it");
        return Err(Error::Unavailable(why));
    }
    plan.without_direct(why);
    Ok(())
}

/// Waits until a shim steers; returns whether one does.
pub(crate) async fn calm(setting: &StageSetting) -> bool {
    let steers = |status: &Status, _: &str| status.direct.as_ref().is_some_and(|direct| direct.on).then_some(());
    let calm = async {
        while ask(setting, steers).await.is_empty() {
            sleep(POLL_EVERY).await;
        }
    };
    timeout(CALM_WITHIN, calm).await.is_ok()
}

/// Logs what is steered, until it is dropped.
pub(crate) async fn watch(setting: StageSetting, recorder: Arc<Recorder>) {
    let mut ticks = tokio::time::interval(POLL_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let steering = ask(&setting, |status, shim| Some((shim.to_owned(), status.direct.clone()?))).await;
        recorder.add("", EventKind::Steering(steering));
    }
}

/// What `select` finds in the status of each shim that answers, and its name.
async fn ask<T>(setting: &StageSetting, select: impl Fn(&Status, &str) -> Option<T>) -> Vec<T> {
    let status = |reply| match reply {
        Reply::Status(status) => Some(status),
        _ => None,
    };
    let shims = of_shims(&setting.run_dir(), Ask::Status, status).await;
    let found = |(socket, status): (PathBuf, Box<Status>)| select(&status, &socket.file_stem()?.to_string_lossy());
    shims.into_iter().filter_map(found).collect()
}
