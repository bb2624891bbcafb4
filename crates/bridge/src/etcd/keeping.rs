//! The members of etcd while a bridge is on: the cluster's lock, and before COMMAND a check and the move of the leadership. A task beside
//! the daemon's loop, which may wait seconds for an answer.

use super::members::Choice;
use super::types::Sample;
use super::{Cluster, EtcdPlan};
use berth_cluster::Client;
use berth_upgrade::lock::{Claim, Holder, Lock, LockError};
use berth_upgrade::pod::draw_uid;
use berth_upgrade::progress::Progress;
use std::net::SocketAddr;
use tokio::sync::watch;

/// What is not avoided without the cluster's lock.
const UNLOCKED: &str = "nothing keeps another control-plane node from being under a bridge or upgraded meanwhile, with which etcd would \
                        lose its majority";

/// What has come of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EtcdState {
    /// COMMAND may begin.
    pub prepared: bool,
    /// Why it may not, and never will under this bridge.
    pub refused: Option<String>,
    /// What the operator should know, in sentences.
    pub notes: Vec<String>,
}

/// Goes on until this is dropped.
#[derive(Debug)]
pub struct Keeping {
    prepare: watch::Sender<bool>,
    state: watch::Receiver<EtcdState>,
}

impl Keeping {
    /// COMMAND is to begin: checks the members again, and moves the leadership away.
    pub fn prepare(&self) {
        self.prepare
            .send_if_modified(|wanted| !std::mem::replace(wanted, true));
    }

    pub fn state(&self) -> EtcdState {
        self.state.borrow().clone()
    }
}

impl EtcdPlan {
    /// Asks these instances for the cluster's lock. None if there is nothing to be done.
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
            let lock = match acquired(lock.as_ref(), needs_lock, &progress, &to).await {
                Ok(lock) => lock,
                Err(why) => return to.send_modify(|state| state.refused = Some(why)),
            };
            let keep = keep(&clusters, wanted, &to);
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

/// The lock as one has it that has changed nothing: it is lost when it is not renewed, so that a bridge that was killed blocks no other node.
/// While its member is away, the check of the members does. `None`, with a note, where the cluster gives none and no operator wants it.
///
/// # Errors
/// Another has it, or an operator wants it.
async fn acquired(
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

async fn keep(
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
    // The lock is held until the bridge drops its end.
    while wanted.changed().await.is_ok() {}
}

impl Cluster {
    /// The last thing before COMMAND. Returns what the operator should know.
    ///
    /// # Errors
    /// The others are not a majority any more.
    async fn prepare(&self) -> Result<Option<String>, String> {
        let sample = self
            .gateway
            .sample(&self.own)
            .await
            .map_err(|why| format!("etcd: {why}"))?;
        let others = match sample.choose() {
            Ok(Choice::Others(others)) => others,
            Ok(Choice::Alone) => {
                return Err("etcd has no other member any more: begin again".into());
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

    /// Spares the cluster an election, where this node's member leads.
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
