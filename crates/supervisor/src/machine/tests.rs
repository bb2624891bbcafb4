//! Models a server, its kernel and two shims. Calls, clients, wake-ups (bells), failures, signals
//! and ends come in any order.
//!
//! A client cannot be copied, so no client is handed over twice. The tests show that no client is
//! dropped.

mod states;

use super::*;
use berth_os::seccomp::Call;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A client. In these tests, a number stands for its socket.
type Client = super::Client<u64>;

fn make_client(number: u64, shim: Option<Shim>) -> Client {
    let from = shim.map(|shim| (shim, number));
    Client {
        socket: number,
        peer: ([10, 0, 0, 1], 40_000).into(),
        from,
    }
}

fn make_call(id: u64, call: Call, socket: RawFd) -> Notification {
    Notification {
        id,
        thread: 1,
        call,
        socket,
        address: 0,
        length: 0,
        flags: 0,
    }
}

fn accept_call(id: u64) -> Notification {
    make_call(id, Call::Accept, 5)
}

fn fail_with(errno: Errno) -> io::Result<()> {
    Err(errno.into())
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Bind {
        ours: bool,
        works: bool,
    },
    Accept {
        number: RawFd,
        by_server: bool,
        blocking: bool,
    },
    Client(Option<Shim>),
    Recall(Shim),
    Discard(Shim),
    Signal,
    Pass(u64),
    /// The server closes its listener. The supervisor gets no notice of that.
    Closes,
}

#[derive(Debug, Clone)]
struct World {
    machine: Machine<u64>,
    now: Time,
    next: u64,
    /// The number of the server's descriptor for its listener. `None` if the server has no
    /// listener.
    listener: Option<RawFd>,
    /// The shims' clients, by number, that were neither accepted nor given back. A client without a
    /// shim dialled the server's own address.
    waiting: BTreeMap<u64, Option<Shim>>,
    /// Calls without an answer, by ID. The value is true if the call may wait for a client.
    calls: BTreeMap<u64, bool>,
    /// True if the machine has woken the server (a bell) since the server's last call.
    rung: bool,
    shims_know: bool,
}

impl World {
    fn new() -> Self {
        Self {
            machine: Machine::new(),
            now: Time::ZERO,
            next: 0,
            listener: None,
            waiting: BTreeMap::new(),
            calls: BTreeMap::new(),
            rung: false,
            shims_know: false,
        }
    }

    fn handle_event(&mut self, event: Event, how: Option<Errno>) {
        self.machine.tick(self.now);
        self.perform_actions(how, true);
        self.next += 1;
        let id = self.next;
        match event {
            Event::Bind { ours, works } => {
                self.machine.on_listener_checked(self.listener.is_some());
                self.perform_actions(how, works);
                self.calls.insert(id, false);
                self.machine
                    .on_bind(make_call(id, Call::Bind, 5 + (id % 2) as RawFd), ours);
                let swaps = matches!(self.machine.actions.back(), Some(Action::Swap(_)));
                assert_eq!(swaps, ours && self.listener.is_none());
                self.perform_actions(how, works);
            }
            Event::Accept {
                number,
                by_server,
                blocking,
            } => {
                self.calls.insert(id, blocking);
                self.rung = false;
                let thread = if by_server { 1 } else { 2 };
                let call = Notification {
                    thread,
                    ..make_call(id, Call::Accept, number)
                };
                self.machine.on_accept(call, by_server, blocking);
                self.perform_actions(how, true);
            }
            Event::Client(shim) => {
                let first = self.waiting.is_empty();
                self.waiting.insert(id, shim);
                self.machine.on_client(make_client(id, shim));
                self.perform_actions(how, true);
                // The first waiting client wakes the server at once. There is one exception: a
                // client that came back from a failed call, because the server soon calls again.
                let rings = first
                    && self.waiting.contains_key(&id)
                    && self.calls.is_empty()
                    && how.is_none();
                assert!(
                    !rings || self.rung,
                    "the first waiting client is announced at once"
                );
            }
            Event::Recall(shim) => {
                let last = self
                    .waiting
                    .iter()
                    .rfind(|(_, of)| **of == Some(shim))
                    .map(|(number, _)| *number);
                self.machine.recall_client(shim, last.unwrap_or(id));
                self.perform_actions(how, true);
                assert!(last.is_none_or(|last| !self.waiting.contains_key(&last)));
            }
            Event::Discard(shim) => {
                self.machine.discard_clients_of_shim(shim);
                self.perform_actions(how, true);
                assert!(!self.waiting.values().any(|of| *of == Some(shim)));
            }
            Event::Signal => {
                self.machine.on_signal();
                self.perform_actions(how, true);
                assert!(self.calls.is_empty(), "a handler runs");
            }
            Event::Pass(millis) => self.now += Duration::from_millis(millis),
            Event::Closes => self.listener = None,
        }
        self.check_invariants();
    }

    fn perform_actions(&mut self, how: Option<Errno>, works: bool) {
        while let Some(action) = self.machine.next_action() {
            match action {
                Action::Continue(call) => self.record_answer(call),
                Action::Fail(call, errno) => {
                    assert!(
                        errno != Errno::EAGAIN || !self.calls[&call.id],
                        "a blocking call gets no EAGAIN"
                    );
                    self.record_answer(call);
                }
                Action::Swap(call) => {
                    if works {
                        self.listener = Some(call.socket);
                        self.machine.on_bound(call.socket);
                    }
                    self.record_answer(call);
                }
                Action::Listening => self.shims_know = true,
                Action::Close => self.shims_know = false,
                Action::HandOver(call, client) => {
                    assert_eq!(
                        call.thread, 1,
                        "the server's clients are not its children's"
                    );
                    let first = self.waiting.keys().next();
                    assert_eq!(first, Some(&client.socket), "first come, first served");
                    if how.is_none_or(|errno| errno == Errno::ENOENT) {
                        self.record_answer(call);
                    }
                    let how = how.map_or(Ok(()), fail_with);
                    self.machine.on_handed_over(call, client, &how);
                }
                Action::Taken(client) | Action::Back(client) => {
                    assert!(self.waiting.remove(&client.socket).is_some());
                }
                Action::Ring => self.rung = true,
                Action::Look => self.machine.on_listener_checked(self.listener.is_some()),
            }
        }
    }

    /// Records the answer to a call, and asserts that it is the first answer.
    fn record_answer(&mut self, call: Notification) {
        assert!(
            self.calls.remove(&call.id).is_some(),
            "{call:?} is answered twice"
        );
    }

    fn check_invariants(&self) {
        let known = self.machine.waiting.iter().map(|client| client.socket);
        assert!(
            self.waiting.keys().copied().eq(known),
            "no client is dropped"
        );
        let known = self.machine.calls.iter().map(|call| call.id);
        assert!(
            self.calls.keys().copied().eq(known),
            "each call has an answer, or waits"
        );
        assert!(self.calls.values().all(|may_wait| *may_wait));
        assert!(
            self.waiting.is_empty() || self.calls.is_empty(),
            "nobody waits for a call that waits"
        );
        let listens = matches!(self.machine.phase(), Phase::Listening(_));
        assert_eq!(listens, self.shims_know);
        assert!(
            self.waiting.is_empty() || listens,
            "clients of no listener are given back"
        );
        let wake = self.machine.wake_at();
        assert!(wake.is_none_or(|wake| wake <= self.now.max(self.machine.now) + PATIENCE));
        assert_eq!(
            wake.is_some(),
            !self.waiting.is_empty(),
            "a bell is outstanding while clients wait"
        );
    }

    /// Checks how a history ends. Within the time of one wake-up, a live server has accepted all
    /// clients, and a dead server has none left.
    fn check_history_end(&mut self, blocking: bool) {
        self.handle_event(Event::Pass(PATIENCE.as_millis() as u64), None);
        self.machine.tick(self.now);
        self.perform_actions(None, true);
        if let Phase::Listening(number) = self.machine.phase() {
            assert!(self.waiting.is_empty() || self.rung);
            for _ in 0..=self.waiting.len() {
                self.handle_event(
                    Event::Accept {
                        number,
                        by_server: true,
                        blocking,
                    },
                    None,
                );
            }
        }
        assert!(self.waiting.is_empty());
        self.machine.on_listener_checked(false);
        self.perform_actions(None, true);
        self.check_invariants();
        assert!(self.calls.is_empty());
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    let mostly = prop::bool::weighted(0.8);
    let number = prop_oneof![8 => 5..=6, 1 => Just(9)];
    let accept = |(number, by_server, blocking)| Event::Accept {
        number,
        by_server,
        blocking,
    };
    prop_oneof![
        1 => (mostly, mostly).prop_map(|(ours, works)| Event::Bind { ours, works }),
        8 => (number, mostly, prop::bool::weighted(0.3)).prop_map(accept),
        8 => prop::option::weighted(0.8, 1_u64..=2).prop_map(Event::Client),
        2 => (1_u64..=2).prop_map(Event::Recall),
        1 => (1_u64..=2).prop_map(Event::Discard),
        1 => Just(Event::Signal),
        4 => (0_u64..20).prop_map(Event::Pass),
        1 => Just(Event::Closes),
    ]
}

fn any_failure() -> impl Strategy<Value = Option<Errno>> {
    prop::option::weighted(
        0.3,
        prop::sample::select(vec![Errno::ENOENT, Errno::EMFILE, Errno::EPERM]),
    )
}

proptest! {
    #[test]
    fn each_client_is_handed_over_or_given_back(
        events in prop::collection::vec((any_event(), any_failure()), 0..80), blocking: bool,
    ) {
        let mut world = World::new();
        world.handle_event(Event::Bind { ours: true, works: true }, None);
        for (event, how) in events {
            world.handle_event(event, how);
        }
        world.check_history_end(blocking);
    }
}

fn take_actions(machine: &mut Machine<u64>) -> Vec<Action<u64>> {
    std::iter::from_fn(|| machine.next_action()).collect()
}

/// Returns a machine with a server that listens on descriptor 5.
fn listening_machine() -> Machine<u64> {
    let mut machine = Machine::new();
    let bind = make_call(1, Call::Bind, 5);
    machine.on_bind(bind, true);
    assert_eq!(take_actions(&mut machine), [Action::Swap(bind)]);
    machine.on_bound(5);
    machine.on_client(make_client(1, Some(1)));
    assert_eq!(
        take_actions(&mut machine),
        [Action::Back(make_client(1, Some(1)))],
        "nothing has accepted yet"
    );
    machine.on_accept(accept_call(2), true, false);
    assert_eq!(
        take_actions(&mut machine),
        [
            Action::Listening,
            Action::Fail(accept_call(2), Errno::EAGAIN)
        ]
    );
    machine
}

#[test]
fn a_bell_rings_for_the_first_waiting_client_and_again_for_a_stopped_server() {
    let mut machine = listening_machine();
    machine.on_client(make_client(2, Some(1)));
    assert_eq!(take_actions(&mut machine), [Action::Ring]);
    machine.on_client(make_client(3, None));
    assert_eq!(take_actions(&mut machine), []);
    machine.tick(PATIENCE);
    assert_eq!(take_actions(&mut machine), [Action::Look]);
    machine.on_listener_checked(true);
    assert_eq!(take_actions(&mut machine), [Action::Ring]);
    let late = PATIENCE + Duration::from_millis(5);
    machine.tick(late);
    machine.on_accept(accept_call(3), true, false);
    assert_eq!(
        take_actions(&mut machine),
        [Action::HandOver(accept_call(3), make_client(2, Some(1)))]
    );
    machine.on_handed_over(accept_call(3), make_client(2, Some(1)), &Ok(()));
    assert_eq!(
        take_actions(&mut machine),
        [Action::Taken(make_client(2, Some(1)))]
    );
    // If the server accepts only one client after a wake-up, the machine wakes it again.
    assert_eq!(machine.wake_at(), Some(late + PATIENCE));
    machine.tick(late + PATIENCE);
    assert_eq!(take_actions(&mut machine), [Action::Look]);
    machine.on_listener_checked(false);
    assert_eq!(
        take_actions(&mut machine),
        [Action::Close, Action::Back(make_client(3, None))]
    );
    assert_eq!(machine.wake_at(), None);
    // The server may bind its address again.
    let bind = make_call(4, Call::Bind, 7);
    machine.on_bind(bind, true);
    assert_eq!(take_actions(&mut machine), [Action::Swap(bind)]);
}

#[test]
fn a_blocking_call_waits_for_a_client_or_a_signal() {
    let mut machine = listening_machine();
    machine.on_accept(accept_call(3), true, true);
    assert_eq!(take_actions(&mut machine), []);
    machine.on_client(make_client(2, None));
    assert_eq!(
        take_actions(&mut machine),
        [Action::HandOver(accept_call(3), make_client(2, None))]
    );
    let full = fail_with(Errno::EMFILE);
    machine.on_handed_over(accept_call(3), make_client(2, None), &full);
    assert_eq!(
        take_actions(&mut machine),
        [Action::Fail(accept_call(3), Errno::EMFILE)]
    );
    machine.on_accept(accept_call(4), true, true);
    assert_eq!(
        take_actions(&mut machine),
        [Action::HandOver(accept_call(4), make_client(2, None))]
    );
    let failed = [
        Action::Fail(accept_call(4), Errno::ECONNABORTED),
        Action::Back(make_client(2, None)),
    ];
    machine.on_handed_over(
        accept_call(4),
        make_client(2, None),
        &fail_with(Errno::EPERM),
    );
    assert_eq!(take_actions(&mut machine), failed);
    machine.on_accept(accept_call(5), true, true);
    assert_eq!(take_actions(&mut machine), []);
    machine.on_signal();
    assert_eq!(
        take_actions(&mut machine),
        [Action::Fail(accept_call(5), Errno::EINTR)]
    );
    machine.on_accept(accept_call(6), true, true);
    assert_eq!(take_actions(&mut machine), []);
    machine.on_listener_checked(false);
    assert_eq!(
        take_actions(&mut machine),
        [Action::Close, Action::Continue(accept_call(6))]
    );
    machine.on_listener_checked(false);
    assert_eq!(take_actions(&mut machine), [], "once");
}

#[test]
fn a_shim_with_many_waiting_clients_gets_the_next_one_back() {
    let mut machine = listening_machine();
    let most = UNACKNOWLEDGED as u64;
    for number in 0..most {
        machine.on_client(make_client(number, Some(1)));
    }
    assert_eq!(take_actions(&mut machine), [Action::Ring]);
    for shim in [Some(1), Some(2), None] {
        machine.on_client(make_client(most, shim));
    }
    let back = Action::Back(make_client(most, Some(1)));
    assert_eq!(take_actions(&mut machine), [back]);
}
