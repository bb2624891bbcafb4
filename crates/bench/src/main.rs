//! Measures berth and tests how long it holds: one program, of which each subcommand has a script.
//!
//! | subcommand | module | script |
//! | --- | --- | --- |
//! | `bench` | [`mod@bench`]: berth against other TCP relays and no relay | `scripts/bench.sh` |
//! | `soak` | [`soak`]: real processes under load and faults, for minutes or hours | `scripts/soak.sh` |
//!
//! They share [`process`] (child processes, their logs and memory), [`clients`] (the open loop), [`server`] (the accept
//! loop), [`client_hello`], [`stats`] and [`markdown`]. The servers that they need are hidden subcommands, which run as
//! processes of their own.

#![forbid(unsafe_code)]

mod bench;
mod client_hello;
mod clients;
mod markdown;
mod process;
mod server;
mod soak;
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

/// Measure berth, and soak it
#[derive(Debug, Parser)]
#[command(name = "berth-bench", max_term_width = 100)]
enum Cli {
    /// Measure berth against other TCP relays and against no relay, on loopback
    Bench(bench::options::BenchOptions),
    /// Run berth under load and faults
    Soak(soak::SoakOptions),
    /// The server behind all relays of `bench`
    #[command(hide = true)]
    Backend { address: SocketAddr },
    /// The server of `soak`
    #[command(hide = true)]
    Instance(soak::instance::SoakInstanceOptions),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { EX_USAGE } else { 0 });
        }
    };
    let (name, failed, done) = match cli {
        Cli::Bench(options) => ("bench", EX_UNAVAILABLE, bench::run(&options)),
        Cli::Soak(options) => ("soak", 1, soak::run(options)),
        Cli::Backend { address } => ("bench backend", EX_UNAVAILABLE, success(bench::backend::run(address))),
        Cli::Instance(options) => ("soak instance", 1, success(soak::instance::run(&options))),
    };
    done.unwrap_or_else(|error| {
        eprintln!("{name}: {error:#}");
        ExitCode::from(failed)
    })
}

fn success<E: Into<anyhow::Error>>(done: Result<(), E>) -> Result<ExitCode> {
    done.map(|()| ExitCode::SUCCESS).map_err(Into::into)
}

/// Moves this process into a network namespace of its own with this address; clients can connect from every address of its network.
/// Needs root, and a process without other threads.
fn enter_network(node: Ipv4Addr, netmask: Ipv4Addr) -> Result<()> {
    netns::enter_as_root(node)?;
    netdevice::set(netns::ALIAS, InterfaceSetting::Netmask(netmask)).context("cannot give the clients addresses")
}
