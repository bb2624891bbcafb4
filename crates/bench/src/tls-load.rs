//! Opens new TLS connections at a steady rate and says how each of them went: the load client of
//! `scripts/e2e.sh`.
//!
//! Open-loop: connections begin by the clock, however the ones before them fare, so that a stall is
//! met by as many as would have come. Nothing is tried twice: what fails is written down. One line a
//! connection goes to standard output:
//!
//! ```text
//! START_US SOURCE OUTCOME TOOK_US STAGE DETAIL
//! ```
//!
//! `START_US` is Unix time and `TOOK_US` the time until the answer was complete, both in
//! microseconds. SIGTERM ends it: no new connection begins, and those that did are waited for.

use clap::Parser;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsConnector;

/// A client that waited this long without a whole answer is lost.
const UNANSWERED: Duration = Duration::from_secs(15);

/// Most bytes of an answer. `/version` has about 1 KB with its headers.
const ANSWER_LIMIT: usize = 64 * 1024;

/// Open new TLS connections at a steady rate, never again for one that failed
#[derive(Debug, Parser)]
struct Args {
    /// Where to connect to
    #[arg(long)]
    server: SocketAddr,
    /// PEM file with the authority of the server's certificate
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
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Arc::new(Args::parse());
    let tls = TlsConnector::from(Arc::new(tls_config(&args.ca)?));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut connections = JoinSet::new();
    let start = Instant::now();
    for number in 0.. {
        let due = start + Duration::from_secs(1) * number / args.rate;
        // A slow machine is seen in the figures, not hidden: late ones all begin at once.
        loop {
            tokio::select! {
                biased;
                _ = terminate.recv() => return drain(connections).await,
                Some(result) = connections.join_next() => write(&result?)?,
                () = sleep_until(due) => break,
            }
        }
        let source = args.source[number as usize % args.source.len()];
        connections.spawn(connection(args.clone(), tls.clone(), source));
    }
    drain(connections).await
}

async fn drain(mut connections: JoinSet<Line>) -> Result<(), Box<dyn std::error::Error>> {
    while let Some(result) = connections.join_next().await {
        write(&result?)?;
    }
    Ok(())
}

fn write(line: &Line) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{line}")
}

fn tls_config(ca: &PathBuf) -> Result<ClientConfig, Box<dyn std::error::Error>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca)? {
        roots.add(certificate?)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    // Each is a stranger, with a whole handshake.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

/// How one connection went.
struct Line {
    started: SystemTime,
    source: String,
    took: Duration,
    result: Result<(), Failure>,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let started = self.started.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let (outcome, stage, detail) = match &self.result {
            Ok(()) => ("ok", Stage::Answer, "-"),
            Err(failure) => (failure.outcome, failure.stage, failure.detail.as_str()),
        };
        write!(f, "{started} {} {outcome} {} {} {detail}", self.source, self.took.as_micros(), stage.as_str())
    }
}

/// How far a connection came.
#[derive(Debug, Clone, Copy)]
enum Stage {
    Connect,
    Handshake,
    Answer,
}

impl Stage {
    fn as_str(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Handshake => "handshake",
            Self::Answer => "answer",
        }
    }
}

/// Why a connection counts as lost.
struct Failure {
    outcome: &'static str,
    stage: Stage,
    detail: String,
}

impl Failure {
    fn of(stage: Stage) -> impl FnOnce(io::Error) -> Self {
        move |error| {
            let outcome = match error.kind() {
                ErrorKind::ConnectionRefused => "refused",
                ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe => "reset",
                ErrorKind::UnexpectedEof => "ended",
                ErrorKind::TimedOut => "unanswered",
                // rustls' own errors come as this.
                ErrorKind::InvalidData => "tls",
                _ => "other",
            };
            Self { outcome, stage, detail: error.to_string() }
        }
    }
}

async fn connection(args: Arc<Args>, tls: TlsConnector, source: IpAddr) -> Line {
    let started = SystemTime::now();
    let clock = Instant::now();
    let mut stage = Stage::Connect;
    let mut from = source.to_string();
    let result = match timeout(UNANSWERED, get(&args, &tls, source, &mut stage, &mut from)).await {
        Ok(result) => result,
        Err(_) => Err(Failure::of(stage)(ErrorKind::TimedOut.into())),
    };
    Line { started, source: from, took: clock.elapsed(), result }
}

async fn get(
    args: &Args,
    tls: &TlsConnector,
    source: IpAddr,
    stage: &mut Stage,
    from: &mut String,
) -> Result<(), Failure> {
    let stream = async {
        let socket = if args.server.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.bind(SocketAddr::new(source, 0))?;
        // With the port: it finds a lost connection in a shim's log.
        *from = socket.local_addr()?.to_string();
        let stream = socket.connect(args.server).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    let stream = stream.await.map_err(Failure::of(*stage))?;
    *stage = Stage::Handshake;
    let mut stream = tls.connect(ServerName::from(args.server.ip()), stream).await.map_err(Failure::of(*stage))?;
    *stage = Stage::Answer;
    // The user agent names the address, so that an audit log can be held against it.
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: {}\r\nUser-Agent: tls-load/{source}\r\nConnection: close\r\n\r\n",
        args.path, args.server
    );
    let answer = async {
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        let mut answer = Vec::new();
        while !is_whole(&answer) && answer.len() < ANSWER_LIMIT {
            if stream.read_buf(&mut answer).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(answer)
    };
    let answer = answer.await.map_err(Failure::of(*stage))?;
    // The answer is there: how the server closes is not what is measured.
    let _ = stream.shutdown().await;
    let status = answer.split(|byte| *byte == b'\r').next().map(String::from_utf8_lossy).unwrap_or_default();
    if status.starts_with("HTTP/1.1 200 ") {
        return Ok(());
    }
    Err(Failure { outcome: "status", stage: *stage, detail: status.into_owned() })
}

/// Whether an answer is there up to the last byte that its Content-Length promises.
fn is_whole(answer: &[u8]) -> bool {
    const END: &[u8] = b"\r\n\r\n";
    let Some(head) = answer.windows(END.len()).position(|window| window == END) else { return false };
    let length = String::from_utf8_lossy(&answer[..head]).lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    // Without a length the end of the stream would say it; kube-apiserver gives one here.
    length.is_some_and(|length| answer.len() >= head + END.len() + length)
}
