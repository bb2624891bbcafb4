//! The test, checked after every interval: is the new instance's share of bad requests above the
//! limit?
//!
//! Checking a p-value every few seconds and stopping at the first small one is wrong far more often
//! than the p-value says (Fisher's exact test at every look). A test that is valid at any time
//! needs no fixed number of looks. Lindon, Sanden and Shirikian, "Rapid Regression Detection in
//! Software Deployments through Sequential Testing" (KDD 2022), stop a deployment early with such a
//! test. Their test counts independent events. Errors of an API are not independent: a client
//! retries, a webhook is away for ten seconds, etcd stalls, and a hundred errors are one event. So
//! the unit here is not the request but the interval between two samples, whatever happened inside.
//!
//! The test is a bet (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
//! betting", JRSS B 2024). Each interval has a share `x` of bad requests, from 0 to 1. The
//! hypothesis that all is well says that `x` is at most `a` on average, given the past. A gambler
//! starts with wealth 1, stakes a part on `x > a`, and multiplies the wealth by `1 + c / a * (x -
//! a)`, a factor of at most 1 on average. So wealth is a nonnegative supermartingale, and the
//! probability that wealth ever reaches `1 / alpha` is at most `alpha` (Ville, 1939), however the
//! requests inside an interval depend on each other. Three additions make the test robust, and none
//! can raise that probability:
//!
//! - `x` is `bad / (all + 5)`: a few requests of one client prove nothing.
//! - A factor is at most 16, so that no single burst gives a verdict, however large: at least four
//!   intervals have to be bad. Where the old instance has no requests of the kind, the factor is at
//!   most 2, and 40 s have to be bad, since the old instance might suffer as well.
//! - Part of the initial wealth is kept for later bets, which begin afresh: an eighth at each step,
//!   and 1/256 at each interval up to the 128th (a mixture over the start of the fault, as in Shin,
//!   Ramdas and Rinaldo, "E-detectors", NEJSDS 2024). Losses in quiet minutes do not have to be won
//!   back.

use crate::signals::Counts;

/// The probability that a good upgrade is sent back, for all signals and all steps together.
pub const ALPHA: f64 = 0.005;

/// The gambler may lose this part of the wealth in one interval.
const STAKE: f64 = 0.6;
/// This many good requests are added to every interval, so that a few bad ones prove nothing.
const ADDED_GOOD_REQUESTS: f64 = 5.0;
const MAX_FACTOR: f64 = 16.0;
const MAX_FACTOR_ALONE: f64 = 2.0;

/// The initial wealth of 1 is handed out in parts, at each step and each interval: 4 × 1/8 + 128 ×
/// 1/256 = 1.
const MAX_STEPS: u32 = 4;
const WEALTH_PER_STEP: f64 = 1.0 / 8.0;
const MAX_INTERVALS: u32 = 128;
const WEALTH_PER_INTERVAL: f64 = 1.0 / 256.0;

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wealth {
    now: f64,
    steps: u32,
    intervals: u32,
}

impl Wealth {
    pub(crate) fn begin_step(&mut self) {
        if self.steps < MAX_STEPS {
            self.steps += 1;
            self.now += WEALTH_PER_STEP;
        }
    }

    /// Bets on the requests of one interval. `allowed` is the share that may be bad. `alone` is
    /// true if the old instance had no requests to compare with.
    pub(crate) fn bet_on_interval(&mut self, counts: Counts, allowed: f64, alone: bool) {
        if self.intervals < MAX_INTERVALS {
            self.intervals += 1;
            self.now += WEALTH_PER_INTERVAL;
        }
        let share = (counts.bad / (counts.all + ADDED_GOOD_REQUESTS)).clamp(0.0, 1.0);
        self.now *= (1.0 + STAKE / allowed * (share - allowed)).min(if alone {
            MAX_FACTOR_ALONE
        } else {
            MAX_FACTOR
        });
    }

    #[cfg(test)]
    pub(crate) fn current_wealth(self) -> f64 {
        self.now
    }

    /// True if the wealth has reached `1 / alpha`. For a good instance the probability of this is
    /// at most `alpha`.
    pub(crate) fn refutes(self, alpha: f64) -> bool {
        self.now >= 1.0 / alpha
    }
}
