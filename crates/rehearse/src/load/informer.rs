//! A client that keeps a copy of objects, as controllers do. At the end the copy must be exactly
//! the objects that were written and not deleted.
//!
//! Quiet informers follow objects without writes, and see no events. Only bookmarks give them a
//! revision that a later instance still knows. Quiet informers show how often a client lists again.
//! Their copies are hardly any evidence, and are not counted.

use super::Client;
use super::follow::{Follower, View};
use super::objects::{
    ALL_CONFIGMAPS, ALL_SECRETS, Event, Object, READ_NAMESPACE, Tag, configmaps_path,
};
use super::writer::Goal;
use crate::record::event::{EventKind, Informer};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::mpsc::Sender;
use tokio::sync::watch::Receiver;

#[derive(Debug, Clone, Copy)]
pub(super) enum Scope {
    All,
    /// ConfigMaps of a namespace without writes. Other namespaces have ConfigMaps that are written.
    QuietNamespace,
    /// Secrets, which nobody writes during a rehearsal.
    QuietResource,
}

impl Scope {
    fn path(self) -> String {
        match self {
            Self::All => ALL_CONFIGMAPS.to_owned(),
            Self::QuietNamespace => configmaps_path(READ_NAMESPACE),
            Self::QuietResource => ALL_SECRETS.to_owned(),
        }
    }

    fn includes(self, tag: &Tag, name: &str) -> bool {
        match self {
            Self::All => tag.owns_object_name(name),
            Self::QuietNamespace => tag.is_name_of_read_object(name),
            Self::QuietResource => false,
        }
    }
}

/// Follows until the load stops and the copy is complete. `begun` is dropped at the first watch.
pub(super) async fn run(
    client: Client,
    index: u64,
    scope: Scope,
    goal: Receiver<Option<Arc<Goal>>>,
    begun: Option<Sender<()>>,
) {
    let copy = Copy {
        tag: client.tag.clone(),
        scope,
        held: BTreeSet::new(),
        duplicated: 0,
        missed: 0,
    };
    let kind = if matches!(scope, Scope::All) {
        "informer"
    } else {
        "quiet"
    };
    let mut follower = Follower::new(client, kind, index, scope.path(), copy);
    follower.begun = begun;
    let goal = follower.run(goal).await;
    // If the written objects are unknown, there is nothing to compare the copy with.
    let Some(written) = goal
        .as_ref()
        .and_then(|goal| follower.view.wanted_names(goal))
    else {
        return;
    };
    let held = &follower.view.held;
    let informer = Informer {
        id: follower.name.clone(),
        written: written.len() as u64,
        held: held.len() as u64,
        missing: written.difference(held).count() as u64 + follower.view.missed,
        stale: held.difference(&written).count() as u64,
        duplicated: follower.view.duplicated,
        relists: follower.relists,
        expired: follower.expired,
    };
    follower
        .client
        .recorder
        .add(&follower.name, EventKind::Informer(informer));
}

/// The copy of the objects: only their names, since objects are created and deleted but never
/// changed.
#[derive(Debug)]
struct Copy {
    tag: Tag,
    scope: Scope,
    held: BTreeSet<String>,
    duplicated: u64,
    missed: u64,
}

impl Copy {
    /// The objects that the copy should hold. `None` if unknown.
    fn wanted_names(&self, goal: &Goal) -> Option<BTreeSet<String>> {
        let objects = goal.objects.as_ref()?;
        Some(
            objects
                .iter()
                .filter(|name| self.scope.includes(&self.tag, name))
                .cloned()
                .collect(),
        )
    }
}

impl View for Copy {
    fn take_list(&mut self, objects: &[Object<'_>]) {
        let names = objects.iter().map(|object| &*object.metadata.name);
        self.held = names
            .filter(|name| self.scope.includes(&self.tag, name))
            .map(str::to_owned)
            .collect();
    }

    fn observe_event(&mut self, _: &str, event: &Event<'_>) {
        let name = &*event.object.metadata.name;
        if !self.scope.includes(&self.tag, name) {
            return;
        }
        match &*event.kind {
            "ADDED" => self.duplicated += u64::from(!self.held.insert(name.to_owned())),
            // A deleted object that the copy did not hold was missed earlier.
            "DELETED" => self.missed += u64::from(!self.held.remove(name)),
            _ => {}
        }
    }

    fn has_reached(&self, goal: &Goal) -> bool {
        self.wanted_names(goal)
            .is_none_or(|wanted| wanted == self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_informer_holds_what_events_have_and_notices_duplicates() {
        let tag = Tag::from_current_time();
        let name = |number| tag.written_name(number);
        let mut copy = Copy {
            tag: tag.clone(),
            scope: Scope::All,
            held: BTreeSet::new(),
            duplicated: 0,
            missed: 0,
        };
        let mut observe = |kind: &str, name: String| {
            let event =
                format!(r#"{{"type":"{kind}","object":{{"metadata":{{"name":"{name}"}}}}}}"#);
            copy.observe_event("old", &serde_json::from_str(&event).unwrap());
            (copy.held.len(), copy.duplicated, copy.missed)
        };
        for (kind, name, now) in [
            ("ADDED", name(1), (1, 0, 0)),
            ("ADDED", name(2), (2, 0, 0)),
            ("DELETED", name(1), (1, 0, 0)),
            ("ADDED", name(2), (1, 1, 0)),
            ("DELETED", name(1), (1, 1, 1)),
            ("ADDED", "other".into(), (1, 1, 1)),
        ] {
            assert_eq!(observe(kind, name.clone()), now, "{kind} {name}");
        }
        let goal = |numbers: &[u64]| Goal {
            last: 2,
            objects: Some(numbers.iter().map(|n| name(*n)).collect()),
        };
        assert!(
            copy.has_reached(&goal(&[2]))
                && !copy.has_reached(&goal(&[]))
                && !copy.has_reached(&goal(&[1, 2]))
        );
        copy.take_list(&[]);
        assert!(copy.has_reached(&goal(&[])));
    }
}
