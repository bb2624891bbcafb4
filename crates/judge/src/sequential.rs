//! The test: whether the new instance's share of bad requests is above what is allowed, looked at after every interval.
//!
//! Whoever looks at a p-value every few seconds and stops at the first small one is wrong far more often than the
//! p-value says (Fisher's exact test at every look). A test that may be looked at always needs no fixed number of
//! looks: Lindon, Sanden and Shirikian, "Rapid Regression Detection in Software Deployments through Sequential Testing"
//! (KDD 2022), show how a deployment is stopped early with one. Theirs counts events that come independently of each
//! other. Errors of an API do not: a client retries, a webhook is away for ten seconds, etcd stalls, and a hundred
//! errors are one event. So the unit here is not the request but the interval between two samples, whatever happened
//! inside it.
//!
//! It is a bet (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024): each
//! interval has a share `x` of bad requests, from 0 to 1, and the hypothesis that all is well says that it is at most
//! `a` on average, given all that was before. Who starts with wealth 1 and stakes a part of it on `x > a` multiplies it
//! by `1 + c / a * (x - a)`, which on average is at most 1. So wealth is a nonnegative supermartingale, and the
//! probability that it ever reaches `1 / alpha` is at most `alpha` (Ville, 1939), however the requests inside an
//! interval depend on each other. Three more things make it robust, and none can raise that probability:
//!
//! - `x` is `bad / (all + 5)`: a few requests of one client prove nothing.
//! - A factor is at most 16, so that no burst alone gives a verdict, however large: at least four intervals have to be
//!   bad. It is at most 2, and 40 s have to be bad, where the old instance has no such requests: nobody knows whether it
//!   would suffer, too.
//! - Part of the initial wealth is kept for later bets, which begin afresh: an eighth at each step, and 1/256 at each
//!   interval up to the 128th (a mixture over the time when the fault begins, as in Shin, Ramdas and Rinaldo,
//!   "E-detectors", NEJSDS 2024). What is lost in quiet minutes does not have to be won back.

use crate::signals::Counts;

/// The probability that a good upgrade is sent back, for all signals and all steps together.
pub const ALPHA: f64 = 0.005;

/// The part of the wealth that may be lost in one interval.
const STAKE: f64 = 0.6;
/// Requests that are taken to have been good in every interval.
const GOOD: f64 = 5.0;
const MOST: f64 = 16.0;
const MOST_ALONE: f64 = 2.0;

/// Steps and intervals that have a part of the initial wealth. Together they spend all of it.
const STEPS: u32 = 4;
const AT_STEP: f64 = 1.0 / 8.0;
const INTERVALS: u32 = 128;
const AT_INTERVAL: f64 = 1.0 / 256.0;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wealth {
    now: f64,
    steps: u32,
    intervals: u32,
}

impl Wealth {
    pub(crate) fn begin_step(&mut self) {
        if self.steps < STEPS {
            self.steps += 1;
            self.now += AT_STEP;
        }
    }

    /// After an interval in which so many were bad, of which this share is allowed; `alone`: the old instance had none to compare
    /// with.
    pub(crate) fn bet(&mut self, counts: Counts, allowed: f64, alone: bool) {
        if self.intervals < INTERVALS {
            self.intervals += 1;
            self.now += AT_INTERVAL;
        }
        let share = (counts.bad / (counts.all + GOOD)).clamp(0.0, 1.0);
        self.now *=
            (1.0 + STAKE / allowed * (share - allowed)).min(if alone { MOST_ALONE } else { MOST });
    }

    #[cfg(test)]
    pub(crate) fn now(self) -> f64 {
        self.now
    }

    /// Whether that much was won: the probability of it is `alpha` at most, if all is well.
    pub(crate) fn refutes(self, alpha: f64) -> bool {
        self.now >= 1.0 / alpha
    }
}
