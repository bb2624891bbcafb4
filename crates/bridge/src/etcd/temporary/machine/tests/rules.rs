//! Tests of single rules: an observation leads to a certain decision.

use super::*;
use EtcdStep::{GivenBack, Own, Returning, Stopping, Temporary};
use berth_testing::{NANOSECOND, assert_changes_after};
use std::collections::BTreeSet;

const GONE: OwnEtcd = OwnEtcd {
    process: None,
    answers: false,
    opened: Opened::Unseen,
};
const SILENT: OwnEtcd = OwnEtcd {
    process: Some(1),
    ..GONE
};
const WAITS: OwnEtcd = OwnEtcd {
    opened: Opened::Waits,
    ..SILENT
};
const SERVES: OwnEtcd = OwnEtcd {
    process: Some(1),
    answers: true,
    opened: Opened::Named,
};
const UNSEEN_ONE: OwnEtcd = OwnEtcd {
    opened: Opened::Unseen,
    ..SERVES
};
/// The node's etcd has opened another file than the database that the path names.
const STRAY: OwnEtcd = OwnEtcd {
    opened: Opened::Other,
    ..SERVES
};

const NONE: TemporaryEtcd = TemporaryEtcd {
    running: false,
    ending: false,
    ends: 0,
    answers: false,
    opened: Opened::Unseen,
};
const BEGINS: TemporaryEtcd = TemporaryEtcd {
    running: true,
    ..NONE
};
const REPLACES: TemporaryEtcd = TemporaryEtcd {
    running: true,
    answers: true,
    opened: Opened::Named,
    ..NONE
};
const ENDING: TemporaryEtcd = TemporaryEtcd {
    ending: true,
    ..REPLACES
};
const STRAYS: TemporaryEtcd = TemporaryEtcd {
    opened: Opened::Other,
    ..REPLACES
};

const HOLDERS: [Holder; 4] = [
    Holder::Unknown,
    Holder::Nobody,
    Holder::Temporary,
    Holder::Another,
];

fn make_observation(own: OwnEtcd, temporary: TemporaryEtcd, holder: Holder) -> EtcdObservation {
    EtcdObservation {
        own,
        temporary,
        holder,
        ..EtcdObservation::default()
    }
}

/// A machine in the given step since the time 0.
fn machine_in_step(step: EtcdStep) -> EtcdMachine {
    EtcdMachine {
        step,
        ..EtcdMachine::default()
    }
}

/// The wanted state, and the machine, after a single observation at the time 0.
fn observe_once(mut machine: EtcdMachine, seen: &EtcdObservation) -> (EtcdWanted, EtcdMachine) {
    (machine.next(seen, Duration::ZERO), machine)
}

fn step_after(machine: EtcdMachine, seen: &EtcdObservation) -> EtcdStep {
    observe_once(machine, seen).1.step
}

/// Asserts that an observation from the time 0 on leads to `next` after `time`, and not a
/// nanosecond sooner.
#[track_caller]
fn assert_leads_after(
    time: Duration,
    mut machine: EtcdMachine,
    seen: &EtcdObservation,
    next: EtcdStep,
) {
    assert_changes_after(time, machine.step, next, |now| {
        machine.next(seen, now);
        machine.step
    });
}

#[test]
fn one_observation_leads_to_one_step() {
    let answers_without_a_process = TemporaryEtcd {
        running: false,
        ..REPLACES
    };
    for (step, own, temporary, holder, next) in [
        (Own, SERVES, NONE, Holder::Another, Own),
        (Own, UNSEEN_ONE, NONE, Holder::Unknown, Own),
        (Own, GONE, NONE, Holder::Nobody, Stopping),
        // Back to the node's etcd if it answers with the database at the path, and only then.
        (Stopping, SERVES, NONE, Holder::Another, Own),
        (Stopping, SERVES, BEGINS, Holder::Another, Own),
        (Stopping, UNSEEN_ONE, NONE, Holder::Unknown, Stopping),
        (
            Stopping,
            OwnEtcd {
                answers: false,
                ..SERVES
            },
            NONE,
            Holder::Another,
            Stopping,
        ),
        (Returning, SERVES, BEGINS, Holder::Another, Own),
        (Returning, UNSEEN_ONE, NONE, Holder::Unknown, Returning),
        (GivenBack, SERVES, NONE, Holder::Another, Own),
        // On to the temporary etcd under the same conditions, unless it was told to end.
        (Stopping, GONE, REPLACES, Holder::Temporary, Temporary),
        (Stopping, GONE, ENDING, Holder::Temporary, Stopping),
        (Stopping, GONE, BEGINS, Holder::Temporary, Stopping),
        (Stopping, GONE, STRAYS, Holder::Unknown, Stopping),
        (
            Stopping,
            GONE,
            TemporaryEtcd {
                answers: false,
                ..REPLACES
            },
            Holder::Temporary,
            Stopping,
        ),
        (
            Stopping,
            GONE,
            answers_without_a_process,
            Holder::Unknown,
            Stopping,
        ),
        // The temporary etcd serves until it has gone or must not run, or the node's etcd is there.
        (Temporary, GONE, REPLACES, Holder::Temporary, Temporary),
        (Temporary, SILENT, REPLACES, Holder::Temporary, Temporary),
        (Temporary, GONE, NONE, Holder::Nobody, Stopping),
        (Temporary, GONE, REPLACES, Holder::Another, Stopping),
        (Temporary, GONE, STRAYS, Holder::Unknown, Stopping),
        (Temporary, WAITS, REPLACES, Holder::Temporary, Returning),
        (
            Temporary,
            UNSEEN_ONE,
            REPLACES,
            Holder::Temporary,
            Returning,
        ),
        (Temporary, SERVES, REPLACES, Holder::Temporary, Returning),
        (Temporary, SERVES, NONE, Holder::Another, Own),
        // The node's etcd has the data until it has gone.
        (Returning, WAITS, BEGINS, Holder::Temporary, Returning),
        (Returning, SILENT, NONE, Holder::Another, Returning),
        (Returning, GONE, REPLACES, Holder::Temporary, Returning),
        (Returning, GONE, NONE, Holder::Nobody, Stopping),
    ] {
        let seen = make_observation(own, temporary, holder);
        assert_eq!(
            step_after(machine_in_step(step), &seen),
            next,
            "{step}: {seen:?}"
        );
    }
}

#[test]
fn data_that_was_given_back_stays_so_while_it_may_be_replaced_or_lack_writes_or_etcd_fails() {
    for bits in 0..8 {
        let [commanding, given_up, unrecovered] = [1, 2, 4].map(|bit| bits & bit != 0);
        let seen = EtcdObservation {
            commanding,
            unrecovered,
            ..make_observation(GONE, NONE, Holder::Nobody)
        };
        let machine = EtcdMachine {
            given_up,
            ..machine_in_step(GivenBack)
        };
        assert_eq!(
            step_after(machine, &seen) == Stopping,
            bits == 0,
            "{seen:?} {given_up}"
        );
    }
}

/// The rule holds from the first moment on, when the step has not changed yet.
#[test]
fn no_etcd_is_started_from_data_that_may_lack_writes() {
    for (step, temporary) in [
        (Own, NONE),
        (Returning, NONE),
        (Stopping, NONE),
        (Temporary, REPLACES),
        (GivenBack, NONE),
    ] {
        let seen = EtcdObservation {
            unrecovered: true,
            ..make_observation(GONE, temporary, Holder::Nobody)
        };
        let (wanted, machine) = observe_once(machine_in_step(step), &seen);
        assert_ne!(wanted.temporary, Process::Run, "{step}");
        assert!(matches!(machine.step, Stopping | GivenBack), "{step}");
    }
}

#[test]
fn the_temporary_etcd_is_started_on_free_data_and_killed_if_another_process_has_the_lock() {
    for holder in HOLDERS {
        for (temporary, runs) in [
            (NONE, holder == Holder::Nobody),
            (BEGINS, holder != Holder::Another),
            (
                TemporaryEtcd {
                    ending: true,
                    ..BEGINS
                },
                false,
            ),
            (
                TemporaryEtcd {
                    opened: Opened::Other,
                    ..BEGINS
                },
                false,
            ),
        ] {
            let (wanted, machine) = observe_once(
                machine_in_step(Stopping),
                &make_observation(GONE, temporary, holder),
            );
            let process = if runs { Process::Run } else { Process::Kill };
            assert_eq!(
                (machine.step, wanted.temporary),
                (Stopping, process),
                "{temporary:?} {holder:?}"
            );
        }
    }
}

#[test]
fn each_step_has_its_route() {
    for (step, own, temporary, route, steers) in [
        (Own, SERVES, NONE, Route::Own, false),
        (Own, UNSEEN_ONE, NONE, Route::Own, false),
        (Own, STRAY, NONE, Route::Hold, false),
        (Stopping, GONE, BEGINS, Route::Hold, true),
        (Temporary, GONE, REPLACES, Route::Temporary, true),
        (Returning, WAITS, REPLACES, Route::Hold, false),
    ] {
        let (wanted, machine) = observe_once(
            machine_in_step(step),
            &make_observation(own, temporary, Holder::Unknown),
        );
        assert_eq!(
            (machine.step, wanted.route, wanted.steers),
            (step, route, steers),
            "{own:?}"
        );
        let runs = matches!(step, Stopping | Temporary);
        assert_eq!(wanted.temporary == Process::Run, runs, "{step}");
    }
    let seen = EtcdObservation {
        commanding: true,
        ..make_observation(GONE, NONE, Holder::Nobody)
    };
    let (wanted, machine) = observe_once(machine_in_step(GivenBack), &seen);
    assert_eq!(
        (machine.step, wanted.route, wanted.steers),
        (GivenBack, Route::Hold, false)
    );
}

/// An etcd that never served does not handle SIGTERM, a late etcd has hung, and an etcd with
/// another file has nothing to write.
#[test]
fn an_etcd_that_served_gets_sigterm_and_others_are_killed() {
    let end = |served, temporary, now| {
        let mut machine = EtcdMachine {
            served,
            ..machine_in_step(Returning)
        };
        machine.next(
            &make_observation(WAITS, temporary, Holder::Temporary),
            Duration::ZERO,
        );
        machine
            .next(&make_observation(WAITS, temporary, Holder::Temporary), now)
            .temporary
    };
    assert_eq!(end(false, BEGINS, secs(1)), Process::Kill);
    assert_eq!(end(false, REPLACES, secs(1)), Process::Terminate);
    assert_eq!(end(true, BEGINS, secs(1)), Process::Terminate);
    assert_eq!(end(true, STRAYS, secs(1)), Process::Kill);
    assert_eq!(end(true, ENDING, HUNG - NANOSECOND), Process::Terminate);
    assert_eq!(end(true, ENDING, HUNG), Process::Kill);
    // The next process has not served.
    let mut machine = EtcdMachine {
        served: true,
        ..machine_in_step(Temporary)
    };
    machine.next(
        &make_observation(GONE, NONE, Holder::Nobody),
        Duration::ZERO,
    );
    assert!(!machine.served);
}

#[test]
fn connections_are_ended_for_a_while_once_calls_have_had_their_time() {
    let stopping = make_observation(GONE, BEGINS, Holder::Unknown);
    let mut machine = machine_in_step(Own);
    for (now, ends) in [
        (Duration::ZERO, false),
        (GRACE - NANOSECOND, false),
        (GRACE, true),
        (ENDS_CONNECTIONS - NANOSECOND, true),
        (ENDS_CONNECTIONS, false),
    ] {
        let wanted = machine.next(&stopping, now);
        assert_eq!(
            (machine.step, wanted.ends_connections),
            (Stopping, ends),
            "{now:?}"
        );
    }
    // An etcd that has gone has no calls in flight, and an etcd with another file gets no time to
    // acknowledge more.
    let stray = |step| EtcdMachine {
        other: Some(Duration::ZERO),
        ..machine_in_step(step)
    };
    for (mut machine, seen, step, ends) in [
        (
            machine_in_step(Temporary),
            make_observation(GONE, NONE, Holder::Nobody),
            Stopping,
            true,
        ),
        (
            machine_in_step(Returning),
            make_observation(GONE, NONE, Holder::Nobody),
            Stopping,
            true,
        ),
        (
            machine_in_step(Temporary),
            make_observation(WAITS, REPLACES, Holder::Temporary),
            Returning,
            false,
        ),
        (
            stray(Own),
            make_observation(STRAY, NONE, Holder::Unknown),
            Returning,
            true,
        ),
        (
            stray(Temporary),
            make_observation(STRAY, REPLACES, Holder::Temporary),
            Returning,
            true,
        ),
    ] {
        let wanted = machine.next(&seen, SEEN_TWICE);
        assert_eq!(
            (machine.step, wanted.ends_connections),
            (step, ends),
            "{seen:?}"
        );
    }
}

#[test]
fn a_database_without_a_name_is_saved_if_no_other_etcd_runs() {
    for (own, temporary, holder, rescues) in [
        (STRAY, NONE, Holder::Unknown, true),
        (STRAY, NONE, Holder::Temporary, false),
        (STRAY, BEGINS, Holder::Unknown, false),
        (WAITS, NONE, Holder::Unknown, false),
    ] {
        let mut machine = machine_in_step(Returning);
        machine.next(&make_observation(own, temporary, holder), Duration::ZERO);
        let wanted = machine.next(&make_observation(own, temporary, holder), SEEN_TWICE);
        assert_eq!(wanted.rescues, rescues, "{own:?} {temporary:?} {holder:?}");
    }
    for step in [Own, Stopping, Temporary] {
        let temporary = if step == Temporary { REPLACES } else { NONE };
        // The machine returns to an answering etcd at once.
        let own = OwnEtcd {
            answers: step == Own,
            ..STRAY
        };
        assert_leads_after(
            SEEN_TWICE,
            machine_in_step(step),
            &make_observation(own, temporary, Holder::Unknown),
            Returning,
        );
    }
}

/// The node's etcd gets the data a minute later if it had the data alone and was not ended by the
/// bridge.
#[test]
fn an_etcd_that_had_the_data_and_ended_has_to_wait() {
    for (own, temporary, rescued, fails) in [
        (SILENT, NONE, false, true),
        (SILENT, NONE, true, false),
        (SILENT, BEGINS, false, false),
        (GONE, BEGINS, false, false),
    ] {
        let mut machine = EtcdMachine {
            rescued,
            failed: 1,
            ..machine_in_step(Returning)
        };
        for _ in 0..2 {
            machine.next(&make_observation(own, temporary, Holder::Unknown), secs(1));
            assert_eq!(machine.failed, 1);
        }
        machine.next(&make_observation(GONE, NONE, Holder::Nobody), secs(2));
        let (failed, retry) = if fails {
            (2, secs(2) + RETRY)
        } else {
            (1, Duration::ZERO)
        };
        assert_eq!(
            (machine.step, machine.failed, machine.retry),
            (Stopping, failed, retry),
            "{own:?} {temporary:?}"
        );
    }
    let retried = || EtcdMachine {
        failed: 1,
        retry: secs(5),
        ..machine_in_step(Temporary)
    };
    assert_leads_after(
        secs(5),
        retried(),
        &make_observation(WAITS, REPLACES, Holder::Temporary),
        Returning,
    );
    // At 6 s the node's etcd does not wait for the data, so the step stays. The failures are
    // forgotten when the node's etcd serves.
    let mut machine = retried();
    machine.next(
        &make_observation(SILENT, REPLACES, Holder::Temporary),
        secs(6),
    );
    assert_eq!((machine.step, machine.failed), (Temporary, 1));
    machine.next(&make_observation(SERVES, NONE, Holder::Another), secs(7));
    assert_eq!(
        (machine.step, machine.failed, machine.retry),
        (Own, 0, Duration::ZERO)
    );
}

#[test]
fn the_temporary_etcd_is_given_up_after_three_exits_in_a_step() {
    let ended = |ends| make_observation(GONE, TemporaryEtcd { ends, ..NONE }, Holder::Unknown);
    let mut machine = EtcdMachine {
        ends: 2,
        ..machine_in_step(Stopping)
    };
    // While the holder of the lock is unknown, no temporary etcd is started, and none exits.
    for nth in 0..10 {
        machine.next(&ended(2 + ENDS - 1), secs(nth));
        assert_eq!((machine.step, machine.given_up), (Stopping, false));
    }
    machine.next(&ended(2 + ENDS), secs(10));
    assert_eq!((machine.step, machine.given_up), (GivenBack, true));
    // A kill by the bridge is no failure, either.
    let mut machine = machine_in_step(Stopping);
    for ends in 0..2 * ENDS {
        let running = TemporaryEtcd { ends, ..BEGINS };
        let wanted = machine.next(&make_observation(GONE, running, Holder::Another), secs(1));
        assert_eq!(wanted.temporary, Process::Kill);
        machine.next(&ended(ends + 1), secs(1));
        assert_eq!(machine.step, Stopping, "{ends}");
    }
}

#[test]
fn a_silent_etcd_is_hung_after_its_time() {
    let size = 1 << 30;
    let silent = |holder| EtcdObservation {
        size,
        ..make_observation(GONE, BEGINS, holder)
    };
    assert_leads_after(
        STARTS,
        machine_in_step(Stopping),
        &silent(Holder::Nobody),
        Returning,
    );
    assert_leads_after(
        startup_patience(size),
        machine_in_step(Stopping),
        &silent(Holder::Temporary),
        Returning,
    );
    let served = EtcdMachine {
        served: true,
        ..machine_in_step(Temporary)
    };
    assert_leads_after(HUNG, served, &silent(Holder::Temporary), Returning);
    // The time begins again when the etcd gets the lock, and when its process starts.
    for before in [
        silent(Holder::Nobody),
        make_observation(GONE, NONE, Holder::Unknown),
    ] {
        let mut machine = machine_in_step(Stopping);
        for (seen, now, step) in [
            (&before, Duration::ZERO, Stopping),
            (&before, STARTS - NANOSECOND, Stopping),
            (&silent(Holder::Temporary), STARTS, Stopping),
            (
                &silent(Holder::Temporary),
                STARTS + startup_patience(size) - NANOSECOND,
                Stopping,
            ),
            (
                &silent(Holder::Temporary),
                STARTS + startup_patience(size),
                Returning,
            ),
        ] {
            machine.next(seen, now);
            assert_eq!(machine.step, step, "{now:?}");
        }
    }
    // A process that does not run is not hung, and a serving process is not either.
    for (step, temporary, holder) in [
        (Stopping, NONE, Holder::Unknown),
        (Temporary, REPLACES, Holder::Temporary),
    ] {
        let mut machine = machine_in_step(step);
        for now in [Duration::ZERO, 2 * STARTS] {
            machine.next(&make_observation(GONE, temporary, holder), now);
            assert_eq!(machine.step, step);
        }
    }
}

#[test]
fn the_data_is_given_back_while_command_may_replace_it() {
    let stopping = |failed| EtcdMachine {
        failed,
        ..machine_in_step(Stopping)
    };
    let commanding = |own| EtcdObservation {
        commanding: true,
        ..make_observation(own, NONE, Holder::Unknown)
    };
    assert_leads_after(GIVES_BACK, stopping(0), &commanding(GONE), GivenBack);
    let temporary = EtcdObservation {
        temporary: REPLACES,
        ..commanding(GONE)
    };
    assert_leads_after(
        GIVES_BACK,
        machine_in_step(Temporary),
        &temporary,
        GivenBack,
    );
    // A waiting etcd gets the data at once, unless it has failed.
    assert_leads_after(GIVES_BACK, stopping(1), &commanding(WAITS), GivenBack);
    for seen in [
        commanding(WAITS),
        make_observation(GONE, NONE, Holder::Unknown),
    ] {
        let mut machine = stopping(0);
        for now in [Duration::ZERO, 2 * GIVES_BACK] {
            machine.next(&seen, now);
            assert_eq!(machine.step, Stopping, "{seen:?}");
        }
    }
}

#[test]
fn an_absence_is_over_after_service_without_a_break() {
    let (serves, gone) = (
        make_observation(SERVES, NONE, Holder::Another),
        make_observation(GONE, NONE, Holder::Unknown),
    );
    let unseen = make_observation(UNSEEN_ONE, NONE, Holder::Unknown);
    // Gone at 0, for longer than a slow answer; back at 10.
    let away = |then: &[(&EtcdObservation, Duration)]| {
        let mut machine = machine_in_step(Own);
        for (seen, now) in [(&gone, secs(0)), (&gone, secs(2)), (&serves, secs(10))]
            .iter()
            .chain(then)
        {
            machine.next(seen, *now);
        }
        machine.away
    };
    let since = Some(Duration::ZERO);
    let back = secs(10) + BACK;
    assert_eq!(
        (
            away(&[(&serves, back - NANOSECOND)]),
            away(&[(&serves, back)])
        ),
        (since, None)
    );
    // A slow answer is no break, but an exit is.
    let slow = [(&gone, secs(12)), (&serves, secs(12)), (&serves, back)];
    assert_eq!(away(&slow), None);
    let ends = [
        (&gone, secs(12)),
        (&gone, secs(14)),
        (&gone, secs(14)),
        (&serves, secs(14)),
        (&serves, back),
    ];
    assert_eq!(away(&ends), since);
    // An etcd that answers all the time is not away. An etcd that answers without a visible
    // database does not serve.
    for seen in [&serves, &unseen] {
        let mut machine = machine_in_step(Own);
        machine.next(seen, Duration::ZERO);
        assert_eq!(
            (machine.away, machine.back.is_some()),
            (None, seen.own.serves())
        );
    }
}

#[test]
fn a_slow_etcd_is_reported_as_the_nodes_etcd() {
    for step in [Own, Stopping, Temporary, Returning, GivenBack] {
        for has_stopped in [false, true] {
            let machine = EtcdMachine {
                has_stopped,
                ..machine_in_step(step)
            };
            let told = if step == Stopping && !has_stopped {
                Own
            } else {
                step
            };
            assert_eq!(machine.step(), told, "{has_stopped}");
        }
    }
}

#[test]
fn trouble_is_reported_to_the_operator() {
    let told = [
        EtcdMachine {
            is_unseen: true,
            ..machine_in_step(Own)
        },
        EtcdMachine {
            is_unseen: true,
            ..machine_in_step(Temporary)
        },
        EtcdMachine {
            given_up: true,
            ..machine_in_step(GivenBack)
        },
        machine_in_step(GivenBack),
        EtcdMachine {
            failed: 1,
            ..machine_in_step(Temporary)
        },
    ]
    .map(|machine| machine.trouble().unwrap());
    assert!(told[1].contains("no client") && !told[0].contains("no client"));
    assert_eq!(BTreeSet::from(told).len(), 5, "each has its own text");
    assert_eq!(
        [Own, Stopping, Temporary, Returning].map(|step| machine_in_step(step).trouble().is_some()),
        [false; 4]
    );
    // An etcd that answers without a visible database is reported after a while. An absent etcd is
    // not reported, nor an etcd with a database.
    for (own, is_told) in [(UNSEEN_ONE, true), (SILENT, false), (SERVES, false)] {
        let mut machine = machine_in_step(Own);
        for (now, late) in [
            (Duration::ZERO, false),
            (UNSEEN - NANOSECOND, false),
            (UNSEEN, true),
        ] {
            machine.next(&make_observation(own, NONE, Holder::Unknown), now);
            assert_eq!(machine.is_unseen, is_told && late, "{own:?} {now:?}");
        }
    }
}

#[test]
fn a_large_database_gets_additional_time_for_each_gib() {
    let (none, half, one) = (0, 1 << 29, 1 << 30);
    assert_eq!(
        [none, half, one].map(startup_patience),
        [HUNG, HUNG + HUNG_PER_GIB / 2, HUNG + HUNG_PER_GIB]
    );
    let pause = GRACE + PAUSE;
    let expected = [pause, pause + PAUSE_PER_GIB / 2, pause + PAUSE_PER_GIB];
    assert_eq!([none, half, one].map(expected_pause), expected);
}

/// The second etcd has the lock on the file at the path, does not serve, and loses that file, too.
/// Its rescue does not make good that the first one's writes are in no file with a name.
#[test]
fn an_etcd_that_has_not_served_makes_no_file_complete() {
    let mut world = world_stopped_for_copy(true);
    world.run_for(secs(12));
    world.apply_event(Event::Crash);
    world.apply_event(Event::Start(Kind::Good));
    world.tick();
    assert_eq!(world.observation().own.opened, Opened::Named);
    world.apply_event(Event::Replace);
    world.run_for(secs(50));
    assert!(world.unrecovered && world.rescue.is_some());
    world.run_for(secs(45));
    assert!(world.unrecovered && world.rescue.is_none() && world.temporary.is_none());
    world.assert_ends_well();
}
