//! New versions that were judged beside the old one: how soon what was wrong with them was found, and how many requests of
//! clients met it until then.

use super::{Case, Judge, Span};
use crate::data::{self, Judged, MarkKind, Ran};
use crate::event::{Answer, Attempt, EventKind};
use crate::record::{Moment, Record};
use crate::report::format::{self, count, wait};
use crate::section::{Grid, Line, Row, Section, Series};
use berth_judge::{Judgement, Signal, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(super) const JUDGED: Judge = Judge { judge, section };

/// Verdicts as they are written.
pub(super) const UNDECIDED: &str = "undecided";
const BAD: &str = "bad";

/// A wait that is as long as that for a slow list; and for what the old version answers in the end, as without a fault.
const SLOW: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(1)];

fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Case { record, span, steps, .. } = case;
    for event in &record.events {
        let EventKind::Judged(verdict) = &event.what else { continue };
        if ran.judged.iter().all(|judged| judged.instance != event.subject) {
            ran.judged.push(of(record, &event.subject, span).0);
        }
        let Some(step) = steps.at(event.at) else { continue };
        for (code, shares) in shares(verdict) {
            let none = || vec![None; steps.count];
            let new = || data::Compared { old: none(), new: none(), limit: none() };
            let to = ran.signals.entry(code.to_string()).or_insert_with(new);
            [to.old[step], to.new[step], to.limit[step]] = shares.map(|share| Some(share * 100.0));
        }
    }
    for judged in &ran.judged {
        let name = &judged.instance;
        let has_fault = record.injected.iter().any(|injected| injected.instance == *name);
        if has_fault && judged.verdict == UNDECIDED {
            ran.verdict
                .doubt(format!("there was not enough to judge {name} by: a higher --rate or a faster machine helps"));
        }
        if !has_fault && judged.verdict == BAD {
            let found = judged.found.join(", ");
            let why = format!("{name} was judged bad although nothing is wrong with it: {found}");
            match of(record, name, span).1.into_iter().all(Signal::is_time) {
                true => ran.verdict.doubt(format!("{why}, but by times alone")),
                false => ran.verdict.object(why),
            }
        }
    }
    if case.plan.judge.is_some() && ran.judged.is_empty() {
        ran.verdict.doubt("no new version was judged".into());
    }
}

/// The old one's, the new one's and the allowed shares by signal: of what is farthest beyond the limit.
fn shares(verdict: &Verdict) -> BTreeMap<Signal, [f64; 3]> {
    let mut by_code: BTreeMap<Signal, [f64; 3]> = BTreeMap::new();
    for row in verdict.rows.iter().filter(|row| row.judgement != Judgement::NotCompared) {
        let shares = by_code.entry(row.code).or_insert([row.old, row.new, row.limit]);
        if row.new - row.limit > shares[1] - shares[2] {
            *shares = [row.old, row.new, row.limit];
        }
    }
    by_code
}

/// What is known of one instance, and what was found.
pub(super) fn of(record: &Record, instance: &str, span: &Span) -> (Judged, BTreeSet<Signal>) {
    let of = |mark| record.moments.0.iter().filter(move |m: &&Moment| m.instance == instance && m.mark == mark);
    let (from, to) = (of(MarkKind::Share).map(|m| m.at).min(), of(MarkKind::Judged).map(|m| m.at).max());
    let meanwhile = |a: &&Attempt| from.is_some_and(|from| a.due >= from) && to.is_none_or(|to| a.due <= to);
    let meanwhile = || record.attempts.iter().filter(meanwhile);
    let verdicts = record.events.iter().rev().filter(|event| event.subject == instance);
    let last = verdicts.into_iter().find_map(|event| match &event.what {
        EventKind::Judged(verdict) => Some(verdict),
        _ => None,
    });
    let bad = || last.into_iter().flat_map(|last| &last.rows).filter(|row| row.judgement == Judgement::Bad);
    // The sum of all is found, too, wherever a part of it is.
    let parts = |code| bad().filter(move |row| row.code == code && row.subject != "all").count();
    let found = bad().filter(|row| row.subject != "all" || parts(row.code) == 0);
    let found = found.map(|row| match row.compared {
        0 => format!("{} ({}: {})", row.code, row.subject, row.note),
        compared => {
            let [new, limit] = [row.new, row.limit].map(format::percent);
            format!("{} ({}: {new} of {}, at most {limit} allowed)", row.code, row.subject, count(compared))
        }
    });
    let met = |a: &&Attempt| match &a.answer {
        Answer::Good { instance: by } => a.done.since(a.due) >= SLOW[usize::from(by != instance)],
        _ => true,
    };
    let judged = Judged {
        instance: instance.to_owned(),
        verdict: to.and(last).map(|last| format!("{:?}", last.outcome).to_lowercase()).unwrap_or_default(),
        from_ms: from.map(|from| span.ms(from)),
        to_ms: to.map(|to| span.ms(to)),
        share: of(MarkKind::Share).max_by_key(|m| m.at).map(|m| m.text.clone()).unwrap_or_default(),
        requests: meanwhile().count() as u64,
        met: meanwhile().filter(met).count() as u64,
        found: found.collect(),
    };
    (judged, bad().map(|row| row.code).collect())
}

impl Judged {
    /// When the verdict was there, in words.
    pub(super) fn when(&self) -> String {
        match (self.from_ms, self.to_ms) {
            (Some(from), Some(to)) => {
                format!("{} after the first step began, at {}", wait((to - from) as f64), self.share)
            }
            (None, Some(_)) => "before its first client".to_owned(),
            (_, None) => "never".to_owned(),
        }
    }

    pub(super) fn met_share(&self) -> String {
        format!("{:.2} %", self.met as f64 / self.requests.max(1) as f64 * 100.0)
    }
}

fn section(ran: &Ran) -> Section {
    let counts = |judged: &Judged| format!("{} of {}", count(judged.met), count(judged.requests));
    let met = |judged: &Judged| format!("{}, {}", counts(judged), judged.met_share());
    let row = |judged: &Judged| {
        let words = format!("{} requests failed or waited; {}", counts(judged), judged.when());
        Row::main(format!("{}: judged {}", judged.instance, judged.verdict), judged.met_share(), words)
    };
    let cells = |judged: &Judged| {
        let cells = vec![judged.verdict.clone(), judged.when(), met(judged), judged.found.join(", ")];
        (judged.instance.clone(), cells)
    };
    let grid = Grid {
        title: "New versions that were judged",
        columns: &["new version", "verdict", "when", "requests that failed or waited", "found by"],
        rows: ran.judged.iter().map(cells).collect(),
        note: "Requests are those of all clients, of both versions, from the beginning of the first step to the verdict.",
    };
    let whole = |shares: &[Option<f64>]| shares.iter().map(|share| share.unwrap_or_default().round() as u64).collect();
    let series = |(code, data::Compared { old, new, limit }): (&String, &data::Compared)| {
        let most = new.iter().flatten().copied().fold(0.0, f64::max);
        let lines = [("old", "p50", old), ("new", "p99", new), ("allowed", "max", limit)];
        Series {
            title: format!("Judged by {code}: bad ones of all so far, in percent"),
            words: format!("At most {most:.1} % of the new version's were bad."),
            lines: lines.map(|(name, look, shares)| Line { name, look, counts: whole(shares) }).into(),
        }
    };
    Section {
        rows: ran.judged.iter().map(row).collect(),
        grids: vec![grid],
        series: ran.signals.iter().map(series).collect(),
        ..Section::default()
    }
}
