//! The findings of a command: each problem with its place, cause, fix and severity.

use crate::file::FileError;
use berth_options::check::Mistakes;
use hyper::StatusCode;
use serde::Serialize;
use std::fmt::Display;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The command cannot do its work, or clients lose something.
    Error,
    /// It works, but clients may be affected, or it will stop working.
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

/// Something that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Name of the check of `berth doctor`; empty outside of it.
    pub id: &'static str,
    pub severity: Severity,
    /// Where: file and line, a path or a setting of the node. Empty where the cause has it.
    #[serde(rename = "where")]
    pub place: String,
    /// The problem and its cause.
    pub cause: String,
    /// An edit or a command. Empty where the cause has it.
    pub fix: String,
}

/// Why the cluster's API cannot be asked, and what fixes it: where it does not know the credentials, does not allow the request, or fails.
pub fn explain(error: &berth_cluster::Error, [unknown, forbidden, failed]: [&str; 3]) -> String {
    let fix = match error.status() {
        None => "see that an apiserver answers there",
        Some(StatusCode::UNAUTHORIZED) => unknown,
        Some(StatusCode::FORBIDDEN) => forbidden,
        Some(_) => failed,
    };
    format!("{error}: {fix}")
}

impl From<FileError> for Refusal {
    fn from(error: FileError) -> Self {
        if error.is_content() {
            Self::usage(vec![error.to_string()])
        } else {
            Self::unavailable(&error)
        }
    }
}

/// Why a command does not begin; nothing was changed.
#[derive(Debug)]
pub enum Refusal {
    /// The command line or a manifest is wrong.
    Usage(Mistakes),
    /// Something that is needed cannot be had.
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
