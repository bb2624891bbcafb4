//! The events in a [log](crate::record::log): what clients, instances and the script saw.
//!
//! Events judge nothing: only the whole log shows what the other end of a connection reported.

use super::data::MarkKind;
use super::gate_metrics::GateMetrics;
use super::loss::Loss;
use super::stamp::Stamp;
use crate::config::fault::{Fault, Standby};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// An entry of the log: a time, and what was seen then.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    pub at: Stamp,
    /// The client, instance or process of the event. Empty if the event concerns the whole
    /// rehearsal.
    pub subject: String,
    pub what: EventKind,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// The timetables of the clients began.
    LoadBegan,
    LoadEnded,
    /// A request of a client's timetable was answered, or failed.
    Attempt(Dialed, Attempt),
    /// A connection ended although its client wanted to keep it.
    StreamEnd(Dialed, StreamEnd),
    /// The clients are behind their timetable by this duration: the largest delay so far.
    Behind(Duration),
    /// A timer of the clients was late by this duration, at least
    /// [`LATE_TIMER`](crate::config::LATE_TIMER).
    Late(Duration),
    /// A watch finished.
    Watch(WatchSum),
    /// The final state of an informer: a client with a local copy of the objects.
    Informer(Informer),
    /// A storm of this many clients began.
    StormBegan(u32),
    /// A client of the storm tried to connect.
    StormTry(Answer),
    /// Every client of the storm was served or gave up.
    StormEnded,
    /// A simulated apiserver reported the end of a connection.
    EndReport(EndReport),
    /// An event in the life of an instance, such as its start or SIGTERM.
    Mark {
        mark: MarkKind,
        /// Details, such as an exit status. May be empty.
        text: String,
    },
    /// An instance takes part in the run. True for the old and the new instance, false for a
    /// version that must never serve.
    Player(bool),
    /// The instance's `/version` answered with this version, as expected.
    Version(String),
    /// The script injected a fault in an instance or in its relay.
    Fault {
        fault: Fault,
        standby: Standby,
    },
    /// A step of a fault. The number counts injected faults from 0.
    FaultStep(usize, FaultStep),
    /// The Service `kubernetes` was polled. True if the Service has an address.
    Service(bool),
    /// Metrics of the gates of all shims, by the socket of the shim.
    Gates(Vec<(PathBuf, GateMetrics)>),
    /// The resources of a shim after an upgrade.
    Footprint(Footprint),
    /// An apiserver logged an untrusted certificate.
    UntrustedCertificate,
    /// An error of the rehearsal's own processes, in words.
    Trouble(String),
    /// A remark that is no objection to the run.
    Note(String),
}

/// The address that a client dials.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialed {
    /// The berth's address, which is under test.
    Front,
    /// The address of an instance: the control group, without a proxy between.
    Instance(String),
}

/// The resources of a shim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    pub pid: u32,
    /// Memory that is not shared with another process (RssAnon).
    pub memory_kib: u64,
    /// Open file descriptors, except those of connections.
    pub descriptors: u64,
    pub threads: u64,
}

/// A step of an injected fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultStep {
    /// Shims or clients have noticed the fault. Under a bridge: the killed process is gone.
    Noticed,
    /// The fault is over: everything is as it was before.
    Over,
    /// The number of the shim's connections just before the fault.
    Has(u64),
    /// Another observation, in words.
    Seen(String),
}

/// Name of a stream, a single connection of a client. The header [`STREAM_HEADER`] carries the
/// name.
pub type StreamId = String;

/// Request header that carries the [`StreamId`], so that an instance can report which stream ended.
pub const STREAM_HEADER: &str = "x-rehearse-stream";

/// A request from a client's timetable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// The request is on a new or on an open connection.
    pub kind: ConnectionKind,
    /// True if the request writes an object.
    pub writes: bool,
    /// The connection of the request.
    pub stream: StreamId,
    /// When the request was due by the timetable. Waits are counted from here.
    pub due: Stamp,
    /// When the answer was complete or the failure was seen.
    pub done: Stamp,
    pub answer: Answer,
}

/// The connection that an [`Attempt`] uses: a new one, or one that was open already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConnectionKind {
    /// A new connection: TCP connect, TLS handshake, then the request.
    New,
    /// A request on an open connection, which has carried an answer before.
    Kept,
}

/// The result of an [`Attempt`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// A complete answer with a status below 400.
    Good {
        instance: String,
    },
    /// A complete answer with an error status.
    Bad {
        instance: String,
        status: u16,
    },
    Failed(Failure),
}

/// The reason why an answer is missing, or why a stream ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Failure {
    Refused,
    Reset,
    /// The connection was closed, with or without a TLS close before.
    Closed,
    /// No answer for [`crate::config::ANSWER_TIMEOUT`].
    Unanswered,
    /// The client does not trust the certificate for this address.
    X509(String),
    Tls(String),
    Http(String),
    /// A failure of this process (no file descriptors, no ports), not of the berth.
    Local(String),
}

impl std::error::Error for Failure {}

impl Failure {
    /// The loss for a client that does not retry. `None` for a failure of this machine.
    pub(crate) fn loss(&self) -> Option<Loss> {
        Some(match self {
            Self::Local(_) => return None,
            Self::Unanswered => Loss::Unanswered,
            Self::Refused => Loss::Refused,
            Self::Reset => Loss::Reset,
            Self::Closed => Loss::Closed,
            Self::X509(_) | Self::Tls(_) => Loss::Tls,
            Self::Http(_) => Loss::Http,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str("refused"),
            Self::Reset => f.write_str("reset"),
            Self::Closed => f.write_str("closed"),
            Self::Unanswered => f.write_str("unanswered"),
            Self::X509(why) => write!(f, "x509: {why}"),
            Self::Tls(why) => write!(f, "TLS: {why}"),
            Self::Http(why) => write!(f, "HTTP: {why}"),
            Self::Local(why) => write!(f, "this machine: {why}"),
        }
    }
}

/// The unwanted end of a connection after a complete TLS handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamEnd {
    pub stream: StreamId,
    pub what: StreamKind,
    pub protocol: Protocol,
    /// The instance of the connection. The client saw this instance's certificate.
    pub instance: String,
    /// When the client saw the end.
    pub at: Stamp,
    pub how: Failure,
    /// True if a request was in flight, as it always is on a watch.
    pub in_flight: bool,
    /// How the instance announced the end. `None` if the end came unannounced.
    pub signed: Option<Signed>,
}

/// The purpose of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamKind {
    /// A single request. The [`Attempt`] records the end, too.
    New,
    /// A connection with many requests in a row.
    Kept,
    Watch,
}

/// HTTP version of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    Http1,
    Http2,
}

/// How an instance announces the end of a connection. All announcements are inside TLS, so a relay
/// cannot forge them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Signed {
    /// A regular end of a streamed answer, such as a watch's, that could have continued.
    EndOfAnswer,
    /// `Connection: close` on the last answer.
    LastAnswer,
    /// HTTP/2's GOAWAY, while no request was in flight that may still finish.
    GoAway,
    /// TLS's close_notify.
    CloseNotify,
}

/// An instance's report about a connection that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndReport {
    /// The name given by the client.
    pub stream: StreamId,
    /// The address of the connection's peer, seen from the instance.
    pub peer: SocketAddr,
    pub by: EndedBy,
    /// When the instance began to close the connection, or saw the connection's end.
    pub at: Stamp,
    /// Number of requests rejected with 429 or 503 during the shutdown.
    pub rejected: u32,
}

/// The side that closed a connection, as the instance saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndedBy {
    /// The instance closed the connection, because of its shutdown.
    Instance,
    /// The peer closed the connection while no request was in flight.
    Peer,
    /// The peer closed or reset the connection in the middle of an answer.
    PeerEarly,
}

/// The summary of a watch.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchSum {
    /// Name of the client. The streams of a client are named `CLIENT-1`, `CLIENT-2` and so on.
    pub client: String,
    /// Number of events by instance.
    pub events: BTreeMap<String, u64>,
    /// Missed writes ([`Loss::EventMissed`]) and duplicated or late writes
    /// ([`Loss::EventDuplicated`]): when the client noticed them, and how many.
    pub flaws: Vec<(Stamp, Loss, u64)>,
    /// Number of times that the client listed again.
    pub relists: u64,
    /// Number of 410 answers: the client's revision was older than the instance's history.
    pub expired: u64,
}

impl WatchSum {
    /// Number of writes with this flaw (missed, or duplicated and late).
    pub fn count(&self, flaw: Loss) -> u64 {
        self.flaws
            .iter()
            .filter(|(_, loss, _)| *loss == flaw)
            .map(|(_, _, count)| count)
            .sum()
    }
}

/// The final state of a client that lists and watches to keep a copy of objects, compared with the
/// writes. `informer-N` follows all objects, `quiet-N` follows objects without writes during the
/// load.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Informer {
    /// The name of the client.
    pub id: String,
    /// Number of objects that were written and not deleted.
    pub written: u64,
    /// Number of objects in the client's copy at the end.
    pub held: u64,
    /// Number of written objects that are missing in the copy, or were never seen before their
    /// deletion.
    pub missing: u64,
    /// Number of deleted objects that are still in the copy.
    pub stale: u64,
    /// Number of objects with a duplicated event.
    pub duplicated: u64,
    /// Number of times that the client listed again.
    pub relists: u64,
    /// Number of 410 answers: the client's revision was older than the instance's history.
    pub expired: u64,
}

impl Informer {
    /// True if the client follows objects without writes: only the number of lists counts as
    /// evidence, not the copy.
    pub(crate) fn follows_objects_without_writes(&self) -> bool {
        self.id.starts_with("quiet-")
    }
}
