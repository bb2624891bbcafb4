//! `berth rehearse`: an upgrade under load on this machine, with the programs of production.
//!
//! The modules from the ground up. A module uses only modules above it in this table.
//!
//! | module | content |
//! | --- | --- |
//! | [`config`] | the plan in checked values: apiservers, topology, faults, load |
//! | [`record`] | events and their log; the record of a run; the data of the report |
//! | [`testbed`] | addresses, network namespace, certificates, simulated kube-apiserver and store |
//! | [`load`] | clients that connect through the berth and never retry |
//! | `run` | processes of a run and the script: start, load, upgrade, faults, stop |
//! | [`judges`] | from the record to the figures, a file for each subject |
//! | [`report`] | the figures as a table, as JSON and as a page |
//!
//! A new figure is a row that a judge adds ([`record::data::Ran`]). The table, the page and the
//! JSON show the row without further changes.

#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    reason = "the crate is not published: what its name says needs no comment"
)]
// The print macros panic if a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod config;
pub mod judges;
pub mod load;
pub mod record;
pub mod report;
mod run;
pub mod testbed;

pub use run::outcome::{Aborted, Rehearsed};
pub use run::processes::Error;

use berth_steering::self_test;
use config::{Plan, Topology, Via, find_program};
use record::{
    Record,
    data::{Run, RunOutcome},
    progress,
};
use run::{
    processes::{self, Processes},
    script,
    session::Session,
};
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use tokio::signal::unix::{SignalKind, signal};

/// Rehearses the runs of a plan one after another. Processes are stopped and directories removed in
/// every case but SIGKILL. After SIGKILL, the next rehearsal removes the directory.
pub async fn rehearse(plan: &Plan) -> Rehearsed {
    let mut outcome = Rehearsed::default();
    outcome.aborted = rehearse_all(plan, &mut outcome).await.err();
    outcome
}

async fn rehearse_all(plan: &Plan, outcome: &mut Rehearsed) -> Result<(), Aborted> {
    let handler = |kind| signal(kind).map_err(Error::unavailable_error("cannot handle signals"));
    let (mut int, mut term) = (
        handler(SignalKind::interrupt())?,
        handler(SignalKind::terminate())?,
    );
    for left in processes::sweep_directories() {
        progress::print(&format!(
            "removed {}, left by a rehearsal that was killed",
            left.display()
        ));
    }
    check_available(plan, plan.via)
        .await
        .map_err(Error::Unavailable)?;
    for (index, &via) in plan.runs.iter().enumerate() {
        let topology = plan.topology.to_string();
        if let Err(why) = check_available(plan, via).await {
            progress::print(&format!("skipped: {why}"));
            outcome.runs.push(Run {
                via,
                topology,
                outcome: RunOutcome::Skipped(why),
            });
            continue;
        }
        let session = Session::new(plan, via);
        let mut processes = Processes::new(&session)?;
        if plan.runs.len() > 1 {
            progress::print(&format!(
                "\nrun {} of {}, {}",
                index + 1,
                plan.runs.len(),
                via.describe()
            ));
        }
        let ended = tokio::select! {
            ended = catch_panic(script::play_script(&session, &mut processes)) => ended,
            _ = int.recv() => Err(Aborted::Signal(libc::SIGINT)),
            _ = term.recv() => Err(Aborted::Signal(libc::SIGTERM)),
        };
        processes.stop_all().await;
        let failed = ended.as_ref().err().map(ToString::to_string);
        let ran = judges::judge(
            &Record::of(session.recorder.drain()),
            plan,
            failed.as_deref(),
        );
        outcome.runs.push(Run {
            via,
            topology,
            outcome: RunOutcome::Ran(Box::new(ran)),
        });
        outcome.failed.extend(failed.map(|why| (via, why)));
        match ended {
            // A run that is only compared with the run under test may fail: the failure is its
            // result, and the next run follows.
            Err(Aborted::Failed(error)) if via != plan.via => {
                progress::print(&format!("via {via}: {error}"));
            }
            ended => ended?,
        }
    }
    Ok(())
}

/// Turns a panic into an error, so that the data gathered before is kept.
async fn catch_panic(play: impl Future<Output = Result<(), Error>>) -> Result<(), Aborted> {
    let mut play = pin!(play);
    poll_fn(
        |task| match catch_unwind(AssertUnwindSafe(|| play.as_mut().poll(task))) {
            Ok(poll) => poll.map_err(Aborted::Failed),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text
                    .or(panic.downcast_ref::<&str>().copied())
                    .unwrap_or("a panic");
                Poll::Ready(Err(Aborted::Panicked(text.to_owned())))
            }
        },
    )
    .await
}

/// Checks that this machine has what a way needs: a kernel that can steer, or the program HAProxy.
async fn check_available(plan: &Plan, via: Via) -> Result<(), String> {
    let needed = match via {
        Via::Berth if plan.topology == Topology::Bridge => self_test()
            .await
            .map(drop)
            .map_err(|error| format!("{error}; nothing was changed")),
        Via::Haproxy => find_program("haproxy".as_ref()).map(drop),
        Via::Berth | Via::PortSharing | Via::None => Ok(()),
    };
    needed.map_err(|why| format!("{why}: {via} cannot be rehearsed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_aborts_the_rehearsal() {
        let aborted = catch_panic(async { panic!("at {}", 7) }).await.unwrap_err();
        assert!(
            matches!(&aborted, Aborted::Panicked(text) if text == "at 7"),
            "{aborted}"
        );
        assert!(catch_panic(async { Ok(()) }).await.is_ok());
    }
}
