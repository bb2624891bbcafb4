//! Records of each instance: the increments between two samples, and the usual rates of the
//! old instance.

use crate::histogram::Histogram;
use crate::signals::{Counts, Sample, Signal, Subject};
use std::collections::BTreeMap;

/// Limits for the old instance's requests of one subject, such as LISTs of pods. At most
/// [`MAX_REQUESTS`] requests count, at most [`MAX_EARLIER_REQUESTS`] of them from before the
/// judge's start. A comparison needs [`MIN_KNOWN_REQUESTS`] requests at least.
pub(crate) const MAX_REQUESTS: f64 = 1000.0;
pub(crate) const MAX_EARLIER_REQUESTS: f64 = 50.0;
pub(crate) const MIN_KNOWN_REQUESTS: f64 = 5.0;
/// The old instance must have answered this many requests of a subject before the judge can say
/// which requests are slow.
pub(crate) const MIN_TIMES: f64 = 20.0;
/// A request is slow if it takes more than [`SLOW_RATIO`] times as long as the old instance's 95th
/// percentile ([`SLOW_QUANTILE`]).
pub(crate) const SLOW_RATIO: f64 = 2.0;
pub(crate) const SLOW_QUANTILE: f64 = 0.95;

pub(crate) type Id = (Signal, Subject);

/// The judge's view of an instance: the last sample, and the largest memory so far.
#[derive(Debug, Default)]
pub(crate) struct Side {
    pub(crate) last: Sample,
    /// Largest resident memory of the process in any sample, in bytes.
    pub(crate) memory: f64,
}

/// Requests that an instance counted between two samples.
#[derive(Debug, Default)]
pub(crate) struct Increments {
    pub(crate) counts: BTreeMap<Id, Counts>,
    pub(crate) histograms: BTreeMap<Id, Histogram>,
}

/// The old instance's requests of one subject, such as LISTs of pods: usual numbers and times.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) counts: Counts,
    pub(crate) histogram: Histogram,
    /// Time in seconds from which a request is slow. Fixed as soon as there are enough requests.
    pub(crate) slow: Option<f64>,
    /// `bad` is the number of bad requests since the last step began. `most` is the highest rate of
    /// bad requests per second in any earlier step.
    pub(crate) bad: f64,
    pub(crate) most: f64,
    /// Recent requests of the old instance. The weight of an interval's requests halves with each
    /// later interval.
    pub(crate) recent: f64,
    /// Times of the new instance's requests since the first step.
    pub(crate) new: Histogram,
}

impl Side {
    /// Returns the increments since the last sample. A new process has no increments yet.
    pub(crate) fn advance_to_sample(&mut self, sample: Sample) -> Increments {
        let mut increments = Increments::default();
        let goes_on = self.last.answered && !has_restarted(&self.last, &sample);
        self.memory = self.memory.max(sample.memory.unwrap_or_default());
        if goes_on {
            // A kube-apiserver creates a series with its first count, so a new series has started
            // at zero. berth's own counts can be any number when they first appear.
            let begins = |id: &Id| {
                !matches!(
                    id.0,
                    Signal::EmptyConnections | Signal::FirstByte | Signal::TlsErrors
                )
            };
            for (id, now) in &sample.counts {
                let before = self
                    .last
                    .counts
                    .get(id)
                    .copied()
                    .or_else(|| begins(id).then(Counts::default));
                let since = before.map(|before| Counts {
                    bad: (now.bad - before.bad).max(0.0),
                    all: (now.all - before.all).max(now.bad - before.bad).max(0.0),
                });
                increments.counts.extend(
                    since
                        .filter(|since| since.all > 0.0)
                        .map(|since| (id.clone(), since)),
                );
            }
            for (id, now) in &sample.histograms {
                let before = self
                    .last
                    .histograms
                    .get(id)
                    .cloned()
                    .or_else(|| begins(id).then(Histogram::default));
                let since = before
                    .map(|before| now.increments_since(&before))
                    .filter(|since| since.total() > 0.0);
                increments
                    .histograms
                    .extend(since.map(|since| (id.clone(), since)));
            }
        }
        if sample.answered {
            self.last = sample;
        } else {
            self.last.counts.extend(sample.counts);
            self.last.histograms.extend(sample.histograms);
        }
        increments
    }
}

impl History {
    pub(crate) fn learn_counts(&mut self, counts: Counts, most: f64) {
        self.counts.add(counts.bad, counts.all);
        let factor = (most / self.counts.all).min(1.0);
        if self.counts.all > 0.0 {
            self.counts = Counts {
                bad: self.counts.bad * factor,
                all: self.counts.all * factor,
            };
        }
    }

    pub(crate) fn learn_histogram(&mut self, histogram: &Histogram, most: f64) {
        self.histogram.merge(histogram);
        self.histogram.scale_down(most);
        if self.slow.is_none() && self.histogram.total() >= MIN_TIMES {
            self.slow = self
                .histogram
                .quantile(SLOW_QUANTILE)
                .and_then(|usual| self.histogram.find_bound(SLOW_RATIO * usual));
        }
        if let Some(slow) = self.slow {
            self.counts = Counts {
                bad: self.histogram.count_above(slow),
                all: self.histogram.total(),
            };
        }
    }
}

pub(crate) fn has_restarted(before: &Sample, now: &Sample) -> bool {
    before
        .started
        .zip(now.started)
        .is_some_and(|(before, now)| before != now)
}
