//! The findings of a command: each problem with its place, cause, fix and severity.

use crate::file::FileError;
use berth_options::check::Mistakes;
use hyper::StatusCode;
use serde::Serialize;
use std::fmt::{self, Display};

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

impl Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [&self.place, &self.cause, &self.fix].map(String::as_str);
        f.write_str(&parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(": "))
    }
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

#[derive(Debug, Default)]
pub struct Report(Vec<Finding>);

impl Report {
    /// Adds a reason not to begin: a sentence with its place and its fix.
    pub fn error(&mut self, text: impl Into<String>) {
        self.add(Severity::Error, text.into());
    }

    /// Adds a note that does not prevent the command.
    pub fn info(&mut self, text: impl Into<String>) {
        self.add(Severity::Info, text.into());
    }

    fn add(&mut self, severity: Severity, cause: String) {
        self.0.push(Finding { id: "", severity, place: String::new(), cause, fix: String::new() });
    }

    pub fn push(&mut self, finding: Finding) {
        self.0.push(finding);
    }

    /// The value, or an error that begins with `what`.
    pub fn ok<T, E: Display>(&mut self, what: &str, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.error(format!("{what}{error}"))).ok()
    }

    /// Those that are errors, as text.
    pub fn errors(&self) -> Vec<String> {
        self.texts(|severity| severity == Severity::Error)
    }

    /// Those that are none, as text.
    pub fn notes(&self) -> Vec<String> {
        self.texts(|severity| severity != Severity::Error)
    }

    fn texts(&self, wanted: impl Fn(Severity) -> bool) -> Vec<String> {
        self.0.iter().filter(|finding| wanted(finding.severity)).map(ToString::to_string).collect()
    }
}

impl From<FileError> for Refusal {
    fn from(error: FileError) -> Self {
        if error.is_content() { Self::usage(vec![error.to_string()]) } else { Self::unavailable(&error) }
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
