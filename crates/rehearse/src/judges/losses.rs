//! What clients lost, what an instance ended or rejected itself, and what a promise under a fault allows.

use super::busy::{self, Busy};
use super::ends::Ends;
use super::faults::{self, Lost};
use super::{Case, JUDGE, Judge};
use crate::data::{Ran, Tally, count_of};
use crate::event::{Answer, Attempt, ConnectionKind, Failure, StreamEnd, StreamKind};
use crate::loss::Loss;
use crate::plan::UNANSWERED;
use crate::stamp::Stamp;
use crate::verdict::UNTOLD;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

pub(super) const LOSSES: Judge = Judge { judge, ..JUDGE };

fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let record = case.record;
    let mut losses = Losses::new(case, ran);
    losses.clients(&record.attempts, &record.ends);
    let (local, rejected, untold) = (losses.local, losses.rejected, losses.untold);
    busy::object(untold, ran);
    ran.verdict.doubt_machine(local);
    ran.verdict.apart = apart(case.ended.len() as u64, rejected, ran.allowed(), untold);
}

fn apart(ended: u64, rejected: u64, allowed: u64, untold: u64) -> Vec<Tally> {
    let always = [
        ("ended_by_instance", "streams that their instance ended", ended),
        ("rejected", "requests that their instance rejected", rejected),
    ];
    let seldom = [("allowed", "losses that a promise under a fault allows", allowed), (UNTOLD.0, UNTOLD.1, untold)];
    let all = always.into_iter().chain(seldom.into_iter().filter(|(_, _, count)| *count > 0));
    all.map(|(kind, text, count)| Tally { kind: kind.to_owned(), text: text.to_owned(), count }).collect()
}

struct Losses<'a, 'r> {
    case: &'r mut Case<'a>,
    ran: &'r mut Ran,
    ends: Ends<'a>,
    /// The ends of new connections whose TLS handshake was complete.
    new_ends: HashMap<&'a str, &'a StreamEnd>,
    /// Requests that instances report to have rejected, by stream, less those that were found already.
    reported: HashMap<&'a str, u32>,
    /// Which instance answered on a stream.
    served_by: HashMap<&'a str, &'a str>,
    /// Requests that were found to be rejected.
    rejected: u64,
    /// Requests that this machine could not make, by their reasons.
    local: BTreeMap<&'a str, u64>,
    busy: Busy,
    /// Requests that were not answered while this machine was too busy to tell.
    untold: u64,
    slack: Duration,
}

impl<'a, 'r> Losses<'a, 'r> {
    fn new(case: &'r mut Case<'a>, ran: &'r mut Ran) -> Self {
        let record = case.record;
        let new_ends = record.ends.iter().filter(|end| end.what == StreamKind::New);
        let served_by = record.attempts.iter().filter_map(|attempt| match &attempt.answer {
            Answer::Good { instance } | Answer::Bad { instance, .. } => {
                Some((attempt.stream.as_str(), instance.as_str()))
            }
            Answer::Failed(_) => None,
        });
        Self {
            case,
            ran,
            ends: Ends::new(record),
            new_ends: new_ends.map(|end| (end.stream.as_str(), end)).collect(),
            reported: record.reports.iter().map(|(_, report)| (report.stream.as_str(), report.rejected)).collect(),
            served_by: served_by.collect(),
            rejected: 0,
            local: BTreeMap::new(),
            busy: Busy::of(record),
            untold: 0,
            slack: faults::slack(record),
        }
    }

    /// What the clients saw.
    fn clients(&mut self, attempts: &'a [Attempt], ends: &'a [StreamEnd]) {
        for attempt in attempts {
            match &attempt.answer {
                Answer::Good { .. } => {}
                Answer::Bad { instance, status } => self.bad_status(attempt, instance, *status),
                Answer::Failed(failure) => self.failed(attempt, failure),
            }
        }
        ends.iter().filter(|end| end.what != StreamKind::New).for_each(|end| self.ended(end));
    }

    /// Whether a new connection that failed was ended by the instance that it had come to.
    fn instance_ended(&self, stream: &str) -> bool {
        self.new_ends.get(stream).is_some_and(|end| self.ends.by_instance(end).is_ok())
    }

    /// Whether an instance rejected a request because it was stopping: it reports their number, or the status shows it.
    fn is_rejected(&mut self, attempt: &Attempt, instance: &str, status: u16) -> bool {
        match self.reported.get_mut(attempt.stream.as_str()) {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => matches!(status, 429 | 503) && self.ends.stopping(instance, attempt.done),
        }
    }

    fn bad_status(&mut self, attempt: &Attempt, instance: &str, status: u16) {
        if self.is_rejected(attempt, instance, status) {
            self.rejected += 1;
        } else {
            let (due, seen) = (Some(attempt.due), attempt.done);
            let lost = Lost { loss: Loss::BadStatus, due, seen, instance: Some(instance) };
            self.lose(&lost, &format!("{}: {status} from {instance}", attempt.stream));
        }
    }

    fn failed(&mut self, attempt: &'a Attempt, failure: &'a Failure) {
        match failure {
            Failure::Local(why) => *self.local.entry(why).or_default() += 1,
            Failure::Unanswered => {}
            // The end of a kept connection is judged once, as the end of a stream.
            _ if attempt.kind == ConnectionKind::Kept => return,
            Failure::Reset | Failure::Closed | Failure::Http(_) if self.instance_ended(&attempt.stream) => {
                self.apart(&attempt.stream, attempt.done);
                return;
            }
            Failure::X509(_) => self.ran.figures.x509_errors += 1,
            _ => {}
        }
        let Some(loss) = failure.loss() else { return };
        let waited = attempt.done.since(attempt.due);
        let instance = self.served_by.get(attempt.stream.as_str()).copied();
        let lost = Lost { loss, due: Some(attempt.due), seen: attempt.done, instance };
        // With its timer in time, the client had given up before.
        let in_vain = loss == Loss::Unanswered || matches!(loss, Loss::Reset | Loss::Closed) && waited >= UNANSWERED;
        // What a promise allows, is that.
        let is_untold = in_vain && self.busy.explains(attempt);
        if is_untold && faults::excuse(&self.case.record.injected, &lost, self.slack).is_none() {
            self.untold += 1;
            return;
        }
        self.lose(&lost, &format!("{}: {failure} after {waited:.1?}", attempt.stream));
    }

    fn ended(&mut self, end: &'a StreamEnd) {
        if let Failure::Local(why) = &end.how {
            *self.local.entry(why).or_default() += 1;
            return;
        }
        match self.ends.by_instance(end) {
            Ok(()) => self.apart(&end.stream, end.at),
            Err(why) => {
                let while_what = if end.in_flight { "with a request under way" } else { "between requests" };
                let words = format!("{} ({:?}): {} {while_what}, {why}", end.stream, end.what, end.how);
                let instance = Some(end.instance.as_str());
                let lost = Lost { loss: Loss::StreamEnded, due: None, seen: end.at, instance };
                if !self.lose(&lost, &words) {
                    self.case.allowed.insert(&end.stream);
                }
            }
        }
    }

    /// Counts a stream that its instance ended.
    fn apart(&mut self, stream: &'a str, at: Stamp) {
        self.case.ended.insert(stream);
        if let Some(step) = self.case.steps.at(at) {
            self.ran.timeline.ended_by_instance[step] += 1;
        }
    }

    /// Counts a loss, under the fault that excuses it if there is one. Whether there is none.
    fn lose(&mut self, lost: &Lost<'_>, example: &str) -> bool {
        let Self { case, ran, .. } = self;
        let step = case.steps.at(lost.seen);
        if let Some(fault) = faults::excuse(&case.record.injected, lost, self.slack) {
            lost.loss.add(1, &mut ran.promises[fault].allowed);
            step.into_iter().for_each(|step| ran.timeline.allowed[step] += 1);
            return false;
        }
        if count_of(&ran.verdict.lost, lost.loss.kind()) == 0 {
            let into = lost.seen.since(case.record.began.unwrap_or(lost.seen));
            ran.verdict.examples.push(format!("{example}, {into:.1?} into the load"));
        }
        if let Some(step) = step {
            case.steps.count(&mut ran.timeline.lost, lost.loss.kind(), step, 1);
        }
        lost.loss.add(1, &mut ran.verdict.lost);
        true
    }
}
