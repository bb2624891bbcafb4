//! From the kernel's accept queue to a relaying worker: accept loops, limits and back-off.
//!
//! Each listener has a task, all on the first worker. A connection goes to the worker with the
//! fewest connections, with a preference of [`MAX_IMBALANCE`] for the first worker. (Two epolls on
//! duplicates of a listener share very unevenly: 1,748 to 252 were seen.) Only a listener that no
//! longer listens ends its loop; errors of accept(2) do not.

use crate::metrics::Metrics;
use crate::relay::{self, Context, OpenConnection};
use berth_os::explained;
use berth_os::socket;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, watch};

/// Number of connections to accept before other tasks of the worker get their turn. Accepting them
/// takes some 3 ms. When all clients come at one moment, a client that finds no room in the
/// kernel's queue tries again only after a second.
const MAX_BATCH: usize = 1024;

/// Longest pause of an accept loop after descriptors or memory ran out. A connection that ends cuts
/// the pause short.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// How long a shim without siblings may wait for descriptors, to accept the clients that are left
/// in a queue. After this time these clients give up (client-go: 10 s for a handshake). Connections
/// that hold the descriptors are not ended.
const MAX_LAST_PAUSE: Duration = Duration::from_secs(10);

/// How many more connections the first worker may have than any other worker, while clients are
/// passed as sockets. A passed client leaves the shim after some milliseconds, and waking another
/// worker costs as much as passing the client.
const MAX_IMBALANCE: u64 = 16;

/// Kinds of errors of accept(2). Each kind tells the accept loop what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcceptError {
    Empty,
    /// The client is gone, or the network reported an error for the client: accept the next client.
    Client,
    /// No descriptor or memory left: wait.
    Exhausted,
    /// The socket no longer listens.
    Closed,
    /// Unknown to accept(2): wait, so as not to spin.
    Unknown,
}

impl AcceptError {
    pub(crate) fn from_io_error(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Self::Empty,
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => Self::Exhausted,
            Some(
                libc::ECONNABORTED
                | libc::EINTR
                | libc::EPERM
                | libc::EPROTO
                | libc::ENETDOWN
                | libc::ENOPROTOOPT
                | libc::EHOSTDOWN
                | libc::ENONET
                | libc::EHOSTUNREACH
                | libc::EOPNOTSUPP
                | libc::ENETUNREACH
                | libc::ETIMEDOUT,
            ) => Self::Client,
            Some(libc::EINVAL | libc::EBADF | libc::ENOTSOCK) => Self::Closed,
            _ => Self::Unknown,
        }
    }

    /// The label of the metric `berth_accept_errors_total{kind}`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Client => "client",
            Self::Exhausted => "exhausted",
            Self::Closed => "closed",
            Self::Unknown => "unknown",
        }
    }
}

/// Instructions for an accept loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accepting {
    Yes,
    /// Stop: another shim accepts.
    No,
    /// Accept the queued clients and stop: no other shim is left.
    Rest,
}

#[derive(Debug)]
struct AcceptedConnection {
    open: OpenConnection,
    client: TcpStream,
    peer: SocketAddr,
    sent: Option<Vec<u8>>,
}

/// The queue of accepted connections for a worker. A new connection wakes the worker's thread only
/// if the queue was empty. A task that is spawned from another thread always wakes the thread (a
/// write to an eventfd).
#[derive(Debug)]
struct WorkerQueue {
    to: mpsc::UnboundedSender<AcceptedConnection>,
    context: Arc<Context>,
}

impl WorkerQueue {
    fn new(worker: &Handle, context: Context) -> Self {
        let (to, mut queue) = mpsc::unbounded_channel();
        worker.spawn(async move {
            while let Some(AcceptedConnection {
                open,
                client,
                peer,
                sent,
            }) = queue.recv().await
            {
                tokio::spawn(relay::relay_client(open, client, peer, sent));
            }
        });
        Self {
            to,
            context: Arc::new(context),
        }
    }
}

/// Distributes accepted connections to workers, up to a limit.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    first: Handle,
    queues: Vec<WorkerQueue>,
    metrics: Arc<Metrics>,
    ended: Arc<Notify>,
    limit: u64,
    /// True if an accept has failed for a lasting reason since the listen queue was last empty.
    /// Such a failure is logged once, not at each attempt.
    troubled: AtomicBool,
}

impl Dispatcher {
    /// Makes a dispatcher to at least one worker, with a context for each, for at most `limit`
    /// connections at once.
    pub(crate) fn new(
        workers: &[Handle],
        contexts: impl Iterator<Item = Context>,
        metrics: Arc<Metrics>,
        ended: Arc<Notify>,
        limit: u64,
    ) -> Self {
        let queues = workers
            .iter()
            .zip(contexts)
            .map(|(worker, context)| WorkerQueue::new(worker, context))
            .collect();
        Self {
            first: workers[0].clone(),
            queues,
            metrics,
            ended,
            limit,
            troubled: AtomicBool::new(false),
        }
    }

    /// Accepts from a listener while `accepting` allows it, or until the listener no longer
    /// listens. Runs on the first worker, and calls `runs` when nothing can prevent accepting any
    /// more.
    pub(crate) fn spawn_accept_loop(
        self: &Arc<Self>,
        listener: Arc<OwnedFd>,
        accepting: watch::Receiver<Accepting>,
        runs: impl FnOnce() + Send + 'static,
    ) -> tokio::task::JoinHandle<io::Result<()>> {
        let this = self.clone();
        self.first
            .spawn(async move { this.accept_clients(listener, accepting, runs).await })
    }

    async fn accept_clients(
        &self,
        listener: Arc<OwnedFd>,
        mut accepting: watch::Receiver<Accepting>,
        runs: impl FnOnce(),
    ) -> io::Result<()> {
        let listener = berth_os::make_awaitable(listener, Interest::READABLE)?;
        runs();
        loop {
            let mut ready = tokio::select! {
                biased;
                _ = accepting.wait_for(|now| *now != Accepting::Yes) => break,
                ready = listener.readable() => ready?,
            };
            match self.accept_batch(&listener, self.limit) {
                None => tokio::task::yield_now().await,
                Some(AcceptError::Empty) => ready.clear_ready(),
                Some(AcceptError::Closed) => return Ok(()),
                Some(_) => tokio::select! {
                    _ = accepting.wait_for(|now| *now != Accepting::Yes) => break,
                    () = self.pause_after_error() => {}
                },
            }
        }
        // If no sibling has a duplicate of this listener, closing the listener resets the clients
        // in its queue. So these clients are accepted first. After the time limit they would not
        // wait any longer. The listener is closed on this thread, within microseconds: another
        // thread would have to wake up first.
        let until = tokio::time::Instant::now() + MAX_LAST_PAUSE;
        while *accepting.borrow() == Accepting::Rest {
            match self.accept_batch(&listener, u64::MAX) {
                None => tokio::task::yield_now().await,
                Some(AcceptError::Empty | AcceptError::Closed) => break,
                Some(_) if tokio::time::Instant::now() >= until => break,
                Some(_) => self.pause_after_error().await,
            }
        }
        drop(listener);
        Ok(())
    }

    /// Waits for a while, or until a connection ends and releases its descriptors.
    async fn pause_after_error(&self) {
        tokio::select! {
            () = self.ended.notified() => {}
            () = tokio::time::sleep(MAX_PAUSE) => {}
        }
    }

    /// True if the limit of connections is reached.
    pub(crate) fn is_full(&self) -> bool {
        self.metrics.open_connections() >= self.limit
    }

    /// Relays a connection that a sibling accepted.
    pub(crate) fn take_over_client(&self, client: TcpStream, peer: SocketAddr, sent: Vec<u8>) {
        self.dispatch_client(client, peer, Some(sent));
    }

    fn dispatch_client(&self, client: TcpStream, peer: SocketAddr, sent: Option<Vec<u8>>) {
        let passes = |context: &Context| {
            context.peeks
                && context
                    .table
                    .borrow()
                    .pick_instance(|_| true)
                    .is_some_and(|picked| picked.link.is_some())
        };
        let near = if self
            .queues
            .first()
            .is_some_and(|queue| passes(&queue.context))
        {
            MAX_IMBALANCE
        } else {
            0
        };
        let open = |(number, queue): &(usize, &WorkerQueue)| {
            queue.context.stats.open.load(Relaxed) + if *number > 0 { near } else { 0 }
        };
        if let Some((_, queue)) = self.queues.iter().enumerate().min_by_key(open) {
            // If the worker has ended, the shim is ending, and this connection ends with it.
            let _ = queue.to.send(AcceptedConnection {
                open: OpenConnection::new(&queue.context),
                client,
                peer,
                sent,
            });
        }
    }

    /// Accepts up to [`MAX_BATCH`] clients, while there are fewer connections than `limit`. Returns
    /// why it stopped early.
    fn accept_batch(&self, listener: &AsyncFd<Arc<OwnedFd>>, limit: u64) -> Option<AcceptError> {
        for _ in 0..MAX_BATCH {
            if self.metrics.open_connections() >= limit {
                if !socket::is_readable(listener.get_ref()) {
                    // No client waits.
                    return Some(AcceptError::Empty);
                }
                // At the limit, clients that should go first wait in the kernel's queue, too. So a
                // client that waits for its turn at the gate is rejected, and another client is
                // accepted.
                let gate = self
                    .queues
                    .first()
                    .and_then(|queue| queue.context.gate.as_ref());
                if gate.is_some_and(|gate| gate.make_room()) {
                    self.metrics.count_accept_error("limit");
                    return Some(AcceptError::Exhausted);
                }
                self.report_error(
                    "limit",
                    &"--max-connections is reached: further clients wait in the backlog",
                );
                return Some(AcceptError::Exhausted);
            }
            match socket::accept(listener.as_fd()) {
                Ok((client, peer)) => self.dispatch_client(client, peer, None),
                Err(error) => match AcceptError::from_io_error(&error) {
                    AcceptError::Empty => {
                        // Only an empty queue shows that the shortage is over. At a limit, each
                        // connection that ends lets one client in, and the next client has to wait
                        // again.
                        self.troubled.store(false, Relaxed);
                        return Some(AcceptError::Empty);
                    }
                    // This shim or a sibling has ended the listener: it does not listen any more.
                    AcceptError::Closed => {
                        self.metrics
                            .count_accept_error(AcceptError::Closed.as_str());
                        return Some(AcceptError::Closed);
                    }
                    AcceptError::Client => self
                        .metrics
                        .count_accept_error(AcceptError::Client.as_str()),
                    trouble => {
                        self.report_error(trouble.as_str(), &error);
                        return Some(trouble);
                    }
                },
            }
        }
        None
    }

    fn report_error(&self, kind: &'static str, what: &dyn std::fmt::Display) {
        self.metrics.count_accept_error(kind);
        if !self.troubled.swap(true, Relaxed) {
            tracing::warn!(
                code = %explained::CANNOT_ACCEPT,
                kind,
                open = self.metrics.open_connections(),
                "cannot accept, trying again: {what}"
            );
        }
    }
}
