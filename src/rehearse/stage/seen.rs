//! What can be seen of an instance from outside: in a shim's log, from a shim's answer, in /proc.

use super::super::plan::Via;
use super::super::record::{Mark, Recorder, Stamp};
use super::super::topology::{Layout, NODE};
use super::Setting;
use super::process::Listener;
use crate::backend::health::Standing;
use crate::control;
use crate::control::wire::{Ask, Reply};
use crate::instance::InstanceId;
use crate::os::holder;
use crate::phase::Phase;
use crate::registry::instance::{self, Listed, Record};
use crate::registry::{BerthDir, RunDir};
use nix::unistd::Pid;
use serde::Deserialize;
use std::net::SocketAddr;
use std::sync::Arc;

/// A line of a shim's log, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Line {
    message: String,
    #[serde(default)]
    instance: String,
}

/// Hears from a shim's log when an instance joins and leaves.
pub(super) fn hear(owner: &str, layout: Layout, recorder: &Arc<Recorder>) -> Listener {
    let (owner, recorder) = (owner.to_owned(), Arc::clone(recorder));
    if layout.via != Via::Berth {
        return Arc::new(|_| {});
    }
    Arc::new(move |line| {
        let at = Stamp::now();
        if let Some((instance, mark)) = serde_json::from_str(line).ok().and_then(|line| told(&owner, &line)) {
            recorder.note(|r| r.moments.add(&instance, mark, at));
        }
    })
}

/// What a line tells of whom. A node shim joins once; with it, an instance joins when it is ready.
fn told(owner: &str, line: &Line) -> Option<(String, Mark)> {
    let (message, instance) = (line.message.as_str(), &line.instance);
    if owner == NODE {
        return match message {
            "ready" => Some((instance.clone(), Mark::Joined)),
            "gone" => None,
            _ if message.contains("not ready any more") => Some((instance.clone(), Mark::Left)),
            _ => None,
        };
    }
    match message {
        "ready" if instance == owner => Some((owner.to_owned(), Mark::Ready)),
        "joined" => Some((owner.to_owned(), Mark::Joined)),
        "left" => Some((owner.to_owned(), Mark::Left)),
        _ => None,
    }
}

/// Whether a shim says that it listens and that an instance is ready, or why not.
pub(super) async fn joined(setting: &Setting, shim: &str, name: &str) -> Result<(), String> {
    let berth = berth(setting).ok_or("nobody was in the run directory yet")?;
    let shim = InstanceId::parse(shim).map_err(|error| error.to_string())?;
    let path = berth.socket_path(&shim).map_err(|error| error.to_string())?;
    let status = match control::ask(&path, Ask::Status).await {
        Ok(Reply::Status(status)) => status,
        Ok(reply) => return Err(format!("its shim says {reply:?}")),
        Err(error) => return Err(format!("its shim cannot be asked: {error}")),
    };
    match status.instances.iter().find(|i| i.instance.as_str() == name) {
        Some(own) if own.standing != Standing::Ready => Err(own.last_probe.clone()),
        Some(_) if status.state != Phase::Joined => Err(format!("its shim has not joined: {}", status.state.as_str())),
        Some(_) => Ok(()),
        None => Err("its shim does not know it yet".into()),
    }
}

/// What `berth exec` recorded of an instance.
pub(super) fn record(setting: &Setting, name: &str) -> Option<Record> {
    listed(setting, name).map(|listed| listed.record)
}

/// The same of one that lives.
pub(super) fn living(setting: &Setting, name: &str) -> Option<Record> {
    listed(setting, name).filter(|listed| listed.alive).map(|listed| listed.record)
}

fn listed(setting: &Setting, name: &str) -> Option<Listed> {
    let listing = instance::list(&berth(setting)?).ok()?;
    listing.instances.into_iter().find(|listed| listed.record.instance.as_str() == name)
}

fn berth(setting: &Setting) -> Option<BerthDir> {
    RunDir::find(&setting.run_dir()).ok()??.berth(setting.address).ok()
}

/// Whether a process has a listening socket on an address.
pub(super) fn listens(pid: Pid, address: SocketAddr) -> bool {
    let listeners = holder::listeners(address.port()).unwrap_or_default();
    let inodes: Vec<u64> = listeners.iter().filter(|entry| entry.local == address).map(|entry| entry.inode).collect();
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors.flatten().any(|fd| {
        let target = std::fs::read_link(fd.path()).unwrap_or_default();
        let target = target.to_string_lossy();
        let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')?.parse().ok());
        inode.is_some_and(|inode| inodes.contains(&inode))
    })
}
