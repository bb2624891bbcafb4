//! Decides when the node's own slice is in the Service `kubernetes`: a pure rule.
//!
//! With several control-plane nodes kube-apiserver's own reconciler is enough: no connection is
//! lost while one address is missing, and a dead node's address is dropped after 15 s and a round
//! of 10 s. A slice that stayed would keep a dead node longer. So berth's slice exists only while
//! the Service would otherwise have no address, or only this node's. kube-proxy merges a Service's
//! slices, and keeps either of two entries for one address, so the slice is removed, and never
//! marked unready.

use berth_node::terms::Phase;
use std::time::Duration;

/// Time for which another node's address must have been in the Service before the slice is removed:
/// longer than the 25 s for which a dead node's address may stay.
const OTHERS: Duration = Duration::from_secs(30);

/// Time for which the addresses of the last read are valid if further reads fail.
const UNREAD: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceObservation {
    pub phase: Phase,
    /// True if a sibling has joined and its instance is ready.
    pub sibling: bool,
    /// True if the shim is about to leave, or has left.
    pub withdrawn: bool,
    /// True if kube-apiserver's slice names another node; `None` if unknown.
    pub others: Option<bool>,
}

/// The wanted state of the slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceDecision {
    Present,
    Absent,
    /// Leave the slice as it is, because a sibling decides, or too little is known.
    Unchanged,
}

/// Remembers since when another node has been named, and the time of the last such read.
#[derive(Debug, Default)]
pub struct Rule {
    others: Option<(Duration, Duration)>,
}

impl Rule {
    /// Decides at a time of a monotonic clock.
    pub fn decide(&mut self, now: Duration, observed: SliceObservation) -> SliceDecision {
        self.others = match observed.others {
            Some(true) => Some((self.others.map_or(now, |(since, _)| since), now)),
            Some(false) => None,
            None => self.others.filter(|(_, read)| now < *read + UNREAD),
        };
        match (observed.phase, observed.others) {
            _ if observed.withdrawn && !observed.sibling => SliceDecision::Absent,
            // Nothing was reachable for longer than clients are held.
            (Phase::Refusing, _) if !observed.sibling => SliceDecision::Absent,
            (Phase::Joined, Some(false)) => SliceDecision::Present,
            (Phase::Joined, Some(true)) if self.has_lasted(now) => SliceDecision::Absent,
            _ => SliceDecision::Unchanged,
        }
    }

    fn has_lasted(&self, now: Duration) -> bool {
        self.others.is_some_and(|(since, _)| now >= since + OTHERS)
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
        // The wait for another node starts again from zero.
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
        /// For every history: a lone shim that leaves or refuses is not named. Only a shim that has
        /// joined writes. The slice of a serving shim is removed only after another node was named
        /// for the whole time, as far as it could be read.
        #[test]
        fn the_slice_is_absent_or_present_only_for_its_reasons(steps in prop::collection::vec((0u64..20, any_observation()), 1..40)) {
            let (mut rule, mut now, mut unread, mut named_for) = (Rule::default(), 0, 0, None);
            for (pause, observed) in steps {
                now += pause;
                unread += pause;
                named_for = match (observed.others, named_for) {
                    (Some(true), Some(lasting)) => Some(lasting + pause),
                    (Some(true), None) => Some(0),
                    (None, Some(lasting)) if unread < UNREAD.as_secs() => Some(lasting + pause),
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
