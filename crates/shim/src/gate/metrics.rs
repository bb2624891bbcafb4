//! Metrics of the gate.

use super::queue::Class;
use super::{Gate, Refused};
use crate::metrics::{family, gauge};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct GateCounters {
    handshakes: Histogram,
    waits: [Histogram; Class::ALL.len()],
    dropped: [AtomicU64; Refused::ALL.len()],
}

impl GateCounters {
    pub(super) fn new() -> Self {
        // A handshake takes 1 to 3 ms of a processor; 0.1 ms to 26 s.
        let handshakes = Histogram::new(exponential_buckets(1e-4, 4.0, 10));
        // 1 ms to 16 s.
        let waits = Class::ALL.map(|_| Histogram::new(exponential_buckets(1e-3, 4.0, 8)));
        Self { handshakes, waits, dropped: Default::default() }
    }

    pub(super) fn answered(&self, took: Duration) {
        self.handshakes.observe(took.as_secs_f64());
    }

    pub(super) fn waited(&self, class: Class, waited: Duration) {
        self.waits[class as usize].observe(waited.as_secs_f64());
    }

    pub(super) fn dropped(&self, why: Refused) {
        self.dropped[why as usize].fetch_add(1, Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct GateMetrics(pub(crate) Arc<Gate>);

impl Collector for GateMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let (now, counters) = (self.0.status(), &self.0.counters);
        gauge(
            &mut to,
            "berth_gate_openings",
            "TLS handshakes in flight: clients whose first bytes an instance has not answered",
            now.openings,
        )?;
        gauge(&mut to, "berth_gate_openings_limit", "Most TLS handshakes that may be in flight", now.limit)?;
        let waiting =
            Class::ALL.map(|class| ([("class", class.as_str())], ConstGauge::new(self.0.waiting(class) as u64)));
        family(&mut to, "berth_gate_waiting", "Clients that wait for their turn", MetricType::Gauge, waiting)?;
        let dropped = |why: Refused| ConstCounter::new(counters.dropped[why as usize].load(Relaxed));
        let dropped = Refused::ALL.map(|why| ([("reason", why.as_str())], dropped(why)));
        family(&mut to, "berth_gate_dropped", "Clients that waited and got no turn", MetricType::Counter, dropped)?;
        let help = "Time from a client's first bytes to an instance's";
        counters.handshakes.encode(to.encode_descriptor(
            "berth_gate_opening_seconds",
            help,
            None,
            MetricType::Histogram,
        )?)?;
        let waits = Class::ALL.map(|class| ([("class", class.as_str())], counters.waits[class as usize].clone()));
        family(
            &mut to,
            "berth_gate_wait_seconds",
            "Seconds that clients queued at the gate",
            MetricType::Histogram,
            waits,
        )
    }
}
