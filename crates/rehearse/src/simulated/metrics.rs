//! What a simulated apiserver counts of what it does, and how its `/metrics` shows it: under the names and labels of
//! kube-apiserver, those series that an upgrade's judge reads and that have something behind them here.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Upper bounds of histograms' buckets, in seconds: some of kube-apiserver's.
const BOUNDS: [f64; 14] = [0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

const TIMES: &str = "apiserver_request_duration_seconds_bucket";

const WEBHOOK_TIMES: &str = "apiserver_admission_webhook_admission_duration_seconds_bucket";

/// Counts by series: its name, and its labels.
#[derive(Debug, Default)]
pub(super) struct Metrics(Mutex<BTreeMap<(&'static str, String), u64>>);

impl Metrics {
    pub(super) fn count(&self, name: &'static str, labels: &str) {
        self.add(name, labels.to_owned(), true);
    }

    /// A request that was answered; a watch when it began.
    pub(super) fn request(&self, labels: &str, code: u16, took: Duration) {
        self.count("apiserver_request_total", &format!("{labels},code=\"{code}\""));
        if !labels.contains("WATCH") {
            self.time(TIMES, labels, took);
        }
    }

    /// A call of an admission webhook, and whether it failed.
    pub(super) fn webhook(&self, name: &str, failed: bool, took: Duration) {
        let labels = format!("name=\"{name}\",type=\"validating\",operation=\"CREATE\"");
        self.time(WEBHOOK_TIMES, &format!("{labels},rejected=\"{failed}\""), took);
        if failed {
            let labels = format!("{labels},error_type=\"calling_webhook_error\",rejection_code=\"0\"");
            self.count("apiserver_admission_webhook_rejection_count", &labels);
        }
    }

    fn time(&self, name: &'static str, labels: &str, took: Duration) {
        for bound in BOUNDS {
            self.add(name, format!("{labels},le=\"{bound}\""), took.as_secs_f64() <= bound);
        }
        self.count(name, &format!("{labels},le=\"+Inf\""));
    }

    /// A bucket is there although nothing fell into it.
    fn add(&self, name: &'static str, labels: String, is_one: bool) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((name, labels)).or_default() += u64::from(is_one);
    }

    pub(super) fn page(&self) -> String {
        let mut page = String::new();
        for ((name, labels), count) in &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = writeln!(page, "{name}{{{labels}}} {count}");
        }
        for (name, _, value) in berth_os::process::usage() {
            let _ = writeln!(page, "{name} {value}");
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_counts_as_kube_apiserver_does() {
        let metrics = Metrics::default();
        let list = "group=\"\",version=\"v1\",resource=\"secrets\",scope=\"cluster\",verb=\"LIST\"";
        metrics.request(list, 500, Duration::from_millis(30));
        metrics.request(list, 500, Duration::from_millis(3));
        metrics.request(&list.replace("LIST", "WATCH"), 200, Duration::from_secs(3));
        metrics.webhook("w", true, Duration::from_millis(2));
        let page = metrics.page();
        let value = |name: &str, labels: &[&str]| {
            let series = berth_judge::metrics::samples(&page, |other| other == name);
            let mut of = series.filter(|series| labels.chunks(2).all(|label| series.label(label[0]) == label[1]));
            (of.next().map(|series| series.value), of.count())
        };
        let requests = "apiserver_request_total";
        assert_eq!(value(requests, &["verb", "LIST", "code", "500", "resource", "secrets"]), (Some(2.0), 0));
        assert_eq!(value(requests, &["verb", "WATCH", "code", "200"]), (Some(1.0), 0));
        for (bound, count) in [("0.005", 1.0), ("0.025", 1.0), ("0.05", 2.0), ("+Inf", 2.0)] {
            assert_eq!(value(TIMES, &["le", bound]), (Some(count), 0), "{bound}");
        }
        assert_eq!(value(WEBHOOK_TIMES, &["name", "w", "rejected", "true", "le", "+Inf"]), (Some(1.0), 0));
        let rejected = "apiserver_admission_webhook_rejection_count";
        assert_eq!(value(rejected, &["name", "w", "error_type", "calling_webhook_error"]), (Some(1.0), 0));
        assert!(value("process_resident_memory_bytes", &[]).0 > Some(0.0));
        assert!(value("process_start_time_seconds", &[]).0 > Some(0.0));
    }
}
