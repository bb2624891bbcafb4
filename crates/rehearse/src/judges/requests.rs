//! Requests and streams of all clients: what was lost, what was allowed, how long they waited.

use crate::data::{Ran, count_of};
use crate::report::format::{self, count, wait};
use crate::section::{Row, Section};

pub(super) fn section(ran: &Ran) -> Section {
    let Ran { figures, verdict, promises, .. } = ran;
    let control = || ran.control_streams.values();
    let (opened, ended) = (count(control().map(|c| c.opened).sum()), count(control().map(|c| c.ended).sum()));
    let apart = format!("closed as it shut down (normal); of the control {ended} of {opened}");
    let within = format!("99 % within {}", wait(figures.wait_p99_ms));
    let silent = match figures.silent_s {
        0 => String::new(),
        s => format!("{} without any good answer", format::of(s, "whole second", "whole seconds")),
    };
    let lost = match ran.allowed() {
        0 => String::new(),
        allowed => format!("and {} that a promise allows", count(allowed)),
    };
    let new = count(figures.new_connections);
    let mut rows = vec![
        Row::main("requests", count(figures.requests), format!("{new} on a new connection")),
        Row::compared("new connections", new),
        Row::main("lost", count(verdict.lost()), lost),
    ];
    rows.extend(verdict.lost.iter().map(|tally| Row::table(format!("  {}", tally.text), count(tally.count), "")));
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
        Row::compared("99 % within", wait(figures.wait_p99_ms)),
        Row::main("longest time without an answer", wait(figures.longest_silence_ms), silent),
        Row::main("x509 errors", count(figures.x509_errors), ""),
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
