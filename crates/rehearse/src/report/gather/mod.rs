//! From what a rehearsal wrote down and judged to a report's data; pure.
//!
//! What belongs to one run comes from the judges; here are the verdict as a whole, and the rehearsal.

use super::{environment, format};
use crate::data::{self, Command, Program, Ran, Report, Run, RunOutcome, Tally, Verdict};
use crate::event::Kind;
use crate::judges;
use crate::plan::{Plan, Via};
use crate::stamp::millis;
use crate::verdict::{Loss, Promise as Promised, Verdict as Judged};
use crate::{Rehearsed, Run as Played};
use std::collections::BTreeSet;

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
        environment: environment::read(programs(plan, rehearsed)),
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
    Ran { verdict: verdict(played, control), ..judges::data(&played.record, &played.verdict) }
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

#[cfg(test)]
mod tests;
