//! What the gates of the shims in a rehearsal say by their metrics: who waits there, and for how many openings. What is
//! counted between the last look and a shim's end is not seen.

use super::stamp::Stamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What all gates said together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// Clients that wait, by class.
    pub waiting: BTreeMap<String, u64>,
    /// Openings in flight.
    pub openings: u64,
    /// How many there may be.
    pub limit: u64,
}

/// What one gate says: the same, and what it counted so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateMetrics {
    now: Look,
    counted: Counted,
}

/// What gates count.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Clients that waited and had their turn, by class.
    pub waited: BTreeMap<String, u64>,
    /// Clients that waited and had none, by reason.
    pub dropped: BTreeMap<String, u64>,
}

/// What was seen of all gates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gates {
    /// In order.
    pub looks: Vec<(Stamp, Look)>,
    /// Since the first look.
    pub counted: Counted,
    /// What each shim had counted when it was asked last.
    before: BTreeMap<PathBuf, Counted>,
}

impl Gates {
    /// Takes in what the shims said.
    pub(crate) fn look(&mut self, at: Stamp, shims: Vec<(PathBuf, GateMetrics)>) {
        let mut all = Look::default();
        for (shim, GateMetrics { now, counted }) in shims {
            all.openings += now.openings;
            all.limit += now.limit;
            add(&mut all.waiting, &now.waiting, &BTreeMap::new());
            let before = self.before.insert(shim, counted.clone());
            // What the first look finds is from before the load; later, a shim is new.
            let before =
                before.unwrap_or_else(|| if self.looks.is_empty() { counted.clone() } else { Counted::default() });
            add(&mut self.counted.waited, &counted.waited, &before.waited);
            add(&mut self.counted.dropped, &counted.dropped, &before.dropped);
        }
        self.looks.push((at, all));
    }
}

/// Adds what is counted to what was. One that counts from 0 again was started since.
fn add(to: &mut BTreeMap<String, u64>, counted: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) {
    for (key, count) in counted {
        let before = before.get(key).copied().unwrap_or_default();
        *to.entry(key.clone()).or_default() += count.checked_sub(before).unwrap_or(*count);
    }
}

impl GateMetrics {
    /// From a shim's metrics; none: it has no gate.
    pub(crate) fn parse(metrics: &str) -> Option<Self> {
        let mut said = None::<Self>;
        for line in metrics.lines() {
            let Some((name, rest)) = line.strip_prefix("berth_gate_").and_then(|line| line.split_once('{')) else {
                continue;
            };
            let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
            let Ok(value) = value.parse() else { continue };
            let label = |name: &str| {
                let value = labels.split(',').find_map(|label| label.strip_prefix(name)?.strip_prefix("=\""));
                value.and_then(|value| value.strip_suffix('"')).unwrap_or_default().to_owned()
            };
            let said = said.get_or_insert_default();
            match name {
                "openings" => said.now.openings = value,
                "openings_limit" => said.now.limit = value,
                "waiting" => drop(said.now.waiting.insert(label("class"), value)),
                "wait_seconds_count" => drop(said.counted.waited.insert(label("class"), value)),
                "dropped_total" => drop(said.counted.dropped.insert(label("reason"), value)),
                _ => {}
            }
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = "\
# TYPE berth_gate_openings gauge
berth_gate_openings{shim=\"old\"} 3
berth_gate_openings_limit{shim=\"old\"} 4
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
        of.iter().map(|(key, count)| ((*key).to_owned(), *count)).collect()
    }

    #[test]
    fn what_a_gate_says_is_read_from_its_shims_metrics() {
        let said = GateMetrics::parse(METRICS).unwrap();
        assert_eq!(said.now, Look { waiting: counts(&[("first", 7), ("late", 0)]), openings: 3, limit: 4 });
        assert_eq!(said.counted, Counted { waited: counts(&[("first", 9)]), dropped: counts(&[("full", 2)]) });
        assert_eq!(GateMetrics::parse("berth_shim_state{shim=\"old\"} 1\n# EOF\n"), None);
    }

    #[test]
    fn what_gates_counted_is_added_up_over_their_lives() {
        let said = |waiting, waited| GateMetrics {
            now: Look { waiting: counts(&[("others", waiting)]), openings: 1, limit: 4 },
            counted: Counted { waited: counts(&[("others", waited)]), ..Counted::default() },
        };
        let mut gates = Gates::default();
        let mut look = |at, shims: &[(&str, GateMetrics)]| {
            gates.look(Stamp(at), shims.iter().map(|(shim, said)| (PathBuf::from(shim), said.clone())).collect());
            gates.counted.waited.get("others").copied()
        };
        assert_eq!(look(1, &[("old", said(0, 5))]), Some(0), "from before the load");
        assert_eq!(look(2, &[("old", said(3, 7)), ("new", said(4, 1))]), Some(3));
        assert_eq!(look(3, &[("new", said(0, 9))]), Some(11));
        assert_eq!(look(4, &[("new", said(0, 2))]), Some(13), "it was started again");
        let both = Look { waiting: counts(&[("others", 7)]), openings: 2, limit: 8 };
        assert_eq!(gates.looks[1], (Stamp(2), both));
    }
}
