//! Requests and streams of all clients: what was lost, what was allowed, how long they waited.

use super::{Case, Judge};
use crate::data::{Figures, Ran, count_of};
use crate::event::{Answer, ConnectionKind};
use crate::loss;
use crate::record::Record;
use crate::report::format::{self, count, wait};
use crate::section::{Row, Section};
use crate::stamp::{Stamp, millis};
use hdrhistogram::Histogram;
use std::ops::Range;
use std::time::Duration;

pub(super) const REQUESTS: Judge = Judge { judge, section };

/// Fewest new connections for a verdict.
const FEWEST: u64 = 200;

/// How far clients may be behind their timetable before a run measures the machine rather than berth.
pub(super) const MOST_BEHIND: Duration = Duration::from_secs(1);

/// Longest wait that the histogram distinguishes, in microseconds: far beyond what a client waits.
const LONGEST_WAIT: u64 = 120_000_000;

fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Case { record, plan, .. } = case;
    let Ran { figures, verdict, .. } = ran;
    for attempt in &record.attempts {
        figures.requests += 1;
        figures.new_connections += u64::from(attempt.kind == ConnectionKind::New);
        if let (ConnectionKind::New, Answer::Good { instance } | Answer::Bad { instance, .. }) =
            (attempt.kind, &attempt.answer)
        {
            *figures.new_connections_by_instance.entry(instance.clone()).or_default() += 1;
        }
    }
    waits(record, figures);
    let behind = record.behind;
    if behind > MOST_BEHIND {
        let rate = plan.load.rate;
        verdict.too_busy(format!(
            "the clients were up to {behind:.1?} behind their timetable: this machine is too slow or too busy for \
             --rate {rate}, and waits are its own"
        ));
    }
    let connections = figures.new_connections;
    let load = match (record.began, record.over) {
        (Some(began), Some(ended)) => ended.since(began),
        _ => Duration::MAX,
    };
    let planned = (f64::from(plan.load.rate) * load.as_secs_f64()) as u64;
    let fewest = FEWEST.min(planned);
    if connections < fewest {
        verdict.doubt(format!("only {connections} new connections; fewer than {fewest} prove nothing"));
    }
}

fn waits(record: &Record, figures: &mut Figures) {
    let mut waits = Histogram::<u64>::new_with_bounds(1, LONGEST_WAIT, 3).expect("the bounds are in order");
    let mut longest = Duration::ZERO;
    for attempt in &record.attempts {
        let wait = attempt.done.since(attempt.due);
        longest = longest.max(wait);
        waits.saturating_record(u64::try_from(wait.as_micros()).unwrap_or(u64::MAX));
    }
    figures.wait_p50_ms = waits.value_at_quantile(0.5) as f64 / 1e3;
    figures.wait_p99_ms = waits.value_at_quantile(0.99) as f64 / 1e3;
    figures.wait_max_ms = millis(longest);
    let load = record.load();
    let answers = good_answers(record, &load);
    figures.longest_silence_ms = millis(longest_silence(&answers, &load));
    figures.silent_s = silent_s(&answers, &load);
}

/// When good answers came within the load, in order.
fn good_answers(record: &Record, load: &Range<Stamp>) -> Vec<Stamp> {
    let good = record.attempts.iter().filter(|a| matches!(a.answer, Answer::Good { .. }));
    let mut answers: Vec<Stamp> = good.map(|a| a.done).filter(|at| load.contains(at)).collect();
    answers.sort_unstable();
    answers
}

/// The whole seconds of the load without a good answer.
fn silent_s(answers: &[Stamp], load: &Range<Stamp>) -> u64 {
    let seconds = load.end.since(load.start).as_secs();
    let mut answered: Vec<u64> = answers.iter().map(|at| at.since(load.start).as_secs()).collect();
    answered.dedup();
    seconds - answered.iter().filter(|second| **second < seconds).count() as u64
}

/// The longest time within the load without a good answer.
fn longest_silence(answers: &[Stamp], load: &Range<Stamp>) -> Duration {
    let answers = answers.iter().copied().chain([load.end]);
    let silences = answers.scan(load.start, |before, at| Some(at.since(std::mem::replace(before, at))));
    silences.max().unwrap_or_default()
}

fn section(ran: &Ran) -> Section {
    let Ran { figures, verdict, promises, .. } = ran;
    let control = || ran.control_streams.values();
    let (opened, ended) = (count(control().map(|c| c.opened).sum()), count(control().map(|c| c.ended).sum()));
    let apart = format!("closed as it shut down (normal); of those straight to it {ended} of {opened}");
    let within = format!("99 % within {}", wait(figures.wait_p99_ms));
    let silent = match figures.silent_s {
        0 => String::new(),
        s => format!("{} without any good answer", format::of(s, "whole second", "whole seconds")),
    };
    let allowed = (ran.allowed() > 0).then(|| format!("and {} that a promise allows", count(ran.allowed())));
    let lost = verdict.lost.iter().map(loss::words).chain(allowed);
    let lost = lost.collect::<Vec<_>>().join(", ");
    let new = count(figures.new_connections);
    let mut rows = vec![
        Row::main("requests", count(figures.requests), format!("{new} on a new connection, to {}", ran.apiservers())),
        Row::compared("new connections", new),
        Row::main("lost", count(verdict.lost()), lost),
    ];
    if !promises.is_empty() {
        rows.push(Row::both("allowed under faults", count(ran.allowed()), ""));
        rows.push(Row::compared("promises broken", count(ran.broken())));
    }
    for promise in promises.iter().filter(|promise| !promise.allowed.is_empty()) {
        let kinds: Vec<_> = promise.allowed.iter().map(|t| format!("{} {}", count(t.count), t.text)).collect();
        let all = promise.allowed.iter().map(|t| t.count).sum();
        rows.push(Row::table(format!("  {}", promise.fault), count(all), kinds.join(", ")));
    }
    let median = format!("median {}, {within}", wait(figures.wait_p50_ms));
    rows.extend([
        Row::main("longest wait", wait(figures.wait_max_ms), median),
        Row::compared("99th percentile", wait(figures.wait_p99_ms)),
        Row::main("longest time without an answer", wait(figures.longest_silence_ms), silent),
        Row::both("x509 errors", count(figures.x509_errors), ""),
        Row::both("streams ended by the instance", count(count_of(&verdict.apart, "ended_by_instance")), apart),
        Row::both(
            "rejected by the instance",
            count(count_of(&verdict.apart, "rejected")),
            "503 or 429 while it shut down",
        ),
    ]);
    if figures.slow_reads > 0 {
        rows.push(Row::page("large answers read slowly to their end", count(figures.slow_reads)));
    }
    Section { rows, ..Section::default() }
}
