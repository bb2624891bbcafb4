//! The protocol between simulated apiservers and the rehearsal, over a Unix socket: one JSON object
//! a line, with the protocol version in the first line.
//!
//! A connection carries calls and replies in turn. After [`Call::Watch`] the connection carries
//! changes until closed.
//!
//! The protocol uses a stream of lines, not the datagrams of berth-node, because a list can be
//! larger than a datagram.

use crate::record::{data::MarkKind, event::EndReport, stamp::Stamp};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::io;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Version of the protocol. Both ends run the same binary, so a different version is an error.
pub(crate) const VERSION: u32 = 1;

/// Length limit of a line. A list of ten thousand small ConfigMaps fits.
const MAX_LINE: u64 = 64 << 20;

/// A call of a simulated apiserver to the rehearsal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "kebab-case")]
pub(crate) enum Call {
    /// The first line of a connection.
    Hello {
        version: u32,
        /// Name of the instance.
        instance: String,
    },
    /// Read one object.
    Get { namespace: String, name: String },
    /// List the objects of a namespace, or of all namespaces.
    List {
        /// The namespace. `None` for all namespaces.
        namespace: Option<String>,
    },
    /// Create a new object.
    Create {
        /// A ConfigMap with namespace and name.
        object: Value,
    },
    /// Delete an existing object.
    Delete { namespace: String, name: String },
    /// Read the changes after a revision, and continue with new ones.
    Watch {
        /// The revision before the first change.
        after: u64,
    },
    /// An event in the instance's life.
    Mark { mark: MarkKind, at: Stamp },
    /// A connection has ended.
    Ended(EndReport),
}

/// The reply to a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "kebab-case")]
pub(crate) enum Reply {
    /// Reply to a mark or an end report: done.
    Noted,
    /// Reply to get, create and delete.
    Object {
        /// The object's current state.
        object: Value,
    },
    /// Reply to list.
    List {
        revision: u64,
        /// Objects ordered by namespace and name.
        items: Vec<Value>,
    },
    /// Reply to watch: a change.
    Change(Change),
    /// Reply to watch, from time to time: all changes up to this revision were sent.
    Progress { revision: u64 },
    /// The call failed.
    Failed { reason: Reason },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Change {
    /// The revision of the change.
    pub(crate) revision: u64,
    pub(crate) kind: ChangeKind,
    /// The written object, or the last state of a deleted object.
    pub(crate) object: Value,
}

/// Effect of a write on its object. In capitals: the type of the watch event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum ChangeKind {
    /// The object is new.
    Added,
    /// The object was deleted.
    Deleted,
}

/// The reason why the store could not do a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    #[error("no such object")]
    NotFound,
    #[error("the object exists already")]
    Exists,
    #[error("the store no longer has the history since the requested revision")]
    Gone,
    /// The line is no call of this protocol version.
    #[error("not a call of protocol version {VERSION}")]
    Protocol,
}

/// Writes one line.
pub(crate) async fn write_message<T: Serialize>(
    to: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line).await
}

/// Reads one line. `None` at the end of the stream. The error is [`io::ErrorKind::InvalidData`] if
/// the line is too long, cut off, or no valid message.
pub(crate) async fn read_message<T: DeserializeOwned>(
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
