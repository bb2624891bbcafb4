//! `berth rehearse` and the stand-in apiserver that it starts.

use super::{Exit, block_on, mistaken, unavailable};
use crate::cli::{RehearseArgs, StandInArgs};
use crate::config::Mistakes;
use crate::rehearse::plan::{self, Plan};
use crate::rehearse::stage::Error;
use crate::rehearse::{Outcome, rehearse, stand_in, table};
use anyhow::Context;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::io::Write;
use std::ops::RangeInclusive;
use std::time::Duration;

pub(super) fn run(args: &RehearseArgs) -> anyhow::Result<Exit> {
    let plan = match check(args) {
        Ok(plan) => plan,
        Err(mistakes) => return Ok(mistaken(&mistakes)),
    };
    Ok(match block_on(rehearse(&plan))? {
        Ok(Outcome::Judged(verdict)) => {
            let written = std::io::stdout().write_all(table::render(&verdict).as_bytes());
            written.context("cannot write to standard output")?;
            if verdict.held() { Exit::Ok } else { Exit::No }
        }
        Ok(Outcome::Aborted(signal)) => {
            eprintln!("berth: the rehearsal was aborted; nothing can be concluded from it");
            Exit::Child(u8::try_from(128 + signal).unwrap_or(1))
        }
        Err(error @ Error::Unavailable(_)) => unavailable(&error),
        Err(error @ Error::Instance { .. }) => {
            eprintln!("berth: {error}");
            Exit::No
        }
    })
}

pub(super) fn stand_in(args: &StandInArgs) -> anyhow::Result<Exit> {
    Ok(match stand_in::run(&args.flags) {
        0 => Exit::Ok,
        status => Exit::Child(status),
    })
}

/// Checks everything and reports all mistakes, each with the option and the mend.
fn check(args: &RehearseArgs) -> Result<Plan, Mistakes> {
    let mut errors = Vec::new();
    let rate = number("--rate", &args.rate, plan::RATE, &mut errors);
    let clients = number("--clients", &args.clients, plan::CLIENTS, &mut errors);
    let watches = number("--watches", &args.watches, plan::WATCHES, &mut errors);
    let text = &args.shutdown_delay_duration;
    let delay = humantime::parse_duration(text).unwrap_or_else(|error| {
        errors.push(format!("--shutdown-delay-duration {text:?}: {error}; give a time such as 0s or 1500ms"));
        Duration::ZERO
    });
    if delay > plan::LONGEST_DELAY {
        let longest = humantime::format_duration(plan::LONGEST_DELAY);
        errors.push(format!("--shutdown-delay-duration {text}: give {longest} or less"));
    }
    if !errors.is_empty() {
        return Err(Mistakes(errors));
    }
    let plan = Plan::new(rate, clients, watches, delay);
    raise_file_limit(&plan).map_err(|error| Mistakes(vec![error]))?;
    Ok(plan)
}

fn number(option: &str, text: &str, range: RangeInclusive<u32>, errors: &mut Vec<String>) -> u32 {
    match text.parse() {
        Ok(number) if range.contains(&number) => number,
        _ => {
            errors.push(format!("{option} {text:?}: give a whole number from {} to {}", range.start(), range.end()));
            0
        }
    }
}

/// Raises the soft limit of open files to the hard one; the children inherit it. An error if the load
/// could not stay below it.
fn raise_file_limit(plan: &Plan) -> Result<(), String> {
    let limit = getrlimit(Resource::RLIMIT_NOFILE).map(|(soft, hard)| {
        if soft < hard && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok() { hard } else { soft }
    });
    match limit {
        Ok(limit) if limit < plan.descriptors() => Err(format!(
            "--rate {}, --clients {} and --watches {} may need {} open files, and the limit is {limit}: raise it \
             (ulimit -n) or give less",
            plan.rate,
            plan.clients,
            plan.watches,
            plan.descriptors()
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(rate: &str, clients: &str, watches: &str, delay: &str) -> RehearseArgs {
        RehearseArgs {
            rate: rate.into(),
            clients: clients.into(),
            watches: watches.into(),
            shutdown_delay_duration: delay.into(),
        }
    }

    #[test]
    fn every_mistake_is_reported_with_its_option() {
        let errors = check(&args("0", "many", "-1", "soon")).unwrap_err().0;
        let options = ["--rate", "--clients", "--watches", "--shutdown-delay-duration"];
        assert_eq!(errors.len(), options.len());
        for (error, option) in errors.iter().zip(options) {
            assert!(error.starts_with(option) && error.contains("give"), "{error}");
        }
        assert_eq!(check(&args("100", "8", "8", "2m")).unwrap_err().0.len(), 1);
    }

    #[test]
    fn what_is_typed_becomes_the_plan() {
        let plan = check(&args("20", "2", "7", "1s 500ms")).unwrap();
        assert_eq!((plan.rate, plan.clients, plan.watches), (20, 2, 7));
        assert_eq!(plan.shutdown_delay, Duration::from_millis(1500));
    }
}
