//! Upgrades of simulated clusters, and of recorded pages, before the judge.

mod cases;
mod simulated;

use crate::sequential::Wealth;
use crate::signals::{Counts, Subject};
use crate::{Judge, Judgement, Outcome, Row, Sample, Signal, Verdict};
use proptest::prelude::*;
use simulated::{Cluster, Fault, INTERVAL};
use std::collections::BTreeMap;
use std::env;
use std::time::Duration;

/// The new instance's share of new connections in each step. Each step takes a minute.
const STEPS: [f64; 4] = [0.05, 0.25, 0.5, 1.0];
const MINUTE: u32 = (60.0 / INTERVAL) as u32;

/// A finished upgrade of a simulated cluster.
#[derive(Debug)]
struct Upgrade {
    verdict: Verdict,
    /// Seconds from the first step to the verdict.
    seconds: f64,
    /// `met` is the number of requests that met the fault in the first step before the verdict.
    /// `minute` is the number of all requests in that step.
    met: f64,
    minute: f64,
}

impl Upgrade {
    fn is_bad(&self) -> bool {
        self.verdict.outcome == Outcome::Bad
    }

    fn bad_signals(&self) -> Vec<Signal> {
        bad_rows(&self.verdict).map(|row| row.code).collect()
    }
}

fn bad_rows(verdict: &Verdict) -> impl Iterator<Item = &Row> {
    verdict
        .rows
        .iter()
        .filter(|row| row.judgement == Judgement::Bad)
}

fn run_upgrade(mut cluster: Cluster, accepted: &[Signal]) -> Upgrade {
    let mut judge = Judge::new(accepted.iter().copied());
    let (mut at, mut seconds, mut met, mut minute) = (0.0, 0.0, 0.0, 0.0);
    'all: for share in [0.0].into_iter().chain(STEPS) {
        if share > 0.0 {
            judge.begin_step();
        }
        for interval in 0..MINUTE {
            at += INTERVAL;
            let [old, new] = cluster.simulate_interval(share);
            judge.observe(Duration::from_secs_f64(at), old, new);
            if share == 0.0 {
                (cluster.met, cluster.all) = (0.0, 0.0);
                continue;
            }
            seconds += INTERVAL;
            if share == STEPS[0] {
                (met, minute) = (
                    cluster.met,
                    cluster.all / f64::from(interval + 1) * f64::from(MINUTE),
                );
            }
            if judge.is_bad() {
                break 'all;
            }
        }
    }
    Upgrade {
        verdict: judge.verdict(),
        seconds,
        met,
        minute,
    }
}

/// No good upgrade is sent back, and 95 of 100 are called good. BERTH_JUDGE_UPGRADES is the number
/// of upgrades.
#[test]
fn good_upgrades_are_not_sent_back() {
    let upgrades =
        env::var("BERTH_JUDGE_UPGRADES").map_or(30, |count| count.parse().expect("a number"));
    let all = (0..upgrades).map(|seed| (seed, run_upgrade(Cluster::noisy(seed), &[])));
    let mut outcomes = BTreeMap::<String, u64>::new();
    for (seed, upgrade) in all {
        *outcomes
            .entry(format!("{:?}", upgrade.verdict.outcome))
            .or_default() += 1;
        for row in bad_rows(&upgrade.verdict) {
            println!("seed {seed}, {} s: {row:?}", upgrade.seconds);
        }
    }
    println!("of {upgrades} good upgrades: {outcomes:?}");
    let of = |outcome: &str| outcomes.get(outcome).copied().unwrap_or_default();
    assert!(
        of("Bad") == 0 && of("Good") * 100 >= 95 * upgrades,
        "{outcomes:?}"
    );
}

/// Each fault is found, and in the first minute fewer than one in a hundred requests meet the
/// fault. From the given rate (requests a second) on, the fault is found within the first minute.
/// BERTH_JUDGE_SEEDS is the number of clusters for each fault.
#[test]
fn each_simulated_fault_is_found_early() {
    let seeds = env::var("BERTH_JUDGE_SEEDS").map_or(2, |count| count.parse().expect("a number"));
    let all = [
        (Fault::Errors, Signal::Errors, 50.0),
        (Fault::ErrorsOfOne, Signal::Errors, 200.0),
        (Fault::SlowLists, Signal::Latency, 1000.0),
        (Fault::Webhook, Signal::WebhookErrors, 50.0),
        (Fault::NotFound, Signal::NotFound, 1000.0),
        (Fault::Leak, Signal::Memory, 50.0),
        (Fault::Hang, Signal::NoAnswer, 50.0),
        (Fault::StandStill, Signal::NoAnswer, 50.0),
    ];
    for (fault, code, early) in all {
        for rate in [50.0, 200.0, 1000.0] {
            let mut upgrades: Vec<_> = (0..seeds)
                .map(|seed| run_upgrade(Cluster::calm(seed, rate, fault), &[]))
                .collect();
            upgrades.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
            let middle = &upgrades[upgrades.len() / 2];
            println!(
                "{fault:?} {rate}: {} s, {} of {} requests of the first minute",
                middle.seconds, middle.met, middle.minute
            );
            assert!(
                middle.met <= 0.01 * middle.minute && (middle.seconds <= 60.0 || rate < early),
                "{middle:?}"
            );
            for upgrade in &upgrades {
                let codes = upgrade.bad_signals();
                let found = codes.contains(&code)
                    || fault == Fault::Webhook && codes.contains(&Signal::Errors);
                assert!(upgrade.is_bad() && found, "{fault:?} {rate}: {upgrade:?}");
            }
        }
    }
}

/// A fault that the judge's signals hardly show never leads to the verdict "good".
/// BERTH_JUDGE_SEEDS is the number of clusters for each fault.
#[test]
fn no_fault_is_called_good() {
    let seeds = env::var("BERTH_JUDGE_SEEDS").map_or(2, |count| count.parse().expect("a number"));
    let all = [
        (Fault::RefusesMost, Some(Signal::Authentication)),
        (Fault::RefusesAll, Some(Signal::Authentication)),
        (Fault::Forbids, Some(Signal::Authorization)),
        (Fault::Swallows, None),
        (Fault::FewSeats, Some(Signal::Rejections)),
        (Fault::HidesMetrics, Some(Signal::NoMetrics)),
        (Fault::FailsMoved, Some(Signal::Errors)),
        (Fault::FailsBesideTenant, Some(Signal::Errors)),
        (Fault::FailsControllers, Some(Signal::Errors)),
        (Fault::Starves, None),
        (Fault::SlowsWebhook, None),
    ];
    for (fault, code) in all {
        for rate in [50.0, 200.0, 1000.0] {
            for seed in 0..seeds {
                let upgrade = run_upgrade(Cluster::calm(seed, rate, fault), &[]);
                println!(
                    "{fault:?} {rate}: {} s, {:?}, {:?}",
                    upgrade.seconds,
                    upgrade.verdict.outcome,
                    upgrade.bad_signals()
                );
                assert_ne!(
                    upgrade.verdict.outcome,
                    Outcome::Good,
                    "{fault:?} {rate}, seed {seed}: {upgrade:?}"
                );
                assert!(
                    code.is_none_or(|code| upgrade.bad_signals().contains(&code)),
                    "{fault:?} {rate}, seed {seed}: {upgrade:?}"
                );
            }
        }
    }
}

#[test]
fn an_accepted_finding_does_not_count() {
    let upgrade = run_upgrade(
        Cluster::calm(1, 200.0, Fault::SlowLists),
        &[Signal::Latency],
    );
    assert_eq!(upgrade.verdict.outcome, Outcome::Good, "{upgrade:?}");
    let row = upgrade
        .verdict
        .rows
        .iter()
        .find(|row| row.judgement == Judgement::Accepted && row.subject == "LIST");
    let note = &row.expect("slow lists are a row").note;
    assert!(note.starts_with("95th percentile "), "{note}");
    // Only signals that are times have quantiles in their notes.
    assert!(
        upgrade
            .verdict
            .rows
            .iter()
            .all(|row| row.code != Signal::Errors || row.note.is_empty()),
        "{upgrade:?}"
    );
}

#[test]
fn too_few_requests_are_undecided_with_a_reason() {
    let upgrade = run_upgrade(Cluster::calm(1, 1.0, Fault::None), &[]);
    assert_eq!(upgrade.verdict.outcome, Outcome::Undecided);
    assert!(
        upgrade.verdict.lacking[0]
            .ends_with("requests to the new instance can be compared, and 100 are needed")
    );
    assert_eq!(upgrade.verdict.against, None);
    let verdict = Judge::new([]).verdict();
    assert_eq!(
        (verdict.outcome, verdict.rows.len()),
        (Outcome::Undecided, 0)
    );
}

/// A version that refuses every client has too few requests for a bad verdict. The verdict still
/// names the evidence against it.
#[test]
fn few_clients_that_are_refused_speak_against_a_version() {
    for (fault, rate, words) in [
        (
            Fault::RefusesAll,
            0.1,
            "requests to the new instance were answered 401",
        ),
        (
            Fault::Forbids,
            0.04,
            "requests to the new instance were answered 403",
        ),
        (Fault::Swallows, 0.5, "connections and accepted no request"),
    ] {
        let Verdict {
            outcome, against, ..
        } = run_upgrade(Cluster::calm(1, rate, fault), &[]).verdict;
        assert_eq!(outcome, Outcome::Undecided, "{fault:?}");
        let against = against.unwrap_or_default();
        assert!(against.ends_with(words), "{fault:?}: {against:?}");
    }
}

/// Judges two instances by their pages. `both` does not change and is on both pages. The lines of
/// `old` and `new` grow by the same amount in each interval.
fn make_judge(both: &str, old: &str, new: &str) -> Judge {
    let mut judge = Judge::new([]);
    let page = |more: &str, times: f64| {
        let lines = both
            .lines()
            .map(|line| (line, 1.0))
            .chain(more.lines().map(|line| (line, times)));
        let grown = lines.filter_map(|(line, times)| {
            let (name, value) = line.rsplit_once(' ')?;
            // A name with an exclamation mark is a gauge, which does not grow.
            let times = if line.starts_with('!') { 1.0 } else { times };
            Some(format!(
                "{} {}\n",
                name.trim_start_matches('!'),
                value.parse::<f64>().ok()? * times
            ))
        });
        grown.collect::<String>()
    };
    for at in 0..40 {
        if at == 5 {
            judge.begin_step();
        }
        let times = f64::from(at);
        let [old, new] = [(old, 1.0 + times), (new, times)]
            .map(|(more, times)| Sample::new(Some(&page(more, times))));
        judge.observe(Duration::from_secs(2 * at as u64), old, new);
    }
    judge
}

fn bad_codes(judge: &Judge) -> Vec<Signal> {
    let mut codes: Vec<_> = bad_rows(&judge.verdict()).map(|row| row.code).collect();
    codes.dedup();
    codes
}

#[test]
fn a_webhooks_own_refusals_are_no_fault() {
    let calls = "apiserver_admission_webhook_admission_duration_seconds_bucket{name=\"a\",le=\"+Inf\"} 20\n";
    let rejected = |error| {
        format!(
            "{calls}apiserver_admission_webhook_rejection_count{{name=\"a\",error_type=\"{error}\"}} 9"
        )
    };
    assert_eq!(bad_codes(&make_judge("", calls, &rejected("no_error"))), []);
    assert_eq!(
        bad_codes(&make_judge("", calls, &rejected("calling_webhook_error"))),
        [Signal::WebhookErrors]
    );
    let ignored = format!("{calls}apiserver_admission_webhook_fail_open_count{{name=\"a\"}} 9");
    assert_eq!(
        bad_codes(&make_judge("", calls, &ignored)),
        [Signal::WebhookErrors]
    );
}

#[test]
fn rejections_count_where_seats_are_free() {
    let served = |seats: u32| {
        format!(
            "apiserver_flowcontrol_dispatched_requests_total{{priority_level=\"a\"}} 20\n\
             !apiserver_flowcontrol_current_limit_seats{{priority_level=\"a\"}} {seats}\n"
        )
    };
    let rejects = |seats: u32, taken: u32| {
        served(seats)
            + &format!(
                "apiserver_flowcontrol_rejected_requests_total{{priority_level=\"a\"}} 20\n\
                 !apiserver_flowcontrol_current_executing_seats{{priority_level=\"a\"}} {taken}"
            )
    };
    // A rejection counts if at most half of the seats are taken, or if the instance has fewer than
    // three quarters of the old instance's seats.
    for (seats, taken, found) in [
        (20, 10, true),
        (20, 11, false),
        (15, 11, false),
        (14, 11, true),
    ] {
        let codes = bad_codes(&make_judge("", &served(20), &rejects(seats, taken)));
        assert_eq!(
            codes == [Signal::Rejections],
            found,
            "{seats} {taken}: {codes:?}"
        );
    }
}

#[test]
fn storage_errors_and_aborts_are_found() {
    for (all, errors, code) in [
        (
            "etcd_requests_total{operation=\"get\"}",
            "etcd_request_errors_total{operation=\"get\"}",
            Signal::EtcdErrors,
        ),
        (
            "etcd_requests_total{operation=\"get\"}",
            "apiserver_storage_decode_errors_total{}",
            Signal::Decoding,
        ),
        (
            "apiserver_storage_transformation_operations_total{status=\"OK\"}",
            "apiserver_storage_transformation_operations_total{status=\"Internal\"}",
            Signal::Encryption,
        ),
        (
            "apiserver_request_total{verb=\"GET\"}",
            "apiserver_request_aborts_total{verb=\"GET\"}",
            Signal::Aborts,
        ),
    ] {
        let old = format!("{all} 20\n");
        assert_eq!(
            bad_codes(&make_judge("", &old, &format!("{old}{errors} 5"))),
            [code]
        );
        // Equal errors on both instances are no finding.
        let both = format!("{old}{errors} 5");
        assert_eq!(bad_codes(&make_judge("", &both, &both)), []);
    }
}

#[test]
fn an_apiservice_unavailable_to_the_new_instance_alone_is_found() {
    let [up, down] =
        [0, 1].map(|value| format!("!aggregator_unavailable_apiservice{{name=\"v1.a\"}} {value}"));
    assert_eq!(
        bad_codes(&make_judge("", &up, &down)),
        [Signal::Aggregation]
    );
    assert!(bad_rows(&make_judge("", &up, &down).verdict()).any(|row| row.subject == "v1.a"));
    assert_eq!(bad_codes(&make_judge("", &down, &down)), []);
    assert_eq!(bad_codes(&make_judge("", &down, &up)), []);
}

#[test]
fn a_restart_is_a_finding() {
    let started = |at: u32| Sample::new(Some(&format!("process_start_time_seconds {at}")));
    let mut judge = Judge::new([]);
    judge.observe(Duration::from_secs(1), started(1), started(5));
    judge.observe(Duration::from_secs(2), started(2), started(5));
    assert!(!judge.is_bad());
    judge.observe(Duration::from_secs(3), started(2), started(6));
    assert_eq!(bad_codes(&judge), [Signal::Restart]);
}

#[test]
fn a_missing_api_counts_if_it_is_used() {
    let asked = |count: u32| {
        let line = format!(
            "apiserver_request_total{{group=\"a\",version=\"v1beta1\",resource=\"x\",verb=\"GET\"}} {count}"
        );
        Sample::new(Some(&line)).with_apis(["v1".to_owned(), "a/v1beta1".to_owned()].into())
    };
    let new = || Sample::new(Some("")).with_apis(["v1".to_owned(), "a/v1".to_owned()].into());
    let mut judge = Judge::new([]);
    for at in 0..9 {
        judge.observe(Duration::from_secs(at), asked(7), new());
    }
    assert!(!judge.is_bad());
    judge.observe(Duration::from_secs(9), asked(8), new());
    let verdict = judge.verdict();
    assert_eq!(
        bad_rows(&verdict)
            .map(|row| (row.code, &*row.subject))
            .collect::<Vec<_>>(),
        [(Signal::MissingApi, "a/v1beta1")]
    );
    // A watch that was opened before the judge's start counts as long as it is open.
    let watched = "apiserver_longrunning_requests{group=\"a\",version=\"v1beta1\",resource=\"x\",verb=\"WATCH\"} 1";
    let old = Sample::new(Some(watched)).with_apis(["a/v1beta1".to_owned()].into());
    let mut judge = Judge::new([]);
    judge.observe(Duration::ZERO, old, new());
    assert_eq!(bad_codes(&judge), [Signal::MissingApi]);
}

/// A page of an instance with this many successful and failed requests.
fn requests_sample(good: u64, bad: u64) -> Sample {
    let line = |code, count| {
        format!(
            "apiserver_request_total{{verb=\"GET\",resource=\"pods\",code=\"{code}\"}} {count}\n"
        )
    };
    Sample::new(Some(&(line(200, good) + &line(500, bad))))
}

#[test]
fn requests_that_met_a_fault_are_counted() {
    let mut judge = Judge::new([]);
    judge.observe(
        Duration::ZERO,
        requests_sample(50, 0),
        requests_sample(0, 0),
    );
    judge.begin_step();
    assert_eq!(judge.requests_that_met_the_fault(), (0, 0));
    let bad = (1..99).find(|at| {
        judge.observe(
            Duration::from_secs(2 * at),
            requests_sample(50 + 90 * at, 0),
            requests_sample(0, 20 * at),
        );
        assert!(judge.is_bad() || judge.requests_that_met_the_fault().1 == 0);
        judge.is_bad()
    });
    let intervals = bad.expect("it is found");
    assert_eq!(
        judge.requests_that_met_the_fault(),
        (110 * intervals, 20 * intervals)
    );
}

#[test]
fn a_common_outage_is_left_out() {
    let mut judge = Judge::new([]);
    judge.observe(
        Duration::ZERO,
        requests_sample(50, 0),
        requests_sample(0, 0),
    );
    judge.begin_step();
    for at in 1..40 {
        // A tenth of the old instance's requests fail, and all requests of the new instance fail.
        judge.observe(
            Duration::from_secs(2 * at),
            requests_sample(50 + 90 * at, 10 * at),
            requests_sample(0, 20 * at),
        );
    }
    let verdict = judge.verdict();
    assert_eq!(verdict.outcome, Outcome::Undecided, "{verdict:?}");
    assert!(
        verdict.lacking[0]
            .ends_with("; 39 intervals were left out, since the old instance suffered, too"),
        "{verdict:?}"
    );
}

#[test]
fn slow_requests_are_excused_while_the_old_instance_is_slow() {
    // `all` requests, of which `quick` took less than a second.
    let asked = |resource: &str, all: u32, quick: u32| {
        let bucket = |le: &str, count: u32| {
            let labels =
                format!("verb=\"GET\",resource=\"{resource}\",scope=\"resource\",le=\"{le}\"");
            format!("apiserver_request_duration_seconds_bucket{{{labels}}} {count}\n")
        };
        bucket("0.1", quick) + &bucket("1", quick) + &bucket("+Inf", all)
    };
    // The old instance's clients ask for pods from now on, and the new instance's for config maps.
    let (both, new) = (asked("configmaps", 100, 100), asked("configmaps", 20, 2));
    assert_eq!(
        bad_codes(&make_judge(&both, &asked("pods", 6, 6), &new)),
        [Signal::Latency]
    );
    assert_eq!(
        bad_codes(&make_judge(&both, &asked("pods", 6, 1), &new)),
        []
    );
    // Times are compared only if the old instance had five requests in the interval.
    assert_eq!(
        bad_codes(&make_judge(&both, &asked("pods", 5, 5), &new)),
        [Signal::Latency]
    );
    assert_eq!(
        bad_codes(&make_judge(&both, &asked("pods", 4, 4), &new)),
        []
    );
}

proptest! {
    /// If the average share of bad requests is as allowed, a bet does not gain on average, however
    /// the bad requests cluster.
    #[test]
    fn no_bet_is_favourable(all in 1.0..1e6f64, allowed in 0.001..1.0f64, cluster in 0.0..1.0f64) {
        let factor = |bad: f64| {
            let mut wealth = Wealth::default();
            (0..4).for_each(|_| wealth.begin_step());
            let before = wealth.current_wealth();
            wealth.bet_on_interval(Counts { bad, all }, allowed, false);
            wealth.current_wealth() / (before + 1.0 / 256.0)
        };
        // In each interval either no request or the share `part` of the requests is bad. The second
        // is so rare that the average share is the allowed one.
        let part = allowed + cluster * (1.0 - allowed);
        prop_assert!(factor(0.0) > 0.0);
        prop_assert!(factor(part * all) * allowed / part + factor(0.0) * (1.0 - allowed / part) <= 1.0 + 1e-9);
    }

    #[test]
    fn the_staked_wealth_adds_up(intervals in 0u32..500, steps in 0u32..9) {
        let mut wealth = Wealth::default();
        (0..steps).for_each(|_| wealth.begin_step());
        // Each interval has exactly as many bad requests as allowed.
        (0..intervals).for_each(|_| wealth.bet_on_interval(Counts { bad: 10.0, all: 95.0 }, 0.1, false));
        let staked = f64::from(steps.min(4)) / 8.0 + f64::from(intervals.min(128)) / 256.0;
        prop_assert!((wealth.current_wealth() - staked).abs() < 1e-9);
    }
}

#[test]
fn weights_sum_to_one_at_most() {
    let sum: f64 = Signal::COMPARED_SIGNALS
        .into_iter()
        .map(Signal::weight)
        .sum();
    assert!(sum <= 1.0 + 1e-9, "{sum}");
    assert_eq!(Subject::default().to_string(), "all");
    assert_eq!(Signal::WebhookErrors.to_string(), "webhook-errors");
}
