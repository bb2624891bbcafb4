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

/// Most attempts at an instance in an epoch. The second attempt shows whether the first attempt met
/// a process that was just ending. An instance that ends two attempts without a byte does so on
/// purpose.
const ATTEMPTS: u8 = 2;

/// A client's waits for its turn at instances, with a common limit.
#[derive(Default)]
pub(super) struct TurnWait {
    pub(super) waited: Duration,
    pub(super) since: Option<Instant>,
    pub(super) hello_by: Option<Instant>,
    /// The slot for the next attempt.
    pub(super) slot: Option<HandshakeSlot>,
}

/// Epochs of instances that this connection tried, and the number of attempts in each.
#[derive(Clone, Default)]
pub(super) struct TriedEpochs(Vec<(u64, u8)>);

impl TriedEpochs {
    pub(super) fn allows(&self, instance: &BackendInstance) -> bool {
        self.attempts(instance.epoch) < ATTEMPTS
    }

    pub(super) fn has_refused(&self, instance: &BackendInstance) -> bool {
        self.attempts(instance.epoch) > ATTEMPTS
    }

    fn attempts(&self, epoch: u64) -> u8 {
        self.0
            .iter()
            .find(|(known, _)| *known == epoch)
            .map_or(0, |(_, attempts)| *attempts)
    }

    pub(super) fn add(&mut self, epoch: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == epoch) {
            Some((_, attempts)) => *attempts = (*attempts + 1).min(ATTEMPTS),
            None => self.0.push((epoch, 1)),
        }
    }

    /// Records a refused connection: no further attempt in this epoch.
    pub(super) fn refuse(&mut self, epoch: u64) {
        self.0.retain(|(known, _)| *known != epoch);
        self.0.push((epoch, ATTEMPTS + 1));
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
    /// How the last attempt ended. The client's connection ends alike if no instance does better.
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

    /// Ends the client's connection like its last attempt.
    pub(super) fn end_with(&self, outcome: Outcome) -> Outcome {
        if outcome != Outcome::Closed {
            socket::reset_on_close(&**self.client);
        }
        outcome
    }
}
