//! The load: open-loop clients that never retry.
//!
//! Requests are due by a fixed timetable, and waits are counted from the due time. So a slow answer
//! delays no other request and hides no wait (no coordinated omission). A single seed decides the
//! requests of each client and their times (`timetable`). Clients only log observations:
//!
//! * `fresh` opens new connections, and `kept` keeps them.
//! * `watch` counts the objects that `writer` writes. `informer` keeps a copy of these objects, or
//!   of objects that no client writes. `watch` and `informer` list objects and then watch the
//!   objects (`follow`).
//! * `storm` is a crowd of clients that connect at one moment, and retry.
//! * `anonymous` runs only `fresh`, and `known` runs every kind of client, against any apiserver,
//!   for scripts. `closed` measures an apiserver's speed without a timetable.
//! * `dial` makes a client's connection, and `observe` sees how the instance ends it.
//!
//! The **control** is a few clients of each kind that dial every instance at its own address. If
//! the control's connections end, the cause is the instance itself, not a shim or proxy. A real
//! apiserver has to `grant` the clients their rights.
//!
//! The load has a thread of its own, so that the rest of the rehearsal cannot change its pace.
//! `timer` records when the thread could not run in time.

mod anonymous;
mod closed;
mod dial;
mod follow;
mod fresh;
mod grant;
mod informer;
mod kept;
mod known;
mod objects;
mod observe;
mod sequence;
mod storm;
mod timer;
mod timetable;
mod watch;
mod writer;

pub use anonymous::{Anonymous, Connection};
pub use closed::Closed;
pub use dial::Target;
pub use grant::grant_client_rights;
pub use known::Known;
pub(crate) use storm::StormClients;

use crate::config::{ANSWER_TIMEOUT, LoadPlan};
use crate::record::{
    event::{
        Answer, Attempt, ConnectionKind, Dialed, EventKind, Protocol, StreamEnd, StreamId,
        StreamKind,
    },
    log::Recorder,
    stamp::Stamp,
};
use dial::{Link, SendError};
use informer::Scope;
use objects::Tag;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use timetable::{Ask, Entry, Seed};
use tokio::sync::{mpsc, oneshot, watch as channel};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use writer::{Goal, Ledger, Writer};

/// The instances that joined, in the order of joining.
pub type Instances = Vec<Joined>;

/// An instance that can be dialled past the shims.
#[derive(Debug, Clone)]
pub struct Joined {
    /// When the instance joined. An instance that was restarted joins again.
    pub at: Stamp,
    pub name: String,
    pub address: SocketAddr,
}

impl Joined {
    /// An instance that joined now.
    pub fn at_current_time(name: &str, address: SocketAddr) -> Self {
        Self {
            at: Stamp::now(),
            name: name.to_owned(),
            address,
        }
    }
}

/// Period over which the starts of watches and informers are spread.
const START_SPREAD: Duration = Duration::from_millis(500);

/// Number of clients that keep a copy of all objects: one for each HTTP version.
const INFORMERS: u64 = 2;

/// Number of clients that keep a copy of objects without writes: for each of the two quiet scopes,
/// one client for each HTTP version.
const QUIET_INFORMERS: u64 = 4;

/// Number of kept connections that the control has to each instance. The control has as many
/// watches. Two of each use HTTP/1.1, and two HTTP/2.
const CONTROL_CONNECTIONS: u64 = 4;

/// The running clients. Dropping the value ends them without an entry in the log.
#[derive(Debug)]
pub struct Load {
    stop: CancellationToken,
    gone: CancellationToken,
    over: oneshot::Receiver<Result<(), String>>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    /// Writes the objects for reads, and starts all clients.
    pub async fn start(
        plan: &LoadPlan,
        target: &Target,
        instances: &channel::Receiver<Instances>,
        recorder: &Arc<Recorder>,
    ) -> Result<Self, String> {
        let (stop, gone) = (CancellationToken::new(), CancellationToken::new());
        let client = Client {
            target: target.clone(),
            recorder: Arc::clone(recorder),
            tag: Tag::from_current_time(),
            ledger: Ledger::default(),
            catch_up: plan.catch_up,
            stop: stop.clone(),
            control: None,
        };
        let (begin, begun) = oneshot::channel();
        let (end, over) = oneshot::channel();
        let run = run(*plan, client, instances.clone(), begin);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(|e| format!("no runtime: {e}"))?;
        let token = gone.clone();
        let thread = std::thread::Builder::new()
            .name("load".into())
            .spawn(move || {
                if let Some(result) = runtime.block_on(token.run_until_cancelled(run)) {
                    let _ = end.send(result);
                }
            });
        let thread = thread.map_err(|e| format!("no thread: {e}"))?;
        let mut load = Self {
            stop,
            gone,
            over,
            thread: Some(thread),
        };
        match begun.await {
            Ok(()) => Ok(load),
            Err(_) => Err(load.wait_for_clients().await.err().unwrap_or_default()),
        }
    }

    /// Ends the timetables, and waits for outstanding answers and until each watch has seen the
    /// last write. The error says how many clients panicked.
    pub async fn finish(mut self) -> Result<(), String> {
        self.stop.cancel();
        self.wait_for_clients().await
    }

    async fn wait_for_clients(&mut self) -> Result<(), String> {
        let result = (&mut self.over).await;
        result.unwrap_or_else(|_| {
            Err("the thread of the rehearsal's clients panicked: a bug in berth".to_owned())
        })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.gone.cancel();
        if let Some(thread) = self.thread.take() {
            // The thread ends at once, because `gone` cancels everything that it waits for.
            let _ = thread.join();
        }
    }
}

/// Runs the whole load on its own thread.
async fn run(
    plan: LoadPlan,
    client: Client,
    mut instances: channel::Receiver<Instances>,
    begin: oneshot::Sender<()>,
) -> Result<(), String> {
    let seed = Seed(plan.seed);
    let mut writer = Writer::new(client.clone(), client.tag.clone(), instances.clone());
    writer.write_stock().await?;

    let (goal_sender, goal) = channel::channel(None::<Arc<Goal>>);
    let mut timer = JoinSet::new();
    timer.spawn(timer::run(Arc::clone(&client.recorder)));
    let (mut timed, mut followers, mut controls) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
    // Quiet informers watch before anything else happens, so that their revision is older than any
    // later instance.
    let (begin_quiet, mut quiet_begun) = mpsc::channel(1);
    for index in 0..QUIET_INFORMERS {
        let scope = if index < QUIET_INFORMERS / 2 {
            Scope::QuietNamespace
        } else {
            Scope::QuietResource
        };
        followers.spawn(informer::run(
            client.clone(),
            index,
            scope,
            goal.clone(),
            Some(begin_quiet.clone()),
        ));
    }
    drop(begin_quiet);
    let _ = tokio::time::timeout(ANSWER_TIMEOUT, quiet_begun.recv()).await;

    for index in 0..u64::from(plan.watches) {
        let watch = watch::run(client.clone(), index, goal.clone());
        followers.spawn(run_after(seed.draw_start(b'w', index, START_SPREAD), watch));
    }
    for index in 0..INFORMERS {
        let informer = informer::run(client.clone(), index, Scope::All, goal.clone(), None);
        followers.spawn(run_after(
            seed.draw_start(b'i', index, START_SPREAD),
            informer,
        ));
    }
    for index in 0..u64::from(plan.clients) {
        timed.spawn(kept::run(client.clone(), seed, index));
    }
    timed.spawn(fresh::run(client.clone(), seed, plan.rate));
    let writer = tokio::spawn(writer.run());
    let _ = begin.send(());

    let mut controlled = BTreeSet::new();
    let (_never, no_goal) = channel::channel(None);
    while !client.stop.is_cancelled() {
        for joined in instances.borrow_and_update().iter() {
            if !controlled.insert((joined.at, joined.name.clone())) {
                continue;
            }
            let control = client.for_control(joined);
            for index in 0..CONTROL_CONNECTIONS {
                controls.spawn(kept::run(control.clone(), seed, index));
                controls.spawn(watch::run(control.clone(), index, no_goal.clone()));
            }
        }
        let changed = client.stop.run_until_cancelled(instances.changed()).await;
        if matches!(changed, Some(Err(_))) {
            client.stop.cancelled().await;
        }
    }

    let mut broken = 0;
    broken += join_clients(&mut timed).await;
    controls.shutdown().await;
    match writer.await {
        Ok(writer) => {
            let (goal, trouble) = writer.find_goal().await;
            if let Some(trouble) = trouble {
                client.recorder.add_trouble(trouble);
            }
            goal_sender.send_replace(Some(Arc::new(goal)));
        }
        Err(_) => broken += 1,
    }
    broken += join_clients(&mut followers).await;
    if broken == 0 {
        Ok(())
    } else {
        Err(format!(
            "{broken} clients of the rehearsal panicked: a bug in berth"
        ))
    }
}

async fn run_after(pause: Duration, client: impl Future<Output = ()>) {
    tokio::time::sleep(pause).await;
    client.await;
}

/// Waits for clients, and returns how many of them panicked.
async fn join_clients(clients: &mut JoinSet<()>) -> u32 {
    let mut broken = 0;
    while let Some(ended) = clients.join_next().await {
        broken += u32::from(ended.is_err());
    }
    broken
}

/// The parts that every kind of client needs: its server, the log, and the signals from the load.
#[derive(Clone)]
struct Client {
    target: Target,
    recorder: Arc<Recorder>,
    tag: Tag,
    ledger: Ledger,
    catch_up: Duration,
    stop: CancellationToken,
    /// `Some` for a client of the control, which dials this instance directly, and only once.
    control: Option<Joined>,
}

impl Client {
    /// Makes a client of the control, which dials the given instance directly.
    fn for_control(&self, instance: &Joined) -> Self {
        let target = self.target.with_instance(instance);
        Self {
            target,
            control: Some(instance.clone()),
            ..self.clone()
        }
    }

    /// Name of a client in the log, such as `kept-3`.
    fn name(&self, kind: &str, index: u64) -> String {
        match &self.control {
            Some(joined) => format!("control-{}-{:x}-{kind}-{index}", joined.name, joined.at.0),
            None => format!("{kind}-{index}"),
        }
    }

    fn record_attempt(
        &self,
        kind: ConnectionKind,
        ask: Ask,
        stream: &StreamId,
        due: Stamp,
        answer: Answer,
    ) {
        let writes = ask == Ask::Create;
        let attempt = Attempt {
            kind,
            writes,
            stream: stream.clone(),
            due,
            done: Stamp::now(),
            answer,
        };
        self.recorder.add_at(
            attempt.done,
            stream,
            EventKind::Attempt(self.dialed_address(), attempt),
        );
    }

    /// Logs the end of a connection that the client wanted to keep.
    fn record_end(&self, end: StreamEnd) {
        self.recorder.add_at(
            end.at,
            &end.stream.clone(),
            EventKind::StreamEnd(self.dialed_address(), end),
        );
    }

    fn dialed_address(&self) -> Dialed {
        self.control.as_ref().map_or(Dialed::Front, |joined| {
            Dialed::Instance(joined.name.clone())
        })
    }

    /// Connects and sends a first request: an attempt of kind [`ConnectionKind::New`]. Returns the
    /// link if the request was answered.
    async fn open_connection(
        &self,
        protocol: Protocol,
        stream: StreamId,
        entry: Entry,
        due: Stamp,
    ) -> Option<Link> {
        // The time limit begins now, not at `due`: a client that waited for the answer to its
        // previous request is late, but its next request has not failed yet.
        let opened = dial::limit_time(ANSWER_TIMEOUT, async {
            let mut link = self.target.dial(protocol, stream.clone()).await?;
            let failure = match self.ask(&mut link, entry).await {
                Ok(answer) => return Ok((link, answer)),
                Err(SendError::Died(failure)) => failure,
                Err(SendError::NeverSent) => link.wait_for_end().await,
            };
            let end = link.describe_end(StreamKind::New, failure.clone(), true, false);
            self.record_end(end);
            Err(failure)
        });
        let (link, answer) = match opened.await {
            Ok((link, answer)) => (Some(link), answer),
            Err(failure) => (None, Answer::Failed(failure)),
        };
        self.record_attempt(ConnectionKind::New, entry.ask, &stream, due, answer);
        link
    }

    /// Sends a request and reads the whole answer.
    async fn ask(&self, link: &mut Link, entry: Entry) -> Result<Answer, SendError> {
        let name = self.tag.created_name(&link.stream, entry.number);
        let response = link.send(self.tag.make_request(entry.ask, &name)).await?;
        let status = response.status();
        dial::read_body(response.into_body())
            .await
            .map_err(SendError::Died)?;
        if entry.ask == Ask::Create && status.is_success() {
            self.ledger.add_name(name);
        }
        Ok(link.to_answer(status))
    }
}

/// A moment on two clocks: tokio's, for timers, and the clock of stamps.
#[derive(Debug, Clone, Copy)]
struct Due {
    instant: Instant,
    stamp: Stamp,
}

impl Due {
    fn now() -> Self {
        Self {
            instant: Instant::now(),
            stamp: Stamp::now(),
        }
    }

    fn plus(self, after: Duration) -> Self {
        Self {
            instant: self.instant + after,
            stamp: self.stamp.plus(after),
        }
    }
}
