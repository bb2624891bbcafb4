//! Collects the mistakes of a command line, so that all of them are reported at once.

use crate::ask::parse_duration;
use humantime::format_duration;
use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// All mistakes of a command line, each a sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct Mistakes(pub Vec<String>);

#[derive(Debug, Default)]
pub struct Checks(Vec<String>);

impl Checks {
    pub fn report(&mut self, mistake: impl Into<String>) {
        self.0.push(mistake.into());
    }

    /// Returns the value of a check that succeeded. Otherwise records the error as a mistake, and
    /// returns `None`.
    pub fn ok_or_report<T, E: Display>(&mut self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.0.push(error.to_string())).ok()
    }

    /// Parses a duration such as `8s`, `500ms` or `1m30s`, not below `least`.
    pub fn parse_duration(&mut self, option: &str, text: &str, least: Duration) -> Duration {
        let long = |time| {
            if time < least {
                Err(format!("at least {}", format_duration(least)))
            } else {
                Ok(time)
            }
        };
        let parsed = parse_duration(text).and_then(long);
        self.ok_or_report(parsed.map_err(|why| format!("{option} {text}: {why}")))
            .unwrap_or(least)
    }

    /// Parses a whole number, and records a mistake if it is outside of the range.
    pub fn parse_number<T>(&mut self, option: &str, text: &str, range: RangeInclusive<T>) -> T
    where
        T: FromStr + PartialOrd + Copy + Display,
    {
        match text.parse() {
            Ok(number) if range.contains(&number) => number,
            _ => {
                self.report(format!(
                    "{option} {text}: give a whole number from {} to {}",
                    range.start(),
                    range.end()
                ));
                *range.start()
            }
        }
    }

    /// Parses an address with a port, and records a mistake if it cannot be parsed.
    pub fn parse_address(&mut self, option: &str, text: &str) -> Option<SocketAddr> {
        self.ok_or_report(text.parse().map_err(|_| {
            format!("{option} {text:?}: give an IP address with a port, such as 127.0.0.1:6443 or [::1]:6443")
        }))
    }

    /// Returns the value if there were no mistakes.
    ///
    /// # Errors
    /// All recorded mistakes.
    pub fn finish<T>(self, value: Option<T>) -> Result<T, Mistakes> {
        match value {
            Some(value) if self.0.is_empty() => Ok(value),
            _ => Err(Mistakes(self.0)),
        }
    }
}
