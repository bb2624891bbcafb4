//! The Service `kubernetes`: when it had no address.

use super::{Case, Judge};
use crate::data::{Period, Ran};
use crate::event::{Event, EventKind};
use crate::record::Record;
use crate::report::format::{moment, wait};
use crate::section::{Row, Section};
use crate::stamp::{Stamp, millis};

pub(super) const SERVICE: Judge = Judge { judge, section };

/// Times for which the Service had no address, from the first time on that it had one. `None` if it never had one, as without
/// real apiservers in a network namespace.
fn gaps(record: &Record) -> Option<Vec<(Stamp, Stamp)>> {
    let mut gaps = None::<Vec<(Stamp, Stamp)>>;
    let mut was_empty = false;
    for Event { at, what, .. } in &record.events {
        let EventKind::Service(names_any) = what else { continue };
        let is_empty = !names_any;
        match &mut gaps {
            None if is_empty => {}
            None => gaps = Some(Vec::new()),
            Some(gaps) => match gaps.last_mut().filter(|_| was_empty) {
                // Up to now, also when there is no later poll.
                Some(gap) => gap.1 = *at,
                None if is_empty => gaps.push((*at, *at)),
                None => {}
            },
        }
        was_empty = is_empty && gaps.is_some();
    }
    gaps
}

fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Some(gaps) = gaps(case.record) else { return };
    ran.figures.endpoint_gap_ms = Some(millis(gaps.iter().map(|(from, to)| to.since(*from)).sum()));
    ran.endpoint_gaps = Some(gaps.iter().map(|gap| case.span.period(gap)).collect());
}

fn section(ran: &Ran) -> Section {
    let empty = |gap: &Period| {
        let from = format!("Service kubernetes empty, from {}", moment(gap.from_ms));
        Row::page(from, wait((gap.to_ms - gap.from_ms) as f64))
    };
    let note = "the instance that stops removes the address, even if another serves";
    let all = ran.figures.endpoint_gap_ms.map(|gap| Row::main("Service kubernetes was empty for", wait(gap), note));
    Section {
        rows: all.into_iter().chain(ran.endpoint_gaps.iter().flatten().map(empty)).collect(),
        ..Section::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_is_empty_from_when_it_first_named_an_address() {
        let record = |looks: &[bool]| {
            let sample = |(n, names_any): (usize, &bool)| {
                let (at, what) = (Stamp(n as u64), EventKind::Service(*names_any));
                Event { at, subject: "kubernetes".into(), what }
            };
            Record::of(looks.iter().enumerate().map(sample).collect())
        };
        let seen = record(&[false, true, false, false, true, false]);
        assert_eq!(gaps(&seen), Some(vec![(Stamp(2), Stamp(4)), (Stamp(5), Stamp(5))]));
        assert_eq!(gaps(&record(&[false])), None);
    }
}
