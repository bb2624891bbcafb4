//! The Unix sockets in the run directory: a shim's, for requests of commands and siblings; a
//! bridge's ([`bridge`]); and an instance's supervisor's ([`supervisor`]).
//!
//! [`wire`] has the messages of a shim. This module exchanges them: one request, one reply, then
//! the connection ends or, between siblings, is used by the handover. Only root and the shim's uid
//! may send requests.

pub mod bridge;
pub mod supervisor;
pub mod wire;

use berth_os::explained;
use berth_os::file::{lock_file_within, none_if_missing};
use berth_os::off_thread::OffThread;
use berth_os::seqpacket;
use nix::errno::Errno;
use nix::fcntl::Flock;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use wire::{Ask, Reply, Request, Status};

/// Time limit for a message from the peer. The peer is on the same machine.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Maximum number of requests that a shim reads and answers at the same time. Further requests
/// wait, because each one holds a descriptor.
pub const MAX_REQUESTS: usize = 64;

/// Time for which a process waits until another process of the directory listens. To begin to
/// listen takes milliseconds.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two attempts to connect to a socket with a full queue. The kernel sends no event
/// when there is room.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(10);

/// A socket on which a shim receives requests.
#[derive(Debug)]
pub struct Server {
    // As the first field, the file is dropped while `listener` is still open: see `file_identity`.
    _file: SocketFile,
    listener: AsyncFd<OwnedFd>,
}

impl Server {
    /// Listens at a path. Replaces the file of a dead shim.
    ///
    /// # Errors
    /// `EADDRINUSE` if a live shim listens there, or the errors of the system calls.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let (listener, file) = listen_at(path)?;
        Ok(Self {
            listener: berth_os::make_awaitable(listener, Interest::READABLE)?,
            _file: file,
        })
    }

    /// Reads requests until the future is dropped. Calls `answer` for each request that its sender
    /// may send.
    pub async fn serve<F: Future<Output = ()> + Send>(
        self,
        answer: impl Fn(IncomingRequest) -> F + Send + Sync + 'static,
    ) {
        let (answer, places, mut troubled) = (
            Arc::new(answer),
            Arc::new(Semaphore::new(MAX_REQUESTS)),
            false,
        );
        loop {
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            match self
                .listener
                .async_io(Interest::READABLE, |listener| {
                    seqpacket::accept(listener.as_fd())
                })
                .await
            {
                Ok(socket) => {
                    troubled = false;
                    let answer = answer.clone();
                    tokio::spawn(async move {
                        let _place = place;
                        match read_request(socket).await {
                            Ok(Some(asked)) => answer(asked).await,
                            Ok(None) => {}
                            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                                tracing::warn!(
                                    code = %explained::REQUEST_REFUSED,
                                    "a process connected to the shim's socket and sent no request: connection closed"
                                );
                            }
                            Err(error) => {
                                tracing::debug!(%error, "a request on the shim's socket failed");
                            }
                        }
                    });
                }
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        tracing::warn!(
                            code = %explained::SOCKET_NOT_ACCEPTED,
                            %error,
                            "cannot accept on the shim's socket, trying again"
                        );
                    }
                    tokio::time::sleep(PATIENCE).await;
                }
            }
        }
    }
}

/// The file of a socket. Dropping this value removes the file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    file: (u64, u64),
}

/// Listens at a path like [`Server::bind`], and returns the socket and its file.
///
/// # Errors
/// The errors of [`Server::bind`].
pub fn listen_at(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    // Only one process at a time may create a socket in a directory. Otherwise, one of two
    // processes with the same path could rename the new socket of the other.
    let _turn = lock_directory(path.parent().unwrap_or(path), LISTEN_TIMEOUT)?;
    match seqpacket::dial_path(path) {
        Ok(_) => return Err(io::ErrorKind::AddrInUse.into()),
        // The queue is full, so a live shim listens.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Err(_) => {}
    }
    // Create the socket under another name and rename it, so that a client always finds the old or
    // the new socket. The kernel limits the length of a socket's path. So the temporary name is no
    // longer than the final one: it has a dot instead of `.sock`.
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_stem().unwrap_or_default());
    let made = path.with_file_name(name);
    none_if_missing(std::fs::remove_file(&made))?;
    let listener = seqpacket::bind_listener(&made)?;
    let file = file_identity(&made)?;
    std::fs::rename(&made, path)?;
    Ok((
        listener,
        SocketFile {
            path: path.to_owned(),
            file,
        },
    ))
}

fn lock_directory(directory: &Path, wait: Duration) -> io::Result<Flock<File>> {
    lock_file_within(File::open(directory)?, wait).map_err(|errno| match errno {
        Errno::EWOULDBLOCK => io::Error::other(
            "another shim that starts in the same directory is stopped or hangs: end that shim",
        ),
        errno => errno.into(),
    })
}

/// Returns the device and inode of a file. While the socket is open, no other file has the same
/// pair.
fn file_identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let (path, file) = (std::mem::take(&mut self.path), self.file);
        OffThread::new("").make_last_call_within(PATIENCE, move || {
            // Remove only this process's file. Another process may have replaced it.
            if file_identity(&path).is_ok_and(|now| now == file) {
                let _ = std::fs::remove_file(&path);
            }
        });
    }
}

/// A request that has been received from a peer with the right to send it.
#[derive(Debug)]
pub struct IncomingRequest {
    pub ask: Ask,
    /// The bytes that follow the JSON object in the message.
    pub rest: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
    socket: AsyncFd<OwnedFd>,
}

impl IncomingRequest {
    /// Sends the reply. Returns the connection for further messages, if it is still open.
    pub async fn reply(self, reply: &Reply) -> Option<AsyncFd<OwnedFd>> {
        let written = match serde_json::to_vec(reply) {
            Ok(message) => write_message(&self.socket, &message, &[]).await,
            Err(error) => Err(error.into()),
        };
        written
            .inspect_err(
                |error| tracing::debug!(%error, "a reply on the shim's socket was not read"),
            )
            .ok()?;
        Some(self.socket)
    }
}

/// Reads a request. Returns `None` if the request was refused or its sender has gone.
async fn read_request(socket: OwnedFd) -> io::Result<Option<IncomingRequest>> {
    let (uid, own) = (
        seqpacket::peer_credentials(socket.as_fd())?.uid(),
        nix::unistd::geteuid().as_raw(),
    );
    let socket = berth_os::make_awaitable(socket, Interest::READABLE | Interest::WRITABLE)?;
    let why = if uid != own && uid != 0 {
        tracing::warn!(
            code = %explained::REQUEST_OF_ANOTHER_UID,
            uid,
            "a request of a process of another uid was refused"
        );
        format!(
            "uid {uid} may not send requests to a shim of uid {own}: run the command as uid {own} or as root"
        )
    } else {
        let (message, descriptors) = read_message(&socket, PATIENCE).await?;
        let (json, rest) = wire::split_message(&message);
        match wire::parse_request(json) {
            // The sender has given up before this shim read the request, and may have done
            // something else instead. If this shim hung and is now the last shim, it must not leave
            // because of an old request. And if a sibling has dialled again, this shim must not
            // take it for another shim with the same name. `Ask::Pass` is different: a client's
            // connection comes with a token that decides.
            Ok(Request { ask, .. })
                if ask != Ask::Pass && seqpacket::is_closed(socket.get_ref().as_fd())? =>
            {
                tracing::info!(
                    ?ask,
                    "ignored a request: the sender had closed the connection before this shim read the request"
                );
                return Ok(None);
            }
            // Root may read the status and drain the shim. Listeners and connections go only to a
            // process with this shim's uid, which could listen here itself.
            Ok(Request { ask, .. }) if uid != own && ask.is_reserved_for_siblings() => {
                tracing::warn!(
                    code = %explained::SIBLING_OF_ANOTHER_UID,
                    uid,
                    own,
                    "a sibling of another uid was refused: run all shims of a berth with one uid"
                );
                format!(
                    "a shim of uid {uid} cannot share the port of a shim of uid {own}: run both shims with one uid"
                )
            }
            Ok(Request { ask, .. }) => {
                return Ok(Some(IncomingRequest {
                    ask,
                    rest: rest.to_vec(),
                    descriptors,
                    socket,
                }));
            }
            Err(why) => {
                tracing::warn!(
                    code = %explained::REQUEST_REFUSED,
                    "a request on the shim's socket was refused: {why}"
                );
                why
            }
        }
    };
    write_message(&socket, &serde_json::to_vec(&Reply::Refused(why))?, &[]).await?;
    Ok(None)
}

/// Sends a request to the shim with the socket at `path`, and waits for the reply for at most
/// `patience`.
///
/// # Errors
/// `ENOENT` or `ECONNREFUSED` if there is no shim, `TimedOut` if it hangs, `InvalidData` if its
/// message is not a reply.
pub async fn ask_shim(path: &Path, ask: Ask, patience: Duration) -> io::Result<Reply> {
    Ok(exchange_messages(path, ask, &[], &[], patience).await?.0)
}

/// Beginning of the error that [`request_status`] returns if a shim hangs.
pub const HANGS: &str = "it does not answer within";

/// Requests a shim's status, and waits for the reply for at most `patience`.
pub async fn request_status(path: &Path, patience: Duration) -> Result<Box<Status>, String> {
    match exchange_messages(path, Ask::Status, &[], &[], patience)
        .await
        .map(|(reply, _)| reply)
    {
        Ok(Reply::Status(status)) => Ok(status),
        Ok(Reply::Refused(why)) => Err(format!("it refuses: {why}")),
        Ok(_) => Err("unexpected reply".into()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err("it is dead".into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err("it does not exist".into()),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(format!("{HANGS} {}", humantime::format_duration(patience)))
        }
        Err(error) => Err(berth_os::strip_error_numbers(format!(
            "the request failed: {error}"
        ))),
    }
}

/// Sends a request with further bytes and descriptors, and waits for the reply for at most
/// `patience`. Returns also the connection for further messages.
pub async fn exchange_messages(
    path: &Path,
    ask: Ask,
    rest: &[u8],
    descriptors: &[BorrowedFd<'_>],
    patience: Duration,
) -> io::Result<(Reply, AsyncFd<OwnedFd>)> {
    let socket = timeout(patience, dial_shim(path))
        .await
        .map_err(|_| io::ErrorKind::TimedOut)??;
    let socket = berth_os::make_awaitable(socket, Interest::READABLE | Interest::WRITABLE)?;
    // The peer must have this process's uid, as in `read_request`.
    let (uid, own) = (
        seqpacket::peer_credentials(socket.get_ref().as_fd())?.uid(),
        nix::unistd::geteuid().as_raw(),
    );
    if uid != own && ask.is_reserved_for_siblings() {
        let why = format!(
            "the process at {} is uid {uid}, this process is uid {own}: siblings need the same uid",
            path.display()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let mut message = serde_json::to_vec(&Request::from(ask))?;
    message.push(b'\n');
    message.extend_from_slice(rest);
    write_message(&socket, &message, descriptors).await?;
    let (reply, _) = read_message(&socket, patience).await?;
    let reply =
        wire::parse_reply(&reply).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
    Ok((reply, socket))
}

/// Connects to a shim's socket, and waits while the socket's queue is full. A separate thread
/// dials, because the socket's path may be on a disk that stalls.
///
/// # Errors
/// The errors of [`seqpacket::dial_path`].
pub async fn dial_shim(path: &Path) -> io::Result<OwnedFd> {
    static DIALS: LazyLock<OffThread> = LazyLock::new(|| OffThread::new("a shim's socket"));
    loop {
        let path = path.to_owned();
        match DIALS
            .call_within(Duration::MAX, move || seqpacket::dial_path(&path))
            .await
            .flatten()
        {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(QUEUE_FULL_PAUSE).await;
            }
            dialled => return dialled,
        }
    }
}

async fn read_message(
    socket: &AsyncFd<OwnedFd>,
    patience: Duration,
) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    timeout(patience, receive_message(socket))
        .await
        .map_err(|_| io::ErrorKind::TimedOut)?
}

async fn write_message(
    socket: &AsyncFd<OwnedFd>,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    timeout(PATIENCE, transmit_message(socket, message, descriptors))
        .await
        .map_err(|_| io::ErrorKind::TimedOut)?
}

/// Receives the next message. The caller may drop the future and call the function again.
async fn receive_message(socket: &AsyncFd<OwnedFd>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut message = vec![0; seqpacket::MAX_MESSAGE];
    let receive = socket.async_io(Interest::READABLE, |socket| {
        seqpacket::receive_message(socket.as_fd(), &mut message)
    });
    let received = receive.await?;
    message.truncate(received.length);
    if message.is_empty() {
        Err(io::ErrorKind::UnexpectedEof.into())
    } else {
        Ok((message, received.descriptors))
    }
}

async fn transmit_message(
    socket: &AsyncFd<OwnedFd>,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    socket
        .async_io(Interest::WRITABLE, |to| {
            seqpacket::transmit_message(to.as_fd(), message, descriptors)
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{Backlog, listen};
    use std::pin::pin;
    use std::task::Poll;

    #[tokio::test]
    async fn a_socket_with_the_longest_path_can_be_created() {
        let directory = tempfile::tempdir().unwrap();
        let fits = 107 - directory.path().as_os_str().len() - "/.sock".len();
        let path = directory.path().join(format!("{}.sock", "x".repeat(fits)));
        let server = Server::bind(&path).unwrap();
        assert_eq!(path.as_os_str().len(), 107);
        drop(server);
        assert!(!path.exists());
    }

    /// Siblings take a shim for dead if its socket refuses connections. So the path must name the
    /// socket of the process that listens, and never the socket of a process that failed to bind.
    #[tokio::test]
    async fn of_concurrent_servers_at_one_path_exactly_one_listens_and_has_the_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.sock");
        for round in 0..200 {
            let begin = std::sync::Barrier::new(4);
            let runtime = tokio::runtime::Handle::current();
            let mut listening: Vec<_> = std::thread::scope(|scope| {
                let listen = || {
                    let _in = runtime.enter();
                    begin.wait();
                    Server::bind(&path).map_err(|error| error.kind())
                };
                let all = [(); 4].map(|()| scope.spawn(listen));
                all.into_iter().map(|one| one.join().unwrap()).collect()
            });
            let errors = listening
                .extract_if(.., |one| one.is_err())
                .map(|one| one.unwrap_err());
            assert_eq!(
                errors.collect::<Vec<_>>(),
                [io::ErrorKind::AddrInUse; 3],
                "round {round}"
            );
            assert!(seqpacket::dial_path(&path).is_ok(), "round {round}");
        }
    }

    #[test]
    fn a_start_that_times_out_names_the_cause() {
        let directory = tempfile::tempdir().unwrap();
        let turn = lock_directory(directory.path(), LISTEN_TIMEOUT).unwrap();
        let late = lock_directory(directory.path(), Duration::ZERO).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::Other, "{late}");
        drop(turn);
        lock_directory(directory.path(), Duration::ZERO).unwrap();
    }

    #[tokio::test]
    async fn a_request_of_a_sender_that_has_gone_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.sock");
        let server = Server::bind(&path).unwrap();
        // The request is sent before the shim begins to read.
        let late = seqpacket::dial_path(&path).unwrap();
        seqpacket::transmit_message(
            late.as_fd(),
            &serde_json::to_vec(&Request::from(Ask::Drain)).unwrap(),
            &[],
        )
        .unwrap();
        drop(late);
        let (granted, mut asks) = tokio::sync::mpsc::unbounded_channel();
        let serving = server.serve(move |asked: IncomingRequest| {
            let granted = granted.clone();
            async move {
                granted.send(asked.ask.clone()).unwrap();
                drop(asked.reply(&Reply::Done).await);
            }
        });
        tokio::select! {
            reply = ask_shim(&path, Ask::Metrics, PATIENCE) => assert_eq!(reply.unwrap(), Reply::Done),
            () = serving => {}
        }
        assert_eq!(asks.recv().await, Some(Ask::Metrics));
        assert!(asks.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_client_that_finds_the_queue_full_waits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.sock");
        let server = Server::bind(&path).unwrap();
        listen(server.listener.get_ref(), Backlog::new(0).unwrap()).unwrap();
        let _queued = seqpacket::dial_path(&path).unwrap();
        assert_eq!(
            seqpacket::dial_path(&path).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        let mut asking = pin!(ask_shim(&path, Ask::Drain, PATIENCE));
        let first = std::future::poll_fn(|cx| Poll::Ready(asking.as_mut().poll(cx))).await;
        assert!(first.is_pending(), "{first:?}");
        let serving =
            server.serve(async |asked: IncomingRequest| drop(asked.reply(&Reply::Done).await));
        tokio::select! {
            reply = asking => assert_eq!(reply.unwrap(), Reply::Done),
            () = serving => {}
        }
    }
}
