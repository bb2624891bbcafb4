//! Rise and fall: the health of an instance by consecutive probe results. Pure, without a clock.

use berth_node::terms::InstanceHealth;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observation {
    /// The probe got the expected answer.
    Pass,
    /// The probe got another answer or none, but the port is open.
    Fail,
    /// Like [`Observation::Fail`], but this lasts until a configuration changes. The apiserver does
    /// not accept the probe's credentials, or the probe does not accept the apiserver's TLS (its
    /// certificate, its algorithms).
    Rejected,
    /// Handshakes of clients are in flight, and none ends: the instance is stuck, whatever the
    /// result of the probe.
    Hangs,
    /// The port refused a connection: nothing listens.
    Refused,
}

/// Computes the health of an instance from observations.
#[derive(Debug, Clone)]
pub(crate) struct HealthTracker {
    rise: u32,
    fall: u32,
    health: InstanceHealth,
    /// Number of consecutive observations that contradict `health`.
    against: u32,
}

impl HealthTracker {
    /// Makes the state of a new instance: unready until `rise` consecutive probes passed. Numbers
    /// below 1 count as 1.
    pub(crate) fn new(rise: u32, fall: u32) -> Self {
        Self {
            rise,
            fall,
            health: InstanceHealth::Unready,
            against: 0,
        }
    }

    pub(crate) fn health(&self) -> InstanceHealth {
        self.health
    }

    /// True if the instance is not ready, but its last probe passed. The next probe follows at
    /// once.
    pub(crate) fn is_rising(&self) -> bool {
        self.health != InstanceHealth::Ready && self.against > 0
    }

    /// True if the instance is ready and its last result was good.
    pub(crate) fn is_well(&self) -> bool {
        self.health == InstanceHealth::Ready && self.against == 0
    }

    pub(crate) fn observe(&mut self, seen: Observation) -> InstanceHealth {
        let (needed, becomes) = match (self.health, seen) {
            (InstanceHealth::Ready, Observation::Fail | Observation::Rejected) => {
                (self.fall, InstanceHealth::Failing)
            }
            (InstanceHealth::Ready, Observation::Hangs) => (0, InstanceHealth::Failing),
            (InstanceHealth::Unready | InstanceHealth::Failing, Observation::Pass) => {
                (self.rise, InstanceHealth::Ready)
            }
            // Nothing listens, so the next process at the port is a new one. The instance starts
            // again from unready.
            (_, Observation::Refused) => (0, InstanceHealth::Unready),
            (health, _) => (0, health),
        };
        self.against = self.against.saturating_add(1);
        if self.against >= needed {
            (self.health, self.against) = (becomes, 0);
        }
        self.health
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_observation() -> impl Strategy<Value = Observation> {
        prop_oneof![4 => Just(Observation::Pass), 4 => Just(Observation::Fail), 1 => Just(Observation::Refused)]
    }

    proptest! {
        /// Compares the machine with its definition in words, applied to the whole history.
        #[test]
        fn health_follows_from_history(rise in 1u32..5, fall in 1u32..5, history in prop::collection::vec(any_observation(), 0..60)) {
            let mut health = HealthTracker::new(rise, fall);
            for end in 0..history.len() {
                health.observe(history[end]);
                let since_refusal = history[..=end].rsplit(|s| *s == Observation::Refused).next().unwrap_or_default();
                prop_assert_eq!(health.health(), health_by_definition(since_refusal, rise, fall), "after {:?}", &history[..=end]);
            }
        }
    }

    /// The next probe follows at once while the instance rises; a well instance is probed less
    /// often.
    #[test]
    fn an_instance_rises_from_its_first_pass_and_is_well_until_its_first_fail() {
        use Observation::{Fail, Hangs, Pass, Refused, Rejected};
        let rows: [(&[_], _); 9] = [
            (&[], (false, false)),
            (&[Fail], (false, false)),
            (&[Pass], (true, false)),
            (&[Pass, Pass], (false, true)),
            (&[Pass, Pass, Fail], (false, false)),
            (&[Pass, Pass, Rejected, Pass], (false, true)),
            (&[Pass, Pass, Hangs], (false, false)),
            (&[Pass, Pass, Fail, Fail, Pass], (true, false)),
            (&[Pass, Pass, Refused], (false, false)),
        ];
        for (history, expected) in rows {
            let mut health = HealthTracker::new(2, 2);
            for seen in history {
                health.observe(*seen);
            }
            assert_eq!(
                (health.is_rising(), health.is_well()),
                expected,
                "{history:?}"
            );
        }
    }

    /// Returns ready if and only if the last `rise` consecutive passes are younger than the last
    /// `fall` consecutive fails.
    fn health_by_definition(history: &[Observation], rise: u32, fall: u32) -> InstanceHealth {
        let last_run = |of: Observation, length: u32| {
            let length = length as usize;
            (length..=history.len())
                .rev()
                .find(|end| history[end - length..*end].iter().all(|s| *s == of))
        };
        match (
            last_run(Observation::Pass, rise),
            last_run(Observation::Fail, fall),
        ) {
            (None, _) => InstanceHealth::Unready,
            (Some(pass), Some(fail)) if fail > pass => InstanceHealth::Failing,
            (Some(_), _) => InstanceHealth::Ready,
        }
    }
}
