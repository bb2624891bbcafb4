//! How many TLS handshakes an instance may have in flight. Pure: the time is passed in.
//!
//! The bound is at least twice the CPUs: as many handshakes as can be computed, and as many more that wait for
//! a CPU. It grows by one with each fast handshake while the bound, or one source's share of it, was reached, so
//! that without load no client ever waits for it. It shrinks by the gradient (calm time ÷ time now), as the limiters of Envoy and
//! Netflix do, while handshakes take more than twice their calm time. A young instance has a second bound, which
//! doubles every 5 s, and grows by one with each handshake that takes no longer than 10 ms.

use std::time::Duration;
use tokio::time::Instant;

/// Handshakes that take no longer let the bound of a young instance grow.
const FAST: Duration = Duration::from_millis(10);

/// A handshake is slow if it takes this many times as long as without load, and longer than `TOLERABLE`. With the bound that
/// 10 ms lead to, a kube-apiserver served 5,000 clients 5 % later than without a gate, and on the same day with this 1 %; with
/// 50 ms, 55 of 5,000 handshakes were computed in vain instead of 32 (docs/gate.md, "Measured").
const TOLERANCE: u32 = 2;
const TOLERABLE: Duration = Duration::from_millis(25);

/// A window is judged after this time and number of handshakes, or after a second with one.
const WINDOW: Duration = Duration::from_millis(250);
const ENOUGH: usize = 8;
const LONGEST_WINDOW: Duration = Duration::from_secs(1);

/// A window is of no use after that.
const FORGOTTEN: Duration = Duration::from_secs(10);

/// The calm time is not learned from handshakes that take this long: the instance hangs.
const HANGS: Duration = Duration::from_secs(1);

/// Most handshakes of a window whose times are recorded.
const SAMPLES: usize = 256;

/// Weight of one window in the calm time, and in the bound.
const CALM_WEIGHT: f64 = 0.1;
const WEIGHT: f64 = 0.2;

/// The least factor for the bound, before it is weighted.
const STEEPEST: f64 = 0.5;

/// Time in which the bound of a young instance doubles.
const DOUBLES: Duration = Duration::from_secs(5);

/// Largest bound.
const MOST: f64 = 65_536.0;

#[derive(Debug)]
pub(super) struct Limiter {
    least: f64,
    bound: f64,
    /// The bound of a young instance, and since when.
    young: (f64, Instant),
    /// Duration of a handshake while no more than [`Self::least`] are wanted. Durations under load are not used: the calm time would
    /// grow with each storm, and the bound with it.
    calm: Option<Duration>,
    is_slow: bool,
    window: Window,
}

#[derive(Debug)]
struct Window {
    began: Instant,
    took: Vec<Duration>,
    most_wanted: usize,
}

impl Window {
    fn new(began: Instant) -> Self {
        Self { began, took: Vec::new(), most_wanted: 0 }
    }

    fn is_over(&self, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.began);
        age >= LONGEST_WINDOW || age >= WINDOW && self.took.len() >= ENOUGH
    }

    fn median(&mut self) -> Duration {
        let middle = self.took.len() / 2;
        *self.took.select_nth_unstable(middle).1
    }
}

impl Limiter {
    /// For an instance that was discovered now.
    pub(super) fn new(cpus: usize, now: Instant) -> Self {
        let least = 2.0 * cpus.max(1) as f64;
        Self { least, bound: least, young: (least, now), calm: None, is_slow: false, window: Window::new(now) }
    }

    pub(super) fn bound(&mut self, now: Instant) -> usize {
        if now >= self.window.began + FORGOTTEN {
            (self.is_slow, self.window) = (false, Window::new(now));
        }
        while self.young.0 < MOST && now >= self.young.1 + DOUBLES {
            self.young.1 += DOUBLES;
            if !self.is_slow {
                self.young.0 *= 2.0;
            }
        }
        self.bound.min(self.young.0) as usize
    }

    /// Records a handshake: its duration, the number of those in flight and waiting with it, and whether the bound was reached for
    /// its source.
    pub(super) fn record(&mut self, took: Duration, wanted: usize, reached: bool, now: Instant) {
        if self.window.is_over(now) && !self.window.took.is_empty() {
            self.judge(now);
        }
        let window = &mut self.window;
        if window.took.is_empty() {
            window.began = now;
        }
        if window.took.len() < SAMPLES {
            window.took.push(took);
        }
        window.most_wanted = window.most_wanted.max(wanted);
        if !self.is_slow && took <= self.slow() && reached {
            if took <= FAST {
                self.young.0 = (self.young.0 + 1.0).min(MOST);
            }
            if self.bound <= self.young.0 {
                self.bound = (self.bound + 1.0).min(MOST);
            }
        }
    }

    /// Longer handshakes are slow.
    fn slow(&self) -> Duration {
        TOLERABLE.max(self.calm.unwrap_or_default() * TOLERANCE)
    }

    fn judge(&mut self, now: Instant) {
        let mut window = std::mem::replace(&mut self.window, Window::new(now));
        let took = window.median();
        self.is_slow = took > self.slow();
        if window.most_wanted as f64 <= self.least && took < HANGS {
            // Slow handshakes become the calm time only gradually.
            let took = took.min(self.slow());
            let calm = self.calm.unwrap_or(took);
            self.calm = Some(calm.mul_f64(1.0 - CALM_WEIGHT) + took.mul_f64(CALM_WEIGHT));
        }
        if self.is_slow {
            let gradient = (self.slow().as_secs_f64() / took.as_secs_f64()).max(STEEPEST);
            let bound = self.bound * gradient + self.bound.sqrt();
            self.bound = (self.bound * (1.0 - WEIGHT) + bound * WEIGHT).clamp(self.least, self.bound);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PROCESSORS: usize = 2;
    const LEAST: usize = 2 * PROCESSORS;
    const MS: Duration = Duration::from_millis(1);

    /// A number of clients, each of whose handshakes takes `cost` of a CPU, as many at once as the bound allows.
    fn crowd(limiter: &mut Limiter, now: &mut Instant, clients: usize, cost: Duration, period: Duration) {
        let until = *now + period;
        while *now < until {
            let bound = limiter.bound(*now);
            let in_flight = bound.min(clients);
            let took = cost * in_flight.div_ceil(PROCESSORS) as u32;
            *now += cost / PROCESSORS as u32;
            limiter.record(took, clients, in_flight >= bound, *now);
        }
    }

    /// One that is not young any more.
    fn grown() -> (Limiter, Instant) {
        let start = Instant::now();
        (Limiter::new(PROCESSORS, start), start + 60 * DOUBLES)
    }

    #[test]
    fn in_calm_no_client_ever_waits() {
        let (mut limiter, mut now) = grown();
        // As a benchmark does: 100 at once, answered within a millisecond.
        crowd(&mut limiter, &mut now, 100, MS / 100, Duration::from_secs(1));
        assert!(limiter.bound(now) > 100 && !limiter.is_slow, "{limiter:?}");
    }

    #[test]
    fn a_crowd_is_held_to_what_the_processors_do() {
        let (mut limiter, mut now) = grown();
        crowd(&mut limiter, &mut now, 5000, 2 * MS, Duration::from_secs(30));
        let bound = limiter.bound(now);
        // As many as are computed in a tolerable time.
        let most = PROCESSORS * TOLERABLE.as_millis() as usize / 2;
        assert!((LEAST..=most + most / 10).contains(&bound), "{bound}: {limiter:?}");
        // Dearer ones, as of a CPU that others use.
        crowd(&mut limiter, &mut now, 5000, 50 * MS, Duration::from_secs(30));
        let under_load = limiter.bound(now);
        assert!(under_load <= bound, "{under_load} after {bound}: {limiter:?}");
        crowd(&mut limiter, &mut now, 100, MS / 100, Duration::from_secs(5));
        assert!(limiter.bound(now) > 100, "calm again: {limiter:?}");
    }

    #[test]
    fn a_storm_is_never_taken_for_calm() {
        let (mut limiter, mut now) = grown();
        crowd(&mut limiter, &mut now, 1, 2 * MS, Duration::from_secs(10));
        let calm = limiter.calm;
        // The CPUs are busy otherwise, so that handshakes are slow even at the least bound.
        for _ in 0..6000 {
            now += 10 * MS;
            limiter.record(100 * MS, 1000, true, now);
        }
        assert_eq!((limiter.bound(now), limiter.calm), (LEAST, calm));
    }

    #[test]
    fn slow_is_calm_where_no_client_waits() {
        let (mut limiter, mut now) = grown();
        crowd(&mut limiter, &mut now, 1, 50 * MS, Duration::from_secs(60));
        assert!(limiter.calm >= Some(45 * MS) && !limiter.is_slow, "{limiter:?}");
    }

    #[test]
    fn a_young_instance_begins_low_and_doubles() {
        let start = Instant::now();
        let mut limiter = Limiter { calm: Some(12 * MS), ..Limiter::new(PROCESSORS, start) };
        for doubled in 0..4 {
            let mut now = start + doubled * DOUBLES;
            for _ in 0..1000 {
                assert!(limiter.bound(now) <= LEAST << doubled);
                limiter.record(20 * MS, 1000, true, now);
                now += 4 * MS;
            }
            assert_eq!(limiter.bound(now), LEAST << doubled);
        }
    }

    #[test]
    fn a_young_instance_that_is_fast_is_as_any() {
        let start = Instant::now();
        let (mut limiter, mut now) = (Limiter::new(PROCESSORS, start), start);
        crowd(&mut limiter, &mut now, 100, MS / 100, MS * 100);
        assert!(limiter.bound(now) > 100, "{limiter:?}");
    }

    proptest! {
        #[test]
        fn the_bound_is_never_under_twice_the_processors(
            cpus in 0..64usize,
            openings in prop::collection::vec((0..20_000u64, 0..3000u64, 0..1000usize, any::<bool>()), 0..500),
        ) {
            let mut now = Instant::now();
            let mut limiter = Limiter::new(cpus, now);
            for (took, pause, wanted, reached) in openings {
                now += Duration::from_millis(pause);
                limiter.record(Duration::from_millis(took), wanted, reached, now);
                let bound = limiter.bound(now);
                prop_assert!(bound >= 2 * cpus.max(1) && bound as f64 <= MOST.max(2.0 * cpus as f64), "{limiter:?}");
            }
        }
    }
}
