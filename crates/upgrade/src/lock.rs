//! The lock against upgrades of two nodes at once: a Lease in the cluster, held while a node is
//! upgraded.
//!
//! The Lease is created with POST and replaced with PUT at the `resourceVersion` that was read, so
//! only one of two racing upgrades gets the lock. The Lease records whether the holder may have
//! changed its node. A holder that changed nothing loses the lock when it stops renewing, so a
//! killed process blocks nobody. A holder that may have changed its node keeps the lock until its
//! upgrade is finished or an operator breaks the lock: no second node may be left in the middle of
//! an upgrade.
//!
//! The lock has a namespace of its own. In the namespace of the instances' Leases, every node's
//! token could remove or forge the lock.
//!
//! [`Claim`] decides, without I/O. An upgrade is identified by the UID that is drawn for it and
//! kept in its state.

use super::journal::read_node_name;
use super::progress::Progress;
use berth_cluster::client::none_if_missing;
use berth_cluster::lease::{Expiry, RENEWAL_INTERVAL, lease_object};
use berth_cluster::service::FIELD_MANAGER;
use berth_cluster::{Client, Error};
use berth_manifest::grant::objects;
use berth_node::instance_id::InstanceId;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::Mutex;
use tokio::time::sleep;

pub const LOCK_NAME: &str = "upgrade";

/// The lock's namespace. No shim has rights there.
pub const NAMESPACE: &str = "berth-upgrade";

/// Path of all Leases in the lock's namespace.
pub const LEASES_PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/berth-upgrade/leases";

pub const LOCK_PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/berth-upgrade/leases/upgrade";

/// Time limit of a request to the cluster's API.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a failed request is retried, and how often a write is retried after a conflict.
const MAX_TRIES: (u32, u32) = (2, 50);

/// Time between two tries, and between two reads while another holder has the lock.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// How long a release may take to succeed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(15);

const NODE_ANNOTATION: &str = "berth/node";
const UPGRADE_ANNOTATION: &str = "berth/upgrade";
const PROCESS_ANNOTATION: &str = "berth/process";
const COMMAND_ANNOTATION: &str = "berth/command";
const CHANGED_ANNOTATION: &str = "berth/changed";

/// An upgrade that has or wants the lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The UID that was drawn for the upgrade.
    pub upgrade: String,
    /// The node to be upgraded.
    pub node: String,
    pub process: String,
    pub command: String,
    /// True if the upgrade may have changed its node.
    pub changed: bool,
    /// Since when the upgrade has had the lock.
    pub since: String,
}

impl Holder {
    /// Describes this process, which wants to hold the lock for `upgrade`.
    pub fn from_this_process(upgrade: &InstanceId, changed: bool) -> Self {
        let words: Vec<_> = std::env::args_os()
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        Self {
            upgrade: upgrade.to_string(),
            node: read_node_name(Path::new("/proc")).unwrap_or_else(|| "?".into()),
            process: std::process::id().to_string(),
            command: words.join(" "),
            changed,
            since: String::new(),
        }
    }

    /// Parses the Lease. A Lease without the annotation "nothing was changed" may come from a later
    /// berth, and counts as changed.
    pub fn parse(object: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let annotations = &object["metadata"]["annotations"];
        Self {
            upgrade: text(&annotations[UPGRADE_ANNOTATION]),
            node: text(&annotations[NODE_ANNOTATION]),
            process: text(&annotations[PROCESS_ANNOTATION]),
            command: text(&annotations[COMMAND_ANNOTATION]),
            changed: annotations[CHANGED_ANNOTATION] != "false",
            since: text(&object["spec"]["acquireTime"]),
        }
    }

    /// Describes the holder for people.
    pub fn describe(&self) -> String {
        let Self {
            node,
            process,
            command,
            since,
            ..
        } = self;
        let since = since
            .split_once('.')
            .map_or_else(|| since.clone(), |(seconds, _)| format!("{seconds}Z"));
        format!("node {node} since {since} (process {process} there: {command})")
    }

    /// Explains why another node cannot be upgraded now, and what to do.
    pub fn describe_refusal(&self, node: &str) -> String {
        let holder = self.describe();
        if !self.changed {
            return format!(
                "the cluster's lock is held by {holder}: wait until the holder has ended"
            );
        }
        let there = &self.node;
        let fix = if there == node {
            "the holder is an upgrade of this node that began with another --state-dir: give that directory".to_owned()
        } else {
            format!(
                "wait for the end of that upgrade; if that upgrade was interrupted or ended with exit status 75, run `berth upgrade` on {there} to bring that upgrade to its end"
            )
        };
        format!(
            "the cluster's lock is held by {holder}: {fix}; --break-lock takes the lock from a node that is gone for good"
        )
    }
}

/// The next action of an upgrade that wants or has the lock.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// The lock is free: create this Lease.
    Create(Value),
    /// Replace the Lease (compare-and-swap on `resourceVersion`).
    Replace(Value),
    /// The holder may live: wait to see whether it renews the Lease.
    Wait(Holder),
    /// The holder lives, or has changed its node.
    Refuse(Holder),
}

/// Decides the next action of an upgrade about the lock.
#[derive(Debug)]
pub struct Claim {
    me: Holder,
    break_lock: bool,
    /// Decides whether another holder's Lease has expired, which needs several reads.
    expiry: Expiry,
    /// The `resourceVersion` of another holder's Lease when it was first read. If it changes, that
    /// holder lives.
    first: Option<Value>,
}

impl Claim {
    /// A claim by an upgrade. `break_lock` takes the lock from its holder, once.
    pub fn new(me: Holder, break_lock: bool) -> Self {
        Self {
            me,
            break_lock,
            expiry: Expiry::default(),
            first: None,
        }
    }

    /// Decides what to do about the Lease as read from etcd. `now` is monotonic.
    pub fn next(&mut self, now: Duration, time: SystemTime, read: Option<&Value>) -> Decision {
        let Some(object) = read else {
            (self.expiry, self.first) = (Expiry::default(), None);
            return Decision::Create(self.make_lease_object(None, time));
        };
        let holder = Holder::parse(object);
        if holder.upgrade == self.me.upgrade || self.break_lock {
            return Decision::Replace(self.make_lease_object(Some(object), time));
        }
        if holder.changed {
            return Decision::Refuse(holder);
        }
        self.expiry.record_list(now, RENEWAL_INTERVAL, [object]);
        let version = &object["metadata"]["resourceVersion"];
        if self.expiry.is_expired(LOCK_NAME) {
            Decision::Replace(self.make_lease_object(Some(object), time))
        } else if self.first.get_or_insert_with(|| version.clone()) == version {
            Decision::Wait(holder)
        } else {
            Decision::Refuse(holder)
        }
    }

    /// Records that the Lease could not be read.
    pub fn record_read_failure(&mut self) {
        self.expiry.record_failure();
    }

    /// Records that this upgrade holds the lock. Earlier holders and `break_lock` no longer count.
    pub fn record_lock_held(&mut self) {
        (self.break_lock, self.expiry, self.first) = (false, Expiry::default(), None);
    }

    fn make_lease_object(&self, before: Option<&Value>, time: SystemTime) -> Value {
        let Holder {
            upgrade,
            node,
            process,
            command,
            changed,
            ..
        } = &self.me;
        let annotations = json!({NODE_ANNOTATION: node, UPGRADE_ANNOTATION: upgrade, PROCESS_ANNOTATION: process, COMMAND_ANNOTATION: command, CHANGED_ANNOTATION: changed.to_string()});
        let identity = format!("{node}_{upgrade}");
        let mut object = lease_object(
            [NAMESPACE, LOCK_NAME, "upgrade"],
            &annotations,
            &identity,
            [time; 2],
            0,
        );
        if let Some(before) = before {
            let spec = &before["spec"];
            object["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"].clone();
            if Holder::parse(before).upgrade == *upgrade {
                object["spec"]["acquireTime"] = spec["acquireTime"].clone();
                object["spec"]["leaseTransitions"] = spec["leaseTransitions"].clone();
            } else {
                object["spec"]["leaseTransitions"] =
                    json!(spec["leaseTransitions"].as_u64().unwrap_or(0) + 1);
            }
        }
        object
    }
}

/// Why the lock was not acquired.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error("{}", holder.describe_refusal(node))]
    Busy { holder: Holder, node: String },
    /// The cluster's API failed.
    #[error(transparent)]
    Api(#[from] Error),
}

/// The lock of a cluster.
#[derive(Debug)]
pub struct Lock {
    client: Client,
    began: Instant,
    /// The mutex is locked during a request, so that requests never overlap: a late renewal could
    /// bring back a released lock.
    claim: Mutex<Claim>,
}

impl Lock {
    /// Makes the lock of a cluster, without a request. `client` must have an administrator's
    /// rights.
    pub fn new(client: &Client, claim: Claim) -> Self {
        let client = client.clone().with_patience(REQUEST_TIMEOUT);
        Self {
            client,
            began: Instant::now(),
            claim: Mutex::new(claim),
        }
    }

    /// Acquires the lock. Takes up to 40 s if the holder was killed before it changed anything.
    ///
    /// # Errors
    /// Another upgrade holds the lock, or the Lease cannot be read or written.
    pub async fn acquire(&self, progress: &Progress) -> Result<(), LockError> {
        let mut claim = self.claim.lock().await;
        let mut waited = None;
        loop {
            match (self.try_to_take_lock(&mut claim).await, waited.take()) {
                (Ok(None), _) => return Ok(()),
                (Ok(Some(holder)), _) => {
                    progress.print_wait(&format!(
                        "the cluster's lock is held by {}: within 40 s berth knows whether this holder still runs",
                        holder.describe()
                    ));
                    waited = Some(holder);
                    sleep(RETRY_PAUSE).await;
                }
                // An earlier read found the lock's holder, so the error names the holder and not
                // the API's failure.
                (Err(LockError::Api(_)), Some(holder)) => {
                    return Err(LockError::Busy {
                        holder,
                        node: claim.me.node.clone(),
                    });
                }
                (Err(error), _) => return Err(error),
            }
        }
    }

    /// Marks in the Lease that the node will be changed. From here on no other upgrade can take the
    /// lock.
    ///
    /// # Errors
    /// Another upgrade got the lock meanwhile, or the cluster does not answer. Nothing may be
    /// changed.
    pub async fn mark_node_changed(&self, progress: &Progress) -> Result<(), LockError> {
        self.claim.lock().await.me.changed = true;
        self.acquire(progress).await
    }

    /// Renews the lock until the future is dropped. API failures are not reported: once this
    /// upgrade is marked as having changed its node, no other upgrade can take the lock.
    pub async fn keep_renewed(&self, progress: &Progress) {
        let mut warned = false;
        loop {
            sleep(RENEWAL_INTERVAL).await;
            let mut claim = self.claim.lock().await;
            match self.try_to_take_lock(&mut claim).await {
                Err(LockError::Busy { holder, .. }) if !warned => {
                    progress.print_line(&format!(
                        "warning: the cluster's lock was taken by {}: two nodes are upgraded at once",
                        holder.describe()
                    ));
                    warned = true;
                }
                _ => {}
            }
        }
    }

    pub async fn release(&self, progress: &Progress) {
        let claim = self.claim.lock().await;
        // `wait::ask_until` cannot be used here: its future is not `Send`.
        let began = tokio::time::Instant::now();
        let removed = loop {
            match self.remove_lease(&claim.me.upgrade).await {
                Err(_) if began.elapsed() < RELEASE_TIMEOUT => sleep(RETRY_PAUSE).await,
                removed => break removed,
            }
        };
        if let Err(error) = removed {
            progress.print_line(&format!(
                "warning: the cluster's lock cannot be released: {error}"
            ));
            progress.print_detail(&format!(
                "no other node can be upgraded until `kubectl delete lease {LOCK_NAME} --namespace {NAMESPACE}`"
            ));
        }
    }

    async fn remove_lease(&self, upgrade: &str) -> Result<(), Error> {
        match none_if_missing(self.client.get(LOCK_PATH).await)? {
            Some(object) if Holder::parse(&object).upgrade == upgrade => {
                none_if_missing(self.client.delete_unchanged(LOCK_PATH, &object).await).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Reads the Lease, decides, and writes the Lease if the decision says so. Returns `None` if
    /// this upgrade holds the lock now, and otherwise the other holder, which may still live.
    async fn try_to_take_lock(&self, claim: &mut Claim) -> Result<Option<Holder>, LockError> {
        let mut tries = (0, 0);
        loop {
            let done = match self.read_and_decide(claim).await {
                Ok(Decision::Create(object)) => self.create_lease(&object).await,
                Ok(Decision::Replace(object)) => {
                    self.client.put(LOCK_PATH, &object).await.map(drop)
                }
                Ok(Decision::Wait(holder)) => return Ok(Some(holder)),
                Ok(Decision::Refuse(holder)) => {
                    return Err(LockError::Busy {
                        holder,
                        node: claim.me.node.clone(),
                    });
                }
                Err(error) => Err(error),
            };
            match done {
                Ok(()) => {
                    claim.record_lock_held();
                    return Ok(None);
                }
                Err(error)
                    if error.status() == Some(StatusCode::CONFLICT) && tries.1 < MAX_TRIES.1 =>
                {
                    tries.1 += 1;
                }
                Err(error) if tries.0 == MAX_TRIES.0 || is_forbidden(&error) => {
                    return Err(error.into());
                }
                // If only the answer to a write was lost, the next read of the Lease shows that.
                Err(_) => tries.0 += 1,
            }
            sleep(RETRY_PAUSE / 4).await;
        }
    }

    async fn read_and_decide(&self, claim: &mut Claim) -> Result<Decision, Error> {
        match none_if_missing(self.client.get(LOCK_PATH).await) {
            Ok(read) => Ok(claim.next(self.began.elapsed(), SystemTime::now(), read.as_ref())),
            Err(error) => {
                claim.record_read_failure();
                Err(error)
            }
        }
    }

    /// Creates the Lease, and its namespace if necessary.
    async fn create_lease(&self, object: &Value) -> Result<(), Error> {
        let created = self.client.post(LEASES_PATH, object).await;
        let Err(error) = created else { return Ok(()) };
        if error.status() != Some(StatusCode::NOT_FOUND) {
            return Err(error);
        }
        let namespace = objects::namespace_object(NAMESPACE);
        self.client
            .apply(&objects::object_path(&namespace), FIELD_MANAGER, &namespace)
            .await?;
        self.client.post(LEASES_PATH, object).await.map(drop)
    }
}

fn is_forbidden(error: &Error) -> bool {
    matches!(
        error.status(),
        Some(StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED)
    )
}

#[cfg(test)]
mod tests;
