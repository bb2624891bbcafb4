//! Requests for APIs that a release removes: from the metrics of all instances, and from the audit log who sends them.
//!
//! kube-apiserver sets `apiserver_requested_deprecated_apis` to 1 at the first request since its process began, and counts requests in
//! `apiserver_request_total`, a watch when it ends. In the audit log such a request has the annotations `k8s.io/deprecated` and
//! `k8s.io/removed-release`.

use super::super::checks::API_REMOVED;
use super::{Finding, Release, few};
use berth_judge::metrics::samples;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

const REQUESTED: &str = "apiserver_requested_deprecated_apis";
const REQUESTS: &str = "apiserver_request_total";
const REMOVED: &str = "k8s.io/removed-release";

/// How many files of an audit log are read, the last ones first, and how much of each, from its end.
const FILES: usize = 4;
const BYTES: u64 = 64 << 20;

/// Most characters of a user and its agent that are shown.
const CALLER: usize = 200;

/// What takes the place of the instance in the audit log's path.
const INSTANCE: &str = "{instance}";

/// Group, version, resource and subresource.
type Api = [String; 4];

/// How an API was used that some release removes.
#[derive(Debug, Clone, PartialEq)]
struct Usage {
    removed: Release,
    /// Over all instances; a gauge without a count is a watch that has not ended.
    requests: f64,
    /// Users and their agents, by the audit log, with the number of requests.
    callers: BTreeMap<String, u64>,
}

/// All uses that were seen.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Uses(BTreeMap<Api, Usage>);

impl Uses {
    fn usage(&mut self, api: Api, removed: Release) -> &mut Usage {
        self.0.entry(api).or_insert(Usage { removed, requests: 0.0, callers: BTreeMap::new() })
    }

    /// Adds the metrics of all instances.
    pub(super) fn count(&mut self, pages: &[String]) {
        let labels = ["group", "version", "resource", "subresource"];
        let all = |wanted: &'static str| pages.iter().flat_map(move |page| samples(page, move |name| name == wanted));
        for sample in all(REQUESTED).filter(|sample| sample.value > 0.0) {
            if let Ok(removed) = sample.label("removed_release").parse() {
                self.usage(labels.map(|name| sample.label(name).to_owned()), removed);
            }
        }
        for sample in all(REQUESTS) {
            if let Some(usage) = self.0.get_mut(&labels.map(|name| sample.label(name).to_owned())) {
                usage.requests += sample.value;
            }
        }
    }

    /// Adds an audit log, by the path that the manifest gives it.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn read(&mut self, log: &Path) -> io::Result<()> {
        for file in files(log)? {
            let mut file = File::open(file)?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(BYTES)))?;
            let (mut reader, mut line) = (BufReader::new(file.take(BYTES)), Vec::new());
            while reader.read_until(b'\n', &mut line)? > 0 {
                // Of many lines few are of these; the first may be cut off.
                if memchr::memmem::find(&line, REMOVED.as_bytes()).is_some()
                    && let Ok(event) = serde_json::from_slice(&line)
                {
                    self.add(&event);
                }
                line.clear();
            }
        }
        Ok(())
    }

    /// An event of the audit log.
    fn add(&mut self, event: &Value) {
        let Some(removed) = event["annotations"][REMOVED].as_str().and_then(|removed| removed.parse().ok()) else {
            return;
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let api = ["apiGroup", "apiVersion", "resource", "subresource"].map(|field| text(&event["objectRef"][field]));
        let caller = format!("{} ({})", text(&event["user"]["username"]), text(&event["userAgent"]));
        // A client chooses its name.
        let caller = caller.chars().filter(|c| !c.is_control()).take(CALLER).collect();
        *self.usage(api, removed).callers.entry(caller).or_default() += 1;
    }

    pub(super) fn examine(&self, to: Release) -> Vec<Finding> {
        let gone = self.0.iter().filter(|(_, usage)| usage.removed <= to);
        gone.map(|(api, Usage { removed, requests, callers })| {
            let mut callers: Vec<_> = callers.iter().collect();
            callers.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            let callers: Vec<_> = callers.into_iter().map(|(caller, count)| format!("{caller}: {count}")).collect();
            let by = match callers.is_empty() {
                true => "an audit log on this node would name them".to_owned(),
                false => format!("by the audit log of this node {}", few(&callers)),
            };
            let parts = api.iter().filter(|part| !part.is_empty());
            let place = parts.map(String::as_str).collect::<Vec<_>>().join("/");
            let cause = format!(
                "{removed} removes this API, and clients use it ({requests} requests that ended since the instances started; {by}): they get 404 then"
            );
            let fix = "let these clients use a version that stays (https://kubernetes.io/docs/reference/using-api/deprecation-guide/)";
            API_REMOVED.at(place, cause, fix)
        })
        .collect()
    }
}

/// The files of an audit log: of all instances, and those that were rotated, the last ones first.
fn files(log: &Path) -> io::Result<Vec<PathBuf>> {
    let name = log.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let stem = log.file_stem().unwrap_or_default().to_string_lossy();
    let begin = stem.split(INSTANCE).next().unwrap_or_default();
    let end = name.strip_prefix(&*stem).unwrap_or_default();
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(log.parent().unwrap_or(Path::new("/")))? {
        let entry = entry?;
        let other = entry.file_name();
        if other.to_string_lossy().starts_with(begin) && other.to_string_lossy().ends_with(end) {
            found.insert((entry.metadata()?.modified()?, entry.path()));
        }
    }
    Ok(found.into_iter().rev().take(FILES).map(|(_, path)| path).collect())
}
