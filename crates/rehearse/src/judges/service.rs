//! The Service `kubernetes`: whose addresses it has, and when it had none.

use super::{Case, Judge};
use crate::data::{Period, Ran};
use crate::event::{Event, EventKind, Named, RECONCILED, names};
use crate::record::Record;
use crate::report::format::{moment, wait};
use crate::section::{Row, Section};
use crate::stamp::{Stamp, millis};
use std::collections::BTreeSet;
use std::net::IpAddr;

pub(super) const SERVICE: Judge = Judge { judge, section };

/// What was seen of it.
#[derive(Debug, Default)]
pub(super) struct Service<'a> {
    /// Its addresses from some moment on, each time that they changed.
    named: Vec<(Stamp, &'a Named)>,
    /// Times for which it had none, from the first time on that it had one; none if it never had one, as without real
    /// apiservers in a network namespace.
    gaps: Option<Vec<(Stamp, Stamp)>>,
}

/// When a node's address was taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Forgotten {
    /// Of the slice that kube-apiserver's own reconciler writes.
    pub(super) reconciled: Option<Stamp>,
    /// Of all slices.
    pub(super) named: Option<Stamp>,
}

impl<'a> Service<'a> {
    pub(super) fn of(record: &'a Record) -> Self {
        let mut service = Self::default();
        let mut was_empty = false;
        for Event { at, what, .. } in &record.events {
            let EventKind::Service { named, .. } = what else { continue };
            let is_empty = named.values().all(BTreeSet::is_empty);
            match &mut service.gaps {
                None if is_empty => {}
                None => service.gaps = Some(Vec::new()),
                Some(gaps) => match gaps.last_mut().filter(|_| was_empty) {
                    // Up to now, also when there is no later poll.
                    Some(gap) => gap.1 = *at,
                    None if is_empty => gaps.push((*at, *at)),
                    None => {}
                },
            }
            was_empty = is_empty && service.gaps.is_some();
            if service.named.last().is_none_or(|(_, last)| *last != named) {
                service.named.push((*at, named));
            }
        }
        service
    }

    /// When it had a node's address no more, after `at`.
    pub(super) fn forgot(&self, at: Stamp, node: IpAddr) -> Forgotten {
        let first = |gone: &dyn Fn(&Named) -> bool| {
            let mut after = self.named.iter().filter(|(seen, _)| *seen >= at);
            after.find(|(_, named)| gone(named)).map(|(seen, _)| *seen)
        };
        Forgotten {
            reconciled: first(&|named| named.get(RECONCILED).is_none_or(|all| !all.contains(&node))),
            named: first(&|named| !names(named, node)),
        }
    }
}

fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Some(gaps) = Service::of(case.record).gaps else { return };
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
        let named = |ips: &[&str]| [(RECONCILED.to_owned(), ips.iter().map(|ip| ip.parse().unwrap()).collect())].into();
        let record = |looks: &[&[&str]]| {
            let sample = |(n, ips): (usize, &&[&str])| {
                let what = EventKind::Service { after: Stamp(0), named: named(ips) };
                Event { at: Stamp(n as u64), subject: "kubernetes".into(), what }
            };
            Record::of(looks.iter().enumerate().map(sample).collect())
        };
        let seen = record(&[&[], &["10.0.0.3"], &[], &[], &["10.0.0.3"], &[]]);
        let service = Service::of(&seen);
        assert_eq!(service.gaps, Some(vec![(Stamp(2), Stamp(4)), (Stamp(5), Stamp(5))]));
        assert_eq!(service.named.iter().map(|(at, _)| at.0).collect::<Vec<_>>(), [0, 1, 2, 4, 5]);
        assert_eq!(Service::of(&record(&[&[]])).gaps, None);
    }
}
