//! What commands ask of a bridge, and its replies: lines of JSON on a socket that only root can reach.
//!
//! Each connection asks once. The answer is that it was refused, or a [`BridgeStatus`] at once and at each change. Who is to run COMMAND says
//! on the same connection that it begins, and how it ended; if it goes away in between, clients stay on the bridge.

use super::machine::{BridgeOutcome, Step};
use super::restore::Difference;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

pub const VERSION: u32 = 1;

/// The socket's name in the bridge's directory.
pub const SOCKET: &str = "bridge.sock";

/// What is locked by the bridge that is on, and stays: by it a directory is known as a bridge's.
pub const LOCK: &str = "bridge.lock";

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

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// While the node's own may be replaced: why the Service `kubernetes` is not kept, although it should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// Connections through the bridge that are open.
    pub connections_open: u64,
    /// New connections that were steered.
    pub connections_steered: u64,
    /// Of these, how many the temporary instance got after the node's own had been restarted and ready.
    #[serde(default)]
    pub connections_old: u64,
    /// Files that stay.
    pub logs: Vec<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemporaryStatus {
    pub address: SocketAddr,
    pub pid: Option<u32>,
    pub ready: bool,
    pub ends: u32,
    /// What came of its last probe.
    pub probe: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnStatus {
    pub address: SocketAddr,
    /// Inode of its listener.
    pub listener: Option<u64>,
    pub ready: bool,
    /// What is steered goes to it while it is ready.
    #[serde(default)]
    pub preferred: bool,
    /// COMMAND runs or has ended, and it has not been ready for 30 s.
    #[serde(default)]
    pub late: bool,
    pub probe: String,
    /// With trouble or where it is late, and while it is not ready: the last lines of its container's log, where it is in a pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<String>,
}

/// A connection to a bridge.
#[derive(Debug)]
pub struct Client {
    replies: Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
}

impl Client {
    /// Asks the bridge of this directory.
    ///
    /// # Errors
    /// There is none.
    pub async fn ask(directory: &Path, ask: &Ask) -> io::Result<Self> {
        let (reader, writer) = UnixStream::connect(directory.join(SOCKET)).await?.into_split();
        let mut client = Self { replies: BufReader::new(reader).lines(), writer };
        client.tell(ask).await?;
        Ok(client)
    }

    /// The bridge's process.
    #[must_use]
    pub fn daemon(&self) -> Option<i32> {
        self.writer.as_ref().peer_cred().ok()?.pid()
    }

    /// Says one thing more.
    ///
    /// # Errors
    /// The bridge has gone away.
    pub async fn tell(&mut self, ask: &Ask) -> io::Result<()> {
        write(&mut self.writer, ask).await
    }

    /// The next reply; none when the bridge has gone away. Can be dropped and called again.
    pub async fn next(&mut self) -> Option<Reply> {
        let line = self.replies.next_line().await.ok()??;
        serde_json::from_str(&line).ok()
    }
}

/// Writes one line.
///
/// # Errors
/// The other end has gone away.
pub async fn write(to: &mut OwnedWriteHalf, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    to.write_all(&line).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(what: &impl Serialize) -> String {
        serde_json::to_string(what).unwrap()
    }

    #[test]
    fn lines_are_as_documented() {
        assert_eq!(text(&Ask::Status), r#""status""#);
        assert_eq!(text(&Ask::End { now: true }), r#"{"end":{"now":true}}"#);
        assert_eq!(text(&Reply::Refused("no".into())), r#"{"refused":"no"}"#);
        let status = BridgeStatus {
            version: VERSION,
            berth: "0.1.0".into(),
            pid: 7,
            step: Step::AwaitOwn,
            steering: true,
            command: false,
            trouble: None,
            steering_error: None,
            outcome: Some(BridgeOutcome::Abandoned("told".into())),
            temporary: TemporaryStatus {
                address: "127.1.2.3:7000".parse().unwrap(),
                pid: Some(8),
                ready: true,
                ends: 0,
                probe: "200".into(),
            },
            own: OwnStatus {
                address: "10.0.0.5:6443".parse().unwrap(),
                listener: None,
                ready: false,
                preferred: false,
                late: false,
                probe: String::new(),
                log: Vec::new(),
            },
            service: None,
            connections_open: 0,
            connections_steered: 0,
            connections_old: 0,
            logs: Vec::new(),
        };
        let line = text(&Reply::Status(Box::new(status.clone())));
        assert!(
            line.contains(r#""step":"await-own""#) && line.contains(r#""outcome":"abandoned","why":"told""#),
            "{line}"
        );
        assert_eq!(serde_json::from_str::<Reply>(&line).unwrap(), Reply::Status(Box::new(status.clone())));
        let running = BridgeStatus { outcome: None, ..status };
        assert_eq!(serde_json::from_str::<BridgeStatus>(&text(&running)).unwrap(), running);
    }
}
