//! The findings of a command: each problem with its place, cause, fix and severity.

use crate::file::FileError;
use berth_options::check::Mistakes;
use hyper::StatusCode;
use serde::Serialize;
use std::fmt::Display;

/// How much a finding matters to the operator, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The command cannot do its work, or clients lose something.
    Error,
    /// The command works, but clients may be affected, or it will stop working later.
    Warning,
    /// A note, or something that was not checked.
    Info,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "info",
        }
    }
}

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check of `berth doctor`; empty for other commands.
    pub id: &'static str,
    pub severity: Severity,
    /// File and line, a path, or a setting of the node. Empty if the cause contains the place.
    #[serde(rename = "where")]
    pub place: String,
    /// The problem and its cause.
    pub cause: String,
    /// An edit or a command. Empty if the cause contains the fix.
    pub fix: String,
}

/// Explains a failed request to the cluster's API, with a fix for each case: unknown credentials, a
/// forbidden request, or another error.
pub fn explain_cluster_error(
    error: &berth_cluster::Error,
    [unknown, forbidden, failed]: [&str; 3],
) -> String {
    let fix = match error.status() {
        None => "check that an apiserver answers there",
        Some(StatusCode::UNAUTHORIZED) => unknown,
        Some(StatusCode::FORBIDDEN) => forbidden,
        Some(_) => failed,
    };
    format!("{error}: {fix}")
}

impl From<FileError> for Refusal {
    fn from(error: FileError) -> Self {
        if error.is_wrong_content() {
            Self::usage(vec![error.to_string()])
        } else {
            Self::unavailable(&error)
        }
    }
}

/// Why a command refuses to start. The command has changed nothing.
#[derive(Debug)]
pub enum Refusal {
    /// The command line or a manifest is wrong.
    Usage(Mistakes),
    /// Something necessary is not available.
    Unavailable(Vec<String>),
    /// `berth doctor` found errors, which have been printed.
    Errors,
}

impl Refusal {
    pub fn usage(mistakes: Vec<String>) -> Self {
        Self::Usage(Mistakes(mistakes))
    }

    pub fn unavailable(why: &dyn Display) -> Self {
        Self::Unavailable(vec![why.to_string()])
    }
}
