//! The new instance's share of the clients, sent to the shims again and again. The share expires
//! soon after berth ends.

use super::super::machine::Slot;
use super::super::observer::{InstanceDetails, NodeDetails};
use berth_node::instance_id::InstanceId;
use berth_node::ipc;
use berth_node::ipc::wire::{Ask, Reply, Share};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

/// Time after which a shim drops a share, unless the share is sent again. Also the longest wait for
/// a shim's reply.
const LEASE: Duration = Duration::from_secs(10);

/// Time after which an unchanged share is sent again.
const RENEWED: Duration = Duration::from_secs(2);

pub struct Shares {
    /// The salt stays the same during an upgrade, so clients stay with their instance when the
    /// upgrade is resumed.
    salt: u64,
    local: bool,
    sent: Option<(Instant, Slot, u16)>,
}

impl Shares {
    pub fn new(upgrade: &InstanceId, local: bool) -> Self {
        let mut hasher = DefaultHasher::new();
        upgrade.hash(&mut hasher);
        Self {
            salt: hasher.finish(),
            local,
            sent: None,
        }
    }

    /// Gives a slot's instance this share of the clients, in thousandths, and the other slot's
    /// instance the rest.
    ///
    /// # Errors
    /// A shim refuses the share. A shim that is missing or silent is no error, and gets the share
    /// at the next call.
    pub async fn send_share_if_due(
        &mut self,
        slot: Slot,
        permille: u16,
        details: &NodeDetails,
    ) -> Result<(), String> {
        let is_kept = |(at, of, part): (Instant, Slot, u16)| {
            (of, part) == (slot, permille) && at.elapsed() < RENEWED
        };
        if self.sent.is_some_and(is_kept) {
            return Ok(());
        }
        let [new, old] = [
            details.details_of_slot(slot),
            details.details_of_slot(slot.opposite_slot()),
        ];
        let (Some(to), Some(from)) = (&new.id, &old.id) else {
            return Ok(());
        };
        self.sent = Some((Instant::now(), slot, permille));
        let share = Share {
            old: from.clone(),
            new: to.clone(),
            permille,
            salt: self.salt,
            lease_ms: LEASE.as_millis() as u64,
            local: self.local,
        };
        let (new, old) = tokio::join!(send_share(new, &share), send_share(old, &share));
        new.and(old)
    }
}

async fn send_share(details: &InstanceDetails, share: &Share) -> Result<(), String> {
    let Some(socket) = &details.socket else {
        return Ok(());
    };
    match ipc::ask_shim(socket, Ask::Share(share.clone()), ipc::PATIENCE).await {
        Ok(Reply::Refused(why)) => Err(why),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Checks that an instance's shim can give another instance a share of the clients, by ending a
/// share that has not begun.
///
/// # Errors
/// The reason why the shim cannot give a share.
pub(super) async fn check_shares(
    details: &InstanceDetails,
    other: &InstanceId,
) -> Result<(), String> {
    let (Some(own), Some(socket)) = (&details.id, &details.socket) else {
        return Err("it has no shim".into());
    };
    let share = Share {
        old: own.clone(),
        new: other.clone(),
        permille: 0,
        salt: 0,
        lease_ms: 0,
        local: false,
    };
    match ipc::ask_shim(socket, Ask::Share(share), LEASE).await {
        Ok(Reply::Done) => Ok(()),
        Ok(Reply::Refused(why)) => Err(why),
        Ok(reply) => Err(format!("unexpected reply: {reply:?}")),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    /// A shim that answers every request with `reply`, and the recorded requests.
    fn start_shim(
        directory: &Path,
        id: &str,
        reply: Reply,
    ) -> (InstanceDetails, Arc<Mutex<Vec<Ask>>>) {
        let socket = directory.join(format!("{id}.sock"));
        let (asked, reply) = (Arc::<Mutex<Vec<Ask>>>::default(), Arc::new(reply));
        let asks = asked.clone();
        let serving = ipc::Server::bind(&socket).unwrap().serve(move |request| {
            asks.lock().unwrap().push(request.ask.clone());
            let reply = reply.clone();
            async move { drop(request.reply(&reply).await) }
        });
        tokio::spawn(serving);
        (
            InstanceDetails {
                id: id.parse().ok(),
                socket: Some(socket),
                ..InstanceDetails::default()
            },
            asked,
        )
    }

    #[tokio::test]
    async fn a_shim_without_shares_is_found_before_any_change() {
        let temp = tempfile::tempdir().unwrap();
        let other = "b".parse().unwrap();
        let (older, _) = start_shim(
            temp.path(),
            "older",
            Reply::Refused("version 2 is not known".into()),
        );
        assert_eq!(
            check_shares(&older, &other).await,
            Err("version 2 is not known".into())
        );
        assert!(
            check_shares(&InstanceDetails::default(), &other)
                .await
                .is_err()
        );
        let (shim, asked) = start_shim(temp.path(), "a", Reply::Done);
        assert_eq!(check_shares(&shim, &other).await, Ok(()));
        assert!(
            matches!(&asked.lock().unwrap()[..], [Ask::Share(share)] if share.lease_ms == 0),
            "it begins nothing"
        );
    }

    #[tokio::test]
    async fn a_share_is_sent_again_if_it_changes_or_is_old() {
        let slot = |id: &str| InstanceDetails {
            id: id.parse().ok(),
            ..InstanceDetails::default()
        };
        let details = NodeDetails {
            canonical: slot("old"),
            temporary: slot("new"),
            ..NodeDetails::default()
        };
        let now = Instant::now();
        let (later, old) = (now + LEASE * 100, now.checked_sub(RENEWED).unwrap());
        for (at, of, part, is_sent) in [
            (later, Slot::Temporary, 50, false),
            (later, Slot::Temporary, 60, true),
            (later, Slot::Canonical, 50, true),
            (old, Slot::Temporary, 50, true),
        ] {
            let mut shares = Shares::new(&"u".parse().unwrap(), true);
            shares.sent = Some((at, of, part));
            let kept = shares
                .send_share_if_due(Slot::Temporary, 50, &details)
                .await;
            assert_eq!(kept, Ok(()));
            assert_eq!(shares.sent.is_none_or(|(sent, ..)| sent != at), is_sent);
        }
    }

    #[tokio::test]
    async fn a_refused_share_is_an_error_of_either_shim() {
        let temp = tempfile::tempdir().unwrap();
        let (refuses, _) = start_shim(temp.path(), "a", Reply::Refused("no".into()));
        let (shares, _) = start_shim(temp.path(), "b", Reply::Done);
        for (canonical, temporary) in [(&refuses, &shares), (&shares, &refuses)] {
            let details = NodeDetails {
                canonical: canonical.clone(),
                temporary: temporary.clone(),
                ..NodeDetails::default()
            };
            let refused = async {
                loop {
                    let mut shares = Shares::new(&"u".parse().unwrap(), true);
                    // A shim that answers too late on a busy machine is no error.
                    if let Err(why) = shares
                        .send_share_if_due(Slot::Temporary, 50, &details)
                        .await
                    {
                        return why;
                    }
                    tokio::task::yield_now().await;
                }
            };
            let why = tokio::time::timeout(Duration::from_secs(60), refused).await;
            assert_eq!(why.unwrap(), "no");
        }
    }

    #[tokio::test]
    async fn both_shims_get_every_change_of_the_share() {
        let temp = tempfile::tempdir().unwrap();
        let (canonical, of_old) = start_shim(temp.path(), "old", Reply::Done);
        let (temporary, of_new) = start_shim(temp.path(), "new", Reply::Done);
        let details = NodeDetails {
            canonical,
            temporary,
            ..NodeDetails::default()
        };
        let mut shares = Shares::new(&"u".parse().unwrap(), true);
        for permille in [50, 50, 250] {
            assert_eq!(
                shares
                    .send_share_if_due(Slot::Temporary, permille, &details)
                    .await,
                Ok(())
            );
        }
        let told = |asked: &Mutex<Vec<Ask>>| {
            let asked = asked.lock().unwrap();
            let share = |ask: &Ask| match ask {
                Ask::Share(share) => (
                    share.old.to_string(),
                    share.new.to_string(),
                    share.permille,
                    share.local,
                ),
                other => panic!("{other:?}"),
            };
            asked.iter().map(share).collect::<Vec<_>>()
        };
        let [first, last] =
            [50, 250].map(|permille| ("old".to_owned(), "new".to_owned(), permille, true));
        // A share is not sent again before its renewal is due, unless the share changes.
        assert_eq!(told(&of_new).first(), Some(&first));
        assert_eq!(told(&of_new).last(), Some(&last));
        assert_eq!(told(&of_old), told(&of_new));
        // In the reverse direction, the temporary instance is the old side.
        shares
            .send_share_if_due(Slot::Canonical, 0, &details)
            .await
            .unwrap();
        assert_eq!(
            told(&of_old).last(),
            Some(&("new".to_owned(), "old".to_owned(), 0, true))
        );
    }
}
