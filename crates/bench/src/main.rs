//! Measures berth against other TCP relays and against no relay: the program of `scripts/bench.sh`.
//!
//! The server behind all relays is a hidden subcommand, which runs as a process of its own.

#![forbid(unsafe_code)]

mod bench;
mod client_hello;
mod markdown;
mod process;
mod stats;

use anyhow::{Context, Result};
use berth_os::netdevice::{self, InterfaceSetting};
use berth_rehearse::netns;
use clap::Parser;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;

/// Exit status of a wrong command line.
const EX_USAGE: u8 = 64;
/// Exit status if something is missing.
const EX_UNAVAILABLE: u8 = 69;

/// Measure berth
#[derive(Debug, Parser)]
#[command(name = "berth-bench", max_term_width = 100)]
enum Cli {
    /// Measure berth against other TCP relays and against no relay, on loopback
    Bench(bench::options::BenchOptions),
    /// The server behind all relays of `bench`
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
        Cli::Backend { address } => bench::backend::run(address).map(|()| ExitCode::SUCCESS).map_err(Into::into),
    };
    done.unwrap_or_else(|error| {
        eprintln!("bench: {error:#}");
        ExitCode::from(EX_UNAVAILABLE)
    })
}

/// Moves this process into a network namespace of its own with this address; clients can connect from every address of its network.
/// Needs root, and a process without other threads.
fn enter_network(node: Ipv4Addr, netmask: Ipv4Addr) -> Result<()> {
    netns::enter_as_root(node)?;
    netdevice::set(netns::ALIAS, InterfaceSetting::Netmask(netmask)).context("cannot give the clients addresses")
}
