//! Brings an accepted client to an instance that answers: pick, connect, replay, hold.
//!
//! A completed connect is not yet an accepted connection. A backend that closes its listener resets
//! its accept queue, and a process that ends drops its newest connections. A TLS client sends first
//! and its ClientHello can be replayed, so the client's bytes are kept until the instance's first
//! byte. An attempt is replayed to the next instance if the attempt is refused or ends before the
//! first byte, or if its instance is stuck while another instance is ready. While no instance is
//! ready, the client is held. A client that has closed its side is not given another attempt. Each
//! attempt passes the gate first ([`crate::gate`]).

use super::abort::AbortOnDrop;
use super::copy::{ResetWatch, with_buffer};
use super::opening::{Opening, TriedEpochs};
use super::replay_buffer::ReplayBuffer;
use super::source::Source;
use super::{Context, Outcome, PassRequest};
use crate::backend::{BackendInstance, Table};
use crate::gate::HandshakeSlot;
use crate::share::Placement;
use berth_node::instance_id::InstanceId;
use berth_node::terms::InstanceHealth;
use berth_os::socket;
use std::future::poll_fn;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

/// How long a connect to a loopback address may take. A longer connect means a full accept queue.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a connection is offered to siblings: on arrival, and after a hold.
const MAX_PASSES: u8 = 2;

/// Time between two attempts when descriptors, memory or ports ran out.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Number of source addresses to try if other processes use all ports of a source.
const MAX_SOURCES: usize = 3;

/// How an instance has got the client.
pub(super) enum ReachedInstance {
    /// A connection to an instance that has answered, or that has bytes of the client which cannot
    /// be replayed.
    Connected {
        backend: AbortOnDrop,
        /// Source address of the connection. It counts as used until the connection ends.
        source: Option<Source>,
        instance: InstanceId,
        exchanged: ExchangedBytes,
    },
    /// The instance has the client's socket.
    Injected(InstanceId),
}

/// The bytes that the client and the instance have sent so far.
pub(super) struct ExchangedBytes {
    /// Bytes of the client that the instance already has.
    pub(super) sent: usize,
    /// Bytes of the client that the instance does not have yet.
    pub(super) up: Vec<u8>,
    /// Bytes of the instance that the client does not have yet.
    pub(super) down: Vec<u8>,
}

/// How an attempt ended.
pub(super) enum AttemptResult {
    Injected,
    Answered(AbortOnDrop, Option<Source>, ExchangedBytes),
    /// The connect to the instance failed.
    Unreachable(io::Error),
    /// The instance ended the connection without a byte, by FIN or by reset.
    Ended(Outcome),
    /// The instance is stuck or gone, and another instance is ready.
    Abandoned,
    /// The client reset its connection, or the gate refused the rest of a late ClientHello.
    Refused(Outcome),
}

impl Opening<'_> {
    /// Finds an instance that answers the client.
    ///
    /// # Errors
    /// How the connection ended instead. The client's socket is set to reset where necessary.
    pub(super) async fn reach_instance(mut self) -> Result<ReachedInstance, Outcome> {
        let context = self.context;
        let mut table = context.table.clone();
        let mut passes = if self.kept.passed { 0 } else { MAX_PASSES };
        if !self.kept.passed
            && let Some(sibling) = self.choose_sibling()
        {
            let passed = self.pass_client(Some(sibling)).await;
            context.share.count_placement(if passed {
                Placement::Passed
            } else {
                Placement::Declined
            });
            if passed {
                return Err(Outcome::Passed);
            }
        }
        let mut again = false;
        loop {
            let leaving = context.state.borrow().is_leaving();
            // The last attempt ended because the instance stopped, or gave up waiting for the
            // client (kube-apiserver: 32 s). A silent client gets another attempt only after
            // sending something.
            if let Some(outcome) = self.ended
                && self.kept.bytes.is_empty()
                && !leaving
                && !self.wait_for_bytes().await
            {
                return Err(self.end_client(outcome));
            }
            let picked = pick_instance(&table.borrow_and_update(), leaving, &self.tried).cloned();
            // If this shim relayed to a sibling's instance, the connection would end with this
            // shim, which may soon end like its own instance. The sibling should have the socket
            // itself.
            let is_elsewhere = picked.as_ref().is_none_or(|instance| !instance.own);
            let is_linked = picked
                .as_ref()
                .is_some_and(|instance| self.find_link(instance).is_some());
            if passes > 0 && is_elsewhere && !is_linked && (leaving || !context.stays) {
                passes -= 1;
                if self.pass_client(None).await {
                    return Err(Outcome::Passed);
                }
            }
            let Some(instance) = picked else {
                if let Some(outcome) = self.ended
                    && table
                        .borrow()
                        .pick_instance(|instance| !self.tried.has_refused(instance))
                        .is_some()
                {
                    // The instance is ready and has ended two attempts of this connection, so it
                    // has done that on purpose.
                    return Err(self.end_client(outcome));
                }
                let tried = self.tried.clone();
                let found = async {
                    // The wait cannot fail: the sender lives as long as the workers do.
                    let _ = table
                        .wait_for(|table| pick_instance(table, leaving, &tried).is_some())
                        .await;
                };
                self.hold_client(found).await?;
                continue;
            };
            let tried = self.tried.clone();
            tokio::select! {
                biased;
                admitted = self.wait_for_turn(&instance) => admitted.map_err(|outcome| self.end_client(outcome))?,
                () = wait_for_other_choice(context, &mut table, leaving, instance.epoch, &tried) => {
                    self.leave_queue();
                    continue;
                }
            }
            let replay = std::mem::replace(&mut again, true);
            let result = match self
                .inject_client(&instance, &mut table, &tried, replay)
                .await
            {
                Some(result) => result,
                None => tokio::select! {
                    biased;
                    result = self.try_instance(&instance, replay) => result,
                    () = wait_until_instance_stuck(&mut table, instance.epoch, &tried) => {
                        self.leave_queue();
                        AttemptResult::Abandoned
                    }
                },
            };
            match result {
                AttemptResult::Injected => return Ok(ReachedInstance::Injected(instance.id)),
                AttemptResult::Answered(backend, source, exchanged) => {
                    return Ok(ReachedInstance::Connected {
                        backend,
                        source,
                        instance: instance.id,
                        exchanged,
                    });
                }
                AttemptResult::Refused(outcome) => return Err(self.end_client(outcome)),
                AttemptResult::Unreachable(error) => {
                    tracing::debug!(instance = %instance.id, address = %instance.address, %error, "cannot connect");
                    if error.kind() == io::ErrorKind::ConnectionRefused {
                        context.report_refused(&instance);
                        self.tried.add_refusal(instance.epoch);
                    } else if is_local_shortage(&error) {
                        // The shortage is not the instance's fault, and connections that end
                        // release resources.
                        again = replay;
                        self.hold_client(tokio::time::sleep(RETRY_PAUSE)).await?;
                    } else {
                        self.tried.add_attempt(instance.epoch);
                        self.ended = Some(Outcome::BackendReset);
                    }
                }
                AttemptResult::Ended(outcome) => {
                    if self.kept.is_given_up() {
                        return Err(self.end_client(outcome));
                    }
                    tracing::debug!(instance = %instance.id, outcome = outcome.as_str(), "the attempt ended before the first byte of the instance: replay");
                    self.tried.add_attempt(instance.epoch);
                    self.ended = Some(outcome);
                }
                AttemptResult::Abandoned if self.kept.is_given_up() => {
                    return Err(self.end_client(Outcome::ClientLeft));
                }
                AttemptResult::Abandoned => {
                    tracing::debug!(instance = %instance.id, "the instance has sent no byte, and another instance is ready: replay");
                    context.count_answer(&instance, None);
                    self.tried.add_attempt(instance.epoch);
                }
            }
        }
    }

    /// Returns the socket of the sibling that a share gives a new connection to. `None` if no share
    /// is in force, or if the own instance would not serve the connection anyway.
    fn choose_sibling(&self) -> Option<Arc<Path>> {
        let context = self.context;
        if !context.share.is_on() || context.state.borrow().is_leaving() {
            return None;
        }
        if !context
            .table
            .borrow()
            .pick_instance(|_| true)
            .is_some_and(|picked| picked.own)
        {
            return None;
        }
        context
            .share
            .choose_sibling(self.peer, self.client.local_addr().ok(), Instant::now())
    }

    /// Offers the connection to a sibling, or only to `only`, which must reply immediately. Returns
    /// true if a sibling has the connection: the caller may then drop its descriptor.
    async fn pass_client(&mut self, only: Option<Arc<Path>>) -> bool {
        let Ok(duplicate) = self.client.as_fd().try_clone_to_owned() else {
            return false;
        };
        let (taken, answer) = oneshot::channel();
        self.client.set_abort(false);
        let pass = PassRequest {
            client: duplicate,
            sent: self.kept.consumed_bytes().to_vec(),
            only,
            taken,
        };
        let passed = self.context.passes.send(pass).is_ok() && answer.await.unwrap_or(false);
        self.client.set_abort(!passed);
        passed
    }

    /// Makes an attempt at an instance, up to the instance's first byte or the end of the
    /// connection. A dropped attempt resets its connection.
    async fn try_instance(&mut self, instance: &BackendInstance, replay: bool) -> AttemptResult {
        let context = self.context;
        let mut slot = self.turn.slot.take();
        let mut handshake = self
            .kept
            .is_client_hello()
            .then(|| instance.handshakes.begin_handshake());
        let connected =
            connect_and_send(context, instance.address, self.peer, &self.kept.bytes).await;
        let (mut backend, mut sent, source) = match connected {
            Ok((backend, sent, source)) => (AbortOnDrop::new(backend), sent, source),
            Err(error) => return AttemptResult::Unreachable(error),
        };
        if self.kept.consume(self.client.as_fd()).is_err() {
            return AttemptResult::Refused(Outcome::ClientReset);
        }
        if replay {
            context.stats.replays.fetch_add(1, Relaxed);
        }
        loop {
            // While the ClientHello is incomplete, the instance has nothing to answer, and no
            // handshake is in flight.
            let is_early = !self.kept.has_whole_hello();
            if handshake.is_none() && self.kept.is_client_hello() {
                handshake = Some(instance.handshakes.begin_handshake());
            }
            let began = Instant::now();
            let counts_until = slot
                .as_ref()
                .filter(|_| !is_early)
                .map(HandshakeSlot::end_time);
            let first = wait_for_first_byte(
                self.client,
                &mut backend,
                &mut self.kept,
                &mut sent,
                is_early,
                counts_until,
            );
            let first = match slot.take().filter(|_| !is_early) {
                Some(slot) => wait_with_slot(slot, first).await,
                None => first.await,
            };
            match first {
                Ok(Some(exchanged)) => {
                    if !exchanged.down.is_empty()
                        && let Some(handshake) = handshake
                    {
                        handshake.end_handshake();
                        context.count_answer(instance, Some(began.elapsed()));
                    }
                    return AttemptResult::Answered(backend, source, exchanged);
                }
                // The rest of the ClientHello is sent when the client's turn comes.
                Ok(None) => match self.wait_for_turn(instance).await {
                    Ok(()) => slot = self.turn.slot.take(),
                    Err(outcome) => return AttemptResult::Refused(outcome),
                },
                Err(outcome @ Outcome::ClientReset) => return AttemptResult::Refused(outcome),
                Err(outcome) => {
                    if let Some(handshake) = handshake {
                        handshake.end_handshake();
                        context.count_answer(instance, None);
                    }
                    backend.close();
                    return AttemptResult::Ended(outcome);
                }
            }
        }
    }
}

/// Waits until an instance is stuck or gone, and another instance that may be tried is ready. An
/// instance that only fails its probe may be slow, and moving its clients would only add handshakes
/// for the next instance.
pub(super) async fn wait_until_instance_stuck(
    table: &mut watch::Receiver<Arc<Table>>,
    epoch: u64,
    tried: &TriedEpochs,
) {
    let is_stuck = |table: &Arc<Table>| {
        let moves = table
            .instances
            .iter()
            .any(|instance| instance.epoch == epoch && !instance.hangs);
        !moves
            && table
                .instances
                .iter()
                .any(|other| other.health() == InstanceHealth::Ready && tried.allows_attempt(other))
    };
    if table.wait_for(is_stuck).await.is_err() {
        // Without a sender, the shim is about to end, and so is this wait.
        std::future::pending::<()>().await;
    }
}

fn pick_instance<'table>(
    table: &'table Table,
    leaving: bool,
    tried: &TriedEpochs,
) -> Option<&'table BackendInstance> {
    let usable = |instance: &BackendInstance| tried.allows_attempt(instance);
    if leaving {
        table.pick_instance_while_leaving(usable)
    } else {
        table.pick_instance(usable)
    }
}

/// Waits until a client that waits for its turn at an instance should go to another instance.
async fn wait_for_other_choice(
    context: &Context,
    table: &mut watch::Receiver<Arc<Table>>,
    leaving: bool,
    epoch: u64,
    tried: &TriedEpochs,
) {
    let is_other = |table: &Arc<Table>| {
        pick_instance(table, leaving, tried).is_none_or(|instance| instance.epoch != epoch)
    };
    let mut state = context.state.clone();
    let changed = tokio::select! {
        changed = table.wait_for(is_other) => changed.is_ok(),
        changed = state.wait_for(|state| state.is_leaving() != leaving) => changed.is_ok(),
    };
    if !changed {
        // Without the senders, the shim is about to end, and so is this wait.
        std::future::pending::<()>().await;
    }
}

/// Waits for the instance's first byte, which releases the handshake's slot.
async fn wait_with_slot(
    slot: HandshakeSlot,
    first_byte: impl Future<Output = Result<Option<ExchangedBytes>, Outcome>>,
) -> Result<Option<ExchangedBytes>, Outcome> {
    let mut first_byte = std::pin::pin!(first_byte);
    let first = timeout_at(slot.end_time(), &mut first_byte).await;
    match &first {
        Err(_) => slot.end_handshake(),
        Ok(Ok(Some(exchanged))) if !exchanged.down.is_empty() => slot.end_handshake(),
        Ok(_) => drop(slot),
    }
    match first {
        Ok(first) => first,
        Err(_) => first_byte.await,
    }
}

/// Connects to an instance from an address that names the client, and sends as much of `first` as
/// the socket takes at once. Returns the number of bytes sent.
async fn connect_and_send(
    context: &Context,
    to: SocketAddr,
    client: SocketAddr,
    first: &[u8],
) -> io::Result<(TcpStream, usize, Option<Source>)> {
    // An instance on another host cannot be reached from a loopback address.
    if to.is_ipv4() && (to.ip().is_loopback() || context.from_loopback) {
        let mut source = context.sources.acquire_source(client.ip(), 0);
        for _ in 0..MAX_SOURCES {
            match connect_from(context, Some(source.address.into()), to, first).await {
                // Other processes use all ports of this source address.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                    source = context
                        .sources
                        .acquire_source(client.ip(), source.number + 1);
                }
                connected => return connected.map(|(stream, sent)| (stream, sent, Some(source))),
            }
        }
    }
    let source = context
        .from_loopback
        .then_some(Ipv6Addr::LOCALHOST.into())
        .filter(|_| to.is_ipv6());
    connect_from(context, source, to, first)
        .await
        .map(|(stream, sent)| (stream, sent, None))
}

async fn connect_from(
    context: &Context,
    source: Option<IpAddr>,
    to: SocketAddr,
    first: &[u8],
) -> io::Result<(TcpStream, usize)> {
    let started = Instant::now();
    let stream = socket::connect(to, source)?;
    // With an instance of this host, connect(2) has completed the TCP handshake by now. So neither
    // a timer nor a wait is needed.
    let (connected, sent) = if first.is_empty() {
        (stream.peer_addr().is_ok(), 0)
    } else {
        match (&stream).write(first) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => (false, 0),
            sent => (true, sent?),
        }
    };
    let stream = TcpStream::from_std(stream)?;
    if !connected {
        timeout(CONNECT_TIMEOUT, stream.writable())
            .await
            .map_err(|_| io::ErrorKind::TimedOut)??;
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
    }
    context
        .connect_seconds
        .observe(started.elapsed().as_secs_f64());
    Ok((stream, sent))
}

/// Sends the client's bytes on, and keeps them, until the instance's first byte. The instance
/// already has `sent` bytes. `None` if the attempt began before the ClientHello was complete, and
/// it is complete now.
///
/// While the handshake has a slot, no more is read than the buffer can keep.
///
/// # Errors
/// The client reset the connection, or the instance ended the connection.
async fn wait_for_first_byte(
    client: &mut TcpStream,
    backend: &mut TcpStream,
    kept: &mut ReplayBuffer,
    sent: &mut usize,
    is_early: bool,
    counts_until: Option<Instant>,
) -> Result<Option<ExchangedBytes>, Outcome> {
    let counts = || counts_until.is_some_and(|until| Instant::now() < until);
    let mut finished = false;
    let mut watch = ResetWatch::default();
    poll_fn(|cx| {
        loop {
            if is_early && kept.has_whole_hello() {
                return Poll::Ready(Ok(None));
            }
            if !kept.is_replayable() {
                return Poll::Ready(Ok(Some(ExchangedBytes {
                    sent: *sent,
                    up: kept.bytes.split_off(*sent),
                    down: Vec::new(),
                })));
            }
            let answer = with_buffer(|buffer| {
                let mut read = ReadBuf::new(buffer);
                Pin::new(&mut *backend)
                    .poll_read(cx, &mut read)
                    .map_ok(|()| read.filled().to_vec())
            });
            match answer {
                Poll::Ready(Ok(down)) if down.is_empty() => {
                    return Poll::Ready(Err(Outcome::Closed));
                }
                Poll::Ready(Ok(down)) => {
                    return Poll::Ready(Ok(Some(ExchangedBytes {
                        sent: *sent,
                        up: kept.bytes.split_off(*sent),
                        down,
                    })));
                }
                Poll::Ready(Err(_)) => return Poll::Ready(Err(Outcome::BackendReset)),
                Poll::Pending => {}
            }
            if *sent < kept.bytes.len() {
                match ready!(Pin::new(&mut *backend).poll_write(cx, &kept.bytes[*sent..])) {
                    Ok(written) => *sent += written,
                    Err(_) => return Poll::Ready(read_before_reset(backend, kept, *sent)),
                }
            } else if kept.finished || kept.is_full() && kept.has_whole_hello() && counts() {
                // A client that sends more than a ClientHello first gets the answer to the
                // ClientHello.
                if kept.finished && !finished {
                    finished = true;
                    if ready!(Pin::new(&mut *backend).poll_shutdown(cx)).is_err() {
                        return Poll::Ready(read_before_reset(backend, kept, *sent));
                    }
                }
                return watch.poll(cx, client).map(|()| Err(Outcome::ClientReset));
            } else if kept.is_full() {
                // Further bytes cannot be kept, so the next read rules out a replay. An instance
                // may need all of a large ClientHello before answering.
                return client
                    .poll_peek(cx, &mut ReadBuf::new(&mut [0]))
                    .map(|more| {
                        more.map(|_| {
                            Some(ExchangedBytes {
                                sent: *sent,
                                up: Vec::new(),
                                down: Vec::new(),
                            })
                        })
                        .map_err(|_| Outcome::ClientReset)
                    });
            } else if ready!(kept.poll_fill(cx, client)).is_err() {
                return Poll::Ready(Err(Outcome::ClientReset));
            }
        }
    })
    .await
}

/// Returns the instance's last bytes before a reset. A write met the reset, and the read before did
/// not find the bytes yet.
///
/// # Errors
/// The instance sent nothing.
fn read_before_reset(
    backend: &TcpStream,
    kept: &mut ReplayBuffer,
    sent: usize,
) -> Result<Option<ExchangedBytes>, Outcome> {
    let read = |buffer: &mut [u8]| {
        socket::read(backend.as_fd(), buffer).map(|read| buffer[..read].to_vec())
    };
    match with_buffer(read) {
        Ok(down) if !down.is_empty() => Ok(Some(ExchangedBytes {
            sent,
            up: kept.bytes.split_off(sent),
            down,
        })),
        _ => Err(Outcome::BackendReset),
    }
}

/// True if this process or host lacks a descriptor, memory, or a port of the source.
fn is_local_shortage(error: &io::Error) -> bool {
    let lacks = [
        libc::EMFILE,
        libc::ENFILE,
        libc::ENOBUFS,
        libc::ENOMEM,
        libc::EADDRNOTAVAIL,
    ];
    error
        .raw_os_error()
        .is_some_and(|code| lacks.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// In this test, the event loop knows that the socket is writable, and not yet that it is
    /// readable.
    #[tokio::test]
    async fn an_answer_before_a_reset_is_found_by_the_write_that_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || {
            let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (stream, listener.accept().unwrap().0)
        };
        let ((client, mut sender), (backend, mut instance)) = (connect(), connect());
        sender.write_all(b"\x16").unwrap();
        let mut kept = ReplayBuffer::read(&client, None, None, false).unwrap();
        let [mut client, mut backend] = [client, backend].map(|stream| {
            stream.set_nonblocking(true).unwrap();
            TcpStream::from_std(stream).unwrap()
        });
        backend.writable().await.unwrap();
        instance.write_all(b"answer").unwrap();
        socket::reset_on_close(&instance);
        drop(instance);
        let first =
            wait_for_first_byte(&mut client, &mut backend, &mut kept, &mut 0, false, None).await;
        let down = first
            .unwrap_or_else(|outcome| panic!("{}", outcome.as_str()))
            .unwrap()
            .down;
        assert_eq!(down, b"answer");
    }
}
