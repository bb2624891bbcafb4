//! The requests of a client and their times, from a seed. Pure: no clock, no I/O.

use crate::record::event::Protocol;
use fastrand::Rng;
use std::iter;
use std::time::Duration;

/// Average number of requests with one create among them.
const REQUESTS_PER_CREATE: u64 = 20;

/// Average number of requests with one list among them, not counting creates.
const REQUESTS_PER_LIST: u64 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    Get,
    List,
    /// Create an object with a unique name.
    Create,
}

/// A request in the timetable of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// Counts from 0.
    pub(super) number: u64,
    /// The due time, from the client's start.
    pub(super) after: Duration,
    pub(super) ask: Ask,
}

/// The seed of all timetables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seed(pub(super) u64);

impl Seed {
    /// Returns the random numbers of a client, which are independent of those of other clients.
    /// `kind` is a letter for the kind of the client, and `index` is its number among the clients
    /// of the kind.
    fn client_rng(self, kind: u8, index: u64) -> Rng {
        let mut rng = Rng::with_seed(self.0 ^ (u64::from(kind) << 56) ^ index);
        // Generators with similar seeds begin with similar numbers. So the first number only seeds
        // the generator that is returned.
        rng.fork()
    }

    /// New connections at a rate. A second has `rate` equal parts, and in each part a connection
    /// begins at a random point.
    pub(super) fn fresh_entries(self, rate: u32) -> impl Iterator<Item = Entry> + Send {
        let step = Duration::from_secs(1) / rate;
        make_entries(self.client_rng(b'f', 0), step, move |rng| {
            step.mul_f64(rng.f64())
        })
    }

    /// Requests of a kept connection, one every `step`. The first is due at a random point of the
    /// first `step`.
    pub(super) fn kept_entries(
        self,
        index: u64,
        step: Duration,
    ) -> impl Iterator<Item = Entry> + Send {
        let mut rng = self.client_rng(b'k', index);
        let offset = step.mul_f64(rng.f64());
        make_entries(rng, step, move |_| offset)
    }

    /// Returns the random start, below `within`, of a client without a timetable.
    pub(super) fn draw_start(self, kind: u8, index: u64, within: Duration) -> Duration {
        within.mul_f64(self.client_rng(kind, index).f64())
    }
}

fn make_entries(
    mut rng: Rng,
    step: Duration,
    jitter: impl Fn(&mut Rng) -> Duration + Send,
) -> impl Iterator<Item = Entry> + Send {
    let mut number = 0;
    iter::from_fn(move || {
        // The time is a multiple of the step and not a sum of steps, because rounding errors of a
        // sum would change the rate.
        let after = Duration::from_nanos(u64::try_from(step.as_nanos()).ok()?.checked_mul(number)?);
        let entry = Entry {
            number,
            after: after + jitter(&mut rng),
            ask: choose_ask(&mut rng),
        };
        number += 1;
        Some(entry)
    })
}

fn choose_ask(rng: &mut Rng) -> Ask {
    if rng.u64(..REQUESTS_PER_CREATE) == 0 {
        Ask::Create
    } else if rng.u64(..REQUESTS_PER_LIST) == 0 {
        Ask::List
    } else {
        Ask::Get
    }
}

/// The protocol of a client: half of the clients speak HTTP/1.1.
pub(super) fn protocol_of(index: u64) -> Protocol {
    if index.is_multiple_of(2) {
        Protocol::Http1
    } else {
        Protocol::Http2
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The timetables of a load of some seconds: of new connections, and of four kept connections.
    fn all_entries(seed: u64, rate: u32) -> Vec<Vec<Entry>> {
        let seed = Seed(seed);
        let step = Duration::from_millis(100);
        let mut all = vec![seed.fresh_entries(rate).take(500).collect()];
        all.extend((0..4).map(|index| seed.kept_entries(index, step).take(100).collect()));
        all
    }

    proptest! {
        #[test]
        fn the_same_seed_makes_the_same_timetable(seed: u64, rate in 20..=1000_u32) {
            prop_assert_eq!(all_entries(seed, rate), all_entries(seed, rate));
            prop_assert_eq!(Seed(seed).draw_start(b'w', 3, Duration::MAX / 4), Seed(seed).draw_start(b'w', 3, Duration::MAX / 4));
            prop_assert_ne!(all_entries(seed, rate), all_entries(seed.wrapping_add(1), rate));
        }

        #[test]
        fn no_two_clients_have_the_same_timetable(seed: u64) {
            let mut all = all_entries(seed, 100);
            let clients = all.len();
            all.iter_mut().for_each(|entries| entries.truncate(100));
            all.sort_by_key(|entries| entries.iter().map(|e| e.after).collect::<Vec<_>>());
            all.dedup();
            prop_assert_eq!(all.len(), clients);
        }

        #[test]
        fn the_rate_is_kept_and_nothing_overtakes(seed: u64, rate in 20..=1000_u32) {
            let entries: Vec<Entry> = Seed(seed).fresh_entries(rate).take(rate as usize * 2).collect();
            prop_assert!(entries.is_sorted_by_key(|e| e.after));
            let last = entries.last().unwrap();
            prop_assert_eq!(last.number + 1, entries.len() as u64);
            prop_assert!((1.9..=2.0).contains(&last.after.as_secs_f64()), "{:?}", last);
            let share = |ask| entries.iter().filter(|e| e.ask == ask).count() as f64 / entries.len() as f64;
            prop_assert!(share(Ask::Get) > 0.5 && share(Ask::Create) < 0.5);
        }
    }
}
