//! Requests to the cluster's API. Each request is counted. Each failure is logged once when it
//! begins, and once when it has ended. A failure that affects every request is logged for the first
//! request only.

use crate::{Count, Credentials, Facts};
use berth_cluster::kubeconfig::Mistake;
use berth_cluster::{Client, Error};
use berth_node::ipc::wire::ClusterStatus;
use berth_os::explained;
use berth_os::off_thread::OffThread;
use hyper::StatusCode;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which a failure that did not recur counts as over, because the request is not needed
/// any more. Longer than the time between two checks of the token.
const FORGOTTEN: Duration = Duration::from_secs(900);

/// The cluster's API, as a shim reaches it.
pub(crate) struct Api {
    credentials: Credentials,
    /// Reads the credentials' files on another thread: a disk that etcd keeps busy may take
    /// seconds, and the probing thread cannot wait so long.
    files: OffThread,
    /// The address that clients dial. A sibling may listen there.
    berth: SocketAddr,
    /// The Service's addresses on other nodes, from the last read.
    others: Mutex<Vec<SocketAddr>>,
    problems: Mutex<BTreeMap<String, Problem>>,
    facts: watch::Receiver<Facts>,
    status: watch::Sender<Option<ClusterStatus>>,
    count: Count,
}

/// Why a kind of request to the API fails, until one of that kind succeeds.
#[derive(Debug)]
struct Problem {
    /// The result, as in the metric's label.
    result: &'static str,
    why: String,
    last: Instant,
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api")
            .field("berth", &self.berth)
            .finish_non_exhaustive()
    }
}

impl Api {
    pub(crate) fn new(
        credentials: Credentials,
        berth: SocketAddr,
        facts: watch::Receiver<Facts>,
        status: watch::Sender<Option<ClusterStatus>>,
        count: Count,
    ) -> Self {
        let (files, others, problems) = (
            OffThread::new("the credentials' files"),
            Mutex::default(),
            Mutex::default(),
        );
        Self {
            credentials,
            files,
            berth,
            others,
            problems,
            facts,
            status,
            count,
        }
    }

    /// Returns a client that dials a ready instance of the shim, or else the berth, or else another
    /// node. The credentials' files are read for each request, because renewals replace them.
    ///
    /// # Errors
    /// The credentials cannot be used.
    pub(crate) async fn client(&self) -> Result<Client, Error> {
        let credentials = self.credentials.clone();
        let read = self.with_files(move || credentials.read()).await;
        let read = read.map_err(|error| {
            Mistake::new("file", &error.to_string()).of(self.credentials.path())
        })?;
        let client = read?.with_patience(TIMEOUT);
        let own = self
            .facts
            .borrow()
            .instances
            .iter()
            .find(|own| own.ready)
            .map(|own| own.address);
        Ok(client.at(own
            .into_iter()
            .chain([self.berth])
            .chain(lock(&self.others).iter().copied())))
    }

    pub(crate) fn set_others(&self, others: Vec<SocketAddr>) {
        *lock(&self.others) = others;
    }

    /// Makes a request and returns the response, or `None` after a failure. `request` is a label,
    /// `object` the object's name.
    pub(crate) async fn ask<T>(
        &self,
        request: &'static str,
        object: &str,
        ask: impl AsyncFnOnce(Client) -> Result<T, Error>,
    ) -> Option<T> {
        let answer = match self.client().await {
            Ok(client) => ask(client).await,
            Err(error) => Err(error),
        };
        self.record(request, object, answer.as_ref().err());
        answer.ok()
    }

    pub(crate) fn record(&self, request: &'static str, object: &str, failure: Option<&Error>) {
        let result = result_label(failure);
        (self.count)(request, result);
        let key = format!("{request} {object}");
        let now = Instant::now();
        let mut problems = lock(&self.problems);
        problems.retain(|_, problem| now.duration_since(problem.last) < FORGOTTEN);
        match failure {
            None => {
                if problems
                    .remove(&key)
                    .is_some_and(|before| !is_logged(&problems, before.result))
                {
                    tracing::info!(
                        request,
                        object,
                        "the cluster's API accepts this request again"
                    );
                }
            }
            Some(error) => {
                let why = format!("{error}{}", help_for(result));
                let logged = is_logged(&problems, result);
                // Compared by the result only: text that changes with each attempt (a port, a time)
                // is not a new failure.
                let problem = Problem {
                    result,
                    why: why.clone(),
                    last: now,
                };
                if problems
                    .insert(key, problem)
                    .is_none_or(|before| before.result != result)
                    && !logged
                {
                    tracing::warn!(code = %explained::CLUSTER_REFUSES, request, object, "{why}");
                }
            }
        }
        self.publish(&problems);
    }

    /// Forgets the failure of a request that is not needed any more.
    pub(crate) fn forget(&self, request: &'static str, object: &str) {
        let mut problems = lock(&self.problems);
        if problems.remove(&format!("{request} {object}")).is_some() {
            self.publish(&problems);
        }
    }

    /// Changes the keeper's part of the status.
    pub(crate) fn update_status(&self, change: impl FnOnce(&mut ClusterStatus)) {
        self.status
            .send_modify(|status| status.as_mut().map_or((), change));
    }

    /// True if the Service contains a slice of this node, as far as this shim knows.
    pub(crate) fn has_slices(&self) -> bool {
        self.status
            .borrow()
            .as_ref()
            .is_some_and(|status| !status.slices.is_empty())
    }

    /// Returns the token's file, if the shim renews the token itself and the kubeconfig can be
    /// read.
    pub(crate) async fn token(&self) -> Option<PathBuf> {
        let credentials = self.credentials.clone();
        self.with_files(move || credentials.token()).await.ok()?
    }

    /// Reads or writes files of the credentials on another thread.
    pub(crate) async fn with_files<T: Send + 'static>(
        &self,
        files: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        self.files.within(TIMEOUT, files).await
    }

    fn publish(&self, problems: &BTreeMap<String, Problem>) {
        let problems: Vec<_> = problems
            .iter()
            .map(|(request, Problem { why, .. })| format!("{request}: {why}"))
            .collect();
        self.update_status(|status| status.problems = problems);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True if a failure that affects every request was already logged for some request.
fn is_logged(problems: &BTreeMap<String, Problem>, result: &str) -> bool {
    matches!(result, "credentials" | "unreachable" | "unauthorized")
        && problems.values().any(|problem| problem.result == result)
}

fn result_label(failure: Option<&Error>) -> &'static str {
    match failure {
        None => "ok",
        Some(Error::Credentials(_)) => "credentials",
        Some(Error::Unreachable { .. }) => "unreachable",
        Some(Error::Status {
            status: StatusCode::UNAUTHORIZED,
            ..
        }) => "unauthorized",
        Some(Error::Status {
            status: StatusCode::FORBIDDEN,
            ..
        }) => "forbidden",
        Some(Error::Status { .. }) => "failed",
    }
}

/// Returns advice about a failure.
fn help_for(result: &str) -> &'static str {
    match result {
        "credentials" | "unauthorized" => {
            "; help: run berth grant again (in-cluster: see the pod's service account), the shim reads its files for each request"
        }
        "forbidden" => {
            "; help: a Role does not allow this request: run berth grant again, which names all control-plane nodes (in-cluster: apply the Roles \
             again)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn failed(status: StatusCode) -> Error {
        let path = "/x".to_owned();
        Error::Status {
            server: "s".into(),
            status,
            method: hyper::Method::GET,
            path,
            message: "no".into(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_problem_is_shown_until_it_ends_or_is_forgotten() {
        let status = watch::Sender::new(Some(ClusterStatus::default()));
        let seen = status.subscribe();
        let (facts, credentials) = (
            watch::channel(Facts::default()).1,
            Credentials::Kubeconfig("/nonexistent".into()),
        );
        let counted = Arc::new(Mutex::new(Vec::new()));
        let counting = counted.clone();
        let count: Count = Arc::new(move |request, result| lock(&counting).push((request, result)));
        let api = Api::new(
            credentials,
            "10.0.0.5:6443".parse().unwrap(),
            facts,
            status,
            count,
        );
        let problems = || seen.borrow().as_ref().unwrap().problems.clone();
        api.record("apply_lease", "a", Some(&failed(StatusCode::FORBIDDEN)));
        api.record("apply_lease", "b", None);
        assert!(
            problems().len() == 1 && problems()[0].starts_with("apply_lease a: s answers 403"),
            "{:?}",
            problems()
        );
        assert!(problems()[0].ends_with("apply the Roles again)"));
        api.record("apply_lease", "a", None);
        assert_eq!(problems(), [""; 0]);
        api.record("renew_token", "t", Some(&failed(StatusCode::UNAUTHORIZED)));
        api.forget("renew_token", "t");
        assert_eq!(problems(), [""; 0]);
        api.record(
            "delete_slice",
            "gone",
            Some(&failed(StatusCode::INTERNAL_SERVER_ERROR)),
        );
        tokio::time::advance(FORGOTTEN).await;
        let missing = api.client().await.unwrap_err();
        api.record("list_leases", "", Some(&missing));
        assert!(
            problems().len() == 1 && problems()[0].contains("kubeconfig /nonexistent"),
            "{:?}",
            problems()
        );
        assert_eq!(lock(&counted).last(), Some(&("list_leases", "credentials")));
    }
}
