//! `berth rehearse --nodes 3` with real kube-apiservers and a real kube-proxy.

use super::{Binaries, program};
use berth_rehearse::data::{Ran, Report, Run};
use libtest_mimic::Failed;
use std::process::{Command, Stdio};

/// Three nodes go from one minor version to the next; then one is gone, and one is cut off. With berth nothing else is lost, and
/// the address leaves the Service no later than by kube-apiserver's own reconciler. Without berth, in the same run, upgrades
/// lose connections.
pub(super) fn rehearsal(binaries: &Binaries) -> Result<(), Failed> {
    let Binaries { old, new, etcd } = binaries;
    let kube_proxy = program(&new.paths, "KUBE_PROXY")?;
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let json = directory.path().join("report.json");
    let status = Command::new(env!("CARGO_BIN_EXE_berth"))
        .args(["rehearse", "--netns", "--nodes=3", "--fault=node-gone,partition", "--compare=none,berth", "--rate=30"])
        .args(["--shutdown-watch-termination-grace-period=5s", "--old", &old.path, "--new", &new.path, "--etcd", etcd])
        .args(["--kube-proxy", &kube_proxy, "--json"])
        .arg(&json)
        .stdin(Stdio::null())
        .status()
        .map_err(|error| format!("cannot run berth rehearse: {error}"))?;
    if !status.success() {
        return Err(format!("berth rehearse --nodes 3: {status}").into());
    }
    let text = std::fs::read(&json).map_err(|error| error.to_string())?;
    let report: Report = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    let runs: Vec<&Ran> = report.runs.iter().filter_map(Run::ran).collect();
    let [none, berth] = runs[..] else { return Err(format!("{} runs, not two", runs.len()).into()) };
    let lost = |ran: &Ran| ran.verdict.lost.iter().map(|tally| tally.count).sum::<u64>();
    if lost(none) == 0 || lost(berth) > 0 {
        return Err(format!("lost {} without berth, {} with it", lost(none), lost(berth)).into());
    }
    for ran in [none, berth] {
        let new_connections: Vec<_> = ran.by_address.iter().map(|at| at.new_connections).collect();
        if new_connections.len() != 4 || new_connections.iter().any(|count| *count < 200) {
            return Err(format!("new connections by the Service and three addresses: {new_connections:?}").into());
        }
        let faults: Vec<_> = ran.away.iter().map(|away| away.fault.as_str()).collect();
        if faults != ["node-gone", "partition"] || ran.away.iter().any(|away| away.named_ms.is_none()) {
            return Err(format!("not every node that went away left the Service: {:?}", ran.away).into());
        }
    }
    Ok(())
}
