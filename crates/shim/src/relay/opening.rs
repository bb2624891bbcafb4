//! A client's connection on its way to an instance: the state between attempts.

use super::abort::AbortOnDrop;
use super::replay_buffer::ReplayBuffer;
use super::{Context, Outcome};
use crate::backend::BackendInstance;
use crate::gate::HandshakeSlot;
use berth_os::socket;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::Instant;

/// Maximum number of attempts at an instance in an epoch. The second attempt shows whether the
/// first attempt met a process that was just ending. An instance that ends two attempts without a
/// byte does so on purpose.
const MAX_ATTEMPTS: u8 = 2;

/// The time that a client has waited for its turn at the gate. A common limit applies to its waits
/// at all instances.
#[derive(Default)]
pub(super) struct TurnWait {
    pub(super) waited: Duration,
    pub(super) since: Option<Instant>,
    pub(super) hello_by: Option<Instant>,
    /// The slot at the gate for the next attempt.
    pub(super) slot: Option<HandshakeSlot>,
}

/// Instances that this connection has tried, each by its epoch, and the number of attempts. A new
/// process of an instance has a new epoch.
#[derive(Clone, Default)]
pub(super) struct TriedEpochs(Vec<(u64, u8)>);

impl TriedEpochs {
    pub(super) fn allows_attempt(&self, instance: &BackendInstance) -> bool {
        self.count_attempts(instance.epoch) < MAX_ATTEMPTS
    }

    pub(super) fn has_refused(&self, instance: &BackendInstance) -> bool {
        self.count_attempts(instance.epoch) > MAX_ATTEMPTS
    }

    fn count_attempts(&self, epoch: u64) -> u8 {
        self.0
            .iter()
            .find(|(known, _)| *known == epoch)
            .map_or(0, |(_, attempts)| *attempts)
    }

    pub(super) fn add_attempt(&mut self, epoch: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == epoch) {
            Some((_, attempts)) => *attempts = (*attempts + 1).min(MAX_ATTEMPTS),
            None => self.0.push((epoch, 1)),
        }
    }

    /// Records a refused connection: no further attempt in this epoch.
    pub(super) fn add_refusal(&mut self, epoch: u64) {
        self.0.retain(|(known, _)| *known != epoch);
        self.0.push((epoch, MAX_ATTEMPTS + 1));
    }
}

/// A client's connection on its way to an instance.
pub(super) struct Opening<'a> {
    pub(super) context: &'a Context,
    pub(super) client: &'a mut AbortOnDrop,
    pub(super) peer: SocketAddr,
    pub(super) kept: ReplayBuffer,
    pub(super) turn: TurnWait,
    /// How long the client was held in total.
    pub(super) held: Duration,
    pub(super) tried: TriedEpochs,
    /// How the last attempt ended. The client's connection ends in the same way if no instance does
    /// better.
    pub(super) ended: Option<Outcome>,
}

impl<'a> Opening<'a> {
    pub(super) fn new(
        context: &'a Context,
        client: &'a mut AbortOnDrop,
        peer: SocketAddr,
        kept: ReplayBuffer,
    ) -> Self {
        Self {
            context,
            client,
            peer,
            kept,
            turn: TurnWait::default(),
            held: Duration::ZERO,
            tried: TriedEpochs::default(),
            ended: None,
        }
    }

    /// Ends the client's connection in the same way as its last attempt.
    pub(super) fn end_client(&self, outcome: Outcome) -> Outcome {
        if outcome != Outcome::Closed {
            socket::reset_on_close(&**self.client);
        }
        outcome
    }
}
