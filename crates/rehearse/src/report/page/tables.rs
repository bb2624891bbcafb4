//! Tables: those of judges, and the numbers behind each plot, for those who cannot see it or want to count.

use crate::data::{Ran, Watch};
use crate::judges;
use crate::report::format::{count, moment, wait};
use crate::report::plot;
use maud::{Markup, html};
use std::collections::BTreeMap;

/// Names of columns, and their cells by steps of the timeline.
type Columns = Vec<(String, Vec<String>)>;

/// A table whose rows have names. Its cells are numbers, but for those of the last columns, from `words` on.
pub(super) fn table(columns: &[&str], words: usize, rows: &[(String, Vec<String>)]) -> Markup {
    html! {
        table.steps {
            thead { tr { @for name in columns { th scope="col" { (name) } } } }
            tbody {
                @for (name, cells) in rows {
                    tr { th scope="row" { (name) } @for (n, cell) in (1..).zip(cells) { td class=[(n >= words).then_some("text")] { (cell) } } }
                }
            }
        }
    }
}

pub(super) fn all(ran: &Ran, id: &str) -> Markup {
    let timeline = &ran.timeline;
    let by_step = |name: &str, title: &str, columns: &Columns| {
        let from = |step: usize| moment((timeline.step_ms * step as u64) as i64);
        let cells = |step: usize| columns.iter().map(|(_, cells)| cells[step].clone()).collect();
        let rows: Vec<_> = (0..plot::steps(ran)).map(|step| (from(step), cells(step))).collect();
        let names: Vec<&str> = ["From"].into_iter().chain(columns.iter().map(|(name, _)| name.as_str())).collect();
        folded(id, name, title, &table(&names, names.len(), &rows))
    };
    // Lists of a file made by hand may be too short.
    let steps = || 0..plot::steps(ran);
    let counts = |counts: &[u64]| steps().map(|step| count(counts.get(step).copied().unwrap_or(0))).collect();
    let waits = |waits: &[Option<f64>]| {
        steps().map(|step| waits.get(step).copied().flatten().map_or("–".to_owned(), wait)).collect()
    };
    let by_key = |prefix: &str, all: &BTreeMap<String, Vec<u64>>, name: fn(&str) -> String| -> Columns {
        all.iter().map(|(key, values)| (format!("{prefix}{}", name(key)), counts(values))).collect()
    };
    let mut answers = by_key("answered by ", &timeline.answered, str::to_owned);
    answers.extend(by_key("lost: ", &timeline.lost, plot::short));
    answers.push(("ended by the instance".to_owned(), counts(&timeline.ended_by_instance)));
    answers.push(("allowed by a promise".to_owned(), counts(&timeline.allowed)));
    let waits = [
        ("median", &timeline.wait_p50_ms),
        ("99th percentile", &timeline.wait_p99_ms),
        ("longest", &timeline.wait_max_ms),
    ]
    .map(|(name, values)| (name.to_owned(), waits(values)));
    let sections = judges::sections(ran);
    html! {
        div.tables {
            h3 { "The numbers of these plots" }
            (by_step("answers", "Answers and losses", &answers))
            (by_step("waits", "Latency", &waits.into()))
            @for numbers in sections.iter().filter_map(|section| section.numbers.as_ref()) {
                @let columns = numbers.columns.iter().map(|(name, values)| (name.clone(), counts(values))).collect();
                (by_step(numbers.id, numbers.title, &columns))
            }
            (by_step("connections", "Keep-alive connections and watches", &by_key("open on ", &timeline.open_connections, str::to_owned)))
            @if !ran.watches.is_empty() {
                (folded(id, "watches", "Watches", &lanes(&ran.watches)))
                (by_step("watches-by-step", "Watches by instance", &by_key("watches on ", &plot::on_instances(ran), str::to_owned)))
            }
        }
    }
}

fn folded(id: &str, name: &str, title: &str, table: &Markup) -> Markup {
    let id = format!("{id}-{name}");
    html! {
        details {
            summary id=(id) { (title) }
            div.scroll.tall tabindex="0" role="region" aria-labelledby=(id) { (table) }
        }
    }
}

fn lanes(watches: &[Watch]) -> Markup {
    let columns = ["Watch", "Events", "Missed", "Duplicated", "Relists", "410 Gone", "Noticed at", "On", "Gaps"];
    let row = |watch: &Watch| {
        let counts = [watch.events, watch.missed, watch.duplicated, watch.relists, watch.expired].map(count);
        let flaws: Vec<_> = watch.flaws.iter().map(|flaw| moment(flaw.at_ms)).collect();
        let segments = watch.segments.iter().map(|on| format!("{} until {}", on.instance, moment(on.to_ms)));
        let gaps = watch.gaps.iter().map(|gap| {
            let (length, ended) = (wait((gap.to_ms - gap.from_ms) as f64), plot::ended(gap));
            format!("{length} at {}, {ended}: {}", moment(gap.from_ms), gap.reason)
        });
        let words = [flaws, segments.collect(), gaps.collect()].map(|words| words.join(", "));
        (watch.id.clone(), counts.into_iter().chain(words).collect())
    };
    table(&columns, 6, &watches.iter().map(row).collect::<Vec<_>>())
}
