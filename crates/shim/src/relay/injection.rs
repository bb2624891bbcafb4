//! Makes a client's socket the result of an instance's accept(2), by the instance's supervisor
//! ([`crate::backend::supervisor`]): no byte is relayed.
//!
//! The shim keeps a duplicate until the instance's first byte. If the instance ends before, the
//! shim still has its client: the first bytes are unread, or in the replay buffer. So no byte of a
//! TLS client is lost, as with the relay.
//!
//! Two things differ from the relay. An instance that hangs keeps the clients that it has accepted,
//! since no other process can take a descriptor away: such a client waits until the instance goes
//! on or ends. And a client of an instance that closes the connection without a byte sees the close
//! when the shim closes its duplicate: after [`ANSWER_TIMEOUT`].

use super::Outcome;
use super::attempt::{AttemptResult, wait_until_instance_stuck};
use super::opening::{Opening, TriedEpochs};
use crate::backend::supervisor::{Acknowledgement, Link, PassedClient};
use crate::backend::{BackendInstance, Table};
use crate::gate::HandshakeSlot;
use berth_node::terms::shorten_wait;
use berth_os::socket::{self, Progress};
use std::io;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// How long an instance may take to answer an accepted client. Afterwards the client is the
/// instance's alone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// When an instance or its supervisor has ended, both count as ended after this time. The instance
/// may live on: its record may have been removed, or its program has file capabilities, and the
/// kernel does not kill such a program with the supervisor. An instance that lives on can still
/// answer within this time.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Time between two checks for the instance's first byte. A TLS client's reply to that byte is an
/// event, but the reply may have a long way.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Least time between two checks for the instance's first byte, while that byte releases the
/// client's slot at the gate: `GATE_CHECK_INTERVAL` if nobody waits at the gate,
/// `FIRST_CHECK_INTERVAL` if a client does.
const GATE_CHECK_INTERVAL: Duration = Duration::from_millis(10);
const FIRST_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Possible help for the client of an ended instance.
#[derive(Debug, PartialEq, Eq)]
enum Salvage {
    /// The instance had answered.
    Answered,
    /// The instance has read nothing: another instance can have the socket.
    Intact,
    /// The instance has read this many of the kept bytes: the shim can relay the bytes to another
    /// instance.
    Replay(usize),
    /// The instance has read bytes that are not kept, or bytes that may have had an effect already.
    Lost,
}

impl Salvage {
    /// Decides what can be done for a client that had sent `kept` bytes before its socket was
    /// passed.
    fn from_progress(progress: Progress, kept: usize, is_replayable: bool) -> Self {
        let Progress {
            sent,
            received,
            unread,
        } = progress;
        match usize::try_from(received.saturating_sub(unread)) {
            _ if sent > 0 => Self::Answered,
            Ok(0) => Self::Intact,
            Ok(read) if is_replayable && read <= kept => Self::Replay(read),
            _ => Self::Lost,
        }
    }
}

/// The fate of a client's socket that was sent to a supervisor.
enum SocketFate {
    /// The instance has answered.
    Answered,
    /// The instance has accepted the client. The client has left, or has waited long for an answer.
    Kept,
    /// The supervisor has given the client back.
    Back,
    /// The supervisor has given the client back, since the instance is stuck and another instance
    /// is ready.
    Recalled,
    /// The instance has ended, or its supervisor has, with an unacknowledged client.
    Ended,
}

impl Opening<'_> {
    /// Returns the link that gives an instance the client's socket in place of its bytes. If there
    /// is a gate, a client with a slow ClientHello is relayed: the gate decides when the instance
    /// gets the rest.
    pub(super) fn find_link(&self, instance: &BackendInstance) -> Option<Arc<Link>> {
        let fits =
            self.kept.is_intact() && (self.kept.has_whole_hello() || self.context.gate.is_none());
        instance.link.clone().filter(|_| fits)
    }

    /// Passes the client's socket to an instance. `None` if passing fails and the client is to be
    /// relayed.
    pub(super) async fn inject_client(
        &mut self,
        instance: &BackendInstance,
        table: &mut watch::Receiver<Arc<Table>>,
        tried: &TriedEpochs,
        replay: bool,
    ) -> Option<AttemptResult> {
        let link = self.find_link(instance)?;
        let place = tokio::select! {
            biased;
            place = link.acquire_place() => place?,
            () = wait_until_instance_stuck(table, instance.epoch, tried) => {
                self.leave_queue();
                return Some(AttemptResult::Abandoned);
            }
        };
        // From here on, the instance may have the socket. A reset at the end of this process must
        // not hit the instance's socket.
        self.client.set_abort(false);
        let (seq, passed) = match link.send_client(self.client.as_fd(), place) {
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
        let handshake = self
            .kept
            .is_client_hello()
            .then(|| instance.handshakes.begin_handshake());
        let mut changes = table.clone();
        let recall = async {
            wait_until_instance_stuck(&mut changes, instance.epoch, tried).await;
            link.recall_client(seq)
        };
        let gone = async {
            // Without a sender, the shim is about to end.
            let _ = table
                .wait_for(|table| {
                    table
                        .instances
                        .iter()
                        .all(|other| other.started != instance.started)
                })
                .await;
        };
        let sent = wait_for_answer(
            self.client,
            &passed,
            recall,
            gone,
            || link.has_ended(),
            slot,
        )
        .await;
        let answered = match sent {
            SocketFate::Answered => Some(began.elapsed()),
            SocketFate::Kept => return Some(AttemptResult::Injected),
            SocketFate::Back => {
                tracing::debug!(instance = %instance.id, "a client's socket came back: relay");
                return self
                    .take_client_back(None)
                    .err()
                    .map(|_| AttemptResult::Refused(Outcome::ClientReset));
            }
            SocketFate::Recalled => {
                let back = self
                    .take_client_back(None)
                    .map_or(Some(Outcome::ClientReset), |()| None);
                return Some(back.map_or(AttemptResult::Abandoned, AttemptResult::Refused));
            }
            SocketFate::Ended => None,
        };
        if let Some(handshake) = handshake {
            handshake.end_handshake();
            self.context.count_answer(instance, answered);
        }
        if answered.is_some() {
            return Some(AttemptResult::Injected);
        }
        let progress = socket::read_progress(self.client.as_fd()).ok();
        let salvage = progress.map(|progress| {
            Salvage::from_progress(progress, self.kept.bytes.len(), self.kept.is_replayable())
        });
        tracing::debug!(instance = %instance.id, ?salvage, "ended with a client's socket");
        let read = match salvage {
            Some(Salvage::Answered) => return Some(AttemptResult::Injected),
            Some(Salvage::Intact) => None,
            Some(Salvage::Replay(read)) => Some(read),
            Some(Salvage::Lost) | None => {
                return Some(AttemptResult::Refused(Outcome::BackendReset));
            }
        };
        let is_there = self.take_client_back(read).is_ok();
        let ended = if is_there {
            AttemptResult::Ended
        } else {
            AttemptResult::Refused
        };
        Some(ended(if is_there {
            Outcome::BackendReset
        } else {
            Outcome::ClientReset
        }))
    }

    /// Takes the socket back for this shim alone. The instance has read `read` bytes.
    fn take_client_back(&mut self, read: Option<usize>) -> io::Result<()> {
        self.client.set_abort(true);
        self.kept.set_consumed(read.unwrap_or(0));
        socket::set_nonblocking(self.client.as_fd())?;
        match self.client.register_again() {
            // If the buffer is full, further bytes may already be in the socket, and they would
            // cause no event.
            Err(error) if self.kept.is_full() => return Err(error),
            _ => {}
        }
        self.kept.read_available_bytes(self.client.as_fd())
    }
}

/// Waits for an instance's first byte to a client, after the client's socket was sent to the
/// instance's supervisor. The first byte releases the handshake's slot. The instance has ended when
/// it is `gone` and its supervisor has `ended`, or some time after the first of both.
///
/// The runtime's readiness of the client is lost: see
/// [`AbortOnDrop::register_again`](super::abort::AbortOnDrop::register_again).
async fn wait_for_answer(
    client: &TcpStream,
    passed: &PassedClient,
    recall: impl Future<Output = io::Result<()>>,
    gone: impl Future<Output = ()>,
    ended: impl Fn() -> bool,
    mut slot: Option<HandshakeSlot>,
) -> SocketFate {
    let (mut recall, mut gone, mut recalled, mut is_gone) =
        (pin!(recall), pin!(gone), false, false);
    let (began, mut accepted, mut ends, mut has_left) =
        (Instant::now(), None::<Instant>, None::<Instant>, false);
    loop {
        // Makes the runtime forget the readiness that the client's ClientHello has caused, so that
        // only the client's next message is an event.
        let _ = client.try_io(Interest::READABLE, || {
            Err::<(), _>(io::ErrorKind::WouldBlock.into())
        });
        let now = Instant::now();
        // A slot that another client waits for is kept at most 1.5 times as long as the instance
        // needs.
        let look = slot.as_ref().map_or(CHECK_INTERVAL, |slot| {
            let least = if slot.has_waiting_clients() {
                FIRST_CHECK_INTERVAL
            } else {
                GATE_CHECK_INTERVAL
            };
            ((now - began) / 2).clamp(least, CHECK_INTERVAL)
        });
        tokio::select! {
            biased;
            () = &mut gone, if !is_gone => {
                is_gone = true;
                ends.get_or_insert(now + END_TIMEOUT);
            }
            () = passed.wait_until_client_returned() => {
                if passed.acknowledgement() == Some(Acknowledgement::Back) {
                    return if recalled { SocketFate::Recalled } else { SocketFate::Back };
                }
                ends.get_or_insert(now + END_TIMEOUT);
            }
            asked = &mut recall, if passed.acknowledgement().is_none() && !recalled => {
                recalled = true;
                if let Err(error) = asked {
                    tracing::debug!(%error, "cannot recall a client");
                }
            }
            // A client that has closed its side stays ready for ever, so this is awaited only once.
            Ok(ready) = client.ready(Interest::READABLE), if !has_left => has_left = ready.is_read_closed(),
            () = sleep(look) => {}
        }
        let (now, has_answered) = (
            Instant::now(),
            socket::has_sent(client.as_fd()).unwrap_or(false),
        );
        if let Some(slot) = slot.take_if(|slot| has_answered || slot.end_time() <= now) {
            slot.end_handshake();
        }
        // The supervisor may acknowledge the client after the first byte. The client's place in the
        // link is released only then.
        if has_answered {
            return SocketFate::Answered;
        }
        if passed.acknowledgement() == Some(Acknowledgement::Taken) {
            let accepted = *accepted.get_or_insert(now);
            if accepted + shorten_wait(ANSWER_TIMEOUT) <= now || socket::peer_has_ended(client) {
                return SocketFate::Kept;
            }
        }
        if ends.is_some_and(|ends| ends <= now || is_gone && ended()) {
            return SocketFate::Ended;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MaxOpenings;
    use crate::gate::{Gate, GateEntry};
    use std::future::{pending, ready};
    use std::io::Write;
    use std::net::{Ipv4Addr, TcpListener, TcpStream as StdTcpStream};
    use std::num::NonZeroUsize;

    #[test]
    fn the_bytes_that_an_instance_read_decide_the_salvage() {
        for (sent, received, unread, kept, is_replayable, then) in [
            (0, 0, 0, 0, true, Salvage::Intact),
            (0, 300, 300, 300, true, Salvage::Intact),
            (0, 300, 300, 300, false, Salvage::Intact),
            // More bytes came after the socket was passed.
            (0, 500, 500, 300, true, Salvage::Intact),
            (0, 300, 295, 300, true, Salvage::Replay(5)),
            (0, 300, 0, 300, true, Salvage::Replay(300)),
            (0, 500, 200, 300, true, Salvage::Replay(300)),
            (0, 500, 199, 300, true, Salvage::Lost),
            // No TLS.
            (0, 300, 299, 300, false, Salvage::Lost),
            // The client had sent nothing before its socket was passed.
            (0, 300, 0, 0, true, Salvage::Lost),
            (1, 300, 0, 300, true, Salvage::Answered),
            (1, 300, 300, 300, true, Salvage::Answered),
        ] {
            let progress = Progress {
                sent,
                received,
                unread,
            };
            assert_eq!(
                Salvage::from_progress(progress, kept, is_replayable),
                then,
                "{progress:?} {kept} {is_replayable}"
            );
        }
    }

    /// Returns a client, the instance's descriptor of the client's connection, and the shim's
    /// descriptor. The paused clock of the tests advances only while nothing else runs.
    fn connect_client() -> (StdTcpStream, StdTcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = StdTcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        let kept = TcpStream::from_std(accepted.try_clone().unwrap()).unwrap();
        (client, accepted, kept)
    }

    #[tokio::test(start_paused = true)]
    async fn a_slot_is_free_soon_after_the_first_byte_though_the_client_is_far_away() {
        for (after, is_awaited, most) in [(8, true, 14), (2, true, 4), (2, false, 11)] {
            let (_client, mut instance, kept) = connect_client();
            let gate = Gate::new(MaxOpenings::Fixed(NonZeroUsize::MIN), Vec::new()).unwrap();
            let enter = || gate.enter_client(1, Ipv4Addr::LOCALHOST.into(), 0, Instant::now());
            let GateEntry::Open(slot) = enter() else {
                panic!()
            };
            let _next = is_awaited.then(enter);
            let passed = PassedClient::default();
            passed.set_acknowledgement(Acknowledgement::Taken);
            let began = Instant::now();
            let answers = async {
                sleep(Duration::from_millis(after)).await;
                instance.write_all(&[0]).unwrap();
                pending::<()>().await;
            };
            let sent =
                wait_for_answer(&kept, &passed, pending(), answers, || false, Some(slot)).await;
            assert!(matches!(sent, SocketFate::Answered));
            let waited = began.elapsed();
            assert!(
                waited <= Duration::from_millis(most),
                "{after} {is_awaited}: {waited:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_without_a_record_keeps_its_client_while_its_supervisor_lives() {
        let accepted = Some(Acknowledgement::Taken);
        for (acknowledgement, ends) in [
            (None, false),
            (Some(Acknowledgement::Unknown), false),
            (accepted, false),
            (accepted, true),
        ] {
            let (_client, _instance, kept) = connect_client();
            let passed = PassedClient::default();
            acknowledgement
                .into_iter()
                .for_each(|acknowledgement| passed.set_acknowledgement(acknowledgement));
            let began = Instant::now();
            assert!(matches!(
                wait_for_answer(&kept, &passed, pending(), ready(()), || ends, None).await,
                SocketFate::Ended
            ));
            assert_eq!(began.elapsed() >= END_TIMEOUT, !ends);
        }
    }
}
