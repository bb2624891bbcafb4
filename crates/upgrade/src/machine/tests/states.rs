//! Searches all states of an upgrade that a limited number of faults can lead to. berth is killed
//! and the node reboots after any action and during any wait. Two silences of one shim do not
//! overlap: a shim's last answer counts for 30 s.

use super::world::Run;
use super::*;
use berth_testing::states::{Digest, Explored, Model, explore};
use std::hash::Hash;

#[derive(Debug, Clone, Copy)]
enum Event {
    /// berth looks at the node until there is something to do, and does that.
    Act,
    Pass(u32),
    /// berth is killed, and stays away for this many seconds.
    Kill(u32),
    /// The node reboots. Each of the two pods is ready after this many seconds.
    Reboot([u32; 2]),
    Interrupt,
    Silent(Slot, u32),
    /// The answer to the next drain is lost.
    LoseAnswer,
    /// The instance of a slot is not ready for this many seconds, and its process stays.
    Unready(Slot, u32),
    /// Somebody else writes one of the two manifest files.
    Edit(Slot),
}

/// How many more events of each kind may happen.
#[derive(Debug, Clone, Copy, Hash)]
struct Budget {
    passes: u8,
    kills: u8,
    reboots: u8,
    silences: u8,
    answers: u8,
    interrupts: u8,
    unready: u8,
    edits: u8,
}

const NONE: Budget = Budget {
    passes: 0,
    kills: 0,
    reboots: 0,
    silences: 0,
    answers: 3,
    interrupts: 0,
    unready: 0,
    edits: 0,
};

#[derive(Clone)]
struct Bounded {
    /// Index of the start state that led to this state.
    root: usize,
    world: World,
    run: Run,
    budget: Budget,
    over: Option<Action>,
    /// True if the upgrade may go back: an instance was unready for long, or its shim got silent
    /// before the shim reported that the instance is ready again, or three answers were lost.
    lost: bool,
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
            let (at, world) = (slot as usize, &self.world);
            let speaks = u8::from(!world.is_silent(at));
            may(
                budget.silences.min(speaks),
                &[2, 29].map(|long| Event::Silent(slot, long)),
            );
            may(
                budget.unready.min(u8::from(world.in_group(at))),
                &[2, 40].map(|long| Event::Unready(slot, long)),
            );
            let untouched = u8::from(world.edited == [false; 2]);
            may(budget.edits.min(untouched), &[Event::Edit(slot)]);
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
                return world.stay_killed_for(run, away);
            }
            Event::Reboot(boot) => {
                budget.reboots -= 1;
                world.reboot(boot);
                return world.stay_killed_for(run, 5);
            }
            Event::Silent(slot, long) => {
                budget.silences -= 1;
                // The instance may be ready again, but its shim's last report says that it is not.
                let at = slot as usize;
                self.lost |= world.serves_once_ready(at) && !world.reported[at];
                world.given.silences[at] = Some((world.now, long));
                return;
            }
            Event::Unready(slot, long) => {
                budget.unready -= 1;
                self.lost |= long > 3;
                world.unready[slot as usize] = long;
                return;
            }
            Event::Edit(slot) => {
                budget.edits -= 1;
                return world.edit_manifest_file(slot);
            }
            Event::LoseAnswer => {
                budget.answers -= 1;
                self.lost |= budget.answers == 0;
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
            self.over = world.step_once(run);
        }
    }

    fn digest(&self, digest: &mut Digest) {
        (self.root, self.budget, self.over.is_some(), self.lost).hash(digest);
        self.world.digest(&self.run, digest);
    }

    /// Every run ends. After a halt, the repeated command finishes the upgrade once the cause is
    /// gone. A run without failures completes the upgrade.
    fn check_state(&self, _: usize) {
        let Self {
            mut world,
            run: Run { mut disk, .. },
            ..
        } = self.clone();
        if let Some(over) = &self.over {
            return assert!(matches!(over, Action::Finish(_) | Action::Halt(_)));
        }
        let is_edited = world.edited != [false; 2];
        let mut over = world.run_until_end(&mut disk);
        assert!(!is_edited || matches!(over, Action::Halt(_)), "{over:?}");
        let is_calm = world.given.interrupt.is_none() && !self.lost;
        if is_calm && world.given.has_only_good_instances() && !is_edited {
            assert_eq!(over, Action::Finish(UpgradeOutcome::Done), "{:?}", disk.why);
        }
        if let Action::Halt(_) = over {
            world.given.temporary = Fate::Good;
            world.repair_failures();
            over = world.run_until_end(&mut disk);
        }
        let outcome = match disk.target {
            Version::Old => UpgradeOutcome::RolledBack,
            Version::Emulated => UpgradeOutcome::Emulating,
            Version::New => UpgradeOutcome::Done,
        };
        assert_eq!(over, Action::Finish(outcome), "{:?}", disk.why);
        assert_eq!(world.files, [Some(disk.target), None]);
        assert!(world.in_group(0));
        assert!(!disk.judged || self.world.given.has_bad_verdict());
    }
}

impl Given {
    fn has_only_good_instances(&self) -> bool {
        let mut verdicts = self.judge.iter().flat_map(|judge| &judge.verdicts);
        [self.temporary, self.canonical] == [Fate::Good; 2]
            && verdicts.all(|verdict| *verdict == JudgeResult::GoOn)
    }

    fn has_bad_verdict(&self) -> bool {
        let mut verdicts = self.judge.iter().flat_map(|judge| &judge.verdicts);
        verdicts.any(|verdict| matches!(verdict, JudgeResult::GoBack(_)))
    }
}

/// Good and failing instances, with and without a judge who finds no fault.
fn usual_nodes() -> Vec<Given> {
    let fates = [
        (Fate::Good, Fate::Good),
        (Fate::NeverReady, Fate::Good),
        (Fate::Good, Fate::Refuses),
        (Fate::Good, Fate::Crashes(5)),
    ];
    let with_judges = |(temporary, canonical)| {
        [None, Some(good_judge(true))].map(|judge| Given {
            temporary,
            canonical,
            judge,
            ..good_given()
        })
    };
    fates.into_iter().flat_map(with_judges).collect()
}

/// Other verdicts, a restart of the same version, a shim for the whole node, and an old manifest
/// that does not serve any more.
fn special_nodes() -> Vec<Given> {
    let go_back = || JudgeResult::GoBack(BAD.into());
    let stop = || JudgeResult::Stop(UNDECIDED.into());
    let good = || JudgeResult::GoOn;
    let judged = |emulated, verdicts| Given {
        judge: Some(Judge {
            verdicts,
            ..good_judge(emulated)
        }),
        ..good_given()
    };
    let same = Given {
        same: true,
        ..good_given()
    };
    let undrained = |given| Given {
        drains: false,
        ..given
    };
    let without_back = |given| Given {
        back: Fate::NeverReady,
        ..given
    };
    let refuses = |given| Given {
        canonical: Fate::Refuses,
        ..given
    };
    vec![
        judged(false, [good(), go_back()]),
        judged(true, [good(), stop()]),
        judged(true, [go_back(), good()]),
        judged(true, [stop(), good()]),
        same.clone(),
        refuses(same),
        undrained(good_given()),
        undrained(refuses(good_given())),
        without_back(refuses(good_given())),
        without_back(judged(true, [go_back(), good()])),
    ]
}

fn explore_with(name: &str, nodes: &[Given], budgets: &[Budget], usually: usize) -> Explored {
    let roots = nodes
        .iter()
        .flat_map(|given| budgets.iter().map(move |budget| (given.clone(), *budget)));
    let roots = roots.enumerate().map(|(root, (given, budget))| Bounded {
        root,
        run: Run::new(Position::initial(), given.course()),
        world: World::new(given),
        budget,
        over: None,
        lost: false,
    });
    explore(name, &roots.collect::<Vec<_>>(), usually)
}

#[test]
fn every_state_of_an_upgrade_keeps_the_invariants() {
    let budget = Budget {
        passes: 2,
        kills: 2,
        reboots: 1,
        interrupts: 1,
        unready: 1,
        edits: 1,
        ..NONE
    };
    let silent = Budget {
        reboots: 0,
        kills: 1,
        silences: 2,
        ..budget
    };
    let nodes = [usual_nodes(), special_nodes()].concat();
    let found = explore_with("upgrade", &nodes, &[budget, silent], 8_000);
    assert!(found.states >= 8_000, "{found:?}");
}

/// Each search has only a few faults. So it can try them after each action, up to the end of the
/// upgrade.
#[test]
fn every_state_of_an_upgrade_and_a_few_faults_keeps_the_invariants() {
    let deep = |name, budget| {
        let found = explore_with(name, &usual_nodes(), &[budget], 3_000);
        assert!(found.states >= 3_000, "{found:?}");
    };
    let few = Budget { passes: 1, ..NONE };
    deep(
        "upgrade, lost answers of a silent shim",
        Budget {
            silences: 1,
            ..NONE
        },
    );
    deep("upgrade, kills", Budget { kills: 2, ..few });
    deep(
        "upgrade, a reboot",
        Budget {
            reboots: 1,
            interrupts: 1,
            ..few
        },
    );
    deep(
        "upgrade, a silent shim",
        Budget {
            silences: 1,
            kills: 1,
            answers: 1,
            ..few
        },
    );
    deep(
        "upgrade, an interrupt",
        Budget {
            interrupts: 1,
            kills: 1,
            passes: 2,
            ..few
        },
    );
}

/// Each search tries a single fault after each action, up to the end of the upgrade. Each floor is
/// a little below the number of states that the search finds.
#[test]
fn every_state_of_an_upgrade_and_one_fault_keeps_the_invariants() {
    let nodes = [usual_nodes(), special_nodes()].concat();
    let all = |name, budget, floor| {
        let found = explore_with(name, &nodes, &[budget], 100_000);
        assert!(found.exhausted && found.states >= floor, "{found:?}");
    };
    let none = Budget { answers: 0, ..NONE };
    all("upgrade, lost answers", NONE, 800);
    all("upgrade, a kill", Budget { kills: 1, ..none }, 1_200);
    all("upgrade, one reboot", Budget { reboots: 1, ..none }, 2_200);
    all(
        "upgrade, a silence",
        Budget {
            silences: 1,
            ..none
        },
        2_400,
    );
    all(
        "upgrade, one interrupt",
        Budget {
            interrupts: 1,
            ..none
        },
        650,
    );
    all(
        "upgrade, an unready instance",
        Budget { unready: 1, ..none },
        2_050,
    );
    all(
        "upgrade, a foreign file",
        Budget { edits: 1, ..none },
        1_050,
    );
}
