//! The members of etcd while a bridge is on: the cluster's lock, and before COMMAND a check of the
//! members and a move of the leadership. Runs as a separate task, since an answer may take seconds.

use super::members::Choice;
use super::types::Sample;
use super::{Cluster, EtcdPlan};
use berth_cluster::Client;
use berth_upgrade::lock::{Claim, Holder, Lock, LockError};
use berth_upgrade::pod::draw_uid;
use berth_upgrade::progress::Progress;
use std::net::SocketAddr;
use tokio::sync::watch;

/// The risk of a bridge without the cluster's lock.
const UNLOCKED: &str = "nothing keeps another control-plane node from being under a bridge or upgraded meanwhile, with which etcd would \
                        lose its majority";

/// State of the preparations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EtcdState {
    /// True if COMMAND may begin.
    pub prepared: bool,
    /// The reason why COMMAND can never begin under this bridge.
    pub refused: Option<String>,
    /// Notes for the operator, in sentences.
    pub notes: Vec<String>,
}

/// Handle of the task, which runs until the handle is dropped.
#[derive(Debug)]
pub struct Keeping {
    prepare: watch::Sender<bool>,
    state: watch::Receiver<EtcdState>,
}

impl Keeping {
    /// Checks the members again and moves the leadership away, since COMMAND is about to begin.
    pub fn prepare(&self) {
        self.prepare
            .send_if_modified(|wanted| !std::mem::replace(wanted, true));
    }

    pub fn state(&self) -> EtcdState {
        self.state.borrow().clone()
    }
}

impl EtcdPlan {
    /// Requests the cluster's lock from the instances. `None` if no etcd has other members.
    #[must_use]
    pub fn start(&self, instances: [SocketAddr; 2]) -> Option<Keeping> {
        let (prepare, wanted) = watch::channel(false);
        let (to, state) = watch::channel(EtcdState::default());
        let clusters = self.clusters.clone();
        if clusters.is_empty() {
            return None;
        }
        let lock = self.lock.clone().map(|client| client.at(instances));
        let needs_lock = self.needs_lock;
        tokio::spawn(async move {
            let progress = Progress::default();
            let lock = match acquire_lock(lock.as_ref(), needs_lock, &progress, &to).await {
                Ok(lock) => lock,
                Err(why) => return to.send_modify(|state| state.refused = Some(why)),
            };
            let keep = prepare_until_released(&clusters, wanted, &to);
            match lock {
                None => keep.await,
                Some(lock) => {
                    tokio::select! {
                        () = keep => {}
                        () = lock.keep(&progress) => {}
                    }
                    lock.release(&progress).await;
                }
            }
        });
        Some(Keeping { prepare, state })
    }
}

/// Acquires the cluster's lock as a holder that has changed nothing: without renewals the lock
/// expires, so that a killed bridge blocks no other node. While the node's member is away, the
/// check of the members blocks other nodes. `None`, with a note, if the cluster refuses the lock
/// and no operator asked for it.
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
            Claim::new(Holder::current(&draw_uid()?, false), false),
        );
        match lock.acquire(progress).await {
            Ok(()) => return Ok(Some(lock)),
            Err(LockError::Api(error)) if needs_lock => {
                return Err(format!("--kubeconfig: {error}: {UNLOCKED}"));
            }
            Err(LockError::Api(error)) => why = error.to_string(),
            Err(busy) => return Err(busy.to_string()),
        }
    }
    to.send_modify(|state| state.notes.push(format!("etcd: {why}: {UNLOCKED}")));
    Ok(None)
}

async fn prepare_until_released(
    clusters: &[Cluster],
    mut wanted: watch::Receiver<bool>,
    to: &watch::Sender<EtcdState>,
) {
    if wanted.wait_for(|wanted| *wanted).await.is_err() {
        return;
    }
    for cluster in clusters {
        match cluster.prepare().await {
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
    /// The last check before COMMAND. Returns a note for the operator.
    ///
    /// # Errors
    /// The other members are no longer a majority.
    async fn prepare(&self) -> Result<Option<String>, String> {
        let sample = self
            .gateway
            .sample(&self.own)
            .await
            .map_err(|why| format!("etcd: {why}"))?;
        let others = match sample.choose() {
            Ok(Choice::Others(others)) => others,
            Ok(Choice::Alone) => {
                return Err("etcd no longer has another member: begin again".into());
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
                "etcd: {}, which is used, cannot be any more ({why}): begin again",
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
