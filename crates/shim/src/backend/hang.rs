//! Detects an instance that hangs: TLS handshakes of clients are in flight, and none ends. Accepted
//! connections prove nothing, because the kernel accepts connections. A slow instance ends
//! handshakes, however long each takes.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Longest time between two samples of the handshakes, and how many samples without an ended
/// handshake show a hang, at least.
const MAX_INTERVAL: Duration = Duration::from_millis(250);
const MIN_SAMPLES: u32 = 8;

/// Numbers of TLS handshakes that this shim's clients have at an instance. All relaying threads
/// count here, without a lock or a clock.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    in_flight: AtomicU32,
    ended: AtomicU32,
}

impl Handshakes {
    /// Counts a handshake as in flight: a complete ClientHello is sent to the instance.
    pub(crate) fn begin_handshake(&self) -> Handshake<'_> {
        self.in_flight.fetch_add(1, Relaxed);
        Handshake(self)
    }
}

/// A handshake in flight, until dropped.
pub(crate) struct Handshake<'a>(&'a Handshakes);

impl Handshake<'_> {
    /// Counts the handshake as ended: the instance answered or ended the connection.
    pub(crate) fn end_handshake(self) {
        self.0.ended.fetch_add(1, Relaxed);
    }
}

impl Drop for Handshake<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Finds out whether an instance hangs. Counts the samples in which handshakes were in flight and
/// none ended. Time without samples does not count, because this process may have been stopped.
#[derive(Debug)]
pub(super) struct HangDetector {
    /// Time between two samples.
    pub(super) interval: Duration,
    samples: u32,
    ended: u32,
    /// Number of samples in which at least one handshake was in flight, and number of samples in
    /// which at least two handshakes were in flight.
    still: [u32; 2],
}

impl HangDetector {
    /// Makes a detector for which a hang is certain when no handshake has ended for `timeout`.
    pub(super) fn new(timeout: Duration) -> Self {
        let samples = MIN_SAMPLES.max(
            timeout
                .as_millis()
                .div_ceil(MAX_INTERVAL.as_millis())
                .try_into()
                .unwrap_or(u32::MAX),
        );
        Self {
            interval: timeout / samples,
            samples,
            ended: 0,
            still: [0; 2],
        }
    }

    pub(super) fn sample_handshakes(&mut self, handshakes: &Handshakes) {
        let (in_flight, ended) = (
            handshakes.in_flight.load(Relaxed),
            handshakes.ended.load(Relaxed),
        );
        let moved = std::mem::replace(&mut self.ended, ended) != ended;
        for (least, still) in (1..).zip(&mut self.still) {
            *still = if moved || in_flight < least {
                0
            } else {
                still.saturating_add(1)
            };
        }
    }

    /// True if at least one client has waited for too long. A single client may wait because of the
    /// bytes that it sent.
    pub(super) fn is_suspect(&self) -> bool {
        self.still[0] > self.samples
    }

    /// True if two clients have waited for too long, or if one client has and the last probe
    /// failed. Counting starts over then.
    pub(super) fn is_certain(&mut self, is_well: bool) -> bool {
        let is = self.still[1] > self.samples || self.is_suspect() && !is_well;
        if is {
            self.still = [0; 2];
        }
        is
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_samples(detector: &mut HangDetector, handshakes: &Handshakes, times: u32) {
        (0..times).for_each(|_| detector.sample_handshakes(handshakes));
    }

    #[test]
    fn two_waiting_clients_or_one_and_a_failed_probe_mean_a_hang() {
        let mut now = HangDetector::new(Duration::from_secs(2));
        let (handshakes, all) = (Handshakes::default(), MIN_SAMPLES + 1);
        take_samples(&mut now, &handshakes, 2 * all);
        assert!(
            !now.is_suspect() && !now.is_certain(false),
            "no client waits"
        );
        let one = handshakes.begin_handshake();
        take_samples(&mut now, &handshakes, all - 1);
        assert!(!now.is_suspect());
        take_samples(&mut now, &handshakes, 1);
        assert!(now.is_suspect() && !now.is_certain(true));
        let two = handshakes.begin_handshake();
        take_samples(&mut now, &handshakes, all - 1);
        assert!(!now.is_certain(true), "the second has just begun");
        take_samples(&mut now, &handshakes, 1);
        assert!(
            now.is_certain(true) && !now.is_certain(true),
            "reported once"
        );
        drop(two);
        take_samples(&mut now, &handshakes, all);
        assert!(!now.is_certain(true) && now.is_certain(false));
        one.end_handshake();
        take_samples(&mut now, &handshakes, all);
        assert!(!now.is_certain(false));
    }

    #[test]
    fn one_ended_handshake_disproves_a_hang_and_an_abandoned_one_does_not() {
        let mut now = HangDetector::new(Duration::from_secs(2));
        let handshakes = Handshakes::default();
        let _storm: Vec<_> = (0..100).map(|_| handshakes.begin_handshake()).collect();
        for _ in 0..50 {
            take_samples(&mut now, &handshakes, MIN_SAMPLES);
            handshakes.begin_handshake().end_handshake();
            assert!(!now.is_certain(false));
        }
        for _ in 0..=MIN_SAMPLES + 1 {
            drop(handshakes.begin_handshake());
            now.sample_handshakes(&handshakes);
        }
        assert!(now.is_certain(true));
    }

    #[test]
    fn a_hang_is_detected_within_a_second_of_any_timeout() {
        for millis in [1, 100, 500, 2000, 10_000, 3_600_000] {
            let timeout = Duration::from_millis(millis);
            let HangDetector {
                interval, samples, ..
            } = HangDetector::new(timeout);
            assert!(
                interval * samples <= timeout
                    && interval * (samples + 2) <= timeout + Duration::from_secs(1),
                "{timeout:?}"
            );
            assert!(interval * (samples + 1) >= timeout);
        }
    }
}
