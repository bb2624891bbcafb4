//! The `berth` program. It parses the command line and returns an exit status.

#![forbid(unsafe_code)]
// These macros panic if a pipe is closed or a disk is full, so the program must not print with
// them.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match berth::cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            return berth::commands::print_clap_message(error);
        }
    };
    // Catch a panic, which is a bug, to return the exit status of sysexits(3) for it. A panic in a
    // single connection never comes here: the panic ends only the connection.
    std::panic::catch_unwind(|| berth::commands::dispatch(cli))
        .unwrap_or_else(|_| berth::commands::Exit::Bug.into())
}
