//! A stand-in for an apiserver, run by the test binary itself. It echoes bytes and obeys words of a
//! client (see `obey_client`). After SIGTERM, SIGINT, SIGHUP or SIGQUIT it stops listening, and
//! ends with its last connection.

use crate::support::net::PROBES;
use crate::support::tls;
use rustls::ServerConfig;
use socket2::SockRef;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};

/// Flags of the stand-in. If the variable is set, this process is a stand-in.
const FLAGS: &str = "STAND_IN_FLAGS";

/// Exit status of the stand-in. Default: 0.
const STATUS: &str = "STAND_IN_STATUS";

/// Directory of `kube.crt` and `kube.key`. If set, the stand-in serves an API by TLS, and counts
/// requests in its metrics.
pub(crate) const API: &str = "STAND_IN_API";

/// The release that the API reports to emulate, and whether it answers clients with 500.
pub(crate) const EMULATES: &str = "STAND_IN_EMULATES";
pub(crate) const BROKEN: &str = "STAND_IN_BROKEN";

/// Moment at which the stand-in prints the event and hangs: after it has accepted a client
/// (`accepted`), or has read the client's first bytes (`read`).
pub(crate) const SILENT: &str = "STAND_IN_SILENT";

/// Shell code that runs the stand-in with the flags that berth adds, and hides the flags from the
/// test harness.
pub(crate) const STAND_IN: &str =
    r#"STAND_IN_FLAGS="$*" exec "$TEST_BINARY" --exact stand_in::process --nocapture"#;

/// Not a test: the stand-in, if the variable is set.
#[test]
fn process() {
    let Ok(flags) = std::env::var(FLAGS) else {
        return;
    };
    let value = |name: &str| {
        let found = flags
            .split(' ')
            .find_map(|flag| flag.strip_prefix(name)?.strip_prefix('='));
        found
            .unwrap_or_else(|| panic!("no {name} in {flags}"))
            .to_owned()
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let [mut term, mut int, mut hup, mut quit] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()]
                .map(|kind| signal(kind).unwrap());
        let listener = TcpListener::bind(format!("{}:{}", value("--bind-address"), value("--secure-port")));
        let listener = listener.await.unwrap();
        let api = std::env::var_os(API).map(|directory| Arc::new(Api::new(Path::new(&directory))));
        println!("listening, pid {}", std::process::id());
        let mut connections = tokio::task::JoinSet::new();
        let by = loop {
            tokio::select! {
                _ = term.recv() => break "SIGTERM",
                _ = int.recv() => break "SIGINT",
                _ = hup.recv() => break "SIGHUP",
                _ = quit.recv() => break "SIGQUIT",
                Ok((mut stream, client)) = listener.accept() => {
                    if let Some(api) = api.clone() {
                        let stream = stream.into_std().unwrap();
                        stream.set_nonblocking(false).unwrap();
                        // A probe sends nothing. A client that disconnects early does not matter.
                        connections.spawn_blocking(move || drop(tls::answer_request(&api.tls, stream, |path| api.answer(path))));
                        continue;
                    }
                    let silent = std::env::var(SILENT).unwrap_or_default();
                    connections.spawn(async move {
                        let mut buffer = [0; 1024];
                        // Only clients, not probes.
                        if client.ip() != PROBES && silent == "accepted" {
                            println!("accepted a client");
                            std::future::pending::<()>().await;
                        }
                        while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                            if silent == "read" {
                                println!("read {length} bytes");
                                std::future::pending::<()>().await;
                            }
                            if obey_client(&buffer[..length], &mut stream, client).await.is_err() {
                                break;
                            }
                        }
                    });
                }
            }
        };
        println!("told to end by {by}");
        drop(listener);
        loop {
            tokio::select! {
                _ = term.recv() => println!("told again"),
                _ = int.recv() => println!("told again"),
                _ = hup.recv() => println!("told again"),
                _ = quit.recv() => println!("told again"),
                ended = connections.join_next() => if ended.is_none() { break },
            }
        }
    });
    std::process::exit(std::env::var(STATUS).map_or(0, |status| status.parse().unwrap()));
}

/// Obeys a client's word: send the client's address (`who`), answer after the client's end
/// (`late`), end the connection (`end`), or reset it (`reset`). After `late` and `end`, prints how
/// the client ended. An error ends the connection.
async fn obey_client(said: &[u8], stream: &mut TcpStream, client: SocketAddr) -> io::Result<()> {
    match said {
        b"who" => stream.write_all(client.to_string().as_bytes()).await?,
        b"late" | b"end" => {
            if said == b"end" {
                stream.shutdown().await?;
            } else {
                stream.write_all(said).await?;
            }
            let mut more = String::new();
            let end = stream.read_to_string(&mut more).await;
            println!(
                "after {more:?} the client has ended: {:?}",
                end.map_err(|error| error.kind())
            );
            if said == b"late" {
                stream.write_all(b"answer").await?;
            }
        }
        b"reset" => {
            SockRef::from(&*stream).set_linger(Some(Duration::ZERO))?;
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        other => stream.write_all(other).await?,
    }
    Ok(())
}

struct Api {
    tls: Arc<ServerConfig>,
    emulates: String,
    broken: bool,
    requests: AtomicU32,
}

impl Api {
    fn new(directory: &Path) -> Self {
        let file = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap();
        Self {
            tls: tls::server_config(&file("kube.crt"), &file("kube.key")),
            emulates: std::env::var(EMULATES).unwrap(),
            broken: std::env::var_os(BROKEN).is_some(),
            requests: AtomicU32::new(0),
        }
    }

    fn answer(&self, path: &str) -> (&'static str, String) {
        let code = if self.broken { 500 } else { 200 };
        match path.strip_prefix("/k").unwrap_or(path) {
            "/metrics" => ("200 OK", self.metrics(code)),
            "/readyz" if !self.broken => ("200 OK", "ok".to_owned()),
            "/api/v1" => (
                "200 OK",
                r#"{"kind": "APIResourceList", "resources": []}"#.to_owned(),
            ),
            "/api/v1/pods" => {
                self.requests.fetch_add(1, Ordering::Relaxed);
                let status = if self.broken {
                    "500 Internal Server Error"
                } else {
                    "200 OK"
                };
                (
                    status,
                    r#"{"apiVersion": "v1", "kind": "PodList", "items": []}"#.to_owned(),
                )
            }
            _ => ("404 Not Found", "{}".to_owned()),
        }
    }

    fn metrics(&self, code: u32) -> String {
        let requests = self.requests.load(Ordering::Relaxed);
        let labels =
            r#"group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1""#;
        let bucket = |le: &str| {
            format!(
                "apiserver_request_duration_seconds_bucket{{{labels},le=\"{le}\"}} {requests}\n"
            )
        };
        let (quick, all, emulates, id) = (
            bucket("0.005"),
            bucket("+Inf"),
            &self.emulates,
            std::process::id(),
        );
        format!(
            "apiserver_request_total{{code=\"{code}\",{labels}}} {requests}\n{quick}{all}process_start_time_seconds {id}\n\
             version_info{{binary=\"1.36.3\",emulation=\"{emulates}\"}} 1\n"
        )
    }
}
