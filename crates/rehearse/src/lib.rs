//! `berth rehearse`: an upgrade under load on this machine, by the processes of production.
//!
//! In the order of the flow:
//!
//! * [`plan`]: what will be rehearsed, in checked values; [`fault`]: what goes wrong meanwhile.
//! * [`apiserver`]: the values of `--old` and `--new`; [`simulated`] is the one that berth has.
//! * `instance`: one of them as a command line; it knows the `setting`.
//! * `topology`: which processes an instance has and which gets SIGTERM when; `haproxy`: the
//!   configuration of what berth replaces.
//! * [`stage`]: the processes, certificates from [`certs`], an [`address`]; all on 127/8 and in one temporary directory.
//! * [`store`]: the objects that simulated apiservers serve, in etcd's place; they reach it through [`store_server`] in
//!   the language of `wire`. Real ones get an `etcd`.
//! * [`load`]: clients through the berth that never retry.
//! * [`event`]: what clients, instances and the script see; [`log`]: these, appended and never changed; [`record`]: the same, sorted
//!   after the run by what they are about.
//! * `monitor`: requests in addition to the load; [`gate`]: the metrics of their gates.
//! * [`netns`]: a network namespace for all of this.
//! * `script`: one run: start old, load, start new, wait until it joined, stop old.
//! * [`judges`], a file each: from the record to the [`data`], which is the JSON and has a version. A figure is a row there. `verdict` is what a run
//!   came to as a whole; what can be lost is a `loss`.
//! * The [`table`] and the [`report`]'s page show the rows, and do not know which judge made which.
//! * [`stats`]: a percentile. `progress`: what is printed meanwhile. `context` has it, the plan and the log of one run.

#![forbid(unsafe_code)]
#![allow(
    missing_docs,
    reason = "the crate is not published: what its name says needs no comment"
)]
// They panic where a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod address;
pub mod apiserver;
pub mod certs;
mod context;
pub mod data;
mod etcd;
pub mod event;
pub mod fault;
pub mod gate;
mod haproxy;
mod instance;
pub mod judges;
pub mod load;
pub mod log;
mod loss;
mod monitor;
pub mod netns;
pub mod plan;
mod progress;
pub mod record;
pub mod report;
mod script;
mod setting;
pub mod simulated;
pub mod stage;
pub mod stamp;
pub mod stats;
pub mod store;
pub mod store_server;
pub mod table;
mod topology;
pub mod verdict;
mod wire;

use berth_steering::self_test;
use context::Context;
use data::{Run, RunOutcome};
use plan::{Plan, Topology, Via, find_program};
use record::Record;
use stage::{Error, Stage};
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use tokio::signal::unix::{SignalKind, signal};

/// All that a rehearsal came to.
#[derive(Debug, Default)]
pub struct Rehearsed {
    /// One a way, in the order of [`Plan::runs`].
    pub runs: Vec<Run>,
    /// The ways whose run did not come to its end, and why.
    pub failed: Vec<(Via, String)>,
    /// Why it did not come to its end; what is there was gathered before.
    pub aborted: Option<Aborted>,
}

/// Why a rehearsal did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum Aborted {
    /// A signal; its number.
    #[error("the rehearsal was aborted by {}; nothing can be concluded from it", name(*.0))]
    Signal(i32),
    /// A bug in berth.
    #[error("the rehearsal broke down: {0}; nothing can be concluded from it (please report this)")]
    Panicked(String),
    /// Something was not there, or an instance did not do what it should.
    #[error(transparent)]
    Failed(#[from] Error),
}

fn name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal)
        .map_or_else(|_| format!("signal {signal}"), |s| s.to_string())
}

/// Rehearses, one run after the other. Processes are stopped and directories removed in every case but SIGKILL, and
/// then by the next rehearsal.
pub async fn rehearse(plan: &Plan) -> Rehearsed {
    let mut outcome = Rehearsed::default();
    outcome.aborted = rehearse_all(plan, &mut outcome).await.err();
    outcome
}

async fn rehearse_all(plan: &Plan, outcome: &mut Rehearsed) -> Result<(), Aborted> {
    let handler = |kind| signal(kind).map_err(Error::unavailable("cannot handle signals"));
    let (mut int, mut term) = (
        handler(SignalKind::interrupt())?,
        handler(SignalKind::terminate())?,
    );
    for left in stage::sweep() {
        progress::print(&format!(
            "removed {}, left by a rehearsal that was killed",
            left.display()
        ));
    }
    available(plan, plan.via)
        .await
        .map_err(Error::Unavailable)?;
    for (index, &via) in plan.runs.iter().enumerate() {
        let topology = plan.topology.to_string();
        if let Err(why) = available(plan, via).await {
            progress::print(&format!("skipped: {why}"));
            outcome.runs.push(Run {
                via,
                topology,
                outcome: RunOutcome::Skipped(why),
            });
            continue;
        }
        let context = Context::new(plan, via);
        let mut stage = Stage::new(&context)?;
        if plan.runs.len() > 1 {
            progress::print(&format!(
                "\nrun {} of {}, {}",
                index + 1,
                plan.runs.len(),
                via.way()
            ));
        }
        let ended = tokio::select! {
            ended = caught(script::play(&context, &mut stage)) => ended,
            _ = int.recv() => Err(Aborted::Signal(libc::SIGINT)),
            _ = term.recv() => Err(Aborted::Signal(libc::SIGTERM)),
        };
        stage.close().await;
        let failed = ended.as_ref().err().map(ToString::to_string);
        let ran = judges::judge(
            &Record::of(context.recorder.drain()),
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
            // When a comparison fails, that is a result about what is compared.
            Err(Aborted::Failed(error)) if via != plan.via => {
                progress::print(&format!("via {via}: {error}"))
            }
            ended => ended?,
        }
    }
    Ok(())
}

/// A panic must not cost what was gathered before it.
async fn caught(play: impl Future<Output = Result<(), Error>>) -> Result<(), Aborted> {
    let mut play = pin!(play);
    poll_fn(
        |context| match catch_unwind(AssertUnwindSafe(|| play.as_mut().poll(context))) {
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

/// Whether what a way needs is there.
async fn available(plan: &Plan, via: Via) -> Result<(), String> {
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
    async fn a_panic_is_an_end_like_others() {
        let aborted = caught(async { panic!("at {}", 7) }).await.unwrap_err();
        assert!(
            aborted.to_string().contains("broke down: at 7;"),
            "{aborted}"
        );
        assert!(caught(async { Ok(()) }).await.is_ok());
    }
}
