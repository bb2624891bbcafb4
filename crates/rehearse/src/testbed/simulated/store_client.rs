//! The simulated apiserver's connection to the rehearsal's store, which takes the place of etcd.

use crate::record::{data::MarkKind, event::EndReport, stamp::Stamp};
use crate::testbed::store::wire::{self, Call, Reply};
use serde_json::Value;
use std::io;
use std::path::{Path, PathBuf};
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};

/// Length of the queue of calls.
const QUEUE_LENGTH: usize = 1024;

/// A client of the store. Clones share a connection.
#[derive(Debug, Clone)]
pub(super) struct StoreClient {
    calls: mpsc::Sender<(Call, oneshot::Sender<io::Result<Reply>>)>,
    path: PathBuf,
    instance: String,
}

pub(super) struct StoreConnection {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl StoreConnection {
    async fn open(path: &Path, instance: &str) -> io::Result<Self> {
        let (reader, writer) = UnixStream::connect(path).await?.into_split();
        let mut connection = Self {
            reader: BufReader::new(reader),
            writer,
        };
        let hello = Call::Hello {
            version: wire::VERSION,
            instance: instance.to_owned(),
        };
        match connection.call(&hello).await? {
            Reply::Noted => Ok(connection),
            other => Err(io::Error::other(format!(
                "the store does not speak protocol {}: {other:?}",
                wire::VERSION
            ))),
        }
    }

    async fn call(&mut self, call: &Call) -> io::Result<Reply> {
        wire::write_message(&mut self.writer, call).await?;
        self.next().await
    }

    async fn next(&mut self) -> io::Result<Reply> {
        wire::read_message(&mut self.reader)
            .await?
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

impl StoreClient {
    /// Connects to the store. The error names the socket.
    pub(super) async fn connect(path: &Path, instance: &str) -> io::Result<Self> {
        let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        let mut connection = StoreConnection::open(path, instance).await.map_err(named)?;
        let (calls, mut queue) = mpsc::channel::<(Call, oneshot::Sender<_>)>(QUEUE_LENGTH);
        // A separate task makes the calls: a cancelled caller must not leave a reply behind for the
        // next caller.
        tokio::spawn(async move {
            while let Some((call, answer)) = queue.recv().await {
                let _ = answer.send(connection.call(&call).await);
            }
        });
        Ok(Self {
            calls,
            path: path.to_owned(),
            instance: instance.to_owned(),
        })
    }

    /// Makes a call and waits for the reply.
    pub(super) async fn call(&self, call: Call) -> io::Result<Reply> {
        let (answer, answered) = oneshot::channel();
        let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
        self.calls
            .send((call, answer))
            .await
            .map_err(|_| closed())?;
        answered.await.map_err(|_| closed())?
    }

    /// Returns the revision and the objects at this revision.
    pub(super) async fn list(&self, namespace: Option<String>) -> io::Result<(u64, Vec<Value>)> {
        match self.call(Call::List { namespace }).await? {
            Reply::List { revision, items } => Ok((revision, items)),
            other => Err(unexpected_reply(&other)),
        }
    }

    /// Returns the changes after a revision, on a separate connection.
    pub(super) async fn watch(&self, after: u64) -> io::Result<StoreWatch> {
        let mut connection = StoreConnection::open(&self.path, &self.instance).await?;
        wire::write_message(&mut connection.writer, &Call::Watch { after }).await?;
        Ok(StoreWatch(connection))
    }

    /// Reports an event of the instance's life. The instance goes on if the rehearsal is gone.
    pub(super) async fn report_mark(&self, mark: MarkKind, at: Stamp) {
        self.send_report(Call::Mark { mark, at }).await;
    }

    /// Reports the end of a connection.
    pub(super) async fn report_end(&self, report: EndReport) {
        self.send_report(Call::Ended(report)).await;
    }

    async fn send_report(&self, call: Call) {
        if let Err(error) = self.call(call).await {
            tracing::warn!(%error, "cannot reach the rehearsal");
        }
    }
}

/// The connection on which the store sends its changes as they happen.
pub(super) struct StoreWatch(StoreConnection);

impl StoreWatch {
    /// Waits for the next change or progress notification.
    pub(super) async fn next(&mut self) -> io::Result<Reply> {
        self.0.next().await
    }
}

/// Returns the error for a reply of the wrong kind.
pub(super) fn unexpected_reply(reply: &Reply) -> io::Error {
    io::Error::other(format!("unexpected answer of the store: {reply:?}"))
}
