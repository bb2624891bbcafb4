//! The gates of the shims: the clients that waited there, and the TLS handshakes in flight.

use super::{Case, Judge};
use crate::data::{Gate, Ran};
use crate::event::{Event, EventKind};
use crate::gate::{Counted, GateMetrics, Sample};
use crate::record::Record;
use crate::report::format::{self, count};
use crate::section::Place::{Compared, Page, Table};
use crate::section::{Line, Numbers, Row, Section, Series};
use crate::stamp::Stamp;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

pub(super) const GATE: Judge = Judge { judge, section };

/// What was seen of all gates.
#[derive(Debug, Default)]
struct Gates {
    /// In order.
    samples: Vec<(Stamp, Sample)>,
    /// Since the first sample.
    counted: Counted,
    /// What each shim had counted when it was asked last.
    before: BTreeMap<PathBuf, Counted>,
}

impl Gates {
    /// None: the shims have no gate, or they were not asked, as there was no storm.
    fn of(record: &Record) -> Option<Self> {
        let mut gates = None::<Self>;
        for Event { at, what, .. } in &record.events {
            match what {
                // Shims without a gate report nothing.
                EventKind::Gates(shims) if gates.is_some() || !shims.is_empty() => {
                    gates.get_or_insert_default().sample(*at, shims);
                }
                _ => {}
            }
        }
        gates
    }

    /// Adds what the shims reported.
    fn sample(&mut self, at: Stamp, shims: &[(PathBuf, GateMetrics)]) {
        let mut all = Sample::default();
        for (shim, GateMetrics { now, counted }) in shims {
            all.openings += now.openings;
            all.limit += now.limit;
            add(&mut all.waiting, &now.waiting, &BTreeMap::new());
            let before = self.before.insert(shim.clone(), counted.clone());
            // What the first sample has is from before the load; later, a shim is new.
            let before =
                before.unwrap_or_else(|| if self.samples.is_empty() { counted.clone() } else { Counted::default() });
            add(&mut self.counted.waited, &counted.waited, &before.waited);
            add(&mut self.counted.dropped, &counted.dropped, &before.dropped);
        }
        self.samples.push((at, all));
    }
}

/// Adds what is counted to what was. One that counts from 0 again was started since.
fn add(to: &mut BTreeMap<String, u64>, counted: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) {
    for (key, count) in counted {
        let before = before.get(key).copied().unwrap_or_default();
        *to.entry(key.clone()).or_default() += count.checked_sub(before).unwrap_or(*count);
    }
}

fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Case { record, span, steps, .. } = case;
    let Some(gates) = Gates::of(record) else { return };
    let over = |value: &dyn Fn(&Sample) -> u64| {
        let mut seen = vec![Vec::new(); steps.count];
        for (at, sample) in &gates.samples {
            if let Some(step) = steps.at(*at) {
                seen[step].push(value(sample));
            }
        }
        let most = seen.into_iter().scan(0, |last, seen| {
            let most = seen.iter().copied().max().unwrap_or(*last);
            *last = seen.last().copied().unwrap_or(*last);
            Some(most)
        });
        most.collect::<Vec<u64>>()
    };
    let samples = || gates.samples.iter().filter(|(at, _)| *at >= span.began).map(|(_, sample)| sample);
    let classes: BTreeSet<&String> = samples().flat_map(|sample| sample.waiting.keys()).collect();
    let of_class = |sample: &Sample, class: &String| sample.waiting.get(class).copied().unwrap_or_default();
    ran.gate = Some(Gate {
        waited: gates.counted.waited.clone(),
        dropped: gates.counted.dropped.clone(),
        most_waiting: samples().map(|sample| sample.waiting.values().sum()).max().unwrap_or_default(),
        waiting: classes.into_iter().map(|class| (class.clone(), over(&|sample| of_class(sample, class)))).collect(),
        openings: over(&|sample| sample.openings),
        limit: over(&|sample| sample.limit),
    });
}

fn section(ran: &Ran) -> Section {
    let Some(gate) = &ran.gate else { return Section::default() };
    let most = &[Table, Compared, Page];
    let mut rows = vec![Row::at(most, "most clients queued at the gate", count(gate.most_waiting), format::gate(gate))];
    let waited =
        gate.waited.iter().map(|(class, n)| (format!("clients that waited and were connected: class {class}"), n));
    let dropped = gate.dropped.iter().map(|(reason, n)| (format!("clients that waited and were dropped: {reason}"), n));
    rows.extend(waited.chain(dropped).map(|(name, clients)| Row::page(name, count(*clients))));
    Section {
        title: "The gate: clients of the storm and all others",
        rows,
        series: series(gate).into(),
        numbers: Some(numbers(gate)),
        ..Section::default()
    }
}

fn series(gate: &Gate) -> [Series; 2] {
    let line = |name, look, counts: &[u64]| Line { name, look, counts: counts.to_vec() };
    // In the order in which they are served. A class without waiting clients is not drawn.
    let waiting = [("first", "p50"), ("others", "p99"), ("late", "max")].into_iter().filter_map(|(class, look)| {
        let counts = gate.waiting.get(class).filter(|counts| counts.iter().any(|count| *count > 0))?;
        Some(line(class, look, counts))
    });
    let handshakes = vec![line("in flight", "p50", &gate.openings), line("limit", "p99", &gate.limit)];
    let most = |counts: &[u64]| count(counts.iter().copied().max().unwrap_or_default());
    let (in_flight, limit) = (most(&gate.openings), most(&gate.limit));
    [
        Series {
            title: "Clients queued at the gate, by class".to_owned(),
            words: format!("At most {} were queued. {}.", count(gate.most_waiting), format::gate(gate)),
            lines: waiting.collect(),
        },
        Series {
            title: "TLS handshakes in flight, and their limit".to_owned(),
            words: format!("At most {in_flight} were in flight; the limit was at most {limit}."),
            lines: handshakes,
        },
    ]
}

fn numbers(gate: &Gate) -> Numbers {
    let waiting = gate.waiting.iter().map(|(class, counts)| (format!("queued: {class}"), counts.clone()));
    let handshakes =
        [("TLS handshakes in flight".to_owned(), gate.openings.clone()), ("limit".to_owned(), gate.limit.clone())];
    Numbers { id: "gate", title: "The gate", columns: waiting.chain(handshakes).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(of: &[(&str, u64)]) -> BTreeMap<String, u64> {
        of.iter().map(|(key, count)| ((*key).to_owned(), *count)).collect()
    }

    #[test]
    fn what_gates_counted_is_added_up_over_their_lives() {
        let reported = |waiting, waited| GateMetrics {
            now: Sample { waiting: counts(&[("others", waiting)]), openings: 1, limit: 4 },
            counted: Counted { waited: counts(&[("others", waited)]), ..Counted::default() },
        };
        let mut gates = Gates::default();
        let mut sample = |at, shims: &[(&str, GateMetrics)]| {
            gates.sample(
                Stamp(at),
                &shims.iter().map(|(shim, reported)| (PathBuf::from(shim), reported.clone())).collect::<Vec<_>>(),
            );
            gates.counted.waited.get("others").copied()
        };
        assert_eq!(sample(1, &[("old", reported(0, 5))]), Some(0), "from before the load");
        assert_eq!(sample(2, &[("old", reported(3, 7)), ("new", reported(4, 1))]), Some(3));
        assert_eq!(sample(3, &[("new", reported(0, 9))]), Some(11));
        assert_eq!(sample(4, &[("new", reported(0, 2))]), Some(13), "it was started again");
        let both = Sample { waiting: counts(&[("others", 7)]), openings: 2, limit: 8 };
        assert_eq!(gates.samples[1], (Stamp(2), both));
    }
}
