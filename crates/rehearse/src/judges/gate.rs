//! Counts the clients that waited at a shim's gate: the queue for TLS handshakes.

use super::Case;
use crate::record::{
    Record,
    data::{Ran, Value},
    event::{Event, EventKind},
    format::{self, format_count},
    gate_metrics::GateMetrics,
    stamp::Stamp,
};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Figures of the gates of all shims.
#[derive(Debug, Default)]
struct GateSeries {
    /// Number of clients that waited at all gates together, at each sample.
    waiting: Vec<(Stamp, u64)>,
    /// Clients that waited and were connected, since the first sample, by class.
    waited: BTreeMap<String, u64>,
    /// Clients that waited and were not connected, by reason.
    dropped: BTreeMap<String, u64>,
    /// The previous report of each shim.
    before: BTreeMap<PathBuf, GateMetrics>,
}

impl GateSeries {
    /// `None` if the shims have no gate, or were not asked because there was no storm.
    fn of(record: &Record) -> Option<Self> {
        let mut gates = None::<Self>;
        for Event { at, what, .. } in &record.events {
            match what {
                // Shims without a gate report nothing.
                EventKind::Gates(shims) if gates.is_some() || !shims.is_empty() => {
                    gates.get_or_insert_default().add_sample(*at, shims);
                }
                _ => {}
            }
        }
        gates
    }

    /// Adds the metrics that the shims reported at one time.
    fn add_sample(&mut self, at: Stamp, shims: &[(PathBuf, GateMetrics)]) {
        for (shim, metrics) in shims {
            let before = self.before.insert(shim.clone(), metrics.clone());
            // The counters of the first sample include clients from before the load, so they are
            // subtracted. A shim that appears later has counted from zero.
            let first = if self.waiting.is_empty() {
                metrics.clone()
            } else {
                GateMetrics::default()
            };
            let before = before.unwrap_or(first);
            add_increase(&mut self.waited, &metrics.waited, &before.waited);
            add_increase(&mut self.dropped, &metrics.dropped, &before.dropped);
        }
        self.waiting.push((
            at,
            shims
                .iter()
                .flat_map(|(_, metrics)| metrics.waiting.values())
                .sum(),
        ));
    }
}

/// Adds the increase of the counters. A counter that is lower than before belongs to a restarted
/// shim, which counts from zero.
fn add_increase(
    to: &mut BTreeMap<String, u64>,
    counted: &BTreeMap<String, u64>,
    before: &BTreeMap<String, u64>,
) {
    for (key, count) in counted {
        let before = before.get(key).copied().unwrap_or_default();
        *to.entry(key.clone()).or_default() += count.checked_sub(before).unwrap_or(*count);
    }
}

/// Adds how many clients waited at the gates, and why some of them were not connected.
pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let Some(GateSeries {
        waiting,
        waited,
        dropped,
        ..
    }) = GateSeries::of(case.record)
    else {
        return;
    };
    let during = waiting.iter().filter(|(at, _)| *at >= case.span.began);
    let most = during
        .map(|(_, waiting)| *waiting)
        .max()
        .unwrap_or_default();
    let all = waited.values().chain(dropped.values()).sum();
    let why = |(reason, clients): (&String, &u64)| {
        let words = match reason.as_str() {
            "full" => "for lack of room",
            "expired" => "after 15 s",
            "left" => "that had left",
            other => other,
        };
        format!("{} {words}", format_count(*clients))
    };
    let left: Vec<_> = dropped
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(why)
        .collect();
    let left = if left.is_empty() {
        "none".to_owned()
    } else {
        left.join(", ")
    };
    let words = format!(
        "{} had to wait, dropped: {left}",
        format::format_count_with_noun(all, "client", "clients")
    );
    ran.add("most clients queued at the gate", Value::Count(most))
        .set_note(words);
    for (class, clients) in waited {
        ran.add(
            format!("of the gate's class {class}"),
            Value::Count(clients),
        )
        .set_note("clients that waited and were connected");
    }
}
