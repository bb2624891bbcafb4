//! Checks the instances: how many connections each served, and whether an apiserver logged an
//! untrusted certificate.

use super::Case;
use crate::record::{
    Player, Record,
    data::{Instance, MarkKind, Ran, Value},
    event::{Answer, Attempt, ConnectionKind, EventKind},
    stamp::Stamp,
};

/// Fewest new connections that each instance has to serve for a verdict.
const MIN_CONNECTIONS: u64 = 20;

/// Checks that there was an upgrade, and that each instance was used.
pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let record = case.record;
    for Player { name, version, .. } in &record.players {
        let version = version.clone().unwrap_or_default();
        ran.add(
            format!("connections on {name}"),
            Value::Count(count_served(record, name)),
        )
        .set_note(version.clone());
        ran.instances.push(Instance {
            name: name.clone(),
            version,
        });
    }
    let untrusted = record
        .events
        .iter()
        .filter(|event| event.what == EventKind::UntrustedCertificate)
        .count();
    ran.add("x509 errors of apiservers", Value::Count(untrusted as u64))
        .set_note("in the apiservers' logs: an instance got another instance's certificate");
    let turns: Vec<&str> = record
        .players
        .iter()
        .filter(|player| player.serves)
        .map(|player| player.name.as_str())
        .collect();
    if turns.len() < 2 {
        ran.add_objection("there was no upgrade".into());
    }
    for name in &turns {
        let served = count_served(record, name);
        if served < MIN_CONNECTIONS {
            ran.add_doubt(format!("{name} served only {served} new connections"));
        }
    }
    for pair in turns.windows(2) {
        judge_upgrade(record, pair[0], pair[1], ran);
    }
}

/// New connections that an instance answered.
fn count_served(record: &Record, name: &str) -> u64 {
    let new = record
        .attempts
        .iter()
        .filter(|attempt| attempt.kind == ConnectionKind::New);
    let by = new
        .filter(|a| matches!(&a.answer, Answer::Good { instance } | Answer::Bad { instance, .. } if instance == name));
    by.count() as u64
}

/// Checks that an upgrade happened, in the right order.
fn judge_upgrade(record: &Record, old: &str, new: &str, ran: &mut Ran) {
    let moments = &record.moments;
    // A real apiserver does not report when it is ready, terminates or is drained. Then the times
    // count at which the script saw this from outside, a little later.
    let ready = moments
        .first_time(new, MarkKind::Ready)
        .or(moments.first_time(new, MarkKind::Joined));
    let stopped = moments
        .last_time(old, MarkKind::Terminating)
        .or(moments.last_time(old, MarkKind::Sigterm));
    let gone = moments
        .last_time(old, MarkKind::Drained)
        .or(moments.last_time(old, MarkKind::Exited));
    let served = |a: &&Attempt| matches!(&a.answer, Answer::Good { instance } if instance == new);
    let early = record
        .attempts
        .iter()
        .filter(served)
        .filter(|a| ready.is_none_or(|r| a.done < r))
        .count();
    let after = |gone: Stamp| record.attempts.iter().filter(served).any(|a| a.due > gone);
    let objection = match (stopped, gone, ready) {
        (None, ..) => Some(format!("{old} was never sent SIGTERM")),
        (_, None, _) => Some(format!("{old} did not finish its drain")),
        (_, _, None) => Some(format!("{new} never got ready")),
        (Some(stopped), _, Some(ready)) if stopped < ready => {
            Some(format!("{old} was stopped before {new} was ready"))
        }
        (_, Some(gone), _) if !after(gone) => {
            ran.add_doubt(format!("{new} served nothing after {old} was gone"));
            None
        }
        _ => None,
    };
    if let Some(objection) = objection {
        ran.add_objection(objection);
    }
    if early > 0 {
        ran.add_objection(format!(
            "{new} answered {early} requests before its /readyz was 200"
        ));
    }
}
