//! The context of one run: the plan, the way that is rehearsed, the log, and the progress on the terminal.

use crate::config::{Plan, Via};
use crate::record::{
    event::{EventKind, FaultStep},
    log::Recorder,
    progress::Progress,
};
use crate::testbed::store::{NOTIFY_EVERY, Store};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Context<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) via: Via,
    pub(crate) recorder: Arc<Recorder>,
    /// Of simulated apiservers.
    pub(crate) store: Arc<Store>,
    progress: Progress,
}

impl<'a> Context<'a> {
    pub(crate) fn new(plan: &'a Plan, via: Via) -> Self {
        let recorder = Arc::default();
        let store =
            Arc::new(Store::default().notifying_every(plan.timing.speedup.of(NOTIFY_EVERY)));
        Self {
            plan,
            via,
            progress: Progress::new(&recorder),
            recorder,
            store,
        }
    }

    /// Prints what begins or has ended.
    pub(crate) fn print(&self, what: &str) {
        self.progress.print(what);
    }

    /// Logs what is not as it should be.
    pub(crate) fn trouble(&self, trouble: String) {
        self.recorder.trouble(trouble);
    }

    /// Logs what is worth knowing, and prints it, once.
    pub(crate) fn log_note(&self, note: &str) {
        let what = EventKind::Note(note.to_owned());
        if !self
            .recorder
            .read(|log| log.iter().any(|event| event.what == what))
        {
            self.print(note);
            self.recorder.add("", what);
        }
    }

    /// Logs what is seen of a fault.
    pub(crate) fn step(&self, fault: usize, step: FaultStep) {
        self.recorder.add("", EventKind::FaultStep(fault, step));
    }
}
