//! `berth generate`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Options of `berth generate`.
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    #[command(subcommand)]
    pub what: Generate,
}

/// What `berth generate` writes.
#[derive(Debug, Clone, Subcommand)]
pub enum Generate {
    /// Write a man page for berth and one for each subcommand
    Man {
        /// Directory to write them to; made if it is not there
        #[arg(default_value = ".", value_name = "DIR")]
        dir: PathBuf,
    },
    /// Write a shell's completions to standard output
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}
