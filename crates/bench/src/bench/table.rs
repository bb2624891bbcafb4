//! Results as Markdown tables, also for a terminal.

use super::peer::{Peer, PeerKind};
use super::results::Results;
use super::work::{Case, Metric, Work};
use crate::markdown::align_table;
use std::fmt::Write;

const SAMPLES: &str =
    "Each figure is the median of the rounds, with the least and the most in brackets.";

const RATIOS: &str = "Each ratio (÷) is the median of the ratios within a round.";

/// A table of medians, with a line for each figure that most readers look for.
pub(super) fn render_overview(results: &Results) -> String {
    let Some(berth) = results.peers.iter().position(Peer::is_berth) else {
        return String::new();
    };
    let all: Vec<usize> = (0..results.peers.len())
        .filter(|&peer| results.peers[peer].kind != (PeerKind::Haproxy { splice: true }))
        .collect();
    let haproxy = results
        .peers
        .iter()
        .position(|peer| peer.kind == PeerKind::Haproxy { splice: false });
    let mut heads = vec![String::new()];
    heads.extend(all.iter().map(|&peer| results.peers[peer].name.clone()));
    heads.extend(haproxy.map(|_| "berth ÷ haproxy".to_owned()));
    heads.push("berth ÷ best other".to_owned());
    let inject = results
        .peers
        .iter()
        .position(Peer::is_inject)
        .zip(results.no_relay());
    heads.extend(
        inject
            .into_iter()
            .flat_map(|_| ["inject ÷ none", "goal of inject"].map(str::to_owned)),
    );
    let mut rows = vec![heads];
    for case in results.key_cases() {
        let mut metrics = case.key_metrics().to_vec();
        if matches!(case.work, Work::Ping | Work::Connect) {
            metrics.insert(1, Metric::P99);
        }
        for metric in metrics {
            let mut row = vec![format!("{case}: {}", metric.title())];
            let median = |&peer: &usize| {
                results
                    .summary(case, peer, metric)
                    .map(|summary| metric.show(summary.median))
            };
            row.extend(all.iter().map(|peer| or_dash(median(peer))));
            row.extend(haproxy.map(|haproxy| format_ratio(results, case, berth, haproxy, metric)));
            row.push(format_best(results, case, berth, metric));
            if let Some((inject, none)) = inject {
                row.extend([
                    format_ratio(results, case, inject, none, metric),
                    or_dash(format_goal(case, metric)),
                ]);
            }
            rows.push(row);
        }
    }
    format!(
        "## Overview\n\nMedians. {RATIOS}\n\n{}\n",
        align_table(&rows)
    )
}

fn format_goal(case: Case, metric: Metric) -> Option<String> {
    let limit = case.goal(metric)?;
    Some(if metric.higher_is_better() {
        format!("≥ {limit:.2} of none")
    } else {
        format!("≤ {}", metric.show(limit))
    })
}

/// A table for each case.
pub(super) fn render_tables(results: &Results) -> String {
    let mut text = String::new();
    let mut work = None;
    for case in results.cases() {
        if work.replace(case.work) != Some(case.work) {
            let (title, about) = titles_of(case.work);
            let _ = writeln!(text, "## {title}\n\n{about} {SAMPLES} {RATIOS}\n");
        }
        let _ = writeln!(
            text,
            "### {case}\n\n{}{}",
            render_table(results, case),
            format_failures(results, case)
        );
    }
    text
}

/// The title of a work's tables, and a description of the work.
fn titles_of(work: Work) -> (&'static str, &'static str) {
    match work {
        Work::Ping => (
            "Ping",
            "256 B there and back on kept connections, one request outstanding on each.",
        ),
        Work::Connect => (
            "Connect",
            "Connect, 64 B there and back, close. The time is that from connect to answer.",
        ),
        Work::Bulk => (
            "Bulk",
            "Bytes one way for as long as it lasts: what arrived, and the relay's CPU time for it.",
        ),
        Work::Idle => (
            "Idle",
            "Connections that are held, each after one round trip, then after an answer of 1 MiB on each. Memory is the \
             relay's Pss, summed over its processes, less that before them. The kernel's is the increase on the whole machine \
             (Slab of /proc/meminfo): the two sockets of the relay, and those of client and backend.",
        ),
        Work::Burst => (
            "Burst",
            "Clients that all connect at one moment, 64 B there and back each, and stay. The rate is that until the last has \
             its answer. Where a queue is full a SYN comes again after 1 s.",
        ),
        Work::Growth => (
            "Growth",
            "As ping, with ever more connections, all of them active, to one relay that is not restarted.",
        ),
        Work::Slow => (
            "Slow",
            "Readers of an answer of 5 MB each, 50 KB a second, after 8 s. The sockets' memory is that of the whole network \
             namespace (TCP of /proc/net/sockstat), the relay's is its Pss, both less what they were before the answers.",
        ),
    }
}

fn render_table(results: &Results, case: Case) -> String {
    let main = case.main_metric();
    let metrics = results.metrics_of(case);
    let others: Vec<Metric> = metrics
        .iter()
        .copied()
        .filter(|metric| *metric != main)
        .collect();
    let builds: Vec<usize> = results
        .peers_of(case)
        .into_iter()
        .filter(|&peer| results.peers[peer].is_berth())
        .collect();
    let first_build = builds.first().copied().filter(|_| builds.len() > 1);

    let mut heads = vec!["peer".to_owned(), main.title().to_owned()];
    let with_none = results
        .no_relay()
        .filter(|&none| results.peers_of(case).contains(&none));
    heads.extend(with_none.map(|_| "÷ none".to_owned()));
    heads.push("÷ best other".to_owned());
    heads.extend(first_build.map(|peer| format!("÷ {}", results.peers[peer].name)));
    heads.extend(others.iter().map(|metric| metric.title().to_owned()));
    heads.push("samples".to_owned());

    let mut rows = vec![heads];
    for peer in results.peers_of(case) {
        let mut row = vec![
            results.peers[peer].name.clone(),
            format_cell(results, case, peer, main),
        ];
        row.extend(with_none.map(|none| format_ratio(results, case, peer, none, main)));
        row.push(format_best(results, case, peer, main));
        row.extend(first_build.map(|build| format_ratio(results, case, peer, build, main)));
        row.extend(
            others
                .iter()
                .map(|metric| format_cell(results, case, peer, *metric)),
        );
        let good = results
            .summary(case, peer, main)
            .map_or(0, |summary| summary.count);
        row.push(good.to_string());
        rows.push(row);
    }
    align_table(&rows)
}

fn or_dash(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "–".to_owned())
}

fn format_ratio(results: &Results, case: Case, peer: usize, to: usize, metric: Metric) -> String {
    let ratio = results.ratio(case, peer, to, metric).filter(|_| peer != to);
    or_dash(ratio.map(|ratio| format!("{ratio:.2}")))
}

/// The ratio to the best other relay, with its name.
fn format_best(results: &Results, case: Case, peer: usize, metric: Metric) -> String {
    let best = results
        .best_other(case, peer, metric)
        .filter(|_| Some(peer) != results.no_relay());
    or_dash(best.map(|best| {
        format!(
            "{} ({})",
            format_ratio(results, case, peer, best, metric),
            results.peers[best].name
        )
    }))
}

fn format_cell(results: &Results, case: Case, peer: usize, metric: Metric) -> String {
    let Some(summary) = results.summary(case, peer, metric) else {
        return or_dash(None);
    };
    let (median, least, most) = (
        metric.show(summary.median),
        metric.show(summary.least),
        metric.show(summary.most),
    );
    if least == most {
        median
    } else {
        format!("{median} ({least}–{most})")
    }
}

/// Why figures are missing.
fn format_failures(results: &Results, case: Case) -> String {
    let mut text = String::new();
    for peer in results.peers_of(case) {
        let failures = results.failures(case, peer);
        if let Some(first) = failures.first() {
            let _ = writeln!(
                text,
                "\n{}: {} failed: {first}",
                results.peers[peer].name,
                failures.len()
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::tests::results;

    #[test]
    fn the_overview_has_medians_and_ratios() {
        insta::assert_snapshot!(render_overview(&results()), @r#"
        ## Overview

        Medians. Each ratio (÷) is the median of the ratios within a round.

        |                                      | none | berth | haproxy | envoy | berth ÷ haproxy | berth ÷ best other |
        | ------------------------------------ | ----:| -----:| -------:| -----:| ---------------:| ------------------:|
        | ping, 16 connections: requests/s     |  110 |    60 |      42 |    21 |            1.50 |     1.50 (haproxy) |
        | ping, 16 connections: p99 µs         |   11 |    20 |      31 |    26 |            0.67 |       0.80 (envoy) |
        | ping, 16 connections: CPU µs/request |    – |     – |       – |     – |               – |                  – |
        "#);
    }

    #[test]
    fn inject_is_compared_with_no_relay_and_is_no_relay() {
        let mut results = results();
        (results.peers[2].kind, results.peers[2].name) =
            (PeerKind::Inject("/bin/true".into()), "inject".to_owned());
        let overview = render_overview(&results);
        let rates = overview
            .lines()
            .find(|line| line.contains("requests/s"))
            .unwrap();
        let cells: Vec<_> = rates.split('|').map(str::trim).collect();
        assert!(
            overview.contains("| berth ÷ best other | inject ÷ none | goal of inject |"),
            "{overview}"
        );
        assert_eq!(
            cells[2..],
            [
                "110",
                "60",
                "42",
                "21",
                "3.00 (envoy)",
                "0.38",
                "≥ 0.97 of none",
                ""
            ],
            "{overview}"
        );
    }

    #[test]
    fn a_table_has_spread_ratios_and_failures() {
        insta::assert_snapshot!(render_table(&results(), Case::ping(16)) + &format_failures(&results(), Case::ping(16)), @r#"
        | peer    |    requests/s | ÷ none |   ÷ best other |     p99 µs | samples |
        | ------- | -------------:| ------:| --------------:| ----------:| -------:|
        | none    | 110 (100–120) |      – |              – | 11 (10–12) |       2 |
        | berth   |            60 |   0.60 | 1.50 (haproxy) |         20 |       1 |
        | haproxy |    42 (40–44) |   0.38 |   0.67 (berth) | 31 (30–32) |       2 |
        | envoy   |    21 (20–22) |   0.19 |   0.33 (berth) | 26 (25–27) |       2 |

        berth: 1 failed: reset
        "#);
    }
}
