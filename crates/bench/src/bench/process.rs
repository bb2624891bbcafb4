//! A peer's processes, as /proc tells of them.

use anyhow::{Context, Result};
use berth_bench::memory::kilobytes;
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use std::fs;
use std::process::Child;

/// A child and its descendants. All are killed when it is dropped.
pub(crate) struct Tree(Child);

impl Tree {
    pub(crate) fn new(root: Child) -> Self {
        Self(root)
    }

    /// The exit status, if it ended by itself.
    pub(crate) fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    fn pids(&self) -> Vec<i32> {
        let mut found = vec![self.0.id() as i32];
        let all: Vec<(i32, i32)> = fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
                Some((pid, parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?))
            })
            .collect();
        let mut at = 0;
        while at < found.len() {
            let of = found[at];
            found.extend(all.iter().filter(|(_, parent)| *parent == of).map(|(pid, _)| pid));
            at += 1;
        }
        found
    }

    /// The clocks of the processes that there are now, to be read often.
    pub(crate) fn clocks(&self) -> Result<Clocks> {
        let clocks: nix::Result<_> =
            self.pids().into_iter().map(|pid| clock_getcpuclockid(Pid::from_raw(pid))).collect();
        Ok(Clocks(clocks?))
    }

    /// Proportional set size: resident memory, where pages that several processes share count once.
    /// What sockets hold in the kernel is not in it.
    pub(crate) fn memory(&self) -> Result<f64> {
        self.sum(|pid| {
            let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
            kilobytes(&rollup, "Pss:").context("smaps_rollup without Pss")
        })
    }

    pub(crate) fn descriptors(&self) -> Result<f64> {
        self.sum(|pid| Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count() as f64))
    }

    fn sum(&self, of: impl Fn(i32) -> Result<f64>) -> Result<f64> {
        self.pids().into_iter().map(of).sum()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for pid in self.pids() {
            // One that is gone already is what is wanted.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = self.0.wait();
    }
}

/// CPU time, user and system, of some processes, to the nanosecond.
pub(crate) struct Clocks(Vec<ClockId>);

impl Clocks {
    pub(crate) fn seconds(&self) -> Result<f64> {
        self.0
            .iter()
            .map(|clock| {
                let time = clock.now().context("a process of the peer ended")?;
                Ok(time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9)
            })
            .sum()
    }
}

/// Bytes that the kernel uses for itself, sockets among them, on all of the machine.
pub(crate) fn kernel_memory() -> Result<f64> {
    let meminfo = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    kilobytes(&meminfo, "Slab:").context("no Slab in /proc/meminfo")
}

/// Bytes that all TCP sockets of the network namespace hold.
pub(crate) fn socket_memory() -> Result<f64> {
    let sockstat = fs::read_to_string("/proc/self/net/sockstat").context("/proc/self/net/sockstat")?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)?.context("no size of a page")? as f64;
    pages(&sockstat).map(|pages| pages * page).context("no memory of TCP in /proc/self/net/sockstat")
}

/// From the line `TCP: inuse 27 orphan 0 tw 3 alloc 30 mem 12`.
fn pages(sockstat: &str) -> Option<f64> {
    let line = sockstat.lines().find_map(|line| line.strip_prefix("TCP:"))?;
    line.split_ascii_whitespace().skip_while(|word| *word != "mem").nth(1)?.parse().ok()
}

/// The parent in /proc/PID/stat: `pid (name) state ppid ...`, where the name may hold anything.
fn parent(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_look_like_the_rest_of_the_line() {
        assert_eq!(parent("12 (a) S 7 (b) R 34 12 12 0"), Some(34));
        assert_eq!(parent("12"), None);
    }

    #[test]
    fn pages_of_sockets() {
        let sockstat = "sockets: used 280\nTCP: inuse 27 orphan 0 tw 3 alloc 30 mem 12\nUDP: inuse 4 mem 9\n";
        assert_eq!(pages(sockstat), Some(12.0));
        assert_eq!(pages("UDP: inuse 4 mem 9\n"), None);
    }
}
