//! Matches clients with the server's accept(2) calls, as a pure state machine: no I/O, no clock.
//!
//! * A client of a shim, or of the server's own address, waits here until the server accepts, first
//!   come, first served.
//! * A call on a non-blocking listener returns at once, with a client or with `EAGAIN`: a waiting
//!   call would cost Go's runtime a thread. A call on a blocking listener waits for a client.
//! * While clients wait and no call does, a bell is outstanding ([`Action::Ring`]). The bell rings
//!   for the first client, and again whenever the server has not called for [`PATIENCE`]. Before
//!   each repeated bell, the server's descriptor is checked: if the listener is gone, all waiting
//!   clients are given back.

use berth_node::ipc::supervisor::UNACKNOWLEDGED;
use berth_os::seccomp::Notification;
use nix::errno::Errno;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::time::Duration;

/// Time since the supervisor began.
pub(crate) type Time = Duration;

/// Unique number of a connection to a shim.
pub(crate) type Shim = u64;

/// Time in which the server should call accept(2) after a bell. A single bell is enough, unless a
/// process is stopped.
const PATIENCE: Time = Duration::from_millis(15);

/// A client that the server has not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client<S> {
    pub(crate) socket: S,
    pub(crate) peer: SocketAddr,
    /// The shim, and the shim's number for the client. `None` if the client dialled the server's
    /// own address.
    pub(crate) from: Option<(Shim, u64)>,
}

/// State of the server's listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not bound yet.
    Starting,
    /// Bound, with the descriptor's number in the server.
    Bound(RawFd),
    /// The server accepts from the descriptor with this number.
    Listening(RawFd),
    /// Closed by the server.
    Closed,
}

/// An action for the driver, to be carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action<S> {
    /// Let the kernel carry out a call.
    Continue(Notification),
    /// Let a call fail.
    Fail(Notification, Errno),
    /// Replace the socket that is being bound by a socket that the supervisor holds, too, and let
    /// the call succeed. Answered by [`Machine::on_bound`] on success.
    Swap(Notification),
    /// The server listens: shims may send clients.
    Listening,
    /// Let a call return this client. Answered by [`Machine::on_handed_over`].
    HandOver(Notification, Client<S>),
    /// The server has accepted the client.
    Taken(Client<S>),
    /// The shim has the client back.
    Back(Client<S>),
    /// Wake the server.
    Ring,
    /// Check whether the server still has its listener. Answered by
    /// [`Machine::on_listener_checked`].
    Look,
    /// The listener is gone: shims keep their clients.
    Close,
}

/// The state machine. `S` is a client's socket.
#[derive(Debug, Clone)]
pub(crate) struct Machine<S> {
    now: Time,
    phase: Phase,
    waiting: VecDeque<Client<S>>,
    /// Calls on a blocking listener, while no client waits.
    calls: VecDeque<Notification>,
    /// Time of the next bell.
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

    /// Time at which [`Machine::tick`] is needed without an event.
    pub(crate) fn wake_at(&self) -> Option<Time> {
        self.bell
    }

    /// Sets the time. Must be called before any other event.
    pub(crate) fn tick(&mut self, now: Time) {
        self.now = now;
        self.actions
            .extend(self.bell.take_if(|bell| *bell <= now).map(|_| Action::Look));
    }

    /// The server calls bind(2), for its address or another. The caller has checked the listener
    /// before, since a closed listener may be replaced.
    pub(crate) fn on_bind(&mut self, call: Notification, its_address: bool) {
        let swaps = its_address && matches!(self.phase, Phase::Starting | Phase::Closed);
        self.actions.push_back(if swaps {
            Action::Swap(call)
        } else {
            Action::Continue(call)
        });
    }

    /// The supervisor holds the socket that the server has bound. `number` is the server's
    /// descriptor.
    pub(crate) fn on_bound(&mut self, number: RawFd) {
        self.phase = Phase::Bound(number);
    }

    /// The server, or a child of the server, calls accept(2).
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
        // No bell: the server calls again, until `EAGAIN`.
        self.match_clients(false);
    }

    /// Outcome of [`Action::HandOver`].
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
            // The call no longer waits: the server repeats the call, or ends.
            Err(Some(Errno::ENOENT | Errno::ESRCH)) => {}
            // The server has no room for another descriptor.
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
            self.match_clients(false);
        } else {
            self.actions.push_back(Action::Back(client));
        }
    }

    /// True if a shim, or the server's own address (`None`), has the maximum of waiting clients.
    pub(crate) fn is_full(&self, of: Option<Shim>) -> bool {
        let its = self
            .waiting
            .iter()
            .filter(|client| client.from.map(|(shim, _)| shim) == of);
        its.count() >= UNACKNOWLEDGED
    }

    /// A client came from a shim, or to the server's own address.
    pub(crate) fn on_client(&mut self, client: Client<S>) {
        if matches!(self.phase, Phase::Listening(_))
            && !self.is_full(client.from.map(|(shim, _)| shim))
        {
            self.waiting.push_back(client);
            self.match_clients(true);
        } else {
            self.actions.push_back(Action::Back(client));
        }
    }

    /// A shim wants a client back. Nothing happens if the server has accepted the client.
    pub(crate) fn recall(&mut self, shim: Shim, seq: u64) {
        let position = self
            .waiting
            .iter()
            .position(|client| client.from == Some((shim, seq)));
        self.actions.extend(
            position
                .and_then(|position| self.waiting.remove(position))
                .map(Action::Back),
        );
        self.match_clients(false);
    }

    /// A shim's messages cannot be understood: the shim's waiting clients are given back.
    pub(crate) fn discard(&mut self, shim: Shim) {
        let is_its = |client: &Client<S>| client.from.is_some_and(|(from, _)| from == shim);
        let (back, stay): (VecDeque<_>, _) = self.waiting.drain(..).partition(is_its);
        self.waiting = stay;
        self.actions.extend(back.into_iter().map(Action::Back));
        self.match_clients(false);
    }

    /// Outcome of [`Action::Look`]: true if the server still has its listener. False after a close,
    /// and after the server's end.
    pub(crate) fn on_listener_checked(&mut self, there: bool) {
        if there {
            self.match_clients(true);
        } else if matches!(self.phase, Phase::Bound(_) | Phase::Listening(_)) {
            (self.phase, self.bell) = (Phase::Closed, None);
            self.actions.push_back(Action::Close);
            self.actions
                .extend(self.calls.drain(..).map(Action::Continue));
            self.actions
                .extend(self.waiting.drain(..).map(Action::Back));
        }
    }

    /// The server got a signal. Waiting calls return `EINTR`, so that the signal's handler can run.
    pub(crate) fn on_signal(&mut self) {
        self.actions.extend(
            self.calls
                .drain(..)
                .map(|call| Action::Fail(call, Errno::EINTR)),
        );
    }

    /// Matches waiting clients and waiting calls. If clients are left, the bell rings now, or a
    /// bell is already outstanding. Without `rings`, the first bell comes later, if clients still
    /// wait.
    fn match_clients(&mut self, rings: bool) {
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
