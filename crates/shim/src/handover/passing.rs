//! Passes clients between shims.
//!
//! A [`PassToken`] goes with each client. Only the shim that has claimed the token serves the
//! client: a sibling that stalled may read the request after the sender has given up and serves the
//! client.

use super::Group;
use crate::relay::PassRequest;
use crate::shared::Shared;
use crate::state::Stop;
use berth_node::ipc::wire::{Ask, Reply};
use berth_node::ipc::{self, IncomingRequest};
use berth_node::terms::Phase;
use berth_os::socket;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::read;
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::{sleep, timeout};

/// Maximum number of clients that are on their way to siblings at once. Each client needs
/// descriptors in both shims, and a place in the queue of the sibling's socket, which
/// net.core.somaxconn may limit to 128.
pub(crate) const MAX_PASSES: usize = 32;

/// How long a client that a share gives to a sibling may wait for its turn, and again for the
/// sibling's reply. After that this shim serves the client itself.
const OFFER_TIMEOUT: Duration = Duration::from_millis(100);

impl Group {
    /// Takes a client's connection from a sibling.
    pub(super) fn take_over_client(&self, request: &IncomingRequest) -> Result<(), String> {
        if self.machine.phase() != Phase::Joined {
            return Err(format!("this shim is {}", self.machine.phase().as_str()));
        }
        // Two leaving shims would pass the client back and forth.
        if self.shared.stop() != Stop::No {
            return Err("this shim is leaving".to_owned());
        }
        // At this limit, descriptors may be missing for the client's connection to an instance, and
        // for the messages of siblings.
        if self.dispatcher.is_full() {
            self.count_handover_step("take", "full");
            return Err(
                "this shim has as many connections as --max-connections or its open files allow"
                    .to_owned(),
            );
        }
        let [client, token] = &request.descriptors[..] else {
            return Err(format!(
                "{} descriptors came instead of two",
                request.descriptors.len()
            ));
        };
        let peer = socket::check_connection(client.as_fd())?;
        socket::set_nonblocking(client.as_fd()).map_err(|error| error.to_string())?;
        let client = client.try_clone().map_err(|error| error.to_string())?;
        if !PassToken(token.try_clone().map_err(|error| error.to_string())?).claim_client() {
            self.count_handover_step("take", "late");
            return Err("the sender already serves the client".to_owned());
        }
        self.dispatcher
            .take_over_client(TcpStream::from(client), peer, request.rest.clone());
        self.count_handover_step("take", "ok");
        Ok(())
    }

    /// Publishes which siblings take clients. Passes that wait for a removed sibling are given up.
    pub(super) fn publish_takers(&self) {
        let joined = self.machine.joined_siblings();
        let Shared {
            table,
            config,
            cluster,
            ..
        } = &self.shared;
        let sibling = self.machine.has_successor();
        if config.cluster.is_some() {
            let (phase, blocked) = (self.machine.phase(), self.shared.is_worker_blocked());
            cluster.publish_facts(phase, sibling, blocked, &table.borrow(), config.discover);
        }
        let instances = joined
            .into_iter()
            .filter_map(|holder| self.siblings.instances.get(&holder));
        let paths: Vec<_> = instances
            .filter_map(|instance| self.shared.berth.socket_path(instance).ok())
            .collect();
        self.siblings
            .passing
            .takers
            .send_if_modified(|now| std::mem::replace(now, paths.clone()) != paths);
    }

    /// Passes a client's connection to the first joined sibling that takes the connection.
    pub(super) fn pass_client(&self, pass: PassRequest) {
        let (passing, metrics) = (self.siblings.passing.clone(), self.shared.metrics.clone());
        tokio::spawn(async move {
            let PassRequest {
                client,
                sent,
                only,
                taken,
            } = pass;
            let passed = passing
                .pass_client(client.as_fd(), &sent, only.as_deref())
                .await;
            // A client that a share offers to a sibling may be declined. This shim then serves the
            // client, and nothing has failed.
            if passed || only.is_none() {
                metrics.count_handover("pass", if passed { "ok" } else { "failed" });
            }
            let _ = taken.send(passed);
        });
    }
}

/// Passes at most [`MAX_PASSES`] clients at once. All clients of an instance need passing at the
/// moment when the instance ends.
#[derive(Debug)]
pub(super) struct Passer {
    /// Sockets of the siblings that may take clients: they have joined, and their leases are valid.
    takers: watch::Sender<Vec<PathBuf>>,
    free: Semaphore,
    /// Number of siblings' replies so far. A pass that waits for its turn sees by this number that
    /// siblings reply.
    answers: AtomicU64,
    /// How long a sibling may take to reply.
    patience: Duration,
}

impl Passer {
    /// Makes a passer. It waits for a sibling's reply as long as a lease lasts, but no longer than
    /// a client may be held. A sibling with a valid lease is busy or stalls only for a moment. If
    /// this shim relayed the client to the sibling's instance instead, the end of this shim would
    /// cut the connection.
    pub(super) fn new(lease: Duration, hold: Duration) -> Self {
        Self {
            takers: watch::Sender::default(),
            free: Semaphore::new(MAX_PASSES),
            answers: AtomicU64::new(0),
            patience: lease.min(hold),
        }
    }

    /// Offers a client to the siblings in turn, or only to `only`. Returns true if a sibling has
    /// the client.
    async fn pass_client(&self, client: BorrowedFd<'_>, sent: &[u8], only: Option<&Path>) -> bool {
        let turn = match only {
            // A short wait is allowed, so that the share comes out right when many clients come at
            // one moment.
            Some(_) => timeout(OFFER_TIMEOUT, self.free.acquire())
                .await
                .ok()
                .and_then(Result::ok),
            None => self.wait_for_permit().await,
        };
        let Some(_turn) = turn else { return false };
        let patience = if only.is_some() {
            self.patience.min(OFFER_TIMEOUT)
        } else {
            self.patience
        };
        let Ok(token) = PassToken::new() else {
            return false;
        };
        let siblings = self.takers.borrow().clone();
        for path in siblings
            .into_iter()
            .filter(|path| only.is_none_or(|only| path == only))
        {
            let with = [client, token.0.as_fd()];
            let reply = tokio::select! {
                reply = ipc::exchange_messages(&path, Ask::Pass, sent, &with, patience) => reply,
                () = self.wait_until_takers(|takers| !takers.contains(&path)) => {
                    tracing::debug!(path = %path.display(), "not passed: the sibling is no longer joined");
                    continue;
                }
            };
            match reply {
                Ok((reply, _)) => {
                    self.answers.fetch_add(1, Relaxed);
                    if reply == Reply::Done {
                        return true;
                    }
                    tracing::debug!(path = %path.display(), ?reply, "not passed");
                }
                Err(error) => tracing::debug!(path = %path.display(), %error, "not passed"),
            }
        }
        // If the token is gone, a sibling has claimed it and has the client, whether a reply came
        // or not.
        !token.claim_client()
    }

    /// Waits until one more client may be on its way. `None` if no sibling takes clients, or none
    /// replies any more.
    async fn wait_for_permit(&self) -> Option<SemaphorePermit<'_>> {
        let mut turn = pin!(self.free.acquire());
        loop {
            let before = self.answers.load(Relaxed);
            tokio::select! {
                biased;
                () = self.wait_until_takers(<[PathBuf]>::is_empty) => return None,
                turn = &mut turn => return turn.ok(),
                () = sleep(self.patience) => if self.answers.load(Relaxed) == before {
                    return None;
                },
            }
        }
    }

    /// Waits until the siblings that take clients satisfy `wanted`.
    async fn wait_until_takers(&self, wanted: impl Fn(&[PathBuf]) -> bool) {
        let _ = self
            .takers
            .subscribe()
            .wait_for(|takers| wanted(takers))
            .await;
    }
}

/// The right to serve a client: one byte in a pipe without writers. The process that reads the byte
/// has the right; other readers get the end of file.
struct PassToken(OwnedFd);

impl PassToken {
    fn new() -> io::Result<Self> {
        let (reader, mut writer) = io::pipe()?;
        writer.write_all(&[0])?;
        Ok(Self(reader.into()))
    }

    fn claim_client(self) -> bool {
        // A sibling may have sent another descriptor than a pipe. Reading it must not block.
        let unblocked = fcntl(&self.0, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).is_ok();
        unblocked && read(&self.0, &mut [0]) == Ok(1)
    }
}
