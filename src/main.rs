//! The `berth` binary: arguments in, exit status out.

#![forbid(unsafe_code)]
// `println!` and `eprintln!` panic if a pipe is closed or a disk is full.
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
    // A panic is a bug, for which sysexits(3) has a status. A panic in a connection ends only that
    // connection.
    std::panic::catch_unwind(|| berth::commands::dispatch(cli))
        .unwrap_or_else(|_| berth::commands::Exit::Bug.into())
}
