//! Connections to siblings, from the first message until they stand.

use super::Group;
use super::passing::Passing;
use super::peers::Event;
use crate::config::Config;
use berth_node::instance::InstanceId;
use berth_node::ipc::wire::{Ask, Reply};
use berth_node::ipc::{self, IncomingRequest, PATIENCE};
use berth_node::registry::lease;
use berth_node::terms::ShimId;
use berth_os::seqpacket;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// Time between two looks whether a sibling that is waited for has died: nothing tells of the death of who has no connection.
pub(super) const DEAD: Duration = Duration::from_millis(50);

/// Most problems that are remembered as logged.
const TOLD: usize = 100;

/// How a connection to a sibling comes to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Connecting {
    Dialled,
    /// The sibling asked, and is replied to.
    Comes,
}

pub(super) struct Siblings {
    /// Instances of those that have a lease, for their sockets.
    pub(super) instances: BTreeMap<ShimId, InstanceId>,
    pub(super) connecting: BTreeMap<ShimId, Connecting>,
    /// What tells the writers of the connections that stand.
    pub(super) writers: BTreeMap<ShimId, Arc<Notify>>,
    pub(super) unreachable: BTreeMap<ShimId, String>,
    /// Those without a connection that were logged.
    pub(super) told_unconnected: BTreeSet<ShimId>,
    pub(super) events: mpsc::UnboundedSender<Event>,
    pub(super) passing: Arc<Passing>,
}

impl Siblings {
    pub(super) fn new(config: &Config, events: mpsc::UnboundedSender<Event>) -> Self {
        Self {
            instances: BTreeMap::new(),
            connecting: BTreeMap::new(),
            writers: BTreeMap::new(),
            unreachable: BTreeMap::new(),
            told_unconnected: BTreeSet::new(),
            events,
            passing: Arc::new(Passing::new(config.lease, config.hold)),
        }
    }
}

impl Group {
    pub(super) fn dial(&mut self, holder: ShimId, instance: &InstanceId) {
        let Ok(path) = self.shared.berth.socket_path(instance) else { return };
        self.siblings.connecting.insert(holder, Connecting::Dialled);
        let (me, events, berth, instance) =
            (self.me, self.siblings.events.clone(), self.shared.berth.clone(), instance.clone());
        tokio::spawn(async move {
            let answer = ipc::exchange(&path, Ask::Join { holder: me }, &[], &[], PATIENCE).await;
            let path = path.display();
            let event = match answer {
                Ok((Reply::Joined { holder: there }, socket)) if there == holder => Event::Connected(holder, socket),
                Ok((Reply::Joined { holder: there }, socket)) => {
                    let leased = lease::read(&berth, &instance).ok().flatten().map(|lease| lease.holder_identity);
                    if leased == Some(there) {
                        // It started again after the lease was read.
                        let _ = events.send(Event::Unreachable(holder, format!("{path} has another holder now")));
                        Event::Connected(there, socket)
                    } else {
                        Event::Conflict(holder, format!("{path} is answered by {there}, and the lease is of {holder}"))
                    }
                }
                Ok((reply, _)) => Event::Alone(holder, format!("{path} says {reply:?}")),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    Event::Alone(holder, error.to_string())
                }
                Err(error) => Event::Unreachable(holder, format!("{path}: {error}")),
            };
            let _ = events.send(event);
        });
    }

    /// Ends the wait for siblings that died before they were heard, whose leases hold on. A shim's socket listens before
    /// its name is there, and the name goes before the socket closes: one that refuses is of a process that is gone. That
    /// there is none, or that its queue is full, says nothing.
    pub(super) fn find_dead(&mut self) {
        self.tick();
        for holder in self.machine.awaited() {
            let Some(instance) = self.siblings.instances.get(&holder) else { continue };
            let Ok(path) = self.shared.berth.socket_path(instance) else { continue };
            if seqpacket::dial(&path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
                tracing::info!(%instance, "a sibling's lease holds and its socket refuses: it has died");
                let actions = self.machine.gone(holder);
                self.act(actions);
            }
        }
    }

    /// Forgets those that have neither a lease nor a connection: who starts has a new name each time.
    pub(super) fn forget(&mut self, leased: &BTreeSet<ShimId>) {
        self.machine.forget_dead(leased);
        let Siblings { instances, connecting, writers, unreachable, told_unconnected, .. } = &mut self.siblings;
        let known = |holder: &ShimId| {
            leased.contains(holder) || connecting.contains_key(holder) || writers.contains_key(holder)
        };
        instances.retain(|holder, _| known(holder));
        unreachable.retain(|holder, _| known(holder));
        told_unconnected.retain(known);
        // Messages name holders, too. Some are then logged again.
        if self.told_problems.len() > TOLD {
            self.told_problems.clear();
        }
    }

    /// A dial failed. Whether the sibling is without a connection.
    pub(super) fn not_dialled(&mut self, holder: ShimId, why: &str) -> bool {
        self.siblings.unreachable.insert(holder, why.to_owned());
        // Meanwhile it may have come itself.
        if self.siblings.connecting.get(&holder) == Some(&Connecting::Dialled) {
            self.siblings.connecting.remove(&holder);
        }
        !self.siblings.writers.contains_key(&holder) && !self.siblings.connecting.contains_key(&holder)
    }

    /// Whether a holder may come; if not, why.
    fn may_join(&self, holder: ShimId) -> Result<(), String> {
        let taken = |what: &str| format!("the name {holder} is {what}");
        if holder == self.me {
            Err(taken("this shim's own"))
        } else if self.siblings.writers.contains_key(&holder)
            || self.siblings.connecting.get(&holder) == Some(&Connecting::Comes)
        {
            Err(taken("connected already"))
        } else {
            Ok(())
        }
    }

    /// Two processes go by one name. Whoever was there first stays: nothing that is said under the name by another
    /// connection touches it.
    pub(super) fn conflict(&mut self, why: &str) {
        self.count("connect", "conflict");
        if self.told_problems.insert(why.to_owned()) {
            tracing::warn!("another process goes by a sibling's name, and was refused: {why}");
        }
    }

    pub(super) fn asked(&mut self, asked: IncomingRequest) {
        let reply = match asked.ask {
            Ask::Join { holder } if !self.config.plain_close => match self.may_join(holder) {
                Err(why) => {
                    self.conflict(&why);
                    Reply::Refused(why)
                }
                // Both dial: the connection of the smaller name is the one that stays.
                Ok(()) if self.me < holder && self.siblings.connecting.contains_key(&holder) => {
                    Reply::Refused("this shim dials itself".into())
                }
                Ok(()) => {
                    self.siblings.connecting.insert(holder, Connecting::Comes);
                    let (me, events) = (self.me, self.siblings.events.clone());
                    tokio::spawn(async move {
                        let _ = events.send(match asked.reply(&Reply::Joined { holder: me }).await {
                            Some(socket) => Event::Connected(holder, socket),
                            None => Event::Gone(holder),
                        });
                    });
                    return;
                }
            },
            Ask::Pass => self.take_over(&asked).map_or_else(Reply::Refused, |()| Reply::Done),
            _ => Reply::Refused("not here".into()),
        };
        tokio::spawn(async move { asked.reply(&reply).await });
    }
}
