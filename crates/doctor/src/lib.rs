//! Checks a kube-apiserver's manifest, node and cluster before an upgrade, and finds the causes of
//! lost requests. Each finding has a place, a cause and a fix.
//!
//! [`examine`] does no I/O: it judges a [`Case`], which contains the manifest and the facts about
//! its node and cluster. [`other_files`], [`node`] and [`cluster`] gather the facts. [`CHECKS`]
//! lists every check, and `docs/doctor.md` says what must hold for each.
//!
//! doctor finds the changes that `berth inject` would make in a manifest by inject's own rules
//! ([`berth_manifest::inject::find_lapses`]), so that each rule exists once.
//!
//! [`service`] keeps the EndpointSlice of a bridge or an upgrade in the Service `kubernetes`;
//! [`cluster`] finds a slice that a bridge or an upgrade has left there.

#![forbid(unsafe_code)]
// These macros panic if a pipe is closed or a disk is full, so the crate must not print with them.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod checks;
pub mod cluster;
mod layout;
mod manifest;
pub mod node;
mod options;
pub mod other_files;
mod pair;
pub mod service;
pub mod text;

use berth_manifest::Manifest;
use berth_manifest::report::{Finding, Severity};

pub use checks::CHECKS;
pub use options::{ShimOf, find_shim};

/// A check that doctor makes. A finding of the check has this severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// Name of the check. The name never changes from version to version.
    pub id: &'static str,
    pub severity: Severity,
    /// What the check looks at.
    pub scope: &'static str,
    /// What must hold, in Markdown.
    pub rule: &'static str,
}

impl Check {
    /// Makes a finding of this check.
    fn make_finding(
        &self,
        place: impl Into<String>,
        cause: impl Into<String>,
        fix: impl Into<String>,
    ) -> Finding {
        let Self { id, severity, .. } = *self;
        Finding {
            id,
            severity,
            place: place.into(),
            cause: cause.into(),
            fix: fix.into(),
        }
    }
}

/// The input of the checks. A field is `None` if doctor has not looked at that part.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    /// The manifest's name in findings, for example its path.
    pub name: &'a str,
    pub manifest: &'a Manifest,
    /// The manifest that the kubelet runs now, and that `manifest` will replace.
    pub running: Option<&'a Manifest>,
    /// The other files in the manifest's directory, if the manifest is a static pod's.
    pub other_files: Option<&'a [other_files::ManifestFile]>,
    /// Facts about the node.
    pub node: Option<&'a node::Facts>,
    /// Facts about the cluster.
    pub cluster: Option<&'a cluster::Cluster>,
}

impl<'a> Case<'a> {
    /// Makes a case in which only the manifest is known.
    pub fn new(name: &'a str, manifest: &'a Manifest) -> Self {
        Self {
            name,
            manifest,
            running: None,
            other_files: None,
            node: None,
            cluster: None,
        }
    }

    /// Formats a place in the manifest as `FILE:LINE`.
    fn format_place(&self, line: usize) -> String {
        format!("{}:{line}", self.name)
    }
}

/// Makes all checks. Returns the findings sorted by severity, the worst first.
pub fn examine(case: &Case<'_>) -> Vec<Finding> {
    let mut findings = manifest::examine(case);
    findings.extend(
        case.running
            .into_iter()
            .flat_map(|running| pair::examine(case, running)),
    );
    findings.extend(
        case.other_files
            .into_iter()
            .flat_map(|files| other_files::examine(case, files)),
    );
    findings.extend(
        case.node
            .into_iter()
            .flat_map(|facts| node::examine(case, facts)),
    );
    findings.extend(cluster::examine(case));
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// Makes errors of the given checks warnings, as the operator asked by `--ignore-errors`.
pub fn excuse_findings(findings: &mut [Finding], checks: &[String]) {
    for finding in findings
        .iter_mut()
        .filter(|finding| finding.severity == Severity::Error)
    {
        if checks.iter().any(|check| check == finding.id) {
            finding.severity = Severity::Warning;
        }
    }
    findings.sort_by_key(|finding| finding.severity);
}

#[cfg(test)]
mod tests;
