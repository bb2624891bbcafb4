//! The rules of the machine one by one, each at its edge. The random walks and the search show what
//! follows from all rules together, and reach an edge by chance.

use super::*;

const SIBLING: ShimId = ShimId(7);
/// The listener that the shim makes, and the sibling's listener.
const OWN: Cookie = Cookie(1);
const THEIRS: Cookie = Cookie(2);
const THIRD: Cookie = Cookie(3);
const MOMENT: Time = Duration::from_millis(1);
const DOWN: Facts = Facts {
    ready: false,
    reachable: false,
    leaving: false,
    blocked: false,
};
const UNREADY: Facts = Facts {
    reachable: true,
    ..DOWN
};
const READY: Facts = Facts {
    ready: true,
    ..UNREADY
};
const LEAVING: Facts = Facts {
    leaving: true,
    ..READY
};

fn make_machine() -> Machine {
    Machine::new(
        Rules {
            addresses: vec![test_address()],
            hold: HOLD,
            lease: LEASE,
        },
        Time::ZERO,
    )
}

/// Returns a joined machine with its own listener.
fn joined_machine() -> Machine {
    let mut machine = make_machine();
    machine.set_facts(READY);
    machine.on_listening(test_address(), OWN);
    machine.on_accepting(OWN);
    assert_eq!(machine.phase(), Phase::Joined);
    machine
}

/// Returns the announcement of a joined and ready sibling.
fn serving_announce(owns: &[Cookie], accepts: &[Cookie]) -> Announce {
    let [owns, accepts] = [owns, accepts].map(|cookies| cookies.iter().copied().collect());
    Announce {
        phase: Phase::Joined,
        ready: true,
        reachable: true,
        leaving: false,
        owns,
        accepts,
    }
}

/// The sibling connects, announces its state, and gives its listener.
fn meet_sibling(machine: &mut Machine, announce: Announce) -> Vec<Action> {
    machine.on_connected(SIBLING);
    without_announce(machine.on_update(SIBLING, announce, &[(THEIRS, test_address())]))
}

fn renew_sibling_lease(machine: &mut Machine, now: Time) -> Vec<Action> {
    without_announce(machine.on_leases(now, &[(SIBLING, now, now + LEASE)]))
}

/// Returns the actions without the announcement.
fn without_announce(actions: Vec<Action>) -> Vec<Action> {
    actions
        .into_iter()
        .filter(|action| *action != Action::Announce)
        .collect()
}

#[test]
fn a_sibling_is_awaited_while_its_lease_holds_and_for_a_lease_at_most() {
    for (lease, awaited) in [(STEP, STEP), (2 * LEASE, LEASE)] {
        let mut machine = make_machine();
        machine.on_leases(Time::ZERO, &[(SIBLING, Time::ZERO, lease)]);
        assert_eq!(machine.set_facts(READY), [Action::Announce]);
        assert!(without_announce(machine.tick(awaited - MOMENT)).is_empty());
        assert_eq!(
            (machine.awaited_siblings(), machine.knows_siblings()),
            (vec![SIBLING], false)
        );
        assert_eq!(machine.tick(awaited), [Action::Listen(test_address())]);
        assert_eq!(
            (machine.awaited_siblings(), machine.now()),
            (vec![], awaited)
        );
    }
    let mut machine = make_machine();
    machine.on_connected(SIBLING);
    assert_eq!(
        (machine.awaited_siblings(), machine.knows_siblings()),
        (vec![], false),
        "it is connected, and announces soon"
    );
    assert_eq!(without_announce(machine.set_facts(READY)), []);
    assert_eq!(
        without_announce(machine.on_update(SIBLING, Announce::default(), &[])),
        [Action::Listen(test_address())]
    );
}

#[test]
fn siblings_that_stay_silent_or_without_a_connection_are_reported_after_a_lease() {
    let mut machine = make_machine();
    let [silent, unconnected, announced] = [1, 2, 3].map(ShimId);
    machine.on_leases(Time::ZERO, &[(unconnected, Time::ZERO, 2 * LEASE)]);
    machine.on_connected(silent);
    machine.on_connected(announced);
    machine.on_update(announced, Announce::default(), &[]);
    for (at, of) in [
        (Time::ZERO, [vec![], vec![]]),
        (LEASE - MOMENT, [vec![], vec![]]),
    ]
    .into_iter()
    .chain([
        (LEASE, [vec![silent], vec![unconnected]]),
        (2 * LEASE, [vec![silent], vec![]]),
    ]) {
        machine.tick(at);
        assert_eq!(
            [machine.silent_siblings(), machine.unconnected_siblings()],
            of,
            "{at:?}"
        );
    }
    assert_eq!(
        machine.peers.keys().copied().collect::<Vec<_>>(),
        [silent, announced],
        "who is connected may wake"
    );
    machine.on_update(silent, Announce::default(), &[]);
    assert!(machine.silent_siblings().is_empty());
}

#[test]
fn all_guards_are_here_when_each_live_sibling_has_announced() {
    let rows = [
        (false, true, Time::ZERO, false),
        (true, false, Time::ZERO, false),
        (true, true, Time::ZERO, true),
        (true, false, LEASE - MOMENT, false),
        (true, false, LEASE, true),
    ];
    for (connected, announced, now, all) in rows {
        let mut machine = make_machine();
        assert!(machine.has_all_guards(), "nobody has others");
        machine.on_leases(Time::ZERO, &[(SIBLING, Time::ZERO, LEASE)]);
        connected.then(|| machine.on_connected(SIBLING));
        announced.then(|| machine.on_update(SIBLING, Announce::default(), &[]));
        machine.tick(now);
        assert_eq!(
            machine.has_all_guards(),
            all,
            "{connected} {announced} {now:?}"
        );
    }
}

#[test]
fn joined_siblings_take_clients_and_a_staying_sibling_succeeds() {
    let serves = serving_announce(&[THEIRS], &[THEIRS]);
    let rows = [
        (serves.clone(), true, Time::ZERO, (true, true)),
        (
            Announce {
                leaving: true,
                ..serves.clone()
            },
            true,
            Time::ZERO,
            (true, false),
        ),
        (
            Announce {
                ready: false,
                ..serves.clone()
            },
            true,
            Time::ZERO,
            (false, false),
        ),
        (
            Announce {
                phase: Phase::Waiting,
                ..serves.clone()
            },
            true,
            Time::ZERO,
            (false, false),
        ),
        (serves.clone(), false, Time::ZERO, (false, false)),
        (serves.clone(), true, LEASE - MOMENT, (true, true)),
        (serves, true, LEASE, (false, false)),
    ];
    for (announce, connected, now, expected) in rows {
        let mut machine = make_machine();
        machine.on_leases(Time::ZERO, &[(SIBLING, Time::ZERO, LEASE)]);
        connected.then(|| machine.on_connected(SIBLING));
        machine.on_update(SIBLING, announce.clone(), &[]);
        machine.tick(now);
        let found = (
            machine.joined_siblings() == [SIBLING],
            machine.has_successor(),
        );
        assert_eq!(found, expected, "{announce:?} {connected} {now:?}");
    }
}

#[test]
fn a_lease_revives_a_sibling_if_it_was_renewed_after_the_end() {
    let mut machine = make_machine();
    machine.on_connected(SIBLING);
    machine.on_gone(STEP, SIBLING);
    for (renewed, is_dead) in [(STEP, true), (STEP + MOMENT, false)] {
        machine.on_leases(2 * STEP, &[(SIBLING, renewed, renewed + LEASE)]);
        assert_eq!(
            (
                machine.is_dead(SIBLING),
                machine.awaited_siblings().is_empty()
            ),
            (is_dead, is_dead)
        );
    }
    machine.on_gone(3 * STEP, SIBLING);
    machine.forget_dead(&BTreeSet::from([SIBLING]));
    assert!(machine.is_dead(SIBLING), "its lease may be read again");
    machine.forget_dead(&BTreeSet::new());
    assert!(!machine.is_dead(SIBLING));
}

#[test]
fn the_machine_wakes_at_each_deadline_once() {
    let mut waits = make_machine();
    assert_eq!(waits.next_wake(), Some(HOLD), "clients are refused");
    waits.tick(HOLD);
    assert_eq!(waits.next_wake(), None);
    let mut serves = joined_machine();
    assert_eq!(
        (serves.next_wake(), serves.addresses()),
        (None, &[test_address()][..])
    );
    serves.on_leases(Time::ZERO, &[(SIBLING, Time::ZERO, 10 * LEASE)]);
    assert_eq!(
        serves.next_wake(),
        Some(LEASE),
        "a sibling is awaited no more"
    );
    meet_sibling(&mut serves, serving_announce(&[THEIRS], &[THEIRS]));
    serves.tick(2 * LEASE);
    assert_eq!(
        serves.next_wake(),
        Some(10 * LEASE),
        "a sibling's lease ends"
    );
    serves.set_facts(LEAVING);
    assert_eq!(
        serves.next_wake(),
        Some(3 * LEASE),
        "the time to leave ends"
    );
    serves.tick(2 * LEASE + STEP);
    serves.on_update(
        SIBLING,
        serving_announce(&[OWN, THEIRS], &[OWN, THEIRS]),
        &[],
    );
    assert_eq!(
        serves.next_wake(),
        Some(3 * LEASE + STEP),
        "the time of the accept loops ends"
    );
}

#[test]
fn a_new_connection_gets_one_announcement() {
    let mut machine = joined_machine();
    assert_eq!(machine.on_connected(SIBLING), [Action::Announce]);
    assert_eq!(machine.set_facts(READY), [], "nothing has changed");
    assert_eq!(
        machine.on_update(SIBLING, Announce::default(), &[(THEIRS, test_address())])[..1],
        [Action::Accept(THEIRS)]
    );
    assert_eq!(
        machine.guards(),
        [(OWN, test_address()), (THEIRS, test_address())]
    );
}

#[test]
fn a_shim_is_joined_when_it_accepts_at_each_address() {
    let other = SocketAddr::new(test_address().ip(), 7443);
    let rules = Rules {
        addresses: vec![test_address(), other],
        hold: HOLD,
        lease: LEASE,
    };
    let mut machine = Machine::new(rules, Time::ZERO);
    // An orphan at the first address.
    assert_eq!(
        meet_sibling(&mut machine, Announce::default()),
        [Action::Accept(THEIRS)]
    );
    assert_eq!(machine.on_accepting(THEIRS), [Action::Announce]);
    assert_eq!(
        without_announce(machine.set_facts(READY)),
        [Action::Listen(other)]
    );
    assert_eq!(
        machine.announce().owns,
        [THEIRS].into(),
        "it takes the orphan over"
    );
    assert_eq!(without_announce(machine.tick(STEP)), [], "it listens once");
    assert_eq!(machine.retry_listen(other), [Action::Listen(other)]);
    assert_eq!(machine.on_listening(other, OWN)[..1], [Action::Accept(OWN)]);
    assert_eq!(
        (machine.phase(), machine.guards()),
        (Phase::Waiting, vec![(THEIRS, test_address())])
    );
    assert_eq!(
        machine.on_accepting(OWN),
        [Action::Phase(Phase::Joined), Action::Announce]
    );
    assert_eq!(
        (machine.announce().accepts, machine.guards().len()),
        ([OWN, THEIRS].into(), 2)
    );
}

/// A newcomer would have no guard of the orphan if the shim died before its loop ran.
#[test]
fn an_orphan_is_given_while_its_accept_loop_starts() {
    let mut machine = make_machine();
    machine.set_facts(READY);
    assert_eq!(
        meet_sibling(&mut machine, Announce::default()),
        [Action::Accept(THEIRS)]
    );
    assert_eq!(machine.announce().owns, [THEIRS].into());
    assert_eq!(machine.guards(), [(THEIRS, test_address())]);
}

/// The shim's instance is not ready, although others are.
#[test]
fn a_shim_that_was_never_ready_makes_and_releases_no_listener() {
    for sibling in [None, Some(serving_announce(&[THEIRS], &[THEIRS]))] {
        let mut machine = make_machine();
        assert_eq!(without_announce(machine.set_facts(UNREADY)), []);
        assert_eq!(
            sibling.map_or(vec![], |announce| meet_sibling(&mut machine, announce)),
            []
        );
        for now in [STEP, 2 * STEP] {
            assert_eq!(
                (without_announce(machine.tick(now)), machine.phase()),
                (vec![], Phase::Waiting)
            );
        }
    }
}

#[test]
fn a_listener_that_its_live_owner_does_not_accept_from_is_an_orphan() {
    for (owns, accepts, is_orphan) in [
        (true, true, false),
        (true, false, true),
        (false, true, true),
        (false, false, true),
    ] {
        let of = |is: bool| if is { &[THEIRS][..] } else { &[] };
        for mut machine in [make_machine(), joined_machine()] {
            let taken = meet_sibling(&mut machine, serving_announce(of(owns), of(accepts)));
            assert_eq!(
                taken == [Action::Accept(THEIRS)],
                is_orphan,
                "{owns} {accepts}"
            );
        }
    }
    let mut machine = joined_machine();
    meet_sibling(&mut machine, serving_announce(&[], &[]));
    machine.on_accepting(THEIRS);
    assert_eq!(
        meet_sibling(&mut machine, serving_announce(&[THEIRS], &[THEIRS])),
        [Action::Guard(THEIRS)]
    );
    assert_eq!(machine.on_accepting(THEIRS), [], "it ends");
    assert_eq!(
        (
            machine.announce().accepts,
            without_announce(machine.on_gone(STEP, SIBLING))
        ),
        ([OWN].into(), vec![])
    );
    assert_eq!(
        machine.on_loop_ended(THEIRS)[..1],
        [Action::Accept(THEIRS)],
        "one loop after the other"
    );
}

#[test]
fn an_unheard_sibling_may_own_a_new_guard_but_no_listener_in_use() {
    let mut machine = joined_machine();
    meet_sibling(&mut machine, serving_announce(&[], &[]));
    machine.on_accepting(THEIRS);
    machine.on_leases(
        STEP,
        &[(ShimId(8), STEP, 10 * LEASE), (SIBLING, STEP, 10 * LEASE)],
    );
    assert_eq!(
        without_announce(machine.on_update(
            SIBLING,
            serving_announce(&[], &[]),
            &[(THIRD, test_address())]
        )),
        []
    );
    assert_eq!(machine.announce().accepts, [OWN, THEIRS].into());
    assert_eq!(machine.tick(STEP + LEASE)[..1], [Action::Accept(THIRD)]);
}

#[test]
fn clients_are_refused_when_nothing_was_reachable_for_the_hold() {
    let mut machine = joined_machine();
    machine.tick(10 * HOLD);
    let since = machine.now();
    assert_eq!(machine.set_facts(DOWN), [Action::Announce]);
    assert_eq!(machine.tick(since + HOLD - MOMENT), []);
    let refused = [
        Action::Refuse(OWN),
        Action::Phase(Phase::Refusing),
        Action::Announce,
    ];
    assert_eq!(machine.tick(since + HOLD), refused);
    assert_eq!(
        (machine.on_loop_ended(OWN), machine.tick(since + 2 * HOLD)),
        (vec![], vec![])
    );
    assert_eq!(
        machine.set_facts(UNREADY),
        [Action::Accept(OWN), Action::Announce],
        "the instance of a sibling is ready"
    );
    machine.on_accepting(OWN);
    assert_eq!(machine.phase(), Phase::Joined);
}

#[test]
fn an_instance_that_a_sibling_reaches_is_reachable() {
    let mut machine = joined_machine();
    meet_sibling(
        &mut machine,
        Announce {
            reachable: true,
            ..Announce::default()
        },
    );
    machine.set_facts(DOWN);
    renew_sibling_lease(&mut machine, HOLD);
    assert_eq!(machine.phase(), Phase::Joined);
    machine.tick(HOLD + LEASE);
    assert_eq!(
        machine.next_wake(),
        Some(2 * HOLD + LEASE),
        "since its lease has ended"
    );
}

#[test]
fn a_waiting_shim_without_an_instance_accepts_for_the_hold() {
    let mut machine = make_machine();
    assert_eq!(
        meet_sibling(&mut machine, Announce::default()),
        [Action::Accept(THEIRS)]
    );
    machine.on_accepting(THEIRS);
    assert_eq!(without_announce(machine.tick(HOLD - MOMENT)), []);
    assert_eq!(
        without_announce(machine.tick(HOLD)),
        [Action::Refuse(THEIRS)]
    );
    assert_eq!(
        (machine.on_loop_ended(THEIRS), machine.phase()),
        (vec![], Phase::Waiting)
    );
}

#[test]
fn a_ready_shim_keeps_its_listeners_beside_a_successor() {
    let mut machine = joined_machine();
    assert_eq!(
        meet_sibling(
            &mut machine,
            serving_announce(&[OWN, THEIRS], &[OWN, THEIRS])
        ),
        []
    );
    assert_eq!(
        (machine.phase(), machine.announce().owns),
        (Phase::Joined, [OWN].into())
    );
}

/// The shim's instance is down, and its sibling's instance is up.
#[test]
fn a_relieved_shim_accepts_until_its_sibling_does() {
    let mut machine = joined_machine();
    meet_sibling(&mut machine, serving_announce(&[THEIRS], &[THEIRS]));
    assert_eq!(without_announce(machine.set_facts(UNREADY)), []);
    for nth in 1..20 {
        assert_eq!(renew_sibling_lease(&mut machine, nth * STEP), []);
    }
    let Announce {
        phase,
        owns,
        accepts,
        ..
    } = machine.announce();
    assert_eq!(
        (phase, owns, accepts),
        (Phase::Joined, [].into(), [OWN].into())
    );
    machine.set_facts(READY);
    assert_eq!(machine.announce().owns, [OWN].into(), "it is up again");
    machine.set_facts(UNREADY);
    let both = serving_announce(&[OWN, THEIRS], &[OWN, THEIRS]);
    assert_eq!(
        without_announce(machine.on_update(SIBLING, both.clone(), &[])),
        [Action::Guard(OWN)]
    );
    assert_eq!(
        (
            machine.phase(),
            without_announce(machine.on_loop_ended(OWN))
        ),
        (Phase::Joined, vec![Action::Phase(Phase::Left)])
    );
    for nth in 20..22 {
        assert_eq!(
            (
                renew_sibling_lease(&mut machine, nth * STEP),
                machine.phase()
            ),
            (vec![], Phase::Left)
        );
    }
    // The sibling's instance is down as well: clients may hang at either.
    let down = Announce {
        ready: false,
        ..both.clone()
    };
    let returns = [
        Action::Listen(test_address()),
        Action::Phase(Phase::Waiting),
    ];
    assert_eq!(
        without_announce(machine.on_update(SIBLING, down, &[])),
        returns
    );
    assert_eq!(
        without_announce(machine.on_update(SIBLING, both, &[])),
        [Action::Phase(Phase::Left)],
        "relieved again"
    );
}

#[test]
fn a_shim_that_has_left_accepts_again_when_nobody_relieves_it() {
    for (hold, phase) in [(HOLD, Phase::Joined), (Time::ZERO, Phase::Left)] {
        let mut machine = joined_machine();
        machine.rules.hold = hold;
        meet_sibling(&mut machine, serving_announce(&[THEIRS], &[OWN, THEIRS]));
        machine.set_facts(DOWN);
        machine.on_loop_ended(OWN);
        assert_eq!(machine.phase(), Phase::Left);
        let again = [
            Action::Accept(OWN),
            Action::Accept(THEIRS),
            Action::Phase(Phase::Waiting),
        ];
        assert_eq!(
            without_announce(machine.on_gone(STEP, SIBLING)),
            if hold == HOLD { &again[..] } else { &[] }
        );
        for now in [2 * STEP, 3 * STEP] {
            assert_eq!(without_announce(machine.tick(now)), []);
        }
        machine.on_accepting(OWN);
        assert_eq!(
            machine.phase(),
            phase,
            "its instance is down, and clients wait"
        );
    }
}

#[test]
fn a_shim_that_is_ready_again_joins_when_its_loops_have_ended() {
    let mut machine = make_machine();
    machine.set_facts(READY);
    assert_eq!(
        without_announce(machine.on_listening(test_address(), OWN)),
        [Action::Accept(OWN)]
    );
    meet_sibling(&mut machine, serving_announce(&[THEIRS], &[THEIRS]));
    machine.set_facts(UNREADY);
    assert_eq!(
        machine.guards(),
        [(OWN, test_address()), (THEIRS, test_address())],
        "who leaves gives what it has not begun"
    );
    let both = serving_announce(&[OWN, THEIRS], &[OWN, THEIRS]);
    assert_eq!(
        without_announce(machine.on_update(SIBLING, both, &[])),
        [Action::Guard(OWN)]
    );
    assert_eq!(without_announce(machine.set_facts(READY)), []);
    assert_eq!(
        without_announce(machine.on_loop_ended(OWN)),
        [Action::Phase(Phase::Left)]
    );
    assert_eq!(
        without_announce(machine.tick(STEP)),
        [
            Action::Listen(test_address()),
            Action::Phase(Phase::Waiting)
        ]
    );
}

#[test]
fn a_shim_that_leaves_alone_serves_its_queue() {
    let mut machine = joined_machine();
    assert_eq!(
        machine.set_facts(LEAVING),
        [Action::Close(OWN), Action::Announce]
    );
    assert_eq!((machine.phase(), machine.guards()), (Phase::Joined, vec![]));
    // A sibling that leaves too gives the listener once more.
    let leaves = Announce {
        leaving: true,
        ..serving_announce(&[], &[])
    };
    machine.on_connected(SIBLING);
    assert_eq!(
        without_announce(machine.on_update(SIBLING, leaves, &[(OWN, test_address())])),
        []
    );
    assert_eq!(
        without_announce(machine.on_loop_ended(OWN)),
        [Action::Close(OWN)]
    );
    assert_eq!(
        without_announce(machine.on_loop_failed(OWN)),
        [Action::Phase(Phase::Left)]
    );
    assert_eq!(
        (without_announce(machine.tick(STEP)), machine.phase()),
        (vec![], Phase::Left),
        "although its instance is ready"
    );
}

#[test]
fn a_leaving_shim_waits_a_lease_for_a_staying_sibling() {
    let accepts = serving_announce(&[THEIRS], &[THEIRS]);
    let leaves = |announce: &Announce| Announce {
        leaving: true,
        ..announce.clone()
    };
    let covers = serving_announce(&[THEIRS], &[OWN, THEIRS]);
    // The sibling's announcement, the expiry of the sibling's lease, and the time at which the shim
    // releases its listener.
    let rows = [
        (
            accepts.clone(),
            10 * LEASE,
            STEP + LEASE,
            [Action::Close(OWN)].to_vec(),
        ),
        (
            accepts.clone(),
            LEASE,
            LEASE,
            vec![Action::Close(OWN), Action::Close(THEIRS)],
        ),
        (covers.clone(), LEASE, STEP, vec![Action::Guard(OWN)]),
        (
            leaves(&covers),
            10 * LEASE,
            STEP,
            vec![Action::Close(OWN), Action::Close(THEIRS)],
        ),
    ];
    for (announce, until, at, actions) in rows {
        let mut machine = joined_machine();
        machine.on_leases(Time::ZERO, &[(SIBLING, Time::ZERO, until)]);
        meet_sibling(&mut machine, announce.clone());
        machine.tick(STEP);
        let mut done = without_announce(machine.set_facts(LEAVING));
        if at > STEP {
            assert_eq!((done, machine.announce().owns), (vec![], [].into()));
            assert_eq!(without_announce(machine.tick(at - MOMENT)), []);
            done = without_announce(machine.tick(at));
        }
        assert_eq!(done, actions, "{announce:?} {until:?}");
        assert_eq!(
            machine.phase(),
            Phase::Joined,
            "its accept loop has not ended"
        );
        machine.on_loop_ended(OWN);
        assert_eq!(
            machine.phase() == Phase::Left,
            !actions.contains(&Action::Close(THEIRS)),
            "no loop of it runs"
        );
        machine.on_loop_ended(THEIRS);
        assert_eq!(machine.phase(), Phase::Left);
    }
    // A sibling that leaves accepts, and a sibling that stays accepts nothing or has announced
    // nothing yet.
    for other in [Some(accepts), None] {
        let mut machine = joined_machine();
        meet_sibling(&mut machine, leaves(&covers));
        machine.on_connected(ShimId(8));
        other
            .into_iter()
            .for_each(|other| drop(machine.on_update(ShimId(8), other, &[])));
        assert_eq!(without_announce(machine.set_facts(LEAVING)), []);
    }
}

#[test]
fn a_shim_that_has_left_serves_its_queues_when_no_sibling_stays() {
    let mut machine = joined_machine();
    meet_sibling(&mut machine, serving_announce(&[THEIRS], &[OWN, THEIRS]));
    machine.set_facts(LEAVING);
    machine.on_loop_ended(OWN);
    assert_eq!(machine.phase(), Phase::Left);
    let stays = serving_announce(&[THEIRS], &[THEIRS]);
    assert_eq!(
        without_announce(machine.on_update(SIBLING, stays, &[(THIRD, test_address())])),
        [],
        "it may accept soon"
    );
    let closed = [OWN, THEIRS, THIRD].map(Action::Close);
    assert_eq!(without_announce(machine.on_gone(STEP, SIBLING)), closed);
}

#[test]
fn a_leaving_shim_takes_no_orphan_and_keeps_its_listeners() {
    let mut machine = joined_machine();
    meet_sibling(&mut machine, serving_announce(&[], &[]));
    machine.on_accepting(THEIRS);
    assert_eq!(without_announce(machine.set_facts(LEAVING)), []);
    assert_eq!(
        without_announce(machine.on_update(
            SIBLING,
            serving_announce(&[], &[]),
            &[(THIRD, test_address())]
        )),
        []
    );
    assert_eq!(machine.announce().accepts, [OWN, THEIRS].into());
}

/// A loop that ends accepts no more clients from the queue.
#[test]
fn a_leaving_shim_serves_a_queue_when_the_old_loop_has_ended() {
    let mut machine = joined_machine();
    meet_sibling(&mut machine, serving_announce(&[], &[]));
    machine.on_accepting(THEIRS);
    assert_eq!(
        meet_sibling(&mut machine, serving_announce(&[THEIRS], &[THEIRS])),
        [Action::Guard(THEIRS)]
    );
    machine.on_gone(STEP, SIBLING);
    assert_eq!(
        without_announce(machine.set_facts(LEAVING)),
        [Action::Close(OWN)]
    );
    assert_eq!(
        without_announce(machine.on_loop_ended(OWN)),
        [],
        "the other loop has not ended"
    );
    assert_eq!(
        without_announce(machine.on_loop_ended(THEIRS)),
        [Action::Close(THEIRS)]
    );
    assert_eq!(
        without_announce(machine.on_loop_ended(THEIRS)),
        [Action::Phase(Phase::Left)]
    );
}

#[test]
fn a_leaving_shim_that_refused_accepts_no_more() {
    let mut machine = joined_machine();
    meet_sibling(&mut machine, Announce::default());
    machine.set_facts(DOWN);
    renew_sibling_lease(&mut machine, HOLD);
    machine.on_loop_ended(OWN);
    machine.on_loop_ended(THEIRS);
    assert_eq!(machine.phase(), Phase::Refusing);
    assert_eq!(
        without_announce(machine.set_facts(LEAVING)),
        [],
        "its sibling stays"
    );
}

#[test]
fn a_failed_loop_is_retried_unless_another_shim_accepts() {
    let mut machine = joined_machine();
    machine.on_loop_failed(OWN);
    assert_eq!(
        (machine.announce().accepts, machine.tick(STEP)),
        ([].into(), vec![])
    );
    assert_eq!(
        without_announce(machine.on_loop_ended(OWN)),
        [Action::Accept(OWN)]
    );
    machine.on_accepting(OWN);
    meet_sibling(&mut machine, serving_announce(&[], &[]));
    assert_eq!(without_announce(machine.on_loop_failed(THEIRS)), []);
    assert_eq!(
        meet_sibling(&mut machine, serving_announce(&[THEIRS], &[THEIRS])),
        []
    );
    assert_eq!(
        meet_sibling(&mut machine, serving_announce(&[], &[])),
        [Action::Accept(THEIRS)]
    );
    machine.on_accepting(THEIRS);
    assert_eq!(
        meet_sibling(&mut machine, serving_announce(&[THEIRS], &[THEIRS])),
        [Action::Guard(THEIRS)]
    );
    machine.on_loop_failed(THEIRS);
    assert_eq!(
        meet_sibling(&mut machine, serving_announce(&[], &[])),
        [Action::Accept(THEIRS)],
        "it was to end, and has"
    );
}
