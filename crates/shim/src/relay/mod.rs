//! One connection, from accept to its end.
//!
//! `opening` finds an instance and brings the client's first bytes there, as often as it takes, from the address that
//! [`source`] names the client by. What they are is in `replay_buffer` (`client_hello`: when they are all there), what a
//! client waits for before in `waiting`. `copy` moves bytes both ways from then on, with `bulk` where they are many; here
//! is the frame around both: counting, the line of log, and the reset of what the end of the shim cuts (`abort`). TLS is
//! never opened.

mod abort;
pub(crate) mod bulk;
pub mod client_hello;
mod copy;
mod opening;
pub(crate) mod outcome;
mod replay_buffer;
pub mod source;
mod waiting;

use crate::backend::{Instance, Table};
use crate::gate::Gate;
use crate::metrics::WorkerStats;
use abort::AbortOnDrop;
use berth_node::instance::InstanceId;
use berth_node::terms::Speedup;
use berth_os::socket::Keepalive;
use prometheus_client::metrics::histogram::Histogram;
use replay_buffer::ReplayBuffer;
use std::net::{SocketAddr, TcpStream as StdTcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};

pub use outcome::Outcome;
use source::Sources;

/// An instance refused a connection in an epoch.
#[derive(Debug, Clone)]
pub struct Refusal {
    pub id: InstanceId,
    /// In which epoch; one that is over means nothing.
    pub epoch: u64,
}

/// A connection that was accepted here and that the own instance cannot serve.
#[derive(Debug)]
pub struct Pass {
    /// A duplicate of the client's socket.
    pub client: OwnedFd,
    pub said: Vec<u8>,
    /// Rather not at all than later.
    pub at_once: bool,
    /// Told whether a sibling has it.
    pub taken: oneshot::Sender<bool>,
}

/// The way to a sibling.
#[derive(Debug, Clone)]
pub struct Passing {
    /// Whether what the own instance cannot serve goes to a sibling. Not so for a node shim that stays:
    /// it has no instance of its own.
    pub on: Arc<AtomicBool>,
    /// Whether the shim was told to leave: then a ready sibling's instance comes before the own one.
    pub leaving: watch::Receiver<bool>,
    /// To the control plane, which knows the siblings.
    pub to: mpsc::UnboundedSender<Pass>,
}

impl Passing {
    /// Gives a connection to a sibling, or only if that can be done at once. True: it has it, and what is here may be dropped.
    async fn pass(&self, client: &mut AbortOnDrop, said: &[u8], at_once: bool) -> bool {
        let Ok(duplicate) = client.as_fd().try_clone_to_owned() else { return false };
        let (taken, answer) = oneshot::channel();
        client.set_abort(false);
        let pass = Pass { client: duplicate, said: said.to_vec(), at_once, taken };
        let passed = self.to.send(pass).is_ok() && answer.await.unwrap_or(false);
        client.set_abort(!passed);
        passed
    }
}

/// What the connections of one worker share.
#[derive(Debug)]
pub struct Context {
    pub table: watch::Receiver<Arc<Table>>,
    /// For the legs towards instances; accepted sockets inherit theirs from the listener.
    pub keepalive: Keepalive,
    pub hold: Duration,
    /// Who is opened when, all workers together.
    pub gate: Option<Arc<Gate>>,
    /// Source addresses towards instances, all workers together.
    pub sources: Arc<Sources>,
    /// Whether instances of this host are dialled from loopback that have another address: what comes from there is not steered.
    pub from_loopback: bool,
    /// Places for clients that wait, all workers together.
    pub held: Arc<Semaphore>,
    pub refusals: mpsc::UnboundedSender<Refusal>,
    pub stats: Arc<WorkerStats>,
    pub connect_seconds: Histogram,
    /// Told whenever a connection ended.
    pub ended: Arc<Notify>,
    /// Where connections can be passed on.
    pub passing: Passing,
    pub log_connections: bool,
    pub speedup: Speedup,
}

impl Context {
    fn report_refused(&self, instance: &Instance) {
        // Nobody listens any more when the shim ends.
        let _ = self.refusals.send(Refusal { id: instance.id.clone(), epoch: instance.epoch });
    }
}

/// What a connection shares with the others of its worker. It counts as open from when it is distributed
/// to the worker until this is dropped, however it ends.
#[derive(Debug)]
pub struct Open {
    context: Arc<Context>,
    pending: Option<Pending>,
}

impl Open {
    #[must_use]
    pub fn new(context: &Arc<Context>) -> Self {
        context.stats.open.fetch_add(1, Relaxed);
        Self { context: context.clone(), pending: Some(Pending::new(context.stats.clone())) }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.context.stats.open.fetch_sub(1, Relaxed);
        self.context.ended.notify_one();
    }
}

/// Counts a connection as pending: its client said something and has no answer. From when it is distributed until
/// it is read from, it may have.
#[derive(Debug)]
struct Pending {
    stats: Arc<WorkerStats>,
    is: bool,
}

impl Pending {
    fn new(stats: Arc<WorkerStats>) -> Self {
        stats.pending.fetch_add(1, Relaxed);
        Self { stats, is: true }
    }

    fn set(&mut self, is: bool) {
        if std::mem::replace(&mut self.is, is) != is {
            let pending = &self.stats.pending;
            _ = if is { pending.fetch_add(1, Relaxed) } else { pending.fetch_sub(1, Relaxed) };
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Counts bytes for the connection and for the worker.
struct Bytes<'a> {
    stats: &'a WorkerStats,
    up: u64,
    down: u64,
}

impl Bytes<'_> {
    fn up(&mut self, bytes: usize) {
        self.up += bytes as u64;
        self.stats.bytes_up.fetch_add(bytes as u64, Relaxed);
    }

    fn down(&mut self, bytes: usize) {
        self.down += bytes as u64;
        self.stats.bytes_down.fetch_add(bytes as u64, Relaxed);
    }
}

/// Relays one accepted connection to its end.
///
/// `said` is what a sibling that accepted it and passed it on read of the client already.
pub async fn serve(mut open: Open, client: StdTcpStream, peer: SocketAddr, said: Option<Vec<u8>>) {
    let pending = open.pending.take();
    let context = &*open.context;
    let started = Instant::now();
    let mut bytes = Bytes { stats: &context.stats, up: 0, down: 0 };
    let mut instance = None;
    let mut source = None;
    let outcome = 'served: {
        let Ok(kept) = ReplayBuffer::read(&client, said, pending) else { break 'served Outcome::ClientReset };
        let mut client = match TcpStream::from_std(client) {
            Ok(client) => AbortOnDrop::new(client),
            Err(error) => {
                tracing::warn!(client = %peer, %error, "cannot serve an accepted connection");
                break 'served Outcome::Failed;
            }
        };
        // Boxed: what is needed only until the first byte is not part of a connection's memory
        // for the rest of its life.
        let outcome = match Box::pin(opening::open(context, &mut client, peer, kept)).await {
            Err(outcome) => outcome,
            Ok(opening::Opened { mut backend, source: _in_use, instance: id, said }) => {
                if context.log_connections || tracing::enabled!(tracing::Level::DEBUG) {
                    source = backend.local_addr().ok();
                    instance = Some(id);
                }
                bytes.up(said.sent);
                let outcome =
                    copy::copy(&mut client, &mut backend, said.up, said.down, &mut bytes, context.speedup).await;
                backend.close();
                outcome
            }
        };
        client.close();
        outcome
    };
    context.stats.ended(outcome);
    macro_rules! log {
        ($level:ident) => {
            tracing::$level!(
                client = %peer,
                source = source.map(tracing::field::display),
                instance = instance.as_ref().map(tracing::field::display),
                up = bytes.up,
                down = bytes.down,
                ms = started.elapsed().as_millis() as u64,
                outcome = outcome.as_str(),
                "connection ended"
            )
        };
    }
    if context.log_connections { log!(info) } else { log!(debug) }
}
