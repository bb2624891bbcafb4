//! Checks that an etcd continues from the data that was served before: the revision must not be
//! lower. Writes are missing if COMMAND copied or moved the data while "etcd is stopped", or put a
//! backup in its place.

use crate::etcd::gateway::Gateway;
use berth_node::ipc::bridge::{EtcdStatus, EtcdStep};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::sleep;

/// Time between two questions to the temporary etcd, and to the node's etcd. Writes after the last
/// question are not counted.
const INTERVAL: Duration = Duration::from_millis(200);
const OWN_INTERVAL: Duration = Duration::from_secs(1);

/// URLs of both etcds. Their certificate is for the address of the node's etcd.
#[derive(Debug, Clone)]
pub struct Revisions {
    pub gateway: Gateway,
    pub own: String,
    pub temporary: String,
}

/// Result of the comparison.
#[derive(Debug, Clone, Default)]
pub struct Compared {
    /// The message if writes are missing.
    pub missing: Option<String>,
    /// True if the node's etcd has not been asked since it returned.
    pub is_open: bool,
}

impl Revisions {
    /// Compares revisions until the sender of `etcd` or the receiver of `compared` is dropped.
    pub async fn compare_revisions(
        self,
        mut etcd: watch::Receiver<EtcdStatus>,
        compared: watch::Sender<Compared>,
    ) {
        let mut last = 0;
        while !compared.is_closed() {
            let step = etcd.borrow_and_update().step;
            let serves = match step {
                EtcdStep::Own => Some(("node's", &self.own, OWN_INTERVAL)),
                EtcdStep::Temporary => Some(("temporary", &self.temporary, INTERVAL)),
                _ => None,
            };
            if step != EtcdStep::Own {
                compared.send_modify(|compared| compared.is_open = true);
            }
            if let Some((who, url, _)) = serves
                && let Ok(status) = self.gateway.fetch_status(url).await
                && etcd.borrow().step == step
            {
                let missing = describe_gap(who, last, status.revision);
                last = status.revision;
                compared.send_modify(|compared| {
                    compared.is_open &= step != EtcdStep::Own;
                    if let Some(why) = missing {
                        tracing::warn!("etcd: {why}");
                        compared.missing = Some(why);
                    }
                });
            }
            tokio::select! {
                changed = etcd.changed() => if changed.is_err() { return },
                () = sleep(serves.map_or(OWN_INTERVAL, |(.., interval)| interval)), if serves.is_some() => {}
            }
        }
    }
}

/// The message for a lower revision than before. Each write adds one to the revision.
fn describe_gap(who: &str, before: u64, now: u64) -> Option<String> {
    let lost = before.checked_sub(now).filter(|lost| *lost > 0)?;
    Some(format!(
        "the {who} etcd serves from other data than before: the revision was {before} and is now {now}, so at least {lost} writes that \
         were acknowledged are missing; the old data directory has these writes, unless COMMAND overwrote the directory: stop all \
         clients that write to the cluster, and see what COMMAND copied, and when"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::etcd;

    /// Compares the revisions of etcds that serve in the given steps, in order.
    async fn compare_steps(steps: &[(EtcdStep, u64)]) -> Compared {
        let (members, servers) =
            etcd::start_members(&[(([127, 0, 0, 1], 0).into(), "127.0.0.1"); 3]).await;
        let access = &servers[0].access;
        let gateway =
            Gateway::new(access.ca.clone(), access.client.clone()).with_server_name("127.0.0.1");
        // The third of the simulated members answers with the given revisions.
        let at = || servers[2].access.server.clone();
        let revisions = Revisions {
            gateway,
            own: at(),
            temporary: at(),
        };
        let (to, etcd) = watch::channel(EtcdStatus {
            step: EtcdStep::Stopping,
            ..EtcdStatus::default()
        });
        let (tells, told) = watch::channel(Compared::default());
        let comparing = tokio::spawn(revisions.compare_revisions(etcd, tells));
        let left = || members.lock().unwrap().revisions.len();
        for (step, revision) in steps {
            members.lock().unwrap().revisions = vec![*revision; 100];
            to.send_modify(|status| status.step = *step);
            // Wait for the third question: it follows the answer to the second question, and that
            // answer belongs to this step.
            while matches!(step, EtcdStep::Own | EtcdStep::Temporary) && left() > 97 {
                sleep(Duration::from_millis(10)).await;
            }
        }
        drop(to);
        comparing.await.unwrap();
        told.borrow().clone()
    }

    #[tokio::test]
    async fn missing_writes_are_counted() {
        use EtcdStep::{Own, Returning, Temporary};
        for (steps, missing) in [
            (
                &[(Temporary, 150), (Returning, 0), (Own, 100)][..],
                Some("the node's etcd serves from other data"),
            ),
            (&[(Temporary, 100), (Own, 100)], None),
            (&[(Temporary, 90), (Own, 100)], None),
            // COMMAND put a copy in place of the data while the node's etcd was away, or between
            // two temporary etcds.
            (
                &[(Own, 150), (Temporary, 100), (Own, 100)],
                Some("the temporary etcd serves from other data"),
            ),
            (
                &[(Temporary, 150), (Returning, 0), (Temporary, 100)],
                Some("the temporary etcd serves from other data"),
            ),
        ] {
            let Compared {
                missing: told,
                is_open,
            } = compare_steps(steps).await;
            assert_eq!(told.is_some(), missing.is_some(), "{steps:?}: {told:?}");
            assert!(
                missing.is_none_or(|part| told.as_ref().unwrap().contains(part)),
                "{told:?}"
            );
            assert!(told.is_none_or(|why| why.contains("at least 50 writes")));
            assert_eq!(is_open, steps.last().unwrap().0 != Own);
        }
    }
}
