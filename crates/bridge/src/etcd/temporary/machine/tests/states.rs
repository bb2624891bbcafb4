//! Explores every state of the two etcds within bounds.
//!
//! Not in the model: etcd refuses data if the data's last raft snapshot is newer than the file at
//! the path. A node's etcd that ends in the first 100 ms after its file was replaced, before the
//! bridge rescues it, leaves such data, and only etcd's refusal keeps a temporary etcd from
//! starting with it.
//!
//! In the model as in the bridge, a snapshot that is written after the last observation before a
//! file is replaced counts as newer than the file at the path. An etcd that lost its file before it
//! served counts as one that acknowledged writes.

use super::Copies::{AtOnce, Fail, Slowly};
use super::*;
use berth_testing::states::{Digest, Model, explore};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::hash::Hash;
use std::rc::Rc;

#[derive(Debug, Clone, Copy)]
enum Step {
    Happens(Event),
    /// Lets so many ticks pass.
    Pass(u32),
}

#[derive(Clone)]
struct Bounded {
    world: World,
    /// Number of times that time may still pass, and number of events that may still happen.
    passes: u8,
    events: u8,
    /// [`SITUATIONS`] of all searched states.
    came_by: Rc<RefCell<BTreeSet<&'static str>>>,
}

impl Model for Bounded {
    type Event = Step;

    fn events(&self) -> Vec<Step> {
        use Event::{
            Command, Copies, Crash, CrashTemporary, Hang, HangTemporary, Linger, Replace, Snapshot,
            Start, Stop,
        };
        let World {
            own,
            temporary,
            snapped,
            copies,
            commanding,
            ..
        } = &self.world;
        let mut events = Vec::new();
        if self.passes > 0 {
            events.extend([1, 2, 25, 250, 1250, 1900].map(Step::Pass));
        }
        if self.events > 0 {
            let its = match (own, temporary) {
                (None, _) => vec![Start(Kind::Good), Start(Kind::Refuses)],
                (Some(_), _) => vec![
                    Stop(0),
                    Stop(30),
                    Crash,
                    Hang(30),
                    Hang(1900),
                    Linger(0),
                    Linger(250),
                ],
            };
            let copies = [AtOnce, Slowly, Fail].into_iter().filter(|it| it != copies);
            let temporary = temporary
                .iter()
                .flat_map(|_| [CrashTemporary, HangTemporary]);
            let snapshot = (!snapped).then_some(Snapshot);
            let all = its
                .into_iter()
                .chain(temporary)
                .chain(snapshot)
                .chain(copies.map(Copies))
                .chain([Replace, Command(!commanding)]);
            events.extend(all.map(Step::Happens));
        }
        events
    }

    fn happen(&mut self, event: Step) {
        match event {
            Step::Happens(event) => {
                self.events -= 1;
                self.world.apply_event(event);
            }
            Step::Pass(ticks) => {
                self.passes -= 1;
                self.world.run_for(TICK * ticks);
            }
        }
    }

    fn digest(&self, digest: &mut Digest) {
        (self.passes, self.events).hash(digest);
        self.world.digest(digest);
    }

    fn check_state(&self, nth: usize) {
        self.came_by.borrow_mut().extend(self.world.situations());
        if nth.is_multiple_of(4) {
            self.world.clone().assert_ends_well();
        }
    }
}

impl World {
    fn digest(&self, digest: &mut Digest) {
        let EtcdMachine {
            speedup: _,
            step,
            since,
            has_stopped,
            away,
            back,
            ends,
            silent,
            ending,
            kills,
            other,
            unseen,
            served,
            had_data,
            rescued,
            failed,
            retry,
            given_up,
            is_unseen,
        } = &self.machine;
        let age = |since: Duration, most| self.now.saturating_sub(since).min(most).as_millis();
        let since_when = |since: &Option<Duration>, most| since.map(|since| age(since, most));
        let silent = silent.map(|(since, had_lock)| (age(since, STARTS), had_lock));
        (
            step,
            age(*since, secs(13)),
            has_stopped,
            since_when(away, GIVES_BACK),
            since_when(back, BACK),
        )
            .hash(digest);
        (
            silent,
            since_when(ending, HUNG),
            kills,
            since_when(other, secs(1)),
            since_when(unseen, UNSEEN),
        )
            .hash(digest);
        (
            served,
            had_data,
            rescued,
            failed.min(&2),
            retry.saturating_sub(self.now).as_millis(),
        )
            .hash(digest);
        (
            given_up,
            is_unseen,
            self.ends.saturating_sub(*ends).min(ENDS),
        )
            .hash(digest);
        let file = |file: File| (self.named.saturating_sub(file.number).min(2), file.locked);
        let own = self
            .own
            .map(|own| (own.kind as u8, own.stops, own.opens, file(own.file)));
        let stands_still = self.own.map(|own| (own.hangs, own.tried, own.paused));
        let due = self.due.map(|due| due.saturating_sub(self.now).as_millis());
        (
            stands_still,
            self.lingers.map(|(it, left)| (file(it), left)),
            self.rescue,
            due,
            (self.copies as u8, self.lacks),
        )
            .hash(digest);
        let temporary = self
            .temporary
            .map(|it| (it.hangs, it.ending, it.opens, file(it.file)));
        (
            own,
            temporary,
            self.snapped,
            self.commanding,
            self.unrecovered,
            self.told,
        )
            .hash(digest);
        let EtcdWanted {
            route,
            ends_connections,
            steers,
            temporary,
            rescues,
        } = self.wanted;
        (
            route as u8,
            ends_connections,
            steers,
            temporary as u8,
            rescues,
        )
            .hash(digest);
    }
}

/// Situations that the search has to come by.
const SITUATIONS: [&str; 12] = [
    "a copy fails",
    "a copy is made",
    "a copy outlives its process",
    "COMMAND has ended",
    "a hung etcd has the lock",
    "a hung etcd waits for the lock",
    "a lock has no listener",
    "an etcd waits for a lock without a listener",
    "the data is given back",
    "the data may lack writes",
    "the node's etcd has another file",
    "the temporary etcd hangs",
];

impl World {
    fn situations(&self) -> impl Iterator<Item = &'static str> {
        let own = self.own.as_ref();
        let is_hung = |locked| own.is_some_and(|own| own.hangs > 0 && own.file.locked == locked);
        let lingers = self.lingers.is_some();
        let are = [
            self.due.is_some(),
            self.rescue.is_some(),
            self.rescue.is_some() && !own.is_some_and(|own| own.paused),
            !self.commanding,
            is_hung(true),
            is_hung(false),
            lingers,
            lingers && own.is_some_and(|own| self.as_opened(own.file) == Opened::Waits),
            self.machine.step == EtcdStep::GivenBack,
            self.unrecovered,
            own.is_some_and(|own| self.as_opened(own.file) == Opened::Other),
            self.temporary.is_some_and(|it| it.hangs),
        ];
        SITUATIONS
            .into_iter()
            .zip(are)
            .filter_map(|(name, is)| is.then_some(name))
    }
}

/// Searches of one or two events are exhausted.
#[test]
fn every_state_of_two_etcds_leads_to_the_nodes_etcd() {
    let came_by = Rc::default();
    for (events, passes, usually, least) in [
        (1, 2, 4_000, 1_000),
        (2, 1, 4_000, 1_500),
        (2, 4, 2_000, 2_000),
        (4, 4, 4_000, 4_000),
    ] {
        let worlds = [
            serving_world(),
            crashed_world(),
            temporary_serving_world(),
            world_stopped_for_copy(false),
            world_stopped_for_copy(true),
        ];
        let roots = worlds.map(|world| Bounded {
            world,
            passes,
            events,
            came_by: Rc::clone(&came_by),
        });
        let name = format!("etcd, {events} events, {passes} spans of time");
        let found = explore(&name, &roots, usually);
        assert!(found.states >= least, "{name}: {found:?}");
        assert!(found.exhausted || passes == 4, "{name}: {found:?}");
    }
    assert_eq!(came_by.take(), BTreeSet::from(SITUATIONS));
}
