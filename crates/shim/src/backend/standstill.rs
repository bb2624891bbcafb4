//! What shows that an instance stands still: handshakes of clients are in flight there, and none ends. A port that takes connections
//! shows nothing, for the kernel takes them; and a slow instance ends handshakes, however long each of them is.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Longest time between two looks, and the fewest looks for which none may end.
const LOOK: Duration = Duration::from_millis(250);
const LOOKS: u32 = 8;

/// Handshakes of this shim's clients at an instance: counted by all relaying threads, without a lock or a clock.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    in_flight: AtomicU32,
    ended: AtomicU32,
}

impl Handshakes {
    /// A ClientHello that is whole goes to the instance.
    pub(crate) fn begin(&self) -> Handshake<'_> {
        self.in_flight.fetch_add(1, Relaxed);
        Handshake(self)
    }
}

/// A handshake in flight, until it is dropped.
pub(crate) struct Handshake<'a>(&'a Handshakes);

impl Handshake<'_> {
    /// The instance answered or ended it: it moves.
    pub(crate) fn end(self) {
        self.0.ended.fetch_add(1, Relaxed);
    }
}

impl Drop for Handshake<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// For how many looks handshakes were in flight and none ended. Time in which nobody looked does not count: this process may
/// have stood still itself.
#[derive(Debug)]
pub(super) struct Standstill {
    /// Time between two looks.
    pub(super) look: Duration,
    looks: u32,
    ended: u32,
    /// Looks at which at least one was in flight, and two.
    still: [u32; 2],
}

impl Standstill {
    /// For one in which none ends for so long.
    pub(super) fn new(timeout: Duration) -> Self {
        let looks = LOOKS.max(timeout.as_millis().div_ceil(LOOK.as_millis()).try_into().unwrap_or(u32::MAX));
        Self { look: timeout / looks, looks, ended: 0, still: [0; 2] }
    }

    pub(super) fn look(&mut self, handshakes: &Handshakes) {
        let (in_flight, ended) = (handshakes.in_flight.load(Relaxed), handshakes.ended.load(Relaxed));
        let moved = std::mem::replace(&mut self.ended, ended) != ended;
        for (least, still) in (1..).zip(&mut self.still) {
            *still = if moved || in_flight < least { 0 } else { still.saturating_add(1) };
        }
    }

    /// A client that says something odd may wait alone.
    pub(super) fn is_suspect(&self) -> bool {
        self.still[0] > self.looks
    }

    /// Two wait, or one and the last probe failed. It begins anew with that.
    pub(super) fn is_certain(&mut self, is_well: bool) -> bool {
        let is = self.still[1] > self.looks || self.is_suspect() && !is_well;
        if is {
            self.still = [0; 2];
        }
        is
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(standstill: &mut Standstill, handshakes: &Handshakes, times: u32) {
        (0..times).for_each(|_| standstill.look(handshakes));
    }

    #[test]
    fn two_that_wait_or_one_and_a_failed_probe() {
        let mut now = Standstill::new(Duration::from_secs(2));
        let (handshakes, all) = (Handshakes::default(), LOOKS + 1);
        looks(&mut now, &handshakes, 2 * all);
        assert!(!now.is_suspect() && !now.is_certain(false), "nobody waits");
        let one = handshakes.begin();
        looks(&mut now, &handshakes, all - 1);
        assert!(!now.is_suspect());
        looks(&mut now, &handshakes, 1);
        assert!(now.is_suspect() && !now.is_certain(true));
        let two = handshakes.begin();
        looks(&mut now, &handshakes, all - 1);
        assert!(!now.is_certain(true), "the second has just begun");
        looks(&mut now, &handshakes, 1);
        assert!(now.is_certain(true) && !now.is_certain(true), "said once");
        drop(two);
        looks(&mut now, &handshakes, all);
        assert!(!now.is_certain(true) && now.is_certain(false));
        one.end();
        looks(&mut now, &handshakes, all);
        assert!(!now.is_certain(false));
    }

    #[test]
    fn one_that_ends_in_time_is_enough_and_one_that_leaves_is_not() {
        let mut now = Standstill::new(Duration::from_secs(2));
        let handshakes = Handshakes::default();
        let _storm: Vec<_> = (0..100).map(|_| handshakes.begin()).collect();
        for _ in 0..50 {
            looks(&mut now, &handshakes, LOOKS);
            handshakes.begin().end();
            assert!(!now.is_certain(false));
        }
        for _ in 0..=LOOKS + 1 {
            drop(handshakes.begin());
            now.look(&handshakes);
        }
        assert!(now.is_certain(true));
    }

    #[test]
    fn it_is_noticed_within_a_second_of_any_timeout() {
        for millis in [1, 100, 500, 2000, 10_000, 3_600_000] {
            let timeout = Duration::from_millis(millis);
            let Standstill { look, looks, .. } = Standstill::new(timeout);
            assert!(look * looks <= timeout && look * (looks + 2) <= timeout + Duration::from_secs(1), "{timeout:?}");
            assert!(look * (looks + 1) >= timeout);
        }
    }
}
