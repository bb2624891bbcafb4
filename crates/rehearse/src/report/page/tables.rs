//! The numbers behind each plot, for those who cannot see it or want to count.

use crate::data::{Ran, Timeline, Watch};
use crate::judges;
use crate::report::{format, plot};
use crate::section::Numbers;
use maud::{Markup, html};
use std::collections::BTreeMap;

type Counts = BTreeMap<String, Vec<u64>>;

pub(super) fn all(ran: &Ran, id: &str) -> Markup {
    let timeline = &ran.timeline;
    let answers = counts("answered by ", &timeline.answered, str::to_owned);
    let lost = counts("lost: ", &timeline.lost, plot::short);
    let ended = ("ended by the instance".to_owned(), timeline.ended_by_instance.as_slice());
    let allowed = ("allowed by a promise".to_owned(), timeline.allowed.as_slice());
    let answers: Vec<_> = answers.into_iter().chain(lost).chain([ended, allowed]).collect();
    let open = counts("open on ", &timeline.open_connections, str::to_owned);
    let on = plot::on_instances(ran);
    let watches = counts("watches on ", &on, str::to_owned);
    html! {
        div.tables {
            h3 { "The numbers of these plots" }
            (table(id, "answers", "Answers and losses", &by_step(timeline, &answers)))
            (table(id, "waits", "Waits", &waits(timeline)))
            @for Numbers { id: name, title, columns } in judges::sections(ran).iter().filter_map(|section| section.numbers.as_ref()) {
                (table(id, name, title, &by_step(timeline, &columns.iter().map(|(name, counts)| (name.clone(), &counts[..])).collect::<Vec<_>>())))
            }
            (table(id, "connections", "Kept connections and watches", &by_step(timeline, &open)))
            @if !ran.watches.is_empty() {
                (table(id, "watches", "Watches", &lanes(&ran.watches)))
                (table(id, "watches-by-step", "Watches by instance", &by_step(timeline, &watches)))
            }
        }
    }
}

fn counts<'a>(prefix: &str, counts: &'a Counts, name: fn(&str) -> String) -> Vec<(String, &'a [u64])> {
    counts.iter().map(|(key, counts)| (format!("{prefix}{}", name(key)), counts.as_slice())).collect()
}

fn table(id: &str, name: &str, title: &str, table: &Markup) -> Markup {
    let id = format!("{id}-{name}");
    html! {
        details {
            summary id=(id) { (title) }
            div.scroll.tall tabindex="0" role="region" aria-labelledby=(id) { table.steps { (table) } }
        }
    }
}

fn from(timeline: &Timeline, step: usize) -> String {
    format::moment((timeline.step_ms * step as u64) as i64)
}

fn by_step(timeline: &Timeline, columns: &[(String, &[u64])]) -> Markup {
    html! {
        thead { tr { th scope="col" { "From" } @for (name, _) in columns { th scope="col" { (name) } } } }
        tbody {
            @for step in 0..timeline.wait_max_ms.len() {
                tr {
                    th scope="row" { (from(timeline, step)) }
                    @for (_, counts) in columns { td { (format::count(counts.get(step).copied().unwrap_or(0))) } }
                }
            }
        }
    }
}

fn waits(timeline: &Timeline) -> Markup {
    let columns = [&timeline.wait_p50_ms, &timeline.wait_p99_ms, &timeline.wait_max_ms];
    html! {
        thead { tr { @for name in ["From", "half within", "99 % within", "longest"] { th scope="col" { (name) } } } }
        tbody {
            @for step in 0..timeline.wait_max_ms.len() {
                tr {
                    th scope="row" { (from(timeline, step)) }
                    @for waits in columns { td { (waits.get(step).copied().flatten().map_or("–".into(), format::wait)) } }
                }
            }
        }
    }
}

fn lanes(watches: &[Watch]) -> Markup {
    html! {
        thead { tr { @for name in ["Watch", "Events", "Missed", "Duplicated", "Lists again", "410", "Noticed at", "On", "Gaps"] { th scope="col" { (name) } } } }
        tbody {
            @for watch in watches {
                tr {
                    th scope="row" { (watch.id) }
                    @for count in [watch.events, watch.missed, watch.duplicated, watch.relists, watch.expired] { td { (format::count(count)) } }
                    td.text {
                        @for (index, flaw) in watch.flaws.iter().enumerate() {
                            @if index > 0 { ", " }
                            (format::moment(flaw.at_ms))
                        }
                    }
                    td.text {
                        @for (index, segment) in watch.segments.iter().enumerate() {
                            @if index > 0 { ", " }
                            (segment.instance) " until " (format::moment(segment.to_ms))
                        }
                    }
                    td.text {
                        @for (index, gap) in watch.gaps.iter().enumerate() {
                            @if index > 0 { ", " }
                            (format::wait((gap.to_ms - gap.from_ms) as f64)) " at " (format::moment(gap.from_ms))
                            ", " (plot::ended(gap)) ": " (gap.reason)
                        }
                    }
                }
            }
        }
    }
}
