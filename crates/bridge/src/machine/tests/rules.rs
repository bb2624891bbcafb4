//! Tests of single rules: an observation or a request leads to a certain decision.

use super::*;
use Step::{AwaitOwn, Drain, Hold, Linger, Overlap, Restore, Settle, Start};
use berth_testing::{NANOSECOND, assert_changes_after};

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
    listens: true,
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
fn machine_in_step(step: Step) -> Machine {
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
fn assert_leads_after(time: Duration, mut machine: Machine, seen: &BridgeObservation, next: Step) {
    assert_changes_after(time, machine.step, next, |now| {
        machine.next(seen, now);
        machine.step
    });
}

#[test]
fn a_command_may_run_until_its_end_is_reported() {
    for step in STEPS {
        let unreported = matches!(step, Hold | Restore);
        assert_eq!(
            machine_in_step(step).command_may_run(),
            unreported,
            "{step}"
        );
        assert!(
            !Machine {
                ended: true,
                ..machine_in_step(step)
            }
            .command_may_run(),
            "{step}"
        );
        assert!(
            Machine {
                commanding: true,
                ended: true,
                ..machine_in_step(step)
            }
            .command_may_run(),
            "{step}"
        );
        assert!(
            Machine {
                abandoned: true,
                ended: true,
                ..machine_in_step(step)
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
            ..machine_in_step(Hold)
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
                ..machine_in_step(step)
            };
            let is_preferred = match step {
                Start | Settle | Overlap => false,
                Hold | Restore => process != FIRST,
                AwaitOwn => process != FIRST || before != FIRST,
                Linger | Drain => true,
            };
            assert_eq!(
                machine.preferred_process(),
                is_preferred.then_some(process),
                "{step} {before}"
            );
        }
        assert_eq!(machine_in_step(step).preferred_process(), None);
    }
}

#[test]
fn one_command_begins_in_the_step_hold() {
    for step in STEPS {
        let mut machine = machine_in_step(step);
        assert_eq!(
            (machine.request_command().is_ok(), machine.wanted),
            (step == Hold, step == Hold),
            "{step}"
        );
    }
    assert!(
        Machine {
            wanted: true,
            ..machine_in_step(Hold)
        }
        .request_command()
        .is_err()
    );
    assert!(
        Machine {
            commanding: true,
            ..machine_in_step(Hold)
        }
        .request_command()
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
            ..machine_in_step(step)
        };
        machine.record_command_end(Ok(true));
        assert_eq!((machine.step, machine.commanding), (then, false));
        let mut machine = Machine {
            commanding,
            ..machine_in_step(step)
        };
        machine.record_abandoned_command("it went away");
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
                ..machine_in_step(step)
            };
            let may = step == AwaitOwn || step == Hold && !commanding;
            assert_eq!(
                machine.request_restore().is_ok(),
                may,
                "{step} {commanding}"
            );
            assert_eq!(machine.step, if may { Restore } else { step });
        }
    }
    for step in STEPS {
        let mut machine = machine_in_step(step);
        machine.record_restore(Ok(true));
        let then = match step {
            Restore => (AwaitOwn, true),
            _ => (step, false),
        };
        assert_eq!((machine.step, machine.must_restart), then);
    }
    for (process, before) in [(FIRST, None), (SECOND, Some(SECOND))] {
        let mut machine = Machine {
            first: Some(FIRST),
            restores: true,
            ..machine_in_step(Restore)
        };
        let mut act = |process, action| {
            let own = OwnObservation {
                process: Some(process),
                ready: true,
            };
            let seen = BridgeObservation { own, ..SERVED };
            assert_eq!(machine.next(&seen, Duration::ZERO), action);
            machine.before
        };
        // A process from before the bridge needs no restart, and neither does a process that starts
        // during the restore.
        assert_eq!(act(process, Action::Restore), before);
        assert_eq!(act(SECOND + 1, Action::Wait), before);
    }
}

#[test]
fn an_operator_ends_the_bridge_at_once_or_when_no_command_runs() {
    for step in STEPS {
        for (now, commanding) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut machine = Machine {
                commanding,
                before: Some(FIRST),
                ..machine_in_step(step)
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
                machine.request_end(now).is_ok(),
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
            // If the node's kube-apiserver has ended, nobody serves without the bridge.
            for process in [None, Some(7)] {
                let mut machine = Machine {
                    wanted,
                    process,
                    ..machine_in_step(step)
                };
                let mut refused = machine.clone();
                refused.refuse_command("too few", process);
                let then = match step {
                    Start | Settle => Drain,
                    Overlap if process.is_some() => Linger,
                    Overlap => Hold,
                    _ => step,
                };
                assert_eq!(
                    (refused.step, is_not_begun(&refused)),
                    (then, matches!(then, Drain | Linger) && then != step),
                    "{step}"
                );
                let stays = step == Hold && wanted || step == Overlap && process.is_none();
                assert_eq!(refused.trouble().is_some(), stays);
                machine.record_steering_failure("no descriptor");
                let ends = process.is_some() && (step == Overlap || wanted);
                assert_eq!(
                    (machine.step == Linger, is_not_begun(&machine)),
                    (ends || step == Linger, ends),
                    "{step}"
                );
                assert_eq!(machine.steering_error().is_some(), !ends);
            }
        }
    }
}

#[test]
fn a_temporary_instance_lost_before_command_ends_the_bridge_if_the_nodes_serves() {
    let nobody = BridgeObservation {
        own: OwnObservation::default(),
        ..SERVED
    };
    for (step, wanted, temporary, seen, ends) in [
        (Overlap, false, GONE, SERVED, true),
        (Overlap, false, GONE, UNREADY, true),
        (Overlap, false, GONE, nobody, false),
        (Overlap, false, SLOW, SERVED, false),
        (Hold, true, GONE, SERVED, true),
        (Hold, true, GONE, UNREADY, false),
        (Hold, true, SLOW, SERVED, false),
        (Hold, false, GONE, SERVED, false),
        (AwaitOwn, false, GONE, SERVED, false),
    ] {
        let mut machine = Machine {
            wanted,
            ..machine_in_step(step)
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
    assert_leads_after(LOST, machine_in_step(Settle), &slow, Drain);
    let mut machine = machine_in_step(Settle);
    machine.next(
        &BridgeObservation {
            temporary: GONE,
            ..SERVED
        },
        Duration::ZERO,
    );
    assert_eq!(machine.step, Drain);
    // An exit counts even if the process has been started again since.
    let mut machine = machine_in_step(Hold);
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
    let mut machine = machine_in_step(Hold);
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
    // Nothing listens on the port.
    let gone = BridgeObservation {
        own: OwnObservation::default(),
        ..away
    };
    // The search for the listener failed.
    let unknown = BridgeObservation {
        own: OwnObservation {
            process: None,
            ready: true,
        },
        ..away
    };
    let deaf = BridgeObservation {
        listens: false,
        ..gone
    };
    for (seen, temporary, lost, action) in [
        (SERVED, READY, false, Action::Wait),
        (away, READY, false, Action::Steer),
        (SERVED, SLOW, true, Action::Unsteer),
        (SERVED, GONE, true, Action::Unsteer),
        (SERVED, SLOW, false, Action::Wait),
        (UNREADY, SLOW, true, Action::Wait),
        (UNREADY, GONE, true, Action::Start),
        (away, SLOW, true, Action::Wait),
        (away, GONE, true, Action::Start),
        (gone, GONE, true, Action::Steer),
        (gone, SLOW, true, Action::Steer),
        (gone, SLOW, false, Action::Steer),
        (deaf, SLOW, true, Action::Wait),
        (unknown, SLOW, true, Action::Wait),
    ] {
        assert_eq!(
            machine_in_step(Hold).keep_steered(&BridgeObservation { temporary, ..seen }, lost),
            action,
            "{seen:?} {temporary:?}"
        );
    }
    // After a failure to steer, a temporary instance runs first.
    for (temporary, action) in [(SLOW, Action::Steer), (GONE, Action::Start)] {
        let machine = Machine {
            steering_error: Some("no descriptor".into()),
            ..machine_in_step(Hold)
        };
        assert_eq!(
            machine.keep_steered(&BridgeObservation { temporary, ..gone }, true),
            action
        );
    }
    // A kube-apiserver that listens may serve although it is not ready.
    let unready = BridgeObservation {
        temporary: SLOW,
        steering: false,
        ..UNREADY
    };
    assert_eq!(
        machine_in_step(Hold).keep_steered(&unready, true),
        Action::Wait
    );
}

#[test]
fn a_step_goes_on_while_new_connections_cannot_be_steered() {
    let away = BridgeObservation {
        steering: false,
        ..SERVED
    };
    let mut machine = Machine {
        restores: true,
        ..machine_in_step(Restore)
    };
    for action in [Action::Restore, Action::Steer, Action::Steer] {
        assert_eq!(machine.next(&away, Duration::ZERO), action);
        machine.record_steering_failure("no descriptor");
    }
    assert_leads_after(LIMITS.settle, machine_in_step(AwaitOwn), &away, Linger);
    let unready = BridgeObservation {
        steering: false,
        ..UNREADY
    };
    assert_leads_after(LIMITS.ready, machine_in_step(AwaitOwn), &unready, Hold);
}

#[test]
fn the_temporary_instance_has_its_time_and_its_tries_to_get_ready_and_settle() {
    let start = |temporary| BridgeObservation {
        temporary,
        steering: false,
        ..SERVED
    };
    assert_leads_after(LIMITS.ready, machine_in_step(Start), &start(SLOW), Drain);
    assert_leads_after(
        LIMITS.settle,
        machine_in_step(Settle),
        &start(READY),
        Overlap,
    );
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
        let mut machine = machine_in_step(Start);
        assert_eq!(machine.next(&start(temporary), Duration::ZERO), action);
        assert_eq!(
            (machine.step, is_not_begun(&machine)),
            (step, step == Drain)
        );
    }
    // The time is over, but the last answer was slow.
    let mut machine = machine_in_step(Settle);
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
    assert_leads_after(OVERLAP, machine_in_step(Overlap), &SERVED, Hold);
    assert_leads_after(NAMED, machine_in_step(Overlap), &unnamed, Hold);
    for (seen, waits) in [(SERVED, OVERLAP), (unnamed, NAMED)] {
        let mut machine = Machine {
            wanted: true,
            ..machine_in_step(Hold)
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
        ..machine_in_step(Hold)
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
            ..machine_in_step(step)
        };
        for (now, late) in [
            (Duration::ZERO, false),
            (LATE - NANOSECOND, false),
            (LATE, true),
        ] {
            machine.next(&seen, now);
            assert_eq!(
                machine.own_apiserver_is_late(),
                is_late && late,
                "{step} {commanding} {now:?}"
            );
        }
    }
}

#[test]
fn the_nodes_kube_apiserver_is_back_after_it_has_stayed_ready() {
    assert_leads_after(LIMITS.settle, machine_in_step(AwaitOwn), &SERVED, Linger);
    assert_leads_after(LIMITS.ready, machine_in_step(AwaitOwn), &UNREADY, Hold);
    let awaits = |must_restart, before| Machine {
        must_restart,
        before: Some(before),
        ..machine_in_step(AwaitOwn)
    };
    // The process must be a new one, or may be the old one.
    assert_leads_after(LIMITS.ready, awaits(true, FIRST), &SERVED, Hold);
    assert_leads_after(LIMITS.settle, awaits(true, SECOND), &SERVED, Linger);
    assert_leads_after(LIMITS.settle, awaits(false, FIRST), &SERVED, Linger);
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
        let mut machine = machine_in_step(AwaitOwn);
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
    assert_eq!(
        machine_in_step(Linger).next(&SERVED, OVERLAP),
        Action::Unsteer
    );
    assert_leads_after(OVERLAP, machine_in_step(Linger), &away, Drain);
    assert_eq!(
        machine_in_step(Drain).next(&away, Duration::ZERO),
        Action::Drain
    );
    let drained = BridgeObservation {
        drained: true,
        ..away
    };
    assert_eq!(
        machine_in_step(Drain).next(&drained, Duration::ZERO),
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
            ..machine_in_step(AwaitOwn)
        };
        machine.next(&UNREADY, LIMITS.ready);
        assert_eq!(machine.step, step, "{on_failure:?}");
    }
}
