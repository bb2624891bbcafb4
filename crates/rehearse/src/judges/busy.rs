//! Decides whether this machine was too busy for a verdict. The only evidence is the clients'
//! timers and timetable, which do not depend on the system under test.
//!
//! A busy machine excuses nothing but a long wait, and only if timers were late during the wait, or
//! if the clients fell far behind their timetable in the run. A wait that ended by a reset or a
//! close counts as unanswered, once it has lasted until the client would have given up. Refused
//! connections, early resets and wrong answers are losses, however busy the machine was.

use super::requests::MAX_BEHIND;
use crate::config::LATE_TIMER;
use crate::record::{Record, data::Ran, event::Attempt, loss::Loss, stamp::Stamp};
use std::time::Duration;

/// Times when timers of the clients were late by [`LATE_TIMER`] or more. Nothing of the load could
/// run at these moments.
#[derive(Debug)]
pub(super) struct BusyPeriods {
    /// Begin and end of each period with late timers, in order and without overlaps.
    late: Vec<(Stamp, Stamp)>,
    /// True if the clients fell so far behind their timetable that the machine explains every wait.
    is_slow: bool,
}

impl BusyPeriods {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            late: join_periods(record.late.clone()),
            is_slow: record.behind > MAX_BEHIND,
        }
    }

    /// True if the busy machine explains why a request waited long: timers were late for at least
    /// half of the wait, or the clients were far behind their timetable in the run.
    pub(super) fn explains(&self, attempt: &Attempt) -> bool {
        if self.is_slow {
            return true;
        }
        let Attempt { due, done, .. } = *attempt;
        let late = sum_overlap((due, done), &self.late);
        late >= LATE_TIMER && late * 2 >= done.since(due)
    }
}

/// Adds an objection to the run if requests stayed unanswered while this machine was busy: nobody
/// can tell whether berth or the machine was the cause.
pub(super) fn report_unanswered(unanswered: u64, ran: &mut Ran) {
    if unanswered > 0 {
        let unanswered = Loss::Unanswered.words(unanswered);
        ran.mark_too_busy(format!(
            "{unanswered}, and this machine was too busy to tell why: the clients were far behind their timetable, \
             or for half of the wait the clients' timers were late by {LATE_TIMER:?} or more"
        ));
    }
}

fn join_periods(mut periods: Vec<(Stamp, Stamp)>) -> Vec<(Stamp, Stamp)> {
    periods.sort_unstable();
    let mut joined: Vec<(Stamp, Stamp)> = Vec::new();
    for (from, to) in periods {
        match joined.last_mut().filter(|last| last.1 >= from) {
            Some(last) => last.1 = last.1.max(to),
            None => joined.push((from, to)),
        }
    }
    joined
}

/// Returns how much time of the first period is covered by the other periods.
fn sum_overlap((from, to): (Stamp, Stamp), periods: &[(Stamp, Stamp)]) -> Duration {
    periods
        .iter()
        .map(|(began, ended)| to.min(*ended).since(from.max(*began)))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{attempt, stamp_at};
    use super::*;
    use crate::record::event::{Answer, Failure};

    #[test]
    fn a_wait_is_explained_by_timers_that_were_late_for_half_of_it() {
        let wait = attempt("new-0", 1_000, 16_000, Answer::Failed(Failure::Unanswered));
        for (late, is_explained) in [
            (&[(0, 9_000)][..], true),
            (&[(2_000, 6_000), (9_000, 13_000)], true),
            // Overlapping periods count only once.
            (&[(2_000, 6_000), (3_000, 6_500)], false),
            (&[], false),
            (&[(1_000, 8_000)], false),
            (&[(0, 1_000), (16_000, 90_000)], false),
        ] {
            let periods = late
                .iter()
                .map(|(from, to)| (stamp_at(*from), stamp_at(*to)))
                .collect();
            let record = Record {
                late: periods,
                ..Record::default()
            };
            assert_eq!(
                BusyPeriods::of(&record).explains(&wait),
                is_explained,
                "{late:?}"
            );
        }
    }
}
