//! Measures berth against other TCP relays and against no relay: the program of `scripts/bench.sh`.
//!
//! The server to which all relays connect runs as a process of its own. If the machine has Go, the
//! server is `crates/bench/server`, and otherwise a hidden subcommand of this program.

#![forbid(unsafe_code)]

mod bench;
mod client_hello;
mod markdown;
mod process;
mod stats;

use clap::Parser;
use std::net::SocketAddr;
use std::process::ExitCode;

/// Exit status if the command line is wrong.
const EX_USAGE: u8 = 64;
/// Exit status if a file, a program or a port is missing.
const EX_UNAVAILABLE: u8 = 69;

/// Measure berth
#[derive(Debug, Parser)]
#[command(name = "berth-bench", max_term_width = 100)]
enum Cli {
    /// Measure berth against other TCP relays and against no relay, on loopback
    Bench(bench::options::BenchOptions),
    /// The server behind all peers of `bench`, without --server
    #[command(hide = true)]
    Backend { address: SocketAddr },
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { EX_USAGE } else { 0 });
        }
    };
    let done = match cli {
        Cli::Bench(options) => bench::run(&options),
        Cli::Backend { address } => bench::backend::run(address)
            .map(|()| ExitCode::SUCCESS)
            .map_err(Into::into),
    };
    done.unwrap_or_else(|error| {
        eprintln!("bench: {error:#}");
        ExitCode::from(EX_UNAVAILABLE)
    })
}
