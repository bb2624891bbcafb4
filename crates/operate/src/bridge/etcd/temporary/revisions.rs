//! Whether the node's own etcd goes on from what the temporary one wrote: its revision may not be lower. Where COMMAND copied or moved the
//! data while "etcd is stopped", or put a backup in its place, writes are missing.

use crate::bridge::etcd::gateway::Gateway;
use berth_node::ipc::bridge::{EtcdStatus, EtcdStep};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;

/// Time between two questions. What the temporary etcd writes after the last one is not counted.
const INTERVAL: Duration = Duration::from_millis(200);

/// Where both are asked. Their certificate is for the node's own.
#[derive(Debug, Clone)]
pub struct Revisions {
    pub gateway: Gateway,
    pub own: String,
    pub temporary: String,
}

impl Revisions {
    /// Tells of writes that are missing. Goes on until one end of the channels is dropped.
    pub async fn compare(self, mut etcd: watch::Receiver<EtcdStatus>, missing: watch::Sender<Option<String>>) {
        let mut last = None;
        while !missing.is_closed() {
            let step = etcd.borrow_and_update().step;
            match (step, last) {
                (EtcdStep::Temporary, _) => {
                    if let Ok(status) = self.gateway.status(&self.temporary).await {
                        last = last.max(Some(status.revision));
                    }
                }
                (EtcdStep::Own, Some(wrote)) => {
                    if let Ok(status) = self.gateway.status(&self.own).await {
                        if let Some(why) = gap(wrote, status.revision) {
                            tracing::warn!("etcd: {why}");
                            missing.send_replace(Some(why));
                        }
                        last = None;
                    }
                }
                _ => {}
            }
            let is_asked = step == EtcdStep::Temporary || last.is_some();
            tokio::select! {
                changed = etcd.changed() => if changed.is_err() { return },
                () = sleep(INTERVAL), if is_asked => {}
            }
        }
    }
}

/// What is wrong where the node's own has a lower revision. Each write adds one to it.
fn gap(temporary: u64, own: u64) -> Option<String> {
    let lost = temporary.checked_sub(own).filter(|lost| *lost > 0)?;
    Some(format!(
        "the node's own etcd serves from other data than the temporary one wrote: it is at revision {own}, and that was at {temporary}, \
         so that at least {lost} writes that were acknowledged are missing; they are in the data directory of before, if COMMAND did not \
         overwrite it: stop what writes to the cluster, and see what COMMAND copied, and when"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::etcd;

    #[tokio::test]
    async fn writes_that_are_missing_are_counted() {
        for (temporary, missing) in [(150, Some("at least 50 writes")), (100, None), (90, None)] {
            let (members, servers) = etcd::start(&[(([127, 0, 0, 1], 0).into(), "127.0.0.1"); 3]).await;
            members.lock().unwrap().revisions = vec![temporary; 100];
            let access = &servers[0].access;
            let gateway = Gateway::new(access.ca.clone(), access.client.clone()).named("127.0.0.1");
            let at = |member: usize| servers[member].access.server.clone();
            let revisions = Revisions { gateway, own: at(0), temporary: at(2) };
            let (to, etcd) = watch::channel(EtcdStatus::default());
            let (tells, mut told) = watch::channel(None);
            let comparing = tokio::spawn(revisions.compare(etcd, tells));
            for step in [EtcdStep::Temporary, EtcdStep::Returning, EtcdStep::Own] {
                to.send_modify(|status| status.step = step);
                sleep(Duration::from_millis(600)).await;
            }
            drop(to);
            comparing.await.unwrap();
            let told = told.borrow_and_update().clone();
            assert_eq!(told.is_some(), missing.is_some(), "{told:?}");
            assert!(missing.is_none_or(|part| told.unwrap().contains(part)));
        }
    }
}
