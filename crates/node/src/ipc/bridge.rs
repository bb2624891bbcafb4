//! Requests of commands to a bridge, and its replies: JSON messages on a socket that only root can
//! reach.
//!
//! Each connection sends one request. The reply is a refusal, or a [`BridgeStatus`] at once and at
//! each change. The process that will run COMMAND reports on its connection when COMMAND begins,
//! and how COMMAND ended. If that process goes away in between, clients stay on the bridge.

use super::{dial_shim, receive_message, transmit_message};
use berth_os::{make_awaitable, seqpacket};
use nix::sys::socket::{Shutdown, shutdown};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

pub const VERSION: u32 = 1;

/// Name of the socket's file in the bridge's directory.
pub const SOCKET_NAME: &str = "bridge.sock";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ask {
    Status,
    /// Asks for the status. Sent by the process that will run COMMAND: if it goes away before
    /// COMMAND begins, the bridge ends.
    Accompany,
    /// Reports that COMMAND begins. Follows `Accompany` on the same connection.
    Command,
    /// Reports that COMMAND has ended. `failed` has the reason if it failed.
    Ended {
        failed: Option<String>,
    },
    End {
        now: bool,
    },
    /// Restores the files that define the node's kube-apiserver, or only compares them (`dry_run`).
    Restore {
        dry_run: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    Status(Box<BridgeStatus>),
    Refused(String),
    /// The files that the restore changes. With `dry_run`, the files that it would change.
    Differences(Vec<Difference>),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BridgeStatus {
    pub version: u32,
    pub berth: String,
    /// The process ID of the bridge, which runs as a daemon.
    pub pid: u32,
    pub step: Step,
    /// True if the kernel gives new connections to the bridge.
    pub steering: bool,
    /// True while COMMAND runs, that is the command that replaces the node's kube-apiserver.
    pub command: bool,
    /// Reason why clients stay on the bridge although COMMAND has ended, or the operator ended the
    /// bridge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Reason why new connections go to the node's kube-apiserver although the bridge is on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steering_error: Option<String>,
    /// Result of the bridge, once it has one. Connections to the node's kube-apiserver through the
    /// bridge may still be open.
    #[serde(default, skip_serializing_if = "Option::is_none", flatten)]
    pub outcome: Option<BridgeOutcome>,
    pub temporary: TemporaryStatus,
    pub own: OwnStatus,
    /// State of the node's etcd and the temporary etcd. `None` if the bridge has no temporary etcd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdStatus>,
    /// Notes for the operator, each a sentence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Number of open connections through the bridge.
    pub connections_open: u64,
    /// Number of new connections that the kernel has given to the bridge.
    pub connections_steered: u64,
    /// Log files, which are not removed when the bridge ends.
    pub logs: Vec<PathBuf>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemporaryStatus {
    pub address: Option<SocketAddr>,
    pub pid: Option<u32>,
    pub ready: bool,
    pub ends: u32,
    /// Result of the last probe of this instance.
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
    /// True if COMMAND has begun, and the instance has not been ready for a minute.
    #[serde(default)]
    pub late: bool,
    pub probe: String,
    /// The last lines of the container's log. Only present for an instance in a pod that is not
    /// ready, if the bridge reports trouble or the instance is `late`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdStatus {
    pub step: EtcdStep,
    /// The temporary etcd's process ID.
    pub pid: Option<u32>,
    /// A problem that the bridge cannot solve: the operator must decide what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// The latest pauses in milliseconds. In a pause neither etcd serves, and clients wait.
    #[serde(default)]
    pub pauses: Vec<u64>,
}

/// Tells which etcd has the data, the node's or the temporary one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EtcdStep {
    /// The node's etcd has the data.
    #[default]
    Own,
    /// The node's etcd stops, and the temporary etcd waits for the data.
    Stopping,
    /// The temporary etcd has the data.
    Temporary,
    /// The temporary etcd ends, and the node's etcd waits for the data.
    Returning,
    /// Any etcd that the node starts has the data. The temporary etcd has ended, and will not use
    /// the data again.
    GivenBack,
}

impl fmt::Display for EtcdStep {
    /// Formats the step as in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A step of a bridge, from its start to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// The bridge waits until the temporary instance is ready.
    #[default]
    Start,
    /// The temporary instance is ready. Before it gets clients, the bridge watches whether it stays
    /// ready.
    Settle,
    /// New connections go to the temporary instance. The node's kube-apiserver still gets
    /// connections with an earlier handshake.
    Overlap,
    /// The temporary instance serves, so the node's kube-apiserver may be replaced.
    Hold,
    /// The bridge waits until the node's kube-apiserver is ready and stays ready for a while.
    AwaitOwn,
    /// The files that define the node's kube-apiserver are restored.
    Restore,
    /// New connections go to the node's kube-apiserver. The bridge still gets connections with an
    /// earlier handshake.
    Linger,
    /// The bridge's connections are ended, and then the temporary instance.
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
    /// The node's kube-apiserver serves, as it should.
    #[default]
    Done,
    /// The node's kube-apiserver serves as before, because the bridge restored its files. Contains
    /// the reason.
    Restored(String),
    /// COMMAND was not run. Contains the reason.
    NotBegun(String),
    /// The bridge ended, but the node's kube-apiserver is not as it should be. Contains the reason.
    Abandoned(String),
}

/// A file that has changed since the bridge began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    pub path: PathBuf,
    /// True if the file does not exist any more.
    pub missing: bool,
    /// The change that a restore makes, in the form of `diff -u`. `None` if the content must not be
    /// shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
    /// Reason why the restore changes nothing. Only the first difference contains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// A connection between a command and a bridge. Waits for the peer as long as the peer lives, even
/// if the peer is stopped (Ctrl-Z).
#[derive(Debug)]
pub struct Connection(AsyncFd<OwnedFd>);

impl Connection {
    /// Connects to the bridge of a directory and sends it a request.
    ///
    /// # Errors
    /// There is no bridge.
    pub async fn ask(directory: &Path, ask: &Ask) -> io::Result<Self> {
        let connection = Self::new(dial_shim(&directory.join(SOCKET_NAME)).await?)?;
        connection.send(ask).await?;
        Ok(connection)
    }

    /// Makes a connection from an open socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(make_awaitable(
            socket,
            Interest::READABLE | Interest::WRITABLE,
        )?))
    }

    /// Returns the process ID of the peer. `None` if the kernel does not show it.
    pub fn peer_pid(&self) -> Option<i32> {
        Some(
            seqpacket::peer_credentials(self.0.get_ref().as_fd())
                .ok()?
                .pid(),
        )
    }

    /// Sends a message to the peer. After an error, nothing more can be sent: the peer reads the
    /// end of the connection, and does not wait for the message that was lost.
    ///
    /// # Errors
    /// The peer has gone away, or the kernel has no memory for the message.
    pub async fn send(&self, what: &impl Serialize) -> io::Result<()> {
        transmit_message(&self.0, &serde_json::to_vec(what)?, &[])
            .await
            .inspect_err(|_| {
                let _ = shutdown(self.0.as_raw_fd(), Shutdown::Write);
            })
    }

    /// Receives the next message. Returns `None` if the peer has gone away. The caller may drop the
    /// future and call the function again.
    pub async fn receive_message<T: DeserializeOwned>(&self) -> Option<T> {
        let message = match receive_message(&self.0).await {
            // The peer has gone away and left bytes unread. Its earlier messages can still be read
            // here.
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
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    fn to_json(what: &impl Serialize) -> String {
        serde_json::to_string(what).unwrap()
    }

    #[tokio::test]
    async fn the_peer_of_a_message_that_cannot_be_sent_reads_the_end() {
        let (command, bridge) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_NONBLOCK,
        )
        .unwrap();
        let command = Connection::new(command).unwrap();
        let bridge = Connection::new(bridge).unwrap();
        let failed = Some("larger than the buffer of the socket".repeat(1 << 16));
        command.send(&Ask::Ended { failed }).await.unwrap_err();
        assert_eq!(bridge.receive_message::<Ask>().await, None);
        // The other direction goes on.
        bridge.send(&Reply::Refused("no".into())).await.unwrap();
        assert!(command.receive_message::<Reply>().await.is_some());
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
        let listener = seqpacket::bind_listener(&directory.path().join(SOCKET_NAME)).unwrap();
        let command = Connection::ask(directory.path(), &Ask::Accompany)
            .await
            .unwrap();
        let bridge = Connection::new(seqpacket::accept(listener.as_fd()).unwrap()).unwrap();
        assert_eq!(command.peer_pid(), i32::try_from(std::process::id()).ok());
        bridge.send(&Reply::Refused("unread".into())).await.unwrap();
        command.send(&Ask::Ended { failed: None }).await.unwrap();
        drop(command);
        assert_eq!(bridge.receive_message().await, Some(Ask::Accompany));
        assert_eq!(
            bridge.receive_message().await,
            Some(Ask::Ended { failed: None })
        );
        assert_eq!(bridge.receive_message::<Ask>().await, None);
    }
}
