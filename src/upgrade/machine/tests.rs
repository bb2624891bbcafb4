//! The machine against a model of a node: a kubelet that is slow, pods that fail in each way, and a berth that
//! is killed after any of its actions and started again.

use super::*;
use proptest::prelude::*;

const LIMITS: Limits =
    Limits { ready: Duration::from_secs(120), settle: Duration::from_secs(20), stop: Duration::from_secs(60) };

/// What becomes of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Good,
    /// Its process runs and never answers.
    NeverReady,
    /// Its process ends at once: a bad flag.
    Refuses,
    /// Its process ends this long after it got ready, each time.
    Crashes(u32),
    /// The kubelet cannot start it: no image.
    NotStarted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    /// Gets ready when the time is over.
    Starting(u32),
    Ready(u32),
    /// Ended; starts again when the time is over.
    Down(u32),
    /// Ends when the time is over.
    Stopping(u32),
}

#[derive(Debug, Clone, Copy)]
struct Pod {
    version: Version,
    fate: Fate,
    life: Life,
    drained: bool,
    backoff: u32,
    process: u64,
}

/// How a world is.
#[derive(Debug, Clone)]
struct Given {
    temporary: Fate,
    canonical: Fate,
    /// Of the old manifest when it comes back.
    back: Fate,
    same: bool,
    /// Each pod has a shim; else there is one for the node.
    drains: bool,
    /// The kubelet says of an image that it cannot get it.
    journal: bool,
    /// Seconds until the kubelet sees a change, until a process is ready, and until one has ended.
    lag: u32,
    start: u32,
    stop: u32,
    /// After which actions berth is killed, and for how long it is away.
    kills: Vec<(usize, u32)>,
    /// After which action the operator interrupts it.
    interrupt: Option<usize>,
}

struct World {
    given: Given,
    files: [Option<Version>; 2],
    /// What the kubelet knows of the files, and since when it is to know better.
    known: [Option<Version>; 2],
    unknown_for: [u32; 2],
    pods: [Option<Pod>; 2],
    ends: [u32; 2],
    processes: u64,
}

impl World {
    fn new(given: Given) -> Self {
        let old = Pod {
            version: Version::Old,
            fate: Fate::Good,
            life: Life::Ready(1000),
            drained: false,
            backoff: 0,
            process: 1,
        };
        let files = [Some(Version::Old), None];
        Self { given, files, known: files, unknown_for: [0; 2], pods: [Some(old), None], ends: [0; 2], processes: 1 }
    }

    fn in_group(&self, slot: usize) -> bool {
        self.pods[slot].is_some_and(|pod| matches!(pod.life, Life::Ready(_)) && !pod.drained)
    }

    fn instance(&self, slot: usize) -> Instance {
        let pod = self.pods[slot].filter(|pod| pod.fate != Fate::NotStarted);
        Instance {
            alive: pod.is_some(),
            drains: self.given.drains && pod.is_some(),
            in_group: self.in_group(slot),
            process: pod.filter(|pod| !matches!(pod.life, Life::Down(_))).map(|pod| pod.process),
            ends: self.ends[slot],
            hopeless: self.pods[slot]
                .filter(|pod| self.given.journal && pod.fate == Fate::NotStarted && pod.version == Version::New)
                .map(|_| Hopeless::Image),
        }
    }

    fn see(&self) -> Seen {
        let content = |file: Option<Version>| file.map_or(Content::Absent, Content::Holds);
        Seen {
            canonical_file: content(self.files[0]),
            temporary_file: content(self.files[1]),
            canonical: self.instance(0),
            temporary: self.instance(1),
            plain_serves: false,
            reached: true,
        }
    }

    fn act(&mut self, action: &Action) {
        match action {
            Action::Place(slot, version) => {
                let at = *slot as usize;
                assert!(self.files[at].is_none(), "{slot:?} is placed over another");
                assert!(self.pods[at].is_none() || self.pods[at].is_some_and(|pod| pod.fate == Fate::NotStarted));
                self.files[at] = Some(*version);
                self.unknown_for[at] = self.given.lag;
            }
            Action::Remove(slot) => {
                let at = *slot as usize;
                assert!(self.files[at].is_some());
                assert!(!self.in_group(at) || self.in_group(1 - at), "the last ready one is removed");
                self.files[at] = None;
                self.unknown_for[at] = self.given.lag;
            }
            Action::Drain(slot) => {
                let at = *slot as usize;
                assert!(self.in_group(1 - at), "the last ready one is drained");
                if let Some(pod) = &mut self.pods[at] {
                    pod.drained = true;
                }
            }
            _ => {}
        }
    }

    /// A second goes by.
    fn tick(&mut self) {
        for (at, slot) in [Slot::Canonical, Slot::Temporary].into_iter().enumerate() {
            match self.unknown_for[at].checked_sub(1) {
                Some(left) => self.unknown_for[at] = left,
                None => self.known[at] = self.files[at],
            }
            let wanted = self.known[at];
            let Some(pod) = &mut self.pods[at] else {
                let Some(version) = wanted else { continue };
                let fate = match (slot, version) {
                    (Slot::Temporary, _) => self.given.temporary,
                    (Slot::Canonical, Version::New) => self.given.canonical,
                    (Slot::Canonical, Version::Old) => self.given.back,
                };
                self.processes += 1;
                let life = Life::Starting(self.given.start);
                self.pods[at] = Some(Pod { version, fate, life, drained: false, backoff: 10, process: self.processes });
                continue;
            };
            let stays = wanted == Some(pod.version) || (self.given.same && wanted.is_some());
            if !stays && !matches!(pod.life, Life::Stopping(_)) {
                pod.life = Life::Stopping(self.given.stop);
            }
            let mut end = |pod: &mut Pod| {
                self.ends[at] += 1;
                pod.life = Life::Down(pod.backoff);
                pod.backoff = (pod.backoff * 2).min(60);
            };
            match pod.life {
                Life::Starting(_) if pod.fate == Fate::NotStarted => {}
                Life::Starting(_) if pod.fate == Fate::Refuses => end(pod),
                Life::Starting(0) if pod.fate == Fate::NeverReady => {}
                Life::Starting(0) => pod.life = Life::Ready(0),
                Life::Starting(left) => pod.life = Life::Starting(left - 1),
                Life::Ready(age) if pod.fate == Fate::Crashes(age) => end(pod),
                Life::Ready(age) => pod.life = Life::Ready(age + 1),
                Life::Down(0) => {
                    self.processes += 1;
                    pod.process = self.processes;
                    pod.life = Life::Starting(self.given.start);
                }
                Life::Down(left) => pod.life = Life::Down(left - 1),
                Life::Stopping(0) => {
                    self.pods[at] = None;
                    self.ends[at] += 1;
                }
                Life::Stopping(left) => pod.life = Life::Stopping(left - 1),
            }
        }
        assert!(self.in_group(0) || self.in_group(1), "nobody serves: {:?}", self.pods);
    }

    /// Runs berth until it ends, and again wherever it is killed.
    fn run(&mut self, disk: &mut Position) -> Action {
        let mut machine = Machine::new(disk.clone(), LIMITS, self.given.same);
        let (mut now, mut actions) = (0, 0);
        for _ in 0..10_000 {
            match machine.next(&self.see(), Duration::from_secs(now)) {
                Action::Wait => {
                    self.tick();
                    now += 1;
                    continue;
                }
                over @ (Action::Finish(_) | Action::Halt(_)) => {
                    *disk = machine.position().clone();
                    return over;
                }
                Action::Entered => *disk = machine.position().clone(),
                action => {
                    self.act(&action);
                    if matches!(action, Action::Drain(_)) {
                        machine.drained(true);
                    }
                }
            }
            actions += 1;
            if self.given.interrupt == Some(actions) {
                machine.interrupt();
            }
            if let Some((_, away)) = self.given.kills.clone().iter().find(|(after, _)| *after == actions) {
                for _ in 0..*away {
                    self.tick();
                }
                machine = Machine::new(disk.clone(), LIMITS, self.given.same);
            }
        }
        panic!("it comes to no end: {disk:?} {:?}", self.see());
    }

    fn alone(&self) -> bool {
        !self.instance(1).alive && self.files[1].is_none() && self.in_group(0)
    }
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => Just(Fate::Good),
        1 => Just(Fate::NeverReady),
        1 => Just(Fate::Refuses),
        1 => (0..15u32).prop_map(Fate::Crashes),
        1 => Just(Fate::NotStarted),
    ]
}

fn given() -> impl Strategy<Value = Given> {
    let kills = prop::collection::vec((1..25usize, 0..90u32), 0..6);
    let times = (0..25u32, 0..40u32, 0..20u32);
    let layout = (prop::bool::weighted(0.2), prop::bool::weighted(0.8), any::<bool>());
    (fate(), fate(), fate(), layout, times, kills, prop::option::weighted(0.2, 1..20usize)).prop_map(
        |(temporary, canonical, back, (same, drains, journal), (lag, start, stop), kills, interrupt)| Given {
            temporary,
            canonical,
            back,
            same,
            drains,
            journal,
            lag,
            start,
            stop,
            kills,
            interrupt,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Someone serves at each moment (`World::tick`, `World::act`), and the end is one of two, or a halt
    /// that says why and from which the same command goes on once the cause is mended.
    #[test]
    fn somebody_serves_and_it_ends_well(given in given()) {
        let mut world = World::new(given.clone());
        let mut disk = Position::begin(false);
        let mut over = world.run(&mut disk);
        if let Action::Halt(why) = &over {
            let both_fail = given.canonical != Fate::Good && (given.same || given.back != Fate::Good);
            prop_assert!(both_fail && given.temporary == Fate::Good, "{why} {disk:?}");
            prop_assert!(world.in_group(1), "the temporary one serves");
            // Mended, and the command given again.
            (world.given.canonical, world.given.back) = (Fate::Good, Fate::Good);
            for pod in world.pods.iter_mut().flatten() {
                pod.fate = Fate::Good;
            }
            world.given.kills.clear();
            over = world.run(&mut disk);
        }
        prop_assert!(world.alone(), "{:?}", world.see());
        let back = Action::Finish(Outcome::RolledBack);
        match over {
            Action::Finish(Outcome::Done) => {
                prop_assert_eq!(world.files[0], Some(disk.target));
                prop_assert!(given.temporary == Fate::Good);
            }
            over => {
                prop_assert_eq!(over, back);
                prop_assert_eq!(world.files[0], Some(Version::Old));
                prop_assert!(disk.why.is_some());
                let failed = given.temporary != Fate::Good || given.canonical != Fate::Good;
                prop_assert!(failed || given.interrupt.is_some());
            }
        }
    }
}

fn good() -> Given {
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
    }
}

/// How it ends, and why.
fn ended(given: Given) -> (Action, Option<String>) {
    let mut disk = Position::begin(false);
    (World::new(given).run(&mut disk), disk.why)
}

#[test]
fn what_fails_is_told() {
    let why = |given| ended(given).1.unwrap_or_default();
    assert_eq!(ended(good()), (Action::Finish(Outcome::Done), None));
    let temporary = |temporary| why(Given { temporary, ..good() });
    assert_eq!(temporary(Fate::NeverReady), "it was not ready in 2m");
    assert_eq!(temporary(Fate::Refuses), "its process ended 3 times without getting ready");
    assert_eq!(temporary(Fate::Crashes(7)), "its process ended 11s after it was ready");
    assert_eq!(why(Given { interrupt: Some(1), ..good() }), "it was interrupted");
    assert_eq!(temporary(Fate::NotStarted), "the kubelet cannot get its image");
    assert_eq!(
        why(Given { temporary: Fate::NotStarted, journal: false, ..good() }),
        "it was not ready in 2m",
        "where the kubelet cannot be asked"
    );
    let canonical = |back| ended(Given { canonical: Fate::Refuses, back, ..good() }).0;
    assert_eq!(canonical(Fate::Good), Action::Finish(Outcome::RolledBack));
    assert_eq!(canonical(Fate::NeverReady), Action::Halt("it was not ready in 2m".into()));
}

#[test]
fn what_another_wrote_is_left_alone() {
    let world = World::new(good());
    for step in [Step::StartTemporary, Step::StopOld, Step::StopTemporary, Step::Withdraw, Step::Switch] {
        let position = Position { step, ..Position::begin(false) };
        let next = |seen: Seen| Machine::new(position.clone(), LIMITS, false).next(&seen, Duration::ZERO);
        let other = Seen { canonical_file: Content::Other, ..world.see() };
        assert!(matches!(next(other), Action::Halt(why) if why.contains("canonical file")), "{step:?}");
        let other = Seen { temporary_file: Content::Other, ..world.see() };
        assert!(matches!(next(other), Action::Halt(why) if why.contains("temporary file")), "{step:?}");
    }
}

#[test]
fn a_shim_that_cannot_be_drained_stops_it_before_anything_goes() {
    let mut world = World::new(good());
    world.files[1] = Some(Version::New);
    world.pods[1] = world.pods[0];
    let mut machine = Machine::new(Position { step: Step::StopOld, ..Position::begin(false) }, LIMITS, false);
    for _ in 0..DRAINS {
        assert_eq!(machine.next(&world.see(), Duration::ZERO), Action::Drain(Slot::Canonical));
        machine.drained(false);
    }
    assert_eq!(machine.next(&world.see(), Duration::ZERO), Action::Entered);
    assert_eq!(machine.position().step, Step::Withdraw);
    // Told, but still there: it is stopped all the same, since the other one is in the group.
    let mut machine = Machine::new(Position { step: Step::StopOld, ..Position::begin(false) }, LIMITS, false);
    assert_eq!(machine.next(&world.see(), Duration::ZERO), Action::Drain(Slot::Canonical));
    machine.drained(true);
    assert_eq!(machine.next(&world.see(), LEAVING), Action::Remove(Slot::Canonical));
}

/// Waiting longer would only lengthen the gap of a first switch.
#[test]
fn what_is_hopeless_is_not_waited_for() {
    let steps = [
        (Step::StartTemporary, Step::Withdraw),
        (Step::StartCanonical, Step::StartCanonical),
        (Step::Switch, Step::SwitchBack),
    ];
    for (step, back) in steps {
        for (hopeless, why) in [
            (Hopeless::Image, "the kubelet cannot get its image"),
            (Hopeless::Probe, "its apiserver refuses its shim's probe"),
        ] {
            let mut world = World::new(good());
            world.files = match step {
                Step::StartTemporary => [Some(Version::Old), Some(Version::New)],
                _ => [Some(Version::New), None],
            };
            let mut seen = Seen { canonical: Instance::default(), ..world.see() };
            let mut machine = Machine::new(Position { step, ..Position::begin(false) }, LIMITS, false);
            assert_eq!(machine.next(&seen, Duration::ZERO), Action::Wait, "{step:?}");
            (seen.canonical.hopeless, seen.temporary.hopeless) = (Some(hopeless), Some(hopeless));
            assert_eq!(machine.next(&seen, Duration::from_secs(1)), Action::Entered, "{step:?}");
            let Position { step: now, target, why: told } = machine.position().clone();
            assert_eq!((now, target, told.as_deref()), (back, Version::Old, Some(why)));
        }
    }
}

#[test]
fn in_place_one_file_takes_the_others_place_and_gives_it_back() {
    let mut machine = Machine::new(Position::begin(true), LIMITS, false);
    let old = Seen {
        canonical_file: Content::Holds(Version::Old),
        temporary_file: Content::Absent,
        canonical: Instance::default(),
        temporary: Instance::default(),
        plain_serves: true,
        reached: true,
    };
    let at = |machine: &mut Machine, seen: Seen, now| machine.next(&seen, Duration::from_secs(now));
    assert_eq!(at(&mut machine, old, 0), Action::Place(Slot::Canonical, Version::New));
    let new = Seen { canonical_file: Content::Holds(Version::New), plain_serves: false, ..old };
    assert_eq!(at(&mut machine, new, 1), Action::Wait);
    let up = Instance { alive: true, in_group: true, drains: true, process: Some(1), ends: 0, hopeless: None };
    let ready = Seen { canonical: up, ..new };
    let mut failing = Machine::new(machine.position().clone(), LIMITS, false);
    assert_eq!(at(&mut machine, ready, 20), Action::Entered);
    assert_eq!(at(&mut machine, ready, 20), Action::Wait);
    assert_eq!(at(&mut machine, ready, 40), Action::Entered);
    let unreached = Seen { reached: false, ..ready };
    assert_eq!(at(&mut machine, unreached, 40), Action::Wait);
    assert!(matches!(at(&mut machine, unreached, 70), Action::Halt(why) if why.contains("does not accept")));
    assert_eq!(at(&mut machine, ready, 71), Action::Finish(Outcome::Done));

    assert_eq!(at(&mut failing, new, 0), Action::Wait);
    assert_eq!(at(&mut failing, new, 180), Action::Entered);
    assert_eq!(failing.position().why.as_deref(), Some("it was not ready in 3m"));
    assert_eq!(at(&mut failing, new, 180), Action::Place(Slot::Canonical, Version::Old));
    assert_eq!(at(&mut failing, Seen { plain_serves: false, ..old }, 190), Action::Wait);
    assert_eq!(at(&mut failing, old, 200), Action::Finish(Outcome::RolledBack));
}
