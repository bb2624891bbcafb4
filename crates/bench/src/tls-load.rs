//! Opens new TLS connections at a steady rate and prints the outcome of each: the clients of a rehearsal
//! for `scripts/e2e.sh`, `scripts/direct.sh`, `scripts/kubelet.sh` and `scripts/cluster.sh`.
//!
//! Open-loop: connections begin by a timetable, whatever becomes of those before, so that a stall affects as many
//! as would have come. Nothing is retried: failures are recorded. One line a connection goes to standard
//! output:
//!
//! ```text
//! START_US CLIENT OUTCOME TOOK_US DETAIL
//! ```
//!
//! `START_US` is the Unix time at which it began, which a slow machine makes late, and `TOOK_US` the time from when it was due
//! until the answer was complete, both in microseconds. `OUTCOME` is `ok` or `lost`. SIGTERM ends it: no new connection begins,
//! and those that did are waited for.
//!
//! With a certificate there are all kinds of clients: new connections, kept ones, watches and informers. `CLIENT` is a
//! name that begins with the kind and ends with `/write` if the request is one, `START_US` when it was due, a line is a request, and all lines come at the end. There are three
//! outcomes more:
//!
//! * `ended`: a kept connection or a watch, at `START_US`. `DETAIL` has `told` if the apiserver announced it inside TLS or else
//!   `cut`, then how, and whether a request was under way.
//! * `whole` and `flawed`: a watch or an informer at the end of all. `DETAIL` has events missed and seen twice, and how
//!   often it listed again.
//!
//! With `--closed` it measures how many requests are answered, and writes one line: `ANSWERS SECONDS`.
//!
//! `tls-load judge` reads such lines for scripts; see [`lines`].

#![forbid(unsafe_code)]

mod lines;

use anyhow::{Context, Result, anyhow};
use berth_rehearse::event::{Answer, Attempt, ConnectionKind, Failure, StreamEnd};
use berth_rehearse::load::{Anonymous, Closed, Connection, Known};
use berth_rehearse::plan::LoadPlan;
use berth_rehearse::record::Record;
use berth_rehearse::stamp::Stamp;
use berth_rehearse::verdict::Loss;
use clap::{Parser, Subcommand};
use lines::{Judge, WRITE};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::signal::unix::{SignalKind, signal};

/// Open new TLS connections at a steady rate, without retries
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where to connect to
    #[arg(long, required = true)]
    server: Option<SocketAddr>,
    /// PEM file with the CA of the server's certificate
    #[arg(long, required = true)]
    ca: Option<PathBuf>,
    /// What to GET; anything but 200 is a failure
    #[arg(long, default_value = "/version", conflicts_with = "client_certificate")]
    path: String,
    /// New connections a second
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), required_unless_present = "closed")]
    rate: Option<u32>,
    /// Address to connect from; several take turns
    #[arg(long, required_unless_present = "client_certificate", conflicts_with = "client_certificate")]
    source: Vec<IpAddr>,
    /// PEM file with the certificate of an admin: clients of all kinds
    #[arg(long, requires = "client_key")]
    client_certificate: Option<PathBuf>,
    /// PEM file with its key, as PKCS #8
    #[arg(long, requires = "client_certificate")]
    client_key: Option<PathBuf>,
    /// Kept connections
    #[arg(long, default_value_t = 4, requires = "client_certificate")]
    clients: u32,
    /// Watches of what is written all the time
    #[arg(long, default_value_t = 4, requires = "client_certificate")]
    watches: u32,
    /// Instead, GET this path as often as it is answered, on the kept connections
    #[arg(long, value_name = "PATH", requires = "client_certificate", conflicts_with_all = ["rate", "watches"])]
    closed: Option<String>,
    /// On a new connection each time
    #[arg(long, requires = "closed")]
    fresh: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Evaluate lines of tls-load
    #[command(subcommand)]
    Judge(Judge),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(Command::Judge(judge)) = &args.command {
        println!("{}", judge.run()?);
        return Ok(());
    }
    // clap requires both.
    let (Some(server), Some(ca)) = (args.server, &args.ca) else { return Ok(()) };
    let read = CertificateDer::pem_file_iter(ca).and_then(Iterator::collect);
    let rate = args.rate.unwrap_or_default();
    let ca: Vec<_> = read.with_context(|| ca.display().to_string())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async { _ = terminate.recv().await };
    let (Some(cert), Some(key)) = (&args.client_certificate, &args.client_key) else {
        let Args { path, source: sources, .. } = args;
        return Ok(Anonymous { server, ca, path, rate, sources, agent: "tls-load" }.run(stop, write).await?);
    };
    let shown = |path: &Path| path.display().to_string();
    let cert = CertificateDer::from_pem_file(cert).with_context(|| shown(cert))?;
    let key = PrivatePkcs8KeyDer::from_pem_file(key).with_context(|| shown(key))?;
    if let Some(path) = args.closed {
        let closed = Closed { server, ca, cert, key, path, clients: args.clients, fresh: args.fresh };
        let began = Instant::now();
        let answers = closed.run(stop).await.map_err(|why| anyhow!(why))?;
        println!("{answers} {:.3}", began.elapsed().as_secs_f64());
        return Ok(());
    }
    let plan = LoadPlan { rate, clients: args.clients, watches: args.watches, ..LoadPlan::default() };
    let record = Known { server, ca, cert, key, plan }.run(stop).await.map_err(|why| anyhow!(why))?;
    Ok(write_all(&record)?)
}

fn write(Connection { began, client, took, result }: Connection) {
    let began = began.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let (outcome, detail) = match &result {
        Ok(()) => ("ok", "-"),
        Err(why) => ("lost", why.as_str()),
    };
    println!("{began} {client} {outcome} {} {detail}", took.as_micros());
}

fn write_all(record: &Record) -> std::io::Result<()> {
    let (now, stamp) = (SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(), Stamp::now());
    let unix = |at: Stamp| now.as_micros().saturating_sub(u128::from(stamp.0.saturating_sub(at.0) / 1000));
    let mut out = std::io::stdout().lock();
    for Attempt { kind, writes, stream, due, done, answer } in &record.attempts {
        let (outcome, detail) = match answer {
            Answer::Good { .. } => ("ok", "-".to_owned()),
            Answer::Bad { status, .. } => ("lost", status.to_string()),
            // The line of the connection's end reports it.
            Answer::Failed(how) if *kind == ConnectionKind::Kept && *how != Failure::Unanswered => continue,
            Answer::Failed(how) => ("lost", how.to_string()),
        };
        let write = if *writes { WRITE } else { "" };
        writeln!(out, "{} {stream}{write} {outcome} {} {detail}", unix(*due), done.0.saturating_sub(due.0) / 1000)?;
    }
    for StreamEnd { stream, at, how, in_flight, signed, .. } in &record.ends {
        let told = if signed.is_some() { "told" } else { "cut" };
        let when = if *in_flight { "under way" } else { "idle" };
        writeln!(out, "{} {stream} ended 0 {told}, {how}, {when}", unix(*at))?;
    }
    let watches = record.watches.iter().map(|watch| {
        let (missed, twice) = (watch.count(Loss::EventMissed), watch.count(Loss::EventDuplicated));
        (&watch.client, missed, twice, watch.relists)
    });
    let informers = record.informers.iter().map(|i| (&i.id, i.missing + i.stale, i.duplicated, i.relists));
    for (client, missed, twice, lists) in watches.chain(informers) {
        let outcome = if missed + twice == 0 { "whole" } else { "flawed" };
        writeln!(out, "{} {client} {outcome} 0 {missed} missed, {twice} twice, {lists} lists again", now.as_micros())?;
    }
    for trouble in &record.troubles {
        eprintln!("tls-load: {trouble}");
    }
    Ok(())
}
