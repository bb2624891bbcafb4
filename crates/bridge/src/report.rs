//! Findings of preflight: all errors that prevent a bridge at once, and notes.

use std::fmt::Display;

#[derive(Debug, Default)]
pub struct Report {
    /// Errors that prevent a bridge: sentences, each with a fix.
    pub errors: Vec<String>,
    /// Remarks that do not prevent a bridge.
    pub notes: Vec<String>,
}

impl Report {
    pub fn error(&mut self, why: impl Into<String>) {
        self.errors.push(why.into());
    }

    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// The value, or `None` after adding an error that begins with `what`.
    pub fn ok<T, E: Display>(&mut self, what: &str, result: Result<T, E>) -> Option<T> {
        result
            .map_err(|error| self.error(format!("{what}{error}")))
            .ok()
    }
}
