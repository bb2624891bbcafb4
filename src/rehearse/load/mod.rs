//! The load: open-loop clients that never retry.
//!
//! Requests are due by a fixed timetable and waits are counted from there, so a slow answer delays no
//! other request and hides none (no coordinated omission). `fresh` opens new connections, `kept`
//! keeps them, `watch` watches what [`Load`]'s writer writes straight into the store. All of them
//! only write down what they saw.

mod dial;
mod fresh;
mod kept;
mod sequence;
mod watch;

pub use dial::Target;

use super::plan::{LoadPlan, UNANSWERED, WRITE_EVERY};
use super::record::{Answer, Attempt, Failure, Kind, Recorder, Stamp, StreamId};
use super::store::Store;
use super::wire::Reason;
use dial::{Link, Protocol, Unsent};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// Namespace of all that is written.
const NAMESPACE: &str = "rehearsal";

/// What new and kept connections read.
const READ: &str = "/api/v1/namespaces/rehearsal/configmaps/read-me";

/// The clients at work. Dropping it ends them without a word in the record.
#[derive(Debug)]
pub struct Load {
    stop: CancellationToken,
    clients: JoinSet<()>,
}

impl Load {
    /// Writes the objects that are read, and starts all clients.
    pub fn start(
        plan: &LoadPlan,
        target: &Target,
        store: &Arc<Store>,
        recorder: &Arc<Recorder>,
    ) -> Result<Self, Reason> {
        store.create(json!({
            "kind": "ConfigMap", "apiVersion": "v1",
            "metadata": {"namespace": NAMESPACE, "name": "read-me"}, "data": {"hello": "world"},
        }))?;
        let mut load = Self { stop: CancellationToken::new(), clients: JoinSet::new() };
        let (goal, reached) = tokio::sync::watch::channel(None);
        load.clients.spawn(write(Arc::clone(store), load.stop.clone(), goal));

        let client = Client { target: target.clone(), recorder: Arc::clone(recorder), stop: load.stop.clone() };
        for index in 0..u64::from(plan.watches) {
            load.clients.spawn(watch::run(client.clone(), index, reached.clone()));
        }
        for index in 0..u64::from(plan.clients) {
            load.clients.spawn(kept::run(client.clone(), index, u64::from(plan.clients)));
        }
        load.clients.spawn(fresh::run(client, plan.rate));
        Ok(load)
    }

    /// Ends the timetables, and waits for what is under way: answers that are due, and the last
    /// writes at each watch. The error tells of clients that broke down.
    pub async fn finish(mut self) -> Result<(), String> {
        self.stop.cancel();
        let mut broken = 0;
        while let Some(ended) = self.clients.join_next().await {
            broken += u32::from(ended.is_err());
        }
        if broken == 0 { Ok(()) } else { Err(format!("{broken} clients of the rehearsal broke down: a bug in berth")) }
    }
}

/// What every client has.
#[derive(Clone)]
struct Client {
    target: Target,
    recorder: Arc<Recorder>,
    stop: CancellationToken,
}

impl Client {
    fn attempt(&self, kind: Kind, stream: &StreamId, due: Stamp, answer: Answer) {
        let attempt = Attempt { kind, stream: stream.clone(), due, done: Stamp::now(), answer };
        self.recorder.note(|r| r.attempts.push(attempt));
    }

    /// Connects and sends a first request: an attempt of kind [`Kind::New`]. The link is there when
    /// it was answered.
    async fn open(&self, protocol: Protocol, stream: StreamId, path: &str, due: Due) -> Option<Link> {
        let opened = tokio::time::timeout_at(due.instant + UNANSWERED, async {
            let mut link = self.target.dial(protocol, stream.clone()).await?;
            match ask(&mut link, path).await {
                Ok(answer) => Ok((link, answer)),
                Err(Unsent::Died(failure)) => Err(failure),
                Err(Unsent::NeverSent) => Err(link.ended().await),
            }
        });
        let (link, answer) = match opened.await {
            Ok(Ok((link, answer))) => (Some(link), answer),
            Ok(Err(failure)) => (None, Answer::Failed(failure)),
            Err(_) => (None, Answer::Failed(Failure::Unanswered)),
        };
        self.attempt(Kind::New, &stream, due.stamp, answer);
        link
    }
}

/// One request and its whole answer.
async fn ask(link: &mut Link, path: &str) -> Result<Answer, Unsent> {
    let response = link.get(path).await?;
    let (instance, status) = (dial::instance(&response), response.status().as_u16());
    dial::whole(response.into_body()).await.map_err(Unsent::Died)?;
    Ok(if status < 400 { Answer::Good { instance } } else { Answer::Bad { instance, status } })
}

/// One moment on both clocks.
#[derive(Debug, Clone, Copy)]
struct Due {
    instant: Instant,
    stamp: Stamp,
}

impl Due {
    fn now() -> Self {
        Self { instant: Instant::now(), stamp: Stamp::now() }
    }

    fn plus(self, after: Duration) -> Self {
        Self { instant: self.instant + after, stamp: self.stamp.plus(after) }
    }
}

/// Writes a numbered ConfigMap every [`WRITE_EVERY`], from 1 on, until the load stops; then says the
/// last number.
async fn write(store: Arc<Store>, stop: CancellationToken, goal: tokio::sync::watch::Sender<Option<u64>>) {
    let mut ticks = tokio::time::interval(WRITE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = 0;
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        let number = last + 1;
        let written = store.create(json!({
            "kind": "ConfigMap", "apiVersion": "v1",
            "metadata": {"namespace": NAMESPACE, "name": format!("write-{number:06}")},
            "data": {sequence::FIELD: number.to_string()},
        }));
        match written {
            Ok(_) => last = number,
            Err(error) => tracing::error!(%error, number, "cannot write"),
        }
    }
    goal.send_replace(Some(last));
}
