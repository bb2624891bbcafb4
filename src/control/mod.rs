//! The Unix socket of a shim in the run directory: what commands (and siblings) ask it.
//!
//! [`wire`] is what is said, here is who may say it and how: one request, one reply, then the end. Only
//! root and the shim's own uid are heard.

pub mod wire;

use crate::os::{self, seqpacket};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;
use wire::{Ask, Reply, Request};

/// How long one side waits for the other; both are on this machine.
const PATIENCE: Duration = Duration::from_secs(1);

/// A socket that commands can dial. Its file is removed when it is dropped.
#[derive(Debug)]
pub struct Server {
    listener: AsyncFd<OwnedFd>,
    path: PathBuf,
}

impl Server {
    /// Listens at a path. A file that a dead shim left there is replaced.
    ///
    /// # Errors
    /// `EADDRINUSE` when a live shim listens there; what the system calls say otherwise.
    pub fn bind(path: &Path) -> io::Result<Self> {
        match seqpacket::dial(path) {
            Ok(_) => return Err(io::ErrorKind::AddrInUse.into()),
            // Its queue is full, so it is alive.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(io::ErrorKind::AddrInUse.into()),
            Err(_) => {}
        }
        // Made beside and renamed: whoever dials finds the old one or the new one, never none.
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        let made = path.with_file_name(name);
        match std::fs::remove_file(&made) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = seqpacket::listener(&made)?;
        std::fs::rename(&made, path)?;
        Ok(Self { listener: os::awaitable(listener, Interest::READABLE)?, path: path.to_owned() })
    }

    /// Answers until it is dropped.
    pub async fn serve(self, answer: impl Fn(Ask) -> Reply + Send + Sync + 'static) {
        let answer = Arc::new(answer);
        loop {
            match self.listener.async_io(Interest::READABLE, |listener| seqpacket::accept(listener.as_fd())).await {
                Ok(socket) => {
                    let answer = answer.clone();
                    tokio::spawn(async move {
                        if let Err(error) = converse(socket, &*answer).await {
                            tracing::debug!(%error, "a request on the shim's socket came to nothing");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept on the shim's socket, trying again");
                    tokio::time::sleep(PATIENCE).await;
                }
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn converse(socket: OwnedFd, answer: &(impl Fn(Ask) -> Reply + ?Sized)) -> io::Result<()> {
    let (uid, own) = (seqpacket::peer_uid(socket.as_fd())?, nix::unistd::geteuid().as_raw());
    let socket = os::awaitable(socket, Interest::READABLE | Interest::WRITABLE)?;
    let reply = if uid == own || uid == 0 {
        match wire::parse_request(&read(&socket).await?) {
            Ok(Request { ask, .. }) => answer(ask),
            Err(why) => Reply::Refused(why),
        }
    } else {
        tracing::warn!(uid, "a process of another uid asked and was refused");
        Reply::Refused(format!("uid {uid} may not ask a shim of uid {own}: ask as that uid or as root"))
    };
    write(&socket, &serde_json::to_vec(&reply)?).await
}

/// Asks the shim whose socket is at a path.
///
/// # Errors
/// `ENOENT` or `ECONNREFUSED` when there is none, `TimedOut` when it hangs, `InvalidData` when what it
/// says is no reply.
pub async fn ask(path: &Path, ask: Ask) -> io::Result<Reply> {
    let socket = os::awaitable(seqpacket::dial(path)?, Interest::READABLE | Interest::WRITABLE)?;
    write(&socket, &serde_json::to_vec(&Request { version: wire::VERSION, ask })?).await?;
    let reply = read(&socket).await?;
    wire::parse_reply(&reply).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))
}

async fn read(socket: &AsyncFd<OwnedFd>) -> io::Result<Vec<u8>> {
    let mut message = vec![0; seqpacket::MESSAGE];
    let receive = socket.async_io(Interest::READABLE, |socket| seqpacket::receive(socket.as_fd(), &mut message));
    let length = timeout(PATIENCE, receive).await.map_err(|_| io::ErrorKind::TimedOut)??;
    message.truncate(length);
    if message.is_empty() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(message) }
}

async fn write(socket: &AsyncFd<OwnedFd>, message: &[u8]) -> io::Result<()> {
    let transmit = socket.async_io(Interest::WRITABLE, |socket| seqpacket::transmit(socket.as_fd(), message));
    timeout(PATIENCE, transmit).await.map_err(|_| io::ErrorKind::TimedOut)?
}
