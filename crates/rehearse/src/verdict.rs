//! What a run came to as a whole: whether it held, and a sentence about it.
//!
//! **Lost** is a new connection that was refused, reset, or not answered within
//! 15 s of being dialled, or a stream that ended before its instance ended it.

use super::data::{Ran, Verdict, count_of};
use super::loss;
use super::report::format;
use std::collections::BTreeMap;

pub use super::loss::Loss;

/// The instance that is replaced.
pub const OLD: &str = "old";

/// The instance that replaces it.
pub const NEW: &str = "new";

/// A name of [`Verdict::apart`], and what that is called.
pub(crate) const UNTOLD: (&str, &str) =
    ("unanswered_busy", "requests that waited in vain while this machine was too busy to tell");

impl Verdict {
    /// Objects to what was rehearsed.
    pub(crate) fn object(&mut self, objection: String) {
        self.inconclusive = false;
        self.objections.push(objection);
    }

    /// Objects to the run: another one, or one on a faster machine, may prove more.
    pub(crate) fn doubt(&mut self, objection: String) {
        self.objections.push(objection);
    }

    /// Objects to the run by the clients' own timers: this machine was too busy to tell.
    pub(crate) fn too_busy(&mut self, objection: String) {
        self.too_busy = true;
        self.doubt(objection);
    }

    /// Objects to requests that this machine could not make, by their reasons.
    pub(crate) fn doubt_machine(&mut self, failed: BTreeMap<&str, u64>) {
        for (why, count) in failed {
            self.doubt(format!("{count} requests failed on this machine ({why}): a lower --rate or --storm helps"));
        }
    }
}

/// A run in one sentence.
pub(crate) fn summary(ran: &Ran) -> String {
    let Ran { verdict, figures, .. } = ran;
    let requests = format::of(figures.requests, "request", "requests");
    let connections = format::count(figures.new_connections);
    let broke = match ran.broken() {
        0 => String::new(),
        broken => format!(" {}.", format::of(broken, "promise was broken", "promises were broken")),
    };
    if verdict.lost() > 0 {
        let lost = verdict.lost.iter().map(loss::words).collect::<Vec<_>>().join(", ");
        return format!("Of {requests}, {connections} of them on a new connection: {lost}.{broke}");
    }
    if let Some(objection) = verdict.objections.first() {
        if verdict.too_busy {
            let seen = match count_of(&verdict.apart, UNTOLD.0) {
                0 => "nothing was seen to be lost".to_owned(),
                untold => {
                    format!("{} waited in vain meanwhile, and nothing else was seen to be lost", format::count(untold))
                }
            };
            return format!("This machine was too busy to tell: of {requests} {seen}.{broke}");
        }
        let objection = objection.lines().next().unwrap_or_default().trim_end_matches([';', ':', '.']);
        return format!("Of {requests} nothing was seen to be lost, but {objection}.{broke}");
    }
    if ran.broken() > 0 {
        return format!("Of {requests} nothing else was lost.{broke}");
    }
    let longest = format::wait(figures.wait_max_ms);
    let all = match ran.allowed() {
        0 => format!("All of {requests} were answered, {connections} of them on a new connection"),
        allowed => {
            let allowed = format::of(allowed, "loss that a promise allows", "losses that promises allow");
            format!("Of {requests}, {connections} of them on a new connection, nothing was lost beyond {allowed}")
        }
    };
    let watched = match ran.watches.len() as u64 {
        0 => String::new(),
        1 => " The watch saw every write once.".to_owned(),
        watches => format!(" {} watches saw every write once.", format::count(watches)),
    };
    let kept = match ran.informers.iter().filter(|informer| !informer.is_quiet()).count() as u64 {
        0 => String::new(),
        1 => " The informer holds exactly what was written.".to_owned(),
        informers => format!(" {} informers hold exactly what was written.", format::count(informers)),
    };
    format!("{all}; the longest took {longest}.{watched}{kept}")
}
