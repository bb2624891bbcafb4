//! Measures memory, descriptors and CPU time of a peer's processes.

use crate::process::{ChildProcess, count_entries, read_pss};
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use procfs::process::all_processes;
use procfs::{Current as _, Meminfo};
use std::fs;

/// The processes of a peer: a relay with its descendants, and with `--pass inject` the supervisor,
/// but not the server, which is its child. Dropping this value kills the processes.
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

    /// Returns the CPU clocks of the processes that run now. Reading a clock is cheap.
    pub(super) fn clocks(&self) -> Result<Clocks> {
        let clocks: nix::Result<_> = self
            .pids()
            .into_iter()
            .map(|pid| clock_getcpuclockid(Pid::from_raw(pid)))
            .collect();
        Ok(Clocks(clocks?))
    }

    /// Returns the memory of all processes together, in bytes; see [`read_pss`].
    pub(super) fn memory(&self) -> Result<f64> {
        self.pids().into_iter().map(read_pss).sum()
    }

    pub(super) fn count_descriptors(&self) -> Result<f64> {
        self.pids()
            .into_iter()
            .map(|pid| count_entries(pid, "fd"))
            .sum()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for pid in self.pids() {
            // If this fails, the process has ended.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Clocks of processes. Each clock counts user and system time of a process, to the nanosecond.
pub(super) struct Clocks(Vec<ClockId>);

impl Clocks {
    pub(super) fn cpu_seconds(&self) -> Result<f64> {
        self.0
            .iter()
            .map(|clock| {
                let time = clock.now().context("a process of the peer ended")?;
                Ok(time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9)
            })
            .sum()
    }
}

/// Returns the bytes of the kernel's own data structures on this machine (slab), including sockets.
pub(super) fn kernel_memory() -> Result<f64> {
    Ok(Meminfo::current()?.slab as f64)
}

/// Returns the bytes in the buffers of all TCP sockets of this network namespace.
pub(super) fn socket_memory() -> Result<f64> {
    let sockstat =
        fs::read_to_string("/proc/self/net/sockstat").context("/proc/self/net/sockstat")?;
    let bytes = parse_tcp_pages(&sockstat).map(|pages| pages * procfs::page_size() as f64);
    bytes.context("no memory of TCP in /proc/self/net/sockstat")
}

/// Returns the number of pages (`mem`) in a line such as `TCP: inuse 27 orphan 0 tw 3 alloc 30 mem
/// 12`.
fn parse_tcp_pages(sockstat: &str) -> Option<f64> {
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
    fn the_pages_of_tcp_sockets_are_parsed() {
        let sockstat =
            "sockets: used 280\nTCP: inuse 27 orphan 0 tw 3 alloc 30 mem 12\nUDP: inuse 4 mem 9\n";
        assert_eq!(parse_tcp_pages(sockstat), Some(12.0));
        assert_eq!(parse_tcp_pages("UDP: inuse 4 mem 9\n"), None);
    }
}
