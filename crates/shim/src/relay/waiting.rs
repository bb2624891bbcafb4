//! The waits of a client before an attempt, for its turn at the gate or for an instance, and the
//! detection of clients that leave meanwhile.

use super::Outcome;
use super::opening::Opening;
use super::replay_buffer::ReplayBuffer;
use crate::backend::BackendInstance;
use crate::gate::{GateEntry, GateRefusal};
use berth_os::{make_awaitable, socket};
use std::future::poll_fn;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;
use tokio::io::{Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

impl Opening<'_> {
    /// Waits until the instance may be dialled, or may get the ClientHello that is complete now.
    pub(super) async fn wait_for_turn(&mut self, to: &BackendInstance) -> Result<(), Outcome> {
        let Some(gate) = &self.context.gate else {
            return Ok(());
        };
        let (client, kept, turn) = (&mut *self.client, &mut self.kept, &mut self.turn);
        let by = *turn.hello_by.get_or_insert_with(|| gate.hello_deadline());
        let hello = async {
            while !(kept.has_whole_hello() || kept.is_full() || kept.finished) {
                poll_fn(|cx| kept.poll_fill(cx, client)).await?;
            }
            io::Result::Ok(())
        };
        if let Ok(Err(_)) = timeout_at(by, hello).await {
            return Err(Outcome::ClientReset);
        }
        let mut waiting = match gate.enter_client(
            to.epoch,
            self.peer.ip(),
            kept.bytes.len(),
            Instant::now() - turn.waited,
        ) {
            GateEntry::Open(slot) => {
                turn.slot = Some(slot);
                return Ok(());
            }
            GateEntry::Wait(waiting) => waiting,
        };
        // While the client waits, no instance owes the client an answer.
        kept.set_held(true);
        turn.since = Some(Instant::now());
        let admitted = tokio::select! {
            biased;
            admitted = waiting.wait_for_turn() => admitted,
            () = wait_until_client_gone(client, kept) => Err(GateRefusal::Left),
        };
        self.leave_queue();
        let why = match admitted {
            // The runtime's readiness of the socket is older than the turn, so the kernel is asked
            // whether the client has left.
            Ok(slot) if !(self.kept.is_replayable() && socket::peer_has_ended(&**self.client)) => {
                self.turn.slot = Some(slot);
                return Ok(());
            }
            Ok(_) => GateRefusal::Left,
            Err(why) => why,
        };
        waiting.refuse_client(why);
        Err(match why {
            GateRefusal::Left => Outcome::ClientLeft,
            GateRefusal::Expired => Outcome::GateExpired,
            GateRefusal::Full => Outcome::GateFull,
        })
    }

    /// Ends the client's wait for its turn at the gate, and adds up the time.
    pub(super) fn leave_queue(&mut self) {
        self.kept.set_held(false);
        self.turn.waited += self
            .turn
            .since
            .take()
            .map_or(Duration::ZERO, |since| since.elapsed());
    }

    /// Holds the client until `awaited` returns, for at most `--hold` in total.
    ///
    /// # Errors
    /// How the connection ends instead.
    pub(super) async fn hold_client(
        &mut self,
        awaited: impl Future<Output = ()>,
    ) -> Result<(), Outcome> {
        let began = Instant::now();
        let until = began + self.context.hold.saturating_sub(self.held);
        let Ok(_place) = self.context.held.try_acquire() else {
            return Err(self.end_client(Outcome::HoldFull));
        };
        self.kept.set_held(true);
        let waited = tokio::select! {
            () = awaited => Ok(()),
            () = tokio::time::sleep_until(until) => Err(Outcome::HoldExpired),
            outcome = wait_until_client_leaves(self.client, &mut self.kept) => Err(outcome),
        };
        self.kept.set_held(false);
        self.held += began.elapsed();
        waited.map_err(|outcome| self.end_client(outcome))
    }

    /// Waits for a silent client to send something, for at most `--hold`. Silent clients take no
    /// place among held clients: no answer is due.
    pub(super) async fn wait_for_bytes(&mut self) -> bool {
        let filled = timeout(
            self.context.hold,
            poll_fn(|cx| self.kept.poll_fill(cx, self.client)),
        )
        .await;
        filled.is_ok_and(|filled| filled.is_ok()) && !self.kept.bytes.is_empty()
    }
}

/// Waits until a held client gives up.
async fn wait_until_client_leaves(client: &mut TcpStream, kept: &mut ReplayBuffer) -> Outcome {
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

/// Waits until a client with complete first bytes is gone. Later bytes stay in the kernel, and do
/// not count for the gate's room.
async fn wait_until_client_gone(client: &TcpStream, kept: &ReplayBuffer) {
    if kept.is_peeking() {
        // The unread first bytes hide the client's end. The wait uses a duplicate of the
        // descriptor, so that the event of bytes that come now is left for the client's own
        // descriptor.
        let watched = client
            .as_fd()
            .try_clone_to_owned()
            .and_then(|fd| make_awaitable(fd, Interest::READABLE));
        if let Ok(watched) = watched {
            while !socket::peer_has_ended(&watched)
                && let Ok(mut ready) = watched.readable().await
            {
                ready.clear_ready();
            }
        }
        if !socket::peer_has_ended(client)
            || !kept.is_replayable() && !socket::was_reset_or_timed_out(client)
        {
            let _ = client.ready(Interest::ERROR).await;
        }
        return;
    }
    let more = poll_fn(|cx| client.poll_peek(cx, &mut ReadBuf::new(&mut [0]))).await;
    // A client without TLS may have closed its side and still wait for its answer.
    if matches!(more, Ok(1..)) || !kept.is_replayable() && more.is_ok() {
        let _ = client.ready(Interest::ERROR).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::client_hello::HANDSHAKE_TYPE;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream as StdTcpStream};

    /// A client with a late ClientHello waits for its turn without the ClientHello.
    #[tokio::test]
    async fn bytes_sent_during_the_wait_are_read_after_the_turn() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = StdTcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (client, _) = listener.accept().unwrap();
        client.set_nonblocking(true).unwrap();
        let mut kept = ReplayBuffer::read(&client, None, None, true).unwrap();
        let mut client = TcpStream::from_std(client).unwrap();
        {
            let mut leaves = std::pin::pin!(wait_until_client_gone(&client, &kept));
            // The wait gets the events of these bytes, and does not end.
            for sent in [&[][..], &[HANDSHAKE_TYPE]] {
                sender.write_all(sent).unwrap();
                assert!(
                    timeout(Duration::from_millis(1), &mut leaves)
                        .await
                        .is_err()
                );
            }
        }
        let filled = timeout(
            Duration::from_secs(30),
            poll_fn(|cx| kept.poll_fill(cx, &mut client)),
        );
        filled.await.expect("the bytes are there").unwrap();
        assert_eq!(kept.bytes, [HANDSHAKE_TYPE]);
    }
}
