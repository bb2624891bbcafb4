//! The machine against a model of a node, second by second, in which both instances fail in every
//! way.

mod rules;
mod states;

use super::*;
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    ready: Duration::from_secs(120),
    settle: Duration::from_secs(20),
    speedup: Speedup::NONE,
};

/// COMMAND's effect on the node's kube-apiserver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Exits, and a new process is ready after so many seconds.
    Restarts(u32),
    /// COMMAND leaves kube-apiserver alone.
    Stays,
    /// Exits, and no new process gets ready.
    NeverReady,
    /// Exits, and each new process exits so many seconds after it got ready.
    Crashes(u32),
}

#[derive(Debug, Clone)]
struct Given {
    /// Seconds until the temporary instance is ready. `None` for never.
    start: Option<u32>,
    /// Seconds in which the temporary instance exits; first second and length of a time with slow
    /// answers.
    deaths: Vec<u32>,
    slow: Option<(u32, u32)>,
    /// First second in which the temporary instance cannot be started.
    unstartable: Option<u32>,
    /// Seconds from the first steering until the Service names the node. `None` for never.
    named: Option<u32>,
    /// Seconds for the preparation of etcd, and true if COMMAND may begin then.
    prepares: (u32, bool),
    own: Fate,
    /// Seconds in the step hold until COMMAND is requested.
    asks: u32,
    /// Length of COMMAND, and the second of COMMAND in which it stops the node's kube-apiserver.
    command: u32,
    stops: u32,
    succeeds: bool,
    on_failure: OnFailure,
    /// Seconds from a restore until the node's kube-apiserver is ready; the inner `None` for never.
    /// The outer `None` if the restore fails.
    restored: Option<Option<u32>>,
    /// Length of a restore in seconds.
    restoring: u32,
    /// Second in which the operator ends the bridge, and true for an end at once.
    end: Option<(u32, bool)>,
    /// True if new connections cannot be steered.
    unsteerable: bool,
}

fn any_fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => (0..60u32).prop_map(Fate::Restarts),
        1 => Just(Fate::Stays),
        1 => Just(Fate::NeverReady),
        1 => (0..19u32).prop_map(Fate::Crashes),
    ]
}

prop_compose! {
    fn any_given()(
        start in prop::option::weighted(0.95, 0..60u32),
        deaths in prop::collection::vec(0..400u32, 0..4),
        slow in prop::option::of((0..300u32, 1..30u32)),
        unstartable in prop::option::weighted(0.2, 0..300u32),
        own in any_fate(),
        named in prop::option::weighted(0.9, 0..30u32),
        prepares in (0..20u32, prop::bool::weighted(0.9)),
        (asks, command, stops) in (0..5u32, 1..40u32, 0..40u32),
        succeeds in prop::bool::weighted(0.8),
        on_failure in prop_oneof![Just(OnFailure::Stay), Just(OnFailure::Restore), Just(OnFailure::End)],
        restored in prop::option::weighted(0.8, prop::option::weighted(0.8, 0..60u32)),
        restoring in 0..10u32,
        end in prop::option::weighted(0.3, (0..300u32, any::<bool>())),
    ) -> Given {
        let stops = stops.min(command);
        Given {
            start, deaths, slow, unstartable, named, prepares, own, asks, command, stops, succeeds, on_failure, restored, restoring, end,
            unsteerable: false,
        }
    }
}

/// The node's kube-apiserver from before the bridge.
const FIRST: u64 = 1;

/// Number of seconds without a reachable instance after which the bridge refuses clients.
const HOLD: u32 = 12;

/// A process, and the seconds until it is ready.
type Instance = Option<(u64, u32)>;

#[derive(Clone)]
struct World {
    given: Given,
    machine: Machine,
    now: u32,
    processes: u64,
    temporary: Instance,
    own: Instance,
    ends: u32,
    /// Second in which the temporary instance was started last.
    started: Option<u32>,
    steering: bool,
    /// Number of seconds for which the bridge has reached no instance.
    unreachable: u32,
    /// True if the node's etcd serves.
    etcd: bool,
    /// Number of seconds for which the node's etcd has served.
    etcd_served: u32,
    drained: bool,
    /// Seconds for which the node's kube-apiserver has been ready.
    own_ready: u32,
    /// Seconds in which a ready instance was idle, and clients were sent to an instance that was
    /// not ready.
    dark: u32,
    /// Seconds in which steering began first, began last, and ended.
    steered: Option<u32>,
    resteered: u32,
    unsteered: Option<u32>,
    /// Second in which the preparation of etcd was requested.
    prepares: Option<u32>,
    /// Seconds in which COMMAND was requested, and in which COMMAND began.
    asked: Option<u32>,
    command: Option<u32>,
    /// Second in which the restore under way began.
    restoring: Option<u32>,
    /// The process that COMMAND or a restore is to replace.
    before: Option<u64>,
    acts: Vec<Action>,
}

impl World {
    fn new(given: Given) -> Self {
        Self {
            machine: Machine::new(LIMITS, given.on_failure),
            given,
            now: 0,
            processes: 1,
            temporary: None,
            own: Some((FIRST, 0)),
            ends: 0,
            started: None,
            steering: false,
            unreachable: HOLD,
            etcd: true,
            etcd_served: 1000,
            drained: false,
            own_ready: 1000,
            dark: 0,
            steered: None,
            resteered: 0,
            unsteered: None,
            prepares: None,
            asked: None,
            command: None,
            restoring: None,
            before: None,
            acts: Vec::new(),
        }
    }

    fn new_process(&mut self, ready_in: u32) -> Instance {
        self.processes += 1;
        Some((self.processes, ready_in))
    }

    fn start_own(&mut self, ready_in: u32) {
        (self.own, self.own_ready) = (self.new_process(ready_in), 0);
    }

    /// True if the temporary instance serves, whatever its probe answers.
    fn temporary_serves(&self) -> bool {
        matches!(self.temporary, Some((_, 0)))
    }

    fn own_process(&self) -> Option<u64> {
        self.own.map(|(process, _)| process)
    }

    /// True if the bridge's shim reaches an instance.
    fn reaches_an_instance(&self) -> bool {
        let is_preferred =
            |(process, left)| left == 0 && self.machine.preferred_process() == Some(process);
        self.temporary_serves() || self.own.is_some_and(is_preferred)
    }

    /// True if the bridge accepts clients.
    fn accepts_clients(&self) -> bool {
        self.reaches_an_instance() || self.unreachable < HOLD
    }

    fn observation(&self) -> BridgeObservation {
        let slow = self
            .given
            .slow
            .is_some_and(|(from, long)| (from..from + long).contains(&self.now));
        BridgeObservation {
            temporary: TemporaryObservation {
                running: self.temporary.is_some(),
                ready: self.temporary_serves() && !slow,
                ends: self.ends,
            },
            own: OwnObservation {
                process: self.own_process(),
                ready: matches!(self.own, Some((_, 0))),
            },
            listens: self.accepts_clients(),
            steering: self.steering,
            named: self.is_named_in_service(),
            prepared: self.command_is_allowed() == Some(true),
            etcd: self.etcd,
            drained: self.drained,
        }
    }

    fn is_named_in_service(&self) -> bool {
        self.steered
            .zip(self.given.named)
            .is_some_and(|(steered, after)| self.now >= steered + after)
    }

    /// True if COMMAND may begin. `None` until that is known.
    fn command_is_allowed(&self) -> Option<bool> {
        let (takes, may) = self.given.prepares;
        self.prepares
            .filter(|begun| self.now >= begun + takes)
            .map(|_| may)
    }

    fn tick(&mut self) {
        self.now += 1;
        for (_, left) in self.temporary.iter_mut().chain(self.own.iter_mut()) {
            *left = left.saturating_sub(1);
        }
        if self.given.deaths.contains(&self.now) && self.temporary.take().is_some() {
            self.ends += 1;
        }
        if let (Fate::Crashes(after), true) = (self.given.own, self.command.is_some())
            && self
                .own
                .is_some_and(|(process, left)| process > 1 && left == 0)
            && self.own_ready > after
        {
            self.start_own(3);
        }
        if let Some(begun) = self.command {
            let runs = self.now - begun;
            if runs == self.given.stops {
                match self.given.own {
                    Fate::Stays => {}
                    Fate::Restarts(after) => self.start_own(after),
                    Fate::NeverReady => self.start_own(u32::MAX),
                    Fate::Crashes(_) => self.start_own(1),
                }
            }
            if runs == self.given.command {
                self.machine.record_command_end(if self.given.succeeds {
                    Ok(true)
                } else {
                    Err("exit status 1".into())
                });
            }
        }
        self.own_ready = if matches!(self.own, Some((_, 0))) {
            self.own_ready + 1
        } else {
            0
        };
        self.etcd_served = if self.etcd { self.etcd_served + 1 } else { 0 };
        self.unreachable = if self.reaches_an_instance() {
            0
        } else {
            self.unreachable + 1
        };
        if self.steering && !self.accepts_clients() {
            self.stop_steering();
        }
        if let Some((at, at_once)) = self.given.end
            && at == self.now
        {
            let _ = self.machine.request_end(at_once);
        }
    }

    fn stop_steering(&mut self) {
        if self.steering {
            (self.steering, self.unsteered) = (false, Some(self.now));
        }
    }

    /// Ends the restore under way. The kubelet restarts kube-apiserver, unless it has done so since
    /// the restore began, or kube-apiserver has never exited: the kubelet sees the old manifest
    /// again.
    fn end_restore(&mut self) {
        self.restoring = None;
        let Some(ready) = self.given.restored else {
            return self.machine.record_restore(Err("disk full".into()));
        };
        self.machine.record_restore(Ok(true));
        self.given.own = ready.map_or(Fate::NeverReady, Fate::Restarts);
        if self.own.is_none() || self.own_process() == self.before {
            self.start_own(ready.unwrap_or(u32::MAX));
        }
    }

    /// Carries out actions until the machine waits, and asserts that they are allowed.
    fn carry_out_actions(&mut self) -> Option<BridgeOutcome> {
        loop {
            if self.command_is_allowed() == Some(false) {
                self.machine.refuse_command("too few", self.own_process());
            }
            if self
                .restoring
                .is_some_and(|begun| self.now >= begun + self.given.restoring)
            {
                self.end_restore();
            }
            let (seen, action) = (self.observation(), self.next());
            if !matches!(action, Action::Wait | Action::Prepare | Action::Drain) {
                self.acts.push(action.clone());
                assert!(
                    self.acts.len() < 10_000,
                    "it goes round in circles: {:?}",
                    &self.acts[9_990..]
                );
            }
            match action {
                Action::Wait if self.request_command_when_due() => {}
                Action::Wait => break,
                Action::Prepare if self.prepares.is_none() => self.prepares = Some(self.now),
                Action::Prepare => break,
                Action::Entered => {}
                Action::Start => {
                    assert!(self.temporary.is_none(), "it runs already");
                    let is_early = self.started == Some(self.now);
                    let fails = self.given.unstartable.is_some_and(|from| self.now >= from);
                    if is_early || fails {
                        // The next try is a second later.
                        self.ends += u32::from(!is_early);
                        self.started = Some(self.now);
                        if self.request_command_when_due() {
                            continue;
                        }
                        break;
                    }
                    self.started = Some(self.now);
                    self.temporary = self.new_process(self.given.start.unwrap_or(u32::MAX));
                }
                Action::Steer if self.given.unsteerable => {
                    self.machine.record_steering_failure("no descriptor");
                    break;
                }
                Action::Steer => {
                    let holds = seen.listens && seen.own == OwnObservation::default();
                    assert!(
                        (seen.temporary.ready || holds) && !seen.steering,
                        "{seen:?}"
                    );
                    self.steering = true;
                    self.steered.get_or_insert(self.now);
                    (self.resteered, self.unsteered) = (self.now, None);
                }
                Action::Unsteer => {
                    let settled = seen.own.ready && self.own_ready >= 20;
                    let replaced = !seen.temporary.ready && seen.own.ready;
                    let reported = self.machine.outcome != BridgeOutcome::Done;
                    assert!(
                        settled || replaced || reported,
                        "{seen:?} {}",
                        self.own_ready
                    );
                    self.stop_steering();
                }
                Action::Drain => {
                    assert!(!self.steering, "clients are sent to an instance that ends");
                    let begun = self.unsteered.unwrap_or_default();
                    assert!(
                        self.steered.is_none() || self.now >= begun + 5,
                        "handshakes are cut"
                    );
                    (self.temporary, self.drained) = (None, true);
                }
                Action::Restore => {
                    assert!(!self.machine.is_command_running(), "COMMAND may write it");
                    self.restoring = Some(self.now);
                    self.before = self.own_process().filter(|process| *process != FIRST);
                }
                Action::Finish(outcome) => return Some(outcome),
            }
        }
        if self.machine.is_command_running() && self.command.is_none() {
            let steered = self.steered.unwrap();
            let seen = self.observation();
            assert!(
                seen.temporary.ready && seen.steering,
                "no other serves while one is stopped, at {}",
                self.now
            );
            assert!(
                self.now >= self.resteered + 5,
                "handshakes that began before are cut"
            );
            assert_eq!(self.command_is_allowed(), Some(true));
            assert!(
                self.is_named_in_service() || self.now >= steered + 15,
                "the Service may be empty"
            );
            self.command = Some(self.now);
            self.before = self.own_process();
        }
        None
    }

    /// Requests COMMAND, once.
    fn request_command_when_due(&mut self) -> bool {
        if self.machine.step() != Step::Hold
            || self.command.is_some()
            || self.machine.trouble().is_some()
        {
            return false;
        }
        let asks = self.now >= *self.asked.get_or_insert(self.now + self.given.asks);
        asks && self.machine.request_command().is_ok()
    }

    /// True if steered connections go to the node's kube-apiserver, which is ready.
    fn clients_reach_own_apiserver(&self) -> bool {
        self.steering
            && self.own.is_some_and(|(process, left)| {
                left == 0 && self.machine.preferred_process() == Some(process)
            })
    }

    /// After the first steering, clients must always reach a ready instance, except for the time
    /// until a change is noticed. Of two ready instances, they must reach the one that COMMAND has
    /// started.
    fn assert_rules(&mut self) {
        let reported = self.machine.outcome != BridgeOutcome::Done;
        let own = matches!(self.own, Some((_, 0)));
        let is_first = self.own.is_some_and(|(process, _)| process == FIRST);
        // A restart of the node's kube-apiserver during the overlap is not COMMAND's.
        let is_old = self.steering && own && !is_first && self.machine.step() != Step::Overlap;
        assert!(
            !is_old || self.clients_reach_own_apiserver(),
            "the old version answers at {}",
            self.now
        );
        let may_be_stopped = self.machine.step() == Step::Hold;
        assert!(
            !(may_be_stopped && is_first && self.clients_reach_own_apiserver()),
            "COMMAND may stop the server, at {}",
            self.now
        );
        let served = if self.steering {
            self.clients_reach_own_apiserver() || self.temporary_serves()
        } else {
            own
        };
        let other = if self.steering {
            own
        } else {
            self.temporary_serves()
        };
        let counts =
            self.steered.is_some() && !reported && !served && other && !self.given.unsteerable;
        self.dark = if counts { self.dark + 1 } else { 0 };
        // Steering comes back with the first good answer.
        let slow = self.given.slow.map_or(0, |(_, long)| long);
        assert!(
            self.dark <= 1 + slow,
            "{} s dark at {} {:?}",
            self.dark,
            self.now,
            self.given
        );
        self.assert_holds_clients();
        self.assert_steps_go_on();
    }

    /// The bridge holds clients that would be refused.
    fn assert_holds_clients(&self) {
        let step = self.machine.step();
        let keeps = matches!(
            step,
            Step::Overlap | Step::Hold | Step::AwaitOwn | Step::Restore
        );
        let holds = self.accepts_clients() && !self.given.unsteerable;
        assert!(
            !(keeps && holds) || self.steering || self.own.is_some(),
            "clients are refused in {step} at {}",
            self.now
        );
    }

    /// The steps go on, whether or not the temporary instance can be started and steered to.
    fn assert_steps_go_on(&self) {
        let Machine { step, restores, .. } = self.machine;
        assert!(step != Step::Restore || !restores, "nothing is restored");
        if step != Step::AwaitOwn {
            return;
        }
        let since = self.machine.since.unwrap_or_default().as_secs();
        let age = u64::from(self.now) - since;
        // A process that gets ready in the last moment has to settle, and etcd may be slow then.
        assert!(age <= 120 + 20 + 3, "it waits for {age} s");
        let served = self.own_ready.min(self.etcd_served);
        let is_back = served > 20 && self.own_process() != self.before;
        assert!(
            !(is_back && age > 20),
            "the new process is ready, at {}",
            self.now
        );
    }

    fn run_until(&mut self, until: u32) -> Option<BridgeOutcome> {
        while self.now < until {
            if let Some(outcome) = self.carry_out_actions() {
                return Some(outcome);
            }
            self.assert_rules();
            self.tick();
        }
        None
    }

    fn assert_ends_well(&mut self) {
        assert_eq!(self.run_until(3000), Some(BridgeOutcome::Done));
    }

    /// Asserts that clients stay on the bridge, whether or not COMMAND has ended, and returns the
    /// reason.
    fn assert_stays_in_hold(&mut self) -> &str {
        assert_eq!(
            (self.run_until(2000), self.machine.step()),
            (None, Step::Hold)
        );
        self.machine.trouble().unwrap()
    }

    fn next(&mut self) -> Action {
        let seen = self.observation();
        self.machine
            .next(&seen, Duration::from_secs(self.now.into()))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(berth_testing::case_count(2000)))]

    /// `World::carry_out_actions` and `World::assert_rules` have the rules; the test checks the outcome.
    #[test]
    fn clients_are_served_and_the_bridge_ends_well(given in any_given()) {
        let mut world = World::new(given.clone());
        match world.run_until(3000) {
            Some(BridgeOutcome::Done) => {
                prop_assert!(matches!(world.own, Some((_, 0))), "the node's own serves");
                let restarted = world.own_process() != world.before;
                prop_assert!(restarted || given.end.is_some() || !given.succeeds, "COMMAND's work is not waited for");
            }
            Some(BridgeOutcome::Restored(why)) => {
                prop_assert!(given.on_failure == OnFailure::Restore, "{why}");
                prop_assert!(matches!(world.own, Some((_, 0))), "the node's own serves");
            }
            Some(BridgeOutcome::NotBegun(_)) => prop_assert!(world.command.is_none()),
            Some(BridgeOutcome::Abandoned(why)) => {
                let at_once = given.end.is_some_and(|(_, at_once)| at_once);
                prop_assert!(at_once || given.on_failure == OnFailure::End, "{why}");
            }
            None => {
                prop_assert_eq!(world.machine.step(), Step::Hold);
                prop_assert!(given.on_failure != OnFailure::End);
                let restored = matches!(world.machine.outcome, BridgeOutcome::Restored(_));
                prop_assert!(world.steering || given.unstartable.is_some());
                prop_assert!(world.machine.trouble().is_some());
                // The operator fixes the node, and ends the bridge.
                world.given.own = Fate::Restarts(0);
                world.start_own(0);
                world.machine.request_end(false).unwrap();
                let outcome = world.run_until(4000);
                prop_assert!(outcome == Some(BridgeOutcome::Done) || restored && matches!(outcome, Some(BridgeOutcome::Restored(_))));
            }
        }
    }
}

/// A run without failures. The first connections are steered at 30 s; COMMAND begins at 35 s and
/// takes 10 s, in the middle of which COMMAND stops the node's kube-apiserver.
fn calm_given(own: Fate) -> Given {
    Given {
        start: Some(10),
        deaths: Vec::new(),
        slow: None,
        unstartable: None,
        named: Some(0),
        prepares: (0, true),
        own,
        asks: 0,
        command: 10,
        stops: 5,
        succeeds: true,
        on_failure: OnFailure::Stay,
        restored: None,
        restoring: 0,
        end: None,
        unsteerable: false,
    }
}

/// A world after so many seconds.
fn world_at(second: u32, given: Given) -> World {
    let mut world = World::new(given);
    world.run_until(second);
    world
}

#[test]
fn a_restart_goes_through_every_step() {
    let mut world = World::new(calm_given(Fate::Restarts(30)));
    world.assert_ends_well();
    // 10 to be ready, 20 settled; 5 of overlap; 10 of COMMAND; 25 more to be ready, 20 settled; 5
    // of overlap.
    assert_eq!(
        (world.steered, world.command, world.unsteered, world.now),
        (Some(30), Some(35), Some(90), 95)
    );
    use Action::{Entered, Finish, Start, Steer, Unsteer};
    assert_eq!(
        world.acts,
        [
            Start,
            Entered,
            Entered,
            Steer,
            Entered,
            Entered,
            Unsteer,
            Entered,
            Finish(BridgeOutcome::Done)
        ]
    );
}

#[test]
fn a_restarted_kube_apiserver_serves_while_ready_and_the_temporary_instance_otherwise() {
    let mut world = world_at(
        45,
        Given {
            command: 200,
            ..calm_given(Fate::Restarts(10))
        },
    );
    assert!(world.steering && !world.clients_reach_own_apiserver());
    for again in [50, 100, 150] {
        world.run_until(again + 1);
        assert!(world.machine.is_command_running() && world.clients_reach_own_apiserver());
        world.own = None;
        world.run_until(again + 10);
        assert!(world.steering && world.machine.preferred_process().is_none());
        world.start_own(5);
        world.run_until(again + 14);
        assert!(
            world.machine.preferred_process().is_some() && !world.clients_reach_own_apiserver()
        );
    }
    world.assert_ends_well();
    assert_eq!(
        world
            .acts
            .iter()
            .filter(|act| **act == Action::Unsteer)
            .count(),
        1,
        "steering stays on until the end"
    );
}

/// A new kubelet restarts kube-apiserver after COMMAND has ended.
#[test]
fn a_kube_apiserver_that_may_be_restarted_serves_after_it_has_settled() {
    let mut world = world_at(60, calm_given(Fate::Stays));
    assert!(
        world.machine.step() == Step::AwaitOwn
            && world.steering
            && !world.clients_reach_own_apiserver()
    );
    world.own = None;
    world.run_until(65);
    world.start_own(0);
    world.run_until(67);
    assert!(world.clients_reach_own_apiserver());
    world.assert_ends_well();
}

#[test]
fn a_kube_apiserver_from_before_serves_after_the_operator_ends_the_bridge() {
    let mut world = world_at(
        60,
        Given {
            succeeds: false,
            ..calm_given(Fate::Stays)
        },
    );
    assert!(
        world.machine.trouble().is_some() && world.steering && !world.clients_reach_own_apiserver()
    );
    world.machine.request_end(false).unwrap();
    world.run_until(62);
    assert!(world.clients_reach_own_apiserver());
    world.assert_ends_well();
}

#[test]
fn command_waits_for_its_conditions() {
    let calm = || calm_given(Fate::Restarts(0));
    let named = |named| Given { named, ..calm() };
    for (given, begins) in [
        // The Service names the node, but COMMAND does not wait for it forever.
        (named(Some(3)), 35),
        (named(Some(9)), 39),
        (named(Some(40)), 45),
        (named(None), 45),
        // etcd is prepared.
        (
            Given {
                prepares: (7, true),
                ..calm()
            },
            42,
        ),
        // The temporary instance answers. After its restart, clients went to the node's
        // kube-apiserver until 46.
        (
            Given {
                asks: 3,
                slow: Some((38, 2)),
                ..calm()
            },
            40,
        ),
        (
            Given {
                asks: 14,
                deaths: vec![36],
                ..calm()
            },
            51,
        ),
    ] {
        let mut world = World::new(given);
        world.assert_ends_well();
        assert_eq!((world.steered, world.command), (Some(30), Some(begins)));
    }
}

#[test]
fn a_failure_before_command_changes_nothing() {
    let calm = || calm_given(Fate::Restarts(0));
    for (given, why, unsteered) in [
        (
            Given {
                start: None,
                ..calm()
            },
            "not ready after 2m",
            None,
        ),
        (
            Given {
                start: None,
                deaths: vec![1, 2, 3],
                ..calm()
            },
            "ended 3 times before it was ready",
            None,
        ),
        (
            Given {
                start: Some(2),
                deaths: vec![10],
                ..calm()
            },
            "ended 8s after it was ready",
            None,
        ),
        (
            Given {
                deaths: vec![32],
                ..calm()
            },
            "ended 2s after it was ready",
            Some(32),
        ),
        // COMMAND is requested in the second in which the temporary instance exits.
        (
            Given {
                asks: 3,
                deaths: vec![38],
                ..calm()
            },
            "the temporary kube-apiserver is not ready any more",
            Some(38),
        ),
        (
            Given {
                prepares: (7, false),
                ..calm()
            },
            "too few",
            Some(42),
        ),
    ] {
        let mut world = World::new(given);
        let Some(BridgeOutcome::NotBegun(reason)) = world.run_until(1000) else {
            panic!("it has begun")
        };
        assert!(reason.contains(why), "{reason}");
        assert_eq!(
            (world.command, world.own, world.unsteered),
            (None, Some((FIRST, 0)), unsteered),
            "{why}"
        );
    }
}

/// The temporary instance is slow when steering is due, or steering stops and cannot be restored.
#[test]
fn handshakes_have_their_time_from_when_steering_begins_or_ends() {
    let mut world = world_at(30, calm_given(Fate::Restarts(0)));
    let ready = world.observation();
    let slow = BridgeObservation {
        temporary: TemporaryObservation {
            ready: false,
            ..ready.temporary
        },
        ..ready
    };
    let seconds = |seconds| Duration::from_secs(seconds);
    assert_eq!(world.machine.next(&ready, seconds(30)), Action::Entered);
    assert_eq!(world.machine.next(&slow, seconds(30)), Action::Wait);
    assert_eq!(world.machine.next(&ready, seconds(32)), Action::Steer);
    (world.steering, world.steered, world.now) = (true, Some(32), 32);
    world.assert_ends_well();
    assert_eq!((world.steered, world.command), (Some(32), Some(37)));
    let mut world = world_at(32, calm_given(Fate::Restarts(0)));
    assert_eq!(
        (world.machine.step(), world.next()),
        (Step::Overlap, Action::Wait)
    );
    (world.steering, world.unsteered) = (false, Some(32));
    assert_eq!(world.next(), Action::Steer);
    world.machine.record_steering_failure("no descriptor");
    assert!(matches!(
        world.run_until(3000),
        Some(BridgeOutcome::NotBegun(_))
    ));
    assert_eq!(world.now, 37);
}

#[test]
fn a_bridge_is_refused_until_command_runs() {
    let refused = |second| {
        let mut world = world_at(second, calm_given(Fate::Restarts(0)));
        let own = world.own_process();
        world
            .machine
            .refuse_command("another node has the lock", own);
        (world.run_until(3000), world.steered)
    };
    assert_eq!(
        refused(5),
        (
            Some(BridgeOutcome::NotBegun("another node has the lock".into())),
            None
        )
    );
    assert_eq!(refused(40), (Some(BridgeOutcome::Done), Some(30)));
}

/// The operator ends the bridge before etcd is prepared, the node's kube-apiserver does not come
/// back, and COMMAND is requested all the same.
#[test]
fn a_command_after_a_failed_end_waits_like_any_other() {
    let early = |prepares| {
        let mut world = world_at(
            32,
            Given {
                prepares,
                asks: 5000,
                ..calm_given(Fate::Stays)
            },
        );
        assert_eq!(
            (world.machine.step(), world.machine.request_end(false)),
            (Step::Overlap, Ok(()))
        );
        world.start_own(u32::MAX);
        world.assert_stays_in_hold();
        world.machine.request_command().unwrap();
        world
    };
    let mut world = early((7, true));
    let asked = world.now;
    world.run_until(asked + 10);
    assert_eq!(world.command, Some(asked + 7));
    let mut world = early((7, false));
    assert_eq!(
        (world.run_until(asked + 10), world.machine.trouble()),
        (None, Some("too few"))
    );
    assert!(world.steering && world.command.is_none() && world.machine.step() == Step::Hold);
    // The Service does not name the node yet, either. A restore fails a second later.
    let mut world = world_at(
        32,
        Given {
            named: None,
            ..calm_given(Fate::Restarts(0))
        },
    );
    assert_eq!(
        (
            world.machine.request_end(false),
            world.machine.request_restore()
        ),
        (Ok(()), Ok(()))
    );
    assert_eq!(
        (world.carry_out_actions(), world.machine.step()),
        (None, Step::Hold)
    );
    world.machine.request_command().unwrap();
    world.run_until(50);
    assert_eq!(world.command, Some(45));
}

#[test]
fn a_command_that_restarts_nothing_is_reported() {
    let mut world = World::new(calm_given(Fate::Stays));
    assert!(
        world
            .assert_stays_in_hold()
            .contains("nothing has restarted it")
            && world.steering
    );
    // The operator accepts any process.
    world.machine.request_end(false).unwrap();
    world.assert_ends_well();
}

#[test]
fn a_caller_that_goes_away_before_command_leaves_no_bridge() {
    let mut world = world_at(
        36,
        Given {
            slow: Some((35, 2)),
            ..calm_given(Fate::Stays)
        },
    );
    assert!(!world.machine.is_command_running() && world.machine.step() == Step::Hold);
    world.machine.record_abandoned_command("it went away");
    world.assert_ends_well();
    assert_eq!(world.command, None);
}

#[test]
fn steering_that_fails_while_clients_depend_on_it_is_reported_until_it_works() {
    // COMMAND may stop the node's kube-apiserver.
    let mut world = world_at(42, calm_given(Fate::Restarts(60)));
    world.steering = false;
    assert_eq!(world.next(), Action::Steer);
    world.machine.record_steering_failure("no descriptor");
    assert_eq!(
        (world.machine.step(), world.machine.steering_error()),
        (Step::Hold, Some("no descriptor"))
    );
    world.run_until(43);
    assert_eq!(
        (world.steering, world.machine.steering_error()),
        (true, None)
    );
    // Before COMMAND nothing has changed yet.
    let mut world = world_at(
        36,
        Given {
            slow: Some((35, 2)),
            ..calm_given(Fate::Stays)
        },
    );
    world.machine.record_steering_failure("no descriptor");
    assert_eq!(
        world.run_until(3000),
        Some(BridgeOutcome::NotBegun(
            "cannot steer: no descriptor".into()
        ))
    );
    assert_eq!(world.command, None);
}

/// The temporary instance answers all of COMMAND's probes meanwhile.
#[test]
fn a_kube_apiserver_that_does_not_get_ready_is_reported_while_command_runs() {
    // Stopped at 40.
    let mut world = world_at(
        99,
        Given {
            command: 200,
            ..calm_given(Fate::NeverReady)
        },
    );
    assert!(!world.machine.own_apiserver_is_late());
    world.run_until(102);
    assert!(world.machine.is_command_running() && world.machine.own_apiserver_is_late());
    world.start_own(0);
    world.run_until(103);
    assert!(!world.machine.own_apiserver_is_late());
}

#[test]
fn clients_of_a_temporary_instance_that_exits_go_to_the_nodes_at_once() {
    // COMMAND has not stopped the node's kube-apiserver yet.
    let mut world = world_at(
        38,
        Given {
            deaths: vec![37],
            stops: 9,
            ..calm_given(Fate::Restarts(1))
        },
    );
    assert!(
        !world.steering && world.temporary.is_some(),
        "the own one serves, and another is started"
    );
    world.assert_ends_well();
    // If the node's kube-apiserver does not serve either, clients wait at the bridge.
    let mut world = world_at(
        46,
        Given {
            deaths: vec![45],
            ..calm_given(Fate::Restarts(60))
        },
    );
    assert!(world.steering && world.own.is_some_and(|(_, left)| left > 0));
    world.assert_ends_well();
}

#[test]
fn a_bridge_with_a_running_command_ends_only_at_once() {
    let mut world = world_at(
        60,
        Given {
            command: 500,
            ..calm_given(Fate::NeverReady)
        },
    );
    assert!(world.machine.request_command().is_err());
    assert!(world.machine.request_end(false).is_err());
    assert!(world.machine.request_restore().is_err());
    assert_eq!(world.machine.step(), Step::Hold);
    world.machine.request_end(true).unwrap();
    assert_eq!(world.machine.step(), Step::Linger);
    let outcome = world.run_until(3000);
    assert!(
        matches!(outcome, Some(BridgeOutcome::Abandoned(_))),
        "{outcome:?}"
    );
}

#[test]
fn a_temporary_instance_that_cannot_be_restarted_does_not_keep_the_bridge_from_ending() {
    let world = |own| {
        World::new(Given {
            deaths: vec![50],
            unstartable: Some(40),
            ..calm_given(own)
        })
    };
    world(Fate::Restarts(30)).assert_ends_well();
    world(Fate::NeverReady).assert_stays_in_hold();
}

#[test]
fn a_caller_that_vanishes_leaves_clients_on_the_bridge() {
    for on_failure in [OnFailure::Stay, OnFailure::End] {
        let mut world = world_at(
            60,
            Given {
                command: 5000,
                on_failure,
                ..calm_given(Fate::NeverReady)
            },
        );
        world.machine.record_abandoned_command("it went away");
        assert_eq!(world.assert_stays_in_hold(), "it went away");
        // Reported trouble is gone at the end.
        world.machine.request_end(true).unwrap();
        assert_eq!(
            (world.machine.step(), world.machine.trouble()),
            (Step::Linger, None)
        );
    }
}

#[test]
fn files_are_restored_once() {
    let given = |restored| Given {
        on_failure: OnFailure::Restore,
        restored,
        ..calm_given(Fate::NeverReady)
    };
    let Some(BridgeOutcome::Restored(why)) = World::new(given(Some(Some(10)))).run_until(2000)
    else {
        panic!("it is not")
    };
    assert!(why.contains("does not stay ready"), "{why}");
    let mut world = World::new(given(Some(None)));
    world.assert_stays_in_hold();
    assert!(world.steering);
    assert_eq!(
        world
            .acts
            .iter()
            .filter(|action| **action == Action::Restore)
            .count(),
        1
    );
    assert!(
        World::new(given(None))
            .assert_stays_in_hold()
            .ends_with("restoring the files failed: disk full")
    );
}

#[test]
fn a_kube_apiserver_from_before_needs_no_restart_after_a_restore() {
    for succeeds in [true, false] {
        let given = Given {
            on_failure: OnFailure::Restore,
            restored: Some(None),
            succeeds,
            ..calm_given(Fate::Stays)
        };
        let mut world = World::new(given);
        let outcome = world.run_until(2000);
        assert!(
            matches!(outcome, Some(BridgeOutcome::Restored(_))),
            "{outcome:?} {:?}",
            world.machine.trouble()
        );
        assert_eq!(world.own, Some((FIRST, 0)));
        // The node's kube-apiserver had to settle again.
        let restored = world
            .acts
            .iter()
            .position(|act| *act == Action::Restore)
            .unwrap();
        assert!(world.acts[restored..].contains(&Action::Unsteer));
    }
}

#[test]
fn the_operator_restores_files() {
    // A ready, new kube-apiserver that the operator does not want is not waited for.
    let mut world = world_at(50, calm_given(Fate::Restarts(0)));
    assert_eq!(
        (world.machine.step(), world.machine.request_restore()),
        (Step::AwaitOwn, Ok(()))
    );
    assert_eq!(
        (world.machine.step(), world.machine.trouble()),
        (Step::Restore, Some("the operator requested a restore"))
    );
    assert_eq!(world.next(), Action::Restore);
    world.before = world.own_process();
    world.machine.record_restore(Ok(true));
    world.run_until(100);
    assert_eq!(world.machine.step(), Step::AwaitOwn);
    world.start_own(1);
    assert!(matches!(
        world.run_until(2000),
        Some(BridgeOutcome::Restored(_))
    ));
    let mut machine = Machine::new(LIMITS, OnFailure::Stay);
    assert!(machine.request_restore().is_err());
}

/// A disk may be slow.
#[test]
fn clients_are_served_during_a_restore() {
    let mut world = world_at(50, calm_given(Fate::NeverReady));
    world.machine.request_restore().unwrap();
    assert_eq!(
        (world.next(), world.next()),
        (Action::Restore, Action::Wait),
        "it is begun once"
    );
    (world.temporary, world.ends) = (None, 1);
    assert_eq!(world.next(), Action::Start);
    assert!(world.machine.request_end(false).is_err());
    assert!(world.machine.request_command().is_err());
    world.machine.request_end(true).unwrap();
    world.machine.record_restore(Ok(true));
    let ends = (world.machine.step(), world.machine.trouble());
    assert_eq!(
        ends,
        (Step::Linger, None),
        "it ends although something is written"
    );
}

#[test]
fn a_command_that_fails_leaves_clients_where_the_operator_said() {
    let failed = |on_failure| {
        World::new(Given {
            succeeds: false,
            on_failure,
            ..calm_given(Fate::NeverReady)
        })
    };
    assert_eq!(
        failed(OnFailure::Stay).assert_stays_in_hold(),
        "exit status 1"
    );
    let Some(BridgeOutcome::Abandoned(why)) = failed(OnFailure::End).run_until(2000) else {
        panic!("it stays")
    };
    assert!(why.starts_with("exit status 1; "), "{why}");
}

#[test]
fn a_command_that_nobody_reports_counts_as_running() {
    // After `berth bridge start`: until the operator ends the bridge.
    let unreported = || Given {
        asks: 5000,
        ..calm_given(Fate::Stays)
    };
    let mut world = world_at(32, unreported());
    assert!(!world.machine.command_may_run() && world.machine.step() == Step::Overlap);
    for etcd in [true, false] {
        world.etcd = etcd;
        world.run_until(world.now + 20);
        assert!(world.machine.command_may_run() && world.machine.step() == Step::Hold);
    }
    world.machine.request_end(false).unwrap();
    assert!(!world.machine.command_may_run());
    // Such a command may write the restored files.
    let mut world = world_at(50, unreported());
    world.machine.request_restore().unwrap();
    assert!(world.machine.command_may_run());
    // An abandoned command may run until the end, whatever the operator requests.
    let mut world = world_at(
        60,
        Given {
            command: 5000,
            ..calm_given(Fate::NeverReady)
        },
    );
    world.machine.record_abandoned_command("it went away");
    world.run_until(70);
    assert!(world.machine.command_may_run());
    world.machine.request_end(false).unwrap();
    world.run_until(80);
    assert!(world.machine.command_may_run() && world.machine.step() == Step::AwaitOwn);
}

/// The temporary etcd may serve again until the node's etcd has come back. A later stop of etcd
/// comes from a command that an operator runs by hand.
#[test]
fn a_command_that_is_known_to_have_failed_has_ended() {
    let mut world = world_at(
        40,
        Given {
            succeeds: false,
            ..calm_given(Fate::NeverReady)
        },
    );
    for (etcd, until, may_run) in [
        (false, 40, true),
        (false, 100, false),
        (true, 101, true),
        (false, 102, true),
    ] {
        world.etcd = etcd;
        world.run_until(until);
        assert_eq!(world.machine.command_may_run(), may_run, "{until}");
    }
    // COMMAND has ended, too, if the node's kube-apiserver did not come back after COMMAND.
    let mut world = world_at(40, calm_given(Fate::NeverReady));
    world.etcd = false;
    world.run_until(1000);
    assert!(!world.machine.command_may_run() && world.machine.step() == Step::Hold);
}

/// kube-apiserver is ready with another etcd member, through the bridge's relay, which disappears
/// when the bridge ends.
#[test]
fn a_node_whose_member_of_etcd_is_down_is_not_back() {
    let mut world = world_at(40, calm_given(Fate::Restarts(10)));
    world.etcd = false;
    assert!(
        world
            .assert_stays_in_hold()
            .contains("the etcd member does not answer")
    );
    world.machine.request_end(false).unwrap();
    world.run_until(2050);
    assert_eq!(world.machine.step(), Step::AwaitOwn);
    world.etcd = true;
    world.assert_ends_well();
    // A slow answer does not count, except in the last moment.
    let mut world = world_at(60, calm_given(Fate::Restarts(10)));
    assert_eq!(world.machine.step(), Step::AwaitOwn);
    for _ in 0..2 {
        world.etcd = false;
        world.run_until(world.now + 1);
        world.etcd = true;
        world.run_until(world.now + 2);
    }
    world.assert_ends_well();
    assert!(world.now < 110, "{}", world.now);
}
