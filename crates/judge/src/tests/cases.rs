//! Short histories of two instances. The verdict on each can be calculated by hand.

use super::bad_codes;
use crate::signals::{Connections, Sample, Signal, Subject};
use crate::{Judge, Judgement, Outcome, Row};
use std::time::Duration;

/// Two instances that the judge asks for their metrics every two seconds.
struct Pair {
    judge: Judge,
    at: u64,
    old: Sample,
    new: Sample,
}

impl Pair {
    /// Starts the judge. `life` has the old instance's requests for pods until then: bad ones and
    /// all.
    fn new(signal: Signal, life: [f64; 2]) -> Self {
        let sample = Sample {
            metrics: Signal::COMPARED_SIGNALS.map(Signal::metric).into(),
            ..Sample::new(Some(""))
        };
        let mut pair = Self {
            judge: Judge::new([]),
            at: 1000,
            old: sample.clone(),
            new: sample,
        };
        pair.add_and_observe(signal, life, [0.0; 2]);
        pair
    }

    fn add_requests(&mut self, signal: Signal, resource: &str, old: [f64; 2], new: [f64; 2]) {
        for (sample, [bad, all]) in [(&mut self.old, old), (&mut self.new, new)] {
            sample.add_counts(signal, Subject::of_resource(resource), bad, all);
        }
    }

    fn observe_pair(&mut self) {
        self.at += 2;
        self.judge.observe(
            Duration::from_secs(self.at),
            self.old.clone(),
            self.new.clone(),
        );
    }

    /// Adds two seconds. `old` and `new` have each instance's requests for pods: bad ones and all.
    fn add_and_observe(&mut self, signal: Signal, old: [f64; 2], new: [f64; 2]) {
        self.add_requests(signal, "pods", old, new);
        self.observe_pair();
    }

    /// Number of intervals until the verdict is bad.
    fn intervals_until_bad(&mut self, interval: impl Fn(&mut Self)) -> Option<usize> {
        (1..40).find(|_| {
            interval(self);
            self.judge.is_bad()
        })
    }

    fn sum_row(&self, signal: Signal) -> Row {
        let mut rows = self.judge.verdict().rows.into_iter();
        rows.find(|row| row.code == signal && row.subject == "all")
            .expect("every signal has a sum")
    }
}

#[test]
fn the_limit_is_the_sum_of_its_three_parts() {
    // Of the old instance's 400 requests, 4 are bad, all of them in the 32 s before the step.
    let mut pair = Pair::new(Signal::Errors, [0.0, 50.0]);
    pair.add_and_observe(Signal::Errors, [4.0, 50.0], [0.0; 2]);
    (0..15).for_each(|_| pair.add_and_observe(Signal::Errors, [0.0, 20.0], [0.0; 2]));
    pair.judge.begin_step();
    // Of 100 requests, the tolerance allows 2. In the second interval, a tenth of the old
    // instance's requests fail, too.
    let (always, mut usual, mut allowed) = (2.0 + 2.0 * 4.0 / 32.0, 0.0, 0.0);
    for (intervals, old, share) in [(1, [0.0; 2], 0.01), (2, [2.0, 20.0], 0.1)] {
        pair.add_and_observe(Signal::Errors, old, [5.0, 100.0]);
        (usual, allowed) = (
            usual + 100.0 * share,
            allowed + always + 3.0 * 100.0 * share,
        );
        let (row, all) = (pair.sum_row(Signal::Errors), 100 * intervals);
        assert_eq!((row.compared, row.judgement), (all, Judgement::Good));
        for (is, wanted) in [
            (row.old, usual / all as f64),
            (row.new, 0.05),
            (row.limit, allowed / all as f64),
        ] {
            assert!((is - wanted).abs() < 1e-9, "{wanted}: {row:?}");
        }
    }
}

/// An eighth of the old instance's 80 requests fail usually, which is 10. The old instance suffers
/// above three times as many, plus a twentieth of 80, plus 3: above 37.
#[test]
fn the_old_instance_suffers_beyond_three_times_the_usual_rate() {
    for (bad, compared) in [(30.0 + 4.0 + 3.0, 100), (38.0, 0)] {
        let mut pair = Pair::new(Signal::Errors, [125.0, 1000.0]);
        pair.judge.begin_step();
        pair.add_and_observe(Signal::Errors, [bad, 80.0], [0.0, 100.0]);
        assert_eq!(pair.sum_row(Signal::Errors).compared, compared, "{bad}");
    }
}

/// The wealth at stake is an eighth, plus 1/256 for each interval. The verdict is bad once the
/// wealth reaches 3200, which is 1 / (ALPHA / 8 / 2). Each interval multiplies the wealth by 16, or
/// by 2 if the old instance had less than one request lately.
#[test]
fn errors_that_cannot_be_compared_take_more_intervals_to_be_found() {
    for (before, beside, intervals) in [(0.0, 0.0, 15), (0.0, 1.0, 4), (4.0, 0.0, 2 + 7)] {
        let mut pair = Pair::new(Signal::Errors, [0.0, 50.0]);
        pair.add_and_observe(Signal::Errors, [0.0, before], [0.0; 2]);
        pair.judge.begin_step();
        let bad = pair.intervals_until_bad(|pair| {
            pair.add_and_observe(Signal::Errors, [0.0, beside], [20.0, 20.0]);
        });
        assert_eq!(bad, Some(intervals), "{before} {beside}");
        assert_eq!(pair.judge.verdict().outcome, Outcome::Bad);
    }
    // The sum is comparable if at least half of the bad requests are for pods, since the old
    // instance has requests for pods. Otherwise the test of pods alone finds the fault, with a
    // quarter of the sum's part of ALPHA.
    for (lacked, had, intervals) in [(10.0, 10.0, 4), (11.0, 9.0, 5)] {
        let mut pair = Pair::new(Signal::Errors, [0.0, 50.0]);
        pair.add_requests(Signal::Errors, "nodes", [0.0, 50.0], [0.0; 2]);
        pair.observe_pair();
        (0..9).for_each(|_| pair.observe_pair());
        pair.judge.begin_step();
        let bad = pair.intervals_until_bad(|pair| {
            pair.add_requests(Signal::Errors, "nodes", [0.0; 2], [lacked; 2]);
            pair.add_and_observe(Signal::Errors, [0.0, 1.0], [had; 2]);
        });
        assert_eq!(bad, Some(intervals), "{lacked}");
    }
}

/// A bet waits for 50 requests times the allowed share (a tenth), but for no more than 10.
#[test]
fn a_bet_waits_for_enough_requests() {
    for (life, few) in [([0.0, 50.0], 5), ([50.0, 50.0], 10)] {
        let mut pair = Pair::new(Signal::Rejections, life);
        pair.judge.begin_step();
        for (more, compared) in [(few - 1, 0), (1, few)] {
            pair.add_and_observe(Signal::Rejections, [0.0; 2], [0.0, f64::from(more)]);
            assert_eq!(
                pair.sum_row(Signal::Rejections).compared,
                u64::from(compared as u32)
            );
        }
    }
}

/// Sizes in MiB, two seconds apart. Memory counts as growing beyond 1.25 times the old instance's
/// size, if the growth per second exceeds both 8 MiB and a 200th of the old instance's size.
#[test]
fn memory_counts_as_growing_only_above_all_its_limits() {
    for (old, before, now, grows) in [
        (800, 1000, 1017, true),
        (800, 1000, 1016, false),
        (800, 984, 1001, true),
        (800, 983, 1000, false),
        (4000, 6000, 6041, true),
        (4000, 6000, 6040, false),
        (0, 1000, 2000, false),
    ] {
        let size = |mib: u32| Some(f64::from(mib) * f64::from(1 << 20));
        let mut pair = Pair::new(Signal::Errors, [0.0; 2]);
        (pair.old.memory, pair.new.memory) = (size(old), size(before));
        pair.observe_pair();
        pair.judge.begin_step();
        pair.new.memory = size(now);
        pair.observe_pair();
        let row = pair.sum_row(Signal::Memory);
        assert_eq!(
            (row.compared, row.new, row.limit),
            (1, f64::from(u8::from(grows)), 0.1),
            "{old} {before} {now}"
        );
    }
}

#[test]
fn one_apiservice_unavailable_to_the_new_instance_is_enough() {
    for (down, compared) in [(None, 0), (Some("b"), 1), (Some("a"), 1)] {
        let mut pair = Pair::new(Signal::Errors, [0.0; 2]);
        for name in ["a", "b"].into_iter().filter(|_| down.is_some()) {
            pair.old.unavailable.insert(name.to_owned(), false);
            pair.new
                .unavailable
                .insert(name.to_owned(), Some(name) == down);
        }
        pair.judge.begin_step();
        pair.observe_pair();
        let row = pair.sum_row(Signal::Aggregation);
        assert_eq!(
            (row.compared, row.new),
            (compared, compared as f64),
            "{down:?}"
        );
    }
}

/// Number of samples until the new instance is found to be silent, or to hide its metrics. Each
/// letter is a sample:
///
/// - `s`: the new instance is silent.
/// - `r`: the new instance refuses its metrics.
/// - `-`: the new instance answers, and gets no connection.
/// - `e`, `f`: the new instance answers, and gets one or four connections without a byte.
/// - `b`: the new instance answers, and gets two connections, one of them with a byte.
/// - Capital letters and `_`: in addition, the old instance does not answer.
fn samples_until_silent(samples: &str) -> Option<(usize, Vec<Signal>)> {
    let mut pair = Pair::new(Signal::Errors, [0.0; 2]);
    let (answers, mut connections) = (pair.new.clone(), Connections::default());
    pair.new = answers.clone().with_connections(connections.clone());
    pair.observe_pair();
    let found = samples.chars().position(|letter| {
        pair.old.answered = letter.is_lowercase() || letter == '-';
        let (all, empty) = match letter.to_ascii_lowercase() {
            'e' => (1.0, 1.0),
            'f' => (4.0, 4.0),
            'b' => (2.0, 1.0),
            _ => (0.0, 0.0),
        };
        (connections.all, connections.empty) = (connections.all + all, connections.empty + empty);
        let sample = match letter.to_ascii_lowercase() {
            's' => Sample::new(None),
            'r' => Sample::with_refused_metrics(),
            _ => answers.clone(),
        };
        pair.new = sample.with_connections(connections.clone());
        pair.observe_pair();
        pair.judge.is_bad()
    });
    Some((found? + 1, bad_codes(&pair.judge)))
}

#[test]
fn silence_is_four_samples_without_an_answer_or_a_byte() {
    for (samples, found) in [
        ("ssss", Some(4)),
        ("sssrsss-sss", None),
        ("SSSSsss", None),
        ("eeee", Some(4)),
        ("f---", Some(4)),
        ("f--", None),
        ("e----eef", Some(7 + 1)),
        ("e---------", None),
        ("----f--", None),
        ("eebeeee", Some(7)),
        ("EEEE---", None),
        ("eEEEeee", Some(7)),
        ("f___", None),
        ("f___---", Some(7)),
    ] {
        let wanted = found.map(|after| (after, vec![Signal::NoAnswer]));
        assert_eq!(samples_until_silent(samples), wanted, "{samples}");
    }
    let refuses = |count| "r".repeat(count);
    assert_eq!(
        samples_until_silent(&refuses(30)),
        Some((30, vec![Signal::NoMetrics]))
    );
    assert_eq!(
        samples_until_silent(&(refuses(29) + "RRRR-" + &refuses(29))),
        None
    );
}

/// When 20 connections have come, and from the eleventh interval on, there must be at least a
/// quarter as many requests.
#[test]
fn each_connection_must_bring_requests() {
    let after = |connections: f64, arrived: f64, change: fn(&mut Pair)| {
        let mut pair = Pair::new(Signal::Errors, [0.0; 2]);
        pair.add_requests(Signal::EmptyConnections, "", [0.0; 2], [0.0; 2]);
        pair.observe_pair();
        pair.judge.begin_step();
        pair.add_requests(
            Signal::EmptyConnections,
            "",
            [0.0; 2],
            [0.0, connections - 1.0],
        );
        pair.add_requests(Signal::Authentication, "", [0.0; 2], [0.0, arrived]);
        (0..10).for_each(|_| pair.observe_pair());
        pair.add_requests(Signal::EmptyConnections, "", [0.0; 2], [0.0, 1.0]);
        change(&mut pair);
        pair.intervals_until_bad(Pair::observe_pair)
            .map(|intervals| (10 + intervals, bad_codes(&pair.judge)))
    };
    assert_eq!(
        after(20.0, 4.0, |_| ()),
        Some((11, vec![Signal::NoRequests]))
    );
    assert_eq!(after(20.0, 5.0, |_| ()), None);
    assert_eq!(after(19.0, 0.0, |_| ()), None);
    // An instance that lacks the metric may have had requests all the same.
    assert_eq!(after(20.0, 4.0, |pair| pair.new.metrics.clear()), None);
    let refuses = |pair: &mut Pair| {
        pair.new.answered = false;
        pair.observe_pair();
        pair.new.answered = true;
        pair.add_requests(Signal::Authentication, "", [0.0; 2], [0.0, 1.0]);
    };
    assert_eq!(after(20.0, 4.0, refuses), None);
}

#[test]
fn a_step_that_was_mostly_left_out_stays_a_missing_requirement() {
    let unseen = |pair: &Pair| {
        let lacking = pair.judge.verdict().lacking;
        lacking.iter().find_map(|text| {
            text.strip_prefix("most intervals of ")?
                .split(' ')
                .next()?
                .parse()
                .ok()
        })
    };
    let mut pair = Pair::new(Signal::Errors, [0.0, 50.0]);
    pair.judge.begin_step();
    for [bad, steps] in [[20.0, 1.0], [0.0, 1.0], [20.0, 2.0]] {
        // The interval after one in which the old instance suffers is left out, too.
        (0..5).for_each(|_| pair.add_and_observe(Signal::Errors, [bad, 20.0], [0.0, 20.0]));
        assert_eq!(unseen(&pair), Some(steps));
        pair.judge.begin_step();
    }
}

/// A step is enough for a verdict with ten intervals and a hundred comparable requests, if these
/// are at least half of all requests.
#[test]
fn ten_intervals_and_a_hundred_comparable_requests_are_enough() {
    for (intervals, pods, nodes, lacking) in [
        (10, 10.0, 10.0, 0),
        (9, 12.0, 12.0, 1),
        (11, 9.0, 9.0, 1),
        (10, 10.0, 11.0, 1),
        (9, 10.0, 11.0, 3),
    ] {
        let mut pair = Pair::new(Signal::Errors, [0.0, 50.0]);
        pair.judge.begin_step();
        for _ in 0..intervals {
            pair.add_requests(Signal::Errors, "nodes", [0.0; 2], [0.0, nodes]);
            pair.add_and_observe(Signal::Errors, [0.0, 10.0], [0.0, pods]);
        }
        let verdict = pair.judge.verdict();
        assert_eq!(verdict.lacking.len(), lacking, "{:?}", verdict.lacking);
        assert_eq!(
            verdict.outcome,
            if lacking == 0 {
                Outcome::Good
            } else {
                Outcome::Undecided
            }
        );
    }
}

/// The limit is 0.5: the tolerance of 0.02 plus three times the old instance's share of 0.16.
#[test]
fn a_signal_whose_limit_is_above_half_of_the_requests_is_not_compared() {
    for (bad, judgement, outcome) in [
        (160.0, Judgement::Good, Outcome::Good),
        (170.0, Judgement::NotCompared, Outcome::Undecided),
    ] {
        let mut pair = Pair::new(Signal::Errors, [bad, 1000.0]);
        pair.judge.begin_step();
        (0..10).for_each(|_| pair.add_and_observe(Signal::Errors, [0.0; 2], [0.0, 100.0]));
        assert_eq!(
            (
                pair.sum_row(Signal::Errors).judgement,
                pair.judge.verdict().outcome
            ),
            (judgement, outcome)
        );
    }
}

#[test]
fn a_signal_without_a_comparison_has_a_row() {
    let mut pair = Pair::new(Signal::Errors, [0.0, 50.0]);
    pair.judge.begin_step();
    let names_metric = |pair: &Pair| {
        let row = pair.sum_row(Signal::Errors);
        assert_eq!(
            (row.compared, row.old, row.new, row.limit),
            (0, 0.0, 0.0, 0.0)
        );
        assert_eq!(row.judgement, Judgement::NotCompared);
        row.note.contains(Signal::Errors.metric())
    };
    assert!(!names_metric(&pair));
    pair.new.metrics.clear();
    pair.observe_pair();
    assert!(names_metric(&pair));
    // With requests to compare, a metric that is missing now does not matter.
    pair.add_and_observe(Signal::Errors, [0.0; 2], [0.0, 10.0]);
    assert_eq!(pair.sum_row(Signal::Errors).judgement, Judgement::Good);
    // No subject is bad, so each signal has a single row: its sum.
    assert_eq!(
        pair.judge.verdict().rows.len(),
        Signal::COMPARED_SIGNALS.len()
    );
}

#[test]
fn the_rows_of_the_five_worst_subjects_follow_the_sum() {
    let names = ["r1", "r2", "r3", "r4", "r5", "r6", "r7"];
    let mut pair = Pair::new(Signal::Errors, [0.0; 2]);
    names
        .iter()
        .for_each(|name| pair.add_requests(Signal::Errors, name, [0.0, 50.0], [0.0; 2]));
    pair.observe_pair();
    pair.judge.begin_step();
    for _ in 0..6 {
        for (name, bad) in names.iter().zip(11..) {
            pair.add_requests(Signal::Errors, name, [0.0, 9.0], [f64::from(bad); 2]);
        }
        pair.observe_pair();
    }
    let rows = pair
        .judge
        .verdict()
        .rows
        .into_iter()
        .filter(|row| row.code == Signal::Errors);
    assert_eq!(
        rows.map(|row| row.subject).collect::<Vec<_>>(),
        ["all", "r7", "r6", "r5", "r4", "r3"]
    );
}

#[test]
fn refusals_are_evidence_unless_the_old_instance_refuses_as_many() {
    for (bad, against) in [(0.0, true), (50.0, false)] {
        let mut pair = Pair::new(Signal::Authentication, [bad, 50.0]);
        pair.judge.begin_step();
        pair.add_and_observe(Signal::Authentication, [0.0; 2], [4.0, 4.0]);
        assert_eq!(pair.judge.verdict().against.is_some(), against);
    }
}
