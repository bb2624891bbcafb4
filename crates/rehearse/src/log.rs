//! The log of a rehearsal: one event for each thing that a client, an instance or the script saw, appended when it was seen and
//! never changed.
//!
//! The load, the stage and the script only append. What the events mean is decided when all is over:
//! [`Record`](super::record::Record) sorts them for the judges.

use super::data::{Informer, MarkKind};
use super::fault::{Fault, Standby};
use super::gate::GateMetrics;
use super::record::{Answer, Attempt, EndReport, Named, StreamEnd, WatchSum};
use super::stamp::Stamp;
use berth_node::ipc::wire::DirectStatus;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// One thing that was seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    pub at: Stamp,
    /// The client, instance or process that it is about; empty: the whole rehearsal.
    pub who: String,
    pub what: EventKind,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// The timetables of the clients began.
    LoadBegan,
    LoadEnded,
    /// Clients of their own dial a node.
    NodeDialed(SocketAddr),
    /// A request of a client's timetable was answered, or failed.
    Attempt(Dialed, Attempt),
    /// A connection ended without its client wanting that.
    StreamEnd(Dialed, StreamEnd),
    /// A large answer was read slowly to its end.
    SlowRead,
    /// The clients were this far behind their timetable, farther than before.
    Behind(Duration),
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
    Player {
        /// Whether it is one of those that take over from one another; others are not to serve.
        serves: bool,
        /// Its node, if there are several.
        node: Option<String>,
    },
    /// The instance has the version that it should have.
    Version(String),
    /// A fault was injected at an instance.
    Fault {
        fault: Fault,
        standby: Standby,
        /// Name and address of the node, if there are several.
        node: Option<(String, SocketAddr)>,
    },
    /// Something was seen of the fault that was injected as the N-th, from 0 on.
    FaultStep(usize, FaultStep),
    /// The Service `kubernetes` was looked at.
    Service {
        /// When the poll before was, which saw what the event before has.
        after: Stamp,
        /// The addresses in its EndpointSlices.
        named: Named,
    },
    /// The shims were asked for their direct path, by their names.
    Steering(Vec<(String, DirectStatus)>),
    /// The shims were asked for the metrics of their gates, by their sockets.
    Gates(Vec<(PathBuf, GateMetrics)>),
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
    /// The address that is under test: of several nodes, the Service.
    Front,
    /// A node by its address.
    Node(String),
    /// An instance itself: the control, with nothing in between.
    Instance(String),
}

/// What can be seen of a fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultStep {
    /// Whoever is to notice it has; under a bridge, what was killed is gone.
    Noticed,
    /// All is as before again.
    Over,
    /// Something else, in words.
    Seen(String),
    /// kube-proxy sends no client to the node any more.
    Unproxied,
    /// The node's link is back.
    Linked,
    /// The Service named the node again at this moment at the earliest.
    Named(Stamp),
    /// The node's shim listens again.
    Listened,
}

/// The log while it is written.
#[derive(Debug, Default)]
pub struct Recorder(Mutex<Vec<Event>>);

impl Recorder {
    /// Appends an event of this moment.
    pub fn add(&self, who: &str, what: EventKind) {
        self.add_at(Stamp::now(), who, what);
    }

    /// Appends an event of another moment.
    pub(crate) fn add_at(&self, at: Stamp, who: &str, what: EventKind) {
        self.lock().push(Event { at, who: who.to_owned(), what });
    }

    /// Appends a mark of an instance.
    pub(crate) fn mark(&self, instance: &str, mark: MarkKind) {
        self.add(instance, EventKind::Mark { mark, text: String::new() });
    }

    /// Appends what was not as it should be.
    pub(crate) fn trouble(&self, trouble: String) {
        self.add("", EventKind::Trouble(trouble));
    }

    /// Appends a fault; its number.
    pub(crate) fn inject(
        &self,
        instance: &str,
        fault: Fault,
        standby: Standby,
        node: Option<(String, SocketAddr)>,
    ) -> usize {
        let mut log = self.lock();
        let number = log.iter().filter(|event| matches!(event.what, EventKind::Fault { .. })).count();
        let what = EventKind::Fault { fault, standby, node };
        log.push(Event { at: Stamp::now(), who: instance.to_owned(), what });
        number
    }

    pub fn read<T>(&self, read: impl FnOnce(&[Event]) -> T) -> T {
        read(&self.lock())
    }

    /// The last time that an instance came so far.
    pub fn last(&self, instance: &str, mark: MarkKind) -> Option<Stamp> {
        self.read(|log| last(log, instance, mark))
    }

    /// How far the clients were behind their timetable at most.
    pub(crate) fn behind(&self) -> Duration {
        let behind = |event: &Event| if let EventKind::Behind(behind) = event.what { Some(behind) } else { None };
        self.read(|log| log.iter().filter_map(behind).max().unwrap_or_default())
    }

    /// Takes the log out; what is added afterwards is not in it.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.lock())
    }

    /// A panic elsewhere leaves whole events behind.
    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does several things at once: no other event is appended meanwhile.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Vec<Event>) -> T) -> T {
        act(&mut self.lock())
    }
}

/// The last time that an instance came so far.
pub(crate) fn last(log: &[Event], instance: &str, wanted: MarkKind) -> Option<Stamp> {
    let marked =
        |event: &&Event| event.who == instance && matches!(event.what, EventKind::Mark { mark, .. } if mark == wanted);
    log.iter().filter(marked).map(|event| event.at).max()
}

/// The requests of the clients that dial what is under test.
pub fn attempts(log: &[Event]) -> impl DoubleEndedIterator<Item = &Attempt> {
    log.iter().filter_map(|event| match &event.what {
        EventKind::Attempt(Dialed::Front, attempt) => Some(attempt),
        _ => None,
    })
}
