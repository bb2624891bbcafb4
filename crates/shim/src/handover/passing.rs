//! Clients that one shim passes to another.
//!
//! With a client goes a [`PassToken`], and who has taken it serves: a sibling that stalled may find the request when
//! who asked has waited long enough and serves the client itself.

use super::Group;
use crate::drain::Stop;
use crate::relay::Pass;
use crate::shared::Shared;
use berth_node::ipc::wire::{Ask, Reply};
use berth_node::ipc::{self, IncomingRequest};
use berth_node::terms::Phase;
use berth_os::socket;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::unistd::read;
use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::sleep;

/// Most clients that are on their way to a sibling at once. Each takes descriptors here and there, and a place in
/// the queue of the sibling's socket, which net.core.somaxconn may cut to 128.
pub(crate) const PASSES: usize = 32;

/// How long a sibling may say nothing to what is offered and can be served here as well.
const AT_ONCE: Duration = Duration::from_millis(100);

impl Group {
    /// Takes a client's connection from a leaving sibling.
    pub(super) fn take_over(&self, asked: &IncomingRequest) -> Result<(), String> {
        if self.machine.phase() != Phase::Joined {
            return Err(format!("this shim is {}", self.machine.phase().as_str()));
        }
        // Two that leave would pass it to and fro.
        if *self.shared.stop.borrow() != Stop::No {
            return Err("this shim is leaving".to_owned());
        }
        // One more would lack descriptors for its leg, and so would what siblings say.
        if self.dispatcher.is_full() {
            self.count("take", "full");
            return Err("this shim has as many connections as --max-connections or its open files allow".to_owned());
        }
        let [client, token] = &asked.descriptors[..] else {
            return Err(format!("{} descriptors came, not two", asked.descriptors.len()));
        };
        let peer = socket::check_connection(client.as_fd())?;
        let client = client.try_clone().map_err(|error| error.to_string())?;
        if !PassToken::from(token.try_clone().map_err(|error| error.to_string())?).take() {
            self.count("take", "late");
            return Err("who asked serves it already".to_owned());
        }
        self.dispatcher.take_over(TcpStream::from(client), peer, asked.rest.clone());
        self.count("take", "ok");
        Ok(())
    }

    /// Says which siblings take clients now: those that wait for one that does no more give up.
    pub(super) fn tell_who_takes(&self) {
        let joined = self.machine.joined_siblings();
        let Shared { phase, table, config, cluster, has_successor, .. } = &self.shared;
        let sibling = self.machine.has_successor();
        has_successor.store(sibling, Relaxed);
        if config.cluster.is_some() {
            cluster.tell(phase.borrow().0, sibling, self.is_blocked(), &table.borrow(), config.discover);
        }
        let instances = joined.into_iter().filter_map(|holder| self.siblings.instances.get(&holder));
        let paths: Vec<_> = instances.filter_map(|instance| self.shared.berth.socket_path(instance).ok()).collect();
        self.siblings.passing.takers.send_if_modified(|now| std::mem::replace(now, paths.clone()) != paths);
    }

    /// Gives a client's connection to the first joined sibling that takes it.
    pub(super) fn pass(&self, pass: Pass) {
        let (passing, metrics) = (self.siblings.passing.clone(), self.shared.metrics.clone());
        tokio::spawn(async move {
            let Pass { client, said, at_once, taken } = pass;
            let passed = passing.pass(client.as_fd(), &said, at_once).await;
            // What is only offered is served here as well.
            if passed || !at_once {
                metrics.handed_over("pass", if passed { "ok" } else { "failed" });
            }
            let _ = taken.send(passed);
        });
    }
}

/// Lets [`PASSES`] clients be passed on at once. All that an instance had come at the moment when it ends.
#[derive(Debug)]
pub(super) struct Passing {
    /// The sockets of the siblings that are joined, by leases that hold.
    takers: watch::Sender<Vec<PathBuf>>,
    free: Semaphore,
    /// How often a sibling said something to a pass: who waits sees that it goes on.
    answers: AtomicU64,
    /// How long a sibling may say nothing.
    patience: Duration,
}

impl Passing {
    /// A sibling with a lease that holds is busy or stalls for a moment: who is relayed to its instance instead is
    /// cut when this shim ends. So it is waited for as long as its lease holds, and as long as a client may be held.
    pub(super) fn new(lease: Duration, hold: Duration) -> Self {
        Self {
            takers: watch::Sender::default(),
            free: Semaphore::new(PASSES),
            answers: AtomicU64::new(0),
            patience: lease.min(hold),
        }
    }

    /// Offers a client to siblings in turn. True: one has it.
    async fn pass(&self, client: BorrowedFd<'_>, said: &[u8], at_once: bool) -> bool {
        let turn = if at_once { self.free.try_acquire().ok() } else { self.next().await };
        let Some(_turn) = turn else { return false };
        let patience = if at_once { self.patience.min(AT_ONCE) } else { self.patience };
        let Ok(token) = PassToken::new() else { return false };
        let siblings = self.takers.borrow().clone();
        for path in siblings {
            let with = [client, token.0.as_fd()];
            let reply = tokio::select! {
                reply = ipc::exchange(&path, Ask::Pass, said, &with, patience) => reply,
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
        // Whatever was said or not: a sibling has it if it has taken it.
        !token.take()
    }

    /// Waits for a turn; none when there is no sibling, or none says anything any more.
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

    /// Waits until the siblings that take clients are as wanted.
    async fn until(&self, wanted: impl Fn(&[PathBuf]) -> bool) {
        let _ = self.takers.subscribe().wait_for(|takers| wanted(takers)).await;
    }
}

/// The right to serve a client: one byte in a pipe that nobody writes to any more. Who reads it has it; all others
/// read its end.
struct PassToken(OwnedFd);

impl PassToken {
    fn new() -> io::Result<Self> {
        let (reader, mut writer) = io::pipe()?;
        writer.write_all(&[0])?;
        Ok(Self(reader.into()))
    }

    fn take(self) -> bool {
        // What a sibling sent may be something else, and must not block.
        let unblocked = fcntl(&self.0, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).is_ok();
        unblocked && read(&self.0, &mut [0]) == Ok(1)
    }
}

impl From<OwnedFd> for PassToken {
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}
