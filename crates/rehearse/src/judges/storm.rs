//! A storm: when its clients were served, and how their tries failed before.

use super::{Case, Judge, Span, what_happened};
use crate::data::{self, Promise, Ran, Tally};
use crate::event::{Answer, Event, EventKind, Failure};
use crate::loss::Loss;
use crate::record::Record;
use crate::report::format::{self, count, wait};
use crate::section::Place::{Page, Table, Tile};
use crate::section::{Row, Section};
use crate::stamp::{Stamp, millis};
use std::collections::BTreeMap;

pub(super) const STORM: Judge = Judge { judge, section };

/// What it is called where a fault's name is expected.
const NAME: &str = "storm";

/// Clients that came at one moment, and retried until they were served.
#[derive(Debug)]
struct StormEvents<'a> {
    clients: u32,
    /// When they came.
    at: Stamp,
    /// When the last had been served, or had given up for good; none: not seen.
    over: Option<Stamp>,
    /// What came of each try, and when: a client's last is the one that was answered well.
    tries: Vec<(Stamp, &'a Answer)>,
}

impl<'a> StormEvents<'a> {
    fn of(record: &'a Record) -> Option<Self> {
        let mut storm = None::<Self>;
        for Event { at, what, .. } in &record.events {
            match (what, &mut storm) {
                (EventKind::StormBegan(clients), _) => {
                    storm = Some(Self { clients: *clients, at: *at, over: None, tries: Vec::new() });
                }
                (EventKind::StormTry(answer), Some(storm)) => storm.tries.push((*at, answer)),
                (EventKind::StormEnded, Some(storm)) => storm.over = Some(*at),
                _ => {}
            }
        }
        storm
    }

    /// When each client was served that was, in order.
    fn served(&self) -> Vec<Stamp> {
        let good = self.tries.iter().filter(|(_, answer)| matches!(answer, Answer::Good { .. }));
        let mut served: Vec<Stamp> = good.map(|(at, _)| *at).collect();
        served.sort_unstable();
        served
    }

    /// When all had been served.
    fn all_served(&self) -> Option<Stamp> {
        let served = self.served();
        served.last().copied().filter(|_| served.len() == self.clients as usize)
    }

    /// Tries that failed, each with its reason.
    fn failures(&self) -> impl Iterator<Item = &Failure> {
        self.tries
            .iter()
            .filter_map(|(_, answer)| if let Answer::Failed(failure) = answer { Some(failure) } else { None })
    }

    /// Tries that ended because a client would not wait any longer.
    fn gave_up(&self) -> u64 {
        self.failures().filter(|failure| **failure == Failure::Unanswered).count() as u64
    }

    /// Each client is served in the end, although it gave up and tried again.
    fn promise(&self, span: &Span) -> Promise {
        let (clients, served) = (self.clients, self.served().len());
        let mut broken = Vec::new();
        let mut seen = Vec::new();
        match self.all_served() {
            Some(last) => seen.push(format!("all {clients} were served within {:.1?}", last.since(self.at))),
            None => broken.push(format!("of {clients} only {served} were served")),
        }
        let x509 = self.failures().filter(|failure| matches!(failure, Failure::X509(_))).count();
        if x509 > 0 {
            broken.push(format!("{x509} met a certificate that they do not trust"));
        }
        let failed = self.tries.len() - served;
        seen.push(format!("{failed} tries failed, of which {} were given up", self.gave_up()));
        Promise {
            fault: NAME.to_owned(),
            instance: NAME.to_owned(),
            from_ms: span.ms(self.at),
            to_ms: self.over.map(|over| span.ms(over)),
            promise: "each of its clients is served, if it retries until it is".to_owned(),
            held: broken.is_empty(),
            what_happened: what_happened(broken, seen),
            allowed: Vec::new(),
        }
    }
}

/// Its failed tries are part of its promise, and not losses.
fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Some(storm) = StormEvents::of(case.record) else {
        if case.plan.load.storm > 0 {
            ran.verdict.doubt("there was no storm".into());
        }
        return;
    };
    let mut local: BTreeMap<&str, u64> = BTreeMap::new();
    for failure in storm.failures() {
        match failure {
            Failure::Local(why) => *local.entry(why).or_default() += 1,
            Failure::X509(_) => ran.figures.x509_errors += 1,
            _ => {}
        }
    }
    ran.verdict.doubt_machine(local);
    ran.promises.push(storm.promise(&case.span));
    let served = storm.served();
    let after = |at: &Stamp| millis(at.since(storm.at));
    let mut failed = Vec::new();
    for (_, answer) in &storm.tries {
        let loss = match answer {
            Answer::Good { .. } | Answer::Failed(Failure::Unanswered) => None,
            Answer::Bad { .. } => Some(Loss::BadStatus),
            Answer::Failed(failure) => failure.loss(),
        };
        loss.into_iter().for_each(|loss| loss.add(1, &mut failed));
    }
    ran.storm = Some(data::Storm {
        from_ms: case.span.ms(storm.at),
        clients: storm.clients.into(),
        served: served.len() as u64,
        half_served_ms: served.get((storm.clients as usize).div_ceil(2).saturating_sub(1)).map(after),
        all_served_ms: storm.all_served().as_ref().map(after),
        gave_up: storm.gave_up(),
        failed,
    });
}

fn section(ran: &Ran) -> Section {
    let Some(storm) = &ran.storm else { return Section::default() };
    let after = |ms: Option<f64>| ms.map_or_else(|| "never".to_owned(), wait);
    let failed = |tally: &Tally| Row::page(format!("tries that failed: {}", tally.text), count(tally.count));
    let mut rows = vec![
        Row::at(&[Table, Tile, Page], "clients of the storm", count(storm.clients), words(storm)),
        Row::page("of those served", count(storm.served)),
        Row::page("half were served within", after(storm.half_served_ms)),
        Row::page("all were served within", after(storm.all_served_ms)),
        Row::page("tries given up: no TLS handshake for 10 s, or no answer for 15 s", count(storm.gave_up)),
        Row::compared("storm served within", after(storm.all_served_ms)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_has_ended_when_each_of_its_clients_was_served() {
        let ms = |ms: u64| Stamp(ms * 1_000_000);
        let good = Answer::Good { instance: "new".into() };
        let tried = |tries: &[(u64, &Answer)]| {
            let tries = tries.iter().map(|(at, answer)| (ms(*at), *answer)).collect();
            let span = Span { began: ms(0), over: ms(9_000), last: ms(9_000) };
            let promise = StormEvents { clients: 2, at: ms(1_000), over: Some(ms(9_000)), tries }.promise(&span);
            let (broken, seen): (Vec<_>, Vec<_>) =
                promise.what_happened.into_iter().partition(|line| line.starts_with("broken: "));
            assert_eq!(promise.held, broken.is_empty());
            (broken, seen)
        };
        let [gave_up, reset, x509] =
            [Failure::Unanswered, Failure::Reset, Failure::X509("other".into())].map(Answer::Failed);
        let (broken, seen) = tried(&[(1_100, &good), (1_200, &reset), (2_000, &gave_up), (3_500, &good)]);
        assert_eq!(broken, [""; 0]);
        assert_eq!(seen, ["all 2 were served within 2.5s", "2 tries failed, of which 1 were given up"]);
        let (broken, seen) = tried(&[(1_100, &good), (2_000, &gave_up)]);
        assert_eq!((broken, seen.len()), (vec!["broken: of 2 only 1 were served".to_owned()], 1));
        assert_eq!(tried(&[(1_100, &good), (1_200, &x509), (2_000, &good)]).0.len(), 1);
    }
}
