//! The kinds of work that peers do, and the figures that are measured.

use super::load::{self, Answers, Direction, PING_BYTES, Pace, Pool};
use super::peer::{Peer, PeerKind, RunningPeer};
use super::usage::{Clocks, Tree, kernel_memory, socket_memory};
use anyhow::{Context as _, Result, ensure};
use berth_rehearse::judges::stats::percentile;
use berth_rehearse::record::format::format_count;
use clap::ValueEnum;
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

/// Number of clients that make short connections at the same time.
const SHORT_CLIENTS: usize = 32;

/// Length of the answer that each idle connection gets before memory is measured again: a small
/// LIST.
const SMALL_LIST_BYTES: u64 = 1 << 20;

/// Length of the answer for slow readers: a LIST of some 500 pods. In each TICK, a reader reads
/// A_TICK bytes, which makes 50 KB a second.
const LARGE_LIST_BYTES: u64 = 5_000_000;
const READ_INTERVAL: Duration = Duration::from_millis(100);
const READ_BYTES: usize = 5_000;

/// Time for which slow readers read before memory is measured. Until then, buffers have stopped
/// growing.
const SETTLE_TIME: Duration = Duration::from_secs(8);

/// Limit of the descriptors that a relay opens besides two for each connection. Of all relays,
/// berth keeps the most in reserve.
const SPARE_DESCRIPTORS: u64 = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Work {
    /// Requests and answers of 256 B on 16 and on 1,000 kept connections
    Ping,
    /// Connect, request and answer of 64 B, close; 32 clients
    Connect,
    /// 1 and 16 streams, in each direction
    Bulk,
    /// Start, and memory of 8,000 connections
    Idle,
    /// 8,000 clients that connect at once
    Burst,
    /// Ping on 100 to 8,000 connections
    Growth,
    /// Memory of 2,000 readers of 50 KB/s
    Slow,
}

/// A measurement of a kind of work. A peer makes the measurement once in each round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) work: Work,
    /// Number of connections, clients, streams or readers, depending on the work.
    pub(super) count: usize,
    /// Direction of the data in [`Work::Bulk`].
    way: Direction,
}

impl Work {
    /// Returns the cases of this work. A short run has fewer connections.
    pub(super) fn cases(self, short: bool) -> Vec<Case> {
        let (many, idle, growth): (_, _, &[usize]) = if short {
            (250, 500, &[100, 500])
        } else {
            (1_000, 8_000, &[100, 500, 1_000, 2_000, 4_000, 8_000])
        };
        let counts = match self {
            Self::Ping => &[16, many][..],
            Self::Connect => &[SHORT_CLIENTS],
            Self::Bulk => &[1, 16],
            Self::Idle | Self::Burst => &[idle],
            Self::Growth => growth,
            Self::Slow => &[if short { 200 } else { 2_000 }],
        };
        let ways = if self == Self::Bulk {
            &[Direction::Down, Direction::Up][..]
        } else {
            &[Direction::Down]
        };
        let cases = ways.iter().flat_map(|&way| {
            counts.iter().map(move |&count| Case {
                work: self,
                count,
                way,
            })
        });
        cases.collect()
    }

    /// True if this work is measured for this peer.
    pub(super) fn is_measured_for(self, peer: &Peer) -> bool {
        match (&peer.kind, self) {
            (PeerKind::Haproxy { splice: true }, work) => work == Self::Bulk,
            (PeerKind::None, work) => work != Self::Idle,
            _ => true,
        }
    }
}

impl Case {
    #[cfg(test)]
    pub(super) fn ping(count: usize) -> Self {
        Self {
            work: Work::Ping,
            count,
            way: Direction::Down,
        }
    }

    /// Returns the most important figure of this case.
    pub(super) fn main_metric(self) -> Metric {
        self.key_metrics()[0]
    }

    /// Returns the figures that most readers look for. The first is the most important one.
    pub(super) fn key_metrics(self) -> &'static [Metric] {
        match self.work {
            Work::Ping | Work::Connect | Work::Burst | Work::Growth => {
                &[Metric::Rate, Metric::CpuPerRequest]
            }
            Work::Bulk => &[Metric::Gigabits, Metric::CpuPerGigabyte],
            Work::Idle => &[
                Metric::IdleMemory,
                Metric::UsedMemory,
                Metric::BaseMemory,
                Metric::Start,
            ],
            Work::Slow => &[Metric::SocketMemory, Metric::IdleMemory],
        }
    }
}

impl Case {
    /// Returns the goal of `--pass inject` for a figure. The goal is a least ratio to the figure
    /// without a relay, or a greatest value.
    pub(super) fn goal(self, metric: Metric) -> Option<f64> {
        match (self.work, metric) {
            (Work::Ping, Metric::Rate) | (Work::Bulk, Metric::Gigabits) => Some(0.97),
            (Work::Ping, Metric::CpuPerRequest) => Some(1.0),
            (Work::Connect, Metric::CpuPerRequest) => Some(100.0),
            (Work::Idle, Metric::IdleMemory) => Some(200.0),
            _ => None,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = format_thousands(self.count as f64);
        match self.work {
            Work::Ping => write!(f, "ping, {count} connections"),
            Work::Connect => write!(f, "connect, {count} clients"),
            Work::Bulk => {
                let way = if self.way == Direction::Up {
                    "up"
                } else {
                    "down"
                };
                write!(
                    f,
                    "bulk {way}, {count} stream{}",
                    if self.count == 1 { "" } else { "s" }
                )
            }
            Work::Idle => write!(f, "idle, {count} connections"),
            Work::Burst => write!(f, "burst, {count} clients"),
            Work::Growth => write!(f, "growth, {count} connections"),
            Work::Slow => write!(f, "slow, {count} readers"),
        }
    }
}

/// A kind of figure. Tables have the kinds in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Metric {
    /// Requests/s.
    Rate,
    /// Bits a second, in 10^9.
    Gigabits,
    /// Percentiles of the time until the answer, in µs. P50 is the median.
    P50,
    P99,
    P999,
    /// CPU time that the relay uses for each answer, in µs.
    CpuPerRequest,
    /// CPU time that the relay uses to transfer 10^9 bytes, in seconds.
    CpuPerGigabyte,
    /// The relay's memory for each connection, in bytes.
    IdleMemory,
    /// The relay's memory for each connection after an answer of 1 MiB on every connection, in
    /// bytes.
    UsedMemory,
    /// The kernel's memory for each connection, in bytes. A connection through a relay has four
    /// sockets.
    KernelMemory,
    /// Bytes in the buffers of all sockets of a connection, those of the client and the backend
    /// included.
    SocketMemory,
    /// The relay's memory after one connection, in bytes.
    BaseMemory,
    /// Bytes of memory.
    Memory,
    /// Open file descriptors.
    Descriptors,
    /// Time from the start of the relay's program (exec) to its first answer, in ms.
    Start,
    /// Size of the program, in bytes.
    Size,
}

impl Metric {
    /// Returns the title of the figure's column in tables.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Rate => "requests/s",
            Self::Gigabits => "Gbit/s",
            Self::P50 => "p50 µs",
            Self::P99 => "p99 µs",
            Self::P999 => "p99.9 µs",
            Self::CpuPerRequest => "CPU µs/request",
            Self::CpuPerGigabyte => "CPU s/GB",
            Self::IdleMemory => "B/connection",
            Self::UsedMemory => "B/connection after 1 MiB",
            Self::KernelMemory => "kernel B/connection",
            Self::SocketMemory => "sockets' B/connection",
            Self::BaseMemory => "base MiB",
            Self::Memory => "memory MiB",
            Self::Descriptors => "descriptors",
            Self::Start => "exec to answer ms",
            Self::Size => "program MiB",
        }
    }

    pub(super) fn higher_is_better(self) -> bool {
        matches!(self, Self::Rate | Self::Gigabits)
    }

    pub(super) fn format_value(self, value: f64) -> String {
        const MIB: f64 = 1024.0 * 1024.0;
        match self {
            Self::BaseMemory | Self::Memory | Self::Size => format!("{:.1}", value / MIB),
            Self::CpuPerGigabyte => format!("{value:.3}"),
            Self::Gigabits | Self::CpuPerRequest | Self::Start => format!("{value:.1}"),
            _ => format_thousands(value),
        }
    }
}

/// Formats a whole number with separators between thousands.
pub(super) fn format_thousands(value: f64) -> String {
    let sign = if value < -0.5 { "-" } else { "" };
    format!("{sign}{}", format_count(value.abs().round() as u64))
}

/// The figures of a case, or the error because of which there are none.
pub(super) type Measured = Result<Vec<(Metric, f64)>, String>;

/// The conditions that all measurements of a run share.
pub(super) struct Bench<'a> {
    pub(super) backend: SocketAddr,
    pub(super) pace: Pace,
    pub(super) short: bool,
    /// The directory in which each peer gets a directory of its own.
    pub(super) directory: &'a Path,
}

impl Bench<'_> {
    /// Starts the peer, measures every case of a work, and ends the peer.
    pub(super) fn run(&self, work: Work, peer: &Peer) -> Vec<(Case, Measured)> {
        let started = peer
            .start(self.backend, self.directory)
            .map_err(|error| format!("{error:#}"));
        let mut pool = None;
        let measure = |case: Case| match &started {
            Ok(running) => {
                let measured = self.measure(case, peer, running, &mut pool);
                let measured = measured
                    .and_then(|figures| running.check_passed_sockets(case.count).map(|()| figures));
                (case, measured.map_err(|error| format!("{error:#}")))
            }
            Err(error) => (case, Err(error.clone())),
        };
        work.cases(self.short).into_iter().map(measure).collect()
    }

    fn measure(
        &self,
        case: Case,
        peer: &Peer,
        running: &RunningPeer,
        grown: &mut Option<Pool>,
    ) -> Result<Vec<(Metric, f64)>> {
        let limit = berth_os::process::raise_file_limit()?;
        let needed = 2 * case.count as u64 + SPARE_DESCRIPTORS;
        ensure!(
            limit >= needed,
            "the measurement needs {needed} descriptors, and the hard limit of open files is {limit}: raise the limit with ulimit -n"
        );
        let (address, count) = (running.address, case.count);
        match case.work {
            Work::Ping => Ok(list_figures(
                &Pool::open(address, count)?.measure_ping(self.pace, &make_cpu_meter(running)?)?,
            )),
            Work::Connect => Ok(list_figures(&load::measure_short_connections(
                address,
                count,
                Some(self.pace),
                &make_cpu_meter(running)?,
            )?)),
            Work::Bulk => {
                let (bytes, span) = Pool::open(address, count)?.measure_bulk(
                    case.way,
                    running.backend,
                    self.pace,
                    &make_cpu_meter(running)?,
                )?;
                let gigabytes = bytes as f64 / 1e9;
                let mut figures = vec![(Metric::Gigabits, 8.0 * gigabytes / span.seconds)];
                figures.extend(
                    span.cpu
                        .map(|seconds| (Metric::CpuPerGigabyte, seconds / gigabytes)),
                );
                Ok(figures)
            }
            Work::Idle => measure_idle(count, peer, running),
            Work::Burst => Ok(list_figures(&load::measure_short_connections(
                address,
                count,
                None,
                &make_cpu_meter(running)?,
            )?)),
            Work::Slow => measure_slow_readers(count, running),
            Work::Growth => {
                // If a case failed, its connections are not used again.
                let mut pool = grown.take().map_or_else(|| Pool::open(address, 0), Ok)?;
                pool.open_up_to(count)?;
                let mut figures =
                    list_figures(&pool.measure_ping(self.pace, &make_cpu_meter(running)?)?);
                if let Some(tree) = &running.tree {
                    figures.push((Metric::Memory, tree.memory()?));
                }
                *grown = Some(pool);
                Ok(figures)
            }
        }
    }
}

/// Returns a function for the CPU seconds of the relay's processes, those that run now.
fn make_cpu_meter(running: &RunningPeer) -> Result<impl Fn() -> Result<Option<f64>> + use<>> {
    let clocks = running.tree.as_ref().map(Tree::clocks).transpose()?;
    Ok(move || clocks.as_ref().map(Clocks::cpu_seconds).transpose())
}

fn list_figures(answers: &Answers) -> Vec<(Metric, f64)> {
    let count = answers.latencies.len() as f64;
    let mut figures = vec![(Metric::Rate, count / answers.span.seconds)];
    for (metric, share) in [
        (Metric::P50, 0.5),
        (Metric::P99, 0.99),
        (Metric::P999, 0.999),
    ] {
        figures.extend(
            percentile(&answers.latencies, share)
                .map(|nanoseconds| (metric, f64::from(nanoseconds) / 1e3)),
        );
    }
    figures.extend(
        answers
            .span
            .cpu
            .map(|seconds| (Metric::CpuPerRequest, seconds * 1e6 / count)),
    );
    figures
}

fn measure_idle(count: usize, peer: &Peer, running: &RunningPeer) -> Result<Vec<(Metric, f64)>> {
    let tree = running.tree.as_ref().context("there is no relay")?;
    let (base, kernel_base) = (tree.memory()?, kernel_memory()?);
    let mut pool = Pool::open(running.address, count)?;
    let a_connection = |memory: f64| (memory - base) / count as f64;
    let idle = a_connection(tree.memory()?);
    let kernel = (kernel_memory()? - kernel_base) / count as f64;
    let descriptors = tree.count_descriptors()?;
    ensure!(
        peer.is_inject() || descriptors >= 2.0 * count as f64,
        "only {descriptors} descriptors for {count} connections: some connections are not open"
    );
    pool.request_answers(SMALL_LIST_BYTES)?;
    let used = a_connection(tree.memory()?);
    // Every connection must still answer.
    pool.request_answers(PING_BYTES as u64)?;
    Ok(vec![
        (Metric::IdleMemory, idle),
        (Metric::UsedMemory, used),
        (Metric::KernelMemory, kernel),
        (Metric::Descriptors, descriptors),
        (Metric::BaseMemory, base),
        (Metric::Start, running.until_answer.as_secs_f64() * 1e3),
        (Metric::Size, peer.program_size() as f64),
    ])
}

fn measure_slow_readers(count: usize, running: &RunningPeer) -> Result<Vec<(Metric, f64)>> {
    let mut pool = Pool::open(running.address, count)?;
    let memory = || running.tree.as_ref().map(Tree::memory).transpose();
    let (base, sockets_base) = (memory()?, socket_memory()?);
    pool.read_slowly(LARGE_LIST_BYTES, READ_INTERVAL, READ_BYTES, SETTLE_TIME)?;
    let a_connection = |now: f64, base: f64| (now - base) / count as f64;
    let mut figures = vec![(
        Metric::SocketMemory,
        a_connection(socket_memory()?, sockets_base),
    )];
    figures.extend(
        memory()?
            .zip(base)
            .map(|(now, base)| (Metric::IdleMemory, a_connection(now, base))),
    );
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_separators() {
        assert_eq!(format_thousands(0.4), "0");
        assert_eq!(format_thousands(999.6), "1,000");
        assert_eq!(format_thousands(1_234_567.0), "1,234,567");
        assert_eq!(format_thousands(-1_234.0), "-1,234");
    }
}
