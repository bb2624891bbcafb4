mod rules;
mod states;

use super::super::drive::RESCUES;
use super::*;
use proptest::prelude::*;

const TICK: Duration = Duration::from_millis(50);

/// Behaviour of a node's etcd that has the lock.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Good,
    /// Refuses the data, and exits.
    Refuses,
}

/// The fate of copies of a database.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Copies {
    AtOnce,
    /// Copies take 50 s.
    Slowly,
    /// A copy fails, for example since the disk is full.
    Fail,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// SIGTERM to the node's etcd, which stops answering, and exits after so many ticks if its
    /// connections stay.
    Stop(u32),
    Crash,
    /// The node's etcd lives, and does nothing for so many ticks.
    Hang(u32),
    /// The node's etcd closes its port, and keeps the lock for so many ticks.
    Linger(u32),
    Start(Kind),
    CrashTemporary,
    /// The temporary etcd stays, with or without the lock, but no longer answers.
    HangTemporary,
    /// Another file replaces the database, like a defragmentation by the node's etcd that is
    /// stopped meanwhile.
    Replace,
    /// The serving etcd writes a raft snapshot.
    Snapshot,
    Copies(Copies),
    Command(bool),
}

#[derive(Debug, Clone, Copy)]
struct Own {
    kind: Kind,
    stops: Option<u32>,
    /// Ticks from the lock to the first answer.
    opens: u32,
    file: File,
    /// Ticks until the process does something again.
    hangs: u32,
    /// True once the process's database was to be copied, and while the process is stopped for the
    /// copy.
    tried: bool,
    paused: bool,
}

#[derive(Debug, Clone, Copy)]
struct Temporary {
    hangs: bool,
    ending: Option<u32>,
    opens: u32,
    file: File,
}

/// The file that a process opened as its database. `locked` is true if the process has the lock.
#[derive(Debug, Clone, Copy, PartialEq)]
struct File {
    number: u32,
    locked: bool,
}

/// Two processes and their files, as the machine observes them.
#[derive(Clone)]
struct World {
    machine: EtcdMachine,
    now: Duration,
    own: Option<Own>,
    temporary: Option<Temporary>,
    /// The file that an etcd of the node without a port still has locked, and for how many ticks.
    lingers: Option<(File, u32)>,
    /// Ticks to the end of the copy that is being made, and the time at which a failed copy is
    /// tried again.
    rescue: Option<u32>,
    due: Option<Duration>,
    copies: Copies,
    /// True if the file at the path lacks writes of an etcd. The database of this etcd was to be
    /// copied.
    lacks: bool,
    /// The file at the database's path.
    named: u32,
    /// True if a raft snapshot was written since an etcd was last seen to serve from the file at
    /// the path.
    snapped: bool,
    ends: u32,
    size: u64,
    commanding: bool,
    /// True if the node's etcd served from a file without a name, and the bridge did not end the
    /// process.
    unrecovered: bool,
    wanted: EtcdWanted,
    /// True if the temporary etcd got SIGTERM.
    told: bool,
}

impl World {
    fn new() -> Self {
        let file = File {
            number: 0,
            locked: true,
        };
        let own = Own {
            opens: 0,
            ..Own::just_started(Kind::Good, file)
        };
        Self {
            machine: EtcdMachine::new(Speedup::default()),
            now: Duration::ZERO,
            own: Some(own),
            temporary: None,
            lingers: None,
            rescue: None,
            due: None,
            copies: Copies::AtOnce,
            lacks: false,
            named: 0,
            snapped: false,
            ends: 0,
            size: 0,
            commanding: true,
            unrecovered: false,
            wanted: EtcdWanted::default(),
            told: false,
        }
    }

    fn apply_event(&mut self, event: Event) {
        match event {
            Event::Stop(ticks) => self
                .own
                .iter_mut()
                .for_each(|own| own.stops = own.stops.or(Some(ticks))),
            Event::Crash => self.own = None,
            Event::Hang(ticks) => self.own.iter_mut().for_each(|own| own.hangs = ticks),
            Event::Linger(ticks) if self.lingers.is_none() => {
                let own = self.own.take_if(|own| own.file.locked && !own.paused);
                self.lingers = own.map(|own| (own.file, ticks));
            }
            Event::Linger(_) => {}
            Event::Start(kind) if self.own.is_none() => {
                self.own = Some(Own::just_started(kind, self.file_at_path()));
            }
            Event::Start(_) => {}
            Event::CrashTemporary => {
                self.ends += u32::from(self.temporary.is_some());
                self.end_temporary();
            }
            Event::HangTemporary => self.temporary.iter_mut().for_each(|it| it.hangs = true),
            Event::Replace => self.named += 1,
            Event::Snapshot => self.snapped |= self.own.is_none_or(|own| !own.is_hung_or_paused()),
            Event::Copies(copies) => self.copies = copies,
            Event::Command(runs) => self.commanding = runs,
        }
    }

    fn file_at_path(&self) -> File {
        File {
            number: self.named,
            locked: false,
        }
    }

    fn end_temporary(&mut self) {
        (self.temporary, self.told) = (None, false);
    }

    fn is_locked(&self, number: u32) -> bool {
        let has = |file: File| file.locked && file.number == number;
        self.temporary.is_some_and(|it| has(it.file)) || self.files_of_node_etcds().any(has)
    }

    /// The files of the node's etcds.
    fn files_of_node_etcds(&self) -> impl Iterator<Item = File> + use<> {
        let lingers = self.lingers.map(|(file, _)| file);
        self.own.map(|own| own.file).into_iter().chain(lingers)
    }

    fn as_opened(&self, file: File) -> Opened {
        match (file.number == self.named, file.locked) {
            (true, true) => Opened::Named,
            (true, false) => Opened::Waits,
            (false, true) => Opened::Other,
            (false, false) => Opened::Unseen,
        }
    }

    fn observation(&self) -> EtcdObservation {
        let own = self.own.map_or(OwnEtcd::default(), |own| OwnEtcd {
            process: Some(1),
            answers: own.file.locked
                && own.opens == 0
                && own.stops.is_none()
                && !own.is_hung_or_paused()
                && own.kind == Kind::Good,
            opened: self.as_opened(own.file),
        });
        let temporary = self
            .temporary
            .map_or(TemporaryEtcd::default(), |it| TemporaryEtcd {
                running: true,
                ending: self.told,
                ends: 0,
                answers: it.file.locked && it.opens == 0 && !it.hangs && it.ending.is_none(),
                // A waiting process is not looked at.
                opened: Some(self.as_opened(it.file))
                    .filter(|opened| *opened != Opened::Waits)
                    .unwrap_or_default(),
            });
        let lingers = self.lingers.map(|(file, _)| self.as_opened(file));
        let holder = match (own.opened, temporary.opened, lingers) {
            (_, Opened::Named, _) => Holder::Temporary,
            (Opened::Named, ..) | (.., Some(Opened::Named)) => Holder::Another,
            (Opened::Unseen, _, None) if !temporary.running && self.rescue.is_none() => {
                Holder::Nobody
            }
            _ => Holder::Unknown,
        };
        let temporary = TemporaryEtcd {
            ends: self.ends,
            ..temporary
        };
        let Self {
            size,
            commanding,
            unrecovered,
            ..
        } = *self;
        EtcdObservation {
            own,
            temporary,
            holder,
            size,
            commanding,
            unrecovered,
        }
    }

    fn tick(&mut self) {
        self.now += TICK;
        let is_locked = |world: &Self, file: File| world.is_locked(file.number);
        self.lingers = self
            .lingers
            .and_then(|(file, left)| Some((file, left.checked_sub(1)?)));
        if let Some(mut own) = self.own.filter(|own| !own.is_hung_or_paused()) {
            let mut ends = false;
            match &mut own.stops {
                Some(0) => ends = true,
                Some(left) => {
                    *left = if self.wanted.ends_connections {
                        0
                    } else {
                        *left - 1
                    }
                }
                None if !own.file.locked => own.file.locked = !is_locked(self, own.file),
                None if own.kind == Kind::Refuses => ends = true,
                None => own.opens = own.opens.saturating_sub(1),
            }
            self.own = (!ends).then_some(own);
        }
        let hung = self.own.iter_mut();
        hung.for_each(|own| own.hangs = own.hangs.saturating_sub(1));
        if let Some(mut it) = self.temporary {
            match &mut it.ending {
                Some(0) => {
                    self.ends += 1;
                    self.end_temporary();
                }
                ending => {
                    match ending {
                        Some(left) if !it.hangs => *left -= 1,
                        _ if !it.file.locked => it.file.locked = !is_locked(self, it.file),
                        _ => it.opens = it.opens.saturating_sub(1),
                    }
                    self.temporary = Some(it);
                }
            }
        }
        match &mut self.rescue {
            Some(0) => self.end_rescue(),
            Some(left) => *left -= 1,
            None => self.unrecovered &= !self.observation().own.serves(),
        }
        let (seen, before) = (self.observation(), self.machine.step);
        // Like `snapshot` in `EtcdDaemon::observe`.
        self.snapped &= !seen.own.serves() && seen.holder != Holder::Temporary;
        let is_other = seen.own.opened == Opened::Other;
        self.lacks |= self.snapped && is_other && self.own.is_some_and(|own| own.tried);
        self.lacks &= !seen.own.serves();
        self.wanted = self.machine.next(&seen, self.now);
        self.assert_rules(&seen, before);
        match self.wanted.temporary {
            Process::Run if self.temporary.is_none() => {
                let mut others = self.files_of_node_etcds();
                assert!(
                    others.all(|file| !file.locked) && self.rescue.is_none(),
                    "it never waits for the lock, and no other etcd has the data"
                );
                assert!(
                    !self.unrecovered && !self.lacks,
                    "it never starts from what may lack writes"
                );
                self.temporary = Some(Temporary {
                    hangs: false,
                    ending: None,
                    opens: 4,
                    file: self.file_at_path(),
                });
            }
            Process::Run => {}
            Process::Terminate => {
                // An etcd that waits for the lock, or has just got it, ignores the signal.
                self.told |= self.temporary.is_some();
                let handles = self
                    .temporary
                    .iter_mut()
                    .filter(|it| it.file.locked && it.opens == 0);
                handles.for_each(|it| it.ending = it.ending.or(Some(4)));
            }
            Process::Kill => {
                self.ends += u32::from(self.temporary.is_some());
                self.end_temporary();
            }
        }
        let mut others = self.files_of_node_etcds();
        assert!(
            self.wanted.temporary != Process::Run
                || others.all(|file| self.as_opened(file) != Opened::Named),
            "the temporary one runs although the node's own has the lock"
        );
        if self.wanted.rescues {
            self.begin_rescue();
        }
    }

    /// Like `EtcdDaemon::begin_rescue`.
    fn begin_rescue(&mut self) {
        let is_due = self.due.is_some_and(|due| self.now >= due);
        if let Some(own) = &mut self.own
            && (is_due || !own.tried)
            && self.rescue.is_none()
        {
            (own.tried, own.paused) = (true, true);
            match self.copies {
                Copies::Slowly => self.rescue = Some(1000),
                Copies::AtOnce | Copies::Fail => self.end_rescue(),
            }
        }
    }

    /// Like `rescue_database` and `EtcdDaemon::end_rescue`.
    fn end_rescue(&mut self) {
        let fails = self.copies == Copies::Fail;
        (self.rescue, self.due) = (None, fails.then(|| self.now + RESCUES));
        let ends = |own: &mut Own| std::mem::take(&mut own.paused) && !fails && !self.snapped;
        self.unrecovered = self.own.take_if(ends).is_none();
    }

    /// Asserts the rules of every step.
    fn assert_rules(&self, seen: &EtcdObservation, before: EtcdStep) {
        let (step, wanted) = (self.machine.step, self.wanted);
        if seen.own.serves() {
            assert!(
                matches!(step, EtcdStep::Own | EtcdStep::Returning),
                "{step} although the node's own answers"
            );
        }
        assert_eq!(
            wanted.route == Route::Temporary,
            step == EtcdStep::Temporary
        );
        assert!(
            !wanted.ends_connections || wanted.route == Route::Hold,
            "what serves is left alone"
        );
        let is_the_nodes = matches!(
            step,
            EtcdStep::Own | EtcdStep::Returning | EtcdStep::GivenBack
        );
        assert!(wanted.temporary != Process::Run || !is_the_nodes && !seen.temporary.ending);
        assert_eq!(wanted.steers, !is_the_nodes);
        // No client is let through to a process with another file than the path's, or before the
        // process's file was seen.
        match wanted.route {
            Route::Own => {
                assert!(seen.own.answers, "no client waits for an etcd that hangs");
                assert_ne!(seen.own.opened, Opened::Other);
                assert!(before == EtcdStep::Own || seen.own.serves());
            }
            Route::Temporary => {
                assert!(seen.temporary.opened != Opened::Other && seen.holder != Holder::Another);
                assert!(before == EtcdStep::Temporary || seen.temporary.serves());
            }
            Route::Hold => {}
        }
        assert!(!wanted.rescues || seen.own.opened == Opened::Other && !seen.temporary.running);
    }

    fn run_for(&mut self, time: Duration) {
        for _ in 0..time.as_millis() / TICK.as_millis() {
            self.tick();
        }
    }

    /// Runs until the given step, for at most two minutes, and returns the time taken.
    fn run_until_step(&mut self, step: EtcdStep) -> Duration {
        let began = self.now;
        while self.machine.step() != step {
            self.tick();
            assert!(
                self.now - began < secs(120),
                "{} and not {step}",
                self.machine.step()
            );
        }
        self.now - began
    }

    /// The node's etcd answers too late, once.
    fn answer_slowly(&mut self) -> EtcdWanted {
        let mut slow = self.observation();
        slow.own.answers = false;
        self.now += TICK;
        self.machine.next(&slow, self.now)
    }

    /// COMMAND ends, and a good etcd is started on the node, unless there is one, which may hang
    /// for a while.
    fn assert_ends_well(&mut self) {
        self.apply_event(Event::Command(false));
        let is_good = |own: Own| {
            own.kind == Kind::Good && own.stops.is_none() && own.file.number == self.named
        };
        if !self.own.is_some_and(is_good) {
            self.apply_event(Event::Crash);
            self.apply_event(Event::Start(Kind::Good));
        }
        self.run_for(secs(200));
        assert_eq!(self.machine.step(), EtcdStep::Own);
        assert!(self.temporary.is_none());
        assert_eq!((self.wanted.route, self.wanted.steers), (Route::Own, false));
    }

    fn is_given_back(&self) -> bool {
        self.machine.step() == EtcdStep::GivenBack && self.temporary.is_none()
    }
}

impl Own {
    /// A process that has just started.
    fn just_started(kind: Kind, file: File) -> Self {
        Self {
            kind,
            stops: None,
            opens: 4,
            file,
            hangs: 0,
            tried: false,
            paused: false,
        }
    }

    fn is_hung_or_paused(&self) -> bool {
        self.hangs > 0 || self.paused
    }
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// A world in which the node's etcd serves.
fn serving_world() -> World {
    let mut world = World::new();
    world.run_for(secs(1));
    world
}

/// A world in which the node's etcd has just crashed.
fn crashed_world() -> World {
    let mut world = World::new();
    world.apply_event(Event::Crash);
    world
}

/// A world in which the temporary etcd serves.
fn temporary_serving_world() -> World {
    let mut world = crashed_world();
    world.run_until_step(EtcdStep::Temporary);
    world
}

/// A world in which the node's etcd serves from a file without a name, and is stopped for a copy of
/// that file.
fn world_stopped_for_copy(snapped: bool) -> World {
    let mut world = serving_world();
    world.apply_event(Event::Copies(Copies::Slowly));
    world.apply_event(Event::Replace);
    world.snapped = snapped;
    world.run_for(secs(1));
    world
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0_u32..200).prop_map(Event::Stop),
        Just(Event::Crash),
        (0_u32..2_000).prop_map(Event::Hang),
        (0_u32..200).prop_map(Event::Linger),
        prop_oneof![3 => Just(Kind::Good), 1 => Just(Kind::Refuses)].prop_map(Event::Start),
        Just(Event::CrashTemporary),
        Just(Event::HangTemporary),
        Just(Event::Replace),
        Just(Event::Snapshot),
        prop::sample::select(vec![Copies::AtOnce, Copies::Slowly, Copies::Fail])
            .prop_map(Event::Copies),
        any::<bool>().prop_map(Event::Command),
    ]
}

proptest! {
    /// After any events, once COMMAND has ended and a good etcd is started on the node, the node's
    /// etcd serves and the temporary etcd ends.
    #[test]
    fn the_nodes_etcd_serves_in_the_end(events in prop::collection::vec((any_event(), 0_u32..400), 0..24)) {
        let mut world = World::new();
        for (event, ticks) in events {
            world.apply_event(event);
            world.run_for(TICK * ticks);
        }
        world.assert_ends_well();
    }

    /// While COMMAND runs, an etcd of the node that does not become healthy has the data alone
    /// after 90 s, since a backup may be copied over the data.
    #[test]
    fn the_data_is_given_back_in_time(events in prop::collection::vec((any_event(), 0_u32..600), 0..12)) {
        let mut world = crashed_world();
        let (mut away, mut back, mut silent, mut waited) = (Duration::ZERO, Duration::ZERO, Duration::ZERO, false);
        for (event, ticks) in events {
            if !matches!(event, Event::Command(_) | Event::Replace) {
                world.apply_event(event);
            }
            for _ in 0..ticks {
                world.tick();
                let seen = world.observation();
                waited |= seen.own.waits_for_lock();
                // To kubeadm, a moment's answer between two crashes is no answer.
                (back, silent) = if seen.own.answers { (back + TICK, Duration::ZERO) } else { (Duration::ZERO, silent + TICK) };
                away = if back > BACK { Duration::ZERO } else { away + TICK };
                // An etcd that waits for the lock gets the lock at once, and is judged by its
                // behaviour then.
                // A temporary etcd that hangs just before gets as long to end.
                if away > GIVES_BACK + HUNG + secs(1) && silent > HUNG && !waited {
                    prop_assert_eq!(world.machine.step(), EtcdStep::GivenBack);
                }
            }
        }
    }
}

#[test]
fn a_replaced_etcd_costs_two_pauses() {
    let mut world = serving_world();
    world.apply_event(Event::Stop(140));
    let pause = world.run_until_step(EtcdStep::Temporary);
    assert!(
        pause < expected_pause(0),
        "its connections are ended, so that it ends: {pause:?}"
    );
    world.run_for(secs(12));
    assert_eq!(
        (world.machine.step(), world.wanted.route),
        (EtcdStep::Temporary, Route::Temporary)
    );
    world.apply_event(Event::Start(Kind::Good));
    world.run_until_step(EtcdStep::Returning);
    assert_eq!(
        (world.wanted.route, world.wanted.ends_connections),
        (Route::Hold, false),
        "calls may be answered yet"
    );
    assert!(world.run_until_step(EtcdStep::Own) < expected_pause(0));
    world.run_for(secs(1));
    assert!(world.temporary.is_none());
}

#[test]
fn calls_in_flight_have_their_time_to_be_answered() {
    let mut world = World::new();
    world.apply_event(Event::Stop(u32::MAX));
    world.run_for(GRACE);
    assert_eq!(
        (world.wanted.ends_connections, world.wanted.route),
        (false, Route::Hold)
    );
    world.run_for(2 * TICK);
    assert!(world.wanted.ends_connections);
}

#[test]
fn after_one_slow_answer_clients_stay_on_the_nodes_etcd() {
    let mut world = serving_world();
    let wanted = world.answer_slowly();
    assert_eq!(
        (wanted.route, wanted.ends_connections),
        (Route::Hold, false)
    );
    assert_eq!(world.machine.step(), EtcdStep::Own);
    world.tick();
    assert_eq!(
        (world.machine.step(), world.wanted.route),
        (EtcdStep::Own, Route::Own)
    );
}

#[test]
fn slow_answers_for_minutes_are_no_absence() {
    let mut world = World::new();
    for _ in 0..20 {
        world.run_for(secs(10));
        world.answer_slowly();
        assert_ne!(world.machine.step, EtcdStep::GivenBack);
    }
    world.tick();
    world.apply_event(Event::Stop(0));
    world.run_until_step(EtcdStep::Temporary);
}

#[test]
fn an_etcd_that_refuses_the_data_is_tried_again_once_a_minute() {
    let mut world = World {
        commanding: false,
        ..temporary_serving_world()
    };
    for _ in 0..2 {
        world.apply_event(Event::Start(Kind::Refuses));
        world.run_until_step(EtcdStep::Returning);
        let tried = world.now;
        world.run_until_step(EtcdStep::Temporary);
        assert!(world.machine.trouble().is_some());
        world.apply_event(Event::Start(Kind::Refuses));
        world.run_until_step(EtcdStep::Returning);
        assert!(world.now - tried >= RETRY);
        world.run_until_step(EtcdStep::Temporary);
    }
}

#[test]
fn an_etcd_that_keeps_failing_has_the_data_alone_while_command_runs() {
    let mut world = crashed_world();
    while world.now < GIVES_BACK {
        world.apply_event(Event::Start(Kind::Refuses));
        world.run_for(secs(10));
    }
    world.run_for(HUNG);
    assert!(world.is_given_back());
    // COMMAND has put a backup in place, or given up.
    world.apply_event(Event::Command(false));
    world.run_until_step(EtcdStep::Temporary);
}

#[test]
fn a_temporary_etcd_that_does_not_start_leaves_the_node_alone() {
    let mut world = crashed_world();
    for _ in 0..ENDS {
        world.tick();
        world.apply_event(Event::CrashTemporary);
    }
    world.run_until_step(EtcdStep::GivenBack);
    assert!(world.machine.given_up);
    world.apply_event(Event::Command(false));
    world.run_for(secs(100));
    assert_eq!(world.machine.step(), EtcdStep::GivenBack);
    world.apply_event(Event::Start(Kind::Good));
    world.run_until_step(EtcdStep::Own);
}

#[test]
fn a_temporary_etcd_that_is_too_late_is_killed_before_it_has_a_client() {
    let mut world = crashed_world();
    world.tick();
    assert!(world.temporary.is_some() && world.wanted.temporary == Process::Run);
    // The kubelet's etcd is faster.
    let file = File {
        number: world.named,
        locked: true,
    };
    world.own = Some(Own {
        opens: 100,
        ..Own::just_started(Kind::Good, file)
    });
    for _ in 0..90 {
        world.tick();
        assert!(world.temporary.is_none() && world.wanted.route == Route::Hold);
    }
    world.run_until_step(EtcdStep::Own);
    assert!(!world.machine.given_up);
}

#[test]
fn a_temporary_etcd_with_another_file_is_killed_at_once() {
    let mut world = temporary_serving_world();
    world.apply_event(Event::Replace);
    world.tick();
    assert_eq!(
        (world.wanted.route, world.wanted.temporary),
        (Route::Hold, Process::Kill)
    );
    world.run_until_step(EtcdStep::Temporary);
}

#[test]
fn the_database_of_a_nodes_etcd_with_another_file_is_copied_after_two_observations() {
    // If a snapshot is newer than the file at the path, only the open file is complete.
    for (snapped, step) in [(false, EtcdStep::Temporary), (true, EtcdStep::Returning)] {
        let mut world = serving_world();
        world.apply_event(Event::Replace);
        world.snapped = snapped;
        world.tick();
        assert_eq!(
            (world.wanted.route, world.wanted.rescues),
            (Route::Hold, false)
        );
        world.run_for(SEEN_TWICE);
        assert!(world.wanted.ends_connections && world.wanted.rescues);
        world.run_for(secs(30));
        assert_eq!((world.own.is_some(), world.machine.step()), (snapped, step));
        assert_eq!(world.machine.failed, 0, "it was ended by the bridge");
    }
}

#[test]
fn data_that_may_lack_writes_is_left_to_the_nodes_etcd_until_it_serves() {
    let mut world = World {
        commanding: false,
        ..serving_world()
    };
    world.apply_event(Event::Replace);
    world.apply_event(Event::Snapshot);
    world.run_for(secs(1));
    // The process ends: a temporary etcd would start from a file that lacks acknowledged writes.
    world.apply_event(Event::Crash);
    world.run_for(secs(200));
    assert!(world.is_given_back());
    world.apply_event(Event::Start(Kind::Good));
    world.run_until_step(EtcdStep::Own);
    world.apply_event(Event::Crash);
    world.run_until_step(EtcdStep::Temporary);
}

#[test]
fn an_etcd_that_serves_for_a_moment_between_crashes_is_still_away() {
    let mut world = crashed_world();
    while world.now < GIVES_BACK {
        world.run_for(secs(10));
        world.apply_event(Event::Start(Kind::Good));
        world.run_until_step(EtcdStep::Own);
        world.run_for(secs(5));
        world.apply_event(Event::Crash);
    }
    world.run_for(secs(1));
    assert!(world.is_given_back());
    // The node's etcd is well for the time between two of kubeadm's checks.
    world.apply_event(Event::Start(Kind::Good));
    world.run_until_step(EtcdStep::Own);
    world.run_for(BACK + secs(1));
    world.apply_event(Event::Crash);
    world.run_until_step(EtcdStep::Temporary);
}

#[test]
fn an_exit_of_the_temporary_etcd_is_noticed_at_once() {
    let mut world = temporary_serving_world();
    world.apply_event(Event::CrashTemporary);
    world.tick();
    assert_eq!(world.machine.step(), EtcdStep::Stopping);
}

#[test]
fn a_defragmentation_that_ends_well_costs_no_connection() {
    let mut world = serving_world();
    let mut seen = world.observation();
    for opened in [Opened::Unseen, Opened::Other, Opened::Waits, Opened::Named] {
        seen.own.opened = opened;
        world.now += TICK;
        let wanted = world.machine.next(&seen, world.now);
        assert!(!wanted.ends_connections && world.machine.step() == EtcdStep::Own);
        assert_eq!(wanted.route == Route::Hold, opened == Opened::Other);
    }
}

#[test]
fn a_large_database_has_more_time_to_open() {
    for (size, opens) in [(0, 100), (1_u64 << 30, 600), (8 << 30, 3000)] {
        let mut world = World {
            size,
            commanding: false,
            ..crashed_world()
        };
        world.tick();
        world.temporary.iter_mut().for_each(|it| it.opens = opens);
        // The time to open counts from the lock.
        world.run_for(TICK * opens);
        assert_eq!(world.machine.step(), EtcdStep::Stopping);
        assert!(
            world.run_until_step(EtcdStep::Temporary) <= 2 * TICK,
            "{size}"
        );
    }
}

#[test]
fn an_etcd_without_a_visible_database_gets_no_client_and_is_reported() {
    let mut world = crashed_world();
    world.tick();
    let own = OwnEtcd {
        process: Some(1),
        answers: true,
        opened: Opened::Unseen,
    };
    let seen = EtcdObservation {
        own,
        holder: Holder::Unknown,
        ..EtcdObservation::default()
    };
    world.machine.next(&seen, world.now);
    let wanted = world.machine.next(&seen, world.now + UNSEEN);
    assert_eq!(wanted.route, Route::Hold);
    assert!(world.machine.is_unseen);
}
