//! Decides when the node's slice is in the Service `kubernetes`, without I/O.
//!
//! With several control-plane nodes kube-apiserver's own reconciler is enough: no connection is
//! lost while one address is missing, and a dead node's address is dropped after 15 s and a round
//! of 10 s. A slice that stayed would keep a dead node longer. So berth's slice exists only while
//! the Service would otherwise have no address, or only this node's address. The slice is removed
//! and never marked unready: if two slices contain the same address, kube-proxy uses only one of
//! the two entries, and this may be the unready entry.

use berth_node::terms::Phase;
use std::time::Duration;

/// Time for which another node must have been in the Service before berth removes its own slice.
/// The time is longer than the 25 s for which a dead node's address may stay.
const OTHERS_DURATION: Duration = Duration::from_secs(30);

/// Time for which the last read of the slice is valid if later reads fail.
const UNREAD_DURATION: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceObservation {
    pub phase: Phase,
    /// True if a sibling has joined and its instance is ready.
    pub sibling: bool,
    /// True if the shim is about to leave, or has left.
    pub withdrawn: bool,
    /// True if kube-apiserver's slice contains another node. `None` if the slice could not be read.
    pub others: Option<bool>,
}

/// The decision whether the node's slice should be in the Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceDecision {
    Present,
    Absent,
    /// Leave the slice as it is, because a sibling decides, or because too little is known.
    Unchanged,
}

/// Remembers how long kube-apiserver's slice has named another node, and when a read last showed
/// another node.
#[derive(Debug, Default)]
pub struct Rule {
    others: Option<(Duration, Duration)>,
}

impl Rule {
    /// Decides from what is observed at `now`, a time of a monotonic clock.
    pub fn decide(&mut self, now: Duration, observed: SliceObservation) -> SliceDecision {
        self.others = match observed.others {
            Some(true) => Some((self.others.map_or(now, |(since, _)| since), now)),
            Some(false) => None,
            None => self
                .others
                .filter(|(_, read)| now < *read + UNREAD_DURATION),
        };
        match (observed.phase, observed.others) {
            _ if observed.withdrawn && !observed.sibling => SliceDecision::Absent,
            // The shim refuses clients, because no instance has been reachable for longer than
            // `--hold`.
            (Phase::Refusing, _) if !observed.sibling => SliceDecision::Absent,
            (Phase::Joined, Some(false)) => SliceDecision::Present,
            (Phase::Joined, Some(true)) if self.others_were_named_for_long(now) => {
                SliceDecision::Absent
            }
            _ => SliceDecision::Unchanged,
        }
    }

    fn others_were_named_for_long(&self, now: Duration) -> bool {
        self.others
            .is_some_and(|(since, _)| now >= since + OTHERS_DURATION)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    const CALM: SliceObservation = SliceObservation {
        phase: Phase::Joined,
        sibling: false,
        withdrawn: false,
        others: Some(false),
    };

    #[test]
    fn the_slice_is_present_for_a_lone_node_until_another_was_named_for_long() {
        let mut rule = Rule::default();
        let named = SliceObservation {
            others: Some(true),
            ..CALM
        };
        assert_eq!(rule.decide(seconds(0), CALM), SliceDecision::Present);
        assert_eq!(rule.decide(seconds(10), named), SliceDecision::Unchanged);
        assert_eq!(rule.decide(seconds(39), named), SliceDecision::Unchanged);
        assert_eq!(rule.decide(seconds(40), named), SliceDecision::Absent);
        assert_eq!(rule.decide(seconds(41), CALM), SliceDecision::Present);
        // kube-apiserver's slice named no other node meanwhile, so the 30 s begin again.
        assert_eq!(rule.decide(seconds(50), named), SliceDecision::Unchanged);
    }

    #[test]
    fn addresses_of_the_last_read_are_valid_for_ten_seconds() {
        let named = SliceObservation {
            others: Some(true),
            ..CALM
        };
        for (pause, decision) in [(9, SliceDecision::Absent), (10, SliceDecision::Unchanged)] {
            let mut rule = Rule::default();
            rule.decide(seconds(0), named);
            rule.decide(seconds(25), named);
            rule.decide(
                seconds(25 + pause),
                SliceObservation {
                    others: None,
                    ..CALM
                },
            );
            assert_eq!(
                rule.decide(seconds(36), named),
                decision,
                "after {pause} s without an answer"
            );
        }
    }

    fn any_observation() -> impl Strategy<Value = SliceObservation> {
        let others = prop_oneof![Just(None), Just(Some(true)), Just(Some(false))];
        (0..Phase::ALL.len(), any::<bool>(), any::<bool>(), others).prop_map(
            |(phase, sibling, withdrawn, others)| SliceObservation {
                phase: Phase::ALL[phase],
                sibling,
                withdrawn,
                others,
            },
        )
    }

    proptest! {
        /// Tries random histories. In each, the slice of a shim that leaves or refuses clients
        /// without a sibling is removed. Any other change needs a shim that has joined. The slice
        /// of a serving shim is removed only after kube-apiserver's slice named another node in
        /// every read for 30 s.
        #[test]
        fn the_slice_is_absent_or_present_only_for_its_reasons(steps in prop::collection::vec((0u64..20, any_observation()), 1..40)) {
            let (mut rule, mut now, mut unread, mut named_for) = (Rule::default(), 0, 0, None);
            for (pause, observed) in steps {
                now += pause;
                unread += pause;
                named_for = match (observed.others, named_for) {
                    (Some(true), Some(lasting)) => Some(lasting + pause),
                    (Some(true), None) => Some(0),
                    (None, Some(lasting)) if unread < UNREAD_DURATION.as_secs() => Some(lasting + pause),
                    _ => None,
                };
                unread = if observed.others.is_some() { 0 } else { unread };
                let decision = rule.decide(seconds(now), observed);
                if !observed.sibling && (observed.withdrawn || observed.phase == Phase::Refusing) {
                    prop_assert_eq!(decision, SliceDecision::Absent);
                } else if observed.phase != Phase::Joined || observed.others.is_none() {
                    prop_assert_eq!(decision, SliceDecision::Unchanged);
                } else if decision == SliceDecision::Absent {
                    prop_assert!(named_for >= Some(30));
                } else if decision == SliceDecision::Present {
                    prop_assert_eq!(observed.others, Some(false));
                }
            }
        }
    }
}
