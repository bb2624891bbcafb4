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

fn machine() -> Machine {
    Machine::new(
        Rules {
            addresses: vec![address()],
            hold: HOLD,
            lease: LEASE,
        },
        Time::ZERO,
    )
}

/// Returns a joined machine with its own listener.
fn joined() -> Machine {
    let mut machine = machine();
    machine.facts(READY);
    machine.listening(address(), OWN);
    machine.accepting(OWN);
    assert_eq!(machine.phase(), Phase::Joined);
    machine
}

/// Returns the announcement of a joined and ready sibling.
fn serving(owns: &[Cookie], accepts: &[Cookie]) -> Announce {
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
fn meet(machine: &mut Machine, announce: Announce) -> Vec<Action> {
    machine.connected(SIBLING);
    deeds(machine.updated(SIBLING, announce, &[(THEIRS, address())]))
}

fn renew(machine: &mut Machine, now: Time) -> Vec<Action> {
    deeds(machine.leased(now, &[(SIBLING, now, now + LEASE)]))
}

/// Returns the actions without the announcement.
fn deeds(actions: Vec<Action>) -> Vec<Action> {
    actions
        .into_iter()
        .filter(|action| *action != Action::Announce)
        .collect()
}

#[test]
fn a_sibling_is_awaited_while_its_lease_holds_and_for_a_lease_at_most() {
    for (lease, awaited) in [(STEP, STEP), (2 * LEASE, LEASE)] {
        let mut machine = machine();
        machine.leased(Time::ZERO, &[(SIBLING, Time::ZERO, lease)]);
        assert_eq!(machine.facts(READY), [Action::Announce]);
        assert!(deeds(machine.tick(awaited - MOMENT)).is_empty());
        assert_eq!(
            (machine.awaited(), machine.knows_siblings()),
            (vec![SIBLING], false)
        );
        assert_eq!(machine.tick(awaited), [Action::Listen(address())]);
        assert_eq!((machine.awaited(), machine.now()), (vec![], awaited));
    }
    let mut machine = machine();
    machine.connected(SIBLING);
    assert_eq!(
        (machine.awaited(), machine.knows_siblings()),
        (vec![], false),
        "it is connected, and announces soon"
    );
    assert_eq!(deeds(machine.facts(READY)), []);
    assert_eq!(
        deeds(machine.updated(SIBLING, Announce::default(), &[])),
        [Action::Listen(address())]
    );
}

#[test]
fn siblings_that_stay_silent_or_without_a_connection_are_reported_after_a_lease() {
    let mut machine = machine();
    let [silent, unconnected, announced] = [1, 2, 3].map(ShimId);
    machine.leased(Time::ZERO, &[(unconnected, Time::ZERO, 2 * LEASE)]);
    machine.connected(silent);
    machine.connected(announced);
    machine.updated(announced, Announce::default(), &[]);
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
        assert_eq!([machine.silent(), machine.unconnected()], of, "{at:?}");
    }
    assert_eq!(
        machine.peers.keys().copied().collect::<Vec<_>>(),
        [silent, announced],
        "who is connected may wake"
    );
    machine.updated(silent, Announce::default(), &[]);
    assert!(machine.silent().is_empty());
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
        let mut machine = machine();
        assert!(machine.has_all_guards(), "nobody has others");
        machine.leased(Time::ZERO, &[(SIBLING, Time::ZERO, LEASE)]);
        connected.then(|| machine.connected(SIBLING));
        announced.then(|| machine.updated(SIBLING, Announce::default(), &[]));
        machine.tick(now);
        assert_eq!(
            machine.has_all_guards(),
            all,
            "{connected} {announced} {now:?}"
        );
    }
}

#[test]
fn who_serves_clients_of_this_shim_and_who_succeeds_it() {
    let serves = serving(&[THEIRS], &[THEIRS]);
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
        let mut machine = machine();
        machine.leased(Time::ZERO, &[(SIBLING, Time::ZERO, LEASE)]);
        connected.then(|| machine.connected(SIBLING));
        machine.updated(SIBLING, announce.clone(), &[]);
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
    let mut machine = machine();
    machine.connected(SIBLING);
    machine.gone(STEP, SIBLING);
    for (renewed, is_dead) in [(STEP, true), (STEP + MOMENT, false)] {
        machine.leased(2 * STEP, &[(SIBLING, renewed, renewed + LEASE)]);
        assert_eq!(
            (machine.is_dead(SIBLING), machine.awaited().is_empty()),
            (is_dead, is_dead)
        );
    }
    machine.gone(3 * STEP, SIBLING);
    machine.forget_dead(&BTreeSet::from([SIBLING]));
    assert!(machine.is_dead(SIBLING), "its lease may be read again");
    machine.forget_dead(&BTreeSet::new());
    assert!(!machine.is_dead(SIBLING));
}

#[test]
fn it_wakes_when_something_is_due_and_no_more_when_that_is_past() {
    let mut waits = machine();
    assert_eq!(waits.wake(), Some(HOLD), "clients are refused");
    waits.tick(HOLD);
    assert_eq!(waits.wake(), None);
    let mut serves = joined();
    assert_eq!(
        (serves.wake(), serves.addresses()),
        (None, &[address()][..])
    );
    serves.leased(Time::ZERO, &[(SIBLING, Time::ZERO, 10 * LEASE)]);
    assert_eq!(serves.wake(), Some(LEASE), "a sibling is awaited no more");
    meet(&mut serves, serving(&[THEIRS], &[THEIRS]));
    serves.tick(2 * LEASE);
    assert_eq!(serves.wake(), Some(10 * LEASE), "a sibling's lease ends");
    serves.facts(LEAVING);
    assert_eq!(serves.wake(), Some(3 * LEASE), "the time to leave ends");
    serves.tick(2 * LEASE + STEP);
    serves.updated(SIBLING, serving(&[OWN, THEIRS], &[OWN, THEIRS]), &[]);
    assert_eq!(
        serves.wake(),
        Some(3 * LEASE + STEP),
        "the time of the accept loops ends"
    );
}

#[test]
fn a_connection_is_announced_to_once() {
    let mut machine = joined();
    assert_eq!(machine.connected(SIBLING), [Action::Announce]);
    assert_eq!(machine.facts(READY), [], "nothing has changed");
    assert_eq!(
        machine.updated(SIBLING, Announce::default(), &[(THEIRS, address())])[..1],
        [Action::Accept(THEIRS)]
    );
    assert_eq!(machine.guards(), [(OWN, address()), (THEIRS, address())]);
}

#[test]
fn a_shim_is_joined_when_it_accepts_at_each_address() {
    let other = SocketAddr::new(address().ip(), 7443);
    let rules = Rules {
        addresses: vec![address(), other],
        hold: HOLD,
        lease: LEASE,
    };
    let mut machine = Machine::new(rules, Time::ZERO);
    // An orphan at the first address.
    assert_eq!(
        meet(&mut machine, Announce::default()),
        [Action::Accept(THEIRS)]
    );
    assert_eq!(machine.accepting(THEIRS), [Action::Announce]);
    assert_eq!(deeds(machine.facts(READY)), [Action::Listen(other)]);
    assert_eq!(
        machine.announce().owns,
        [THEIRS].into(),
        "it takes the orphan over"
    );
    assert_eq!(deeds(machine.tick(STEP)), [], "it listens once");
    assert_eq!(machine.listen_again(other), [Action::Listen(other)]);
    assert_eq!(machine.listening(other, OWN)[..1], [Action::Accept(OWN)]);
    assert_eq!(
        (machine.phase(), machine.guards()),
        (Phase::Waiting, vec![(THEIRS, address())])
    );
    assert_eq!(
        machine.accepting(OWN),
        [Action::Phase(Phase::Joined), Action::Announce]
    );
    assert_eq!(
        (machine.announce().accepts, machine.guards().len()),
        ([OWN, THEIRS].into(), 2)
    );
}

/// The shim's instance is not ready, although others are.
#[test]
fn who_was_never_ready_makes_no_listener_and_has_none_to_let_go() {
    for sibling in [None, Some(serving(&[THEIRS], &[THEIRS]))] {
        let mut machine = machine();
        assert_eq!(deeds(machine.facts(UNREADY)), []);
        assert_eq!(
            sibling.map_or(vec![], |announce| meet(&mut machine, announce)),
            []
        );
        for now in [STEP, 2 * STEP] {
            assert_eq!(
                (deeds(machine.tick(now)), machine.phase()),
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
        for mut machine in [machine(), joined()] {
            let taken = meet(&mut machine, serving(of(owns), of(accepts)));
            assert_eq!(
                taken == [Action::Accept(THEIRS)],
                is_orphan,
                "{owns} {accepts}"
            );
        }
    }
    let mut machine = joined();
    meet(&mut machine, serving(&[], &[]));
    machine.accepting(THEIRS);
    assert_eq!(
        meet(&mut machine, serving(&[THEIRS], &[THEIRS])),
        [Action::Guard(THEIRS)]
    );
    assert_eq!(machine.accepting(THEIRS), [], "it ends");
    assert_eq!(
        (
            machine.announce().accepts,
            deeds(machine.gone(STEP, SIBLING))
        ),
        ([OWN].into(), vec![])
    );
    assert_eq!(
        machine.ended(THEIRS)[..1],
        [Action::Accept(THEIRS)],
        "one loop after the other"
    );
}

#[test]
fn a_new_sibling_may_own_what_is_given_and_not_what_is_accepted_from() {
    let mut machine = joined();
    meet(&mut machine, serving(&[], &[]));
    machine.accepting(THEIRS);
    machine.leased(
        STEP,
        &[(ShimId(8), STEP, 10 * LEASE), (SIBLING, STEP, 10 * LEASE)],
    );
    assert_eq!(
        deeds(machine.updated(SIBLING, serving(&[], &[]), &[(THIRD, address())])),
        []
    );
    assert_eq!(machine.announce().accepts, [OWN, THEIRS].into());
    assert_eq!(machine.tick(STEP + LEASE)[..1], [Action::Accept(THIRD)]);
}

#[test]
fn clients_are_refused_when_nothing_was_reachable_for_the_hold() {
    let mut machine = joined();
    machine.tick(10 * HOLD);
    let since = machine.now();
    assert_eq!(machine.facts(DOWN), [Action::Announce]);
    assert_eq!(machine.tick(since + HOLD - MOMENT), []);
    let refused = [
        Action::Refuse(OWN),
        Action::Phase(Phase::Refusing),
        Action::Announce,
    ];
    assert_eq!(machine.tick(since + HOLD), refused);
    assert_eq!(
        (machine.ended(OWN), machine.tick(since + 2 * HOLD)),
        (vec![], vec![])
    );
    assert_eq!(
        machine.facts(UNREADY),
        [Action::Accept(OWN), Action::Announce],
        "the instance of a sibling is ready"
    );
    machine.accepting(OWN);
    assert_eq!(machine.phase(), Phase::Joined);
}

#[test]
fn what_a_sibling_reaches_is_reachable() {
    let mut machine = joined();
    meet(
        &mut machine,
        Announce {
            reachable: true,
            ..Announce::default()
        },
    );
    machine.facts(DOWN);
    renew(&mut machine, HOLD);
    assert_eq!(machine.phase(), Phase::Joined);
    machine.tick(HOLD + LEASE);
    assert_eq!(
        machine.wake(),
        Some(2 * HOLD + LEASE),
        "since its lease has ended"
    );
}

#[test]
fn who_waits_and_reaches_nothing_accepts_for_the_hold() {
    let mut machine = machine();
    assert_eq!(
        meet(&mut machine, Announce::default()),
        [Action::Accept(THEIRS)]
    );
    machine.accepting(THEIRS);
    assert_eq!(deeds(machine.tick(HOLD - MOMENT)), []);
    assert_eq!(deeds(machine.tick(HOLD)), [Action::Refuse(THEIRS)]);
    assert_eq!(
        (machine.ended(THEIRS), machine.phase()),
        (vec![], Phase::Waiting)
    );
}

#[test]
fn who_is_ready_keeps_its_listeners_beside_a_successor() {
    let mut machine = joined();
    assert_eq!(
        meet(&mut machine, serving(&[OWN, THEIRS], &[OWN, THEIRS])),
        []
    );
    assert_eq!(
        (machine.phase(), machine.announce().owns),
        (Phase::Joined, [OWN].into())
    );
}

/// The shim's instance is down, and its sibling's instance is up.
#[test]
fn who_is_relieved_accepts_until_its_sibling_does() {
    let mut machine = joined();
    meet(&mut machine, serving(&[THEIRS], &[THEIRS]));
    assert_eq!(deeds(machine.facts(UNREADY)), []);
    for nth in 1..20 {
        assert_eq!(renew(&mut machine, nth * STEP), []);
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
    machine.facts(READY);
    assert_eq!(machine.announce().owns, [OWN].into(), "it is up again");
    machine.facts(UNREADY);
    let both = serving(&[OWN, THEIRS], &[OWN, THEIRS]);
    assert_eq!(
        deeds(machine.updated(SIBLING, both.clone(), &[])),
        [Action::Guard(OWN)]
    );
    assert_eq!(
        (machine.phase(), deeds(machine.ended(OWN))),
        (Phase::Joined, vec![Action::Phase(Phase::Left)])
    );
    for nth in 20..22 {
        assert_eq!(
            (renew(&mut machine, nth * STEP), machine.phase()),
            (vec![], Phase::Left)
        );
    }
    // The sibling's instance is down as well: clients may hang at either.
    let down = Announce {
        ready: false,
        ..both.clone()
    };
    let returns = [Action::Listen(address()), Action::Phase(Phase::Waiting)];
    assert_eq!(deeds(machine.updated(SIBLING, down, &[])), returns);
    assert_eq!(
        deeds(machine.updated(SIBLING, both, &[])),
        [Action::Phase(Phase::Left)],
        "relieved again"
    );
}

#[test]
fn who_has_left_accepts_again_when_nobody_relieves_it() {
    for (hold, phase) in [(HOLD, Phase::Joined), (Time::ZERO, Phase::Left)] {
        let mut machine = joined();
        machine.rules.hold = hold;
        meet(&mut machine, serving(&[THEIRS], &[OWN, THEIRS]));
        machine.facts(DOWN);
        machine.ended(OWN);
        assert_eq!(machine.phase(), Phase::Left);
        let again = [
            Action::Accept(OWN),
            Action::Accept(THEIRS),
            Action::Phase(Phase::Waiting),
        ];
        assert_eq!(
            deeds(machine.gone(STEP, SIBLING)),
            if hold == HOLD { &again[..] } else { &[] }
        );
        for now in [2 * STEP, 3 * STEP] {
            assert_eq!(deeds(machine.tick(now)), []);
        }
        machine.accepting(OWN);
        assert_eq!(
            machine.phase(),
            phase,
            "its instance is down, and clients wait"
        );
    }
}

#[test]
fn who_is_ready_again_while_its_loops_end_joins_after_that() {
    let mut machine = machine();
    machine.facts(READY);
    assert_eq!(
        deeds(machine.listening(address(), OWN)),
        [Action::Accept(OWN)]
    );
    meet(&mut machine, serving(&[THEIRS], &[THEIRS]));
    machine.facts(UNREADY);
    assert_eq!(
        machine.guards(),
        [(OWN, address()), (THEIRS, address())],
        "who leaves gives what it has not begun"
    );
    let both = serving(&[OWN, THEIRS], &[OWN, THEIRS]);
    assert_eq!(
        deeds(machine.updated(SIBLING, both, &[])),
        [Action::Guard(OWN)]
    );
    assert_eq!(deeds(machine.facts(READY)), []);
    assert_eq!(deeds(machine.ended(OWN)), [Action::Phase(Phase::Left)]);
    assert_eq!(
        deeds(machine.tick(STEP)),
        [Action::Listen(address()), Action::Phase(Phase::Waiting)]
    );
}

#[test]
fn who_leaves_alone_serves_its_queue() {
    let mut machine = joined();
    assert_eq!(
        machine.facts(LEAVING),
        [Action::Close(OWN), Action::Announce]
    );
    assert_eq!((machine.phase(), machine.guards()), (Phase::Joined, vec![]));
    // A sibling that leaves too gives the listener once more.
    let leaves = Announce {
        leaving: true,
        ..serving(&[], &[])
    };
    machine.connected(SIBLING);
    assert_eq!(
        deeds(machine.updated(SIBLING, leaves, &[(OWN, address())])),
        []
    );
    assert_eq!(deeds(machine.ended(OWN)), [Action::Close(OWN)]);
    assert_eq!(deeds(machine.failed(OWN)), [Action::Phase(Phase::Left)]);
    assert_eq!(
        (deeds(machine.tick(STEP)), machine.phase()),
        (vec![], Phase::Left),
        "although its instance is ready"
    );
}

#[test]
fn who_leaves_waits_for_a_sibling_that_stays_for_a_lease() {
    let accepts = serving(&[THEIRS], &[THEIRS]);
    let leaves = |announce: &Announce| Announce {
        leaving: true,
        ..announce.clone()
    };
    let covers = serving(&[THEIRS], &[OWN, THEIRS]);
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
        let mut machine = joined();
        machine.leased(Time::ZERO, &[(SIBLING, Time::ZERO, until)]);
        meet(&mut machine, announce.clone());
        machine.tick(STEP);
        let mut done = deeds(machine.facts(LEAVING));
        if at > STEP {
            assert_eq!((done, machine.announce().owns), (vec![], [].into()));
            assert_eq!(deeds(machine.tick(at - MOMENT)), []);
            done = deeds(machine.tick(at));
        }
        assert_eq!(done, actions, "{announce:?} {until:?}");
        assert_eq!(
            machine.phase(),
            Phase::Joined,
            "its accept loop has not ended"
        );
        machine.ended(OWN);
        assert_eq!(
            machine.phase() == Phase::Left,
            !actions.contains(&Action::Close(THEIRS)),
            "no loop of it runs"
        );
        machine.ended(THEIRS);
        assert_eq!(machine.phase(), Phase::Left);
    }
    // A sibling that leaves accepts, and a sibling that stays accepts nothing or has announced
    // nothing yet.
    for other in [Some(accepts), None] {
        let mut machine = joined();
        meet(&mut machine, leaves(&covers));
        machine.connected(ShimId(8));
        other
            .into_iter()
            .for_each(|other| drop(machine.updated(ShimId(8), other, &[])));
        assert_eq!(deeds(machine.facts(LEAVING)), []);
    }
}

#[test]
fn who_has_left_serves_its_queues_when_no_sibling_stays() {
    let mut machine = joined();
    meet(&mut machine, serving(&[THEIRS], &[OWN, THEIRS]));
    machine.facts(LEAVING);
    machine.ended(OWN);
    assert_eq!(machine.phase(), Phase::Left);
    let stays = serving(&[THEIRS], &[THEIRS]);
    assert_eq!(
        deeds(machine.updated(SIBLING, stays, &[(THIRD, address())])),
        [],
        "it may accept soon"
    );
    let closed = [OWN, THEIRS, THIRD].map(Action::Close);
    assert_eq!(deeds(machine.gone(STEP, SIBLING)), closed);
}

#[test]
fn who_leaves_takes_no_orphan_and_keeps_what_it_accepts_from() {
    let mut machine = joined();
    meet(&mut machine, serving(&[], &[]));
    machine.accepting(THEIRS);
    assert_eq!(deeds(machine.facts(LEAVING)), []);
    assert_eq!(
        deeds(machine.updated(SIBLING, serving(&[], &[]), &[(THIRD, address())])),
        []
    );
    assert_eq!(machine.announce().accepts, [OWN, THEIRS].into());
}

/// A loop that ends accepts no more clients from the queue.
#[test]
fn who_leaves_serves_a_queue_when_the_loop_that_ended_there_has() {
    let mut machine = joined();
    meet(&mut machine, serving(&[], &[]));
    machine.accepting(THEIRS);
    assert_eq!(
        meet(&mut machine, serving(&[THEIRS], &[THEIRS])),
        [Action::Guard(THEIRS)]
    );
    machine.gone(STEP, SIBLING);
    assert_eq!(deeds(machine.facts(LEAVING)), [Action::Close(OWN)]);
    assert_eq!(
        deeds(machine.ended(OWN)),
        [],
        "the other loop has not ended"
    );
    assert_eq!(deeds(machine.ended(THEIRS)), [Action::Close(THEIRS)]);
    assert_eq!(deeds(machine.ended(THEIRS)), [Action::Phase(Phase::Left)]);
}

#[test]
fn who_refused_and_leaves_accepts_no_more() {
    let mut machine = joined();
    meet(&mut machine, Announce::default());
    machine.facts(DOWN);
    renew(&mut machine, HOLD);
    machine.ended(OWN);
    machine.ended(THEIRS);
    assert_eq!(machine.phase(), Phase::Refusing);
    assert_eq!(deeds(machine.facts(LEAVING)), [], "its sibling stays");
}

#[test]
fn a_loop_that_failed_is_tried_again_when_it_may_and_forgotten_when_another_shim_accepts() {
    let mut machine = joined();
    machine.failed(OWN);
    assert_eq!(
        (machine.announce().accepts, machine.tick(STEP)),
        ([].into(), vec![])
    );
    assert_eq!(deeds(machine.ended(OWN)), [Action::Accept(OWN)]);
    machine.accepting(OWN);
    meet(&mut machine, serving(&[], &[]));
    assert_eq!(deeds(machine.failed(THEIRS)), []);
    assert_eq!(meet(&mut machine, serving(&[THEIRS], &[THEIRS])), []);
    assert_eq!(
        meet(&mut machine, serving(&[], &[])),
        [Action::Accept(THEIRS)]
    );
    machine.accepting(THEIRS);
    assert_eq!(
        meet(&mut machine, serving(&[THEIRS], &[THEIRS])),
        [Action::Guard(THEIRS)]
    );
    machine.failed(THEIRS);
    assert_eq!(
        meet(&mut machine, serving(&[], &[])),
        [Action::Accept(THEIRS)],
        "it was to end, and has"
    );
}
