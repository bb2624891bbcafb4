//! Where the log goes and how much of it.

use clap::{Args, ValueEnum};

const LOGGING: &str = "Logging";

/// Logging options, valid with every subcommand.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// How log lines look; they go to standard error
    #[arg(long, global = true, env = "BERTH_LOG_FORMAT", default_value = "text", value_name = "FORMAT", help_heading = LOGGING)]
    pub log_format: LogFormat,
    /// Least severity that is logged
    #[arg(long, global = true, env = "BERTH_LOG_LEVEL", default_value = "info", value_name = "LEVEL", help_heading = LOGGING)]
    pub log_level: LogLevel,
}

/// Form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One readable line per event
    Text,
    /// One JSON object per event
    Json,
}

/// Least severity that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Failures that need attention
    Error,
    /// And possible problems
    Warn,
    /// And life cycle events
    Info,
    /// And each connection
    Debug,
    /// And each step of a connection
    Trace,
}
