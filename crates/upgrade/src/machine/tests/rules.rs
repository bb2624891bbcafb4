//! Single rules. Each rule alone decides the machine's reaction to an observation.

use super::*;
use Step::{
    JudgeCanonical, JudgeTemporary, SettleCanonical, SettleTemporary, StartCanonical,
    StartTemporary, StopOld, StopTemporary, Verify, Withdraw,
};
use Version::{Emulated, New, Old};

const STEPS: [Step; 10] = [
    StartTemporary,
    SettleTemporary,
    JudgeTemporary,
    StopOld,
    StartCanonical,
    SettleCanonical,
    JudgeCanonical,
    StopTemporary,
    Verify,
    Withdraw,
];

const AWAY: InstanceObservation = InstanceObservation {
    alive: false,
    in_group: false,
    drains: false,
    silent: false,
    process: None,
    ends: 0,
    not_started: false,
};

const SERVES: InstanceObservation = InstanceObservation {
    alive: true,
    in_group: true,
    drains: true,
    process: Some(1),
    ..AWAY
};

/// Both instances serve.
fn observe_both(canonical: Version, temporary: Version) -> NodeObservation {
    NodeObservation {
        canonical_file: Content::Holds(canonical),
        temporary_file: Content::Holds(temporary),
        canonical: SERVES,
        temporary: SERVES,
    }
}

fn with_target(step: Step, target: Version) -> Machine {
    Machine::new(
        Position {
            step,
            target,
            ..Position::initial()
        },
        LIMITS,
        Course::default(),
    )
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn is_halt(action: &Action) -> bool {
    matches!(action, Action::Halt(_))
}

#[test]
fn an_interrupt_leads_back_until_the_old_instance_is_removed() {
    let back = [
        StartTemporary,
        SettleTemporary,
        JudgeTemporary,
        JudgeCanonical,
        Withdraw,
    ];
    for step in STEPS {
        assert_eq!(
            with_target(step, New).interrupt_leads_back(),
            back.contains(&step),
            "{step}"
        );
        // An interrupt does not turn an upgrade around that is on its way back.
        assert!(
            with_target(step, Old).interrupt_leads_back()
                && with_target(step, Emulated).interrupt_leads_back(),
            "{step}"
        );
    }
}

#[test]
fn the_first_four_steps_watch_the_temporary_instance() {
    for (nth, step) in STEPS.into_iter().enumerate() {
        assert_eq!(step.watched_slot() == Slot::Temporary, nth < 4, "{step}");
    }
}

#[test]
fn a_step_is_displayed_as_in_json() {
    for step in STEPS {
        assert_eq!(serde_json::to_value(step).unwrap(), step.to_string());
    }
    assert_eq!(
        [Old, Emulated, New].map(|version| version.to_string()),
        ["old", "new, emulating", "new"]
    );
}

#[test]
fn a_foreign_file_halts_every_step() {
    for step in STEPS {
        let seen = NodeObservation {
            canonical_file: Content::Other,
            ..observe_both(Old, New)
        };
        assert!(
            is_halt(&make_machine(step).next(&seen, Duration::ZERO)),
            "{step}"
        );
        let seen = NodeObservation {
            temporary_file: Content::Other,
            ..observe_both(Old, New)
        };
        assert!(
            is_halt(&make_machine(step).next(&seen, Duration::ZERO)),
            "{step}"
        );
    }
}

/// A step halts if `kube-apiserver.yaml` holds another manifest than it should, or is missing.
#[test]
fn a_wrong_canonical_file_halts_the_step() {
    for (steps, bad) in [
        (
            &[
                StartTemporary,
                SettleTemporary,
                JudgeTemporary,
                StopOld,
                Withdraw,
            ][..],
            New,
        ),
        (&[SettleCanonical, JudgeCanonical, StopTemporary], Old),
    ] {
        for step in steps {
            assert!(
                is_halt(&make_machine(*step).next(&observe_both(bad, New), Duration::ZERO)),
                "{step}"
            );
            let none = NodeObservation {
                canonical_file: Content::Absent,
                ..observe_both(Old, New)
            };
            let next = make_machine(*step).next(&none, Duration::ZERO);
            // `StopOld` itself removes the file.
            assert_eq!(is_halt(&next), *step != StopOld, "{step}");
        }
    }
}

#[test]
fn a_removed_temporary_file_leads_back_while_its_instance_is_watched() {
    for (step, next) in [
        (SettleTemporary, Withdraw),
        (JudgeTemporary, Withdraw),
        (SettleCanonical, SettleCanonical),
    ] {
        let canonical = if step == SettleCanonical { New } else { Old };
        let seen = NodeObservation {
            temporary_file: Content::Absent,
            ..observe_both(canonical, New)
        };
        let mut machine = make_machine(step);
        let _ = machine.next(&seen, Duration::ZERO);
        assert_eq!(machine.position().step, next, "{step}");
    }
}

#[test]
fn only_the_old_instances_shim_must_accept_a_drain() {
    let refused = |step, canonical, goes: InstanceObservation| {
        let mut machine = make_machine(step);
        (0..MAX_FAILED_DRAINS).for_each(|_| machine.record_drain(false));
        let seen = match step {
            StopOld => NodeObservation {
                canonical: goes,
                ..observe_both(canonical, New)
            },
            _ => NodeObservation {
                temporary: goes,
                ..observe_both(canonical, New)
            },
        };
        (machine.next(&seen, Duration::ZERO), machine.position().step)
    };
    assert_eq!(refused(StopOld, Old, SERVES), (Action::Entered, Withdraw));
    let left = InstanceObservation {
        in_group: false,
        ..SERVES
    };
    assert_eq!(
        refused(StopOld, Old, left),
        (Action::Remove(Slot::Canonical), StopOld)
    );
    assert_eq!(
        refused(StopTemporary, New, SERVES),
        (Action::Remove(Slot::Temporary), StopTemporary)
    );
}

/// The new instance stops serving while the old one is being stopped. The machine goes back only if
/// the old one still serves and was not drained.
#[test]
fn no_step_goes_back_to_a_drained_or_lost_instance() {
    let away = InstanceObservation {
        in_group: false,
        ..SERVES
    };
    for (old, drained, back) in [
        (SERVES, false, true),
        (SERVES, true, false),
        (away, false, false),
        (away, true, false),
    ] {
        let seen = NodeObservation {
            canonical: old,
            ..observe_both(Old, New)
        };
        let mut machine = make_machine(StopOld);
        let _ = machine.next(&seen, secs(0));
        if drained {
            machine.record_drain(true);
        }
        let lost = NodeObservation {
            temporary: away,
            ..seen
        };
        assert_eq!(machine.next(&lost, secs(1)), Action::Wait);
        let next = machine.next(&lost, secs(1) + LOST_AFTER);
        if back {
            assert_eq!((next, machine.position().step), (Action::Entered, Withdraw));
        } else {
            assert_eq!(next, Action::Wait);
            assert_eq!(machine.next(&lost, LIMITS.ready), Action::Wait);
            assert!(is_halt(&machine.next(&lost, secs(1) + LIMITS.ready)));
        }
    }
}

/// While the other instance does not serve, the machine waits until the ready timeout, and then
/// halts. It removes nothing meanwhile.
#[test]
fn a_removal_waits_for_the_staying_instance() {
    let away = InstanceObservation {
        in_group: false,
        ..SERVES
    };
    for (mut machine, seen) in [
        (
            with_target(StartCanonical, Old),
            NodeObservation {
                temporary: away,
                ..observe_both(New, New)
            },
        ),
        (
            with_target(Withdraw, Old),
            NodeObservation {
                canonical: away,
                ..observe_both(Old, New)
            },
        ),
    ] {
        assert_eq!(machine.next(&seen, secs(0)), Action::Wait);
        assert_eq!(
            machine.next(&seen, LIMITS.ready - Duration::from_nanos(1)),
            Action::Wait
        );
        assert!(is_halt(&machine.next(&seen, LIMITS.ready)));
    }
}

#[test]
fn the_reason_says_how_the_new_instance_was_lost() {
    let away = |ends| NodeObservation {
        temporary: InstanceObservation { ends, ..AWAY },
        ..observe_both(Old, New)
    };
    let why = |machine: &Machine| machine.position().why.clone().unwrap();
    for (ends, how) in [
        (0, "the instance got unready"),
        (1, "the instance's process ended"),
    ] {
        let mut machine = make_machine(SettleTemporary);
        let _ = machine.next(&observe_both(Old, New), secs(0));
        let _ = machine.next(&away(ends), secs(1));
        assert_eq!(
            machine.next(&away(ends), secs(1) + LOST_AFTER),
            Action::Entered
        );
        assert!(
            why(&machine).starts_with(how)
                && why(&machine).ends_with("after the instance was ready"),
            "{}",
            why(&machine)
        );
    }
    // This run has not seen the instance ready, so the reason does not say that it was ready.
    let mut machine = make_machine(SettleTemporary);
    assert_eq!(machine.next(&away(0), secs(0)), Action::Wait);
    assert_eq!(machine.next(&away(0), LIMITS.ready), Action::Entered);
    assert!(
        !why(&machine).contains("after the instance was ready"),
        "{}",
        why(&machine)
    );
}

#[test]
fn an_upgrade_is_done_when_a_single_instance_of_the_right_file_serves() {
    let done = NodeObservation {
        temporary_file: Content::Absent,
        temporary: AWAY,
        ..observe_both(New, New)
    };
    assert_eq!(
        make_machine(Verify).next(&done, secs(0)),
        Action::Finish(UpgradeOutcome::Done)
    );
    for seen in [
        NodeObservation {
            canonical_file: Content::Holds(Old),
            ..done
        },
        NodeObservation {
            temporary_file: Content::Holds(New),
            ..done
        },
        NodeObservation {
            temporary: SERVES,
            ..done
        },
        NodeObservation {
            canonical: AWAY,
            ..done
        },
    ] {
        let mut machine = make_machine(Verify);
        assert_eq!(machine.next(&seen, secs(0)), Action::Wait, "{seen:?}");
        assert!(is_halt(&machine.next(&seen, LIMITS.ready)), "{seen:?}");
    }
}
