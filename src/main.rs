//! The `berth` binary: arguments in, exit status out.

#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match berth::cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { berth::commands::Exit::Usage.into() } else { ExitCode::SUCCESS };
        }
    };
    // A panic is a bug; sysexits has a status for that. Those of a connection end only that connection.
    std::panic::catch_unwind(|| berth::commands::dispatch(cli)).unwrap_or_else(|_| berth::commands::Exit::Bug.into())
}
