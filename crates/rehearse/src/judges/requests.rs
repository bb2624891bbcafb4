//! Requests and streams of the clients: counts and waiting times.

use super::Case;
use super::stats::percentile;
use crate::record::{
    Record,
    data::{Ran, Value},
    event::{Answer, ConnectionKind, Failure},
    format::{self, format_count, format_wait_time},
    stamp::{Stamp, millis},
};
use std::ops::Range;
use std::time::Duration;

/// Fewest new connections that a run needs: fewer would prove nothing.
const MIN_CONNECTIONS: u64 = 200;

/// How far clients may be behind their timetable before a run measures the machine rather than
/// berth.
pub(super) const MAX_BEHIND: Duration = Duration::from_secs(1);

pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let Case { record, plan, .. } = case;
    let new = record
        .attempts
        .iter()
        .filter(|attempt| attempt.kind == ConnectionKind::New);
    let x509 = new
        .clone()
        .filter(|attempt| matches!(attempt.answer, Answer::Failed(Failure::X509(_))))
        .count();
    let connections = new.count() as u64;
    let words = format!(
        "{} on a new connection, to {}",
        format_count(connections),
        ran.describe_apiservers()
    );
    ran.add("requests", Value::Count(record.attempts.len() as u64))
        .mark_as_main()
        .set_note(words);
    ran.add("new connections", Value::Count(connections));
    judge_waits(record, ran);
    ran.add("x509 errors", Value::Count(x509 as u64));
    let behind = record.behind;
    if behind > MAX_BEHIND {
        let rate = plan.load.rate;
        ran.mark_too_busy(format!(
            "the clients were up to {behind:.1?} behind their timetable: this machine is too slow or too busy for \
             --rate {rate}, so the machine caused the waits: give a lower --rate"
        ));
    }
    let load = match (record.began, record.over) {
        (Some(began), Some(ended)) => ended.since(began),
        _ => Duration::MAX,
    };
    let planned = (f64::from(plan.load.rate) * load.as_secs_f64()) as u64;
    let fewest = MIN_CONNECTIONS.min(planned);
    if connections < fewest {
        ran.add_doubt(format!(
            "there were only {connections} new connections, and fewer than {fewest} connections prove nothing: give a higher --rate"
        ));
    }
}

fn judge_waits(record: &Record, ran: &mut Ran) {
    let mut waits: Vec<Duration> = record
        .attempts
        .iter()
        .map(|attempt| attempt.done.since(attempt.due))
        .collect();
    waits.sort_unstable();
    let [median, p99, longest] =
        [0.5, 0.99, 1.0].map(|share| percentile(&waits, share).map_or(0.0, millis));
    let words = format!(
        "median {}, 99 % within {}",
        format_wait_time(median),
        format_wait_time(p99)
    );
    ran.add("longest wait", Value::Ms(longest))
        .mark_as_main()
        .set_note(words);
    ran.add("median wait", Value::Ms(median));
    ran.add("99th percentile", Value::Ms(p99));
    let load = record.load_period();
    let answers = good_answer_times(record, &load);
    let words = match count_silent_seconds(&answers, &load) {
        0 => String::new(),
        s => format!(
            "{} without any good answer",
            format::format_count_with_noun(s, "whole second", "whole seconds")
        ),
    };
    ran.add(
        "longest time without an answer",
        Value::Ms(millis(longest_silence(&answers, &load))),
    )
    .mark_as_main()
    .set_note(words);
}

/// Times of good answers within the load, in order.
fn good_answer_times(record: &Record, load: &Range<Stamp>) -> Vec<Stamp> {
    let good = record
        .attempts
        .iter()
        .filter(|a| matches!(a.answer, Answer::Good { .. }));
    let mut answers: Vec<Stamp> = good
        .map(|a| a.done)
        .filter(|at| load.contains(at))
        .collect();
    answers.sort_unstable();
    answers
}

/// The whole seconds of the load without a good answer.
fn count_silent_seconds(answers: &[Stamp], load: &Range<Stamp>) -> u64 {
    let seconds = load.end.since(load.start).as_secs();
    let mut answered: Vec<u64> = answers
        .iter()
        .map(|at| at.since(load.start).as_secs())
        .collect();
    answered.dedup();
    seconds - answered.iter().filter(|second| **second < seconds).count() as u64
}

/// The longest time within the load without a good answer.
fn longest_silence(answers: &[Stamp], load: &Range<Stamp>) -> Duration {
    let answers = answers.iter().copied().chain([load.end]);
    let silences = answers.scan(load.start, |before, at| {
        Some(at.since(std::mem::replace(before, at)))
    });
    silences.max().unwrap_or_default()
}
