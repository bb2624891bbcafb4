//! Keeps etcd's other members usable while a bridge is on. Holds the cluster's lock, which keeps
//! other nodes from being upgraded. Before COMMAND, checks the members again and moves the
//! leadership away from this node. Runs as a separate task, since an answer of a member may take
//! seconds.

use super::members::MemberChoice;
use super::types::Sample;
use super::{Cluster, EtcdPlan};
use berth_cluster::Client;
use berth_upgrade::lock::{Claim, Holder, Lock, LockError};
use berth_upgrade::pod::draw_uid;
use berth_upgrade::progress::Progress;
use std::net::SocketAddr;
use tokio::sync::watch;

/// The risk of a bridge without the cluster's lock.
const UNLOCKED_RISK: &str = "another control-plane node may be under a bridge or be upgraded meanwhile, and etcd \
     would lose its majority";

/// How far etcd is prepared for COMMAND.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EtcdState {
    /// True if COMMAND may begin.
    pub prepared: bool,
    /// The reason why COMMAND can never begin under this bridge.
    pub refused: Option<String>,
    /// Notes for the operator, in sentences.
    pub notes: Vec<String>,
}

/// Handle of the task that keeps etcd's other members usable. The task ends when the handle is
/// dropped.
#[derive(Debug)]
pub struct Keeping {
    prepare: watch::Sender<bool>,
    state: watch::Receiver<EtcdState>,
}

impl Keeping {
    /// Checks the members again and moves the leadership away, since COMMAND is about to begin.
    pub fn request_preparation(&self) {
        self.prepare
            .send_if_modified(|wanted| !std::mem::replace(wanted, true));
    }

    pub fn state(&self) -> EtcdState {
        self.state.borrow().clone()
    }
}

impl EtcdPlan {
    /// Starts the task, which first requests the cluster's lock from the kube-apiservers at
    /// `instances`. `None` if no etcd has members on other nodes.
    #[must_use]
    pub fn start(&self, instances: [SocketAddr; 2]) -> Option<Keeping> {
        let (prepare, wanted) = watch::channel(false);
        let (to, state) = watch::channel(EtcdState::default());
        let clusters = self.clusters.clone();
        if clusters.is_empty() {
            return None;
        }
        let lock = self
            .lock
            .clone()
            .map(|client| client.with_addresses(instances));
        let needs_lock = self.needs_lock;
        tokio::spawn(async move {
            let progress = Progress::default();
            let lock = match acquire_lock(lock.as_ref(), needs_lock, &progress, &to).await {
                Ok(lock) => lock,
                Err(why) => return to.send_modify(|state| state.refused = Some(why)),
            };
            let keep = prepare_and_hold_lock(&clusters, wanted, &to);
            match lock {
                None => keep.await,
                Some(lock) => {
                    tokio::select! {
                        () = keep => {}
                        () = lock.keep_renewed(&progress) => {}
                    }
                    lock.release(&progress).await;
                }
            }
        });
        Some(Keeping { prepare, state })
    }
}

/// Acquires the cluster's lock, which is marked as held by a node without changes: the lock expires
/// when the bridge no longer renews it, so a killed bridge blocks no other node for long. (While
/// this node's member is away, other nodes are blocked by their own check of the members.) `None`,
/// with a note for the operator, if the cluster refuses the lock and no operator asked for it.
///
/// # Errors
/// The bridge must not start: another node holds the lock, or the lock was asked for with
/// `--kubeconfig` and cannot be read.
async fn acquire_lock(
    client: Option<&Client>,
    needs_lock: bool,
    progress: &Progress,
    to: &watch::Sender<EtcdState>,
) -> Result<Option<Lock>, String> {
    let mut why = "the cluster's lock is not held without --kubeconfig".to_owned();
    if let Some(client) = client {
        let lock = Lock::new(
            client,
            Claim::new(Holder::from_this_process(&draw_uid()?, false), false),
        );
        match lock.acquire(progress).await {
            Ok(()) => return Ok(Some(lock)),
            Err(LockError::Api(error)) if needs_lock => {
                return Err(format!("--kubeconfig: {error}: {UNLOCKED_RISK}"));
            }
            Err(LockError::Api(error)) => why = error.to_string(),
            Err(busy) => return Err(busy.to_string()),
        }
    }
    to.send_modify(|state| state.notes.push(format!("etcd: {why}: {UNLOCKED_RISK}")));
    Ok(None)
}

async fn prepare_and_hold_lock(
    clusters: &[Cluster],
    mut wanted: watch::Receiver<bool>,
    to: &watch::Sender<EtcdState>,
) {
    if wanted.wait_for(|wanted| *wanted).await.is_err() {
        return;
    }
    for cluster in clusters {
        match cluster.prepare_cluster().await {
            Ok(note) => to.send_modify(|state| state.notes.extend(note)),
            Err(why) => {
                to.send_modify(|state| state.refused = Some(why));
                return;
            }
        }
    }
    to.send_modify(|state| state.prepared = true);
    // Hold the lock until the bridge drops its end of the channel.
    while wanted.changed().await.is_ok() {}
}

impl Cluster {
    /// Checks for the last time before COMMAND that the other members can serve, and moves the
    /// leadership. Returns a note for the operator if the leadership could not be moved.
    ///
    /// # Errors
    /// The other members are no longer a majority.
    async fn prepare_cluster(&self) -> Result<Option<String>, String> {
        let sample = self
            .gateway
            .fetch_sample(&self.own)
            .await
            .map_err(|why| format!("etcd: {why}"))?;
        let others = match sample.choose_members() {
            Ok(MemberChoice::Others(others)) => others,
            Ok(MemberChoice::Alone) => {
                return Err("etcd no longer has another member: start the bridge again".into());
            }
            Err(why) => return Err(format!("etcd: {}", why.join("; "))),
        };
        let is_used = |id: u64| others.members.iter().any(|(member, _)| member.id == id);
        if let Some((lost, _)) = self
            .others
            .members
            .iter()
            .find(|(member, _)| !is_used(member.id))
        {
            let why = others.left_out.join("; ");
            return Err(format!(
                "etcd: {}, which the bridge uses, cannot be used any more ({why}): start the bridge again",
                lost.describe()
            ));
        }
        Ok(self.move_leadership(&sample).await.err())
    }

    /// Moves the leadership if this node's member leads, to spare the cluster an election.
    async fn move_leadership(&self, sample: &Sample) -> Result<(), String> {
        let Some((to, _)) = self
            .others
            .members
            .first()
            .filter(|_| sample.leader == sample.list.by)
        else {
            return Ok(());
        };
        let moved = self.gateway.transfer_leadership(&self.own, to.id).await;
        moved.map_err(|why| {
            format!("etcd: this node's member stays the leader until it stops: {why}")
        })?;
        tracing::info!(
            to = to.describe(),
            "etcd's leadership was moved away from this node's member"
        );
        Ok(())
    }
}
