//! A storm: when its clients were served, and how earlier tries failed.

use super::{Case, Span, describe_outcome};
use crate::record::{
    Record,
    data::{Losses, Promise, Ran, Value},
    event::{Answer, Event, EventKind, Failure},
    format::{self, format_count, format_wait_time},
    loss::{self, Loss},
    stamp::{Stamp, millis},
};
use std::collections::BTreeMap;

/// Name of a storm in the report, where a promise has the name of its fault.
const NAME: &str = "storm";

/// Clients that came at one moment, and retried until they were served.
#[derive(Debug)]
struct StormEvents<'a> {
    clients: u32,
    /// When the clients came.
    at: Stamp,
    /// When the last client had been served, or had given up for good. `None` if not seen.
    over: Option<Stamp>,
    /// Time and outcome of each try. A client's last try is the one with a good answer.
    tries: Vec<(Stamp, &'a Answer)>,
}

impl<'a> StormEvents<'a> {
    fn of(record: &'a Record) -> Option<Self> {
        let mut storm = None::<Self>;
        for Event { at, what, .. } in &record.events {
            match (what, &mut storm) {
                (EventKind::StormBegan(clients), _) => {
                    storm = Some(Self {
                        clients: *clients,
                        at: *at,
                        over: None,
                        tries: Vec::new(),
                    });
                }
                (EventKind::StormTry(answer), Some(storm)) => storm.tries.push((*at, answer)),
                (EventKind::StormEnded, Some(storm)) => storm.over = Some(*at),
                _ => {}
            }
        }
        storm
    }

    /// The times at which clients were served, sorted.
    fn served_times(&self) -> Vec<Stamp> {
        let good = self
            .tries
            .iter()
            .filter(|(_, answer)| matches!(answer, Answer::Good { .. }));
        let mut served: Vec<Stamp> = good.map(|(at, _)| *at).collect();
        served.sort_unstable();
        served
    }

    /// Returns when the last client was served. `None` if a client was never served.
    fn last_served_time(&self) -> Option<Stamp> {
        let served = self.served_times();
        served
            .last()
            .copied()
            .filter(|_| served.len() == self.clients as usize)
    }

    /// The reasons of failed tries.
    fn failures_of_tries(&self) -> impl Iterator<Item = &Failure> {
        self.tries.iter().filter_map(|(_, answer)| {
            if let Answer::Failed(failure) = answer {
                Some(failure)
            } else {
                None
            }
        })
    }

    /// Returns the number of tries that a client gave up because the wait was too long.
    fn count_given_up_tries(&self) -> u64 {
        self.failures_of_tries()
            .filter(|failure| **failure == Failure::Unanswered)
            .count() as u64
    }

    /// Judges the promise that each client is served in the end, if it retries after failed tries.
    fn judge_promise(&self, span: &Span) -> Promise {
        let (clients, served) = (self.clients, self.served_times().len());
        let mut broken = Vec::new();
        let mut seen = Vec::new();
        match self.last_served_time() {
            Some(last) => seen.push(format!(
                "all {clients} clients were served within {:.1?}",
                last.since(self.at)
            )),
            None => broken.push(format!("of {clients} clients only {served} were served")),
        }
        let x509 = self
            .failures_of_tries()
            .filter(|failure| matches!(failure, Failure::X509(_)))
            .count();
        if x509 > 0 {
            broken.push(format!("untrusted certificates: {x509}"));
        }
        let failed = self.tries.len() - served;
        seen.push(format!(
            "{failed} tries failed, of which {} were given up",
            self.count_given_up_tries()
        ));
        Promise {
            fault: NAME.to_owned(),
            instance: NAME.to_owned(),
            from_ms: span.millis_since_load_began(self.at),
            to_ms: self.over.map(|over| span.millis_since_load_began(over)),
            promise: "each client of the storm is served, if the client retries until it is served"
                .to_owned(),
            held: broken.is_empty(),
            what_happened: describe_outcome(broken, seen),
            allowed: Losses::new(),
        }
    }
}

/// Judges the storm. Its failed tries are listed under its promise, and do not count as losses.
pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let Some(storm) = StormEvents::of(case.record) else {
        if case.plan.load.storm > 0 {
            ran.add_doubt("there was no storm".into());
        }
        return;
    };
    let mut local: BTreeMap<&str, u64> = BTreeMap::new();
    let mut failed = Losses::new();
    for (_, answer) in &storm.tries {
        let loss = match answer {
            Answer::Good { .. } | Answer::Failed(Failure::Unanswered) => None,
            Answer::Bad { .. } => Some(Loss::BadStatus),
            Answer::Failed(failure) => failure.loss(),
        };
        if let Answer::Failed(Failure::Local(why)) = answer {
            *local.entry(why).or_default() += 1;
        }
        loss.into_iter()
            .for_each(|loss| *failed.entry(loss).or_default() += 1);
    }
    ran.add_machine_doubts(local);
    ran.promises.push(storm.judge_promise(&case.span));
    let (served, gave_up) = (storm.served_times(), storm.count_given_up_tries());
    let after = |at: &Stamp| millis(at.since(storm.at));
    let last_served_time = storm.last_served_time().as_ref().map(after);
    let came_to = match last_served_time {
        Some(ms) => format!("all served within {}", format_wait_time(ms)),
        None => format!("only {} were served", format_count(served.len() as u64)),
    };
    let words = (gave_up > 0)
        .then(|| format::format_count_with_noun(gave_up, "try given up", "tries given up"))
        .into_iter();
    let words = words
        .chain((!failed.is_empty()).then(|| loss::losses_in_words(&failed)))
        .collect::<Vec<_>>()
        .join(", ");
    let words = if words.is_empty() {
        "at the first try".to_owned()
    } else {
        words
    };
    ran.add("clients of the storm", Value::Count(storm.clients.into()))
        .mark_as_main()
        .set_note(format!("{came_to}; {words}"));
    if let Some(half) = served.get((storm.clients as usize).div_ceil(2).saturating_sub(1)) {
        ran.add("half of the storm served within", Value::Ms(after(half)));
    }
    if let Some(all) = last_served_time {
        ran.add("storm served within", Value::Ms(all));
    }
    ran.add("storm: tries given up", Value::Count(gave_up))
        .set_note("no TLS handshake for 10 s, or no answer for 15 s");
}
