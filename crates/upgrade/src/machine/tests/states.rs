//! Every state of an upgrade within bounds. berth is killed and the node reboots after any action
//! and during any wait.

use super::world::Run;
use super::*;
use berth_testing::states::{Digest, Model, explore};
use std::hash::Hash;

#[derive(Debug, Clone, Copy)]
enum Event {
    /// berth runs until it has acted.
    Act,
    Pass(u32),
    /// berth is killed, and stays away for this many seconds.
    Kill(u32),
    /// The node reboots. Each slot's pod is ready after this many seconds.
    Reboot([u32; 2]),
    Interrupt,
    Silent(Slot, u32),
    /// The answer to the next drain is lost.
    LoseAnswer,
}

/// The remaining number of events of each kind.
#[derive(Debug, Clone, Copy, Hash)]
struct Budget {
    passes: u8,
    kills: u8,
    reboots: u8,
    silences: u8,
    answers: u8,
    interrupts: u8,
}

#[derive(Clone)]
struct Bounded {
    /// Number of the start state.
    root: usize,
    world: World,
    run: Run,
    budget: Budget,
    over: Option<Action>,
}

impl Model for Bounded {
    type Event = Event;

    fn events(&self) -> Vec<Event> {
        let budget = &self.budget;
        let mut events = Vec::new();
        if self.over.is_some() {
            return events;
        }
        let mut may =
            |left: u8, all: &[Event]| events.extend_from_slice(if left > 0 { all } else { &[] });
        may(1, &[Event::Act]);
        may(budget.passes, &[Event::Pass(2), Event::Pass(25)]);
        may(budget.kills, &[Event::Kill(0), Event::Kill(40)]);
        may(
            budget.reboots,
            &[[3, 3], [3, 60], [60, 3]].map(Event::Reboot),
        );
        for slot in [Slot::Canonical, Slot::Temporary] {
            may(
                budget.silences,
                &[2, 29].map(|long| Event::Silent(slot, long)),
            );
        }
        may(
            budget.answers.min(u8::from(!self.world.loses_answer)),
            &[Event::LoseAnswer],
        );
        may(budget.interrupts, &[Event::Interrupt]);
        events
    }

    fn happen(&mut self, event: Event) {
        let Self {
            world, run, budget, ..
        } = self;
        let until = match event {
            Event::Act => world.now + 400,
            Event::Pass(seconds) => {
                budget.passes -= 1;
                world.now + seconds
            }
            Event::Kill(away) => {
                budget.kills -= 1;
                return world.be_away(run, away);
            }
            Event::Reboot(boot) => {
                budget.reboots -= 1;
                world.reboot(boot);
                return world.be_away(run, 5);
            }
            Event::Silent(slot, long) => {
                budget.silences -= 1;
                world.given.silences[slot as usize] = Some((world.now, long));
                return;
            }
            Event::LoseAnswer => {
                budget.answers -= 1;
                world.loses_answer = true;
                return;
            }
            Event::Interrupt => {
                budget.interrupts -= 1;
                world.given.interrupt = Some(run.actions);
                return run.machine.interrupt();
            }
        };
        let done = run.actions;
        while self.over.is_none()
            && world.now < until
            && !(matches!(event, Event::Act) && run.actions > done)
        {
            self.over = world.step(run);
        }
    }

    fn digest(&self, digest: &mut Digest) {
        (self.root, self.budget, self.over.is_some()).hash(digest);
        self.world.digest(&self.run, digest);
    }

    /// Every run ends. After a halt, the repeated command finishes the upgrade once the cause is
    /// gone. A run without failures completes the upgrade.
    fn check(&self, _: usize) {
        let Self {
            mut world,
            run: Run { mut disk, .. },
            ..
        } = self.clone();
        if let Some(over) = &self.over {
            return assert!(matches!(over, Action::Finish(_) | Action::Halt(_)));
        }
        let Given {
            temporary,
            canonical,
            interrupt,
            ..
        } = world.given;
        let mut over = world.run(&mut disk);
        // Three lost answers lead back.
        let is_calm = interrupt.is_none() && self.budget.answers > 0;
        if is_calm && temporary == Fate::Good && canonical == Fate::Good {
            assert_eq!(over, Action::Finish(UpgradeOutcome::Done), "{:?}", disk.why);
        }
        if let Action::Halt(_) = over {
            world.given.temporary = Fate::Good;
            world.repair();
            over = world.run(&mut disk);
        }
        assert!(matches!(over, Action::Finish(_)), "{over:?}");
        assert_eq!(world.files, [Some(disk.target), None]);
        assert!(world.in_group(0));
    }
}

fn explore_with(name: &str, budgets: &[Budget], usually: usize) {
    let failing = [
        (Fate::NeverReady, Fate::Good),
        (Fate::Good, Fate::Refuses),
        (Fate::Good, Fate::Crashes(5)),
    ];
    let given = [(Fate::Good, Fate::Good)]
        .into_iter()
        .chain(failing)
        .flat_map(|(temporary, canonical)| {
            let judges = [None, Some(good_judge(true))];
            judges.map(|judge| Given {
                temporary,
                canonical,
                judge,
                ..good_given()
            })
        });
    let roots: Vec<_> = given
        .flat_map(|given| budgets.iter().map(move |budget| (given.clone(), *budget)))
        .collect();
    let roots = roots
        .into_iter()
        .enumerate()
        .map(|(root, (given, budget))| {
            let (world, run) = (
                World::new(given.clone()),
                Run::new(Position::begin(), given.course()),
            );
            Bounded {
                root,
                world,
                run,
                budget,
                over: None,
            }
        });
    explore(name, &roots.collect::<Vec<_>>(), usually);
}

#[test]
fn every_state_of_an_upgrade() {
    let budget = Budget {
        passes: 2,
        kills: 2,
        reboots: 1,
        silences: 0,
        answers: 3,
        interrupts: 1,
    };
    let silent = Budget {
        reboots: 0,
        kills: 1,
        silences: 2,
        ..budget
    };
    explore_with("upgrade", &[budget, silent], 8_000);
}

/// Only a few faults in each search, which therefore tries them after each action, to the end.
#[test]
fn every_state_of_an_upgrade_and_a_few_faults() {
    let none = Budget {
        passes: 1,
        kills: 0,
        reboots: 0,
        silences: 0,
        answers: 3,
        interrupts: 0,
    };
    explore_with(
        "upgrade, lost answers",
        &[Budget { passes: 0, ..none }],
        3_000,
    );
    explore_with(
        "upgrade, lost answers of a silent shim",
        &[Budget {
            passes: 0,
            silences: 1,
            ..none
        }],
        3_000,
    );
    explore_with("upgrade, kills", &[Budget { kills: 2, ..none }], 3_000);
    explore_with(
        "upgrade, a reboot",
        &[Budget {
            reboots: 1,
            interrupts: 1,
            ..none
        }],
        3_000,
    );
    explore_with(
        "upgrade, a silent shim",
        &[Budget {
            silences: 1,
            kills: 1,
            answers: 1,
            ..none
        }],
        3_000,
    );
    explore_with(
        "upgrade, an interrupt",
        &[Budget {
            interrupts: 1,
            kills: 1,
            passes: 2,
            ..none
        }],
        3_000,
    );
}
