//! The connection to the supervisor of an instance (`berth exec --pass inject`), which makes
//! clients' sockets results of the instance's accept(2): see [`berth_node::ipc::supervisor`].
//!
//! [`keep_connection`] dials, on the control plane, and reads the supervisor's messages. Relaying
//! threads send clients through a [`Link`]: a message to a supervisor never waits, since at most
//! [`UNACKNOWLEDGED`] clients are on their way.

use berth_node::instance_id::InstanceId;
use berth_node::ipc;
use berth_node::ipc::supervisor::{FromShim, ToShim, UNACKNOWLEDGED, VERSION, parse_message};
use berth_os::{make_awaitable, seqpacket};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

/// Time between two attempts to dial a supervisor.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// A connection to a supervisor. Its instance accepts clients.
#[derive(Debug)]
pub(crate) struct Link {
    socket: AsyncFd<OwnedFd>,
    /// Limits the number of clients that the supervisor has not acknowledged yet. Closed when the
    /// connection has ended.
    places: Arc<Semaphore>,
    unacknowledged: Mutex<Unacknowledged>,
}

#[derive(Debug, Default)]
struct Unacknowledged {
    last: u64,
    clients: HashMap<u64, (Arc<PassedClient>, OwnedSemaphorePermit)>,
}

/// A client that was sent to a supervisor.
#[derive(Debug, Default)]
pub(crate) struct PassedClient {
    acknowledgement: OnceLock<Acknowledgement>,
    /// Notified on every acknowledgement except [`Acknowledgement::Taken`]. That one comes for
    /// every client, and nobody waits for it.
    returned: Notify,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acknowledgement {
    /// The instance has accepted the client.
    Taken,
    /// The shim has the client back.
    Back,
    /// The connection ended before an acknowledgement.
    Unknown,
}

impl PassedClient {
    pub(crate) fn acknowledgement(&self) -> Option<Acknowledgement> {
        self.acknowledgement.get().copied()
    }

    /// Waits until the client is back, or the connection has ended before an acknowledgement.
    pub(crate) async fn wait_until_client_returned(&self) {
        self.returned.notified().await;
    }

    pub(crate) fn set_acknowledgement(&self, acknowledgement: Acknowledgement) {
        let _ = self.acknowledgement.set(acknowledgement);
        if acknowledgement != Acknowledgement::Taken {
            self.returned.notify_one();
        }
    }
}

impl Link {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = make_awaitable(socket, Interest::READABLE)?;
        Ok(Self {
            socket,
            places: Arc::new(Semaphore::new(UNACKNOWLEDGED)),
            unacknowledged: Mutex::default(),
        })
    }

    /// Waits until one more client may be sent. `None` if the connection has ended.
    pub(crate) async fn acquire_place(&self) -> Option<OwnedSemaphorePermit> {
        self.places.clone().acquire_owned().await.ok()
    }

    /// Sends a client's socket. Returns the number for a recall.
    ///
    /// # Errors
    /// The client could not be sent, so the supervisor does not have it.
    pub(crate) fn send_client(
        &self,
        client: BorrowedFd<'_>,
        place: OwnedSemaphorePermit,
    ) -> io::Result<(u64, Arc<PassedClient>)> {
        let passed = Arc::<PassedClient>::default();
        let mut unacknowledged = self.lock_unacknowledged();
        if self.has_ended() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        unacknowledged.last += 1;
        let seq = unacknowledged.last;
        self.transmit_message(FromShim::Client { seq }, &[client])?;
        // Acknowledgements are handled under the same lock. So the acknowledgement of this client
        // finds it here.
        unacknowledged.clients.insert(seq, (passed.clone(), place));
        Ok((seq, passed))
    }

    /// Asks for a client back. The client comes unless the instance has accepted it.
    ///
    /// # Errors
    /// The supervisor reads no more.
    pub(crate) fn recall_client(&self, seq: u64) -> io::Result<()> {
        self.transmit_message(FromShim::Recall { seq }, &[])
    }

    /// True if the connection has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.places.is_closed()
    }

    fn transmit_message(
        &self,
        message: FromShim,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        seqpacket::transmit_message(
            self.socket.get_ref().as_fd(),
            &serde_json::to_vec(&message)?,
            descriptors,
        )
    }

    fn acknowledge(&self, seqs: &[u64], acknowledgement: Acknowledgement) {
        let mut unacknowledged = self.lock_unacknowledged();
        for seq in seqs {
            if let Some((client, _place)) = unacknowledged.clients.remove(seq) {
                client.set_acknowledgement(acknowledgement);
            }
        }
    }

    fn lock_unacknowledged(&self) -> MutexGuard<'_, Unacknowledged> {
        self.unacknowledged
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    async fn receive_message(&self) -> io::Result<ToShim> {
        let mut buffer = [0; 1024];
        let received = loop {
            let receive =
                |socket: &OwnedFd| seqpacket::receive_message(socket.as_fd(), &mut buffer);
            match self.socket.async_io(Interest::READABLE, receive).await {
                // The supervisor has ended before reading all messages. Its own messages can still
                // be read.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                received => break received?,
            }
        };
        if received.length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        parse_message(&buffer[..received.length]).map_err(io::Error::other)
    }
}

/// Ends a link when dropped: nobody reads from its connection any more.
struct LinkGuard(Arc<Link>);

impl Drop for LinkGuard {
    fn drop(&mut self) {
        let mut unacknowledged = self.0.lock_unacknowledged();
        self.0.places.close();
        unacknowledged
            .clients
            .drain()
            .for_each(|(_, (client, _))| client.set_acknowledgement(Acknowledgement::Unknown));
    }
}

/// Keeps a connection to the supervisor of an instance. Calls `changed` with a link while the
/// instance accepts, and with `None` otherwise. Ends with the reason if this shim does not
/// understand the supervisor.
pub(crate) async fn keep_connection(
    path: &Path,
    instance: &InstanceId,
    changed: impl Fn(Option<Arc<Link>>),
) -> String {
    loop {
        if let Ok(link) = ipc::dial_shim(path).await.and_then(Link::new) {
            let reading = LinkGuard(Arc::new(link));
            let ended = read_messages(&reading.0, instance, &changed).await;
            changed(None);
            match ended {
                Ok(why) => return why,
                Err(error) => {
                    tracing::debug!(%instance, %error, "the connection to the instance's supervisor has ended");
                }
            }
        }
        sleep(RETRY_PAUSE).await;
    }
}

/// Reads the supervisor's messages until the connection ends. Returns why clients cannot be sent to
/// the supervisor.
async fn read_messages(
    link: &Arc<Link>,
    instance: &InstanceId,
    changed: impl Fn(Option<Arc<Link>>),
) -> io::Result<String> {
    match link.receive_message().await? {
        ToShim::Hello { version, .. } if version != VERSION => {
            return Ok(format!(
                "the instance's supervisor uses version {version} of the messages, and this shim uses version {VERSION}"
            ));
        }
        ToShim::Hello {
            instance: other, ..
        } if other != *instance => {
            return Err(io::Error::other(format!(
                "the supervisor belongs to {other}"
            )));
        }
        ToShim::Hello { .. } => {}
        other => return Err(io::Error::other(format!("the first message is {other:?}"))),
    }
    loop {
        match link.receive_message().await? {
            ToShim::Listening => changed(Some(link.clone())),
            ToShim::Closed => changed(None),
            ToShim::Taken { seqs } => link.acknowledge(&seqs, Acknowledgement::Taken),
            ToShim::Back { seq } => link.acknowledge(&[seq], Acknowledgement::Back),
            ToShim::Hello { .. } | ToShim::Unknown => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_node::ipc::supervisor::MAX_TAKEN;
    use std::net::{TcpListener, TcpStream};
    use std::path::PathBuf;
    use tempfile::TempDir;
    use tokio::sync::mpsc;
    use tokio::task::{JoinHandle, yield_now};

    /// The test as a supervisor without an instance, and the shim that dials this supervisor.
    struct Dialled {
        supervisor: OwnedFd,
        links: mpsc::UnboundedReceiver<Option<Arc<Link>>>,
        shim: JoinHandle<String>,
        _listens: (TempDir, OwnedFd, ipc::SocketFile),
    }

    impl Dialled {
        async fn new() -> Self {
            let temp = tempfile::tempdir().unwrap();
            let path: PathBuf = temp.path().join("a.accept");
            let (listener, file) = ipc::listen_at(&path).unwrap();
            let (changed, links) = mpsc::unbounded_channel();
            let shim = async move {
                keep_connection(&path, &InstanceId::parse("a").unwrap(), |link| {
                    drop(changed.send(link));
                })
                .await
            };
            let shim = tokio::spawn(shim);
            let supervisor = loop {
                match seqpacket::accept(listener.as_fd()) {
                    Ok(supervisor) => break supervisor,
                    Err(_) => yield_now().await,
                }
            };
            Self {
                supervisor,
                links,
                shim,
                _listens: (temp, listener, file),
            }
        }

        fn send_message(&self, message: &ToShim) {
            seqpacket::transmit_message(
                self.supervisor.as_fd(),
                &serde_json::to_vec(message).unwrap(),
                &[],
            )
            .unwrap();
        }

        fn send_hello(&self, version: u32) {
            self.send_message(&ToShim::Hello {
                version,
                instance: InstanceId::parse("a").unwrap(),
            });
        }
    }

    #[tokio::test]
    async fn a_supervisor_of_another_version_gets_no_client() {
        for version in [VERSION - 1, VERSION + 1] {
            let mut dialled = Dialled::new().await;
            dialled.send_hello(version);
            dialled.send_message(&ToShim::Listening);
            dialled.shim.await.unwrap();
            assert!(dialled.links.recv().await.unwrap().is_none());
            assert!(
                dialled.links.recv().await.is_none(),
                "it is not dialled again"
            );
        }
    }

    #[tokio::test]
    async fn clients_are_bounded_and_each_is_acknowledged_or_unknown() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut dialled = Dialled::new().await;
        dialled.send_hello(VERSION);
        dialled.send_message(&ToShim::Listening);
        let link = dialled.links.recv().await.unwrap().unwrap();
        let mut answers = Vec::new();
        for _ in 0..UNACKNOWLEDGED {
            let place = link.acquire_place().await.unwrap();
            answers.push(link.send_client(client.as_fd(), place).unwrap());
        }
        assert_eq!(link.places.available_permits(), 0);
        let mut buffer = [0; 1024];
        let first = seqpacket::receive_message(dialled.supervisor.as_fd(), &mut buffer).unwrap();
        assert_eq!(first.descriptors.len(), 1);
        assert_eq!(
            parse_message(&buffer[..first.length]),
            Ok(FromShim::Client { seq: 1 })
        );
        let mut answers = answers.into_iter();
        let (seq, back) = answers.next().unwrap();
        dialled.send_message(&ToShim::Back { seq });
        back.wait_until_client_returned().await;
        assert_eq!(back.acknowledgement(), Some(Acknowledgement::Back));
        let taken: Vec<_> = answers.by_ref().take(MAX_TAKEN).collect();
        dialled.send_message(&ToShim::Taken {
            seqs: taken.iter().map(|(seq, _)| *seq).collect(),
        });
        let (_first, second) = (
            link.acquire_place().await.unwrap(),
            link.acquire_place().await.unwrap(),
        );
        assert!(
            taken
                .iter()
                .all(|(_, client)| client.acknowledgement() == Some(Acknowledgement::Taken))
        );
        // The supervisor ends after reading one message: the shim sees a reset before the last
        // acknowledgement.
        let (seq, last) = answers.next().unwrap();
        dialled.send_message(&ToShim::Taken { seqs: vec![seq] });
        drop(dialled.supervisor);
        for (_, client) in answers {
            client.wait_until_client_returned().await;
            assert_eq!(client.acknowledgement(), Some(Acknowledgement::Unknown));
        }
        assert_eq!(last.acknowledgement(), Some(Acknowledgement::Taken));
        assert!(link.send_client(client.as_fd(), second).is_err());
        assert!(link.acquire_place().await.is_none());
        assert!(dialled.links.recv().await.unwrap().is_none());
        dialled.shim.abort();
    }
}
