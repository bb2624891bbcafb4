//! Requests of commands to a bridge, and its replies: JSON messages on a socket that only root can
//! reach.
//!
//! Each connection sends one request. The reply is a refusal, or a [`BridgeStatus`] at once and at
//! each change. The command that will run COMMAND reports on the same connection when COMMAND
//! begins, and how COMMAND ended. If the command goes away in between, clients stay on the bridge.

use super::{dial_shim, receive_message, transmit_message};
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
    /// Like `Status`, from the process that will run COMMAND. If the process goes away before
    /// COMMAND begins, the bridge ends.
    Accompany,
    /// COMMAND begins. Sent after `Accompany` on the same connection.
    Command,
    /// COMMAND has ended, with the reason if it failed.
    Ended {
        failed: Option<String>,
    },
    End {
        now: bool,
    },
    /// Restore the sources of the node's kube-apiserver, or only compare them (`dry_run`).
    Restore {
        dry_run: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    Status(Box<BridgeStatus>),
    Refused(String),
    /// The files that are restored, or would be.
    Differences(Vec<Difference>),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BridgeStatus {
    pub version: u32,
    pub berth: String,
    /// The daemon's process ID.
    pub pid: u32,
    pub step: Step,
    /// True if new connections go to the bridge.
    pub steering: bool,
    /// True if COMMAND runs.
    pub command: bool,
    /// Reason why clients stay on the bridge although COMMAND has ended, or the operator ended the
    /// bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Reason why new connections go to the node's kube-apiserver although the bridge is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steering_error: Option<String>,
    /// Result of the bridge. Connections to the node's kube-apiserver through the bridge may still
    /// be open.
    #[serde(default, skip_serializing_if = "Option::is_none", flatten)]
    pub outcome: Option<BridgeOutcome>,
    pub temporary: TemporaryStatus,
    pub own: OwnStatus,
    /// The node's etcd, if the bridge has a temporary etcd for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdStatus>,
    /// Notes for the operator, in sentences.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Number of open connections through the bridge.
    pub connections_open: u64,
    /// Number of new connections that were steered.
    pub connections_steered: u64,
    /// Log files, which stay after the bridge.
    pub logs: Vec<PathBuf>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemporaryStatus {
    pub address: Option<SocketAddr>,
    pub pid: Option<u32>,
    pub ready: bool,
    pub ends: u32,
    /// Result of the last probe.
    pub probe: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnStatus {
    pub address: Option<SocketAddr>,
    /// Inode of the instance's listener.
    pub listener: Option<u64>,
    pub ready: bool,
    /// True if steered connections go to this instance while it is ready.
    #[serde(default)]
    pub preferred: bool,
    /// True if COMMAND runs or has ended, and the instance has not been ready for a minute.
    #[serde(default)]
    pub late: bool,
    pub probe: String,
    /// The last lines of the container's log, if the instance is in a pod. Present only while the
    /// instance is not ready, and there is trouble or it is late.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdStatus {
    pub step: EtcdStep,
    /// The temporary etcd's process ID.
    pub pid: Option<u32>,
    /// A decision that the operator must make.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The latest pauses, each the time in milliseconds for which clients waited while neither etcd
    /// served.
    #[serde(default)]
    pub pauses: Vec<u64>,
}

/// The etcd that has the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EtcdStep {
    /// The node's etcd.
    #[default]
    Own,
    /// The node's etcd stops, and the temporary etcd waits for the data.
    Stopping,
    /// The temporary etcd.
    Temporary,
    /// The temporary etcd ends, and the node's etcd waits for the data.
    Returning,
    /// Any etcd that the node starts: the temporary etcd has ended, and leaves the data alone.
    GivenBack,
}

impl fmt::Display for EtcdStep {
    /// Formats the step as in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The step of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Waiting until the temporary instance is ready.
    #[default]
    Start,
    /// The temporary instance is ready and is watched for a while.
    Settle,
    /// New connections go to the temporary instance; earlier handshakes still reach the node's
    /// kube-apiserver.
    Overlap,
    /// The node's kube-apiserver may be replaced.
    Hold,
    /// Waiting until the node's kube-apiserver is ready and stays ready for a while.
    AwaitOwn,
    /// The sources of the node's kube-apiserver are restored.
    Restore,
    /// New connections go to the node's kube-apiserver; earlier handshakes still reach the bridge.
    Linger,
    /// The bridge's connections end, then the temporary instance.
    Drain,
}

impl fmt::Display for Step {
    /// Formats the step as in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "outcome", content = "why")]
pub enum BridgeOutcome {
    /// The node's kube-apiserver serves.
    #[default]
    Done,
    /// The node's kube-apiserver serves as before, since its sources were restored. With the
    /// reason.
    Restored(String),
    /// COMMAND was not run. With the reason.
    NotBegun(String),
    /// The bridge ended although the node's kube-apiserver is not as it should be. With the reason.
    Abandoned(String),
}

/// A changed file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    pub path: PathBuf,
    /// True if the file is gone.
    pub missing: bool,
    /// The change that a restore makes, in the form of `diff -u`. `None` if the content must not be
    /// shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
    /// Reason why nothing is restored. Only in the first difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// A connection between a command and a bridge. Waits for the peer as long as the peer lives, which
/// may be stopped (Ctrl-Z).
#[derive(Debug)]
pub struct Connection(AsyncFd<OwnedFd>);

impl Connection {
    /// Sends a request to the bridge of a directory.
    ///
    /// # Errors
    /// There is no bridge.
    pub async fn ask(directory: &Path, ask: &Ask) -> io::Result<Self> {
        let connection = Self::new(dial_shim(&directory.join(SOCKET)).await?)?;
        connection.send(ask).await?;
        Ok(connection)
    }

    /// Uses an open socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(make_awaitable(
            socket,
            Interest::READABLE | Interest::WRITABLE,
        )?))
    }

    /// Process ID of the peer.
    pub fn peer(&self) -> Option<i32> {
        Some(
            seqpacket::peer_credentials(self.0.get_ref().as_fd())
                .ok()?
                .pid(),
        )
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The peer has gone away.
    pub async fn send(&self, what: &impl Serialize) -> io::Result<()> {
        transmit_message(&self.0, &serde_json::to_vec(what)?, &[]).await
    }

    /// Receives the next message. Returns `None` if the peer has gone away. The future can be
    /// dropped and the function called again.
    pub async fn next<T: DeserializeOwned>(&self) -> Option<T> {
        let message = match receive_message(&self.0).await {
            // The peer has gone away without reading everything; the peer's earlier messages can
            // still be read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                receive_message(&self.0).await
            }
            received => received,
        };
        serde_json::from_slice(&message.ok()?.0).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to_json(what: &impl Serialize) -> String {
        serde_json::to_string(what).unwrap()
    }

    #[test]
    fn messages_are_as_documented() {
        assert_eq!(to_json(&Ask::Status), r#""status""#);
        assert_eq!(to_json(&Ask::End { now: true }), r#"{"end":{"now":true}}"#);
        assert_eq!(to_json(&Reply::Refused("no".into())), r#"{"refused":"no"}"#);
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
        let line = to_json(&Reply::Status(Box::new(status.clone())));
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
            serde_json::from_str::<BridgeStatus>(&to_json(&running)).unwrap(),
            running
        );
    }

    #[tokio::test]
    async fn earlier_messages_are_read_although_the_peer_left_without_reading() {
        let directory = tempfile::tempdir().unwrap();
        let listener = seqpacket::bind_listener(&directory.path().join(SOCKET)).unwrap();
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
