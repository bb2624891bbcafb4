//! Checks a kube-apiserver's manifest, node and cluster for what would make an upgrade lose requests, before the upgrade. Each
//! finding has its place, its cause and its fix.
//!
//! [`examine`] is pure: it judges a [`Case`], which is the manifest and whatever else is known. What is to be
//! known besides the text is gathered by [`beside`], [`node`] and [`cluster`]. [`CHECKS`] lists every check, and `docs/doctor.md` says of each what must hold.
//!
//! What `berth inject` would change in a manifest is checked by its own rules ([`berth_manifest::inject::judge`]), so that each rule
//! exists once.
//!
//! [`service`] is the EndpointSlice of a bridge or an upgrade in the Service `kubernetes`; [`cluster`] finds a slice that a bridge or an upgrade has left.

#![forbid(unsafe_code)]
// They panic where a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod beside;
mod checks;
pub mod cluster;
mod layout;
mod manifest;
pub mod node;
mod options;
mod pair;
pub mod service;
pub mod text;

use berth_manifest::Manifest;
use berth_manifest::report::{Finding, Severity};

pub use checks::CHECKS;
pub use options::{ShimOf, shim_of};

/// A check, and how bad it is if what it checks does not hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    /// Its name, which stays the same from version to version.
    pub id: &'static str,
    pub severity: Severity,
}

impl Check {
    /// A finding of this check.
    fn at(
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

/// The input of the checks. `None`: not sampled.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    /// The manifest's name in findings.
    pub name: &'a str,
    pub manifest: &'a Manifest,
    /// The manifest that the kubelet runs now and this one is to replace.
    pub running: Option<&'a Manifest>,
    /// The other files of its directory, for a static pod.
    pub beside: Option<&'a [beside::ManifestFile]>,
    /// What was seen of its node.
    pub node: Option<&'a node::Facts>,
    /// What was seen of the cluster.
    pub cluster: Option<&'a cluster::Cluster>,
}

impl<'a> Case<'a> {
    /// A manifest of which nothing but its text is known.
    pub fn new(name: &'a str, manifest: &'a Manifest) -> Self {
        Self {
            name,
            manifest,
            running: None,
            beside: None,
            node: None,
            cluster: None,
        }
    }

    /// The place `FILE:LINE`.
    fn line(&self, line: usize) -> String {
        format!("{}:{line}", self.name)
    }
}

/// All findings, the worst first, otherwise in the order of the file.
pub fn examine(case: &Case<'_>) -> Vec<Finding> {
    let mut findings = manifest::examine(case);
    findings.extend(
        case.running
            .into_iter()
            .flat_map(|running| pair::examine(case, running)),
    );
    findings.extend(
        case.beside
            .into_iter()
            .flat_map(|files| beside::examine(case, files)),
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

/// Makes warnings of the errors of these checks (`--ignore-errors`).
pub fn excuse(findings: &mut [Finding], checks: &[String]) {
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
