//! The `berth` binary: arguments in, exit status out.

#![forbid(unsafe_code)]
// They panic where a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match berth::cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            return berth::commands::explain(error);
        }
    };
    // A panic is a bug; sysexits has a status for that. Those of a connection end only that connection.
    std::panic::catch_unwind(|| berth::commands::dispatch(cli))
        .unwrap_or_else(|_| berth::commands::Exit::Bug.into())
}
