//! Metrics of the shims' gates: the numbers of waiting clients. Counts between the last poll and
//! the end of a shim are missing.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Metrics of a shim's gate, where clients queue for their TLS handshakes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateMetrics {
    /// Number of waiting clients, by class.
    pub(crate) waiting: BTreeMap<String, u64>,
    /// Total number of clients that were served after a wait, by class.
    pub(crate) waited: BTreeMap<String, u64>,
    /// Total number of clients that were dropped from the queue, by reason.
    pub(crate) dropped: BTreeMap<String, u64>,
}

impl GateMetrics {
    /// Parses a shim's metrics. `None` if the shim has no gate.
    pub(crate) fn parse(metrics: &str) -> Option<Self> {
        let mut gate = None::<Self>;
        for line in metrics.lines() {
            let Some((name, rest)) = line
                .strip_prefix("berth_gate_")
                .and_then(|line| line.split_once('{'))
            else {
                continue;
            };
            let Some((labels, value)) = rest.rsplit_once("} ") else {
                continue;
            };
            let Ok(value) = value.parse() else { continue };
            let label = |name: &str| {
                let value = labels
                    .split(',')
                    .find_map(|label| label.strip_prefix(name)?.strip_prefix("=\""));
                value
                    .and_then(|value| value.strip_suffix('"'))
                    .unwrap_or_default()
                    .to_owned()
            };
            let gate = gate.get_or_insert_default();
            match name {
                "waiting" => drop(gate.waiting.insert(label("class"), value)),
                "wait_seconds_count" => drop(gate.waited.insert(label("class"), value)),
                "dropped_total" => drop(gate.dropped.insert(label("reason"), value)),
                _ => {}
            }
        }
        gate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = "\
# TYPE berth_gate_openings gauge
berth_gate_openings{shim=\"old\"} 3
berth_gate_waiting{shim=\"old\",class=\"first\"} 7
berth_gate_waiting{shim=\"old\",class=\"late\"} 0
berth_gate_dropped_total{shim=\"old\",reason=\"full\"} 2
berth_gate_wait_seconds_sum{shim=\"old\",class=\"first\"} 0.5
berth_gate_wait_seconds_count{shim=\"old\",class=\"first\"} 9
berth_gate_wait_seconds_bucket{shim=\"old\",le=\"+Inf\",class=\"first\"} 9
berth_connections_total{shim=\"old\",outcome=\"gate_full\"} 2
# EOF
";

    fn counts(of: &[(&str, u64)]) -> BTreeMap<String, u64> {
        of.iter()
            .map(|(key, count)| ((*key).to_owned(), *count))
            .collect()
    }

    #[test]
    fn gate_metrics_are_parsed() {
        let gate = GateMetrics::parse(METRICS).unwrap();
        let (waiting, waited) = (
            counts(&[("first", 7), ("late", 0)]),
            counts(&[("first", 9)]),
        );
        assert_eq!(
            gate,
            GateMetrics {
                waiting,
                waited,
                dropped: counts(&[("full", 2)])
            }
        );
        assert_eq!(
            GateMetrics::parse("berth_shim_state{shim=\"old\"} 1\n# EOF\n"),
            None
        );
    }
}
