//! Explores every state of a bridge within bounds: both instances, etcd, the Service, COMMAND and
//! the operator change at any time.

use super::*;
use berth_testing::states::{Digest, Model, explore};
use std::hash::Hash;

#[derive(Debug, Clone, Copy)]
enum Event {
    Pass(u32),
    TemporaryEnds,
    Slow(u32),
    /// The node's kube-apiserver exits, or a new process starts and is ready after so many seconds.
    Own(Option<u32>),
    Etcd(bool),
    Named,
    Prepared(bool),
    Begin,
    End(Result<bool, ()>),
    Vanish,
    Operator(Order),
    Steerable(bool),
}

#[derive(Debug, Clone, Copy)]
enum Order {
    End,
    EndNow,
    Restore,
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
        ..calm_given(Fate::NeverReady)
    };
    Bounded {
        world: world_at(second, given),
        budget,
        over: false,
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
        // An exit of the node's kube-apiserver after it has settled no longer concerns the bridge.
        let is_over = matches!(machine.step(), Step::Linger | Step::Drain);
        may(
            if is_over { 0 } else { budget.own },
            &[Event::Own(Some(0)), Event::Own(Some(4)), Event::Own(None)],
        );
        may(
            budget.others,
            &[
                Event::Etcd(!self.world.etcd),
                Event::Steerable(given.unsteerable),
            ],
        );
        may(u8::from(given.named.is_none()), &[Event::Named]);
        may(
            u8::from(given.prepares.0 == LATER),
            &[Event::Prepared(true), Event::Prepared(false)],
        );
        if machine.is_commanding() {
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
        } = self;
        match event {
            Event::Pass(seconds) => {
                budget.passes -= 1;
                *over = world.run(world.now + seconds).is_some();
            }
            Event::TemporaryEnds => {
                budget.temporary -= 1;
                world.ends += u32::from(world.temporary.take().is_some());
            }
            Event::Slow(seconds) => {
                budget.temporary -= 1;
                world.given.slow = Some((world.now, seconds));
            }
            Event::Own(starts) => {
                budget.own -= 1;
                world.own = starts.and_then(|ready| world.process(ready));
                world.own_ready = 0;
            }
            Event::Etcd(serves) => {
                budget.others -= 1;
                world.etcd = serves;
            }
            Event::Steerable(can) => {
                budget.others -= 1;
                world.given.unsteerable = !can;
                if world.steering && !can {
                    (world.steering, world.unsteered) = (false, Some(world.now));
                }
            }
            Event::Named => world.given.named = Some(0),
            Event::Prepared(may) => world.given.prepares = (0, may),
            Event::Begin => {
                budget.commands -= 1;
                let _ = world.machine.command_begins();
            }
            Event::End(how) => {
                world.command = None;
                world
                    .machine
                    .command_ended(how.map_err(|()| "exit status 1".into()));
            }
            Event::Vanish => {
                world.command = None;
                world.machine.command_abandoned("it went away");
            }
            Event::Operator(order) => {
                budget.orders -= 1;
                let _ = match order {
                    Order::End => world.machine.end(false),
                    Order::EndNow => world.machine.end(true),
                    Order::Restore => world.machine.restore(),
                };
            }
        }
        if !*over {
            *over = world.act().is_some();
        }
        world.acts.clear();
    }

    fn digest(&self, digest: &mut Digest) {
        (self.budget, self.over).hash(digest);
        self.world.digest(digest);
    }

    /// Once failures stop and the operator ends the bridge, the bridge ends.
    fn check(&self, _: usize) {
        let mut model = self.clone();
        if model.over {
            return;
        }
        let World { given, .. } = &mut model.world;
        (given.unsteerable, given.slow, given.prepares.0) = (false, None, given.prepares.0.min(1));
        (given.start, given.own, given.restored) = (Some(1), Fate::Restarts(0), Some(Some(0)));
        model.world.etcd = true;
        model.world.own = model.world.process(0);
        model.world.run(model.world.now + 20);
        model.world.machine.command_ended(Ok(false));
        let _ = model.world.machine.end(false);
        let outcome = model.world.run(model.world.now + 400);
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
            self.own.map(|(own, _)| own),
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
            age(since, 121),
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
        )
            .hash(digest);
        (
            self.unsteered.map(|since| age(since, 5)),
            self.prepares.is_some(),
            self.command.is_some(),
        )
            .hash(digest);
    }
}

const NONE: Budget = Budget {
    passes: 4,
    temporary: 0,
    own: 0,
    others: 0,
    commands: 1,
    orders: 0,
};

fn explore_with(name: &str, budget: Budget, usually: usize) {
    let mut roots = Vec::new();
    for on_failure in [OnFailure::Stay, OnFailure::Restore, OnFailure::End] {
        for restored in [None, Some(Some(3))] {
            roots.extend(
                [9, 29, 31, 40].map(|second| make_root(second, on_failure, restored, budget)),
            );
        }
    }
    explore(name, &roots, usually);
}

#[test]
fn every_state_of_a_bridge() {
    let all = Budget {
        passes: 6,
        temporary: 2,
        own: 2,
        others: 2,
        commands: 2,
        orders: 2,
    };
    explore_with("bridge", all, 8_000);
}

/// Few events of each kind, to explore every order of events.
#[test]
fn every_state_of_a_bridge_and_a_few_faults() {
    explore_with(
        "bridge, its instance fails",
        Budget {
            temporary: 2,
            ..NONE
        },
        6_000,
    );
    explore_with(
        "bridge, the node's own fails",
        Budget { own: 2, ..NONE },
        6_000,
    );
    explore_with(
        "bridge, etcd fails or nothing can be steered",
        Budget { others: 2, ..NONE },
        6_000,
    );
    explore_with(
        "bridge, the operator interferes",
        Budget { orders: 2, ..NONE },
        6_000,
    );
    explore_with(
        "bridge, two commands",
        Budget {
            passes: 5,
            commands: 2,
            temporary: 1,
            ..NONE
        },
        6_000,
    );
}
