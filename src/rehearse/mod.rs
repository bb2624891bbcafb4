//! `berth rehearse`: an upgrade under load on this machine, with everything real but the apiserver.
//!
//! In the order of the flow:
//!
//! * [`plan`]: what will be rehearsed, in checked numbers.
//! * [`stage`]: the processes. Two `berth run` of this very binary, each with a [`stand_in`] apiserver
//!   as its child; certificates from [`certs`]; all of it on 127/8 and in one temporary folder.
//! * [`store`]: the objects that both stand-ins serve, in etcd's place; they reach it through [`hub`]
//!   in the language of [`wire`].
//! * [`load`]: clients through the berth that never retry.
//! * [`record`]: what clients saw, and what instances report of themselves.
//! * [`verdict`]: from the record to what was lost; pure. [`table`] prints it, [`progress`] entertains.
//!
//! The script of a rehearsal is here: start old, load, start new, wait until it is ready and joined,
//! stop old, verdict.

pub mod certs;
pub mod hub;
pub mod load;
pub mod plan;
pub mod progress;
pub mod record;
pub mod stage;
pub mod stand_in;
pub mod store;
pub mod table;
pub mod verdict;
pub mod wire;

use load::{Load, Target};
use plan::Plan;
use progress::Progress;
use record::Recorder;
use stage::{Error, Stage};
use std::sync::Arc;
use store::Store;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;
use verdict::{NEW, OLD, Verdict};

/// Versions that the stand-ins report, so that a look at `/version` tells them apart.
const VERSIONS: [(&str, &str); 2] = [(OLD, "v1.33.0"), (NEW, "v1.34.0")];

/// How a rehearsal ended.
#[derive(Debug)]
pub enum Outcome {
    /// It came to its end.
    Judged(Box<Verdict>),
    /// A signal ended it; its number.
    Aborted(i32),
}

/// Rehearses. Children are stopped and the folder is removed in every case.
pub async fn rehearse(plan: &Plan) -> Result<Outcome, Error> {
    let handler = |kind| signal(kind).map_err(|e| Error::Unavailable(format!("cannot handle signals: {e}")));
    let (mut int, mut term) = (handler(SignalKind::interrupt())?, handler(SignalKind::terminate())?);
    let mut stage = Stage::new(plan)?;
    let recorder = Arc::new(Recorder::default());
    let outcome = tokio::select! {
        judged = script(plan, &mut stage, &recorder) => judged.map(|verdict| Outcome::Judged(Box::new(verdict))),
        _ = int.recv() => Ok(Outcome::Aborted(libc::SIGINT)),
        _ = term.recv() => Ok(Outcome::Aborted(libc::SIGTERM)),
    };
    stage.close().await;
    outcome
}

async fn script(plan: &Plan, stage: &mut Stage, recorder: &Arc<Recorder>) -> Result<Verdict, Error> {
    let store = Arc::new(Store::default());
    let socket = UnixListener::bind(stage.socket()).map_err(|e| {
        let path = stage.socket();
        Error::Unavailable(format!("cannot make the socket {} (TMPDIR names another place): {e}", path.display()))
    })?;
    // Aborted with this future when it is dropped.
    let mut background = tokio::task::JoinSet::new();
    background.spawn(hub::serve(socket, Arc::clone(&store), Arc::clone(recorder)));
    let progress = Progress::new(recorder);
    let say = |what: String| progress.say(&what);

    say(format!("start old, {}, behind {}", VERSIONS[0].1, stage.address));
    stage.start(OLD, VERSIONS[0].1)?;
    let took = stage.ready(OLD, plan.ready_within).await?;
    say(format!("old is ready and joined after {took:.1?}"));

    let (rate, clients, watches) = (plan.rate, plan.clients, plan.watches);
    say(format!("load: {rate} new connections a second, {clients} kept connections, {watches} watches"));
    let target = Target::new(stage.address, &stage.certs.ca)
        .map_err(|e| Error::Unavailable(format!("cannot use the certificates just made: {e}")))?;
    let load = Load::start(plan, &target, &store, recorder)
        .map_err(|e| Error::Unavailable(format!("cannot fill the store: {e}")))?;
    sleep(plan.before).await;

    say(format!("start new, {}", VERSIONS[1].1));
    stage.start(NEW, VERSIONS[1].1)?;
    let took = stage.ready(NEW, plan.ready_within).await?;
    say(format!("new is ready and joined after {took:.1?}"));
    sleep(plan.together).await;

    say("SIGTERM to old".into());
    stop(plan, stage, recorder, OLD, &say).await;
    sleep(plan.after).await;

    if let Err(broken) = load.finish().await {
        recorder.note(|r| r.faults.push(broken));
    }
    say("load is over, stop new".into());
    stop(plan, stage, recorder, NEW, &say).await;
    Ok(verdict::judge(&recorder.take(), plan))
}

/// Stops an instance; what is not as it should be goes into the record.
async fn stop(plan: &Plan, stage: &mut Stage, recorder: &Recorder, name: &'static str, say: &impl Fn(String)) {
    let began = tokio::time::Instant::now();
    let grace = plan.grace + plan.shutdown_delay;
    let stopped = stage.stop(name, grace).await;
    let fault = match stopped.status {
        Some(status) if stopped.early => Some(format!("{name} ended before it was told to ({status})")),
        Some(status) if status.success() => None,
        Some(status) => Some(format!("{name} ended with {status}")),
        None => Some(format!("{name} was still there {grace:?} after SIGTERM and had to be killed")),
    };
    match fault {
        None => say(format!("{name} is gone after {:.1?}", began.elapsed())),
        Some(fault) => {
            say(format!("{fault}; its last lines of log:\n{}", stage.log(name).await));
            recorder.note(|r| r.faults.push(fault));
        }
    }
}
