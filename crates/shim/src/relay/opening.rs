//! From an accepted client to an instance that answered: pick, connect, replay, hold.
//!
//! A completed connect is not yet an accepted connection. A backend that closes its listener resets what waits there,
//! and a process that ends drops what it accepted last. A TLS client speaks first and its ClientHello can be replayed,
//! so what it sent is kept until the instance's first byte, and a leg that is refused or ends before that, or whose
//! instance stands still beside one that is ready, is replayed to the next instance. While there is none, the client
//! is held. Nobody gets another leg who wants nothing any more. Before each leg is the gate ([`crate::gate`]).

use super::abort::AbortOnDrop;
use super::copy::{Watch, with_buffer};
use super::replay_buffer::ReplayBuffer;
use super::source::Source;
use super::waiting::{Held, Line, speaks};
use super::{Context, Outcome};
use crate::backend::standstill::Handshake;
use crate::backend::{Instance, Table};
use crate::gate::Opening;
use berth_node::instance::InstanceId;
use berth_node::terms::{InstanceHealth, Speedup};
use berth_os::socket;
use std::future::poll_fn;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

/// Legs to one instance in one epoch. The second finds out whether the first met a process that was
/// just ending; an instance that ends two without a byte means it.
const LEGS: u8 = 2;

/// How long a connect to a loopback address may take: longer means a full accept queue.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Times that a connection is offered to siblings: when it comes, and when it was held.
const PASSES: u8 = 2;

/// Time between two tries for a leg when descriptors, memory or ports ran out.
const PAUSE: Duration = Duration::from_millis(100);

/// Source addresses that are tried when one has no port left.
const SOURCES: usize = 3;

/// A client and an instance that answered it, or whose first bytes cannot be replayed.
pub(super) struct Opened {
    pub(super) backend: AbortOnDrop,
    /// In use as long as the leg.
    pub(super) source: Option<Source>,
    pub(super) instance: InstanceId,
    pub(super) said: Said,
}

/// What both ends said so far.
pub(super) struct Said {
    /// Bytes of the client that the instance has already.
    pub(super) sent: usize,
    /// What the client sent and the instance does not have yet.
    pub(super) up: Vec<u8>,
    /// What the instance sent and the client does not have yet.
    pub(super) down: Vec<u8>,
}

/// How a leg went.
enum Leg {
    Answered(AbortOnDrop, Option<Source>, Said),
    /// There was none: the instance cannot be connected to.
    Unreachable(io::Error),
    /// The instance ended it without a byte: by FIN or by reset.
    Ended(Outcome),
    /// Its instance stands still or is gone, and another one is ready.
    Overtaken,
    ClientReset,
    /// The gate did not let in what was said late.
    Refused(Outcome),
}

/// Epochs of instances that this connection tried, and how many legs it had to each.
#[derive(Default)]
struct Tried(Vec<(u64, u8)>);

impl Tried {
    fn allows(&self, instance: &Instance) -> bool {
        self.legs(instance.epoch) < LEGS
    }

    fn refused(&self, instance: &Instance) -> bool {
        self.legs(instance.epoch) > LEGS
    }

    fn legs(&self, epoch: u64) -> u8 {
        self.0.iter().find(|(known, _)| *known == epoch).map_or(0, |(_, legs)| *legs)
    }

    fn add(&mut self, epoch: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == epoch) {
            Some((_, legs)) => *legs = (*legs + 1).min(LEGS),
            None => self.0.push((epoch, 1)),
        }
    }

    /// Nobody listens: no more of this epoch, however few legs there were.
    fn refuse(&mut self, epoch: u64) {
        self.0.retain(|(known, _)| *known != epoch);
        self.0.push((epoch, LEGS + 1));
    }
}

/// Finds an instance that answers the client.
///
/// # Errors
/// How it ended instead; the client is set to be reset where that is due.
pub(super) async fn open(
    context: &Context,
    client: &mut AbortOnDrop,
    peer: SocketAddr,
    mut kept: ReplayBuffer,
) -> Result<Opened, Outcome> {
    let mut table = context.table.clone();
    let mut passes = if kept.passed { 0 } else { PASSES };
    let mut offered = kept.passed;
    let mut tried = Tried::default();
    let mut held = Held::default();
    let mut line = Line::default();
    // How the last leg ended; said to the client if no instance does better.
    let mut ended = None;
    let mut again = false;
    loop {
        let leaving = *context.passing.leaving.borrow();
        // Whether the instance stopped, or waited for the client in vain (kube-apiserver: 32 s): another leg is for who
        // says something.
        if let Some(outcome) = ended
            && kept.bytes.is_empty()
            && !leaving
            && !speaks(context, client, &mut kept).await
        {
            return Err(tell(client, outcome));
        }
        let picked = pick(&table.borrow_and_update(), leaving, &tried).cloned();
        // A relay to a sibling's instance would end with this shim, which may be about to follow its own
        // instance: the sibling should have the socket itself. So it may while the own instance is young and has enough to do.
        let is_elsewhere = passes > 0 && picked.as_ref().is_none_or(|instance| !instance.own);
        let is_offer = !offered && picked.as_ref().is_some_and(|own| is_ramping(context, &table.borrow(), own, peer));
        if context.passing.on.load(Relaxed) && (is_elsewhere || is_offer) {
            passes -= u8::from(is_elsewhere);
            offered |= is_offer;
            if context.passing.pass(client, &kept.bytes, is_offer).await {
                return Err(Outcome::Passed);
            }
        }
        let Some(instance) = picked else {
            if let Some(outcome) = ended
                && table.borrow().pick(|instance| !tried.refused(instance)).is_some()
            {
                // It is ready and ended two legs: it means it.
                return Err(tell(client, outcome));
            }
            let found = async {
                // The sender lives as long as the workers do.
                let _ = table.wait_for(|table| pick(table, leaving, &tried).is_some()).await;
            };
            if let Err(outcome) = held.wait(context, client, &mut kept, found).await {
                return Err(tell(client, outcome));
            }
            continue;
        };
        tokio::select! {
            biased;
            turn = line.wait(context, &instance, client, peer, &mut kept) => {
                turn.map_err(|outcome| tell(client, outcome))?;
            }
            () = picked_otherwise(context, &mut table, leaving, instance.epoch, &tried) => {
                line.leave(&mut kept);
                continue;
            }
        }
        let replay = std::mem::replace(&mut again, true);
        let leg = tokio::select! {
            biased;
            leg = leg(context, &instance, client, peer, &mut kept, replay, &mut line) => leg,
            () = overtaken(&mut table, instance.epoch, &tried) => {
                line.leave(&mut kept);
                Leg::Overtaken
            }
        };
        match leg {
            Leg::Answered(backend, source, said) => {
                context.stats.own.fetch_add(u64::from(instance.own), Relaxed);
                return Ok(Opened { backend, source, instance: instance.id, said });
            }
            Leg::ClientReset => return Err(Outcome::ClientReset),
            Leg::Refused(outcome) => return Err(tell(client, outcome)),
            Leg::Unreachable(error) => {
                tracing::debug!(instance = %instance.id, address = %instance.address, %error, "cannot connect");
                if error.kind() == io::ErrorKind::ConnectionRefused {
                    context.report_refused(&instance);
                    tried.refuse(instance.epoch);
                } else if is_own_lack(&error) {
                    // Nothing is wrong with the instance: what ends meanwhile gives one back.
                    again = replay;
                    if let Err(outcome) = held.wait(context, client, &mut kept, tokio::time::sleep(PAUSE)).await {
                        return Err(tell(client, outcome));
                    }
                } else {
                    tried.add(instance.epoch);
                    ended = Some(Outcome::BackendReset);
                }
            }
            Leg::Ended(outcome) => {
                if kept.is_given_up() {
                    return Err(tell(client, outcome));
                }
                tracing::debug!(instance = %instance.id, outcome = outcome.as_str(), "ended before its first byte: replay");
                tried.add(instance.epoch);
                ended = Some(outcome);
            }
            Leg::Overtaken if kept.is_given_up() => return Err(tell(client, Outcome::ClientLeft)),
            Leg::Overtaken => {
                tracing::debug!(instance = %instance.id, "no first byte, and another instance is ready: replay");
                tried.add(instance.epoch);
            }
        }
    }
}

/// Waits until an instance stands still or is gone, and another one that may be tried is ready. One that only fails its probe may
/// be slow, and what waits there would be handshakes of the next one, too.
async fn overtaken(table: &mut watch::Receiver<Arc<Table>>, epoch: u64, tried: &Tried) {
    let is_overtaken = |table: &Arc<Table>| {
        let moves = table.instances.iter().any(|instance| instance.epoch == epoch && !instance.stands_still);
        !moves && table.instances.iter().any(|other| other.health() == InstanceHealth::Ready && tried.allows(other))
    };
    if table.wait_for(is_overtaken).await.is_err() {
        // The sender is gone, and the shim with it.
        std::future::pending::<()>().await;
    }
}

fn pick<'table>(table: &'table Table, leaving: bool, tried: &Tried) -> Option<&'table Instance> {
    let usable = |instance: &Instance| tried.allows(instance);
    if leaving { table.pick_leaving(usable) } else { table.pick(usable) }
}

/// Whether the own instance is young and has no opening for this client now, and another is well.
fn is_ramping(context: &Context, table: &Table, own: &Instance, client: SocketAddr) -> bool {
    let mut others = table.instances.iter().filter(|other| !other.own);
    let gate = context.gate.as_ref().filter(|_| own.own && others.any(Instance::is_well));
    gate.is_some_and(|gate| gate.is_ramping(own.epoch, client.ip()))
}

/// Waits until what waits for its turn at an instance had better go elsewhere.
async fn picked_otherwise(
    context: &Context,
    table: &mut watch::Receiver<Arc<Table>>,
    leaving: bool,
    epoch: u64,
    tried: &Tried,
) {
    let is_other = |table: &Arc<Table>| pick(table, leaving, tried).is_none_or(|instance| instance.epoch != epoch);
    let mut leaves = context.passing.leaving.clone();
    let changed = tokio::select! {
        changed = table.wait_for(is_other) => changed.is_ok(),
        changed = leaves.wait_for(|leaves| *leaves != leaving) => changed.is_ok(),
    };
    if !changed {
        // The senders are gone, and the shim with them.
        std::future::pending::<()>().await;
    }
}

/// One leg to an instance, up to its first byte or its end. It is reset if it is given up.
async fn leg(
    context: &Context,
    instance: &Instance,
    client: &mut TcpStream,
    peer: SocketAddr,
    kept: &mut ReplayBuffer,
    replay: bool,
    line: &mut Line,
) -> Leg {
    let mut opening = line.opening.take();
    let mut handshake = kept.is_client_hello().then(|| instance.handshakes.begin());
    let (mut backend, mut sent, source) = match connect(context, instance.address, peer, &kept.bytes).await {
        Ok((backend, sent, source)) => (AbortOnDrop::new(backend), sent, source),
        Err(error) => return Leg::Unreachable(error),
    };
    if replay {
        context.stats.replays.fetch_add(1, Relaxed);
    }
    loop {
        // There is nothing to answer yet, so it is no opening.
        let is_early = !kept.is_whole();
        if handshake.is_none() && kept.is_client_hello() {
            handshake = Some(instance.handshakes.begin());
        }
        let counts_until = opening.as_ref().filter(|_| !is_early).map(Opening::ends);
        let said = first_byte(client, &mut backend, kept, &mut sent, is_early, counts_until, context.speedup);
        let said = match opening.take().filter(|_| !is_early) {
            Some(opening) => during(opening, said).await,
            None => said.await,
        };
        match said {
            Ok(Some(said)) => {
                if !said.down.is_empty() {
                    handshake.into_iter().for_each(Handshake::end);
                }
                return Leg::Answered(backend, source, said);
            }
            // The last of its ClientHello goes on when it is its turn again.
            Ok(None) => match line.wait(context, instance, client, peer, kept).await {
                Ok(()) => opening = line.opening.take(),
                Err(outcome) => return Leg::Refused(outcome),
            },
            Err(Outcome::ClientReset) => return Leg::ClientReset,
            Err(outcome) => {
                handshake.into_iter().for_each(Handshake::end);
                backend.close();
                return Leg::Ended(outcome);
            }
        }
    }
}

/// What both ends say during an opening, which is over with an instance's first byte.
async fn during(
    opening: Opening,
    first_byte: impl Future<Output = Result<Option<Said>, Outcome>>,
) -> Result<Option<Said>, Outcome> {
    let mut first_byte = std::pin::pin!(first_byte);
    let said = timeout_at(opening.ends(), &mut first_byte).await;
    match &said {
        Err(_) => opening.end(),
        Ok(Ok(Some(said))) if !said.down.is_empty() => opening.end(),
        Ok(_) => drop(opening),
    }
    match said {
        Ok(said) => said,
        Err(_) => first_byte.await,
    }
}

/// Makes the client see how its last leg ended.
fn tell(client: &TcpStream, outcome: Outcome) -> Outcome {
    if outcome != Outcome::Closed {
        socket::reset_on_close(client);
    }
    outcome
}

/// Connects to an instance from an address that names the client, and says as much of `first` as it takes at
/// once: how much that was is told.
async fn connect(
    context: &Context,
    to: SocketAddr,
    client: SocketAddr,
    first: &[u8],
) -> io::Result<(TcpStream, usize, Option<Source>)> {
    // One of another host cannot be reached from there.
    if to.is_ipv4() && (to.ip().is_loopback() || context.from_loopback) {
        let mut source = context.sources.take(client.ip(), 0);
        for _ in 0..SOURCES {
            match connect_from(context, Some(source.address.into()), to, first).await {
                // Others than this shim have its ports.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
                    source = context.sources.take(client.ip(), source.number + 1);
                }
                connected => return connected.map(|(stream, sent)| (stream, sent, Some(source))),
            }
        }
    }
    let source = context.from_loopback.then_some(Ipv6Addr::LOCALHOST.into()).filter(|_| to.is_ipv6());
    connect_from(context, source, to, first).await.map(|(stream, sent)| (stream, sent, None))
}

async fn connect_from(
    context: &Context,
    source: Option<IpAddr>,
    to: SocketAddr,
    first: &[u8],
) -> io::Result<(TcpStream, usize)> {
    let started = Instant::now();
    let stream = socket::connect(to, source, &context.keepalive)?;
    // The handshake with an instance of this host is over by now: neither a timer nor a wait is needed.
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
        timeout(CONNECT_TIMEOUT, stream.writable()).await.map_err(|_| io::ErrorKind::TimedOut)??;
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
    }
    context.connect_seconds.observe(started.elapsed().as_secs_f64());
    Ok((stream, sent))
}

/// Passes the client's bytes on, keeping them, until the instance's first byte. `sent` of them it has already. None if
/// it is too early for an answer and the client has just said all that there can be one to.
/// Otherwise, who ended it: the client by a reset, or the instance. While it counts as an opening, what cannot be kept is not asked for.
async fn first_byte(
    client: &mut TcpStream,
    backend: &mut TcpStream,
    kept: &mut ReplayBuffer,
    sent: &mut usize,
    is_early: bool,
    counts_until: Option<Instant>,
    speedup: Speedup,
) -> Result<Option<Said>, Outcome> {
    let counts = || counts_until.is_some_and(|until| Instant::now() < until);
    let mut finished = false;
    let mut watch = Watch::new(speedup);
    poll_fn(|cx| {
        loop {
            if is_early && kept.is_whole() {
                return Poll::Ready(Ok(None));
            }
            if !kept.is_replayable() {
                return Poll::Ready(Ok(Some(Said { sent: *sent, up: kept.bytes.split_off(*sent), down: Vec::new() })));
            }
            let answer = with_buffer(|buffer| {
                let mut read = ReadBuf::new(buffer);
                Pin::new(&mut *backend).poll_read(cx, &mut read).map_ok(|()| read.filled().to_vec())
            });
            match answer {
                Poll::Ready(Ok(down)) if down.is_empty() => return Poll::Ready(Err(Outcome::Closed)),
                Poll::Ready(Ok(down)) => {
                    return Poll::Ready(Ok(Some(Said { sent: *sent, up: kept.bytes.split_off(*sent), down })));
                }
                Poll::Ready(Err(_)) => return Poll::Ready(Err(Outcome::BackendReset)),
                Poll::Pending => {}
            }
            if *sent < kept.bytes.len() {
                match ready!(Pin::new(&mut *backend).poll_write(cx, &kept.bytes[*sent..])) {
                    Ok(written) => *sent += written,
                    Err(_) => return Poll::Ready(Err(Outcome::BackendReset)),
                }
            } else if kept.finished || kept.is_full() && kept.is_whole() && counts() {
                // Who says more than a ClientHello is answered that first.
                if kept.finished && !finished {
                    finished = true;
                    if ready!(Pin::new(&mut *backend).poll_shutdown(cx)).is_err() {
                        return Poll::Ready(Err(Outcome::BackendReset));
                    }
                }
                return watch.poll(cx, client).map(|()| Err(Outcome::ClientReset));
            } else if kept.is_full() {
                // What comes next cannot be kept: from then on the connection goes on as it is. An instance may
                // want all of a large ClientHello before it answers.
                return client.poll_peek(cx, &mut ReadBuf::new(&mut [0])).map(|more| {
                    more.map(|_| Some(Said { sent: *sent, up: Vec::new(), down: Vec::new() }))
                        .map_err(|_| Outcome::ClientReset)
                });
            } else if ready!(kept.poll_fill(cx, client)).is_err() {
                return Poll::Ready(Err(Outcome::ClientReset));
            }
        }
    })
    .await
}

/// Whether this process or this host lacks something for a leg: a descriptor, memory, or a port of the source.
fn is_own_lack(error: &io::Error) -> bool {
    let lacks = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EADDRNOTAVAIL];
    error.raw_os_error().is_some_and(|code| lacks.contains(&code))
}
