//! From samples of both instances to a verdict.
//!
//! Both instances are compared at the same time, and like with like: verb × resource × scope. A
//! client that moves sends new LISTs for all its resources, so the new instance gets more LISTs
//! than the old instance, and a plain sum would call it slower. Sums over a verb, a resource or all
//! requests add the limits of their parts, weighted by the new instance's requests.
//!
//! The number of bad requests allowed in an interval has three parts:
//!
//! - The signal's tolerance.
//! - Three times the old instance's share of bad requests, either in the last thousand requests or
//!   in this interval, whichever is larger. At first, the last thousand are from the instance's
//!   whole life, because some requests are made only when a client connects.
//! - As many bad requests as the old instance had in the same time, in the minute before a step. A
//!   client with requests that always fail may have moved, and brings its errors along.
//!
//! A request is slow if it takes more than twice the time of 95 of 100 requests of the old
//! instance. Subjects with too few requests for this figure are not compared.
//!
//! Intervals in which the old instance suffers as well are left out, with the interval after, since
//! an outage of etcd does not reach both instances at the same moment. Requests that the old
//! instance never had are left out, too. The old instance's own requests show whether it suffers.
//! So times count only while the old instance has some requests (`MIN_COMPARED_TIMES`): without
//! them, a busy machine looks like a slow version. If the old instance answers any request slowly,
//! the new instance is allowed to answer slowly, too. Reads and writes are separate here, because a
//! webhook slows only writes, and all writing clients may have moved.
//!
//! The probability of a false alarm ([`ALPHA`]) is divided among signals, and within a signal among
//! all requests, resources, verbs and their combinations that the old instance had before the first
//! step. The division is family-wise (Bonferroni), since signals depend on each other. Some
//! findings are certain and need no test: an instance restarts, stops answering while the other
//! instance answers, or lacks an API in use.
//!
//! A gap in the bound: the limits come from the old instance's requests, and are not known exactly.
//! The tolerance and the factor of three make up for that. The simulation in the tests, with noise
//! meant to be worse than in a real cluster, shows whether they suffice.

use crate::histogram::Histogram;
use crate::history::{
    History, Id, Increments, MAX_EARLIER_REQUESTS, MAX_REQUESTS, MIN_KNOWN_REQUESTS, SLOW_QUANTILE,
    Side, has_restarted,
};
use crate::sequential::{ALPHA, Wealth};
use crate::signals::{Counts, Sample, Signal, Subject};
use crate::verdict::{Judgement, Outcome, Row, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

/// Allowed ratio of the new instance's share of bad requests to the old instance's, in addition to
/// the tolerance.
const MAX_RATIO: f64 = 3.0;
/// The old instance suffers if it has more bad requests than the sum of [`MAX_RATIO`] times the
/// usual number, the share `all` of all its requests, and the number `bad`.
const SUFFERING_LIMIT: Counts = Counts {
    bad: 3.0,
    all: 0.05,
};
/// The judge compares times in an interval only if the old instance had this many requests in it.
const MIN_COMPARED_TIMES: f64 = 5.0;
/// An instance is silent after this many samples in a row without an answer to the judge. Only
/// samples count in which the other instance answers.
const MAX_SILENT_SAMPLES: u32 = 4;
/// An instance hides its metrics after this many refusals in a row, while the other instance gives
/// its metrics. This takes a minute, since a busy instance refuses a few requests.
const MAX_REFUSED_SAMPLES: u32 = 30;
/// This many connections in a row without a byte from the instance count as no answer.
const MAX_EMPTY_CONNECTIONS: f64 = 4.0;
/// Fewer connections or refusals than this number are no evidence against the new instance.
const MIN_EVIDENCE: f64 = 2.0;
/// When a step has brought this many connections, the new instance must have at least
/// [`MIN_REQUESTS_PER_CONNECTION`] requests per connection. Every client sends at least one
/// request, except a client that only checks TLS.
const MIN_CONNECTIONS: f64 = 20.0;
const MIN_REQUESTS_PER_CONNECTION: f64 = 0.25;
/// If the new instance has less than this part of the old instance's seats (API priority and
/// fairness), its rejections are for lack of seats.
const MIN_SEAT_SHARE: f64 = 0.75;
/// A step can be "good" only with at least [`MIN_INTERVALS`] intervals and [`MIN_REQUESTS`]
/// comparable requests to the new instance, which must be at least the part
/// [`MIN_COMPARABLE_SHARE`] of all its requests.
const MIN_INTERVALS: u32 = 10;
const MIN_REQUESTS: f64 = 100.0;
const MIN_COMPARABLE_SHARE: f64 = 0.5;
/// If more than this share of requests may be bad on average, no fault could be found.
const MAX_AVERAGE_LIMIT: f64 = 0.5;
/// Maximum number of rows for one signal in a verdict, not counting the row of the sum.
const MAX_LINES: usize = 5;

/// Weight of a sample of a state, such as the size of the process, in requests.
const STATE_SAMPLE_WEIGHT: f64 = 100.0;
/// A bet waits until it has this many requests: [`BATCH_FACTOR`] times the allowed share of bad
/// requests, but no more than [`MAX_BATCH`].
const BATCH_FACTOR: f64 = 50.0;
const MAX_BATCH: f64 = 10.0;

/// Takes a sample of each instance about every two seconds, starting a minute before the first
/// step, in which the new instance gets only berth's own requests. After each sample,
/// [`Judge::is_bad`] says whether to roll back. After a step, the verdict says whether there were
/// enough requests to go on.
#[derive(Debug, Default)]
pub struct Judge {
    accepted: BTreeSet<Signal>,
    /// When each instance last answered, on the caller's clock. The old instance is first.
    at: [Duration; 2],
    old: Side,
    new: Side,
    history: BTreeMap<Id, History>,
    /// The tests of the new instance, by signal and subject. Empty until the first step.
    tests: BTreeMap<Id, Test>,
    certain: BTreeMap<(Signal, String), String>,
    /// Number of requests to both instances before the first step.
    before: f64,
    /// `requests` has the old instance's requests by API in its first sample. `apis` has the APIs
    /// that each instance serves.
    requests: Option<BTreeMap<String, f64>>,
    apis: [Option<BTreeSet<String>>; 2],
    suffered: bool,
    /// `unanswered` counts the samples in a row in which the new instance was silent, and `refused`
    /// those in which it refused its metrics.
    unanswered: u32,
    refused: u32,
    /// The new instance's latest connections in a row without a byte: the number of samples since
    /// the first of them, and the number of connections.
    empty: (u32, f64),
    /// Number of earlier steps that prove nothing, because most of their intervals were left out.
    unseen: u32,
    /// Connections given to the new instance since the first step began. `followed` is true if the
    /// new instance has let in a request.
    given: f64,
    followed: bool,
    step: Step,
}

#[derive(Debug, Default)]
struct Test {
    wealth: Wealth,
    alpha: f64,
    interval: Tally,
    total: Tally,
    found: bool,
}

/// Counts of the new instance's requests. `old` is how many would be bad at the old instance's
/// rate, and `allowed` is how many may be bad.
#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    new: Counts,
    old: f64,
    allowed: f64,
    /// Bad requests of a kind that the old instance had no requests of lately.
    alone: f64,
}

#[derive(Debug, Default)]
struct Step {
    /// Seconds in which the judge learned from the old instance.
    seconds: f64,
    intervals: u32,
    left_out: u32,
    requests: f64,
    compared: f64,
    /// Connections given to the new instance, and all requests that arrived there, including
    /// berth's own.
    connections: f64,
    arrived: f64,
}

impl Judge {
    /// Makes a judge that tolerates the `accepted` signals: a finding with such a signal does not
    /// make a verdict bad.
    pub fn new(accepted: impl IntoIterator<Item = Signal>) -> Self {
        Self {
            accepted: accepted.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Starts a step with a new share of connections. Before the first step, the judge only learns
    /// the usual rates.
    pub fn begin_step(&mut self) {
        if self.tests.is_empty() {
            self.tests = self.prepare_tests();
            self.before = self.request_count();
        }
        for history in self.history.values_mut() {
            history.most = history
                .most
                .max(mem::take(&mut history.bad) / self.step.seconds.max(1.0));
        }
        self.unseen += u32::from(self.step.proves_nothing());
        self.step = Step::default();
        self.tests
            .values_mut()
            .for_each(|test| test.wealth.begin_step());
    }

    /// Takes the samples of both instances at the same time. `at` comes from any monotonic clock.
    pub fn observe(&mut self, at: Duration, old: Sample, new: Sample) {
        self.find_certain_faults(&old, &new);
        let answered = [old.answered, new.answered];
        let alive = [&old, &new].map(|sample| sample.answered || sample.refused);
        self.refused = if new.refused {
            self.refused + u32::from(old.answered)
        } else {
            0
        };
        let since = |side: usize| at.saturating_sub(self.at[side]).as_secs_f64();
        let [old_seconds, new_seconds] = [(0, &self.old), (1, &self.new)].map(|(side, seen)| {
            if answered[side] && seen.last.answered {
                since(side)
            } else {
                0.0
            }
        });
        let states = self.judge_states(&old, &new, new_seconds);
        if !self.old.last.answered {
            self.learn_lifetime_counts(&old);
        }
        let busy = self.busy_levels(&old, &new);
        let starts_again = has_restarted(&self.old.last, &old);
        let (from_old, from_new) = (
            self.old.advance_to_sample(old),
            self.new.advance_to_sample(new),
        );
        self.check_silence(alive, &from_new);
        (0..2)
            .filter(|side| answered[*side])
            .for_each(|side| self.at[side] = at);
        let was = self.count_bad_and_all(&from_old);
        for (id, history) in &mut self.history {
            history.recent = history.recent / 2.0 + was.get(id).map_or(0.0, |counts| counts.all);
        }
        let suffers = starts_again || self.old_instance_suffers(&was);
        if !suffers {
            self.learn_interval(&from_old, &was);
            self.step.seconds += old_seconds;
        }
        let suffered = mem::replace(&mut self.suffered, suffers);
        if self.tests.is_empty() {
            return;
        }
        self.check_connections_bring_requests(&from_new, answered[1]);
        let compares = answered[0] && !suffers && !suffered;
        match compares && answered[1] {
            true => self.step.intervals += 1,
            false => self.step.left_out += 1,
        }
        if !compares {
            return;
        }
        self.compare_requests(&from_new, &was, &busy, new_seconds);
        for (id, tally) in states {
            if let Some(test) = self.tests.get_mut(&id) {
                test.interval.add(&tally);
            }
        }
        self.tests.values_mut().for_each(Test::place_bets);
    }

    /// True once the new instance has to give back its connections. The outcome stays bad.
    pub fn is_bad(&self) -> bool {
        let tests = self
            .tests
            .iter()
            .filter(|(_, test)| test.found)
            .map(|(id, _)| id.0);
        tests
            .chain(self.certain.keys().map(|(signal, _)| *signal))
            .any(|signal| !self.accepted.contains(&signal))
    }

    /// Returns the number of requests to both instances since the first step began, and the number
    /// of requests that met the fault. The latter is the largest number of bad requests among the
    /// signals that found a fault, without signals of states.
    pub fn requests_that_met_the_fault(&self) -> (u64, u64) {
        let found = self
            .tests
            .iter()
            .filter(|((signal, _), test)| test.found && !signal.is_state());
        let met = found
            .map(|(_, test)| test.total.new.bad)
            .fold(0.0, f64::max);
        (
            (self.request_count() - self.before).max(met) as u64,
            met as u64,
        )
    }

    fn request_count(&self) -> f64 {
        [&self.old, &self.new]
            .into_iter()
            .flat_map(|side| side.last.requests.values())
            .sum()
    }

    pub fn verdict(&self) -> Verdict {
        let mut rows: Vec<Row> = Signal::COMPARED_SIGNALS
            .into_iter()
            .flat_map(|signal| self.list_rows(signal))
            .collect();
        rows.extend(self.certain.iter().map(|((code, subject), note)| Row {
            code: *code,
            subject: subject.clone(),
            compared: 0,
            old: 0.0,
            new: 1.0,
            limit: 0.0,
            judgement: self.judgement_of(*code),
            note: note.clone(),
        }));
        let lacking = self.missing_requirements();
        let outcome = match () {
            () if self.is_bad() => Outcome::Bad,
            () if lacking.is_empty() => Outcome::Good,
            () => Outcome::Undecided,
        };
        Verdict {
            outcome,
            rows,
            lacking,
            against: self.weak_evidence(),
        }
    }

    /// Makes a test for each kind of requests that the old instance has had. Each test gets its
    /// part of [`ALPHA`].
    fn prepare_tests(&self) -> BTreeMap<Id, Test> {
        let mut ids: BTreeSet<Id> = Signal::COMPARED_SIGNALS
            .map(|signal| (signal, Subject::default()))
            .into();
        let known = self
            .history
            .iter()
            .filter(|(_, history)| history.counts.all >= MIN_KNOWN_REQUESTS);
        ids.extend(known.flat_map(|((signal, subject), _)| {
            subject
                .enclosing_subjects()
                .into_iter()
                .map(|level| (*signal, level))
        }));
        let services = self.old.last.unavailable.keys();
        ids.extend(services.map(|name| (Signal::Aggregation, Subject::of_resource(name))));
        let mut like: BTreeMap<_, u32> = BTreeMap::new();
        ids.iter().for_each(|(signal, subject)| {
            *like
                .entry((*signal, level_and_alpha_divisor(subject)))
                .or_default() += 1;
        });
        let alpha = |(signal, subject): &Id| {
            let (_, share) = level_and_alpha_divisor(subject);
            ALPHA * signal.weight()
                / f64::from(share)
                / f64::from(like[&(*signal, level_and_alpha_divisor(subject))])
        };
        ids.into_iter()
            .map(|id| {
                (
                    id.clone(),
                    Test {
                        alpha: alpha(&id),
                        ..Test::default()
                    },
                )
            })
            .collect()
    }

    /// Looks for the findings that need no test: a restart, or a missing API.
    fn find_certain_faults(&mut self, old: &Sample, new: &Sample) {
        let mut find = |signal, subject: &str, note: String| {
            self.certain
                .entry((signal, subject.to_owned()))
                .or_insert(note);
        };
        if has_restarted(&self.new.last, new) {
            find(
                Signal::Restart,
                "process",
                "the new instance started again".to_owned(),
            );
        }
        for (known, sample) in self.apis.iter_mut().zip([old, new]) {
            *known = sample.apis.clone().or(known.take());
        }
        if old.answered && self.requests.is_none() {
            self.requests = Some(old.requests.clone());
        }
        let (Some(first), [Some(served), Some(serves)]) = (&self.requests, &self.apis) else {
            return;
        };
        for api in served.difference(serves) {
            let [before, now, open] = [first, &old.requests, &old.open]
                .map(|requests| requests.get(api).copied().unwrap_or_default());
            if now > before || open > 0.0 {
                let note = format!(
                    "the new instance does not serve this API; the old instance had {} requests for the API, and has {open} watches",
                    now - before
                );
                find(Signal::MissingApi, api, note);
            }
        }
    }

    /// Checks whether the new instance is silent: no metrics, or not a byte on any connection. The
    /// first byte belongs to the TLS handshake, which needs neither etcd nor a webhook.
    fn check_silence(&mut self, [old, new]: [bool; 2], from_new: &Increments) {
        self.unanswered = if new {
            0
        } else {
            self.unanswered + u32::from(old)
        };
        match from_new
            .counts
            .get(&(Signal::EmptyConnections, Subject::default()))
        {
            Some(connections) if connections.bad < connections.all => self.empty = (0, 0.0),
            Some(connections) if old => {
                self.empty = (self.empty.0 + 1, self.empty.1 + connections.all);
            }
            // After an empty connection, a sample without any connection counts as silence, too.
            None if old && self.empty.0 > 0 => self.empty.0 += 1,
            _ => {}
        }
        if self.refused >= MAX_REFUSED_SAMPLES {
            let note = format!(
                "the new instance refused its metrics {MAX_REFUSED_SAMPLES} times in a row, while the old instance gave metrics"
            );
            self.certain
                .entry((Signal::NoMetrics, "process".to_owned()))
                .or_insert(note);
        }
        let (samples, connections) = self.empty;
        if self.unanswered >= MAX_SILENT_SAMPLES
            || samples >= MAX_SILENT_SAMPLES && connections >= MAX_EMPTY_CONNECTIONS
        {
            let note = format!(
                "in {MAX_SILENT_SAMPLES} samples, the new instance gave no metrics or no byte on any connection, while the old instance answered"
            );
            self.certain
                .entry((Signal::NoAnswer, "process".to_owned()))
                .or_insert(note);
        }
    }

    /// Checks that clients' connections to the new instance bring requests, whatever the answers.
    fn check_connections_bring_requests(&mut self, from_new: &Increments, answered: bool) {
        let of = |signal| {
            from_new
                .counts
                .get(&(signal, Subject::default()))
                .map_or(0.0, |counts| counts.all)
        };
        self.followed |= from_new
            .counts
            .keys()
            .any(|(signal, _)| *signal == Signal::Errors);
        let given = of(Signal::EmptyConnections);
        (self.given, self.step.connections) = (self.given + given, self.step.connections + given);
        self.step.arrived += of(Signal::Authentication);
        let Step {
            intervals,
            connections,
            arrived,
            ..
        } = self.step;
        let counts = answered && self.new.last.metrics.contains(Signal::NoRequests.metric());
        if counts
            && intervals >= MIN_INTERVALS
            && connections >= MIN_CONNECTIONS
            && arrived < MIN_REQUESTS_PER_CONNECTION * connections
        {
            let note = format!(
                "clients opened {connections:.0} connections to the new instance, and sent only {arrived:.0} requests on these connections"
            );
            self.certain
                .entry((Signal::NoRequests, "all".to_owned()))
                .or_insert(note);
        }
    }

    /// Evidence against the new instance that is too weak for a test. A version that refuses every
    /// client has few comparable requests.
    fn weak_evidence(&self) -> Option<String> {
        let refused = [(Signal::Authentication, 401), (Signal::Authorization, 403)]
            .into_iter()
            .find_map(|(signal, code)| {
                let test = self
                    .tests
                    .get(&(signal, Subject::default()))
                    .filter(|_| !self.accepted.contains(&signal))?;
                let mut all = test.total;
                all.add(&test.interval);
                let Tally { new, allowed, .. } = all;
                (new.bad >= MIN_EVIDENCE && new.bad > allowed).then(|| {
                    format!(
                        "{} of {} requests to the new instance were answered {code}",
                        new.bad, new.all
                    )
                })
            });
        let lost = || {
            format!(
                "the new instance got {} connections and accepted no request",
                self.given
            )
        };
        refused.or_else(|| (self.given >= MIN_EVIDENCE && !self.followed).then(lost))
    }

    /// Judges states, which are no counts: an APIService is unavailable, or the process grows
    /// beyond the size that the old instance needs for all clients. One sample counts as
    /// [`STATE_SAMPLE_WEIGHT`] requests.
    fn judge_states(&self, old: &Sample, new: &Sample, seconds: f64) -> BTreeMap<Id, Tally> {
        let mut tallies = BTreeMap::new();
        let mut add = |signal: Signal, subject: Subject, bad: bool| {
            let new = Counts {
                bad: if bad { STATE_SAMPLE_WEIGHT } else { 0.0 },
                all: STATE_SAMPLE_WEIGHT,
            };
            let tally = Tally {
                new,
                old: 0.0,
                allowed: signal.tolerance() * STATE_SAMPLE_WEIGHT,
                alone: 0.0,
            };
            tallies.insert((signal, subject), tally);
        };
        let services = old
            .unavailable
            .iter()
            .filter_map(|(name, old)| Some((name, *old, *new.unavailable.get(name)?)));
        let mut any = false;
        for (name, old, new) in services.clone() {
            any |= new && !old;
            add(Signal::Aggregation, Subject::of_resource(name), new && !old);
        }
        if services.count() > 0 {
            add(Signal::Aggregation, Subject::default(), any);
        }
        if let (Some(now), Some(before)) = (new.memory, self.new.last.memory) {
            let peak = self.old.memory.max(old.memory.unwrap_or_default());
            let pace = f64::from(8 << 20).max(peak / 200.0);
            let grows = peak > 0.0 && now > 1.25 * peak && now - before > seconds * pace;
            add(Signal::Memory, Subject::default(), grows);
        }
        tallies
    }

    /// Returns the new instance's priority levels with more than half of their seats taken, now or
    /// in the last sample. The result is empty if the instance has few seats in all. Levels lend
    /// each other seats, so only the total can be compared with the old instance's.
    fn busy_levels(&self, old: &Sample, new: &Sample) -> BTreeSet<Subject> {
        let [all_old, all_new] =
            [old, new].map(|sample| sample.seats.values().map(|seats| seats.all).sum::<f64>());
        if all_new < MIN_SEAT_SHARE * all_old {
            return BTreeSet::new();
        }
        let seats = self.new.last.seats.iter().chain(&new.seats);
        seats
            .filter(|(_, seats)| seats.bad > seats.all / 2.0)
            .map(|(level, _)| Subject::of_resource(level))
            .collect()
    }

    /// Learns from the counts of the old instance's whole life. Some requests are sent only when a
    /// client connects, and that may have been days ago.
    fn learn_lifetime_counts(&mut self, old: &Sample) {
        for (id, histogram) in &old.histograms {
            self.history
                .entry(id.clone())
                .or_default()
                .learn_histogram(histogram, MAX_EARLIER_REQUESTS);
        }
        for (id, counts) in &old.counts {
            self.history
                .entry(id.clone())
                .or_default()
                .learn_counts(*counts, MAX_EARLIER_REQUESTS);
        }
    }

    /// Counts the old instance's bad requests and all its requests in an interval. For a histogram,
    /// slow requests are bad.
    fn count_bad_and_all(&mut self, from: &Increments) -> BTreeMap<Id, Counts> {
        let mut all = from.counts.clone();
        for (id, histogram) in &from.histograms {
            if let Some(slow) = self.history.entry(id.clone()).or_default().slow {
                all.insert(
                    id.clone(),
                    Counts {
                        bad: histogram.count_above(slow),
                        all: histogram.total(),
                    },
                );
            }
        }
        all
    }

    fn old_instance_suffers(&self, was: &BTreeMap<Id, Counts>) -> bool {
        let mut sums: BTreeMap<Signal, (Counts, f64)> = BTreeMap::new();
        for (id, counts) in was {
            let (sum, usual) = sums.entry(id.0).or_default();
            sum.add(counts.bad, counts.all);
            *usual += counts.all
                * self
                    .history
                    .get(id)
                    .map_or(0.0, |history| history.counts.share_of_bad());
        }
        let tells = [
            Signal::Errors,
            Signal::Latency,
            Signal::EtcdErrors,
            Signal::EmptyConnections,
            Signal::FirstByte,
        ];
        tells
            .iter()
            .filter_map(|signal| sums.get(signal))
            .any(|(sum, usual)| {
                sum.bad > MAX_RATIO * usual + SUFFERING_LIMIT.all * sum.all + SUFFERING_LIMIT.bad
            })
    }

    fn learn_interval(&mut self, from: &Increments, was: &BTreeMap<Id, Counts>) {
        for (id, histogram) in &from.histograms {
            self.history
                .entry(id.clone())
                .or_default()
                .learn_histogram(histogram, MAX_REQUESTS);
        }
        for (id, counts) in was {
            let history = self.history.entry(id.clone()).or_default();
            // For a histogram, `learn_histogram` has counted slow requests and all requests
            // already.
            if !from.histograms.contains_key(id) {
                history.learn_counts(*counts, MAX_REQUESTS);
            }
            history.bad += counts.bad;
        }
    }

    /// Compares the new instance's requests with their limits.
    fn compare_requests(
        &mut self,
        from: &Increments,
        was: &BTreeMap<Id, Counts>,
        busy: &BTreeSet<Subject>,
        seconds: f64,
    ) {
        let slow = from.histograms.iter().filter_map(|(id, histogram)| {
            let history = self.history.get_mut(id)?;
            history.new.merge(histogram);
            Some((
                id,
                Counts {
                    bad: histogram.count_above(history.slow?),
                    all: histogram.total(),
                },
            ))
        });
        let mut beside: BTreeMap<(Signal, bool), Counts> = BTreeMap::new();
        was.iter().for_each(|((signal, subject), old)| {
            beside
                .entry((*signal, subject.is_write()))
                .or_default()
                .add(old.bad, old.all);
        });
        let beside = |(signal, subject): &Id| {
            beside
                .get(&(*signal, subject.is_write()))
                .copied()
                .filter(|_| signal.is_time())
        };
        let all: Vec<_> = slow.collect();
        for (id, new) in all
            .into_iter()
            .chain(from.counts.iter().map(|(id, new)| (id, *new)))
        {
            let (signal, subject) = id;
            let is_request = *signal == Signal::Errors;
            self.step.requests += if is_request { new.all } else { 0.0 };
            let known = self
                .history
                .get(id)
                .filter(|history| history.counts.all >= MIN_KNOWN_REQUESTS);
            let Some(history) = known else { continue };
            let alone =
                signal.is_time() && beside(id).is_none_or(|old| old.all < MIN_COMPARED_TIMES);
            if alone || *signal == Signal::Rejections && busy.contains(subject) {
                continue;
            }
            self.step.compared += if is_request { new.all } else { 0.0 };
            let now = was
                .get(id)
                .copied()
                .into_iter()
                .chain(beside(id))
                .map(Counts::share_of_bad)
                .fold(0.0, f64::max);
            let old = history.counts.share_of_bad().max(now) * new.all;
            let allowed = (signal.tolerance() * new.all + MAX_RATIO * old + history.most * seconds)
                .min(new.all);
            let alone = if history.recent < 1.0 { new.bad } else { 0.0 };
            for level in subject.enclosing_subjects() {
                if let Some(test) = self.tests.get_mut(&(*signal, level)) {
                    test.interval.add(&Tally {
                        new,
                        old,
                        allowed,
                        alone,
                    });
                }
            }
        }
    }

    fn list_rows(&self, signal: Signal) -> Vec<Row> {
        let lacks = [(&self.old, "old"), (&self.new, "new")]
            .into_iter()
            .find(|(side, _)| !side.last.metrics.contains(signal.metric()));
        let mut tests: Vec<_> = self
            .tests
            .range((signal, Subject::default())..)
            .take_while(|(id, _)| id.0 == signal)
            .collect();
        tests.retain(|((_, subject), test)| test.found || *subject == Subject::default());
        tests.sort_by(|(a, one), (b, other)| {
            let first = |subject: &Subject| *subject != Subject::default();
            first(&a.1)
                .cmp(&first(&b.1))
                .then(other.total.new.bad.total_cmp(&one.total.new.bad))
        });
        let rows = tests
            .into_iter()
            .take(1 + MAX_LINES)
            .map(|((_, subject), test)| {
                let Tally {
                    new, old, allowed, ..
                } = test.total;
                let share = |part: f64| if new.all > 0.0 { part / new.all } else { 0.0 };
                let (judgement, note) = match lacks {
                    _ if test.found => (
                        self.judgement_of(signal),
                        self.format_quantiles(signal, subject),
                    ),
                    Some((_, which)) if new.all == 0.0 => (
                        Judgement::NotCompared,
                        format!("the {which} instance has no {}", signal.metric()),
                    ),
                    _ if new.all == 0.0 => (
                        Judgement::NotCompared,
                        "nothing that both instances had".to_owned(),
                    ),
                    _ if share(allowed) > MAX_AVERAGE_LIMIT => (
                        Judgement::NotCompared,
                        "the old instance is too bad for a comparison".to_owned(),
                    ),
                    _ => (Judgement::Good, self.format_quantiles(signal, subject)),
                };
                let [old, new_share, limit] = [old, new.bad, allowed].map(share);
                let compared = (new.all
                    / if signal.is_state() {
                        STATE_SAMPLE_WEIGHT
                    } else {
                        1.0
                    })
                .round() as u64;
                Row {
                    code: signal,
                    subject: subject.to_string(),
                    compared,
                    old,
                    new: new_share,
                    limit,
                    judgement,
                    note,
                }
            });
        rows.collect()
    }

    /// Formats the 95th percentiles of both instances. Empty if one of them has no histogram.
    fn format_quantiles(&self, signal: Signal, subject: &Subject) -> String {
        let (mut old, mut new) = (Histogram::default(), Histogram::default());
        for (_, history) in self
            .history
            .iter()
            .filter(|(id, _)| id.0 == signal && id.1.enclosing_subjects().contains(subject))
        {
            old.merge(&history.histogram);
            new.merge(&history.new);
        }
        let [Some(old), Some(new)] = [old, new].map(|histogram| histogram.quantile(SLOW_QUANTILE))
        else {
            return String::new();
        };
        format!("95th percentile {new:.3} s, old {old:.3} s")
    }

    fn judgement_of(&self, code: Signal) -> Judgement {
        if self.accepted.contains(&code) {
            Judgement::Accepted
        } else {
            Judgement::Bad
        }
    }

    fn missing_requirements(&self) -> Vec<String> {
        let Step {
            intervals,
            left_out,
            requests,
            compared,
            ..
        } = self.step;
        let mut lacking = Vec::new();
        if intervals < MIN_INTERVALS {
            lacking.push(format!(
                "only {intervals} intervals can be compared, and {MIN_INTERVALS} are needed; {left_out} intervals were left out, since the old instance suffered, too"
            ));
        }
        let unseen = self.unseen + u32::from(self.step.proves_nothing());
        if unseen > 0 {
            lacking.push(format!(
                "most intervals of {unseen} steps were left out: the old instance suffered, too, or the new instance gave no metrics"
            ));
        }
        if compared < MIN_REQUESTS {
            lacking.push(format!(
                "only {compared:.0} requests to the new instance can be compared, and {MIN_REQUESTS:.0} are needed"
            ));
        }
        if compared < MIN_COMPARABLE_SHARE * requests {
            lacking.push(format!(
                "only {compared:.0} of {requests:.0} requests to the new instance are of a kind that the old instance had, too"
            ));
        }
        for signal in [Signal::Errors, Signal::Latency] {
            let total = self
                .tests
                .get(&(signal, Subject::default()))
                .map(|test| test.total)
                .unwrap_or_default();
            if total.allowed > MAX_AVERAGE_LIMIT * total.new.all {
                lacking.push(format!(
                    "{signal}: the old instance is so bad in this signal that a fault of the new instance would not show"
                ));
            }
        }
        lacking
    }
}

impl Step {
    /// True if most intervals were left out. Such a step proves nothing about the new instance, and
    /// a later step with another share cannot make up for it.
    fn proves_nothing(&self) -> bool {
        self.left_out > self.intervals
    }
}

impl Test {
    fn place_bets(&mut self) {
        let Tally {
            new,
            allowed,
            alone,
            ..
        } = self.interval;
        // Without a request, `allowed / new.all` is NaN, which `min` turns into 1. No bet follows
        // then.
        let share = (allowed / new.all).min(1.0);
        if new.all >= (BATCH_FACTOR * share).min(MAX_BATCH) {
            self.total.add(&mem::take(&mut self.interval));
            self.wealth
                .bet_on_interval(new, share, alone > new.bad / 2.0);
            self.found |= self.wealth.refutes(self.alpha);
        }
    }
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.new.add(other.new.bad, other.new.all);
        self.old += other.old;
        self.allowed += other.allowed;
        self.alone += other.alone;
    }
}

/// Returns the level of a subject (0 for the total), and the divisor of its part of ALPHA. The
/// total gets half.
fn level_and_alpha_divisor(subject: &Subject) -> (u8, u8) {
    match (subject.verb.is_empty(), subject.resource.is_empty()) {
        (true, true) => (0, 2),
        (true, false) => (1, 4),
        (false, true) => (2, 8),
        (false, false) => (3, 8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The total gets half of ALPHA, all resources share a quarter, all verbs an eighth, and all
    /// combinations an eighth.
    #[test]
    fn each_test_has_its_part_of_alpha() {
        let id = |verb: &str, resource: &str| {
            (
                Signal::Errors,
                Subject {
                    verb: verb.into(),
                    ..Subject::of_resource(resource)
                },
            )
        };
        let mut judge = Judge::default();
        for (verb, resource) in [("GET", "pods"), ("LIST", "pods"), ("GET", "nodes")] {
            judge
                .history
                .entry(id(verb, resource))
                .or_default()
                .counts
                .all = MIN_KNOWN_REQUESTS;
        }
        let tests = judge.prepare_tests();
        for (verb, resource, part) in [
            ("", "", 0.5),
            ("", "pods", 0.25 / 2.0),
            ("LIST", "", 0.125 / 2.0),
            ("GET", "nodes", 0.125 / 3.0),
        ] {
            let alpha = tests[&id(verb, resource)].alpha;
            assert!(
                (alpha / ALPHA - part * Signal::Errors.weight()).abs() < 1e-9,
                "{verb} {resource}: {alpha}"
            );
        }
    }
}
