//! Opens new TLS connections at a steady rate and says how each of them went: the clients of a rehearsal
//! for `scripts/e2e.sh` and `scripts/kubelet.sh`.
//!
//! Open-loop: connections begin by a timetable, however the ones before them fare, so that a stall is
//! met by as many as would have come. Nothing is tried twice: what fails is written down. One line a
//! connection goes to standard output:
//!
//! ```text
//! START_US CLIENT OUTCOME TOOK_US DETAIL
//! ```
//!
//! `START_US` is the Unix time at which it began, which a slow machine makes late, and `TOOK_US` the time from when it was due
//! until the answer was complete, both in microseconds. `OUTCOME` is `ok` or `lost`. SIGTERM ends it: no new connection begins,
//! and those that did are waited for.

#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use berth_rehearse::load::{Anonymous, Connection};
use clap::Parser;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::UNIX_EPOCH;
use tokio::signal::unix::{SignalKind, signal};

/// Open new TLS connections at a steady rate, never again for one that failed
#[derive(Debug, Parser)]
struct Args {
    /// Where to connect to
    #[arg(long)]
    server: SocketAddr,
    /// PEM file with the CA of the server's certificate
    #[arg(long)]
    ca: PathBuf,
    /// What to GET; anything but 200 is a failure
    #[arg(long, default_value = "/version")]
    path: String,
    /// New connections a second
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// Address to connect from; several take turns
    #[arg(long, required = true)]
    source: Vec<IpAddr>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let Args { server, ca, path, rate, source: sources } = Args::parse();
    let read = CertificateDer::pem_file_iter(&ca).and_then(Iterator::collect);
    let ca = read.with_context(|| ca.display().to_string())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async { _ = terminate.recv().await };
    Ok(Anonymous { server, ca, path, rate, sources, agent: "tls-load" }.run(stop, write).await?)
}

fn write(Connection { began, client, took, result }: Connection) {
    let began = began.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let (outcome, detail) = match &result {
        Ok(()) => ("ok", "-"),
        Err(why) => ("lost", why.as_str()),
    };
    println!("{began} {client} {outcome} {} {detail}", took.as_micros());
}
