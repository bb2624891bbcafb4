//! From what a rehearsal wrote down and judged to a report's data; pure.
//!
//! One function a part of the data: a new kind of client or figure changes that one. `streams` makes
//! lives of connections out of attempts and ends, `series` cuts all into steps.

mod series;
mod streams;
#[cfg(test)]
mod tests;

use super::data::{Figures, Instance, Mark, MarkKind, Outcome, Promise, Ran, Run, Tally, Verdict, Via};
use super::format;
use crate::rehearse::record::{Answer, Failure, Happened, Mark as Told, Record, Stamp};
use crate::rehearse::verdict::{Loss, Verdict as Judged};
use std::collections::BTreeMap;
use std::time::Duration;

/// What a run left behind.
#[derive(Debug)]
pub struct Source<'a> {
    /// The way from clients to instances.
    pub via: Via,
    /// Who got SIGTERM when.
    pub topology: &'a str,
    /// Names and versions, in the order in which they were started.
    pub instances: &'a [(&'a str, &'a str)],
    /// What was written down.
    pub record: &'a Record,
    /// What was made of it.
    pub verdict: &'a Judged,
    /// The verdict on a run that dialed the instances directly.
    pub control: Option<&'a Judged>,
    /// What was promised under faults.
    pub promises: Vec<Promise>,
}

/// A run that was made.
pub fn run(source: Source<'_>) -> Run {
    let span = Span::of(source.record);
    let lives = streams::lives(source.record, &span);
    let instances = source.instances.iter();
    let ran = Ran {
        load_ms: span.over.since(span.began).as_millis() as u64,
        instances: instances.map(|&(name, version)| Instance { name: name.into(), version: version.into() }).collect(),
        verdict: verdict(&source),
        figures: figures(&source, &span),
        timeline: series::timeline(source.record, source.verdict, &lives, &span),
        marks: marks(source.record, &span),
        watches: streams::watches(source.record, source.verdict, &lives, &span),
        informers: Vec::new(),
        promises: source.promises,
    };
    Run { via: source.via, topology: source.topology.to_owned(), outcome: Outcome::Ran(Box::new(ran)) }
}

/// A run that was not made.
pub fn skipped(via: Via, topology: &str, reason: String) -> Run {
    Run { via, topology: topology.to_owned(), outcome: Outcome::Skipped(reason) }
}

/// The load, and all that came of it.
#[derive(Debug, Clone, Copy)]
struct Span {
    /// Zero of all times.
    began: Stamp,
    /// End of the timetables.
    over: Stamp,
    /// The last answer, or `over` if that is later.
    last: Stamp,
}

impl Span {
    /// An aborted run did not come to the end of its load, and perhaps not to its beginning.
    fn of(record: &Record) -> Self {
        let first = record.attempts.iter().map(|a| a.due).min();
        let last = record.attempts.iter().map(|a| a.done).max();
        let began = record.began.or(first).unwrap_or(Stamp(0));
        let over = record.over.or(last).unwrap_or(began).max(began);
        Self { began, over, last: last.map_or(over, |last| last.max(over)) }
    }

    fn ms(&self, at: Stamp) -> i64 {
        let ms = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        if at < self.began { -ms(self.began.since(at)) } else { ms(at.since(self.began)) }
    }
}

fn verdict(source: &Source<'_>) -> Verdict {
    let judged = source.verdict;
    let verdict = Verdict {
        held: judged.held() && source.promises.iter().all(|p| p.held),
        summary: String::new(),
        lost: judged.lost.iter().map(|(loss, &count)| lost(*loss, count)).collect(),
        apart: apart(judged),
        control: source.control.map(apart),
        objections: judged.objections.clone(),
        examples: judged.examples.clone(),
    };
    Verdict { summary: summary(source, &verdict), ..verdict }
}

fn lost(loss: Loss, count: u64) -> Tally {
    let (kind, _, text) = name(loss);
    tally(kind, text, count)
}

fn tally(kind: &str, text: &str, count: u64) -> Tally {
    Tally { kind: kind.to_owned(), text: text.to_owned(), count }
}

/// A loss's name in the data, which does not change, and what one and several are called.
fn name(loss: Loss) -> (&'static str, &'static str, &'static str) {
    match loss {
        Loss::Refused => ("refused", "connection refused", "connections refused"),
        Loss::Reset => ("reset", "connection reset", "connections reset"),
        Loss::Closed => ("closed", "connection closed without an answer", "connections closed without an answer"),
        Loss::Unanswered => ("unanswered", "request unanswered for 15 s", "requests unanswered for 15 s"),
        Loss::Tls => ("tls", "TLS error", "TLS errors"),
        Loss::Http => ("http", "HTTP error", "HTTP errors"),
        Loss::BadStatus => ("bad_status", "error status", "error statuses"),
        Loss::StreamEnded => ("stream_ended", "stream cut", "streams cut"),
        Loss::EventMissed => ("event_missed", "watch event missed", "watch events missed"),
        Loss::EventDoubled => ("event_doubled", "watch event doubled", "watch events doubled"),
    }
}

fn apart(judged: &Judged) -> Vec<Tally> {
    vec![
        tally("ended_by_instance", "streams that their instance ended", judged.ended_by_instance),
        tally("turned_away", "requests that their instance turned away", judged.turned_away),
    ]
}

fn summary(source: &Source<'_>, verdict: &Verdict) -> String {
    let (judged, lost) = (source.verdict, verdict.lost());
    let watches = source.record.watches.len() as u64;
    let words = |(loss, &count): (&Loss, &u64)| {
        let (_, one, many) = name(*loss);
        format::of(count, one, many)
    };
    let kinds = judged.lost.iter().map(words);
    let kinds = kinds.collect::<Vec<_>>().join(", ");
    let broken = source.promises.iter().filter(|p| !p.held).count() as u64;
    let longest = format::wait(millis(judged.longest_wait));
    let requests = format::of(judged.requests, "request", "requests");
    let connections = format::count(judged.new_connections);
    if verdict.held && lost == 0 {
        let watched = match watches {
            0 => String::new(),
            1 => " The watch saw every write once.".to_owned(),
            _ => format!(" {} watches saw every write once.", format::count(watches)),
        };
        let all = format!("All of {requests} were answered, {connections} of them on a new connection");
        return format!("{all}; the longest took {longest}.{watched}");
    }
    let broke = match broken {
        0 => String::new(),
        _ => format!(" {}.", format::of(broken, "promise was broken", "promises were broken")),
    };
    match (lost, judged.objections.first()) {
        (0, Some(objection)) => format!("Of {requests} nothing was seen to be lost, but {objection}.{broke}"),
        (0, None) => format!("Of {requests} nothing was lost.{broke}"),
        _ => format!("Of {requests}, {connections} of them on a new connection: {kinds}.{broke}"),
    }
}

fn millis(time: Duration) -> f64 {
    // Microseconds are as fine as the waits are measured.
    time.as_micros() as f64 / 1e3
}

fn figures(source: &Source<'_>, span: &Span) -> Figures {
    let (judged, attempts) = (source.verdict, &source.record.attempts);
    let x509 = |answer: &Answer| matches!(answer, Answer::Failed(Failure::Tls(why)) if why.contains("certificate"));
    let (longest, silent_s) = series::silence(source.record, span);
    Figures {
        requests: judged.requests,
        new_connections: judged.new_connections,
        new_connections_by_instance: judged.connections.clone(),
        wait_p50_ms: millis(judged.median_wait),
        wait_p99_ms: millis(judged.p99_wait),
        wait_max_ms: millis(judged.longest_wait),
        longest_silence_ms: millis(longest),
        silent_s,
        watch_events: judged.watch_events,
        x509_errors: attempts.iter().filter(|a| x509(&a.answer)).count() as u64,
        endpoint_gap_ms: None,
    }
}

/// What the script saw, and what only the instances themselves can tell.
fn marks(record: &Record, span: &Span) -> Vec<Mark> {
    let mut marks: BTreeMap<(i64, &str, MarkKind), &str> = BTreeMap::new();
    for moment in &record.moments {
        let what = match moment.what {
            Happened::Started => MarkKind::Started,
            Happened::Joined => MarkKind::Joined,
            Happened::Sigterm => MarkKind::Sigterm,
            Happened::Left => MarkKind::Left,
            Happened::Exited => MarkKind::Exited,
            Happened::Fault => MarkKind::Fault,
        };
        marks.insert((span.ms(moment.at), &moment.instance, what), &moment.text);
    }
    let sent = |instance: &str| record.moments.iter().any(|m| m.what == Happened::Sigterm && m.instance == instance);
    for (instance, told) in &record.marks {
        for (&mark, &at) in told {
            let what = match mark {
                Told::Ready => MarkKind::Ready,
                Told::Drained => MarkKind::Drained,
                Told::Terminating if !sent(instance) => MarkKind::Sigterm,
                Told::Listening | Told::Terminating | Told::Draining => continue,
            };
            marks.insert((span.ms(at), instance, what), "");
        }
    }
    let mark = |((at_ms, instance, what), text): ((i64, &str, MarkKind), &str)| Mark {
        at_ms,
        instance: instance.to_owned(),
        what,
        text: text.to_owned(),
    };
    marks.into_iter().map(mark).collect()
}
