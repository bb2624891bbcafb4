//! The `berth` binary: arguments in, exit status out.

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
    berth::commands::init_log(&cli.log);
    berth::commands::dispatch(cli.command)
}
