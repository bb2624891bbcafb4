//! A connection, from accept to its end.
//!
//! `attempt` finds an instance and sends it the client's first bytes, again if necessary, from the
//! source address that names the client ([`source`]). `replay_buffer` keeps these bytes, and
//! `client_hello` decides whether they are complete. `waiting` holds a client before an attempt.
//! `injection` passes the client's socket to the instance instead, where possible. After the first
//! byte `copy` moves bytes both ways, with `bulk` for large transfers. This file has the rest:
//! counters, the log line, and the reset of connections that the end of the shim cuts (`abort`).
//! TLS is never terminated.

mod abort;
mod attempt;
pub(crate) mod bulk;
pub mod client_hello;
mod copy;
mod injection;
mod opening;
pub(crate) mod outcome;
mod replay_buffer;
pub mod source;
mod waiting;

use crate::backend::{BackendInstance, Table};
use crate::gate::Gate;
use crate::metrics::WorkerStats;
use crate::share::Sharing;
use crate::state::ShimState;
use abort::AbortOnDrop;
use attempt::{ExchangedBytes, ReachedInstance};
use berth_node::instance_id::InstanceId;
use berth_os::explained;
use berth_os::locks;
use opening::Opening;
use prometheus_client::metrics::histogram::Histogram;
use replay_buffer::ReplayBuffer;
use std::net::{SocketAddr, TcpStream as StdTcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot, watch};

pub use outcome::Outcome;
use source::Sources;

/// True once a passed connection could not be counted as open. Only the first such error is logged.
static UNCOUNTED: AtomicBool = AtomicBool::new(false);

/// The report that an instance refused a connection.
#[derive(Debug, Clone)]
pub struct Refusal {
    pub id: InstanceId,
    /// Epoch of the instance at the refusal. The refusal is ignored if the instance has a later
    /// epoch now.
    pub epoch: u64,
}

/// An accepted connection that a sibling should serve.
#[derive(Debug)]
pub struct PassRequest {
    /// A duplicate of the client's socket.
    pub client: OwnedFd,
    /// The bytes that the client sent.
    pub sent: Vec<u8>,
    /// If set, only the sibling with this socket gets the offer, and must reply immediately.
    pub only: Option<Arc<Path>>,
    /// Gets the result: true if a sibling has the connection.
    pub taken: oneshot::Sender<bool>,
}

/// State that the connections of a worker share.
#[derive(Debug)]
pub struct Context {
    pub table: watch::Receiver<Arc<Table>>,
    pub hold: Duration,
    /// Limits the TLS handshakes in flight. All workers have the same gate.
    pub gate: Option<Arc<Gate>>,
    /// Divides new connections between this shim and a sibling. All workers have the same shares.
    pub share: Arc<Sharing>,
    /// Source addresses of connections to instances, shared by all workers.
    pub sources: Arc<Sources>,
    /// True if instances of this host with other addresses are dialled from loopback, too:
    /// connections from loopback are not steered.
    pub from_loopback: bool,
    /// True if clients' first bytes stay in the kernel until they are relayed, so that a client may
    /// be passed to an instance as a socket.
    pub peeks: bool,
    /// Limits the held clients: each of them has a permit. All workers have the same limit.
    pub held: Arc<Semaphore>,
    pub refusals: mpsc::UnboundedSender<Refusal>,
    pub stats: Arc<WorkerStats>,
    pub connect_seconds: Histogram,
    /// Seconds from a ClientHello to the own instance's first byte.
    pub first_byte_seconds: Histogram,
    /// Notified whenever a connection ends.
    pub ended: Arc<Notify>,
    /// State of the shim. While the shim leaves, a ready sibling's instance comes before the own
    /// instance.
    pub state: watch::Receiver<ShimState>,
    /// True if the shim has no own instance: connections go to a sibling only when the shim leaves.
    pub stays: bool,
    /// Takes connections that a sibling should serve to the control plane, which knows the
    /// siblings.
    pub passes: mpsc::UnboundedSender<PassRequest>,
    pub log_connections: bool,
}

impl Context {
    fn report_refused(&self, instance: &BackendInstance) {
        // The message is lost only if the shim is ending.
        let _ = self.refusals.send(Refusal {
            id: instance.id.clone(),
            epoch: instance.epoch,
        });
    }

    /// Counts the own instance's time to answer a ClientHello. `after` is `None` if the instance
    /// did not answer.
    fn count_answer(&self, instance: &BackendInstance, after: Option<Duration>) {
        match after {
            _ if !instance.own => {}
            Some(after) => self.first_byte_seconds.observe(after.as_secs_f64()),
            None => drop(self.stats.empty.fetch_add(1, Relaxed)),
        }
    }
}

/// A connection's handle on its worker's state. The connection counts as open from its distribution
/// to the worker until the drop of this handle, however it ends.
#[derive(Debug)]
pub struct OpenConnection {
    context: Arc<Context>,
    pending: Option<PendingConnection>,
}

impl OpenConnection {
    #[must_use]
    pub fn new(context: &Arc<Context>) -> Self {
        context.stats.open.fetch_add(1, Relaxed);
        Self {
            context: context.clone(),
            pending: Some(PendingConnection::new(context.stats.clone())),
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.context.stats.open.fetch_sub(1, Relaxed);
        self.context.ended.notify_one();
    }
}

/// Counts a connection as pending: the client has sent something and has no answer. Between
/// distribution and first read, the connection is assumed to be pending.
#[derive(Debug)]
struct PendingConnection {
    stats: Arc<WorkerStats>,
    is: bool,
}

impl PendingConnection {
    fn new(stats: Arc<WorkerStats>) -> Self {
        stats.pending.fetch_add(1, Relaxed);
        Self { stats, is: true }
    }

    fn set_pending(&mut self, is: bool) {
        if std::mem::replace(&mut self.is, is) != is {
            let pending = &self.stats.pending;
            _ = if is {
                pending.fetch_add(1, Relaxed)
            } else {
                pending.fetch_sub(1, Relaxed)
            };
        }
    }
}

impl Drop for PendingConnection {
    fn drop(&mut self) {
        self.set_pending(false);
    }
}

/// Counts bytes for the connection and for the worker.
struct ByteCounter<'a> {
    stats: &'a WorkerStats,
    up: u64,
    down: u64,
}

impl ByteCounter<'_> {
    fn count_bytes_up(&mut self, bytes: usize) {
        self.up += bytes as u64;
        self.stats.bytes_up.fetch_add(bytes as u64, Relaxed);
    }

    fn count_bytes_down(&mut self, bytes: usize) {
        self.down += bytes as u64;
        self.stats.bytes_down.fetch_add(bytes as u64, Relaxed);
    }
}

/// Relays an accepted connection to its end.
///
/// `sent` has the bytes that a sibling read from the client before passing the connection on.
pub async fn relay_client(
    mut open: OpenConnection,
    client: StdTcpStream,
    peer: SocketAddr,
    sent: Option<Vec<u8>>,
) {
    let pending = open.pending.take();
    let context = &*open.context;
    let started = Instant::now();
    let mut bytes = ByteCounter {
        stats: &context.stats,
        up: 0,
        down: 0,
    };
    let mut instance = None;
    let mut source = None;
    let outcome = 'served: {
        let Ok(kept) = ReplayBuffer::read(&client, sent, pending, context.peeks) else {
            break 'served Outcome::ClientReset;
        };
        let mut client = match TcpStream::from_std(client) {
            Ok(client) => AbortOnDrop::new(client),
            Err(error) => {
                tracing::warn!(
                    code = %explained::CANNOT_SERVE,
                    client = %peer,
                    %error,
                    "cannot serve an accepted connection"
                );
                break 'served Outcome::Failed;
            }
        };
        // The future is boxed, so that state for the time before the first byte is no part of a
        // connection's memory for the rest of its life.
        let outcome = match Box::pin(
            Opening::new(context, &mut client, peer, kept).reach_instance(),
        )
        .await
        {
            Err(outcome) => outcome,
            Ok(ReachedInstance::Injected(id)) => {
                instance = Some(id);
                // From here on, the instance alone closes the socket.
                if let Err(error) = locks::lock_socket(&*client)
                    && !UNCOUNTED.swap(true, Relaxed)
                {
                    tracing::warn!(%error, "connections of instances are not counted as open: `berth status` shows too few open connections");
                }
                Outcome::Injected
            }
            Ok(ReachedInstance::Connected {
                mut backend,
                source: _in_use,
                instance: id,
                exchanged,
            }) => {
                if context.log_connections || tracing::enabled!(tracing::Level::DEBUG) {
                    source = backend.local_addr().ok();
                    instance = Some(id);
                }
                bytes.count_bytes_up(exchanged.sent);
                let ExchangedBytes { up, down, .. } = exchanged;
                let outcome =
                    copy::copy_streams(&mut client, &mut backend, up, down, &mut bytes).await;
                backend.close();
                outcome
            }
        };
        client.close();
        outcome
    };
    context.stats.count_ended(outcome);
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
    if context.log_connections {
        log!(info);
    } else {
        log!(debug);
    }
}
