//! The direct path: how many connections went past the shims, and when a shim steered.

use super::Case;
use crate::data::{Ran, Value};
use crate::event::{Event, EventKind};
use crate::record::Record;
use crate::report::format::percent;
use crate::stamp::Stamp;
use berth_node::ipc::wire::DirectStatus;
use std::collections::BTreeMap;
use std::time::Duration;

/// What was seen of the direct path.
#[derive(Debug, Default)]
struct Steered {
    /// Connections that were steered during the load.
    steered: u64,
    /// When a shim reported that it steers.
    on: Vec<(Stamp, Stamp)>,
    /// What each shim had counted when it was asked last.
    counted: BTreeMap<String, u64>,
    samples: u64,
    was_on: bool,
}

impl Steered {
    /// None: the shims have no direct path.
    fn of(record: &Record) -> Option<Self> {
        let mut steered = None::<Self>;
        for Event { at, what, .. } in &record.events {
            if let EventKind::Steering(shims) = what {
                steered.get_or_insert_default().sample(*at, shims);
            }
        }
        steered
    }

    /// Adds what the shims reported.
    fn sample(&mut self, at: Stamp, shims: &[(String, DirectStatus)]) {
        for (shim, direct) in shims {
            let before = self.counted.insert(shim.clone(), direct.opened);
            self.steered += match before {
                // From before the load.
                None if self.samples == 0 => 0,
                Some(before) if before <= direct.opened => direct.opened - before,
                // It was started since.
                _ => direct.opened,
            };
        }
        let is_on = shims.iter().any(|(_, direct)| direct.on);
        match self.on.last_mut().filter(|_| self.was_on) {
            Some(period) if is_on => period.1 = at,
            None if is_on => self.on.push((at, at)),
            _ => {}
        }
        self.was_on = is_on;
        self.samples += 1;
    }

    /// How long it was on between two moments.
    fn on_within(&self, from: Stamp, to: Stamp) -> Duration {
        self.on.iter().map(|(began, ended)| ended.min(&to).since(*began.max(&from))).sum()
    }
}

pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let Some(used) = Steered::of(case.record) else { return };
    if used.steered == 0 {
        ran.doubt("nothing was steered: the direct path was never used".into());
    }
    let load = case.span.over.since(case.span.began).as_secs_f64();
    let share = used.on_within(case.span.began, case.span.over).as_secs_f64() / load.max(f64::MIN_POSITIVE);
    let words = format!("by the kernel, past the shims, {} of the time", percent(share));
    ran.add("connections steered", Value::Count(used.steered)).main().note(words);
    ran.add("times that steering was on", Value::Count(used.on.len() as u64));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(on: bool, opened: u64) -> DirectStatus {
        DirectStatus { on, opened, ..DirectStatus::default() }
    }

    #[test]
    fn what_shims_steered_is_added_up_over_their_lives() {
        let mut used = Steered::default();
        let sample = |used: &mut Steered, at: u64, shims: &[(&str, bool, u64)]| {
            let shims: Vec<_> =
                shims.iter().map(|(shim, on, opened)| (shim.to_string(), reported(*on, *opened))).collect();
            used.sample(Stamp(at), &shims);
        };
        // What was steered before the first sample was before the load.
        sample(&mut used, 100, &[("old", true, 7)]);
        sample(&mut used, 200, &[("old", true, 10)]);
        sample(&mut used, 300, &[("old", false, 12), ("new", false, 0)]);
        assert_eq!((used.steered, used.on.clone()), (5, vec![(Stamp(100), Stamp(200))]));
        // Another life of the first, and one that does not answer.
        sample(&mut used, 400, &[("old", true, 1)]);
        sample(&mut used, 500, &[("old", true, 3), ("new", false, 4)]);
        assert_eq!(used.steered, 12);
        assert_eq!(used.on_within(Stamp(150), Stamp(450)), Duration::from_nanos(100));
        sample(&mut used, 600, &[]);
        assert!(!used.was_on && used.on.len() == 2);
    }
}
