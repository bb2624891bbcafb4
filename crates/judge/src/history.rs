//! Observations of each instance: increments between two samples, and the usual rates of the old
//! instance.

use crate::histogram::Histogram;
use crate::signals::{Counts, Sample, Signal, Subject};
use std::collections::BTreeMap;

/// Number of the old instance's requests to remember per subject; how many of them may be from
/// before the judge's start; and the minimum for a comparison.
pub(crate) const REMEMBERED: f64 = 1000.0;
pub(crate) const FROM_BEFORE: f64 = 50.0;
pub(crate) const ENOUGH: f64 = 5.0;
/// Minimum number of requests to tell which requests are slow.
pub(crate) const ENOUGH_TIMES: f64 = 20.0;
/// A request is slow if it takes more than [`SLOW`] times this quantile.
pub(crate) const SLOW: f64 = 2.0;
pub(crate) const QUANTILE: f64 = 0.95;

pub(crate) type Id = (Signal, Subject);

/// Observations of an instance.
#[derive(Debug, Default)]
pub(crate) struct Side {
    pub(crate) last: Sample,
    /// Peak memory of the process.
    pub(crate) memory: f64,
}

/// Increments between two samples.
#[derive(Debug, Default)]
pub(crate) struct Increments {
    pub(crate) counts: BTreeMap<Id, Counts>,
    pub(crate) histograms: BTreeMap<Id, Histogram>,
}

/// Observations of a subject of the old instance.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) counts: Counts,
    pub(crate) histogram: Histogram,
    /// Time from which a request is slow. Fixed as soon as there are enough requests.
    pub(crate) slow: Option<f64>,
    /// Bad requests since the last step began, and the maximum rate per second of all steps so far.
    pub(crate) bad: f64,
    pub(crate) most: f64,
    /// Requests in the last intervals. The weight halves with each interval.
    pub(crate) recent: f64,
    /// The new instance's histogram since the first step.
    pub(crate) new: Histogram,
}

impl Side {
    /// Returns the increments since the last sample; none for a process that is new.
    pub(crate) fn advance(&mut self, sample: Sample) -> Increments {
        let mut increments = Increments::default();
        let goes_on = self.last.answered && !has_restarted(&self.last, &sample);
        self.memory = self.memory.max(sample.memory.unwrap_or_default());
        if goes_on {
            // kube-apiserver's series start at zero when they appear. berth's own counts can appear
            // at any value.
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
                    .map(|before| now.since(&before))
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
    pub(crate) fn learn(&mut self, counts: Counts, most: f64) {
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
        self.histogram.limit(most);
        if self.slow.is_none() && self.histogram.total() >= ENOUGH_TIMES {
            self.slow = self
                .histogram
                .quantile(QUANTILE)
                .and_then(|usual| self.histogram.bound(SLOW * usual));
        }
        if let Some(slow) = self.slow {
            self.counts = Counts {
                bad: self.histogram.above(slow),
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
