//! A kube-apiserver is restarted under informers: each lists and watches, as the reflector of client-go, and again when its watch has ended.
//!
//! Before the restart each only watches, from where one list was: that list is not what is measured.

use crate::clients::{AGAIN, PATIENCE};
use crate::process::Processors;
use crate::real::{ControlPlane, Real, tell};
use crate::storms::source;
use crate::{Cli, LONGEST, NODE, Round};
use anyhow::{Context, Result, anyhow, bail};
use berth_rehearse::load::Visit;
use berth_rehearse::record::Failure;
use serde_json::json;
use std::cell::Cell;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// What is listed: so many ConfigMaps, each with so many bytes.
const OBJECTS: usize = 500;
const SIZE: usize = 1500;
const PATH: &str = "/api/v1/namespaces/default/configmaps";

/// kube-apiserver's own bound of a list.
const LIST_WITHIN: Duration = Duration::from_secs(60);

/// Longer than all of it takes.
const WATCH_FOR: &str = "timeoutSeconds=3600";

/// Time between two informers before the restart.
const SPACED: Duration = Duration::from_millis(5);

/// What the informers do and did, all on one thread.
struct Seen {
    watching: watch::Sender<u32>,
    first: Cell<Option<Instant>>,
    lists: Cell<u32>,
    most_lists: Cell<u32>,
    listed: Cell<u32>,
    gave_up: Cell<u32>,
    rejected: Cell<u32>,
    refused: Cell<u32>,
}

fn add(to: &Cell<u32>) {
    to.set(to.get() + 1);
}

/// Takes back what it counted when it is dropped.
struct Counted<F: FnMut()>(F);

impl<F: FnMut()> Drop for Counted<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Seen {
    fn new() -> Rc<Self> {
        Rc::new(Self {
            watching: watch::channel(0).0,
            first: Cell::default(),
            lists: Cell::default(),
            most_lists: Cell::default(),
            listed: Cell::default(),
            gave_up: Cell::default(),
            rejected: Cell::default(),
            refused: Cell::default(),
        })
    }

    /// A list is in flight.
    fn list(&self) -> Counted<impl FnMut()> {
        add(&self.lists);
        self.most_lists.set(self.most_lists.get().max(self.lists.get()));
        Counted(|| self.lists.set(self.lists.get() - 1))
    }

    fn watch(&self) -> Counted<impl FnMut()> {
        self.watching.send_modify(|watching| *watching += 1);
        Counted(|| self.watching.send_modify(|watching| *watching -= 1))
    }

    /// Whether so many watch before [`LONGEST`] is over.
    async fn are_watching(&self, all: u32) -> bool {
        let mut watching = self.watching.subscribe();
        timeout(LONGEST, watching.wait_for(|watching| *watching == all)).await.is_ok()
    }
}

/// Lists and watches for as long as it is let.
async fn inform(from: Ipv4Addr, service: Real, seen: Rc<Seen>, mut known: Option<String>) {
    loop {
        match timeout(PATIENCE, service.connect(from)).await {
            Ok(Ok(mut open)) => match follow(&mut open, &seen, known.take()).await {
                Ok(()) | Err(Ended::Watch) => {}
                Err(Ended::List) => add(&seen.refused),
                Err(Ended::Unanswered) => add(&seen.gave_up),
            },
            Ok(Err(_)) => add(&seen.refused),
            Err(_) => add(&seen.gave_up),
        }
        sleep(AGAIN).await;
    }
}

/// What of it ended without an answer.
enum Ended {
    List,
    Watch,
    Unanswered,
}

async fn follow(open: &mut Visit, seen: &Seen, known: Option<String>) -> Result<(), Ended> {
    let revision = match known {
        Some(revision) => revision,
        None => loop {
            match timeout(LIST_WITHIN, list(open, seen)).await {
                Ok(Ok(Some(revision))) => break revision,
                // It is to come again, and keeps the connection.
                Ok(Ok(None)) => add(&seen.rejected),
                Ok(Err(_)) => return Err(Ended::List),
                Err(_) => return Err(Ended::Unanswered),
            }
            sleep(AGAIN).await;
        },
    };
    let path = format!("{PATH}?watch=true&resourceVersion={revision}&{WATCH_FOR}");
    let mut answer = loop {
        let answer = timeout(LIST_WITHIN, open.get(&path)).await.map_err(|_| Ended::Unanswered)?;
        let answer = answer.map_err(|_| Ended::Watch)?;
        match answer.status {
            200 => break answer,
            // Too many at once: again, from the same revision.
            429 => add(&seen.rejected),
            _ => return Err(Ended::Watch),
        }
        sleep(AGAIN).await;
    };
    let _watching = seen.watch();
    if seen.first.get().is_none() {
        seen.first.set(Some(Instant::now()));
    }
    while let Ok(Some(_)) = answer.next().await {}
    Ok(())
}

/// The revision of what it lists from the watch cache, as client-go does first; none if it was rejected.
async fn list(open: &mut Visit, seen: &Seen) -> Result<Option<String>, Failure> {
    let _in_flight = seen.list();
    let mut answer = open.get(&format!("{PATH}?resourceVersion=0")).await?;
    let mut head = Vec::new();
    while let Some(piece) = answer.next().await? {
        // It is in what comes before the objects.
        if head.len() < 200 {
            head.extend_from_slice(&piece);
        }
    }
    let revision = revision(&String::from_utf8_lossy(&head)).filter(|_| answer.status == 200);
    if revision.is_some() {
        add(&seen.listed);
    }
    Ok(revision)
}

fn revision(list: &str) -> Option<String> {
    let (_, rest) = list.split_once(r#""resourceVersion":""#)?;
    rest.split_once('"').map(|(revision, _)| revision.to_owned())
}

/// Writes what is listed, if it is not there.
async fn stock(plane: &ControlPlane) -> Result<()> {
    let mut admin = plane.admin().await?;
    for number in 0..OBJECTS {
        let body = json!({
            "kind": "ConfigMap", "apiVersion": "v1",
            "metadata": {"name": format!("storm-{number}")}, "data": {"text": "x".repeat(SIZE)},
        });
        let answer = admin.create(PATH, body.to_string()).await.map_err(|failure| anyhow!("{failure}"))?;
        if ![201, 409].contains(&answer.status) {
            bail!("cannot write a ConfigMap: status {}", answer.status);
        }
        answer.rest().await.map_err(|failure| anyhow!("{failure}"))?;
    }
    Ok(())
}

pub(crate) async fn run(cli: &Cli, gate: &str, processors: &Processors, plane: &ControlPlane) -> Result<Round> {
    let old = plane.apiserver(processors).await?;
    stock(plane).await?;
    let directory = tempfile::Builder::new().prefix("berth-storm-").tempdir()?;
    let berth = plane.berth(cli, gate, directory.path())?;
    let (service, alone) = (plane.service()?, Seen::new());
    let open = timeout(PATIENCE, service.connect(NODE)).await.context("berth does not serve")?;
    let mut open = open.map_err(|failure| anyhow!("{failure}"))?;
    let listed = list(&mut open, &alone).await.map_err(|failure| anyhow!("{failure}"))?;
    let listed = listed.context("a list without a revision")?;
    let seen = Seen::new();
    let mut informers = JoinSet::new();
    for number in 0..cli.informers {
        let from = source(number % cli.sources);
        informers.spawn_local(inform(from, service.clone(), seen.clone(), Some(listed.clone())));
        sleep(SPACED).await;
    }
    if !seen.are_watching(cli.informers).await {
        bail!("{} of {} informers watch before the restart", *seen.watching.borrow(), cli.informers);
    }

    for cell in [&seen.most_lists, &seen.listed, &seen.gave_up, &seen.rejected, &seen.refused] {
        cell.set(0);
    }
    seen.first.set(None);
    let before = old.peak()?;
    old.end().await?;
    if !seen.are_watching(0).await {
        bail!("{} informers watch an instance that has ended", *seen.watching.borrow());
    }
    seen.first.set(None);
    let started = Instant::now();
    let new = plane.begin(processors)?;
    let in_time = seen.are_watching(cli.informers).await;
    let all = Instant::now();
    let since = |then: Instant| if in_time { (all - then).as_secs_f64() } else { f64::INFINITY };
    let watching = *seen.watching.borrow();
    let peak = new.peak()?;
    informers.shutdown().await;
    tell(&berth);
    drop(berth);
    let failed = new.failed_handshakes(&mut plane.admin().await?).await?;
    let first = seen.first.get().context("nobody watched")?;
    Ok(Round {
        figures: vec![
            ("informers that watch again", f64::from(watching)),
            ("s from its start until all do", since(started)),
            ("s from the first that does to the last", since(first)),
            ("most lists in flight", f64::from(seen.most_lists.get())),
            ("peak memory of the new kube-apiserver, MiB", peak),
            ("of the one before, from which all watched without a list, MiB", before),
            ("lists that were answered", f64::from(seen.listed.get())),
            ("lists and watches that were rejected", f64::from(seen.rejected.get())),
            ("times that one gave up", f64::from(seen.gave_up.get())),
            ("times that one was refused or reset", f64::from(seen.refused.get())),
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
