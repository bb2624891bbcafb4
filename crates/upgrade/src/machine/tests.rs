//! Tests of the upgrade's state machine on a [model of a node](world). Anything may happen there at
//! any time.

mod rules;
mod states;
mod world;

use super::*;
use proptest::prelude::*;
use world::{Fate, Given, Judge, Reboot, World};

const BAD: &str = "errors: all";
const UNDECIDED: &str = "not enough to judge";

const LIMITS: Limits = Limits {
    ready: Duration::from_secs(120),
    settle: Duration::from_secs(20),
    stop: Duration::from_secs(60),
};

/// A reboot in any second of an upgrade or after any action. Pods start in any order and get ready
/// in time.
fn any_reboot() -> impl Strategy<Value = Reboot> {
    let when = prop_oneof![(0..200u32, Just(0)), (Just(0), 0..25usize)];
    (when, 0..40u32, 0..90u32, 0..90u32).prop_map(|((at, after), away, a, b)| Reboot {
        at,
        after,
        away,
        boot: [a, b],
    })
}

/// For each of the two pods, the second in which its shim stops answering, and the length of the
/// silence.
fn any_silences() -> impl Strategy<Value = [Option<(u32, u32)>; 2]> {
    prop::array::uniform2(prop::option::of((0..200u32, 1..30u32)))
}

fn any_fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => Just(Fate::Good),
        1 => Just(Fate::NeverReady),
        1 => Just(Fate::Refuses),
        1 => (0..15u32).prop_map(Fate::Crashes),
        1 => Just(Fate::NotStarted),
    ]
}

fn any_verdict() -> impl Strategy<Value = JudgeResult> {
    prop_oneof![3 => Just(JudgeResult::GoOn), 1 => Just(JudgeResult::GoBack(BAD.into())), 1 => Just(JudgeResult::Stop(UNDECIDED.into()))]
}

fn any_judge() -> impl Strategy<Value = Option<Judge>> {
    let judge = (
        any::<bool>(),
        0..60u32,
        prop::array::uniform2(any_verdict()),
    );
    prop::option::of(judge.prop_map(|(emulated, takes, verdicts)| Judge {
        emulated,
        takes,
        verdicts,
    }))
}

prop_compose! {
    fn any_given()(
        (temporary, canonical, back) in (any_fate(), any_fate(), any_fate()),
        (same, drains, journal) in (prop::bool::weighted(0.2), prop::bool::weighted(0.8), any::<bool>()),
        (lag, start, stop) in any_times(),
        kills in prop::collection::vec((1..25usize, 0..90u32), 0..6),
        interrupt in prop::option::weighted(0.2, 1..20usize),
        silences in any_silences(),
        mut judge in any_judge(),
    ) -> Given {
        if let Some(judge) = &mut judge {
            // If both manifests have the same text, there is no older release to emulate.
            judge.emulated &= !same;
        }
        let reboot = None;
        Given { temporary, canonical, back, same, drains, journal, lag, start, stop, kills, interrupt, reboot, silences, judge }
    }
}

fn any_times() -> impl Strategy<Value = (u32, u32, u32)> {
    (0..25u32, 0..40u32, 0..20u32)
}

prop_compose! {
    /// A node on which nothing fails.
    fn sound_given()((lag, start, stop) in any_times(), same: bool, drains: bool, judged: bool) -> Given {
        Given { lag, start, stop, same, drains, judge: judged.then(|| good_judge(!same)), ..good_given() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(berth_testing::case_count(2000)))]

    /// An instance serves at each moment (`World::pass_second`, `World::carry_out_action`). The
    /// upgrade ends in one of the two versions, or halts with a reason, and then the repeated
    /// command finishes the upgrade once the cause is fixed.
    #[test]
    fn an_instance_serves_at_all_times_and_the_upgrade_ends(given in any_given()) {
        let mut world = World::new(given.clone());
        let mut disk = Position::initial();
        let mut over = world.run_until_end(&mut disk);
        let judged = given.judge.clone().map(|judge| judge.verdicts);
        let is_bad = |at: usize| matches!(judged.as_ref().map(|judged| &judged[at]), Some(JudgeResult::GoBack(_)));
        let withdrawn = given.temporary != Fate::Good || is_bad(1) || given.interrupt.is_some();
        let sent_back = given.course().emulated && (is_bad(0) || given.interrupt.is_some());
        let goes_back = given.canonical != Fate::Good || sent_back;
        if let Action::Halt(why) = &over {
            let both_fail = goes_back && (given.same || given.back != Fate::Good);
            prop_assert!((both_fail || why == UNDECIDED) && given.temporary == Fate::Good, "{why} {disk:?}");
            prop_assert!(world.in_group(1), "the temporary one serves");
            // The operator repeats the command.
            world.repair_failures();
            over = world.run_until_end(&mut disk);
        }
        prop_assert!(world.is_canonical_alone(), "{:?}", world.observe());
        prop_assert_eq!(world.files[0], Some(disk.target));
        match over {
            Action::Finish(UpgradeOutcome::Done) => {
                prop_assert!(disk.target == Version::New && given.temporary == Fate::Good && disk.why.is_none());
            }
            Action::Finish(UpgradeOutcome::RolledBack) => {
                prop_assert!(disk.target == Version::Old && disk.why.is_some());
                prop_assert!(goes_back || withdrawn);
            }
            Action::Finish(UpgradeOutcome::Emulating) => {
                prop_assert!(given.course().emulated && disk.target == Version::Emulated);
                prop_assert!(goes_back && disk.why.is_some());
            }
            over => prop_assert!(false, "{over:?}"),
        }
        // The position names a verdict only if there was a bad verdict.
        prop_assert!(!disk.judged || is_bad(0) || is_bad(1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(berth_testing::case_count(2000)))]

    /// After a reboot no instance serves until the pods have started. Neither a reboot nor a silent
    /// shim counts as a failure of a version.
    #[test]
    fn a_reboot_or_a_silent_shim_does_not_turn_the_upgrade_back(
        given in sound_given(),
        harm in prop_oneof![any_reboot().prop_map(Ok), any_silences().prop_map(Err)],
    ) {
        let given = match harm {
            Ok(reboot) => Given { reboot: Some(reboot), ..given },
            Err(silences) => Given { silences, ..given },
        };
        let mut world = World::new(given);
        let mut disk = Position::initial();
        prop_assert_eq!(world.run_until_end(&mut disk), Action::Finish(UpgradeOutcome::Done), "{:?}", disk.why);
        prop_assert!(world.is_canonical_alone());
        prop_assert_eq!(world.files[0], Some(Version::New));
    }

    /// A failing version is not kept, whenever the node reboots: the upgrade ends, and the repeated
    /// command finishes it.
    #[test]
    fn an_upgrade_that_fails_also_fails_after_a_reboot(given in any_given(), reboot in any_reboot()) {
        let given = Given { reboot: Some(reboot), ..given };
        let mut world = World::new(given.clone());
        let mut disk = Position::initial();
        let mut over = world.run_until_end(&mut disk);
        if let Action::Halt(_) = over {
            world.given.temporary = Fate::Good;
            world.repair_failures();
            over = world.run_until_end(&mut disk);
        }
        prop_assert!(matches!(over, Action::Finish(_)), "{over:?}");
        prop_assert_eq!(world.files, [Some(disk.target), None]);
        prop_assert!(world.in_group(0));
    }
}

fn good_given() -> Given {
    Given {
        temporary: Fate::Good,
        canonical: Fate::Good,
        back: Fate::Good,
        same: false,
        drains: true,
        journal: true,
        lag: 1,
        start: 10,
        stop: 5,
        kills: Vec::new(),
        interrupt: None,
        reboot: None,
        silences: [None; 2],
        judge: None,
    }
}

/// A machine in the given step.
fn make_machine(step: Step) -> Machine {
    Machine::new(
        Position {
            step,
            ..Position::initial()
        },
        LIMITS,
        Course::default(),
    )
}

fn good_judge(emulated: bool) -> Judge {
    Judge {
        emulated,
        takes: 30,
        verdicts: [JudgeResult::GoOn, JudgeResult::GoOn],
    }
}

/// Runs an upgrade, and returns the last action and the reason.
fn run_to_end(given: Given) -> (Action, Option<String>) {
    let mut disk = Position::initial();
    (World::new(given).run_until_end(&mut disk), disk.why)
}

#[test]
fn every_failure_has_a_reason() {
    let why = |given| run_to_end(given).1.unwrap_or_default();
    assert_eq!(
        run_to_end(good_given()),
        (Action::Finish(UpgradeOutcome::Done), None)
    );
    let temporary = |temporary| {
        why(Given {
            temporary,
            ..good_given()
        })
    };
    assert_eq!(
        temporary(Fate::NeverReady),
        "the instance was not ready in 2m"
    );
    assert_eq!(
        temporary(Fate::Refuses),
        "the instance's process ended 3 times without getting ready"
    );
    assert_eq!(
        temporary(Fate::Crashes(7)),
        "the instance's process ended 11s after the instance was ready"
    );
    assert_eq!(
        why(Given {
            interrupt: Some(1),
            ..good_given()
        }),
        "interrupted by a signal"
    );
    assert_eq!(
        temporary(Fate::NotStarted),
        "the kubelet cannot start the instance"
    );
    assert_eq!(
        why(Given {
            temporary: Fate::NotStarted,
            journal: false,
            ..good_given()
        }),
        "the instance was not ready in 2m",
        "where the kubelet cannot be asked"
    );
    let rolled_back = Action::Finish(UpgradeOutcome::RolledBack);
    let not_started = run_to_end(Given {
        canonical: Fate::NotStarted,
        ..good_given()
    });
    assert_eq!(
        not_started,
        (
            rolled_back,
            Some("the kubelet cannot start the instance".into())
        )
    );
    let canonical = |back| {
        run_to_end(Given {
            canonical: Fate::Refuses,
            back,
            ..good_given()
        })
        .0
    };
    assert_eq!(
        canonical(Fate::Good),
        Action::Finish(UpgradeOutcome::RolledBack)
    );
    assert_eq!(
        canonical(Fate::NeverReady),
        Action::Halt("the instance was not ready in 2m".into())
    );
}

#[test]
fn a_bad_verdict_leads_back_to_the_other_instance() {
    use UpgradeOutcome::{Done, Emulating, RolledBack};
    let bad = |judge: Judge, at: usize| {
        let mut verdicts = judge.verdicts;
        verdicts[at] = JudgeResult::GoBack(BAD.into());
        run_to_end(Given {
            judge: Some(Judge { verdicts, ..judge }),
            ..good_given()
        })
    };
    let why = Some(BAD.to_owned());
    assert_eq!(
        bad(good_judge(false), 1),
        (Action::Finish(RolledBack), why.clone())
    );
    assert_eq!(
        bad(good_judge(true), 1),
        (Action::Finish(RolledBack), why.clone())
    );
    assert_eq!(bad(good_judge(true), 0), (Action::Finish(Emulating), why));
    // Without emulation, the verdict on the canonical instance is not asked for.
    assert_eq!(bad(good_judge(false), 0), (Action::Finish(Done), None));
    let judge = Judge {
        verdicts: [JudgeResult::GoOn, JudgeResult::Stop(UNDECIDED.into())],
        ..good_judge(true)
    };
    assert_eq!(
        run_to_end(Given {
            judge: Some(judge),
            ..good_given()
        }),
        (Action::Halt(UNDECIDED.into()), None)
    );
}

/// An instance that does not serve never replaces the one that serves, even after a good verdict.
#[test]
fn an_instance_lost_while_judged_is_removed() {
    for (step, back) in [
        (Step::JudgeTemporary, Step::Withdraw),
        (Step::JudgeCanonical, Step::StartCanonical),
    ] {
        let mut world = World::new(good_given());
        let files = if step == Step::JudgeTemporary {
            Version::Old
        } else {
            Version::New
        };
        (world.files, world.pods[1]) = ([Some(files), Some(Version::Emulated)], world.pods[0]);
        let course = Course {
            judged: true,
            emulated: true,
            same: false,
        };
        let mut machine = Machine::new(
            Position {
                step,
                ..Position::initial()
            },
            LIMITS,
            course,
        );
        let seen = world.observe();
        assert!(
            matches!(machine.next(&seen, Duration::ZERO), Action::Judge(_)),
            "{step}"
        );
        let away = InstanceObservation::default();
        let lost = NodeObservation {
            canonical: away,
            temporary: away,
            ..seen
        };
        let _ = machine.next(&lost, Duration::from_secs(1));
        machine.record_judge_result(JudgeResult::GoOn);
        assert_eq!(
            machine.next(&lost, Duration::from_secs(1) + LOST_AFTER),
            Action::Entered
        );
        assert_eq!(machine.position().step, back);
        assert!(!machine.position().judged);
    }
}

/// The time for a pod to stop begins when its file is removed, and not with an earlier wait.
#[test]
fn the_stop_limit_begins_when_the_file_is_removed() {
    let mut world = World::new(Given {
        drains: false,
        ..good_given()
    });
    world.files[1] = Some(Version::New);
    world.pods[1] = world.pods[0].take();
    let mut machine = make_machine(Step::Withdraw);
    assert_eq!(machine.next(&world.observe(), Duration::ZERO), Action::Wait);
    world.pods[0] = world.pods[1];
    assert_eq!(
        machine.next(&world.observe(), Duration::from_secs(100)),
        Action::Remove(Slot::Temporary)
    );
    world.files[1] = None;
    assert_eq!(
        machine.next(&world.observe(), Duration::from_secs(101)),
        Action::Wait
    );
    let late = machine.next(&world.observe(), Duration::from_secs(161));
    assert!(
        matches!(late, Action::Halt(why) if why.starts_with("the kubelet has not stopped the pod in 1m"))
    );
}

#[test]
fn a_foreign_file_is_left_alone() {
    let seen = World::new(good_given()).observe();
    for step in [
        Step::StartTemporary,
        Step::StopOld,
        Step::StopTemporary,
        Step::Withdraw,
    ] {
        for (other, what) in [
            (
                NodeObservation {
                    canonical_file: Content::Other,
                    ..seen
                },
                "canonical file",
            ),
            (
                NodeObservation {
                    temporary_file: Content::Other,
                    ..seen
                },
                "temporary file",
            ),
        ] {
            let next = make_machine(step).next(&other, Duration::ZERO);
            assert!(
                matches!(&next, Action::Halt(why) if why.contains(what)),
                "{step:?}: {next:?}"
            );
        }
    }
}

#[test]
fn a_shim_that_cannot_be_drained_ends_the_upgrade_before_any_removal() {
    let mut world = World::new(good_given());
    world.files[1] = Some(Version::New);
    world.pods[1] = world.pods[0];
    let seen = world.observe();
    let mut refused = make_machine(Step::StopOld);
    for _ in 0..MAX_FAILED_DRAINS {
        assert_eq!(
            refused.next(&seen, Duration::ZERO),
            Action::Drain(Slot::Canonical)
        );
        refused.record_drain(false);
    }
    assert_eq!(refused.next(&seen, Duration::ZERO), Action::Entered);
    assert_eq!(refused.position().step, Step::Withdraw);
    // A shim that has accepted a drain leaves, even if the answers to later drains are lost. So the
    // upgrade never goes back to its instance.
    let mut lost = make_machine(Step::StopOld);
    for asked in [true, false, false, false] {
        assert_eq!(
            lost.next(&seen, Duration::ZERO),
            Action::Drain(Slot::Canonical)
        );
        lost.record_drain(asked);
    }
    assert_eq!(
        lost.next(&seen, Duration::ZERO),
        Action::Remove(Slot::Canonical)
    );
    // A drained shim has not left in time. The shim's instance is stopped anyway, since the new
    // instance serves.
    let mut drained = make_machine(Step::StopOld);
    assert_eq!(
        drained.next(&seen, Duration::ZERO),
        Action::Drain(Slot::Canonical)
    );
    drained.record_drain(true);
    assert_eq!(
        drained.next(&seen, LEAVE_TIMEOUT),
        Action::Remove(Slot::Canonical)
    );
}

/// The temporary instance's shim is silent at the moment when the failed new version should be
/// removed. Until the removal, the new version ends again and again.
#[test]
fn failures_of_the_new_version_do_not_count_against_the_old_one() {
    let given = Given {
        canonical: Fate::Crashes(2),
        drains: false,
        journal: false,
        lag: 19,
        start: 2,
        stop: 7,
        silences: [None, Some((93, 28))],
        ..good_given()
    };
    let mut world = World::new(given);
    let over = world.run_until_end(&mut Position::initial());
    assert_eq!(over, Action::Finish(UpgradeOutcome::RolledBack));
}
