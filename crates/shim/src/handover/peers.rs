//! The connections to siblings, on which each shim announces its state and passes guards.
//!
//! Each connection has two halves. The writer reads the state at the moment of sending, so that
//! updates do not queue while a sibling hangs. The reader checks every update before the update is
//! used.

use berth_node::ipc::wire::{self, Update};
use berth_node::terms::{Announce, Cookie, ShimId};
use berth_os::explained;
use berth_os::{seqpacket, socket};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc};

/// State that this shim announces to its siblings, and the listeners that it holds.
#[derive(Debug, Default)]
pub struct PublishedState {
    pub announce: Announce,
    /// Listeners in `held` that siblings get duplicates of.
    pub guards: BTreeSet<Cookie>,
    pub held: BTreeMap<Cookie, (SocketAddr, Arc<OwnedFd>)>,
}

/// An event of a connection to a sibling.
#[derive(Debug)]
pub enum PeerEvent {
    Connected(ShimId, AsyncFd<OwnedFd>),
    /// The sibling sent an update, with checked listeners.
    Updated(ShimId, Announce, Vec<(Cookie, SocketAddr, OwnedFd)>),
    /// The sibling refused the connection, and said why.
    Refused(ShimId, String),
    /// A shim replied that is not the holder of the lease. The string has the details.
    Conflict(ShimId, String),
    /// The sibling cannot be dialled. The string says why.
    Unreachable(ShimId, String),
    Gone(ShimId),
    /// The result of writing the own lease.
    Written(io::Result<()>),
}

pub fn lock_published(published: &Mutex<PublishedState>) -> MutexGuard<'_, PublishedState> {
    published.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Exchanges updates with a sibling until the connection ends. Each notification of `changed` sends
/// an update.
pub async fn exchange_updates(
    socket: AsyncFd<OwnedFd>,
    holder: ShimId,
    addresses: Arc<[SocketAddr]>,
    published: Arc<Mutex<PublishedState>>,
    changed: Arc<Notify>,
    events: mpsc::UnboundedSender<PeerEvent>,
) {
    let sending = async {
        match send_updates(&socket, &published, &changed).await {
            // The sending half waits for ever now, so that the sibling's last update can still be
            // read. The receiving half finds the end after that update.
            Err(error) if is_end(&error) => std::future::pending().await,
            ended => ended,
        }
    };
    let ended = tokio::select! {
        sent = sending => sent,
        received = receive_updates(&socket, holder, &addresses, &events) => received,
    };
    match ended {
        Err(error) if is_end(&error) => {
            tracing::debug!(sibling = holder.0, "a sibling closed its connection");
        }
        Err(error) => tracing::warn!(
            code = %explained::LISTENERS_NOT_SHARED,
            sibling = holder.0,
            "the connection to a sibling ended: {error}"
        ),
        Ok(()) => {}
    }
    let _ = events.send(PeerEvent::Gone(holder));
}

/// True if the error means that the sibling is gone.
fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

async fn send_updates(
    socket: &AsyncFd<OwnedFd>,
    published: &Mutex<PublishedState>,
    changed: &Notify,
) -> io::Result<()> {
    let mut given: BTreeSet<Cookie> = BTreeSet::new();
    loop {
        changed.notified().await;
        loop {
            // The state is read only when the socket has room, so that it is the latest.
            let mut ready = socket.writable().await?;
            let (message, guards, sockets, more) = {
                let published = lock_published(published);
                given.retain(|cookie| published.held.contains_key(cookie));
                let wanted =
                    |cookie: &Cookie| published.guards.contains(cookie) && !given.contains(cookie);
                let new: Vec<_> = published
                    .held
                    .iter()
                    .filter(|(cookie, _)| wanted(cookie))
                    .collect();
                let more = new.len() > seqpacket::MAX_DESCRIPTORS;
                let new = &new[..new.len().min(seqpacket::MAX_DESCRIPTORS)];
                let guards: Vec<_> = new
                    .iter()
                    .map(|(cookie, (address, _))| (**cookie, *address))
                    .collect();
                let sockets: Vec<_> = new.iter().map(|(_, (_, socket))| socket.clone()).collect();
                let update = Update {
                    version: wire::STATE_VERSION,
                    announce: published.announce.clone(),
                    guards,
                };
                (serde_json::to_vec(&update)?, update.guards, sockets, more)
            };
            let descriptors: Vec<_> = sockets.iter().map(|socket| socket.as_fd()).collect();
            match ready.try_io(|to| seqpacket::transmit_message(to.as_fd(), &message, &descriptors))
            {
                Err(_would_block) => continue,
                Ok(sent) => sent?,
            }
            given.extend(guards.iter().map(|(cookie, _)| *cookie));
            if !more {
                break;
            }
        }
    }
}

async fn receive_updates(
    socket: &AsyncFd<OwnedFd>,
    holder: ShimId,
    addresses: &[SocketAddr],
    events: &mpsc::UnboundedSender<PeerEvent>,
) -> io::Result<()> {
    let invalid = |what: String| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("invalid message from peer: {what}"),
        )
    };
    let mut buffer = vec![0; seqpacket::MAX_MESSAGE];
    let mut reset = false;
    loop {
        let received = socket
            .async_io(Interest::READABLE, |socket| {
                seqpacket::receive_message(socket.as_fd(), &mut buffer)
            })
            .await;
        let received = match received {
            // The kernel first reports, once, that the sibling died with unread data. Earlier
            // messages of the sibling are still queued.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset && !reset => {
                reset = true;
                continue;
            }
            received => received?,
        };
        if received.length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Update {
            announce, guards, ..
        } = wire::parse_update(&buffer[..received.length]).map_err(invalid)?;
        if guards.len() != received.descriptors.len() {
            return Err(invalid(format!(
                "{} listeners, and {} descriptors",
                guards.len(),
                received.descriptors.len()
            )));
        }
        let mut checked = Vec::new();
        for ((cookie, address), descriptor) in guards.into_iter().zip(received.descriptors) {
            socket::check_listener(descriptor.as_fd(), address, cookie.0)
                .map_err(|why| invalid(format!("the sibling's listener of {address}: {why}")))?;
            // Two shims may share one address and differ in others. A listener of an address that
            // this shim does not listen on is not kept.
            if addresses.contains(&address) {
                checked.push((cookie, address, descriptor));
            } else {
                tracing::info!(sibling = holder.0, %address, "refused a sibling's listener: this shim does not listen on the address");
            }
        }
        if events
            .send(PeerEvent::Updated(holder, announce, checked))
            .is_err()
        {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    /// Returns the events of a sibling that sent an update and died. `unread`: the sibling left
    /// unread data. `updates`: an update was being sent to the sibling.
    async fn receive_events(unread: bool, updates: bool) -> Vec<PeerEvent> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let (theirs, ours) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        let listener = socket::bind("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let address = socket::local_address(listener.as_fd()).unwrap();
        let guards = vec![(
            Cookie(socket::read_cookie(listener.as_fd()).unwrap()),
            address,
        )];
        let update = Update {
            version: wire::STATE_VERSION,
            announce: Announce::default(),
            guards,
        };
        let last = serde_json::to_vec(&update).unwrap();
        seqpacket::transmit_message(theirs.as_fd(), &last, &[listener.as_fd()]).unwrap();
        if unread {
            seqpacket::transmit_message(ours.as_fd(), b"unread", &[]).unwrap();
        }
        drop(theirs);
        let ours = berth_os::make_awaitable(ours, Interest::READABLE | Interest::WRITABLE).unwrap();
        let (changed, (events, mut received)) =
            (Arc::new(Notify::new()), mpsc::unbounded_channel());
        if updates {
            changed.notify_one();
        }
        exchange_updates(
            ours,
            ShimId(1),
            [address].into(),
            Arc::default(),
            changed,
            events,
        )
        .await;
        std::iter::from_fn(|| received.try_recv().ok()).collect()
    }

    #[tokio::test]
    async fn the_last_update_of_a_sibling_that_died_is_received() {
        // Either the sending or the receiving half may notice the death first, by chance. So each
        // case is tried many times.
        for _ in 0..20 {
            for (unread, updates) in [(false, false), (true, false), (false, true), (true, true)] {
                let events = receive_events(unread, updates).await;
                let [
                    PeerEvent::Updated(ShimId(1), _, guards),
                    PeerEvent::Gone(ShimId(1)),
                ] = &events[..]
                else {
                    panic!("unread {unread}, updates {updates}: {events:?}")
                };
                assert_eq!(guards.len(), 1);
            }
        }
    }
}
