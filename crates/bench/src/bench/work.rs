//! The work that peers do, and what is measured of it.

use crate::load::{self, Answers, PING, Pace, Pool, Way};
use crate::peer::{Kind, Peer, Running};
use crate::process::{Clocks, Tree, kernel_memory, socket_memory};
use anyhow::{Context as _, Result, ensure};
use berth_bench::stats::percentile;
use berth_rehearse::report::format::count;
use clap::ValueEnum;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

/// Clients of the short connections.
const CLIENTS: usize = 32;

/// The answer that each idle connection had before its memory is looked at again: a small LIST.
const LIST: u64 = 1 << 20;

/// Streams that others are beside.
const STREAMS: usize = 4;

/// The answer that slow readers read, 50 KB a second each: a LIST of some 500 pods.
const LARGE: u64 = 5_000_000;
const TICK: Duration = Duration::from_millis(100);
const A_TICK: usize = 5_000;

/// How long they read before memory is looked at: what is buffered for them has come to a rest.
const SETTLED: Duration = Duration::from_secs(8);

/// Descriptors that a relay has beside two a connection, at most; berth keeps the most free.
const SPARE: u64 = 256;

/// A kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Work {
    /// Requests and answers of 256 B on 16 and on 1,000 kept connections
    Ping,
    /// Connect, 64 B there and back, close; 32 clients
    Connect,
    /// Streams one way, one and 16 of them
    Bulk,
    /// Start, and memory of 8,000 connections
    Idle,
    /// 8,000 clients that connect at one moment
    Burst,
    /// Ping on 100 to 8,000 connections
    Growth,
    /// Ping on 16 connections beside four streams down
    Beside,
    /// Memory of 2,000 readers of 50 KB/s
    Slow,
}

/// One thing that each peer does once a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    Ping(usize),
    Connect(usize),
    Bulk(Way, usize),
    Idle(usize),
    Burst(usize),
    Growth(usize),
    Beside(usize),
    Slow(usize),
}

impl Work {
    /// What it consists of; a short run does less.
    pub(crate) fn cases(self, short: bool) -> Vec<Case> {
        let (many, idle, growth): (_, _, &[usize]) =
            if short { (250, 500, &[100, 500]) } else { (1_000, 8_000, &[100, 500, 1_000, 2_000, 4_000, 8_000]) };
        match self {
            Self::Ping => vec![Case::Ping(16), Case::Ping(many)],
            Self::Connect => vec![Case::Connect(CLIENTS)],
            Self::Bulk => [Way::Down, Way::Up]
                .into_iter()
                .flat_map(|way| [1, 16].map(|streams| Case::Bulk(way, streams)))
                .collect(),
            Self::Idle => vec![Case::Idle(idle)],
            Self::Burst => vec![Case::Burst(idle)],
            Self::Growth => growth.iter().copied().map(Case::Growth).collect(),
            Self::Beside => vec![Case::Beside(16)],
            Self::Slow => vec![Case::Slow(if short { 200 } else { 2_000 })],
        }
    }

    /// Whether a peer is asked to do it.
    pub(crate) fn is_for(self, peer: &Peer) -> bool {
        match (&peer.kind, self) {
            (Kind::Haproxy { splice: true }, work) => work == Self::Bulk,
            (Kind::None, work) => work != Self::Idle,
            _ => true,
        }
    }
}

impl Case {
    pub(crate) fn work(self) -> Work {
        match self {
            Self::Ping(_) => Work::Ping,
            Self::Connect(_) => Work::Connect,
            Self::Bulk(..) => Work::Bulk,
            Self::Idle(_) => Work::Idle,
            Self::Burst(_) => Work::Burst,
            Self::Growth(_) => Work::Growth,
            Self::Beside(_) => Work::Beside,
            Self::Slow(_) => Work::Slow,
        }
    }

    /// The figure that says most.
    pub(crate) fn main_metric(self) -> Metric {
        self.key_metrics()[0]
    }

    /// The figures that most people look for, the one that says most first.
    pub(crate) fn key_metrics(self) -> Vec<Metric> {
        match self {
            Self::Ping(_) | Self::Connect(_) | Self::Burst(_) | Self::Growth(_) => {
                vec![Metric::Rate, Metric::CpuPerRequest]
            }
            Self::Bulk(..) => vec![Metric::Gigabits, Metric::CpuPerGigabyte],
            Self::Idle(_) => vec![Metric::IdleMemory, Metric::UsedMemory, Metric::BaseMemory, Metric::Start],
            Self::Beside(_) => vec![Metric::P999, Metric::Gigabits],
            Self::Slow(_) => vec![Metric::SocketMemory, Metric::IdleMemory],
        }
    }

    fn connections(self) -> usize {
        match self {
            Self::Ping(count)
            | Self::Connect(count)
            | Self::Bulk(_, count)
            | Self::Idle(count)
            | Self::Burst(count)
            | Self::Growth(count)
            | Self::Slow(count) => count,
            Self::Beside(count) => STREAMS + count,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ping(count) => write!(f, "ping, {} connections", thousands(*count as f64)),
            Self::Connect(count) => write!(f, "connect, {count} clients"),
            Self::Bulk(way, count) => {
                let way = if *way == Way::Up { "up" } else { "down" };
                write!(f, "bulk {way}, {count} stream{}", if *count == 1 { "" } else { "s" })
            }
            Self::Idle(count) => write!(f, "idle, {} connections", thousands(*count as f64)),
            Self::Burst(count) => write!(f, "burst, {} clients", thousands(*count as f64)),
            Self::Growth(count) => write!(f, "growth, {} connections", thousands(*count as f64)),
            Self::Beside(count) => write!(f, "ping, {count} connections beside {STREAMS} streams"),
            Self::Slow(count) => write!(f, "slow, {} readers", thousands(*count as f64)),
        }
    }
}

/// What a figure is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Metric {
    /// Requests/s.
    Rate,
    /// Bits a second, in 10^9.
    Gigabits,
    /// Of the answers' times, in µs.
    P50,
    P99,
    P999,
    /// CPU time of the relay an answer, in µs.
    CpuPerRequest,
    /// CPU seconds of the relay for 10^9 bytes.
    CpuPerGigabyte,
    /// Bytes of memory a connection.
    IdleMemory,
    /// Likewise, after an answer of 1 MiB on each.
    UsedMemory,
    /// Bytes of the kernel's memory a connection, of all four sockets.
    KernelMemory,
    /// Bytes that the kernel's sockets hold a connection, those of client and backend among them.
    SocketMemory,
    /// Bytes of memory in all, with one connection seen.
    BaseMemory,
    /// Bytes of memory in all.
    Memory,
    /// Open file descriptors.
    Descriptors,
    /// From exec to the first answer, in ms.
    Start,
    /// Bytes of the program.
    Size,
}

impl Metric {
    /// Its name in bench.json.
    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Gigabits => "gigabits_per_second",
            Self::P50 => "p50_us",
            Self::P99 => "p99_us",
            Self::P999 => "p999_us",
            Self::CpuPerRequest => "cpu_us_per_request",
            Self::CpuPerGigabyte => "cpu_seconds_per_gigabyte",
            Self::IdleMemory => "bytes_per_connection",
            Self::UsedMemory => "bytes_per_connection_used",
            Self::KernelMemory => "kernel_bytes_per_connection",
            Self::SocketMemory => "socket_bytes_per_connection",
            Self::BaseMemory => "base_bytes",
            Self::Memory => "bytes",
            Self::Descriptors => "descriptors",
            Self::Start => "start_ms",
            Self::Size => "program_bytes",
        }
    }

    pub(crate) fn title(self) -> &'static str {
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

    pub(crate) fn higher_is_better(self) -> bool {
        matches!(self, Self::Rate | Self::Gigabits)
    }

    pub(crate) fn show(self, value: f64) -> String {
        const MIB: f64 = 1024.0 * 1024.0;
        match self {
            Self::BaseMemory | Self::Memory | Self::Size => format!("{:.1}", value / MIB),
            Self::CpuPerGigabyte => format!("{value:.3}"),
            Self::Gigabits | Self::CpuPerRequest | Self::Start => format!("{value:.1}"),
            _ => thousands(value),
        }
    }
}

/// A whole number as people read it.
pub(crate) fn thousands(value: f64) -> String {
    let sign = if value < -0.5 { "-" } else { "" };
    format!("{sign}{}", count(value.abs().round() as u64))
}

/// The figures of one case, or why there are none.
pub(crate) type Measured = Result<Vec<(Metric, f64)>, String>;

/// What all measurements have in common.
pub(crate) struct Bench<'a> {
    /// Where peers listen.
    pub(crate) node: Ipv4Addr,
    pub(crate) backend: SocketAddr,
    pub(crate) pace: Pace,
    pub(crate) short: bool,
    /// Where peers have their directories.
    pub(crate) directory: &'a Path,
}

impl Bench<'_> {
    /// Starts the peer, lets it do all cases and ends it.
    pub(crate) fn run(&self, work: Work, peer: &Peer) -> Vec<(Case, Measured)> {
        let started = peer.start(self.node, self.backend, self.directory).map_err(|error| format!("{error:#}"));
        let mut pool = None;
        let measure = |case: Case| match &started {
            Ok(running) => {
                let measured = self.measure(case, peer, running, &mut pool);
                let measured = measured.and_then(|figures| running.check().map(|()| figures));
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
        running: &Running,
        grown: &mut Option<Pool>,
    ) -> Result<Vec<(Metric, f64)>> {
        let limit = berth_os::process::raise_file_limit()?;
        let needed = 2 * case.connections() as u64 + SPARE;
        ensure!(
            limit >= needed,
            "needs {needed} descriptors, and the hard limit of open files is {limit}: raise it with ulimit -n"
        );
        match case {
            Case::Ping(count) => {
                let mut pool = Pool::open(running.address, count)?;
                Ok(figures(&pool.ping(0, self.pace, &cpu(running)?)?.0))
            }
            Case::Connect(clients) => {
                Ok(figures(&load::connects(running.address, clients, self.pace, &cpu(running)?)?))
            }
            Case::Bulk(way, streams) => {
                let pool = Pool::open(running.address, streams)?;
                let (bytes, span) = pool.bulk(way, self.backend, self.pace, &cpu(running)?)?;
                let gigabytes = bytes as f64 / 1e9;
                let mut figures = vec![(Metric::Gigabits, 8.0 * gigabytes / span.seconds)];
                figures.extend(span.cpu.map(|seconds| (Metric::CpuPerGigabyte, seconds / gigabytes)));
                Ok(figures)
            }
            Case::Idle(count) => idle(count, peer, running),
            Case::Burst(count) => Ok(figures(&load::burst(running.address, count, &cpu(running)?)?)),
            Case::Beside(count) => {
                let mut pool = Pool::open(running.address, STREAMS + count)?;
                let (answers, bytes) = pool.ping(STREAMS, self.pace, &cpu(running)?)?;
                let mut figures = figures(&answers);
                // The relay's time is mostly for the streams.
                figures.retain(|(metric, _)| *metric != Metric::CpuPerRequest);
                figures.push((Metric::Gigabits, 8e-9 * bytes as f64 / answers.span.seconds));
                Ok(figures)
            }
            Case::Slow(count) => slow(count, running),
            Case::Growth(count) => {
                // A pool that something went wrong with is not used again.
                let mut pool = grown.take().map_or_else(|| Pool::open(running.address, 0), Ok)?;
                pool.grow(count)?;
                let mut figures = figures(&pool.ping(0, self.pace, &cpu(running)?)?.0);
                if let Some(tree) = &running.tree {
                    figures.push((Metric::Memory, tree.memory()?));
                }
                *grown = Some(pool);
                Ok(figures)
            }
        }
    }
}

/// CPU seconds of the relay's processes that there are now.
fn cpu(running: &Running) -> Result<impl Fn() -> Result<Option<f64>> + use<>> {
    let clocks = running.tree.as_ref().map(Tree::clocks).transpose()?;
    Ok(move || clocks.as_ref().map(Clocks::seconds).transpose())
}

fn figures(answers: &Answers) -> Vec<(Metric, f64)> {
    let count = answers.latencies.len() as f64;
    let mut figures = vec![(Metric::Rate, count / answers.span.seconds)];
    for (metric, share) in [(Metric::P50, 0.5), (Metric::P99, 0.99), (Metric::P999, 0.999)] {
        figures.extend(percentile(&answers.latencies, share).map(|nanoseconds| (metric, f64::from(nanoseconds) / 1e3)));
    }
    figures.extend(answers.span.cpu.map(|seconds| (Metric::CpuPerRequest, seconds * 1e6 / count)));
    figures
}

fn idle(count: usize, peer: &Peer, running: &Running) -> Result<Vec<(Metric, f64)>> {
    let tree = running.tree.as_ref().context("there is no relay")?;
    let (base, kernel_base) = (tree.memory()?, kernel_memory()?);
    let mut pool = Pool::open(running.address, count)?;
    let a_connection = |memory: f64| (memory - base) / count as f64;
    let idle = a_connection(tree.memory()?);
    let kernel = (kernel_memory()? - kernel_base) / count as f64;
    let descriptors = tree.descriptors()?;
    ensure!(
        peer.kind == Kind::DirectPath || descriptors >= 2.0 * count as f64,
        "only {descriptors} descriptors for {count} connections: some are not held"
    );
    pool.answers(LIST)?;
    let used = a_connection(tree.memory()?);
    // The connections are still there.
    pool.answers(PING as u64)?;
    Ok(vec![
        (Metric::IdleMemory, idle),
        (Metric::UsedMemory, used),
        (Metric::KernelMemory, kernel),
        (Metric::Descriptors, descriptors),
        (Metric::BaseMemory, base),
        (Metric::Start, running.until_answer.as_secs_f64() * 1e3),
        (Metric::Size, peer.size() as f64),
    ])
}

fn slow(count: usize, running: &Running) -> Result<Vec<(Metric, f64)>> {
    let mut pool = Pool::open(running.address, count)?;
    let memory = || running.tree.as_ref().map(Tree::memory).transpose();
    let (base, sockets_base) = (memory()?, socket_memory()?);
    pool.slowly(LARGE, TICK, A_TICK, SETTLED)?;
    let a_connection = |now: f64, base: f64| (now - base) / count as f64;
    let mut figures = vec![(Metric::SocketMemory, a_connection(socket_memory()?, sockets_base))];
    figures.extend(memory()?.zip(base).map(|(now, base)| (Metric::IdleMemory, a_connection(now, base))));
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_people_read_them() {
        assert_eq!(thousands(0.4), "0");
        assert_eq!(thousands(999.6), "1,000");
        assert_eq!(thousands(1_234_567.0), "1,234,567");
        assert_eq!(thousands(-1_234.0), "-1,234");
    }
}
