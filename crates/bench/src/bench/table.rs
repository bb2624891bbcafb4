//! Writes results as Markdown tables, which can also be read on a terminal.

use super::peer::{Peer, PeerKind};
use super::results::Results;
use super::work::{Case, Metric, Work};
use crate::markdown::align_table;
use std::fmt::Write;

const SAMPLES_NOTE: &str =
    "Each figure is the median of the rounds, with the lowest and the highest in brackets.";

const RATIOS_NOTE: &str = "Each ratio (÷) is the median of the ratios within a round.";

/// Makes a table of medians. Each line is a figure that most readers look for.
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
        .zip(results.find_no_relay_peer());
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
                    .map(|summary| metric.format_value(summary.median))
            };
            row.extend(all.iter().map(|peer| cell_or_dash(median(peer))));
            row.extend(haproxy.map(|haproxy| format_ratio(results, case, berth, haproxy, metric)));
            row.push(format_best_ratio(results, case, berth, metric));
            if let Some((inject, none)) = inject {
                row.extend([
                    format_ratio(results, case, inject, none, metric),
                    cell_or_dash(format_goal(case, metric)),
                ]);
            }
            rows.push(row);
        }
    }
    format!(
        "## Overview\n\nMedians. {RATIOS_NOTE}\n\n{}\n",
        align_table(&rows)
    )
}

fn format_goal(case: Case, metric: Metric) -> Option<String> {
    let limit = case.goal(metric)?;
    Some(if metric.higher_is_better() {
        format!("≥ {limit:.2} of none")
    } else {
        format!("≤ {}", metric.format_value(limit))
    })
}

/// Makes a table for each case that was measured.
pub(super) fn render_tables(results: &Results) -> String {
    let mut text = String::new();
    let mut work = None;
    for case in results.cases() {
        if work.replace(case.work) != Some(case.work) {
            let (title, about) = titles_of(case.work);
            let _ = writeln!(text, "## {title}\n\n{about} {SAMPLES_NOTE} {RATIOS_NOTE}\n");
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

/// Returns the title of a work's tables, and a sentence that describes the work.
fn titles_of(work: Work) -> (&'static str, &'static str) {
    match work {
        Work::Ping => (
            "Ping",
            "Requests and answers of 256 B on kept connections, one request at a time on each connection.",
        ),
        Work::Connect => (
            "Connect",
            "Connect, request and answer of 64 B, close. The time is measured from the connect to the answer.",
        ),
        Work::Bulk => (
            "Bulk",
            "Bytes in one direction during the whole measurement: the rate of arrival, and the relay's CPU time per GB.",
        ),
        Work::Idle => (
            "Idle",
            "Connections that are held open, measured after one round trip and again after an answer of 1 MiB on each connection. \
             Memory is the increase of the relay's Pss, summed over the relay's processes. The kernel's memory is the increase on the \
             whole machine (Slab of /proc/meminfo): the two sockets of the relay, and the sockets of client and backend.",
        ),
        Work::Burst => (
            "Burst",
            "Clients that all connect at the same moment, each with request and answer of 64 B, and stay connected. The rate is \
             measured until the last client has its answer. Where a queue is full, the client sends its SYN again after 1 s.",
        ),
        Work::Growth => (
            "Growth",
            "Like ping, with more and more connections, all active, to one relay that is not restarted.",
        ),
        Work::Slow => (
            "Slow",
            "Clients that each read an answer of 5 MB at 50 KB/s, measured after 8 s. The sockets' memory is the increase in the whole \
             network namespace (TCP of /proc/net/sockstat) since before the answers; the relay's memory is the increase of its Pss.",
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
        .find_no_relay_peer()
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
        row.push(format_best_ratio(results, case, peer, main));
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

fn cell_or_dash(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "–".to_owned())
}

fn format_ratio(results: &Results, case: Case, peer: usize, to: usize, metric: Metric) -> String {
    let ratio = results.ratio(case, peer, to, metric).filter(|_| peer != to);
    cell_or_dash(ratio.map(|ratio| format!("{ratio:.2}")))
}

/// Formats the ratio of a figure to that of the best other relay, and that relay's name.
fn format_best_ratio(results: &Results, case: Case, peer: usize, metric: Metric) -> String {
    let best = results
        .find_best_other_peer(case, peer, metric)
        .filter(|_| Some(peer) != results.find_no_relay_peer());
    cell_or_dash(best.map(|best| {
        format!(
            "{} ({})",
            format_ratio(results, case, peer, best, metric),
            results.peers[best].name
        )
    }))
}

fn format_cell(results: &Results, case: Case, peer: usize, metric: Metric) -> String {
    let Some(summary) = results.summary(case, peer, metric) else {
        return cell_or_dash(None);
    };
    let (median, least, most) = (
        metric.format_value(summary.median),
        metric.format_value(summary.least),
        metric.format_value(summary.most),
    );
    if least == most {
        median
    } else {
        format!("{median} ({least}–{most})")
    }
}

/// Lists the errors because of which a case has fewer figures.
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
    use crate::bench::results::tests::make_results;

    #[test]
    fn the_overview_has_medians_and_ratios() {
        insta::assert_snapshot!(render_overview(&make_results()), @r#"
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
        let mut results = make_results();
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
        insta::assert_snapshot!(render_table(&make_results(), Case::ping(16)) + &format_failures(&make_results(), Case::ping(16)), @r#"
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
