//! From the record to the verdict: what was lost, what the instances ended themselves, and whether
//! the run was a test at all. Pure.
//!
//! **Lost** is a new connection that was refused, reset, or not answered within
//! 15 s of being dialled, or a stream that ended before its instance ended it. Who ended a stream is decided by
//! `ends`.

use super::data::{Figures, Informer};
use super::ends::Ends;
use super::plan::Plan;
use super::promise::{self, Lost, Promise};
use super::record::{
    Answer, AtNode, Attempt, Failure, Kind, MarkKind, Record, Stamp, StreamEnd, StreamId, WatchSum, What,
};
use hdrhistogram::Histogram;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

pub use super::loss::Loss;

/// The instance that is replaced.
pub const OLD: &str = "old";

/// The instance that replaces it.
pub const NEW: &str = "new";

/// Fewest new connections, and of those fewest on either instance, for a verdict.
const FEWEST: u64 = 200;
const FEWEST_EACH: u64 = 20;

/// How far clients may be behind their timetable before a run says more of the machine than of berth.
const MOST_BEHIND: Duration = Duration::from_secs(1);

/// Longest wait that the histogram tells apart, in microseconds: far beyond what a client waits.
const LONGEST_WAIT: u64 = 120_000_000;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verdict {
    /// Sums, as a report has them.
    pub figures: Figures,
    /// What was lost, by kind.
    pub lost: BTreeMap<Loss, u64>,
    /// When each of those was seen that has a moment: a write that a watch never saw has none.
    pub losses: Vec<(Stamp, Loss)>,
    /// The streams that their instance ended, and when their client saw it.
    pub ends_by_instance: Vec<(Stamp, StreamId)>,
    /// The streams whose end a promise under a fault allows.
    pub ends_allowed: Vec<StreamId>,
    /// The first of each kind of failure, in words.
    pub examples: Vec<String>,
    /// Requests that an instance answered with 429 or 503 because it was shutting down.
    pub rejected: u64,
    /// What was promised under faults, and what came of it.
    pub promises: Vec<Promise>,
    /// What of it clients saw that dialed a node: one a node, in the order of the record.
    pub nodes: Vec<LostAtNode>,
    /// What else is worth knowing.
    pub notes: Vec<String>,
    /// Why nothing can be concluded, or what else was not as it should be.
    pub objections: Vec<String>,
    /// Some of these are to what was rehearsed, and not only to this run.
    pub(crate) at_fault: bool,
}

/// What clients saw that dialed a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LostAtNode {
    /// What was lost, by kind.
    pub lost: BTreeMap<Loss, u64>,
    /// Losses that promises under faults allow.
    pub allowed: u64,
}

impl Verdict {
    pub fn lost(&self) -> u64 {
        self.lost.values().sum()
    }

    /// Losses that promises under faults allow.
    pub(crate) fn allowed(&self) -> u64 {
        self.promises.iter().map(|promise| promise.allowed.len() as u64).sum()
    }

    /// Nothing was lost in a run that would have shown it, and every promise held.
    pub fn held(&self) -> bool {
        self.lost() == 0 && self.objections.is_empty() && self.kept()
    }

    /// The run says nothing, as its machine was too slow for the load: nothing was seen that berth or an instance did wrong.
    pub fn is_inconclusive(&self) -> bool {
        self.lost() == 0 && self.kept() && !self.objections.is_empty() && !self.at_fault
    }

    /// Every promise under faults was kept.
    pub(crate) fn kept(&self) -> bool {
        self.promises.iter().all(Promise::held)
    }

    fn lose(&mut self, loss: Loss, count: u64) {
        if count > 0 {
            *self.lost.entry(loss).or_default() += count;
        }
    }
}

pub fn judge(record: &Record, plan: &Plan) -> Verdict {
    let mut judge = Judge::new(record);
    judge.verdict.promises = promise::check(record, plan.timing.speedup);
    for attempt in &record.attempts {
        judge.count(attempt);
        judge.attempt(attempt);
    }
    judge.ends(&record.ends);
    judge.storm(plan);
    for node in &record.nodes {
        judge.node(node);
    }
    judge.watches(plan);
    judge.informers();
    judge.waits();
    judge.asked(plan);
    judge.objections(plan);
    judge.verdict
}

struct Judge<'a> {
    record: &'a Record,
    ends: Ends<'a>,
    /// The ends of new connections whose TLS handshake was over.
    new_ends: HashMap<&'a str, &'a StreamEnd>,
    /// Requests rejected by stream, less those that were seen already.
    rejected: HashMap<&'a str, u32>,
    /// Who answered on a stream.
    served_by: HashMap<&'a str, &'a str>,
    local: BTreeMap<String, u64>,
    slack: Duration,
    /// The node whose clients are judged; none: the Service's, or the only ones.
    node: Option<SocketAddr>,
    verdict: Verdict,
}

impl<'a> Judge<'a> {
    fn new(record: &'a Record) -> Self {
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
        let (ends, slack) = (Ends::new(record), promise::slack(record));
        let verdict = Verdict::default();
        Self { record, ends, new_ends, rejected, served_by, local: BTreeMap::new(), slack, node: None, verdict }
    }

    /// Whether a new connection that failed was ended by the instance that it had come to.
    fn instance_ended(&self, stream: &str) -> bool {
        self.new_ends.get(stream).is_some_and(|end| self.ends.by_instance(end).is_ok())
    }

    /// Whether an instance rejected a request because it was stopping: it counts those itself, or the status says so.
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
    fn node(&mut self, node: &AtNode) {
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

    /// A request of the Service's clients, or of the only ones.
    fn count(&mut self, attempt: &Attempt) {
        self.verdict.figures.requests += 1;
        self.verdict.figures.new_connections += u64::from(attempt.kind == Kind::New);
        if let (Kind::New, Answer::Good { instance } | Answer::Bad { instance, .. }) = (attempt.kind, &attempt.answer) {
            *self.verdict.figures.new_connections_by_instance.entry(instance.clone()).or_default() += 1;
        }
    }

    fn attempt(&mut self, attempt: &Attempt) {
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

    fn failed(&mut self, attempt: &Attempt, failure: &Failure) {
        match failure {
            Failure::Local(why) => *self.local.entry(why.clone()).or_default() += 1,
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

    /// What its clients met is told by its promise.
    fn storm(&mut self, plan: &Plan) {
        let tries = self.record.storm.iter().flat_map(|storm| &storm.tries);
        for (_, answer) in tries {
            match answer {
                Answer::Failed(Failure::Local(why)) => *self.local.entry(why.clone()).or_default() += 1,
                Answer::Failed(Failure::X509(_)) => self.verdict.figures.x509_errors += 1,
                _ => {}
            }
        }
        if plan.load.storm > 0 && self.record.storm.is_none() {
            self.doubt("there was no storm".into());
        }
    }

    fn ends(&mut self, ends: &[StreamEnd]) {
        for end in ends.iter().filter(|end| end.what != What::New) {
            if let Failure::Local(why) = &end.how {
                *self.local.entry(why.clone()).or_default() += 1;
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
        if let Some(fault) = promise::excuse(&self.record.injected, lost, self.slack) {
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

    fn watches(&mut self, plan: &Plan) {
        let (watches, informers) = (&self.record.watches, &self.record.informers);
        let both = |watch: fn(&WatchSum) -> u64, informer: fn(&Informer) -> u64| -> u64 {
            watches.iter().map(watch).chain(informers.iter().map(informer)).sum()
        };
        self.verdict.figures.relists = both(|w| w.relists, |i| i.relists);
        self.verdict.figures.expired = both(|w| w.expired, |i| i.expired);
        self.verdict.figures.watch_events = watches.iter().flat_map(|w| w.events.values()).sum();
        for (_, loss, count) in watches.iter().flat_map(|w| &w.flaws) {
            self.verdict.lose(*loss, *count);
        }
        if watches.len() < plan.load.watches as usize {
            self.object(format!("only {} of {} watches came to their end", watches.len(), plan.load.watches));
        }
        if plan.load.slow_readers > 0 && self.record.slow_reads == 0 {
            self.doubt("no slow reader came to the end of an answer".into());
        }
        if !watches.iter().any(|w| w.events.values().filter(|events| **events > 0).count() > 1) {
            self.doubt("no watch saw events from more than one instance".into());
        }
    }

    fn informers(&mut self) {
        let informers = &self.record.informers;
        // An object too many is an event that was missed: that of its end.
        self.verdict.lose(Loss::EventMissed, informers.iter().map(|i| i.missing + i.stale).sum());
        self.verdict.lose(Loss::EventDuplicated, informers.iter().map(|i| i.duplicated).sum());
    }

    fn waits(&mut self) {
        let mut waits = Histogram::<u64>::new_with_bounds(1, LONGEST_WAIT, 3).expect("the bounds are in order");
        let mut longest = Duration::ZERO;
        for attempt in &self.record.attempts {
            let wait = attempt.done.since(attempt.due);
            longest = longest.max(wait);
            waits.saturating_record(u64::try_from(wait.as_micros()).unwrap_or(u64::MAX));
        }
        let figures = &mut self.verdict.figures;
        figures.wait_p50_ms = waits.value_at_quantile(0.5) as f64 / 1e3;
        figures.wait_p99_ms = waits.value_at_quantile(0.99) as f64 / 1e3;
        figures.wait_max_ms = millis(longest);
        let load = self.record.load();
        figures.longest_silence_ms = millis(self.record.longest_silence(&load));
        figures.silent_s = self.record.silent_s(&load);
    }

    /// What was asked and heard beside the load.
    fn asked(&mut self, plan: &Plan) {
        let (record, figures) = (self.record, &mut self.verdict.figures);
        figures.slow_reads = record.slow_reads;
        figures.logged_x509_errors = (!plan.old.is_stand_in()).then_some(record.logged_x509_errors);
        let gaps = record.endpoint_gaps.as_ref();
        figures.endpoint_gap_ms = gaps.map(|gaps| millis(gaps.iter().map(|(from, to)| to.since(*from)).sum()));
        self.verdict.notes.clone_from(&record.notes);
    }

    /// What makes a run worthless although nothing was lost, and promises that were broken without
    /// a loss.
    fn objections(&mut self, plan: &Plan) {
        for trouble in &self.record.troubles {
            self.object(trouble.clone());
        }
        for (why, count) in std::mem::take(&mut self.local) {
            self.doubt(format!(
                "{count} requests failed on this machine's own account ({why}): a lower --rate or --storm helps"
            ));
        }
        let behind = self.record.behind;
        if behind > MOST_BEHIND {
            let rate = plan.load.rate;
            self.doubt(format!(
                "the clients were up to {behind:.1?} behind their timetable: this machine is too slow or too busy for \
                 --rate {rate}, and waits are its own"
            ));
        }
        let connections = self.verdict.figures.new_connections;
        let load = match (self.record.began, self.record.over) {
            (Some(began), Some(ended)) => ended.since(began),
            _ => Duration::MAX,
        };
        let planned = (f64::from(plan.load.rate) * load.as_secs_f64()) as u64;
        let fewest = FEWEST.min(planned);
        if connections < fewest {
            self.doubt(format!("only {connections} new connections; fewer than {fewest} say nothing"));
        }
        if self.record.direct.as_ref().is_some_and(|direct| direct.steered == 0) {
            self.doubt("nothing was steered: the direct path was never used".into());
        }
        let record = self.record;
        let mut nodes: BTreeMap<Option<&str>, Vec<&str>> = BTreeMap::new();
        for player in record.players.iter().filter(|player| player.serves) {
            nodes.entry(player.node.as_deref()).or_default().push(&player.name);
        }
        if nodes.is_empty() || nodes.values().any(|turns| turns.len() < 2) {
            self.object("there was no upgrade".into());
        }
        for name in nodes.values().flatten() {
            let served = self.verdict.figures.new_connections_by_instance.get(*name).copied().unwrap_or(0);
            if served < FEWEST_EACH {
                self.doubt(format!("{name} served only {served} new connections"));
            }
        }
        for pair in nodes.values().flat_map(|turns| turns.windows(2)) {
            self.upgrade(pair[0], pair[1]);
        }
    }

    /// Whether an upgrade happened, in the right order.
    fn upgrade(&mut self, old: &str, new: &str) {
        let moments = &self.record.moments;
        // What a real apiserver does not tell is seen from outside, a little later.
        let ready = moments.first(new, MarkKind::Ready).or(moments.first(new, MarkKind::Joined));
        let told = moments.last(old, MarkKind::Terminating).or(moments.last(old, MarkKind::Sigterm));
        let gone = moments.last(old, MarkKind::Drained).or(moments.last(old, MarkKind::Exited));
        let served = |a: &&Attempt| matches!(&a.answer, Answer::Good { instance } if instance == new);
        let early = self.record.attempts.iter().filter(served).filter(|a| ready.is_none_or(|r| a.done < r)).count();
        let after = |gone: Stamp| self.record.attempts.iter().filter(served).any(|a| a.due > gone);
        let objection = match (told, gone, ready) {
            (None, ..) => Some(format!("{old} was never sent SIGTERM")),
            (_, None, _) => Some(format!("{old} did not come to the end of its drain")),
            (_, _, None) => Some(format!("{new} never got ready")),
            (Some(told), _, Some(ready)) if told < ready => Some(format!("{old} was stopped before {new} was ready")),
            (_, Some(gone), _) if !after(gone) => {
                self.doubt(format!("{new} served nothing after {old} was gone"));
                None
            }
            _ => None,
        };
        if let Some(objection) = objection {
            self.object(objection);
        }
        if early > 0 {
            self.object(format!("{new} answered {early} requests before its /readyz was 200"));
        }
    }

    /// To what was rehearsed.
    fn object(&mut self, objection: String) {
        self.verdict.at_fault = true;
        self.verdict.objections.push(objection);
    }

    /// To the run: another one, or one on a faster machine, may say more.
    fn doubt(&mut self, objection: String) {
        self.verdict.objections.push(objection);
    }
}

/// As a report has it. Microseconds are as fine as the waits are measured.
pub(crate) fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

#[cfg(test)]
mod tests;
