//! The resources of the shims (memory, file descriptors, threads), and faults in their descriptors
//! and their clock.

use super::Processes;
use super::probe::ask_shims;
use super::settings::Settings;
use crate::record::event::{EventKind, Footprint};
use berth_node::ipc::wire::{Ask, Reply, Status};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::process::Command;

/// Number of times that the descriptors of each shim are counted. The smallest count is logged.
const TRIES: usize = 10;

/// Directories in which distributions install libfaketime, directly or one level deeper.
const LIBRARIES: [&str; 3] = ["/usr/lib", "/usr/lib64", "/usr/local/lib"];

/// The libfaketime library for multi-threaded programs.
const FAKETIME: &str = "faketime/libfaketimeMT.so.1";

impl Processes {
    /// Logs the resources of each shim. Descriptors of connections are subtracted. Because
    /// connections come and go, descriptors are counted several times, and the smallest number is
    /// logged. A count is used only if the number of connections did not change meanwhile.
    pub(crate) async fn log_footprints(&self) {
        let mut least = BTreeMap::<String, Footprint>::new();
        for _ in 0..TRIES {
            let before = ask_statuses(&self.settings).await;
            let counted = before
                .into_iter()
                .filter_map(|(shim, status)| Some((shim, measure_footprint(&status)?, status)));
            let counted: Vec<_> = counted.collect();
            let after = ask_statuses(&self.settings).await;
            for (shim, footprint, status) in counted {
                let same = |now: &Status| {
                    now.pid == status.pid
                        && connection_descriptors(now) == connection_descriptors(&status)
                };
                if after.iter().any(|(_, now)| same(now)) {
                    let known = least.entry(shim).or_insert(footprint);
                    known.descriptors = known.descriptors.min(footprint.descriptors);
                }
            }
        }
        for (shim, footprint) in least {
            self.recorder.add(&shim, EventKind::Footprint(footprint));
        }
    }

    /// Limits the open files of a process to the present number if `starved`, otherwise to the
    /// limit of this process.
    pub(crate) async fn limit_files(&self, pid: Pid, starved: bool) -> io::Result<()> {
        let limit = match starved {
            true => count_entries(pid.as_raw(), "fd").unwrap_or_default(),
            false => berth_os::process::raise_file_limit()?,
        };
        let mut command = Command::new("prlimit");
        command
            .arg(format!("--pid={pid}"))
            .arg(format!("--nofile={limit}:"))
            .stdin(Stdio::null());
        match command.status().await? {
            status if status.success() => Ok(()),
            status => Err(io::Error::other(format!("prlimit: {status}"))),
        }
    }

    /// Sets the offset of the shims' wall clock, in seconds.
    pub(crate) fn set_clock(&self, seconds: i64) -> io::Result<()> {
        fs::write(self.settings.clock_file(), format!("{seconds:+}\n"))
    }
}

/// True if the process has loaded libfaketime, so that its clock can be set.
pub(crate) fn has_faketime(pid: Pid) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains(FAKETIME))
}

/// Returns the path of libfaketime. `None` if libfaketime is not installed.
pub(crate) fn find_faketime() -> Option<PathBuf> {
    let inside = |directory: &str| {
        fs::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
    };
    let all = LIBRARIES
        .iter()
        .flat_map(|directory| inside(directory).chain([PathBuf::from(directory)]));
    all.map(|directory: PathBuf| directory.join(FAKETIME))
        .find(|file: &PathBuf| Path::exists(file))
}

async fn ask_statuses(settings: &Settings) -> Vec<(String, Box<Status>)> {
    let status = |reply| {
        if let Reply::Status(status) = reply {
            Some(status)
        } else {
            None
        }
    };
    let shims = ask_shims(&settings.run_dir(), Ask::Status, status).await;
    let named = |(socket, status): (PathBuf, _)| {
        Some((socket.file_stem()?.to_string_lossy().into_owned(), status))
    };
    shims.into_iter().filter_map(named).collect()
}

/// Returns the number of descriptors of connections: one for each client that waits for an instance
/// or at the gate, and two for every other connection.
fn connection_descriptors(status: &Status) -> u64 {
    let waiting = status.held + status.gate.as_ref().map_or(0, |gate| gate.waiting);
    (2 * status.connections_open).saturating_sub(waiting)
}

fn measure_footprint(status: &Status) -> Option<Footprint> {
    let pid = i32::try_from(status.pid).ok()?;
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let memory = text
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(Footprint {
        pid: status.pid,
        memory_kib: memory.split_whitespace().next()?.parse().ok()?,
        descriptors: count_entries(pid, "fd")?.saturating_sub(connection_descriptors(status)),
        threads: count_entries(pid, "task")?,
    })
}

/// Returns the number of entries in a process's directory in /proc.
fn count_entries(pid: i32, directory: &str) -> Option<u64> {
    fs::read_dir(format!("/proc/{pid}/{directory}"))
        .ok()
        .map(|entries| entries.count() as u64)
}
