use super::*;
use proptest::prelude::*;

const TICK: Duration = Duration::from_millis(50);

/// How an own etcd that has the lock goes on.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Good,
    /// It refuses the data, and ends.
    Refuses,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// SIGTERM to the node's own: it answers no more, and ends after this many ticks if its connections stay.
    Stop(u32),
    Crash,
    Start(Kind),
    CrashTemporary,
    /// It stays, with the lock if it has it, and answers no more.
    HangTemporary,
    Command(bool),
}

#[derive(Debug, Clone, Copy)]
struct Own {
    kind: Kind,
    stops: Option<u32>,
    starved: bool,
    /// Ticks until it answers, once it has the lock.
    opens: u32,
}

#[derive(Debug, Clone, Copy)]
struct Temporary {
    hangs: bool,
    ending: Option<u32>,
    opens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Holder {
    Own,
    Temporary,
}

/// Two processes and the lock, as the machine meets them.
struct World {
    machine: EtcdMachine,
    now: Duration,
    own: Option<Own>,
    temporary: Option<Temporary>,
    lock: Option<Holder>,
    ends: u32,
    commanding: bool,
    wanted: EtcdWanted,
    /// The temporary one got SIGTERM.
    told: bool,
}

impl World {
    fn new() -> Self {
        Self {
            machine: EtcdMachine::new(Speedup::default()),
            now: Duration::ZERO,
            own: Some(Own { kind: Kind::Good, stops: None, starved: false, opens: 0 }),
            temporary: None,
            lock: Some(Holder::Own),
            ends: 0,
            commanding: true,
            wanted: EtcdWanted::default(),
            told: false,
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Stop(ticks) => self.own.iter_mut().for_each(|own| own.stops = own.stops.or(Some(ticks))),
            Event::Crash => self.end_own(),
            Event::Start(kind) if self.own.is_none() => {
                self.own = Some(Own { kind, stops: None, starved: false, opens: 4 });
            }
            Event::Start(_) => {}
            Event::CrashTemporary => {
                self.ends += u32::from(self.temporary.is_some());
                self.end_temporary();
            }
            Event::HangTemporary => self.temporary.iter_mut().for_each(|it| it.hangs = true),
            Event::Command(runs) => self.commanding = runs,
        }
    }

    fn end_own(&mut self) {
        self.own = None;
        self.lock = self.lock.filter(|holder| *holder != Holder::Own);
    }

    fn end_temporary(&mut self) {
        (self.temporary, self.told) = (None, false);
        self.lock = self.lock.filter(|holder| *holder != Holder::Temporary);
    }

    fn seen(&self) -> EtcdObservation {
        let holds = |who| self.lock == Some(who);
        let own = self.own.map_or(OwnEtcd::default(), |own| OwnEtcd {
            process: Some(1),
            answers: holds(Holder::Own) && own.opens == 0 && own.stops.is_none() && own.kind == Kind::Good,
            waits: !holds(Holder::Own),
            starved: own.starved,
        });
        let temporary = self.temporary.map_or(TemporaryEtcd::default(), |it| TemporaryEtcd {
            running: true,
            ending: self.told,
            ends: 0,
            serves: holds(Holder::Temporary) && it.opens == 0 && !it.hangs && it.ending.is_none(),
        });
        EtcdObservation { own, temporary: TemporaryEtcd { ends: self.ends, ..temporary }, commanding: self.commanding }
    }

    fn tick(&mut self) {
        self.now += TICK;
        if let Some(own) = &mut self.own {
            match &mut own.stops {
                Some(0) => self.end_own(),
                Some(left) => *left = if self.wanted.ends_connections { 0 } else { *left - 1 },
                None if self.lock.is_none() => self.lock = Some(Holder::Own),
                None if self.lock == Some(Holder::Own) && own.kind == Kind::Refuses => self.end_own(),
                None if self.lock == Some(Holder::Own) => own.opens = own.opens.saturating_sub(1),
                None => {}
            }
        }
        if let Some(it) = &mut self.temporary {
            match &mut it.ending {
                Some(0) => self.end_temporary(),
                Some(left) if !it.hangs => *left -= 1,
                _ if self.lock.is_none() => self.lock = Some(Holder::Temporary),
                _ if self.lock == Some(Holder::Temporary) => it.opens = it.opens.saturating_sub(1),
                _ => {}
            }
        }
        let seen = self.seen();
        self.wanted = self.machine.next(&seen, self.now);
        self.check(&seen);
        match self.wanted.temporary {
            Process::Run if self.temporary.is_none() => {
                self.temporary = Some(Temporary { hangs: false, ending: None, opens: 4 });
            }
            Process::Run => {}
            Process::Terminate => {
                // One that waits for the lock, or has just got it, ignores the signal.
                let serves = self.lock == Some(Holder::Temporary);
                self.told |= self.temporary.is_some();
                let handles = self.temporary.iter_mut().filter(|it| serves && it.opens == 0);
                handles.for_each(|it| it.ending = it.ending.or(Some(4)));
            }
            Process::Kill => self.end_temporary(),
        }
    }

    /// What holds in every step.
    fn check(&self, seen: &EtcdObservation) {
        let (step, wanted) = (self.machine.step, self.wanted);
        if seen.own.answers {
            assert!(matches!(step, EtcdStep::Own | EtcdStep::Returning), "{step} although the node's own answers");
        }
        assert_eq!(wanted.route == Route::Temporary, step == EtcdStep::Temporary);
        assert!(!wanted.ends_connections || wanted.route == Route::Hold, "what serves is left alone");
        let is_the_nodes = matches!(step, EtcdStep::Own | EtcdStep::Returning | EtcdStep::GivenBack);
        assert_eq!(wanted.temporary == Process::Run, !is_the_nodes && !seen.temporary.ending);
        assert_eq!(wanted.steers, !is_the_nodes);
    }

    fn run(&mut self, time: Duration) {
        for _ in 0..time.as_millis() / TICK.as_millis() {
            self.tick();
        }
    }

    /// Runs until it is in this step, for a minute at most; how long it took.
    fn until(&mut self, step: EtcdStep) -> Duration {
        let began = self.now;
        while self.machine.step() != step {
            self.tick();
            assert!(self.now - began < Duration::from_secs(120), "{} and not {step}", self.machine.step());
        }
        self.now - began
    }
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0_u32..200).prop_map(Event::Stop),
        Just(Event::Crash),
        prop_oneof![3 => Just(Kind::Good), 1 => Just(Kind::Refuses)].prop_map(Event::Start),
        Just(Event::CrashTemporary),
        Just(Event::HangTemporary),
        any::<bool>().prop_map(Event::Command),
    ]
}

proptest! {
    /// Whatever happens: when a good one of the node's own is started and COMMAND has ended, that serves, and the temporary one ends.
    #[test]
    fn the_nodes_own_serves_in_the_end(events in prop::collection::vec((event(), 0_u32..400), 0..24)) {
        let mut world = World::new();
        for (event, ticks) in events {
            world.happen(event);
            world.run(TICK * ticks);
        }
        world.happen(Event::Command(false));
        if world.own.is_none_or(|own| own.kind != Kind::Good || own.stops.is_some()) {
            world.end_own();
            world.happen(Event::Start(Kind::Good));
        }
        world.run(Duration::from_secs(200));
        prop_assert_eq!(world.machine.step(), EtcdStep::Own);
        prop_assert!(world.temporary.is_none());
        prop_assert_eq!((world.wanted.route, world.wanted.steers), (Route::Own, false));
    }

    /// While COMMAND runs, whatever does not become healthy has the data alone after 90 s: a backup may be copied over it.
    #[test]
    fn the_data_is_given_back_in_time(events in prop::collection::vec((event(), 0_u32..100), 0..12)) {
        let mut world = World::new();
        world.happen(Event::Crash);
        let (mut away, mut waited) = (Duration::ZERO, false);
        for (event, ticks) in events {
            if !matches!(event, Event::Command(_)) {
                world.happen(event);
            }
            for _ in 0..ticks {
                world.tick();
                let seen = world.seen();
                waited |= seen.own.waits;
                away = if seen.own.answers { Duration::ZERO } else { away + TICK };
                // One that waits for the lock gets it at once; what it does then counts.
                if away > GIVES_BACK + HUNG && !waited {
                    prop_assert_eq!(world.machine.step(), EtcdStep::GivenBack);
                }
            }
        }
    }
}

#[test]
fn an_own_that_is_replaced_costs_two_pauses() {
    let mut world = World::new();
    world.run(Duration::from_secs(1));
    world.happen(Event::Stop(140));
    let pause = world.until(EtcdStep::Temporary);
    assert!(pause < Duration::from_secs(2), "its connections are ended, so that it ends: {pause:?}");
    world.run(Duration::from_secs(12));
    assert_eq!((world.machine.step(), world.wanted.route), (EtcdStep::Temporary, Route::Temporary));
    world.happen(Event::Start(Kind::Good));
    world.until(EtcdStep::Returning);
    assert_eq!(world.wanted.route, Route::Hold);
    assert!(world.until(EtcdStep::Own) < Duration::from_secs(2));
    world.run(Duration::from_secs(1));
    assert!(world.temporary.is_none());
}

#[test]
fn one_that_gets_no_cpu_has_more_time_to_answer() {
    for (starved, ends) in [(false, true), (true, false)] {
        let mut world = World::new();
        world.own = Some(Own { kind: Kind::Good, stops: Some(u32::MAX), starved, opens: 0 });
        world.tick();
        world.run(GRACE + TICK);
        assert_eq!((world.wanted.ends_connections, world.wanted.route), (ends, Route::Hold));
        world.run(STARVED_GRACE);
        assert!(world.wanted.ends_connections || world.own.is_none());
    }
}

#[test]
fn a_slow_answer_costs_nothing() {
    let mut world = World::new();
    world.run(Duration::from_secs(1));
    let slow = EtcdObservation { own: OwnEtcd { process: Some(1), ..OwnEtcd::default() }, ..world.seen() };
    let wanted = world.machine.next(&slow, world.now + TICK);
    assert_eq!((wanted.route, wanted.ends_connections), (Route::Hold, false));
    assert_eq!(world.machine.step(), EtcdStep::Own);
    world.now += TICK;
    world.tick();
    assert_eq!((world.machine.step(), world.wanted.route), (EtcdStep::Own, Route::Own));
}

#[test]
fn one_that_refuses_the_data_is_tried_again_once_a_minute() {
    let mut world = World::new();
    world.commanding = false;
    world.happen(Event::Crash);
    world.until(EtcdStep::Temporary);
    for _ in 0..2 {
        world.happen(Event::Start(Kind::Refuses));
        world.until(EtcdStep::Returning);
        let tried = world.now;
        world.until(EtcdStep::Temporary);
        assert!(world.machine.trouble().is_some());
        world.happen(Event::Start(Kind::Refuses));
        world.until(EtcdStep::Returning);
        assert!(world.now - tried >= RETRY);
        world.until(EtcdStep::Temporary);
    }
}

#[test]
fn one_that_fails_again_and_again_has_the_data_alone_while_command_runs() {
    let mut world = World::new();
    world.happen(Event::Crash);
    while world.now < GIVES_BACK {
        world.happen(Event::Start(Kind::Refuses));
        world.run(Duration::from_secs(10));
    }
    world.run(HUNG);
    assert_eq!(world.machine.step(), EtcdStep::GivenBack);
    assert!(world.temporary.is_none());
    // COMMAND has put a backup there, or given up.
    world.happen(Event::Command(false));
    world.until(EtcdStep::Temporary);
}

#[test]
fn a_temporary_one_that_does_not_start_leaves_the_node_as_it_is() {
    let mut world = World::new();
    world.happen(Event::Crash);
    for _ in 0..ENDS {
        world.tick();
        world.happen(Event::CrashTemporary);
    }
    world.until(EtcdStep::GivenBack);
    assert!(world.machine.trouble().unwrap().contains("etcd.log"));
    world.happen(Event::Command(false));
    world.run(Duration::from_secs(100));
    assert_eq!(world.machine.step(), EtcdStep::GivenBack);
    world.happen(Event::Start(Kind::Good));
    world.until(EtcdStep::Own);
}
