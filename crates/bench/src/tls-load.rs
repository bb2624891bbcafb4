//! Plays the clients in scripts: opens new TLS connections at a steady rate, and prints the outcome
//! of each.
//!
//! The load is open-loop: connections begin by a timetable, whatever becomes of earlier ones. So a
//! stall affects as many connections as in real traffic. Nothing is retried, and failures are
//! recorded. Each connection is a line on standard output, a JSON object for `scripts/judge.jq`:
//!
//! ```text
//! {"began":1764285120000000,"client":"192.0.2.1:40000","outcome":"ok","took":2143,"detail":"-"}
//! ```
//!
//! `began` is the Unix time at which the connection began, possibly late on a slow machine. `took`
//! is the time from the due time until the answer was complete. Both are in microseconds. `outcome`
//! is `ok` or `lost`. After SIGTERM no new connection begins, and the program waits for the open
//! ones.
//!
//! With a certificate there are clients of all kinds: new connections, kept ones, watches and
//! informers. `client` is a name that begins with the kind. `began` is the time when the request
//! was due. `write` is true for a write. All lines are printed at the end. There are three more
//! outcomes:
//!
//! * `ended`: a kept connection or a watch ended at `began`. `told` is true if the apiserver
//!   announced the end inside TLS, and `detail` says how the connection ended.
//! * `whole` and `flawed`: the state of a watch or an informer at the end of the run, with the
//!   number of events `missed` and seen `twice`, and of further lists (`lists`).
//!
//! With `--closed` the program measures how many requests are answered, and prints a single line:
//! `ANSWERS SECONDS`.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, anyhow};
use berth_rehearse::config::LoadPlan;
use berth_rehearse::load::{Anonymous, Closed, Connection, Known};
use berth_rehearse::record::{
    Record,
    event::{Answer, Attempt, ConnectionKind, Failure, StreamEnd},
    stamp::Stamp,
    verdict::Loss,
};
use clap::Parser;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use serde_json::json;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::signal::unix::{SignalKind, signal};

/// Number of watches. They watch objects that change all the time.
const WATCH_COUNT: u32 = 4;

/// Open new TLS connections at a steady rate, without retries
#[derive(Debug, Parser)]
struct Args {
    /// Address to connect to
    #[arg(long)]
    server: SocketAddr,
    /// PEM file with the CA of the server's certificate
    #[arg(long)]
    ca: PathBuf,
    /// New connections a second
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), required_unless_present = "closed")]
    rate: Option<u32>,
    /// Address to connect from; several take turns
    #[arg(
        long,
        required_unless_present = "client_certificate",
        conflicts_with = "client_certificate"
    )]
    source: Vec<IpAddr>,
    /// PEM file with the certificate of an admin: clients of all kinds
    #[arg(long, requires = "client_key")]
    client_certificate: Option<PathBuf>,
    /// PEM file with the certificate's key, as PKCS #8
    #[arg(long, requires = "client_certificate")]
    client_key: Option<PathBuf>,
    /// Kept connections
    #[arg(long, default_value_t = 4, requires = "client_certificate")]
    clients: u32,
    /// Instead of new connections at a steady rate, GET this path on the kept connections, again as
    /// soon as an answer is complete
    #[arg(
        long,
        value_name = "PATH",
        requires = "client_certificate",
        conflicts_with = "rate"
    )]
    closed: Option<String>,
    /// Open a new connection for each GET
    #[arg(long, requires = "closed")]
    fresh: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let args = Args::parse();
    let (server, rate) = (args.server, args.rate.unwrap_or_default());
    let read = CertificateDer::pem_file_iter(&args.ca).and_then(Iterator::collect);
    let ca: Vec<_> = read.with_context(|| args.ca.display().to_string())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let stop = async { _ = terminate.recv().await };
    let (Some(cert), Some(key)) = (&args.client_certificate, &args.client_key) else {
        let path = "/version".to_owned();
        return Ok(Anonymous {
            server,
            ca,
            path,
            rate,
            sources: args.source,
            agent: "tls-load",
        }
        .run(stop, write_result)
        .await?);
    };
    let shown = |path: &Path| path.display().to_string();
    let cert = CertificateDer::from_pem_file(cert).with_context(|| shown(cert))?;
    let key = PrivatePkcs8KeyDer::from_pem_file(key).with_context(|| shown(key))?;
    if let Some(path) = args.closed {
        let closed = Closed {
            server,
            ca,
            cert,
            key,
            path,
            clients: args.clients,
            fresh: args.fresh,
        };
        let began = Instant::now();
        let answers = closed.run(stop).await.map_err(|why| anyhow!(why))?;
        println!("{answers} {:.3}", began.elapsed().as_secs_f64());
        return Ok(());
    }
    let plan = LoadPlan {
        rate,
        clients: args.clients,
        watches: WATCH_COUNT,
        ..LoadPlan::default()
    };
    let record = Known {
        server,
        ca,
        cert,
        key,
        plan,
    }
    .run(stop)
    .await
    .map_err(|why| anyhow!(why))?;
    Ok(write_all(&record)?)
}

fn write_result(
    Connection {
        began,
        client,
        took,
        result,
    }: Connection,
) {
    let began = to_micros(began.duration_since(UNIX_EPOCH).unwrap_or_default());
    let (outcome, detail) = match &result {
        Ok(()) => ("ok", "-"),
        Err(why) => ("lost", why.as_str()),
    };
    let line = json!({"began": began, "client": client, "outcome": outcome, "took": to_micros(took), "detail": detail});
    println!("{line}");
}

fn write_all(record: &Record) -> std::io::Result<()> {
    let (now, stamp) = (
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
        Stamp::now(),
    );
    let unix = |at: Stamp| to_micros(now).saturating_sub(stamp.0.saturating_sub(at.0) / 1000);
    let mut out = std::io::stdout().lock();
    for Attempt {
        kind,
        writes,
        stream,
        due,
        done,
        answer,
    } in &record.attempts
    {
        let (outcome, detail) = match answer {
            Answer::Good { .. } => ("ok", "-".to_owned()),
            Answer::Bad { status, .. } => ("lost", status.to_string()),
            // Another line reports this failure: the one for the end of the connection.
            Answer::Failed(how) if *kind == ConnectionKind::Kept && *how != Failure::Unanswered => {
                continue;
            }
            Answer::Failed(how) => ("lost", how.to_string()),
        };
        let (began, took) = (unix(*due), done.0.saturating_sub(due.0) / 1000);
        let line = json!({
            "began": began, "client": stream, "write": writes, "outcome": outcome, "took": took, "detail": detail,
        });
        writeln!(out, "{line}")?;
    }
    for StreamEnd {
        stream,
        at,
        how,
        signed,
        ..
    } in &record.ends
    {
        let (began, detail) = (unix(*at), how.to_string());
        let line = json!({
            "began": began, "client": stream, "outcome": "ended", "took": 0, "told": signed.is_some(), "detail": detail,
        });
        writeln!(out, "{line}")?;
    }
    let watches = record.watches.iter().map(|watch| {
        let (missed, twice) = (
            watch.count(Loss::EventMissed),
            watch.count(Loss::EventDuplicated),
        );
        (&watch.client, missed, twice, watch.relists)
    });
    let informers = record
        .informers
        .iter()
        .map(|i| (&i.id, i.missing + i.stale, i.duplicated, i.relists));
    for (client, missed, twice, lists) in watches.chain(informers) {
        let outcome = if missed + twice == 0 {
            "whole"
        } else {
            "flawed"
        };
        let line = json!({
            "began": to_micros(now), "client": client, "outcome": outcome, "took": 0, "detail": "-",
            "missed": missed, "twice": twice, "lists": lists,
        });
        writeln!(out, "{line}")?;
    }
    for trouble in &record.troubles {
        eprintln!("tls-load: {trouble}");
    }
    Ok(())
}

fn to_micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}
