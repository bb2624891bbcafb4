//! `berth bridge --judge`: a look at both while both serve, and what is said of it.

use super::watch::Watcher;
use super::{status, unavailable};
use crate::cli::BridgeStartArgs;
use berth_cluster::Client;
use berth_cluster::kubeconfig::{ADMIN, given_or_admin};
use berth_node::ipc::bridge::Step;
use berth_operate::bridge::judge::BridgeJudge;
use berth_upgrade::judge::{Outcome, Verdict};
use std::path::PathBuf;
use std::time::Duration;

/// The judge that is wanted. Made before anything is changed.
pub(super) fn of(args: &BridgeStartArgs) -> anyhow::Result<Option<BridgeJudge>> {
    if !args.judge {
        return Ok(None);
    }
    let Some(path) = given_or_admin(args.kubeconfig.as_deref()) else {
        let why = "--judge: both instances are asked for their metrics as an administrator, and there is no";
        return Err(unavailable(format!("{why} {ADMIN}: give --kubeconfig")));
    };
    let client = Client::from_kubeconfig(path).map_err(|error| unavailable(format!("--judge: {error}")))?;
    Ok(Some(BridgeJudge::new(client, args.accept.clone())))
}

/// Looks until the bridge lets the temporary one end.
pub(super) async fn look(mut judge: BridgeJudge, directory: PathBuf, interval: Duration) -> Option<Verdict> {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match status(&directory).await {
            Some(status) if status.outcome.is_none() && status.step != Step::Drain => judge.look(&status).await,
            _ => return judge.verdict(),
        }
    }
}

/// Says what came out, and whether it is bad.
pub(super) fn report(verdict: Option<&Verdict>, watcher: &Watcher) -> bool {
    match verdict {
        Some(verdict) => watcher.verdict(verdict),
        None => watcher.line("not judged: COMMAND put nothing there to compare"),
    }
    verdict.is_some_and(|verdict| verdict.outcome == Outcome::Bad)
}
