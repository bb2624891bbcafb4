//! The samples of a run, with their medians and the ratios between relays.

use super::peer::{Peer, PeerKind};
use super::work::{Case, Measured, Metric, Work};
use crate::stats::Summary;
use std::collections::HashMap;
use std::fmt;
use std::mem::discriminant;

/// The outcome of one case, for one peer in one round.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) case: Case,
    /// Index of the peer in [`Results::peers`].
    pub(super) peer: usize,
    pub(super) round: usize,
    pub(super) outcome: Measured,
}

/// Formats a line of progress, with the first figure of the sample.
impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "round {}: {}: ", self.round + 1, self.case)?;
        match &self.outcome {
            Ok(figures) => figures.first().map_or(Ok(()), |(metric, value)| {
                write!(f, "{} {}", metric.format_value(*value), metric.title())
            }),
            Err(error) => write!(f, "failed: {error}"),
        }
    }
}

/// All samples of a run, and the peers that made them.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) peers: Vec<Peer>,
    /// Peers that were not measured, each with the reason.
    pub(super) missing: Vec<(&'static str, String)>,
    pub(super) samples: Vec<Sample>,
}

impl Results {
    /// Returns the measured cases. They are grouped by work, and in the order of measurement.
    pub(super) fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for sample in &self.samples {
            if !cases.contains(&sample.case) {
                cases.push(sample.case);
            }
        }
        cases.sort_by_key(|case| case.work);
        cases
    }

    /// Returns the measured cases without those of [`Work::Growth`], of which only the largest is
    /// kept.
    pub(super) fn key_cases(&self) -> Vec<Case> {
        let mut cases = self.cases();
        let last = cases
            .iter()
            .rev()
            .find(|case| case.work == Work::Growth)
            .copied();
        cases.retain(|case| case.work != Work::Growth || Some(*case) == last);
        cases
    }

    /// Returns the indexes of the peers that ran a case.
    pub(super) fn peers_of(&self, case: Case) -> Vec<usize> {
        (0..self.peers.len())
            .filter(|&peer| self.samples_of(case, peer).next().is_some())
            .collect()
    }

    /// Returns the kinds of figures that any peer has in a case, in the order of tables.
    pub(super) fn metrics_of(&self, case: Case) -> Vec<Metric> {
        let samples = self.samples.iter().filter(|sample| sample.case == case);
        let mut metrics: Vec<_> = samples
            .flat_map(|sample| sample.outcome.iter().flatten())
            .map(|(metric, _)| *metric)
            .collect();
        metrics.sort_unstable();
        metrics.dedup();
        metrics
    }

    pub(super) fn summary(&self, case: Case, peer: usize, metric: Metric) -> Option<Summary> {
        let values: Vec<_> = self
            .values_by_round(case, peer, metric)
            .map(|(_, value)| value)
            .collect();
        Summary::from_samples(&values)
    }

    /// Returns the errors of the rounds in which this case failed for this peer.
    pub(super) fn failures(&self, case: Case, peer: usize) -> Vec<&str> {
        self.samples_of(case, peer)
            .filter_map(|sample| sample.outcome.as_ref().err().map(String::as_str))
            .collect()
    }

    /// Returns the median of the ratios of two peers in each round. Load from elsewhere on the
    /// machine affects both peers of a round, so their ratio is steadier than their figures.
    pub(super) fn ratio(&self, case: Case, peer: usize, to: usize, metric: Metric) -> Option<f64> {
        let others: HashMap<usize, f64> = self
            .values_by_round(case, to, metric)
            .filter(|(_, value)| *value > 0.0)
            .collect();
        let ratios = self
            .values_by_round(case, peer, metric)
            .filter_map(|(round, value)| Some(value / others.get(&round)?));
        Summary::from_samples(&ratios.collect::<Vec<_>>()).map(|summary| summary.median)
    }

    /// Returns the index of the peer that stands for no relay.
    pub(super) fn find_no_relay_peer(&self) -> Option<usize> {
        self.peers
            .iter()
            .position(|peer| peer.kind == PeerKind::None)
    }

    /// Returns the best relay that is not the peer's own program.
    pub(super) fn find_best_other_peer(
        &self,
        case: Case,
        peer: usize,
        metric: Metric,
    ) -> Option<usize> {
        let make = discriminant(&self.peers[peer].kind);
        let others = (0..self.peers.len()).filter(|&other| {
            let kind = &self.peers[other].kind;
            !matches!(kind, PeerKind::None | PeerKind::Inject(_)) && discriminant(kind) != make
        });
        let medians =
            others.filter_map(|other| Some((other, self.summary(case, other, metric)?.median)));
        let better = |a: &(usize, f64), b: &(usize, f64)| {
            let order = a.1.total_cmp(&b.1);
            if metric.higher_is_better() {
                order
            } else {
                order.reverse()
            }
        };
        medians.max_by(better).map(|(other, _)| other)
    }

    /// Returns a peer's values of a figure, each with the number of its round.
    fn values_by_round(
        &self,
        case: Case,
        peer: usize,
        metric: Metric,
    ) -> impl Iterator<Item = (usize, f64)> {
        self.samples_of(case, peer).filter_map(move |sample| {
            let (_, value) = sample
                .outcome
                .iter()
                .flatten()
                .find(|(of, _)| *of == metric)?;
            Some((sample.round, *value))
        })
    }

    fn samples_of(&self, case: Case, peer: usize) -> impl Iterator<Item = &Sample> {
        self.samples
            .iter()
            .filter(move |sample| sample.case == case && sample.peer == peer)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bench::load::Pace;
    use crate::bench::setting::BenchSetting;
    use crate::bench::work::Metric::{P99, Rate};
    use std::time::Duration;

    /// Makes the samples of one case in two rounds. In one round, berth failed.
    pub(in super::super) fn make_results() -> Results {
        let peer = |name: &str, kind| Peer {
            name: name.to_owned(),
            kind,
            program: "/bin/true".into(),
        };
        let sample = |peer, round, outcome| Sample {
            case: Case::ping(16),
            peer,
            round,
            outcome,
        };
        let figures = |rate, p99| Ok(vec![(Rate, rate), (P99, p99)]);
        Results {
            peers: vec![
                peer("none", PeerKind::None),
                peer("berth", PeerKind::Berth),
                peer("haproxy", PeerKind::Haproxy { splice: false }),
                peer("envoy", PeerKind::Envoy),
            ],
            missing: vec![("nginx", "not found".to_owned())],
            samples: vec![
                sample(0, 0, figures(100.0, 10.0)),
                sample(1, 0, figures(60.0, 20.0)),
                sample(2, 0, figures(40.0, 30.0)),
                sample(3, 0, figures(20.0, 25.0)),
                sample(0, 1, figures(120.0, 12.0)),
                sample(1, 1, Err("reset".to_owned())),
                sample(2, 1, figures(44.0, 32.0)),
                sample(3, 1, figures(22.0, 27.0)),
            ],
        }
    }

    pub(in super::super) fn make_setting() -> BenchSetting {
        let pace = Pace {
            warm_up: Duration::from_millis(500),
            window: Duration::from_secs(2),
        };
        BenchSetting::new(
            "scripts/bench.sh",
            &make_results().peers,
            String::new(),
            2,
            pace,
        )
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let results = make_results();
        assert_eq!(
            results.ratio(Case::ping(16), 2, 0, Rate),
            Some(f64::midpoint(40.0 / 100.0, 44.0 / 120.0))
        );
        assert_eq!(
            results.ratio(Case::ping(16), 1, 0, Rate),
            Some(60.0 / 100.0)
        );
        assert_eq!(results.ratio(Case::ping(17), 1, 0, Rate), None);
    }

    #[test]
    fn the_best_other_peer_has_the_highest_rate_or_the_least_latency() {
        let results = make_results();
        assert_eq!(
            results.find_best_other_peer(Case::ping(16), 1, Rate),
            Some(2)
        );
        assert_eq!(
            results.find_best_other_peer(Case::ping(16), 2, Rate),
            Some(1)
        );
        assert_eq!(
            results.find_best_other_peer(Case::ping(16), 1, P99),
            Some(3)
        );
    }

    #[test]
    fn a_failed_round_is_listed_and_not_in_the_summary() {
        let results = make_results();
        assert_eq!(results.failures(Case::ping(16), 1), ["reset"]);
        assert_eq!(
            results
                .summary(Case::ping(16), 1, Rate)
                .map(|summary| summary.count),
            Some(1)
        );
        assert_eq!(results.peers_of(Case::ping(16)), [0, 1, 2, 3]);
    }
}
