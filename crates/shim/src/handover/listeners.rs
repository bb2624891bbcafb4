//! The listeners of this shim: its sockets that do not listen yet, and its accept loops.

use super::Group;
use super::machine::Action;
use super::peers::lock_published;
use crate::accept::Accepting;
use berth_node::terms::Cookie;
use berth_os::explained;
use berth_os::off_thread::OffThread;
use berth_os::{proc_net, sock_diag, socket};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Length of the accept queue. The kernel limits the length to net.core.somaxconn.
const BACKLOG: u32 = 4096;

/// Time until listen or accept is tried again on a socket that failed.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// How long the search for the process that holds a port may take.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) enum LoopEvent {
    /// The accept loop accepts clients.
    Runs(Cookie),
    /// The accept loop has ended, on request or because the listener no longer listens.
    Ended(Cookie),
    /// The accept loop could not start or go on. The string says why.
    Failed(Cookie, SocketAddr, String),
    /// The inodes of all listeners on the shim's addresses.
    Listed(BTreeSet<u64>),
}

pub(super) struct Listeners {
    /// Sockets of this shim that are bound and do not listen yet.
    pub(super) waiting: BTreeMap<SocketAddr, Arc<OwnedFd>>,
    /// Tells each accept loop whether to accept. The entry of a loop stays until the loop has
    /// ended.
    pub(super) loops: BTreeMap<Cookie, watch::Sender<Accepting>>,
    events: mpsc::UnboundedSender<LoopEvent>,
    pub(super) retry: Option<Instant>,
    /// Addresses on which a socket of this shim could not listen.
    pub(super) not_listening: BTreeSet<SocketAddr>,
    pub(super) failed: BTreeSet<Cookie>,
    /// Inodes of the listeners on the shim's addresses that belonged neither to this shim nor to a
    /// sibling at the last search.
    unknown: BTreeSet<u64>,
}

impl Listeners {
    pub(super) fn new(
        sockets: Vec<(SocketAddr, OwnedFd)>,
        events: mpsc::UnboundedSender<LoopEvent>,
    ) -> Self {
        let waiting = sockets
            .into_iter()
            .map(|(address, socket)| (address, Arc::new(socket)))
            .collect();
        let (not_listening, failed, unknown) = Default::default();
        Self {
            waiting,
            loops: BTreeMap::new(),
            events,
            retry: None,
            not_listening,
            failed,
            unknown,
        }
    }
}

impl Group {
    pub(super) fn on_loop_event(&mut self, event: LoopEvent) {
        let actions = match event {
            LoopEvent::Runs(cookie) => self.machine.on_accepting(cookie),
            LoopEvent::Ended(cookie) => {
                self.listeners.loops.remove(&cookie);
                self.machine.on_loop_ended(cookie)
            }
            LoopEvent::Failed(cookie, address, why) => {
                self.listeners.loops.remove(&cookie);
                self.on_accept_failure(cookie, address, &why)
            }
            LoopEvent::Listed(inodes) => return self.count_foreign_listeners(&inodes),
        };
        self.carry_out_actions(actions);
    }

    pub(super) fn listen(&mut self, address: SocketAddr) -> Vec<Action> {
        let listened = self.bind_socket(address).and_then(|own| {
            socket::start_listening(own.as_fd(), BACKLOG)?;
            socket::read_cookie(own.as_fd())
        });
        match listened {
            Ok(cookie) => {
                let cookie = Cookie(cookie);
                if let Some(own) = self.listeners.waiting.remove(&address) {
                    lock_published(&self.published)
                        .held
                        .insert(cookie, (address, own));
                }
                self.count_handover_step("listen", "ok");
                let trouble = describe_listen_trouble(address);
                self.logged_problems
                    .retain(|logged| !logged.starts_with(&trouble));
                self.machine.on_listening(address, cookie)
            }
            Err(error) => {
                // The search for the process that holds the port reads every socket of the host. So
                // each problem causes one search, and not each attempt.
                if self
                    .logged_problems
                    .insert(describe_listen_trouble(address) + &error.to_string())
                {
                    tokio::spawn(async move {
                        let why = match error.raw_os_error() {
                            Some(libc::EADDRINUSE) => {
                                let explain = move || proc_net::explain_in_use(address);
                                OffThread::new("/proc")
                                    .call_within(SEARCH_TIMEOUT, explain)
                                    .await
                            }
                            _ => Err(error),
                        };
                        let why = why.unwrap_or_else(|error| error.to_string());
                        tracing::error!(
                            code = %explained::CANNOT_LISTEN,
                            %address,
                            "cannot listen, trying again: {why}"
                        );
                    });
                }
                self.count_handover_step("listen", "failed");
                self.listeners.not_listening.insert(address);
                self.listeners.retry = Some(Instant::now() + RETRY_PAUSE);
                Vec::new()
            }
        }
    }

    /// Returns this shim's socket for an address, which does not listen yet. Binds a new socket if
    /// the last one was handed over.
    pub(super) fn bind_socket(&mut self, address: SocketAddr) -> io::Result<Arc<OwnedFd>> {
        Ok(match self.listeners.waiting.entry(address) {
            Entry::Occupied(own) => own.get().clone(),
            Entry::Vacant(free) => {
                let freebind = self
                    .config
                    .place
                    .listen
                    .iter()
                    .any(|listen| listen.addr == address && listen.freebind);
                let own = socket::bind(address, freebind)?;
                free.insert(Arc::new(own)).clone()
            }
        })
    }

    /// Accepts from a listener, whichever shim made the listener. Connections inherit the options
    /// that this shim sets.
    pub(super) fn start_accepting(&mut self, cookie: Cookie) -> Vec<Action> {
        let held = lock_published(&self.published).held.get(&cookie).cloned();
        let Some((address, listener)) = held else {
            return self.machine.on_loop_failed(cookie);
        };
        let ready = socket::set_nodelay_and_keepalive(listener.as_fd())
            .and_then(|()| socket::start_listening(listener.as_fd(), BACKLOG));
        match ready {
            Ok(()) => {
                tracing::debug!(%address, listener = cookie.0, "accepting");
                self.start_loop(cookie, address, listener, Accepting::Yes);
                self.count_handover_step("accept", "ok");
                Vec::new()
            }
            Err(error) => self.on_accept_failure(cookie, address, &error.to_string()),
        }
    }

    fn start_loop(
        &mut self,
        cookie: Cookie,
        address: SocketAddr,
        listener: Arc<OwnedFd>,
        how: Accepting,
    ) {
        // The loop runs, so the next tick must not report it as ended.
        self.listeners.failed.remove(&cookie);
        let accepting = watch::Sender::new(how);
        let (runs, ends) = (self.listeners.events.clone(), self.listeners.events.clone());
        // The loop itself sends this event, because a sibling releases the listener on this event.
        let runs = move || drop(runs.send(LoopEvent::Runs(cookie)));
        let task = self
            .dispatcher
            .spawn_accept_loop(listener, accepting.subscribe(), runs);
        self.listeners.loops.insert(cookie, accepting);
        tokio::spawn(async move {
            let _ = ends.send(match task.await {
                Ok(Ok(())) => LoopEvent::Ended(cookie),
                Ok(Err(error)) => LoopEvent::Failed(cookie, address, error.to_string()),
                Err(error) => {
                    tracing::error!(
                        code = %explained::ACCEPT_LOOP_ENDED,
                        %address,
                        %error,
                        "an accept loop ended: a bug"
                    );
                    LoopEvent::Failed(cookie, address, error.to_string())
                }
            });
        });
    }

    /// Accepts the clients in the queue of a sibling's listener, and closes this shim's duplicate
    /// of it. No other shim is left for these clients.
    pub(super) fn drain_guard(
        &mut self,
        cookie: Cookie,
        guard: Option<(SocketAddr, Arc<OwnedFd>)>,
    ) -> Vec<Action> {
        let Some((address, guard)) = guard else {
            return self.machine.on_loop_ended(cookie);
        };
        self.start_loop(cookie, address, guard, Accepting::Rest);
        Vec::new()
    }

    pub(super) fn on_accept_failure(
        &mut self,
        cookie: Cookie,
        address: SocketAddr,
        why: &str,
    ) -> Vec<Action> {
        if self
            .logged_problems
            .insert(format!("accept {address}: {why}"))
        {
            tracing::error!(
                code = %explained::CANNOT_ACCEPT_YET,
                %address,
                "cannot accept, trying again: {why}"
            );
        }
        self.count_handover_step("accept", "failed");
        self.listeners.retry = Some(Instant::now() + RETRY_PAUSE);
        self.listeners.failed.insert(cookie);
        self.machine.on_loop_failed(cookie)
    }

    pub(super) fn end_loop(&self, cookie: Cookie, how: Accepting) {
        if let Some(accepting) = self.listeners.loops.get(&cookie) {
            accepting.send_replace(how);
        }
    }

    /// Lists the listeners on the shim's addresses. Does nothing while a sibling has no connection
    /// to this shim: an unknown listener may be that sibling's, and the missing connection is
    /// reported already.
    pub(super) fn start_listing_listeners(&self) {
        if !self.machine.has_all_guards() {
            return;
        }
        let addresses = self.machine.addresses().to_vec();
        let (kernel, events, most) = (
            self.shared.kernel.clone(),
            self.listeners.events.clone(),
            self.config.lease,
        );
        tokio::spawn(async move {
            let listed = move || {
                let listeners = addresses
                    .into_iter()
                    .flat_map(|at| sock_diag::listeners_at(at).unwrap_or_default());
                listeners.map(|listener| listener.inode).collect()
            };
            if let Ok(inodes) = kernel.call_within(most, listed).await {
                let _ = events.send(LoopEvent::Listed(inodes));
            }
        });
    }

    /// Counts the listeners on the shim's addresses that no answering shim of the berth holds. The
    /// holder may be another proxy of the same uid, a shim with another run directory, or a shim
    /// that hung before the shim shared its listener. Such listeners get a part of new connections, and
    /// no other shim can accept from them. A listener counts when found twice: at first, its
    /// duplicate may be on its way.
    fn count_foreign_listeners(&mut self, inodes: &BTreeSet<u64>) {
        if !self.machine.has_all_guards() {
            return;
        }
        let guards: BTreeSet<_> = lock_published(&self.published)
            .held
            .values()
            .filter_map(|(_, listener)| socket::read_inode(listener.as_fd()))
            .collect();
        let unknown = inodes - &guards;
        let foreign = unknown.intersection(&self.listeners.unknown).count();
        let before = self
            .shared
            .metrics
            .foreign_listeners
            .set(i64::try_from(foreign).unwrap_or(i64::MAX));
        if before == 0 && foreign > 0 {
            tracing::warn!(
                code = %explained::FOREIGN_LISTENER,
                listeners = foreign,
                "no shim that answers holds some listeners on the berth's port, and these listeners get a share of the new \
                 connections: `ss -ltnp` names the processes; end a shim that hangs, and stop another program"
            );
        }
        self.listeners.unknown = unknown;
    }
}

/// Returns the start of the log line for a failed listen(2) on an address.
fn describe_listen_trouble(address: SocketAddr) -> String {
    format!("listen {address}: ")
}
