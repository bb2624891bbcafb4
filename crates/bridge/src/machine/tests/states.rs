//! Explores every state of a bridge within bounds: both instances, etcd, the Service, COMMAND, a
//! restore and the operator change at any time. The bridge reaches an instance while the instance
//! serves. A real shim also reaches an instance that accepts connections and is not ready, and so
//! holds clients for longer than the model.

use super::*;
use berth_testing::states::{Digest, Explored, Model, explore};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::hash::Hash;
use std::rc::Rc;

#[derive(Debug, Clone, Copy)]
enum Event {
    Pass(u32),
    TemporaryEnds,
    /// Probes of the temporary instance fail for so many seconds, although it serves.
    Slow(u32),
    /// The temporary instance does not serve for so many seconds, and its process stays.
    TemporaryUnready(u32),
    /// The node's kube-apiserver exits, or a new process starts and is ready after so many seconds.
    Own(Option<u32>),
    /// The node's kube-apiserver does not serve for so many seconds, and its process stays.
    Unready(u32),
    Etcd(bool),
    Named,
    Prepared(bool),
    Begin,
    End(Result<bool, ()>),
    Vanish,
    Operator(Order),
    /// The restore is done. If [`Event::Own`] has happened since its begin, the kubelet has
    /// restarted kube-apiserver already.
    Restored,
    Steerable(bool),
    /// The lease of the steering expires: the bridge has hung for a moment.
    Lapse,
}

#[derive(Debug, Clone, Copy)]
enum Order {
    End,
    EndNow,
    Restore,
}

impl Event {
    fn name(self) -> String {
        let text = format!("{self:?}");
        text.split('(').next().unwrap_or_default().to_owned()
    }
}

/// Number of times that each event may still happen.
#[derive(Debug, Clone, Copy, Hash)]
struct Budget {
    passes: u8,
    temporary: u8,
    own: u8,
    others: u8,
    commands: u8,
    orders: u8,
}

#[derive(Clone)]
struct Bounded {
    world: World,
    budget: Budget,
    over: bool,
    /// Names of the events of all states.
    happened: Rc<RefCell<BTreeSet<String>>>,
}

const LATER: u32 = 1_000_000;

fn make_root(
    second: u32,
    on_failure: OnFailure,
    restored: Option<Option<u32>>,
    budget: Budget,
) -> Bounded {
    let prepares = if second < 32 {
        (LATER, true)
    } else {
        (0, true)
    };
    let named = (second >= 32).then_some(0);
    let given = Given {
        asks: LATER,
        command: LATER,
        stops: LATER,
        named,
        prepares,
        on_failure,
        restored,
        restoring: LATER,
        ..calm_given(Fate::NeverReady)
    };
    Bounded {
        world: world_at(second, given),
        budget,
        over: false,
        happened: Rc::default(),
    }
}

impl Model for Bounded {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let (World { given, machine, .. }, budget) = (&self.world, &self.budget);
        let mut events = Vec::new();
        if self.over {
            return events;
        }
        let mut may =
            |left: u8, all: &[Event]| events.extend_from_slice(if left > 0 { all } else { &[] });
        may(
            budget.passes,
            &[
                Event::Pass(1),
                Event::Pass(5),
                Event::Pass(21),
                Event::Pass(121),
            ],
        );
        may(
            budget.temporary,
            &[Event::TemporaryEnds, Event::Slow(2), Event::Slow(4)],
        );
        may(
            budget
                .temporary
                .min(u8::from(self.world.temporary_serves())),
            &[Event::TemporaryUnready(4), Event::TemporaryUnready(25)],
        );
        // An exit of the node's kube-apiserver after it has settled no longer concerns the bridge.
        let is_over = matches!(machine.step(), Step::Linger | Step::Drain);
        may(
            if is_over { 0 } else { budget.own },
            &[Event::Own(Some(0)), Event::Own(Some(4)), Event::Own(None)],
        );
        let serves = matches!(self.world.own, Some((_, 0)));
        may(
            if is_over || !serves { 0 } else { budget.own },
            &[Event::Unready(2), Event::Unready(25)],
        );
        may(
            budget.others,
            &[
                Event::Etcd(!self.world.etcd),
                Event::Steerable(given.unsteerable),
            ],
        );
        may(
            budget.others.min(u8::from(self.world.steering)),
            &[Event::Lapse],
        );
        may(u8::from(self.world.restoring.is_some()), &[Event::Restored]);
        may(u8::from(given.named.is_none()), &[Event::Named]);
        may(
            u8::from(given.prepares.0 == LATER),
            &[Event::Prepared(true), Event::Prepared(false)],
        );
        if machine.is_command_running() {
            may(
                1,
                &[
                    Event::End(Ok(true)),
                    Event::End(Ok(false)),
                    Event::End(Err(())),
                    Event::Vanish,
                ],
            );
        } else {
            may(
                budget.commands.min(u8::from(machine.step() == Step::Hold)),
                &[Event::Begin],
            );
            may(u8::from(machine.wanted), &[Event::Vanish]);
        }
        may(
            budget.orders,
            &[Order::End, Order::EndNow, Order::Restore].map(Event::Operator),
        );
        events
    }

    fn happen(&mut self, event: Event) {
        let Self {
            world,
            budget,
            over,
            happened,
        } = self;
        happened.borrow_mut().insert(event.name());
        match event {
            Event::Pass(seconds) => {
                budget.passes -= 1;
                *over = world.run_until(world.now + seconds).is_some();
            }
            Event::TemporaryEnds => {
                budget.temporary -= 1;
                world.ends += u32::from(world.temporary.take().is_some());
            }
            Event::Slow(seconds) => {
                budget.temporary -= 1;
                world.given.slow = Some((world.now, seconds));
            }
            Event::TemporaryUnready(seconds) => {
                budget.temporary -= 1;
                world.given.slow = Some((world.now, LOST.as_secs() as u32));
                world.temporary = world.temporary.map(|(process, _)| (process, seconds));
            }
            Event::Own(starts) => {
                budget.own -= 1;
                match starts {
                    Some(ready) => world.start_own(ready),
                    None => (world.own, world.own_ready) = (None, 0),
                }
            }
            Event::Unready(seconds) => {
                budget.own -= 1;
                world.own = world.own.map(|(process, _)| (process, seconds));
                world.own_ready = 0;
            }
            Event::Etcd(serves) => {
                budget.others -= 1;
                (world.etcd, world.etcd_served) = (serves, 0);
            }
            Event::Steerable(can) => {
                budget.others -= 1;
                world.given.unsteerable = !can;
                if !can {
                    world.stop_steering();
                }
            }
            Event::Lapse => {
                budget.others -= 1;
                world.stop_steering();
            }
            Event::Restored => world.end_restore(),
            Event::Named => world.given.named = Some(0),
            Event::Prepared(may) => world.given.prepares = (0, may),
            Event::Begin => {
                budget.commands -= 1;
                let _ = world.machine.request_command();
            }
            Event::End(how) => {
                world.command = None;
                world
                    .machine
                    .record_command_end(how.map_err(|()| "exit status 1".into()));
            }
            Event::Vanish => {
                world.command = None;
                world.machine.record_abandoned_command("it went away");
            }
            Event::Operator(order) => {
                budget.orders -= 1;
                let _ = match order {
                    Order::End => world.machine.request_end(false),
                    Order::EndNow => world.machine.request_end(true),
                    Order::Restore => world.machine.request_restore(),
                };
            }
        }
        if !*over {
            *over = world.carry_out_actions().is_some();
        }
        world.acts.clear();
    }

    fn digest(&self, digest: &mut Digest) {
        (self.budget, self.over).hash(digest);
        self.world.digest(digest);
    }

    /// Once failures stop and the operator ends the bridge, the bridge ends.
    fn check_state(&self, _: usize) {
        let mut model = self.clone();
        if model.over {
            return;
        }
        let World { given, .. } = &mut model.world;
        (given.unsteerable, given.slow, given.prepares.0) = (false, None, given.prepares.0.min(1));
        (given.start, given.own, given.restored) = (Some(1), Fate::Restarts(0), Some(Some(0)));
        given.restoring = 0;
        let temporary = model.world.temporary;
        model.world.temporary = temporary.map(|(process, left)| (process, left.min(1)));
        (model.world.etcd, model.world.dark) = (true, 0);
        model.world.start_own(0);
        model.world.run_until(model.world.now + 20);
        model.world.machine.record_command_end(Ok(false));
        let _ = model.world.machine.request_end(false);
        let outcome = model.world.run_until(model.world.now + 400);
        assert!(
            outcome.is_some(),
            "it does not end: {:?}",
            model.world.machine
        );
    }
}

impl World {
    fn digest(&self, digest: &mut Digest) {
        let Machine {
            limits: _,
            on_failure,
            step,
            since,
            wanted,
            commanding,
            abandoned,
            ended,
            must_restart,
            first,
            process,
            before,
            etcd_lost,
            own_ready,
            steered,
            lost,
            own_lost,
            own_is_late,
            trouble,
            steering_error,
            restores,
            outcome,
        } = &self.machine;
        let now = Duration::from_secs(self.now.into());
        let age = |since: &Option<Duration>, most: u64| {
            since.map(|since| now.saturating_sub(since).as_secs().min(most))
        };
        let left =
            |until: &Option<Duration>| until.map(|until| until.saturating_sub(now).as_secs());
        // Of processes, only equality matters.
        let all = [
            *first,
            *process,
            *before,
            own_ready.map(|(process, _)| process),
            self.own_process(),
            self.before,
        ];
        let name = |of: Option<u64>| all.iter().position(|known| *known == of);
        (
            all.map(name),
            *on_failure as u8,
            step,
            wanted,
            commanding,
            abandoned,
            ended,
            must_restart,
        )
            .hash(digest);
        (
            age(since, 144),
            left(etcd_lost),
            age(&own_ready.map(|(_, since)| since), 21),
            age(steered, 15),
        )
            .hash(digest);
        (
            left(lost),
            age(own_lost, 60),
            own_is_late,
            trouble.is_some(),
            steering_error.is_some(),
            restores,
        )
            .hash(digest);
        std::mem::discriminant(outcome).hash(digest);
        let Given {
            slow,
            named,
            prepares,
            restored,
            own,
            unsteerable,
            start,
            ..
        } = &self.given;
        let slow = slow.map(|(from, long)| ((from + long).saturating_sub(self.now), long));
        (
            slow,
            named,
            prepares,
            restored,
            *own == Fate::NeverReady,
            unsteerable,
            start,
        )
            .hash(digest);
        let age = |since: u32, most: u32| self.now.saturating_sub(since).min(most);
        let own = self
            .own
            .map(|(process, left)| (process == FIRST, left.min(200)));
        (
            self.temporary.map(|(_, left)| left),
            own,
            self.ends.min(3),
            self.steering,
            self.etcd,
            self.drained,
        )
            .hash(digest);
        (
            self.own_ready.min(21),
            self.dark,
            self.steered.map(|since| age(since, 15)),
            age(self.resteered, 5),
            self.unreachable.min(HOLD),
        )
            .hash(digest);
        (
            self.unsteered.map(|since| age(since, 5)),
            self.prepares.is_some(),
            self.command.is_some(),
            self.restoring.is_some(),
            self.started == Some(self.now),
            self.etcd_served.min(21),
        )
            .hash(digest);
    }
}

const NONE: Budget = Budget {
    passes: 2,
    temporary: 0,
    own: 0,
    others: 0,
    commands: 1,
    orders: 0,
};

/// Seconds in which the temporary instance gets ready, settles, gets the first connections, and
/// waits for COMMAND.
const STEPS: [u32; 4] = [9, 29, 31, 40];

/// Returns the names of the events that can happen after one of these seconds: the search must
/// have each of them.
fn list_possible_events(seconds: &[u32], budget: &Budget) -> BTreeSet<String> {
    let begins = u8::from(seconds.iter().any(|second| *second < 32));
    let all = [
        (1, "Pass Begin End Vanish Restored"),
        (begins, "Named Prepared"),
        (budget.temporary, "TemporaryEnds Slow TemporaryUnready"),
        (budget.own, "Own Unready"),
        (budget.others, "Etcd Steerable Lapse"),
        (budget.orders, "Operator"),
    ];
    let may_happen = all.into_iter().filter(|(left, _)| *left > 0);
    may_happen
        .flat_map(|(_, names)| names.split(' ').map(str::to_owned))
        .collect()
}

/// Returns the result of a search, and whether each kind of event has happened.
fn explore_with(name: &str, seconds: &[u32], budget: Budget, usually: usize) -> (Explored, bool) {
    let happened = Rc::default();
    let mut roots = Vec::new();
    for (on_failure, restored) in [
        (OnFailure::Stay, Some(Some(3))),
        (OnFailure::Restore, None),
        (OnFailure::Restore, Some(Some(3))),
        (OnFailure::End, Some(Some(3))),
    ] {
        roots.extend(seconds.iter().map(|second| Bounded {
            happened: Rc::clone(&happened),
            ..make_root(*second, on_failure, restored, budget)
        }));
    }
    let found = explore(name, &roots, usually);
    let all = *happened.borrow() == list_possible_events(seconds, &budget);
    (found, all)
}

#[test]
fn every_state_of_a_bridge_leads_to_its_end() {
    let all = Budget {
        passes: 6,
        temporary: 2,
        own: 2,
        others: 2,
        commands: 2,
        orders: 2,
    };
    let (found, have_happened) = explore_with("bridge", &STEPS, all, 8_000);
    assert!(have_happened && found.states >= 8_000, "{found:?}");
}

/// Few events of each kind, in every order. The floors are a little below the numbers of states.
#[test]
fn every_state_of_a_bridge_with_a_few_faults_leads_to_its_end() {
    let all = |name, seconds: &[u32], budget, floor| {
        let (found, have_happened) = explore_with(name, seconds, budget, 1_000_000);
        assert!(
            found.exhausted && found.states >= floor && have_happened,
            "{found:?}"
        );
    };
    let (late, last) = (&STEPS[2..], &STEPS[3..]);
    all("bridge, no fault", &STEPS, NONE, 2_200);
    all(
        "bridge, its instance fails",
        last,
        Budget {
            temporary: 1,
            ..NONE
        },
        7_200,
    );
    all(
        "bridge, the node's own fails",
        last,
        Budget { own: 1, ..NONE },
        8_800,
    );
    all(
        "bridge, etcd fails or nothing can be steered",
        late,
        Budget { others: 1, ..NONE },
        12_400,
    );
    all(
        "bridge, the operator interferes",
        &STEPS,
        Budget { orders: 1, ..NONE },
        7_900,
    );
    all(
        "bridge, two commands",
        &STEPS,
        Budget {
            commands: 2,
            ..NONE
        },
        3_900,
    );
    // Both instances fail, or the node's own fails during a restore.
    let few = Budget {
        passes: 1,
        own: 1,
        ..NONE
    };
    all(
        "bridge, both fail",
        last,
        Budget {
            temporary: 1,
            ..few
        },
        25_500,
    );
    all(
        "bridge, a restore",
        last,
        Budget { orders: 1, ..few },
        8_900,
    );
}

/// Two faults of one kind, and more time.
#[test]
fn every_state_of_a_bridge_with_two_faults_leads_to_its_end() {
    let few = Budget { passes: 4, ..NONE };
    for (name, budget) in [
        (
            "bridge, its instance fails twice",
            Budget {
                temporary: 2,
                ..few
            },
        ),
        (
            "bridge, the node's own fails twice",
            Budget { own: 2, ..few },
        ),
        (
            "bridge, etcd or the steering fails twice",
            Budget { others: 2, ..few },
        ),
        ("bridge, two orders", Budget { orders: 2, ..few }),
        (
            "bridge, two commands and a fault",
            Budget {
                passes: 5,
                commands: 2,
                temporary: 1,
                ..few
            },
        ),
    ] {
        let (found, _) = explore_with(name, &STEPS, budget, 2_000);
        assert!(found.states >= 2_000, "{found:?}");
    }
}
