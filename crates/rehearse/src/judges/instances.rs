//! What is known of the instances: what each served, and what they logged of certificates.

use super::{Case, Judge};
use crate::data::{ControlStreams, Instance, MarkKind, Ran, Verdict};
use crate::event::{Answer, Attempt, EventKind};
use crate::record::{Player, Record};
use crate::report::format::count;
use crate::section::{Row, Section};
use crate::stamp::Stamp;
use std::collections::BTreeMap;

pub(super) const INSTANCES: Judge = Judge { judge, section };

/// Fewest new connections that each instance has to serve for a verdict.
const FEWEST: u64 = 20;

/// Whether there was an upgrade, and each instance was used.
fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Case { record, plan, .. } = case;
    let Ran { figures, verdict, .. } = ran;
    let untrusted = record.events.iter().filter(|event| event.what == EventKind::UntrustedCertificate).count();
    figures.logged_x509_errors = Some(untrusted as u64);
    let turns: Vec<&str> =
        record.players.iter().filter(|player| player.serves).map(|player| player.name.as_str()).collect();
    if turns.len() < 2 {
        verdict.object("there was no upgrade".into());
    }
    for name in &turns {
        let served = figures.new_connections_by_instance.get(*name).copied().unwrap_or(0);
        if served < FEWEST {
            verdict.doubt(format!("{name} served only {served} new connections"));
        }
    }
    for pair in turns.windows(2) {
        upgrade(record, pair[0], pair[1], verdict);
    }
    let instance = |Player { name, version, .. }: &Player| Instance {
        name: name.clone(),
        version: version.clone().unwrap_or_default(),
    };
    ran.simulated = plan.old.is_simulated();
    ran.instances = record.players.iter().map(instance).collect();
    ran.control_streams = control(record);
}

/// Whether an upgrade happened, in the right order.
fn upgrade(record: &Record, old: &str, new: &str, verdict: &mut Verdict) {
    let moments = &record.moments;
    // A real apiserver does not report these moments: they are seen from outside, a little later.
    let ready = moments.first(new, MarkKind::Ready).or(moments.first(new, MarkKind::Joined));
    let stopped = moments.last(old, MarkKind::Terminating).or(moments.last(old, MarkKind::Sigterm));
    let gone = moments.last(old, MarkKind::Drained).or(moments.last(old, MarkKind::Exited));
    let served = |a: &&Attempt| matches!(&a.answer, Answer::Good { instance } if instance == new);
    let early = record.attempts.iter().filter(served).filter(|a| ready.is_none_or(|r| a.done < r)).count();
    let after = |gone: Stamp| record.attempts.iter().filter(served).any(|a| a.due > gone);
    let objection = match (stopped, gone, ready) {
        (None, ..) => Some(format!("{old} was never sent SIGTERM")),
        (_, None, _) => Some(format!("{old} did not come to the end of its drain")),
        (_, _, None) => Some(format!("{new} never got ready")),
        (Some(stopped), _, Some(ready)) if stopped < ready => Some(format!("{old} was stopped before {new} was ready")),
        (_, Some(gone), _) if !after(gone) => {
            verdict.doubt(format!("{new} served nothing after {old} was gone"));
            None
        }
        _ => None,
    };
    if let Some(objection) = objection {
        verdict.object(objection);
    }
    if early > 0 {
        verdict.object(format!("{new} answered {early} requests before its /readyz was 200"));
    }
}

/// Connections to the instances themselves, and how many of them ended.
fn control(record: &Record) -> BTreeMap<String, ControlStreams> {
    let mut streams: BTreeMap<String, ControlStreams> = BTreeMap::new();
    for (instance, opened) in &record.control.streams {
        streams.entry(instance.clone()).or_default().opened = opened.len() as u64;
    }
    for end in &record.control.ends {
        streams.entry(end.instance.clone()).or_default().ended += 1;
    }
    streams
}

fn section(ran: &Ran) -> Section {
    let served = |Instance { name, version }: &Instance| {
        let served = ran.figures.new_connections_by_instance.get(name).copied().unwrap_or(0);
        Row::table(format!("connections on {name}"), count(served), version.clone())
    };
    let mut rows: Vec<Row> = ran.instances.iter().map(served).collect();
    if let Some(errors) = ran.figures.logged_x509_errors {
        let note = "in their logs: one met another's certificate";
        rows.push(Row::both("x509 errors of apiservers", count(errors), note));
        rows.push(Row::page("certificate errors in the apiservers' logs", count(errors)));
    }
    for (instance, control) in &ran.control_streams {
        rows.push(Row::page(format!("connections straight to {instance}"), count(control.opened)));
        rows.push(Row::page("of those ended, which only the instance can have done", count(control.ended)));
    }
    Section { rows, ..Section::default() }
}
