//! Connections to siblings, from the first message until they are established.

use super::Group;
use super::passing::Passer;
use super::peers::PeerEvent;
use crate::config::Config;
use berth_node::instance_id::InstanceId;
use berth_node::ipc::wire::{Ask, Reply};
use berth_node::ipc::{self, IncomingRequest, PATIENCE};
use berth_node::registry::lease;
use berth_node::terms::ShimId;
use berth_os::explained;
use berth_os::seqpacket;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

/// Time between two checks for dead siblings, as long as this shim awaits the first update of a
/// sibling. The sibling's death causes no event, since there is no connection yet.
pub(super) const DEAD_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum number of problems that are remembered so that each is logged once.
const MAX_LOGGED: usize = 100;

/// How a connection to a sibling is being established.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionState {
    Dialled,
    /// The sibling dialled, and gets a reply.
    Accepted,
}

pub(super) struct Siblings {
    /// The instance of each sibling that has a lease. A sibling's socket is named after its
    /// instance.
    pub(super) instances: BTreeMap<ShimId, InstanceId>,
    pub(super) connecting: BTreeMap<ShimId, ConnectionState>,
    /// Wakes the writer of each established connection, which then sends an update.
    pub(super) writers: BTreeMap<ShimId, Arc<Notify>>,
    pub(super) unreachable: BTreeMap<ShimId, String>,
    /// Siblings without a connection for which this has been logged.
    pub(super) logged_unconnected: BTreeSet<ShimId>,
    /// When this shim last looked for siblings that have died.
    pub(super) looked: Option<Instant>,
    pub(super) events: mpsc::UnboundedSender<PeerEvent>,
    pub(super) passing: Arc<Passer>,
}

impl Siblings {
    pub(super) fn new(config: &Config, events: mpsc::UnboundedSender<PeerEvent>) -> Self {
        Self {
            instances: BTreeMap::new(),
            connecting: BTreeMap::new(),
            writers: BTreeMap::new(),
            unreachable: BTreeMap::new(),
            logged_unconnected: BTreeSet::new(),
            looked: None,
            events,
            passing: Arc::new(Passer::new(config.lease, config.hold)),
        }
    }
}

impl Group {
    pub(super) fn dial_sibling(&mut self, holder: ShimId, instance: &InstanceId) {
        let Ok(path) = self.shared.berth.socket_path(instance) else {
            return;
        };
        self.siblings
            .connecting
            .insert(holder, ConnectionState::Dialled);
        let (me, events, shared, instance) = (
            self.me,
            self.siblings.events.clone(),
            self.shared.clone(),
            instance.clone(),
        );
        tokio::spawn(async move {
            let answer =
                ipc::exchange_messages(&path, Ask::Join { holder: me }, &[], &[], PATIENCE).await;
            let path = path.display();
            let event = match answer {
                Ok((Reply::Joined { holder: there }, socket)) if there == holder => {
                    PeerEvent::Connected(holder, socket)
                }
                Ok((Reply::Joined { holder: there }, socket)) => {
                    let read = move || lease::read(&shared.berth, &instance);
                    let read = shared
                        .run_dir
                        .call_within(PATIENCE, read)
                        .await
                        .ok()
                        .and_then(Result::ok)
                        .flatten();
                    let leased = read.map(|lease| lease.holder_identity);
                    if leased == Some(there) {
                        // The sibling was restarted after its lease was read.
                        let _ = events.send(PeerEvent::Unreachable(
                            holder,
                            format!("{path} has another holder now"),
                        ));
                        PeerEvent::Connected(there, socket)
                    } else {
                        PeerEvent::Conflict(
                            holder,
                            format!(
                                "the shim {there} answers {path}, but the lease belongs to the shim {holder}"
                            ),
                        )
                    }
                }
                Ok((reply, _)) => PeerEvent::Refused(holder, format!("{path} replied {reply:?}")),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    PeerEvent::Refused(holder, error.to_string())
                }
                Err(error) => PeerEvent::Unreachable(holder, format!("{path}: {error}")),
            };
            let _ = events.send(event);
        });
    }

    /// Ends the wait for siblings that died before their first update and have a valid lease. A
    /// shim's socket listens before the socket gets its name, and the name is removed before the
    /// socket closes. So a refused connection proves that the socket's process is gone. A missing
    /// socket or a full queue proves nothing.
    pub(super) async fn mark_dead_siblings(&mut self) {
        self.tick();
        let awaited = self.machine.awaited_siblings();
        if awaited.is_empty()
            || self
                .siblings
                .looked
                .is_some_and(|looked| looked.elapsed() < DEAD_CHECK_INTERVAL)
        {
            return;
        }
        self.siblings.looked = Some(Instant::now());
        let path = |holder| {
            self.shared
                .berth
                .socket_path(self.siblings.instances.get(&holder)?)
                .ok()
        };
        let paths: Vec<_> = awaited
            .into_iter()
            .filter_map(|holder| Some((holder, path(holder)?)))
            .collect();
        let refuses = |path: &PathBuf| {
            seqpacket::dial_path(path)
                .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        };
        let look = move || {
            paths
                .into_iter()
                .filter(|(_, path)| refuses(path))
                .collect::<Vec<_>>()
        };
        for (holder, path) in self
            .shared
            .run_dir
            .call_within(self.request_timeout(), look)
            .await
            .unwrap_or_default()
        {
            tracing::info!(socket = %path.display(), "a sibling has died: its socket refuses connections, although its lease is valid");
            let actions = self.machine.on_gone(self.now(), holder);
            self.carry_out_actions(actions);
        }
    }

    /// Forgets siblings with neither a lease nor a connection: each start of a shim has a new ID.
    pub(super) fn forget_siblings_except(&mut self, leased: &BTreeSet<ShimId>) {
        self.machine.forget_dead(leased);
        let Siblings {
            instances,
            connecting,
            writers,
            unreachable,
            logged_unconnected,
            ..
        } = &mut self.siblings;
        let known = |holder: &ShimId| {
            leased.contains(holder)
                || connecting.contains_key(holder)
                || writers.contains_key(holder)
        };
        instances.retain(|holder, _| known(holder));
        unreachable.retain(|holder, _| known(holder));
        logged_unconnected.retain(known);
        // Problems contain the IDs of shims, so old ones are forgotten, too. Some problems are
        // logged again after this.
        if self.logged_problems.len() > MAX_LOGGED {
            self.logged_problems.clear();
        }
    }

    /// Records a failed dial. Returns true if the sibling is without a connection.
    pub(super) fn record_failed_dial(&mut self, holder: ShimId, why: &str) -> bool {
        self.siblings.unreachable.insert(holder, why.to_owned());
        // The sibling may have dialled meanwhile.
        if self.siblings.connecting.get(&holder) == Some(&ConnectionState::Dialled) {
            self.siblings.connecting.remove(&holder);
        }
        !self.siblings.writers.contains_key(&holder)
            && !self.siblings.connecting.contains_key(&holder)
    }

    /// Checks that the shim with this ID may connect. The error says why it may not.
    fn check_may_join(&self, holder: ShimId) -> Result<(), String> {
        let taken = |what: &str| format!("the name {holder} is {what}");
        if holder == self.me {
            Err(taken("this shim's own"))
        } else if self.siblings.writers.contains_key(&holder)
            || self.siblings.connecting.get(&holder) == Some(&ConnectionState::Accepted)
        {
            Err(taken("connected already"))
        } else {
            Ok(())
        }
    }

    /// Logs that two processes use one ID. The first process keeps the ID: messages on another
    /// connection with the same ID do not affect the first.
    pub(super) fn report_conflict(&mut self, why: &str) {
        self.count_handover_step("connect", "conflict");
        if self.logged_problems.insert(why.to_owned()) {
            tracing::warn!(
                code = %explained::FALSE_NAME,
                "another process goes by a sibling's name, and was refused: {why}"
            );
        }
    }

    pub(super) fn on_request(&mut self, request: IncomingRequest) {
        let reply = match request.ask {
            Ask::Join { holder } => match self.check_may_join(holder) {
                Err(why) => {
                    self.report_conflict(&why);
                    Reply::Refused(why)
                }
                // Both shims have dialled each other. The connection that the smaller ID dialled
                // stays.
                Ok(()) if self.me < holder && self.siblings.connecting.contains_key(&holder) => {
                    Reply::Refused("this shim dials itself".into())
                }
                Ok(()) => {
                    self.siblings
                        .connecting
                        .insert(holder, ConnectionState::Accepted);
                    let (me, events) = (self.me, self.siblings.events.clone());
                    tokio::spawn(async move {
                        let _ =
                            events.send(match request.reply(&Reply::Joined { holder: me }).await {
                                Some(socket) => PeerEvent::Connected(holder, socket),
                                None => PeerEvent::Gone(holder),
                            });
                    });
                    return;
                }
            },
            Ask::Pass => self
                .take_over_client(&request)
                .map_or_else(Reply::Refused, |()| Reply::Done),
            Ask::Share(ref share) => self
                .apply_share(share.clone())
                .map_or_else(Reply::Refused, |()| Reply::Done),
            _ => Reply::Refused("this shim does not handle the request".into()),
        };
        tokio::spawn(async move { request.reply(&reply).await });
    }
}
