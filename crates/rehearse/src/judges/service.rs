//! The Service `kubernetes`: when it had no address.

use super::Case;
use crate::record::{
    Record,
    data::{Ran, Value},
    event::{Event, EventKind},
    stamp::{Stamp, millis},
};

/// Returns the periods in which the Service had no address, after its first address. `None` if the
/// Service never had an address: only real apiservers in a network namespace write addresses.
fn find_gaps(record: &Record) -> Option<Vec<(Stamp, Stamp)>> {
    let mut gaps = None::<Vec<(Stamp, Stamp)>>;
    let mut was_empty = false;
    for Event { at, what, .. } in &record.events {
        let EventKind::Service(names_any) = what else {
            continue;
        };
        let is_empty = !names_any;
        match &mut gaps {
            None if is_empty => {}
            None => gaps = Some(Vec::new()),
            Some(gaps) => match gaps.last_mut().filter(|_| was_empty) {
                // The previous poll found no address, so the gap lasts until this poll.
                Some(gap) => gap.1 = *at,
                None if is_empty => gaps.push((*at, *at)),
                None => {}
            },
        }
        was_empty = is_empty && gaps.is_some();
    }
    gaps
}

pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let Some(gaps) = find_gaps(case.record) else {
        return;
    };
    let empty = millis(gaps.iter().map(|(from, to)| to.since(*from)).sum());
    let words = "the instance that stops removes the address from the Service, even if another instance serves";
    ran.add("Service kubernetes was empty for", Value::Ms(empty))
        .mark_as_main()
        .set_note(words);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_is_empty_from_when_it_first_named_an_address() {
        let record = |looks: &[bool]| {
            let sample = |(n, names_any): (usize, &bool)| {
                let (at, what) = (Stamp(n as u64), EventKind::Service(*names_any));
                Event {
                    at,
                    subject: "kubernetes".into(),
                    what,
                }
            };
            Record::of(looks.iter().enumerate().map(sample).collect())
        };
        let seen = record(&[false, true, false, false, true, false]);
        assert_eq!(
            find_gaps(&seen),
            Some(vec![(Stamp(2), Stamp(4)), (Stamp(5), Stamp(5))])
        );
        assert_eq!(find_gaps(&record(&[false])), None);
    }
}
