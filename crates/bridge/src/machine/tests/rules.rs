//! Tests of single rules: an observation or a request leads to a certain decision.

use super::*;
use Step::{AwaitOwn, Drain, Hold, Linger, Overlap, Restore, Settle, Start};
use berth_testing::{NANOSECOND, changes_after};

const STEPS: [Step; 8] = [
    Start, Settle, Overlap, Hold, AwaitOwn, Restore, Linger, Drain,
];

const SECOND: u64 = FIRST + 1;

const READY: TemporaryObservation = TemporaryObservation {
    running: true,
    ready: true,
    ends: 0,
};
const SLOW: TemporaryObservation = TemporaryObservation {
    ready: false,
    ..READY
};
const GONE: TemporaryObservation = TemporaryObservation {
    running: false,
    ..SLOW
};

/// Both instances serve, new connections go to the bridge, and nothing keeps COMMAND from
/// beginning.
const SERVED: BridgeObservation = BridgeObservation {
    temporary: READY,
    own: OwnObservation {
        process: Some(FIRST),
        ready: true,
    },
    steering: true,
    named: true,
    etcd: true,
    prepared: true,
    drained: false,
};

/// The node's kube-apiserver is not ready.
const UNREADY: BridgeObservation = BridgeObservation {
    own: OwnObservation {
        process: Some(FIRST),
        ready: false,
    },
    ..SERVED
};

/// A machine in the given step since the time 0.
fn from(step: Step) -> Machine {
    Machine {
        step,
        since: Some(Duration::ZERO),
        ..Machine::new(LIMITS, OnFailure::Stay)
    }
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn is_not_begun(machine: &Machine) -> bool {
    matches!(machine.outcome, BridgeOutcome::NotBegun(_))
}

/// Asserts that an observation from the time 0 on leads to `next` after `time`, and not a
/// nanosecond sooner.
#[track_caller]
fn leads_after(time: Duration, mut machine: Machine, seen: &BridgeObservation, next: Step) {
    changes_after(time, machine.step, next, |now| {
        machine.next(seen, now);
        machine.step
    });
}

#[test]
fn a_command_may_run_until_its_end_is_reported() {
    for step in STEPS {
        let unreported = matches!(step, Hold | Restore);
        assert_eq!(from(step).command_may_run(), unreported, "{step}");
        assert!(
            !Machine {
                ended: true,
                ..from(step)
            }
            .command_may_run(),
            "{step}"
        );
        assert!(
            Machine {
                commanding: true,
                ended: true,
                ..from(step)
            }
            .command_may_run(),
            "{step}"
        );
        assert!(
            Machine {
                abandoned: true,
                ended: true,
                ..from(step)
            }
            .command_may_run(),
            "{step}"
        );
    }
    // The end of COMMAND is forgotten when etcd serves again, and is not concluded from a stopped
    // etcd.
    for (ended, etcd, then) in [
        (true, true, false),
        (true, false, true),
        (false, true, false),
        (false, false, false),
    ] {
        let mut machine = Machine {
            ended,
            ..from(Hold)
        };
        machine.next(&BridgeObservation { etcd, ..SERVED }, Duration::ZERO);
        assert_eq!(machine.ended, then, "{ended} {etcd}");
    }
}

#[test]
fn steered_connections_prefer_a_process_from_after_the_start_of_the_bridge_or_command() {
    for step in STEPS {
        for (process, before) in [
            (FIRST, FIRST),
            (FIRST, SECOND),
            (SECOND, FIRST),
            (SECOND, SECOND),
        ] {
            let machine = Machine {
                first: Some(FIRST),
                process: Some(process),
                before: Some(before),
                ..from(step)
            };
            let is_preferred = match step {
                Start | Settle | Overlap => false,
                Hold | Restore => process != FIRST,
                AwaitOwn => process != FIRST || before != FIRST,
                Linger | Drain => true,
            };
            assert_eq!(
                machine.preferred(),
                is_preferred.then_some(process),
                "{step} {before}"
            );
        }
        assert_eq!(from(step).preferred(), None);
    }
}

#[test]
fn one_command_begins_in_the_step_hold() {
    for step in STEPS {
        let mut machine = from(step);
        assert_eq!(
            (machine.command_begins().is_ok(), machine.wanted),
            (step == Hold, step == Hold),
            "{step}"
        );
    }
    assert!(
        Machine {
            wanted: true,
            ..from(Hold)
        }
        .command_begins()
        .is_err()
    );
    assert!(
        Machine {
            commanding: true,
            ..from(Hold)
        }
        .command_begins()
        .is_err()
    );
}

#[test]
fn the_end_of_a_command_counts_only_while_the_command_runs_in_the_step_hold() {
    for (step, commanding, then) in [
        (Hold, true, AwaitOwn),
        (Hold, false, Hold),
        (Linger, true, Linger),
        (AwaitOwn, false, AwaitOwn),
    ] {
        let mut machine = Machine {
            commanding,
            ..from(step)
        };
        machine.command_ended(Ok(true));
        assert_eq!((machine.step, machine.commanding), (then, false));
        let mut machine = Machine {
            commanding,
            ..from(step)
        };
        machine.command_abandoned("it went away");
        let told = commanding && step == Hold;
        assert_eq!(
            (machine.abandoned, machine.trouble().is_some()),
            (commanding, told),
            "{step}"
        );
    }
}

#[test]
fn files_are_restored_in_two_steps_and_not_during_a_command() {
    for step in STEPS {
        for commanding in [false, true] {
            let mut machine = Machine {
                commanding,
                ..from(step)
            };
            let may = step == AwaitOwn || step == Hold && !commanding;
            assert_eq!(machine.restore().is_ok(), may, "{step} {commanding}");
            assert_eq!(machine.step, if may { Restore } else { step });
        }
    }
    for step in STEPS {
        for (process, before) in [(FIRST, None), (SECOND, Some(SECOND))] {
            let mut machine = Machine {
                first: Some(FIRST),
                process: Some(process),
                ..from(step)
            };
            machine.record_restore(Ok(true));
            match step {
                // A process that was started from the restored files needs no restart.
                Restore => assert_eq!(
                    (machine.step, machine.before, machine.must_restart),
                    (AwaitOwn, before, true)
                ),
                _ => assert_eq!(
                    (machine.step, machine.before, machine.must_restart),
                    (step, None, false)
                ),
            }
        }
    }
}

#[test]
fn an_operator_ends_the_bridge_at_once_or_when_no_command_runs() {
    for step in STEPS {
        for (now, commanding) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut machine = Machine {
                commanding,
                before: Some(FIRST),
                ..from(step)
            };
            let then = match step {
                Linger | Drain => Some(step),
                Start | Settle => Some(Drain),
                _ if now => Some(Linger),
                _ if commanding => None,
                Restore => None,
                _ => Some(AwaitOwn),
            };
            assert_eq!(
                machine.end(now).is_ok(),
                then.is_some(),
                "{step} {now} {commanding}"
            );
            assert_eq!(
                machine.step,
                then.unwrap_or(step),
                "{step} {now} {commanding}"
            );
            assert_eq!(
                machine.before.is_none(),
                then == Some(AwaitOwn),
                "whichever process it is"
            );
            assert_eq!(is_not_begun(&machine), matches!(step, Start | Settle));
            let is_abandoned = matches!(machine.outcome, BridgeOutcome::Abandoned(_));
            assert_eq!(
                is_abandoned,
                now && matches!(step, Overlap | Hold | AwaitOwn | Restore)
            );
        }
    }
}

#[test]
fn a_refused_command_ends_the_bridge_while_nothing_depends_on_it() {
    for step in STEPS {
        for wanted in [false, true] {
            let mut machine = Machine {
                wanted,
                ..from(step)
            };
            machine.refuse("too few");
            let then = match step {
                Start | Settle => Drain,
                Overlap => Linger,
                _ => step,
            };
            assert_eq!(
                (machine.step, is_not_begun(&machine)),
                (then, then != step),
                "{step}"
            );
            assert_eq!(machine.trouble().is_some(), step == Hold && wanted);
            let mut machine = Machine {
                wanted,
                ..from(step)
            };
            machine.cannot_steer("no descriptor");
            let ends = step == Overlap || wanted;
            assert_eq!(
                (machine.step == Linger, is_not_begun(&machine)),
                (ends || step == Linger, ends),
                "{step}"
            );
            assert_eq!(machine.steering_error().is_some(), !ends);
        }
    }
}

#[test]
fn a_temporary_instance_lost_before_command_ends_the_bridge_if_the_nodes_serves() {
    for (step, wanted, temporary, seen, ends) in [
        (Overlap, false, GONE, SERVED, true),
        (Overlap, false, GONE, UNREADY, true),
        (Overlap, false, SLOW, SERVED, false),
        (Hold, true, GONE, SERVED, true),
        (Hold, true, GONE, UNREADY, false),
        (Hold, true, SLOW, SERVED, false),
        (Hold, false, GONE, SERVED, false),
        (AwaitOwn, false, GONE, SERVED, false),
    ] {
        let mut machine = Machine {
            wanted,
            ..from(step)
        };
        machine.next(&BridgeObservation { temporary, ..seen }, Duration::ZERO);
        let then = if ends { (Linger, true) } else { (step, false) };
        assert_eq!(
            (machine.step, is_not_begun(&machine)),
            then,
            "{step} {wanted} {temporary:?}"
        );
    }
}

#[test]
fn a_slow_answer_is_no_loss_and_an_exit_is_one_at_once() {
    let slow = BridgeObservation {
        temporary: SLOW,
        ..SERVED
    };
    leads_after(LOST, from(Settle), &slow, Drain);
    let mut machine = from(Settle);
    machine.next(
        &BridgeObservation {
            temporary: GONE,
            ..SERVED
        },
        Duration::ZERO,
    );
    assert_eq!(machine.step, Drain);
    // An exit counts even if the process has been started again since.
    let mut machine = from(Hold);
    assert_eq!(
        machine.next(
            &BridgeObservation {
                temporary: GONE,
                ..UNREADY
            },
            secs(1)
        ),
        Action::Start
    );
    assert_eq!(machine.next(&slow, secs(2)), Action::Unsteer);
    // A good answer resets the time.
    let mut machine = from(Hold);
    for (seen, now) in [(&slow, 0), (&SERVED, 2), (&slow, 3)] {
        assert_eq!(machine.next(seen, secs(now)), Action::Wait);
    }
}

#[test]
fn new_connections_go_to_the_ready_instance() {
    let away = BridgeObservation {
        steering: false,
        ..SERVED
    };
    for (seen, temporary, lost, action) in [
        (SERVED, READY, false, None),
        (away, READY, false, Some(Action::Steer)),
        (SERVED, SLOW, true, Some(Action::Unsteer)),
        (SERVED, GONE, true, Some(Action::Unsteer)),
        (SERVED, SLOW, false, None),
        (UNREADY, SLOW, true, None),
        (UNREADY, GONE, true, Some(Action::Start)),
        (away, SLOW, true, None),
        (away, GONE, true, Some(Action::Start)),
    ] {
        assert_eq!(
            keep_steered(&BridgeObservation { temporary, ..seen }, lost),
            action,
            "{seen:?} {temporary:?}"
        );
    }
}

#[test]
fn the_temporary_instance_has_its_time_and_its_tries_to_get_ready_and_settle() {
    let start = |temporary| BridgeObservation {
        temporary,
        steering: false,
        ..SERVED
    };
    leads_after(LIMITS.ready, from(Start), &start(SLOW), Drain);
    leads_after(LIMITS.settle, from(Settle), &start(READY), Overlap);
    for (temporary, action, step) in [
        (READY, Action::Entered, Settle),
        (SLOW, Action::Wait, Start),
        (GONE, Action::Start, Start),
        (
            TemporaryObservation {
                ends: ENDS - 1,
                ..GONE
            },
            Action::Start,
            Start,
        ),
        (
            TemporaryObservation { ends: ENDS, ..GONE },
            Action::Entered,
            Drain,
        ),
    ] {
        let mut machine = from(Start);
        assert_eq!(machine.next(&start(temporary), Duration::ZERO), action);
        assert_eq!(
            (machine.step, is_not_begun(&machine)),
            (step, step == Drain)
        );
    }
    // The time is over, but the last answer was slow.
    let mut machine = from(Settle);
    assert_eq!(machine.next(&start(SLOW), LIMITS.settle), Action::Wait);
    assert_eq!(machine.step, Settle);
}

/// COMMAND waits for handshakes that began before, the Service, and etcd.
#[test]
fn a_command_waits_for_clients_and_etcd() {
    let unnamed = BridgeObservation {
        named: false,
        ..SERVED
    };
    leads_after(OVERLAP, from(Overlap), &SERVED, Hold);
    leads_after(NAMED, from(Overlap), &unnamed, Hold);
    for (seen, waits) in [(SERVED, OVERLAP), (unnamed, NAMED)] {
        let mut machine = Machine {
            wanted: true,
            ..from(Hold)
        };
        for (now, begins) in [
            (Duration::ZERO, false),
            (waits - NANOSECOND, false),
            (waits, true),
        ] {
            assert_eq!(machine.next(&seen, now), Action::Wait);
            assert_eq!(
                (machine.commanding, machine.wanted),
                (begins, !begins),
                "{now:?}"
            );
        }
    }
    let steered = || Machine {
        steered: Some(Duration::ZERO),
        ..from(Hold)
    };
    for (seen, wanted, action) in [
        (SERVED, false, Action::Wait),
        (
            BridgeObservation {
                temporary: SLOW,
                ..SERVED
            },
            true,
            Action::Wait,
        ),
        (
            BridgeObservation {
                prepared: false,
                ..SERVED
            },
            true,
            Action::Prepare,
        ),
    ] {
        let mut machine = Machine {
            wanted,
            ..steered()
        };
        assert_eq!(
            (machine.next(&seen, NAMED), machine.commanding),
            (action, false),
            "{seen:?}"
        );
    }
    // COMMAND is to replace the process that ran when COMMAND began.
    for commanding in [false, true] {
        let mut machine = Machine {
            commanding,
            ..steered()
        };
        machine.next(&SERVED, NAMED);
        assert_eq!(machine.before, (!commanding).then_some(FIRST));
    }
}

#[test]
fn a_replaced_kube_apiserver_that_is_late_is_reported() {
    for (step, commanding, seen, is_late) in [
        (Hold, true, UNREADY, true),
        (AwaitOwn, false, UNREADY, true),
        (Hold, false, UNREADY, false),
        (Hold, true, SERVED, false),
        (AwaitOwn, false, SERVED, false),
    ] {
        let mut machine = Machine {
            commanding,
            ..from(step)
        };
        for (now, late) in [
            (Duration::ZERO, false),
            (LATE - NANOSECOND, false),
            (LATE, true),
        ] {
            machine.next(&seen, now);
            assert_eq!(
                machine.own_is_late(),
                is_late && late,
                "{step} {commanding} {now:?}"
            );
        }
    }
}

#[test]
fn the_nodes_kube_apiserver_is_back_after_it_has_stayed_ready() {
    leads_after(LIMITS.settle, from(AwaitOwn), &SERVED, Linger);
    leads_after(LIMITS.ready, from(AwaitOwn), &UNREADY, Hold);
    let awaits = |must_restart, before| Machine {
        must_restart,
        before: Some(before),
        ..from(AwaitOwn)
    };
    // The process must be a new one, or may be the old one.
    leads_after(LIMITS.ready, awaits(true, FIRST), &SERVED, Hold);
    leads_after(LIMITS.settle, awaits(true, SECOND), &SERVED, Linger);
    leads_after(LIMITS.settle, awaits(false, FIRST), &SERVED, Linger);
    let second = BridgeObservation {
        own: OwnObservation {
            process: Some(SECOND),
            ready: true,
        },
        ..SERVED
    };
    let deaf = BridgeObservation {
        etcd: false,
        ..SERVED
    };
    let (settle, ready) = (LIMITS.settle, LIMITS.ready);
    for (course, last) in [
        // Another process resets the time.
        (
            &[
                (&SERVED, secs(0)),
                (&second, secs(10)),
                (&second, secs(30) - NANOSECOND),
                (&second, secs(30)),
            ][..],
            Linger,
        ),
        // The node's etcd member may be slow, but not in the last moment. A lost member resets the
        // time.
        (
            &[
                (&SERVED, secs(0)),
                (&deaf, settle),
                (&deaf, settle + LOST - NANOSECOND),
                (&SERVED, settle + LOST),
            ],
            Linger,
        ),
        (
            &[
                (&SERVED, secs(0)),
                (&deaf, secs(1)),
                (&deaf, secs(1) + LOST),
                (&SERVED, secs(5)),
                (&SERVED, secs(25) - NANOSECOND),
                (&SERVED, secs(25)),
            ],
            Linger,
        ),
        // A process may stay ready beyond the time limit, but must not become ready only then.
        (
            &[
                (&UNREADY, secs(0)),
                (&SERVED, ready - NANOSECOND),
                (&SERVED, ready + secs(1)),
                (&SERVED, ready + settle),
            ],
            Linger,
        ),
        (
            &[
                (&UNREADY, secs(0)),
                (&UNREADY, ready - NANOSECOND),
                (&SERVED, ready),
            ],
            Hold,
        ),
    ] {
        let mut machine = from(AwaitOwn);
        for (nth, (seen, now)) in course.iter().enumerate() {
            machine.next(seen, *now);
            let step = if nth + 1 == course.len() {
                last
            } else {
                AwaitOwn
            };
            assert_eq!(machine.step, step, "{now:?}");
        }
    }
}

#[test]
fn the_bridge_ends_after_handshakes_and_its_connections() {
    let away = BridgeObservation {
        steering: false,
        ..SERVED
    };
    assert_eq!(from(Linger).next(&SERVED, OVERLAP), Action::Unsteer);
    leads_after(OVERLAP, from(Linger), &away, Drain);
    assert_eq!(from(Drain).next(&away, Duration::ZERO), Action::Drain);
    let drained = BridgeObservation {
        drained: true,
        ..away
    };
    assert_eq!(
        from(Drain).next(&drained, Duration::ZERO),
        Action::Finish(BridgeOutcome::Done)
    );
}

#[test]
fn a_failure_leads_to_one_restore_if_the_operator_said_so() {
    let restored = BridgeOutcome::Restored("it failed".into());
    for (on_failure, outcome, step) in [
        (OnFailure::Restore, BridgeOutcome::Done, Restore),
        (OnFailure::Restore, restored, Hold),
        (OnFailure::Stay, BridgeOutcome::Done, Hold),
        (OnFailure::End, BridgeOutcome::Done, Linger),
    ] {
        let mut machine = Machine {
            on_failure,
            outcome,
            ..from(AwaitOwn)
        };
        machine.next(&UNREADY, LIMITS.ready);
        assert_eq!(machine.step, step, "{on_failure:?}");
    }
}
