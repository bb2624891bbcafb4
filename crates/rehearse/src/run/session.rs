//! The session of a run: plan, way, log, and progress on the terminal.

use crate::config::{Plan, Via};
use crate::record::{
    event::{EventKind, FaultStep},
    log::Recorder,
    progress::Progress,
};
use crate::testbed::store::{NOTIFY_INTERVAL, Store};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Session<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) via: Via,
    pub(crate) recorder: Arc<Recorder>,
    /// The store that simulated apiservers use in place of etcd.
    pub(crate) store: Arc<Store>,
    progress: Progress,
}

impl<'a> Session<'a> {
    pub(crate) fn new(plan: &'a Plan, via: Via) -> Self {
        let recorder = Arc::default();
        let store = Arc::new(
            Store::default().with_notify_interval(plan.timing.speedup.shorten(NOTIFY_INTERVAL)),
        );
        Self {
            plan,
            via,
            progress: Progress::new(&recorder),
            recorder,
            store,
        }
    }

    /// Prints the begin or end of a phase.
    pub(crate) fn print_progress(&self, what: &str) {
        self.progress.print(what);
    }

    /// Logs an unexpected error.
    pub(crate) fn record_trouble(&self, trouble: String) {
        self.recorder.add_trouble(trouble);
    }

    /// Logs and prints a remark. A repeated remark is dropped.
    pub(crate) fn log_note(&self, note: &str) {
        let what = EventKind::Note(note.to_owned());
        if !self
            .recorder
            .read(|log| log.iter().any(|event| event.what == what))
        {
            self.print_progress(note);
            self.recorder.add("", what);
        }
    }

    /// Logs a step of a fault.
    pub(crate) fn record_fault_step(&self, fault: usize, step: FaultStep) {
        self.recorder.add("", EventKind::FaultStep(fault, step));
    }
}
