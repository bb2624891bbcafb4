//! A client that keeps a copy of all objects, as controllers do, and at the end should hold exactly
//! those that were written and not deleted.

use super::Client;
use super::follow::{Follower, View};
use super::objects::{ALL, Event, Object, Tag};
use super::writer::Goal;
use crate::rehearse::record::Informer;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::watch::Receiver;

/// Follows until the load stops and it holds what it should.
pub(super) async fn run(client: Client, index: u64, tag: Tag, goal: Receiver<Option<Arc<Goal>>>) {
    let recorder = Arc::clone(&client.recorder);
    let copy = Copy { tag, held: BTreeSet::new(), doubled: 0, missed: 0 };
    let mut follower = Follower::new(client, "informer", index, ALL.to_owned(), copy);
    let goal = follower.run(goal).await;
    // What is there is not known: nothing can be said.
    let Some(written) = goal.as_ref().and_then(|goal| goal.objects.as_ref()) else { return };
    let held = &follower.view.held;
    let informer = Informer {
        id: follower.name,
        written: written.len() as u64,
        held: held.len() as u64,
        missing: written.difference(held).count() as u64 + follower.view.missed,
        stale: held.difference(written).count() as u64,
        doubled: follower.view.doubled,
        relists: follower.relists,
    };
    recorder.note(|r| r.informers.push(informer));
}

/// The copy: names say it all, as no object is changed.
#[derive(Debug)]
struct Copy {
    tag: Tag,
    held: BTreeSet<String>,
    doubled: u64,
    missed: u64,
}

impl View for Copy {
    fn listed(&mut self, objects: &[Object<'_>]) {
        let names = objects.iter().map(|object| &*object.metadata.name);
        self.held = names.filter(|name| self.tag.is_on(name)).map(str::to_owned).collect();
    }

    fn saw(&mut self, _: &str, event: &Event<'_>) {
        let name = &*event.object.metadata.name;
        if !self.tag.is_on(name) {
            return;
        }
        match &*event.kind {
            "ADDED" => self.doubled += u64::from(!self.held.insert(name.to_owned())),
            // What was not there before it went was missed.
            "DELETED" => self.missed += u64::from(!self.held.remove(name)),
            _ => {}
        }
    }

    fn has(&self, goal: &Goal) -> bool {
        goal.objects.as_ref().is_none_or(|objects| *objects == self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_what_it_was_told_and_notices_what_was_told_twice() {
        let tag = Tag::now();
        let name = |number| tag.write(number);
        let event = |kind: &str, number| {
            format!(r#"{{"type":"{kind}","object":{{"metadata":{{"name":"{}"}}}}}}"#, name(number))
        };
        let mut copy = Copy { tag: tag.clone(), held: BTreeSet::new(), doubled: 0, missed: 0 };
        let tell = |copy: &mut Copy, kind: &str, number| {
            copy.saw("old", &serde_json::from_str(&event(kind, number)).unwrap());
        };
        tell(&mut copy, "ADDED", 1);
        tell(&mut copy, "ADDED", 2);
        tell(&mut copy, "DELETED", 1);
        assert_eq!((copy.held.len(), copy.doubled, copy.missed), (1, 0, 0));
        tell(&mut copy, "ADDED", 2);
        tell(&mut copy, "DELETED", 1);
        assert_eq!((copy.held.len(), copy.doubled, copy.missed), (1, 1, 1));
        copy.saw("old", &serde_json::from_str(r#"{"type":"ADDED","object":{"metadata":{"name":"other"}}}"#).unwrap());
        let goal = |numbers: &[u64]| Goal { last: 2, objects: Some(numbers.iter().map(|n| name(*n)).collect()) };
        assert!(copy.has(&goal(&[2])) && !copy.has(&goal(&[])) && !copy.has(&goal(&[1, 2])));
        copy.listed(&[]);
        assert!(copy.has(&goal(&[])));
    }
}
