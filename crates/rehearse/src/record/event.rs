//! What a [log](crate::record::log) holds: the events that clients, instances and the script saw.
//!
//! Nothing is judged here: only the whole log shows what the other side reported.

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

/// One thing that was seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    pub at: Stamp,
    /// The client, instance or process that it is about; empty: the whole rehearsal.
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
    /// A connection ended without its client wanting that.
    StreamEnd(Dialed, StreamEnd),
    /// The clients were this far behind their timetable, farther than before.
    Behind(Duration),
    /// A timer of the clients was this late, by [`LATE`](crate::config::LATE) at least.
    Late(Duration),
    /// A watch came to its end.
    Watch(WatchSum),
    /// A client that keeps a copy of objects came to its end.
    Informer(Informer),
    /// The clients of a storm came.
    StormBegan(u32),
    /// One try of one of them.
    StormTry(Answer),
    /// Each of them was served, or gave up for good.
    StormEnded,
    /// A simulated apiserver reported the end of a connection.
    EndReport(EndReport),
    /// Something happened to an instance.
    Mark {
        mark: MarkKind,
        /// More of it in words, such as an exit status; may be empty.
        text: String,
    },
    /// The instance takes part. True for the old and the new instance, of which one takes over from the other; false for a version that must
    /// never serve.
    Player(bool),
    /// The instance has the version that it should have.
    Version(String),
    /// A fault was injected at an instance.
    Fault {
        fault: Fault,
        standby: Standby,
    },
    /// Something was seen of the fault that was injected as the N-th, from 0 on.
    FaultStep(usize, FaultStep),
    /// The Service `kubernetes` was polled. True if it named an address.
    Service(bool),
    /// The shims were asked for the metrics of their gates, by their sockets.
    Gates(Vec<(PathBuf, GateMetrics)>),
    /// What a shim uses, after a round.
    Footprint(Footprint),
    /// An apiserver logged a certificate that it does not trust.
    UntrustedCertificate,
    /// Something was not as it should be, in words.
    Trouble(String),
    /// Something is worth knowing and is nothing against the run, in words.
    Note(String),
}

/// What a client dials.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialed {
    /// The address that is under test.
    Front,
    /// An instance itself: the control, with nothing in between.
    Instance(String),
}

/// What a shim uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    pub pid: u32,
    /// Memory that no other process shares (RssAnon).
    pub memory_kib: u64,
    /// Open descriptors, without those of connections.
    pub descriptors: u64,
    pub threads: u64,
}

/// What can be seen of a fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultStep {
    /// Shims or clients have noticed it; under a bridge, what was killed is gone.
    Noticed,
    /// All is as before again.
    Over,
    /// Its shim has so many connections, just before.
    Has(u64),
    /// Something else, in words.
    Seen(String),
}

/// Name of a stream: one client's one connection. It travels in the header [`STREAM_HEADER`].
pub type StreamId = String;

/// Request header that carries the [`StreamId`], so that an instance can name what it ended.
pub const STREAM_HEADER: &str = "x-rehearse-stream";

/// One request that a client had in its timetable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// On a new connection or a kept one.
    pub kind: ConnectionKind,
    /// Whether it was to write something.
    pub writes: bool,
    /// The connection that it used.
    pub stream: StreamId,
    /// When the timetable wanted it; waits are counted from here.
    pub due: Stamp,
    /// When the answer was complete, or the failure seen.
    pub done: Stamp,
    pub answer: Answer,
}

/// Whether an [`Attempt`] had to connect first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConnectionKind {
    /// Connect, TLS handshake, request.
    New,
    /// A request on a connection that answered before.
    Kept,
}

/// What came of an [`Attempt`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// A whole answer with a status below 400.
    Good {
        instance: String,
    },
    /// A whole answer with an error status.
    Bad {
        instance: String,
        status: u16,
    },
    Failed(Failure),
}

/// Why there was no answer, or why a stream ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Failure {
    Refused,
    Reset,
    /// The connection was closed, with or without a TLS close before.
    Closed,
    /// Nothing for [`crate::config::UNANSWERED`].
    Unanswered,
    /// The certificate was not one that the client trusts for this address.
    X509(String),
    Tls(String),
    Http(String),
    /// This process failed (no descriptors, no ports), and not the berth.
    Local(String),
}

impl std::error::Error for Failure {}

impl Failure {
    /// What it costs a client that does not retry; none: it is this machine's own.
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

/// An end that its client did not want, of a connection whose TLS handshake was complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamEnd {
    pub stream: StreamId,
    pub what: StreamKind,
    pub protocol: Protocol,
    /// Whose certificate was seen on it.
    pub instance: String,
    /// When the client saw the end.
    pub at: Stamp,
    pub how: Failure,
    /// A request was under way (always so for a watch).
    pub in_flight: bool,
    /// How its instance announced the end, if it did.
    pub signed: Option<Signed>,
}

/// What a stream was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamKind {
    /// One request. Its end is in the [`Attempt`], too.
    New,
    /// One request after the other.
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

/// How an instance announces that it ends a connection. All of these are inside TLS, so that a relay
/// cannot forge them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Signed {
    /// The end of an answer that could have gone on: a watch's.
    EndOfAnswer,
    /// `Connection: close` on the last answer.
    LastAnswer,
    /// HTTP/2's GOAWAY, with no request under way that it lets finish.
    GoAway,
    /// TLS's close_notify.
    CloseNotify,
}

/// An instance's own report about a connection that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndReport {
    /// As the client named it.
    pub stream: StreamId,
    /// The other end of the connection as the instance saw it.
    pub peer: SocketAddr,
    pub by: EndedBy,
    /// When the instance began to end it, or saw that it had ended.
    pub at: Stamp,
    /// Requests that it rejected with 429 or 503 because it was shutting down.
    pub rejected: u32,
}

/// Which end closed a connection, seen from the instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndedBy {
    /// The instance, because it shuts down.
    Instance,
    /// The other end closed it while nothing was under way.
    Peer,
    /// The other end closed or reset it while an answer was under way.
    PeerEarly,
}

/// What one watch saw in all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchSum {
    /// Name of its client: its streams are `CLIENT-1`, `CLIENT-2` and so on.
    pub client: String,
    /// Events by the instance that sent them.
    pub events: BTreeMap<String, u64>,
    /// When it noticed what it never saw ([`Loss::EventMissed`]) or saw again or too late ([`Loss::EventDuplicated`]), and how
    /// many writes.
    pub flaws: Vec<(Stamp, Loss, u64)>,
    /// How often the client listed again.
    pub relists: u64,
    /// Times that it got 410: its revision was older than what the instance knew.
    pub expired: u64,
}

impl WatchSum {
    /// Writes that it never saw, or saw again or too late.
    pub fn count(&self, flaw: Loss) -> u64 {
        self.flaws
            .iter()
            .filter(|(_, loss, _)| *loss == flaw)
            .map(|(_, _, count)| count)
            .sum()
    }
}

/// What a client that lists and watches to keep a copy of objects holds in the end, against what was written. One named `informer-N` is of
/// all objects, `quiet-N` of objects that are not written during the load.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Informer {
    /// Its client.
    pub id: String,
    /// Objects that were written and not deleted.
    pub written: u64,
    /// Objects that it holds at the end.
    pub held: u64,
    /// Objects that were written and that it does not hold, or never saw before they were deleted.
    pub missing: u64,
    /// Objects that it holds although they were deleted.
    pub stale: u64,
    /// Objects of which it saw an event twice.
    pub duplicated: u64,
    /// How often the client listed again.
    pub relists: u64,
    /// Times that it got 410: its revision was older than what the instance knew.
    pub expired: u64,
}

impl Informer {
    /// It follows objects that are not written: what it holds is no evidence, only how often it listed again.
    pub(crate) fn is_quiet(&self) -> bool {
        self.id.starts_with("quiet-")
    }
}
