//! Memory, descriptors and CPU time of a peer's processes.

use crate::process::{ChildProcess, count_entries, read_pss};
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use procfs::process::all_processes;
use procfs::{Current as _, Meminfo};
use std::fs;

/// A relay with its descendants, and a supervisor without its child, the server. All processes are
/// killed when the tree is dropped.
pub(super) struct Tree {
    pub(super) relay: ChildProcess,
    pub(super) supervisor: Option<ChildProcess>,
}

impl Tree {
    fn pids(&self) -> Vec<i32> {
        let processes = all_processes().into_iter().flatten().flatten();
        let all: Vec<_> = processes
            .filter_map(|process| Some((process.pid, process.stat().ok()?.ppid)))
            .collect();
        let mut found = vec![self.relay.pid()];
        let mut at = 0;
        while at < found.len() {
            let of = found[at];
            found.extend(
                all.iter()
                    .filter(|(_, parent)| *parent == of)
                    .map(|(pid, _)| pid),
            );
            at += 1;
        }
        found.extend(self.supervisor.as_ref().map(ChildProcess::pid));
        found
    }

    /// CPU clocks of the present processes, to be read often.
    pub(super) fn clocks(&self) -> Result<Clocks> {
        let clocks: nix::Result<_> = self
            .pids()
            .into_iter()
            .map(|pid| clock_getcpuclockid(Pid::from_raw(pid)))
            .collect();
        Ok(Clocks(clocks?))
    }

    /// Sum of [`read_pss`].
    pub(super) fn memory(&self) -> Result<f64> {
        self.pids().into_iter().map(read_pss).sum()
    }

    pub(super) fn descriptors(&self) -> Result<f64> {
        self.pids()
            .into_iter()
            .map(|pid| count_entries(pid, "fd"))
            .sum()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for pid in self.pids() {
            // An error means that the process has ended.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// CPU time, user and system, of some processes, to the nanosecond.
pub(super) struct Clocks(Vec<ClockId>);

impl Clocks {
    pub(super) fn seconds(&self) -> Result<f64> {
        self.0
            .iter()
            .map(|clock| {
                let time = clock.now().context("a process of the peer ended")?;
                Ok(time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9)
            })
            .sum()
    }
}

/// Bytes that the machine's kernel uses for itself, including sockets.
pub(super) fn kernel_memory() -> Result<f64> {
    Ok(Meminfo::current()?.slab as f64)
}

/// Bytes that all TCP sockets of the network namespace hold.
pub(super) fn socket_memory() -> Result<f64> {
    let sockstat =
        fs::read_to_string("/proc/self/net/sockstat").context("/proc/self/net/sockstat")?;
    let bytes = parse_pages(&sockstat).map(|pages| pages * procfs::page_size() as f64);
    bytes.context("no memory of TCP in /proc/self/net/sockstat")
}

/// Parses the line `TCP: inuse 27 orphan 0 tw 3 alloc 30 mem 12`.
fn parse_pages(sockstat: &str) -> Option<f64> {
    let line = sockstat
        .lines()
        .find_map(|line| line.strip_prefix("TCP:"))?;
    line.split_ascii_whitespace()
        .skip_while(|word| *word != "mem")
        .nth(1)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_sockets() {
        let sockstat =
            "sockets: used 280\nTCP: inuse 27 orphan 0 tw 3 alloc 30 mem 12\nUDP: inuse 4 mem 9\n";
        assert_eq!(parse_pages(sockstat), Some(12.0));
        assert_eq!(parse_pages("UDP: inuse 4 mem 9\n"), None);
    }
}
