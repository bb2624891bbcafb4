//! Rise and fall: what consecutive probe answers say about an instance. Pure; it knows no time.

use berth_node::terms::Standing;

/// What was seen of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observation {
    /// The probe was answered as it should be.
    Pass,
    /// The probe was answered otherwise or not at all, but the port is there.
    Fail,
    /// As [`Observation::Fail`], and it stays so until somebody changes something: the apiserver does not know who asks, or shows a
    /// certificate that does not fit.
    Rejected,
    /// The port refused a connection: nobody listens.
    Refused,
}

/// The state machine of one instance.
#[derive(Debug, Clone)]
pub struct Health {
    rise: u32,
    fall: u32,
    standing: Standing,
    /// Consecutive answers that speak against the standing.
    row: u32,
}

impl Health {
    /// A newcomer: unready until `rise` consecutive probes passed. Numbers below 1 count as 1.
    #[must_use]
    pub fn new(rise: u32, fall: u32) -> Self {
        Self { rise: rise.max(1), fall: fall.max(1), standing: Standing::Unready, row: 0 }
    }

    /// What the instance is good for now.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Whether it is on its way to ready: then the next probe follows at once.
    #[must_use]
    pub fn is_rising(&self) -> bool {
        self.standing != Standing::Ready && self.row > 0
    }

    /// Takes in what was seen; returns the new standing.
    pub fn observe(&mut self, seen: Observation) -> Standing {
        let (against, needed, becomes) = match (self.standing, seen) {
            // Whoever refuses starts anew: what listens there next is another process.
            (_, Observation::Refused) => {
                self.become_(Standing::Unready);
                return self.standing;
            }
            (Standing::Ready, Observation::Fail | Observation::Rejected) => (true, self.fall, Standing::Failing),
            (Standing::Unready | Standing::Failing, Observation::Pass) => (true, self.rise, Standing::Ready),
            (standing, _) => (false, 0, standing),
        };
        self.row = if against { self.row.saturating_add(1) } else { 0 };
        if against && self.row >= needed {
            self.become_(becomes);
        }
        self.standing
    }

    fn become_(&mut self, standing: Standing) {
        self.standing = standing;
        self.row = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seen() -> impl Strategy<Value = Observation> {
        prop_oneof![4 => Just(Observation::Pass), 4 => Just(Observation::Fail), 1 => Just(Observation::Refused)]
    }

    proptest! {
        /// The machine against the sentence that describes it, read off the whole history.
        #[test]
        fn standing_follows_from_history(rise in 1u32..5, fall in 1u32..5, history in prop::collection::vec(seen(), 0..60)) {
            let mut health = Health::new(rise, fall);
            for end in 0..history.len() {
                health.observe(history[end]);
                let since_refusal = history[..=end].rsplit(|s| *s == Observation::Refused).next().unwrap_or_default();
                prop_assert_eq!(health.standing(), by_definition(since_refusal, rise, fall), "after {:?}", &history[..=end]);
            }
        }

        #[test]
        fn never_ready_without_rise_passes_in_a_row(rise in 1u32..5, history in prop::collection::vec(seen(), 0..60)) {
            let mut health = Health::new(rise, 3);
            let mut was = Standing::Unready;
            for (i, seen) in history.iter().enumerate() {
                let now = health.observe(*seen);
                if was != Standing::Ready && now == Standing::Ready {
                    let rise = rise as usize;
                    prop_assert!(i + 1 >= rise && history[i + 1 - rise..=i].iter().all(|s| *s == Observation::Pass));
                }
                was = now;
            }
        }
    }

    /// Ready iff the last full row of passes is younger than the last full row of fails.
    fn by_definition(history: &[Observation], rise: u32, fall: u32) -> Standing {
        let last_row = |of: Observation, length: u32| {
            let length = length as usize;
            (length..=history.len()).rev().find(|end| history[end - length..*end].iter().all(|s| *s == of))
        };
        match (last_row(Observation::Pass, rise), last_row(Observation::Fail, fall)) {
            (None, _) => Standing::Unready,
            (Some(pass), Some(fail)) if fail > pass => Standing::Failing,
            (Some(_), _) => Standing::Ready,
        }
    }
}
