//! From what a rehearsal wrote down and judged to a report's data; pure.
//!
//! One function a part of the data: a new kind of client or figure changes that one. `streams` makes
//! lives of connections out of attempts and ends, `series` cuts all into steps.

mod series;
mod streams;
#[cfg(test)]
mod tests;

use super::{environment, format};
use crate::data::{
    self, Away, ByAddress, Command, ControlStreams, Direct, Informer, Instance, Mark, MarkKind, Period, Program,
    Promise, Ran, Report, Run, RunOutcome, Storm, Tally, Verdict,
};
use crate::network::SERVICE;
use crate::plan::{Plan, Via};
use crate::promise::{Forgotten, Promise as Promised};
use crate::record::{Answer, Attempt, Failure, Injected, Kind, Player, Record, Stamp, Storm as Stormed};
use crate::verdict::{Loss, LostAtNode, Verdict as Judged, millis};
use crate::{Rehearsed, Run as Played};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

/// What came of each run, in the order of the plan.
pub fn runs(plan: &Plan, rehearsed: &Rehearsed) -> Vec<Run> {
    let topology = plan.topology.to_string();
    let control = rehearsed.runs.iter().find(|run| run.via == Via::None).map(|run| &run.verdict);
    let one = |via: &Via| {
        let via_is = |run: &&Played| run.via == *via;
        let skipped = || rehearsed.skipped.iter().find(|(other, _)| other == via);
        let outcome = match rehearsed.runs.iter().find(via_is) {
            Some(played) => RunOutcome::Ran(Box::new(ran(played, control))),
            None => RunOutcome::Skipped(skipped()?.1.clone()),
        };
        Some(Run { via: *via, topology: topology.clone(), outcome })
    };
    plan.runs.iter().filter_map(one).collect()
}

/// The report of a rehearsal and its runs, made now and here.
pub fn report(plan: &Plan, rehearsed: &Rehearsed, runs: Vec<Run>, argv: Vec<String>) -> Report {
    Report {
        version: data::VERSION,
        berth_version: berth_node::VERSION.to_owned(),
        made_at: environment::now(),
        command: Command::new(argv),
        seed: Some(plan.load.seed),
        environment: environment::look(programs(plan, rehearsed)),
        aborted: rehearsed.aborted.as_ref().map(ToString::to_string),
        runs,
    }
}

/// The apiservers, each once, and what was between or behind them.
fn programs(plan: &Plan, rehearsed: &Rehearsed) -> Vec<Program> {
    let mut seen = BTreeSet::new();
    let players = rehearsed.runs.iter().flat_map(|run| &run.record.players);
    let known = players.filter_map(|player| Some((player, player.version.as_ref()?)));
    let new = known.filter(|(player, _)| seen.insert(player.name.as_str()));
    let apiservers = new.map(|(player, version)| Program { role: player.name.clone(), version: version.clone() });
    let kube_proxy = plan.nodes.as_ref();
    let kube_proxy =
        kube_proxy.and_then(|nodes| environment::ask("kube-proxy", nodes.kube_proxy.as_os_str(), "--version"));
    let etcd = plan.etcd.as_ref().and_then(|program| environment::ask("etcd", program.as_os_str(), "--version"));
    let haproxy = rehearsed.runs.iter().find(|run| run.via == Via::Haproxy);
    let haproxy = haproxy.and_then(|_| environment::ask("haproxy", "haproxy".as_ref(), "-v"));
    // Of this program the version is in the report already.
    let berth = plan.berth.as_ref().and_then(|program| environment::ask("berth", program.as_os_str(), "--version"));
    apiservers.chain(etcd).chain(kube_proxy).chain(haproxy).chain(berth).collect()
}

fn ran(played: &Played, control: Option<&Judged>) -> Ran {
    let (record, judged) = (&played.record, &played.verdict);
    let span = Span::of(record);
    let lives = streams::lives(record, &span);
    Ran {
        load_ms: span.over.since(span.began).as_millis() as u64,
        instances: record.players.iter().map(instance).collect(),
        verdict: verdict(played, control),
        figures: judged.figures.clone(),
        timeline: series::timeline(record, judged, &lives, &span),
        marks: marks(record, judged, &span),
        watches: streams::watches(record, judged, &lives, &span),
        informers: informers(record),
        control_streams: control_streams(record),
        endpoint_gaps: endpoint_gaps(record, &span),
        storm: record.storm.as_ref().map(|storm| self::storm(storm, &span)),
        gate: record.gates.as_ref().map(|gates| series::gate(gates, &span)),
        direct: direct(record, &span),
        by_address: by_address(record, judged),
        away: away(record, &span),
        promises: judged.promises.iter().map(|promised| promise(promised, &span)).collect(),
    }
}

fn instance(player: &Player) -> Instance {
    Instance { name: player.name.clone(), version: player.version.clone().unwrap_or_default() }
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
    fn of(record: &Record) -> Self {
        let load = record.load();
        let last = record.attempts.iter().map(|a| a.done).max();
        Self { began: load.start, over: load.end, last: last.map_or(load.end, |last| last.max(load.end)) }
    }

    fn ms(&self, at: Stamp) -> i64 {
        let ms = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        if at < self.began { -ms(self.began.since(at)) } else { ms(at.since(self.began)) }
    }
}

fn verdict(played: &Played, control: Option<&Judged>) -> Verdict {
    let judged = &played.verdict;
    let unfinished = played.failed.iter().map(|why| format!("it did not come to its end: {why}"));
    let objections: Vec<String> = unfinished.chain(judged.objections.iter().cloned()).collect();
    Verdict {
        held: judged.held() && objections.is_empty(),
        inconclusive: judged.is_inconclusive() && played.failed.is_none(),
        summary: summary(played, objections.first()),
        lost: judged.lost.iter().map(|(loss, &count)| loss.tally(count)).collect(),
        apart: apart(judged),
        control: control.map(apart),
        objections,
        notes: judged.notes.clone(),
        examples: judged.examples.clone(),
    }
}

fn apart(judged: &Judged) -> Vec<Tally> {
    let apart = [
        ("ended_by_instance", "streams that their instance ended", judged.ends_by_instance.len() as u64),
        ("rejected", "requests that their instance rejected", judged.rejected),
        ("allowed", "losses that a promise under a fault allows", judged.allowed()),
        (
            "allowed_direct",
            "of these, new connections on the direct path when the instance was killed",
            judged.promises.iter().map(Promised::lost_on_direct).sum(),
        ),
    ];
    let apart = apart.into_iter().filter(|(kind, _, count)| !kind.starts_with("allowed") || *count > 0);
    apart.map(|(kind, text, count)| Tally { kind: kind.to_owned(), text: text.to_owned(), count }).collect()
}

fn summary(played: &Played, objection: Option<&String>) -> String {
    let judged = &played.verdict;
    let nodes = || played.record.nodes.iter().flat_map(|node| &node.attempts);
    let new = nodes().filter(|attempt| attempt.kind == Kind::New).count() as u64;
    let requests = format::of(judged.figures.requests + nodes().count() as u64, "request", "requests");
    let connections = format::count(judged.figures.new_connections + new);
    let broken = judged.promises.iter().filter(|p| !p.held()).count() as u64;
    let broke = match broken {
        0 => String::new(),
        _ => format!(" {}.", format::of(broken, "promise was broken", "promises were broken")),
    };
    let words = |(loss, &count): (&Loss, &u64)| {
        let (_, one, many) = loss.names();
        format::of(count, one, many)
    };
    let lost = judged.lost.iter().map(words).collect::<Vec<_>>().join(", ");
    match (judged.lost(), objection) {
        (1.., _) => format!("Of {requests}, {connections} of them on a new connection: {lost}.{broke}"),
        (0, Some(objection)) => {
            let objection = objection.lines().next().unwrap_or_default().trim_end_matches([';', ':', '.']);
            format!("Of {requests} nothing was seen to be lost, but {objection}.{broke}")
        }
        (0, None) if broken > 0 => format!("Of {requests} nothing else was lost.{broke}"),
        (0, None) => {
            let waits = nodes().map(|attempt| millis(attempt.done.since(attempt.due)));
            let longest = format::wait(waits.fold(judged.figures.wait_max_ms, f64::max));
            let all = match judged.allowed() {
                0 => format!("All of {requests} were answered, {connections} of them on a new connection"),
                allowed => {
                    let allowed = format::of(allowed, "loss that a promise allows", "losses that promises allow");
                    format!(
                        "Of {requests}, {connections} of them on a new connection, nothing was lost beyond {allowed}"
                    )
                }
            };
            let watched = match played.record.watches.len() as u64 {
                0 => String::new(),
                1 => " The watch saw every write once.".to_owned(),
                watches => format!(" {} watches saw every write once.", format::count(watches)),
            };
            let kept = match played.record.informers.iter().filter(|informer| !informer.is_quiet()).count() as u64 {
                0 => String::new(),
                1 => " The informer holds exactly what was written.".to_owned(),
                informers => format!(" {} informers hold exactly what was written.", format::count(informers)),
            };
            format!("{all}; the longest took {longest}.{watched}{kept}")
        }
    }
}

fn promise(promised: &Promised, span: &Span) -> Promise {
    let broken = promised.broken.iter().map(|why| format!("broken: {why}"));
    let direct = promised.on_direct.then(|| {
        let lost = format::of(promised.lost_on_direct(), "new connection", "new connections");
        format!("{lost} lost on the direct path when the instance was killed")
    });
    Promise {
        fault: promised.fault.clone(),
        instance: promised.instance.clone(),
        from_ms: span.ms(promised.at),
        to_ms: promised.over.map(|over| span.ms(over)),
        promise: promised.text.to_owned(),
        held: promised.held(),
        what_happened: broken.chain(promised.seen.iter().cloned()).chain(direct).collect(),
        allowed: promised.allowed_by_kind().into_iter().map(|(loss, count)| loss.tally(count)).collect(),
    }
}

fn informers(record: &Record) -> Vec<Informer> {
    let mut informers = record.informers.clone();
    // They are noted as they come to their end.
    informers.sort_unstable_by(|a, b| a.id.cmp(&b.id));
    informers
}

fn control_streams(record: &Record) -> BTreeMap<String, ControlStreams> {
    let mut streams: BTreeMap<String, ControlStreams> = BTreeMap::new();
    for (instance, opened) in &record.control.streams {
        streams.entry(instance.clone()).or_default().opened = *opened;
    }
    for end in &record.control.ends {
        streams.entry(end.instance.clone()).or_default().ended += 1;
    }
    streams
}

fn endpoint_gaps(record: &Record, span: &Span) -> Option<Vec<Period>> {
    let period = |(from, to): &(Stamp, Stamp)| Period { from_ms: span.ms(*from), to_ms: span.ms(*to) };
    Some(record.endpoint_gaps.as_ref()?.iter().map(period).collect())
}

fn storm(storm: &Stormed, span: &Span) -> Storm {
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
    Storm {
        from_ms: span.ms(storm.at),
        clients: storm.clients.into(),
        served: served.len() as u64,
        half_served_ms: served.get((storm.clients as usize).div_ceil(2).saturating_sub(1)).map(after),
        all_served_ms: storm.all_served().as_ref().map(after),
        gave_up: storm.gave_up(),
        failed: failed.into_iter().map(|(loss, count)| loss.tally(count)).collect(),
    }
}

fn direct(record: &Record, span: &Span) -> Option<Direct> {
    let used = record.direct.as_ref()?;
    let load = span.over.since(span.began).as_secs_f64();
    let share = used.on_within(span.began, span.over).as_secs_f64() / load;
    let period = |(from, to): &(Stamp, Stamp)| Period { from_ms: span.ms(*from), to_ms: span.ms(*to) };
    let on = used.on.iter().map(period).collect();
    Some(Direct { steered: used.steered, on_share: if load > 0.0 { share } else { 0.0 }, on })
}

/// The Service first: what was lost there is what is left of all.
fn by_address(record: &Record, judged: &Judged) -> Vec<ByAddress> {
    if record.nodes.is_empty() {
        return Vec::new();
    }
    let mut at_service = LostAtNode { lost: judged.lost.clone(), allowed: judged.allowed() };
    for node in &judged.nodes {
        at_service.allowed -= node.allowed;
        for (loss, count) in &node.lost {
            *at_service.lost.entry(*loss).or_default() -= count;
        }
    }
    let at = |name: &str, address: SocketAddr, attempts: &[Attempt], seen: &LostAtNode| ByAddress {
        name: name.to_owned(),
        address: address.to_string(),
        requests: attempts.len() as u64,
        new_connections: attempts.iter().filter(|attempt| attempt.kind == Kind::New).count() as u64,
        lost: seen.lost.iter().filter(|(_, count)| **count > 0).map(|(loss, &count)| loss.tally(count)).collect(),
        allowed: seen.allowed,
        wait_max_ms: attempts.iter().map(|attempt| millis(attempt.done.since(attempt.due))).fold(0.0, f64::max),
    };
    let service = at("Service kubernetes", SERVICE, &record.attempts, &at_service);
    let nodes = record.nodes.iter().zip(&judged.nodes);
    [service].into_iter().chain(nodes.map(|(node, seen)| at(&node.name, node.address, &node.attempts, seen))).collect()
}

fn away(record: &Record, span: &Span) -> Vec<Away> {
    let one = |injected: &Injected| {
        let Injected { fault, node, at, over, .. } = injected;
        let node = node.as_ref().filter(|_| fault.is_of_a_node())?;
        let seen = Forgotten::of(record, *at, node.address.ip());
        let after = |moment: Stamp| millis(moment.since(*at));
        let failed = |a: &&Attempt| a.kind == Kind::New && matches!(a.answer, Answer::Failed(_));
        let meanwhile = |a: &&Attempt| a.due >= *at && over.is_none_or(|over| a.due < over);
        Some(Away {
            fault: fault.to_string(),
            node: node.name.clone(),
            from_ms: span.ms(*at),
            reconciled_ms: seen.reconciled.map(after),
            named_ms: seen.named.map(after),
            lost_ms: record.attempts.iter().filter(failed).filter(meanwhile).map(|a| a.due).max().map(after),
            back_ms: over.map(after),
        })
    };
    record.injected.iter().filter_map(one).collect()
}

/// Each once, in order. Where the script told an instance to stop, it need not say so itself.
fn marks(record: &Record, judged: &Judged, span: &Span) -> Vec<Mark> {
    let moments = &record.moments;
    let mut marks: BTreeMap<(i64, &str, MarkKind), String> = BTreeMap::new();
    for moment in &moments.0 {
        let what = match moment.mark {
            MarkKind::Terminating if moments.first(&moment.instance, MarkKind::Sigterm).is_none() => MarkKind::Sigterm,
            MarkKind::Listening | MarkKind::Terminating | MarkKind::Draining => continue,
            mark => mark,
        };
        marks.insert((span.ms(moment.at), &moment.instance, what), moment.text.clone());
    }
    for promised in &judged.promises {
        marks.insert((span.ms(promised.at), &promised.instance, MarkKind::Fault), promised.fault.clone());
    }
    // What both an instance and the script saw is told once, until something happens to the instance.
    let mut told: BTreeSet<(&str, MarkKind)> = BTreeSet::new();
    marks.retain(|(_, instance, what), _| {
        if matches!(what, MarkKind::Started | MarkKind::Exited | MarkKind::Fault) {
            told.retain(|(other, _)| other != instance);
        }
        told.insert((*instance, *what))
    });
    let mark = |((at_ms, instance, what), text): ((i64, &str, MarkKind), String)| Mark {
        at_ms,
        instance: instance.to_owned(),
        what,
        text,
    };
    marks.into_iter().map(mark).collect()
}
