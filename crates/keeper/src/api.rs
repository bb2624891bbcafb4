//! Who is asked, and what comes of it: each request is counted, and each kind of failure is told once, when it begins and
//! when it is over. One that meets every request alike is told of the first.

use crate::{Count, Facts};
use berth_cluster::{Client, Error};
use berth_node::ipc::wire::ClusterStatus;
use hyper::StatusCode;
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Longest time that an answer may take: the next thing waits for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// The cluster's API, as a shim reaches it.
pub(super) struct Api {
    client: Client,
    /// What clients dial: a sibling may listen there.
    berth: SocketAddr,
    /// The Service's addresses on other nodes, as they were seen last.
    others: Mutex<Vec<SocketAddr>>,
    /// How each request fails now: the result that is counted, and a sentence.
    problems: Mutex<BTreeMap<&'static str, (&'static str, String)>>,
    facts: watch::Receiver<Facts>,
    status: watch::Sender<Option<ClusterStatus>>,
    count: Count,
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("berth", &self.berth).finish_non_exhaustive()
    }
}

impl Api {
    pub(super) fn new(
        client: Client,
        berth: SocketAddr,
        facts: watch::Receiver<Facts>,
        status: watch::Sender<Option<ClusterStatus>>,
        count: Count,
    ) -> Self {
        let client = client.with_patience(PATIENCE);
        Self { client, berth, others: Mutex::default(), problems: Mutex::default(), facts, status, count }
    }

    /// Dials the own instance if it is ready, else the berth, else another node.
    pub(super) fn client(&self) -> Client {
        let own = self.facts.borrow().instances.iter().find(|own| own.ready).map(|own| own.address);
        let others = lock(&self.others);
        self.client.clone().at(own.into_iter().chain([self.berth]).chain(others.iter().copied()))
    }

    pub(super) fn set_others(&self, others: Vec<SocketAddr>) {
        *lock(&self.others) = others;
    }

    /// The answer, if there is one; `request` is a word of this code.
    pub(super) fn note<T>(&self, request: &'static str, answer: Result<T, Error>) -> Option<T> {
        self.noted(request, answer.as_ref().err());
        answer.ok()
    }

    /// How a request ended.
    pub(super) fn noted(&self, request: &'static str, failure: Option<&Error>) {
        let result = match failure.map(Error::status) {
            None => "ok",
            Some(None) => "unreachable",
            Some(Some(StatusCode::UNAUTHORIZED)) => "unauthorized",
            Some(Some(StatusCode::FORBIDDEN)) => "forbidden",
            Some(Some(_)) => "failed",
        };
        (self.count)(request, result);
        let mut problems = lock(&self.problems);
        match failure {
            None => {
                if problems.remove(request).is_some_and(|(before, _)| !told(&problems, before)) {
                    tracing::info!(request, "the cluster's API takes this request again");
                }
            }
            Some(error) => {
                let help = help(result);
                let told = told(&problems, result);
                // What changes with each try (a port, a time) is no other failure.
                let before = problems.insert(request, (result, format!("{error}{help}")));
                if !told && before.is_none_or(|(before, _)| before != result) {
                    tracing::warn!(request, "{error}{help}");
                }
            }
        }
        let problems: Vec<_> = problems.iter().map(|(request, (_, why))| format!("{request}: {why}")).collect();
        self.status.send_if_modified(|status| {
            let Some(status) = status else { return false };
            std::mem::replace(&mut status.problems, problems.clone()) != problems
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a failure that meets every request alike has met another one, of which it was said.
fn told(problems: &BTreeMap<&'static str, (&'static str, String)>, result: &str) -> bool {
    matches!(result, "unreachable" | "unauthorized") && problems.values().any(|(before, _)| *before == result)
}

/// What to do about a failure.
fn help(result: &str) -> &'static str {
    match result {
        "unauthorized" => "; help: the credentials of --cluster are not valid (any more): run berth grant again",
        "forbidden" => "; help: a Role lacks this: run berth grant again, which names all control-plane nodes",
        _ => "",
    }
}
