//! A kube-apiserver is restarted under informers: each lists and watches, as client-go's reflector does, and again when its watch has ended.
//!
//! Before the restart they only watch, from the revision of one list, since their first lists are not what is measured.

use super::real::{ControlPlane, Real};
use super::storms::source;
use super::{Cpus, LONGEST, NODE, Round, StormOptions, directory, show_warnings};
use crate::clients::{Failed, RETRY, TIMEOUT, insist};
use anyhow::{Context, Result, bail};
use berth_rehearse::event::Failure;
use berth_rehearse::load::Visit;
use serde_json::json;
use std::cell::Cell;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// What informers list: ConfigMaps, and the bytes of each.
const OBJECTS: usize = 500;
const SIZE: usize = 1500;
const PATH: &str = "/api/v1/namespaces/default/configmaps";

/// kube-apiserver's own timeout of a list.
const LIST_WITHIN: Duration = Duration::from_secs(60);

/// Longer than the whole storm.
const WATCH_FOR: &str = "timeoutSeconds=3600";

/// Time between two informers before the restart.
const SPACED: Duration = Duration::from_millis(5);

/// The informers' figures. All informers are on one thread.
#[derive(Default)]
struct Figures {
    watching: watch::Sender<u32>,
    first: Cell<Option<Instant>>,
    lists: Cell<u32>,
    most_lists: Cell<u32>,
    listed: Cell<u32>,
    timed_out: Cell<u32>,
    rejected: Cell<u32>,
    refused: Cell<u32>,
}

fn add(to: &Cell<u32>) {
    to.set(to.get() + 1);
}

/// Runs a function when it is dropped, such as one that takes back what was counted.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Figures {
    /// Counts a list while it is in flight.
    fn list(&self) -> OnDrop<impl FnMut()> {
        add(&self.lists);
        self.most_lists.set(self.most_lists.get().max(self.lists.get()));
        OnDrop(|| self.lists.set(self.lists.get() - 1))
    }

    fn watch(&self) -> OnDrop<impl FnMut()> {
        self.watching.send_modify(|watching| *watching += 1);
        OnDrop(|| self.watching.send_modify(|watching| *watching -= 1))
    }

    /// Whether this many watch within [`LONGEST`].
    async fn are_watching(&self, all: u32) -> bool {
        let mut watching = self.watching.subscribe();
        timeout(LONGEST, watching.wait_for(|watching| *watching == all)).await.is_ok()
    }
}

/// Lists and watches until it is dropped.
async fn inform(from: Ipv4Addr, service: Real, figures: Rc<Figures>, mut known: Option<String>) {
    loop {
        let connected = insist(
            async || service.connect(from).await,
            |failed| match failed {
                Failed::TimedOut => add(&figures.timed_out),
                Failed::Rejected => add(&figures.refused),
            },
        );
        match follow(&mut connected.await, &figures, known.take()).await {
            Ok(()) | Err(Ended::Watch) => {}
            Err(Ended::List) => add(&figures.refused),
            Err(Ended::Unanswered) => add(&figures.timed_out),
        }
        sleep(RETRY).await;
    }
}

/// What ended without an answer.
enum Ended {
    List,
    Watch,
    Unanswered,
}

async fn follow(visit: &mut Visit, figures: &Figures, known: Option<String>) -> Result<(), Ended> {
    let revision = match known {
        Some(revision) => revision,
        None => loop {
            match timeout(LIST_WITHIN, list(visit, figures)).await {
                Ok(Ok(Some(revision))) => break revision,
                // 429: it retries on the same connection.
                Ok(Ok(None)) => add(&figures.rejected),
                Ok(Err(_)) => return Err(Ended::List),
                Err(_) => return Err(Ended::Unanswered),
            }
            sleep(RETRY).await;
        },
    };
    let path = format!("{PATH}?watch=true&resourceVersion={revision}&{WATCH_FOR}");
    let mut answer = loop {
        let answer = timeout(LIST_WITHIN, visit.get(&path)).await.map_err(|_| Ended::Unanswered)?;
        let answer = answer.map_err(|_| Ended::Watch)?;
        match answer.status {
            200 => break answer,
            // Too many requests: it retries from the same revision.
            429 => add(&figures.rejected),
            _ => return Err(Ended::Watch),
        }
        sleep(RETRY).await;
    };
    let _watching = figures.watch();
    if figures.first.get().is_none() {
        figures.first.set(Some(Instant::now()));
    }
    while let Ok(Some(_)) = answer.next().await {}
    Ok(())
}

/// Lists from the watch cache, as client-go does first: the revision, or none if the list was rejected.
async fn list(visit: &mut Visit, figures: &Figures) -> Result<Option<String>, Failure> {
    let _in_flight = figures.list();
    let mut answer = visit.get(&format!("{PATH}?resourceVersion=0")).await?;
    let mut head = Vec::new();
    while let Some(piece) = answer.next().await? {
        // The revision comes before the objects.
        if head.len() < 200 {
            head.extend_from_slice(&piece);
        }
    }
    let revision = revision(&String::from_utf8_lossy(&head)).filter(|_| answer.status == 200);
    if revision.is_some() {
        add(&figures.listed);
    }
    Ok(revision)
}

fn revision(list: &str) -> Option<String> {
    let (_, rest) = list.split_once(r#""resourceVersion":""#)?;
    rest.split_once('"').map(|(revision, _)| revision.to_owned())
}

/// Creates the objects, if they are not there.
async fn create_objects(plane: &ControlPlane) -> Result<()> {
    let mut admin = plane.admin().await?;
    for number in 0..OBJECTS {
        let body = json!({
            "kind": "ConfigMap", "apiVersion": "v1",
            "metadata": {"name": format!("storm-{number}")}, "data": {"text": "x".repeat(SIZE)},
        });
        let answer = admin.create(PATH, body.to_string()).await?;
        if ![201, 409].contains(&answer.status) {
            bail!("cannot create a ConfigMap: status {}", answer.status);
        }
        answer.rest().await?;
    }
    Ok(())
}

pub(super) async fn run(options: &StormOptions, gate: &str, cpus: &Cpus, plane: &ControlPlane) -> Result<Round> {
    let old = plane.ready_apiserver(cpus).await?;
    create_objects(plane).await?;
    let directory = directory()?;
    let berth = plane.berth(options, gate, directory.path()).await?;
    let service = plane.service()?;
    let mut visit = timeout(TIMEOUT, service.connect(NODE)).await.context("berth does not serve")??;
    let listed = list(&mut visit, &Figures::default()).await?.context("a list without a revision")?;
    let figures = Rc::new(Figures::default());
    let mut informers = JoinSet::new();
    for number in 0..options.informers {
        let from = source(number % options.sources);
        informers.spawn_local(inform(from, service.clone(), figures.clone(), Some(listed.clone())));
        sleep(SPACED).await;
    }
    if !figures.are_watching(options.informers).await {
        bail!("{} of {} informers watch before the restart", *figures.watching.borrow(), options.informers);
    }

    for cell in [&figures.most_lists, &figures.listed, &figures.timed_out, &figures.rejected, &figures.refused] {
        cell.set(0);
    }
    let before = old.peak()?;
    old.end().await;
    if !figures.are_watching(0).await {
        bail!("{} informers watch an instance that has ended", *figures.watching.borrow());
    }
    figures.first.set(None);
    let started = Instant::now();
    let new = plane.apiserver(cpus)?;
    let in_time = figures.are_watching(options.informers).await;
    let all = Instant::now();
    let since = |then: Instant| if in_time { (all - then).as_secs_f64() } else { f64::INFINITY };
    let watching = *figures.watching.borrow();
    let peak = new.peak()?;
    informers.shutdown().await;
    show_warnings(&berth);
    drop(berth);
    let failed = new.failed_handshakes(&mut plane.admin().await?).await?;
    let first = figures.first.get().context("no informer watches")?;
    let count = |cell: &Cell<u32>| f64::from(cell.get());
    Ok(Round {
        figures: vec![
            ("informers that watch again", f64::from(watching)),
            ("s from its start until all do", since(started)),
            ("s from the first that does to the last", since(first)),
            ("most lists in flight", count(&figures.most_lists)),
            ("peak memory of the new kube-apiserver, MiB", peak),
            ("of the one before, from which all watched without a list, MiB", before),
            ("lists that were answered", count(&figures.listed)),
            ("lists and watches that were rejected", count(&figures.rejected)),
            ("times that one gave up", count(&figures.timed_out)),
            ("times that one was refused or reset", count(&figures.refused)),
            ("handshakes that failed at kube-apiserver", failed),
        ],
        ..Round::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_a_revision() {
        let list = r#"{"kind":"ConfigMapList","metadata":{"resourceVersion":"271"},"items":[{"metadata":{"resourceVersion":"3"}}]}"#;
        assert_eq!(revision(list).as_deref(), Some("271"));
        assert_eq!(revision("{}"), None);
    }
}
