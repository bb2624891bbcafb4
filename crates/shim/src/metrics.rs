//! Every metric family, and the counters behind the families.
//!
//! Connections count in the [`WorkerStats`] of their worker, so that no two cores write to a cache
//! line. Sums are made on request.

use crate::backend::Table;
use crate::family::{encode_counter, encode_family, encode_gauge};
use crate::relay::outcome::Outcome;
use crate::state::ShimState;
use berth_node::instance_id::InstanceId;
use berth_node::terms::{InstanceHealth, Phase};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tokio::sync::{Semaphore, watch};

/// Log lines that were dropped, because nobody read them or they could not be written.
pub static LOG_LINES_DROPPED: AtomicU64 = AtomicU64::new(0);

/// The commit of this build, set by scripts/static.sh.
const REVISION: &str = match option_env!("BERTH_REVISION") {
    Some(revision) if !revision.is_empty() => revision,
    _ => "unknown",
};

/// The counters of a worker's connections, on separate cache lines: mostly the worker's thread
/// alone writes them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerStats {
    /// Connections that were given to the worker and have not ended.
    pub open: AtomicU64,
    /// Open connections with a client that has sent something and has no answer.
    pub pending: AtomicU64,
    pub bytes_up: AtomicU64,
    pub bytes_down: AtomicU64,
    /// Times that a connection was made to another instance, or again, before the first byte.
    pub replays: AtomicU64,
    /// Attempts at the own instance that ended without a byte from the instance.
    pub empty: AtomicU64,
    ended: [AtomicU64; Outcome::ALL.len()],
}

impl WorkerStats {
    pub fn count_ended(&self, outcome: Outcome) {
        self.ended[outcome as usize].fetch_add(1, Relaxed);
    }
}

/// A family of counters with `LABELS` labels. The labels' values are literals in this code.
type Counters<const LABELS: usize> = Family<[(&'static str, &'static str); LABELS], Counter>;

fn register_metric<M: Metric + Clone>(to: &mut Registry, name: &str, help: &str, metric: M) -> M {
    to.register(name, help, metric.clone());
    metric
}

/// Registers counters. Counters with the labels `from` exist from the start: `increase()` does not
/// see a counter that appears with its first count.
fn register_counters<const LABELS: usize>(
    to: &mut Registry,
    name: &str,
    help: &str,
    from: impl IntoIterator<Item = [(&'static str, &'static str); LABELS]>,
) -> Counters<LABELS> {
    let counters = register_metric(to, name, help, Counters::default());
    from.into_iter()
        .for_each(|labels| drop(counters.get_or_create(&labels)));
    counters
}

#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    workers: Vec<Arc<WorkerStats>>,
    /// Limits the held clients: each of them has a permit.
    pub held: Arc<Semaphore>,
    held_limit: usize,
    pub connect_seconds: Histogram,
    pub first_byte_seconds: Histogram,
    probes: Counters<1>,
    accept_errors: Counters<1>,
    handover: Counters<2>,
    renewals: Counters<1>,
    cluster_requests: Counters<2>,
    pub(crate) foreign_listeners: Gauge,
    /// `berth_siblings_unconnected`: live siblings that have had no connection for longer than a
    /// lease.
    pub(crate) siblings_unconnected: Gauge,
}

impl Metrics {
    /// Makes the metrics of a shim with the given numbers of workers and places for held clients,
    /// and with the metrics that `others` collect.
    pub fn new(
        instance: &InstanceId,
        workers: usize,
        held_limit: usize,
        table: watch::Receiver<Arc<Table>>,
        state: watch::Receiver<ShimState>,
        others: Vec<Box<dyn Collector>>,
    ) -> Self {
        let workers: Vec<_> = (0..workers)
            .map(|_| Arc::<WorkerStats>::default())
            .collect();
        let held = Arc::new(Semaphore::new(held_limit));
        // Each shim's page has all shims of the berth, so this label names the shim. (`instance` is
        // Prometheus' own name for a target.)
        let label = ("shim".into(), instance.as_str().to_owned().into());
        let mut registry = Registry::with_labels(std::iter::once(label));
        let sums = MetricSums {
            workers: workers.clone(),
            held: held.clone(),
            held_limit,
            table,
            state,
        };
        registry.register_collector(Box::new(sums));
        others
            .into_iter()
            .for_each(|collector| registry.register_collector(collector));
        let to = &mut registry;
        Self {
            workers,
            held,
            held_limit,
            connect_seconds: register_metric(
                to,
                "berth_backend_connect_seconds",
                "Time that a connect to kube-apiserver took, in seconds",
                // Loopback connects take some 20 µs.
                Histogram::new([
                    1e-5, 3e-5, 1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0,
                ]),
            ),
            first_byte_seconds: register_metric(
                to,
                "berth_first_byte_seconds",
                "Time from a client's TLS hello to the first byte of the shim's own kube-apiserver, in seconds",
                Histogram::new([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]),
            ),
            probes: register_counters(
                to,
                "berth_probes",
                "Probes of kube-apiserver, by result",
                ["unauthorized", "forbidden", "tls", "config"].map(|result| [("result", result)]),
            ),
            accept_errors: register_counters(
                to,
                "berth_accept_errors",
                "Client connections that could not be accepted, by kind of error; errors of the kind client are harmless",
                ["client", "limit", "exhausted", "closed", "unknown"].map(|kind| [("kind", kind)]),
            ),
            renewals: register_counters(
                to,
                "berth_lease_renewals",
                "Renewals of the shim's lease in the run directory, by result",
                ["ok", "blocked", "failed"].map(|result| [("result", result)]),
            ),
            handover: register_counters(
                to,
                "berth_handover_steps",
                "Steps of handovers of listeners and connections between shims, by result",
                [
                    ("connect", "refused"),
                    ("connect", "conflict"),
                    ("listen", "failed"),
                    ("accept", "failed"),
                    ("pass", "failed"),
                ]
                .map(|(step, result)| [("step", step), ("result", result)]),
            ),
            siblings_unconnected: register_metric(
                to,
                "berth_siblings_unconnected",
                "Live shims of the node without a connection to this shim for longer than a lease",
                Gauge::default(),
            ),
            cluster_requests: register_counters(
                to,
                "berth_cluster_requests",
                "Requests to the Kubernetes API for the Service kubernetes and for Leases, by result",
                [],
            ),
            foreign_listeners: register_metric(
                to,
                "berth_foreign_listeners",
                "Listeners on the shim's port that belong to no shim that answers and get a share of new connections",
                Gauge::default(),
            ),
            registry,
        }
    }

    /// Counts a probe, by [`crate::backend::probe::Answer::result`].
    pub(crate) fn count_probe(&self, result: &'static str) {
        self.probes.get_or_create(&[("result", result)]).inc();
    }

    /// Counts a failed accept: `limit`, or the kinds of `AcceptError`.
    pub(crate) fn count_accept_error(&self, kind: &'static str) {
        self.accept_errors.get_or_create(&[("kind", kind)]).inc();
    }

    /// Counts a step of the handover (connect, guard, listen, accept, refuse, close, pass, take, or
    /// a state). `result` is `ok` or the kind of failure.
    pub(crate) fn count_handover(&self, step: &'static str, result: &'static str) {
        self.handover
            .get_or_create(&[("step", step), ("result", result)])
            .inc();
    }

    /// Counts a renewal of the lease: `ok`, `blocked` (a thread did not respond), `failed`.
    pub(crate) fn count_renewal(&self, result: &'static str) {
        self.renewals.get_or_create(&[("result", result)]).inc();
    }

    /// Creates the counters of the keeper's failed requests, so that they exist before the first
    /// failure.
    pub(crate) fn register_cluster_requests(&self) {
        for (request, result) in berth_keeper::REQUEST_LABELS
            .iter()
            .flat_map(|r| berth_keeper::FAILURE_LABELS.map(|f| (*r, f)))
        {
            drop(
                self.cluster_requests
                    .get_or_create(&[("request", request), ("result", result)]),
            );
        }
    }

    /// Counts a request to the cluster's API: `ok`, `credentials`, `unauthorized`, `forbidden`,
    /// `unreachable`, `failed`.
    pub(crate) fn count_cluster_request(&self, request: &'static str, result: &'static str) {
        self.cluster_requests
            .get_or_create(&[("request", request), ("result", result)])
            .inc();
    }

    pub fn workers(&self) -> &[Arc<WorkerStats>] {
        &self.workers
    }

    pub fn open_connections(&self) -> u64 {
        sum_workers(&self.workers, |w| w.open.load(Relaxed))
    }

    pub fn pending_connections(&self) -> u64 {
        sum_workers(&self.workers, |w| w.pending.load(Relaxed))
    }

    /// Returns the number of all connections ever accepted, ended and open.
    pub fn total_connections(&self) -> u64 {
        self.open_connections()
            + sum_workers(&self.workers, |w| {
                w.ended.iter().map(|ended| ended.load(Relaxed)).sum()
            })
    }

    /// Returns the number of connections with sockets that were passed to instances.
    pub fn injected_connections(&self) -> u64 {
        sum_workers(&self.workers, |w| {
            w.ended[Outcome::Injected as usize].load(Relaxed)
        })
    }

    pub fn held_clients(&self) -> usize {
        self.held_limit - self.held.available_permits()
    }

    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}

/// Merges the pages of several shims into a page in Prometheus' text form: each metric family once,
/// with the samples of all shims. If its HELP and TYPE lines differ, since a sibling is of another
/// version, the first ones count. Shims write OpenMetrics, in which these lines have a counter's
/// name without `_total`.
pub fn merge_pages(pages: &[String]) -> String {
    type MetricHeads<'a> = Vec<(&'a str, &'a str)>;
    let mut families: Vec<(&str, MetricHeads<'_>, Vec<&str>)> = Vec::new();
    for page in pages {
        let mut at = None;
        for line in page
            .lines()
            .filter(|line| !line.is_empty() && *line != "# EOF")
        {
            let mut words = line.strip_prefix("# ").unwrap_or_default().splitn(3, ' ');
            let head = words.next().zip(words.next()).zip(words.next());
            if let Some(((_, name), _)) = head {
                at = Some(
                    families
                        .iter()
                        .position(|(known, ..)| *known == name)
                        .unwrap_or_else(|| {
                            families.push((name, Vec::new(), Vec::new()));
                            families.len() - 1
                        }),
                );
            }
            // A sample without a HELP or TYPE line before it belongs to no family, and no shim
            // wrote the page.
            let Some((_, heads, samples)) = at.and_then(|at| families.get_mut(at)) else {
                continue;
            };
            match head {
                Some(((keyword, _), _)) if heads.iter().any(|(known, _)| *known == keyword) => {}
                Some(((keyword, _), text)) => heads.push((keyword, text)),
                None => samples.push(line),
            }
        }
    }
    let mut text = String::new();
    for (name, heads, samples) in &families {
        let end = if heads.contains(&("TYPE", "counter")) {
            "_total"
        } else {
            ""
        };
        heads.iter().for_each(|&(keyword, rest)| {
            text.extend(["# ", keyword, " ", name, end, " ", rest, "\n"]);
        });
        samples
            .iter()
            .for_each(|&sample| text.extend([sample, "\n"]));
    }
    text
}

fn sum_workers(workers: &[Arc<WorkerStats>], of: impl Fn(&WorkerStats) -> u64) -> u64 {
    workers.iter().map(|worker| of(worker)).sum()
}

/// Metrics with values that are computed for each page.
#[derive(Debug)]
struct MetricSums {
    workers: Vec<Arc<WorkerStats>>,
    held: Arc<Semaphore>,
    held_limit: usize,
    table: watch::Receiver<Arc<Table>>,
    state: watch::Receiver<ShimState>,
}

impl Collector for MetricSums {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let build = [("version", berth_node::VERSION), ("revision", REVISION)];
        let help = "1, labeled by the version of the shim and the commit that it was built from";
        encode_family(
            &mut to,
            "berth_build_info",
            help,
            MetricType::Gauge,
            [(build, ConstGauge::new(1_u64))],
        )?;
        let sum = |of: fn(&WorkerStats) -> u64| sum_workers(&self.workers, of);
        let open = sum(|w| w.open.load(Relaxed));
        encode_gauge(
            &mut to,
            "berth_connections_open",
            "Client connections that are open",
            open,
        )?;
        let help = "Open client connections that have sent something and wait for kube-apiserver's first byte";
        encode_gauge(
            &mut to,
            "berth_connections_pending",
            help,
            sum(|w| w.pending.load(Relaxed)),
        )?;
        let help = "Further connects to a kube-apiserver for clients that had no answer yet";
        encode_counter(
            &mut to,
            "berth_replays",
            help,
            sum(|w| w.replays.load(Relaxed)),
        )?;
        let help = "Attempts of TLS clients at the shim's own kube-apiserver that ended without a byte from kube-apiserver";
        encode_counter(
            &mut to,
            "berth_empty_attempts",
            help,
            sum(|w| w.empty.load(Relaxed)),
        )?;
        let help = "Lines of the log that were dropped, since standard error was not read or could not be written";
        encode_counter(
            &mut to,
            "berth_log_lines_dropped",
            help,
            LOG_LINES_DROPPED.load(Relaxed),
        )?;
        let held = self.held_limit - self.held.available_permits();
        encode_gauge(
            &mut to,
            "berth_held_clients",
            "Clients that wait because no kube-apiserver is ready",
            held as u64,
        )?;

        let workers = &self.workers;
        let ended = |outcome| {
            workers
                .iter()
                .map(|w| w.ended[outcome as usize].load(Relaxed))
                .sum::<u64>()
        };
        let ended = Outcome::ALL.map(|outcome| {
            (
                [("outcome", outcome.as_str())],
                ConstCounter::new(ended(outcome)),
            )
        });
        let help = "Client connections that ended, by outcome";
        encode_family(
            &mut to,
            "berth_connections",
            help,
            MetricType::Counter,
            ended,
        )?;
        let bytes = [
            ("up", sum(|w| w.bytes_up.load(Relaxed))),
            ("down", sum(|w| w.bytes_down.load(Relaxed))),
        ];
        let bytes =
            bytes.map(|(direction, count)| ([("direction", direction)], ConstCounter::new(count)));
        let help = "Bytes relayed, by direction: up is from clients to kube-apiserver";
        encode_family(&mut to, "berth_bytes", help, MetricType::Counter, bytes)?;
        let now = self.state.borrow().phase;
        let states = Phase::ALL.map(|phase| {
            (
                [("state", phase.as_str())],
                ConstGauge::new(u64::from(phase == now)),
            )
        });
        let help = "1 for the state that the shim is in, 0 for the other states";
        encode_family(&mut to, "berth_shim_state", help, MetricType::Gauge, states)?;
        let table = self.table.borrow().clone();
        let healths = table.instances.iter().flat_map(|instance| {
            InstanceHealth::ALL.map(|health| {
                let labels = [
                    ("apiserver", instance.id.as_str()),
                    ("health", health.as_str()),
                ];
                (
                    labels,
                    ConstGauge::new(u64::from(instance.health() == health)),
                )
            })
        });
        let help =
            "1 for the health of kube-apiserver according to the probes, 0 for the other values";
        encode_family(
            &mut to,
            "berth_instance_health",
            help,
            MetricType::Gauge,
            healths,
        )?;

        let cpu = berth_os::process::cpu_seconds();
        encode_counter(
            &mut to,
            "process_cpu_seconds",
            "CPU time of the shim's process, in seconds",
            cpu,
        )?;
        for (name, help, value) in berth_os::process::read_usage() {
            encode_gauge(&mut to, name, help, value)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_merged_by_family() {
        let page = |instance: &str| {
            let writer = crate::backend::TableWriter::new(1, 1);
            let state = watch::channel(ShimState {
                phase: Phase::Joined,
                ..ShimState::default()
            })
            .1;
            Metrics::new(
                &instance.parse().unwrap(),
                2,
                8,
                writer.subscribe(),
                state,
                Vec::new(),
            )
            .encode()
        };
        // A sibling of another version, with other help texts.
        let help = "# HELP berth_replays ";
        let other = page("b").replace(help, &format!("{help}Formerly: "));
        assert!(other.contains("Formerly: "));
        let merged = merge_pages(&[page("a"), other]);
        assert!(!merged.contains("Formerly: "), "{merged}");
        assert_eq!(
            merged
                .matches("# TYPE berth_connections_open gauge\n")
                .count(),
            1,
            "{merged}"
        );
        for part in [
            "berth_connections_open{shim=\"a\"} 0\nberth_connections_open{shim=\"b\"} 0\n",
            "# TYPE berth_replays_total counter\nberth_replays_total{shim=\"a\"} 0\nberth_replays_total{shim=\"b\"} 0\n",
        ] {
            assert!(merged.contains(part), "{merged}");
        }
        // Processes of siblings have separate samples.
        for shim in ["a", "b"] {
            let process = format!("\nprocess_start_time_seconds{{shim=\"{shim}\"}} ");
            assert_eq!(merged.matches(&process).count(), 1, "{merged}");
        }
        for (state, is) in [("waiting", 0), ("joined", 1), ("left", 0), ("refusing", 0)] {
            assert!(
                merged.contains(&format!(
                    "berth_shim_state{{shim=\"a\",state=\"{state}\"}} {is}\n"
                )),
                "{merged}"
            );
        }
        assert!(!merged.contains("# EOF"), "{merged}");
        assert_eq!(merge_pages(&["nonsense\n".into()]), "");
    }
}
