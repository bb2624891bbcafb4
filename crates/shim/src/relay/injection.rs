//! A client's socket becomes the result of an instance's accept(2), by the instance's supervisor ([`crate::backend::supervisor`]): no byte is
//! relayed.
//!
//! The shim keeps a duplicate until the instance's first byte. If the instance ends before, its client is there still: unread, or its first
//! bytes are in the replay buffer. So nothing that a TLS client sent is lost, as with the relay.

use super::Outcome;
use super::attempt::{AttemptResult, stuck};
use super::opening::{Opening, Tried};
use crate::backend::supervisor::Link;
use crate::backend::{BackendInstance, Table};
use crate::gate::HandshakeSlot;
use berth_node::terms::shortened;
use berth_os::awaitable;
use berth_os::socket::{self, Progress};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until};

/// How long an instance may take to answer a client that it has accepted. Then the client is the instance's alone.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// How long an instance may take to end after its supervisor, by which it is killed.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// Time between two looks for the instance's first byte. A TLS client mostly answers that byte at once, which is an event.
const LOOK: Duration = Duration::from_millis(50);

/// What can be done for a client whose instance has ended.
#[derive(Debug, PartialEq, Eq)]
enum Salvage {
    /// The instance had answered.
    Answered,
    /// The instance has read nothing: another one can have the socket.
    Intact,
    /// The instance has read this many of the bytes that are kept: another one can have them by a relay.
    Replay(usize),
    /// The instance has read what is not kept, or what may have done something already.
    Lost,
}

impl Salvage {
    /// For a client that sent `kept` bytes before its socket was passed.
    fn of(progress: Progress, kept: usize, is_replayable: bool) -> Self {
        let Progress { sent, received, unread } = progress;
        match usize::try_from(received.saturating_sub(unread)) {
            _ if sent > 0 => Self::Answered,
            Ok(0) => Self::Intact,
            Ok(read) if is_replayable && read <= kept => Self::Replay(read),
            _ => Self::Lost,
        }
    }
}

/// What became of a socket that was sent.
enum Sent {
    /// The instance has answered.
    Answered,
    /// The instance has accepted the client, which has left, or has waited for an answer for long.
    Kept,
    /// The supervisor has given the client back.
    Back,
    /// The same, since the instance is stuck and another one is ready.
    Recalled,
    /// The instance has ended, or its supervisor has, with a client that was not acknowledged.
    Ended,
}

impl Opening<'_> {
    /// The link by which an instance can have the client's socket, in place of its bytes. A client that is slow to send its ClientHello
    /// is relayed if there is a gate: the gate decides when the instance gets the rest.
    pub(super) fn link_to(&self, instance: &BackendInstance) -> Option<Arc<Link>> {
        let fits = self.kept.is_intact() && (self.kept.is_whole() || self.context.gate.is_none());
        instance.link.clone().filter(|_| fits)
    }

    /// Passes the client's socket to an instance. `None` if that is not possible, and the client is to be relayed.
    pub(super) async fn inject(
        &mut self,
        instance: &BackendInstance,
        table: &mut watch::Receiver<Arc<Table>>,
        tried: &Tried,
        replay: bool,
    ) -> Option<AttemptResult> {
        let link = self.link_to(instance)?;
        let place = tokio::select! {
            biased;
            place = link.place() => place?,
            () = stuck(table, instance.epoch, tried) => {
                self.leave_queue();
                return Some(AttemptResult::Abandoned);
            }
        };
        // A descriptor of its own: the runtime's readiness for the client's is that of what was peeked at.
        let watched = self.client.as_fd().try_clone_to_owned().and_then(|fd| awaitable(fd, Interest::READABLE));
        // From here on, the socket may be the instance's, which a reset at the end of this process must not meet.
        self.client.set_abort(false);
        let sent = watched.and_then(|watched| Ok((watched, link.send(self.client.as_fd(), self.peer, place)?)));
        let (watched, (seq, answer)) = match sent {
            Ok(sent) => sent,
            Err(error) => {
                tracing::debug!(instance = %instance.id, %error, "cannot pass a client's socket: relay");
                self.client.set_abort(true);
                return None;
            }
        };
        if replay {
            self.context.stats.replays.fetch_add(1, Relaxed);
        }
        let (slot, began) = (self.turn.slot.take(), Instant::now());
        let handshake = self.kept.is_client_hello().then(|| instance.handshakes.begin());
        let mut changes = table.clone();
        let recall = async {
            stuck(&mut changes, instance.epoch, tried).await;
            link.recall(seq)
        };
        let sent = follow(&watched, answer, recall, instance.started, table, slot).await;
        let answered = match sent {
            Sent::Answered => Some(began.elapsed()),
            Sent::Kept => return Some(AttemptResult::Injected),
            Sent::Back => {
                tracing::debug!(instance = %instance.id, "a client's socket came back: relay");
                return self.take_back(None).err().map(|_| AttemptResult::Refused(Outcome::ClientReset));
            }
            Sent::Recalled => {
                let back = self.take_back(None).map_or(Some(Outcome::ClientReset), |()| None);
                return Some(back.map_or(AttemptResult::Abandoned, AttemptResult::Refused));
            }
            Sent::Ended => None,
        };
        if let Some(handshake) = handshake {
            handshake.end();
            self.context.own_answered(instance, answered);
        }
        if answered.is_some() {
            return Some(AttemptResult::Injected);
        }
        let progress = socket::progress(watched.as_fd()).ok();
        let salvage = progress.map(|progress| Salvage::of(progress, self.kept.bytes.len(), self.kept.is_replayable()));
        tracing::debug!(instance = %instance.id, ?salvage, "ended with a client's socket");
        let read = match salvage {
            Some(Salvage::Answered) => return Some(AttemptResult::Injected),
            Some(Salvage::Intact) => None,
            Some(Salvage::Replay(read)) => Some(read),
            Some(Salvage::Lost) | None => return Some(AttemptResult::Refused(Outcome::BackendReset)),
        };
        let is_there = self.take_back(read).is_ok();
        let ended = if is_there { AttemptResult::Ended } else { AttemptResult::Refused };
        Some(ended(if is_there { Outcome::BackendReset } else { Outcome::ClientReset }))
    }

    /// The socket is the shim's alone again; the instance has `read` as many of the bytes.
    fn take_back(&mut self, read: Option<usize>) -> io::Result<()> {
        self.client.set_abort(true);
        self.kept.set_consumed(read.unwrap_or(0));
        let client = self.client.as_fd();
        socket::set_nonblocking(client)?;
        self.kept.catch_up(client)
    }
}

/// Waits for the first byte of an instance for a client whose socket was sent to its supervisor. The handshake's slot is released with that.
async fn follow(
    client: &AsyncFd<OwnedFd>,
    mut answer: oneshot::Receiver<bool>,
    recall: impl Future<Output = io::Result<()>>,
    started: u64,
    table: &mut watch::Receiver<Arc<Table>>,
    mut slot: Option<HandshakeSlot>,
) -> Sent {
    let ended = async {
        // If the sender is gone, so is the shim.
        let _ = table.wait_for(|table| table.instances.iter().all(|instance| instance.started != started)).await;
    };
    let (mut ended, mut recall, mut answered, mut recalled) = (pin!(ended), pin!(recall), None, false);
    let (mut until, mut has_left) = (Instant::now(), false);
    loop {
        let has_answered = socket::progress(client.as_fd()).is_ok_and(|progress| progress.sent > 0);
        if let Some(slot) = slot.take_if(|slot| has_answered || slot.ends() <= Instant::now()) {
            slot.end();
        }
        match answered {
            // Also if the acknowledgement comes after the byte: its place is the link's until then.
            _ if has_answered => return Sent::Answered,
            Some(true) if until <= Instant::now() || socket::has_ended(client) => return Sent::Kept,
            Some(false) if until <= Instant::now() => return Sent::Ended,
            _ => {}
        }
        tokio::select! {
            biased;
            () = &mut ended => return Sent::Ended,
            taken = &mut answer, if answered.is_none() => match taken {
                Ok(true) => (answered, until) = (Some(true), Instant::now() + shortened(ANSWERS_WITHIN)),
                Ok(false) => return if recalled { Sent::Recalled } else { Sent::Back },
                // The supervisor has ended, or has discarded the client.
                Err(_) => (answered, until) = (Some(false), Instant::now() + ENDS_WITHIN),
            },
            asked = &mut recall, if answered.is_none() && !recalled => {
                recalled = true;
                if let Err(error) = asked {
                    tracing::debug!(%error, "cannot recall a client");
                }
            }
            // The end of a client stays ready for ever.
            Ok(mut ready) = client.readable(), if !has_left => {
                has_left = ready.ready().is_read_closed();
                ready.clear_ready();
            }
            () = sleep_until(until), if answered.is_some() => {}
            () = sleep(LOOK) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_instance_read_decides_what_can_be_done_for_its_client() {
        for (sent, received, unread, kept, is_replayable, then) in [
            (0, 0, 0, 0, true, Salvage::Intact),
            (0, 300, 300, 300, true, Salvage::Intact),
            (0, 300, 300, 300, false, Salvage::Intact),
            // More came after the socket was passed.
            (0, 500, 500, 300, true, Salvage::Intact),
            (0, 300, 295, 300, true, Salvage::Replay(5)),
            (0, 300, 0, 300, true, Salvage::Replay(300)),
            (0, 500, 200, 300, true, Salvage::Replay(300)),
            (0, 500, 199, 300, true, Salvage::Lost),
            // What is not TLS.
            (0, 300, 299, 300, false, Salvage::Lost),
            // The client sent nothing before.
            (0, 300, 0, 0, true, Salvage::Lost),
            (1, 300, 0, 300, true, Salvage::Answered),
            (1, 300, 300, 300, true, Salvage::Answered),
        ] {
            let progress = Progress { sent, received, unread };
            assert_eq!(Salvage::of(progress, kept, is_replayable), then, "{progress:?} {kept} {is_replayable}");
        }
    }
}
