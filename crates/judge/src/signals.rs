//! The compared signals, the metrics of kube-apiserver behind each signal, and the sample of one
//! instance at one time.
//!
//! Names, labels and buckets are from Kubernetes v1.35.4 and v1.36.3, read in the source:
//!
//! | metrics | where in kubernetes/kubernetes, below staging/src/k8s.io |
//! | --- | --- |
//! | `apiserver_request_total`, `…_request_duration_seconds` (buckets from 5 ms),
//! `…_request_aborts_total`, `…_tls_handshake_errors_total`, `apiserver_longrunning_requests` |
//! apiserver/pkg/endpoints/metrics/metrics.go | |
//! `apiserver_flowcontrol_{rejected,dispatched}_requests_total`, `…_current_executing_seats`,
//! `…_current_limit_seats` | apiserver/pkg/util/flowcontrol/metrics/metrics.go | |
//! `apiserver_admission_webhook_admission_duration_seconds`, `…_rejection_count`,
//! `…_fail_open_count` | apiserver/pkg/admission/metrics/metrics.go | | `etcd_requests_total`,
//! `etcd_request_errors_total`, `apiserver_storage_decode_errors_total` |
//! apiserver/pkg/storage/etcd3/metrics/metrics.go |
//! | `apiserver_storage_transformation_operations_total` | apiserver/pkg/storage/value/metrics.go |
//! | `authentication_attempts`, `authorization_attempts_total` |
//! apiserver/pkg/endpoints/filters/metrics.go | | `aggregator_unavailable_apiservice` |
//! kube-aggregator/pkg/controllers/status/metrics/metrics.go |
//!
//! Facts from the source that the names do not tell:
//!
//! - 401 and 403 are not counted in `apiserver_request_total`, because the filters that answer with
//!   them run before the handler that counts. Each request is counted once in
//!   `authentication_attempts`, and after authentication once in `authorization_attempts_total`.
//! - 429 is counted in `apiserver_request_total` as well. Rejections follow the load and the seats
//!   of each instance, so 429 is no error here. Rejections are compared by priority level, and only
//!   if at most half of the level's seats are taken, or if the instance has fewer seats in all than
//!   the old instance.
//! - A refusal by a webhook itself has `error_type="no_error"`, and a failed call with
//!   `failurePolicy: Ignore` is counted in `…_fail_open_count` alone. The duration is counted for
//!   every call, so its count is the total for both shares; `…_webhook_request_total` counts the
//!   same calls.
//! - The labels of etcd's errors changed in v1.34 (`type` became `group` and `resource`), so errors
//!   are compared by `operation`.
//! - `aggregator_unavailable_apiservice` is the process's own view. The counter `…_total` is left
//!   out: it grows with each change of the APIService's status, and both instances write the
//!   status. The aggregator counts only the requests that it could not pass on
//!   (`apiserver_request_terminations_total`), so there is no total for a share.
//! - A request for an API that is not served leaves no trace: the last handler of the chain
//!   (apiserver/pkg/util/notfoundhandler) answers 404 and counts nothing, and neither does
//!   apiextensions for an unknown version. So a missing API is found by asking each instance for
//!   its APIs, which the caller does. A 404 in `apiserver_request_total` is about a resource of a
//!   served API. 404s are compared for lists and watches, which do not name an object that may be
//!   gone.
//!
//! Left out: `…_request_sli_duration_seconds` (finds the same as `latency`), the number of
//! goroutines (a leak shows in memory), and `apiserver_audit_error_total` (no client notices).

use crate::histogram::Histogram;
use crate::metrics;
use serde::de::{IntoDeserializer, value};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

/// A line of the page with a larger counter, size or time in seconds is skipped. Sums of values up
/// to this one are exact enough.
const MAX_VALUE: f64 = 1e15;

/// A criterion for judging an instance. The serialized and displayed name is the stable code of a
/// finding, such as `webhook-errors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Signal {
    /// Requests answered with 5xx.
    Errors,
    /// Lists and watches answered with 404.
    NotFound,
    /// Requests that took more than twice the time in which the old instance answers 95 of 100.
    Latency,
    /// Requests answered with 401.
    Authentication,
    /// Requests answered with 403.
    Authorization,
    /// Requests rejected while seats were free, or by an instance with fewer seats than the old
    /// instance.
    Rejections,
    WebhookErrors,
    WebhookLatency,
    EtcdErrors,
    /// Objects that could not be encrypted or decrypted.
    Encryption,
    Decoding,
    /// APIServices that are unavailable only to the new instance.
    Aggregation,
    Aborts,
    TlsErrors,
    /// Connections ended without a byte from the instance. berth counts these.
    EmptyConnections,
    /// The instance's first byte came late. berth measures the time from the client's first
    /// message.
    FirstByte,
    Memory,
    Restart,
    /// The instance does not answer berth.
    NoAnswer,
    /// The instance refuses its metrics to berth.
    NoMetrics,
    /// Clients connected, but the instance counted too few requests for their connections.
    NoRequests,
    /// The new instance lacks an API that the old instance serves and clients use.
    MissingApi,
}

impl Signal {
    /// The signals compared by [`crate::sequential`].
    pub const COMPARED_SIGNALS: [Self; 17] = [
        Self::Errors,
        Self::NotFound,
        Self::Latency,
        Self::Authentication,
        Self::Authorization,
        Self::Rejections,
        Self::WebhookErrors,
        Self::WebhookLatency,
        Self::EtcdErrors,
        Self::Encryption,
        Self::Decoding,
        Self::Aggregation,
        Self::Aborts,
        Self::TlsErrors,
        Self::EmptyConnections,
        Self::FirstByte,
        Self::Memory,
    ];

    /// True for durations.
    pub fn is_time(self) -> bool {
        matches!(self, Self::Latency | Self::WebhookLatency | Self::FirstByte)
    }

    /// True for signals that are a state of the instance, and no count of requests or connections.
    pub(crate) fn is_state(self) -> bool {
        matches!(self, Self::Aggregation | Self::Memory)
    }

    /// The share of bad requests from which on a difference matters: smaller ones are tolerated.
    pub fn tolerance(self) -> f64 {
        match self {
            Self::Latency | Self::FirstByte | Self::Rejections | Self::TlsErrors => 0.10,
            Self::WebhookLatency => 0.15,
            Self::Aggregation | Self::Memory => 0.10,
            Self::NotFound | Self::WebhookErrors | Self::EmptyConnections => 0.05,
            _ => 0.02,
        }
    }

    /// The signal's part of the probability of a false alarm. Half goes to the four most telling
    /// signals, and 13 others share the rest.
    pub fn weight(self) -> f64 {
        match self {
            Self::Errors | Self::Latency | Self::EmptyConnections | Self::FirstByte => 1.0 / 8.0,
            _ => 1.0 / 26.0,
        }
    }

    /// The metric required to judge an instance by this signal. Counters of errors are absent until
    /// the first error.
    pub fn metric(self) -> &'static str {
        match self {
            Self::Errors | Self::NotFound | Self::Aborts => "apiserver_request_total",
            Self::Latency => "apiserver_request_duration_seconds_bucket",
            Self::Authentication => "authentication_attempts",
            Self::Authorization => "authorization_attempts_total",
            Self::Rejections => "apiserver_flowcontrol_dispatched_requests_total",
            Self::WebhookErrors | Self::WebhookLatency => {
                "apiserver_admission_webhook_admission_duration_seconds_bucket"
            }
            Self::EtcdErrors | Self::Decoding => "etcd_requests_total",
            Self::Encryption => "apiserver_storage_transformation_operations_total",
            Self::Aggregation => "aggregator_unavailable_apiservice",
            Self::TlsErrors => "apiserver_tls_handshake_errors_total",
            Self::Memory => "process_resident_memory_bytes",
            Self::Restart => "process_start_time_seconds",
            Self::EmptyConnections | Self::FirstByte => "berth's count of connections",
            Self::NoAnswer | Self::NoMetrics => "/metrics",
            Self::NoRequests => "authentication_attempts",
            Self::MissingApi => "the list of APIs",
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for Signal {
    type Err = String;

    fn from_str(code: &str) -> Result<Self, Self::Err> {
        Self::deserialize(code.into_deserializer()).map_err(|error: value::Error| error.to_string())
    }
}

/// A kind of requests that is compared, by verb, resource and scope. An empty field matches every
/// request: a verb alone means all requests with the verb.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    pub verb: Box<str>,
    pub resource: Box<str>,
    pub scope: Box<str>,
}

impl Subject {
    pub fn of_verb(verb: &str) -> Self {
        Self {
            verb: verb.into(),
            ..Self::default()
        }
    }

    pub fn of_resource(resource: &str) -> Self {
        Self {
            resource: resource.into(),
            ..Self::default()
        }
    }

    fn of_sample(sample: &metrics::Sample<'_>) -> Self {
        let [group, resource, subresource] =
            ["group", "resource", "subresource"].map(|name| sample.label(name));
        let dot = if group.is_empty() { "" } else { "." };
        let slash = if subresource.is_empty() || subresource.starts_with('/') {
            ""
        } else {
            "/"
        };
        let resource = format!("{resource}{dot}{group}{slash}{subresource}");
        Self {
            verb: sample.label("verb").into(),
            resource: resource.into(),
            scope: sample.label("scope").into(),
        }
    }

    /// True for writes, which go through webhooks and to etcd.
    pub(crate) fn is_write(&self) -> bool {
        !matches!(&*self.verb, "" | "GET" | "LIST" | "WATCH")
    }

    /// Returns the sums that include this subject: the total, the verb, the resource, and the
    /// subject itself.
    pub fn enclosing_subjects(&self) -> BTreeSet<Self> {
        [
            Self::default(),
            Self::of_verb(&self.verb),
            Self::of_resource(&self.resource),
            self.clone(),
        ]
        .into()
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [&self.verb, &self.resource, &self.scope].map(|part| &**part);
        let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        f.write_str(if parts.is_empty() { "all" } else { "" })?;
        f.write_str(&parts.join(" "))
    }
}

/// The number of requests (or connections), and the number of bad ones.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counts {
    pub bad: f64,
    pub all: f64,
}

impl Counts {
    pub fn add(&mut self, bad: f64, all: f64) {
        self.bad += bad;
        self.all += all;
    }

    pub fn share_of_bad(self) -> f64 {
        if self.all > 0.0 {
            (self.bad / self.all).min(1.0)
        } else {
            0.0
        }
    }
}

/// berth's counts of the clients' connections to one instance.
#[derive(Debug, Clone, Default)]
pub struct Connections {
    /// Connections of TLS clients to the instance.
    pub all: f64,
    /// Connections without a byte from the instance, which ended them or let them time out.
    pub empty: f64,
    /// Seconds from the client's first message to the instance's first byte.
    pub first_byte: Histogram,
}

/// The metrics of one instance at one time. Counts are sums since the instance's start.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// True if the instance answered with its metrics.
    pub(crate) answered: bool,
    /// True if the instance answered the request for its metrics with an error. Such an instance is
    /// not silent.
    pub(crate) refused: bool,
    pub(crate) started: Option<f64>,
    pub(crate) counts: BTreeMap<(Signal, Subject), Counts>,
    pub(crate) histograms: BTreeMap<(Signal, Subject), Histogram>,
    /// Seats of each priority level (API priority and fairness): the taken seats are in `bad`.
    pub(crate) seats: BTreeMap<String, Counts>,
    /// APIServices by name: true if unavailable.
    pub(crate) unavailable: BTreeMap<String, bool>,
    pub(crate) memory: Option<f64>,
    /// Requests of each `group/version`, or `version` for the core API.
    pub(crate) requests: BTreeMap<String, f64>,
    /// Long-running requests (watches) that are open now, of each `group/version`. A controller's
    /// watch may be days old.
    pub(crate) open: BTreeMap<String, f64>,
    pub(crate) apis: Option<BTreeSet<String>>,
    /// Names of the wanted metrics that were found in the page.
    pub(crate) metrics: BTreeSet<&'static str>,
}

impl Sample {
    /// Parses a page of metrics. `None` if the instance did not answer in time.
    pub fn new(page: Option<&str>) -> Self {
        let mut sample = Self {
            answered: page.is_some(),
            ..Self::default()
        };
        for line in metrics::find_samples(page.unwrap_or_default(), is_wanted_metric) {
            if (0.0..=MAX_VALUE).contains(&line.value) {
                sample.add_line(&line);
            }
        }
        sample
    }

    /// Adds berth's counts of this instance's connections.
    #[must_use]
    pub fn with_connections(mut self, connections: Connections) -> Self {
        let all = Subject::default();
        self.add_counts(
            Signal::EmptyConnections,
            all.clone(),
            connections.empty,
            connections.all,
        );
        if self.answered {
            self.add_counts(Signal::TlsErrors, all.clone(), 0.0, connections.all);
        }
        self.histograms
            .insert((Signal::FirstByte, all), connections.first_byte);
        self.metrics.extend([Signal::EmptyConnections.metric()]);
        self
    }

    /// A sample of an instance that answered with an error instead of its metrics.
    #[must_use]
    pub fn with_refused_metrics() -> Self {
        Self {
            refused: true,
            ..Self::default()
        }
    }

    /// The APIs (`v1`, `apps/v1`) that clients have requested.
    pub fn used_apis(&self) -> BTreeSet<String> {
        let used = self
            .requests
            .iter()
            .chain(&self.open)
            .filter(|(api, count)| !api.is_empty() && **count > 0.0);
        used.map(|(api, _)| api.clone()).collect()
    }

    /// Records the APIs that the instance itself serves. Its `/apis` does not tell: that list comes
    /// from APIService objects written by both instances, and an instance that lacks an API removes
    /// the object.
    #[must_use]
    pub fn with_apis(mut self, apis: BTreeSet<String>) -> Self {
        self.apis = Some(apis);
        self
    }

    pub(crate) fn add_counts(&mut self, signal: Signal, subject: Subject, bad: f64, all: f64) {
        self.counts
            .entry((signal, subject))
            .or_default()
            .add(bad, all);
    }

    fn add_line(&mut self, line: &metrics::Sample<'_>) {
        let (value, all) = (line.value, Subject::default());
        let unless = |result: &str| {
            if line.label("result") == result {
                0.0
            } else {
                value
            }
        };
        let known = Signal::COMPARED_SIGNALS
            .map(Signal::metric)
            .into_iter()
            .find(|name| *name == line.name);
        self.metrics.extend(known);
        match line.name.strip_prefix("apiserver_").unwrap_or(line.name) {
            "request_total" => self.add_request(line),
            "longrunning_requests" => *self.open.entry(api_of(line)).or_default() += value,
            "request_duration_seconds_bucket" if !is_long_running(line) => {
                self.add_bucket(Signal::Latency, Subject::of_sample(line), line);
            }
            "request_aborts_total" => {
                self.add_counts(Signal::Aborts, Subject::of_sample(line), value, value);
            }
            "authentication_attempts" => {
                self.add_counts(Signal::Authentication, all, unless("success"), value);
            }
            "authorization_attempts_total" => {
                self.add_counts(Signal::Authorization, all, unless("allowed"), value);
            }
            "tls_handshake_errors_total" => self.add_counts(Signal::TlsErrors, all, value, 0.0),
            "flowcontrol_rejected_requests_total" => {
                self.add_counts(Signal::Rejections, priority_level_of(line), value, value);
            }
            "flowcontrol_dispatched_requests_total" => {
                self.add_counts(Signal::Rejections, priority_level_of(line), 0.0, value);
            }
            "flowcontrol_current_executing_seats" => {
                self.seats
                    .entry(priority_level_of(line).resource.into())
                    .or_default()
                    .bad += value;
            }
            "flowcontrol_current_limit_seats" => {
                self.seats
                    .entry(priority_level_of(line).resource.into())
                    .or_default()
                    .all += value;
            }
            "admission_webhook_admission_duration_seconds_bucket" => {
                self.add_bucket(
                    Signal::WebhookLatency,
                    Subject::of_resource(line.label("name")),
                    line,
                );
                if line.label("le") == "+Inf" {
                    self.add_counts(
                        Signal::WebhookErrors,
                        Subject::of_resource(line.label("name")),
                        0.0,
                        value,
                    );
                }
            }
            "admission_webhook_rejection_count" if line.label("error_type") == "no_error" => {}
            "admission_webhook_rejection_count" | "admission_webhook_fail_open_count" => {
                self.add_counts(
                    Signal::WebhookErrors,
                    Subject::of_resource(line.label("name")),
                    value,
                    0.0,
                );
            }
            "etcd_requests_total" => {
                self.add_counts(
                    Signal::EtcdErrors,
                    Subject::of_verb(line.label("operation")),
                    0.0,
                    value,
                );
                self.add_counts(Signal::Decoding, all, 0.0, value);
            }
            "etcd_request_errors_total" => {
                self.add_counts(
                    Signal::EtcdErrors,
                    Subject::of_verb(line.label("operation")),
                    value,
                    0.0,
                );
            }
            "storage_decode_errors_total" => self.add_counts(Signal::Decoding, all, value, 0.0),
            "storage_transformation_operations_total" => {
                let bad = if line.label("status") == "OK" {
                    0.0
                } else {
                    value
                };
                self.add_counts(
                    Signal::Encryption,
                    Subject::of_verb(line.label("transformation_type")),
                    bad,
                    value,
                );
            }
            "aggregator_unavailable_apiservice" => {
                self.unavailable
                    .insert(line.label("name").into(), value > 0.0);
            }
            "process_start_time_seconds" => self.started = Some(value),
            "process_resident_memory_bytes" => self.memory = Some(value),
            _ => {}
        }
    }

    fn add_request(&mut self, line: &metrics::Sample<'_>) {
        let (value, subject, code) = (line.value, Subject::of_sample(line), line.label("code"));
        // Probes and requests for metrics, such as berth's own, do not count as requests.
        if ["/healthz", "/livez", "/readyz", "/metrics"]
            .iter()
            .any(|path| subject.resource.starts_with(path))
        {
            return;
        }
        *self.requests.entry(api_of(line)).or_default() += value;
        if matches!(line.label("verb"), "LIST" | "WATCH") {
            self.add_counts(
                Signal::NotFound,
                subject.clone(),
                if code == "404" { value } else { 0.0 },
                value,
            );
        }
        self.add_counts(Signal::Aborts, subject.clone(), 0.0, value);
        self.add_counts(
            Signal::Errors,
            subject,
            if code.starts_with('5') { value } else { 0.0 },
            value,
        );
    }

    fn add_bucket(&mut self, signal: Signal, subject: Subject, line: &metrics::Sample<'_>) {
        if let Ok(bound) = line.label("le").parse() {
            self.histograms
                .entry((signal, subject))
                .or_default()
                .add(bound, line.value);
        }
    }
}

fn is_wanted_metric(name: &str) -> bool {
    name.starts_with("apiserver_")
        || name.starts_with("etcd_request")
        || matches!(
            name,
            "aggregator_unavailable_apiservice"
                | "authentication_attempts"
                | "authorization_attempts_total"
                | "process_start_time_seconds"
                | "process_resident_memory_bytes"
        )
}

/// The duration of a watch, or of a shell in a pod, says nothing about the instance.
fn is_long_running(line: &metrics::Sample<'_>) -> bool {
    matches!(line.label("verb"), "WATCH" | "CONNECT")
}

/// The API of a line, in the form of [`Sample::with_apis`].
fn api_of(line: &metrics::Sample<'_>) -> String {
    let [group, version] = ["group", "version"].map(|name| line.label(name));
    if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    }
}

fn priority_level_of(line: &metrics::Sample<'_>) -> Subject {
    Subject::of_resource(line.label("priority_level"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page in the form of kube-apiserver's.
    const PAGE: &str = r#"
# HELP apiserver_request_total [STABLE] Counter of apiserver requests broken out for each verb, dry run value, group, ...
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",component="apiserver",dry_run="",group="apps",resource="deployments",scope="cluster",subresource="",verb="LIST",version="v1"} 8
apiserver_request_total{code="404",component="apiserver",dry_run="",group="apps",resource="deployments",scope="cluster",subresource="",verb="LIST",version="v1"} 1
apiserver_request_total{code="503",component="apiserver",dry_run="",group="apps",resource="deployments",scope="cluster",subresource="",verb="LIST",version="v1beta1"} 1
apiserver_request_total{code="429",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="status",verb="PATCH",version="v1"} 3
apiserver_request_total{code="500",component="",dry_run="",group="",resource="",scope="",subresource="/readyz",verb="GET",version=""} 77
apiserver_request_duration_seconds_bucket{component="apiserver",dry_run="",group="apps",resource="deployments",scope="cluster",subresource="",verb="LIST",version="v1",le="0.005"} 6
apiserver_request_duration_seconds_bucket{component="apiserver",dry_run="",group="apps",resource="deployments",scope="cluster",subresource="",verb="LIST",version="v1",le="+Inf"} 9
apiserver_request_duration_seconds_bucket{component="apiserver",dry_run="",group="apps",resource="deployments",scope="cluster",subresource="",verb="LIST",version="v1beta1",le="+Inf"} 1
apiserver_request_duration_seconds_bucket{component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="WATCH",version="v1",le="+Inf"} 5
apiserver_flowcontrol_current_executing_seats{flow_schema="probes",priority_level="exempt"} 2
apiserver_flowcontrol_current_executing_seats{flow_schema="system-leader-election",priority_level="exempt"} 3
apiserver_flowcontrol_current_limit_seats{priority_level="exempt"} 9
etcd_requests_total{group="",operation="get",resource="pods"} 4
etcd_requests_total{operation="get",type="*core.Pod"} 4
etcd_request_errors_total{group="",operation="get",resource="pods"} 1
authentication_attempts{result="success"} 20
authentication_attempts{result="failure"} 3
authentication_attempts{result="error"} 2
authorization_attempts_total{result="allowed"} 18
authorization_attempts_total{result="no-opinion"} 2
process_start_time_seconds 1.76414e+09
"#;

    #[test]
    fn a_code_is_parsed_as_displayed() {
        for signal in Signal::COMPARED_SIGNALS.into_iter().chain([
            Signal::Restart,
            Signal::NoAnswer,
            Signal::NoMetrics,
            Signal::NoRequests,
            Signal::MissingApi,
        ]) {
            assert_eq!(signal.to_string().parse(), Ok(signal));
        }
        let unknown = "error".parse::<Signal>().unwrap_err();
        assert!(unknown.contains("webhook-errors"), "{unknown}");
    }

    #[test]
    fn a_page_of_kube_apiserver_is_read() {
        let sample = Sample::new(Some(PAGE));
        let counts = |signal, verb: &str, resource: &str, scope: &str| {
            let subject = Subject {
                verb: verb.into(),
                resource: resource.into(),
                scope: scope.into(),
            };
            sample
                .counts
                .get(&(signal, subject))
                .map(|counts| (counts.bad, counts.all))
        };
        assert_eq!(
            counts(Signal::Errors, "LIST", "deployments.apps", "cluster"),
            Some((1.0, 10.0))
        );
        assert_eq!(
            counts(Signal::NotFound, "LIST", "deployments.apps", "cluster"),
            Some((1.0, 10.0))
        );
        // A rejected request does not count as an error, and a probe does not count as a request.
        assert_eq!(
            counts(Signal::Errors, "PATCH", "pods/status", "resource"),
            Some((0.0, 3.0))
        );
        assert_eq!(counts(Signal::Errors, "GET", "/readyz", ""), None);
        assert_eq!(counts(Signal::EtcdErrors, "get", "", ""), Some((1.0, 8.0)));
        assert_eq!(
            counts(Signal::Authentication, "", "", ""),
            Some((5.0, 25.0))
        );
        assert_eq!(counts(Signal::Authorization, "", "", ""), Some((2.0, 20.0)));
        // Requests of all versions of an API are added up, and watches are left out.
        let times: Vec<_> = sample.histograms.values().map(Histogram::total).collect();
        assert_eq!(times, [10.0]);
        assert_eq!(
            sample.requests.into_iter().collect::<Vec<_>>(),
            [
                ("apps/v1".to_owned(), 9.0),
                ("apps/v1beta1".to_owned(), 1.0),
                ("v1".to_owned(), 3.0)
            ]
        );
        assert_eq!(
            (sample.seats["exempt"], sample.started),
            (Counts { bad: 5.0, all: 9.0 }, Some(1_764_140_000.0))
        );
    }
}
