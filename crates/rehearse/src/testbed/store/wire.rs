//! Calls of a simulated apiserver to the rehearsal over a Unix socket, and their replies: one JSON object a
//! line, the version in the first.
//!
//! A connection carries calls in turn, or, after [`Call::Watch`], changes until it is closed.
//!
//! This is a stream of lines, not the datagrams of berth-node's framing, because a list can be larger than a datagram.

use crate::record::{data::MarkKind, event::EndReport, stamp::Stamp};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::io;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Version of this protocol. Both ends are the same binary; a difference is an error.
pub(crate) const VERSION: u32 = 1;

/// Longest line. A list of some ten thousand small ConfigMaps fits.
const MAX_LINE: u64 = 64 << 20;

/// A call of a simulated apiserver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case")]
pub(crate) enum Call {
    /// First line of a connection.
    Hello {
        version: u32,
        /// Name of the instance.
        instance: String,
    },
    /// Read one object.
    Get { namespace: String, name: String },
    /// Read all objects, or those of one namespace.
    List {
        /// Which namespace; none: all.
        namespace: Option<String>,
    },
    /// Write an object that is not there yet.
    Create {
        /// A ConfigMap with namespace and name.
        object: Value,
    },
    /// Remove an object that is there.
    Delete { namespace: String, name: String },
    /// Read all changes after a revision, and go on.
    Watch {
        /// The revision after which changes are wanted.
        after: u64,
    },
    /// A moment in the instance's life.
    Mark { mark: MarkKind, at: Stamp },
    /// A connection has ended.
    Ended(EndReport),
}

/// The reply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub(crate) enum Reply {
    /// Done.
    Noted,
    /// To get, create and delete.
    Object {
        /// As it is now.
        object: Value,
    },
    /// To list.
    List {
        revision: u64,
        /// In order of namespace and name.
        items: Vec<Value>,
    },
    /// To watch: one change.
    Change(Change),
    /// To watch, now and then: all changes up to this revision were sent.
    Progress { revision: u64 },
    /// It cannot be done.
    Failed { reason: Reason },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Change {
    /// The revision that it made.
    pub(crate) revision: u64,
    pub(crate) kind: ChangeKind,
    /// The object as written, or as it was last.
    pub(crate) object: Value,
}

/// What a write did to its object; in capitals, a watch event's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum ChangeKind {
    /// It was not there before.
    Added,
    /// It is not there any more.
    Deleted,
}

/// Why a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// No such object.
    #[error("no such object")]
    NotFound,
    /// There is one already.
    #[error("the object exists already")]
    Exists,
    /// The history does not go back that far.
    #[error("the history does not go back that far")]
    Gone,
    /// Not a call of this protocol and version.
    #[error("not a call of protocol version {VERSION}")]
    Protocol,
}

/// Writes one line.
pub(crate) async fn write<T: Serialize>(
    to: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line).await
}

/// Reads one line; `None` at the end. A line that is too long, cut off or not a message is
/// [`io::ErrorKind::InvalidData`].
pub(crate) async fn read<T: DeserializeOwned>(
    from: &mut (impl AsyncBufRead + Unpin),
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    if from.take(MAX_LINE).read_until(b'\n', &mut line).await? == 0 {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a line was cut off",
        ));
    }
    Ok(Some(serde_json::from_slice(&line)?))
}
