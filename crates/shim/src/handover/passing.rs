//! Clients that one shim passes to another.
//!
//! A [`PassToken`] goes with a client, and the shim that has claimed it serves the client: a sibling that stalled may read the request
//! when the sender has given up and serves the client itself.

use super::Group;
use crate::relay::Pass;
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

/// Most clients that are on their way to a sibling at once. Each takes descriptors here and there, and a place in
/// the queue of the sibling's socket, which net.core.somaxconn may cut to 128.
pub(crate) const PASSES: usize = 32;

/// How long an offer for a share may wait for its turn, and the sibling may take to reply: the client can be served here as well.
const AT_ONCE: Duration = Duration::from_millis(100);

impl Group {
    /// Takes a client's connection from a sibling.
    pub(super) fn take_over(&self, request: &IncomingRequest) -> Result<(), String> {
        if self.machine.phase() != Phase::Joined {
            return Err(format!("this shim is {}", self.machine.phase().as_str()));
        }
        // Two that leave would pass it back and forth.
        if self.shared.stop() != Stop::No {
            return Err("this shim is leaving".to_owned());
        }
        // There may be no descriptors for its connection to an instance, nor for the messages of siblings.
        if self.dispatcher.is_full() {
            self.count("take", "full");
            return Err(
                "this shim has as many connections as --max-connections or its open files allow"
                    .to_owned(),
            );
        }
        let [client, token] = &request.descriptors[..] else {
            return Err(format!(
                "{} descriptors came, not two",
                request.descriptors.len()
            ));
        };
        let peer = socket::check_connection(client.as_fd())?;
        socket::set_nonblocking(client.as_fd()).map_err(|error| error.to_string())?;
        let client = client.try_clone().map_err(|error| error.to_string())?;
        if !PassToken(token.try_clone().map_err(|error| error.to_string())?).claim() {
            self.count("take", "late");
            return Err("the sender serves it already".to_owned());
        }
        self.dispatcher
            .take_over(TcpStream::from(client), peer, request.rest.clone());
        self.count("take", "ok");
        Ok(())
    }

    /// Publishes which siblings take clients: those passes that wait for another one are given up.
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
            let (phase, blocked) = (self.machine.phase(), self.shared.is_blocked());
            cluster.publish(phase, sibling, blocked, &table.borrow(), config.discover);
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

    /// Passes a client's connection to the first joined sibling that takes it.
    pub(super) fn pass(&self, pass: Pass) {
        let (passing, metrics) = (self.siblings.passing.clone(), self.shared.metrics.clone());
        tokio::spawn(async move {
            let Pass {
                client,
                sent,
                only,
                taken,
            } = pass;
            let passed = passing.pass(client.as_fd(), &sent, only.as_deref()).await;
            // A client that is only offered is served here otherwise.
            if passed || only.is_none() {
                metrics.handed_over("pass", if passed { "ok" } else { "failed" });
            }
            let _ = taken.send(passed);
        });
    }
}

/// Lets [`PASSES`] clients be passed at once. All clients of an instance come at the moment when it ends.
#[derive(Debug)]
pub(super) struct Passing {
    /// The sockets of the siblings that are joined, with valid leases.
    takers: watch::Sender<Vec<PathBuf>>,
    free: Semaphore,
    /// Number of replies to passes: a pass that waits for its turn sees progress.
    answers: AtomicU64,
    /// How long a sibling may take to reply.
    patience: Duration,
}

impl Passing {
    /// A sibling with a valid lease is busy or stalls for a moment: a client that is relayed to its instance instead is
    /// cut when this shim ends. So the wait is as long as a lease holds, and as long as a client may be held.
    pub(super) fn new(lease: Duration, hold: Duration) -> Self {
        Self {
            takers: watch::Sender::default(),
            free: Semaphore::new(PASSES),
            answers: AtomicU64::new(0),
            patience: lease.min(hold),
        }
    }

    /// Offers a client to siblings in turn, or only to this one. True: one has it.
    async fn pass(&self, client: BorrowedFd<'_>, sent: &[u8], only: Option<&Path>) -> bool {
        let turn = match only {
            // For a share, which is to be right also when many clients come at one moment.
            Some(_) => timeout(AT_ONCE, self.free.acquire())
                .await
                .ok()
                .and_then(Result::ok),
            None => self.next().await,
        };
        let Some(_turn) = turn else { return false };
        let patience = if only.is_some() {
            self.patience.min(AT_ONCE)
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
                reply = ipc::exchange(&path, Ask::Pass, sent, &with, patience) => reply,
                () = self.until(|takers| !takers.contains(&path)) => {
                    tracing::debug!(path = %path.display(), "not passed: the sibling is not joined any more");
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
        // With or without a reply: a sibling has the client if it has taken the token.
        !token.claim()
    }

    /// Waits for a turn; none when there is no sibling, or none replies any more.
    async fn next(&self) -> Option<SemaphorePermit<'_>> {
        let mut turn = pin!(self.free.acquire());
        loop {
            let before = self.answers.load(Relaxed);
            tokio::select! {
                biased;
                () = self.until(<[PathBuf]>::is_empty) => return None,
                turn = &mut turn => return turn.ok(),
                () = sleep(self.patience) => if self.answers.load(Relaxed) == before {
                    return None;
                },
            }
        }
    }

    /// Waits until the siblings that take clients satisfy `wanted`.
    async fn until(&self, wanted: impl Fn(&[PathBuf]) -> bool) {
        let _ = self
            .takers
            .subscribe()
            .wait_for(|takers| wanted(takers))
            .await;
    }
}

/// The right to serve a client: one byte in a pipe without writers. The process that reads it has the right; all others
/// read its end.
struct PassToken(OwnedFd);

impl PassToken {
    fn new() -> io::Result<Self> {
        let (reader, mut writer) = io::pipe()?;
        writer.write_all(&[0])?;
        Ok(Self(reader.into()))
    }

    fn claim(self) -> bool {
        // A descriptor from a sibling may be something else, and must not block.
        let unblocked = fcntl(&self.0, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).is_ok();
        unblocked && read(&self.0, &mut [0]) == Ok(1)
    }
}
