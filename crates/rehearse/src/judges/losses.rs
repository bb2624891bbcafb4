//! What clients lost, what an instance ended or rejected itself, and what a promise under a fault allows.

use super::ends::Ends;
use super::faults::{self, Lost};
use super::{JUDGE, Judge};
use crate::event::{Answer, Attempt, Failure, Kind, StreamEnd, What};
use crate::loss::Loss;
use crate::plan::Plan;
use crate::record::{AtNode, Record};
use crate::verdict::{LostAtNode, Verdict};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

pub(super) const LOSSES: Judge = Judge { weigh, ..JUDGE };

fn weigh(record: &Record, _: &Plan, verdict: &mut Verdict) {
    let mut losses = Losses::new(record, verdict);
    for attempt in &record.attempts {
        losses.attempt(attempt);
    }
    losses.ends(&record.ends);
    for node in &record.nodes {
        losses.node(node);
    }
    let local = losses.local;
    verdict.doubt_machine(local);
}

struct Losses<'a, 'v> {
    record: &'a Record,
    ends: Ends<'a>,
    /// The ends of new connections whose TLS handshake was over.
    new_ends: HashMap<&'a str, &'a StreamEnd>,
    /// Requests rejected by stream, less those that were seen already.
    rejected: HashMap<&'a str, u32>,
    /// Which instance answered on a stream.
    served_by: HashMap<&'a str, &'a str>,
    /// Requests that this machine could not make, by their reasons.
    local: BTreeMap<&'a str, u64>,
    slack: Duration,
    /// The node whose clients are judged; none: the Service's, or the only ones.
    node: Option<SocketAddr>,
    verdict: &'v mut Verdict,
}

impl<'a, 'v> Losses<'a, 'v> {
    fn new(record: &'a Record, verdict: &'v mut Verdict) -> Self {
        let ends = record.ends.iter().chain(record.nodes.iter().flat_map(|node| &node.ends));
        let new_ends = ends.filter(|end| end.what == What::New);
        let new_ends = new_ends.map(|end| (end.stream.as_str(), end)).collect();
        let rejected = record.reports.iter().map(|(_, r)| (r.stream.as_str(), r.rejected)).collect();
        let attempts = record.attempts.iter().chain(record.nodes.iter().flat_map(|node| &node.attempts));
        let served_by = attempts.filter_map(|attempt| match &attempt.answer {
            Answer::Good { instance } | Answer::Bad { instance, .. } => {
                Some((attempt.stream.as_str(), instance.as_str()))
            }
            Answer::Failed(_) => None,
        });
        let served_by = served_by.collect();
        let (ends, slack) = (Ends::new(record), faults::slack(record));
        Self { record, ends, new_ends, rejected, served_by, local: BTreeMap::new(), slack, node: None, verdict }
    }

    /// Whether a new connection that failed was ended by the instance that it had come to.
    fn instance_ended(&self, stream: &str) -> bool {
        self.new_ends.get(stream).is_some_and(|end| self.ends.by_instance(end).is_ok())
    }

    /// Whether an instance rejected a request because it was stopping: it reports their number, or the status shows it.
    fn rejected(&mut self, attempt: &Attempt, instance: &str, status: u16) -> bool {
        match self.rejected.get_mut(attempt.stream.as_str()) {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => matches!(status, 429 | 503) && self.ends.stopping(instance, attempt.done),
        }
    }

    /// What clients saw that dialed a node.
    fn node(&mut self, node: &'a AtNode) {
        let (lost, allowed) = (self.verdict.lost.clone(), self.verdict.allowed());
        self.node = Some(node.address);
        for attempt in &node.attempts {
            self.attempt(attempt);
        }
        self.ends(&node.ends);
        self.node = None;
        let before = |loss| lost.get(loss).copied().unwrap_or(0);
        let here = self.verdict.lost.iter().map(|(loss, count)| (*loss, count - before(loss)));
        let lost = here.filter(|(_, count)| *count > 0).collect();
        self.verdict.nodes.push(LostAtNode { lost, allowed: self.verdict.allowed() - allowed });
    }

    fn attempt(&mut self, attempt: &'a Attempt) {
        match &attempt.answer {
            Answer::Good { .. } => {}
            Answer::Bad { instance, status } => self.bad_status(attempt, instance, *status),
            Answer::Failed(failure) => self.failed(attempt, failure),
        }
    }

    fn bad_status(&mut self, attempt: &Attempt, instance: &str, status: u16) {
        if self.rejected(attempt, instance, status) {
            self.verdict.rejected += 1;
        } else {
            let (due, seen, node) = (Some(attempt.due), attempt.done, self.node);
            let lost = Lost { loss: Loss::BadStatus, due, seen, instance: Some(instance), node };
            self.lose(&lost, &format!("{}: {status} from {instance}", attempt.stream));
        }
    }

    fn failed(&mut self, attempt: &'a Attempt, failure: &'a Failure) {
        match failure {
            Failure::Local(why) => *self.local.entry(why).or_default() += 1,
            Failure::Unanswered => {}
            // The end of a kept connection is judged once, as the end of a stream.
            _ if attempt.kind == Kind::Kept => return,
            Failure::Reset | Failure::Closed | Failure::Http(_) if self.instance_ended(&attempt.stream) => {
                self.verdict.ends_by_instance.push((attempt.done, attempt.stream.clone()));
                return;
            }
            Failure::X509(_) => self.verdict.figures.x509_errors += 1,
            _ => {}
        }
        let Some(loss) = failure.loss() else { return };
        let waited = attempt.done.since(attempt.due);
        let instance = self.served_by.get(attempt.stream.as_str()).copied();
        let lost = Lost { loss, due: Some(attempt.due), seen: attempt.done, instance, node: self.node };
        self.lose(&lost, &format!("{}: {failure} after {waited:.1?}", attempt.stream));
    }

    fn ends(&mut self, ends: &'a [StreamEnd]) {
        for end in ends.iter().filter(|end| end.what != What::New) {
            if let Failure::Local(why) = &end.how {
                *self.local.entry(why).or_default() += 1;
                continue;
            }
            match self.ends.by_instance(end) {
                Ok(()) => {
                    self.verdict.ends_by_instance.push((end.at, end.stream.clone()));
                }
                Err(why) => {
                    let while_what = if end.in_flight { "with a request under way" } else { "between requests" };
                    let words = format!("{} ({:?}): {} {while_what}, {why}", end.stream, end.what, end.how);
                    let (instance, node) = (Some(end.instance.as_str()), self.node);
                    let lost = Lost { loss: Loss::StreamEnded, due: None, seen: end.at, instance, node };
                    if !self.lose(&lost, &words) {
                        self.verdict.ends_allowed.push(end.stream.clone());
                    }
                }
            }
        }
    }

    /// Counts a loss, under the fault that excuses it if there is one. Whether there is none.
    fn lose(&mut self, lost: &Lost<'_>, example: &str) -> bool {
        if let Some(fault) = faults::excuse(&self.record.injected, lost, self.slack) {
            self.verdict.promises[fault].allowed.push((lost.seen, lost.loss));
            return false;
        }
        self.verdict.losses.push((lost.seen, lost.loss));
        if !self.verdict.lost.contains_key(&lost.loss) {
            let into = lost.seen.since(self.record.began.unwrap_or(lost.seen));
            self.verdict.examples.push(format!("{example}, {into:.1?} into the load"));
        }
        self.verdict.lose(lost.loss, 1);
        true
    }
}
