//! The log of a rehearsal: an event for each observation of a client, an instance or the script.
//! Events are appended when seen and never changed.
//!
//! The load, the processes and the script only append. Events are interpreted after the run:
//! [`Record`](super::Record) sorts them for the judges.

use super::data::MarkKind;
use super::event::{Attempt, Dialed, Event, EventKind};
use super::stamp::Stamp;
use crate::config::fault::{Fault, Standby};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The log of a running rehearsal.
#[derive(Debug, Default)]
pub struct Recorder(Mutex<Vec<Event>>);

impl Recorder {
    /// Appends an event with the present time.
    pub fn add(&self, subject: &str, what: EventKind) {
        self.add_at(Stamp::now(), subject, what);
    }

    /// Appends an event with the given time.
    pub(crate) fn add_at(&self, at: Stamp, subject: &str, what: EventKind) {
        self.lock().push(Event {
            at,
            subject: subject.to_owned(),
            what,
        });
    }

    /// Appends an event of an instance, with the present time.
    pub(crate) fn add_mark(&self, instance: &str, mark: MarkKind) {
        self.add(
            instance,
            EventKind::Mark {
                mark,
                text: String::new(),
            },
        );
    }

    /// Appends an unexpected error.
    pub(crate) fn add_trouble(&self, trouble: String) {
        self.add("", EventKind::Trouble(trouble));
    }

    /// Appends a fault and returns its number.
    pub(crate) fn add_fault(&self, instance: &str, fault: Fault, standby: Standby) -> usize {
        let mut log = self.lock();
        let number = log
            .iter()
            .filter(|event| matches!(event.what, EventKind::Fault { .. }))
            .count();
        let what = EventKind::Fault { fault, standby };
        log.push(Event {
            at: Stamp::now(),
            subject: instance.to_owned(),
            what,
        });
        number
    }

    pub fn read<T>(&self, read: impl FnOnce(&[Event]) -> T) -> T {
        read(&self.lock())
    }

    /// Returns the last time at which an event of this kind was logged for an instance.
    pub fn last_mark_time(&self, instance: &str, mark: MarkKind) -> Option<Stamp> {
        self.read(|log| last_mark(log, instance, mark))
    }

    /// Returns the clients' largest delay behind their timetable.
    pub(crate) fn max_delay(&self) -> Duration {
        let behind = |event: &Event| {
            if let EventKind::Behind(behind) = event.what {
                Some(behind)
            } else {
                None
            }
        };
        self.read(|log| log.iter().filter_map(behind).max().unwrap_or_default())
    }

    /// Removes and returns all events.
    pub fn drain(&self) -> Vec<Event> {
        std::mem::take(&mut *self.lock())
    }

    /// Locks the log. A poisoned lock is safe: a panic leaves no partial events.
    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a function under the lock, so that no other event comes between.
    pub(crate) fn with_events<T>(&self, act: impl FnOnce(&mut Vec<Event>) -> T) -> T {
        act(&mut self.lock())
    }
}

/// Returns the last time at which an event of this kind was logged for an instance.
pub(crate) fn last_mark(log: &[Event], instance: &str, wanted: MarkKind) -> Option<Stamp> {
    let marked = |event: &&Event| {
        event.subject == instance
            && matches!(event.what, EventKind::Mark { mark, .. } if mark == wanted)
    };
    log.iter().filter(marked).map(|event| event.at).max()
}

/// Returns the requests of clients that dial the address under test.
pub fn attempts_at_tested_address(log: &[Event]) -> impl DoubleEndedIterator<Item = &Attempt> {
    log.iter().filter_map(|event| match &event.what {
        EventKind::Attempt(Dialed::Front, attempt) => Some(attempt),
        _ => None,
    })
}
