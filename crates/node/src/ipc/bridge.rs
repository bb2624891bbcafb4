//! Requests of commands to a bridge, and its replies: JSON messages on a socket that only root can reach.
//!
//! Each connection sends one request. The reply is a refusal, or a [`BridgeStatus`] at once and at each change. The command that is to run
//! COMMAND reports on the same connection that it begins, and how it ended; if it goes away in between, clients stay on the bridge.

use super::{dial, receive, transmit};
use berth_os::{make_awaitable, seqpacket};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

pub const VERSION: u32 = 1;

/// The socket's name in the bridge's directory.
pub const SOCKET: &str = "bridge.sock";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    Status,
    /// The same, from the process that will run COMMAND: if it goes away before, the bridge ends.
    Accompany,
    /// COMMAND begins; after `Accompany`, on the same connection.
    Command,
    /// COMMAND has ended, and how if it failed.
    Ended {
        failed: Option<String>,
    },
    End {
        now: bool,
    },
    /// What the node's own instance is started from shall be put back, or only be compared.
    Restore {
        dry_run: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    Status(Box<BridgeStatus>),
    Refused(String),
    /// What is put back, or would be.
    Differences(Vec<Difference>),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BridgeStatus {
    pub version: u32,
    pub berth: String,
    /// The daemon's process.
    pub pid: u32,
    pub step: Step,
    /// New connections go to the bridge.
    pub steering: bool,
    /// COMMAND runs.
    pub command: bool,
    /// Why clients stay on the bridge although COMMAND has ended, or the operator ended the bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Why new connections go to the node's own although the bridge is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steering_error: Option<String>,
    /// How the bridge ended. Connections to the node's own that came through it may still be open.
    #[serde(default, skip_serializing_if = "Option::is_none", flatten)]
    pub outcome: Option<BridgeOutcome>,
    pub temporary: TemporaryStatus,
    pub own: OwnStatus,
    /// The node's etcd, where the bridge has one of its own for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdStatus>,
    /// What the operator should know, in sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Connections through the bridge that are open.
    pub connections_open: u64,
    /// New connections that were steered.
    pub connections_steered: u64,
    /// Files that stay.
    pub logs: Vec<PathBuf>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemporaryStatus {
    pub address: Option<SocketAddr>,
    pub pid: Option<u32>,
    pub ready: bool,
    pub ends: u32,
    /// What came of its last probe.
    pub probe: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnStatus {
    pub address: Option<SocketAddr>,
    /// Inode of its listener.
    pub listener: Option<u64>,
    pub ready: bool,
    /// What is steered goes to it while it is ready.
    #[serde(default)]
    pub preferred: bool,
    /// COMMAND runs or has ended, and it has not been ready for a minute.
    #[serde(default)]
    pub late: bool,
    pub probe: String,
    /// With trouble or where it is late, and while it is not ready: the last lines of its container's log, where it is in a pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdStatus {
    pub step: EtcdStep,
    /// The temporary etcd's process.
    pub pid: Option<u32>,
    /// What an operator has to decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// How long clients waited each time that neither served, in milliseconds; the last ones.
    #[serde(default)]
    pub pauses: Vec<u64>,
}

/// Who has etcd's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EtcdStep {
    /// The node's own.
    #[default]
    Own,
    /// The node's own stops, and the temporary one waits for the data.
    Stopping,
    /// The temporary one.
    Temporary,
    /// The temporary one ends, and the node's own waits for the data.
    Returning,
    /// Whoever the node starts: the temporary one has ended, and leaves it alone.
    GivenBack,
}

impl fmt::Display for EtcdStep {
    /// As it is in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The step of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// The temporary instance shall get ready.
    #[default]
    Start,
    /// It is ready and is watched for a while.
    Settle,
    /// New connections go to it; handshakes that began before still reach the node's own.
    Overlap,
    /// The node's own instance may be replaced.
    Hold,
    /// The node's own instance shall be ready, and stay so for a while.
    AwaitOwn,
    /// What the node's own instance is started from is put back.
    Restore,
    /// New connections go to the node's own; handshakes that began before still reach the bridge.
    Linger,
    /// The bridge's connections end, then the temporary instance.
    Drain,
}

impl fmt::Display for Step {
    /// As it is in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "outcome", content = "why")]
pub enum BridgeOutcome {
    /// The node's own instance serves.
    #[default]
    Done,
    /// It serves as it did before, since it was put back, and why.
    Restored(String),
    /// COMMAND was not run, and why.
    NotBegun(String),
    /// It ended although the node's own instance is not what it should be, and why.
    Abandoned(String),
}

/// A file that is not what it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    pub path: PathBuf,
    /// It is not there any more.
    pub missing: bool,
    /// What putting it back changes, as `diff -u` has it, where that may be shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
    /// In the first one: why nothing is put back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// A connection between a command and a bridge. Waits for the other end as long as that lives: it may be stopped (Ctrl-Z).
#[derive(Debug)]
pub struct Connection(AsyncFd<OwnedFd>);

impl Connection {
    /// Asks the bridge of this directory.
    ///
    /// # Errors
    /// There is none.
    pub async fn ask(directory: &Path, ask: &Ask) -> io::Result<Self> {
        let connection = Self::new(dial(&directory.join(SOCKET)).await?)?;
        connection.send(ask).await?;
        Ok(connection)
    }

    /// Of an open socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(make_awaitable(
            socket,
            Interest::READABLE | Interest::WRITABLE,
        )?))
    }

    /// The process at the other end.
    pub fn peer(&self) -> Option<i32> {
        Some(seqpacket::peer(self.0.get_ref().as_fd()).ok()?.pid())
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The other end has gone away.
    pub async fn send(&self, what: &impl Serialize) -> io::Result<()> {
        transmit(&self.0, &serde_json::to_vec(what)?, &[]).await
    }

    /// The next message; none when the other end has gone away. Can be dropped and called again.
    pub async fn next<T: DeserializeOwned>(&self) -> Option<T> {
        let message = match receive(&self.0).await {
            // It has gone away without reading all; what it sent before is still there.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => receive(&self.0).await,
            received => received,
        };
        serde_json::from_slice(&message.ok()?.0).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(what: &impl Serialize) -> String {
        serde_json::to_string(what).unwrap()
    }

    #[test]
    fn messages_are_as_documented() {
        assert_eq!(text(&Ask::Status), r#""status""#);
        assert_eq!(text(&Ask::End { now: true }), r#"{"end":{"now":true}}"#);
        assert_eq!(text(&Reply::Refused("no".into())), r#"{"refused":"no"}"#);
        let status = BridgeStatus {
            version: VERSION,
            berth: "0.1.0".into(),
            pid: 7,
            step: Step::AwaitOwn,
            steering: true,
            outcome: Some(BridgeOutcome::Abandoned("a reason".into())),
            temporary: TemporaryStatus {
                address: "127.1.2.3:7000".parse().ok(),
                pid: Some(8),
                ready: true,
                ends: 0,
                probe: "200".into(),
            },
            own: OwnStatus {
                address: "10.0.0.5:6443".parse().ok(),
                ..OwnStatus::default()
            },
            ..BridgeStatus::default()
        };
        let line = text(&Reply::Status(Box::new(status.clone())));
        assert!(
            line.contains(r#""step":"await-own""#)
                && line.contains(r#""outcome":"abandoned","why":"a reason""#),
            "{line}"
        );
        assert_eq!(
            serde_json::from_str::<Reply>(&line).unwrap(),
            Reply::Status(Box::new(status.clone()))
        );
        let running = BridgeStatus {
            outcome: None,
            ..status
        };
        assert_eq!(
            serde_json::from_str::<BridgeStatus>(&text(&running)).unwrap(),
            running
        );
    }

    #[tokio::test]
    async fn what_was_sent_before_an_end_is_read_also_where_the_other_end_had_not_read_all() {
        let directory = tempfile::tempdir().unwrap();
        let listener = seqpacket::listener(&directory.path().join(SOCKET)).unwrap();
        let command = Connection::ask(directory.path(), &Ask::Accompany)
            .await
            .unwrap();
        let bridge = Connection::new(seqpacket::accept(listener.as_fd()).unwrap()).unwrap();
        assert_eq!(command.peer(), i32::try_from(std::process::id()).ok());
        bridge.send(&Reply::Refused("unread".into())).await.unwrap();
        command.send(&Ask::Ended { failed: None }).await.unwrap();
        drop(command);
        assert_eq!(bridge.next().await, Some(Ask::Accompany));
        assert_eq!(bridge.next().await, Some(Ask::Ended { failed: None }));
        assert_eq!(bridge.next::<Ask>().await, None);
    }
}
