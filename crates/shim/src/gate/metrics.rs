//! Metrics of the gate.

use super::queue::Class;
use super::{Gate, GateRefusal};
use crate::family::{begin_family, encode_family, encode_gauge};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct GateCounters {
    handshakes: Histogram,
    waits: [Histogram; Class::ALL.len()],
    dropped: [AtomicU64; GateRefusal::ALL.len()],
}

impl GateCounters {
    pub(super) fn new() -> Self {
        // A handshake takes 1 to 3 ms of a CPU, and counts for 5 s at most.
        let handshakes = Histogram::new([
            0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
        ]);
        // No client waits for longer than 15 s.
        let waits =
            Class::ALL.map(|_| Histogram::new([0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0]));
        Self {
            handshakes,
            waits,
            dropped: Default::default(),
        }
    }

    pub(super) fn count_handshake(&self, took: Duration) {
        self.handshakes.observe(took.as_secs_f64());
    }

    pub(super) fn count_wait(&self, class: Class, waited: Duration) {
        self.waits[class as usize].observe(waited.as_secs_f64());
    }

    pub(super) fn count_dropped(&self, why: GateRefusal) {
        self.dropped[why as usize].fetch_add(1, Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct GateMetrics(pub(crate) Arc<Gate>);

impl Collector for GateMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let (now, counters) = (self.0.status(), &self.0.counters);
        let help = "TLS handshakes in flight: clients that have sent something and that kube-apiserver has not answered";
        encode_gauge(&mut to, "berth_gate_openings", help, now.openings)?;
        let help = "Most TLS handshakes that may be in flight; 0 before the first client";
        encode_gauge(&mut to, "berth_gate_openings_limit", help, now.limit)?;
        let waiting = Class::ALL.map(|class| {
            (
                [("class", class.as_str())],
                ConstGauge::new(self.0.count_waiting(class) as u64),
            )
        });
        let help = "Clients that wait at the gate for their turn, by class";
        encode_family(
            &mut to,
            "berth_gate_waiting",
            help,
            MetricType::Gauge,
            waiting,
        )?;
        let dropped =
            |why: GateRefusal| ConstCounter::new(counters.dropped[why as usize].load(Relaxed));
        let dropped = GateRefusal::ALL.map(|why| ([("reason", why.as_str())], dropped(why)));
        let help = "Clients that waited at the gate and got no turn, by reason";
        encode_family(
            &mut to,
            "berth_gate_dropped",
            help,
            MetricType::Counter,
            dropped,
        )?;
        let help = "Time from a client's first bytes to kube-apiserver's first byte, in seconds; 5 at most";
        let handshakes = begin_family(
            &mut to,
            "berth_gate_opening_seconds",
            help,
            MetricType::Histogram,
        )?;
        counters.handshakes.encode(handshakes)?;
        let waits = Class::ALL.map(|class| {
            (
                [("class", class.as_str())],
                counters.waits[class as usize].clone(),
            )
        });
        let help = "Time that clients waited at the gate for their turn, in seconds, by class";
        encode_family(
            &mut to,
            "berth_gate_wait_seconds",
            help,
            MetricType::Histogram,
            waits,
        )
    }
}
