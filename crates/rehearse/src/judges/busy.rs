//! Whether this machine was too busy to tell: by the clients' own timers and timetable alone, which need nothing of what is under test.
//!
//! A busy machine excuses nothing but waits, and only if timers were late during that same wait, or the clients fell far behind their
//! timetable in the run. A wait that a reset or a close ended counts like one without an answer once it has lasted until the client would
//! have given up. What was refused, reset before, or answered wrongly is lost, however busy the machine was.

use super::faults::all_wait;
use super::requests::MOST_BEHIND;
use crate::data::Ran;
use crate::event::Attempt;
use crate::loss::{self, Loss};
use crate::plan::LATE;
use crate::record::{Injected, Record};
use crate::stamp::Stamp;
use std::time::Duration;

/// When timers of the clients were late by [`LATE`] or more: moments at which nothing of the load could have run.
#[derive(Debug)]
pub(super) struct Busy {
    /// In order, and apart from each other.
    late: Vec<(Stamp, Stamp)>,
    /// When all clients were to wait.
    hangs: Vec<(Stamp, Stamp)>,
    /// The clients fell so far behind their timetable that this machine made every wait.
    is_slow: bool,
}

impl Busy {
    pub(super) fn of(record: &Record) -> Self {
        let hung = |injected: &Injected| Some((injected.at, injected.over.filter(|_| all_wait(injected))?));
        let hangs = record.injected.iter().filter_map(hung).collect();
        Self { late: joined(record.late.clone()), hangs: joined(hangs), is_slow: record.behind > MOST_BEHIND }
    }

    /// Whether the machine had no time for a request that waited long: for half of the wait or more, without what a hang took on purpose,
    /// or in the whole run.
    pub(super) fn explains(&self, attempt: &Attempt) -> bool {
        if self.is_slow {
            return true;
        }
        let Attempt { due, done, .. } = *attempt;
        let rest: Vec<_> = without((due, done), &self.hangs);
        let late = rest.iter().map(|part| common(*part, &self.late)).sum::<Duration>();
        let rest = rest.iter().map(|(from, to)| to.since(*from)).sum::<Duration>();
        late >= LATE && late * 2 >= rest
    }
}

/// Objects to what nobody can tell of requests that were not answered.
pub(super) fn object(unanswered: u64, ran: &mut Ran) {
    if unanswered > 0 {
        let unanswered = loss::words(&Loss::Unanswered.tally(unanswered));
        ran.verdict.too_busy(format!(
            "{unanswered}, and meanwhile the clients were far behind their timetable, or their own timers were late by {LATE:?} and more \
             for half of the time at least"
        ));
    }
}

fn joined(mut periods: Vec<(Stamp, Stamp)>) -> Vec<(Stamp, Stamp)> {
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

/// How long these periods and this one have in common.
fn common((from, to): (Stamp, Stamp), periods: &[(Stamp, Stamp)]) -> Duration {
    periods.iter().map(|(began, ended)| to.min(*ended).since(from.max(*began))).sum()
}

/// A period without these.
fn without((mut from, to): (Stamp, Stamp), periods: &[(Stamp, Stamp)]) -> Vec<(Stamp, Stamp)> {
    let mut rest = Vec::new();
    for (began, ended) in periods {
        rest.push((from, to.min(*began)));
        from = from.max(*ended);
    }
    rest.push((from, to));
    rest.retain(|(from, to)| from < to);
    rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Answer, ConnectionKind, Failure};
    use crate::fault::{Fault, Standby};

    fn ms(ms: u64) -> Stamp {
        Stamp(ms * 1_000_000)
    }

    /// Whether a request that waited from then to then is explained.
    fn explained(late: &[(u64, u64)], fault: Option<(Fault, u64, u64)>, (due, done): (u64, u64)) -> bool {
        let injected = fault.map(|(fault, at, over)| Injected {
            fault,
            instance: "old".into(),
            standby: Standby::Shim,
            at: ms(at),
            noticed: None,
            over: Some(ms(over)),
            seen: Vec::new(),
        });
        let late = late.iter().map(|(from, to)| (ms(*from), ms(*to))).collect();
        let record = Record { late, injected: injected.into_iter().collect(), ..Record::default() };
        Busy::of(&record).explains(&Attempt {
            kind: ConnectionKind::New,
            writes: false,
            stream: "new-0".into(),
            due: ms(due),
            done: ms(done),
            answer: Answer::Failed(Failure::Unanswered),
        })
    }

    #[test]
    fn a_wait_is_explained_by_timers_that_were_late_for_half_of_it() {
        let wait = (1_000, 16_000);
        assert!(explained(&[(0, 9_000)], None, wait) && explained(&[(2_000, 6_000), (9_000, 13_000)], None, wait));
        // Twice the same time is half as much.
        assert!(!explained(&[(2_000, 6_000), (3_000, 6_500)], None, wait));
        for others in [&[][..], &[(1_000, 8_000)], &[(0, 1_000), (16_000, 90_000)]] {
            assert!(!explained(others, None, wait), "{others:?}");
        }
    }

    #[test]
    fn of_a_wait_that_a_hang_made_the_rest_must_be_explained() {
        let (wait, hang) = ((3_000, 18_000), (3_500, 14_000));
        let hung = |fault| Some((fault, hang.0, hang.1));
        assert!(explained(&[(14_000, 17_000)], hung(Fault::CalmHang), wait));
        assert!(!explained(&[(14_000, 16_000)], hung(Fault::CalmHang), wait));
        // Late during the hang explains nothing, nor does a hang during which another serves.
        assert!(!explained(&[(4_000, 14_000)], hung(Fault::CalmHang), wait));
        assert!(!explained(&[(14_000, 17_000)], hung(Fault::Hang), wait));
        // A moment of a moment.
        assert!(!explained(&[(14_000, 14_200)], Some((Fault::CalmHang, 0, 14_000)), (3_000, 14_200)));
    }
}
