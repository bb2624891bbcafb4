//! Sends a shim's requests to the cluster's API, and counts them. Each failure is logged once when
//! it begins, and once when it has ended. A failure that affects every request is logged for the
//! first request only.

use crate::{CountRequest, Credentials, Facts};
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

/// Time limit of a request to the cluster's API.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Time after which a failure counts as over if it has not recurred, because the shim does not make
/// the request any more. The time is longer than the time between two checks of the token.
const FAILURE_LIFETIME: Duration = Duration::from_secs(900);

/// The shim's access to the cluster's API.
pub(crate) struct Api {
    credentials: Credentials,
    /// Reads the files of the credentials on another thread. A disk that etcd keeps busy may take
    /// seconds, and this thread also sends probes.
    files: OffThread,
    /// The address that clients dial. This shim or a sibling listens there.
    berth: SocketAddr,
    /// The addresses of other nodes in the Service, as read last.
    others: Mutex<Vec<SocketAddr>>,
    problems: Mutex<BTreeMap<String, Problem>>,
    facts: watch::Receiver<Facts>,
    status: watch::Sender<Option<ClusterStatus>>,
    count: CountRequest,
}

/// The reason why requests of one kind fail. The entry stays until a request of that kind succeeds.
#[derive(Debug)]
struct Problem {
    /// The kind of failure, which is also the value of the metric's label `result`.
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
        count: CountRequest,
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
        let read = self
            .run_file_access(move || credentials.read_client())
            .await;
        let read = read.map_err(|error| {
            Mistake::new("file", &error.to_string()).with_path(self.credentials.display_path())
        })?;
        let client = read?.with_patience(REQUEST_TIMEOUT);
        let own = self
            .facts
            .borrow()
            .instances
            .iter()
            .find(|own| own.ready)
            .map(|own| own.address);
        Ok(client.with_addresses(
            own.into_iter()
                .chain([self.berth])
                .chain(lock(&self.others).iter().copied()),
        ))
    }

    pub(crate) fn set_other_addresses(&self, others: Vec<SocketAddr>) {
        *lock(&self.others) = others;
    }

    /// Makes a request and returns the response, or `None` after a failure. `request` is the kind
    /// of request, for the metric; `object` is the object's name.
    pub(crate) async fn make_request<T>(
        &self,
        request: &'static str,
        object: &str,
        ask: impl AsyncFnOnce(Client) -> Result<T, Error>,
    ) -> Option<T> {
        let answer = match self.client().await {
            Ok(client) => ask(client).await,
            Err(error) => Err(error),
        };
        self.record_result(request, object, answer.as_ref().err());
        answer.ok()
    }

    pub(crate) fn record_result(
        &self,
        request: &'static str,
        object: &str,
        failure: Option<&Error>,
    ) {
        let result = result_label(failure);
        (self.count)(request, result);
        let key = format!("{request} {object}");
        let now = Instant::now();
        let mut problems = lock(&self.problems);
        problems.retain(|_, problem| now.duration_since(problem.last) < FAILURE_LIFETIME);
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
                let why = format!("{error}{}", suggest_fix(result));
                let logged = is_logged(&problems, result);
                // Two failures with the same `result` are the same problem. Their texts may differ
                // by a port or a time.
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
        self.publish_problems(&problems);
    }

    /// Forgets the failure of a request that the shim does not make any more.
    pub(crate) fn forget_failure(&self, request: &'static str, object: &str) {
        let mut problems = lock(&self.problems);
        if problems.remove(&format!("{request} {object}")).is_some() {
            self.publish_problems(&problems);
        }
    }

    /// Changes the part of the shim's status that is about the cluster's API.
    pub(crate) fn update_status(&self, change: impl FnOnce(&mut ClusterStatus)) {
        self.status
            .send_modify(|status| status.as_mut().map_or((), change));
    }

    /// True if this shim knows that the Service contains a slice of this node.
    pub(crate) fn has_slices(&self) -> bool {
        self.status
            .borrow()
            .as_ref()
            .is_some_and(|status| !status.slices.is_empty())
    }

    /// Returns the path of the token's file. `None` if the kubelet renews the token, or the
    /// kubeconfig cannot be read.
    pub(crate) async fn token_path(&self) -> Option<PathBuf> {
        let credentials = self.credentials.clone();
        self.run_file_access(move || credentials.token_path())
            .await
            .ok()?
    }

    /// Runs a function that reads or writes files of the credentials, on another thread.
    pub(crate) async fn run_file_access<T: Send + 'static>(
        &self,
        files: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        self.files.call_within(REQUEST_TIMEOUT, files).await
    }

    fn publish_problems(&self, problems: &BTreeMap<String, Problem>) {
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

/// True if a failure of this kind affects every request and is already logged for one of them.
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

/// Returns the advice that a log line adds to a failure.
fn suggest_fix(result: &str) -> &'static str {
    match result {
        "credentials" | "unauthorized" => {
            "; help: run berth grant again (in-cluster: see the pod's service account); the shim reads the new files at the next request"
        }
        "forbidden" => {
            "; help: a Role does not allow this request: run berth grant again, so that the Role names all control-plane nodes (in-cluster: apply the Roles \
             again)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn error_with_status(status: StatusCode) -> Error {
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
        let count: CountRequest =
            Arc::new(move |request, result| lock(&counting).push((request, result)));
        let api = Api::new(
            credentials,
            "10.0.0.5:6443".parse().unwrap(),
            facts,
            status,
            count,
        );
        let problems = || seen.borrow().as_ref().unwrap().problems.clone();
        api.record_result(
            "apply_lease",
            "a",
            Some(&error_with_status(StatusCode::FORBIDDEN)),
        );
        api.record_result("apply_lease", "b", None);
        assert!(
            problems().len() == 1 && problems()[0].starts_with("apply_lease a: s answers 403"),
            "{:?}",
            problems()
        );
        assert!(problems()[0].ends_with("apply the Roles again)"));
        api.record_result("apply_lease", "a", None);
        assert_eq!(problems(), [""; 0]);
        api.record_result(
            "renew_token",
            "t",
            Some(&error_with_status(StatusCode::UNAUTHORIZED)),
        );
        api.forget_failure("renew_token", "t");
        assert_eq!(problems(), [""; 0]);
        api.record_result(
            "delete_slice",
            "gone",
            Some(&error_with_status(StatusCode::INTERNAL_SERVER_ERROR)),
        );
        tokio::time::advance(FAILURE_LIFETIME).await;
        let missing = api.client().await.unwrap_err();
        api.record_result("list_leases", "", Some(&missing));
        assert_eq!(problems().len(), 1, "{:?}", problems());
        assert_eq!(lock(&counted).last(), Some(&("list_leases", "credentials")));
    }
}
