//! Matches clients with the server's accept(2) calls, as a pure state machine: no I/O, no clock.
//!
//! * A client of a shim, or of the server's own address, waits here until the server accepts, first
//!   come, first served.
//! * A call on a non-blocking listener returns at once, with a client or with `EAGAIN`: a waiting
//!   call would cost Go's runtime a thread. A call on a blocking listener waits for a client.
//! * While a client waits and no call waits, the server must be woken to call accept(2). This
//!   module calls the wake-up a bell ([`Action::Ring`]). The bell rings for the first client, and
//!   again whenever the server has not called for [`PATIENCE`]. Before each repeated bell, the
//!   server's descriptor is checked: if the listener is gone, all waiting clients are given back.

use berth_node::ipc::supervisor::UNACKNOWLEDGED;
use berth_os::seccomp::Notification;
use nix::errno::Errno;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::Duration;

/// Time on the supervisor's clock, counted from its start.
pub(crate) type Time = Duration;

/// Number that identifies a connection of a shim.
pub(crate) type Shim = u64;

/// Time within which the server should call accept(2) after a wake-up, here named a bell
/// ([`Action::Ring`]). The server is late only if a process was stopped.
const PATIENCE: Time = Duration::from_millis(15);

/// A client that waits for the server to accept it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client<S> {
    pub(crate) socket: S,
    pub(crate) peer: SocketAddr,
    /// The shim that sent the client, and the shim's number for it. `None` if the client dialled
    /// the server's own address.
    pub(crate) from: Option<(Shim, u64)>,
}

/// State of the server's listener, as the supervisor knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not bound yet.
    Starting,
    /// The server has bound its address. The number is the server's descriptor of the listener.
    Bound(RawFd),
    /// The server accepts. The number is the server's descriptor of the listener.
    Listening(RawFd),
    /// The server has closed its listener.
    Closed,
}

/// An action for the driver. The driver carries out actions in their order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action<S> {
    /// Let the kernel carry out the waiting call.
    Continue(Notification),
    /// Let the waiting call fail with an error.
    Fail(Notification, Errno),
    /// Replace the socket that is being bound by a socket that the supervisor holds, too, and let
    /// the call succeed. Answered by [`Machine::on_bound`] on success.
    Swap(Notification),
    /// Tell the shims that the server accepts, so that they may send clients.
    Listening,
    /// Make the waiting call return this client. Answered by [`Machine::on_handed_over`].
    HandOver(Notification, Client<S>),
    /// Report that the server has accepted the client.
    Taken(Client<S>),
    /// Give the client back to its shim.
    Back(Client<S>),
    /// Wake the server, so that it calls accept(2).
    Ring,
    /// Check whether the server still has its listener. Answered by
    /// [`Machine::on_listener_checked`].
    Look,
    /// Tell the shims to send no more clients, because the server has closed its listener.
    Close,
}

/// Matches clients with calls of accept(2). `S` is the type of a client's socket.
#[derive(Debug, Clone)]
pub(crate) struct Machine<S> {
    now: Time,
    phase: Phase,
    waiting: VecDeque<Client<S>>,
    /// Calls of accept(2) that wait for a client. Only calls on a blocking listener wait.
    calls: VecDeque<Notification>,
    /// Time of the next bell, that is the next attempt to wake the server. `None` if no client
    /// waits.
    bell: Option<Time>,
    actions: VecDeque<Action<S>>,
}

impl<S> Machine<S> {
    pub(crate) fn new() -> Self {
        let (waiting, calls, actions) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Self {
            now: Time::ZERO,
            phase: Phase::Starting,
            waiting,
            calls,
            bell: None,
            actions,
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the next action after an event. Call this until there are no more actions.
    pub(crate) fn next_action(&mut self) -> Option<Action<S>> {
        self.actions.pop_front()
    }

    /// Returns the time at which [`Machine::tick`] must be called if no event comes before.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        self.bell
    }

    /// Tells the machine what time it is. Must be called before any other event.
    pub(crate) fn tick(&mut self, now: Time) {
        self.now = now;
        self.actions
            .extend(self.bell.take_if(|bell| *bell <= now).map(|_| Action::Look));
    }

    /// Handles a call of bind(2). `its_address` is true if the server binds its own address. The
    /// caller must have called [`Machine::on_listener_checked`] before, because a closed listener
    /// may be replaced.
    pub(crate) fn on_bind(&mut self, call: Notification, its_address: bool) {
        let swaps = its_address && matches!(self.phase, Phase::Starting | Phase::Closed);
        self.actions.push_back(if swaps {
            Action::Swap(call)
        } else {
            Action::Continue(call)
        });
    }

    /// Notes that the server has bound a socket of which the supervisor has a duplicate. `number`
    /// is the server's descriptor.
    pub(crate) fn on_bound(&mut self, number: RawFd) {
        self.phase = Phase::Bound(number);
    }

    /// Handles a call of accept(2) by the server, or by a process that the server started.
    pub(crate) fn on_accept(&mut self, call: Notification, by_server: bool, blocking: bool) {
        match self.phase {
            Phase::Bound(listener) if by_server && listener == call.socket => {
                self.phase = Phase::Listening(listener);
                self.actions.push_back(Action::Listening);
            }
            Phase::Listening(listener) if by_server && listener == call.socket => {}
            _ => return self.actions.push_back(Action::Continue(call)),
        }
        self.bell = None;
        if blocking || !self.waiting.is_empty() {
            self.calls.push_back(call);
        } else {
            self.actions.push_back(Action::Fail(call, Errno::EAGAIN));
        }
        // The server needs no wake-up here, because it repeats the call until it gets `EAGAIN`.
        self.match_clients_with_calls(false);
    }

    /// Handles the outcome of [`Action::HandOver`].
    pub(crate) fn on_handed_over(
        &mut self,
        call: Notification,
        client: Client<S>,
        how: &io::Result<()>,
    ) {
        let errno = how
            .as_ref()
            .map_err(|error| error.raw_os_error().map(Errno::from_raw));
        match errno {
            Ok(()) => return self.actions.push_back(Action::Taken(client)),
            // The call no longer waits: a signal ended it, and the server repeats the call or ends.
            Err(Some(Errno::ENOENT | Errno::ESRCH)) => {}
            // The server has reached its limit of open descriptors.
            Err(Some(errno @ (Errno::EMFILE | Errno::ENFILE))) => {
                self.actions.push_back(Action::Fail(call, errno));
            }
            Err(_) => {
                return self.actions.extend([
                    Action::Fail(call, Errno::ECONNABORTED),
                    Action::Back(client),
                ]);
            }
        }
        if matches!(self.phase, Phase::Listening(_)) {
            self.waiting.push_front(client);
            self.match_clients_with_calls(false);
        } else {
            self.actions.push_back(Action::Back(client));
        }
    }

    /// True if as many clients of this shim wait as a shim may send. `None` stands for clients of
    /// the server's own address.
    pub(crate) fn is_shim_queue_full(&self, of: Option<Shim>) -> bool {
        let its = self
            .waiting
            .iter()
            .filter(|client| client.from.map(|(shim, _)| shim) == of);
        its.count() >= UNACKNOWLEDGED
    }

    /// Adds a client that a shim sent, or that dialled the server's own address.
    pub(crate) fn on_client(&mut self, client: Client<S>) {
        if matches!(self.phase, Phase::Listening(_))
            && !self.is_shim_queue_full(client.from.map(|(shim, _)| shim))
        {
            self.waiting.push_back(client);
            self.match_clients_with_calls(true);
        } else {
            self.actions.push_back(Action::Back(client));
        }
    }

    /// Gives a client back to the shim that wants it. Does nothing if the server has accepted the
    /// client.
    pub(crate) fn recall_client(&mut self, shim: Shim, seq: u64) {
        let position = self
            .waiting
            .iter()
            .position(|client| client.from == Some((shim, seq)));
        self.actions.extend(
            position
                .and_then(|position| self.waiting.remove(position))
                .map(Action::Back),
        );
        self.match_clients_with_calls(false);
    }

    /// Gives a shim's waiting clients back, because its messages cannot be understood.
    pub(crate) fn discard_clients_of_shim(&mut self, shim: Shim) {
        let is_its = |client: &Client<S>| client.from.is_some_and(|(from, _)| from == shim);
        let (back, stay): (VecDeque<_>, _) = self.waiting.drain(..).partition(is_its);
        self.waiting = stay;
        self.actions.extend(back.into_iter().map(Action::Back));
        self.match_clients_with_calls(false);
    }

    /// Handles the outcome of [`Action::Look`]. `there` is true if the server still has its
    /// listener, and false if the server has closed it or has ended.
    pub(crate) fn on_listener_checked(&mut self, there: bool) {
        if there {
            self.match_clients_with_calls(true);
        } else if matches!(self.phase, Phase::Bound(_) | Phase::Listening(_)) {
            (self.phase, self.bell) = (Phase::Closed, None);
            self.actions.push_back(Action::Close);
            self.actions
                .extend(self.calls.drain(..).map(Action::Continue));
            self.actions
                .extend(self.waiting.drain(..).map(Action::Back));
        }
    }

    /// Ends waiting calls with `EINTR` after a signal to the server, so that the signal's handler
    /// can run.
    pub(crate) fn on_signal(&mut self) {
        self.actions.extend(
            self.calls
                .drain(..)
                .map(|call| Action::Fail(call, Errno::EINTR)),
        );
    }

    /// Matches waiting clients with waiting calls. If clients are left, the server is woken at once
    /// if `rings` is true. If it is false, the server is woken after [`PATIENCE`], if clients still
    /// wait then.
    fn match_clients_with_calls(&mut self, rings: bool) {
        let pairs = self.calls.len().min(self.waiting.len());
        let served = self.calls.drain(..pairs).zip(self.waiting.drain(..pairs));
        self.actions
            .extend(served.map(|(call, client)| Action::HandOver(call, client)));
        if self.waiting.is_empty() {
            self.bell = None;
        } else if self.bell.is_none() {
            self.bell = Some(self.now + PATIENCE);
            self.actions.extend(rings.then_some(Action::Ring));
        }
    }
}

#[cfg(test)]
mod tests;
