//! Options for the log's format and level.

use clap::{Args, ValueEnum};

const LOGGING_HEADING: &str = "Logging";

/// Logging options, valid with every subcommand.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// Format of log lines, which go to standard error
    #[arg(long, global = true, env = "BERTH_LOG_FORMAT", default_value = "text", value_name = "FORMAT", help_heading = LOGGING_HEADING)]
    pub log_format: LogFormat,
    /// Lowest severity that is logged
    #[arg(long, global = true, env = "BERTH_LOG_LEVEL", default_value = "info", value_name = "LEVEL", help_heading = LOGGING_HEADING)]
    pub log_level: LogLevel,
}

/// The format of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A readable line per event
    Text,
    /// A JSON object per event
    Json,
}

/// Lowest severity that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Failures that need attention
    Error,
    /// Also possible problems
    Warn,
    /// Also life cycle events
    Info,
    /// Also each connection
    Debug,
    /// Also each step of a connection
    Trace,
}
