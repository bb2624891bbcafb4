//! Metric families that are made for each scrape.

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeMetric, MetricEncoder,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt;

/// Begins a metric family. A dot completes the help text, as in a
/// [`Registry`](prometheus_client::registry::Registry).
pub(crate) fn begin_family<'s>(
    to: &'s mut DescriptorEncoder<'_>,
    name: &'s str,
    help: &str,
    of: MetricType,
) -> Result<MetricEncoder<'s>, fmt::Error> {
    to.encode_descriptor(name, &format!("{help}."), None, of)
}

pub(crate) fn encode_family<'a, const LABELS: usize>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    of: MetricType,
    samples: impl IntoIterator<Item = ([(&'a str, &'a str); LABELS], impl EncodeMetric)>,
) -> fmt::Result {
    let mut family = begin_family(to, name, help, of)?;
    samples
        .into_iter()
        .try_for_each(|(labels, sample)| sample.encode(family.encode_family(&labels)?))
}

pub(crate) fn encode_gauge(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: impl EncodeGaugeValue,
) -> fmt::Result {
    ConstGauge::new(value).encode(begin_family(to, name, help, MetricType::Gauge)?)
}

pub(crate) fn encode_counter(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: impl EncodeCounterValue,
) -> fmt::Result {
    ConstCounter::new(value).encode(begin_family(to, name, help, MetricType::Counter)?)
}
