//! Explores every state of the two etcds within bounds.

use super::*;
use berth_testing::states::{Digest, Model, explore};
use std::hash::Hash;

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
}

impl Model for Bounded {
    type Event = Step;

    fn events(&self) -> Vec<Step> {
        use Event::{
            Command, Crash, CrashTemporary, HangTemporary, Replace, Snapshot, Start, Stop,
        };
        let World {
            own,
            temporary,
            snapped,
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
                (Some(_), _) => vec![Stop(0), Stop(30), Crash],
            };
            let temporary = temporary
                .iter()
                .flat_map(|_| [CrashTemporary, HangTemporary]);
            let snapshot = (!snapped).then_some(Snapshot);
            let all = its
                .into_iter()
                .chain(temporary)
                .chain(snapshot)
                .chain([Replace, Command(!commanding)]);
            events.extend(all.map(Step::Happens));
        }
        events
    }

    fn happen(&mut self, event: Step) {
        match event {
            Step::Happens(event) => {
                self.events -= 1;
                self.world.happen(event);
            }
            Step::Pass(ticks) => {
                self.passes -= 1;
                self.world.run(TICK * ticks);
            }
        }
    }

    fn digest(&self, digest: &mut Digest) {
        (self.passes, self.events).hash(digest);
        self.world.digest(digest);
    }

    fn check(&self, nth: usize) {
        if nth.is_multiple_of(4) {
            self.world.clone().ends_well();
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

#[test]
fn every_state_of_two_etcds() {
    for (events, usually) in [(1, 1_000), (2, 2_000), (4, 4_000)] {
        let roots = [serving_world(), crashed_world(), replaced_world()].map(|world| Bounded {
            world,
            passes: 4,
            events,
        });
        explore(&format!("etcd, {events} events"), &roots, usually);
    }
}
