//! Decides whether berth is far off the other relays, for runs with `--short`.
//!
//! The limits are ratios, never times. They are less than half of the ratios measured on two cores
//! (0.4 of the rate without a relay and 1.0 of HAProxy's), because shared machines vary that much.
//! The limits catch mistakes with a much larger effect: a relay with one thread instead of all, a
//! timer that delays bytes, too many system calls, or leaked buffers.

use super::results::Results;
use super::work::{Metric, Work};

/// Least allowed ratio of berth's rate to the rate without a relay.
const LEAST_OF_NONE: f64 = 0.1;

/// Least allowed ratio of berth's rate to HAProxy's rate.
const LEAST_OF_HAPROXY: f64 = 0.4;

/// Greatest allowed ratio of berth's CPU time and memory to HAProxy's.
const MOST_OF_HAPROXY: f64 = 2.5;

/// Returns what is wrong with berth's results, a sentence each. Unless the run is `short`, only
/// failures are wrong.
pub(super) fn list_complaints(results: &Results, short: bool) -> Vec<String> {
    let mut complaints = Vec::new();
    let haproxy = results.peers.iter().position(|peer| peer.name == "haproxy");
    for case in results.cases() {
        for berth in results
            .peers_of(case)
            .into_iter()
            .filter(|&peer| results.peers[peer].is_berth() || results.peers[peer].is_inject())
        {
            let name = &results.peers[berth].name;
            if let Some(why) = results.failures(case, berth).first() {
                complaints.push(format!("{case}: {name} failed: {why}"));
            }
            if !short {
                continue;
            }
            for &metric in limited_metrics(case.work) {
                let pairs = [
                    (
                        results.find_no_relay_peer(),
                        metric.higher_is_better().then_some(LEAST_OF_NONE),
                    ),
                    (
                        haproxy,
                        Some(if metric.higher_is_better() {
                            LEAST_OF_HAPROXY
                        } else {
                            MOST_OF_HAPROXY
                        }),
                    ),
                ];
                for (other, limit) in pairs {
                    let Some((other, limit)) = other.zip(limit) else {
                        continue;
                    };
                    let Some(ratio) = results.ratio(case, berth, other, metric) else {
                        continue;
                    };
                    if if metric.higher_is_better() {
                        ratio < limit
                    } else {
                        ratio > limit
                    } {
                        let (what, other) = (metric.title(), &results.peers[other].name);
                        complaints.push(format!(
                            "{case}: {name} has {ratio:.2} times the {what} of {other}; the limit is {limit}"
                        ));
                    }
                }
            }
        }
    }
    complaints
}

/// Returns the figures that have limits. Start and answer times have none, because they vary too
/// much on a shared machine.
fn limited_metrics(work: Work) -> &'static [Metric] {
    match work {
        Work::Ping | Work::Connect | Work::Growth => &[Metric::Rate, Metric::CpuPerRequest],
        Work::Bulk => &[Metric::Gigabits, Metric::CpuPerGigabyte],
        // A burst has no limits: if a SYN is dropped, its client waits a second before the next
        // one.
        Work::Burst | Work::Slow => &[],
        Work::Idle => &[Metric::IdleMemory, Metric::UsedMemory],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::tests::make_results;

    #[test]
    fn a_failure_of_berth_is_a_complaint_in_any_run() {
        assert_eq!(
            list_complaints(&make_results(), false),
            ["ping, 16 connections: berth failed: reset"]
        );
    }

    #[test]
    fn a_figure_far_over_its_limit_is_a_complaint_only_in_a_short_run() {
        let mut results = make_results();
        results.samples.retain(|sample| sample.outcome.is_ok());
        assert_eq!(list_complaints(&results, true), [""; 0]);
        for (rate, complained) in [(15.0, 1), (9.0, 2)] {
            for sample in results.samples.iter_mut().filter(|sample| sample.peer == 1) {
                sample.outcome = Ok(vec![(Metric::Rate, rate)]);
            }
            assert_eq!(list_complaints(&results, true).len(), complained, "{rate}");
            assert_eq!(list_complaints(&results, false), [""; 0]);
        }
    }
}
