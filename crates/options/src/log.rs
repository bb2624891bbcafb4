//! Where the log goes and how much of it.

use clap::{Args, ValueEnum};

const LOGGING: &str = "Logging";

/// Logging options, valid with every subcommand.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// How log lines look; they go to standard error
    #[arg(long, global = true, env = "BERTH_LOG_FORMAT", hide_env_values = true, default_value = "text", value_name = "FORMAT", help_heading = LOGGING)]
    pub log_format: LogFormat,
    /// Least severity that is logged
    #[arg(long, global = true, env = "BERTH_LOG_LEVEL", hide_env_values = true, default_value = "info", value_name = "LEVEL", help_heading = LOGGING)]
    pub log_level: LogLevel,
}

/// Form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One readable line an event
    Text,
    /// One JSON object an event
    Json,
}

/// Least severity that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Only what needs somebody
    Error,
    /// And what may need somebody
    Warn,
    /// And the life cycle
    Info,
    /// And each connection
    Debug,
    /// And each step of it
    Trace,
}
