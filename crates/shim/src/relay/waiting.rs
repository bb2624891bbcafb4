//! What a client waits for before it has a leg: for its turn at the gate, or for an instance; and how it is seen that it waits
//! no more.

use super::replay_buffer::ReplayBuffer;
use super::{Context, Outcome};
use crate::backend::Instance;
use crate::gate::{Entry, Opening, Refused};
use berth_os::socket;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

/// The waiting of one client for its turn at an instance, all its waits together bounded.
#[derive(Default)]
pub(super) struct Line {
    waited: Duration,
    /// Since when it waits.
    since: Option<Instant>,
    speaks_by: Option<Instant>,
    /// For the leg that comes next.
    pub(super) opening: Option<Opening>,
}

impl Line {
    /// Returns when its leg may be dialled, or may have what is whole now.
    pub(super) async fn wait(
        &mut self,
        context: &Context,
        to: &Instance,
        client: &mut TcpStream,
        peer: SocketAddr,
        kept: &mut ReplayBuffer,
    ) -> Result<(), Outcome> {
        let Some(gate) = &context.gate else { return Ok(()) };
        let by = *self.speaks_by.get_or_insert_with(|| gate.speaks_by());
        let speaks = async {
            while !(kept.is_whole() || kept.is_full() || kept.finished) {
                poll_fn(|cx| kept.poll_fill(cx, client)).await?;
            }
            io::Result::Ok(())
        };
        if let Ok(Err(_)) = timeout_at(by, speaks).await {
            return Err(Outcome::ClientReset);
        }
        let mut waiting = match gate.enter(to.epoch, peer.ip(), kept.bytes.len(), Instant::now() - self.waited) {
            Entry::Open(opening) => {
                self.opening = Some(opening);
                return Ok(());
            }
            Entry::Wait(waiting) => waiting,
        };
        // No instance owes it an answer yet.
        kept.set_held(true);
        self.since = Some(Instant::now());
        let turn = tokio::select! {
            biased;
            turn = waiting.turn() => turn,
            () = gone(client, kept) => Err(Refused::Left),
        };
        self.leave(kept);
        let outcome = match turn {
            // What the runtime knows of it is older than its turn.
            Ok(opening) if !(kept.is_replayable() && socket::has_ended(client)) => {
                self.opening = Some(opening);
                return Ok(());
            }
            Ok(_) | Err(Refused::Left) => (Refused::Left, Outcome::ClientLeft),
            Err(Refused::Expired) => (Refused::Expired, Outcome::GateExpired),
            Err(Refused::Full) => (Refused::Full, Outcome::GateFull),
        };
        waiting.refuse(outcome.0);
        Err(outcome.1)
    }

    /// It waits no more.
    pub(super) fn leave(&mut self, kept: &mut ReplayBuffer) {
        kept.set_held(false);
        self.waited += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
    }
}

/// The waiting of one client for an instance, all its waits together bounded by `--hold`.
#[derive(Default)]
pub(super) struct Held {
    waited: Duration,
}

impl Held {
    /// Returns when what it waits for is there.
    pub(super) async fn wait(
        &mut self,
        context: &Context,
        client: &mut TcpStream,
        kept: &mut ReplayBuffer,
        awaited: impl Future<Output = ()>,
    ) -> Result<(), Outcome> {
        let began = Instant::now();
        let until = began + context.hold.saturating_sub(self.waited);
        let _place = context.held.try_acquire().map_err(|_| Outcome::HoldFull)?;
        kept.set_held(true);
        let waited = tokio::select! {
            () = awaited => Ok(()),
            () = tokio::time::sleep_until(until) => Err(Outcome::HoldExpired),
            outcome = left(client, kept) => Err(outcome),
        };
        kept.set_held(false);
        self.waited += began.elapsed();
        waited
    }
}

/// Waits until a held client gave up.
async fn left(client: &mut TcpStream, kept: &mut ReplayBuffer) -> Outcome {
    while !kept.is_full() && !kept.finished {
        if poll_fn(|cx| kept.poll_fill(cx, client)).await.is_err() {
            return Outcome::ClientReset;
        }
    }
    if kept.is_given_up() {
        return Outcome::ClientLeft;
    }
    let _ = client.ready(Interest::ERROR).await;
    Outcome::ClientReset
}

/// Waits until a client that said what it has to say at first is gone. What more it says stays with the kernel: it is not
/// counted among what the gate has room for.
async fn gone(client: &TcpStream, kept: &ReplayBuffer) {
    let more = poll_fn(|cx| client.poll_peek(cx, &mut ReadBuf::new(&mut [0]))).await;
    // One that speaks no TLS may be done and want its answer.
    if matches!(more, Ok(1..)) || !kept.is_replayable() && more.is_ok() {
        let _ = client.ready(Interest::ERROR).await;
    }
}

/// Waits until a client that said nothing yet does, `--hold` at most. It takes no place: nobody owes it an answer.
pub(super) async fn speaks(context: &Context, client: &mut TcpStream, kept: &mut ReplayBuffer) -> bool {
    let heard = timeout(context.hold, poll_fn(|cx| kept.poll_fill(cx, client))).await;
    heard.is_ok_and(|heard| heard.is_ok()) && !kept.bytes.is_empty()
}
