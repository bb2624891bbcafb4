//! When the node's own slice is in the Service `kubernetes`: a pure rule.
//!
//! With several control-plane nodes kube-apiserver's own reconciler is enough: nothing is lost while one address is
//! missing, and it drops a dead node's after 15 s and a round of 10 s. A slice that stayed would hold a dead node
//! longer. So it exists only while the Service would otherwise have no address, or this node's alone. kube-proxy merges
//! a Service's slices and keeps either of two entries for one address, so it is removed, and never marked unready.

use berth_node::terms::Phase;
use std::time::Duration;

/// How long another node's address must have been there before the slice goes: longer than the 25 s for which a dead
/// node's may be there still.
const OTHERS: Duration = Duration::from_secs(30);

/// How long the addresses that were read last hold where they cannot be read.
const UNREAD: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    pub phase: Phase,
    /// A sibling is joined, and its instance is ready.
    pub sibling: bool,
    /// The shim is about to leave, or has left.
    pub withdrawn: bool,
    /// Whether kube-apiserver's slice names another node; `None` where that is not known.
    pub others: Option<bool>,
}

/// What the slice should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    Present,
    Absent,
    /// Either: a sibling decides, or too little is known.
    AsItIs,
}

/// Remembers since when another node is named, and when that was read last.
#[derive(Debug, Default)]
pub struct Rule {
    others: Option<(Duration, Duration)>,
}

impl Rule {
    /// By a clock that never goes back.
    pub fn decide(&mut self, now: Duration, sight: Sight) -> Want {
        self.others = match sight.others {
            Some(true) => Some((self.others.map_or(now, |(since, _)| since), now)),
            Some(false) => None,
            None => self.others.filter(|(_, read)| now < *read + UNREAD),
        };
        match (sight.phase, sight.others) {
            _ if sight.withdrawn && !sight.sibling => Want::Absent,
            // Nothing was reachable for longer than clients are held.
            (Phase::Refusing, _) if !sight.sibling => Want::Absent,
            (Phase::Joined, Some(false)) => Want::Present,
            (Phase::Joined, Some(true)) if self.lasted(now) => Want::Absent,
            _ => Want::AsItIs,
        }
    }

    fn lasted(&self, now: Duration) -> bool {
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

    const CALM: Sight = Sight {
        phase: Phase::Joined,
        sibling: false,
        withdrawn: false,
        others: Some(false),
    };

    #[test]
    fn a_node_that_is_alone_is_named_and_goes_when_another_has_been_there() {
        let mut rule = Rule::default();
        let named = Sight {
            others: Some(true),
            ..CALM
        };
        assert_eq!(rule.decide(seconds(0), CALM), Want::Present);
        assert_eq!(rule.decide(seconds(10), named), Want::AsItIs);
        assert_eq!(rule.decide(seconds(39), named), Want::AsItIs);
        assert_eq!(rule.decide(seconds(40), named), Want::Absent);
        assert_eq!(rule.decide(seconds(41), CALM), Want::Present);
        // From the start.
        assert_eq!(rule.decide(seconds(50), named), Want::AsItIs);
    }

    #[test]
    fn addresses_that_were_read_hold_for_ten_seconds() {
        let named = Sight {
            others: Some(true),
            ..CALM
        };
        for (pause, want) in [(9, Want::Absent), (10, Want::AsItIs)] {
            let mut rule = Rule::default();
            rule.decide(seconds(0), named);
            rule.decide(seconds(25), named);
            rule.decide(
                seconds(25 + pause),
                Sight {
                    others: None,
                    ..CALM
                },
            );
            assert_eq!(
                rule.decide(seconds(36), named),
                want,
                "after {pause} s without an answer"
            );
        }
    }

    fn sights() -> impl Strategy<Value = Sight> {
        let others = prop_oneof![Just(None), Just(Some(true)), Just(Some(false))];
        (0..Phase::ALL.len(), any::<bool>(), any::<bool>(), others).prop_map(
            |(phase, sibling, withdrawn, others)| Sight {
                phase: Phase::ALL[phase],
                sibling,
                withdrawn,
                others,
            },
        )
    }

    proptest! {
        /// Whatever came before: a lone shim that goes, or refuses, is not named; no shim writes that has not joined; and the
        /// slice of one that serves goes only after another was named all the while, as far as it could be read.
        #[test]
        fn the_promise_holds(steps in prop::collection::vec((0u64..20, sights()), 1..40)) {
            let (mut rule, mut now, mut unread, mut named_for) = (Rule::default(), 0, 0, None);
            for (pause, sight) in steps {
                now += pause;
                unread += pause;
                named_for = match (sight.others, named_for) {
                    (Some(true), Some(lasting)) => Some(lasting + pause),
                    (Some(true), None) => Some(0),
                    (None, Some(lasting)) if unread < UNREAD.as_secs() => Some(lasting + pause),
                    _ => None,
                };
                unread = if sight.others.is_some() { 0 } else { unread };
                let want = rule.decide(seconds(now), sight);
                if !sight.sibling && (sight.withdrawn || sight.phase == Phase::Refusing) {
                    prop_assert_eq!(want, Want::Absent);
                } else if sight.phase != Phase::Joined || sight.others.is_none() {
                    prop_assert_eq!(want, Want::AsItIs);
                } else if want == Want::Absent {
                    prop_assert!(named_for >= Some(30));
                } else if want == Want::Present {
                    prop_assert_eq!(sight.others, Some(false));
                }
            }
        }
    }
}
