//! Explores all states of the machine that few clients and calls can reach.

use super::*;
use berth_testing::states::{Digest, Model, explore};
use std::hash::Hash;

/// Maximum number of waiting clients, and of unanswered calls, in a state.
const MAX: usize = 3;

impl Model for World {
    /// An event, and the error that a client gets if it is handed over during the event.
    type Event = (Event, Option<Errno>);

    fn events(&self) -> Vec<Self::Event> {
        let both = [true, false];
        let mut events: Vec<_> = [
            Event::Signal,
            Event::Pass(7),
            Event::Pass(15),
            Event::Closes,
        ]
        .to_vec();
        events.extend(
            [1, 2]
                .into_iter()
                .flat_map(|shim| [Event::Recall(shim), Event::Discard(shim)]),
        );
        events.extend(
            both.into_iter()
                .flat_map(|ours| both.map(|works| Event::Bind { ours, works })),
        );
        let mut hand_over = Vec::new();
        if self.calls.len() < MAX {
            let accept = |number, by_server| {
                both.map(|blocking| Event::Accept {
                    number,
                    by_server,
                    blocking,
                })
            };
            hand_over.extend(
                [(5, true), (6, true), (5, false), (9, true)]
                    .into_iter()
                    .flat_map(|(n, by)| accept(n, by)),
            );
        }
        if self.waiting.len() < MAX {
            hand_over.extend([None, Some(1), Some(2)].map(Event::Client));
        }
        let hows = [
            None,
            Some(Errno::ENOENT),
            Some(Errno::EMFILE),
            Some(Errno::EPERM),
        ];
        let handed = hand_over
            .into_iter()
            .flat_map(|event| hows.map(|how| (event, how)));
        events
            .into_iter()
            .map(|event| (event, None))
            .chain(handed)
            .collect()
    }

    fn happen(&mut self, (event, how): Self::Event) {
        self.handle_event(event, how);
    }

    fn digest(&self, digest: &mut Digest) {
        let Self {
            machine,
            now,
            next,
            listener,
            waiting,
            calls,
            rung,
            shims_know,
        } = self;
        let Machine {
            now: known,
            phase,
            waiting: clients,
            calls: _,
            bell,
            actions,
        } = machine;
        assert!(actions.is_empty());
        let phase = match phase {
            Phase::Starting => (0, 0),
            Phase::Bound(number) => (1, *number),
            Phase::Listening(number) => (2, *number),
            Phase::Closed => (3, 0),
        };
        let bell = bell.map(|bell| bell.saturating_sub(*now).as_millis());
        (
            phase,
            bell,
            (*now - *known).min(PATIENCE),
            next % 2,
            listener,
            rung,
            shims_know,
        )
            .hash(digest);
        let shims: Vec<_> = clients
            .iter()
            .map(|client| client.from.map(|(shim, _)| shim))
            .collect();
        (shims, waiting.len(), calls.values().collect::<Vec<_>>()).hash(digest);
    }

    fn check_state(&self, nth: usize) {
        self.clone().check_history_end(nth.is_multiple_of(2));
    }
}

#[test]
fn every_state_of_a_supervisor_keeps_the_invariants() {
    let mut world = World::new();
    world.handle_event(
        Event::Bind {
            ours: true,
            works: true,
        },
        None,
    );
    assert!(explore("supervisor", &[World::new(), world], 1_000_000).exhausted);
}
