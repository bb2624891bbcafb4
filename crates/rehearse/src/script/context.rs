//! What every step of a script has: the plan, the log, and what a person sees meanwhile.

use crate::log::{EventKind, FaultStep, Recorder};
use crate::plan::Plan;
use crate::progress::Progress;
use std::sync::Arc;

pub(super) struct Context<'a> {
    pub(super) plan: &'a Plan,
    pub(super) recorder: &'a Arc<Recorder>,
    progress: Progress,
}

impl<'a> Context<'a> {
    pub(super) fn new(plan: &'a Plan, recorder: &'a Arc<Recorder>) -> Self {
        Self { plan, recorder, progress: Progress::new(recorder) }
    }

    /// Prints what begins or has ended.
    pub(super) fn say(&self, what: &str) {
        self.progress.say(what);
    }

    /// Logs what is not as it should be.
    pub(super) fn trouble(&self, trouble: String) {
        self.recorder.trouble(trouble);
    }

    /// Logs what is worth knowing, and prints it.
    pub(super) fn note(&self, note: &str) {
        self.say(note);
        self.recorder.add("", EventKind::Note(note.to_owned()));
    }

    /// Logs what is seen of a fault.
    pub(super) fn step(&self, fault: usize, step: FaultStep) {
        self.recorder.add("", EventKind::FaultStep(fault, step));
    }
}
