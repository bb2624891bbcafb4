//! What was seen of each instance: what came between two samples, and what is usual for the old one.

use crate::histogram::Histogram;
use crate::signals::{Counts, Sample, Signal, Subject};
use std::collections::BTreeMap;

/// Requests of the old instance that are remembered of a subject, how many of them may be older than the judge, and how
/// many there have to be to compare with.
pub(crate) const REMEMBERED: f64 = 1000.0;
pub(crate) const FROM_BEFORE: f64 = 50.0;
pub(crate) const ENOUGH: f64 = 5.0;
/// How many there have to be to say which of them are slow.
pub(crate) const ENOUGH_TIMES: f64 = 20.0;
/// A request is slow beyond so many times this quantile.
pub(crate) const SLOW: f64 = 2.0;
pub(crate) const QUANTILE: f64 = 0.95;

pub(crate) type Id = (Signal, Subject);

/// What was seen of an instance.
#[derive(Debug, Default)]
pub(crate) struct Side {
    pub(crate) last: Sample,
    /// The largest size of the process.
    pub(crate) memory: f64,
}

/// What came between two samples.
#[derive(Debug, Default)]
pub(crate) struct Increments {
    pub(crate) counts: BTreeMap<Id, Counts>,
    pub(crate) histograms: BTreeMap<Id, Histogram>,
}

/// What the old instance had of a subject.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) counts: Counts,
    pub(crate) histogram: Histogram,
    /// From where on a request is slow. It stays, once there are enough requests.
    pub(crate) slow: Option<f64>,
    /// Bad requests since the last step began, and the most per second that there were from one to the next.
    pub(crate) bad: f64,
    pub(crate) most: f64,
    /// Requests in the last intervals: each counts half as much as the one after it.
    pub(crate) recent: f64,
    /// Of the new instance, since the first step.
    pub(crate) new: Histogram,
}

impl Side {
    /// What came since the last sample; nothing from a process that is seen for the first time.
    pub(crate) fn advance(&mut self, sample: Sample) -> Increments {
        let mut increments = Increments::default();
        let goes_on = self.last.answered && !restarted(&self.last, &sample);
        self.memory = self.memory.max(sample.memory.unwrap_or_default());
        if goes_on {
            // A series begins with its first count, but for berth's, which can begin at any time.
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

pub(crate) fn restarted(before: &Sample, now: &Sample) -> bool {
    before
        .started
        .zip(now.started)
        .is_some_and(|(before, now)| before != now)
}
