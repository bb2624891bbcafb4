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
    pub fn add_error(&mut self, why: impl Into<String>) {
        self.errors.push(why.into());
    }

    pub fn add_note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// The value, or `None` after adding an error that begins with `what`.
    pub fn value_or_add_error<T, E: Display>(
        &mut self,
        what: &str,
        result: Result<T, E>,
    ) -> Option<T> {
        result
            .map_err(|error| self.add_error(format!("{what}{error}")))
            .ok()
    }
}
