//! Counts the clients' losses. Counted apart are streams and requests that an instance itself ended
//! or rejected, and losses that a promise under a fault allows.

use super::Case;
use super::busy::{self, BusyPeriods};
use super::ends::EndJudge;
use super::faults::{self, Lost};
use crate::config::ANSWER_TIMEOUT;
use crate::record::{
    data::{Loss, Ran, Value},
    event::{Answer, Attempt, ConnectionKind, Failure, StreamEnd, StreamKind},
    format::format_count,
    loss,
    stamp::Stamp,
};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let record = case.record;
    let mut losses = Losses::new(case, ran);
    losses.judge_clients(&record.attempts, &record.ends);
    let Losses {
        local,
        ended,
        rejected,
        untold,
        ..
    } = losses;
    busy::report_unanswered(untold, ran);
    ran.add_machine_doubts(local);
    judge_events(case, ran);
    let allowed = ran.count_allowed_losses();
    let words =
        (allowed > 0).then(|| format!("and {} that a promise allows", format_count(allowed)));
    let lost = (!ran.lost.is_empty()).then(|| loss::losses_in_words(&ran.lost));
    let words = lost.into_iter().chain(words).collect::<Vec<_>>().join(", ");
    ran.add("lost", Value::Count(ran.lost.values().sum()))
        .mark_as_main()
        .set_note(words);
    if !ran.promises.is_empty() {
        ran.add("allowed under faults", Value::Count(allowed));
    }
    let streams = record
        .control
        .streams
        .values()
        .map(|streams| streams.len() as u64)
        .sum();
    let words = format!(
        "closed during the instance's shutdown (normal); of the streams without berth: {} of {}",
        format_count(record.control.ends.len() as u64),
        format_count(streams)
    );
    ran.add("streams ended by the instance", Value::Count(ended))
        .set_note(words);
    ran.add("rejected by the instance", Value::Count(rejected))
        .set_note("503 or 429 during the instance's shutdown");
}

/// Counts the events that watches and informers missed or saw twice.
fn judge_events(case: &Case<'_>, ran: &mut Ran) {
    let Case { record, steps, .. } = case;
    for (at, loss, count) in record.watches.iter().flat_map(|watch| &watch.flaws) {
        *ran.lost.entry(*loss).or_default() += count;
        // A write that a watch never saw is noticed only after the end of the load, and so counts
        // in the last step.
        let step = steps.step_at(*at).unwrap_or(steps.count - 1);
        steps.add_to_step(&mut ran.timeline.lost, *loss, step, *count);
    }
    // If an informer still has a deleted object in its copy, it missed the event of the deletion.
    for (loss, count) in [
        (
            Loss::EventMissed,
            record
                .informers
                .iter()
                .map(|i| i.missing + i.stale)
                .sum::<u64>(),
        ),
        (
            Loss::EventDuplicated,
            record.informers.iter().map(|i| i.duplicated).sum(),
        ),
    ] {
        if count > 0 {
            *ran.lost.entry(loss).or_default() += count;
        }
    }
}

struct Losses<'a, 'r> {
    case: &'r Case<'a>,
    ran: &'r mut Ran,
    ends: EndJudge<'a>,
    /// Ends of new connections after a complete TLS handshake, by stream.
    new_ends: HashMap<&'a str, &'a StreamEnd>,
    /// Number of requests that an instance reported as rejected, by stream. Each rejected answer
    /// that this judge finds is subtracted.
    reported: HashMap<&'a str, u32>,
    /// The instance that answered, by stream.
    served_by: HashMap<&'a str, &'a str>,
    /// Number of streams that their own instance ended.
    ended: u64,
    /// Number of requests found to be rejected.
    rejected: u64,
    /// Requests that this machine could not make, by reason.
    local: BTreeMap<&'a str, u64>,
    busy: BusyPeriods,
    /// Number of requests that stayed unanswered while this machine was too busy to tell why.
    untold: u64,
    slack: Duration,
}

impl<'a, 'r> Losses<'a, 'r> {
    fn new(case: &'r Case<'a>, ran: &'r mut Ran) -> Self {
        let record = case.record;
        let new_ends = record.ends.iter().filter(|end| end.what == StreamKind::New);
        let served_by = record
            .attempts
            .iter()
            .filter_map(|attempt| match &attempt.answer {
                Answer::Good { instance } | Answer::Bad { instance, .. } => {
                    Some((attempt.stream.as_str(), instance.as_str()))
                }
                Answer::Failed(_) => None,
            });
        Self {
            case,
            ran,
            ends: EndJudge::new(record),
            new_ends: new_ends.map(|end| (end.stream.as_str(), end)).collect(),
            reported: record
                .reports
                .iter()
                .map(|(_, report)| (report.stream.as_str(), report.rejected))
                .collect(),
            served_by: served_by.collect(),
            ended: 0,
            rejected: 0,
            local: BTreeMap::new(),
            busy: BusyPeriods::of(record),
            untold: 0,
            slack: faults::measure_slack(record),
        }
    }

    /// Judges each request of a client, and each end of a stream that a client saw.
    fn judge_clients(&mut self, attempts: &'a [Attempt], ends: &'a [StreamEnd]) {
        for attempt in attempts {
            match &attempt.answer {
                Answer::Good { .. } => {}
                Answer::Bad { instance, status } => self.judge_status(attempt, instance, *status),
                Answer::Failed(failure) => self.judge_failure(attempt, failure),
            }
        }
        ends.iter()
            .filter(|end| end.what != StreamKind::New)
            .for_each(|end| self.judge_end(end));
    }

    /// True if the instance behind a failed new connection ended the connection.
    fn is_ended_by_instance(&self, stream: &str) -> bool {
        self.new_ends
            .get(stream)
            .is_some_and(|end| self.ends.check_ended_by_instance(end).is_ok())
    }

    /// True if an instance rejected a request because the instance was stopping. The instance's
    /// report has the number of such requests. Without a report, the status of the answer decides.
    fn is_rejected(&mut self, attempt: &Attempt, instance: &str, status: u16) -> bool {
        match self.reported.get_mut(attempt.stream.as_str()) {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => matches!(status, 429 | 503) && self.ends.is_stopping(instance, attempt.done),
        }
    }

    fn judge_status(&mut self, attempt: &Attempt, instance: &str, status: u16) {
        if self.is_rejected(attempt, instance, status) {
            self.rejected += 1;
        } else {
            let (due, seen) = (Some(attempt.due), attempt.done);
            let lost = Lost {
                loss: Loss::BadStatus,
                due,
                seen,
                instance: Some(instance),
            };
            self.count_loss(
                &lost,
                &format!("{}: {status} from {instance}", attempt.stream),
            );
        }
    }

    fn judge_failure(&mut self, attempt: &'a Attempt, failure: &'a Failure) {
        match failure {
            Failure::Local(why) => *self.local.entry(why).or_default() += 1,
            Failure::Unanswered => {}
            // The end of a kept connection is also in the record as the end of a stream, and is
            // judged there.
            _ if attempt.kind == ConnectionKind::Kept => return,
            Failure::Reset | Failure::Closed | Failure::Http(_)
                if self.is_ended_by_instance(&attempt.stream) =>
            {
                self.count_end_by_instance(attempt.done);
                return;
            }
            _ => {}
        }
        let Some(loss) = failure.loss() else { return };
        let waited = attempt.done.since(attempt.due);
        let instance = self.served_by.get(attempt.stream.as_str()).copied();
        let lost = Lost {
            loss,
            due: Some(attempt.due),
            seen: attempt.done,
            instance,
        };
        // A reset or close after `ANSWER_TIMEOUT` counts as unanswered: the client would have given
        // up before if its timer had not been late.
        let in_vain = loss == Loss::Unanswered
            || matches!(loss, Loss::Reset | Loss::Closed) && waited >= ANSWER_TIMEOUT;
        // A loss that a promise allows is counted under the promise, even if the machine was busy.
        let is_undecided = in_vain && self.busy.explains(attempt);
        if is_undecided
            && faults::find_excuse(&self.case.record.injected, &lost, self.slack).is_none()
        {
            self.untold += 1;
            return;
        }
        self.count_loss(
            &lost,
            &format!("{}: {failure} after {waited:.1?}", attempt.stream),
        );
    }

    fn judge_end(&mut self, end: &'a StreamEnd) {
        if let Failure::Local(why) = &end.how {
            *self.local.entry(why).or_default() += 1;
            return;
        }
        match self.ends.check_ended_by_instance(end) {
            Ok(()) => self.count_end_by_instance(end.at),
            Err(why) => {
                let while_what = if end.in_flight {
                    "with a request under way"
                } else {
                    "between requests"
                };
                let words = format!(
                    "{} ({:?}): {} {while_what}, {why}",
                    end.stream, end.what, end.how
                );
                let instance = Some(end.instance.as_str());
                let lost = Lost {
                    loss: Loss::StreamEnded,
                    due: None,
                    seen: end.at,
                    instance,
                };
                self.count_loss(&lost, &words);
            }
        }
    }

    /// Counts a stream ended by its own instance.
    fn count_end_by_instance(&mut self, at: Stamp) {
        self.ended += 1;
        if let Some(step) = self.case.steps.step_at(at) {
            self.ran.timeline.ended_by_instance[step] += 1;
        }
    }

    /// Counts a loss. If a fault excuses the loss, the loss is counted under that fault.
    fn count_loss(&mut self, lost: &Lost<'_>, example: &str) {
        let Self {
            case: Case { record, steps, .. },
            ran,
            ..
        } = self;
        let step = steps.step_at(lost.seen);
        let excuse = faults::find_excuse(&record.injected, lost, self.slack);
        let is_its = |fault: &usize| {
            let allowed = ran.promises[*fault]
                .allowed
                .get(&lost.loss)
                .copied()
                .unwrap_or_default();
            lost.loss != Loss::StreamEnded
                || record.injected[*fault].has.is_none_or(|has| allowed < has)
        };
        if let Some(fault) = excuse.filter(is_its) {
            *ran.promises[fault].allowed.entry(lost.loss).or_default() += 1;
            step.into_iter()
                .for_each(|step| ran.timeline.allowed[step] += 1);
            return;
        }
        if !ran.lost.contains_key(&lost.loss) {
            let into = lost.seen.since(record.began.unwrap_or(lost.seen));
            ran.examples
                .push(format!("{example}, {into:.1?} into the load"));
        }
        if let Some(step) = step {
            steps.add_to_step(&mut ran.timeline.lost, lost.loss, step, 1);
        }
        *ran.lost.entry(lost.loss).or_default() += 1;
    }
}
