//! What a client waits for before an attempt: its turn at the gate, or an instance; and how its end is noticed meanwhile.

use super::replay_buffer::ReplayBuffer;
use super::{Context, Outcome};
use crate::backend::BackendInstance;
use crate::gate::{Entry, HandshakeSlot, Refused};
use berth_os::socket;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

/// One client's wait for its turn at an instance; its waits are bounded together.
#[derive(Default)]
pub(super) struct TurnWait {
    waited: Duration,
    since: Option<Instant>,
    hello_by: Option<Instant>,
    /// For the next attempt.
    pub(super) slot: Option<HandshakeSlot>,
}

impl TurnWait {
    /// Returns when the instance may be dialled, or may get the ClientHello that is complete now.
    pub(super) async fn wait(
        &mut self,
        context: &Context,
        to: &BackendInstance,
        client: &mut TcpStream,
        peer: SocketAddr,
        kept: &mut ReplayBuffer,
    ) -> Result<(), Outcome> {
        let Some(gate) = &context.gate else { return Ok(()) };
        let by = *self.hello_by.get_or_insert_with(|| gate.hello_deadline());
        let hello = async {
            while !(kept.is_whole() || kept.is_full() || kept.finished) {
                poll_fn(|cx| kept.poll_fill(cx, client)).await?;
            }
            io::Result::Ok(())
        };
        if let Ok(Err(_)) = timeout_at(by, hello).await {
            return Err(Outcome::ClientReset);
        }
        let mut waiting = match gate.enter(to.epoch, peer.ip(), kept.bytes.len(), Instant::now() - self.waited) {
            Entry::Open(slot) => {
                self.slot = Some(slot);
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
            // The runtime's readiness for the socket is older than its turn.
            Ok(slot) if !(kept.is_replayable() && socket::has_ended(client)) => {
                self.slot = Some(slot);
                return Ok(());
            }
            Ok(_) | Err(Refused::Left) => (Refused::Left, Outcome::ClientLeft),
            Err(Refused::Expired) => (Refused::Expired, Outcome::GateExpired),
            Err(Refused::Full) => (Refused::Full, Outcome::GateFull),
        };
        waiting.refuse(outcome.0);
        Err(outcome.1)
    }

    /// It no longer waits.
    pub(super) fn leave(&mut self, kept: &mut ReplayBuffer) {
        kept.set_held(false);
        self.waited += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
    }
}

/// One client's wait for an instance; its waits are bounded together by `--hold`.
#[derive(Default)]
pub(super) struct HoldWait {
    waited: Duration,
}

impl HoldWait {
    /// Returns when `awaited` does.
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

/// Waits until a held client gives up.
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

/// Waits until a client whose first bytes are complete is gone. What it sends next stays with the kernel: it does not count for
/// the gate's room.
async fn gone(client: &TcpStream, kept: &ReplayBuffer) {
    let more = poll_fn(|cx| client.poll_peek(cx, &mut ReadBuf::new(&mut [0]))).await;
    // A client without TLS may have closed its side and want its answer.
    if matches!(more, Ok(1..)) || !kept.is_replayable() && more.is_ok() {
        let _ = client.ready(Interest::ERROR).await;
    }
}

/// Waits until a silent client sends something, `--hold` at most. It takes no place among held clients: no answer is due.
pub(super) async fn sends_something(context: &Context, client: &mut TcpStream, kept: &mut ReplayBuffer) -> bool {
    let filled = timeout(context.hold, poll_fn(|cx| kept.poll_fill(cx, client))).await;
    filled.is_ok_and(|filled| filled.is_ok()) && !kept.bytes.is_empty()
}
