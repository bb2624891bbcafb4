//! Watches that count the writes, and notice missing ones.

use super::Client;
use super::follow::{Follower, View};
use super::objects::{Event, Object, WRITE_NAMESPACE, configmaps_path};
use super::sequence::Sequence;
use super::writer::Goal;
use crate::record::{
    event::{EventKind, WatchSum},
    stamp::Stamp,
    verdict::Loss,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch::Receiver;

/// Watches until the load stops and the last write was seen.
pub(super) async fn run(client: Client, index: u64, goal: Receiver<Option<Arc<Goal>>>) {
    let mut follower = Follower::new(
        client,
        "watch",
        index,
        configmaps_path(WRITE_NAMESPACE),
        Counted::default(),
    );
    let goal = follower.run(goal).await;
    let mut counted = follower.view;
    let flaw = counted
        .sequence
        .find_missing_end(goal.map_or(0, |goal| goal.last));
    counted.record_flaw(flaw);
    // For the control only the ends of the streams matter, so its events are not recorded.
    if follower.client.control.is_some() {
        return;
    }
    let sum = WatchSum {
        client: follower.name.clone(),
        events: counted.events,
        flaws: counted.flaws,
        relists: follower.relists,
        expired: follower.expired,
    };
    follower
        .client
        .recorder
        .add(&follower.name, EventKind::Watch(sum));
}

#[derive(Debug, Default)]
struct Counted {
    sequence: Sequence,
    /// Number of events by instance.
    events: BTreeMap<String, u64>,
    flaws: Vec<(Stamp, Loss, u64)>,
}

impl Counted {
    fn record_flaw(&mut self, flaw: Option<(Loss, u64)>) {
        self.flaws
            .extend(flaw.map(|(loss, count)| (Stamp::now(), loss, count)));
    }
}

impl View for Counted {
    fn take_list(&mut self, objects: &[Object<'_>]) {
        self.sequence.record_list(
            objects
                .iter()
                .filter_map(Object::sequence)
                .max()
                .unwrap_or(0),
        );
    }

    fn observe_event(&mut self, instance: &str, event: &Event<'_>) {
        if event.kind != "ADDED" {
            return;
        }
        let Some(number) = event.object.sequence() else {
            return;
        };
        match self.events.get_mut(instance) {
            Some(events) => *events += 1,
            None => drop(self.events.insert(instance.to_owned(), 1)),
        }
        let flaw = self.sequence.observe_number(number);
        self.record_flaw(flaw);
    }

    fn has_reached(&self, goal: &Goal) -> bool {
        self.sequence.has_reached(goal.last)
    }
}
