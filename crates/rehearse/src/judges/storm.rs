//! A storm: when its clients were served, and what their tries met before.

use super::Span;
use crate::data::{self, Ran};
use crate::loss::Loss;
use crate::record::{Answer, Failure, Stamp, Storm};
use crate::report::format::{self, count, named, wait};
use crate::section::Place::{Page, Table, Tile};
use crate::section::{Row, Section};
use crate::verdict::millis;
use std::collections::BTreeMap;

pub(super) fn judge(storm: &Storm, span: &Span) -> data::Storm {
    let mut served: Vec<Stamp> = storm.served().collect();
    served.sort_unstable();
    let after = |at: &Stamp| millis(at.since(storm.at));
    let mut failed: BTreeMap<Loss, u64> = BTreeMap::new();
    for (_, answer) in &storm.tries {
        let loss = match answer {
            Answer::Good { .. } | Answer::Failed(Failure::Unanswered) => None,
            Answer::Bad { .. } => Some(Loss::BadStatus),
            Answer::Failed(failure) => failure.loss(),
        };
        loss.inspect(|loss| *failed.entry(*loss).or_default() += 1);
    }
    data::Storm {
        from_ms: span.ms(storm.at),
        clients: storm.clients.into(),
        served: served.len() as u64,
        half_served_ms: served.get((storm.clients as usize).div_ceil(2).saturating_sub(1)).map(after),
        all_served_ms: storm.all_served().as_ref().map(after),
        gave_up: storm.gave_up(),
        failed: failed.into_iter().map(|(loss, count)| loss.tally(count)).collect(),
    }
}

pub(super) fn section(ran: &Ran) -> Section {
    let Some(storm) = &ran.storm else { return Section::default() };
    let after = |ms: Option<f64>| ms.map_or_else(|| "never".to_owned(), wait);
    let failed = |tally: &data::Tally| Row::page(format!("tries that failed: {}", tally.text), count(tally.count));
    let mut rows = vec![
        Row::at(&[Table, Tile, Page], "clients of the storm", count(storm.clients), words(storm)),
        Row::page("of those served", count(storm.served)),
        Row::page("half were served within", after(storm.half_served_ms)),
        Row::page("all were served within", after(storm.all_served_ms)),
        Row::page("tries given up: no TLS handshake for 10 s, or no answer for 15 s", count(storm.gave_up)),
        Row::compared("storm served within", named(storm.all_served_ms)),
        Row::compared("storm: tries given up", count(storm.gave_up)),
    ];
    rows.extend(storm.failed.iter().map(failed));
    Section { title: "The storm", rows, ..Section::default() }
}

/// How a storm's clients were served, and what they met before.
fn words(storm: &data::Storm) -> String {
    let served = match storm.all_served_ms {
        Some(ms) => format!("all served within {}", wait(ms)),
        None => format!("only {} were served", count(storm.served)),
    };
    let gave_up = (storm.gave_up > 0).then(|| format::of(storm.gave_up, "try given up", "tries given up"));
    let failed = storm.failed.iter().map(|tally| format!("{} {}", count(tally.count), tally.text));
    match &gave_up.into_iter().chain(failed).collect::<Vec<_>>()[..] {
        [] => format!("{served}, at the first try"),
        failed => format!("{served}; {}", failed.join(", ")),
    }
}
