//! The report of a rehearsal: its runs, and where, when and by which programs they were made.

use super::environment;
use crate::Rehearsed;
use crate::data::{self, Command, Program, Report, Run};
use crate::plan::{Plan, Via};
use std::collections::BTreeSet;

/// Made now and here.
pub fn report(plan: &Plan, rehearsed: Rehearsed, argv: Vec<String>) -> Report {
    Report {
        version: data::VERSION,
        berth_version: berth_node::VERSION.to_owned(),
        made_at: environment::now(),
        command: Command::new(argv),
        seed: Some(plan.load.seed),
        environment: environment::read(programs(plan, &rehearsed.runs)),
        aborted: rehearsed.aborted.as_ref().map(ToString::to_string),
        runs: rehearsed.runs,
    }
}

/// The apiservers, each once, and what was between or behind them.
fn programs(plan: &Plan, runs: &[Run]) -> Vec<Program> {
    let mut seen = BTreeSet::new();
    let known = runs.iter().filter_map(Run::ran).flat_map(|ran| &ran.instances).filter(|i| !i.version.is_empty());
    let new = known.filter(|instance| seen.insert(instance.name.as_str()));
    let apiservers = new.map(|instance| Program { role: instance.name.clone(), version: instance.version.clone() });
    let kube_proxy = plan.nodes.as_ref();
    let kube_proxy =
        kube_proxy.and_then(|nodes| environment::ask("kube-proxy", nodes.kube_proxy.as_os_str(), "--version"));
    let etcd = plan.etcd.as_ref().and_then(|program| environment::ask("etcd", program.as_os_str(), "--version"));
    let haproxy = runs.iter().find(|run| run.via == Via::Haproxy && run.ran().is_some());
    let haproxy = haproxy.and_then(|_| environment::ask("haproxy", "haproxy".as_ref(), "-v"));
    // Of this program the version is in the report already.
    let berth = plan.berth.as_ref().and_then(|program| environment::ask("berth", program.as_os_str(), "--version"));
    apiservers.chain(etcd).chain(kube_proxy).chain(haproxy).chain(berth).collect()
}

#[cfg(test)]
mod tests;
